"""`tests.bench index`: the manager while it grows to millions of blocks, beside vLLM's.

For each count of blocks a manager of each kind grows from empty until it is full of prompts of
several kinds (tests.bench.prompts). Then prefixes are looked up, and others are stored, which
evicts the coldest. The time of every single call is taken while it grows, and in the end with the
coldest 50,000 blocks pinned. Memory is measured apart, with tracemalloc: that is slow.

Results:

lookup_full_hit, lookup_half_hit, lookup_miss   one lookup of a 1,000-block prefix. asked=first: of
    blocks not touched for long, which come from main memory; again: the same right after. Cases of
    a half hit: "next turn" (500 stored blocks, 500 new ones), "shared head, new tail" (500 blocks
    that ten stored prompts begin with), "shared head, next turn" (one of three that share 250),
    "edited" (leaves a stored prompt after 250 to 750 blocks, where none did before), "mix" (the
    median over all four, equally often)
store_evict       blocks stored per second, each of which evicts one
worst_call        the slowest call, at 99.99 % and at most, without and with pinned blocks. call
    names it, cpu_ms is its CPU time, most_cpu_ms the most of any call
bytes_per_entry   Python memory per block without its key; peak: at most while it grew
"""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence

import msgspec
from rich.console import Console

from kvstore.core.errors import ConfigError, check
from kvstore.gc_tuning import collect_young_only
from tests.bench.managers import Native, Ours, natives
from tests.bench.prompts import CASES, KINDS, PREFIX, Request, question, unit
from tests.bench.report import SEED, Result, paired_ratio, percentile, progress

BLOCKS = (10_000, 100_000, 1_000_000)
BATCH = 256  # blocks stored at a time where single calls are timed
PINNED = 50_000
LOOKUPS = 300  # of each case, all of different requests
ROUNDS = 20  # of PREFIX blocks stored; the systems take turns
SHARE = 0.9999
_NS_US, _NS_MS, _NS_S = 1e3, 1e6, 1e9

Make = Callable[[int], Ours | Native]
Asked = tuple[str, str | None, str]
"""(what is looked up, how it differs from what is stored, what the processor remembers of it)"""
Tell = Callable[..., None]  # of report.progress: what is measured, blocks done


class Call(msgspec.Struct, frozen=True, order=True):
    """One call that was slow."""

    wall_ns: int = 0
    cpu_ns: int = 0
    what: str = ""


class Calls:
    """The times of single calls."""

    def __init__(self) -> None:
        """Start without any."""
        self.wall_ns = array("q")
        self.slowest = Call()
        self.cpu_ns = 0  # the most that one call kept the processor busy

    def take(self, steps: Iterator[str]) -> None:
        """Run all steps, each of which is one call."""
        wall, cpu = time.perf_counter_ns, time.thread_time_ns
        cpu_ns, wall_ns = cpu(), wall()
        for what in steps:
            wall_ns, cpu_ns = wall() - wall_ns, cpu() - cpu_ns
            self.wall_ns.append(wall_ns)
            self.cpu_ns = max(self.cpu_ns, cpu_ns)
            if wall_ns > self.slowest.wall_ns:
                self.slowest = Call(wall_ns, cpu_ns, what)
            cpu_ns, wall_ns = cpu(), wall()


class Measured(msgspec.Struct):
    """What one system showed at one count of blocks."""

    name: str
    blocks: int
    lookup_us: dict[Asked, float]
    stored: list[float]  # blocks/s of each round
    calls: Calls
    entry_bytes: float
    peak_bytes: float


