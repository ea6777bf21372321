"""What a store says to its exporter, and what that answers; framed as kvstore.wire.engine says.

      store                                      exporter
                                                 started
        <------------------------------- Ready   its name, fresh; how to reach it
      Map + fd --------------------------------> maps, registers
        <-------------------- Mapped, Metadata   how to reach it now
      AddPeer ---------------------------------> what a peer's store has said of its exporter
      Transfer, Fill --------------------------> moves
        <------------------------------- Ended

Wrong is the answer to what has no other. A Failed is the last message.
"""

from __future__ import annotations

from kvstore.core.layout import PageRun
from kvstore.wire.framing import Message
from tiers.nixl.errors import ErrorClass

# Store to exporter


class Map(Message, frozen=True):
    """Map an extent, and let peers reach it. Its descriptor comes along.

    bytes: how much of it, from its start. writable: blocks may land there. descriptor: its number
    among the descriptors passed, from 0.
    """

    extent: int
    bytes: int
    writable: bool
    descriptor: int


class Unmap(Message, frozen=True):
    """End the transfers that use an extent as soon as that goes, and unmap it."""

    extent: int


class AddPeer(Message, frozen=True):
    """Learn how to reach a peer, or how to reach it now."""

    peer: str
    metadata: bytes


class RemovePeer(Message, frozen=True):
    """End the transfers with a peer as soon as that goes, and forget it."""

    peer: str


class Transfer(Message, frozen=True):
    """Move blocks between an own extent and a region of a peer's.

    write: to the peer; otherwise from it. address, region_bytes: of the peer's region. Both sides
    are seen as blocks of block_bytes side by side; local[i] is moved from or to remote[i] (u32
    arrays of positions).
    """

    id: int
    peer: str
    write: bool
    extent: int
    address: int
    region_bytes: int
    block_bytes: int
    local: bytes
    remote: bytes


class Fill(Message, frozen=True):
    """Write parts of an own extent to an engine's blocks, in memory of a peer's.

    pages: where bytes of a part lie in there. parts: where in the extent each begins (u64);
    blocks: the engine block that it is written to (u32). gpu: see RankPages.
    """

    id: int
    peer: str
    extent: int
    pages: tuple[PageRun, ...]
    parts: bytes
    blocks: bytes
    gpu: int | None = None


class Abandon(Message, frozen=True):
    """Nobody waits for a transfer: end it as soon as that goes. It has an Ended like any other."""

    id: int


class Ping(Message, frozen=True):
    """Say Pong: one that does not for long is stopped, or hangs."""


# Exporter to store


class Ready(Message, frozen=True):
    """It is there. name: of its agent, never used before."""

    name: str
    metadata: bytes


class Mapped(Message, frozen=True):
    """An extent is mapped. address: where, for peers."""

    extent: int
    address: int


class NotMapped(Message, frozen=True):
    """An extent cannot be mapped."""

    extent: int
    text: str


class Unmapped(Message, frozen=True):
    """An extent is not mapped any more, and no transfer uses it."""

    extent: int


class Metadata(Message, frozen=True):
    """How to reach all that is mapped; comes after Mapped and Unmapped, once for many of them."""

    metadata: bytes


class PeerRefused(Message, frozen=True):
    """A peer cannot be added; transfers with it end as "gone"."""

    peer: str
    text: str


class Ended(Message, frozen=True):
    """A transfer is over: nothing of it is under way, whatever became of it.

    bytes: that NIXL says it has moved, of whole chunks. seconds: since it was asked for. error:
    None, all blocks were moved; "gone", the peer was lost; "refused", it cannot be; "stopped",
    nobody waited for the rest, and what had begun has ended well; "failed".
    """

    id: int
    bytes: int
    seconds: float
    error: ErrorClass | None = None
    text: str = ""


class Pong(Message, frozen=True):
    """It does its work."""


class Wrong(Message, frozen=True):
    """A message could not be understood; it is passed over."""

    text: str


class Failed(Message, frozen=True):
    """It cannot do its work, and ends."""

    text: str


ToExporter = Map | Unmap | AddPeer | RemovePeer | Transfer | Fill | Abandon | Ping
ToStore = (
    Ready | Mapped | NotMapped | Unmapped | Metadata | PeerRefused | Ended | Pong | Wrong | Failed
)
