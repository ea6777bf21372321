"""`kvstore drain`: no new engines or peers, what only memory has goes down, then it is done."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

import msgspec
import pytest

from kvstore import cli
from kvstore.config import Config
from kvstore.store import admin, drain
from kvstore.wire import engine as p
from kvstore.wire import peer as m
from tests.harness.fakes import geometry
from tests.harness.live import LiveStore, client, engine, eventually, store_settings
from tests.harness.patience import WAIT_S
from tests.harness.script import hashes
from tests.test_peer_limits import Place, wanted

WAIT = "--wait", "30s"
FRUGAL = "24B"  # a day: nearly nothing is written but when a store ends, or drains


@pytest.fixture
def config(tmp_path: Path) -> Config:
    nvme = {"path": str(tmp_path / "kv"), "capacity": "128MiB", "extent": "16MiB"}
    cpu = {"capacity": "64MiB", "extent": "16MiB"}
    return store_settings(tmp_path, cpu=cpu, nvme=nvme | {"write_budget": FRUGAL})


def state(store: LiveStore, what: str = drain.DRAIN) -> drain.Drained:
    return next(admin.drain(store.path, what))


def stored(store: LiveStore) -> int:
    core = store.server.store
    for namespace in core.namespaces.values():
        namespace.count()
    counts = core.numbers.counts
    return int(sum(n for key, n in counts.items() if key[::3] == ("kvstore_tier_blocks", "stored")))


def gauge(store: LiveStore) -> float:
    """What Prometheus hears of it."""
    (found,) = (stat for stat in admin.stats(store.path) if stat.name == "kvstore_draining")
    return found.value


def refusal(store: LiveStore, name: str) -> p.Refused:
    with client(store) as worker:
        worker.send(p.Hello(p.VERSION, name, "worker", 0, 1, geometry=geometry()))
        return worker.take(p.Refused)


def test_Q24_new_engines_are_refused_with_a_reason_and_attached_ones_go_on(config: Config) -> None:
    with LiveStore(config) as store, engine(store) as one:
        one.put(hashes(2))
        assert not store.server.store.drain.active
        assert gauge(store) == 0
        found = state(store)
        assert store.server.store.drain.active
        assert gauge(store) == 1
        assert (found.draining, found.engines, found.done) == (True, 1, False)
        refused = refusal(store, "new")
        assert refused.reason == drain.REFUSAL
        assert refused.retry, "it may ask again: another store will be there"
        one.put(hashes(3))
        assert len(one.read(one.ask(hashes(3)))) == 3
        assert not state(store).done, "an engine is attached"
        state(store, drain.DRAIN_CANCEL)
        assert not store.server.store.drain.active
        with engine(store, "new") as new:
            assert len(new.read(new.ask(hashes(3)))) == 3


def test_Q24_new_peers_are_refused_and_those_that_are_there_go_on() -> None:
    place = Place()
    say = place.caller(place.hello("before"))
    place.turns(5)
    place.heard.clear()
    place.prefill.say(place.prefill.connect(), p.Query(drain.DRAIN))
    say(wanted([b"%032d" % 1]))
    place.caller(place.hello("after"))
    place.turns(5)
    (refused,) = (message for message in place.heard if isinstance(message, m.Refused))
    assert (refused.reason, refused.retry) == (drain.REFUSAL, True)
    assert any(isinstance(message, m.Offer) for message in place.heard), "the first is answered"
    place.prefill.say(place.prefill.connect(), p.Query(drain.DRAIN_CANCEL))
    place.heard.clear()
    place.caller(place.hello("later"))
    place.turns(5)
    assert any(isinstance(message, m.Welcome) for message in place.heard)


def test_Q24_now_parts_the_engines(config: Config) -> None:
    with LiveStore(config) as store, engine(store) as one:
        one.put(hashes(1))
        state(store, drain.DRAIN_NOW)
        assert one.worker.take(p.Detach).reason == drain.REFUSAL
        one.close()
        eventually(lambda: state(store).done)
        assert store.server.store.numbers.counts["kvstore_sessions_ended", "drain"] == 1


def test_Q24_a_drain_that_is_waited_for_can_be_cancelled(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    with LiveStore(config) as store, engine(store):
        place = "--store", f"unix://{store.path}"
        waits = threading.Thread(target=cli.main, args=(["drain", *place],))
        waits.start()
        eventually(lambda: store.server.store.drain.active)
        assert cli.main(["drain", "--cancel", *place]) == 0
        waits.join(WAIT_S)
        assert not waits.is_alive()
        assert "the drain was cancelled" in capsys.readouterr().out
        assert not store.server.store.drain.active


def test_Q25_what_only_memory_has_is_written_and_then_it_is_done(
    config: Config, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with LiveStore(config) as store:
        with engine(store) as one:
            one.put(hashes(1))  # takes all of an hour's budget
            eventually(lambda: stored(store) == 1)
            one.put(hashes(8))
            (namespace,) = store.server.store.namespaces.values()
            eventually(lambda: len(namespace.manager.index) == 8)
            assert stored(store) == 1
            assert cli.main(["drain", "--store", f"unix://{store.path}", "--wait", "0s"]) == 1
            assert "not drained yet: 1 engines attached" in capsys.readouterr().out
            eventually(lambda: stored(store) == 8)
            one.put(hashes(10))  # beyond the budget again
            eventually(lambda: len(namespace.manager.index) == 10)
            assert stored(store) == 8
        assert cli.main(["drain", "--store", f"unix://{store.path}", "--json", *WAIT]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told == {
            "draining": True, "engines": 0, "queued": 0, "written": 9, "failed": 0, "done": True,
        }  # fmt: skip
        assert cli.main(["drain", "--store", f"unix://{store.path}", *WAIT]) == 0
        assert capsys.readouterr().out == "drained: 9 blocks written, no engine is attached\n"
        assert sum("drained: 9 blocks" in line for line in caplog.messages) == 1
        started = time.monotonic()
        store.stop()
        assert time.monotonic() - started < 5
        assert "were only in memory" not in caplog.text, "nothing was left to write"
    with LiveStore(config) as store, engine(store) as one:
        granted = one.ask(hashes(10))
        assert granted.sources == {"nvme": 10}
        assert one.read(granted) == [one.content(block) for block in hashes(10)]


def test_Q25_a_disk_that_takes_nothing_is_told(
    config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LiveStore(config) as store:
        with engine(store) as one:
            one.put(hashes(1))
            eventually(lambda: stored(store) == 1)
            one.put(hashes(4))
            (namespace,) = store.server.store.namespaces.values()
            eventually(lambda: len(namespace.manager.index) == 4)
        monkeypatch.setattr("os.pwritev", broken)
        assert cli.main(["drain", "--store", f"unix://{store.path}", *WAIT]) == 1
        assert "blocks could not be written" in capsys.readouterr().err


def broken(*_: object) -> int:
    raise OSError(5, "Input/output error")


def test_Q25_memory_is_looked_at_in_parts(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn takes a part: engines wait for none of them."""
    monkeypatch.setattr(drain, "_LOOK_MAX", 1)
    with LiveStore(config) as store:
        with engine(store) as one:
            one.put(hashes(1))
            eventually(lambda: stored(store) == 1)
            one.put(hashes(9))
            (namespace,) = store.server.store.namespaces.values()
            eventually(lambda: len(namespace.manager.index) == 9)
            turns, tick = [0], store.server.store.drain.tick

            def counted() -> None:
                turns[0] += store.server.store.drain.looking
                tick()

            monkeypatch.setattr(store.server.store.drain, "tick", counted)
            state(store)
            eventually(lambda: stored(store) == 9)
        assert turns[0] >= 6


def test_Q24_without_a_disk_a_drain_waits_for_the_engines_alone(config: Config) -> None:
    with LiveStore(msgspec.structs.replace(config, nvme=None)) as store:
        with engine(store) as one:
            one.put(hashes(4))
            state(store)
            eventually(lambda: not store.server.store.drain.looking)
            assert not state(store).done, "an engine is attached"
        eventually(lambda: state(store).done)
        assert state(store).written == 0
