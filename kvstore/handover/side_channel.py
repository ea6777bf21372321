"""The side channel: connections to other stores, with TLS where there is a cluster key.

Who has no key is not heard, and sees a certificate at most. Without a key only loopback is listened
on and dialled, and only this user's processes, and root's, are spoken to.

All of it is polled from the store's loop and nothing here waits; a name is looked up by a thread.
Each poll reads a little of each connection in its turn. What peers leave unfinished, or unread, is
bounded in sum: the connection with most of it is hung up on. A message that cannot be read is
counted, and answered now and then. A peer that sends too much in a second loses its connection; the
listener goes on.
"""

from __future__ import annotations

import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable

from kvstore import clock
from kvstore.barrier import Barrier
from kvstore.core.errors import ConfigError, ProtocolError
from kvstore.handover.cluster_key import ClusterKey
from kvstore.handover.line import CHUNK_BYTES, Line, Lines
from kvstore.handover.listener import Listener
from kvstore.handover.loopback import may_answer, may_ask, may_dial
from kvstore.handover.name_lookups import NameLookups
from kvstore.logs import RateLog
from kvstore.wire import peer as m
from kvstore.wire.framing import Message, encode

log = logging.getLogger(__name__)

RATE_MAX = 10_000  # messages of one peer in a second
READ_NS = 5_000_000  # of one poll: engines wait meanwhile
READ_BYTES = 4 * CHUNK_BYTES  # of one connection in one poll
ANSWERS_MAX = 10  # to wrong messages of one peer in a second
MET_A_BUG = "its messages met a bug of the store"
LOGGED_MAX = 300  # characters of a wrong message's error
FORGET_NS = 600_000_000_000  # a peer that has said nothing
CAME_MAX = 1024  # peers that came; one more takes the place of that which was silent longest
GREETINGS_MAX = 64  # connections that came and have not proved the key yet
GREETING_NS = 2_000_000_000  # to connect, and to prove the key
UNFINISHED_BYTES_MAX = 64 << 20  # of messages of which not all has come, in sum
UNREAD_BYTES_MAX = 256 << 20  # of what peers do not read, in sum
_ACCEPTS = 16  # in one poll
_LISTENER = 0  # as the number of a connection


