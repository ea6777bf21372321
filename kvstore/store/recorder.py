"""What engines look up, for who asks for it again and again: a recording.

It begins with the first question, and ends when none comes for a while. Nothing is written here:
who asks keeps it. Between two questions so much is kept; what is beyond is counted.
"""

from __future__ import annotations

import msgspec

from kvstore.core.errors import ConfigError
from kvstore.store.namespace import Namespace
from kvstore.wire.engine import Lookup

KEPT_BYTES = 2 << 20  # of hashes, between two questions: encoded in some milliseconds
IDLE_NS = 10_000_000_000


class Recorded(msgspec.Struct, frozen=True):
    """A lookup: when, in ms of the store's clock, and by which names.

    namespace, scope: who else has the same blocks by the same hashes. block_tokens: "" where the
    engine has not told.
    """

    ms: int
    namespace: str
    scope: bytes
    hashes: bytes
    width: int
    block_tokens: str


class Recording(msgspec.Struct, frozen=True):
    """What has come since the last question; dropped: lookups there was no room for."""

    lookups: list[Recorded]
    dropped: int


class Recorder:
    """At most one recording."""

    def __init__(self) -> None:
        self._number = 0
        self._until_ns = 0
        self._begin()

    def _begin(self) -> None:
        self._lookups: list[Recorded] = []
        self._bytes = self._dropped = 0

    def note(self, namespace: Namespace, lookup: Lookup, now_ns: int) -> None:
        """Note a lookup, if a recording goes on. One that is made again is none."""
        if now_ns >= self._until_ns or lookup.again:
            return
        if self._bytes + len(lookup.hashes) > KEPT_BYTES:
            self._dropped += 1
            return
        self._bytes += len(lookup.hashes)
        tokens = namespace.layout.traits.get("block tokens", "")
        digest, ms = namespace.layout.digest, now_ns // 1_000_000
        found = Recorded(ms, digest, lookup.scope, lookup.hashes, lookup.width, tokens)
        self._lookups.append(found)

    def take(self, number: int, now_ns: int, *, ends: bool) -> Recording:
        """Return what has come, and go on. Raises ConfigError during a recording of another's."""
        if number != self._number and now_ns < self._until_ns:
            raise ConfigError("expected no recording, found one that goes on")
        if number != self._number or now_ns >= self._until_ns:
            self._begin()
        self._number, self._until_ns = number, 0 if ends else now_ns + IDLE_NS
        found = Recording(self._lookups, self._dropped)
        self._begin()
        return found
