"""Charts of docs/benchmarks.md, drawn from the benchmarks' own JSON in docs/benchmarks/.

`python -m tests.bench.charts` draws all. To take new figures in, with the command of that page:

    python -m tests.bench vllm --json | python -m tests.bench.charts vllm "2 vCPU (AMD EPYC)"
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parents[2] / "docs/benchmarks"
WIDTH, LABELS, RIGHT, ROW, TOP, BOTTOM = 720, 250, 110, 24, 46, 52
MIB = 2**20

# A panel of its own colours: readable on a light and on a dark page, whichever shows it.
STYLE = """\
text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #24292f }
.title, .group { font-weight: 600 }
.tick, .axis { fill: #57606a; font-size: 12px }
.panel { fill: #ffffff; stroke: #d0d7de }
.grid { stroke: #e4e8ec }
.mark { stroke: #cf222e; stroke-dasharray: 4 3 }
.ours { fill: #0969da; stroke: #0969da }
.other { fill: #8c959f; stroke: #8c959f }
.interval { stroke-width: 1.5; fill: none }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.tick, .axis { fill: #9ba5b0 }
.panel { fill: #161b22; stroke: #30363d }
.grid { stroke: #2b323b }
.mark { stroke: #ff7b72 }
.ours { fill: #58a6ff; stroke: #58a6ff }
}"""


class Row(NamedTuple):
    """One figure: the result that has these values, and what it is called."""

    group: str
    label: str
    where: dict[str, Any]
    ours: bool = True


class Chart(NamedTuple):
    """One question. field: of the results. log: dots on a logarithmic axis instead of bars."""

    name: str
    title: str
    axis: str
    rows: tuple[Row, ...]
    field: str = "value"
    log: bool = False
    mark: float | None = None


WAYS = {"pull": "pulled", "push": "pushed", "direct": "direct, pulled"}
INTO = {"direct_push": "direct, pushed"}
SIZES = {MIB // 2: "0.5 MiB", MIB: "1 MiB", 2 * MIB: "2 MiB", 4 * MIB: "4 MiB"}
COUNTS = {10_000: "10,000 blocks", 100_000: "100,000 blocks", 1_000_000: "1,000,000 blocks"}
HIT = "lookup_full_hit"
IO = ("read", "write")
HELD = ("1,000 blocks, all here", "half here, edited", "nothing here", "stored and evicted")
MOVED = ("2 MiB", "64 KiB")
MOVES = (
    *("pulled from memory", "pushed from memory", "direct, from memory"),
    *("pulled from disk", "pushed from disk", "direct, from disk"),
)
PEERS = {"none": "no connector", "native": "vLLM's own offloading", "ours": "kvstore"}
USERS = {
    "room for all": {
        "none": PEERS["none"],
        "limit": "own memory for all",
        "native": PEERS["native"],
        "ours": PEERS["ours"],
        "ours with a disk": "kvstore, a disk",
    },
    "1.8 times too much": {"native, pressed": PEERS["native"], "ours, pressed": PEERS["ours"]},
}

CHARTS = (
    Chart(
        "vllm",
        "Time to first token of 8,190 tokens",
        "milliseconds, logarithmic",
        tuple(
            Row(group, PEERS[system], {"name": name, "system": system}, ours=system == "ours")
            for name, group, systems in (
                ("ttft_cold", "computed", ("none", "native", "ours")),
                ("ttft_gpu_hit", "engine's own cache", ("none", "ours")),
                ("ttft_cpu_hit", "CPU memory", ("native", "ours")),
                ("ttft_nvme_restart", "disk, after a restart", ("ours",)),
            )
            for system in systems
        ),
        log=True,
    ),
    Chart(
        "load",
        "35 users of an engine whose memory holds a seventh: mean time to first token",
        "milliseconds",
        tuple(
            Row(
                group,
                label,
                {"name": "ttft_mean", "system": system},
                ours=label.startswith("kvstore"),
            )
            for group, systems in USERS.items()
            for system, label in systems.items()
        ),
    ),
    Chart(
        "slow",
        "20 prompts whose blocks are in a slow place, against no connector",
        "time / no connector's, with 90 % interval; dashed: the target, 1.05",
        tuple(
            Row(f"{place}, {ms} ms a block", label, values, ours=not always)
            for place in ("tier", "peer")
            for ms in (2, 25)
            for always, label in ((False, "compares"), (True, "loads in any case"))
            for values in ({"place": place, "block_ms": ms, "always_load": always},)
        ),
        field="ratio",
        mark=1.05,
        log=True,
    ),
    Chart(
        "attach",
        "CPU time of a scheduler step, 256 requests in flight, 99th percentile",
        "microseconds",
        tuple(
            Row("prompts of", f"{tokens:,} tokens", {"prompt_tokens": tokens})
            for tokens in (1024, 8192, 65536)
        ),
    ),
    Chart(
        "index",
        "Lookup of 1,000 blocks that are all here, by blocks in memory",
        "microseconds, logarithmic",
        tuple(
            Row(system, label, {"name": HIT, "asked": "first", "blocks": count}, ours=ours)
            for system, ours in (("kvstore", True), ("vLLM's offloading manager", False))
            for count, label in COUNTS.items()
        ),
        log=True,
    ),
    Chart(
        "nvme",
        "Disk rate with checksums, as a share of fio's",
        "rate / fio's rate, with 90 % interval; dashed: the target, 0.9",
        tuple(
            Row(kind, label, {"name": kind, "block_bytes": size, "checksum": True})
            for kind in IO
            for size, label in SIZES.items()
        ),
        field="ratio",
        mark=0.9,
    ),
    Chart(
        "nvme-index",
        "Time from the start of a store's process",
        "seconds, logarithmic",
        tuple(
            Row(group, f"{count:,} blocks", {"name": name, "blocks": count})
            for name, group in (
                ("index_first_hit", "first hit from disk"),
                ("index_all_known", "all blocks known"),
            )
            for count in (10_000, 100_000, 1_000_000, 10_000_000)
        ),
        log=True,
    ),
    Chart(
        "export",
        "Hand-over between two stores, blocks of 2 MiB",
        "GB/s",
        tuple(
            Row(
                f"{place}, {transport.replace('tcp', 'TCP')}",
                label,
                {"block_bytes": 2 * MIB, "transport": transport, "name": f"{way}_{where}"},
            )
            for where, place in (("cpu", "memory"), ("nvme", "disk"))
            for transport, ways in (("shared memory", WAYS), ("tcp", WAYS | INTO))
            for way, label in ways.items()
        ),
    ),
    Chart(
        "handover",
        "Time to first token of 8,190 tokens computed by another engine",
        "milliseconds, logarithmic",
        (
            Row("computed here", "no hand-over", {"name": "ttft_cold", "system": "pull"}),
            *(
                Row("handed over", label, {"name": "ttft_handed_over", "system": way})
                for way, label in (WAYS | INTO).items()
            ),
            Row(
                "handed over",
                "vLLM's NixlConnector",
                {"name": "ttft_handed_over", "system": "NixlConnector"},
                ours=False,
            ),
        ),
        log=True,
    ),
    Chart(
        "beside",
        "Time that this tree takes, of an older one's",
        "time / the older tree's, with 90 % interval; dashed: equal",
        tuple(
            Row(of, label, {"of": of, "name": label})
            for of, labels in (
                ("attach", ("lookup of 256 keys", "scheduler step, p99")),
                ("index", HELD),
                ("nvme", tuple(f"{way}, {size}" for way in IO for size in SIZES.values())),
                ("vllm", ("computed", "engine's own cache", "CPU memory", "disk, after a restart")),
                ("export", tuple(f"{size}, {way}" for size in MOVED for way in MOVES)),
                ("handover", ("pulled", "pushed", "direct, pulled", "direct, pushed, TCP")),
            )
            for label in labels
        ),
        field="ratio",
        mark=1.0,
    ),
)


def shown(value: float) -> str:
    """Write a figure as the page does, with three digits at most below a thousand."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def figures(chart: Chart) -> list[tuple[Row, dict[str, Any], float]]:
    """Find the result of each row. Raises ValueError if there is not exactly one."""
    results = json.loads((FOLDER / f"{chart.name}.json").read_text(encoding="utf-8"))["results"]
    found = []
    for row in chart.rows:
        fits = [one for one in results if row.where.items() <= one.items()]
        if len(fits) != 1:
            raise ValueError(f"{chart.name}: {len(fits)} results with {row.where}, expected 1")
        peer = not row.ours and "asked" in row.where  # its figure is the reference of ours
        found.append((row, fits[0], float(fits[0]["reference" if peer else chart.field])))
    return found


class _Axis:
    """From values to places, and where the ticks are: powers of ten, or four to eight steps."""

    def __init__(self, values: list[float], *, log: bool) -> None:
        self._place = math.log10 if log else float
        if log:
            powers = range(
                math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1
            )
            self.ticks = [10.0**power for power in powers]
        else:
            high = max(values)
            power = 10.0 ** math.floor(math.log10(high))
            step = next(s for s in (power * part for part in (0.2, 0.5, 1, 2)) if high / s <= 8)
            self.ticks = [step * number for number in range(math.ceil(high / step) + 1)]

    def x(self, value: float) -> float:
        """Return the place of a value."""
        low, high, at = (self._place(v) for v in (self.ticks[0], self.ticks[-1], value))
        return round(LABELS + (at - low) / (high - low) * (WIDTH - LABELS - RIGHT), 1)


def draw(chart: Chart) -> str:
    """Return a chart as SVG."""
    found = figures(chart)
    highest = [one["ratio_high"] for _, one, _ in found if chart.field == "ratio"]
    axis = _Axis([value for *_, value in found] + highest, log=chart.log)
    groups = [row.group for row, *_ in found]
    headings = sum(one != before for one, before in zip(groups, ["", *groups], strict=False))
    bottom = TOP + ROW * (len(found) + headings)
    height = bottom + BOTTOM
    marks = [_line("grid", axis.x(tick), TOP, bottom) for tick in axis.ticks]
    marks += [
        _text("tick", axis.x(tick), bottom + 18, shown(tick), "middle") for tick in axis.ticks
    ]
    if chart.mark is not None:
        marks.append(_line("mark", axis.x(chart.mark), TOP, bottom))
    middle = (LABELS + WIDTH - RIGHT) / 2
    marks.append(_text("axis", middle, bottom + 38, chart.axis, "middle"))
    y, group = float(TOP), ""
    for row, result, value in found:
        if row.group != group:
            group = row.group
            marks.append(_text("group", 16, y + 17, group))
            y += ROW
        marks.append(_text("", LABELS - 10, y + 17, row.label, "end"))
        marks += _figure(chart, axis, row, result, value, y + ROW / 2)
        y += ROW
    space = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
    inside = f'x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}"'
    lines = [
        f'<svg {space} width="{WIDTH}" height="{height}" role="img">',
        f"<title>{escape(chart.title)}</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="panel" {inside} rx="6"/>',
        _text("title", 16, 28, chart.title),
        *marks,
        "</svg>\n",
    ]
    return "\n".join(lines)


def _figure(
    chart: Chart, axis: _Axis, row: Row, result: dict[str, Any], value: float, y: float
) -> list[str]:
    style, x = "ours" if row.ours else "other", axis.x(value)
    end, marks = x, []
    if chart.field == "ratio":
        low, end = axis.x(result["ratio_low"]), axis.x(result["ratio_high"])
        marks.append(f'<path class="{style} interval" d="M{low} {y}H{end}"/>')
    if chart.log or chart.field == "ratio":
        marks.append(f'<circle class="{style}" cx="{x}" cy="{y}" r="5"/>')
    else:
        left = axis.x(0)
        size = f'width="{round(x - left, 1)}" height="14"'
        marks.append(f'<rect class="{style}" x="{left}" y="{y - 7}" {size}/>')
    marks.append(_text("", end + 10, y + 5, shown(value)))
    return marks


def _line(style: str, x: float, top: float, bottom: float) -> str:
    return f'<path class="{style}" d="M{x} {top}V{bottom}"/>'


def _text(style: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def take(name: str, machine: str, output: str) -> str:
    """Return the file of a benchmark's JSON output, with command, machine and date."""
    found = json.loads(output)
    head = {
        "bench": found["bench"],
        "command": f"python -m tests.bench {name}",
        "machine": machine,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    rows = ",\n    ".join(json.dumps(result) for result in found["results"])
    return f'{json.dumps(head, indent=2)[:-2]},\n  "results": [\n    {rows}\n  ]\n}}\n'


def main(arguments: list[str]) -> None:
    """Take figures in, if any are given, and draw all charts."""
    if arguments:
        name, machine = arguments
        text = take(name, machine, sys.stdin.read())
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
    for chart in CHARTS:
        (FOLDER / f"{chart.name}.svg").write_text(draw(chart), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