class Channel:
    """Connections to other stores, by number: those that came, and those that were made."""

    def __init__(
        self,
        key: ClusterKey | None,
        on_message: Callable[[int, Message], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        """Raises ConfigError where a key is of no use.

        on_message may raise ProtocolError, which is counted and answered with Refused.

        on_lost(number, reason): a peer is gone; a new connect() is a new connection.
        """
        self.counts: Counter[str] = Counter()
        self.address = ""  # host:port, once it listens
        self._key = key
        # Of connections that came, and that were made.
        self._tls = {} if key is None else {came: key.tls(accepts=came) for came in (True, False)}
        self._on_message = on_message
        self._on_lost = on_lost
        self._listener: Listener | None = None
        self.lines = Lines()
        self._names = NameLookups()
        self._ready: set[int] = set()  # they can go on, though epoll may not tell
        self._last = 0  # the connection that was read last
        self._now_ns = clock.now_ns()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._lines_max = max(4, min(2 * CAME_MAX, soft // 2))
        self._said = RateLog(log)
        self._barrier = Barrier(self._said, lambda: self.counts.update(internal=1))

    # Listening and dialling

    def listen(self, host: str, port: int) -> None:
        """Let others ask. Raises ConfigError for a port in use, or an open host without a key."""
        self._listener = Listener(self.lines.epoll, host, port, open_to_all=self._key is not None)
        self._listener.watch(self._now_ns, room=True)
        self.address = self._listener.address

    def refusal(self, address: str) -> str:
        """Say why an address is not connected to; nothing if it may be."""
        try:
            may_dial(address, open_to_all=self._key is not None)
        except ConfigError as exc:
            return str(exc)
        return ""

    def connect(self, address: str) -> int:
        """Begin to connect to a peer; return its number."""
        line = self.lines.add(clock.now_ns() + GREETING_NS, came=False)
        try:
            host, port = may_dial(address, open_to_all=self._key is not None)
            line.addresses.extend(self._names.find(line.number, host, port))
        except (ConfigError, OSError, ValueError, RuntimeError) as exc:
            self._fail(line, (exc.strerror if isinstance(exc, OSError) else None) or str(exc))
        if line.addresses:
            self._dial(line)
        return line.number

    def _take_found(self) -> None:
        for number, found in self._names.take():
            line = self.lines.all.get(number)
            if line is None:
                continue
            if isinstance(found, str):
                self._fail(line, found)
                continue
            line.addresses.extend(found)
            self._dial(line)

    def _dial(self, line: Line, why: str = "no address") -> None:
        """Connect to a line's next address; why: what came of the one before."""
        while line.addresses:
            line.due_ns = clock.now_ns() + GREETING_NS // len(line.addresses)
            self.lines.hang_up(line)
            try:
                line.dial()
                self.lines.update(line)
            except OSError as exc:
                why = exc.strerror or str(exc)
            else:
                return
        self._fail(line, why)

    def _fail(self, line: Line, why: str) -> None:
        """Have poll() say that a connection could not be made."""
        line.failed = why
        self._ready.add(line.number)

    def _accept(self, listener: Listener, now_ns: int) -> None:
        until_ns = clock.now_ns() + READ_NS
        for _ in range(_ACCEPTS):
            room = len(self.lines.all) < self._lines_max
            if not listener.watch(now_ns, room=room) or clock.now_ns() > until_ns:
                return
            try:
                tcp = listener.accept(now_ns)
            except OSError as exc:
                self._trouble("too_many", f"accept: {exc.strerror}")
                continue
            if tcp is None:
                return
            try:
                self._came(tcp)
            except OSError:  # it is gone
                tcp.close()

    def _came(self, tcp: socket.socket) -> None:
        """Take a connection. Raises OSError."""
        if self._key is None and not may_ask(tcp):
            text = "another user's process connected, and there is no cluster key: refused"
            self._trouble("unauthorised", text)
            tcp.close()
            return
        young = [line for line in self.lines.young.values() if line.came]
        if len(young) >= GREETINGS_MAX:
            self._ended(young[0], "others came")
        line = self.lines.add(clock.now_ns() + GREETING_NS, came=True)
        try:
            line.use(tcp)
            self._greet(line)
            self.lines.update(line)
        except OSError:
            self._lose(line, "connection: gone")
            raise

    def _trouble(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self._said.warn(f"side channel, {kind}", "side channel: %s", text)

    # Stages

    def _greet(self, line: Line) -> None:
        """Begin TLS, if there is a key."""
        if self._key is None:
            line.agree()
            self._opened(line)
        else:
            line.greet(self._tls[line.came])

    def _opened(self, line: Line) -> None:
        """Both ends may speak."""
        del self.lines.young[line.number]
        line.heard_s = self._now_ns // 1_000_000_000
        came = self.lines.came() if line.came else []
        if len(came) > min(CAME_MAX, self._lines_max // 2):
            silent = min((other for other in came if other is not line), key=lambda o: o.heard_s)
            self._lose(silent, "others came")
        line.flush()

    def _advance(self, line: Line) -> bool:
        """Go on until a connection is open; True once it is. Raises OSError."""
        if line.failed:
            raise OSError(0, line.failed)
        if line.stage == "connecting":
            sock = line.check_connected()
            if self._key is None and not may_answer(sock):
                text = "another user's process listens there, and there is no cluster key"
                raise OSError(0, text)
            line.due_ns = clock.now_ns() + GREETING_NS
            self._greet(line)
        if line.stage == "greeting" and line.agree():
            self._opened(line)
        return line.stage == "open"

    # Turns

    def fileno(self) -> int:
        """Return a descriptor that is readable when poll() has something to do."""
        return self.lines.epoll.fileno()

    @property
    def waiting(self) -> bool:
        """Tell whether poll() has something to do that no descriptor tells."""
        return bool(self._ready) or self._names.waiting

    def send(self, number: int, message: Message) -> None:
        """Send, or drop for a peer that is gone: poll() says that it is lost.

        Nobody is told in here: whoever sends may be going through what would change.
        """
        line = self.lines.all.get(number)
        if line is None:
            return
        line.send(encode(message))
        try:
            line.flush()
            self.lines.update(line)
        except OSError:  # poll() meets it again, once it has read what the peer said before
            self.counts["unsent"] += 1
            self._ready.add(number)

    def _flush(self, line: Line) -> None:
        """Send what a peer takes. Raises OSError, unless there is more to read of what it said."""
        try:
            line.flush()
        except OSError:
            if line.number not in self._ready:
                raise

    def poll(self, now_ns: int) -> None:
        """Hand over what has arrived, and say who is gone."""
        self._now_ns = now_ns
        self._take_found()
        ready, self._ready = self._ready | self.lines.ready(), set()
        listener = self._listener
        if listener is not None and (_LISTENER in ready or not listener.watched):
            self._accept(listener, now_ns)
        ready.discard(_LISTENER)
        self._serve(ready, now_ns)
        late_ns = clock.now_ns()
        for line in [line for line in self.lines.young.values() if late_ns >= line.due_ns]:
            self._ended(line, "timed out")
        self._keep_bounds()
        self._said.tick()

    def _serve(self, ready: set[int], now_ns: int) -> None:
        """Read what connections say, each in its turn."""
        until_ns = clock.now_ns() + READ_NS
        for number in sorted(ready, key=lambda number: (number <= self._last, number)):
            if clock.now_ns() > until_ns:
                self._ready.add(number)
                continue
            line = self.lines.all.get(number)
            if line is None:
                continue
            self._last = number
            try:
                if self._advance(line):
                    self._read(line, now_ns, until_ns)  # first: what it said before it closed
                    self._flush(line)
            except OSError as exc:
                self._ended(line, exc.strerror or str(exc) or "disconnected")
            else:
                self.lines.update(line)

    def _read(self, line: Line, now_ns: int, until_ns: int) -> None:
        """Take some of what a peer says. Raises OSError."""
        read, number = 0, line.number
        data: bytes | None = b""  # at first, what it has said before
        while data is not None:
            read += len(data)
            try:
                for body in line.frames.feed(data):
                    decode = m.decode_for_producer if line.came else m.decode_for_consumer
                    self._take(line, body, decode, now_ns)
                    if number not in self.lines.all:
                        return
                    if clock.now_ns() > until_ns:
                        break
            except ProtocolError as exc:  # where its next message begins is not known
                self._wrong(line, str(exc))
                self._lose(line, "connection: it sends no messages")
                return
            if read >= READ_BYTES or clock.now_ns() > until_ns:
                self._ready.add(number)
                return
            data = line.receive()
            if data == b"":
                raise OSError(0, "disconnected")

    def _take(
        self, line: Line, body: bytes, decode: Callable[[bytes], Message], now_ns: int
    ) -> None:
        second = now_ns // 1_000_000_000
        if line.heard_s != second:
            line.heard_s, line.messages, line.wrong = second, 0, 0
        line.met = True
        line.messages += 1
        if line.messages > RATE_MAX:
            self.counts["too_many"] += 1
            self._said.warn(
                "peers that send too many messages",
                "peer %d: over %d messages in a second",
                line.number,
                RATE_MAX,
            )
            self._lose(line, "it sent too many messages")
            return
        with self._barrier.around(
            f"a message of peer {line.number}", lambda: self.drop(line.number, MET_A_BUG)
        ):
            try:
                self._on_message(line.number, decode(body))
            except ProtocolError as exc:
                self._wrong(line, str(exc))

    def _wrong(self, line: Line, text: str) -> None:
        """Count a wrong message; not all of them are answered."""
        self.counts["malformed"] += 1
        self._said.warn("wrong messages of peers", "peer %d: %r", line.number, text[:LOGGED_MAX])
        line.wrong += 1
        if line.came and line.wrong <= ANSWERS_MAX:
            self.send(line.number, m.Refused(f"not understood: {text}"[: m.TEXT_MAX]))

    def _keep_bounds(self) -> None:
        """Hang up on those that leave most unread, or unfinished, while it is too much in sum."""
        lines = self.lines
        while lines.unfinished > UNFINISHED_BYTES_MAX:
            most = max(lines.all.values(), key=lambda line: line.counted[1])
            self._hang_up(most, f"{most.counted[1]} bytes unfinished")
        while lines.unread > UNREAD_BYTES_MAX:
            most = max(lines.all.values(), key=lambda line: line.counted[0])
            self._hang_up(most, f"{most.counted[0]} bytes unread")

    def _hang_up(self, line: Line, why: str) -> None:
        self._trouble("too_many", f"connection {line.number} is closed: {why}")
        self._lose(line, f"connection: {why}")

    # Ends

    def _ended(self, line: Line, why: str) -> None:
        """A connection has ended by itself; until it is open, a peer's next address is tried.

        One that came and proved nothing is a stranger's.
        """
        if line.addresses and line.stage != "open":
            self._dial(line, why)
            return
        if line.came and line.stage == "greeting":
            self._trouble("unauthorised", f"connection {line.number} has not proved the key: {why}")
        self._lose(line, f"connection: {why}")

    def _lose(self, line: Line, reason: str) -> None:
        if self.lines.all.get(line.number) is not line:
            return
        self.lines.remove(line)
        if line.met:
            with self._barrier.around(f"the end of peer {line.number}"):
                self._on_lost(line.number, reason)

    def drop(self, number: int, why: str = "dropped") -> None:
        """Close a connection."""
        line = self.lines.all.get(number)
        if line is not None:
            self._lose(line, why)

    def forget_silent(self, now_ns: int) -> None:
        """Forget who came and has said nothing for long."""
        limit_s = (now_ns - FORGET_NS) // 1_000_000_000
        for line in self.lines.came():
            if line.heard_s < limit_s:
                self._lose(line, "silent")

    def close(self) -> None:
        """End everything, at once."""
        if self._listener is not None:
            self._listener.close()
        self.lines.close()
