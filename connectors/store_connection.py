"""A connection from an engine process to its store, and how it is made."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable

from kvstore.core import limits
from kvstore.core.errors import KVStoreError, NotSupported, ProtocolError
from kvstore.wire import credentials, framing
from kvstore.wire import engine as p

log = logging.getLogger(__name__)

OUTBOX_BYTES_MAX = 16 << 20
_WRITE_BYTES = 1 << 18
_READ_BYTES = 1 << 16
_ANCILLARY_BYTES = socket.CMSG_SPACE(8 * array("i").itemsize)
_CONNECT_S = 1.0
_RETRY_S = (0.05, 0.1, 0.2, 0.5)  # an idle engine is to be back two seconds after its store
REFUSED_FIRST_S, REFUSED_MOST_S = 1.0, 60.0  # until an engine that was refused asks again
_REASONS_MAX = 16  # logged, each once


class LinkLost(KVStoreError):
    """The store is gone, or does not keep up; connect again."""


class Link:
    """One socket to the store. Sends never block; bytes the socket does not take wait here."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = framing.Decoder(p.ToEngine)
        self._inbox = memoryview(bytearray(_READ_BYTES))
        self._outbox = bytearray()
        self._greeted = False  # the store has heard of us, and hears a goodbye
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.fds: list[int] = []  # received with messages, in their order
        self._put_back: list[framing.Message] = []

    def send(self, message: framing.Message) -> None:
        """Queue a message and write what the socket takes. Raises LinkLost."""
        self._greeted = True
        with self._lock:
            self._outbox += framing.encode(message)
            self._flush()

    @property
    def waiting_bytes(self) -> int:
        """Count what the socket has not taken yet."""
        return len(self._outbox)

    def flush(self) -> None:
        """Write what the socket takes now. Raises LinkLost."""
        if self._outbox:
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                sent = self._sock.send(memoryview(self._outbox)[:_WRITE_BYTES])
                del self._outbox[:sent]
        except BlockingIOError:
            if len(self._outbox) > OUTBOX_BYTES_MAX:
                raise LinkLost(f"store does not read: {len(self._outbox)} bytes wait") from None
        except OSError as exc:
            raise LinkLost(f"store is gone: {exc.strerror}") from exc

    def receive(self, timeout_s: float = 0.0) -> list[framing.Message]:
        """Return what has arrived, waiting at most timeout_s for the first. Raises LinkLost."""
        self.flush()
        messages, self._put_back = self._put_back, []
        if timeout_s > 0 and not messages and not self._poll.poll(timeout_s * 1000):
            return messages
        while True:
            try:
                size, ancillary, _, _ = self._sock.recvmsg_into([self._inbox], _ANCILLARY_BYTES)
            except BlockingIOError:
                return messages
            except OSError as exc:
                raise LinkLost(f"store is gone: {exc.strerror}") from exc
            for _, _, descriptors in ancillary:  # SCM_RIGHTS is all that a store sends
                self.fds.extend(array("i", descriptors))
            if not size:
                if messages:
                    return messages  # the next call tells that the store is gone
                raise LinkLost("store closed the connection")
            try:
                messages.extend(self._decoder.feed(self._inbox[:size]))
            except ProtocolError as exc:
                raise LinkLost(str(exc)) from exc
            if size < _READ_BYTES:
                return messages  # that was all; another try would cost a system call

    def take_fd(self) -> int:
        """Return the first descriptor that has come and was not taken: its message's.

        Raises LinkLost if it has not: this process has too many.
        """
        if not self.fds:
            raise LinkLost("a descriptor of the store did not arrive: too many open files")
        return self.fds.pop(0)

    def put_back(self, messages: list[framing.Message]) -> None:
        """Let the next receive return these first."""
        self._put_back = messages

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once it is closed."""
        return self._sock.fileno()

    def close(self, fault: str = "") -> None:
        """Say goodbye, close the socket and descriptors that were not taken; safe to call twice.

        fault: why this half cannot go on with the session, for the store's log.
        """
        with contextlib.suppress(LinkLost):
            if self._greeted:
                self.send(p.Detach(fault[: limits.TEXT_MAX]))
        self._sock.close()
        while self.fds:
            os.close(self.fds.pop())


def connect(address: str, user: int | None = None) -> Link:
    """Connect to a store's unix socket.

    user: may listen there, beside our own user and root. Raises LinkLost if no such store does.
    """
    try:
        return Link(credentials.connect(address, _CONNECT_S, user))
    except OSError as exc:
        raise LinkLost(f"no store at {address}: {exc.strerror or exc}") from exc
    except credentials.OtherUserError as exc:
        raise LinkLost(f"{exc} (store_user names another)") from exc


def attach(
    find: Callable[[], str],
    hello: p.Hello,
    stop: threading.Event,
    user: int | None = None,
    level: int = logging.WARNING,
) -> tuple[Link, p.Welcome] | None:
    """Connect and say Hello until a store welcomes us; None when stop is set.

    find(): the store's address; starts a private store if there is none. user: as in connect().
    level: of the line that there is no store. Raises NotSupported when the store refuses for good.
    """
    tries = 0
    while not stop.is_set():
        try:
            link = connect(find(), user)
            with contextlib.ExitStack() as unwelcome:
                unwelcome.callback(link.close)
                link.send(hello)
                answer = _await_welcome(link, stop)
                if isinstance(answer, p.Welcome):
                    unwelcome.pop_all()
                    return link, answer
            if answer and tries == len(_RETRY_S):  # not for a moment only
                line = "kvstore: the store takes this engine later: %s; serving without it"
                log.warning(line, answer)
        except LinkLost as exc:
            if tries == 0:
                log.log(level, "kvstore: %s; serving without it, and trying again", exc)
        stop.wait(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
        tries += 1
    return None


def _await_welcome(link: Link, stop: threading.Event) -> p.Welcome | str:
    """Wait for the answer to Hello; the reason if it makes sense to try again."""
    while not stop.is_set():
        messages = link.receive(0.1)
        for index, message in enumerate(messages):
            if isinstance(message, p.Welcome):
                link.put_back(messages[index + 1 :])  # what the store sent right behind it
                return message
            if isinstance(message, p.Refused) and not message.retry:
                raise NotSupported(f"the store refused this engine: {message.reason}")
            if isinstance(message, p.Refused | p.Detach):
                return message.reason
    return ""


class SameOnAllRanks(NotSupported):
    """A reason to end a session that all ranks of an engine find: the first one logs it."""


class Refusals:
    """Waits and log lines of one half of an engine that the store refuses."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._logged: set[str] = set()
        self._wait_s = 0.0
        self._attached_s: float | None = None

    def wait_s(self, why: KVStoreError) -> float:
        """Take note of a refusal; return the seconds until the store is asked again.

        They double from refusal to refusal, and begin anew once a session has lasted.
        """
        now_s = time.monotonic()
        if self._attached_s is not None and now_s - self._attached_s > REFUSED_MOST_S:
            self._logged.clear()
            self._wait_s = 0.0
        self._attached_s = None
        reason = str(why)
        if reason not in self._logged and len(self._logged) < _REASONS_MAX:
            self._logged.add(reason)
            if self._rank > 0 and isinstance(why, SameOnAllRanks):
                log.debug("kvstore: %s", reason)
            else:
                log.error(
                    "kvstore: %s; serving without it, and asking again, up to once a minute", reason
                )
        self._wait_s = min(max(REFUSED_FIRST_S, 2 * self._wait_s), REFUSED_MOST_S)
        part = random.uniform(0.8, 1.0)  # noqa: S311 - many engines' halves were refused at once
        return self._wait_s * part

    def attached(self) -> None:
        """Take note of a session."""
        self._attached_s = time.monotonic()


