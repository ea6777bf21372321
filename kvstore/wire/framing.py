"""How messages become bytes and bytes become messages: length, then msgpack; and u32 arrays.

All protocols use it: engines and their store, stores among each other, a store and its exporter.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence

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
    body = _encoder.encode(message)
    return _HEADER.pack(len(body)) + body


class NotFramed(ProtocolError):
    """Where the next message begins is not known: nothing can be read any more."""


class Decoder:
    """Turns a byte stream into messages of one direction; h11-like, does no I/O."""

    def __init__(self, kinds: object, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        """kinds: ToStore or ToEngine. frame_bytes_max: of one message; may change at any time."""
        self.frame_bytes_max = frame_bytes_max
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    @property
    def unfinished_bytes(self) -> int:
        """Count the bytes of a message that has not ended."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> Iterator[Message]:
        """Yield the messages that are complete now. Raises ProtocolError for anything else.

        What follows a message that is none can still be read, unless it is NotFramed.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _HEADER.size:
                (size,) = _HEADER.unpack_from(self._buffer, start)
                if size > self.frame_bytes_max:
                    raise NotFramed(f"frame of {size} bytes, at most {self.frame_bytes_max}")
                end = start + _HEADER.size + size
                if len(self._buffer) < end:
                    break
                body = bytes(memoryview(self._buffer)[start + _HEADER.size : end])
                start = end
                yield self._decode(body)
        finally:
            del self._buffer[:start]

    def _decode(self, body: bytes) -> Message:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as exc:
            raise ProtocolError(f"not a message of this protocol: {exc}") from exc


def is_sendable(text: str, length_max: int) -> bool:
    """Return True if a message can hold a text: short enough, and Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, from JSON say
        return False
    return len(text) <= length_max
