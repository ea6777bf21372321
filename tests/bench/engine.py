"""A vLLM engine as a child process, small enough for a machine with two cores and no GPU."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import msgspec

import kvstore
from kvstore.core.errors import KVStoreError

START_TIMEOUT_S = 900.0  # all of them long: a shared machine may stand still for minutes
CALL_TIMEOUT_S = 900.0
CLOSE_TIMEOUT_S = 120.0
LOG_TAIL_LINES = 30
SHIM = Path(__file__).parent / "shim"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt.

    Steps count from the start of the run. A request arrives before the step of its number and is
    aborted before the step of that number: equal numbers abort it before it was ever scheduled.
    """

    id: str
    tokens: list[int]
    arrive_step: int = 0
    abort_step: int | None = None
    max_tokens: int | None = None  # instead of the run's
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: dict[str, Any] | None = None
    adapter: str | None = None  # folder of a LoRA adapter


class Result(msgspec.Struct):
    """What became of one request; one that never finished was aborted."""

    id: str
    tokens: list[int] = []
    margins: list[float] = []  # per token: logprob of the best minus that of the second
    cached_tokens: int = 0  # of the prompt, as vLLM reports them: local and external together
    ttft_s: float | None = None  # from being added; None if there was no token
    steps_to_first_token: int | None = None  # 1: the step after it was added; in-process only
    finish_reason: str = "abort"  # length, abort or error
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Ran to its last token."""
        return self.finish_reason == "length"

    @property
    def aborted(self) -> bool:
        """Ended by its abort_step."""
        return self.finish_reason == "abort"


class EngineFailed(KVStoreError):
    """The engine process died, hung or refused a command; the message has its last log lines."""


class Child(Protocol):
    """What an engine needs of its process; subprocess.Popen is one.

    Its pid is that of its process group and session, too.
    """

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float | None = None) -> int: ...


def in_a_new_process(environment: Mapping[str, str], pipe_fd: int, log_fd: int) -> Child:
    """Start the driver with this environment alone; its output goes to log_fd."""
    return subprocess.Popen(
        [sys.executable, "-c", f"from tests.bench.driver import main; main({pipe_fd})"],
        stdin=subprocess.DEVNULL,
        stdout=log_fd,
        stderr=log_fd,
        env=environment,
        pass_fds=[pipe_fd],
        start_new_session=True,  # so that its whole family can be ended together
    )


def environment(*, in_process: bool, ranks: int = 1) -> dict[str, str]:
    """Return ours with what an engine of one process, or of several with so many ranks, needs."""
    root = Path(kvstore.__file__).parent.parent
    path = [os.fspath(SHIM), os.fspath(root), os.environ.get("PYTHONPATH", "")]
    env = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "OMP_NUM_THREADS": "1",  # more than one thread is 10 to 70 times slower on two cores
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if ranks > 1:  # by itself vLLM wants one NUMA node per worker
        cores = sorted(os.sched_getaffinity(0))
        mine = [cores[rank % len(cores)] for rank in range(ranks)]
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in mine)
    return env


def short_name(name: str, labels: Mapping[str, str]) -> str:
    """Name one of vLLM's metrics: without `vllm:`, labels as in `name{source=host}`."""
    own = sorted((k, v) for k, v in labels.items() if k not in ("model_name", "engine"))
    tail = ",".join(f"{key}={value}" for key, value in own)
    return name.removeprefix("vllm:") + (f"{{{tail}}}" if tail else "")


