"""S2: a tier of others that raises, or says what is wrong, is off; the store and the rest go on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvstore import config
from kvstore.core.errors import ConfigError, TierError
from kvstore.core.tier import Telling, Tier
from kvstore.core.types import BlockKey, JobId, JobKind, LookupResult, Slot, TransferJob
from kvstore.store import admin, plugins
from kvstore.store import store as stores
from kvstore.store.plugins import Plugin, _Lent, refuse_tier
from kvstore.testing import SLOT_BYTES, ArrayMemory, key
from kvstore.wire import engine as p
from tests.harness import bad_tiers
from tests.harness.fakes import hashes
from tests.harness.live import (
    Client,
    LiveEngine,
    LiveStore,
    engine,
    eventually,
    store_settings,
)
from tests.harness.patience import WAIT_S
from tests.harness.peers import inside
from tests.test_turns import forget_blocks

VERBS = ("lookup", "touch", "submit", "poll", "discard", "clear", "drain", "close")
HOWS = ("TierError", "SystemExit", "InvariantBroken", "CancelledError", "Panic")


def settings(folder: Path, name: str, **options: object) -> config.Config:
    """A bad tier above a good one."""
    bad = {"class": f"tests.harness.bad_tiers:{name}", "name": "bad", "options": options}
    shelf = {"class": "tests.reference.memory_tier:MemoryTier", "name": "shelf"}
    return store_settings(folder, tier=[bad, shelf])


class Watched:
    """A store with a bad tier, and what is seen of it."""

    def __init__(self, store: LiveStore, live: LiveEngine) -> None:
        self.store, self.live = store, live

    def numbers(self) -> dict[tuple[str, ...], float]:
        found = admin.stats(f"unix://{self.store.path}")
        return {(one.name, *one.labels.values()): one.value for one in found}

    @property
    def off(self) -> bool:
        found = self.numbers()
        state = found["kvstore_tiers", "bad", "off"], found["kvstore_tiers", "bad", "ok"]
        assert state in ((0, 1), (1, 0))
        assert found["kvstore_tiers", "shelf", "ok"] == 1
        return state == (1, 0)

    def serves(self) -> None:
        """What is stored now comes back, by way of the good tier."""
        chain = hashes(3, f"after{self.numbers()}")
        self.live.put(chain)
        self.push_out()
        granted = self.live.ask(chain)
        assert granted.sources == {"shelf": 3}
        assert self.live.read(granted) == [self.live.content(block) for block in chain]
        eventually(lambda: not any(self.jobs_open()))

    def stored(self) -> float:
        """Blocks that the good tier has taken, of all models."""
        found = self.numbers().items()
        return sum(
            v for k, v in found if k[::2] == ("kvstore_tier_blocks", "shelf") and "stored" in k
        )

    def jobs_open(self) -> list[float]:
        return [v for k, v in self.numbers().items() if k[0] == "kvstore_jobs_open"]

    def push_out(self) -> None:
        """Have other blocks take all of memory, once the tiers have those before."""
        before = self.stored()
        for number in range(20):
            self.live.put(hashes(1, f"other{before}.{number}"))
            eventually(lambda: self.stored() > before + number)  # noqa: B023


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [r for r in caplog.records if "tier bad is off" in r.getMessage()]


Start = Callable[..., Watched]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Start]:
    opened: list[Any] = []

    def start(name: str, **options: object) -> Watched:
        store = LiveStore(settings(tmp_path, name, **options))
        store.__enter__()
        attached = engine(store)
        opened.extend([attached, store])
        return Watched(store, attached.__enter__())

    yield start
    for one in opened:
        one.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("verb", "how"),
    [
        *((verb, "RuntimeError") for verb in VERBS),
        *((verb, how) for verb in ("lookup", "poll") for how in HOWS),
    ],
)
def test_S2_a_tier_that_raises_is_off_and_nothing_else_is(
    verb: str, how: str, caplog: pytest.LogCaptureFixture, watched: Start
) -> None:
    name = "Corrupt" if verb == "discard" else "Bad"
    seen = watched(name, raises=[verb], how=how)
    chain = hashes(2)
    seen.live.put(chain)
    if verb == "discard":
        seen.push_out()
    seen.live.load(seen.live.ask(chain), within_s=1.0)
    if verb == "clear":
        admin.clear(f"unix://{seen.store.path}")
    if verb in ("drain", "close"):
        seen.push_out()
        seen.store.stop()
    else:
        eventually(lambda: seen.off)
        seen.serves()
        seen.serves()
    (line,) = lines(caplog)
    assert line.exc_info is not None
    assert f"{verb} failed" in line.getMessage()


@pytest.mark.parametrize("what", [*bad_tiers.WRONG, "lookup"])
def test_S2_a_tier_that_reports_what_is_wrong_is_off(
    what: str, caplog: pytest.LogCaptureFixture, watched: Start
) -> None:
    seen = watched("Wrong", what=what)
    seen.live.put(hashes(2))
    eventually(lambda: seen.off)
    seen.serves()
    assert len(lines(caplog)) == 1


def test_S2_a_tier_that_a_second_model_breaks_is_off(
    caplog: pytest.LogCaptureFixture, watched: Start
) -> None:
    seen = watched("Bad", raises=["constructor"])
    assert seen.off, "it was made for a trial only"
    seen.serves()
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize("close", [True, False])
def test_S2_a_tier_that_is_off_writes_into_no_slot_of_others(close: bool, watched: Start) -> None:
    """Its job is over when it has let go of the memory, and not before."""
    for event in (bad_tiers.Slow.go, bad_tiers.Slow.writing, bad_tiers.Slow.ended):
        event.clear()
    seen = watched("Slow", close=close)
    chain = hashes(1)
    seen.live.put(chain)
    seen.push_out()
    try:
        granted = seen.live.ask(chain)
        assert granted.sources == {"bad": 1}
        bad_tiers.Slow.writing.wait()
        eventually(lambda: seen.off)
        for _ in range(20):
            assert seen.jobs_open() == [1], "its thread may still write"
    finally:
        bad_tiers.Slow.go.set()
    bad_tiers.Slow.ended.wait()
    eventually(lambda: seen.jobs_open() == [0])
    seen.serves()


@contextmanager
def slow_to_close(watched: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """A store that forgets a model, of which a tier of others does not close."""
    monkeypatch.setattr(stores, "FORGET_NS", 0)
    bad_tiers.Closes.closing.clear()
    bad_tiers.Closes.go.clear()
    seen = watched("Closes")
    seen.live.put(hashes(1))
    eventually(lambda: seen.stored() >= 1 and not any(seen.jobs_open()))
    seen.live.close()
    admin.stats(f"unix://{seen.store.path}")
    core = seen.store.server.store
    eventually(lambda: not core.sessions)
    inside(seen.store, lambda: forget_blocks(core))
    assert bad_tiers.Closes.closing.wait(WAIT_S)
    try:
        yield seen
    finally:
        bad_tiers.Closes.go.set()


def test_S2_a_tier_that_is_slow_to_close_holds_up_no_other_model(
    watched: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was closed by the loop: as long as that took, nothing was answered."""
    with slow_to_close(watched, monkeypatch) as seen:
        with engine(seen.store, "other", model="other") as live:
            live.put(chain := hashes(2))
            assert live.read(live.ask(chain))
        worker = Client(seen.store.path)
        hello = p.Hello(p.VERSION, "again", "worker", 0, 1, geometry=seen.live.geometry)
        worker.send(hello)
        refused = worker.take(p.Refused)
        assert refused.retry
        assert refused.reason == "tier bad still closes what it had of this model"
        worker.close()
        bad_tiers.Closes.go.set()
        plugin = seen.store.server.store.plugins[0]
        eventually(lambda: not any(end.thread.is_alive() for end in plugin._ends.values()))
        eventually(lambda: "again" not in seen.store.server.store.sessions)
        with engine(seen.store, "again") as live:
            live.put(chain)
        assert not seen.off


