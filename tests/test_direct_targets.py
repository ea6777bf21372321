"""What a store says between its engines' workers and a peer that writes to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.core.errors import ProtocolError
from kvstore.core.layout import RankPages
from kvstore.handover import transfers
from kvstore.handover.direct_fetches import DirectFetches
from kvstore.handover.peers import Peers
from kvstore.handover.transfers import PeerAgents, Transfers
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.harness.fakes import u32
from tests.test_direct_push import RANKS
from tests.test_peer_limits import Told


def waiting(push: bool = True) -> tuple[DirectFetches, list[tuple[int, framing.Message]]]:
    """A claimed fetch of two ranks, whose workers were told to name their engine blocks."""
    sent: list[tuple[int, framing.Message]] = []
    made = DirectFetches(lambda connection, message, _: sent.append((connection, message)))
    made.begin("n", 5, 1, {0: 10, 1: 11}, [0, 1])
    if push:
        made.push("n", 5)
        assert sent == [(10, p.Push(5)), (11, p.Push(5))]
    return made, sent


def named(rank: int, *positions: int) -> p.Target:
    blocks = u32([10 + position for position in positions])
    return p.Target(5, f"rank {rank}", u32(positions), blocks)


def test_B13_direct_a_peer_is_told_what_all_ranks_have_named() -> None:
    made, _ = waiting()
    assert made.target("n", 1, 0, named(0, 0, 1), RANKS) == {}
    assert made.target("n", 1, 1, named(1, 1), RANKS) == {1: [11]}
    assert made.target("n", 1, 1, named(1, 0), RANKS) == {0: [10]}
    assert made.target("n", 1, 1, p.Target(6, "rank 1", u32([0]), u32([10])), RANKS) == {}, "over"


@pytest.mark.parametrize("ranks", [RANKS[:1], (), (RANKS[0], RankPages("new", b"", ()))])
def test_B20_direct_blocks_that_were_named_by_an_agent_that_has_ended_are_told_to_nobody(
    ranks: tuple[RankPages, ...],
) -> None:
    """Their load is over: they may be another request's by now."""
    made, _ = waiting()
    assert made.target("n", 1, 0, named(0, 0), ranks) == {}
    assert made.target("n", 1, 1, named(1, 0), ranks) is None


def test_B20_direct_a_fetch_whose_blocks_were_named_by_such_an_agent_is_let_go_of() -> None:
    peers, let_go = Peers.__new__(Peers), list[int]()
    inlet: Any = SimpleNamespace(cancel=let_go.append)
    peers.__dict__ |= {"direct": SimpleNamespace(target=lambda *_: None), "inlet": lambda _: inlet}
    namespace: Any = SimpleNamespace(
        layout=SimpleNamespace(digest="n"), engines=SimpleNamespace(ranks=lambda _: RANKS)
    )
    peers.of_fetch(namespace, 1, 1, named(1, 0), 0)
    assert let_go == [5]


def test_B20_direct_nothing_is_kept_of_what_may_be_written_once_nobody_waits_for_it() -> None:
    peers, let_go = Peers.__new__(Peers), list[tuple[int, bool]]()
    inlet: Any = SimpleNamespace(cancel=lambda number, *, now=False: let_go.append((number, now)))
    peers.__dict__ |= {"direct": SimpleNamespace(end=lambda *_: None), "inlet": lambda _: inlet}
    namespace: Any = SimpleNamespace(layout=SimpleNamespace(digest="n"))
    peers.read_no_more(namespace, 5)
    assert let_go == [(5, True)]


@pytest.mark.parametrize(
    ("push", "session", "message", "expected"),
    [
        (False, 1, named(1, 0), "1 engine blocks for 1 positions"),
        (True, 2, named(1, 0), "another engine's"),
        (True, 1, named(1, 3), "which the engine has not claimed"),
        (True, 1, p.Target(5, "rank 1", u32([0, 1]), u32([1, 2, 3])), "3 engine blocks for 2"),
        (True, 1, p.Target(5, "rank 1", u32([0]), u32([99])), r"\[99\] of rank 1, others have"),
        (True, 1, p.Arrived(5, u32([0]), 8, ok=True), "written by its peer, not read"),
        (True, 1, p.Target(5, "rank 1", u32([1]), u32([0])), "no engine block for position 1"),
        (True, 1, p.Target(5, "rank 1", u32([1]), b""), "0 engine blocks for 1 positions"),
    ],
)
def test_B2_direct_engine_blocks_that_are_not_a_workers_to_name_are_refused(
    push: bool, session: int, message: p.Target | p.Arrived, expected: str
) -> None:
    made, _ = waiting(push)
    if push:
        made.target("n", 1, 0, named(0, 0), RANKS)

    def tell() -> None:
        if isinstance(message, p.Target):
            made.target("n", session, 1, message, RANKS)
        else:
            made.arrived("n", session, 1, message)

    with pytest.raises(ProtocolError, match=expected):
        tell()


def test_B20_direct_a_rank_whose_load_has_failed_ends_the_fetch() -> None:
    made, _ = waiting()
    failed = p.Arrived(5, u32([0]), 0, ok=False)
    assert made.arrived("n", 1, 1, failed) == ([0], False)


def test_B20_direct_workers_are_told_what_may_still_be_written() -> None:
    made, sent = waiting()
    sent.clear()
    made.passed("n", 5, [0], ok=False, written=True)
    made.passed("n", 5, [1], ok=False, written=False)
    made.flush()
    assert [message for connection, message in sent if connection == 10] == [
        p.Passed(5, u32([0]), ok=False, written=True),
        p.Passed(5, u32([1]), ok=False),
    ]


# The exporter's peers


def test_the_workers_of_a_peers_engine_are_known_as_long_as_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "NAMED_MAX", 3)
    monkeypatch.setattr(transfers, "AGENTS_MAX", 2)
    told = Told()
    known = PeerAgents(cast("Transfers", told))
    for name in ("exporter", "a", "b"):
        known.meet(1, name, b"md")
    known.meet(1, "a", b"again")
    assert told.known == {"exporter": b"md", "a": b"again", "b": b"md"}
    known.update(1, b"more")
    assert told.known["exporter"] == b"more", "a connection's first"
    assert known.metadata("a") == b"again"
    known.meet(1, "c", b"md")
    assert told.known.keys() == {"exporter", "b", "c"}, "the longest known makes room"
    known.leave(1)
    assert len(known) == 2
    assert [known.metadata(name) for name in ("exporter", "b", "c", "a")].count(b"") == 2