def tiered(**extra: object) -> dict[str, Any]:
    """Return the kv_transfer_config of an engine with our connector."""
    return {
        "kv_connector": "TieredConnector",
        "kv_connector_module_path": "connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


class Engine:
    """One vLLM engine, started on entering the context and gone after leaving it.

    connector is a kv_transfer_config as a dict, or None for plain vLLM. extra overrides any
    vLLM EngineArgs field, env any variable of the child. Any failure ends the engine: after an
    EngineFailed only close() is of use.
    """

    launch: ClassVar[Callable[[Mapping[str, str], int, int], Child]] = staticmethod(
        in_a_new_process
    )

    def __init__(
        self,
        model: Path,
        *,
        connector: dict[str, Any] | None = None,
        in_process: bool = True,
        tensor_parallel_size: int = 1,
        kv_cache_bytes: int = 64 << 20,
        max_num_batched_tokens: int = 2048,
        block_size: int = 32,
        env: Mapping[str, str] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        settings = {
            "model": os.fspath(model),
            "dtype": "bfloat16",
            "seed": 0,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": block_size,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": 16,
            "tensor_parallel_size": tensor_parallel_size,
            "distributed_executor_backend": "uni" if in_process else "mp",
            "disable_log_stats": False,
        }
        self._start = settings | (extra or {}), connector, in_process
        self._env = environment(in_process=in_process, ranks=tensor_parallel_size) | dict(env or {})
        self._child: Child | None = None
        self._pipe: Connection
        self._pids: dict[str, int] = {}
        self.log_path = Path(os.devnull)  # the engine's log; removed by a clean close

    def __enter__(self) -> Self:
        log_fd, log_path = tempfile.mkstemp(prefix="kvstore-engine-", suffix=".log")
        self.log_path = Path(log_path)
        self._pipe, theirs = multiprocessing.Pipe()
        try:
            self._child = type(self).launch(self._env, theirs.fileno(), log_fd)
        finally:
            os.close(log_fd)
            theirs.close()
        self._pids = self._call("start", *self._start, timeout_s=START_TIMEOUT_S)
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def run(
        self,
        requests: Sequence[Request],
        *,
        max_tokens: int,
        logprobs: int = 2,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> list[Result]:
        """Run all requests together and return their results in the order given.

        Returns when the last one has finished or was aborted; in-process, what the engine does
        after that waits for go_idle, idle_steps or the next run. logprobs=0 leaves margins empty.
        """
        if len({request.id for request in requests}) != len(requests):
            raise ValueError("two requests of one run have the same id")
        found: list[Result] = self._call(
            "run", list(requests), max_tokens, logprobs, timeout_s=timeout_s
        )
        return found

    def converse(
        self, sessions: Sequence[Sequence[Sequence[int]]], *, max_tokens: int, logprobs: int = 2
    ) -> list[list[Result]]:
        """Run sessions at once, each turn of one when its last one is answered; their answers.

        sessions: what each user says in each turn, in tokens. A prompt is all that was said before,
        answers of max_tokens included, and that.
        """
        found: list[list[Result]] = self._call("converse", sessions, max_tokens, logprobs)
        return found

    def idle_steps(self, steps: int) -> int:
        """Step without requests, so that finished work is polled; how many steps had work.

        A step without work does nothing. One that has work but runs no model takes 1 ms or more.
        """
        found: int = self._call("idle_steps", steps)
        return found

    def go_idle(self, within_s: float = CALL_TIMEOUT_S) -> None:
        """Step until there is nothing to do any more, as an engine that serves does by itself."""
        deadline_s = time.monotonic() + within_s
        while self.idle_steps(3):
            if time.monotonic() >= deadline_s:
                raise EngineFailed(f"still busy after {within_s:.0f} s, expected idle")

    def reset_prefix_cache(self, *, connector_too: bool = False) -> bool:
        """Forget the engine's own prefix cache; False if some block is still in use."""
        found: bool = self._call("reset_prefix_cache", connector_too)
        return found

    def metrics(self) -> dict[str, float]:
        """vLLM's metrics without the `vllm:` prefix, labels as in `name{source=host}`."""
        found: dict[str, float] = self._call("metrics")
        return found

    def pids(self) -> dict[str, int]:
        """Process ids by role: driver, and unless in_process core, worker0, worker1..."""
        return dict(self._pids)

    def kill(self, which: str, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send sig to one of pids(); may be called from another thread during a run."""
        os.kill(self._pids[which], sig)

    def close(self) -> None:
        """End the engine; safe to call twice. Keeps the log unless the engine ended in order."""
        child = self._child
        if child is None:
            return
        try:
            self._call("close", timeout_s=CLOSE_TIMEOUT_S)
            child.wait(CLOSE_TIMEOUT_S)  # its exit status means nothing: some libraries crash here
            self.log_path.unlink(missing_ok=True)
        except (EngineFailed, subprocess.TimeoutExpired):
            pass
        finally:
            self._end()

    # Any: of what the driver's method returns, which is the type of each caller here.
    def _call(self, what: str, *arguments: object, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a method of the driver; any failure ends the child and is raised."""
        if self._child is None:
            raise EngineFailed("the engine is not running")
        try:
            self._pipe.send((what, arguments))
            error, found = f"not answered in {timeout_s:.0f} s", None
            if self._pipe.poll(timeout_s):
                error, found = self._pipe.recv()
        except (EOFError, OSError):
            error = "the engine process died"
        except BaseException:  # KeyboardInterrupt would leave the answer unread
            self._end()
            raise
        if error:
            raise self._failure(f"{what}: {error}")
        return found

    def _failure(self, what: str) -> EngineFailed:
        """End the child and say what happened, with the end of its log."""
        self._end()
        lines = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return EngineFailed("\n".join([what, f"log: {self.log_path}", *lines]))

    def _end(self) -> None:
        """Kill what is left of the child's process group and reap the child."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        self._pipe.close()
