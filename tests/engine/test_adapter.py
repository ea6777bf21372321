"""What the adapter passes on between vLLM and the two halves, held line by line."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from connectors.engine_interface import Geometry
from connectors.kv_transfer_params import NO_REMOTE, Transfer, remote_of
from connectors.partial_block import partial_block_of
from connectors.step_meta import StepMeta
from kvstore.core.types import GroupRule
from tests.engine.facts import IMPORTS_VLLM
from tests.harness.script import Script

pytestmark = IMPORTS_VLLM

TOKENS = Geometry(16, 16, (16,), (GroupRule(),))
TABLE = ([1, 2],)
HASH_TOKENS = 16
STATES = Geometry(32, HASH_TOKENS, (32, 32), (GroupRule(), GroupRule(1, exact=True)))
HANDED = {"do_remote_decode": True}
GIVEN = {"do_remote_prefill": True, "remote_num_tokens": 40}


def request_of(tokens: int, params: dict[str, Any] | None = None, **more: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    wanted = more.pop("prompt_logprobs", None)
    extra = None if params is None else {"kv_transfer_params": params}
    sampling = SamplingParams(max_tokens=9, extra_args=extra, prompt_logprobs=wanted)
    hasher = get_request_block_hasher(HASH_TOKENS, sha256)
    arguments = {"prompt_token_ids": list(range(tokens)), "block_hasher": hasher} | more
    return Request("r", sampling_params=sampling, pooling_params=None, **arguments)


def adapter(script: Script) -> Any:
    """Both sides of a connector around a scripted half."""
    from connectors import vllm as ours
    from connectors.vllm_scheduler import SchedulerSide

    made = object.__new__(ours.TieredConnector)
    made._scheduler = SchedulerSide(script.half, None, script.geometry)
    made._scheduler.manager = SimpleNamespace(prefix_cache_lookup_enabled=lambda _request: False)
    made._worker = None
    made._connector_metadata = None
    made.script = script
    return made


@pytest.fixture
def connector() -> Any:
    """Of an engine with one group; a peer can reach its store."""
    script = Script(TOKENS)
    script.client.side_channel = "127.0.0.1:9500"
    script.half._hand_overs._transfer = Transfer("engine")
    return adapter(script)


@pytest.fixture
def with_states() -> Any:
    """Of an engine whose second group holds recurrent states."""
    return adapter(Script(STATES))


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


def test_O15_blocks_computed_from_a_failed_load_leave_the_engines_prefix_cache(
    connector: Any,
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

    def made(ahead: object, batches: int = 1, *, v2: bool = False) -> Any:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=ahead),
            max_concurrent_batches=batches,
            use_v2_model_runner=v2,
        )
        return loads_in_steps(config, cache, Geometry(32, 16, (16,), (GroupRule(),)))

    assert made(ahead=False)._block_bytes == 2 * 128
    assert made(ahead=True) is None
    assert made(ahead=None) is None, "not decided"
    assert made(ahead=False, batches=2) is None
    assert made(ahead=False, v2=True) is None, "it does not compute again from where it was"


def test_O6_the_rate_of_copies_reaches_the_scheduler(
    connector: Any,
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


# What the connector sets on vLLM's requests for a hand-over, and reads from them


@pytest.mark.parametrize("tokens", [2, 40, 48, 49])
def test_B5_a_prefill_request_ends_one_token_before_its_prompt(
    with_states: Any, tokens: int
) -> None:
    request = request_of(tokens, dict(HANDED))
    front_end = request.prompt_token_ids
    with_states.on_new_request(request)
    assert request.prompt_token_ids == list(range(tokens - 1))
    assert len(front_end) == tokens, "the front end has the same list"
    assert (request.num_prompt_tokens, request.num_tokens) == (tokens - 1, tokens - 1)
    assert list(request.all_token_ids) == request.prompt_token_ids
    assert request.max_tokens == 1
    assert len(request.block_hashes) == (tokens - 1) // HASH_TOKENS
    request.append_output_token_ids(7)
    fresh = request_of(tokens, prompt_token_ids=[*range(tokens - 1), 7])
    assert request.block_hashes == fresh.block_hashes, "of the token that was sampled"


def test_B5_what_was_shortened_is_not_shortened_again(with_states: Any) -> None:
    params = dict(HANDED)
    request = request_of(40, params)
    with_states.on_new_request(request)
    with_states.on_new_request(request)
    assert request.num_tokens == 39
    again = request_of(39, params)  # the parameters say so, too
    with_states.on_new_request(again)
    assert again.num_tokens == 39


@pytest.mark.parametrize(
    ("tokens", "params", "more"),
    [
        (1, HANDED, {}),
        (40, None, {}),
        (40, GIVEN, {}),
        (40, {"do_remote_decode": False}, {}),
        (
            40,
            HANDED,
            {"mm_features": [SimpleNamespace(mm_position=SimpleNamespace(offset=30, length=10))]},
        ),
    ],
    ids=["one-token", "no-parameters", "decode", "not-handed", "ends-with-an-image"],
)
def test_B5_other_requests_are_left_alone(
    with_states: Any,
    tokens: int,
    params: dict[str, Any] | None,
    more: dict[str, Any],
) -> None:
    features = more.pop("mm_features", [])
    request = request_of(tokens, None if params is None else dict(params), **more)
    request.mm_features = features
    with_states.on_new_request(request)
    assert (request.num_tokens, request.num_prompt_tokens) == (tokens, tokens)
    assert request.max_tokens == 9


def test_B5_without_states_nothing_is_left_out(with_states: Any) -> None:
    with_states._scheduler._states = frozenset()
    request = request_of(40, dict(HANDED))
    with_states.on_new_request(request)
    assert request.num_tokens == 40


def test_B5_the_last_state_of_a_request_that_ended_is_in_its_table() -> None:
    from connectors import vllm_scheduler as compat

    request = request_of(72)
    blocks = ([1, 2, 3], [0, 0, 9])
    request.num_computed_tokens = 71
    shown = compat.last_table(request, blocks, frozenset({1}), STATES)
    assert shown == [[1, 2, 3], [0, 0, 9]]
    request.num_computed_tokens = 64
    assert compat.last_table(request, ([1, 2], [0, 8, 9]), frozenset({1}), STATES) == [
        [1, 2],
        [0, 8, 0],
    ]
    request.num_in_flight_tokens = 1
    shown = compat.last_table(request, blocks, frozenset({1}), STATES)
    assert shown == [[1, 2, 3], [0, 0, 0]], "a step under way goes on from it"
    assert compat.last_table(request, blocks, frozenset(), STATES) is blocks


def test_B6_a_prompt_without_token_ids_announces_nothing() -> None:
    import torch

    from connectors import vllm_scheduler as compat

    assert compat.transfer_of(request_of(40)) is None
    assert compat.transfer_of(request_of(40, dict(GIVEN))) == GIVEN
    embedded = {"prompt_token_ids": None, "prompt_embeds": torch.zeros(40, 8)}
    for params in (GIVEN, HANDED):
        request = request_of(40, dict(params), **embedded)
        assert compat.transfer_of(request) is None
    mixed = {"prompt_embeds": torch.zeros(40, 8), "prompt_is_token_ids": [True] * 30 + [False] * 10}
    assert compat.transfer_of(request_of(40, dict(GIVEN), **mixed)) is None


def test_B17_an_image_has_no_place_in_a_tails_name() -> None:
    from connectors import vllm_scheduler as compat

    request = request_of(40, dict(GIVEN))
    request.mm_features = [SimpleNamespace()]
    assert compat.transfer_of(request) == GIVEN | {"remote_num_tokens": 0}


def test_B17_a_tail_is_made_of_vllms_tokens() -> None:
    geometry = Geometry(32, HASH_TOKENS, (32,), (GroupRule(),))
    one = partial_block_of(geometry, request_of(40), 40, "p")
    other = partial_block_of(geometry, request_of(41), 40, "p")
    assert one is not None
    assert one == other
    assert len(one.hash) == len(request_of(40).block_hashes[0]), "as wide as vLLM's"
