"""The process that holds one vLLM engine: its owner, tests.bench.engine, calls Driver's methods.

In-process, the engine takes a step exactly when this program says so, which makes arrivals and
aborts land on chosen steps. As processes, the engine core runs freely and a step is one of its
outputs, or TICK_S without one.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from tests.bench.engine import Request, Result, short_name

TICK_S = 0.005
NO_FORWARD_PAUSE_S = 0.001  # what vLLM's own core loop sleeps, so that background threads run


# Less than a block, so no connector keeps it.
WARM_UP = Request(id="warm-up", tokens=[3, 4])


class InProcess:
    """The engine core lives here and steps on demand.

    Its step_fn is wrapped because vLLM's client drops the flag that says if the model ran.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._model_ran = False
        inner = self._core.step_fn

        def step_fn() -> Any:
            outputs, self._model_ran = inner()
            return outputs, self._model_ran

        self._core.step_fn = step_fn

    def step(self) -> tuple[list[Any], bool]:
        """Let the core schedule and run once, then give background threads a chance.

        Returns the outputs, and whether the engine had anything to do.
        """
        had_work = bool(self._core.scheduler.has_requests())
        outputs = self._engine.step()
        if not self._model_ran and self._core.scheduler.has_requests():
            time.sleep(NO_FORWARD_PAUSE_S)
        return outputs, had_work


class AsProcesses:
    """The engine core is a process of its own and steps when it likes."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._outputs = engine.engine_core.outputs_queue
        self._resources = engine.engine_core.resources

    def step(self) -> tuple[list[Any], bool]:
        """Take the core's next output, or give up after TICK_S."""
        deadline = time.monotonic() + TICK_S
        while self._outputs.empty():
            if self._resources.engine_dead:  # vLLM itself would wait for an output for ever
                raise RuntimeError("the engine core process died")
            if time.monotonic() > deadline:
                return [], False
            time.sleep(TICK_S / 20)
        return self._engine.step(), True


class Live:
    """A request that is in the engine."""

    def __init__(self, request: Request, step: int) -> None:
        self.request = request
        self.result = Result(request.id)
        self.over = False
        self._added_s = time.perf_counter()
        self._added_step = step

    def take(self, output: Any, step: int) -> None:
        """Add what one step produced; output is a delta."""
        completion, result = output.outputs[0], self.result
        if completion.token_ids and result.ttft_s is None:
            result.ttft_s = time.perf_counter() - self._added_s
            result.steps_to_first_token = step - self._added_step + 1
        result.tokens += completion.token_ids
        for choices in completion.logprobs or ():
            best = sorted((choice.logprob for choice in choices.values()), reverse=True)
            result.margins.append(best[0] - best[1])
        result.cached_tokens = output.num_cached_tokens or 0
        result.kv_transfer_params = output.kv_transfer_params or result.kv_transfer_params
        if output.finished:
            result.finish_reason = str(completion.finish_reason)
            self.over = True


