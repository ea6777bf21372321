"""Slots that are held for peers: the memory that hand-overs may take from the cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvstore.core.tier import Tier
from kvstore.core.types import Slot
from kvstore.handover.jobs import HELD, Job, Peer
from kvstore.handover.moves import STAGING
from kvstore.handover.runs import Run, joined, runs_of


class HeldMemory:
    """Holds blocks of jobs: by a pin of their entries, or in slots of their own.

    bytes_max: for each peer, and half of what is held for all of them.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max

    def room(self, peer: Peer) -> int:
        """Return the bytes that may be held for a peer now; each can have one block at least."""
        of_all = 2 * self.bytes_max - self.bytes
        room = min(self.bytes_max - peer.held_bytes, of_all)
        return room if peer.held_bytes else max(room, peer.source.layout.slot_bytes)

    def pin(self, job: Job, room: int) -> int:
        """Pin the first blocks of what is awaited that are ready, up to `room`; count them."""
        first = (job.keys[position] for position in islice(job.awaited, room))
        entries = job.source.manager.pin_run(first)
        positions = joined(runs_of([job.awaited.popleft() for _ in entries]))
        for position, entry in zip(positions, entries, strict=True):
            job.entries[position], job.slots[position] = entry, entry.slot
        self._count(job.peer, len(entries))
        job.held(positions)
        return len(entries)

    def stage(self, job: Job, tier: Tier, positions: Sequence[int]) -> None:
        """Read blocks of a lower tier into slots of their own; those without one wait."""
        source = job.source
        slots = source.manager.prepare_store(len(positions), wanted=True)
        job.awaited.extendleft(reversed(positions[len(slots) :]))
        staged = positions[: len(slots)]
        for run in runs_of(staged):
            job.states.put(run, STAGING)
        for position, slot in zip(staged, slots, strict=True):
            job.slots[position], job.entries[position] = slot, None
        self._count(job.peer, len(staged))
        if staged:
            keys = [job.keys[position] for position in staged]
            source.tiering.stage(tier, keys, slots, [job.part((p,)) for p in staged])

    def free(self, job: Job, run: Run) -> None:
        """Free the slots of blocks of one state, if they have some; no transfer uses them."""
        (first, end), manager = run, job.source.manager
        if job.states[first] not in HELD:
            return
        self._count(job.peer, first - end)
        entries = job.entries[first:end]
        manager.unpin(filter(None, entries))
        own = zip(job.slots[first:end], entries, strict=True)
        manager.give_back([Slot(slot) for slot, entry in own if entry is None])
        job.entries[first:end] = [None] * (end - first)

    def _count(self, peer: Peer, blocks: int) -> None:
        held = blocks * peer.source.layout.slot_bytes
        peer.held_bytes += held
        self.bytes += held
