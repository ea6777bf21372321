"""A reader whose peer hangs, over TCP: run as a script, with UCX's settings in the environment.

Argument: "reader" or "peer". The reader starts the peer, reads from it, stops it and reads again,
ends its agent, and lets the peer go on: nothing that comes then may be written.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import torch

from kvstore.layout import GroupLayout, LayerRun, Move, RankLayout
from tiers.copier import LayerCache
from tiers.direct import EngineReader
from tiers.exporter.agent import Agent

BLOCKS, PAGE = 8, 1 << 20
PEER = 7


def peer() -> None:
    """Have memory that can be read, until it is killed."""
    agent = Agent(f"peer-{os.getpid()}")
    memory = np.full(BLOCKS * PAGE, PEER, np.uint8)
    agent.register(memory.ctypes.data, memory.nbytes)
    told = pickle.dumps((agent.name, memory.ctypes.data, agent.metadata()))
    sys.stdout.buffer.write(len(told).to_bytes(4, "little") + told)
    sys.stdout.buffer.flush()
    signal.pause()


def reader() -> None:
    """Say "good", or fail."""
    command = [sys.executable, "-m", "tests.direct_frozen", "peer"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    atexit.register(child.kill)
    size = int.from_bytes(child.stdout.read(4), "little")
    name, address, metadata = pickle.loads(child.stdout.read(size))  # noqa: S301 - ours
    storage = torch.zeros(BLOCKS * PAGE, dtype=torch.uint8)
    made = EngineReader({"l": LayerCache(storage, 0, PAGE, PAGE)})
    made.open(RankLayout(PAGE, (GroupLayout(PAGE, (LayerRun("l", 0, PAGE, writes=True),)),)), "lo")
    made.meet(name, metadata)
    moves = [(Move(0, block, 0, 0), address + block * PAGE) for block in range(BLOCKS)]
    reading = made.read(name, moves)
    while not made.over(reading):
        time.sleep(0.001)
    assert bool((storage == PEER).all()), "read wrong"
    storage.zero_()
    os.kill(child.pid, signal.SIGSTOP)
    reading = made.read(name, moves)
    time.sleep(0.5)
    assert not made.over(reading), "a peer that hangs was read"
    made.restart()
    seen = storage.clone()
    os.kill(child.pid, signal.SIGCONT)
    time.sleep(1.0)
    assert torch.equal(storage, seen), "written after its end"
    sys.stdout.write("good\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"reader": reader, "peer": peer}[sys.argv[1]]()
