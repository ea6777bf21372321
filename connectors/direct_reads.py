"""Loads that come straight from a peer into engine memory.

One block of such a load, named by its fetch and its position there:

    wanted --Places: it can be read--> reading --> read, reported to the store (Arrived)
    read --Places once more: it was overwritten in the peer's engine--> reading, from elsewhere
    wanted --Places(push): the store hears where (Target)--> being written by the peer
    any of these --Passed, from the store: the peer held it until then--> valid, or failed

A load ends, complete or failed, only when no read or write of it is under way. Transfers that do
not end after a cancellation, as with a peer that hangs, end with the agent. Within a machine even
that does not stop another process from writing: agents that are written to use networks only.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec

from connectors.copies.host import LayerCache
from connectors.engine_agent import NETWORKS, READ_BYTES, AgentTransfer, EngineAgent
from connectors.load_progress import LoadDeadline
from connectors.step_meta import LoadJob, pieces
from kvstore.core.errors import KVStoreError, TierError
from kvstore.core.layout import Move, RankLayout, RankPages
from kvstore.wire import engine as p
from kvstore.wire import framing

log = logging.getLogger(__name__)

FETCHES_MAX = 1024  # that the store has sent messages about
CANCEL_NS = 1_000_000_000  # for cancelled transfers to end by themselves
RETRY_NS = 1_000_000_000  # until an agent that could not be made is tried again

FetchBlock = tuple[int, int]
"""A fetch, and a position in it."""
Send = Callable[[framing.Message], None]
"""Sends a message to the store."""
FetchMessage = p.Places | p.Passed


class _Source(msgspec.Struct, eq=False):
    """Where a block can be read: an address in a peer's slots, or blocks of its engine's ranks."""

    peer: str = ""
    address: int = 0
    ranks: tuple[RankPages, ...] = ()
    blocks: Sequence[int] = ()


class _Fetch(msgspec.Struct, eq=False):
    """What the store has said of a fetch, by position."""

    sources: dict[int, _Source] = {}
    valid: dict[int, bool] = {}  # True: valid; False: failed
    engines: dict[int, tuple[RankPages, ...]] = {}
    pushed: bool = False
    written: set[int] = set()  # failed, and the peer may still write them

    def add_engine_blocks(self, engine: int, message: p.Places, positions: Sequence[int]) -> None:
        """Note blocks in a peer's engine, whose memory is described once."""
        ranks = self.engines.setdefault(engine, message.ranks)
        blocks = framing.from_u32(message.numbers)
        per = len(blocks) // max(1, len(positions))
        for number, position in enumerate(positions):
            found = blocks[number * per : number * per + per]
            self.sources[position] = _Source(ranks=ranks, blocks=found)


_UNKNOWN = _Fetch()  # of which the store has said nothing


class _PendingRead(msgspec.Struct, frozen=True):
    transfer: AgentTransfer
    blocks: list[FetchBlock]
    in_engine: bool


class PeerLoad(msgspec.Struct, eq=False):
    """The part of one load that comes from a peer: the moves of each block, and their state."""

    moves: dict[FetchBlock, list[Move]]
    deadline: LoadDeadline
    blocks_per_chunk: tuple[int, ...]
    fetches: frozenset[int]
    started: dict[FetchBlock, _Source] = {}
    targets: set[FetchBlock] = set()  # the peer may write our engine blocks of these,
    agent: str = ""  # through this agent, of this worker
    written_bytes: int = 0
    pending: list[_PendingRead] = []
    copied_bytes: int = 0
    failed: bool = False
    valid: int = 0  # blocks
    late: int = 0  # blocks that had not arrived when the load expired
    cancelled_ns: int | None = None


