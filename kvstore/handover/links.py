"""Connections to the peers that are asked: one for each of their addresses and our namespaces.

    dialled --something is wanted, our exporter runs: Hello--> greeted --Welcome--> welcome
                                                   +--Welcome without an agent--> starting --^

A Want waits until its link is welcome; Keep needs no Hello. A user's request may name any
address, so the number of links is limited; the link that was unused longest is closed first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.handover.side_channel import Channel
from kvstore.logs import RateLog
from kvstore.wire import peer as m
from kvstore.wire.framing import Message

log = logging.getLogger(__name__)

LINKS_MAX = 128  # each takes some descriptors
RESTING_NS = 3_000_000_000  # of a link that may make room: with a fetch one speaks each second
IDLE_NS = 300_000_000_000  # of a link that is closed; its peer forgets it later

Stage = Literal["dialled", "greeted", "starting", "welcome"]


class Link(msgspec.Struct, eq=False):
    """A connection that was made, for one namespace; used_ns: when something was last said.

    agent, metadata: of the peer's exporter, once it is welcome. waiting: until then, by job.
    """

    number: int
    address: str
    digest: str
    used_ns: int
    stage: Stage = "dialled"
    agent: str = ""
    metadata: bytes = b""
    waiting: dict[int, m.Want] = {}


class Links:
    """All such connections of a store."""

    def __init__(self, channel: Channel, hello: Callable[[str], m.Hello | None]) -> None:
        """hello(digest): what is said first for a namespace; None while our exporter starts."""
        self._channel = channel
        self._hello = hello
        self.all: dict[int, Link] = {}
        self._by_peer: dict[tuple[str, str], Link] = {}
        self._said = RateLog(log)
        self._now_ns = 0

    def tick(self, now_ns: int) -> None:
        """Note the time."""
        self._now_ns = now_ns
        self._said.tick()

    def connect(self, address: str, digest: str) -> int | None:
        """Return the number of a peer's connection, old or new; None: it cannot be asked."""
        link = self._by_peer.get((address, digest))
        if link is None:
            why = self._channel.refusal(address)
            if not why and not self._has_room():
                why = f"{address[:100]!r} is one more than {LINKS_MAX} peers that are in use"
            if why:
                self._channel.counts["undialled"] += 1
                self._said.warn("addresses that are not dialled", "%s", why)
                return None
            number = self._channel.connect(address)
            link = Link(number, address, digest, self._now_ns)
            self._by_peer[address, digest] = self.all[number] = link
        link.used_ns = self._now_ns
        return link.number

    def _has_room(self) -> bool:
        """Tell whether one more peer can be asked; the one unused longest makes room.

        None that was used a moment ago does: what names thousands of peers at once dials a few.
        """
        if len(self.all) >= LINKS_MAX:
            oldest = min(self.all.values(), key=lambda link: link.used_ns)
            if self._now_ns - oldest.used_ns >= RESTING_NS:
                self._channel.drop(oldest.number)
        return len(self.all) < LINKS_MAX

    def drop_idle(self) -> None:
        """Close what has not been used for long."""
        for link in [*self.all.values()]:
            if self._now_ns - link.used_ns >= IDLE_NS:
                self._channel.drop(link.number)

    def drop(self, digest: str | None = None) -> None:
        """Close those of a namespace, or all."""
        for link in [*self.all.values()]:
            if digest in {None, link.digest}:
                self._channel.drop(link.number)

    def serves(self, digest: str) -> bool:
        """Tell whether a peer can be asked for blocks of a namespace now."""
        return any(link.digest == digest for link in self.all.values())

    def tell(self, address: str, digest: str, message: Message) -> bool:
        """Say what needs no Hello; False if the peer cannot be asked."""
        number = self.connect(address, digest)
        if number is not None:
            self._channel.send(number, message)
        return number is not None

    def say(self, number: int, message: m.Want | m.Land | m.Settle) -> None:
        """Say what needs a Hello, once the peer is welcome."""
        link = self.all.get(number)
        if link is None:
            return
        link.used_ns = self._now_ns
        if link.stage == "welcome":
            self._channel.send(number, message)
        elif isinstance(message, m.Want):
            link.waiting[message.job] = message
            self.greet(link)
        elif isinstance(message, m.Settle) and not message.lease_ms:
            link.waiting.pop(message.job, None)  # what it asked for was never sent

    def reached_at(self, number: int) -> tuple[str, bytes]:
        """Name the exporter at the other end, and how to reach it; none if it is gone."""
        link = self.all.get(number)
        return ("", b"") if link is None else (link.agent, link.metadata)

    def address_of(self, number: int) -> str:
        """Return the address that a connection was made to; empty if it is gone."""
        link = self.all.get(number)
        return "" if link is None else link.address

    def greet(self, link: Link) -> None:
        """Say Hello, once, if there is something to say after it, and our exporter runs."""
        hello = self._hello(link.digest) if link.waiting and link.stage == "dialled" else None
        if hello is not None:
            link.stage = "greeted"
            self._channel.send(link.number, hello)

    def welcome(self, link: Link, message: m.Welcome) -> None:
        """Say what has waited, unless the peer's exporter is still being started.

        Raises ProtocolError where no Hello was said, or this was.
        """
        if link.stage != "greeted" and not (link.stage == "starting" and message.agent):
            raise ProtocolError(f"Welcome, though this connection is {link.stage}")
        if not message.agent:
            link.stage = "starting"
            return
        link.stage, link.agent, link.metadata = "welcome", message.agent, message.metadata
        waiting, link.waiting = link.waiting, {}
        for want in waiting.values():
            self._channel.send(link.number, want)

    def forget(self, number: int) -> Link | None:
        """Return a link whose connection has ended; None: it was no link."""
        link = self.all.pop(number, None)
        if link is not None:
            del self._by_peer[link.address, link.digest]
        return link
