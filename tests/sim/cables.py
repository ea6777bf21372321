"""Side channels of a simulated fleet: connections whose frames take their time, and may be cut.

As over TCP, what is said on a connection is heard in order, or its end is. What was said on one
that is lost may still be heard after what is said on the next one, for its ends are noticed at
different times.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from tests.fuzz.site import Cable, Hear, Net
from tests.sim.store import MS, US

SLOW_MS = (0, 1, 5, 60)
NOTICED_MS = (0, 1, 50, 900)  # after a cut, by each end
SILENT_MS = 5000  # as line.py: what was not acknowledged for so long has cut the connection


class Clock:
    """The time that all of a fleet share."""

    def __init__(self) -> None:
        self.ns = 1_000 * MS


class Road:
    """One direction of a connection."""

    def __init__(self, delay: Callable[[], int], clock: Clock, hear: Hear) -> None:
        """delay(): of a frame, in nanoseconds."""
        self.ended = False  # nothing that is said from now on is heard
        self.cut_off = False  # nor is anything but the end
        self.queue: deque[tuple[int, bytes]] = deque()
        self.echoes = 0  # frames that will be heard twice
        self._delay, self._clock, self._hear = delay, clock, hear

    def send(self, frame: bytes) -> None:
        """Say something; nothing: the connection has ended here."""
        if self.ended:
            return
        self.ended = not frame
        for _ in range(2 if frame and self.echoes else 1):
            self._put(frame, self._delay())
        self.echoes -= self.echoes > 0 and bool(frame)

    def _put(self, frame: bytes, delay_ns: int) -> None:
        last_ns = self.queue[-1][0] if self.queue else 0
        self.queue.append((max(self._clock.ns + delay_ns, last_ns), frame))

    def cut(self, kept: int, noticed_ns: int) -> None:
        """Lose all but the first frames under way; that is noticed after so long."""
        if self.ended and not self.queue:
            return
        while len(self.queue) > kept:
            self.queue.pop()
        self.ended = True
        self.cut_off = not kept
        self._put(b"", noticed_ns)

    def leave(self) -> None:
        """Whoever listened is not there any more."""
        self.ended = True
        self.queue.clear()

    def deliver(self) -> int:
        """Let be heard what has come; count it."""
        heard = 0
        while self.queue and self.queue[0][0] <= self._clock.ns:
            self._hear(self.queue.popleft()[1])
            heard += 1
        return heard


class LongCable(Cable):
    """A connection from one store to another."""

    def __init__(self, net: Cables, one: str, other: str) -> None:
        self.ends = frozenset((one, other))
        self.roads: dict[str, Road] = {}  # by the end that listens
        self._net, self._one, self._other = net, one, other

    def forth(self, hear: Hear) -> Hear:
        return self._road(self._other, hear)

    def back(self, hear: Hear) -> Hear:
        return self._road(self._one, hear)

    def _road(self, end: str, hear: Hear) -> Hear:
        road = Road(self._net.delay, self._net.clock, hear)
        self.roads[end if end not in self.roads else f"{end} too"] = road
        return road.send

    @property
    def over(self) -> bool:
        return all(road.ended and not road.queue for road in self.roads.values())

    def cut(self, rng: random.Random, noticed_ms: tuple[int, ...] = NOTICED_MS) -> None:
        """Lose some of what is under way; both ends notice, each in its time."""
        for road in self.roads.values():
            kept = rng.randint(0, len(road.queue)) if noticed_ms is NOTICED_MS else 0
            road.cut(kept, rng.choice(noticed_ms) * MS)

    def leave(self, address: str, rng: random.Random) -> None:
        """The process at one end is killed: its machine tells the other end."""
        for end, road in self.roads.items():
            if end.removesuffix(" too") == address:
                road.leave()
            else:
                road.cut(rng.randint(0, len(road.queue)), MS)


class Cables(Net):
    """All connections between the stores of a fleet."""

    def __init__(self, rng: random.Random, clock: Clock) -> None:
        super().__init__(rng)
        self.clock = clock
        self.slow = False
        self.tcp = rng.random() < 0.5  # bytes travel over TCP, not shared memory
        self.all: list[LongCable] = []
        self.heard = 0
        self._apart: dict[frozenset[str], int] = {}  # two that do not reach each other, until when

    def delay(self) -> int:
        """Draw how long a frame takes."""
        if self.slow:
            return self.rng.choice(SLOW_MS) * MS
        return int(self.rng.random() * 200) * US

    def cable(self, one: str, other: str) -> Cable:
        made = LongCable(self, one, other)
        self.all.append(made)
        return made

    def part(self, one: str, other: str, for_ms: int) -> None:
        """Let nothing pass between two stores; a connection that this lasts too long for is cut."""
        ends = frozenset((one, other))
        self._apart[ends] = self.clock.ns + for_ms * MS
        if for_ms >= SILENT_MS:
            for cable in self.all:
                if cable.ends == ends:
                    cable.cut(self.rng, (SILENT_MS,))

    def are_apart(self, one: str, other: str) -> bool:
        return self._apart.get(frozenset((one, other)), 0) > self.clock.ns

    def end_faults(self) -> None:
        self.slow = False
        self._apart.clear()
        for cable in self.all:
            for road in cable.roads.values():
                road.echoes = 0

    def deliver(self) -> None:
        """Let everybody hear what has come."""
        for cable in self.all:
            apart = self._apart.get(cable.ends, 0) > self.clock.ns
            for road in cable.roads.values():
                if road.cut_off or not apart:
                    self.heard += road.deliver()
        self.all = [cable for cable in self.all if not cable.over]

    def leave(self, address: str) -> None:
        """A store's process is killed."""
        self.places.pop(address, None)
        for cable in self.all:
            if address in cable.ends:
                cable.leave(address, self.rng)
