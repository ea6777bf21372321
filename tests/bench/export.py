"""`tests.bench export`: blocks from one store to another, against raw NIXL and the raw disk.

Two real stores with their exporters, and the whole protocol: side channel, leases, checksums,
landing slots, confirmation. An engine of each asks and watches its slots, as a worker does; time
runs from the question to the last block that can be read. NIXL alone moves as many blocks of the
same size, at positions in no order, between two processes of its own with memory of the same kind,
as one transfer. What is compared alternates in one run. With "direct" the engine is this process,
and an agent in it reads into its own memory; with "direct_push" the peer's exporter writes there.
An engine that is written to has networks only, so that is measured over TCP only, against NIXL's
WRITE over TCP.

Both stores, both exporters and all threads that take checksums share this machine's processors
here. So there is a second limit: NIXL with one pass of checksums over the bytes on each side,
taken by a thread meanwhile, and the processor time of each process is counted.

Results:

pull_cpu, push_cpu                  from the prefill store's memory, against one NIXL transfer of
    the same blocks
pull_nvme, push_nvme                from its disk only, against the slower of that and the disk
direct_cpu, direct_nvme             the same, read by the engine's worker into its memory
direct_push_cpu, direct_push_nvme   the same, written there by the prefill store's exporter
mutex_ratio                         against NIXL with UCX_USE_MT_MUTEX=y, as our exporters have it
bound_ratio                         what NIXL's rate could be at most with all processors of this
    machine at work on transfers, copies and checksums alone
pull_summed, push_summed            that NIXL transfer with a checksum pass on each side meanwhile,
    against the one without; summed_ratio is against it
first_block_ms                      from the question until the first block can be read
cpu_us, nixl_cpu_us                 processor time for each 2 MiB: of both stores and exporters (in
    the JSON also by process), of the two processes with NIXL alone
main_threads_us                     of the main threads of both stores together, for each block
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from kvstore.core.errors import KVStoreError
from kvstore.core.types import make_key
from kvstore.handover.checksums import block_sum, copied_sum
from kvstore.store import admin
from kvstore.units import KIB, MIB, sized
from tests.bench import raw_nixl
from tests.bench.clock import Clock, child_of, main_thread_us
from tests.bench.nvme import READERS, WRITERS
from tests.bench.raw_disk import Depth, check_space, filled, reference
from tests.bench.report import Result, alternate, compared, paired_ratio, progress
from tests.bench.session import DirectSession, Fetched, Session
from tests.bench.store import StoreProcess, numbers
from tests.harness.fakes import hashes
from tiers.nvme.tier import RUN_BYTES_MAX

PAIRS = 7
TRANSPORTS = {"shared memory": None, "tcp": "tcp,self"}
EXPORTER = "tiers.nixl.exporter"
SUMMED_BYTES = 32 * MIB
PER_BYTES = 2 * MIB  # processor time is of so many bytes
READY_S = 60.0
OURS = ("pull_cpu", "push_cpu", "pull_nvme", "push_nvme", "direct_cpu", "direct_nvme")
INTO_ENGINE = ("direct_push_cpu", "direct_push_nvme")  # which has networks only
SYSTEMS = {"shared memory": OURS, "tcp": OURS + INTO_ENGINE}
RAW = {"pull": "NIXL READ", "push": "NIXL WRITE"}
# Which of these it is compared with.
LIKE = {"pull": "pull", "push": "push", "direct": "pull", "direct_push": "push"}


Clocks = dict[str, Clock]


class Sizes(msgspec.Struct, frozen=True):
    """How much is moved; transports: those of TRANSPORTS."""

    block_bytes: tuple[int, ...] = (64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB)
    data_bytes: int = 128 * MIB  # twice the landing slots
    transports: tuple[str, ...] = tuple(TRANSPORTS)


class Moved(msgspec.Struct, frozen=True):
    """All blocks once. cpu_us: by process, for each PER_BYTES."""

    bytes_per_s: float
    cpu_us: dict[str, float]
    first_s: float = 0.0
    main_us: float = 0.0  # of the stores' main threads, for each block

    @property
    def cpu_us_total(self) -> float:
        """Processor time of all processes."""
        return sum(self.cpu_us.values())


def run(pairs: int | None, sizes: Sizes | None = None) -> list[Result]:
    """Measure everything, the disk in the current directory; pairs: rounds."""
    sizes, rounds = sizes or Sizes(), pairs or PAIRS
    check_space(6 * sizes.data_bytes)
    results = []
    cases = list(itertools.product(sizes.transports, sizes.block_bytes))
    with progress(len(cases) * (1 + rounds)) as tell:
        for transport, block_bytes in cases:
            tell(f"{transport}, blocks of {sized(block_bytes)}", 0)
            with (
                tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=Path.cwd()) as name,
                ExitStack() as ends,
            ):
                systems = _systems(Path(name), block_bytes, transport, sizes, ends)
                results += _results(block_bytes, transport, *alternate(systems, rounds, tell))
    return results


class Stores:
    """A prefill store with some blocks in memory and others on disk only, and a decode store."""

    def __init__(self, folder: Path, block_bytes: int, transport: str, data_bytes: int) -> None:
        """transport: of all agents, one of TRANSPORTS."""
        self.systems = SYSTEMS[transport]
        self._transports = transports = TRANSPORTS[transport]
        self._block_bytes = block_bytes
        self._count = data_bytes // block_bytes
        self.chains = {where: hashes(self._count, where) for where in ("cpu", "nvme")}
        environment = {} if transports is None else {"UCX_TLS": transports}
        for name in ("prefill", "decode"):
            (folder / name).mkdir()
        # One extent each: what is not there yet would be made by evicting what is to be measured.
        disk = f'[nvme]\npath = "{folder}/prefill/kv"\ncapacity = {4 * data_bytes}\n'
        self.prefill = StoreProcess(
            folder / "prefill",
            f"{4 * data_bytes}B",
            f"extent = {4 * data_bytes}\n{disk}[peer]\n",
            environment=environment,
            scraped=False,
        )
        self.decode = StoreProcess(
            folder / "decode",
            f"{2 * data_bytes}B",
            f"extent = {2 * data_bytes}\n[peer]\n",
            environment=environment,
            scraped=False,
        )

    def open(self, ends: ExitStack) -> None:
        """Start both, fill the first one, and hand over all once."""
        ends.enter_context(self.prefill)
        with self._session(self.prefill) as filling:
            filling.put(self.chains["nvme"])
            self._await_written()
        self.prefill.stop()  # after a restart these are on disk only
        self.prefill.__enter__()
        giving = ends.enter_context(self._session(self.prefill))
        giving.put(self.chains["cpu"])
        self._await_written()
        self._peer = giving.side_channel
        ends.enter_context(self.decode)
        self._taking = ends.enter_context(self._session(self.decode))
        set_transports(self._transports)  # of the agent in this process
        ends.callback(set_transports, None)
        self._reading = ends.enter_context(
            DirectSession(self.decode, "reader", self._block_bytes, self._count)
        )
        for name in self.systems:
            self._warm_up(name)
        self._clocks = {
            f"{name}_{kind}": Clock(pid)
            for name, store in (("prefill", self.prefill), ("decode", self.decode))
            for kind, pid in (("store", store.pid), ("exporter", child_of(store.pid, EXPORTER)))
        }
        self._clocks["engine"] = Clock(os.getpid())

    def fetch(self, name: str) -> Moved:
        """Hand over all blocks as one of SYSTEMS; the decode store has none of them after it."""
        way, _, where = name.rpartition("_")
        given = self._given()
        before, main_us = _now_us(self._clocks), self._main_us()
        _, found = self._fetched(way, where)
        cpu_us = _used_us(self._clocks, before, self._size)
        main_us = (self._main_us() - main_us) / self._count
        if not found.complete or found.sources != {"peer": self._count}:
            raise KVStoreError(f"{name}: {len(found.slots)} of {self._count}, {found.sources}")
        given = tuple(now - was for now, was in zip(self._given(), given, strict=True))
        expected = self._count * (where == "nvme"), self._size * way.endswith("push")
        if given != expected:
            raise KVStoreError(f"{name}: blocks from disk, bytes pushed: {given}, not {expected}")
        admin.clear(self.decode.address)
        return Moved(self._size / found.all_s, cpu_us, found.first_s, main_us)

    def _main_us(self) -> float:
        """Return the processor time of both stores' main threads so far."""
        return main_thread_us(self.prefill.pid) + main_thread_us(self.decode.pid)

    def _fetched(self, way: str, where: str) -> tuple[Session, Fetched]:
        session = self._reading if way.startswith("direct") else self._taking
        chain = self.chains[where]
        return session, session.fetch(chain, peer=self._peer, push=way.endswith("push"))

    def _given(self) -> tuple[int, ...]:
        """Count the blocks that the prefill store has read from disk, and the bytes it pushed."""
        found = numbers(self.prefill.address)
        counts = "kvstore_tier_blocks{nvme,loaded}", "kvstore_hand_over_moved_bytes{pushed}"
        return tuple(int(found.get(count, 0)) for count in counts)

    @property
    def _size(self) -> int:
        return self._count * self._block_bytes

    def _session(self, store: StoreProcess) -> Session:
        return Session(store, "bench", self._block_bytes)

    def _await_written(self) -> None:
        """Wait until the disk has as many blocks more as a chain has."""
        deadline_s = time.monotonic() + READY_S
        stored = "kvstore_tier_blocks{nvme,stored}"
        while (written := numbers(self.prefill.address).get(stored, 0)) < self._count:
            if time.monotonic() > deadline_s:
                raise KVStoreError(f"{written:.0f} of {self._count} blocks are on disk")
            time.sleep(0.02)

    def _warm_up(self, name: str) -> None:
        """Hand over until memory is mapped and there is enough of it, and look at the bytes."""
        way, _, where = name.rpartition("_")
        deadline_s = time.monotonic() + READY_S
        while True:
            session, found = self._fetched(way, where)
            if found.complete and not session.holds(self.chains[where], found.slots):
                raise KVStoreError(f"{name}: other bytes than were stored")
            admin.clear(self.decode.address)
            if found.complete:
                return
            if time.monotonic() > deadline_s:
                raise KVStoreError(f"{name}: {len(found.slots)} of {self._count} blocks came")


