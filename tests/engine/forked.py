"""Engine processes that need not import vLLM; see tests/harness/forked.py.

Where an engine's core and workers are processes, they are forked from it, as on a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from tests.bench import driver
from tests.engine.ahead import AHEAD, schedule_ahead
from tests.harness.forked import Forked


def forked_engine(environment: Mapping[str, str], pipe_fd: int, log_fd: int) -> Forked:
    """Start what tests.bench.engine.in_a_new_process does."""
    return Forked(_be_an_engine, [pipe_fd, log_fd], dict(environment))


def _be_an_engine(fds: list[int], environment: dict[str, str]) -> None:
    if "vllm" not in sys.modules:  # nor was the process started in an engine's environment
        raise RuntimeError("forked from a process without vLLM: see `forking` in tests/conftest.py")
    import setproctitle
    from vllm import envs
    from vllm.model_executor.models import registry

    setproctitle.getproctitle()  # the place for it is found while the environment is as it was
    os.environ.update(environment)  # what sitecustomize has set stays, as in a new process
    if AHEAD in environment:
        schedule_ahead()
    vars(envs)["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # on a CPU vLLM starts them afresh
    # vLLM looks at a model in a process of its own, so that this one need not import it.
    # This one has imported it.
    registry._run_in_subprocess = lambda look: look()
    for number in (1, 2):
        os.dup2(fds[1], number)
    try:
        driver.main(fds[0])
    except BaseException:  # noqa: BLE001 - as the interpreter does, where multiprocessing does not
        sys.excepthook(*sys.exc_info())
