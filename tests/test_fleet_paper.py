"""The fleet on paper: its arithmetic, what it refuses, and the page that shows it."""

from __future__ import annotations

import math

import pytest

from kvstore.core.errors import ConfigError
from kvstore.handover.links import LINKS_MAX
from kvstore.handover.transfers import AGENTS_MAX
from tests.bench import fleet
from tests.bench.fleet import Inputs, bends_at, inputs, rows, table
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


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (["own=2"], "own: expected 0 to 1, found 2"),
        (["requests=0"], "requests: expected a number above 0, found 0"),
        (["answer=-1"], "answer: expected a number from 0, found -1"),
        (["prompt=nan"], "prompt: expected a number above 0, found nan"),
        (["own=0.8", "bucket=0.3"], "own and bucket: expected up to 1 together"),
        (["prefill=1"], "prefill: expected below 1"),
        (["prompt=x"], "--set prompt: expected a number, found 'x'"),
        (["speed=1"], "--set speed: expected requests, "),
    ],
)
def test_what_cannot_be_is_refused(settings: list[str], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        inputs(settings)


def test_the_command_ends_with_2_for_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert fleet.main(["--nodes", "0"]) == 2
    assert "--nodes: expected numbers from 1 to" in capsys.readouterr().err
    assert fleet.main(["--nodes", "7", "--set", "group=4"]) == 0
    assert "| 7 nodes |" in capsys.readouterr().out
