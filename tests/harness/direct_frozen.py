"""Engine memory whose peer hangs: run as a script, with UCX's settings in the environment.

Argument: "reader", and "peer", which it starts; or "target", and "writer". The reader reads from
its peer, stops it and reads again, ends its agent, and lets the peer go on; the target is written
by its peer all the time, stops it, ends its agent and lets it go on. Nothing may come then.
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

from connectors.copies.host import LayerCache
from connectors.engine_agent import NETWORKS, EngineAgent
from kvstore.core.layout import GroupLayout, LayerRun, Move, RankLayout
from tiers.nixl.agent import Agent

BLOCKS, PAGE = 256, 32 << 10
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


def started(what: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.harness.direct_frozen", what]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(child.kill)
    return child


def engine(transports: str | None = None) -> tuple[torch.Tensor, EngineAgent]:
    """Empty memory of an engine, and its agent."""
    storage = torch.zeros(BLOCKS * PAGE, dtype=torch.uint8)
    made = EngineAgent({"l": LayerCache(storage, 0, PAGE, PAGE)}, transports=transports)
    made.open(RankLayout(PAGE, (GroupLayout(PAGE, (LayerRun("l", 0, PAGE, writes=True),)),)), "lo")
    return storage, made


def target() -> None:
    """Say "good", or fail."""
    storage, made = engine(NETWORKS)
    served = made.serves()
    assert served is not None
    child = started("writer")
    assert child.stdin is not None
    child.stdin.write(pickle.dumps((served[0].agent, served[0].metadata, storage.data_ptr())))
    child.stdin.close()
    for _ in range(3):  # it writes on
        while not bool((storage == PEER).all()):
            time.sleep(0.001)
        storage.zero_()
    os.kill(child.pid, signal.SIGSTOP)
    made.restart()
    storage.zero_()
    os.kill(child.pid, signal.SIGCONT)
    time.sleep(1.0)
    assert not bool(storage.any()), "written after its end"
    sys.stdout.write("good\n")
    sys.stdout.flush()


def writer() -> None:
    """Write to a target until that fails, by whatever way there is."""
    name, metadata, address = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - ours
    agent = Agent(f"writer-{os.getpid()}")
    memory = np.full(BLOCKS * PAGE, PEER, np.uint8)
    agent.register(memory.ctypes.data, memory.nbytes)
    assert agent.add_peer(metadata) == name
    here, there = (
        np.array([[at + n * PAGE, PAGE, 0] for n in range(BLOCKS)], np.uint64)
        for at in (memory.ctypes.data, address)
    )
    while True:
        flight, over = agent.move(name, here, there, write=True)
        while not over and not agent.over(flight):
            time.sleep(0.0001)
        agent.let_go(flight)


def reader() -> None:
    """Say "good", or fail."""
    child = started("peer")
    assert child.stdout is not None
    size = int.from_bytes(child.stdout.read(4), "little")
    name, address, metadata = pickle.loads(child.stdout.read(size))  # noqa: S301 - ours
    storage, made = engine()
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
    {"reader": reader, "peer": peer, "target": target, "writer": writer}[sys.argv[1]]()
