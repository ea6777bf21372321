"""The exporter's process: one thread, which has the agent, and the socket of the store.

It ends when the store does, and at once, and after a message that cannot be: another one starts.

Mapped memory, and transfers in chunks: peers take turns, and so do the transfers of a peer.

waiting --a turn: its next chunk--> waiting, some chunks under way --its last chunk--> under way
  | peer removed or gone, extent unmapped, abandoned                                       |
  +-> no more chunks are started --nothing under way--> ended <---nothing under way--------+

In shared memory NIXL moves a chunk while it is being started; over a network a few of each peer
are under way at a time, and are looked at between naps. A transfer ends when nothing of it is
under way: its memory is touched no more.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

import msgspec
import numpy as np

from kvstore.core.errors import ProtocolError
from kvstore.wire.framing import Decoder, Message, encode
from tiers.cpu import touch
from tiers.nixl import messages as m
from tiers.nixl.agent import Agent, Blocks, Flight, Indices, Places
from tiers.nixl.pages import in_pages, in_slots

CHUNK_BYTES = 16 << 20  # a few ms of the one thread
CHUNK_PIECES = 1 << 14
FLIGHTS_MAX = 4  # chunks of a peer under way
NAP_S = 0.0001  # looked at more often, UCX's threads get less done
LONG_NAP_S = 0.002  # once nothing has ended for STILL_S
STILL_S = 0.05
_ADDRESS_MAX = 1 << 63
_READ_BYTES = 1 << 18
_DESCRIPTORS_MAX = 64  # of one read
_PR_SET_PDEATHSIG = 1
_BUG = 70  # an exit code for it


class Extent:
    """One extent: mapped and registered as one region, read-only unless writable."""

    def __init__(self, agent: Agent, fd: int, size: int, *, writable: bool) -> None:
        """Map the first `size` bytes of a descriptor, which is not kept. Raises MoveError."""
        self.bytes = size
        self.writable = writable
        self.flights = 0  # transfers under way that use it
        self.leaving = False
        self._agent = agent
        self._blocks: dict[int, Blocks] = {}
        _check_memfd(fd, size)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, access)
        except OSError as exc:
            raise m.MoveError(f"cannot map {size} bytes: {exc}", "failed") from exc
        touch(self._map)
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        try:
            self._region = agent.register(self.address, size)
        except m.MoveError:
            self._map.close()
            raise

    def blocks(self, block_bytes: int) -> Blocks:
        """Return it as a list of equal blocks. Raises MoveError."""
        found = self._blocks.get(block_bytes)
        if found is None:
            found = self._agent.blocks(None, self.address, block_bytes, self.bytes // block_bytes)
            self._blocks[block_bytes] = found
        return found

    def close(self) -> None:
        """Unmap it; nothing is under way."""
        for blocks in self._blocks.values():
            self._agent.drop(blocks)
        self._agent.deregister(self._region)
        self._map.close()


def _check_memfd(fd: int, size: int) -> None:
    """Refuse memory that another process could shrink: to touch the rest would end this one."""
    try:
        found = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as exc:
        raise m.MoveError(f"expected a memfd, found none: {exc}", "refused") from exc
    if not 0 < size <= found:
        raise m.MoveError(f"{size} bytes to map, expected 1 to {found}, its size", "refused")
    if not seals & fcntl.F_SEAL_SHRINK:
        raise m.MoveError(f"seals {seals:#x}, expected F_SEAL_SHRINK among them", "refused")


class _OpenTransfer(msgspec.Struct, eq=False):
    """A transfer that has not ended; start(part): of its blocks."""

    asked: m.Transfer | m.Fill
    extent: Extent
    count: int  # of blocks
    step: int  # blocks of one chunk
    start: Callable[[slice], tuple[Flight, bool]]
    at: int = 0  # blocks before it have been started
    flights: int = 0
    moved: int = 0
    error: m.ErrorClass | None = None
    text: str = ""


class _Peer(msgspec.Struct, eq=False):
    """A peer, and what is open with it."""

    name: str
    known: bool = False  # to NIXL
    fresh: bool = False  # all that NIXL knows of it is of one time
    gone: str = ""  # why nothing moves until it is added again
    changing: bool = False  # as soon as nothing is under way, to this:
    metadata: bytes | None = None
    waiting: deque[_OpenTransfer] = msgspec.field(default_factory=deque)
    flying: list[tuple[Flight, _OpenTransfer]] = msgspec.field(default_factory=list)
    blocks: dict[tuple[int, int, int], Blocks] = msgspec.field(default_factory=dict)


class TransferLoop:
    """Does transfers, a step at a time. Requests are checked; each has one result."""

    def __init__(
        self,
        agent: Agent,
        send: Callable[[m.Ended | m.Mapped | m.Meets], None],
        clock: Callable[[], float],
    ) -> None:
        """send: where results go. clock: seconds; NIXL takes time in the midst of a step."""
        self._agent = agent
        self._clock = clock
        self._send = send
        self.extents: dict[int, Extent] = {}
        self._peers: dict[str, _Peer] = {}
        self._turns: deque[_Peer] = deque()  # peers with anything open
        self._open: dict[int, _OpenTransfer] = {}
        self._moving_s = 0.0  # when a chunk was last started or over

    @property
    def nap_s(self) -> float | None:
        """How long step() has nothing to do; None: until there is a request."""
        if any(_may_start(peer) for peer in self._turns):
            return 0.0
        if not any(peer.flying for peer in self._turns):
            return None
        return NAP_S if self._clock() - self._moving_s < STILL_S else LONG_NAP_S

    def step(self) -> None:
        """Finish the chunks that are over, and start one."""
        for peer in list(self._turns):
            self._look(peer)
        for _ in range(len(self._turns)):
            peer = self._turns[0]
            self._turns.rotate(-1)
            if _may_start(peer):
                self._start(peer, peer.waiting.popleft())
                break
        self._rest()

    # Memory

    def remove_extent(self, number: int) -> None:
        """Unmap an extent as soon as nothing is under way there; it may not have been mapped."""
        extent = self.extents.get(number)
        if extent is None:
            return
        extent.leaving = True
        for found in [found for found in self._open.values() if found.extent is extent]:
            self._fail(found, "refused", f"extent {number} is being unmapped")
        self._unmap(number, extent)

    def _unmap(self, number: int, extent: Extent) -> None:
        if extent.leaving and not extent.flights:
            del self.extents[number]
            extent.close()
            self._send(m.Mapped(number))

    # Peers

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Know a peer, or how to reach it now; one that was lost is met afresh.

        NIXL adds to what it knows. To forget and connect again costs both sides a socket for as
        long as they live, so that is for where it has to be.
        """
        peer = self._peers.setdefault(name, _Peer(name))
        peer.metadata = metadata
        if peer.known and not peer.gone and not peer.changing:
            peer.fresh = False
            self._drop_blocks(peer)
            self._knows(peer)
        else:
            peer.changing = True
            self._change(peer)

    def remove_peer(self, name: str) -> None:
        """Forget a peer as soon as nothing is under way."""
        peer = self._peers[name]
        peer.changing, peer.metadata = True, None
        self._lose(peer, f"{name} was removed")
        self._change(peer)

    def _change(self, peer: _Peer) -> None:
        if peer.flying or not peer.changing:
            return
        peer.changing = False
        self._drop_blocks(peer)
        if peer.known:
            peer.known = False
            with contextlib.suppress(m.MoveError):  # NIXL may have forgotten it by itself
                self._agent.remove_peer(peer.name)
        if peer.metadata is None:
            del self._peers[peer.name]
        else:
            peer.fresh, peer.gone = True, ""
            self._knows(peer)

    def _drop_blocks(self, peer: _Peer) -> None:
        """Drop lists of addresses that may be other memory now."""
        for blocks in peer.blocks.values():
            self._agent.drop(blocks)
        peer.blocks.clear()

    def _knows(self, peer: _Peer) -> None:
        """Pass a peer's metadata to NIXL."""
        self._send(m.Meets(peer.name))
        try:
            try:
                name = self._agent.add_peer(peer.metadata or b"")
            finally:
                self._send(m.Meets())
            if name != peer.name:
                if name not in self._peers:
                    self._agent.remove_peer(name)
                raise m.MoveError(f"metadata of {name!r}, expected {peer.name!r}", "refused")
            peer.known = True
        except m.MoveError as exc:
            self._lose(peer, str(exc))

    def _lose(self, peer: _Peer, why: str) -> None:
        """Start nothing more with a peer, until it is added again."""
        peer.gone = why
        for found in [found for found in self._open.values() if found.asked.peer == peer.name]:
            self._fail(found, "gone", why)

    # Transfers

    def start(self, asked: m.Transfer | m.Fill) -> None:
        """Queue a transfer."""
        try:
            found = self._opened(asked)
        except m.MoveError as exc:
            self._send(m.Ended(asked.id, 0, exc.error, str(exc)))
            return
        peer = self._peers[asked.peer]
        self._open[asked.id] = found
        if not peer.waiting and not peer.flying:
            self._turns.append(peer)
        peer.waiting.append(found)

    def abandon(self, number: int) -> None:
        """Start nothing more of a transfer; it may have ended."""
        found = self._open.get(number)
        if found is not None:
            self._fail(found, "stopped", "abandoned")

    def _opened(self, asked: m.Transfer | m.Fill) -> _OpenTransfer:
        """Check a request. Raises MoveError."""
        peer, extent = self._peers.get(asked.peer), self.extents.get(asked.extent)
        if peer is None or (peer.changing and peer.metadata is None):
            raise _refused(f"peer {asked.peer!r}, expected one of {sorted(self._peers)}")
        if peer.gone:
            raise m.MoveError(peer.gone, "gone")
        if extent is None or extent.leaving:
            raise _refused(f"extent {asked.extent}, expected one of {sorted(self.extents)}")
        if isinstance(asked, m.Fill):
            return self._filling(asked, extent)
        return self._transfer(peer, asked, extent)

    def _transfer(self, peer: _Peer, asked: m.Transfer, extent: Extent) -> _OpenTransfer:
        if not asked.write and not extent.writable:
            raise _refused(f"a read into extent {asked.extent}, expected a writable one")
        if not 0 < asked.block_bytes <= min(asked.region_bytes, extent.bytes):
            limits = f"1 to {extent.bytes} here and {asked.region_bytes} there"
            raise _refused(f"blocks of {asked.block_bytes} bytes, expected {limits}")
        if not 0 < asked.address <= _ADDRESS_MAX - asked.region_bytes:
            raise _refused(f"{asked.region_bytes} bytes at {asked.address:#x}, expected 1 to 2^63")
        local = _positions("local", asked.local, extent.bytes // asked.block_bytes)
        remote = _positions("remote", asked.remote, asked.region_bytes // asked.block_bytes)
        if len(local) != len(remote) or not len(local):
            raise _refused(f"{len(local)} local and {len(remote)} remote blocks, expected as many")

        def start(part: slice) -> tuple[Flight, bool]:
            here, there = extent.blocks(asked.block_bytes), self._blocks(peer, asked)
            return self._agent.start(here, local[part], there, remote[part], write=asked.write)

        step = max(1, CHUNK_BYTES // asked.block_bytes)
        return _OpenTransfer(asked, extent, len(local), step, start)

    def _filling(self, asked: m.Fill, extent: Extent) -> _OpenTransfer:
        parts, blocks = check_fill(asked, extent.bytes)
        parts += np.uint64(extent.address)

        def start(part: slice) -> tuple[Flight, bool]:
            local = np.concatenate([in_slots(page, parts[part]) for page in asked.pages])
            remote = np.concatenate([in_pages(page, blocks[part]) for page in asked.pages])
            return self._agent.move(asked.peer, local, remote, write=True, peer_gpu=asked.gpu)

        size = sum(page.pieces * page.piece_bytes for page in asked.pages)
        pieces = sum(page.pieces for page in asked.pages)
        step = max(1, min(CHUNK_BYTES // size, CHUNK_PIECES // pieces))
        return _OpenTransfer(asked, extent, len(blocks), step, start)

    def _start(self, peer: _Peer, found: _OpenTransfer) -> None:
        stop = found.at + found.step
        try:
            flight, over = found.start(slice(found.at, stop))
        except m.MoveError as exc:
            if exc.error == "refused" and not peer.fresh:
                peer.changing = True  # it may be reached by what NIXL knew before
                peer.waiting.appendleft(found)
                self._change(peer)
            else:
                self._failed(peer, found, exc)
            return
        self._moving_s = self._clock()
        found.at = stop
        found.flights += 1
        found.extent.flights += 1
        if stop < found.count:
            peer.waiting.append(found)
        if over:
            self._landed(flight, found)
        else:
            peer.flying.append((flight, found))

    def _blocks(self, peer: _Peer, asked: m.Transfer) -> Blocks:
        key = (asked.address, asked.region_bytes, asked.block_bytes)
        blocks = peer.blocks.get(key)
        if blocks is None:
            count = asked.region_bytes // asked.block_bytes
            blocks = self._agent.blocks(peer.name, asked.address, asked.block_bytes, count)
            peer.blocks[key] = blocks
        return blocks

    def _look(self, peer: _Peer) -> None:
        """Finish a peer's chunks that are over."""
        for entry in list(peer.flying):
            flight, found = entry
            error = None
            try:
                if not self._agent.over(flight):
                    continue
            except m.MoveError as exc:
                error = exc
            peer.flying.remove(entry)
            self._moving_s = self._clock()
            self._landed(flight, found, error)
            if error is not None:
                self._failed(peer, found, error)
        self._change(peer)

    def _landed(
        self, flight: Flight, found: _OpenTransfer, error: m.MoveError | None = None
    ) -> None:
        if error is None:
            found.moved += self._agent.moved_bytes(flight)
        self._agent.let_go(flight)
        found.flights -= 1
        found.extent.flights -= 1
        if error is None and not found.flights and found.at >= found.count:
            self._end(found)
        self._unmap(found.asked.extent, found.extent)

    def _failed(self, peer: _Peer, found: _OpenTransfer, exc: m.MoveError) -> None:
        self._fail(found, exc.error, str(exc))
        if exc.error == "gone":
            self._lose(peer, str(exc))

    def _fail(self, found: _OpenTransfer, error: m.ErrorClass, text: str) -> None:
        """Start nothing more of a transfer; the first error is what it ends with.

        One that was stopped has none yet: what is under way of it can still fail.
        """
        if found.error in {None, "stopped"}:
            found.error, found.text = error, text
            waiting = self._peers[found.asked.peer].waiting
            if found in waiting:
                waiting.remove(found)
            found.at = found.count
        if not found.flights:
            self._end(found)

    def _end(self, found: _OpenTransfer) -> None:
        del self._open[found.asked.id]
        self._send(m.Ended(found.asked.id, found.moved, found.error, found.text))

    def _rest(self) -> None:
        """Peers with nothing open have no turn."""
        idle = [peer for peer in self._turns if not peer.waiting and not peer.flying]
        for peer in idle:
            self._turns.remove(peer)


def _may_start(peer: _Peer) -> bool:
    return bool(peer.waiting) and len(peer.flying) < FLIGHTS_MAX and not peer.changing


def check_fill(asked: m.Fill, extent_bytes: int) -> tuple[Places, Places]:
    """Return where parts begin, and engine blocks. Raises MoveError for an invalid request."""
    if len(asked.parts) % 8 or len(asked.blocks) % 4 or not asked.pages:
        raise _refused(f"{len(asked.pages)} runs of pages, {len(asked.parts)} bytes of parts")
    parts = np.frombuffer(asked.parts, np.uint64).copy()
    blocks = np.frombuffer(asked.blocks, np.uint32).astype(np.uint64)
    if len(parts) != len(blocks) or not len(parts):
        raise _refused(f"{len(parts)} parts for {len(blocks)} engine blocks, expected as many")
    last, block = int(parts.max()), int(blocks.max())
    for page in asked.pages:
        end = last + page.offset + page.pieces * page.piece_bytes
        if end > extent_bytes:
            raise _refused(f"a part that ends at {end}, expected up to {extent_bytes}")
        far = page.base + block * page.block_stride + page.pieces * page.piece_stride
        if far + page.piece_bytes > _ADDRESS_MAX:
            raise _refused(f"engine block {block} of {page}, expected addresses below 2^63")
    return parts, blocks


def _refused(text: str) -> m.MoveError:
    return m.MoveError(text, "refused")


def _positions(side: str, data: bytes, count: int) -> Indices:
    """Read positions as NIXL wants them. Raises MoveError."""
    if len(data) % 4:
        raise _refused(f"{len(data)} bytes of {side} positions, expected a multiple of 4")
    found = np.frombuffer(data, np.uint32)
    if len(found) and (highest := int(found.max())) >= min(count, 1 << 31):
        raise _refused(f"{side} position {highest}, expected 0 to {count - 1}")
    return found.view(np.int32)


class Server:
    """Acts on messages until the store closes the socket."""

    def __init__(self, store: socket.socket, agent: Agent) -> None:
        """store: the socket, blocking: waits for a store that does not read."""
        self._store = store
        self._agent = agent
        self._transfers = TransferLoop(agent, self._tell, time.monotonic)
        self._decoder = Decoder(m.ToExporter)
        self._descriptors: deque[int] = deque()  # of extents to map, in the order of their messages
        self._answers = bytearray()
        self._changed = True  # since the store was last told how to reach us

    def run(self) -> None:
        """Serve until the store closes the socket. Raises ProtocolError for what it cannot send."""
        while True:
            self._flush()
            readable, _, _ = select.select([self._store], [], [], self._transfers.nap_s)
            if readable and not self._read():
                return
            self._transfers.step()

    def _tell(self, message: Message) -> None:
        self._changed |= isinstance(message, m.Mapped)
        self._answers += encode(message)
        if isinstance(message, m.Meets):
            self._send_answers()  # later it may not be there any more

    def _flush(self) -> None:
        if self._changed:
            self._changed = False
            self._tell(m.Ready(self._agent.name, self._agent.metadata()))
        self._send_answers()

    def _send_answers(self) -> None:
        if self._answers:
            self._store.sendall(self._answers)
            self._answers.clear()

    def _read(self) -> bool:
        """Act on what the store sends; False: it has closed the socket. Raises ProtocolError."""
        data, descriptors, flags, _ = socket.recv_fds(self._store, _READ_BYTES, _DESCRIPTORS_MAX)
        self._descriptors += descriptors
        if flags & socket.MSG_CTRUNC:  # the next ones would be taken for other extents'
            raise ProtocolError("a descriptor was lost: none is left here")
        for message in self._decoder.feed(data):
            self._do(message)
        return bool(data)

    def _do(self, message: Message) -> None:
        match message:
            case m.Transfer() | m.Fill():
                self._transfers.start(message)
            case m.Abandon(number):
                self._transfers.abandon(number)
            case m.Map(extent, 0):
                self._transfers.remove_extent(extent)
            case m.Map():
                self._map(message, self._descriptors.popleft())
            case m.Peer(peer, None):
                self._transfers.remove_peer(peer)
            case m.Peer(peer, bytes(metadata)):
                self._transfers.add_peer(peer, metadata)
            case m.Ping():
                self._tell(message)

    def _map(self, message: m.Map, fd: int) -> None:
        try:
            extent = Extent(self._agent, fd, message.bytes, writable=message.writable)
        except m.MoveError as exc:
            self._tell(m.Mapped(message.extent, text=str(exc)))
            return
        finally:
            os.close(fd)
        self._transfers.extents[message.extent] = extent
        self._tell(m.Mapped(message.extent, extent.address))


def main(store: socket.socket) -> int:
    """Run as the child that a store starts. Argument: what its name begins with."""
    # First of all: it must not outlive the store, and signals from a terminal mean the store.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _end_of_a_bug
    try:
        agent = Agent(f"{sys.argv[1]}-{secrets.token_hex(8)}")
        Server(store, agent).run()
    except (m.MoveError, ProtocolError) as exc:
        with contextlib.suppress(OSError):
            store.sendall(encode(m.Fatal(str(exc))))
        return 1
    except (BrokenPipeError, ConnectionResetError):  # the store is ending
        return 0
    return 0


def _end_of_a_bug(
    kind: type[BaseException], exc: BaseException, trace: TracebackType | None
) -> None:
    """Say what it was, and leave the rest to the kernel, as below."""
    sys.__excepthook__(kind, exc, trace)
    os._exit(_BUG)


if __name__ == "__main__":
    standard_input = socket.socket(fileno=0)
    code = main(standard_input)
    sys.stderr.flush()
    # UCX's threads, transfers under way and their memory are the kernel's to end; the socket too,
    # so that it is closed when the exit code is known.
    os._exit(code)
