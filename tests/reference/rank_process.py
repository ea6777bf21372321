"""The other end of processes.py: the starter, and what a rank does in its process.

python -m tests.reference.rank_process <fd> <package.module:Class>
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec
import torch

from connectors.copies.host import LayerCache
from connectors.worker import WorkerHalf
from kvstore.core.errors import InvariantBroken, KVStoreError
from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry
from kvstore.plugins import find_class
from tests.reference.connector import TieredWorker, WorkerSide
from tests.reference.processes import Answer, Ended, RankSpec, Started
from tests.reference.ranks import LocalRank, RankStep
from tests.reference.shape import Shape

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
_SPEC_BYTES = 1 << 16

_encoder = msgspec.msgpack.Encoder()


class Side(WorkerSide, Protocol):
    """What a rank process has of a connector."""

    def shutdown(self) -> None:
        """Finish copies and end threads."""
        ...


MakeSide = Callable[[RankSpec, bytearray], Side]
"""From the rank's spec and its memory."""


class AttachedSide(TieredWorker):
    """A real worker half, attached to a real store."""

    def __init__(self, spec: RankSpec, memory: bytearray) -> None:
        """memory: of shape.blocks pages; a group's part of a page is one layer of one head."""
        shape = spec.shape
        storage = torch.frombuffer(memory, dtype=torch.uint8)
        caches = {
            _layer(group): LayerCache(storage, 0, shape.page_bytes, tokens * shape.token_bytes)
            for group, tokens in enumerate(shape.group_tokens)
        }
        worker = WorkerHalf(
            spec.engine,
            spec.rank,
            shape.world,
            rank_geometry(spec.identity, shape, spec.rank),
            caches,
            lambda: spec.store,
        )
        super().__init__(worker)
        self.worker = worker
        self.shutdown = worker.shutdown


def _layer(group: int) -> str:
    return f"g{group}"


def rank_geometry(identity: str, shape: Shape, rank: int) -> RankGeometry:
    """Return a rank's part of a block: in each group one layer, in which it has one head."""
    groups = tuple(
        GroupGeometry(
            rule,
            (LayerGeometry(_layer(group), tokens * shape.token_bytes, 1, rank, shape.world),),
        )
        for group, (rule, tokens) in enumerate(zip(shape.rules, shape.group_tokens, strict=True))
    )
    return RankGeometry(identity, shape.block_tokens, shape.geometry.blocks_per_chunk, groups)


def run_rank(pipe: Connection, spec: RankSpec, make_side: MakeSide) -> None:
    """Run steps until the engine closes the pipe."""
    memory = bytearray(spec.shape.blocks * spec.shape.page_bytes)
    side = make_side(spec, memory)
    rank = LocalRank(spec.shape, spec.rank, side, memory)
    steps = msgspec.msgpack.Decoder(RankStep)
    try:
        while True:
            rank.submit(steps.decode(pipe.recv_bytes()))
            try:
                answer = Answer(rank.collect())
            except InvariantBroken as exc:
                answer = Answer(None, str(exc))
            pipe.send_bytes(_encoder.encode(answer))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the engine is through with us, or gone
    finally:
        side.shutdown()


class _Child(msgspec.Struct):
    """What a process that was just forked is to be."""

    pipe: Connection
    spec: RankSpec


def _start_ranks(sock: socket.socket) -> _Child | None:
    """Fork a rank for each spec that comes; None at the end. In a rank: what it is."""
    specs = msgspec.msgpack.Decoder(RankSpec)
    ranks: dict[int, int] = {}  # pidfd -> pid
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in ranks:
                poll.unregister(ready)
                os.close(ready)
                pid = ranks.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                sock.send(_encoder.encode(Ended(pid, code)))
                continue
            data, fds, _, _ = socket.recv_fds(sock, _SPEC_BYTES, 1)
            if not data:
                return None
            starter, pid = os.getpid(), os.fork()
            if not pid:
                _end_with(starter)
                for pidfd in ranks:
                    os.close(pidfd)
                sock.send(_encoder.encode(Started(os.getpid())))
                return _Child(Connection(fds[0]), specs.decode(data))
            os.close(fds[0])
            pidfd = os.pidfd_open(pid)
            ranks[pidfd] = pid
            poll.register(pidfd, select.POLLIN)


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, also one that is stopped."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:  # gone before that
        sys.exit(0)


def main() -> None:
    """Run as the child of a RankStarter, or, forked, as one of its ranks."""
    logging.basicConfig(level=logging.WARNING, format="rank %(process)d %(levelname)s %(message)s")
    torch.set_num_threads(1)  # many ranks share few cores, and their blocks are small
    try:
        make_side: MakeSide = find_class(sys.argv[2])
    except KVStoreError as exc:
        log.error("no rank can be started: %s", exc)
        sys.exit(1)
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        try:
            child = _start_ranks(sock)
        except (BrokenPipeError, ConnectionResetError):
            return  # the engine is gone
    if child is not None:
        run_rank(child.pipe, child.spec, make_side)
        os._exit(0)  # everything of ours has ended; taking torch down takes half a second


if __name__ == "__main__":
    main()
