"""The side channel's sockets: ZeroMQ with CURVE, so that who has no cluster key learns nothing.

One ROUTER listens, one DEALER for each peer that is asked, all of them behind a gate that bounds
what comes (see gate.py). All of it is polled from the store's loop: nothing here waits. A message
that cannot be read is counted, and answered now and then; whoever says too much in a second is
hung up on; the listener goes on.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvstore.barrier import Barrier
from kvstore.core.errors import ConfigError, ProtocolError
from kvstore.handover.gate import Gate
from kvstore.handover.loopback import is_loopback
from kvstore.rate_log import RateLog
from kvstore.wire import peer as m
from kvstore.wire.framing import Message

log = logging.getLogger(__name__)

RATE_MAX = 10_000  # messages of one peer in a second
QUEUE_MAX = 10_000  # messages that a peer has not read
_DOMAIN = "kvstore"
_KEY_BYTES = 32
_PARTS = 2  # of what a router receives: who, and what
READ_NS = 5_000_000  # of one poll: engines wait meanwhile
READ_MAX = 64  # messages taken from one peer that was asked, in one go
ANSWERS_MAX = 10  # to wrong messages of one peer in a second
BARRED_MAX = 4096
LOGGED_MAX = 300  # characters of a wrong message's error
FORGET_NS = 600_000_000_000  # a peer that has said nothing
CAME_MAX = 1024  # peers that came; one more takes the place of that which was silent longest
STRANGE = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
CALLS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | STRANGE
HANDSHAKE_MS = 2000


class ClusterKey:
    """What all stores of a cluster share. A client and a server key pair follow from it."""

    def __init__(self, secret: bytes) -> None:
        """secret: 32 bytes."""
        self.client_public, self.client_secret = _pair(secret, b"client")
        self.server_public, self.server_secret = _pair(secret, b"server")

    @staticmethod
    def make(path: Path) -> None:
        """Make a file with a new key. Raises ConfigError, and keeps a file that is there."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigError(f"cluster key {path}: {exc.strerror}") from exc
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(_KEY_BYTES) + "\n")

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """Read a key file. Raises ConfigError if it is not one, or others may read it."""
        try:
            mode, text = path.stat().st_mode, path.read_text(encoding="ascii").strip()
            secret = bytes.fromhex(text)
        except OSError as exc:
            raise ConfigError(
                f"cluster key {path}: {exc.strerror}; kvstore keygen makes one"
            ) from exc
        except ValueError as exc:
            raise ConfigError(f"cluster key {path}: expected 64 hexadecimal digits") from exc
        if len(secret) != _KEY_BYTES:
            raise ConfigError(f"cluster key {path}: {len(text)} digits, expected 64")
        if mode & 0o077:
            raise ConfigError(f"cluster key {path}: mode {mode & 0o777:o}, expected 600")
        return cls(secret)


def _pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    made = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"kvstore-" + role).digest())
    return zmq.curve_public(made), made


