"""The commands about what tiers of other sizes would hit: replay, record, advise."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvstore.arguments import count, price, print_json, seconds
from kvstore.core.errors import ConfigError
from kvstore.core.policy import MakePolicy

if TYPE_CHECKING:
    from kvstore.replay import Replayed

BLOCK_TOKENS = 512  # of Mooncake's traces
BLOCK_TOKENS_MAX = 1 << 20
COMPARED = {"arc": "kvstore.replay_policies:Arc", "s3-fifo": "kvstore.replay_policies:S3Fifo"}
"""Policies of replay only."""
BAR_COLUMNS = 40  # of a hit ratio of 1

Add = Callable[..., argparse.ArgumentParser]


def of_stores(add: Add) -> tuple[argparse.ArgumentParser, ...]:
    """Add the commands that ask a running store."""
    text = "record what engines look up, as a trace for `kvstore replay`"
    record = add("record", text, "kvstore record hour.jsonl.gz --for 1h --max 1GiB")
    record.add_argument("file", type=Path, help="the file to make; an existing file is an error")
    text = 'how long, such as "10min" (default: 1h); Ctrl-C ends it earlier'
    record.add_argument("--for", dest="seconds", type=seconds, default=3600.0, help=text)
    record.add_argument("--max", default="1GiB", help="largest file (default: 1GiB)")
    record.add_argument("--json", action="store_true", help="print one JSON object")
    example = "kvstore advise"
    text = "say what memory or a disk of other sizes would bring"
    advise = add("advise", text, example, f"{example} --cpu-price 4 --nvme-price 0.2")
    for tier in ("cpu", "nvme"):
        text = f"price of a GiB of {tier}, in any currency: also say what a point costs"
        advise.add_argument(f"--{tier}-price", type=price, help=text)
    advise.add_argument("--json", action="store_true", help="print a JSON list instead of lines")
    return record, advise


def add_replay(add: Add) -> None:
    """Add the command that asks no store."""
    text = "say what a trace of requests would have hit"
    replay = add(
        "replay", text, "kvstore replay trace.jsonl.gz --cpu 5% --nvme 20%",
        "kvstore replay trace.jsonl.gz --cpu 64GiB --block-bytes 2MiB --json",
        "kvstore replay trace.jsonl.gz --cpu 1%,5%,20% --policy segmented,lru --chart curve.svg",
    )  # fmt: skip
    replay.add_argument("trace", type=Path, help="requests, a line of JSON each; may be gzipped")
    sizes = 'a part of the unique blocks such as "5%%", blocks, or bytes with --block-bytes'
    several = "several with commas: a row for each"
    replay.add_argument("--cpu", required=True, help=f"memory: {sizes}; {several}")
    replay.add_argument("--nvme", help="disk, in the same way (default: none)")
    text = (
        'blocks that may be written to disk: a part of those looked up such as "16%%", or blocks a'
        " day, or bytes; what is used or stored again is written beyond it (default: no limit)"
    )
    replay.add_argument("--write-budget", help=text)
    text = "which block leaves memory next: segmented (the default), lru, a dotted name, or, to "
    text += "compare with, arc and s3-fifo; "
    text += several
    replay.add_argument("--policy", default="segmented", metavar="NAME", help=text)
    text = "of a block, as `kvstore size` says"
    replay.add_argument("--block-bytes", help=f'bytes {text}, such as "2MiB"')
    tokens = f"tokens of a block of the trace (default: {BLOCK_TOKENS})"
    most = count(1, BLOCK_TOKENS_MAX)
    replay.add_argument("--block-tokens", type=most, default=BLOCK_TOKENS, help=tokens)
    text = "draw hit ratios over sizes of memory into this file, .svg or .png (kvstore[charts])"
    replay.add_argument("--chart", type=Path, help=text)
    replay.add_argument("--json", action="store_true", help="print JSON instead")


def _policy(name: str) -> str | MakePolicy:
    from kvstore.config import read_policy
    from kvstore.store.plugins import find_policy

    try:
        return find_policy(read_policy(COMPARED.get(name, name), {}))
    except ConfigError as exc:
        raise ConfigError(f"--policy: {exc}") from exc


def _chart(path: Path) -> Callable[[str, Sequence[Replayed]], None]:
    """Return what draws a chart. Raises ConfigError where none can be drawn."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--chart: expected a name that ends with .svg or .png, found {path}")
    try:
        from kvstore.replay_chart import draw
    except ImportError as exc:
        raise ConfigError("--chart needs matplotlib: pip install 'kvstore[charts]'") from exc
    return partial(draw, path)


def replay_trace(chosen: argparse.Namespace) -> None:
    """Say what a trace would have hit."""
    from kvstore.gc_tuning import collect_young_only
    from kvstore.printing import share
    from kvstore.replay import blocks_of, budget_of, read_trace, replay
    from kvstore.units import parse_bytes

    block_bytes = None if chosen.block_bytes is None else parse_bytes(chosen.block_bytes)
    if block_bytes == 0:
        raise ConfigError("--block-bytes: expected more than 0, found 0")
    if chosen.write_budget is not None and chosen.nvme is None:
        raise ConfigError("--write-budget needs --nvme, found none")
    draw = None if chosen.chart is None else _chart(chosen.chart)
    policies = {name: _policy(name) for name in chosen.policy.split(",")}
    trace = read_trace(chosen.trace)
    sizes = [blocks_of(size, trace.unique, block_bytes) for size in chosen.cpu.split(",")]
    disk = None if chosen.nvme is None else blocks_of(chosen.nvme, trace.unique, block_bytes)
    collect_young_only()  # a full collection walks every block
    outcomes: list[Replayed] = []
    with share() as tell:
        for name, memory in ((name, size) for name in policies for size in sizes):
            done, text = len(outcomes), f"{name}, {memory:,} of {trace.unique:,} blocks"

            def watch(part: float, done: int = done, text: str = text) -> None:
                tell((done + part) / (len(policies) * len(sizes)), text)

            budget = chosen.write_budget
            if budget is not None:
                budget = budget_of(budget, trace, block_bytes)
            found = replay(
                trace, memory, disk, chosen.block_tokens, watch, policies[name], budget
            )  # fmt: skip
            outcomes.append(msgspec.structs.replace(found, policy=name))
    if draw is not None:
        draw(chosen.trace.name, outcomes)
    if chosen.json:
        print_json(outcomes[0] if len(outcomes) == 1 else outcomes)
    else:
        _show(outcomes)


def _show(outcomes: Sequence[Replayed]) -> None:
    """Print a row for each policy and size."""
    from kvstore.printing import output, table

    tiers = [f"{tier.name}>" for tier in outcomes[0].tiers]
    ratios = "all>", "tokens>", "best>", "written>"
    shown = table("policy", "memory>", "share>", *tiers, *ratios, "")
    for each in outcomes:
        found = [tier.block_hit_ratio for tier in each.tiers]
        found += [each.block_hit_ratio, each.token_hit_ratio, each.min_block_hit_ratio]
        found += [each.written_blocks_per_lookup]
        shown.add_row(
            each.policy,
            f"{each.tiers[0].blocks:,}",
            f"{each.percent:.1f}%",
            *(f"{ratio:.4f}" for ratio in found),
            "█" * round(BAR_COLUMNS * each.block_hit_ratio),
        )
    output().print(shown)
