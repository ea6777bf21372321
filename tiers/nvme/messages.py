"""What a store says to the process that owns its index, and what that answers.

The index, an LMDB file, never holds payload:

kvstore.meta            "format", "clean"
kvstore.extents         number (NUMBER) -> slot bytes (NUMBER), digest of its namespace
kvstore.blocks DIGEST   block key -> VALUE, one table for each namespace

A namespace is one that has an extent: a record without an extent stands for nothing.

Each request has one answer. What Load asks for comes after that, as batches up to a Loaded, or a
Failed; no other request is sent meanwhile.
"""

from __future__ import annotations

import socket
import struct
from typing import Generic, TypeVar

import msgspec

FORMAT = b"kvstore-nvme-2"
META, EXTENTS, BLOCKS = b"kvstore.meta", b"kvstore.extents", b"kvstore.blocks "
NUMBER = struct.Struct(">I")
VALUE = struct.Struct("<QQQQI")
"""Place (extent << 32 | position), parent's place, generation, checksum, payload bytes."""
NOWHERE = (1 << 64) - 1
"""The place of a root's parent, and of a record that has none."""
NO_PARENT = (1 << 32) - 1
RECORD_BYTES = 512  # of the index file for each block, with room for half-full pages
FOLDER = "index"


class Commit(msgspec.Struct, tag=True):
    """Make changes durable, all or none, in this order.

    The index is in order only after a commit that is clean. cleared: digests of namespaces, all
    records of which go.
    """

    cleared: list[str] = []
    deletes: dict[str, list[bytes]] = {}  # by digest
    puts: dict[str, list[tuple[bytes, bytes]]] = {}
    extents: list[tuple[int, int, str]] = []  # number, slot bytes, digest
    extents_gone: list[int] = []
    clean: bool = False


class Open(msgspec.Struct, tag=True):
    """The first request: open or make the index. path: of its folder; map_bytes: it can grow to.

    verify: read all of the file first; the process before this one has died of it. read_only:
    change nothing.
    """

    path: str
    map_bytes: int
    verify: bool = False
    read_only: bool = False


class Opened(msgspec.Struct, tag=True):
    """The index is open.

    new: there was none. strays: records of what is no namespace, which are gone unless the index
    is only to be read.
    """

    new: bool
    clean: bool
    strays: int
    extents: dict[int, tuple[int, str]]  # number -> slot bytes, digest


class Load(msgspec.Struct, tag=True):
    """Send the records of a namespace, without the first `skip`. counts: slots of its extents."""

    digest: str
    slot_bytes: int
    counts: dict[int, int]
    skip: int = 0


class Done(msgspec.Struct, tag=True):
    """It is done, or begun."""


class Failed(msgspec.Struct, tag=True):
    """It is not done. damaged: the file is, beyond doubt; format: it is of another kind."""

    text: str
    damaged: bool = False
    format: bool = False


class Batch(msgspec.Struct, tag=True):
    """Records of one namespace, parents first, the oldest first: rows of row_format(width)."""

    width: int
    rows: bytes


class Loaded(msgspec.Struct, tag=True):
    """A namespace's records have all been sent, but those that cannot be: key, place, cause.

    place: the slot that the record's deletion makes free, one beyond the end, or NOWHERE.
    """

    refused: list[tuple[bytes, int, str]]


def row_format(width: int) -> str:
    """Return a record's struct: key (padded), its length, place, parent, generation, sum, leaf.

    The parent is a position in the namespace's records, NO_PARENT for a root; below a leaf hangs
    nothing.
    """
    return f"<{width}sHQIQQ?"


Request = Open | Commit | Load
Answer = Opened | Done | Failed | Batch | Loaded
M = TypeVar("M")

requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_encoder = msgspec.msgpack.Encoder()
_READ_BYTES = 1 << 20


class Connection(Generic[M]):
    """One end of the socket between a store and the process of its index."""

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[M]) -> None:
        """decoder: of what comes in, requests or answers."""
        self._end = end
        self._decoder = decoder
        self._buffer = bytearray()

    def send(self, message: Request | Answer) -> None:
        """Send a message, with its length before it. Raises OSError."""
        body = _encoder.encode(message)
        self._end.sendall(NUMBER.pack(len(body)) + body)

    def receive(self, flags: int = 0) -> M:
        """Return the next message. flags: of recv.

        Raises EOFError when the other end is closed, OSError, and BlockingIOError with
        MSG_DONTWAIT when it is not there yet.
        """
        buffer = self._buffer
        self._fill(NUMBER.size, flags)
        end = NUMBER.size + NUMBER.unpack_from(buffer)[0]
        self._fill(end, flags)
        body = bytes(memoryview(buffer)[NUMBER.size : end])
        del buffer[:end]
        return self._decoder.decode(body)

    def _fill(self, count: int, flags: int) -> None:
        """Have so many bytes in the buffer; what has come stays there if not all is there yet."""
        while len(self._buffer) < count:
            data = self._end.recv(_READ_BYTES, flags)
            if not data:
                raise EOFError
            self._buffer += data

    def close(self) -> None:
        """Close this end; safe to call twice."""
        self._end.close()