class Channel:
    """Connections to other stores, by number: those that came, and those that were made."""

    def __init__(
        self,
        key: ClusterKey | None,
        on_message: Callable[[int, Message], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        """on_message may raise ProtocolError, which is counted and answered with Refused.

        on_lost(number, reason): an asked peer is gone; a new connect() is a new connection.
        """
        self.counts: Counter[str] = Counter()
        self.address = ""  # host:port, once it listens
        self._key = key
        self._on_message = on_message
        self._on_lost = on_lost
        self._context: Any = zmq.Context()
        self._auth: ThreadAuthenticator | None = None
        self._router: Any = None
        self._router_fd = -1
        self._calls: Any = None  # tells of connections, where there is a key
        self._callers: deque[int] = deque()  # when those came whose handshake is not over
        self._came: dict[bytes, int] = {}  # routing id -> number
        self._ids: dict[int, bytes] = {}
        self._made: dict[int, _Dealer] = {}
        self._heard: dict[int, tuple[int, int]] = {}  # this second, and messages in it
        self._doomed: list[tuple[int, str]] = []  # to be lost at the next poll
        self._next = 1
        self._gate = Gate(keyed=key is not None)
        self._ended: dict[int, str] = {}  # connections of the gate, read to the end and then lost
        self._lines: dict[int, int] = {}  # number -> the gate's
        self._numbers: dict[int, int] = {}  # and back
        self._barred: dict[bytes, None] = {}  # routing ids of who was hung up on
        self._rude: dict[int, tuple[int, int]] = {}  # number -> second, and wrong messages in it
        self._said = RateLog(log)
        self._barrier = Barrier(self._said, self._met_a_bug)

    def listen(self, host: str, port: int) -> None:
        """Let others ask. Raises ConfigError for a port in use, or an open host without a key."""
        if self._key is None and not is_loopback(host):
            raise ConfigError(
                f"peer listen {host}:{port}: not a loopback address and no cluster key; "
                "make one with kvstore keygen, or listen on 127.0.0.1"
            )
        router = self._socket(zmq.ROUTER)
        router.router_mandatory = True
        router.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
        if self._key is not None:
            self._auth = ThreadAuthenticator(self._context)
            self._auth.start()
            self._auth.configure_curve_callback(_DOMAIN, self)
            router.curve_server = True
            router.curve_secretkey = self._key.server_secret
            router.zap_domain = _DOMAIN.encode()
            self._calls = router.get_monitor_socket(CALLS)
        try:
            self.address = self._gate.listen(host, port)
            router.bind(self._gate.inside)
        except (ConfigError, zmq.ZMQError) as exc:
            self._close_router(router)
            if isinstance(exc, ConfigError):
                raise
            raise ConfigError(f"peer listen {host}:{port}: {exc.strerror}") from exc
        self._router, self._router_fd = router, router.fd

    def callback(self, _domain: str, key: bytes) -> bool:
        """Say whether a client's key is the cluster's (for the authenticator)."""
        return self._key is not None and key == self._key.client_public

    def may_dial(self, address: str) -> str:
        """Say why an address must not be connected to; nothing if it may be."""
        try:
            self._gate.may_dial(address)
        except ConfigError as exc:
            return str(exc)
        return ""

    def connect(self, address: str) -> int:
        """Begin to connect to a peer; return its number."""
        number, self._next = self._next, self._next + 1
        try:
            self._dial(number, address)
        except (ConfigError, OSError, zmq.ZMQError) as exc:  # no address, or no descriptors
            reason = str(exc) if isinstance(exc, ConfigError) else exc.strerror
            self._doomed.append((number, f"{address[:100]!r}: {reason}"))
        return number

    def _dial(self, number: int, address: str) -> None:
        """Connect through the gate. Raises ConfigError, OSError or ZMQError."""
        dealer = self._socket(zmq.DEALER)
        try:
            dealer.reconnect_ivl = -1  # a new one is made
            if self._key is not None:
                dealer.curve_publickey = self._key.client_public
                dealer.curve_secretkey = self._key.client_secret
                dealer.curve_serverkey = self._key.server_public
            line, inside = self._gate.dial(address)
        except BaseException:
            dealer.close()
            raise
        self._made[number] = _Dealer(dealer, address, dealer.fd)
        self._lines[number], self._numbers[line] = line, number
        dealer.connect(inside)

    def _socket(self, kind: int) -> Any:  # noqa: ANN401 - its options are attributes
        made = self._context.socket(kind)
        made.linger = 0
        made.maxmsgsize = m.MESSAGE_BYTES_MAX
        made.sndhwm = QUEUE_MAX
        made.rcvhwm = 0  # the gate's to bound: one that is full aborts the process in the end
        made.handshake_ivl = made.connect_timeout = HANDSHAKE_MS
        made.heartbeat_ivl = 1000
        made.heartbeat_timeout = 5000
        return made

    def fds(self) -> Iterator[int]:
        """Go through the descriptors that become readable when poll() has something to do."""
        if self._router is not None:
            yield self._router_fd
        if self._calls is not None:
            yield self._calls.fd
        yield self._gate.fileno()
        for dealer in self._made.values():
            yield dealer.fd

    @property
    def waiting(self) -> bool:
        """Tell whether poll() has something to say: no descriptor may tell it.

        To have sent can use up a descriptor's signal.
        """
        if self._doomed or self._ended or (self._router is not None and _readable(self._router)):
            return True
        return any(_readable(dealer.socket) for dealer in self._made.values())

    def send(self, number: int, message: Message) -> None:
        """Send, or drop for a peer that is gone or does not read: poll() says that it is lost.

        Nobody is told in here: whoever sends may be going through what would change.
        """
        frame = m.encode(message)
        self._gate.sending(self._lines.get(number, 0), len(frame))
        try:
            if number in self._made:
                self._made[number].socket.send(frame, zmq.DONTWAIT)
            elif number in self._ids and self._router is not None:
                self._router.send_multipart([self._ids[number], frame], zmq.DONTWAIT)
        except zmq.ZMQError as exc:
            self.counts["unsent"] += 1
            self._doomed.append((number, exc.strerror or "send failed"))

    def poll(self, now_ns: int) -> None:
        """Hand over what has arrived, and say who is gone."""
        doomed, self._doomed = self._doomed, []
        for number, reason in doomed:
            if number in self._made or number in self._ids:
                self._lose(number, reason)
            else:
                self._tell_lost(number, reason)
        self._count_strangers(now_ns)
        if not self._gate_is_closed():
            self._gate.drained()
        self._ended.update(self._gate.poll(now_ns))
        until_ns = time.monotonic_ns() + READ_NS
        self._poll_router(now_ns, until_ns)
        for number, dealer in list(self._made.items()):
            self._poll_dealer(number, dealer, now_ns, until_ns)
        self._lose_ended()
        self._tell_trouble()

    def _gate_is_closed(self) -> bool:
        """Tell whether anything that was let in has not been taken."""
        sockets = [dealer.socket for dealer in self._made.values()]
        return any(_readable(s) for s in (*sockets, self._router) if s is not None)

    def _poll_dealer(self, number: int, dealer: _Dealer, now_ns: int, until_ns: int) -> None:
        """Take some of what a peer answers: at least one message, whoever else says how much."""
        for _ in range(READ_MAX if _readable(dealer.socket) else 0):
            try:
                frame = dealer.socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            self._gate.took(self._lines[number])
            self._take(number, frame, m.decode_for_consumer, now_ns)
            if number not in self._made or time.monotonic_ns() > until_ns:
                break

    def _lose_ended(self) -> None:
        """Lose connections that have ended, once all that they said has been taken."""
        unread = self._router is not None and _readable(self._router)
        for line, reason in list(self._ended.items()):
            number = self._numbers.get(line)
            dealer = None if number is None else self._made.get(number)
            if unread if dealer is None else _readable(dealer.socket):
                continue
            del self._ended[line]
            if number is not None:
                self._lose(number, f"connection: {reason}")

    def _tell_trouble(self) -> None:
        trouble, self._gate.trouble = self._gate.trouble, []
        for kind, text in trouble:
            self.counts["unauthorised" if kind == "stranger" else "too_many"] += 1
            self._said.warn(f"side channel, {kind}", "side channel: %s", text)
        self._said.tick()

    def _poll_router(self, now_ns: int, until_ns: int) -> None:
        while self._router is not None and _readable(self._router):
            try:
                routing = self._router.recv(zmq.DONTWAIT)
                frame = self._router.recv(zmq.DONTWAIT, copy=False)
                more = frame.more
                while self._router.getsockopt(zmq.RCVMORE):
                    self._router.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            if routing not in self._barred:
                number = self._came.get(routing)
                if number is None:
                    number = self._admit(routing, self._gate.number_of(frame.get(zmq.SRCFD)))
                self._gate.took(self._lines.get(number, 0))
                if more:
                    self._wrong(number, "a message of several parts", now_ns)
                else:
                    self._take(number, frame.bytes, m.decode_for_producer, now_ns)
            if time.monotonic_ns() > until_ns:
                break

    def _count_strangers(self, now_ns: int) -> None:
        """Count the connections that no handshake made ones of the cluster.

        Of some that are refused nothing is said: so it is those that came less those that were let
        in, some time later.
        """
        while self._calls is not None and self._calls.poll(0):
            event: Any = recv_monitor_message(self._calls)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._callers.append(now_ns)
            elif self._callers:
                self._callers.popleft()
                self.counts["unauthorised"] += event["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
        while self._callers and now_ns - self._callers[0] > 2 * HANDSHAKE_MS * 1_000_000:
            self._callers.popleft()
            self.counts["unauthorised"] += 1

    def _admit(self, routing: bytes, line: int | None = None) -> int:
        """Number a peer that has come; line: the gate's number of it, if it is still there."""
        if len(self._ids) >= CAME_MAX:
            silent = min(self._ids, key=lambda number: self._heard.get(number, (0, 0))[0])
            self._hang_up(silent, "others came")
        number, self._next = self._next, self._next + 1
        self._came[routing], self._ids[number] = number, routing
        if line is not None:
            self._lines[number], self._numbers[line] = line, number
        return number

    def _take(
        self, number: int, frame: bytes, decode: Callable[[bytes], Message], now_ns: int
    ) -> None:
        second = now_ns // 1_000_000_000
        at, count = self._heard.get(number, (second, 0))
        self._heard[number] = (second, count + 1 if at == second else 1)
        if self._heard[number][1] > RATE_MAX:
            self.counts["too_many"] += 1
            self._said.warn(
                "peers that send too many messages",
                "peer %d: over %d messages in a second",
                number,
                RATE_MAX,
            )
            self._hang_up(number, "it sent too many messages")
            return
        with self._barrier.around(f"a message of peer {number}", lambda: self.give_up(number)):
            try:
                self._on_message(number, decode(frame))
            except ProtocolError as exc:
                self._wrong(number, str(exc), now_ns)

    def give_up(self, number: int) -> None:
        """Hang up on a peer that has met a bug of ours."""
        self._hang_up(number, "its messages met a bug of the store")

    def _met_a_bug(self) -> None:
        self.counts["internal"] += 1

    def _tell_lost(self, number: int, reason: str) -> None:
        with self._barrier.around(f"the end of peer {number}"):
            self._on_lost(number, reason)

    def _wrong(self, number: int, text: str, now_ns: int) -> None:
        """Count a wrong message; not all of them are answered."""
        self.counts["malformed"] += 1
        self._said.warn("wrong messages of peers", "peer %d: %r", number, text[:LOGGED_MAX])
        second = now_ns // 1_000_000_000
        at, count = self._rude.get(number, (second, 0))
        self._rude[number] = (second, count + 1 if at == second else 1)
        if number in self._ids and self._rude[number][1] <= ANSWERS_MAX:
            self.send(number, m.Refused(f"not understood: {text}"[: m.TEXT_MAX]))

    def _hang_up(self, number: int, reason: str) -> None:
        """Take nothing more of a peer, not even what it has said before."""
        routing = self._ids.get(number)
        if routing is not None:
            self._barred[routing] = None
            if len(self._barred) > BARRED_MAX:
                del self._barred[next(iter(self._barred))]
        self._lose(number, reason)

    def _lose(self, number: int, reason: str) -> None:
        dealer = self._made.pop(number, None)
        if dealer is not None:
            dealer.close()
        routing = self._ids.pop(number, None)
        if routing is not None:
            self._came.pop(routing, None)
        self._heard.pop(number, None)
        self._rude.pop(number, None)
        line = self._lines.pop(number, None)
        if line is not None:
            self._numbers.pop(line, None)
            self._gate.drop(line)
        if dealer is not None or routing is not None:
            self._tell_lost(number, reason)

    @property
    def came(self) -> int:
        """Count the connections of peers that came, as far as is known."""
        return len(self._ids)

    def drop(self, number: int) -> None:
        """Close a connection."""
        self._lose(number, "dropped")

    def forget_silent(self, now_ns: int) -> None:
        """Forget who came and has said nothing for long."""
        limit = (now_ns - FORGET_NS) // 1_000_000_000
        for number in [n for n in self._ids if self._heard.get(n, (0, 0))[0] < limit]:
            self._lose(number, "silent")

    def _close_router(self, router: Any) -> None:  # noqa: ANN401 - a socket
        if self._calls is not None:
            router.disable_monitor()
            self._calls.close()
            self._calls = None
        router.close()

    def close(self) -> None:
        """End everything, at once."""
        for dealer in self._made.values():
            dealer.close()
        self._made.clear()
        if self._router is not None:
            self._close_router(self._router)
        if self._auth is not None:
            self._auth.stop()
        self._context.term()
        self._gate.close()


class _Dealer(msgspec.Struct):
    socket: Any
    address: str
    fd: int

    def close(self) -> None:
        self.socket.close()


def _readable(socket: Any) -> bool:  # noqa: ANN401 - one of ZeroMQ's
    """Tell whether there is a message: five times faster than to be told by an exception."""
    return bool(socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)
