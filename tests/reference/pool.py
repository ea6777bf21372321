"""Engine blocks, and which of them hold what by content hash. 0 is the null block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from kvstore.core.errors import InvariantBroken

Name = tuple[int, bytes]
"""Group, and the hash of the tokens up to the block's end."""


class BlockPool:
    """Blocks of the engine's memory, shared by all groups; freed ones keep their content's name."""

    def __init__(self, count: int, *, reuse_newest: bool) -> None:
        """count: blocks, the null block included."""
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))
        self.cached: dict[Name, int] = {}
        self.events: list[tuple[bool, bytes, int]] = []  # (stored or removed, hash, group)
        self._refs = [0] * count
        self._names: dict[int, Name] = {}
        self._reuse_newest = reuse_newest

    def take(self, count: int) -> list[int]:
        """Give out free blocks; there must be that many."""
        taken = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            self.forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        for block in filter(None, blocks):
            self.free.pop(block, None)
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take blocks back, the last ones first to be given out again."""
        for block in filter(None, reversed(list(blocks))):
            self._refs[block] -= 1
            if self._refs[block] < 0:
                raise InvariantBroken(f"engine block {block} freed twice")
            if not self._refs[block]:
                self.free[block] = None
                if self._reuse_newest:
                    self.free.move_to_end(block, last=False)

    @property
    def block_count(self) -> int:
        return len(self._refs)

    @property
    def free_count(self) -> int:
        return len(self.free)

    def next_free(self, count: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield the blocks that are given out next, up to so many, and what each holds."""
        for block in islice(self.free, count):
            yield block, self.held(block)

    def held(self, block: int) -> bytes | None:
        name = self._names.get(block)
        return None if name is None else name[1]

    def publish(self, block: int, name: Name) -> bool:
        """Let others find a block by what it holds; False if it or another is found already."""
        if not block or block in self._names or name in self.cached:
            return False
        self.cached[name] = block
        self._names[block] = name
        self.events.append((True, name[1], name[0]))
        return True

    def forget(self, block: int) -> None:
        name = self._names.pop(block, None)
        if name is not None:
            del self.cached[name]
            self.events.append((False, name[1], name[0]))

    def forget_all(self) -> None:
        for block in list(self._names):
            self.forget(block)
