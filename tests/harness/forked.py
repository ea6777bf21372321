"""Processes forked from one that has imported what they need, and has done nothing else.

Imports are most of what a short process does: a tenth of a second where an index is kept, seven
where an engine runs. The standard library's fork server does them once. A child does all the rest
itself, as it would in a new process, with its own process id, session and environment.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

from tiers.nvme import index_server

# What children import, early or late. A name that is not there is imported by each of them, if at
# all: this is about time only.
OF_INDEXES = (
    "pytest",  # the main module is the tests'
    __name__,
    "tiers.nvme.index_load",
    "tests.harness.nvme_child",
)
OF_ENGINES = (
    "tests.engine.forked",
    "connectors.vllm",
    "connectors.vllm_scheduler",
    "connectors.vllm_worker",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.core.sched.scheduler",
    "tests.engine.kernels",
)


def start_server(imports: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have the imports done, in an environment; the process ends with this one."""
    multiprocessing.set_forkserver_preload([*imports, "tests.harness.frozen"])
    with patch.dict(os.environ, environment):
        forkserver.ensure_running()


@atexit.register
def _end_what_is_left() -> None:
    """End what a test has abandoned: the library waits for it, and it waits for our end.

    Its own function of this kind is older than this one, so it is called later.
    """
    for process in multiprocessing.active_children():
        process.kill()


class Forked:
    """A process, as subprocess.Popen shows one."""

    def __init__(self, main: Callable[..., None], fds: Sequence[int], *arguments: object) -> None:
        """Call main(its descriptors, *arguments) in a child, which is the first of a session."""
        with contextlib.ExitStack() as sent:
            ends = [sent.enter_context(Connection(os.dup(fd))) for fd in fds]
            context = multiprocessing.get_context("forkserver")
            self._process = context.Process(target=_run, args=(main, ends, arguments))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _run(main: Callable[..., None], ends: list[Connection], arguments: tuple[object, ...]) -> None:
    threads = len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))
    if threads != 1:  # one that holds a lock now would never let go of it here
        raise RuntimeError(f"forked from a process with {threads} threads, expected 1")
    os.setsid()
    main([end.fileno() for end in ends], *arguments)


def fork_index(fd: int, lock_fd: int) -> Forked:
    """Start the process of an index; see IndexProcess.start."""
    return Forked(_keep_an_index, [fd, lock_fd])


def _keep_an_index(fds: list[int]) -> None:
    sys.argv[1:] = [str(fds[0])]
    index_server.main()
