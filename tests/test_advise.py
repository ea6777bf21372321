"""Predicted hit ratios of a running store, and what `kvstore advise` makes of them."""

from __future__ import annotations

import json
import selectors
from pathlib import Path

import msgspec
import pytest

from kvstore import cli
from kvstore.core.hit_curve import HitCurve
from kvstore.core.types import BlockKey
from kvstore.metrics import MEMORY, NVME
from kvstore.store import admin, asked
from kvstore.store.advise import Advice, advise, sentence
from kvstore.store.asked import Asked, note_stored
from kvstore.store.status import Prediction, Status
from kvstore.wire import engine as p
from tests.harness.fakes import hashes
from tests.harness.live import LiveStore, client, engine, eventually, store_settings

GIB = 1 << 30
RATIOS = {"0.5": 0.25, "1": 0.5, "2": 0.625, "4": 0.625}


@pytest.fixture
def store(tmp_path: Path) -> LiveStore:
    nvme = {"path": str(tmp_path / "kv"), "capacity": "256MiB", "extent": "16MiB"}
    return LiveStore(store_settings(tmp_path, nvme=nvme))


def test_Q62_a_store_predicts_what_its_tiers_would_hit_with_other_sizes(store: LiveStore) -> None:
    with store, engine(store) as live:
        assert not admin.status(store.path).predictions
        live.put(hashes(4, "mine"))
        for _ in range(2):
            live.read(live.ask(hashes(4, "mine")))
        live.read(live.ask(hashes(4, "mine"), again=True))  # the same request
        eventually(lambda: admin.status(store.path).predictions)
        eventually(lambda: not store.server.store.asked.waits)
        found = admin.status(store.path)
        assert [each.tier for each in found.predictions] == [MEMORY, NVME]
        # It asked for 8 blocks, and 4 of these had been asked for before.
        assert found.predictions[0].ratios == dict.fromkeys(RATIOS, 0.5)
        assert found.predictions[0].namespace == found.models[0].namespace
        names = {stat.labels["size"] for stat in admin.stats(store.path)
                 if stat.name == "kvstore_predicted_hit_ratio"}  # fmt: skip
        assert names == RATIOS.keys()


def test_Q62_a_tenants_blocks_are_its_own(store: LiveStore) -> None:
    with store, engine(store) as live:
        for scope in (b"one", b"two"):
            live.ask(hashes(4, "mine"), scope=scope)
        eventually(lambda: admin.status(store.path).predictions)
        assert admin.status(store.path).predictions[0].ratios["4"] == 0


