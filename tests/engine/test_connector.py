"""The connector's own decisions, called as vLLM calls it, without an engine around it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from connectors.engine_interface import Geometry
from kvstore.core.errors import ConfigError, NotSupported
from kvstore.core.types import GroupRule
from kvstore.wire import engine as p
from tests.engine.facts import IMPORTS_VLLM
from tests.harness.script import Request, Script

pytestmark = IMPORTS_VLLM

TOKENS = Geometry(32, 16, (16, 32), (GroupRule(), GroupRule(2)))


def config(**changes: object) -> Any:
    """What the connector reads of an engine that is served; changes: by dotted name."""
    made = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", enable_prefix_caching=True),
        model_config=SimpleNamespace(is_encoder_decoder=False),
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
    """Makes a scheduler's side whose half is a scripted one."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorRole,
    )

    from connectors import vllm as ours
    from connectors import vllm_compat, vllm_scheduler

    def begin(self: Any, config: Any, *_: object) -> None:
        self._vllm_config = config

    monkeypatch.setattr(KVConnectorBase_V1, "__init__", begin)
    monkeypatch.setattr(vllm_compat, "geometry", lambda *_: TOKENS)

    def made(**changes: object) -> Any:
        script = Script(TOKENS)
        monkeypatch.setattr(vllm_scheduler, "start_half", lambda *_, **__: script.half)
        connector = ours.TieredConnector(
            config(**changes), KVConnectorRole.SCHEDULER, SimpleNamespace()
        )
        connector.script = script
        return connector

    return made


# O13: what a step gives new content, so that the fence knows it


def step(**fields: object) -> Any:
    cached = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    empty = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, kv_cache_block_copies=None
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
    ],
    ids=["nothing", "new", "new-in-part", "more-blocks", "no-block", "resumed", "copied"],
)
def test_O13_blocks_that_get_new_content_are_named(
    make: Callable[..., Any], fields: dict[str, object], written: list[int]
) -> None:
    assert make()._scheduler.written(step(**fields)) == written


# O14


def test_O14_a_finished_request_never_keeps_its_blocks(make: Callable[..., Any]) -> None:
    from vllm.v1.request import RequestStatus

    connector = make()
    more = {"lora_request": None, "kv_transfer_params": None, "skip_reading_prefix_cache": False}
    more["sampling_params"] = None
    ended = RequestStatus.FINISHED_LENGTH_CAPPED
    request = SimpleNamespace(**vars(Request("r", 64)), **more, status=ended)
    connector.on_new_request(request)
    assert connector.request_finished_all_groups(request, ([1, 2, 3, 4], [5, 6])) == (False, None)
    assert connector.request_finished_all_groups(request, ([1, 2, 3, 4], [5, 6])) == (False, None)


# O15


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


# O16


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
    assert on_disk.block_hashes == here.block_hashes
    assert on_disk.token_ids == here.token_ids
    assert list(connector.take_events()) == []


# O18


@pytest.mark.parametrize(
    ("engine", "store"), [("e", "e"), ("e_dp0", "e"), ("e_dp12", "e"), ("e_dpx", "e_dpx")]
)
def test_O18_replicas_of_an_engine_share_a_private_store(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, engine: str, store: str
) -> None:
    from kvstore import launch

    monkeypatch.setattr(launch, "ensure", lambda name, *_: name)
    assert make(kv_transfer_config__engine_id=engine)._find_store() == store


# O22


def test_S2_an_engine_whose_id_no_message_can_hold_is_refused(make: Callable[..., Any]) -> None:
    make(kv_transfer_config__engine_id="e" * 256)
    with pytest.raises(ConfigError, match="up to 256 characters, found 257"):
        make(kv_transfer_config__engine_id="e" * 257)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_config__is_encoder_decoder": True}, "an encoder-decoder model, served are"),
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
