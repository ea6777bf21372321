"""Side channels on this machine, which keep all that has come to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kvstore.core.errors import ProtocolError
from kvstore.handover.cluster_key import ClusterKey
from kvstore.handover.side_channel import Channel
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness.patience import WAIT_S


class Post:
    """A channel and all that has come to it."""

    def __init__(self, key: ClusterKey | None = None) -> None:
        self.got: list[tuple[int, framing.Message]] = []
        self.lost: list[tuple[int, str]] = []
        self.channel = Channel(key, self.take, lambda number, why: self.lost.append((number, why)))

    def take(self, number: int, message: framing.Message) -> None:
        if message == m.Settle(666, 0):
            raise ProtocolError("a wrong one")
        self.got.append((number, message))


def make_posts() -> Iterator[Callable[..., Post]]:
    """Yield what makes one; they are closed in the end."""
    posts: list[Post] = []

    def make(key: ClusterKey | None = None, *, listens: bool = False) -> Post:
        posts.append(Post(key))
        if listens:
            posts[-1].channel.listen("127.0.0.1", 0)
        return posts[-1]

    yield make
    for post in posts:
        post.channel.close()


def until(done: Callable[[], object], *posts: Post) -> None:
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end
        for post in posts:
            post.channel.poll(time.monotonic_ns())
        time.sleep(0.001)
