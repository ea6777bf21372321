"""Ranks as processes: what the engine has of them, and what it says when one is gone or silent.

    engine                     starter                   rank 0 .. n-1, forked off the starter
      Start(spec) + socket ------> fork ----------------------> its own worker half, own store link
      <------------------------------------------------------- Started(pid)
      RankStep ------------------------------------------------> runs the step
      <-------------------------------------------------- Answer(report)
      <--------- Ended(pid) -------+<------------------------- gone, and how

The starter has imported what a rank needs, which takes seconds; a fork of it takes milliseconds.
A rank ends when the engine closes its socket. Whatever becomes of the engine, the starter ends
with it, and every rank, a stopped one too, ends with the starter.

An engine that has lost a rank is over, as with vLLM: every later step fails, too. Whoever runs it
closes it and may start it again under the same id.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import TracebackType
from typing import NoReturn, Self

import msgspec

from kvstore.core.errors import InvariantBroken, KVStoreError
from tests.reference.ranks import RankReport, RankStep
from tests.reference.shape import Shape

ATTACHED = "tests.reference.rank_process:AttachedSide"
START_S = 300.0  # it imports torch, perhaps on a machine that does other things
REPORT_S = 300.0  # what vLLM allows for a step
CLOSE_S = 10.0  # of which a copy that is under way takes milliseconds
_SAID_S = 60.0
_GONE = "the process that starts ranks is gone"


class RankLost(KVStoreError):
    """A rank process ended, or did not report in time; its engine cannot go on."""


class RankSpec(msgspec.Struct, frozen=True):
    """What a rank is made from.

    engine: its id in the store. identity: what else decides the bytes, see RankGeometry. store:
    path of the store's socket. options: for the side's class.
    """

    engine: str
    identity: str
    shape: Shape
    rank: int
    store: str
    options: Mapping[str, str] = {}


class Started(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to the spec it was started with."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A rank is gone. code: its exit status; of one killed by a signal, minus that."""

    pid: int
    code: int


class Answer(msgspec.Struct, frozen=True):
    """What a rank says after a step: its report, or what was broken."""

    report: RankReport | None
    broken: str = ""


_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)
_news: msgspec.msgpack.Decoder[Started | Ended] = msgspec.msgpack.Decoder(Started | Ended)
_NEWS_BYTES = 1 << 10