def set_transports(transports: str | None) -> None:
    """Set UCX_TLS for agents that this process makes; None: UCX chooses."""
    if transports is None:
        os.unsetenv("UCX_TLS")
    else:
        os.putenv("UCX_TLS", transports)


class _Nixl:
    """Two processes with NIXL alone; the first one is active."""

    def __init__(
        self,
        block_bytes: int,
        transports: str | None,
        data_bytes: int,
        ends: ExitStack,
        *,
        mutex: bool = False,
    ) -> None:
        blocks = data_bytes // block_bytes
        self._bytes = blocks * block_bytes
        self._ours, self._other = (
            ends.enter_context(raw_nixl.half(block_bytes, blocks, transports, mutex=mutex))
            for _ in range(2)
        )
        self._clocks = {"active": Clock(self._ours.pid), "passive": Clock(self._other.pid)}
        self._ours.call("meet", *self._other.call("describe"))
        self._rounds = 0

    def move(self, *, write: bool, summed: bool) -> Moved:
        self._rounds += 1
        before = _now_us(self._clocks)
        started_s = time.perf_counter()
        if summed:
            self._other.tell("sum")
        self._ours.call("move", self._rounds, write=write, summed=summed)
        if summed:
            self._other.answer()
        took_s = time.perf_counter() - started_s
        return Moved(self._bytes / took_s, _used_us(self._clocks, before, self._bytes))


