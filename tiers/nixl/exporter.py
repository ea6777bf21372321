"""The exporter's process: one thread, which has the agent, and the socket of the store.

It ends when the store does, and at once. An invalid message is answered, not fatal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections import deque
from types import TracebackType

from kvstore.core.errors import ProtocolError
from kvstore.wire.framing import Decoder, Message, NotFramed, encode
from tiers.nixl import messages as m
from tiers.nixl.agent import Agent
from tiers.nixl.transfers import Extent, TransferLoop

_READ_BYTES = 1 << 18
_DESCRIPTORS_MAX = 64  # of one read
_PR_SET_PDEATHSIG = 1
_BUG = 70  # an exit code for it


class Server:
    """Acts on messages until the store closes the socket."""

    def __init__(self, store: socket.socket, agent: Agent) -> None:
        """store: the socket, blocking: waits for a store that does not read."""
        self._store = store
        self._agent = agent
        self._transfers = TransferLoop(agent, self._tell, time.monotonic)
        self._decoder = Decoder(m.ToExporter)
        self._descriptors: deque[int] = deque()
        self._passed = 0  # number of the first of them
        self._answers = bytearray()
        self._changed = False  # since the store was last told how to reach us

    def run(self) -> None:
        """Serve until the store closes the socket. Raises ProtocolError if it sends no frames."""
        self._tell(m.Ready(self._agent.name, self._agent.metadata()))
        while True:
            self._flush()
            readable, _, _ = select.select([self._store], [], [], self._transfers.nap_s)
            if readable and not self._read():
                return
            self._transfers.step()

    def _tell(self, message: Message) -> None:
        self._changed |= isinstance(message, m.Mapped | m.Unmapped)
        self._answers += encode(message)

    def _flush(self) -> None:
        if self._changed:
            self._changed = False
            self._tell(m.Metadata(self._agent.metadata()))
        if self._answers:
            self._store.sendall(self._answers)
            self._answers.clear()

    def _read(self) -> bool:
        """Act on what the store sends; False: it has closed the socket."""
        data, descriptors, _, _ = socket.recv_fds(self._store, _READ_BYTES, _DESCRIPTORS_MAX)
        self._descriptors += descriptors
        if not data:
            return False
        while True:
            try:
                for message in self._decoder.feed(data):
                    self._do(message)
            except NotFramed:
                raise
            except ProtocolError as exc:
                self._tell(m.Wrong(str(exc)))
                data = b""  # what follows it
            else:
                return True

    def _do(self, message: Message) -> None:
        wrong = None
        match message:
            case m.Transfer() | m.Fill():
                wrong = self._transfers.start(message)
            case m.Abandon(number):
                self._transfers.abandon(number)
            case m.Map():
                self._map(message)
            case m.Unmap(number):
                wrong = self._transfers.remove_extent(number)
            case m.AddPeer(peer, metadata):
                self._transfers.add_peer(peer, metadata)
            case m.RemovePeer(peer):
                wrong = self._transfers.remove_peer(peer)
            case m.Ping():
                self._tell(m.Pong())
        if wrong is not None:
            self._tell(m.Wrong(wrong))

    def _map(self, message: m.Map) -> None:
        try:
            fd = self._descriptor(message.descriptor)
            try:
                if self._transfers.has_extent(message.extent):
                    raise m.MoveError(f"extent {message.extent} is mapped already", "refused")
                extent = Extent(self._agent, fd, message.bytes, writable=message.writable)
            finally:
                os.close(fd)
        except m.MoveError as exc:
            self._tell(m.NotMapped(message.extent, str(exc)))
            return
        self._transfers.add_extent(message.extent, extent)
        self._tell(m.Mapped(message.extent, extent.address))

    def _descriptor(self, number: int) -> int:
        """Take a descriptor that was passed; close those before it, which no message names."""
        while self._descriptors and self._passed < number:
            os.close(self._descriptors.popleft())
            self._passed += 1
        if not self._descriptors or self._passed != number:
            text = f"descriptor {number}, expected {self._passed} or a later one that was passed"
            raise m.MoveError(text, "refused")
        self._passed += 1
        return self._descriptors.popleft()


def main(store: socket.socket) -> int:
    """Run as the child that exporter_child starts. Argument: what its name begins with."""
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
            store.sendall(encode(m.Failed(str(exc))))
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
