"""What the adapter passes on between vLLM and the two halves, held line by line."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.engine_interface import Geometry
from connectors.kv_transfer_params import NO_REMOTE, Transfer, remote_of
from connectors.step_meta import StepMeta
from kvstore.core.types import GroupRule
from tests.engine.facts import IMPORTS_VLLM
from tests.engine.test_shortened import adapter, request_of
from tests.harness.script import Script

pytestmark = IMPORTS_VLLM

TOKENS = Geometry(16, 16, (16,), (GroupRule(),))
TABLE = ([1, 2],)


@pytest.fixture
def connector() -> Any:
    """Of an engine with one group; a peer can reach its store."""
    script = Script(TOKENS)
    script.client.side_channel = "127.0.0.1:9500"
    script.half._hand_overs._transfer = Transfer("engine")
    return adapter(script)


def run(connector: Any, request: Any) -> Any:
    """Let a request arrive, be admitted and computed; the step's copies."""
    connector.on_new_request(request)
    connector.get_num_new_matched_tokens(request, 0)
    blocks = SimpleNamespace(blocks=[[SimpleNamespace(block_id=i) for i in TABLE[0]]])
    connector.update_state_after_alloc(request, blocks, 0)
    return connector.script.step(request, 32, TABLE)


@pytest.mark.parametrize("status", ["ABORTED", "IGNORED", "ERROR", "STOPPED", "LENGTH_CAPPED"])
def test_B10_only_a_request_that_ended_by_itself_is_handed_over(
    connector: Any,
    status: str,
) -> None:
    from vllm.v1.request import RequestStatus

    request = request_of(33, {"do_remote_decode": True})
    run(connector, request)
    connector.script.steps()
    request.status = RequestStatus[f"FINISHED_{status}"]
    delayed, params = connector.request_finished_all_groups(request, TABLE)
    connector.script.step()
    states = [handing.state for step in connector.script.steps() for handing in step.handed_over]
    whole = status in {"STOPPED", "LENGTH_CAPPED"}
    assert not delayed
    assert (params is not None) == whole
    assert states == (["done"] if whole else ["gone"]), "nothing is held for anybody"


def test_B10_a_request_preempted_in_its_last_step_names_no_blocks(connector: Any) -> None:
    """With asynchronous scheduling its output comes after its blocks have gone."""
    from vllm.v1.request import RequestStatus

    request = request_of(33, {"do_remote_decode": True})
    run(connector, request)
    request.num_computed_tokens = 0
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    delayed, params = connector.request_finished_all_groups(request, ([],))
    assert not delayed
    assert params is not None
    assert (params["remote_num_tokens"], params["remote_block_ids"]) == (0, [[]])
    assert remote_of(params) is NO_REMOTE, "the decode engine computes it"
    connector.script.step()
    handing = [one.state for step in connector.script.steps() for one in step.handed_over]
    assert handing[-1:] == ["gone"], "nothing is held for anybody"


@pytest.mark.parametrize("handed", [False, True])
def test_B10_output_of_a_preempted_hand_over_that_is_under_way_is_computed_again(
    connector: Any,
    *,
    handed: bool,
) -> None:
    """By the engine that has it to do: else it would end the request, whose blocks have gone."""
    from vllm.v1.core.sched.output import SchedulerOutput

    request = request_of(33, {"do_remote_decode": True} if handed else None)
    run(connector, request)
    output = SchedulerOutput.make_empty()
    output.preempted_req_ids = {request.request_id, "unknown"}
    connector._scheduler.half.build_meta = lambda step: StepMeta() if set(step.preempted) else None
    connector.build_connector_meta(output)
    assert request.drop_stale_output == handed


def test_O14_requests_whose_blocks_may_go_are_reported_as_sent(connector: Any) -> None:
    from connectors.vllm import TieredMetadata

    loads = {"l", "f"}, {"f"}
    connector._worker = SimpleNamespace(finished_loads=lambda _step: loads)
    connector.bind_connector_metadata(TieredMetadata(StepMeta(sent=("a", "b"))))
    found = connector.get_transfer_results(set())
    assert found.finished_sending == {"a", "b"}
    assert (found.finished_recving, found.failed_recving) == loads


@pytest.mark.parametrize("adapter", [False, True])
def test_B3_a_request_with_an_adapter_is_neither_stored_nor_loaded(
    connector: Any,
    *,
    adapter: bool,
) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import RequestStatus

    lora = LoRARequest("a", 1, "/a") if adapter else None
    request = request_of(33, {"do_remote_decode": True}, lora_request=lora)
    meta = run(connector, request)
    steps = connector.script.steps()
    assert any(step.lookups for step in steps) is not adapter
    assert any(step.handed_over for step in steps) is not adapter
    assert bool(meta.stores) is not adapter
    assert not meta.loads
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, params = connector.request_finished_all_groups(request, TABLE)
    assert (params is None) is adapter
    assert bool(connector.script.step().early) is False


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("params", [None, {"do_remote_decode": True}])
def test_O6_a_prompt_whose_logprobs_are_wanted_asks_nothing_and_is_stored(
    connector: Any,
    logprobs: int | None,
    params: dict[str, Any] | None,
) -> None:
    request = request_of(33, params, prompt_logprobs=logprobs)
    assert request.skip_reading_prefix_cache is (logprobs is not None)
    connector.on_new_request(request)
    assert bool(connector.script.lookups()) is (logprobs is None)
    assert run(connector, request).stores
    assert ("deferred" in connector.script.half.take_stats()) is (logprobs is None)


def test_O13_a_copy_is_over_when_all_ranks_have_said_so() -> None:
    from connectors.vllm import TieredWorkerMetadata

    one = TieredWorkerMetadata(Counter({1: 1, 2: 1}))
    both = one.aggregate(TieredWorkerMetadata(Counter({2: 1, 3: 1})))
    assert both.stores_over == {1: 1, 2: 2, 3: 1}
    with pytest.raises(TypeError, match="NoneType among the reports of TieredConnector"):
        one.aggregate(None)
