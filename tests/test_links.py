"""Connections to peers that are asked, over real TCP: what is said when, and in which order."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvstore.handover.links import Link, Links
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.fuzz.site import End
from tests.harness.fakes import hashes
from tests.harness.posts import Post, make_posts, until
from tests.test_peer_limits import Place, wanted

HELLO = m.Hello(m.VERSION, "n", {})
WELCOME, STARTING = m.Welcome("agent", b"metadata"), m.Welcome()

made = pytest.fixture(make_posts)


class Asking:
    """A peer, and the links of a store that asks it; its exporter may not run yet."""

    def __init__(self, made: Callable[..., Post]) -> None:
        self.peer, self.post = made(listens=True), made()
        self.up = True
        self.links = Links(self.post.channel, lambda _: HELLO if self.up else None)
        self.address = self.peer.channel.address
        number = self.links.connect(self.address, "n")
        assert number is not None
        self.link: Link = self.links.all[number]

    def say(self, message: m.Want | m.Settle) -> None:
        self.links.say(self.link.number, message)

    def heard(self, count: int) -> list[framing.Message]:
        until(lambda: len(self.peer.got) >= count, self.peer, self.post)
        return [message for _, message in self.peer.got]


def test_what_is_wanted_waits_for_welcome_and_what_is_said_of_requests_does_not(
    made: Callable[..., Post],
) -> None:
    asking, done = Asking(made), m.Keep("n", "r", 0)
    asking.up = False
    for job in (1, 2):
        asking.say(wanted(hashes(1), job))
    assert asking.links.tell(asking.address, "n", done)
    assert asking.heard(1) == [done]
    asking.up = True
    asking.links.greet(asking.link)
    asking.links.greet(asking.link)
    asking.say(m.Settle(2, 30_000))  # a heartbeat of what was not sent says nothing
    asking.say(m.Settle(1, 0))
    assert asking.heard(2) == [done, HELLO]
    asking.links.welcome(asking.link, STARTING)
    asking.links.welcome(asking.link, WELCOME)
    asking.say(m.Settle(2, 30_000))
    assert asking.heard(4)[2:] == [wanted(hashes(1), 2), m.Settle(2, 30_000)]
    assert asking.links.reached_at(asking.link.number) == ("agent", b"metadata")


@pytest.mark.parametrize(
    "said",
    [
        (WELCOME,),
        (STARTING,),
        (HELLO, STARTING, STARTING),
        (HELLO, WELCOME, STARTING),
        (HELLO, WELCOME, WELCOME),
    ],
)
def test_B2_what_a_peer_says_of_itself_in_another_order_is_refused(
    said: tuple[framing.Message, ...],
) -> None:
    """A Welcome names an agent; each without one makes a fetch wait ten seconds longer."""
    place, ends = Place(), list[End]()

    def accept(end: End) -> tuple[int, Callable[[bytes], None]]:
        ends.append(end)
        return 0, lambda _: None

    place.net.places["evil:1"] = accept
    if said[0] == HELLO:
        place.ask("evil:1")
    else:
        place.decode.peers.links.connect("evil:1", place.hello().namespace)
    place.turns(1)
    for message in said[said[0] == HELLO :]:
        assert not place.decode.wire.counts["malformed"]
        ends[0].hear(msgspec.msgpack.encode(message))
        place.turns(1)
    assert place.decode.wire.counts["malformed"] == 1


def test_a_store_that_reaches_itself_under_another_address_asks_itself_nothing() -> None:
    """Its exporter would be a peer of its own name."""
    place = Place()
    place.net.places["alias:1"] = place.decode.wire.accept
    place.ask("alias:1")
    place.turns(3)
    assert not place.decode.peers.links.all
    assert not any(inlet.open for inlet in place.decode.peers._inlets.values())
    assert not place.decode.mover.known
