"""What vLLM's own requests are told for a hand-over, and what is read of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from connectors.engine_interface import Geometry
from connectors.partial_block import partial_block_of
from kvstore.core.types import GroupRule
from tests.engine.facts import IMPORTS_VLLM
from tests.harness.script import Script

pytestmark = IMPORTS_VLLM

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
    """Of an engine whose second group holds recurrent states."""
    return adapter(Script(STATES))


@pytest.mark.parametrize("tokens", [2, 40, 48, 49])
def test_B5_a_prefill_request_ends_one_token_before_its_prompt(connector: Any, tokens: int) -> None:
    request = request_of(tokens, dict(HANDED))
    front_end = request.prompt_token_ids
    connector.on_new_request(request)
    assert request.prompt_token_ids == list(range(tokens - 1))
    assert len(front_end) == tokens, "the front end has the same list"
    assert (request.num_prompt_tokens, request.num_tokens) == (tokens - 1, tokens - 1)
    assert list(request.all_token_ids) == request.prompt_token_ids
    assert request.max_tokens == 1
    assert len(request.block_hashes) == (tokens - 1) // HASH_TOKENS
    request.append_output_token_ids(7)
    fresh = request_of(tokens, prompt_token_ids=[*range(tokens - 1), 7])
    assert request.block_hashes == fresh.block_hashes, "of the token that was sampled"


def test_B5_what_was_shortened_is_not_shortened_again(connector: Any) -> None:
    params = dict(HANDED)
    request = request_of(40, params)
    connector.on_new_request(request)
    connector.on_new_request(request)
    assert request.num_tokens == 39
    again = request_of(39, params)  # the parameters say so, too
    connector.on_new_request(again)
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
    connector: Any,
    tokens: int,
    params: dict[str, Any] | None,
    more: dict[str, Any],
) -> None:
    features = more.pop("mm_features", [])
    request = request_of(tokens, None if params is None else dict(params), **more)
    request.mm_features = features
    connector.on_new_request(request)
    assert (request.num_tokens, request.num_prompt_tokens) == (tokens, tokens)
    assert request.max_tokens == 9


def test_B5_without_states_nothing_is_left_out(connector: Any) -> None:
    connector._scheduler._states = frozenset()
    request = request_of(40, dict(HANDED))
    connector.on_new_request(request)
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