def _now_us(clocks: Clocks) -> dict[str, float]:
    return {process: clock.now_us() for process, clock in clocks.items()}


def _used_us(clocks: Clocks, before: dict[str, float], size: int) -> dict[str, float]:
    """Return what each process has used since then, for each PER_BYTES of a size."""
    return {name: (now - before[name]) / size * PER_BYTES for name, now in _now_us(clocks).items()}


def _systems(
    folder: Path, block_bytes: int, transport: str, sizes: Sizes, ends: ExitStack
) -> dict[str, Callable[[], Moved]]:
    """Start all systems with one size of blocks and one transport; return what measures each."""
    size = block_bytes, TRANSPORTS[transport], sizes.data_bytes, ends
    nixl, mutex = _Nixl(*size), _Nixl(*size, mutex=True)
    memory, _ = filled(sizes.data_bytes)
    starts = range(0, sizes.data_bytes // block_bytes * block_bytes, block_bytes)
    blocks = [memory[at : at + block_bytes] for at in starts]
    disk = reference(folder, blocks, Depth(READERS, WRITERS, RUN_BYTES_MAX))
    ends.callback(disk.close)
    disk.write()
    stores = Stores(folder, block_bytes, transport, sizes.data_bytes)
    stores.open(ends)
    systems = {name: partial(stores.fetch, name) for name in stores.systems}
    for way in RAW:
        write = way == "push"
        systems[f"{way}_nixl"] = partial(nixl.move, write=write, summed=False)
        systems[f"{way}_summed"] = partial(nixl.move, write=write, summed=True)
        systems[f"{way}_mutex"] = partial(mutex.move, write=write, summed=False)
    return {**systems, "disk": lambda: Moved(disk.read().bytes_per_s, {})}


def _results(
    block_bytes: int, transport: str, found: dict[str, list[Moved]], disturbed: int
) -> list[Result]:
    common: dict[str, object] = {"block_bytes": block_bytes, "transport": transport}
    common["rounds"] = len(found["disk"])
    common["disturbed_rounds"] = disturbed
    results = []
    for name in SYSTEMS[transport]:
        way, _, where = name.rpartition("_")
        way = LIKE[way]
        limits, against = _rates(found[f"{way}_nixl"]), RAW[way]
        if where == "nvme":
            disk = _rates(found["disk"])
            against = "disk" if statistics.median(disk) < statistics.median(limits) else against
            limits = [min(pair) for pair in zip(disk, limits, strict=True)]
        summed = paired_ratio(_rates(found[name]), _rates(found[f"{way}_summed"]))
        mutex = paired_ratio(_rates(found[name]), _rates(found[f"{way}_mutex"]))
        more: dict[str, object] = {
            "first_block_ms": _median([moved.first_s * 1e3 for moved in found[name]], 3),
            "summed_ratio": round(summed.median, 4),
            "mutex_ratio": round(mutex.median, 4),
            "bound_ratio": round(_bound(block_bytes, found, way), 4),
            "cpu_us": _median([moved.cpu_us_total for moved in found[name]], 1),
            "nixl_cpu_us": _median([moved.cpu_us_total for moved in found[f"{way}_nixl"]], 1),
            "main_threads_us": _median([moved.main_us for moved in found[name]], 2),
            "cpu_us_by_process": {
                process: _median([moved.cpu_us[process] for moved in found[name]], 1)
                for process in found[name][0].cpu_us
            },
        }
        rates = _rates(found[name])
        results.append(compared(name, rates, limits, "GB/s", against, {**common, **more}))
    for way, against in RAW.items():
        moved = found[f"{way}_summed"]
        more = {"cpu_us": _median([each.cpu_us_total for each in moved], 1)}
        rates, limits = _rates(moved), _rates(found[f"{way}_nixl"])
        parameters = {**common, **more}
        results.append(compared(f"{way}_summed", rates, limits, "GB/s", against, parameters))
    return results


def _bound(block_bytes: int, found: dict[str, list[Moved]], way: str) -> float:
    """Return what NIXL's rate could be if all processors did nothing but a hand-over's bytes.

    That is the transfer, a copy with its checksum, and the other checksum.
    """
    source = memoryview(np.random.default_rng(1).bytes(SUMMED_BYTES))
    target = memoryview(bytearray(SUMMED_BYTES))
    parts = [slice(at, at + block_bytes) for at in range(0, SUMMED_BYTES, block_bytes)]
    key, taken_s = make_key(bytes(32), 0), list[float]()
    for _ in range(3):
        began_s = time.thread_time()
        for part in parts:
            copied_sum("", key, source[part], target[part])
            block_sum("", key, source[part])
        taken_s.append(time.thread_time() - began_s)
    per_byte_s = min(taken_s) / SUMMED_BYTES
    moving_us = statistics.median(each.cpu_us_total for each in found[f"{way}_mutex"])
    rate = (os.cpu_count() or 1) / (moving_us / 1e6 / PER_BYTES + per_byte_s)
    return rate / statistics.median(_rates(found[f"{way}_nixl"]))


def _rates(moved: Sequence[Moved]) -> list[float]:
    return [each.bytes_per_s for each in moved]


def _median(values: Sequence[float], digits: int) -> float:
    return round(statistics.median(values), digits)
