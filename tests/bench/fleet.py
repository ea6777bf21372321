"""A fleet on paper: what routers, a shared bucket, networks and stores have to do for N nodes.

    python -m tests.bench.fleet
    python -m tests.bench.fleet --nodes 100,1000 --set requests=8 --set engine_block=64

Nothing is measured here. Each input is named in Inputs and can be set; those that are limits say
whose they are. What a row has to do is compared with its limit: "bends at" is the number of nodes
from which on it does not keep up, all nodes being alike.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator

import msgspec

from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.handover.links import LINKS_MAX
from kvstore.handover.transfers import AGENTS_MAX
from tiers.object.search import PARALLEL

NODES = (100, 1_000, 10_000)
NODES_MAX = 10_000_000
TIERS = 3  # GPU, CPU, disk: a block enters each of them once, and leaves it once
KEEP_S = 10.0  # between two heartbeats of a request that waits
SHARES = ("own", "handed", "prefill", "asked", "bucket", "admitted")
MAY_BE_0 = ("own", "handed", "asked", "bucket", "admitted", "group", "wait_s", "answer", "hello_us")


class Inputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node: an engine with its store. Shares are of 1.

    requests: a second. prompt, answer: tokens of each. token_bytes: of KV, 8 billion weights in
        16 bits. own: share of a prompt that the node's own tiers have.
    engine_block: tokens of the engine's block, which events name.
    handed: share of requests that another node goes on with; prefill: share of nodes that compute
        them; group: prefill nodes that one decode node is sent requests of, 0 for all; wait_s:
        that a request waits before its next engine has its blocks.
    asked: share of requests for which the bucket is asked, bucket: share of a prompt that it has;
        object_tokens: of an object; admitted: share of new tokens that are put there.
    prefixes: into which the bucket's names are divided.

    Limits. router_ops: blocks a second that one index takes, 10 million: what Dynamo says of its
    concurrent one (100 million of the newest). heads, puts: a second of one prefix, of Amazon S3.
    network: bytes a second of a node's card, 100 Gbit/s. block_us: CPU time of both stores' loops
    for a block of 2 MiB that is handed over, and hello_us: for a new connection (assumed).
    """

    requests: float = 4.0
    prompt: float = 8_000.0
    answer: float = 500.0
    token_bytes: float = 131_072.0
    own: float = 0.5
    engine_block: float = 16.0
    handed: float = 0.5
    prefill: float = 0.5
    group: float = 0.0
    wait_s: float = 2.0
    asked: float = 0.5
    bucket: float = 0.1
    object_tokens: float = 256.0
    admitted: float = 0.1
    prefixes: float = 1.0
    router_ops: float = 10_000_000.0
    heads: float = 5_500.0
    puts: float = 3_500.0
    network: float = 12.5e9
    block_us: float = 210.0
    hello_us: float = 2_000.0

    def __post_init__(self) -> None:
        """Raise ConfigError for what cannot be."""
        for name in SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: expected 0 to 1, found {getattr(self, name):g}")
        if self.prefill == 1:
            raise ConfigError("prefill: expected below 1, found 1: no node would be left to decode")
        if self.own + self.bucket > 1:
            raise ConfigError(
                f"own and bucket: expected up to 1 together, found {self.own:g} and {self.bucket:g}"
            )
        for name in self.__struct_fields__:
            found, may_be_0 = getattr(self, name), name in MAY_BE_0
            if not math.isfinite(found) or found < 0 or (found == 0 and not may_be_0):
                least = "from 0" if may_be_0 else "above 0"
                raise ConfigError(f"{name}: expected a number {least}, found {found:g}")


class Row(msgspec.Struct, frozen=True):
    """Something that there is to do: so much of it with N nodes, and its limit, if it has one.

    helps: the setting that does.
    """

    name: str
    unit: str
    of: Callable[[int], float]
    limit: float | None
    helps: str


def rows(given: Inputs) -> Iterator[Row]:
    """Go through what a fleet of such nodes has to do."""
    yield from _events(given)
    yield from _bucket(given)
    yield from _hand_overs(given)


def new_tokens(given: Inputs) -> float:
    """Return the tokens a second that a node computes, and stores."""
    return given.requests * (given.prompt * (1 - given.own - given.bucket) + given.answer)


def _events(given: Inputs) -> Iterator[Row]:
    blocks = new_tokens(given) / given.engine_block
    entries = blocks * TIERS * 2
    helps = "larger engine blocks; a router for each pool"
    yield Row("events", "blocks/s at the router", lambda n: n * entries, given.router_ops, helps)


