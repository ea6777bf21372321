"""Loads that end in the step that admits their request: when, and what a failed one leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from connectors import request_lookups
from connectors.copies.host import SlotMap
from connectors.engine_interface import Geometry, Step, is_one_full_group
from connectors.kv_transfer_params import NO_TRANSFER, Transfer
from connectors.step_loads import ALONE_S_MAX, COPY_S_MAX, MEASURED_BYTES_MIN, START_RATE, StepLoads
from kvstore.core.types import GroupRule
from tests.harness.handover_rig import Node, node, prompt
from tests.harness.live import LiveStore, eventually, store_settings
from tests.harness.patience import WAIT_S
from tests.harness.script import BLOCK, ONE_GROUP, Request, Script, found
from tests.reference import Group, Output, Shape

BLOCK_BYTES = 1 << 20
TABLE = [[1, 2, 3]]
FULL, WINDOW = GroupRule(), GroupRule(2)


def idle_engine(
    geometry: Geometry = ONE_GROUP,
    *,
    block_bytes: int = BLOCK_BYTES,
    beside: bool = False,
    transfer: Transfer = NO_TRANSFER,
) -> Script:
    """A scheduler half whose engine ends each step before the next."""
    loads = StepLoads(block_bytes)
    return Script(geometry, beside=beside, step_loads=loads, transfer=transfer)


def hit(tokens: int, **how: Any) -> tuple[Script, Request]:  # noqa: ANN401 - of idle_engine
    """Such an engine has nothing but a request whose first two blocks are there."""
    script = idle_engine(**how)
    return found(tokens, *[[0, 1]] * len(script.geometry.rules), script=script)


def begun(tokens: int) -> tuple[Script, Request]:
    """Such a request is admitted with a load, in a step that computes the rest."""
    script, request = hit(tokens)
    external, waits = script.matched(request)
    assert external
    assert not waits
    script.half.update_state_after_alloc(request.request_id, TABLE, external)
    request.num_computed_tokens = external
    (job,) = script.step(request, tokens - external, TABLE).loads
    assert job.in_step
    return script, request


def running(script: Script, name: str) -> None:
    """Let a request run that asks for nothing."""
    other = Request(name, 8)
    script.half.on_new_request(other)
    script.admit(other)
    script.step(other, 8, [[9]])


# When


def test_O6_with_nothing_else_to_run_a_load_ends_in_its_step() -> None:
    script, request = hit(40)
    assert script.matched(request) == (32, False)
    assert script.matched(request) == (32, False), "asking again says the same"
    script.half.update_state_after_alloc("r", TABLE, 32)
    request.num_computed_tokens = 32
    (job,) = script.step(request, 8, TABLE).loads
    assert (job.in_step, job.engine.block_ids, job.slots) == (True, (1, 2), (0, 1))


def test_O6_O15_a_step_that_cannot_be_taken_twice_has_no_such_load() -> None:
    """A seed's generator has gone on, and logprobs of the prompt have been told."""
    script, request = hit(40)
    script.half._requests["r"].repeatable = False
    assert script.matched(request) == (32, True)


def test_O6_a_load_ends_in_its_step_beside_requests_that_run_and_wait() -> None:
    script, request = idle_engine(), Request("r", 40, "b")
    running(script, "other")
    script.half.on_new_request(Request("waits", 40, "c"))
    script.arrive(request, [0, 1])
    assert script.matched(request) == (32, False)


