"""Scripted engines that a benchmark watches: when can a slot be read, when is engine memory right.

Nothing is copied out of the slots. Straight into an engine's memory its worker reads what a peer
has, or the peer writes it there.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from connectors.copies.host import LayerCache
from connectors.engine_agent import READ_BYTES, AgentTransfer, EngineAgent
from kvstore.core.errors import KVStoreError
from kvstore.core.layout import Move
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.bench.store import StoreProcess
from tests.harness.live import LiveEngine

ANSWER_S = 60.0
LOOK_S = 0.0003  # between two looks at slots
FIRST_BLOCK = 1  # 0 is the name of none


class Fetched(msgspec.Struct, frozen=True):
    """Blocks that were asked for: seconds until the first and until all of them could be read.

    complete: all of them could be had; otherwise nothing was waited for.
    """

    complete: bool
    slots: list[int]
    sources: dict[str, int]
    first_s: float = 0.0
    all_s: float = 0.0


class Session(LiveEngine):
    """An engine of one rank; detached after the context."""

    def __init__(self, store: StoreProcess, name: str, block_bytes: int, **how: Any) -> None:
        """name: of the engine. block_bytes: of a block in all."""
        super().__init__(store, name, block_bytes, "bench", **how)
        self.side_channel = self.scheduler.take(p.Welcome).side_channel
        self._block_bytes = block_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def fetch(self, hashes: Sequence[bytes], peer: str = "", *, push: bool = False) -> Fetched:
        """Ask for blocks, of another store too, and watch them until all can be read."""
        started_s = time.perf_counter()
        granted = self.ask(hashes, peer=peer, push=push)
        slots = framing.from_u32(granted.hits[0].slots) if granted.lease else []
        found = Fetched(len(slots) == len(hashes), slots, granted.sources)
        if found.complete:
            leased = np.frombuffer(granted.hits[0].generations, np.uint32)
            first_s, all_s = self._watch(np.array(slots), leased, started_s)
            found = msgspec.structs.replace(found, first_s=first_s, all_s=all_s)
        if granted.lease:
            self.worker.send(p.Loaded(granted.lease, 0, 0.0))
        return found

    def holds(self, hashes: Sequence[bytes], slots: Sequence[int]) -> bool:
        """Tell whether slots have the bytes that these blocks should have."""
        for block, slot in zip(hashes, slots, strict=True):
            memory, at = self._place(slot)
            if memory[at : at + self._block_bytes] != self.content(block):
                return False
        return True

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
        for extent, memory in self._maps:
            which = (slots >= extent.first) & (slots < extent.first + extent.count)
            if which.any():
                at = extent.generations_offset
                generations = np.frombuffer(memory, np.uint32, extent.count, at)
                yield generations, slots[which] - extent.first, leased[which]


class DirectSession(Session):
    """One with an engine's tensor of so many blocks, and an agent."""

    def __init__(self, store: StoreProcess, name: str, block_bytes: int, blocks: int) -> None:
        """blocks: of the tensor."""
        super().__init__(store, name, block_bytes, direct=True)
        self._tensor = torch.zeros((FIRST_BLOCK + blocks) * block_bytes, dtype=torch.uint8)
        self._agent = EngineAgent({"layer": LayerCache(self._tensor, 0, block_bytes, block_bytes)})
        self._opened = False

    def fetch_direct(self, hashes: Sequence[bytes], peer: str, *, push: bool = False) -> Fetched:
        """Ask a peer for blocks, and have them in the blocks of the tensor, in their order.

        push: the peer writes them. For agents that have networks only.
        """
        self._open()
        started_s = time.perf_counter()
        granted = self.ask(hashes, peer=peer, push=push, direct=True)
        slots = framing.from_u32(granted.hits[0].slots) if granted.lease else []
        found = Fetched(len(slots) == len(hashes), slots, granted.sources)
        if found.complete:
            block_of = {slot - p.DIRECT: block for block, slot in enumerate(slots, FIRST_BLOCK)}
            first_s = self._receive(block_of, started_s, push=push)
            all_s = time.perf_counter() - started_s
            found = Fetched(True, slots, granted.sources, first_s, all_s)
        if granted.lease:
            self.worker.send(p.Loaded(granted.lease, 0, 0.0))
        return found

    def take(self, hashes: Sequence[bytes]) -> bool:
        """Tell whether the tensor has the bytes that these blocks should have, and empty it."""
        size, came = self._block_bytes, self._tensor.numpy()
        good = all(
            came[at * size : (at + 1) * size].tobytes() == self.content(block)
            for at, block in enumerate(hashes, FIRST_BLOCK)
        )
        self._tensor.zero_()
        return good

    def _open(self) -> None:
        """Have an agent, once the store has said over which devices, and tell how to reach it."""
        while not self._opened:
            for message in self._told():
                if isinstance(message, p.Welcome) and message.layout is not None:
                    self._agent.open(message.layout, message.devices)
                    serves = self._agent.serves()
                    if serves is not None:
                        self.worker.send(p.Serves(*serves))
                    self._opened = True

    def _told(self) -> list[framing.Message]:
        """Return what the store has told the worker, after a moment if it has not."""
        if not self.worker.messages and select.select([self.worker.sock], [], [], LOOK_S)[0]:
            self.worker.read()
        messages, self.worker.messages = self.worker.messages, []
        return messages

    def _receive(self, block_of: dict[int, int], started_s: float, *, push: bool) -> float:
        """Read what can be read until all of it is good; return the seconds until the first was.

        block_of: the tensor's block of each position. push: say where the peer writes, instead.
        """
        first_s, good = 0.0, 0
        flying: list[tuple[int, list[int], AgentTransfer]] = []
        while good < len(block_of):
            for message in self._told():
                if isinstance(message, p.Places) and not push:
                    flying += self._begin(message, block_of)
                elif isinstance(message, p.Push) and push:
                    self.worker.send(self._target(message.fetch, block_of))
                elif isinstance(message, p.Passed):
                    if not message.ok:
                        raise KVStoreError("blocks came, and are not good")
                    good += len(framing.from_u32(message.positions))
                    first_s = first_s or time.perf_counter() - started_s
            flying = [each for each in flying if not self._arrived(*each)]
            if time.perf_counter() - started_s > ANSWER_S:
                raise KVStoreError(f"blocks did not arrive in {ANSWER_S:.0f} s")
        return first_s

    def _begin(
        self, places: p.Places, block_of: dict[int, int]
    ) -> Iterator[tuple[int, list[int], AgentTransfer]]:
        """Start reading what can be read now."""
        if places.metadata:
            self._agent.meet(places.agent, places.metadata)
        positions, numbers = framing.from_u32(places.positions), framing.from_u32(places.numbers)
        at_once = max(1, READ_BYTES // self._block_bytes)
        for first in range(0, len(positions), at_once):
            chunk = positions[first : first + at_once]
            moves = [
                (Move(0, block_of[position], 0, 0), places.base + number * self._block_bytes)
                for position, number in zip(chunk, numbers[first:], strict=False)
            ]
            yield places.fetch, chunk, self._agent.read(places.agent, moves)

    def _target(self, fetch: int, block_of: dict[int, int]) -> p.Target:
        """Say where the peer writes all of it."""
        positions, blocks = framing.u32(list(block_of)), framing.u32(list(block_of.values()))
        return p.Target(fetch, self._agent.name, positions, blocks)

    def _arrived(self, fetch: int, positions: list[int], reading: AgentTransfer) -> bool:
        """Tell the store of a read that is over."""
        if not self._agent.over(reading):
            return False
        self.worker.send(p.Arrived(fetch, framing.u32(positions), reading.bytes, ok=True))
        return True
