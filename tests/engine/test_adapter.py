"""The connector's own decisions, and what it passes on between vLLM and the two halves."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from connectors.engine_interface import Geometry
from connectors.kv_transfer_params import NO_REMOTE, Transfer, remote_of
from connectors.partial_block import partial_block_of
from connectors.step_meta import StepMeta
from kvstore.core.errors import ConfigError, NotSupported
from kvstore.core.types import GroupRule
from kvstore.logs import LINES_MAX
from kvstore.wire import engine as p
from tests.engine.facts import IMPORTS_VLLM
from tests.harness.script import Request, Script

pytestmark = IMPORTS_VLLM

TOKENS = Geometry(16, 16, (16,), (GroupRule(),))
PARTS = Geometry(32, 16, (16, 32), (GroupRule(), GroupRule(2)))
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


def config(**changes: object) -> Any:
    """What the connector reads of an engine that is served; changes: by dotted name."""
    made = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", enable_prefix_caching=True),
        model_config=SimpleNamespace(is_encoder_decoder=False, enable_sleep_mode=False),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, async_scheduling=True),
        max_concurrent_batches=2,
        use_v2_model_runner=False,
        parallel_config=SimpleNamespace(
            nnodes=1,
            distributed_executor_backend="mp",
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            world_size=2,
        ),
        kv_transfer_config=SimpleNamespace(
            kv_connector="TieredConnector",
            kv_role="kv_both",
            engine_id="engine",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"cpu": "16MiB"},
        ),
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        setattr(getattr(made, part), field, value)
    return made


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a scheduler's side around a scripted half. changes: of the engine's configuration."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorRole,
    )

    from connectors import vllm as ours
    from connectors import vllm_compat, vllm_scheduler

    def begin(self: Any, config: Any, *_: object) -> None:
        self._vllm_config, self._connector_metadata = config, None

    monkeypatch.setattr(KVConnectorBase_V1, "__init__", begin)

    def made(geometry: Geometry = PARTS, **changes: object) -> Any:
        script = Script(geometry)
        monkeypatch.setattr(vllm_compat, "geometry", lambda *_: geometry)
        monkeypatch.setattr(vllm_scheduler, "start_half", lambda *_, **__: script.half)
        connector: Any = ours.TieredConnector(
            config(**changes), KVConnectorRole.SCHEDULER, SimpleNamespace()
        )
        manager = SimpleNamespace(prefix_cache_lookup_enabled=lambda _request: False)
        connector.script, connector._scheduler.manager = script, manager
        return connector

    return made


@pytest.fixture
def connector(make: Callable[..., Any]) -> Any:
    """Of an engine with one group; a peer can reach its store."""
    made = make(TOKENS)
    made.script.client.side_channel = "127.0.0.1:9500"
    made.script.half._hand_overs._transfer = Transfer("engine")
    return made


@pytest.fixture
def with_states(make: Callable[..., Any]) -> Any:
    """Of an engine whose second group holds recurrent states."""
    return make(STATES)


def run(connector: Any, request: Any) -> Any:
    """Let a request arrive, be admitted and computed; the step's copies."""
    connector.on_new_request(request)
    connector.get_num_new_matched_tokens(request, 0)
    blocks = SimpleNamespace(blocks=[[SimpleNamespace(block_id=i) for i in TABLE[0]]])
    connector.update_state_after_alloc(request, blocks, 0)
    return connector.script.step(request, 32, TABLE)


