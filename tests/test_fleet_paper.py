"""The fleet on paper: its arithmetic, what it refuses, and the page that shows it."""

from __future__ import annotations

import math

from kvstore.handover.links import LINKS_MAX
from kvstore.handover.transfers import AGENTS_MAX
from tests.bench import fleet
from tests.bench.fleet import Inputs, bends_at, rows, table
from tests.harness.pages import text


def of(given: Inputs, name: str, nodes: int) -> float:
    return next(row for row in rows(given) if row.name == name).of(nodes)


def test_the_page_shows_what_the_command_prints() -> None:
    assert f"\n{table(Inputs(), fleet.NODES)}\n" in text("docs/operate/fleet.md")


def test_each_row_follows_from_the_inputs() -> None:
    given = Inputs(
        requests=2,
        prompt=1024,
        answer=100,
        own=0.5,
        bucket=0.25,
        engine_block=16,
        asked=1,
        object_tokens=256,
        admitted=0.5,
        token_bytes=1000,
        handed=1,
        prefill=0.25,
    )
    new = 2 * (256 + 100)
    assert of(given, "events", 10) == 10 * new / 16 * 3 * 2
    puts = new * 0.5 / 256
    assert of(given, "bucket, PUT", 10) == 10 * puts
    asked = 4 + 1  # a HEAD of each of the 4 objects, a GET of the one that is there
    assert of(given, "bucket, HEAD and GET", 10) == 10 * (2 * asked + puts), "a HEAD before a PUT"
    assert of(given, "bucket, read", 1) == 2 * 256_000
    assert of(given, "bucket, written by a node", 9) == new * 0.5 * 1000 * 86_400
    assert of(given, "hand-over, sent by a prefill node", 9) == 2 / 0.25 * 1_024_000
    assert of(given, "hand-over, peers of a decode node", 100) == 25
    assert of(given, "hand-over, new connections", 4 * LINKS_MAX) == 0
    assert math.isclose(of(given, "hand-over, new connections", 8 * LINKS_MAX), 2 / 0.75 / 2)


def test_it_bends_where_a_limit_is_passed_and_not_where_a_group_keeps_it() -> None:
    found = {row.name: bends_at(row) for row in rows(Inputs())}
    assert found["hand-over, peers of a decode node"] == 2 * LINKS_MAX + 1
    assert found["hand-over, exporters it has met"] == 2 * AGENTS_MAX + 1
    assert found["hand-over, sent by a prefill node"] is None
    nodes = found["events"]
    assert nodes is not None
    assert of(Inputs(), "events", nodes) > Inputs().router_ops >= of(Inputs(), "events", nodes - 1)
    grouped = {row.name: bends_at(row) for row in rows(Inputs(group=100))}
    assert grouped["hand-over, peers of a decode node"] is None
    assert grouped["hand-over, exporters it has met"] is None
