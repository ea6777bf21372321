"""Scripted engines that a benchmark watches: when can a slot be read, when is engine memory right.

Nothing is copied out of the slots. Straight into an engine's memory its worker reads what a peer
has, or the peer writes it there.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from connectors.copies.host import LayerCache
from connectors.direct_reads import DirectTransfers, FetchMessage
from connectors.load_progress import LoadDeadline
from connectors.step_meta import EngineSpec, LoadJob
from kvstore.core.errors import KVStoreError
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.bench.store import StoreProcess
from tests.harness.live import LiveEngine

ANSWER_S = 60.0
LOOK_S = 0.001  # between two looks at slots
FIRST_BLOCK = 1  # 0 is the name of none


class Fetched(msgspec.Struct):
    """Blocks that were asked for: seconds until the first and until all of them could be read.

    complete: all of them could be had; otherwise nothing was waited for.
    """

    complete: bool
    slots: list[int]
    sources: dict[str, int]
    first_s: float = 0.0
    all_s: float = 0.0


class Session(LiveEngine):
    """An engine of one rank, of a store with one extent; detached after the context."""

    def __init__(self, store: StoreProcess, name: str, block_bytes: int, **how: Any) -> None:
        """name: of the engine. block_bytes: of a block in all."""
        super().__init__(store, name, block_bytes, "bench", **how)
        self.side_channel = self.active.side_channel
        self._block_bytes = block_bytes

    def fetch(self, hashes: Sequence[bytes], **how: Any) -> Fetched:
        """Ask for blocks, of another store too, and watch them until all can be read.

        how: of the lookup.
        """
        started_s = time.perf_counter()
        granted = self.ask(hashes, **how)
        slots = framing.from_u32(granted.hits[0].slots) if granted.lease else []
        found = Fetched(len(slots) == len(hashes), slots, granted.sources)
        if found.complete:
            found.first_s = self._receive(granted, slots, started_s)
            found.all_s = time.perf_counter() - started_s
        if granted.lease:
            self.worker.send(p.Loaded(granted.lease, 0, 0.0))
        return found

    def holds(self, hashes: Sequence[bytes], slots: Sequence[int]) -> bool:
        """Tell whether slots have the bytes that these blocks should have."""
        places = [self._place(slot) for slot in slots]
        found = [memory[at : at + self._block_bytes] for memory, at in places]
        return found == [self.content(block) for block in hashes]

    def _receive(self, granted: p.Granted, slots: list[int], started_s: float) -> float:
        """Wait until all slots have their generations; return the seconds to the first."""
        ((extent, memory),) = self._maps
        at = extent.generations_offset
        generations = np.frombuffer(memory, np.uint32, extent.count, at)
        positions = np.array(slots) - extent.first
        leased = np.frombuffer(granted.hits[0].generations, np.uint32)
        first_s = 0.0
        while not (here := generations[positions] == leased).all():
            now_s = time.perf_counter() - started_s
            if here[0] and not first_s:
                first_s = now_s
            if now_s > ANSWER_S:
                raise KVStoreError(f"blocks did not arrive in {ANSWER_S:.0f} s")
            time.sleep(LOOK_S)
        return first_s or time.perf_counter() - started_s


class DirectSession(Session):
    """One with an engine's tensor of so many blocks, and its worker's direct transfers."""

    def __init__(self, store: StoreProcess, name: str, block_bytes: int, blocks: int) -> None:
        """blocks: of the tensor."""
        super().__init__(store, name, block_bytes, direct=True)
        self._tensor = torch.zeros((FIRST_BLOCK + blocks) * block_bytes, dtype=torch.uint8)
        cache = LayerCache(self._tensor, 0, block_bytes, block_bytes)
        self._transfers = DirectTransfers({"layer.0": cache})
        self._opened = False

    def fetch(self, hashes: Sequence[bytes], **how: Any) -> Fetched:
        """Ask a peer for blocks, and have them in the blocks of the tensor, in their order.

        push: the peer writes them. For agents that have networks only.
        """
        while not self._opened:
            self._hear()
        return super().fetch(hashes, direct=True, **how)

    def holds(self, hashes: Sequence[bytes], _slots: Sequence[int]) -> bool:
        """Tell whether the tensor has the bytes that these blocks should have, and empty it."""
        size, came = self._block_bytes, self._tensor.numpy()
        good = all(
            came[at * size : (at + 1) * size].tobytes() == self.content(block)
            for at, block in enumerate(hashes, FIRST_BLOCK)
        )
        self._tensor.zero_()
        return good

    def _hear(self) -> None:
        """Take in what the store has said, after a moment if it has not said anything."""
        if not self.worker.messages and select.select([self.worker.sock], [], [], LOOK_S)[0]:
            self.worker.read()
        messages, self.worker.messages = self.worker.messages, []
        for message in messages:
            if isinstance(message, FetchMessage):
                self._transfers.receive(message)
            elif isinstance(message, p.Welcome) and message.layout is not None:
                self._transfers.open(message.layout, message.devices, self.worker.send)
                self._opened = True

    def _receive(self, granted: p.Granted, slots: list[int], started_s: float) -> float:
        """Load as a worker does until all blocks are valid; return the seconds to the first."""
        blocks = tuple(range(FIRST_BLOCK, FIRST_BLOCK + len(slots)))
        engine = EngineSpec(blocks, (len(slots),), (0,))
        generations = tuple(framing.from_u32(granted.hits[0].generations))
        job = LoadJob("request", 0, granted.lease, engine, tuple(slots), generations)
        limit_ns = int(ANSWER_S * 1e9)
        deadline = LoadDeadline(limit_ns, limit_ns, time.monotonic_ns())
        load = self._transfers.start_load(job, (1,), deadline)
        if load is None:
            raise KVStoreError("the store had these blocks itself, expected its peer's")
        first_s = 0.0
        while not self._transfers.advance(load, time.monotonic_ns()):
            if load.valid and not first_s:
                first_s = time.perf_counter() - started_s
            self._hear()
        if load.failed:
            raise KVStoreError(f"a direct load failed, {load.late} blocks came too late")
        return first_s or time.perf_counter() - started_s
