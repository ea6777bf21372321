"""The side channel's protocol between two stores: what a hand-over is agreed with.

Bytes never travel here: the stores' exporters read or write them, or workers read them. A block
is named by its content key and the generation of its slot, never by a bare slot; what is named by
an engine's block is good only once the producer has said so.

    consumer (decode node)                          producer (prefill node)
      Hello(namespace, traits, exporter) -------------->|
      Welcome(exporter) <-------------------------------|   or Refused(reason); no exporter: later
      Want(job, keys, request, lease) ----------------->|   pins what is ready, starts to read
      Offer(job, positions) <---------------------------|   what there is, or will be
      Have(job, positions, places, sums) <--------------|   readable now; again and again
         READs them into landing slots, takes the sums
      Settle(job, lease, arrived) --------------------->|   unpins them
      Settled(job, valid, end) <------------------------|   the lease held until now: bytes are good

Settle says how a consumer stands with a job, and Settled how its producer does:

    Settle    arrived, with the right sum; unread, in an engine's memory; and for how long it wants
              the rest: the heartbeat. 0: it reads no more
    Settled   valid: of the arrived, those whose lease held, which are unpinned. again: overwritten
              in the engine's memory, or unread: a Have follows. computing: the request that is
              waited for still runs. end: nothing more comes

A consumer may use a block once it is valid, and not before. A Settle is judged by the lease that
held when it came, before it extends that lease. Each that names blocks has one answer, in order,
and a block is named again only after "again"; numbers of jobs are not used twice on a connection.
So an answer that comes late is about the same bytes or about none: a given-up block is not waited
for, and its landing slot is its own. What ends an exchange otherwise:

    the lease is over       Settled(end "lease"). Nothing is valid any more, but what was told stays
                            pinned for a while. Another end follows, once nothing is written
    Settle(lease 0)         What is not under way is unpinned, the rest when its transfer has ended;
                            then the end comes
    connection lost         At the consumer all fails at once; the producer unpins as for lease 0.
                            Nothing is left to say: who wants more makes another connection
    an exporter restarted   The same: Refused, and all connections of that store end
    a job that has ended    Settled(end "unknown"), whatever is said of it

To be pushed, the consumer sends Land(job, positions, landing slots) as it has room, and Have
comes once the producer has written them. If it is direct, both may name blocks of an engine's
memory instead of slots, and no sums are needed; what the engine has overwritten since comes once
more, from slots. Durations travel, clocks are never compared.

A request that waits at the consumer is spoken of by its name, without Hello: Keep(lease) is its
heartbeat, and with lease 0 the consumer is done with what is held for it, which Noted answers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.layout import RankPages
from kvstore.core.limits import BLOCK_NS_MAX, GROUPS_MAX, HASH_BYTES_MAX, Hash, Words
from kvstore.core.types import GroupRule
from kvstore.wire.framing import U32, WORD, Message, decoded, from_u32

VERSION = 7
MESSAGE_BYTES_MAX = 16 << 20
JOB_BLOCKS_MAX = 1 << 16
LEASE_MS_MAX = 600_000
CONSUMERS_MAX = 1024  # of one request
REGIONS_MAX = 1 << 12
RANKS_MAX = 64  # of one engine
ENGINES_MAX = 4  # whose memory one job is told of
TEXT_MAX = 4096

# What a store keeps of a peer is small.
Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
Traits = Annotated[dict[Name, Text], msgspec.Meta(max_length=64)]
Metadata = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
Positions = Annotated[bytes, msgspec.Meta(max_length=4 * JOB_BLOCKS_MAX)]  # u32
Sums = Annotated[bytes, msgspec.Meta(max_length=8 * JOB_BLOCKS_MAX)]  # u64
Ranks = Annotated[tuple[RankPages, ...], msgspec.Meta(max_length=RANKS_MAX)]


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Memory of an exporter: where it begins in that process, and its slots."""

    extent: int
    base: int
    slots: int

    def __post_init__(self) -> None:
        small = 0 <= self.extent < 1 << 32 and 0 < self.slots <= 1 << 32
        if not small or not 0 <= self.base < 1 << 63:
            raise ValueError(f"extent {self.extent} at {self.base} with {self.slots} slots")


class Hello(Message, frozen=True):
    """First message of a consumer; traits: what decides the bytes, by name, as text.

    agent, metadata: of its exporter, empty without one (it cannot be pushed to then).
    """

    version: int
    namespace: Name
    traits: Traits
    agent: Name = ""
    metadata: Metadata = b""


