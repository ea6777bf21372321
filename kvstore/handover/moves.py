"""A move: blocks that one store wants of another, by one Want, as both ends keep them.

    source       an engine block, or a slot; what is on disk is first read into a slot
    destination  a slot, through a landing slot; or an engine block of each rank: a direct move
    mover        the reader; or the writer: a push

The consumer's end is a Fetch, the producer's a Job. The states of a block, at the consumer:

    WANTED --offered--> OFFERED --claimed: by a load with a slot of ours, or by workers--> CLAIMED
    CLAIMED --to be pulled: readable there; all others: the destination has room--> MOVING
    MOVING --in a landing slot--> LANDED --its sum is right, copied to its slot--> CHECKED
    MOVING --direct: all ranks have it--> CHECKED
    CHECKED --the peer: the lease held--> DONE, ready
    CHECKED --the peer: again, since an engine has overwritten it--> CLAIMED
    any --failed, late, lease over, peer gone--> DONE, not ready; its load fails there

And at the producer, where a block is DONE until it is offered:

    WANTED --ready in memory, pinned------------------------> SUMMING
    WANTED --on a lower tier, being read into a slot--------> STAGING --read--> SUMMING
    SUMMING --its sum is known--> SUMMED --to be pulled-----> TOLD
    WANTED, STAGING --direct, without a sum-----------------> TOLD, pushed: SUMMED
    SUMMED --pushed: the destination is known---------------> MOVING --written--> TOLD
    MOVING, out of an engine --overwritten there meanwhile--> MOVING, from its slot
    TOLD --settled: valid-----------------------------------> DONE, not held any more
    TOLD, in an engine's memory --settled: again------------> TOLD, in its slot
    WANTED --its request ended without it-------------------> DONE
    any but WANTED --read or write failed, job released-----> DONE, once nothing is under way
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.core.types import BlockKey
from kvstore.handover.runs import Part, Run, States, numbers, runs_of

WANTED, OFFERED, CLAIMED, STAGING, SUMMING, SUMMED, MOVING, LANDED, CHECKED, TOLD, DONE = range(11)


@dataclass(eq=False, kw_only=True)
class Move:
    """The blocks of one Want. Connection and number name it in a store."""

    connection: int
    number: int
    keys: list[BlockKey]
    request: str = ""
    push: bool = False
    direct: bool = False
    left: int = 0  # blocks that are not DONE
    # Of each block:
    states: States = field(init=False)
    slots: array[int] = field(init=False)  # of this store
    sums: array[int] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.keys)
        self.states = States(count, DONE)
        self.slots, self.sums = numbers(count), numbers(count, "Q")

    @property
    def all(self) -> Run:
        """The run of all blocks."""
        return 0, len(self.keys)

    def part(self, positions: Sequence[int]) -> Part:
        """Name some blocks in the store."""
        return Part(self.connection, self.number, positions)

    def in_state(self, positions: Sequence[int], state: int) -> list[Run]:
        """Return the runs of those positions that are in a state."""
        states = bytes((state,))
        return [part for run in runs_of(positions) for part in self.states.within(run, states)]
