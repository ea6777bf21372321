"""What `kvstore check --disk` found out about a drive, and the settings that follow from it."""

from __future__ import annotations

import statistics

import msgspec
from rich.table import Table

from kvstore.printing import output
from kvstore.units import GIB, MIB

NEARLY = 0.9  # of the best rate: more in flight costs more than it brings
THREADS_MIN = 2  # one slow read holds no other
DRIVE_WRITES_PER_DAY = 1.0
DAY_S = 86_400


class Sample(msgspec.Struct, frozen=True):
    """Blocks moved for a moment with so many in flight."""

    kind: str  # read or write
    pattern: str  # sequential or random
    depth: int
    bytes_per_s: float
    cpu_us_per_block: float


class Suggestion(msgspec.Struct, frozen=True):
    """Settings of `[nvme]`, and what they rest on."""

    threads: int
    write_budget_bytes: int
    assumption: str

    @property
    def toml(self) -> str:
        """Return the lines for the configuration file."""
        unit, size = ("GiB", GIB) if self.write_budget_bytes >= GIB else ("MiB", MIB)
        return (
            f"[nvme]\nthreads = {self.threads}\n"
            f'write_budget = "{max(1, self.write_budget_bytes // size)}{unit}"'
        )


class Report(msgspec.Struct, frozen=True):
    """All that was measured."""

    path: str
    block_bytes: int
    file_bytes: int
    drive_bytes: int  # size of the file system
    seconds: float
    samples: list[Sample]
    suggestion: Suggestion
    toml: str


def show(report: Report) -> None:
    """Print it as a table, and the settings below."""
    table = Table(box=None, header_style="bold")
    table.add_column("blocks of 2 MiB", no_wrap=True)
    table.add_column("in flight", justify="right")
    table.add_column("GB/s", justify="right")
    table.add_column("CPU us", justify="right")
    for one in sorted(report.samples, key=lambda s: (s.kind, s.pattern == "random", s.depth)):
        rate, cpu = f"{one.bytes_per_s / 1e9:.2f}", f"{one.cpu_us_per_block:.0f}"
        table.add_row(f"{one.pattern} {one.kind}s", str(one.depth), rate, cpu)
    console = output()
    console.print(
        f"{report.path}, measured for {report.seconds:.0f} s", highlight=False, soft_wrap=True
    )
    console.print(table)
    lines = [
        "",
        report.suggestion.toml,
        "",
        f"The budget assumes that {report.suggestion.assumption}.",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def suggest(samples: list[Sample], writers: dict[int, int], drive_bytes: int) -> Suggestion:
    """Choose settings; writers: how many writes go with so many reads."""
    reads, writes = _rates(samples, "read"), _rates(samples, "write")
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
    return Suggestion(threads, max(MIB, min(endured, can)), assumption)


def _rates(samples: list[Sample], kind: str) -> dict[int, float]:
    """Return for each depth the mean of in order and at random: one alone is up to chance."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        if sample.kind == kind:
            found.setdefault(sample.depth, []).append(sample.bytes_per_s)
    return {depth: statistics.fmean(rates) for depth, rates in found.items()}