class Want(Message, frozen=True):
    """Ask for blocks: for each group the indices wanted (u32) of a chain, first blocks first.

    request: hand-over request whose blocks are waited for while it is still computed. direct: they
    can be read in an engine's memory, too, and no sums are needed. block_ns: how long the
    consumer's engine computes a block; what takes longer to read from a lower tier is not offered.
    0: that is not known, and the producer's engine counts; None: all is offered.
    """

    job: int
    hashes: bytes
    width: int
    indices: Annotated[tuple[Positions, ...], msgspec.Meta(max_length=GROUPS_MAX)]
    scope: Hash = b""
    request: Text = ""
    lease_ms: int = 30_000
    push: bool = False
    direct: bool = False
    block_ns: Annotated[int, msgspec.Meta(ge=0, le=BLOCK_NS_MAX)] | None = None


class Land(Message, frozen=True):
    """Where wanted blocks may be written: u32 positions in the list of wanted, u32 numbers.

    numbers: slots of the region, or, of a direct want, blocks of the consumer's engine, as many for
    each position; 0: that part is not wanted. ranks: the engine's memory, with the first of them
    only, as metadata: of the exporter, once it has mapped the region.
    """

    job: int
    positions: Positions
    numbers: Words
    region: Region | None = None
    ranks: Ranks = ()
    metadata: Metadata = b""


class Settle(Message, frozen=True):
    """Ask whether the lease held until now, and extend it, or end it with lease_ms 0.

    arrived: positions, with the right sums. unread: positions that could not be read in an engine's
    memory; a Have names them once more.
    """

    job: int
    lease_ms: int
    arrived: Positions = b""
    unread: Positions = b""


class Keep(Message, frozen=True):
    """Heartbeat of a request that waits here: hold for so long what is held for it.

    lease_ms 0: this one of its consumers is done with it; repeats do not count.
    """

    namespace: Name
    request: Text
    lease_ms: int
    rank: int = 0
    consumers: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.consumers <= CONSUMERS_MAX:
            raise ValueError(f"rank {self.rank} of {self.consumers}, at most {CONSUMERS_MAX}")


class Welcome(Message, frozen=True):
    """The namespaces agree.

    agent: of the exporter; empty: it is being started, and another Welcome follows.
    """

    agent: Name = ""
    metadata: Metadata = b""


class Refused(Message, frozen=True):
    """No hand-over; retry: asking again can help."""

    reason: Text
    retry: bool = False


class Offer(Message, frozen=True):
    """Which positions can be had; the others are not here. tiers[i]: where positions[i] is.

    block_ns: how long an engine of this store computes a block; 0: that is not known.
    """

    job: int
    positions: Positions
    tiers: Annotated[tuple[Name, ...], msgspec.Meta(max_length=256)]
    which: Positions  # u8 for each position: index into tiers
    block_ns: Annotated[int, msgspec.Meta(ge=0, le=BLOCK_NS_MAX)] = 0


class Have(Message, frozen=True):
    """Positions that can be read (or, pushed, have been written), and what names their bytes.

    places: u32 (extent, slot) pairs, with sums: u64. regions: of extents not named before, with
    the exporter's metadata that they can be reached by. engine: a number; then places are its
    blocks, u32, as many for each position. ranks: its memory, unless the job has named it before.
    """

    job: int
    positions: Positions
    places: Words
    sums: Sums = b""
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=REGIONS_MAX)] = ()
    metadata: Metadata = b""
    engine: int | None = None
    ranks: Ranks = ()


LEASE_OVER = "lease"
FAILED = "failed"  # of a direct push: what was under way may still come
UNKNOWN = "unknown"  # it has ended before, and its end was sent
MAY_BE_WRITTEN = frozenset({LEASE_OVER, FAILED, UNKNOWN})


class Settled(Message, frozen=True):
    """The answer to Settle, or an end.

    valid: the lease held when these arrived. again: of these the engine's memory has other content
    by now, or could not be read; a Have follows. computing: the job's request runs, and
    what is not there yet is computed. end: nothing more comes: "all", or why not; empty: it goes
    on. Nothing is written any more either, but for MAY_BE_WRITTEN; after LEASE_OVER another end
    follows.
    """

    job: int
    valid: Positions = b""
    again: Positions = b""
    computing: bool = False
    end: Text = ""


RequestState = Literal["waits", "released", "gone", "lapsed", "unknown", "ambiguous"]


class Noted(Message, frozen=True):
    """The answer to a Keep that ends.

    "waits": the request still runs, or other consumers have not reported; "released": nothing is
    held; "gone": it ended without blocks; "lapsed": its lease was over before; "unknown",
    "ambiguous": refused.
    """

    request: Text
    state: RequestState


