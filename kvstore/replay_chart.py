"""A picture of what memory of several sizes would hit (extra `charts`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvstore.core.errors import ConfigError
from kvstore.replay import Replayed

_INCHES = (7.0, 4.2)


def draw(path: Path, title: str, outcomes: Sequence[Replayed]) -> None:
    """Draw a line of block hit ratios for each policy, and one of the bound, over sizes of memory.

    Raises ConfigError for a file that cannot be written.
    """
    figure = Figure(_INCHES, layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        of_policy = [each for each in outcomes if each.policy == policy]
        _line(axes, [(o.percent, o.block_hit_ratio) for o in of_policy], policy, "o-")
    best = {o.percent: o.min_block_hit_ratio for o in outcomes}
    _line(axes, list(best.items()), "best possible", "k--")
    axes.set_xscale("log")
    axes.set_xticks(sorted(best), [f"{percent:.3g} %" for percent in sorted(best)])
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set_xlabel("memory, of the trace's unique blocks")
    axes.set_ylabel("blocks hit, of those looked up")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        with rc_context({"svg.hashsalt": "kvstore", "svg.fonttype": "none"}):
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be written: {exc.strerror}") from exc


def _line(axes: Axes, points: list[tuple[float, float]], label: str, style: str) -> None:
    across, up = zip(*sorted(points), strict=True)
    axes.plot(across, up, style, label=label)
