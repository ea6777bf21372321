"""A whole store under real engine halves, killed again and again on one directory.

KVSTORE_KILLS=300 for a long campaign, KVSTORE_SEED for another one. The seed decides what each
store is killed at, and what the engines ask for; at which moment, the machine decides.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey
from kvstore.store import admin
from tests.bench.store import numbers
from tests.harness.crash_engine import CrashEngine, Layout, Truth, shape
from tests.harness.crash_ledger import Ledger, Life, read_directory
from tests.harness.crash_store import MIB, START_S, Cap, StoreProcess
from tests.harness.store_child import POINTS
from tiers.nvme.directory import Directory
from tiers.nvme.fsck import examine

KILLS = int(os.environ.get("KVSTORE_KILLS", "30"))
SEED = int(os.environ.get("KVSTORE_SEED", "1"))
WINDOW_S = 0.05
CAPS = [64 * MIB, 72 * MIB, 80 * MIB, 96 * MIB]
CONFIG = """
[server]
socket = "{socket}"
metrics = ""
[cpu]
capacity = "24MiB"
extent = "2MiB"
[nvme]
path = "{folder}"
capacity = {capacity}
extent = "2MiB"
durability = "50ms"
"""
FULL = Layout("full", shape((8,), (None,), world=1, token_bytes=8192), layers=2)
WINDOW = Layout("window", shape((8, 4), (None, 20), world=2, token_bytes=2048), layers=1)
ENGINES = {"one": FULL, "two": FULL, "three": WINDOW}

# How lives end: at each point of store_child once, and otherwise, in thirty lives.
ENDS = (*POINTS, *["time"] * 6, *["resize"] * 2, *["loading"] * 4, "row")
OFTEN = {"load": 60, "read": 60, "half-written": 20, "written": 60, "sync": 10, "gone": 40}
ONCE = ("loaded", "clear", "resize")
RARE = 3  # times that other points are passed before
AT_RESIZE = {"made", "known", "forgotten", "resize"}
POINT_S = 1.5
SHRINK_S = 120.0


def mapped_memory() -> set[str]:
    """Inodes of stores' memory that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:kvstore" in line}


