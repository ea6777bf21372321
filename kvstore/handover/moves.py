"""What a hand-over needs done elsewhere: the mover's protocol, and what it says."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from kvstore.core.types import BlockKey
from kvstore.handover.fetches import Check, Read
from kvstore.handover.fetches import Tag as Part
from kvstore.handover.jobs import Fill, Tag, Write
from kvstore.wire import peer as m

BUSY_S = 0.005  # what is waited for wakes the loop up; deadlines do not


class Up(msgspec.Struct, frozen=True):
    """The exporter runs: its agent's name, and how peers reach it."""

    agent: str
    metadata: bytes


class Down(msgspec.Struct, frozen=True):
    """The exporter has ended; so has every transfer."""

    reason: str


class Reachable(msgspec.Struct, frozen=True):
    """Peers can reach an extent; metadata says how."""

    extent: int
    base: int
    metadata: bytes


class Unreachable(msgspec.Struct, frozen=True):
    """The exporter does not use an extent any more."""

    extent: int


class Summed(msgspec.Struct, frozen=True):
    """Checksums of blocks that are handed over."""

    tags: list[Tag]
    sums: list[int]


class Checked(msgspec.Struct, frozen=True):
    """Which landed blocks of a namespace had the right sum, and are in their slots now."""

    digest: str
    tags: list[Part]
    right: list[bool]


class Written(msgspec.Struct, frozen=True):
    """A push has ended; stopped: not all of it was done, and what had begun has ended well."""

    tags: list[Tag]
    ok: bool
    stopped: bool = False


class Arrived(msgspec.Struct, frozen=True):
    """A pull into a namespace has ended."""

    digest: str
    tags: list[Part]
    ok: bool


Event = Up | Down | Reachable | Unreachable | Summed | Checked | Written | Arrived


class Mover(Protocol):
    """Threads and an exporter process; nothing waits. devices: as UCX names them."""

    devices: str

    def poll(self, now_ns: int) -> Sequence[Event]:
        """Return what has happened; each piece of work ends exactly once."""
        ...

    def export(self, extent: int, fd: int, size: int) -> None:
        """Let peers read an extent."""
        ...

    def unexport(self, extent: int) -> None:
        """Have Unreachable come once no transfer uses an extent."""
        ...

    def fds(self) -> Iterator[int]:
        """Go through the descriptors that become readable when poll() has something to do."""
        ...

    def wait_s(self, now_ns: int) -> float | None:
        """Return when to call poll() at the latest; None: when a descriptor says so."""
        ...

    def landing(self, namespace: str, slot_bytes: int) -> Landing:
        """Return a namespace's landing slots."""
        ...

    def wake(self) -> None:
        """Have the exporter run, if it does not yet."""
        ...

    def over_tcp(self, host: str) -> bool:
        """Tell whether bytes from and to a host travel over TCP."""
        ...

    def add_peer(self, agent: str, metadata: bytes) -> None:
        """Learn how to reach a peer's exporter now."""
        ...

    def remove_peer(self, agent: str) -> None:
        """Forget a peer's exporter; what is open with it fails."""
        ...

    def abandon(self, digest: str | None, tag: Tag | Part) -> None:
        """Nobody waits for a block any more: digest of a read's namespace, None for a write.

        What has not begun ends at once; the answer comes all the same.
        """
        ...

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        """What NIXL has moved, by its own count: "pulled", "pushed"."""
        ...

    @property
    def abandoned_bytes(self) -> int:
        """Memory of transfers of ours that nobody waits for and that have not ended."""
        ...

    def restart(self, why: str) -> None:
        """Start the exporter afresh: nothing of before moves any more once Down has come."""
        ...

    def sum(
        self, tags: list[Tag], namespace: str, blocks: list[tuple[BlockKey, memoryview]]
    ) -> None:
        """Take checksums; ends as Summed."""
        ...

    def check(
        self, tags: list[Part], namespace: str, blocks: list[tuple[Check, memoryview, memoryview]]
    ) -> None:
        """Take landed blocks' checksums and copy them if these are right; ends as Checked."""
        ...

    def write(self, tags: list[Tag], agent: str, write: Write) -> None:
        """Write to a peer; ends as Written."""
        ...

    def fill(self, tags: list[Tag], fill: Fill) -> None:
        """Write to an engine of a peer's; ends as Written."""
        ...

    def read(self, tags: list[Part], agent: str, digest: str, read: Read) -> None:
        """Read from a peer into a namespace's landing slots; ends as Arrived."""
        ...

    def close(self) -> None:
        """End all of it."""
        ...


class Landing(Protocol):
    """Landing slots of one namespace."""

    @property
    def count(self) -> int:
        """Count the slots there are."""
        ...

    @property
    def used(self) -> int:
        """Count those that are taken."""
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
        """Say where the exporter has them, and its metadata since then."""
        ...

    def view(self, slot: int) -> memoryview:
        """Return a slot's bytes."""
        ...
