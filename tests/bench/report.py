"""What benchmarks report: results with units and references, as a table or as one JSON object."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.progress import Progress

from tests.bench.steal import DISTURBED, undisturbed

SEED = 20
RESAMPLES = 4000
CONFIDENCE = 0.9
SCALES = {"ms": 1e3, "GB/s": 1e-9, "tokens/s": 1.0}
WHOLE_FROM = 10_000  # with four digits these would be shown with an exponent
T = TypeVar("T")
IN_OTHER_COLUMNS = ("against", "difference_ms", "ratio_low", "ratio_high")
IN_JSON_ONLY = (
    *("value_low", "value_high", "reference_low", "reference_high"),
    "cpu_us_by_process",
    "values",
)


class Number(msgspec.Struct, frozen=True):
    """What is measured."""

    name: str
    value: float
    unit: str


class Result(Number, frozen=True, kw_only=True):
    """One number and what it is compared with.

    reference: the peer's value or the physical limit, measured in the same run; None for none.
    parameters: what else decides the number, and the interval of the ratio. ratio: value against
    reference; given where there are pairs.
    """

    reference: float | None = None
    parameters: dict[str, Any] = {}
    ratio: float | None = None

    def __post_init__(self) -> None:
        """Compare the two values where there are no pairs."""
        if self.ratio is None and self.reference is not None:
            msgspec.structs.force_setattr(self, "ratio", self.value / self.reference)

    @property
    def better(self) -> str:
        """Say which values are good: high rates, and low times and sizes."""
        return "higher" if self.unit.endswith(("/s", "per s")) else "lower"


class Ratio(msgspec.Struct, frozen=True):
    """A paired ratio: median, and the interval that holds it with 90 % confidence."""

    median: float
    low: float
    high: float


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def paired_ratio(values: Sequence[float], references: Sequence[float]) -> Ratio:
    """Median of value over reference within each pair, with its bootstrap interval."""
    ratios = [value / other for value, other in zip(values, references, strict=True)]
    rng = random.Random(SEED)
    medians = [statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)]
    tail = (1 - CONFIDENCE) / 2
    return Ratio(
        statistics.median(ratios), percentile(medians, tail), percentile(medians, 1 - tail)
    )


def compared(
    name: str,
    values: Sequence[float],
    others: Sequence[float],
    unit: str,
    against: str,
    parameters: Mapping[str, object],
) -> Result:
    """Make a result of rounds that were measured in pairs, in seconds or anything per second."""
    ratio = paired_ratio(values, others)
    interval = {"ratio_low": round(ratio.low, 4), "ratio_high": round(ratio.high, 4)}
    alone = measured(name, values, unit, {**parameters, "against": against, **interval})
    reference = statistics.median(others) * SCALES[unit]
    return msgspec.structs.replace(alone, reference=reference, ratio=ratio.median)


def measured(
    name: str, values: Sequence[float], unit: str, parameters: Mapping[str, object]
) -> Result:
    """Make a result of rounds, in seconds or anything per second; JSON has each of them."""
    rounds = [value * SCALES[unit] for value in values]
    return Result(
        name, statistics.median(rounds), unit, parameters={**parameters, "values": rounds}
    )


@contextmanager
def progress(total: int) -> Iterator[Callable[..., None]]:
    """Show how far a benchmark is; yield tell(what is under way, how much more is done)."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def tell(what: str | None = None, done: int = 1) -> None:
            bar.update(task, description=what, advance=done)

        yield tell


def in_turn(names: Sequence[T], number: int) -> list[T]:
    """Order what is measured in a round of this number: each is the first in turn."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def alternate(
    systems: Mapping[str, Callable[[], T]], rounds: int, tell: Callable[..., None]
) -> tuple[dict[str, list[T]], int]:
    """Measure all systems in each round; return what they showed, and the disturbed rounds.

    The first round is not counted, and one in which something was stolen is measured again.
    """
    found: dict[str, list[T]] = {name: [] for name in systems}
    disturbed = 0
    for number in range(rounds + 1):
        in_order = [(name, systems[name]) for name in in_turn(list(systems), number)]
        measured, again = undisturbed(partial(_each, in_order))
        disturbed += again
        for name, one in measured if number else ():
            found[name].append(one)
        tell()
    return found, disturbed


def _each(systems: Sequence[tuple[str, Callable[[], T]]]) -> list[tuple[str, T]]:
    return [(name, measure()) for name, measure in systems]


def as_json(bench: str, results: Sequence[Result], stolen: float = 0.0) -> str:
    """Return the one object that later benchmarks have too; parameters stand beside the rest.

    stolen: share of the processors' time that a hypervisor took away meanwhile.
    """
    rows = []
    for result in results:
        row = msgspec.to_builtins(result)
        rows.append({**row.pop("parameters"), **row, "better": result.better})
    whole = {"bench": bench, "stolen": round(stolen, 4), "results": rows}
    return msgspec.json.encode(whole).decode()


def show(bench: str, results: Sequence[Result], *, stolen: float = 0.0, json: bool) -> None:
    """Print the results; stolen: see as_json."""
    if json:
        print(as_json(bench, results, stolen))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from kvstore.printing import output

    common = _common([result.parameters for result in results])
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("of")
    for heading in ("value", "reference", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        own = [
            str(value) if key == "system" else f"{key}={value}"
            for key, value in result.parameters.items()
            if key not in {*common, *IN_OTHER_COLUMNS, *IN_JSON_ONLY}
        ]
        reference = "-"
        if result.reference is not None:
            against = result.parameters.get("against", "")
            reference = f"{against} {_number(result.reference)}".strip()
        table.add_row(
            result.name,
            " ".join(own),
            f"{_number(result.value)} {result.unit}".strip(),
            reference,
            "-" if result.ratio is None else _number(result.ratio) + _interval(result.parameters),
        )
    console = output()
    everywhere = ", ".join(f"{key}={value}" for key, value in common.items())
    console.print(f"python -m tests.bench {bench}" + (f": {everywhere}" if everywhere else ""))
    console.print(table)
    if stolen >= DISTURBED:
        console.print(
            f"a hypervisor gave {stolen:.0%} of the processors' time to other machines meanwhile:"
            " compare ratios only, or measure again when it does not"
        )


def _common(parameters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what is equal in all results that have it, if more than one has."""
    seen: dict[str, list[Any]] = {}
    for one in parameters:
        for key, value in one.items():
            seen.setdefault(key, []).append(value)
    return {
        key: values[0]
        for key, values in seen.items()
        if len(values) > 1 and all(value == values[0] for value in values)
    }


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= WHOLE_FROM else f"{value:.4g}"


def _interval(parameters: dict[str, Any]) -> str:
    if "ratio_low" not in parameters:
        return ""
    return f" ({_number(parameters['ratio_low'])} to {_number(parameters['ratio_high'])})"