def test_Q62_a_long_prompt_is_fed_in_slices_from_its_end(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "TURN_BLOCKS", 3)
    with store, engine(store) as live:
        live.ask(hashes(1, "other"))
        namespace = store.server.store.sessions["engine"].namespace
    assert namespace is not None
    fed: list[int] = []
    monkeypatch.setattr(namespace.curve, "use", fed.extend)
    waiting, chain = Asked(), hashes(8, "mine")
    waiting.note(namespace, p.Lookup(1, b"".join(chain), len(chain[0])))
    turns = 0
    while waiting.waits:
        waiting.feed()
        turns += 1
    assert turns == 3
    names = [hash(block + b"\0\0") & ((1 << 64) - 1) for block in chain]
    assert fed == names[5:] + names[2:5] + names[:2]
    stored: list[int] = []
    namespace.curve.uses = 1
    monkeypatch.setattr(namespace.curve, "stored", stored.extend)
    note_stored(
        namespace, [BlockKey(block + group) for block in chain for group in (b"\0\0", b"\0\1")]
    )
    assert stored == names
    assert not waiting._bytes
    huge = bytes(asked.WAITING_BYTES_MAX // 8)  # one block, whose hash is as long as that
    for packed, width in ((b"".join(chain), len(chain[0])), (b"1", 1), (huge, len(huge))):
        for _ in range(10_000):
            waiting.note(namespace, p.Lookup(1, packed, width))
        assert waiting._bytes <= asked.WAITING_BYTES_MAX
    assert len(waiting._waiting) <= asked.WAITING_BYTES_MAX // asked.LOOKUP_BYTES


@pytest.mark.meets_bugs
def test_S2_a_bug_in_a_curve_costs_no_more_than_predictions(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HitCurve, "use", lambda *_: 1 / 0)
    with store, engine(store) as live:
        live.put(hashes(4, "mine"))
        for _ in range(2):
            assert len(live.read(live.ask(hashes(4, "mine")))) == 4
            eventually(lambda: not store.server.store.asked.waits)
        refused = ("kvstore_refused", "internal")
        eventually(lambda: store.server.store.numbers.counts[refused] == 2)


def test_Q62_no_answer_waits_for_the_curve(
    store: LiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, fed = store.server, list[bool]()
    monkeypatch.setattr(server.store.asked, "feed", lambda: fed.append(True))
    server._listener.start()
    server._selector.register(server._listener.sock, selectors.EVENT_READ, None)
    with client(store):
        server._turn()
        assert not fed, "a connection came in this turn"
        server._turn()
        assert fed
    server._selector.unregister(server._listener.sock)
    server.stop()
    server.run()  # which ends at once


def status_with(predictions: list[Prediction], looked_up: dict[str, int]) -> Status:
    """A store of 64 GiB of memory and 1 TiB of disk."""
    tier = {
        "state": "ok", "used_bytes": 0, "stored_bytes": 0, "loaded_bytes": 0, "queued_blocks": 0,
        "queue_s": 0.0, "budget_bytes": None, "budget_left_bytes": None,
    }  # fmt: skip
    model = {
        "model": "m", "dtype": "bfloat16", "block_tokens": 16, "block_bytes": 1, "blocks": {},
        "hit_tokens": 0, "pinned_bytes": 0, "leases": 0,
    }  # fmt: skip
    tokens = {"seconds": 1.0, "looked_up": 0, "hit": {}}
    return msgspec.convert(
        {
            "version": "1", "uptime_s": 1.0, "ready": True, "findings": [], "since_start": tokens,
            "last_minute": tokens, "missed_tokens": {}, "stored_blocks": 0, "evicted_blocks": 0,
            "lookups_s": 0.0, "engines": [], "tenants": [], "history": [],
            "tiers": [
                {"name": MEMORY, "capacity_bytes": 64 * GIB, **tier},
                {"name": NVME, "capacity_bytes": 1024 * GIB, **tier},
                {"name": "peer", "capacity_bytes": None, **tier},
            ],
            "models": [
                {"namespace": name, "looked_up_tokens": count, **model}
                for name, count in looked_up.items()
            ],
            "predictions": [msgspec.to_builtins(each) for each in predictions],
        },
        Status,
    )  # fmt: skip


def test_Q63_advice_weighs_models_by_their_tokens() -> None:
    ratios = [dict.fromkeys(RATIOS, 0.0), RATIOS]
    found = [Prediction(name, MEMORY, each) for name, each in zip("ab", ratios, strict=True)]
    advice = advise(status_with(found, {"a": 100, "b": 300, "c": 900}), {MEMORY: 4.0})
    assert advice == [
        Advice(MEMORY, 32 * GIB, -32 * GIB, 0.1875, -18.75, -128.0),
        Advice(MEMORY, 64 * GIB, 0, 0.375, 0.0, 0.0),
        Advice(MEMORY, 128 * GIB, 64 * GIB, 0.46875, 9.375, 256.0),
        Advice(MEMORY, 256 * GIB, 192 * GIB, 0.46875, 9.375, 768.0),
    ]
    assert [sentence(each) for each in advice] == [
        "cpu: -32 GiB (32 GiB): -18.8 points, -128.00",
        "cpu: 64 GiB now: 37.5 % of blocks hit, by its size",
        "cpu: +64 GiB (128 GiB): +9.4 points, +256.00, 27.31 a point",
        "cpu: +192 GiB (256 GiB): +9.4 points, +768.00, 81.92 a point",
    ]
    assert not advise(status_with(found, {}), {})
    (half, *_) = advise(status_with(found, {"b": 1}), {})
    assert sentence(half) == "cpu: -32 GiB (32 GiB): -25.0 points"


def test_Q63_the_command_says_what_a_store_predicts(
    store: LiveStore, capsys: pytest.CaptureFixture[str]
) -> None:
    with store, engine(store) as live:
        assert cli.main(["advise", "--store", store.path]) == 0
        assert capsys.readouterr().out.startswith("nothing to say yet")
        live.put(hashes(4, "mine"))
        for _ in range(2):
            live.read(live.ask(hashes(4, "mine")))
        live.scheduler.send(p.Step(lookup_tokens=128, missed_tokens={"tail": 128}))
        eventually(lambda: admin.status(store.path).models[0].looked_up_tokens)
        eventually(lambda: not store.server.store.asked.waits)
        assert cli.main(["advise", "--store", store.path, "--nvme-price", "0.5"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 8
        assert lines[1] == "cpu: 16 MiB now: 50.0 % of blocks hit, by its size"
        assert lines[6] == "nvme: +256 MiB (512 MiB): +0.0 points, +0.12"
        assert cli.main(["advise", "--store", store.path, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [each["tier"] for each in found] == [MEMORY] * 4 + [NVME] * 4
        with pytest.raises(SystemExit) as end:
            cli.main(["advise", "--store", store.path, "--cpu-price", "cheap"])
        assert end.value.code == 2
        assert 'expected a number such as "0.25", found "cheap"' in capsys.readouterr().err
