"""The simulation's wires and memory: what lies between the real store and its engines."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import count

from connectors.store_connection import LinkLost
from kvstore.core.errors import KVStoreError, check
from kvstore.store.store import Store
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.harness.fakes import HeapExtent, HeapPool
from tiers.cpu import CpuExtent

US = 1_000
MS = 1_000_000
ENCODED = 0.25  # share of messages that are encoded and decoded on their way
WOKEN = 0.2  # chance that a lower tier wakes a store that no message and no time does


class Extent(HeapExtent):
    """Slots full of rubbish, with a number."""

    def __init__(self, fd: int, extent_bytes: int, slot_bytes: int) -> None:
        super().__init__(extent_bytes, slot_bytes)
        self.fd = fd
        self.data[:] = b"\xaa" * self.bytes


class Pool(HeapPool):
    """A capped pool of extents, which have numbers and take a few polls to be made."""

    def __init__(self, fds: dict[int, Extent], extents: int, slots: int) -> None:
        super().__init__(extents, slots)
        self._fds = fds
        self._polls = 0
        self._numbers = count(max(fds, default=0) + 1)

    def poll(self) -> Sequence[tuple[str, CpuExtent | Exception]]:
        self._polls += 1
        if not self._wanted or self._polls % 3:
            return []
        tag, slot_bytes = self._wanted.pop(0)
        extent = Extent(next(self._numbers), self.extent_bytes, slot_bytes)
        self._fds[extent.fd] = extent
        return [(tag, extent)]

    def release(self, extent: CpuExtent) -> None:
        del self._fds[extent.fd]
        super().release(extent)
        check(self.used_bytes >= 0, "an extent released twice")


class Wire:
    """One connection. Both directions keep their order; messages take their time."""

    def __init__(self, net: Net, number: int) -> None:
        self.number = number
        self.up: deque[tuple[int, framing.Message | None]] = deque()
        self.down: deque[tuple[int, framing.Message]] = deque()
        self.fds: deque[Extent] = deque()
        self.open = True
        self.lost = False
        self._net = net

    def send(self, message: framing.Message) -> None:
        self.flush()
        self.up.append((self._net.due(self.up), self._net.carry(message, self._net.to_store)))

    @property
    def waiting_bytes(self) -> int:
        return 0

    def flush(self) -> None:
        if self.lost or not self.open:
            raise LinkLost("store is gone")

    def pop(self) -> framing.Message | None:
        """Take one message that has arrived; None if none has. Raises LinkLost."""
        if self.open and self.down and self.down[0][0] <= self._net.now:
            return self.down.popleft()[1]
        self.flush()
        return None

    def receive(self, timeout_s: float = 0.0) -> list[framing.Message]:
        end = self._net.now + int(timeout_s * 1e9)
        messages: list[framing.Message] = []
        while True:
            message = self.pop() if not messages or self.down else None
            if message is not None:
                messages.append(message)
            elif messages or self._net.now >= end:
                return messages
            else:
                self._net.now = min(end, self._net.now + 50 * US)
                self._net.pump()

    def take_fd(self) -> int:
        raise AssertionError("no engine here is read by peers")

    def close(self, fault: str = "") -> None:
        if self.open:
            if not self.lost:
                self.send(p.Detach(fault))
            self.open = False
            self.up.append((self._net.due(self.up), None))


class Net:
    """Carries messages between one store and its clients, in simulated time."""

    def __init__(self, rng: random.Random) -> None:
        self.now = 1_000 * MS
        self.store: Store | None = None
        self.frozen_until = 0
        self._ticked_ns = 0
        self.slow = False
        self.slow_until = 0
        self.fds: dict[int, Extent] = {}
        self.wires: dict[int, Wire] = {}
        self._next = 1
        self._rng = rng
        self.to_store = framing.Decoder(p.ToStore)
        self._to_engine = framing.Decoder(p.ToEngine)

    def carry(self, message: framing.Message, decoder: framing.Decoder) -> framing.Message:
        """Return what the other side gets; some messages go through bytes."""
        if self._rng.random() >= ENCODED:
            return message
        return next(iter(list(decoder.feed(framing.encode(message)))))

    def due(
        self, queue: deque[tuple[int, framing.Message | None]] | deque[tuple[int, framing.Message]]
    ) -> int:
        if self.slow or self.now < self.slow_until:
            delay = self._rng.choice((0, 1, 5, 60)) * MS
        else:
            delay = int(self._rng.random() * 200) * US
        return max(self.now + delay, queue[-1][0] if queue else 0)

    def close_due(self, wire: Wire | None) -> int:
        """When the store will have seen a connection's end: before it sees the next one."""
        return wire.up[-1][0] if wire is not None and wire.up else 0

    def retry_delay(self) -> int:
        return self._rng.choice((1, 5, 50)) * MS

    def connect(self) -> Wire | None:
        if self.store is None:
            return None
        wire = Wire(self, self._next)
        self.wires[wire.number] = wire
        self._next += 1
        return wire

    def send(self, number: int, message: framing.Message, fd: int | None) -> None:
        """The store's way out."""
        wire = self.wires.get(number)
        if wire is not None and wire.open:
            wire.down.append((self.due(wire.down), self.carry(message, self._to_engine)))
            if fd is not None:
                wire.fds.append(self.fds[fd])

    def pump(self) -> None:
        """One turn of the store's loop: messages or time wake it, or sometimes a lower tier."""
        store, now, told = self.store, self.now, self.now - self._ticked_ns >= MS
        if store is None or now < self.frozen_until:
            return
        for wire in list(self.wires.values()):
            up = wire.up
            while up and up[0][0] <= now:
                told = True
                message = up.popleft()[1]
                if message is None:
                    del self.wires[wire.number]
                    store.on_closed(wire.number, now)
                else:
                    store.on_message(wire.number, message, now)
        if told or self._rng.random() < WOKEN:
            self._ticked_ns = now
            store.on_tick(now)

    def kill(self) -> None:
        """The store's process is gone."""
        self.store = None
        for wire in self.wires.values():
            wire.lost = True
        self.wires.clear()


class Joiner:
    """Connects until welcomed, as connectors.store_connection does on a thread."""

    def __init__(self, net: Net, hello: p.Hello) -> None:
        self.refused: KVStoreError | None = None
        self._net = net
        self._hello = hello
        self._wire: Wire | None = None
        self._last: Wire | None = None
        self._wanted = False
        self._retry_ns = 0

    def start(self) -> None:
        check(not self._wanted, "a second attempt while one is under way")
        self._wanted = True
        self._retry_ns = self._net.close_due(self._last)

    def take(self) -> tuple[Wire, p.Welcome] | None:
        if not self._wanted or self._net.now < self._retry_ns:
            return None
        try:
            if self._wire is None:
                self._wire = self._net.connect()
                if self._wire is not None:
                    self._wire.send(self._hello)
            message = None if self._wire is None else self._wire.pop()
        except LinkLost:
            message = p.Detach("lost")
        if isinstance(message, p.Welcome) and self._wire is not None:
            self._last, self._wire, self._wanted = self._wire, None, False
            return self._last, message
        if isinstance(message, p.Refused):
            check(message.retry, f"refused for good: {message.reason}")
        if message is not None or self._wire is None:
            self._hang_up()
            retry_ns = self._net.now + self._net.retry_delay()
            self._retry_ns = max(retry_ns, self._net.close_due(self._last))
        return None

    def close(self) -> None:
        self._wanted = False
        self._hang_up()

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._last, self._wire = self._wire, None
