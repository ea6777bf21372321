"""The process that owns the index of a store: a page that cannot be read kills this one only.

One thread does what the store asks for, in its order. It ends when the store does, and at once:
the lock on the directory, which it has inherited, is then free for the next.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import msgspec

from tiers.nvme.index_file import IndexFile, OtherFormatError, is_damage, verify
from tiers.nvme.messages import (
    NUMBER,
    Answer,
    Apply,
    Done,
    Failed,
    Load,
    Loaded,
    Mark,
    Open,
    Opened,
    Purge,
    Request,
    Stream,
    Tables,
    TablesFound,
    Unreadable,
)

_decoder = msgspec.msgpack.Decoder(Request)
_encoder = msgspec.msgpack.Encoder()
_ERRORS = (lmdb.Error, OSError, MemoryError, ValueError, SystemError, OtherFormatError)


class Indexer:
    """Does what requests say, on one file."""

    def __init__(self) -> None:
        """Without a file: Open comes first."""
        self._file: IndexFile | None = None
        self._lock_fd = -1
        self.broken = False  # LMDB takes no more writes after one that failed

    def answer(self, request: Request) -> Answer:
        """Do a request. What goes wrong is in the answer."""
        try:
            return self._do(request)
        except _ERRORS as exc:
            self.broken = True
            return failed(exc)

    def _do(self, request: Request) -> Answer:
        if isinstance(request, Open):
            return self._open(request)
        file = self._file
        if file is None:
            return Failed("the index is not open")
        left = False
        match request:
            case Tables():
                return TablesFound(*file.tables())
            case Mark(clean):
                file.mark(clean=clean)
            case Apply(changes):
                file.commit(changes)
            case Purge(number, rows_max):
                left = file.purge(number, rows_max)
            case Load():
                pass  # stream() follows
        return Done(left=left)

    def _open(self, request: Open) -> Answer:
        path = Path(request.path)
        self._lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one before may hang in a write
        if request.verify:
            verify(path)
        self._file = IndexFile(path, request.map_bytes)
        namespaces, _ = self._file.tables()
        strays = self._file.strays({number for number, _ in namespaces.values()})
        numbers = [number for number, _ in namespaces.values()]
        following = max([*numbers, self._file.last_number], default=0) + 1
        new, clean = self._file.new, self._file.clean
        return Opened(new=new, clean=clean, next_number=following, strays=strays)

    def stream(self, request: Load) -> Iterator[Stream]:
        """Yield the records of a namespace."""
        # It takes as long as all else here, and a store that starts empty needs none of it.
        from tiers.nvme.index_load import Rows, Sorted  # noqa: PLC0415

        try:
            rows = Rows()
            for chunk in self._file.rows(request.number) if self._file is not None else ():
                rows.add(chunk)
            found = Sorted(request.number, request.slot_bytes, request.counts, rows)
        except _ERRORS as exc:
            self.broken = True
            yield Unreadable(failed(exc))
            return
        yield from found.batches(request.skip)
        yield Loaded(request.number, found.refused)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def failed(exc: Exception) -> Failed:
    """Put an error into words, and say whose fault it is."""
    return Failed(
        str(exc.__cause__ or exc) or type(exc).__name__,
        damaged=is_damage(exc),
        format=isinstance(exc, OtherFormatError),
    )


def framed(message: Answer | Stream | Request) -> bytes:
    """Encode a message, with its length before it."""
    body = _encoder.encode(message)
    return NUMBER.pack(len(body)) + body


def receive(read: Callable[[int], bytes]) -> bytes | None:
    """Read one message's body; None at the end. read(size) gives up to as many bytes."""
    head = _exactly(read, NUMBER.size)
    return None if head is None else _exactly(read, NUMBER.unpack(head)[0])


def _exactly(read: Callable[[int], bytes], size: int) -> bytes | None:
    parts = []
    while size:
        part = read(size)
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def serve(control: socket.socket, pipe: int) -> None:
    """Answer requests until there are no more, or one has failed."""
    indexer = Indexer()
    with open(pipe, "wb", buffering=0) as stream:
        while not indexer.broken and (body := receive(control.recv)) is not None:
            request = _decoder.decode(body)
            control.sendall(framed(indexer.answer(request)))
            if isinstance(request, Load):
                for message in indexer.stream(request):
                    _write_all(stream.fileno(), framed(message))
    indexer.close()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def end_with(lifeline: int) -> None:
    """Wait for the store's end of a pipe to close, which it does however the store ends."""
    os.read(lifeline, 1)
    os._exit(0)


def main() -> int:
    """Run as the child that tiers.nvme.index_client starts. Arguments: descriptors."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they mean the store, which still commits
        signal.signal(number, signal.SIG_IGN)
    control, pipe, lifeline = (int(argument) for argument in sys.argv[1:4])
    threading.Thread(target=end_with, args=(lifeline,), daemon=True).start()
    try:
        serve(socket.socket(fileno=control), pipe)
    except (BrokenPipeError, ConnectionResetError):  # the store is ending
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
