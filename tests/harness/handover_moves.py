"""Moves, copies and sums of blocks in this process: Transfers without exporters and threads."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from kvstore.core.types import BlockKey
from kvstore.handover import transfers as t
from kvstore.handover.checksums import block_sum
from kvstore.handover.runs import Part
from kvstore.wire.framing import from_u32
from tests.harness.fakes import SLOT_BYTES, HeapExtent
from tiers.cpu import CpuExtent
from tiers.nixl.messages import Fill, Transfer


class LandingSlots(t.Landing):
    """Landing slots in this process, mapped from the start; none is given back twice."""

    def __init__(self, extent: int, count: int, slot_bytes: int = SLOT_BYTES) -> None:
        super().__init__(slot_bytes, lambda _: None)
        self.made(extent, cast("CpuExtent", HeapExtent(count * (slot_bytes + 4), slot_bytes)))
        self.base, self.metadata = 4096 * extent, b"md"

    def give_back(self, slots: Iterable[int]) -> None:
        slots = list(slots)
        assert not set(slots) & set(self._free), "given back twice"
        super().give_back(slots)

    def check_all_free(self) -> None:
        assert sorted(self._free) == list(range(self.count))


class Moves:
    """Each piece of work is done, and ends in its event, when do() has it done."""

    has_room = True

    def __init__(self) -> None:
        self.damage: set[BlockKey] = set()  # blocks whose bytes change after they have landed

    def do(self, work: Callable[[], t.Event]) -> None:
        raise NotImplementedError

    def slot(self, agent: str, extent: int, number: int) -> bytes | None:
        """Bytes of a slot of an exporter's, "": our own; None: none, or it does not move."""
        raise NotImplementedError

    def landing_at(self, agent: str, address: int) -> LandingSlots | None:
        raise NotImplementedError

    def landing(self, digest: str, slot_bytes: int) -> LandingSlots:
        raise NotImplementedError

    def filled(self, fill: Fill) -> bool:
        raise NotImplementedError

    def abandon(self, part: Part) -> None:
        """What is under way here always ends."""

    def sum(
        self, part: Part, digest: str, keys: Sequence[BlockKey], slots: t.Slots, _slot_bytes: int
    ) -> None:
        def work() -> t.Event:
            named = zip(keys, slots.views(), strict=True)
            return t.Summed(part, array("Q", [block_sum(digest, *each) for each in named]))

        self.do(work)

    def check(
        self,
        part: Part,
        digest: str,
        keys: Sequence[BlockKey],
        sums: Sequence[int],
        landed: t.Slots,
        slots: t.Slots,
    ) -> None:
        def work() -> t.Event:
            right = []
            blocks = zip(keys, sums, landed.views(), slots.views(), strict=True)
            for key, expected, there, slot in blocks:
                if key in self.damage:
                    there[5] ^= 1
                slot[:] = there
                right.append(block_sum(digest, key, slot) == expected)
            return t.Checked(digest, part, right)

        self.do(work)

    def start(self, part: Part, move: Transfer | Fill, digest: str | None = None) -> None:
        """Each extent is at 4096 times its number."""

        def work() -> t.Event:
            if isinstance(move, Fill):
                return t.Written(part, self.filled(move))
            ours, theirs = from_u32(move.local), from_u32(move.remote)
            if digest is None:
                landing = self.landing_at(move.peer, move.address)
                found = [self.slot("", move.extent, number) for number in ours]
                return t.Written(part, _put(landing, theirs, found))
            found = [self.slot(move.peer, move.address // 4096, number) for number in theirs]
            return t.Arrived(digest, part, _put(self.landing(digest, 0), ours, found))

        self.do(work)


def _put(landing: LandingSlots | None, slots: Sequence[int], found: Sequence[bytes | None]) -> bool:
    """Put what was found into landing slots; tell whether it was all of it."""
    if landing is None:
        return False
    for slot, content in zip(slots, found, strict=True):
        if content is not None:
            landing.view(slot)[:] = content
    return None not in found
