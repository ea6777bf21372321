"""Policies that `kvstore replay` compares with: ARC and S3-FIFO, over the ends of paths.

ARC: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
S3-FIFO: Yang and others, "FIFO queues are all you need for cache eviction", SOSP 2023.
Both know each block in memory and go up a path at each use: a store would pay too much for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from kvstore.core.index import Node
from kvstore.core.types import BlockKey

_SMALL_PART = 10  # of memory: a tenth is S3-FIFO's small queue
_USES_MAX = 3  # that S3-FIFO counts


class _Queue:
    """Blocks that can be evicted, in the order of their numbers."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Node]] = []
        self._numbers: dict[Node, int] = {}

    def put(self, block: Node, number: int) -> None:
        """Add a block, or give it another number; no two have the same."""
        self._numbers[block] = number
        heappush(self._heap, (number, block))

    def discard(self, block: Node) -> None:
        """Take a block out, if it is there."""
        self._numbers.pop(block, None)

    def holds(self, block: Node) -> bool:
        """Tell whether a block is there."""
        return block in self._numbers

    def first(self) -> Node | None:
        """Return the block with the lowest number."""
        heap = self._heap
        while heap and self._numbers.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][1] if heap else None


def _path(block: Node) -> Iterator[Node]:
    """Go up from a block to the first one of its path."""
    above: Node | None = block
    while above is not None:
        yield above
        above = above.parent


class _Twofold:
    """Blocks in two groups, each with a queue of those that can be evicted."""

    def __init__(self, blocks: Callable[[], int]) -> None:
        """blocks(): how many fit into memory."""
        self._blocks = blocks
        self.clear()

    def clear(self) -> None:
        """All blocks have gone."""
        self._queues = _Queue(), _Queue()
        self._numbers: dict[Node, int] = {}  # of all blocks in memory
        self._second: set[Node] = set()  # those in the second group
        self._gone: tuple[dict[BlockKey, None], dict[BlockKey, None]] = {}, {}  # oldest first
        self._chosen: Node | None = None
        self._last = 0

    def _next(self) -> int:
        self._last += 1
        return self._last

    def enter(self, block: Node, _now_s: float) -> None:
        """A block can be evicted from now on; those above it may have been stored with it."""
        for node in _path(block):
            if node in self._numbers:
                break
            self._numbers[node] = self._next()
            if self._returns(node.key):
                self._second.add(node)
        self._queues[block in self._second].put(block, self._numbers[block])

    def _returns(self, key: BlockKey) -> bool:
        """Tell whether a new block belongs to the second group."""
        raise NotImplementedError

    def leave(self, block: Node) -> None:
        """A block cannot be evicted any more, or has gone, if it was chosen."""
        group = block in self._second
        self._queues[group].discard(block)
        if block is self._chosen:
            self._chosen = None
            self._gone[group][block.key] = None
            del self._numbers[block]
            self._second.discard(block)
            self._forget()

    def _forget(self) -> None:
        """Forget blocks that have gone, as the algorithm has it."""
        raise NotImplementedError

    def _choose(self, block: Node | None) -> Node:
        if block is None:
            raise LookupError("no block has entered")
        self._chosen = block
        return block

    def _promote(self, block: Node) -> None:
        """Move a block to the second group, or to its end."""
        group = block in self._second
        held = self._queues[group].holds(block)
        self._queues[group].discard(block)
        self._second.add(block)
        self._numbers[block] = self._next()
        if held:
            self._queues[1].put(block, self._numbers[block])


class Arc(_Twofold):
    """The first group: blocks that were used once, when they were stored; the second: again."""

    def clear(self) -> None:
        """All blocks have gone."""
        super().clear()
        self._target = 0.0  # blocks that the first group is to have

    def used(self, block: Node, _now_s: float) -> None:
        """A request used a block, and so all above it, the first one last."""
        for node in _path(block):
            self._promote(node)

    def choose(self) -> Node:
        """Evict from the group that has more than the target gives it."""
        once, again = (queue.first() for queue in self._queues)
        first = self._blocks() - len(self._second)
        return self._choose(once if once and (first > self._target or not again) else again)

    def _returns(self, key: BlockKey) -> bool:
        once, again = self._gone
        if key in once:
            self._target += max(1.0, len(again) / len(once))
        elif key in again:
            self._target -= max(1.0, len(once) / len(again))
        else:
            return False
        self._target = min(max(0.0, self._target), self._blocks())
        once.pop(key, None)
        again.pop(key, None)
        return True

    def _forget(self) -> None:
        once, again = self._gone
        while len(once) > len(self._second):
            del once[next(iter(once))]
        while len(once) + len(again) > self._blocks():
            oldest = again or once
            del oldest[next(iter(oldest))]


class S3Fifo(_Twofold):
    """The first group: the small queue; the second: the main one. Both in order of arrival.

    What is used twice goes to the main queue at once: most of it is no end, and has no turn.
    """

    def clear(self) -> None:
        """All blocks have gone."""
        super().clear()
        self._uses: dict[Node, int] = {}

    def used(self, block: Node, _now_s: float) -> None:
        """A request used a block, and so all above it."""
        for node in _path(block):
            self._uses[node] = min(_USES_MAX, self._uses.get(node, 0) + 1)
            if self._uses[node] > 1 and node not in self._second:
                self._promote(node)
                self._uses[node] = 0

    def choose(self) -> Node:
        """Evict from the small queue while it has more than its part; what was used goes on."""
        while True:
            small, main = (queue.first() for queue in self._queues)
            few = len(self._numbers) - len(self._second) <= self._blocks() // _SMALL_PART
            from_main = main is not None and (few or small is None)
            block = self._choose(main if from_main else small)
            uses = self._uses.get(block, 0)
            if not from_main or not uses:
                self._uses.pop(block, None)
                return block
            self._promote(block)
            self._uses[block] = uses - 1

    def _returns(self, key: BlockKey) -> bool:
        gone = self._gone[0]
        return key in gone and gone.pop(key) is None

    def _forget(self) -> None:
        small, main = self._gone
        main.clear()
        while len(small) > self._blocks():
            del small[next(iter(small))]