def test_O6_the_loads_of_a_step_take_as_long_together_as_one_may() -> None:
    script = idle_engine(block_bytes=int(START_RATE * COPY_S_MAX) // 4)
    requests = [Request(text, 40, text) for text in "abc"]
    for request in requests:
        script.arrive(request, [0, 1])
    for request in requests[:2]:
        assert script.matched(request) == (32, False)
        script.half.update_state_after_alloc(request.request_id, TABLE, 32)
    assert script.matched(requests[2]) == (32, True), "no time is left in this step"
    script.step()
    assert script.matched(requests[2]) == (32, False)


def test_O6_who_would_read_what_a_step_loads_waits_for_the_next_step() -> None:
    """The engine finds blocks by their hashes as soon as they are allocated."""
    script, request = hit(48)
    assert script.matched(request, 16) == (16, False)
    same, other, shorter = Request("same", 48), Request("other", 48, "b"), Request("less", 17)
    for late in (same, other, shorter):
        script.arrive(late, [0, 1])
    script.half.update_state_after_alloc("r", TABLE, 16)
    assert script.matched(same, 32) == (None, False)
    assert script.matched(same, 16) == (16, False), "it has the engine's own block only"
    assert script.matched(other, 32)[0] is not None
    assert script.matched(shorter, 16) == (0, False)
    script.step(request, 16, TABLE)
    assert script.matched(same, 32)[0] == 0, "they are right by now"


@pytest.mark.parametrize("tier", ["nvme", "peer"])
def test_O6_what_comes_from_a_lower_tier_is_waited_for_outside_the_step(tier: str) -> None:
    script, request = idle_engine(), Request("r", 40)
    script.half.on_new_request(request)
    (lookup,) = script.lookups()
    script.answer(lookup.ask, [0, 1], sources={tier: 1})
    assert script.matched(request) == (32, True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: found(40, [0, 1]),
        lambda: hit(40, beside=True),
        lambda: hit(40, transfer=Transfer("engine", direct=True)),
        lambda: hit(40, geometry=Geometry(BLOCK, BLOCK, (BLOCK,), (WINDOW,))),
        lambda: hit(40, geometry=Geometry(BLOCK, BLOCK, (BLOCK, BLOCK), (FULL, FULL))),
    ],
    ids=["schedules-ahead", "beside-other-connectors", "direct", "window", "two-groups"],
)
def test_O6_some_engines_have_no_such_loads(make: Callable[[], tuple[Script, Request]]) -> None:
    script, request = make()
    assert script.matched(request) == (32, True)


def test_O6_only_engines_with_one_group_of_full_attention_have_them() -> None:
    groups = ((FULL,), (WINDOW,), (GroupRule(1, exact=True),), (FULL, FULL), (FULL, WINDOW))
    assert [rules for rules in groups if is_one_full_group(rules)] == [(FULL,)]


def test_O6_what_another_engine_computed_is_waited_for_outside_the_step() -> None:
    script, request = idle_engine(transfer=Transfer("engine")), Request("r", 41)
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "there",
        "remote_request_id": "there",
        "remote_block_ids": [[1, 2]],
        "remote_host": "127.0.0.1",
        "remote_port": 9500,
        "remote_num_tokens": 0,
    }
    script.half.on_new_request(request, params)
    (lookup,) = script.lookups()
    assert lookup.peer == "127.0.0.1:9500"
    script.answer(lookup.ask, [0, 1])
    assert script.matched(request) == (32, True)


