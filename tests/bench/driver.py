"""The process that holds one vLLM engine: `python -m tests.bench.driver`, commands on stdin.

The parent side is tests.bench.engine. In-process, the engine takes a step exactly when this
program says so, which makes arrivals and aborts land on chosen steps. As processes, the engine
core runs freely and a step is one of its outputs, or TICK_S without one.

Nothing runs at import: a spawned engine core imports this module again.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol

import msgspec

from tests.bench import wire

TICK_S = 0.005
NO_FORWARD_PAUSE_S = 0.001  # what vLLM's own core loop sleeps, so that background threads run
WARM_UP = wire.Request(id="warm-up", tokens=[3, 4])  # less than a block, so no connector keeps it


class Stepper(Protocol):
    """How the engine is moved on."""

    def step(self) -> tuple[list[Any], bool]:
        """Take one step; the request outputs, and whether the engine had anything to do."""
        ...


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
        """Let the core schedule and run once, then give background threads a chance."""
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

    def __init__(self, request: wire.Request, step: int) -> None:
        self.request = request
        self.finish_reason: str | None = None
        self._added_s = time.perf_counter()
        self._added_step = step
        self._tokens: list[int] = []
        self._margins: list[float] = []
        self._cached_tokens = 0
        self._ttft_s: float | None = None
        self._steps_to_first_token: int | None = None
        self._kv_transfer_params: dict[str, Any] | None = None

    def take(self, output: Any, step: int) -> None:
        """Add what one step produced; output is a delta."""
        completion = output.outputs[0]
        if completion.token_ids and self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self._added_s
            self._steps_to_first_token = step - self._added_step + 1
        self._tokens += completion.token_ids
        for choices in completion.logprobs or ():
            best = sorted((choice.logprob for choice in choices.values()), reverse=True)
            self._margins.append(best[0] - best[1])
        self._cached_tokens = output.num_cached_tokens or 0
        self._kv_transfer_params = output.kv_transfer_params or self._kv_transfer_params
        if output.finished:
            self.finish_reason = str(completion.finish_reason)

    def result(self, *, count_steps: bool) -> wire.Result:
        """What to tell the parent; a request that never finished was aborted."""
        return wire.Result(
            id=self.request.id,
            tokens=self._tokens,
            margins=self._margins,
            cached_tokens=self._cached_tokens,
            ttft_s=self._ttft_s,
            steps_to_first_token=self._steps_to_first_token if count_steps else None,
            finish_reason=self.finish_reason or "abort",
            kv_transfer_params=self._kv_transfer_params,
        )


class Driver:
    """One engine and the commands on it."""

    def __init__(self, start: wire.Start) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        settings: dict[str, Any] = {
            "model": start.model,
            "dtype": "bfloat16",
            "seed": 0,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": start.block_size,
            "kv_cache_memory_bytes": start.kv_cache_bytes,
            "max_num_batched_tokens": start.max_num_batched_tokens,
            "max_num_seqs": start.max_num_seqs,
            "tensor_parallel_size": start.tensor_parallel_size,
            "distributed_executor_backend": "uni" if start.in_process else "mp",
            "disable_log_stats": False,
        }
        if start.connector is not None:
            settings["kv_transfer_config"] = KVTransferConfig(**start.connector)
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**settings | start.extra))
        make = InProcess if start.in_process else AsProcesses
        self._stepper: Stepper = make(self._engine)
        self._in_process = start.in_process
        self._adapters: dict[str, int] = {}
        self._run(wire.Run(requests=[WARM_UP], max_tokens=2, logprobs=2))  # 1 s, once; else in TTFT
        self._stepper.step()

    def handle(self, command: wire.Command) -> wire.Reply:
        """Carry out one command."""
        match command:
            case wire.Run():
                return wire.Ran(self._run(command))
            case wire.IdleSteps(steps):
                return wire.Idled(sum(self._stepper.step()[1] for _ in range(steps)))
            case wire.ResetPrefixCache(connector_too):
                ok = self._engine.reset_prefix_cache(reset_connector=connector_too)
                return wire.WasReset(bool(ok))
            case wire.GetMetrics():
                return wire.Metrics(self._metrics())
            case wire.Close():
                self._engine.engine_core.shutdown()
                return wire.Closed()
            case wire.Start():
                raise ValueError("the engine runs already")

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

    def _run(self, command: wire.Run) -> list[wire.Result]:
        waiting = sorted(command.requests, key=lambda request: request.arrive_step)
        live: dict[str, Live] = {}
        results: dict[str, wire.Result] = {}
        step = 0
        while waiting or live:
            while waiting and waiting[0].arrive_step <= step:
                request = waiting.pop(0)
                live[request.id] = Live(request, step)
                self._add(request, command)
            self._abort(live, step)
            for output in self._stepper.step()[0]:
                if output.request_id in live:
                    live[output.request_id].take(output, step)
            step += 1
            for name in [name for name, one in live.items() if one.finish_reason]:
                results[name] = live.pop(name).result(count_steps=self._in_process)
        return [results[request.id] for request in command.requests]

    def _add(self, request: wire.Request, command: wire.Run) -> None:
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
            max_tokens=request.max_tokens or command.max_tokens,
            logprobs=command.logprobs or None,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra_args,
        )
        self._engine.add_request(request.id, prompt, params, lora_request=adapter)

    def _abort(self, live: dict[str, Live], step: int) -> None:
        """Abort what is due. vLLM reports nothing for these, so they are marked here."""
        for name, one in live.items():
            if one.request.abort_step is not None and one.request.abort_step <= step:
                self._engine.abort_request([name])
                one.finish_reason = "abort"

    def _metrics(self) -> dict[str, float]:
        """Counters and gauges by name{label=value}; histograms as their _count and _sum."""
        if not self._in_process:  # statistics come with outputs
            while self._stepper.step()[1]:
                pass
        values: dict[str, float] = {}
        for metric in self._engine.get_metrics():
            labels = {
                key: value
                for key, value in metric.labels.items()
                if key not in ("model_name", "engine")
            }
            tail = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            name = metric.name.removeprefix("vllm:")
            if name.endswith("_info"):  # settings as labels, always 1
                continue
            where = f"{{{tail}}}" if tail else ""
            if hasattr(metric, "value"):
                values[name + where] = metric.value
            elif hasattr(metric, "sum"):
                values[f"{name}_count{where}"] = metric.count
                values[f"{name}_sum{where}"] = metric.sum
        return values


def read_lines(into: queue.SimpleQueue[bytes]) -> None:
    """Pass stdin on. At its end the parent is gone: take this whole process group along."""
    unread = b""
    while data := os.read(0, 1 << 20):
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            into.put(line)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def serve(lines: Iterable[bytes], send: Callable[[wire.Reply], None]) -> None:
    """Answer each command with one reply, until Close."""
    decoder = msgspec.json.Decoder(wire.Command)
    driver: Driver | None = None
    for line in lines:
        command = decoder.decode(line)
        if driver is not None:
            send(driver.handle(command))
        elif isinstance(command, wire.Start):
            driver = Driver(command)
            send(wire.Ready(driver.pids()))
        else:
            raise TypeError(f"{type(command).__name__} before Start")
        if isinstance(command, wire.Close):
            return


def main() -> None:
    """Serve until told to close; whatever goes wrong is reported, and ends the process."""
    reply_fd = os.dup(1)
    os.dup2(2, 1)  # engine logs must not mix with replies

    def send(reply: wire.Reply) -> None:
        data = memoryview(msgspec.json.encode(reply) + b"\n")
        while data:
            data = data[os.write(reply_fd, data) :]

    def fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_exception(kind, error, trace)
        sys.stderr.flush()
        send(wire.Failed("".join(traceback.format_exception_only(error)).strip()))
        os._exit(1)

    sys.excepthook = fail
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read_lines, args=(lines,), daemon=True).start()
    serve(iter(lines.get, b""), send)
    sys.stderr.flush()
    os._exit(0)  # exit handlers of engine libraries take two seconds, and some crash


if __name__ == "__main__":
    main()
