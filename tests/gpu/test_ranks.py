"""Several ranks on one GPU, each a process with its part of every slot, in memory they share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu.rank import extent_bytes

pytestmark = pytest.mark.gpu


def all_ranks(memory: int, world: int, what: str) -> None:
    """Run the ranks at once, and see that each is right."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.rank", str(memory), str(rank), str(world), what],
            pass_fds=(memory,),
        )
        for rank in range(world)
    ]
    assert [process.wait(120) for process in processes] == [0] * world


@pytest.mark.parametrize(("writers", "readers"), [(4, 4), (4, 1), (1, 2), (2, 4)])
def test_O18_what_ranks_store_ranks_of_another_size_load(writers: int, readers: int) -> None:
    memory = os.memfd_create("slots")
    os.truncate(memory, extent_bytes())
    try:
        all_ranks(memory, writers, "store")
        all_ranks(memory, readers, "load")
    finally:
        os.close(memory)
