"""A vLLM engine as a child process, small enough for a machine with two cores and no GPU."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, Self, TypeVar

import msgspec

import kvstore
from kvstore.core.errors import KVStoreError
from tests.bench import wire

START_TIMEOUT_S = 900.0  # all of them long: a shared machine may stand still for minutes
CALL_TIMEOUT_S = 900.0
CLOSE_TIMEOUT_S = 120.0
LOG_TAIL_LINES = 30
SHIM = Path(__file__).parent / "shim"

Request = wire.Request
Result = wire.Result
_R = TypeVar("_R", bound=wire.Reply)


class EngineFailed(KVStoreError):
    """The engine process died, hung or refused a command; the message has its last log lines."""


class Child(Protocol):
    """What an engine needs of its process; subprocess.Popen is one.

    Its pid is that of its process group and session, too. stdin takes commands, stdout has replies.
    """

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def in_a_new_process(environment: Mapping[str, str], log_fd: int) -> Child:
    """Start the driver with this environment alone; its stderr goes to log_fd."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.bench.driver"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log_fd,
        env=environment,
        bufsize=0,
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

    launch: ClassVar[Callable[[Mapping[str, str], int], Child]] = staticmethod(in_a_new_process)

    def __init__(
        self,
        model: Path,
        *,
        connector: dict[str, Any] | None = None,
        in_process: bool = True,
        tensor_parallel_size: int = 1,
        kv_cache_bytes: int = 64 << 20,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 16,
        block_size: int = 32,
        env: Mapping[str, str] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self._start = wire.Start(
            model=os.fspath(model),
            connector=connector,
            in_process=in_process,
            tensor_parallel_size=tensor_parallel_size,
            kv_cache_bytes=kv_cache_bytes,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            extra=extra or {},
        )
        self._env = environment(in_process=in_process, ranks=tensor_parallel_size) | dict(env or {})
        self._child: Child | None = None
        self._unread = b""
        self._pids: dict[str, int] = {}
        self._decoder = msgspec.json.Decoder(wire.Reply)
        self.log_path = Path(os.devnull)  # the engine's log; removed by a clean close

    def __enter__(self) -> Self:
        log_fd, log_path = tempfile.mkstemp(prefix="kvstore-engine-", suffix=".log")
        self.log_path = Path(log_path)
        try:
            self._child = type(self).launch(self._env, log_fd)
        finally:
            os.close(log_fd)
        self._pids = self._call(self._start, wire.Ready, START_TIMEOUT_S).pids
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
        command = wire.Run(requests=list(requests), max_tokens=max_tokens, logprobs=logprobs)
        return self._call(command, wire.Ran, timeout_s).results

    def idle_steps(self, steps: int) -> int:
        """Step without requests, so that finished work is polled; how many steps had work.

        A step without work does nothing. One that has work but runs no model takes 1 ms or more.
        """
        return self._call(wire.IdleSteps(steps), wire.Idled).steps_with_work

    def go_idle(self, within_s: float = CALL_TIMEOUT_S) -> None:
        """Step until there is nothing to do any more, as an engine that serves does by itself."""
        deadline_s = time.monotonic() + within_s
        while self.idle_steps(3):
            if time.monotonic() >= deadline_s:
                raise EngineFailed(f"still busy after {within_s:.0f} s, expected idle")

    def reset_prefix_cache(self, *, connector_too: bool = False) -> bool:
        """Forget the engine's own prefix cache; False if some block is still in use."""
        return self._call(wire.ResetPrefixCache(connector_too), wire.WasReset).ok

    def metrics(self) -> dict[str, float]:
        """vLLM's metrics without the `vllm:` prefix, labels as in `name{source=host}`."""
        return self._call(wire.GetMetrics(), wire.Metrics).values

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
            self._call(wire.Close(), wire.Closed, CLOSE_TIMEOUT_S)
            child.wait(CLOSE_TIMEOUT_S)  # its exit status means nothing: some libraries crash here
            self.log_path.unlink(missing_ok=True)
        except (EngineFailed, subprocess.TimeoutExpired):
            pass
        finally:
            self._end()

    def _call(
        self, command: wire.Command, expected: type[_R], timeout_s: float = CALL_TIMEOUT_S
    ) -> _R:
        """Send one command and wait for its reply; any failure ends the child and is raised."""
        child = self._child
        if child is None or child.stdin is None:
            raise EngineFailed("the engine is not running")
        try:
            child.stdin.write(msgspec.json.encode(command) + b"\n")
            line = self._read_line(time.monotonic() + timeout_s)
        except BrokenPipeError:
            line = b""
        except TimeoutError:
            what = f"{type(command).__name__} not answered in {timeout_s:.0f} s"
            raise self._failure(what) from None
        except BaseException:  # KeyboardInterrupt would leave the reply unread
            self._end()
            raise
        if not line:
            raise self._failure(f"the engine process died during {type(command).__name__}")
        reply = self._decoder.decode(line)
        if isinstance(reply, wire.Failed):
            raise self._failure(reply.error)
        if not isinstance(reply, expected):
            raise self._failure(f"reply {type(reply).__name__}, expected {expected.__name__}")
        return reply

    def _read_line(self, deadline_s: float) -> bytes:
        """One reply; empty if the child closed its end."""
        if self._child is None or self._child.stdout is None:
            return b""
        fd = self._child.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise TimeoutError
            data = os.read(fd, 1 << 20)
            if not data:
                return b""
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

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
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
