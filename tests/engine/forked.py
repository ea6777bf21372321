"""Engine processes that need not import vLLM; see tests/harness/forked.py.

Where an engine's core and workers are processes, vLLM starts those afresh, by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import IO

from tests.bench import driver
from tests.harness.forked import Forked


class ForkedEngine(Forked):
    """One engine process; see tests.bench.engine.Child."""

    def __init__(self, environment: Mapping[str, str], log_fd: int) -> None:
        commands, ours_in = os.pipe()
        ours_out, replies = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(ours_in, "wb", buffering=0)
        self.stdout: IO[bytes] = os.fdopen(ours_out, "rb", buffering=0)
        try:
            super().__init__(_be_an_engine, [commands, replies, log_fd], dict(environment))
        finally:
            os.close(commands)
            os.close(replies)


def _be_an_engine(fds: list[int], environment: dict[str, str]) -> None:
    """Become what `python -m tests.bench.driver` is, with stdin, stdout and stderr."""
    os.environ.update(environment)  # what sitecustomize has set stays, as in a new process
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    try:
        driver.main()
    except BaseException:  # noqa: BLE001 - as the interpreter does, where multiprocessing does not
        sys.excepthook(*sys.exc_info())