def test_O22_handshakes_of_other_connectors_with_pipeline_stages_are_left_alone(
    connector: Any,
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    several = object.__new__(MultiConnector)
    several._connectors = [connector]
    theirs = {(stage, 0): KVConnectorHandshakeMetadata() for stage in (0, 1)}
    base: Any = super(type(connector), connector)
    with pytest.raises(ValueError, match="pp_rank > 0"):
        base.set_xfer_handshake_metadata_pp_aware(theirs)
    several.set_xfer_handshake_metadata_pp_aware(theirs)
    assert connector.get_handshake_metadata() is None


def test_Q40_a_request_with_wrong_limits_is_not_handed_over(connector: Any) -> None:
    """It would be stored without its tenant, and on a disk that it wants to keep off."""
    from vllm.v1.request import RequestStatus

    request = request_of(33, HANDED | {"tenant": "a", "kv_store_tiers": "x"})
    meta = run(connector, request)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, params = connector.request_finished_all_groups(request, TABLE)
    connector.script.step()
    assert params is None
    assert not meta.stores
    assert not any(step.handed_over for step in connector.script.steps())


@pytest.mark.parametrize("status", ["ABORTED", "IGNORED", "ERROR", "STOPPED", "LENGTH_CAPPED"])
def test_B10_only_a_request_that_ended_by_itself_is_handed_over(
    connector: Any, status: str
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
    connector: Any, *, handed: bool
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


def test_O6_loads_begin_once_and_before_the_forward_pass(connector: Any) -> None:
    """vLLM itself starts those that no step waits for after it."""
    from connectors.vllm import TieredMetadata

    begun: list[StepMeta] = []
    connector._worker = SimpleNamespace(start_loads=begun.append)
    connector.bind_connector_metadata(TieredMetadata(StepMeta(sent=("a",))))
    assert begun == [StepMeta(sent=("a",))]
    connector.start_load_kv(None)
    assert len(begun) == 1


def test_O14_requests_whose_blocks_may_go_are_reported_as_sent(connector: Any) -> None:
    from connectors.vllm import TieredMetadata

    loads = {"l", "f"}, {"f"}
    connector._worker = SimpleNamespace(
        start_loads=lambda _step: None, finished_loads=lambda _step: loads
    )
    connector.bind_connector_metadata(TieredMetadata(StepMeta(sent=("a", "b"))))
    found = connector.get_transfer_results(set())
    assert found.finished_sending == {"a", "b"}
    assert (found.finished_recving, found.failed_recving) == loads


@pytest.mark.parametrize("adapter", [False, True])
def test_B3_a_request_with_an_adapter_is_neither_stored_nor_loaded(
    connector: Any, *, adapter: bool
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


@pytest.mark.parametrize(
    ("sampling", "images", "repeatable"),
    [
        ({}, 0, True),
        (None, 0, True),  # a pooling model
        ({}, 1, False),
        ({"seed": 7}, 0, False),
        ({"prompt_logprobs": 0}, 0, False),
    ],
    ids=["text", "pooling", "image", "seed", "prompt-logprobs"],
)
def test_O6_O15_only_a_request_that_can_be_computed_after_all_loads_in_a_step(
    connector: Any, sampling: dict[str, int] | None, images: int, repeatable: bool
) -> None:
    """vLLM's workers do not get the images that loaded tokens cover, and without them they fail."""
    from vllm import SamplingParams

    request = request_of(40)
    request.sampling_params = None if sampling is None else SamplingParams(**sampling)
    request.mm_features = [SimpleNamespace()] * images
    connector.on_new_request(request)
    assert connector.script.half._requests["r"].repeatable is repeatable


def test_O6_vllm_keeps_the_images_that_loaded_tokens_cover_from_its_workers() -> None:
    """Where it does not, a request with images may load in a step; see is_repeatable."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
    from vllm.v1.core.sched.output import NewRequestData

    place = PlaceholderRange(offset=4, length=16)
    image = MultiModalFeatureSpec(MultiModalKwargsItem(), "image", "hash", place)
    request = request_of(40, mm_features=[image])
    request.num_computed_tokens = 32
    (sent,) = NewRequestData.from_request(request, ([1],)).mm_features
    assert sent.data is None


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
    connector.script.half.step_loads_failed = lambda bad: {*bad, 4}
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


def test_O6_the_rate_of_copies_reaches_the_scheduler(connector: Any) -> None:
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


def test_O26_a_hint_comes_with_a_request_or_among_its_parameters() -> None:
    from connectors import vllm_scheduler as compat

    hint: dict[str, Any] = {"kv_hint": {"actions": []}}
    assert compat.transfer_of(request_of(40, dict(hint))) == hint
    assert compat.transfer_of(request_of(40, kv_hints=hint["kv_hint"])) == hint
    request = request_of(40, dict(HANDED), kv_hints=hint["kv_hint"])
    assert compat.transfer_of(request) == HANDED | hint
    assert request.kv_transfer_params == HANDED, "as it came"


def test_O26_for_a_hint_the_engines_own_cache_is_not_searched() -> None:
    """vLLM does it itself, and in a long prompt it takes long."""
    from connectors import vllm_scheduler as compat

    seen: list[Any] = []
    half: Any = SimpleNamespace(on_new_request=lambda *given, **_: seen.append(given))
    side = compat.SchedulerSide(half, None, STATES)
    request = request_of(40, kv_hints={"actions": []})
    side.on_new_request(request)  # it has no manager, whose cache that is
    assert seen == [(request, {"kv_hint": {"actions": []}}, 0)]


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


def test_S2_lines_of_wrong_limits_that_were_left_out_are_counted_once_their_time_is_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from connectors import vllm_scheduler as compat

    half: Any = SimpleNamespace(
        on_new_request=lambda *_, **__: None,
        limits_refused=lambda: None,
        handed_over=lambda _: (),
        build_meta=lambda _: None,
    )
    side = compat.SchedulerSide(half, None, STATES)
    for _ in range(LINES_MAX + 7):
        side.on_new_request(request_of(40, {"kv_load_tiers": 1}))
    assert len(caplog.messages) == LINES_MAX
    monkeypatch.setattr("kvstore.logs.WINDOW_NS", 0)
    nothing = {"preempted_req_ids": None, "kv_connector_block_state": None}
    side.build_meta(step(**nothing, num_scheduled_tokens={}))
    assert caplog.messages[LINES_MAX:] == ["wrong limits: 7 more in the last 0 s"]


# What a step gives new content, so that the fence knows it


def step(**fields: object) -> Any:
    cached = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    empty = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        kv_cache_block_copies=None,
        new_block_ids_to_zero=None,
    )
    vars(empty).update(fields)
    return empty


def new(computed: int) -> Any:
    return SimpleNamespace(block_ids=([1, 2, 3, 4], [5, 6]), num_computed_tokens=computed)


def cached(ids: object, computed: int, *, resumed: bool) -> Any:
    return SimpleNamespace(
        req_ids=["r"],
        new_block_ids=[ids],
        num_computed_tokens=[computed],
        resumed_req_ids={"r"} if resumed else set(),
    )


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({}, []),
        ({"scheduled_new_reqs": [new(32)]}, [3, 4, 6]),
        # A block that is computed in part is written.
        ({"scheduled_new_reqs": [new(48)]}, [4, 6]),
        ({"scheduled_cached_reqs": cached(([7], [8]), 64, resumed=False)}, [7, 8]),
        ({"scheduled_cached_reqs": cached(None, 64, resumed=False)}, []),
        ({"scheduled_cached_reqs": cached(([1, 2, 3], [4, 5]), 32, resumed=True)}, [3, 5]),
        ({"kv_cache_block_copies": [SimpleNamespace(src_block_id=1, dst_block_id=9)]}, [9]),
        # Blocks of a request that was preempted in the schedule that gave it them.
        ({"new_block_ids_to_zero": [5, 6]}, [5, 6]),
    ],
    ids=["nothing", "new", "new-in-part", "more-blocks", "no-block", "resumed", "copied", "zeroed"],
)
def test_O13_blocks_that_get_new_content_are_named(
    make: Callable[..., Any], fields: dict[str, object], written: list[int]
) -> None:
    assert make()._scheduler.written(step(**fields)) == written


def test_O15_a_failed_load_is_computed_whatever_the_engine_was_told(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        connector = make(kv_transfer_config__kv_load_failure_policy="fail")
    assert connector._config.kv_transfer_config.kv_load_failure_policy == "recompute"
    told = "kv_load_failure_policy of TieredConnector is 'fail': set to 'recompute'"
    assert told in caplog.text
    caplog.clear()
    make()
    assert "kv_load_failure_policy" not in caplog.text


@pytest.mark.parametrize("ints", [True, False])
def test_O16_events_have_hashes_in_the_form_of_the_engines_own(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, *, ints: bool
) -> None:
    import torch
    from vllm.distributed.kv_events import KVEventBatch
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(ints)))
    connector = make()
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    connector._scheduler._cache = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]
    )
    script, request = connector.script, Request("r", 64)
    script.client.collect_events = True
    script.half.events.extra_of = lambda _: lambda *_: [("salt",), None]
    script.arrive(request)
    key = script.key(request, 1, 0)
    script.inbox.append(p.Answers(added=(key,), disk_added=(key,)))
    script.inbox.append(p.Answers(removed=(key,)))
    script.step()
    encoded = msgspec.msgpack.encode(KVEventBatch(0.0, list(connector.take_events())))
    here, on_disk, removed = msgspec.msgpack.decode(encoded, type=KVEventBatch).events
    names = [maybe_convert_block_hash(BlockHash(name)) for name in request.block_hashes]
    assert all(isinstance(name, int if ints else bytes) for name in names)
    assert (here.block_hashes, here.parent_block_hash) == (names[2:], names[1])
    assert removed.block_hashes == names[2:]
    assert [event.medium for event in (here, on_disk, removed)] == ["CPU", "STORAGE", "CPU"]
    assert [event.locality for event in (here, on_disk, removed)] == ["LOCAL"] * 3
    assert [event.group_idx for event in (here, on_disk, removed)] == [0, 0, 0]
    assert (here.block_size, here.token_ids) == (16, list(range(32, 64)))
    assert (here.kv_cache_spec_kind, here.lora_id, here.lora_name) == ("full_attention", None, None)
    assert on_disk.extra_keys == here.extra_keys == [("salt",), None]
    assert on_disk.block_hashes == here.block_hashes
    assert on_disk.token_ids == here.token_ids
    assert list(connector.take_events()) == []


@pytest.mark.parametrize("kind", ["salt", "image", "both", "embeds", "text"])
def test_O16_what_else_is_hashed_is_told_as_the_engine_tells_it(kind: str) -> None:
    import torch
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

    from connectors.late_stores import PastRequest
    from connectors.vllm_scheduler import extra_of

    images = [
        MultiModalFeatureSpec(None, "image", name * 64, PlaceholderRange(offset, length))
        for name, offset, length in (("a", 3, 40), ("b", 50, 9), ("c", 80, 16))
    ]
    more: dict[str, Any] = {}
    if kind in ("salt", "both"):
        more["cache_salt"] = "s"
    if kind in ("image", "both"):
        more["mm_features"] = images
    if kind == "embeds":
        more |= {"prompt_embeds": torch.ones(128, 4), "prompt_token_ids": None}
    request = request_of(128, **more)
    extra = extra_of(request)
    if kind == "text":
        assert extra is None
        return
    assert extra is not None
    assert extra_of(PastRequest("r", request.block_hashes, (), extra)) is extra
    for step in (16, 32):
        keys, at = [], 0  # as vLLM makes its own events: the next block from the last one's image
        for first in range(0, 128, step):
            found, at = generate_block_hash_extra_keys(request, first, first + step, at)
            keys.append(found)
        expected = to_event_extra_keys(keys)
        assert expected is not None
        got = [
            entry
            for first in range(0, 128, 32)
            for entry in extra(first, first + 32, step) or [None] * (32 // step)
        ]
        assert got == expected
        assert any(got)


@pytest.mark.parametrize(
    ("engine", "store"), [("e", "e"), ("e_dp0", "e"), ("e_dp12", "e"), ("e_dpx", "e_dpx")]
)
def test_O18_replicas_of_an_engine_share_a_private_store(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, engine: str, store: str
) -> None:
    from kvstore import launch

    monkeypatch.setattr(launch, "ensure", lambda settings: settings["server"]["socket"])
    address = make(kv_transfer_config__engine_id=engine)._find_store()
    assert address == launch.address_of(store)


def test_S2_an_engine_whose_id_no_message_can_hold_is_refused(make: Callable[..., Any]) -> None:
    make(kv_transfer_config__engine_id="e" * 256)
    with pytest.raises(ConfigError, match="up to 256 characters, found 257"):
        make(kv_transfer_config__engine_id="e" * 257)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_config__is_encoder_decoder": True}, "an encoder-decoder model, served are"),
        ({"model_config__enable_sleep_mode": True}, "enable_sleep_mode True, expected False"),
        ({"kv_transfer_config__kv_role": "kv_producer"}, "'kv_producer', expected 'kv_both'"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, "'xxhash', expected one of"),
        ({"parallel_config__nnodes": 2}, "an engine on several nodes, expected one node"),
        ({"parallel_config__distributed_executor_backend": "ray"}, "on several nodes"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism, expected"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "context parallelism, expected"),
        (
            {
                "cache_config__enable_prefix_caching": False,
                "scheduler_config__enable_chunked_prefill": False,
            },
            "prefix caching and chunked prefill are both off, expected one of them on",
        ),
    ],
    ids=str,
)
def test_O22_what_is_not_served_is_refused_in_one_message(
    make: Callable[..., Any], changes: dict[str, object], told: str
) -> None:
    make(cache_config__enable_prefix_caching=False)  # this alone is
    make(scheduler_config__enable_chunked_prefill=False)
    with pytest.raises(NotSupported, match="kvstore does not serve this engine: ") as caught:
        make(**changes)
    assert told in str(caught.value)