class Driver:
    """One engine; its public methods are what the owner calls."""

    def __init__(
        self, settings: dict[str, Any], connector: dict[str, Any] | None, *, in_process: bool
    ) -> None:
        """settings: of vLLM's EngineArgs. connector: a kv_transfer_config."""
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if connector is not None:
            settings = {"kv_transfer_config": KVTransferConfig(**connector), **settings}
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**settings))
        kind: type[InProcess | AsProcesses] = InProcess if in_process else AsProcesses
        self._stepper = kind(self._engine)
        self._in_process = in_process
        self._adapters: dict[str, int] = {}
        self.run([WARM_UP], 2, 2)  # 1 s, once; else in TTFT
        self._stepper.step()

    def idle_steps(self, steps: int) -> int:
        """Step so many times without adding anything; how many steps had something to do."""
        return sum(self._stepper.step()[1] for _ in range(steps))

    def reset_prefix_cache(self, connector_too: bool) -> bool:
        """Forget the engine's prefix cache, and the connector's; False if a block is in use."""
        return bool(self._engine.reset_prefix_cache(reset_connector=connector_too))

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.engine_core.shutdown()

    def pids(self) -> dict[str, int]:
        """This process, the core and its workers in rank order, as far as they are processes."""
        import psutil

        found = {"driver": os.getpid()}
        for child in psutil.Process().children(recursive=True):
            title = child.cmdline()[0] if child.cmdline() else ""
            if title.startswith("VLLM::EngineCore"):
                found["core"] = child.pid
            elif title.startswith("VLLM::Worker"):
                rank = title.partition("_TP")[2].partition("_")[0] or "0"
                found[f"worker{rank}"] = child.pid
        return found

    def run(self, requests: Sequence[Request], max_tokens: int, logprobs: int) -> list[Result]:
        """Run requests together; logprobs per token, 0 for none."""
        waiting = sorted(requests, key=lambda request: request.arrive_step)
        live: dict[str, Live] = {}
        results: dict[str, Result] = {}
        step = 0
        while waiting or live:
            while waiting and waiting[0].arrive_step <= step:
                request = waiting.pop(0)
                live[request.id] = Live(request, step)
                self._add(request, max_tokens, logprobs)
            self._abort(live, step)
            for output in self._stepper.step()[0]:
                if output.request_id in live:
                    live[output.request_id].take(output, step)
            step += 1
            for name in [name for name, one in live.items() if one.over]:
                results[name] = live.pop(name).result
                if not self._in_process:
                    results[name].steps_to_first_token = None
        return [results[request.id] for request in requests]

    def converse(
        self, sessions: Sequence[Sequence[Sequence[int]]], max_tokens: int, logprobs: int
    ) -> list[list[Result]]:
        """Run sessions at once, each turn of one when its last one is answered.

        sessions: what each user says in each turn. A prompt is all that was said, answers included.
        """
        said = [list(turns[0]) for turns in sessions]
        found: list[list[Result]] = [[] for _ in sessions]
        live: dict[str, tuple[int, Live]] = {}

        def add(number: int) -> None:
            request = Request(id=f"{number}.{len(found[number])}", tokens=list(said[number]))
            live[request.id] = number, Live(request, 0)
            self._add(request, max_tokens, logprobs)

        for number in range(len(sessions)):
            add(number)
        while live:
            for output in self._stepper.step()[0]:
                number, one = live[output.request_id]
                one.take(output, 0)
                if one.over:
                    del live[output.request_id]
                    found[number].append(one.result)
                    if len(found[number]) < len(sessions[number]):
                        said[number] += [*one.result.tokens, *sessions[number][len(found[number])]]
                        add(number)
        return found

    def _add(self, request: Request, max_tokens: int, logprobs: int) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        adapter = None
        if request.adapter is not None:  # the same name for all, a number for each folder
            number = self._adapters.setdefault(request.adapter, len(self._adapters) + 1)
            adapter = LoRARequest("adapter", number, request.adapter)
        prompt: dict[str, Any] = {"prompt_token_ids": request.tokens}
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        extra_args = None
        if request.kv_transfer_params is not None:
            extra_args = {"kv_transfer_params": request.kv_transfer_params}
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens or max_tokens,
            logprobs=logprobs or None,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra_args,
        )
        more: dict[str, Any] = {}
        if request.kv_hints is not None:
            import msgspec
            from vllm.v1.kv_hints import KvHintsEnvelope

            more["kv_hints"] = msgspec.convert(request.kv_hints, KvHintsEnvelope)
        self._engine.add_request(request.id, prompt, params, lora_request=adapter, **more)

    def _abort(self, live: dict[str, Live], step: int) -> None:
        """Abort what is due. vLLM reports nothing for these, so they are marked here."""
        for name, one in live.items():
            if one.request.abort_step is not None and one.request.abort_step <= step:
                self._engine.abort_request([name])
                one.over = True

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name{label=value}; histograms as their _count and _sum."""
        if not self._in_process:  # statistics come with outputs
            while self._stepper.step()[1]:
                pass
        values: dict[str, float] = {}
        for metric in self._engine.get_metrics():
            name, labels = metric.name, metric.labels
            if name.endswith("_info"):  # settings as labels, always 1
                continue
            if hasattr(metric, "value"):
                values[short_name(name, labels)] = metric.value
            elif hasattr(metric, "sum"):
                values[short_name(f"{name}_count", labels)] = metric.count
                values[short_name(f"{name}_sum", labels)] = metric.sum
        return values


def _receive(pipe: Connection, into: queue.SimpleQueue[tuple[str, tuple[Any, ...]]]) -> None:
    """Pass calls on. At their end the parent is gone: take this whole process group along."""
    try:
        while True:
            into.put(pipe.recv())
    except (EOFError, OSError):
        os.killpg(os.getpgrp(), signal.SIGKILL)


def main(fd: int) -> None:
    """Answer calls on a pipe until `close`; an error is sent back, and ends the process.

    The first call has the arguments of Driver. An answer is (what failed, what was returned).
    """
    pipe = Connection(fd)

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        sys.stderr.flush()
        pipe.send(("".join(traceback.format_exception_only(error)).strip(), None))
        os._exit(1)

    sys.excepthook = fail
    calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, calls), daemon=True).start()
    _, (settings, connector, in_process) = calls.get()
    driver = Driver(settings, connector, in_process=in_process)
    name = "pids"
    arguments: tuple[Any, ...] = ()
    while True:
        pipe.send(("", getattr(driver, name)(*arguments)))
        if name == "close":
            sys.stderr.flush()
            os._exit(0)  # exit handlers of engine libraries take two seconds, and some crash
        name, arguments = calls.get()