class Attacher:
    """Connects in the background, so that the engine's step never does.

    It tries again after a refusal, and when the store has closed a connection, which an idle
    engine would not notice.
    """

    def __init__(
        self,
        find: Callable[[], str],
        hello: p.Hello,
        user: int | None = None,
        serve: Callable[[Link, p.Welcome], None] | None = None,
    ) -> None:
        """find(): the store's address; starts a private store if there is none.

        user: may run it, beside our own user and root. serve(): uses a connection on this thread
        until that ends; KVStoreError counts as a refusal. None: connections are for take().
        """
        self.hello = hello
        self.refused: KVStoreError | None = None  # by the last store that answered
        self.refusals = Refusals(hello.rank)
        self.stop = threading.Event()
        self._was_attached = False
        self._find, self._user, self._serve = find, user, serve
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ready: deque[tuple[Link, p.Welcome]] = deque()
        self._thread: threading.Thread | None = None
        # An engine says once that it has no store: its scheduler half, here or as it is detached.
        self._level = logging.WARNING if hello.role == "scheduler" else logging.DEBUG

    def start(self) -> None:
        """Start making a connection, unless one is ready for take()."""
        if self.stop.is_set():
            return
        if self._thread is not None and self._thread.is_alive():
            os.eventfd_write(self._wake, 1)  # the last connection may have been closed
            return
        self._thread = threading.Thread(target=self._run, name="kvstore-link", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.stop.is_set():
            try:
                attached = attach(self._find, self.hello, self.stop, self._user, self._level)
                if attached is not None:
                    self._level = logging.DEBUG
                    (self._serve or self._offer)(*attached)
            except KVStoreError as exc:
                # Not for good: a worker is refused only in a session that has the other half, and
                # a store may come back with other settings.
                if not self.stop.is_set():
                    self.refused = exc.with_traceback(None)  # which would keep what failed
                    self.stop.wait(self.refusals.wait_s(exc))

    def _offer(self, link: Link, welcome: p.Welcome) -> None:
        """Offer a connection to take(); return when either end has closed it."""
        self.refused = None
        self.refusals.attached()
        if self._was_attached:  # one line of an engine: its workers say nothing
            log.info("kvstore: attached again, session %d", welcome.session)
        self._was_attached = True
        attached, closed = (link, welcome), select.poll()
        closed.register(link.fileno(), select.POLLRDHUP)
        closed.register(self._wake, select.POLLIN)
        self._ready.append(attached)
        while link.fileno() >= 0 and not self.stop.is_set():
            if any(fd != self._wake for fd, _ in closed.poll()):
                break
            os.eventfd_read(self._wake)
        self.stop.wait(_RETRY_S[0])
        with contextlib.suppress(ValueError):
            self._ready.remove(attached)  # unless it was taken
            link.close()

    def take(self) -> tuple[Link, p.Welcome] | None:
        """Return a new connection and the store's welcome, once."""
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Stop connecting and close a connection that was not taken; safe to call twice."""
        if not self.stop.is_set():
            self.stop.set()
            os.eventfd_write(self._wake, 1)
            if self._thread is not None:
                self._thread.join()
            os.close(self._wake)
        while self._ready:
            self._ready.popleft()[0].close()
