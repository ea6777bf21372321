"""Where blocks from peers come into a namespace: its consumer, and what that has done elsewhere."""

from __future__ import annotations

from typing import Protocol

from kvstore.handover.consumer import Consumer
from kvstore.handover.direct_fetches import Direct
from kvstore.handover.fetches import Check, EngineRead, Fetched, Read, Waits
from kvstore.handover.fetches import Tag as Part
from kvstore.handover.jobs import Source
from kvstore.handover.moves import Mover
from kvstore.wire.framing import Message


class Others(Protocol):
    """The connections to peers."""

    fetched: Fetched

    def say(self, number: int, message: Message) -> None:
        """Send on a connection that was made, once it is welcome."""
        ...

    def reached_at(self, number: int) -> tuple[str, bytes]:
        """Name the exporter at the other end, and how to reach it; none if it is gone."""
        ...


class Inlet:
    """The work of one namespace's consumer, and what it sends."""

    def __init__(
        self, peers: Others, namespace: Source, mover: Mover, direct: Direct, waits: Waits
    ) -> None:
        self._peers = peers
        self._direct = direct
        self._namespace = namespace
        self._mover = mover
        layout = namespace.layout
        self._landing = mover.landing(layout.digest, layout.slot_bytes)
        how = len(layout.rules), peers.fetched, waits
        self.consumer = Consumer(self, self._landing, peers.say, *how)

    @property
    def quarantined_bytes(self) -> int:
        """Landing memory that something may still write though nobody waits for it."""
        return self.consumer.quarantined * self._namespace.layout.slot_bytes

    @property
    def landing_bytes(self) -> int:
        """Landing memory that is not free, quarantined or not."""
        return self._landing.used * self._namespace.layout.slot_bytes

    @property
    def open(self) -> bool:
        """Tell whether something is fetched, or landing memory is not free."""
        return bool(self.consumer.open or self.consumer.quarantined or self._landing.used)

    @property
    def crowded(self) -> bool:
        """Tell whether more than half of the landing memory is in quarantine."""
        return 2 * self.consumer.quarantined > self._landing.count

    def read(self, tags: list[Part], peer: int, read: Read) -> None:
        """Read a peer's slots; a peer that is gone by now has told the consumer so."""
        agent, _ = self._peers.reached_at(peer)
        self._mover.read(tags, agent, self._namespace.layout.digest, read)

    def pass_on(self, number: int, peer: int, read: Read, positions: list[int]) -> None:
        """Have workers read a peer's slots."""
        digest, agent = self._namespace.layout.digest, self._peers.reached_at(peer)
        self._direct.tell(digest, number, agent, read.region, positions, read.numbers)

    def pass_on_engine(self, number: int, read: EngineRead) -> None:
        """Have workers read the memory of a peer's engine."""
        self._direct.tell_engine(self._namespace.layout.digest, number, read)

    def push(self, number: int) -> None:
        """Have workers say where a peer may write."""
        self._direct.push(self._namespace.layout.digest, number)

    def passed(self, number: int, position: int, *, ok: bool, written: bool) -> None:
        """A block that workers wait for is good, or will not be."""
        digest = self._namespace.layout.digest
        self._direct.passed(digest, number, position, ok=ok, written=written)

    def abandon(self, tag: Part) -> None:
        """Nobody waits for a read any more."""
        self._mover.abandon(self._namespace.layout.digest, tag)

    def check(self, tags: list[Part], blocks: list[Check]) -> None:
        """Check and copy landed blocks."""
        work = [
            (block, self._landing.view(block.landing), self._namespace.view(block.slot))
            for block in blocks
        ]
        self._mover.check(tags, self._namespace.layout.digest, work)
