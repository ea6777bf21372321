"""A session with a store, as an engine of one rank has it, without an engine.

It fills slots with bytes that follow from the blocks' hashes, and watches slots until they can be
read. Nothing is copied out of them.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.core.errors import KVStoreError
from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry
from kvstore.core.types import GroupRule, make_key
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire.credentials import connect

ANSWER_S = 60.0
LOOK_S = 0.0003  # between two looks at slots
CREDIT_SLOTS = 8
BLOCK_TOKENS = 16
HASH_BYTES = 32
_CONNECT_S = 10.0
_READ_BYTES = 1 << 18
_FDS_MAX = 16

M = TypeVar("M", bound=framing.Message)


class Fetched(msgspec.Struct, frozen=True):
    """Blocks that were asked for: seconds until the first and until all of them could be read.

    complete: all of them could be had; otherwise nothing was waited for.
    """

    complete: bool
    slots: list[int]
    sources: dict[str, int]
    first_s: float = 0.0
    all_s: float = 0.0


class _Connection:
    """Messages of one half, and descriptors that came with them."""

    def __init__(self, path: str) -> None:
        self.sock = connect(path, _CONNECT_S)
        self.sock.settimeout(None)
        self.fds: deque[int] = deque()
        self.messages: list[framing.Message] = []
        self._decoder = framing.Decoder(p.ToEngine)

    def send(self, message: framing.Message) -> None:
        self.sock.sendall(framing.encode(message))

    def read(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.sock, _READ_BYTES, _FDS_MAX)
        if not data:
            raise KVStoreError("the store has closed the connection")
        self.fds.extend(fds)
        for message in self._decoder.feed(data):
            if isinstance(message, p.Refused | p.Detach):
                raise KVStoreError(f"the store ends the session: {message.reason}")
            self.messages.append(message)


class Session:
    """Attached on entering the context, detached after leaving it."""

    def __init__(self, path: str, name: str, block_bytes: int, *, direct: bool = False) -> None:
        """path: of the store's socket. name: of the engine. direct: its worker reads from peers."""
        self.side_channel = ""  # the store's, for other stores
        self._direct = direct
        self._name = name
        self._block_bytes = block_bytes
        self._worker = _Connection(path)
        self._scheduler = _Connection(path)
        self._credits: deque[int] = deque()
        self._extents: list[tuple[p.Extent, mmap.mmap]] = []
        self._asks = 0

    def __enter__(self) -> Self:
        layers = (LayerGeometry("layer", self._block_bytes),)
        groups = (GroupGeometry(GroupRule(), layers),)
        geometry = RankGeometry("bench", BLOCK_TOKENS, (1,), groups)
        who = p.VERSION, self._name, "worker", 0, 1
        self._worker.send(p.Hello(*who, geometry=geometry, direct=self._direct))
        self._scheduler.send(p.Hello(p.VERSION, self._name, "scheduler", 0, 1, CREDIT_SLOTS))
        self.side_channel = self._wait(p.Welcome).side_channel
        self._wait(p.Active)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._scheduler.sock.close()
        self._worker.sock.close()
        for fd in self._scheduler.fds:  # of a board, which nothing here writes on
            os.close(fd)
        self._extents.clear()  # unmapped with the last view

    def put(self, hashes: Sequence[bytes]) -> None:
        """Store a request's blocks."""
        for index, block in enumerate(hashes):
            while not self._credits:
                self._answers()
            slot = self._credits.popleft()
            self._bytes_of(slot)[:] = content(block, self._block_bytes)
            parent = make_key(hashes[index - 1], 0) if index else b""
            stored = p.Stored(
                framing.u32([slot]), (make_key(block, 0),), (parent,), ok=True, seconds=0.0
            )
            self._worker.send(stored)

    def fetch(self, hashes: Sequence[bytes], peer: str = "", *, push: bool = False) -> Fetched:
        """Ask for blocks, of another store too, and watch them until all can be read."""
        started_s = time.perf_counter()
        granted = self._ask(hashes, peer, push=push)
        slots = framing.from_u32(granted.hits[0].slots) if granted.lease else []
        found = Fetched(len(slots) == len(hashes), slots, granted.sources)
        if found.complete:
            leased = np.frombuffer(granted.hits[0].generations, np.uint32)
            first_s, all_s = self._watch(np.array(slots), leased, started_s)
            found = msgspec.structs.replace(found, first_s=first_s, all_s=all_s)
        if granted.lease:
            self._worker.send(p.Loaded(granted.lease, 0, 0.0))
        return found

    def _ask(
        self, hashes: Sequence[bytes], peer: str, *, push: bool | None = None, direct: bool = False
    ) -> p.Granted:
        """Ask for blocks, and wait for the answer."""
        self._asks += 1
        where = {"peer": peer, "push": push, "direct": direct}
        lookup = p.Lookup(self._asks, b"".join(hashes), HASH_BYTES)
        self._scheduler.send(p.Step((msgspec.structs.replace(lookup, **where),)))
        while True:
            for granted in self._answers().granted:
                if granted.ask == self._asks:
                    return granted

    def holds(self, hashes: Sequence[bytes], slots: Sequence[int]) -> bool:
        """Tell whether slots have the bytes that these blocks should have."""
        return all(
            self._bytes_of(slot) == content(block, self._block_bytes)
            for block, slot in zip(hashes, slots, strict=True)
        )

    def _watch(
        self, slots: npt.NDArray[np.int64], leased: npt.NDArray[np.uint32], started_s: float
    ) -> tuple[float, float]:
        """Return the seconds until the first slot, and all of them, have their generations."""
        first_s = 0.0
        waiting = list(self._generations(slots, leased))
        ((have, at, want),) = self._generations(slots[:1], leased[:1])
        while waiting:
            now_s = time.perf_counter() - started_s
            if not first_s and have[at] == want:
                first_s = now_s
            waiting = [part for part in waiting if (part[0][part[1]] != part[2]).any()]
            if now_s > ANSWER_S:
                raise KVStoreError(f"blocks did not arrive in {ANSWER_S:.0f} s")
            if waiting:
                time.sleep(LOOK_S)
        return first_s or now_s, now_s

    def _generations(
        self, slots: npt.NDArray[np.int64], leased: npt.NDArray[np.uint32]
    ) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.uint32]]]:
        """Yield, by extent, all its generations, positions of slots in it, and what is leased."""
        for extent, memory in self._extents:
            which = (slots >= extent.first) & (slots < extent.first + extent.count)
            if which.any():
                at = extent.generations_offset
                generations = np.frombuffer(memory, np.uint32, extent.count, at)
                yield generations, slots[which] - extent.first, leased[which]

    def _bytes_of(self, slot: int) -> memoryview:
        for extent, memory in self._extents:
            if extent.first <= slot < extent.first + extent.count:
                at = (slot - extent.first) * extent.slot_bytes
                return memoryview(memory)[at : at + self._block_bytes]
        raise KVStoreError(f"slot {slot} is in no extent that the store has named")

    def _answers(self) -> p.Answers:
        answers = self._wait(p.Answers)
        self._credits.extend(framing.from_u32(answers.credits))
        return answers

    def _wait(self, kind: type[M]) -> M:
        """Wait for the scheduler half's next message of a kind; extents are mapped meanwhile."""
        deadline_s = time.monotonic() + ANSWER_S
        while True:
            for message in self._scheduler.messages:
                if isinstance(message, kind):
                    self._scheduler.messages.remove(message)
                    return message
            if not self._listen(max(0.0, deadline_s - time.monotonic())):
                raise KVStoreError(f"no {kind.__name__} of the store in {ANSWER_S:.0f} s")

    def _listen(self, timeout_s: float) -> bool:
        """Read what has arrived for both halves, and map memory; False: nothing came in time."""
        halves = {half.sock: half for half in (self._worker, self._scheduler)}
        ready = select.select(list(halves), [], [], timeout_s)[0]
        for sock in ready:
            halves[sock].read()
        messages, self._worker.messages = self._worker.messages, []
        for message in messages:
            if isinstance(message, p.Extent):
                fd = self._worker.fds.popleft()
                self._extents.append((message, mmap.mmap(fd, message.bytes)))
                os.close(fd)
                self._worker.send(p.Mapped(message.extent))
            else:
                self._worker.messages.append(message)
        return bool(ready)


def content(block: bytes, size: int) -> bytes:
    """Return what a block with this hash holds."""
    return (block * (size // len(block) + 1))[:size]
