"""`kvstore record`: what engines look up becomes a trace that `kvstore replay` reads."""

from __future__ import annotations

import json
import re
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kvstore import cli
from kvstore.core.errors import KVStoreError
from kvstore.replay import read_trace
from kvstore.store import admin
from kvstore.store.record import Written, record
from kvstore.store.recorder import KEPT_BYTES
from tests.harness.live import LiveEngine, LiveStore, engine, store_settings
from tests.harness.script import hashes


def asks(one: LiveEngine, *chains: list[bytes]) -> None:
    for chain in chains:
        one.ask(chain)


def recorded(store: LiveStore, file: Path, one: LiveEngine, *chains: list[bytes]) -> Written:
    """Record what an engine asks while a recording goes on."""
    told: list[Written] = []

    def watch(done: Written) -> None:
        if not told:
            asks(one, *chains)
            one.ask(chains[0], again=True)
        told.append(done)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(store.path, file, 60.0, 1 << 20, watch=watch)
    return told[-1]


def test_Q61_what_engines_look_up_is_a_trace(tmp_path: Path) -> None:
    a, b = hashes(3, "a"), hashes(5, "b")
    with LiveStore(store_settings(tmp_path)) as store, engine(store) as one:
        asks(one, hashes(2, "before"))
        done = recorded(store, tmp_path / "one", one, a, [*a, *b], b)
        assert (done.requests, done.blocks, done.dropped) == (3, 3 + 8 + 5, 0)
        trace = read_trace(tmp_path / "one")
        first, second, third = (request.hash_ids for request in trace.requests)
        assert second[:3] == first
        assert second[3:] == third
        assert (trace.unique, trace.blocks) == (8, 16)
        times = [request.timestamp for request in trace.requests]
        assert times == sorted(times)
        assert times[0] == 0
        recorded(store, tmp_path / "other", one, a)
        (again,) = read_trace(tmp_path / "other").requests
        assert not set(again.hash_ids) & set(first), "another salt"


def test_Q61_engines_with_other_bytes_have_other_names(tmp_path: Path) -> None:
    chain = hashes(3)
    with (
        LiveStore(store_settings(tmp_path, cpu={"capacity": "48MiB", "extent": "16MiB"})) as store,
        engine(store) as one,
        engine(store, "other", model="other") as other,
    ):
        admin.record(store.path, 7)
        asks(one, chain)
        one.ask(chain, scope=b"scope")
        asks(other, chain)
        found = admin.record(store.path, 7).lookups
        assert len({(each.namespace, each.scope) for each in found}) == 3
        assert {each.hashes for each in found} == {b"".join(chain)}


def test_Q61_a_store_keeps_little_and_not_for_long_and_for_one_only(tmp_path: Path) -> None:
    with LiveStore(store_settings(tmp_path)) as store, engine(store) as one:
        admin.record(store.path, 7)
        with pytest.raises(KVStoreError, match="expected no recording, found one that goes on"):
            admin.record(store.path, 8)
        chain = hashes(KEPT_BYTES // 32 // 3)
        asks(one, chain, chain, chain, chain)
        found = admin.record(store.path, 7)
        assert (len(found.lookups), found.dropped) == (3, 1)
        store.server.store._recorder._until_ns = 0  # ten seconds later
        asks(one, hashes(2))
        assert admin.record(store.path, 8) == msgspec.structs.replace(found, lookups=[], dropped=0)


def test_Q61_the_command_ends_in_time_by_size_or_by_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with LiveStore(store_settings(tmp_path)) as store, engine(store) as one:

        def run(file: str, *words: str) -> dict[str, float]:
            place = ["--store", f"unix://{store.path}", "--json"]
            assert cli.main(["record", str(tmp_path / file), *words, *place]) == 0
            found: dict[str, float] = json.loads(capsys.readouterr().out)
            return found

        assert 0.5 <= run("time", "--for", "500ms")["seconds"] < 30
        assert run("size", "--max", "1B")["seconds"] < 30
        clock = SimpleNamespace(sleep=interrupted, monotonic=time.monotonic)
        monkeypatch.setattr("kvstore.store.record.time", clock)
        assert run("signal")["requests"] == 0
        asks(one, hashes(2))
        words = ["record", str(tmp_path / "time"), "--store", f"unix://{store.path}"]
        assert cli.main(words) == 2
        assert re.search("time: cannot be written: File exists", capsys.readouterr().err)


def test_Q61_a_full_disk_leaves_what_was_recorded_before(tmp_path: Path) -> None:
    file, before = tmp_path / "trace", resource.getrlimit(resource.RLIMIT_FSIZE)
    with LiveStore(store_settings(tmp_path)) as store, engine(store) as one:

        def watch(done: Written) -> None:
            asks(one, hashes(3))
            if done.requests:  # the next write ends in the middle
                resource.setrlimit(resource.RLIMIT_FSIZE, (done.bytes + 9, before[1]))

        said = f"{file}: cannot be written: File too large; it has what came before, requests: 1"
        try:
            with pytest.raises(KVStoreError, match=said):
                record(store.path, file, 60.0, 1 << 20, watch=watch)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(read_trace(file).requests) == 1


def test_Q61_a_store_that_ends_leaves_what_was_recorded(tmp_path: Path) -> None:
    file, told = tmp_path / "trace", list[Written]()
    with LiveStore(store_settings(tmp_path)) as store, engine(store) as one:

        def watch(done: Written) -> None:
            if not told:
                asks(one, hashes(3))
            elif len(told) == 3:
                store.stop()
            told.append(done)

        said = f"no store answers.*; {file} has what came before, requests: 1"
        with pytest.raises(KVStoreError, match=said):
            record(store.path, file, 60.0, 1 << 20, watch=watch)
    assert len(read_trace(file).requests) == 1
