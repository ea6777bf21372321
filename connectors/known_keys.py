"""Keys of blocks that are in the store's memory, by its last messages.

There are many, and a set of all would stop a step for milliseconds when it grows, and again when
it is dropped. So they are in many small sets, each of which grows, and forgets, on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SETS = 64
SET_SHIFT = 58  # of a hash of 64 bits: -32..31, which are the indices of the sets
SET_KEYS_MAX = 1_600  # 200,000 in all, as each set's older keys stay until its newer ones are full


class KnownKeys:
    """Which keys are known. Old ones are forgotten: such a block is copied once more."""

    __slots__ = ("_newer", "_older")

    def __init__(self) -> None:
        """Start with none."""
        self._newer: list[set[bytes]] = [set() for _ in range(SETS)]
        self._older: list[set[bytes]] = [set() for _ in range(SETS)]

    def add(self, keys: Iterable[bytes]) -> None:
        """Note that blocks are there now."""
        newer = self._newer
        for key in keys:
            number = hash(key) >> SET_SHIFT
            known = newer[number]
            known.add(key)
            if len(known) >= SET_KEYS_MAX:
                self._older[number] = known
                newer[number] = set()

    def remove(self, keys: Iterable[bytes]) -> None:
        """Note that blocks are not there any more."""
        for key in keys:
            number = hash(key) >> SET_SHIFT
            self._newer[number].discard(key)
            self._older[number].discard(key)

    def __contains__(self, key: bytes) -> bool:
        """Return True if a key is known."""
        number = hash(key) >> SET_SHIFT
        return key in self._newer[number] or key in self._older[number]

    def none_of(self, keys: Sequence[bytes]) -> bool:
        """Return True if no key is known."""
        newer, older = self._newer, self._older
        for key in keys:
            number = hash(key) >> SET_SHIFT
            if key in newer[number] or key in older[number]:
                return False
        return True

    def all_of(self, keys: Sequence[bytes]) -> bool:
        """Return True if every key is known."""
        return all(key in self for key in keys)
