"""vLLM's scheduler and cache manager, our connector, and a model that checks what it attends to."""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch

from tests.harness.patience import WAIT_S

TOKENS, WORDS, VOCAB = 16, 2, 97  # of an engine block; of a token's KV, each of 8 bytes
STATE = 0  # instead of a window: the group has recurrent states
MASK = (1 << 64) - 1
POISON = 0x6B


def mix(state: int, token: int) -> int:
    """Name a token and all before it."""
    mixed = ((state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 29)) * 0x94D049BB133111EB) & MASK
    return mixed >> 1  # fits a signed word


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """What the model makes of a prompt."""
    state, out = 1, list[int]()
    for token in prompt:
        state = mix(state, token)
    for _ in range(count):
        out.append(state % VOCAB)
        state = mix(state, out[-1])
    return out


class WalkedEngine:
    """An engine in one thread; ahead: it schedules a step before it has the last one's output."""

    def __init__(
        self, model: Path, store: str, windows: Sequence[int | None], *, ahead: bool, **more: Any
    ) -> None:
        """windows: of its KV groups, or STATE. more: blocks, budget, running, policy, extra."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        config = self._config(model, store, ahead=ahead, **more)
        cache = self._cache(config, windows)
        self.windows, self.config, self.ahead = windows, config, ahead
        with set_current_vllm_config(config):
            make = KVConnectorFactory.create_connector
            self.worker: Any = make(config, KVConnectorRole.WORKER, cache)
            self.worker.register_kv_caches(self._views)
            init_none_hash(sha256)
            made = AsyncScheduler if ahead else Scheduler
            self.scheduler: Any = made(
                config, cache, StructuredOutputManager(config), TOKENS, TOKENS, log_stats=True
            )
        self._hasher = get_request_block_hasher(TOKENS, sha256)
        self._states: dict[str, Any] = {}
        self._state_places: dict[tuple[str, int], int] = {}  # by request and group, in its table
        self._steps: deque[Any] = deque()
        self._prompts: dict[str, tuple[list[int], int]] = {}
        self.out: defaultdict[str, list[int]] = defaultdict(list)
        self.amid: Callable[[], None] = lambda: None  # what comes while a step runs
        self.spoiled = 0  # requests that read what a load in their step did not bring
        half = self.scheduler.connector._scheduler.half
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker  # steps before it is attached use it
        deadline = time.monotonic() + WAIT_S
        while not half._client.credits or self.worker._worker._copies.session is None:
            assert time.monotonic() < deadline, "it is not attached"
            self._take(self._scheduled())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state

        kv_transfer_state._KV_CONNECTOR_AGENT = None
        self.scheduler.shutdown()
        self.worker.shutdown()

    def _config(self, model: Path, store: str, *, ahead: bool, **more: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        from tests.engine.support import attach

        connector = attach(SimpleNamespace(address=store), **more.get("extra", {}))  # type: ignore[arg-type]
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_batched_tokens=more["budget"],
            max_num_seqs=more["running"],
            scheduling_policy=more["policy"],
            kv_cache_memory_bytes=1 << 26,
            disable_log_stats=False,
            kv_transfer_config=connector,
        ).create_engine_config()
        config.cache_config.block_size = TOKENS
        config.cache_config.num_gpu_blocks = more["blocks"]
        config.cache_config.mamba_cache_mode = "align"
        config.scheduler_config.async_scheduling = ahead
        return config

    def _cache(self, config: Any, windows: Sequence[int | None]) -> Any:
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
            MambaSpec,
            SlidingWindowSpec,
        )

        shape: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": 2 * WORDS}
        shape |= {"dtype": torch.bfloat16}
        blocks, groups = config.cache_config.num_gpu_blocks, []
        for number, window in enumerate(windows):
            spec: Any = FullAttentionSpec(**shape)
            if window == STATE:
                content: dict[str, Any] = {"shapes": ((TOKENS * WORDS,),), "dtypes": (torch.int64,)}
                spec = MambaSpec(block_size=TOKENS, **content, mamba_cache_mode="align")
            elif window is not None:
                spec = SlidingWindowSpec(**shape, sliding_window=window)
            groups.append(KVCacheGroupSpec([f"layer.{number}"], spec))
        page = groups[0].kv_cache_spec.page_size_bytes
        raw = torch.zeros(blocks * page, dtype=torch.uint8)
        self._kv = raw.view(torch.int64).view(blocks, TOKENS, WORDS).numpy()
        names = [group.layer_names[0] for group in groups]
        rows = {name: 1 if w == STATE else TOKENS for name, w in zip(names, windows, strict=True)}
        self._views = {n: raw.view(torch.bfloat16).view(blocks, 1, rows[n], -1) for n in names}
        backend = SimpleNamespace(get_attn_backend=lambda: TritonAttentionBackend)
        config.compilation_config.static_forward_context.update(dict.fromkeys(names, backend))
        tensor = KVCacheTensor(raw.numel(), names, 0, page)  # groups share it: ids are of one pool
        return KVCacheConfig(blocks, [tensor], groups, kv_cache_layout="LBHNC")

    def add(self, name: str, prompt: list[int], count: int, priority: int = 0) -> None:
        """A request arrives."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self._prompts[name] = prompt, count
        wanted = SamplingParams(max_tokens=count, ignore_eos=True)
        request = Request(
            name, list(prompt), wanted, None, priority=priority, block_hasher=self._hasher
        )
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """A client goes."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self._prompts.pop(name, None)

    def step(self) -> bool:
        """As vLLM's EngineCore does; False if there is nothing to do."""
        if self.scheduler.has_requests():
            self._steps.append(self._scheduled())
            if self.ahead and len(self._steps) < 2:
                return True
        if self._steps:
            self._take(self._steps.popleft())
        return bool(self._steps) or self.scheduler.has_requests()

    def finish(self) -> None:
        """Run until all is over: outputs are right, and every block is free."""
        deadline = time.monotonic() + WAIT_S
        while self.step():
            assert time.monotonic() < deadline, f"hangs: {list(self.scheduler.requests)}"
        wrong = [n for n, (prompt, c) in self._prompts.items() if self.out[n] != answer(prompt, c)]
        pool = self.scheduler.kv_cache_manager.block_pool
        assert (wrong, pool.get_num_free_blocks()) == ([], len(self._kv) - 1)
        self._prompts.clear()

    def _scheduled(self) -> tuple[Any, Callable[[], Any]]:
        scheduled = self.scheduler.schedule()
        return scheduled, lambda: self._execute(scheduled)

    def _take(self, step: tuple[Any, Callable[[], Any]]) -> None:
        scheduled, execute = step
        ran = execute()
        self.amid()
        for core in self.scheduler.update_from_output(scheduled, ran).values():
            for output in core.outputs:
                self.out[output.request_id] += output.new_token_ids

    def _execute(self, step: Any) -> Any:
        from vllm.forward_context import set_forward_context
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

        self.worker.handle_preemptions(step.kv_connector_metadata)
        self._update(step)
        if not step.total_num_scheduled_tokens:
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(step, self.config)
        names = list(step.num_scheduled_tokens)
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin._get_kv_connector_output(step) as connector,
        ):
            sampled = [self._forward(n, step.num_scheduled_tokens[n]) for n in names]
        places = {name: place for place, name in enumerate(names)}
        return ModelRunnerOutput(names, places, sampled, kv_connector_output=connector)

    def _update(self, step: Any) -> None:
        """Take in what the step says of requests; nothing of a block that is new survives."""
        over = {*step.finished_req_ids, *(step.preempted_req_ids or ())}
        over |= step.scheduled_cached_reqs.resumed_req_ids
        self._state_places = {k: v for k, v in self._state_places.items() if k[0] not in over}
        for name in step.finished_req_ids:
            self._states.pop(name, None)
        for new in step.scheduled_new_reqs:
            table = [list(ids) for ids in new.block_ids]
            self._states[new.req_id] = SimpleNamespace(
                tokens=list(new.prompt_token_ids), table=table, computed=new.num_computed_tokens
            )
            self._states[new.req_id].prompt = len(new.prompt_token_ids)
            self._spoil(table, new.num_computed_tokens)
        cached = step.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            state, blocks = self._states[name], cached.new_block_ids[place]
            state.computed = cached.num_computed_tokens[place]
            if name in cached.resumed_req_ids:
                state.table = [list(ids) for ids in blocks]
                state.tokens = list(cached.all_token_ids[name])
                self._spoil(state.table, state.computed)
                continue
            if not self.ahead:  # the last output may have been dropped
                del state.tokens[state.prompt + cached.num_output_tokens[place] :]
            if blocks is not None:
                self._spoil(blocks, 0)
                state.table = [old + new for old, new in zip(state.table, blocks, strict=True)]

    def _spoil(self, table: Sequence[Sequence[int]], computed: int) -> None:
        for ids in table:
            self._kv[[block for block in ids[-(-computed // TOKENS) :] if block]] = POISON

    def _left_wrong(self, name: str) -> set[int]:
        """Return the blocks that a request's load in this step did not fill."""
        loads = [job for job in self.worker._step().loads if job.request_id == name]
        targets: set[int] = {block for job in loads for block in job.engine.block_ids}
        return targets.intersection(self.worker._worker._bad_blocks)

    def _forward(self, name: str, count: int) -> list[int]:
        """Compute tokens. Who reads what its own failed load left writes what is wrong."""
        state, chain = self._states[name], [1]
        wrong, spoils = self._left_wrong(name), 0
        for token in state.tokens:
            chain.append(mix(chain[-1], token))
        for group, window in enumerate(self.windows):
            if window == STATE:
                self._go_on(name, group, chain, state.computed + count)
                continue
            first = 0 if window is None else max(0, state.computed - window + 1)
            for at in range(first, state.computed + count):
                place = state.table[group][at // TOKENS], at % TOKENS
                if at >= state.computed:
                    self._kv[place] = chain[at + 1] - spoils, group
                assert place[0], f"{name} has no block for token {at}"
                right = tuple(self._kv[place]) == (chain[at + 1], group)
                assert right or spoils or place[0] in wrong, f"{name}, token {at}"
                spoils = spoils or int(not right)
        self.spoiled += spoils
        if state.computed + count < len(state.tokens):
            return []
        state.tokens.append((chain[-1] + spoils) % VOCAB)
        return [state.tokens[-1]]

    def _go_on(self, name: str, group: int, chain: list[int], end: int) -> None:
        """Take a request's state to a token, as vLLM's preprocess_mamba and its models do."""
        state = self._states[name]
        table, place = state.table[group], (end - 1) // TOKENS
        before = self._state_places.get((name, group), (state.computed - 1) // TOKENS)
        self._state_places[name, group] = place
        assert table[place], f"{name} has no block for its state"
        if state.computed and before != place:
            self._kv[table[place]] = self._kv[table[before]]
        held = (self._kv[table[place]] == (chain[state.computed], group)).all()
        assert held or not state.computed, f"{name}, state of {state.computed} tokens"
        self._kv[table[place]] = chain[end], group


def prompt(family: object, count: int) -> list[int]:
    """Token ids; equal families share a prefix."""
    rng = random.Random(str(family))
    return [rng.randrange(VOCAB) for _ in range(count)]
