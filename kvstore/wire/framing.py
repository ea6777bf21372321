"""How messages become bytes and bytes become messages: length, then msgpack; and u32 arrays.

All protocols use it: engines and their store, stores among each other, a store and its exporter.
"""

from __future__ import annotations

import re
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from kvstore.core.errors import ProtocolError

FRAME_BYTES_MAX = 256 << 20  # from a store; what it is told has less: see limits

U32 = "I"
WORD = 4  # bytes of one


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


def u32(values: Sequence[int]) -> bytes:
    """Pack numbers for the wire."""
    return array(U32, values).tobytes()


def from_u32(data: bytes) -> list[int]:
    """Unpack numbers from the wire. Raises ProtocolError for a broken length."""
    if len(data) % 4:
        raise ProtocolError(f"u32 array of {len(data)} bytes, expected a multiple of 4")
    return array(U32, data).tolist()


_HEADER = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return the frame of one message."""
    return framed(_encoder.encode(message))


def framed(body: bytes) -> bytes:
    """Return the frame of an encoded message."""
    return _HEADER.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into the bodies of its frames; h11-like, does no I/O."""

    def __init__(self, bytes_max: int) -> None:
        """bytes_max: of one body; may change at any time."""
        self.bytes_max = bytes_max
        self._buffer = bytearray()

    @property
    def unfinished_bytes(self) -> int:
        """Count the bytes of a frame that has not ended."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Yield the bodies that are complete now. Raises ProtocolError for too long a one."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                (size,) = _HEADER.unpack_from(self._buffer, start)
                if size > self.bytes_max:
                    raise ProtocolError(f"frame of {size} bytes, at most {self.bytes_max}")
                end = start + _HEADER.size + size
                if len(self._buffer) < end:
                    break
                body = bytes(memoryview(self._buffer)[start + _HEADER.size : end])
                start = end
                yield body
        finally:
            del self._buffer[:start]


class Decoder:
    """Turns a byte stream into messages of one direction."""

    def __init__(self, kinds: object, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        """kinds: ToStore or ToEngine. frame_bytes_max: of one message."""
        self.frames = Frames(frame_bytes_max)
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kinds)

    def feed(self, data: bytes | memoryview) -> Iterator[Message]:
        """Yield the messages that are complete now. Raises ProtocolError for anything else."""
        for body in self.frames.feed(data):
            yield decoded(self._decoder, body, "this protocol")


class Outbox:
    """Frames that a socket has not taken yet, some with a descriptor."""

    def __init__(self) -> None:
        self._frames: deque[tuple[memoryview, int | None]] = deque()
        self.bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def put(self, frame: bytes, fd: int | None = None) -> None:
        """Queue a frame; fd: sent along, and has to stay open until then."""
        self._frames.append((memoryview(frame), fd))
        self.bytes += len(frame)

    def flush(self, sock: socket.socket) -> None:
        """Write what a socket takes now. Raises OSError when its other end is gone."""
        while self._frames:
            data, fd = self._frames[0]
            try:
                sent = sock.send(data) if fd is None else socket.send_fds(sock, [data], [fd])
            except BlockingIOError:
                return
            self.bytes -= sent
            if sent < len(data):
                self._frames[0] = (data[sent:], None)
            else:
                self._frames.popleft()


_LIMIT = re.compile(r"Expected `\w+` (?:of length )?[<>]=? \S+ - at `\$((?:\[\d+\])+)`")
_items = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], msgspec.Meta(max_length=1 << 16)])
# How many bytes hold the length of bytes, an array or an object in msgpack, by its first byte.
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def decoded(decoder: msgspec.msgpack.Decoder[Message], body: bytes, protocol: str) -> Message:
    """Return a message. Raises ProtocolError for what is none; it names what is beyond a limit."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        text, found = str(exc), None
        limit = _LIMIT.fullmatch(text)
        if limit is not None:
            found = _found(body, [int(index) for index in re.findall(r"\d+", limit[1])])
        named = text if found is None else f"found {found}, expected{text.removeprefix('Expected')}"
        raise ProtocolError(f"not a message of {protocol}: {named}") from exc


def _found(body: bytes, path: Sequence[int]) -> float | None:
    """Return the number at a place of a message, or the length of the value there.

    None: the place is not found, or only by decoding a large part of the message.
    """
    raw: bytes | msgspec.Raw = body
    try:
        for index in path:
            raw = _items.decode(raw)[index]
        head = bytes(memoryview(raw)[:5])
        if head[0] in _LENGTH_BYTES:
            return int.from_bytes(head[1 : 1 + _LENGTH_BYTES[head[0]]], "big")
        value = msgspec.msgpack.decode(raw, type=str | int | float)
    except (msgspec.DecodeError, ValueError, IndexError, RecursionError):
        return None
    return len(value) if isinstance(value, str) else value


def is_sendable(text: str, length_max: int) -> bool:
    """Return True if a message can hold a text: short enough, and Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, from JSON say
        return False
    return len(text) <= length_max
