"""A consumer's fetches, and what it needs of others: how blocks are named, and what is done."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Protocol

import msgspec

from kvstore.export import messages as m
from kvstore.types import BlockKey, JobId, Slot


class State(enum.Enum):
    """Where a wanted block is on its way; see the top of kvstore/export/consumer.py."""

    WANTED = "wanted"
    OFFERED = "offered"
    CLAIMED = "claimed"
    MOVING = "moving"
    LANDED = "landed"
    CHECKED = "checked"
    DONE = "done"


class Block(msgspec.Struct, eq=False):
    """One wanted block."""

    key: BlockKey
    state: State = State.WANTED
    slot: Slot | None = None
    load: tuple[JobId, int] | None = None  # and its number in there
    landing: int | None = None
    place: tuple[int, int] | None = None  # extent and number, once it can be read
    sum: int = 0


class Fetch(msgspec.Struct, eq=False):
    """What is wanted from one peer in one go; direct: read by workers, into engine memory."""

    number: int
    peer: int
    blocks: list[Block]
    push: bool
    asked_ns: int
    heard_ns: int
    extend_ns: int
    left: int  # blocks that are not DONE
    request: str = ""
    offered: bool = False
    released: bool = False
    tiers: dict[int, str] = {}  # position -> the peer's tier
    direct: bool = False


class Tag(msgspec.Struct, frozen=True):
    """Names one block of a fetch to whoever works on it."""

    fetch: int
    position: int


class Read(msgspec.Struct, frozen=True):
    """Slots of one of a peer's extents, and the landing slots that they are read into."""

    region: m.Region
    numbers: list[int]
    landing: list[int]


class Check(msgspec.Struct, frozen=True):
    """A landed block: what it has to be, and where it goes if it is."""

    key: BlockKey
    landing: int
    sum: int
    slot: Slot


class Work(Protocol):
    """What takes time and is done elsewhere: each call has one answer, by its tags, later."""

    def read(self, tags: list[Tag], peer: int, read: Read) -> None:
        """Read a peer's slots for one fetch; the answer is Consumer.moved."""
        ...

    def abandon(self, tag: Tag) -> None:
        """Nobody waits for a read any more: what has not begun is not begun; moved() comes."""
        ...

    def check(self, tags: list[Tag], blocks: list[Check]) -> None:
        """Copy landed blocks to their slots if their sums are right; the answer: checked."""
        ...

    def pass_on(self, number: int, peer: int, read: Read, positions: list[int]) -> None:
        """Have workers read a peer's slots; the answer is Consumer.arrived. read: lands nowhere."""
        ...

    def passed(self, number: int, position: int, *, ok: bool) -> None:
        """Tell the workers what came of a block that they were to read."""
        ...


class Landing(Protocol):
    """Slots that only we and the exporters touch, under a cap in bytes."""

    @property
    def count(self) -> int:
        """Count the slots there are."""
        ...

    def open(self) -> None:
        """They will be wanted soon."""
        ...

    def take(self, count: int) -> list[int]:
        """Take up to count free ones."""
        ...

    def give(self, slots: Collection[int]) -> None:
        """Give some back."""
        ...

    def region(self) -> tuple[m.Region, bytes]:
        """Say where our exporter has them, and its metadata since then."""
        ...