class DirectTransfers:
    """One worker's direct loads: the link thread receives, the copy thread moves."""

    def __init__(self, caches: dict[str, LayerCache], *, pushed: bool = False) -> None:
        """caches: by layer name; pushed: peers write into them, too.

        Raises NotSupported where the tensors cannot be read into.
        """
        self._agent = EngineAgent(caches, transports=NETWORKS if pushed else None)
        self._slot_bytes = 0
        self._inbox: deque[FetchMessage] = deque()
        self._fetches: dict[int, _Fetch] = {}
        self._retry_ns = 0  # without an agent: the next attempt to make one
        self._send: Send = discard  # to the store

    def open(self, layout: RankLayout, devices: str, send: Send) -> None:
        """Start a session; no load is under way. send(): to the store, until end_session().

        Raises TierError, NotSupported where NIXL does not take the tensors' memory, or it would be
        slow and unsafe.
        """
        self._agent.check_reach(devices)
        self._inbox.clear()
        self._fetches.clear()
        self._slot_bytes = layout.slot_bytes
        self._send = send
        self._agent.open(layout, devices)
        self._announce()

    def end_session(self) -> None:
        """Send no more."""
        self._send = discard

    def close(self) -> None:
        """End the agent, and with it all reads and writes."""
        self._agent.close()

    def _announce(self) -> None:
        """Tell the store how peers reach this engine's blocks."""
        try:
            serves = self._agent.serves()
        except (TierError, ValueError) as exc:  # more pieces than a message takes, for one
            log.warning("peers cannot read this engine's memory: %s", exc)
            return
        if serves is not None:
            rank, blocks = serves
            self._send(p.Serves(rank, blocks))

    def receive(self, message: FetchMessage) -> None:
        """Queue what the store says of a fetch; called from the link thread."""
        self._inbox.append(message)

    # Loads

    def start_load(
        self, job: LoadJob, blocks_per_chunk: tuple[int, ...], deadline: LoadDeadline
    ) -> PeerLoad | None:
        """Return the part of a load that comes from a peer; None: there is none.

        blocks_per_chunk: engine blocks in a block, by group. deadline: of blocks not valid yet.
        """
        fetches = dict(zip(job.slots, job.generations, strict=True))
        moves: dict[FetchBlock, list[Move]] = {}
        if max(job.slots, default=0) >= p.DIRECT:
            for group, engine_block, slot, part in pieces(
                job.engine, job.slots, blocks_per_chunk
            ).tolist():
                if slot >= p.DIRECT:
                    block = fetches[slot], slot - p.DIRECT
                    moves.setdefault(block, []).append(Move(group, engine_block, slot, part))
        numbers = frozenset(number for number, _ in moves)
        return PeerLoad(moves, deadline, blocks_per_chunk, numbers) if moves else None

    def advance(self, load: PeerLoad, now_ns: int) -> bool:
        """Continue a load; True when it is over: unless it has failed, all blocks are valid."""
        for number in load.fetches & self._fetches.keys():  # what no load has asked of goes first
            self._fetches[number] = self._fetches.pop(number)
        try:
            self._handle_inbox()
        except (KVStoreError, ValueError) as exc:
            log.error("a message of the store on blocks of a peer is invalid: %s", exc)
            load.failed = True
        self._finish_reads(load)
        valid = [self._valid(block) for block in load.moves]
        if not load.failed:
            count = valid.count(True)
            if count > load.valid:
                load.valid = count
                load.deadline.arrived(now_ns)
            if None in valid and load.deadline.has_expired(now_ns):
                load.late = valid.count(None)
            load.failed = False in valid or load.late > 0
        if not load.failed:
            if not self._agent.name and now_ns >= self._retry_ns:
                self._retry_ns = now_ns + RETRY_NS
                self._restart()
            self._send_targets(load)
            self._start_reads(load)
            self._finish_reads(load)
        if load.failed:
            return self.cancel(load, now_ns)
        if None in valid or load.pending:
            return False
        written = (move.group for block in load.targets for move in load.moves[block])
        load.written_bytes = sum(self._agent.part_bytes[group] for group in written)
        return True

    def cancel(self, load: PeerLoad, now_ns: int) -> bool:
        """Start no more reads; True once no read or write is under way."""
        self._finish_reads(load)
        written = self._being_written(load)
        if not load.pending and not written:
            return True
        if load.cancelled_ns is None:
            load.cancelled_ns = now_ns
            for fetch in {block[0] for block in written}:
                positions = framing.u32([block[1] for block in written if block[0] == fetch])
                self._send(p.Arrived(fetch, positions, 0, ok=False))  # its peer is to stop
        if now_ns - load.cancelled_ns < CANCEL_NS:
            return False
        log.warning(
            "transfers from a peer did not end %d s after a cancellation: restarting the agent",
            CANCEL_NS // 1_000_000_000,
        )
        load.pending.clear()
        self._restart()
        return True

    def _restart(self) -> None:
        try:
            self._agent.restart()
            self._announce()
        except TierError as exc:
            log.error("direct transfers are off until an agent can be made: %s", exc)

    # What the store says

    def _handle_inbox(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            fetch = self._fetches.setdefault(message.fetch, _Fetch())
            while len(self._fetches) > FETCHES_MAX:
                del self._fetches[next(iter(self._fetches))]
            positions = framing.from_u32(message.positions)
            if isinstance(message, p.Passed):
                fetch.valid.update(dict.fromkeys(positions, message.ok))
                fetch.written.difference_update(positions)
                fetch.written.update(positions if message.written else ())
                continue
            fetch.pushed |= message.push
            if message.engine is not None:
                fetch.add_engine_blocks(message.engine, message, positions)
                continue
            if message.metadata:
                self._agent.meet(message.agent, message.metadata)
            for position, number in zip(positions, framing.from_u32(message.numbers), strict=True):
                address = message.base + number * self._slot_bytes
                fetch.sources[position] = _Source(message.agent, address)

    def _valid(self, block: FetchBlock) -> bool | None:
        """True: valid; False: failed; None: the store has not said."""
        return self._fetches.get(block[0], _UNKNOWN).valid.get(block[1])

    def _being_written(self, load: PeerLoad) -> list[FetchBlock]:
        """List the blocks that a peer may still write into our engine blocks."""
        if load.agent != self._agent.name:  # the agent that the peer knows has ended
            return []
        found = []
        for number, position in load.targets:
            fetch = self._fetches.get(number, _UNKNOWN)
            if position not in fetch.valid or position in fetch.written:
                found.append((number, position))
        return found

    def _send_targets(self, load: PeerLoad) -> None:
        """Tell the store the engine blocks that a peer may write for pushed blocks."""
        found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for block, moves in load.moves.items():
            if block in load.targets or not self._fetches.get(block[0], _UNKNOWN).pushed:
                continue
            load.targets.add(block)
            load.agent = self._agent.name
            engine_blocks = [0] * load.blocks_per_chunk[moves[0].group]
            for move in moves:
                engine_blocks[move.part] = move.block_id
            positions, targets = found.setdefault((block[0], len(engine_blocks)), ([], []))
            positions.append(block[1])
            targets += engine_blocks
        for (number, _), (positions, targets) in found.items():
            self._send(
                p.Target(number, self._agent.name, framing.u32(positions), framing.u32(targets))
            )

    # Reads

    def _start_reads(self, load: PeerLoad) -> None:
        found = []
        for block in load.moves:
            source = self._fetches.get(block[0], _UNKNOWN).sources.get(block[1])
            if source is not None and load.started.get(block) is not source:
                found.append((block, source))
        for _, run in groupby(found, key=lambda pair: (pair[0][0], pair[1].peer, pair[1].ranks)):
            chunk: list[tuple[FetchBlock, _Source]] = []
            for pair in run:
                chunk.append(pair)
                if len(chunk) * self._slot_bytes >= READ_BYTES:
                    self._read(load, chunk)
                    chunk = []
            if chunk:
                self._read(load, chunk)

    def _read(self, load: PeerLoad, chunk: Sequence[tuple[FetchBlock, _Source]]) -> None:
        """Start reading blocks that are in slots of one peer, or in one of its engines."""
        first = chunk[0][1]
        load.started.update(chunk)
        try:
            if first.peer:
                slots = [(move, source.address) for b, source in chunk for move in load.moves[b]]
                transfer = self._agent.read(first.peer, slots)
            else:
                parts = [
                    (move, source.blocks[move.part])
                    for block, source in chunk
                    for move in load.moves[block]
                ]
                transfer = self._agent.read_engine(first.ranks, parts)
        except (TierError, ArithmeticError, LookupError, ValueError) as exc:
            transfer = AgentTransfer(0, 0, [], str(exc))  # reported with the others, once they end
        blocks = [block for block, _ in chunk]
        load.pending.append(_PendingRead(transfer, blocks, in_engine=not first.peer))

    def _finish_reads(self, load: PeerLoad) -> None:
        """Report reads that have ended to the store.

        A block that could not be read in an engine is in a slot, too: the store names that next.
        """
        pending, load.pending = load.pending, []
        for read in pending:
            ok = True
            try:
                if not self._agent.over(read.transfer):
                    load.pending.append(read)
                    continue
            except TierError as exc:
                log.error("reading blocks of a peer failed: %s", exc)
                ok = False
                load.failed = load.failed or not read.in_engine
            ok = ok and not load.failed
            copied = read.transfer.bytes if ok else 0
            load.copied_bytes += copied
            positions = framing.u32([position for _, position in read.blocks])
            self._send(p.Arrived(read.blocks[0][0], positions, copied, ok))


def discard(_message: framing.Message) -> None:
    """Send nothing: there is no session."""
