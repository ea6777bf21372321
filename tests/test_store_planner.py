"""Gathering the complete blocks of a step into few jobs, and which jobs read an engine block."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.engine_interface import Geometry
from connectors.events import BlockEvents
from connectors.request_state import TrackedRequest
from connectors.step_meta import StoreJob, pieces
from connectors.store_client import NO_HITS, GroupHits
from connectors.store_planner import JOB_BLOCKS_MAX, StorePlanner
from kvstore.core.types import GroupRule, make_key

FULL, WINDOW = GroupRule(None), GroupRule(2)
ONE = Geometry(16, 16, (16,), (FULL,))
TWO = Geometry(32, 16, (16, 32), (FULL, WINDOW))


class Known(set[bytes]):
    """Known keys, and how often it was asked for single ones."""

    asked = 0

    def __contains__(self, key: object) -> bool:
        self.asked += 1
        return super().__contains__(key)

    def add(self, keys: Sequence[bytes]) -> None:  # type: ignore[override]
        self.update(keys)

    def none_of(self, keys: Sequence[bytes]) -> bool:
        return self.isdisjoint(keys)


class Client:
    """Credits and known keys, and nothing else."""

    def __init__(self, credits_count: int) -> None:
        self.collect_events = False
        self.session = 7
        self.credits = deque(range(100, 100 + credits_count))
        self.known = Known()
        self.shown: list[tuple[list[int], list[bytes], list[int]]] = []
        self.stats: Counter[str] = Counter()

    def count(self, event: str) -> None:
        self.stats[event] += 1

    def publish_blocks(
        self, slots: Sequence[int], keys: Sequence[bytes], blocks: Sequence[int]
    ) -> None:
        if slots:
            self.shown.append((list(slots), list(keys), list(blocks)))


class Request:
    def __init__(self, name: str, blocks: int) -> None:
        self.request_id = name
        self.block_hashes: Sequence[bytes] = [f"{name}/{index}".encode() for index in range(blocks)]
        self.num_tokens = self.num_computed_tokens = blocks * 16
        self.num_in_flight_tokens = 0
        self.all_token_ids: Sequence[int] = range(self.num_tokens)


class Desk:
    """StorePlanner, with what it was declined."""

    def __init__(self, geometry: Geometry = ONE, credits_count: int = 1000) -> None:
        self.client = Client(credits_count)
        self.geometry = geometry
        events = BlockEvents(geometry, self.client)  # type: ignore[arg-type]
        self.offers = StorePlanner(geometry, self.client, 1, events)  # type: ignore[arg-type]

    @property
    def declined(self) -> int:
        return self.client.stats["store_declined"]

    def offer(self, request: Request, tracked: TrackedRequest, *tables: list[int]) -> int:
        return self.offers.store_complete(tracked, request.num_tokens, lambda _: tables)

    def new(self, name: str, blocks: int) -> tuple[Request, TrackedRequest]:
        request = Request(name, blocks)
        return request, TrackedRequest(request, (NO_HITS,) * len(self.geometry.rules))


def copied(job: StoreJob, geometry: Geometry = ONE) -> list[tuple[int, int, int]]:
    """Engine block, slot and part of each move of a job."""
    moves = pieces(job.engine, job.slots, geometry.blocks_per_chunk)
    return [(block, slot, part) for _, block, slot, part in moves.tolist()]


def test_blocks_of_several_requests_share_a_job() -> None:
    desk = Desk()
    for name, ids in (("a", [1, 2]), ("b", [9])):
        desk.offer(*desk.new(name, len(ids)), ids)
    (job,) = desk.offers.take_jobs()
    assert copied(job) == [(1, 100, 0), (2, 101, 0), (9, 102, 0)]
    assert job.keys == tuple(make_key(hash_, 0) for hash_ in (b"a/0", b"a/1", b"b/0"))
    assert job.parents == (b"", make_key(b"a/0", 0), b"")
    assert desk.offers.take_jobs() == ()


def test_larger_blocks_and_groups_keep_their_parts_together() -> None:
    desk = Desk(TWO)
    for name, first in (("a", 1), ("b", 11)):
        request, tracked = desk.new(name, 4)
        desk.offer(request, tracked, [first, first + 1, first + 2, first + 3], [0, first + 4])
    (job,) = desk.offers.take_jobs()
    assert job.engine.group_sizes == (8, 2)
    assert [block for block, _, _ in copied(job, TWO)] == [1, 2, 3, 4, 11, 12, 13, 14, 5, 15]
    assert [part for _, _, part in copied(job, TWO)] == [0, 1] * 4 + [0, 0]
    full, window = 0, 1
    assert job.keys[:2] == (make_key(b"a/1", full), make_key(b"a/3", full))
    assert job.keys[4:] == (make_key(b"a/3", window), make_key(b"b/3", window))
    assert job.parents == (b"", job.keys[0], b"", job.keys[2], b"", b"")
    slots, keys = list(job.slots), list(job.keys)
    assert desk.client.shown == [
        (slots[:4], keys[:4], [1, 2, 3, 4, 11, 12, 13, 14]),
        (slots[4:], keys[4:], [5, 15]),
    ], "peers may read each group's in the engine"


def test_a_long_prompt_is_cut_into_jobs_in_order() -> None:
    desk = Desk()
    count = 2 * JOB_BLOCKS_MAX + 3
    desk.offer(*desk.new("a", count), list(range(1, count + 1)))
    jobs = desk.offers.take_jobs()
    assert [len(job.keys) for job in jobs] == [JOB_BLOCKS_MAX, JOB_BLOCKS_MAX, 3]
    keys = [key for job in jobs for key in job.keys]
    assert [parent for job in jobs for parent in job.parents] == [b"", *keys[:-1]]
    assert [job.job_id for job in jobs] == sorted({job.job_id for job in jobs})


def test_a_prompt_that_the_store_has_is_passed_over_in_runs() -> None:
    """As of the engine's own cache: it is in the way of a request's first step."""
    desk, last = Desk(), make_key(b"a/299", 0)
    request, tracked = desk.new("a", 300)
    desk.client.known.update(make_key(block, 0) for block in request.block_hashes)
    desk.client.known.discard(last)
    desk.offer(request, tracked, list(range(1, 301)))
    assert tracked.cursor == 300
    assert desk.client.known.asked <= 300 + JOB_BLOCKS_MAX, "those of the last run twice"
    (job,) = desk.offers.take_jobs()
    assert job.keys == (last,)


def test_a_run_gathered_at_once_is_the_same_as_block_by_block() -> None:
    at_once, one_by_one = Desk(TWO), Desk(TWO)
    tables = [list(range(1, 21)), list(range(101, 111))]
    at_once.offer(*at_once.new("a", 20), *tables)
    _, tracked = one_by_one.new("a", 20)
    for tokens in range(32, 321, 32):  # a block at a time never is a run
        one_by_one.offers.store_complete(tracked, tokens, lambda _: tables)
    (run,), (each,) = at_once.offers.take_jobs(), one_by_one.offers.take_jobs()
    assert len(run.keys) == 20
    assert (run.engine, run.keys, run.parents) == (each.engine, each.keys, each.parents)
    assert sorted(run.slots) == sorted(each.slots)


def test_what_is_present_is_still_the_parent_of_what_is_not() -> None:
    desk = Desk()
    request, tracked = desk.new("a", 3)
    tracked.present = (GroupHits((0,), (5,), (1,)),)
    desk.client.known = Known({make_key(b"a/1", 0)})
    desk.offer(request, tracked, [1, 2, 3])
    (job,) = desk.offers.take_jobs()
    assert (job.keys, job.parents) == ((make_key(b"a/2", 0),), (make_key(b"a/1", 0),))


@pytest.mark.parametrize("where", [0, 2, 5])
@pytest.mark.parametrize("how", ["known", "present"])
def test_O11_one_block_of_a_run_that_is_there_is_not_copied_again(where: int, how: str) -> None:
    desk = Desk()
    request, tracked = desk.new("a", 6)
    if how == "known":
        desk.client.known = Known({make_key(f"a/{where}".encode(), 0)})
    else:
        tracked.present = (GroupHits((where,), (5,), (1,)),)
    desk.offer(request, tracked, [1, 2, 3, 4, 5, 6])
    (job,) = desk.offers.take_jobs()
    assert job.engine.block_ids == tuple(n for n in range(1, 7) if n != where + 1)
    assert tracked.cursor == 6


@given(st.sets(st.integers(0, 20)), st.integers(0, 20), st.integers(0, 8))
def test_places_are_what_a_set_would_say(present: set[int], first: int, count: int) -> None:
    indices = sorted(present)
    places = GroupHits(indices, indices, indices)
    run = set(range(first, first + count))
    assert places.leading == min(set(range(22)) - present)
    assert [index in places for index in range(22)] == [index in present for index in range(22)]
    assert places.any_of(first, first + count) == bool(run & present)
    assert (places.run(first, first + count) is not None) == (run <= present)


class Watched(list[int]):
    """A block table that counts how often it is looked at."""

    looks = 0

    def __getitem__(self, where: Any) -> Any:  # noqa: ANN401 - as list has it
        Watched.looks += 1
        return super().__getitem__(where)


def test_blocks_that_need_no_copy_are_passed_over_in_runs() -> None:
    """Or the first step after a long hit would take milliseconds."""
    desk = Desk(Geometry(16, 16, (16, 16), (FULL, WINDOW)))
    request, tracked = desk.new("a", 1000)
    everywhere = range(1000)
    tracked.present = (GroupHits(everywhere, everywhere, everywhere), GroupHits((), (), ()))
    Watched.looks = 0
    desk.offer(request, tracked, Watched(range(1, 1001)), Watched([0] * 998 + [2001, 2002]))
    (job,) = desk.offers.take_jobs()
    assert job.engine.block_ids == (2001, 2002)
    assert Watched.looks < 200


def test_a_request_is_due_when_its_next_block_can_be_complete() -> None:
    desk = Desk(credits_count=1)
    request, tracked = desk.new("a", 2)
    assert desk.offer(request, tracked, [1, 2]) == 32, "its second block is complete, not stored"
    assert desk.declined == 1
    assert desk.offer(request, tracked, [1, 2]) == 32
    assert desk.declined == 2
    desk.client.credits.append(5)
    assert desk.offer(request, tracked, [1, 2]) == 48
    assert desk.declined == 2


def test_without_a_session_nothing_is_due_and_nothing_is_declined() -> None:
    desk = Desk(credits_count=0)
    desk.client.session = 0
    request, tracked = desk.new("a", 2)
    assert desk.offer(request, tracked, [1, 2]) == 0
    assert desk.offers.take_jobs() == ()
    assert desk.declined == 0