class Campaign:
    """One directory, its engines, and the stores that use it one after the other."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.mapped_before = mapped_memory()  # other tests' in this process
        self.folder = folder / "kv"
        self.socket = str(folder / "socket")
        self.counts: Counter[str] = Counter()
        self.truth: dict[BlockKey, Truth] = {}
        self.ledger = Ledger(WINDOW_S, self.truth)
        self._here = folder
        self._seed = seed
        self._rng = random.Random(seed)
        self._store: StoreProcess | None = None
        self.cap = Cap(self.folder, CAPS[0])
        self.engines = [
            CrashEngine(name, layout, seed * 10 + number, self.socket, self.truth)
            for number, (name, layout) in enumerate(ENGINES.items())
        ]

    def start(self, kill_at: tuple[str, int] | None = None) -> StoreProcess:
        """Start a store with the cap as it was left, or another."""
        if self._rng.random() < 0.1:
            self.cap.change(self._rng.choice(CAPS))
        text = CONFIG.format(
            socket=self.socket, folder=self.folder, capacity=self.cap.capacity_bytes
        )
        config = self._here / "kvstore.toml"
        config.write_text(text)
        self.counts["starts"] += 1
        self._sessions = {engine.client.session for engine in self.engines}
        self._store = StoreProcess(config, self._here / "log", self._here / "stderr", kill_at)
        return self._store

    # Lives

    def kill(self, number: int) -> None:
        """One life of the store, of the kind that the number has in this seed."""
        self._rng = rng = random.Random(f"{self._seed}/{number}")
        deck = list(ENDS)
        random.Random(f"{self._seed} {number // len(deck)}").shuffle(deck)
        end = deck[number % len(deck)]
        before = self.loads()["loaded from nvme"]
        if end in POINTS:
            self._kill_at_point(end)
        elif end == "row":
            for _ in range(rng.randint(2, 4)):
                store = self.start()
                store.wait(lambda: False, rng.uniform(0.0, 0.3))
                self._bury(store, end)
        else:
            self._kill_at_time(end)
        self.counts["lives with hits from disk"] += self.loads()["loaded from nvme"] > before

    def _kill_at_time(self, end: str) -> None:
        rng, store = self._rng, self.start()
        if end == "loading":
            store.wait(lambda: store.said("loading"), START_S)
            store.wait(lambda: False, rng.uniform(0.0, 0.08))
        else:
            self._serve(store, rng.uniform(0.1, 1.0))
            if end == "resize":
                self._resize(store, rng.choice(CAPS))
                store.wait(lambda: False, rng.choice((0.0, 0.003, 0.03)) * rng.random())
        self._bury(store, end)

    def _kill_at_point(self, point: str) -> None:
        rng = self._rng
        most = 1 if point in ONCE else OFTEN.get(point, RARE)
        store = self.start((point, rng.randint(1, most)))
        if point not in ("load", "loaded"):
            self._serve(store, rng.uniform(0.1, 0.5))
            self._poke(store, point)
        store.wait(lambda: False, POINT_S)
        self._bury(store, point)

    def _poke(self, store: StoreProcess, point: str) -> None:
        """Have done what leads to a point."""
        if point == "clear":
            self._clear()
        if point in AT_RESIZE:
            self._resize(store, CAPS[0] if point == "forgotten" else self._rng.choice(CAPS[1:]))
            self._resize(store, CAPS[-1])

    def _serve(self, store: StoreProcess, seconds: float) -> None:
        """Let it work under load for a while."""
        store.wait(lambda: store.said("serving"), START_S)
        store.wait(self._attached, START_S)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and not store.ended:
            time.sleep(0.02)
            self._check()
        if self._rng.random() < 0.2:
            self._resize(store, self._rng.choice(CAPS))
            if self._rng.random() < 0.5 and not store.wait(lambda: self.cap.reached, SHRINK_S):
                assert store.ended, f"not within its new cap in {SHRINK_S:.0f} s"
        if self._rng.random() < 0.05:
            self._clear()

    def _attached(self) -> bool:
        """Tell whether all engines have sessions, none of them with a store of before."""
        sessions = {engine.client.session for engine in self.engines}  # 0: it has none
        return 0 not in sessions and sessions.isdisjoint(self._sessions)

    def _resize(self, store: StoreProcess, capacity_bytes: int) -> None:
        """As `kvstore resize nvme` does."""
        if store.ended:
            return
        before = self.cap.capacity_bytes
        self.cap.change(capacity_bytes)
        try:
            next(admin.resize(self.socket, "nvme", capacity_bytes))
        except KVStoreError:
            store.wait(lambda: False, POINT_S)
            assert store.ended, "a store that lives refuses a resize"
        self.counts["resizes down" if capacity_bytes < before else "resizes up"] += 1

    def _clear(self) -> None:
        try:
            admin.clear(self.socket)
            self.counts["clears"] += 1
        except KVStoreError:
            self.counts["clears cut short"] += 1

    # Checks

    def _check(self) -> None:
        for engine in self.engines:
            engine.raise_error()
        self.cap.check()

    def _bury(self, store: StoreProcess, end: str) -> None:
        """Kill it, if it has not ended, and compare what is left with what must be."""
        alive_s = store.kill()
        life = self.ledger.follow(store.lines, alive_s)
        self._count(life, end)
        self._check()
        self.compare()

    def compare(self) -> None:
        """Read the directory as the next store would find it."""
        volume = Directory(self.folder)
        volume.open(START_S)  # what a killed store has started may use it for a moment longer
        try:
            assert not list(self.folder.glob("index.damaged*")), "the index was set aside"
            found = read_directory(self.folder, self.truth)
            self.ledger.compare(found)
            self.counts["blocks verified on disk"] += len(found)
        finally:
            volume.close()

    def _count(self, life: Life, end: str) -> None:
        counts = self.counts
        counts["kills"] += 1
        counts[f"kills at: {life.killed_at or 'any time'}"] += 1
        counts["kills inside a commit"] += life.in_commit
        counts["kills while loading"] += life.in_load
        counts["kills inside a copy"] += life.killed_at in ("read", "half-written", "written")
        counts["kills at a resize"] += end == "resize" or life.killed_at in AT_RESIZE
        for word in ("blocks stored", "evicted", "resize", "blocks cleared"):
            counts[f"on disk: {word}"] += life.words[word]

    # The end

    def finish(self) -> None:
        """Start once more, let all requests end, and leave in order with nothing left over."""
        store = self.start()
        self._serve(store, 1.0)
        self._resize(store, CAPS[0])
        assert store.wait(lambda: self.cap.reached, SHRINK_S), "a smaller cap is not reached"
        for engine in self.engines:
            engine.stop()
        assert store.wait(lambda: self._at_rest(numbers(self.socket)), 10.0), numbers(self.socket)
        store.stop()
        self.ledger.follow(store.lines, 0.0, orderly=True)
        self.compare()
        report = examine(self.folder, repair=False)
        assert report.ok, report
        assert report.in_order
        assert not Path(self.socket).exists(), "the socket is left over"
        gc.collect()
        left = mapped_memory() - self.mapped_before
        assert not left, f"memory of a store is still mapped: {left}"
        self._check()

    @staticmethod
    def _at_rest(found: dict[str, float]) -> bool:
        """No session, lease, job or slot on credit is left."""
        held = "kvstore_leases", "kvstore_jobs_open", "kvstore_sessions{", "kvstore_slots{granted}"
        return not any(value for name, value in found.items() if name.startswith(held))

    def close(self) -> None:
        """End what runs, well or not."""
        self.cap.close()
        if self._store is not None:
            self._store.abandon()
        for engine in self.engines:
            engine.abandon()

    def loads(self) -> Counter[str]:
        """What the engines have done."""
        return sum((engine.counts for engine in self.engines), Counter())

    def summary(self) -> str:
        both = {**self.counts, **{f"engines: {k}": v for k, v in self.loads().items()}}
        lines = [f"  {name:32} {count:9,}" for name, count in sorted(both.items())]
        cap = self.cap
        lines.append(
            f"  at most {cap.largest_bytes / MIB:.1f} MiB on disk,"
            f" {cap.largest_part:.3f} of its cap ({cap.samples:,} samples);"
            f" {cap.shrunk} times back within a smaller cap"
        )
        lines.append(
            f"  {self.ledger.required:,} times a block had to be there, at the latest"
            f" {self.ledger.late_s:.2f} s after it was acknowledged"
        )
        return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_kill_of_a_whole_store_costs_durable_blocks_or_gives_wrong_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    # Hundreds of "the store is gone", each kept with the frames, and so the memory, it arose in.
    caplog.set_level(logging.CRITICAL, "connectors")
    before = {thread.name for thread in threading.enumerate()}
    campaign = Campaign(tmp_path, SEED)
    number = 0
    try:
        for engine in campaign.engines:
            engine.start()
        while campaign.counts["kills"] < KILLS:
            campaign.kill(number)
            number += 1
        campaign.finish()
    except BaseException as exc:
        again = f"KVSTORE_SEED={SEED} KVSTORE_KILLS={KILLS} pytest tests/{Path(__file__).name}"
        exc.add_note(f"Life {number} of seed {SEED}; to see it again: {again}")
        raise
    finally:
        campaign.close()
        with capsys.disabled():
            sys.stdout.write(f"\nseed {SEED}, {KILLS} kills\n{campaign.summary()}")
    assert {thread.name for thread in threading.enumerate()} == before
    if len(ENDS) <= KILLS:
        check_states_met(campaign)


def check_states_met(campaign: Campaign) -> None:
    """What it has shown, it has shown in these states."""
    counts, loads = campaign.counts, campaign.loads()
    for what in ("inside a commit", "while loading", "inside a copy", "at a resize"):
        assert counts[f"kills {what}"], f"no kill {what}"
    assert counts["on disk: evicted"] > 10 * KILLS, "the cap was hardly reached"
    assert counts["resizes up"]
    assert counts["resizes down"]
    assert campaign.cap.shrunk
    assert counts["lives with hits from disk"] > KILLS // 3, "few restarts gave hits from disk"
    assert loads["loaded from nvme"] > 10 * KILLS, "few blocks came from disk"
    assert loads["loaded from cpu"] > KILLS
    assert campaign.ledger.required > 100 * KILLS, "little was durable: this shows nothing"
