"""A whole store process on a disk that fails, and an engine that holds it to its promises.

Each answer comes in time, what is read has the right bytes, the process lives and says its state.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from kvstore.store import admin
from tests.bench.steal import Watch
from tests.bench.store import StoreProcess
from tests.harness.fakes import hashes
from tests.harness.faults import Faults
from tests.harness.live import LiveEngine
from tests.harness.patience import WAIT_S

PROMOTE_S = 0.4  # most that an answer waits for the disk
SLACK_S = 2.0  # of a machine that does other things, too
CHAIN = 2  # blocks of a request
MEMORY = "16MiB"  # 15 blocks of 1 MiB


class Served:
    """The store, its engine, and what that has stored."""

    def __init__(self, folder: Path, disk: Path, faults: Faults | None = None) -> None:
        """folder: of the store's own files; disk: of the NVMe tier."""
        self.disk = disk
        self.store = StoreProcess(
            folder,
            MEMORY,
            f'[engine]\npromote = "{PROMOTE_S}s"\n'
            f'[nvme]\npath = "{disk}"\ncapacity = "256MiB"\nextent = "4MiB"\n'
            'durability = "10ms"\n',
            module="tests.harness.serve_hasty",
            scraped=False,
            environment=None if faults is None else faults.environment,
        )
        self.path = self.store.path
        self.names: list[str] = []
        self._rng = random.Random(1)
        self._engine: LiveEngine | None = None

    def start(self) -> None:
        self.store.__enter__()
        self._engine = LiveEngine(self)

    def kill(self) -> None:
        """End the store at once, and start it again."""
        psutil.Process(self.store.pid).kill()
        self.stop()
        self.start()

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self.store.stop()
        assert "Traceback" not in self.log, "what a disk does is told in words"

    @property
    def engine(self) -> LiveEngine:
        assert self._engine is not None, "not started"
        return self._engine

    @property
    def log(self) -> str:
        return self.store.log_path.read_text(errors="replace")

    # What an engine does

    def put(self, count: int) -> list[str]:
        """Store some requests' blocks; they may be lost, but nothing may wait for them."""
        fresh = [f"r{len(self.names) + number}" for number in range(count)]
        for name in fresh:
            with self._in_time("storing"):
                self.engine.put(hashes(CHAIN, name))
            self.names.append(name)
        return fresh

    def get(self, name: str) -> tuple[int, int]:
        """Ask for a request's blocks and read them: how many came, how many of them from disk.

        As an engine does, it asks again for what is in memory if the disk did not bring them.
        """
        chain = hashes(CHAIN, name)
        with self._in_time("a lookup"):
            granted = self.engine.ask(chain)
            found = self.engine.load(granted, PROMOTE_S)
            self._check(chain, found)
        from_disk = granted.sources.get("nvme", 0) if len(found) == CHAIN else 0
        if granted.lease and len(found) < len(granted.hits[0].indices) // 4:
            with self._in_time("a second lookup"):
                found = self.engine.load(self.engine.ask(chain, memory_only=True), PROMOTE_S)
                self._check(chain, found)
        return len(found), from_disk

    def _check(self, chain: Sequence[bytes], found: Sequence[bytes]) -> None:
        expected = [self.engine.content(block) for block in chain[: len(found)]]
        assert list(found) == expected, "wrong bytes"

    def work(self, rounds: int = 3) -> None:
        """Store and read this and that."""
        for _ in range(rounds):
            self.put(1)
            for name in self._rng.sample(self.names, min(3, len(self.names))):
                self.get(name)
        self.numbers()

    def work_until(self, happened: Callable[[], object], what: str) -> None:
        """Go on until something holds."""
        end_s = time.monotonic() + WAIT_S
        while not happened():
            assert time.monotonic() < end_s, f"{what}: not in {WAIT_S} s; {self.numbers()}"
            self.work(1)
            time.sleep(0.02)

    @contextmanager
    def _in_time(self, what: str) -> Iterator[None]:
        watch, queued_s = Watch(), self._queued_s()
        yield
        took = watch.own_s() - (self._queued_s() - queued_s)
        assert took < PROMOTE_S + SLACK_S, f"{what} took {took:.2f} s"

    def _queued_s(self) -> float:
        """Seconds that threads here and in the store, ready to run, have had no processor.

        What waits for the disk is not ready to run: only other load of the machine counts here.
        """
        found = 0
        for pid in (self.store.pid, "self"):
            for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    found += int(thread.read_text(encoding="ascii").split()[1])
        return found / 1e9

    # What an operator sees

    def numbers(self) -> dict[str, float]:
        """The store's numbers of this tier, by name{label}; it answers at once."""
        assert psutil.Process(self.store.pid).status() != psutil.STATUS_ZOMBIE, self.log
        with self._in_time("stats"):
            found = admin.stats(self.store.address, timeout_s=WAIT_S)
        numbers: Counter[str] = Counter()  # namespaces are added up
        for stat in found:
            if stat.labels.get("tier") == "nvme":
                label = stat.labels.get("state") or stat.labels.get("event", "")
                numbers[f"{stat.name}{{{label}}}"] += stat.value  # type: ignore[assignment]
        return dict(numbers)

    @property
    def state(self) -> str:
        """Of the tier: ok, read_only and so on."""
        found = self.numbers()
        return next(
            state
            for state in ("ok", "loading", "read_only", "off")
            if found.get(f"kvstore_tiers{{{state}}}")
        )

    @property
    def disk_bytes(self) -> float:
        """That the tier says it takes."""
        return self.numbers()["kvstore_memory_bytes{}"]

    def count(self, event: str) -> float:
        return self.numbers().get(f"kvstore_tier_blocks{{{event}}}", 0)

    def wait_for(self, *states: str) -> None:
        self.work_until(lambda: self.state in states, f"state {' or '.join(states)}")

    # What must hold

    def _get_patiently(self, name: str) -> tuple[int, int]:
        """What came late, on a machine that does other things, is not lost."""
        best = self.get(name)
        for _ in range(3):
            best = best if best[0] == CHAIN else max(best, self.get(name))
        return best

    def fill(self, count: int = 9) -> list[str]:
        """Store more than memory holds, and wait until it is durable on disk."""
        names = []
        for _ in range(count):
            before, failed = self.count("stored"), self.count("stored_failed")
            (name,) = self.put(1)
            end_s = time.monotonic() + WAIT_S
            while self.count("stored") < before + CHAIN:
                assert time.monotonic() < end_s, f"not stored: {self.numbers()}"
                time.sleep(0.005)
                if self.count("stored_failed") > failed:  # a machine that stands still has hung
                    failed = self.count("stored_failed")
                    self.engine.put(hashes(CHAIN, name))
                    self.get(name)  # if memory still has it, that has it written
            names.append(name)
        time.sleep(0.1)  # the window, and a commit
        return names

    def assert_back(self, names: Sequence[str], *, lost_max: int = 0) -> None:
        """The tier is there again by itself, with these blocks and for new ones.

        lost_max: how many blocks may be missing.
        """
        self.wait_for("ok")
        came = [self._get_patiently(name) for name in names]
        lost = len(names) * CHAIN - sum(found for found, _ in came)
        assert lost <= lost_max, f"{lost} blocks are lost, {lost_max} may be; {self.numbers()}"
        assert sum(disk for _, disk in came), "all came from memory"
        assert [self._get_patiently(name)[0] for name in self.fill(2)] == [CHAIN, CHAIN]


@contextmanager
def served(folder: Path, disk: Path, faults: Faults | None = None) -> Iterator[Served]:
    """A store that has just been started."""
    made = Served(folder, disk, faults)
    try:
        made.start()
        yield made
    finally:
        made.stop()