def test_S2_a_tier_that_does_not_close_is_off_when_its_model_comes_again(
    watched: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with slow_to_close(watched, monkeypatch) as seen:
        monkeypatch.setattr(plugins, "CLOSE_LIMIT_S", 0.0)
        with engine(seen.store, "again") as live:
            live.put(hashes(1))
        assert seen.off
        (line,) = lines(caplog)
        assert "close failed" in line.getMessage()


def test_S2_a_store_that_ends_waits_until_a_tier_is_closed(
    watched: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_to_close(watched, monkeypatch) as seen:
        ending = threading.Thread(target=seen.store.stop)
        ending.start()
        ending.join(0.3)
        assert ending.is_alive()
        bad_tiers.Closes.go.set()
        ending.join(WAIT_S)
        assert not ending.is_alive()


# The barrier alone


def bad(name: str, **options: object) -> config.TierConfig:
    return config.TierConfig(f"tests.harness.bad_tiers:{name}", "bad", options, backlog_ns=10**10)


def guarded(name: str, **options: object) -> tuple[Plugin, Tier]:
    plugin = Plugin(bad(name, **options))
    return plugin, plugin.guarded("n", SLOT_BYTES, ArrayMemory())


def job(number: int, kind: JobKind, *names: int) -> TransferJob:
    keys = tuple(key(one) for one in names)
    return TransferJob(JobId(number), kind, keys, tuple(Slot(n) for n in range(len(keys))))


def test_S2_each_job_of_a_tier_that_goes_off_fails_once() -> None:
    plugin, tier = guarded("Bad", raises=["poll"], after=1)
    tier.submit(job(1, JobKind.STORE, 1))
    assert [(r.job_id, r.done) for r in tier.poll()] == [(1, 1)]
    tier.submit(job(2, JobKind.STORE, 2, 3))
    tier.submit(job(3, JobKind.LOAD, 1))
    found: list[Any] = []
    eventually(lambda: found.extend(tier.poll()) or len(found) >= 2)  # type: ignore[func-returns-value]
    assert sorted((r.job_id, r.done, type(r.error)) for r in found) == [
        (2, 0, TierError),
        (3, 0, TierError),
    ]
    assert plugin.off
    assert tier.poll() == []
    assert tier.lookup(key(1)) is LookupResult.MISS
    with pytest.raises(TierError, match="tier bad is off"):
        tier.submit(job(4, JobKind.STORE, 5))
    assert tier.poll() == []
    tier.close()
    tier.close()


def test_S2_a_job_that_a_tier_does_not_take_is_refused_and_the_tier_stays() -> None:
    plugin, tier = guarded("Bad", raises=["submit"], how="TierError")
    with pytest.raises(TierError, match="submit of a bad tier"):
        tier.submit(job(1, JobKind.STORE, 1))
    assert not plugin.off
    assert tier.poll() == [], "it is no job of the tier's, who reports it all the same"
    assert plugin.off


def test_S2_a_tier_that_is_off_has_its_slots_until_it_is_drained() -> None:
    bad_tiers.Waits.go.clear()
    _, tier = guarded("Waits", raises=["poll"])
    tier.submit(job(1, JobKind.LOAD, 1))
    try:
        for _ in range(100):
            assert tier.poll() == []
    finally:
        bad_tiers.Waits.go.set()
    eventually(tier.poll)


def test_S2_a_tier_that_is_off_gets_no_memory() -> None:
    plugin = Plugin(bad("Bad"))
    lent = _Lent(plugin, ArrayMemory())
    lent.view(Slot(0))[:] = b"x" * SLOT_BYTES
    with plugin.barrier("poll"):
        raise RuntimeError
    with pytest.raises(TierError, match="tier bad is off"):
        lent.view(Slot(0))


def test_O16_what_a_tier_has_told_of_leaves_with_it() -> None:
    _, tier = guarded("Tells", raises=["take_changes"], after=1)
    assert isinstance(tier, Telling)
    tier.tell()
    tier.submit(job(1, JobKind.STORE, 1, 2))
    names: list[BlockKey] = tier.take_changes().added
    assert names == [key(1), key(2)]
    assert sorted(tier.take_changes().removed) == sorted(names)
    assert tier.take_changes().removed == []


@pytest.mark.parametrize("what", bad_tiers.TOLD)
def test_S2_O16_a_tier_that_tells_of_what_are_no_keys_is_off(what: str) -> None:
    """Engines that want events could not read the message that they come with."""
    plugin, tier = guarded("TellsWrong", what=what)
    assert isinstance(tier, Telling)
    tier.tell()
    found = tier.take_changes()
    assert (found.added, found.removed) == ([], [])
    assert plugin.off


def test_S2_a_tier_that_raises_as_it_is_looked_at_is_off() -> None:
    plugin, tier = guarded("Hides")
    assert plugin.off
    assert tier.lookup(key(1)) is LookupResult.MISS
    tier.close()


@pytest.mark.parametrize("how", ["CancelledError", "Panic"])
def test_S2_a_class_that_raises_anything_as_it_is_imported_or_made_is_refused(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_arguments: object) -> NoReturn:
        raise bad_tiers.RAISED[how]

    tier = bad("Bad")
    monkeypatch.setattr(bad_tiers.Bad, "__init__", raises)
    with pytest.raises(ConfigError, match=how):
        refuse_tier(tier)
    monkeypatch.setattr(plugins, "import_module", raises)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        refuse_tier(tier)


def test_an_interrupt_is_no_fault_of_a_tier() -> None:
    plugin, _ = guarded("Bad")
    with pytest.raises(KeyboardInterrupt), plugin.barrier("poll"):
        raise KeyboardInterrupt
    assert not plugin.off
