"""Reads the index at start, in a process of its own: a damaged LMDB file can end whoever maps it.

The child walks the index once and writes its records to a pipe, in frames; an empty frame says
that it has seen all of them. The parent takes them in slices, so that it serves meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import msgspec

from kvstore.errors import TierIOError
from tiers.nvme.journal import NUMBER, refuse_truncated

Row = tuple[bytes, bytes]
_FRAME_ROWS = 2048
_READ_BYTES = 1 << 20
_decoder = msgspec.msgpack.Decoder(list[Row])


class Loader:
    """The child and its pipe."""

    def __init__(self, path: Path) -> None:
        """Start reading the index at a path. Raises TierIOError when no process can be started."""
        command = [sys.executable, "-m", "tiers.nvme.loader", str(path)]
        try:
            self._child = subprocess.Popen(  # noqa: S603 - our own module
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except OSError as exc:
            raise TierIOError(f"cannot start a process to read {path}: {exc}") from exc
        self._path = path
        self._buffer = bytearray()
        self.done = False
        self.killed = False  # by somebody else, such as a system without memory: no damage then
        if self._child.stdout is not None:
            os.set_blocking(self._child.stdout.fileno(), False)

    def take(self) -> list[Row]:
        """Return records that have arrived. Raises TierIOError when the index cannot be read."""
        rows = self._frame()
        if rows is None and self._child.stdout is not None:
            data = self._child.stdout.read(_READ_BYTES)
            if data == b"":
                raise TierIOError(f"{self._path} cannot be read: {self._why()}")
            self._buffer += data or b""
            rows = self._frame()
        if rows == []:
            self.done = True
            self.close()
        return rows or []

    def _frame(self) -> list[Row] | None:
        if len(self._buffer) < NUMBER.size:
            return None
        end = NUMBER.size + NUMBER.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        rows = _decoder.decode(memoryview(self._buffer)[NUMBER.size : end])
        del self._buffer[:end]
        return rows

    def _why(self) -> str:
        _, said = self._child.communicate()
        self.killed = self._child.returncode == -signal.SIGKILL
        lines = said.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its reader ended with {self._child.returncode}"

    def close(self) -> None:
        """End the child; safe to call twice."""
        self._child.kill()
        self._child.communicate()


def frames(path: Path) -> Iterator[bytes]:
    """Walk the index; the last frame is empty. Raises lmdb.Error."""
    env = lmdb.open(str(path), readonly=True, max_dbs=4, lock=False, create=False)
    refuse_truncated(env, path)
    blocks = env.open_db(b"blocks", create=False)
    rows: list[Row] = []
    with env.begin() as txn:
        for key, value in txn.cursor(blocks):
            rows.append((bytes(key), bytes(value)))
            if len(rows) == _FRAME_ROWS:
                yield msgspec.msgpack.encode(rows)
                rows.clear()
    if rows:
        yield msgspec.msgpack.encode(rows)
    env.close()
    yield msgspec.msgpack.encode([])


def main() -> int:
    """Run as the child that Loader starts."""
    try:
        for body in frames(Path(sys.argv[1])):
            sys.stdout.buffer.write(NUMBER.pack(len(body)) + body)
        sys.stdout.buffer.flush()
    except lmdb.Error as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    except BrokenPipeError:  # the parent has had enough
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