def _bucket(given: Inputs) -> Iterator[Row]:
    objects = max(1.0, given.prompt / given.object_tokens)
    rounds = math.ceil(math.log(objects + 1, PARALLEL + 1))
    gets = given.requests * given.prompt * given.bucket / given.object_tokens
    puts = new_tokens(given) * given.admitted / given.object_tokens
    heads = given.requests * given.asked * min(objects, PARALLEL * rounds) + puts
    size = given.object_tokens * given.token_bytes
    reads, writes = given.heads * given.prefixes, given.puts * given.prefixes
    yield Row("bucket, HEAD and GET", "1/s", lambda n: n * (heads + gets), reads, "more prefixes")
    yield Row("bucket, PUT", "1/s", lambda n: n * puts, writes, "more prefixes; a smaller budget")
    yield Row("bucket, read", "B/s", lambda n: n * gets * size, None, "")
    yield Row("bucket, written", "B/day", lambda n: n * puts * size * 86_400, None, "a budget")
    yield Row(
        "bucket, written by a node", "B/day", lambda _: puts * size * 86_400, None, "a budget"
    )


def _hand_overs(given: Inputs) -> Iterator[Row]:
    """Go through hand-overs, of one node each: there are prefill and decode nodes."""
    asked = given.requests * given.handed / (1 - given.prefill)
    served = given.requests * given.handed / given.prefill
    moved = given.prompt * given.token_bytes
    block_s = given.block_us / 1e6 / (2 << 20)

    def peers(nodes: int) -> float:
        most = given.group or nodes * given.prefill
        return min(most, nodes * given.prefill)

    def hellos(nodes: int) -> float:
        return asked * max(0.0, 1 - LINKS_MAX / max(1.0, peers(nodes)))

    group = "a router that has each decode node ask a group of prefill nodes"
    yield Row(
        "hand-over, sent by a prefill node", "B/s", lambda _: served * moved, given.network, ""
    )
    yield Row(
        "hand-over, CPU of its store", "of a core", lambda _: served * moved * block_s / 2, 1, ""
    )
    yield Row("hand-over, peers of a decode node", "", peers, LINKS_MAX, group)
    yield Row("hand-over, exporters it has met", "", peers, AGENTS_MAX, group)
    yield Row("hand-over, new connections", "1/s of a node", hellos, None, group)
    hello_s = given.hello_us / 1e6
    yield Row("hand-over, CPU for these", "of a core", lambda n: hellos(n) * hello_s, 1, group)
    waiting = asked * given.wait_s
    yield Row("hand-over, heartbeats", "1/s of a node", lambda _: waiting / KEEP_S, None, "")


def amount(value: float) -> str:
    """Return a number with two or three digits, and a letter for thousands."""
    for letter, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.2g}" if value < 10 else f"{value:.3g}"


def bends_at(row: Row) -> int | None:
    """Return the least number of nodes with which a row is over its limit; None: there is none."""
    if row.limit is None or row.of(NODES_MAX) <= row.limit:
        return None
    low, high = 1, NODES_MAX
    while low < high:
        middle = (low + high) // 2
        if row.of(middle) > row.limit:
            high = middle
        else:
            low = middle + 1
    return low


def table(given: Inputs, nodes: tuple[int, ...]) -> str:
    """Return the rows in Markdown."""
    counts = " | ".join(f"{count:,} nodes" for count in nodes)
    lines = [
        f"| | {counts} | limit | bends at | what helps |",
        f"|---|{'---:|' * (len(nodes) + 2)}---|",
    ]
    for row in rows(given):
        found = " | ".join(f"{amount(row.of(count))}" for count in nodes)
        limit, at = "" if row.limit is None else amount(row.limit), bends_at(row)
        where = "" if at is None else f"{at:,}"
        name = f"{row.name}, {row.unit}" if row.unit else row.name
        helps = row.helps if at is not None or row.limit is None else ""
        lines.append(f"| {name} | {found} | {limit} | {where} | {helps} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tests.bench.fleet", description="A fleet on paper."
    )
    made.add_argument("--nodes", default=",".join(map(str, NODES)), help="such as 100,1000")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help=f"an input: {', '.join(Inputs.__struct_fields__)}",
    )
    return made


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 2 for wrong arguments."""
    chosen = parser().parse_args(arguments)
    try:
        sys.stdout.write(f"{table(inputs(chosen.set), _counts(chosen.nodes))}\n")
    except KVStoreError as exc:
        sys.stderr.write(f"tests.bench.fleet: error: {exc}\n")
        return 2
    return 0


def inputs(settings: list[str]) -> Inputs:
    """Return inputs of which some are set. Raises ConfigError."""
    found: dict[str, float] = {}
    for setting in settings:
        name, _, number = setting.partition("=")
        if name not in Inputs.__struct_fields__:
            raise ConfigError(f"--set {name}: expected {', '.join(Inputs.__struct_fields__)}")
        try:
            found[name] = float(number)
        except ValueError:
            raise ConfigError(f"--set {name}: expected a number, found {number!r}") from None
    return Inputs(**found)


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and 0 < int(part) <= NODES_MAX for part in parts):
        raise ConfigError(f"--nodes: expected numbers from 1 to {NODES_MAX}, found {text!r}")
    return tuple(map(int, parts))


if __name__ == "__main__":
    sys.exit(main())
