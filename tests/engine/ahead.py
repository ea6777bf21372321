"""Have vLLM schedule steps ahead on a CPU, as it does on a GPU: its CPU platform turns that off.

KVSTORE_TEST_AHEAD=1 before pytest does so in all engines of these tests.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest

AHEAD = "KVSTORE_TEST_AHEAD"  # variable of an engine that schedules steps ahead
ENDS_IN_STEP = pytest.mark.skipif(
    AHEAD in os.environ, reason="a load in a step that is not the last one cannot be taken back"
)


class _AtOnce:
    """A stream, or an event in one, of a device that has done everything when it is asked."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, _other: Any) -> None:
        pass


def schedule_ahead() -> None:
    """Change vLLM in this process, and in those that are forked from it."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    checked = CpuPlatform.check_and_update_config

    def check(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        checked(config)
        config.scheduler_config.async_scheduling = wanted

    platform: Any = CpuPlatform
    platform.check_and_update_config = staticmethod(check)
    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = cuda.current_stream = _AtOnce
    cuda.stream = lambda _stream: contextlib.nullcontext()
