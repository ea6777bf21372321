"""The scheduler half at the edges of its rows: what only one more condition decides."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from connectors import store_client
from connectors.engine_interface import Geometry
from connectors.request_lookups import LOADING_LIMIT_NS
from connectors.store_client import FORGOTTEN_PER_KEY, KNOWN_MAX, KnownKeys
from kvstore.core.types import GroupRule
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.harness.script import BLOCK, MS, Request, Script, found, hashes, running
from tests.test_scheduler_half import loading, waiting
from tests.test_scheduler_offers import run

ROOT = Path(__file__).parent.parent
PARTS = Geometry(BLOCK, 8, (8,), (GroupRule(),))  # two engine blocks in a block
UNEQUAL = Geometry(32, BLOCK, (BLOCK, 32), (GroupRule(), GroupRule()))
KINDS = re.compile(r"mamba|sliding|window|recurrent|state_space|mla(?![a-z])", re.IGNORECASE)


def test_O1_no_kind_of_group_is_named_in_the_halves() -> None:
    """What differs between groups is a number of the geometry."""
    found = set()
    for path in (ROOT / "connectors").glob("*.py"):
        if path.name.startswith("vllm"):
            continue  # reads the engine's kinds and passes on numbers
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for field in ("id", "attr", "arg", "name", "value"):
                word = getattr(node, field, None)
                if isinstance(word, str) and " " not in word:  # not prose
                    found.add((path.name, word))
    assert len(found) > 1000
    assert not [pair for pair in found if KINDS.search(pair[1])]


def test_O4_a_hit_is_whole_blocks_of_every_group() -> None:
    script, request = found(90, [0, 1], [0, 1], script=Script(UNEQUAL))
    assert script.matched(request) == (64, True)
    assert script.matched(request, 48) == (0, False)


def test_O5_what_the_engine_has_itself_is_asked_about_too() -> None:
    script, request = running(20)
    request.num_tokens, request.block_hashes = 65, hashes(4)
    script.matched(request, 32)  # preempted; two of its blocks are still in the engine's cache
    (lookup,) = script.lookups()
    assert lookup.hashes == b"".join(hashes(4))


def test_O8_an_answer_within_the_wait_is_used_and_ends_the_row_of_time_outs() -> None:
    script, running = Script(), Request("running", 8)
    script.half.on_new_request(running)
    for number, answered in enumerate((False, False, True, False, False, True)):
        script.step(running, 1, [[1]])
        script.lookups()
        request = Request(f"r{number}", 33, f"r{number}")
        script.half.on_new_request(request)
        (lookup,) = script.lookups()
        if answered:
            script.answer(lookup.ask, [0, 1])
            script.on_its_way, script.inbox = script.inbox, []
        assert script.matched(request) == ((32, True) if answered else (None, False))


def test_O9_a_table_without_blocks_for_the_load_touches_none() -> None:
    rules = (GroupRule(), GroupRule(1))
    script, request = found(
        40, [0, 1], [1], script=Script(Geometry(BLOCK, BLOCK, (BLOCK,) * 2, rules))
    )
    (job,) = script.load(request, [[0, 2], [0, 3]]).loads
    assert job.engine.block_ids == (2, 3)
    assert job.engine.block_indices == (1, 1)
    assert job.slots == (1, 1001)


def test_O10_drafts_are_offered_once_they_are_accepted() -> None:
    script, request = Script(), Request("r", 45)
    table = [[1, 2, 3, 4]]
    run(script, request)
    assert script.indices(request, script.step(request, 45, table)) == [0, 1]
    request.num_tokens = 46
    assert script.step(request, 4, table).stores == (), "three drafts would complete the third"
    request.num_computed_tokens, request.num_tokens = 46, 47  # none was accepted
    assert script.step(request, 1, table).stores == ()
    request.num_tokens, request.block_hashes = 48, hashes(3)
    assert script.indices(request, script.step(request, 1, table)) == [2]


def test_O10_the_last_token_of_a_request_has_no_KV() -> None:
    script, request = running(31)
    script.step(request, 31, [[1, 2]])
    request.num_tokens, request.block_hashes = 32, hashes(2)
    script.half.request_finished("r", [[1, 2]])
    assert not script.half.has_pending_work()
    assert script.step().early == ()


@pytest.mark.parametrize("length", [2, 16])  # block by block, and as one run
@pytest.mark.parametrize("part", [0, 1])
def test_O10_a_block_with_a_null_part_is_not_stored(length: int, part: int) -> None:
    script, request = running(length * BLOCK, Script(PARTS), hash_tokens=8)
    table = list(range(1, 2 * length + 1))
    table[2 + part] = 0
    stored = script.indices(request, script.step(request, length * BLOCK, [table]))
    assert stored == [index for index in range(length) if index != 1]


@pytest.mark.parametrize("length", [2, 16])
@pytest.mark.parametrize("world", [1, 2])
def test_O13_every_block_of_a_copy_is_fenced_until_all_ranks_have_ended(
    length: int, world: int
) -> None:
    script, request = running(length * BLOCK, Script(world=world))
    table = [list(range(1, length + 1))]
    (job,) = script.step(request, length * BLOCK, table).stores
    for rank in range(world):
        for block in table[0]:
            assert script.step(written=[99, block]).flush == (job.job_id,)
        script.half.on_output({job.job_id: 1}, [], [])
        assert (script.step(written=table[0]).flush == ()) == (rank == world - 1)


def test_O11_of_what_is_ready_the_latest_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_client, "KNOWN_MAX", 4)
    script, request = running(10 * BLOCK)
    keys = [script.key(request, index) for index in range(10)]
    for key in keys[:8]:
        script.changed(added=[key])
        script.client.receive()
    assert [key in script.client.known for key in keys] == [False] * 4 + [True] * 4 + [False] * 2
    script.changed(removed=keys[5:6])
    table = [list(range(1, 11))]
    meta = script.step(request, 10 * BLOCK, table)
    assert script.indices(request, meta) == [0, 1, 2, 3, 5, 8, 9]


def test_O8_no_set_of_known_keys_is_large() -> None:
    """A step pays for the growth of a set, and for its end."""
    known, keys, forgotten = KnownKeys(), hashes(4 * KNOWN_MAX), 0
    for end in range(100, len(keys) + 1, 100):
        left = len(known._forgotten)
        known.add(keys[end - 100 : end])
        forgotten += max(0, left - len(known._forgotten))
        assert left - len(known._forgotten) <= FORGOTTEN_PER_KEY * 100
        assert len(known._newer) < KNOWN_MAX
        assert all(key in known for key in keys[max(0, end - KNOWN_MAX) : end : 500])
    assert forgotten >= KNOWN_MAX
    assert all(key in known for key in keys[-100:])
    assert keys[0] not in known
    assert known.none_of(keys[:100])
    assert not known.none_of([*keys[:100], keys[-1]])
    known.remove(keys[-100:])
    assert known.none_of(keys[-100:])


def test_O14_a_report_of_a_load_that_is_not_under_way_changes_nothing() -> None:
    script, request = found(40, [0, 1])
    script.half.on_output({77: 1}, ["r", "nobody"], ["r", "nobody"])
    assert script.matched(request) == (32, True), "it was not loading yet"
    script.load(request, [[1, 2]])
    for _ in range(2):
        script.half.on_output({}, ["r"], [])
    script.half.update_state_after_alloc("r", (), 0)
    script.half.on_output({}, ["r"], ["r"])
    assert script.indices(request, script.step(request, 8, [[1, 2, 3]])) == []
    assert "load_failed" not in script.half.take_stats()


def test_O15_after_a_failed_load_no_disk_is_waited_for() -> None:
    script, request = loading()
    script.half.on_output({}, ["r"], ["r"])
    script.matched(request)
    assert [lookup.memory_only for lookup in script.lookups()] == [True]
    script.half.on_new_request(Request("other", 40, "other"))
    assert [lookup.memory_only for lookup in script.lookups()] == [False]


def test_O17_copies_of_before_a_reset_stay_fenced_and_keep_their_keys() -> None:
    script, request = running(32)
    (job,) = script.step(request, 16, [[1, 2]]).stores
    request.num_computed_tokens = 32
    script.half.request_finished("r", [[1, 2]])
    script.half.reset_cache(b"new epoch")
    meta = script.step(written=[1])
    assert meta.flush == (job.job_id,)
    assert [key for early in meta.early for key in early.keys] == [script.key(request, 1)]


def test_O19_each_group_has_its_own_slots_and_generations_in_its_order() -> None:
    script, request = Script(UNEQUAL), Request("r", 97)
    script.half.on_new_request(request)
    (lookup,) = script.lookups()
    hits = tuple(
        p.Hit(
            framing.u32([0, 1, 2]),
            framing.u32([g + 5, g + 3, g + 4]),
            framing.u32([g + 1, g + 2, g + 3]),
        )
        for g in (10, 20)
    )
    script.inbox.append(p.Answers(granted=(p.Granted(lookup.ask, 1, 30_000, hits),)))
    (job,) = script.load(request, [[1, 2, 3, 4, 5, 6], [7, 8, 9]], computed=32).loads
    assert job.engine.block_ids == (3, 4, 5, 6, 8, 9)
    assert (job.engine.group_sizes, job.engine.block_indices) == ((4, 2), (2, 1))
    assert job.slots == (13, 14, 23, 24)
    assert job.generations == (12, 13, 22, 23)


def test_O20_of_a_hit_that_the_engine_shrinks_only_that_much_is_loaded() -> None:
    script, request = Script(), Request("r", 65)
    ask = script.arrive(request, [0, 1, 2, 3])
    assert script.matched(request) == (64, True)
    script.steps()
    script.half.update_state_after_alloc("r", [[1, 2]], 32)
    (job,) = script.step().loads
    assert (job.engine.block_ids, job.slots) == ((1, 2), (0, 1))
    assert job.lease == ask
    steps = script.steps()
    assert [(step.lookup_tokens, step.hit_tokens) for step in steps] == [(65, {"cpu": 32})]
    assert [lease for step in steps for lease in step.release] == [], "its load ends the lease"


def test_O8_waiting_for_room_does_not_blame_the_store() -> None:
    """At the cap a request asks again and again; each time there is a moment without an answer."""
    script, head, other = Script(), Request("a", 33), Request("b", 33, "b")
    script.arrive(head, [0, 1])
    script.load(head, [[1, 2]])
    script.arrive(other, capped=True)
    for _ in range(20):
        assert script.matched(other) == (None, False)
        script.now_ns += 100 * MS
        assert script.matched(other) == (None, False), "asked again, not answered yet"
        (again,) = script.lookups()
        script.answer(again.ask, capped=True)
    assert script.client.session
    script.now_ns += LOADING_LIMIT_NS
    assert script.matched(other) == (0, False)
    assert script.client.session, "its answers came in time"


def test_O20_a_hit_that_is_shrunk_to_what_was_not_answered_fails_and_keeps_no_lease() -> None:
    script = Script(Geometry(BLOCK, BLOCK, (BLOCK, BLOCK), (GroupRule(), GroupRule(2))))
    request = Request("r", 81)
    ask = script.arrive(request, [0, 1, 2, 3, 4], [3, 4])
    assert script.matched(request) == (80, True)
    script.steps()
    script.half.update_state_after_alloc("r", [[1, 2, 3], [4, 5, 6]], 48)
    (job,) = script.step().loads
    assert job.session == 0, "the workers fail it"
    assert script.released() == [ask]


def test_O20_a_lease_that_ran_out_while_the_request_waited_is_not_loaded_from() -> None:
    script, first, second = Script(), Request("a", 33), Request("b", 33)
    script.arrive(first, [0, 1])
    script.load(first, [[1, 2]])
    ask = script.arrive(second, [0, 1], lease_ms=1_000)
    assert script.matched(second) == (None, False)
    script.now_ns += 1_000 * MS
    script.half.on_output({}, ["a"], [])
    assert script.matched(second) == (None, False)
    (step,) = script.steps()
    assert step.release == (ask,)
    assert len(step.lookups) == 1


def test_O8_a_busy_engine_waits_for_a_first_ask_only() -> None:
    script, running, request = Script(), Request("running", 8), Request("r", 33)
    script.half.on_new_request(running)
    script.step(running, 8, [[1]])
    script.half.on_new_request(request)
    script.matched(request)
    before = script.waited_ns
    assert before > 0
    for _ in range(3):
        script.step(running, 1, [[1]])
        script.matched(request)
    assert script.waited_ns == before


def test_O8_an_idle_engine_waits_in_each_step_since_an_empty_one_costs_more() -> None:
    script, request = waiting()
    for steps in range(1, 4):
        script.matched(request)
        assert script.waited_ns == pytest.approx(steps * MS, rel=0.01)
        script.step()


@pytest.mark.parametrize("slots", [b"abc", framing.u32([1, 2])])
def test_O8_an_answer_that_does_not_fit_ends_the_session_not_the_engine(slots: bytes) -> None:
    script = Script()
    request = Request("r", 33)
    script.half.on_new_request(request)
    hit = p.Hit(framing.u32([0]), slots, framing.u32([7]))
    ask = script.lookups()[0].ask
    script.inbox.append(p.Answers(granted=(p.Granted(ask, ask, 30_000, (hit,), {}),)))
    assert script.matched(request) == (0, False)
    assert script.client.session == 0
