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
from tests.engine.test_shortened import request_of
from tests.harness.script import Script

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
]

TOKENS = Geometry(16, 16, (16,), (GroupRule(),))
TABLE = ([1, 2],)


@pytest.fixture
def connector() -> Any:  # noqa: ANN401 - vLLM's classes are Any here
    """Both sides of an engine with one group; a peer can reach its store."""
    from connectors import vllm as ours
    from connectors.vllm_scheduler import SchedulerSide

    script = Script(TOKENS)
    script.client.side_channel = "127.0.0.1:9500"
    script.half._hand_overs._transfer = Transfer("engine")
    made = object.__new__(ours.TieredConnector)
    made._scheduler = SchedulerSide(script.half, None, TOKENS)
    made._scheduler.manager = SimpleNamespace(prefix_cache_lookup_enabled=lambda _request: False)
    made._worker = None
    made._connector_metadata = None
    made.script = script
    return made


def run(connector: Any, request: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Let a request arrive, be admitted and computed; the step's copies."""
    connector.on_new_request(request)
    connector.get_num_new_matched_tokens(request, 0)
    blocks = SimpleNamespace(blocks=[[SimpleNamespace(block_id=i) for i in TABLE[0]]])
    connector.update_state_after_alloc(request, blocks, 0)
    return connector.script.step(request, 32, TABLE)


@pytest.mark.parametrize("status", ["ABORTED", "IGNORED", "ERROR", "STOPPED", "LENGTH_CAPPED"])
def test_B10_only_a_request_that_ended_by_itself_is_handed_over(
    connector: Any,  # noqa: ANN401
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


def test_B10_a_request_preempted_in_its_last_step_names_no_blocks(connector: Any) -> None:  # noqa: ANN401
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
    connector: Any,  # noqa: ANN401
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


def test_O14_requests_whose_blocks_may_go_are_reported_as_sent(connector: Any) -> None:  # noqa: ANN401
    from connectors.vllm import TieredMetadata

    loads = {"l", "f"}, {"f"}
    connector._worker = SimpleNamespace(finished_loads=lambda _step: loads)
    connector.bind_connector_metadata(TieredMetadata(StepMeta(sent=("a", "b"))))
    found = connector.get_transfer_results(set())
    assert found.finished_sending == {"a", "b"}
    assert (found.finished_recving, found.failed_recving) == loads


@pytest.mark.parametrize("adapter", [False, True])
def test_B3_a_request_with_an_adapter_is_neither_stored_nor_loaded(
    connector: Any,  # noqa: ANN401
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
    connector: Any,  # noqa: ANN401
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


def test_O15_blocks_computed_from_a_failed_load_leave_the_engines_prefix_cache(
    connector: Any,  # noqa: ANN401
) -> None:
    """vLLM computes them again, unless the request is aborted before: then they would be found."""
    from vllm.v1.outputs import KVConnectorOutput

    evicted: list[set[int]] = []
    connector._scheduler.manager = SimpleNamespace(evict_blocks=evicted.append)
    connector.script.half.step_load_failed = lambda: [3, 4]
    connector.update_connector_output(KVConnectorOutput())
    assert evicted == []
    connector.update_connector_output(KVConnectorOutput(invalid_block_ids={3}))
    assert evicted == [{3, 4}]


def test_O6_only_an_engine_with_one_step_at_a_time_loads_in_a_step() -> None:
    from connectors.vllm_scheduler import loads_in_steps

    cache = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=640)] * 2, num_blocks=10)

    def made(ahead: object, stages: int) -> Any:  # noqa: ANN401 - None or what is allowed
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=ahead),
            parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        )
        return loads_in_steps(config, cache, Geometry(32, 16, (16,), (GroupRule(),)))

    assert made(ahead=False, stages=1)._block_bytes == 2 * 128
    assert made(ahead=True, stages=1) is None
    assert made(ahead=None, stages=1) is None, "not decided"
    assert made(ahead=False, stages=2) is None


def test_O6_the_rate_of_copies_reaches_the_scheduler(
    connector: Any,  # noqa: ANN401
) -> None:
    from vllm.v1.outputs import KVConnectorOutput

    told: list[tuple[int, float]] = []
    connector.script.half.copied = lambda *copied: told.append(copied)
    copies = iter([(1 << 20, 0.5), (1 << 20, 0.25), (0, 0.0)])
    connector._worker = SimpleNamespace(
        take_stores_over=frozenset, take_copied=lambda: next(copies)
    )
    one, other = (connector.build_connector_worker_meta() for _ in range(2))
    total = one.aggregate(other)
    connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=total))
    assert told == [(2 << 20, 0.75)]
    assert connector.build_connector_worker_meta() is None