def test_O6_a_long_copy_is_waited_for_outside_the_step() -> None:
    """A step in which an engine computes nothing waits as long as one with its only request."""
    block_bytes = int(START_RATE * COPY_S_MAX) // 2
    for more, waits in ((0, False), (1, True)):
        script = idle_engine(block_bytes=block_bytes + more)
        script.half.on_new_request(Request("other", 8, "b"))
        script, request = found(40, [0, 1], script=script)
        assert script.matched(request) == (32, waits)
        script.half.request_finished("other", [[]])
        assert script.matched(request) == (32, False)
    for more, waits in ((0, False), (1, True)):
        script, request = hit(40, block_bytes=int(START_RATE * ALONE_S_MAX) // 2 + more)
        assert script.matched(request) == (32, waits)


def test_O6_an_adapters_request_is_not_held_up_for_long() -> None:
    """It is not announced: the engine only says that it runs."""
    script, request = idle_engine(block_bytes=int(START_RATE * COPY_S_MAX)), Request("r", 40)
    script.half.build_meta(Step({"adapter": 1}, (), lambda _: ()))
    script.arrive(request, [0, 1])
    assert script.matched(request) == (32, True)
    script.half.request_finished("adapter", [[]])
    assert script.matched(request) == (32, False)


def test_O6_how_long_a_copy_takes_is_measured() -> None:
    script, request = hit(40)
    script.half.copied(MEASURED_BYTES_MIN, 1.0)
    assert script.matched(request) == (32, True), "1 MiB/s"
    script.half.copied(MEASURED_BYTES_MIN - 1, 1e-9)
    assert script.matched(request) == (32, True), "too little to say"
    script.half.copied(1 << 30, 10.0)
    assert script.matched(request) == (32, False), "2 MiB of 0.1 GiB/s take 19.5 ms"
    script.half.copied(1 << 30, 11.0)
    assert script.matched(request) == (32, True)


def test_O6_a_request_that_comes_back_is_decided_on_anew() -> None:
    script, request = hit(40)
    assert script.matched(request) == (32, False)
    script.half.copied(MEASURED_BYTES_MIN, 1.0)  # the engine had no room for it
    assert script.matched(request) == (32, True)
    script.half.update_state_after_alloc("r", TABLE, 32)
    (job,) = script.step().loads
    assert not job.in_step


# What it leaves


def test_O20_the_lease_is_not_given_back_before_the_workers_have_loaded() -> None:
    script, _ = begun(40)
    script.half.on_output({}, [], [])
    script.half.request_finished("r", TABLE)
    assert script.released() == []


def test_O20_the_queue_for_leases_moves_on_when_a_load_has_ended_in_its_step() -> None:
    script, request = hit(40)
    script.arrive(Request("waits", 40, "b"), capped=True)
    external, _ = script.matched(request)
    script.half.update_state_after_alloc("r", TABLE, external or 0)
    request.num_computed_tokens = 32
    script.step(request, 8, TABLE)
    assert script.lookups() == [], "its load is under way"
    script.half.on_output({}, [], [])
    request.num_computed_tokens = 40
    script.step(request, 1, TABLE)
    (again,) = script.lookups()
    script.answer(again.ask, capped=True)
    script.half.on_output({}, [], [])
    script.step(request, 1, TABLE)
    assert script.lookups() == [], "no lease has ended since"


def test_O12_what_was_loaded_in_a_step_is_not_stored() -> None:
    script, request = begun(48)
    script.half.on_output({}, [], [])
    assert script.indices(request, script.step(request, 1, TABLE)) == [2]


def test_O15_a_request_that_loaded_in_a_step_stores_nothing_before_its_output_is_there() -> None:
    script, request = hit(48)
    external, _ = script.matched(request)
    assert external
    script.half.update_state_after_alloc("r", TABLE, external)
    request.num_computed_tokens = external
    meta = script.step(request, 16, TABLE)
    assert (meta.stores, meta.early) == ((), ())
    request.num_in_flight_tokens = 16
    script.half.request_finished("r", TABLE)  # aborted while the step runs
    assert script.step().early == ()


def test_O15_what_a_failed_load_left_wrong_is_named_and_stored_once_it_is_computed() -> None:
    script, request = begun(48)
    assert script.half.step_loads_failed({2}) == {1, 2, 3}, "loaded, and computed from it"
    assert script.half.take_stats()["load_failed"] == 1
    script.half.on_output({}, [], [])
    request.num_computed_tokens = 0
    assert script.indices(request, script.step(request, 48, TABLE)) == [0, 1, 2]


def test_O15_of_the_loads_of_a_step_one_may_fail() -> None:
    script = idle_engine()
    tables = {"a": [[1, 2, 3]], "b": [[4, 5, 6]]}
    requests = {text: Request(text, 48, text) for text in tables}
    for name, request in requests.items():
        script.arrive(request, [0, 1])
        external, _ = script.matched(request)
        script.half.update_state_after_alloc(name, tables[name], external or 0)
        request.num_computed_tokens = 32
    script.half.build_meta(Step({"a": 16, "b": 16}, (), tables.__getitem__))
    assert script.half.step_loads_failed({5}) == {4, 5, 6}
    requests["b"].num_computed_tokens = 0
    both = Step({"a": 1, "b": 48}, (), tables.__getitem__)
    requests["a"].num_computed_tokens = 48
    meta = script.half.build_meta(both)
    assert script.indices(requests["a"], meta) == [2]
    assert script.indices(requests["b"], meta) == [0, 1, 2], "all of it is computed again"


def test_O15_only_what_lies_behind_the_engines_own_blocks_is_wrong() -> None:
    script, request = hit(48)
    assert script.matched(request, 16) == (16, False)
    script.half.update_state_after_alloc("r", TABLE, 16)
    request.num_computed_tokens = 32
    script.step(request, 16, TABLE)
    assert script.half.step_loads_failed({2}) == {2, 3}


def test_O15_what_is_wrong_is_named_though_the_request_was_aborted_meanwhile() -> None:
    script, _ = begun(48)
    script.half.request_finished("r", TABLE)
    assert script.half.step_loads_failed({1, 2}) == {1, 2, 3}


def test_O15_a_load_of_an_earlier_step_does_not_fail_any_more() -> None:
    script, request = begun(48)
    script.half.on_output({}, [], [])
    script.step(request, 1, TABLE)
    assert script.half.step_loads_failed({1, 2}) == set()
    assert "load_failed" not in script.half.take_stats()


def test_O9_a_promise_without_its_blocks_fails_in_its_step() -> None:
    script, request = hit(40)
    assert script.matched(request) == (32, False)
    script.client.detach("between the answer and the allocation")
    script.attach()
    script.half.update_state_after_alloc("r", TABLE, 32)
    request.num_computed_tokens = 32
    (job,) = script.step(request, 8, TABLE).loads
    assert (job.session, job.in_step) == (0, True)


def test_O9_an_allocation_without_a_load_begins_none() -> None:
    script, request = hit(48)
    assert script.matched(request) == (32, False)
    script.half.update_state_after_alloc("r", TABLE, 0)
    meta = script.step(request, 48, TABLE)
    assert meta.loads == ()
    assert script.indices(request, meta) == [2], "nothing that it started with can turn out bad"


# A reference engine on a real store: it compares every byte that it reads


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LiveStore]:
    with LiveStore(store_settings(tmp_path)) as made:
        yield made


