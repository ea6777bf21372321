"""Starts the process that owns an index (see indexer.py), and talks to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import msgspec

from kvstore.core.errors import TierIOError
from tiers.nvme.index_server import framed, receive
from tiers.nvme.messages import NUMBER, Answer, Request, Stream

_END_S = 5.0
_READ_BYTES = 1 << 20
_PIPE_BYTES = 1 << 20
_OF_THE_FILE = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
_answers = msgspec.msgpack.Decoder(Answer)
_stream = msgspec.msgpack.Decoder(Stream)


class IndexProcessDiedError(TierIOError):
    """The process has ended. of_the_file: of what it read, as far as one can tell."""

    def __init__(self, text: str, *, of_the_file: bool) -> None:
        """text: in words."""
        super().__init__(text)
        self.of_the_file = of_the_file


class Process(Protocol):
    """What is needed of it; subprocess.Popen is one."""

    @property
    def pid(self) -> int:
        """Its id."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit status, minus the signal's number if one has ended it; None before."""
        ...

    def poll(self) -> int | None:
        """Look whether it has ended; its exit status."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; its exit status. Raises subprocess.TimeoutExpired after seconds."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...


def start(passed: Sequence[int], lock_fd: int) -> Process:
    """Start indexer.py with these descriptors. Raises OSError."""
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-P", "-m", "tiers.nvme.index_server", *map(str, passed)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # whoever reads the store's would wait for this one
        pass_fds=(*passed, lock_fd),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C is for the store, which still commits
    )


class Child:
    """The process, and the ways to it. ask() and close() are one thread's, take() another's."""

    start: ClassVar[Callable[[Sequence[int], int], Process]] = staticmethod(start)

    def __init__(self, lock_fd: int) -> None:
        """Start it. It inherits the directory's lock. Raises TierIOError when it does not start."""
        ours, its = socket.socketpair()
        pipe, pipe_in = os.pipe()
        life_out, life = os.pipe()
        passed = (its.fileno(), pipe_in, life_out)
        try:
            self._process = type(self).start(passed, lock_fd)
        except OSError as exc:
            ours.close()
            for fd in (pipe, life):
                os.close(fd)
            raise TierIOError(f"cannot start the index's process: {exc}") from exc
        finally:
            its.close()
            os.close(pipe_in)
            os.close(life_out)
        self._control, self._pipe, self._life = ours, pipe, life
        self._buffer = bytearray()
        os.set_blocking(pipe, False)
        with contextlib.suppress(OSError):  # a user may have no more pages for pipes
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Tell whether it has ended."""
        return self._process.poll() is not None

    def ask(self, request: Request) -> Answer:
        """Have a request done. Raises IndexProcessDiedError when nobody can say whether it is."""
        try:
            self._control.sendall(framed(request))
            body = receive(self._control.recv)
        except OSError:
            body = None
        if body is None:
            raise self.why()
        answer: Answer = _answers.decode(body)
        return answer

    def take(self) -> Stream | None:
        """Return the next part of what was loaded; None: not there yet.

        Raises IndexProcessDiedError.
        """
        message = self._next()
        if message is None:
            try:
                data = os.read(self._pipe, _READ_BYTES)
            except BlockingIOError:
                return None
            if not data:
                raise self.why()
            self._buffer += data
            message = self._next()
        return message

    def _next(self) -> Stream | None:
        if len(self._buffer) < NUMBER.size:
            return None
        end = NUMBER.size + NUMBER.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[NUMBER.size : end])
        del self._buffer[:end]
        message: Stream = _stream.decode(body)
        return message

    def why(self) -> IndexProcessDiedError:
        """Wait for its end, and say what it died of."""
        self.close()
        code = self._process.returncode
        if code is None:
            return IndexProcessDiedError("the index's process hangs", of_the_file=False)
        if code >= 0:
            return IndexProcessDiedError(
                f"the index's process ended with {code}", of_the_file=False
            )
        number = signal.Signals(-code)
        text = f"the index's process was ended by {number.name}"
        return IndexProcessDiedError(text, of_the_file=number in _OF_THE_FILE)

    def close(self) -> None:
        """Have it end in order, for a moment at least; safe to call twice."""
        if self._life < 0:
            return
        self._control.close()
        os.close(self._pipe)  # it may be about to write there
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        os.close(self._life)
        self._life = -1
        if self._process.returncode is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
