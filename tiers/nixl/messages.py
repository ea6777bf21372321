"""Messages between a store and its exporter, framed as kvstore.wire.engine says; how moves fail.

      store                                      exporter
                                                 started
        <------------------------------- Ready   its name, fresh; how to reach it
      Map + fd --------------------------------> maps, registers
        <----------------------- Mapped, Ready   how to reach it now
      Peer ------------------------------------> how to reach a peer's exporter
        <------------------------------- Meets   before NIXL reads that, and after
      Transfer, Fill --------------------------> moves
        <------------------------------- Ended

A message that cannot be ends the process that gets it, after Fatal from the exporter.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvstore.core.errors import TierIOError
from kvstore.core.layout import PageRun
from kvstore.core.limits import Count
from kvstore.wire.framing import Message

ErrorClass = Literal["gone", "refused", "stopped", "failed"]
"""The peer was lost; the request was invalid; the rest was abandoned; anything else."""


class MoveError(TierIOError):
    """The failure of a transfer."""

    def __init__(self, text: str, error: ErrorClass) -> None:
        super().__init__(text)
        self.error: ErrorClass = error


# Store to exporter


class Map(Message, frozen=True):
    """Map an extent, and let peers reach it. Its descriptor comes along.

    bytes: how much of it, from its start; 0, without a descriptor: end the transfers that use the
    extent soon, and unmap it. writable: blocks may land there.
    """

    extent: int
    bytes: int = 0
    writable: bool = False


class Peer(Message, frozen=True):
    """Learn how to reach a peer now. None: end the transfers with it soon, and forget it."""

    peer: str
    metadata: bytes | None


class Transfer(Message, frozen=True):
    """Move blocks between an own extent and a region of a peer's.

    write: to the peer; otherwise from it. address, region_bytes: of the peer's region. Both sides
    are seen as blocks of block_bytes side by side; local[i] is moved from or to remote[i] (u32
    arrays of positions).
    """

    id: int  # 0 until it is started
    peer: str
    write: bool
    extent: int
    address: int
    region_bytes: int
    block_bytes: int
    local: bytes
    remote: bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that it moves."""
        return len(self.local) // 4 * self.block_bytes


class Fill(Message, frozen=True):
    """Write parts of an own extent to an engine's blocks, in memory of a peer's.

    pages: where bytes of a part lie in there. parts: where in the extent each begins (u64);
    blocks: the engine block that it is written to (u32). gpu: see RankPages.
    """

    id: int  # as a Transfer's
    peer: str
    extent: int
    pages: tuple[PageRun, ...]
    parts: bytes
    blocks: bytes
    gpu: int | None = None

    @property
    def moved_bytes(self) -> int:
        """Bytes that it writes."""
        part = sum(page.pieces * page.piece_bytes for page in self.pages)
        return len(self.blocks) // 4 * part


class Abandon(Message, frozen=True):
    """End a transfer as soon as possible. It has an Ended like any other."""

    id: int


class Ping(Message, frozen=True):
    """Asks for a Ping: an exporter that sends none for long is stopped, or hangs."""


# Exporter to store


class Ready(Message, frozen=True):
    """How to reach the exporter and all that is mapped.

    Comes once it runs, and again after one or more Mapped. name: of its agent, never used before.
    """

    name: str
    metadata: bytes


class Mapped(Message, frozen=True):
    """An extent is mapped, at this address for peers.

    None: it is not, and no transfer uses it. text: why it could not be mapped.
    """

    extent: int
    address: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)] | None = None
    text: str = ""


class Ended(Message, frozen=True):
    """A transfer has ended: nothing of it is under way.

    bytes: moved in whole chunks, by NIXL's count. error: None, all blocks were moved; "gone", the
    peer was lost; "refused", it is invalid; "stopped", the rest was abandoned, and what had begun
    has ended well; "failed".
    """

    id: int
    bytes: Count
    error: ErrorClass | None = None
    text: str = ""


class Meets(Message, frozen=True):
    """NIXL begins to read a peer's metadata, which can end the process; None: it has read that."""

    peer: str | None = None


class Fatal(Message, frozen=True):
    """The exporter cannot work, and ends."""

    text: str


ToExporter = Map | Peer | Transfer | Fill | Abandon | Ping
ToStore = Ready | Mapped | Ended | Meets | Fatal | Ping