def run(blocks: Sequence[int] | None = None) -> list[Result]:
    """Measure each count of resident blocks, rounded down to whole requests."""
    counts = [count // PREFIX * PREFIX for count in blocks or BLOCKS]
    if min(counts) < 4 * PREFIX:
        raise ConfigError(f"--blocks: expected at least {4 * PREFIX}, found {min(blocks or ())}")
    peers, told = natives()
    Console(stderr=True).print(f"vLLM, to compare with: {told}")
    kinds: list[tuple[str, Make]] = [(Ours.name, Ours), *peers]
    collect_young_only()
    results: list[Result] = []
    with progress(2 * len(kinds) * sum(counts)) as tell:
        for count in counts:
            sizes = [_sizes(count, name, make, tell) for name, make in kinds]
            results += rows(count, _timed(count, kinds, sizes, tell), told)
    return results


def _sizes(count: int, name: str, make: Make, tell: Tell) -> tuple[float, float]:
    """Return bytes per block once all are there, and at the highest while it grew."""
    wanted = [unit(number) for number in range(count // PREFIX)]  # keys are not counted
    tracemalloc.start()
    try:
        system = make(count)
        for requests in wanted:
            for each in requests:
                system.store_all(each)
            system.settle()
            tell(f"{count:,} blocks: memory of {name}", PREFIX)
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return now / count, peak / count


def _timed(
    count: int, kinds: Sequence[tuple[str, Make]], sizes: Sequence[tuple[float, float]], tell: Tell
) -> list[Measured]:
    """Measure all systems, in turns where they are compared."""
    systems = [make(count) for _, make in kinds]
    collect_young_only()  # a store gets its slots an extent at a time, and not a million at once
    calls = [Calls() for _ in systems]
    whole = count // PREFIX
    for number in range(whole):
        requests = unit(number)
        for system, timed in zip(systems, calls, strict=True):
            for wanted in requests:
                timed.take(system.store(wanted, BATCH))
            tell(f"{count:,} blocks: {system.name}", PREFIX)
    lookups = [_lookups(system, whole) for system in systems]
    rates: list[list[float]] = [[] for _ in systems]
    for number in range(whole, whole + ROUNDS):
        (wanted,) = unit(number, KINDS[0])
        for system, rate in zip(systems, rates, strict=True):
            start_ns = time.perf_counter_ns()
            system.store_all(wanted)
            rate.append(PREFIX * _NS_S / (time.perf_counter_ns() - start_ns))
            system.settle()
    for system, timed in zip(systems, calls, strict=True):
        _pinned(system, whole, timed)
    return [
        Measured(system.name, count, *measured)
        for system, *measured in zip(
            systems, lookups, rates, calls, *zip(*sizes, strict=True), strict=True
        )
    ]


def _lookups(system: Ours | Native, whole: int) -> dict[Asked, float]:
    """Return the median time of a lookup in us, by case and by what the processor remembers.

    first: nobody has touched what is looked at for long, so most of it comes from main memory. The
    question itself has just come in. again: the same lookup right after that. All cases of half
    hits, as often each, are one more: the mix.
    """
    taken: dict[Asked, list[float]] = {}
    rng = random.Random(SEED)
    for case in CASES:
        for asked in [question(case, whole, rng) for _ in range(LOOKUPS)]:
            wanted = asked.received()
            for when in ("first", "again"):
                start_ns = time.perf_counter_ns()
                blocks = system.lookup(wanted)
                took = (time.perf_counter_ns() - start_ns) / _NS_US
                taken.setdefault((case.name, case.case, when), []).append(took)
                if case.case is not None:
                    taken.setdefault((case.name, "mix", when), []).append(took)
                expected = wanted.shared
                check(blocks == expected, f"{system.name} found {blocks} blocks, not {expected}")
    return {asked: statistics.median(times) for asked, times in taken.items()}


def _pinned(system: Ours | Native, whole: int, timed: Calls) -> None:
    """Store, look up and load with the coldest blocks pinned, up to half of all."""
    held = 0
    for number in range(whole):
        if held * PREFIX >= min(PINNED, whole * PREFIX // 2):
            break
        requests = unit(number)
        if all(system.lookup(wanted) == len(wanted.keys) for wanted in requests):
            for wanted in requests:
                timed.take(system.pin(wanted))
            held += 1
    for number in range(whole + ROUNDS, whole + 2 * ROUNDS):
        (wanted,) = unit(number, KINDS[0])
        timed.take(system.store(wanted, BATCH))
        timed.take(_looked_up(system, wanted))
        if system.lookup(wanted) == PREFIX:  # a policy may have let go of some of it
            timed.take(system.load(wanted))
    timed.take(system.unpin())


def _looked_up(system: Ours | Native, wanted: Request) -> Iterator[str]:
    system.lookup(wanted)
    yield "lookup"


def rows(count: int, measured: Sequence[Measured], told: str) -> list[Result]:
    """Compare ours, the first, with each of the others; without others there is no reference."""
    ours, *others = measured
    results = []
    compared: Sequence[Measured | None] = others or [None]
    for other in compared:
        common: dict[str, object] = {"blocks": count, "vllm": told}
        if other is not None:
            common["against"] = other.name
        for mine, theirs in zip(_values(ours), _values(other or ours), strict=True):
            reference = None if other is None else theirs.value
            ratio, more = None, common | mine.parameters
            if other is not None and mine.name == "store_evict":
                pairs = paired_ratio(ours.stored, other.stored)
                ratio = pairs.median
                more |= {"ratio_low": pairs.low, "ratio_high": pairs.high}
            results.append(
                Result(
                    mine.name,
                    mine.value,
                    mine.unit,
                    reference=reference,
                    parameters=more,
                    ratio=ratio,
                )
            )
    return results


def _values(of: Measured) -> Iterator[Result]:
    """One system's numbers, without what they are compared with."""
    for (name, case, when), value in of.lookup_us.items():
        how = {"asked": when} | ({} if case is None else {"case": case})
        yield Result(name, value, "us", parameters=how)
    yield Result("store_evict", statistics.median(of.stored), "blocks/s")
    wall_ns = of.calls.wall_ns
    for statistic, value in (("p99.99", percentile(wall_ns, SHARE)), ("maximum", max(wall_ns))):
        more = {"statistic": statistic, "pinned": min(PINNED, of.blocks // 2)}
        if statistic == "maximum":
            more["call"] = of.calls.slowest.what
            more["cpu_ms"] = round(of.calls.slowest.cpu_ns / _NS_MS, 3)
            more["most_cpu_ms"] = round(of.calls.cpu_ns / _NS_MS, 3)
        yield Result("worst_call", value / _NS_MS, "ms", parameters=more)
    yield Result("bytes_per_entry", of.entry_bytes, "B", parameters={"peak": round(of.peak_bytes)})
