"""NIXL between two processes, without a store: what a hand-over is measured against.

`python -m tests.bench.raw_nixl` is one of the two. It has memory of the kind that stores
have, and does what the parent says on its standard input, one JSON object per line: a transfer of
blocks at positions in no order, and sums of all its blocks at the same time where these are wanted.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import numpy as np
import xxhash

from kvstore.core.errors import KVStoreError
from tests.bench.clock import Clock
from tiers.cpu import CpuExtent
from tiers.nixl.agent import Agent, Indices
from tiers.nixl.ucx import MUTEX, environment

SUM_BYTES = 1 << 20  # of one call, so that neither thread waits long for the other
NAP_S = 0.0001


class Start(msgspec.Struct, frozen=True, tag=True):
    """First line: the memory."""

    block_bytes: int
    blocks: int


class Meet(msgspec.Struct, frozen=True, tag=True):
    """The other process."""

    metadata: bytes
    address: int


class Move(msgspec.Struct, frozen=True, tag=True):
    """Move all blocks, between positions shuffled by a seed; summed: take sums meanwhile."""

    write: bool
    seed: int
    summed: bool = False


class Sum(msgspec.Struct, frozen=True, tag=True):
    """Take the sums of all blocks."""


Command = Start | Meet | Move | Sum


class Started(msgspec.Struct, frozen=True, tag=True):
    """The memory is there."""

    metadata: bytes
    address: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The command was carried out; error: or not."""

    error: str = ""


Reply = Started | Done
R = TypeVar("R", Started, Done)


class _Half:
    """This process: an agent, its memory, and the other one."""

    def __init__(self, start: Start) -> None:
        size = start.blocks * (start.block_bytes + 64)  # with room for what an extent adds
        self._start = start
        self._memory = CpuExtent(size, start.block_bytes)
        whole = np.frombuffer(self._memory.slot(0), np.uint8)
        self._address = int(whole.ctypes.data)
        self._bytes = start.blocks * start.block_bytes
        self._agent = Agent(f"kvstore-bench-{secrets.token_hex(8)}")
        self._agent.register(self._address, self._bytes)
        self._local = self._agent.blocks(None, self._address, start.block_bytes, start.blocks)

    def started(self) -> Started:
        return Started(self._agent.metadata(), self._address)

    def do(self, command: Command) -> None:
        match command:
            case Meet(metadata, address):
                size, count = self._start.block_bytes, self._start.blocks
                peer = self._agent.add_peer(metadata)
                self._remote = self._agent.blocks(peer, address, size, count)
            case Move(write, seed, summed):
                adding = threading.Thread(target=self._sum) if summed else None
                if adding is not None:
                    adding.start()
                self._move(seed, write=write)
                if adding is not None:
                    adding.join()
            case Sum():
                self._sum()

    def _move(self, seed: int, *, write: bool) -> None:
        rng = np.random.default_rng(seed)
        local, remote = (self._shuffled(rng) for _ in range(2))
        flight, over = self._agent.start(self._local, local, self._remote, remote, write=write)
        while not over:
            time.sleep(NAP_S)
            over = self._agent.over(flight)
        self._agent.let_go(flight)

    def _shuffled(self, rng: np.random.Generator) -> Indices:
        return rng.permutation(self._start.blocks).astype(np.int32)

    def _sum(self) -> None:
        for position in range(self._start.blocks):
            state, block = xxhash.xxh3_64(), self._memory.slot(position)
            for at in range(0, len(block), SUM_BYTES):
                state.update(block[at : at + SUM_BYTES])


class Process:
    """One such process, of the parent's; gone after the context."""

    def __init__(self, start: Start, transports: str | None, *, mutex: bool = False) -> None:
        """transports: UCX_TLS; None: UCX chooses. mutex: whoever waits for UCX's lock sleeps."""
        self._start = start
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.bench.raw_nixl"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment("lo", transports) | {MUTEX: "y" if mutex else "n"},
        )
        self.clock = Clock(self._child.pid)
        self._decoder = msgspec.json.Decoder(Reply)

    def __enter__(self) -> Self:
        self.tell(self._start)
        self.started = self._hear(Started)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.kill()
        self._child.communicate()

    def meet(self, other: Process) -> None:
        """Learn of the other one."""
        self.do(Meet(other.started.metadata, other.started.address))

    def do(self, command: Command) -> None:
        """Carry out a command."""
        self.tell(command)
        self.done()

    def done(self) -> None:
        """Wait until it has carried out what it was told."""
        self._hear(Done)

    def tell(self, command: Command) -> None:
        """Start a command."""
        if self._child.stdin is not None:
            self._child.stdin.write(msgspec.json.encode(command) + b"\n")
            self._child.stdin.flush()

    def _hear(self, kind: type[R]) -> R:
        line = b"" if self._child.stdout is None else self._child.stdout.readline()
        reply = self._decoder.decode(line) if line else Done("it has ended")
        if isinstance(reply, Done) and reply.error:
            raise KVStoreError(f"NIXL without a store: {reply.error}")
        if not isinstance(reply, kind):
            raise KVStoreError(f"{type(reply).__name__}, expected {kind.__name__}")
        return reply


def main() -> None:
    """Serve until the parent closes its end."""
    decoder = msgspec.json.Decoder(Command)
    half: _Half | None = None
    for line in sys.stdin.buffer:
        command = decoder.decode(line)
        reply: Reply = Done()
        try:
            if isinstance(command, Start):
                half = _Half(command)
                reply = half.started()
            elif half is not None:
                half.do(command)
        except KVStoreError as exc:
            reply = Done(str(exc))
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # UCX's threads do not end in order
