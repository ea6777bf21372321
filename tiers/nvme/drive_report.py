"""What `kvstore check --disk` found out about a drive, and the settings that follow from it."""

from __future__ import annotations

import statistics

import msgspec
from rich.table import Table

from kvstore.printing import output
from kvstore.units import GIB, MIB

NEARLY = 0.9  # of the best rate: more in flight costs more than it brings
THREADS_MIN = 2  # one slow read holds no other
BETTER = 1.1  # threads are the cheaper mover, so another has to be faster by this
DRIVE_WRITES_PER_DAY = 1.0
DAY_S = 86_400


class Sample(msgspec.Struct, frozen=True):
    """Blocks moved for a moment with so many in flight."""

    mover: str
    kind: str  # read or write
    pattern: str  # sequential or random
    depth: int
    bytes_per_s: float
    cpu_us_per_block: float


class Suggestion(msgspec.Struct, frozen=True):
    """Settings of `[nvme]`, and what they rest on."""

    threads: int
    mover: str
    write_budget_bytes: int
    assumption: str

    @property
    def toml(self) -> str:
        """Return the lines for the configuration file."""
        unit, size = ("GiB", GIB) if self.write_budget_bytes >= GIB else ("MiB", MIB)
        return (
            f"[nvme]\nthreads = {self.threads}\n"
            f'mover = "{self.mover}"\n'
            f'write_budget = "{max(1, self.write_budget_bytes // size)}{unit}"'
        )


class Report(msgspec.Struct, frozen=True):
    """All that was measured; movers: what each that was tried is, or why it cannot be had."""

    path: str
    block_bytes: int
    file_bytes: int
    drive_bytes: int  # size of the file system
    seconds: float
    movers: dict[str, str]
    samples: list[Sample]
    suggestion: Suggestion
    toml: str


def show(report: Report) -> None:
    """Print it as a table, and the settings below."""
    movers = sorted({s.mover for s in report.samples}, reverse=True)  # threads first
    table = Table(box=None, header_style="bold")
    table.add_column("blocks of 2 MiB", no_wrap=True)
    table.add_column("in flight", justify="right")
    for mover in movers:
        table.add_column(f"{mover} GB/s", justify="right")
        table.add_column("CPU us", justify="right")
    found = {(s.kind, s.pattern, s.depth, s.mover): s for s in report.samples}
    for kind, pattern, depth in dict.fromkeys(
        (s.kind, s.pattern, s.depth) for s in _sorted(report.samples)
    ):
        cells = []
        for mover in movers:
            one = found.get((kind, pattern, depth, mover))
            cells += (
                ["-", "-"]
                if one is None
                else [f"{one.bytes_per_s / 1e9:.2f}", f"{one.cpu_us_per_block:.0f}"]
            )
        table.add_row(f"{pattern} {kind}s", str(depth), *cells)
    console = output()
    console.print(
        f"{report.path}, measured for {report.seconds:.0f} s", highlight=False, soft_wrap=True
    )
    console.print(table)
    lines = [f"{name}: {what}" for name, what in report.movers.items()]
    lines += [
        "",
        report.suggestion.toml,
        "",
        f"The budget assumes that {report.suggestion.assumption}.",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def suggest(samples: list[Sample], writers: dict[int, int], drive_bytes: int) -> Suggestion:
    """Choose settings; writers: how many writes go with so many reads."""
    best = {
        mover: max(_rates(samples, mover, "read").values())
        for mover in dict.fromkeys(s.mover for s in samples)
    }
    mover = max(best, key=lambda name: best[name] / (1 if name == "threads" else BETTER))
    reads, writes = _rates(samples, mover, "read"), _rates(samples, mover, "write")
    enough = [
        depth
        for depth in reads
        if depth >= THREADS_MIN
        and reads[depth] >= NEARLY * max(reads.values())
        and writes.get(writers[depth], 0.0) >= NEARLY * max(writes.values())
    ]
    threads = min(enough, default=max(reads))
    endured = int(DRIVE_WRITES_PER_DAY * drive_bytes)
    can = int(max(writes.values()) * DAY_S)
    assumption = (
        f"the drive endures {DRIVE_WRITES_PER_DAY:g} write of its capacity per day, and its"
        f" capacity is its file system's, {drive_bytes / GIB:.0f} GiB: at the"
        f" {max(writes.values()) / 1e9:.2f} GB/s measured, {endured / can:.1%} of the day"
    )
    return Suggestion(threads, mover, max(MIB, min(endured, can)), assumption)


def _sorted(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda s: (s.kind, s.pattern == "random", s.depth))


def _rates(samples: list[Sample], mover: str, kind: str) -> dict[int, float]:
    """Return for each depth the mean of in order and at random: one alone is up to chance."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        if (sample.mover, sample.kind) == (mover, kind):
            found.setdefault(sample.depth, []).append(sample.bytes_per_s)
    return {depth: statistics.fmean(rates) for depth, rates in found.items()}
