"""What a store says to the process that owns its index, and what that answers.

The index, an LMDB file, never holds payload:

kvstore.meta            "format", "clean"
kvstore.extents         number (NUMBER) -> slot bytes (NUMBER), digest of its namespace
kvstore.blocks DIGEST   block key -> VALUE, one table for each namespace
kvstore.tokens DIGEST   generation (GENERATION) -> length of a key (NUMBER), key, token ids; only
                        with `[engine] event_tokens`

A namespace is one that has an extent: a record without an extent stands for nothing.

Each request has one answer; that of a commit which is done is None.
"""

from __future__ import annotations

import socket
import struct
from typing import Generic, TypeVar

import msgspec

FORMAT = b"kvstore-nvme-2"
META, EXTENTS, BLOCKS = b"kvstore.meta", b"kvstore.extents", b"kvstore.blocks "
TOKENS = b"kvstore.tokens "
NUMBER = struct.Struct(">I")
GENERATION = struct.Struct(">Q")
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
    records of which go. tokens: rows of token ids by generation, by digest; those of a record that
    is deleted go with it.
    """

    cleared: list[str] = []
    deletes: dict[str, list[bytes]] = {}  # by digest
    puts: dict[str, list[tuple[bytes, bytes]]] = {}
    extents: list[tuple[int, int, str]] = []  # number, slot bytes, digest
    extents_gone: list[int] = []
    clean: bool = False
    tokens: dict[str, list[tuple[int, bytes]]] = {}


class Open(msgspec.Struct, tag=True):
    """The first request: open or make the index. path: of its folder; map_bytes: it can grow to.

    verify: read all of the file first; the process before this one has died of it. read_only:
    change nothing. tokens: token ids are kept; else those that are there are removed.
    """

    path: str
    map_bytes: int
    verify: bool = False
    read_only: bool = False
    tokens: bool = True


class Opened(msgspec.Struct, tag=True):
    """The index is open.

    new: there was none. strays: records of what is no namespace, which are gone unless the index
    is only to be read.
    """

    new: bool
    clean: bool
    strays: int
    extents: dict[int, tuple[int, str]]  # number -> slot bytes, digest
    tokens_removed: int = 0  # blocks whose token ids were removed


class Load(msgspec.Struct, tag=True):
    """Send some records of a namespace, from the first on. counts: slots of its extents."""

    digest: str
    slot_bytes: int
    counts: dict[int, int]
    first: int
    most: int


class Page(msgspec.Struct, tag=True):
    """Records of a namespace, parents first, the oldest first; none while they are being read.

    rows: of row_format(width). refused: with the last records, those that cannot stand for a
    block: key, place, cause. place: the slot that the record's deletion makes free, one beyond the
    end, or NOWHERE.
    """

    width: int = 0
    rows: bytes = b""
    count: int = 0
    refused: list[tuple[bytes, int, str]] | None = None


class Tokens(msgspec.Struct, tag=True):
    """Send rows of a namespace's token ids, the first of a higher generation than `after` first."""

    digest: str
    after: int
    most: int


class TokenPage(msgspec.Struct, tag=True):
    """Rows: generation, key, token ids. last: there are no more."""

    rows: list[tuple[int, bytes, bytes]]
    last: bool


class Failed(msgspec.Struct, tag=True):
    """It is not done. damaged: the file is, beyond doubt; format: it is of another kind."""

    text: str
    damaged: bool = False
    format: bool = False


def row_format(width: int) -> str:
    """Return a record's struct: key (padded), its length, place, parent, generation, sum, leaf.

    The parent is a position in the namespace's records, NO_PARENT for a root; below a leaf hangs
    nothing.
    """
    return f"<{width}sHQIQQ?"


def token_row(key: bytes, tokens: bytes) -> bytes:
    """Return what the table of token ids has of a block."""
    return NUMBER.pack(len(key)) + key + tokens


def of_token_row(row: bytes) -> tuple[bytes, bytes]:
    """Return the key and token ids of such a row. Raises ValueError for what is none."""
    if len(row) < NUMBER.size:
        raise ValueError("a row of token ids has a wrong size")
    end = NUMBER.size + NUMBER.unpack_from(row)[0]
    return row[NUMBER.size : end], row[end:]


Request = Open | Commit | Load | Tokens
Answer = Opened | Page | TokenPage | Failed | None
M = TypeVar("M")

requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_encoder = msgspec.msgpack.Encoder()


class Connection(Generic[M]):
    """One end of the socket between a store and the process of its index."""

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[M]) -> None:
        """decoder: of what comes in, requests or answers."""
        self._end = end
        self._incoming = end.makefile("rb")
        self._decoder = decoder

    def send(self, message: Request | Answer) -> None:
        """Send a message, with its length before it. Raises OSError."""
        body = _encoder.encode(message)
        self._end.sendall(NUMBER.pack(len(body)) + body)

    def receive(self) -> M:
        """Wait for the next message. Raises OSError, and EOFError when the other end is closed."""
        (size,) = NUMBER.unpack(self._read(NUMBER.size))
        return self._decoder.decode(self._read(size))

    def _read(self, count: int) -> bytes:
        data = self._incoming.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def close(self) -> None:
        """Close this end; safe to call twice."""
        self._incoming.close()
        self._end.close()