class RankStarter:
    """Starts ranks, and tells how they ended; its ranks end with it."""

    def __init__(self, side: str = ATTACHED) -> None:
        """side: "package.module:Class" of every rank's side; see rank_process.MakeSide."""
        self._ranks: list[ProcessRank] = []
        self._ended: dict[int, int] = {}
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "tests.reference.rank_process"]
        path = os.pathsep.join(filter(None, sys.path))
        with theirs:
            # A session of its own: Ctrl-C reaches our process, which then ends them in order.
            self._child = subprocess.Popen(
                [*command, str(theirs.fileno()), side],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The starter's process id."""
        return self._child.pid

    def start(self, spec: RankSpec) -> ProcessRank:
        """Start a rank; it attaches to its store by itself. Raises RankLost if none starts."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                socket.send_fds(self._sock, [_encoder.encode(spec)], [theirs.fileno()])
            end_s = time.monotonic() + START_S
            while not isinstance(news := self._hear(end_s), Started):
                if news is None:
                    raise RankLost(f"no answer within {START_S:.0f} s")
            rank = ProcessRank(self, spec, news.pid, ours)
        except (OSError, RankLost) as exc:
            ours.close()
            why = _GONE if isinstance(exc, BrokenPipeError) else exc
            raise RankLost(f"rank {spec.rank} was not started: {why}") from exc
        self._ranks.append(rank)
        return rank

    def code(self, pid: int) -> int | None:
        """Return how a rank that is gone ended; None if that is not known in time."""
        end_s = time.monotonic() + _SAID_S
        while pid not in self._ended:
            if self._hear(end_s) is None:
                return None
        return self._ended[pid]

    def _hear(self, end_s: float) -> Started | Ended | None:
        """Wait for the starter's next message; None at the time's end. Raises RankLost."""
        self._sock.settimeout(max(0.001, end_s - time.monotonic()))
        try:
            data = self._sock.recv(_NEWS_BYTES)
        except TimeoutError:
            return None
        except ConnectionResetError:
            data = b""
        finally:
            self._sock.settimeout(None)
        if not data:
            raise RankLost(_GONE)
        news = _news.decode(data)
        if isinstance(news, Ended):
            self._ended[news.pid] = news.code
        return news

    def close(self) -> None:
        """End the ranks, and the starter; safe to call twice."""
        end_ranks(self._ranks)
        self._ranks.clear()
        self._sock.close()
        try:
            self._child.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


class ProcessRank:
    """A rank in a process of its own (tests.reference.ranks.Rank)."""

    def __init__(self, starter: RankStarter, spec: RankSpec, pid: int, sock: socket.socket) -> None:
        """Take over the socket to a rank that the starter has just started."""
        self.number = spec.rank
        self.pid = pid
        self._starter = starter
        self._lost = ""
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError as exc:
            raise RankLost(f"{self} ended at once: {exc.strerror}") from exc
        self._sock = sock
        self._pipe = Connection(os.dup(sock.fileno()))
        self.report_s = REPORT_S

    @property
    def report_s(self) -> float:
        """Seconds, the most that a rank may take to read a step, and to report."""
        return self._report_s

    @report_s.setter
    def report_s(self, seconds: float) -> None:
        """Set it, for what is waited for from now on."""
        self._report_s = seconds
        whole, rest = divmod(max(seconds, 0.001), 1)  # 0 would be for ever
        bound = struct.pack("ll", int(whole), int(rest * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)

    def __str__(self) -> str:
        return f"rank {self.number} (process {self.pid})"

    def submit(self, step: RankStep) -> None:
        """Start a step. Raises RankLost."""
        if self._lost:
            raise RankLost(self._lost)
        try:
            self._pipe.send_bytes(_encoder.encode(step))
        except BlockingIOError:
            self._lose(f"has not read its step within {self.report_s:g} s")
        except OSError:
            self._lose(self._how_it_ended())

    def collect(self) -> RankReport:
        """Wait for the step's end. Raises RankLost, or InvariantBroken if a read was wrong."""
        if self._lost:
            raise RankLost(self._lost)
        try:
            if not self._pipe.poll(self.report_s):
                self._lose(f"has not reported within {self.report_s:g} s")
            answer = _answers.decode(self._pipe.recv_bytes())
        except BlockingIOError:
            self._lose(f"has not ended its report within {self.report_s:g} s")
        except (EOFError, OSError):
            self._lose(self._how_it_ended())
        if answer.report is None:
            raise InvariantBroken(answer.broken)
        return answer.report

    def _lose(self, what: str) -> NoReturn:
        self._lost = f"{self} {what}"
        raise RankLost(self._lost)

    def _how_it_ended(self) -> str:
        code = self._starter.code(self.pid)
        if code is None:
            return "has closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with status {code}"

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it is still there."""
        if not self.gone():
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                return

    def gone(self, timeout_s: float = 0.0) -> bool:
        """Tell whether the process has ended, waiting at most timeout_s for it."""
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def hang_up(self) -> None:
        """Let the process end, after the copies that are under way; safe to call twice."""
        self._lost = self._lost or f"{self} was closed"
        self._pipe.close()
        self._sock.close()

    def release(self) -> None:
        """Forget a process that is gone; safe to call twice."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def end_ranks(ranks: list[ProcessRank], wait_s: float = CLOSE_S) -> None:
    """End processes, in order if they can within wait_s, all together; safe to call twice."""
    for rank in ranks:
        rank.hang_up()
    end_s = time.monotonic() + wait_s
    for rank in ranks:
        if not rank.gone(max(0.0, end_s - time.monotonic())):
            rank.signal(signal.SIGKILL)
    for rank in ranks:
        rank.gone(START_S)  # after a SIGKILL that is a matter of the kernel
        rank.release()