@pytest.fixture
def engine(
    store: LiveStore, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Node]:
    monkeypatch.setattr(request_lookups, "IDLE_WAIT_S", WAIT_S)  # however slow the store is
    shape = Shape((Group(4),), 8, 400, budget=24)
    with node(store, request.node.name, shape, step_loads=StepLoads(BLOCK_BYTES)) as made:
        yield made


def run(engine: Node, name: str, tokens: list[int], new: int) -> tuple[int, int]:
    """Run a prompt that the engine itself has forgotten: tokens loaded, steps to its first one."""
    inner = engine.engine
    inner.book.tables.forget_all()
    outputs: list[Output] = []
    step = inner.step

    def kept() -> list[Output]:
        made = step()
        outputs.extend(made)
        return made

    inner.step = kept  # type: ignore[method-assign]
    loaded = engine.run({name: tokens}, new, {})[name]
    inner.step = step  # type: ignore[method-assign]
    blocks = (len(tokens) + new - 1) // 8
    eventually(lambda: len(engine.keys()) == blocks)
    return loaded, next(n for n, output in enumerate(outputs, 1) if output.tokens)


def test_O6_a_hit_takes_one_step(engine: Node) -> None:
    tokens = prompt("hit", 40)
    assert run(engine, "first", tokens, 1) == (0, 2)
    assert run(engine, "hit", tokens, 1) == (32, 1)
    assert engine.engine.counts["loads"] == 0, "none was waited for outside its step"
    engine.half._step_loads = None
    assert run(engine, "outside", tokens, 1) == (32, 2)
    assert engine.engine.counts["loads"] == 1


def moving_on() -> Callable[[SlotMap, NDArray[np.int64]], NDArray[np.uint32]]:
    """Slots' generations that differ each second time, which is after the copy."""
    asked = 0
    generations = SlotMap.generations

    def answer(slots: SlotMap, numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
        nonlocal asked
        asked += 1
        return generations(slots, numbers) + np.uint32(asked % 2 == 0)

    return answer


@pytest.mark.parametrize("new", [1, 20])
def test_O15_what_a_load_in_a_step_left_wrong_is_computed(
    engine: Node, monkeypatch: pytest.MonkeyPatch, new: int
) -> None:
    tokens = prompt(("bad", new), 60)
    run(engine, "first", tokens, new)
    with monkeypatch.context() as patch:
        patch.setattr(SlotMap, "generations", moving_on())
        run(engine, "fails", tokens, new)
    assert engine.engine.counts["sync_failed"] == 1
    assert run(engine, "stored again", tokens, new) == (56, 1)
    assert engine.engine.counts["sync_failed"] == 1
