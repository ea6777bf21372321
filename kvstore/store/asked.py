"""What engines ask for, fed to the curves of hit ratios by size, a little in each idle turn.

So no answer waits for it. What comes faster than it can be fed is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from kvstore.core.types import BlockKey, Chain
from kvstore.store.namespace import Namespace
from kvstore.wire.engine import Lookup

TURN_BLOCKS = 128  # fed in 0.1 ms; tried in up to 3 ms where memory has few hundred blocks
WAITING_BYTES_MAX = 2 << 20  # of hashes, and LOOKUP_BYTES for each lookup
LOOKUP_BYTES = 512
_U64 = (1 << 64) - 1


class Asked:
    """The lookups that are still to be fed."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Namespace, Lookup, int]] = deque()  # up to which block
        self._bytes = 0
        self._sampled: list[BlockKey] = []  # of the lookup that is being fed

    def note(self, namespace: Namespace, lookup: Lookup) -> None:
        """Note a lookup, which was found right; one that is made again is none."""
        blocks, size = len(lookup.hashes) // lookup.width, len(lookup.hashes) + LOOKUP_BYTES
        if lookup.again or not blocks or self._bytes + size > WAITING_BYTES_MAX:
            return
        namespace.hash_bytes = lookup.width
        self._waiting.append((namespace, lookup, blocks))
        self._bytes += size

    @property
    def waits(self) -> bool:
        """Tell whether there is more to feed."""
        return bool(self._waiting)

    def feed(self) -> None:
        """Feed some blocks, those at the end of a prompt first."""
        room = TURN_BLOCKS
        while self._waiting and room:
            namespace, lookup, end = self._waiting.popleft()
            self._bytes -= len(lookup.hashes) + LOOKUP_BYTES
            first = max(0, end - room)
            groups = len(namespace.layout.rules)
            chain = Chain(lookup.hashes, lookup.width, groups, lookup.scope)
            keys = chain.keys_at(namespace.full_first[0], range(first, end))
            namespace.curve.use(list(_hashes(keys)))
            trial = namespace.trial
            if trial is not None:
                self._sampled = trial.sampled(keys) + self._sampled
            room -= end - first
            if first:
                self._waiting.appendleft((namespace, lookup, first))
                self._bytes += len(lookup.hashes) + LOOKUP_BYTES
            elif trial is not None:
                trial.use(self._sampled, namespace.manager.now_s)
                self._sampled = []


def note_stored(namespace: Namespace, keys: Iterable[BlockKey]) -> None:
    """Note blocks that became ready; only of one group, as what is asked for."""
    at = namespace.hash_bytes
    if at and namespace.curve.uses:
        group = namespace.full_first[0].to_bytes(2, "big")
        namespace.curve.stored(_hashes(key for key in keys if key[at : at + 2] == group))


def _hashes(keys: Iterable[BlockKey]) -> Iterator[int]:
    return (hash(key) & _U64 for key in keys)