ToProducer = Hello | Want | Land | Settle | Keep
ToConsumer = Welcome | Refused | Noted | Offer | Have | Settled


_for_producer: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(ToProducer)
_for_consumer: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(ToConsumer)


def decode_for_producer(data: bytes) -> Message:
    """Read what a consumer says. Raises ProtocolError for anything else."""
    return decoded(_for_producer, data, f"side channel {VERSION}")


def decode_for_consumer(data: bytes) -> Message:
    """Read what a producer says. Raises ProtocolError for anything else."""
    return decoded(_for_consumer, data, f"side channel {VERSION}")


def lease_ns(lease_ms: int) -> int:
    """Return a lease in nanoseconds. Raises ProtocolError for one that cannot be."""
    if not 0 < lease_ms <= LEASE_MS_MAX:
        raise ProtocolError(f"a lease of {lease_ms} ms, expected 1 to {LEASE_MS_MAX}")
    return lease_ms * 1_000_000


def clip(rule: GroupRule, blocks: int) -> range:
    """Return which of a group's blocks are handed over: all, or those that what comes next needs.

    Each group's are one more than its trailing blocks: a window may begin inside of one, and what
    is left if the last block cannot be had needs it, too.
    """
    return range(0 if rule.trailing is None else max(0, blocks - rule.trailing - 1), blocks)


def neighbours(numbers: list[int]) -> Sequence[int]:
    """Return numbers as a range if each is one more than the one before."""
    if numbers and numbers[-1] - numbers[0] == len(numbers) - 1:
        found = range(numbers[0], numbers[-1] + 1)
        if numbers == list(found):
            return found
    return numbers


def positions_of(data: bytes, count: int) -> Sequence[int]:
    """Unpack positions: a range if they are neighbours.

    Raises ProtocolError unless each is below count and named once.
    """
    found = neighbours(from_u32(data))
    right = found[-1] < count if isinstance(found, range) else len(set(found)) == len(found)
    if not right or max(found, default=-1) >= count:
        raise ProtocolError(f"positions {list(found[:8])}, expected different ones below {count}")
    return found


def places_of(have: Have, count: int) -> tuple[Sequence[int], array[int], array[int], array[int]]:
    """Return positions, and the extent, slot and sum of each block. Raises ProtocolError."""
    positions, sums, places = positions_of(have.positions, count), array("Q"), array(U32)
    if len(have.sums) != 8 * len(positions) or len(have.places) != 2 * WORD * len(positions):
        raise ProtocolError(f"{len(have.places)} bytes of places for {len(positions)} blocks")
    sums.frombytes(have.sums)
    places.frombytes(have.places)
    return positions, places[::2], places[1::2], sums


def engine_blocks_of(positions: Sequence[int], packed: bytes) -> dict[int, list[int]]:
    """Return engine blocks by position. Raises ProtocolError."""
    blocks = from_u32(packed)
    per = len(blocks) // max(1, len(positions))
    if not per or len(blocks) != per * len(positions):
        raise ProtocolError(f"{len(blocks)} engine blocks for {len(positions)} positions")
    return {at: blocks[n * per : n * per + per] for n, at in enumerate(positions)}


def wanted_of(want: Want, groups: int) -> list[Sequence[int]]:
    """Return the indices wanted of each group. Raises ProtocolError for what cannot be."""
    if not 1 <= want.width <= HASH_BYTES_MAX:
        raise ProtocolError(f"hashes of {want.width} bytes, expected 1 to {HASH_BYTES_MAX}")
    if not want.hashes or len(want.hashes) % want.width:
        raise ProtocolError(f"{len(want.hashes)} bytes of hashes, {want.width} each")
    if len(want.indices) != groups:
        raise ProtocolError(f"indices of {len(want.indices)} groups, this model has {groups}")
    blocks = len(want.hashes) // want.width
    wanted = [_ascending(neighbours(from_u32(data)), blocks) for data in want.indices]
    count = sum(map(len, wanted))
    if not 0 < count <= JOB_BLOCKS_MAX:
        raise ProtocolError(f"{count} blocks wanted, expected 1 to {JOB_BLOCKS_MAX}")
    return wanted


def _ascending(indices: Sequence[int], blocks: int) -> Sequence[int]:
    high = any(index >= blocks for index in indices[-1:])
    if high or not (isinstance(indices, range) or all(a < b for a, b in pairwise(indices))):
        raise ProtocolError(f"indices {list(indices[:8])}, expected ascending ones below {blocks}")
    return indices
