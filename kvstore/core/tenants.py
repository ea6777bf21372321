"""Tenants that share a tier: what each has there, may have, and keeps; and whose block goes next.

A tenant's keys end with its tag (tag_of), so that no tenant finds another one's blocks.

    quota: what a tenant has beyond it goes at once, its own coldest blocks first
    floor: what a tenant has up to it does not go to make room for others

Each tenant's blocks have an order of their own, and all others share one. Marks are put into all
orders from time to time: the mark that was last taken from an order's cold end tells how old the
blocks at that end are. So of several orders the coldest end is found without a time in each block.

A tenant that comes when there are blocks may have some of them: adopt() looks through them, table
by table of the index. Until a table was looked through no block of it is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from kvstore.core.eviction import LeafLRU
from kvstore.core.index import TABLE_SHIFT, TABLES, Node, State
from kvstore.core.segmented import SegmentedLRU
from kvstore.core.types import TAG_BYTES, BlockKey

ADOPT_BLOCKS = 4096  # that one call looks at
MARKS = 64  # in the time in which all blocks are used once


_READY = State.READY


class Share(msgspec.Struct, eq=False):
    """What a tenant has in a tier, of all models. quota_bytes: None: no limit."""

    used_bytes: int = 0
    quota_bytes: int | None = None
    floor_bytes: int = 0

    @property
    def is_over(self) -> bool:
        """Tell whether it has more than it may have."""
        return self.quota_bytes is not None and self.used_bytes > self.quota_bytes


class _Order(LeafLRU):
    """Blocks of one tenant in one namespace. looked: tables that were looked through."""

    def __init__(self, share: Share, looked: int) -> None:
        super().__init__()
        self.share = share
        self.blocks = 0
        self.looked = looked

    def counts(self, key: BlockKey) -> bool:
        """Tell whether a block is counted when it comes and goes."""
        return (hash(key) >> TABLE_SHIFT) % TABLES < self.looked


def with_tenants(
    order: LeafLRU | TenantOrder, shares: Mapping[bytes, Share], blocks: int, block_bytes: int
) -> TenantOrder:
    """Return an order in which tenants, by tag, have their own. blocks: that are in the index."""
    if not isinstance(order, TenantOrder):
        order = TenantOrder(order, blocks, block_bytes)
    order.add(shares, empty=not blocks)
    return order


class TenantOrder:
    """What a LeafLRU is, for blocks of several tenants."""

    def __init__(self, rest: LeafLRU, blocks: int, block_bytes: int) -> None:
        """rest: of all there were until now. blocks: how many these are."""
        self._rest = rest
        self._block_bytes = block_bytes
        self._orders: dict[bytes, _Order] = {}  # by tag
        self._touched = self._epoch = 0
        self._blocks = blocks
        self.exceeded = False  # a tenant may be beyond its quota

    def add(self, shares: Mapping[bytes, Share], *, empty: bool) -> None:
        """Give tenants, by tag, their own orders. empty: the index holds no block yet."""
        for tag, share in shares.items():
            if tag not in self._orders:
                self._orders[tag] = _Order(share, TABLES if empty else 0)

    def tend(
        self,
        table: Callable[[int], Sequence[Node]],
        evict: Callable[[Iterator[Node]], object],
    ) -> bool:
        """Have blocks evicted of those that have more than they may; True: call again soon.

        table(number): the blocks in a table of the index. evict(victims): takes some of them out.
        """
        self._adopt(table)
        for order in list(self._orders.values()):
            if order.share.is_over and order.blocks:
                evict(self._victims_of(order))
        self.exceeded = any(each.share.is_over and each.blocks for each in self._orders.values())
        return self.exceeded or any(order.looked < TABLES for order in self._orders.values())

    def _adopt(self, table: Callable[[int], Sequence[Node]]) -> None:
        """Count some of the blocks that were here before their tenants were known."""
        left = ADOPT_BLOCKS
        for tag, order in self._orders.items():
            while left > 0 and order.looked < TABLES:
                nodes = table(order.looked)
                order.looked += 1
                for node in nodes:
                    if node.key.endswith(tag) and node.state is _READY:
                        self._count(order, 1)
                        listed = node.next is not None
                        self._rest.give(node)
                        if listed:
                            order.freed(node)
                left -= len(nodes) + 1

    def knows(self, tags: Collection[bytes]) -> bool:
        """Tell whether all of these have orders."""
        return len(self._orders) >= len(tags) and all(tag in self._orders for tag in tags)

    def _of(self, node: Node) -> LeafLRU:
        found = self._orders.get(node.key[-TAG_BYTES:])
        if found is None:
            return self._rest
        if isinstance(self._rest, SegmentedLRU) and node.kept:  # it was used before adopt()
            self._rest.give(node)
        return found

    # Blocks that can be read, and those that cannot any more

    def entered(self, key: BlockKey) -> None:
        """Count a block."""
        self._blocks += 1
        found = self._orders.get(key[-TAG_BYTES:])
        if found is not None and found.counts(key):
            self._count(found, 1)

    def left(self, key: BlockKey) -> None:
        """Count a block no more."""
        self._blocks -= 1
        found = self._orders.get(key[-TAG_BYTES:])
        if found is not None and found.counts(key):
            self._count(found, -1)

    def _count(self, order: _Order, by: int) -> None:
        order.blocks += by
        order.share.used_bytes += by * self._block_bytes
        self.exceeded = self.exceeded or order.share.is_over

    # As a LeafLRU

    def stored(self, entry: Node, now_s: float) -> None:
        """A block can be read now."""
        self._pass()
        self._of(entry).stored(entry, now_s)

    def used(self, entry: Node, now_s: float) -> None:
        """A request used a block."""
        self._pass()
        self._of(entry).used(entry, now_s)

    def keep(self, entry: Node) -> None:
        """A request used a block; others may have used what hangs below it since."""
        self._of(entry).keep(entry)

    def unpinned(self, entry: Node) -> None:
        """A block's last pin is gone."""
        self._of(entry).unpinned(entry)

    def _pass(self) -> None:
        self._touched += 1
        if self._touched * MARKS >= self._blocks:
            self._touched, self._epoch = 0, self._epoch + 1
            for order in (self._rest, *self._orders.values()):
                order.mark(self._epoch)

    def covered(self, entry: Node | None) -> None:
        """A block has a child from now on."""
        if entry is not None:
            self._of(entry).covered(entry)

    def freed(self, entry: Node | None) -> None:
        """A block lost its last child or pin."""
        if entry is not None:
            self._of(entry).freed(entry)

    def remove(self, entry: Node) -> None:
        """Leave the order: the block is pinned, or has left."""
        self._of(entry).remove(entry)

    def inherit(self, entry: Node) -> None:
        """Leave the order for another reason than eviction."""
        self._of(entry).inherit(entry)

    def clear(self) -> None:
        """Forget all blocks at once."""
        self._rest.clear()
        self._blocks = 0
        for order in self._orders.values():
            order.clear()
            order.share.used_bytes -= order.blocks * self._block_bytes
            order.blocks, order.looked = 0, TABLES

    def victims(self, *, wanted: bool = False) -> Iterator[Node]:
        """Take the coldest blocks out, of whom has more than its floor; as LeafLRU does.

        The caller counts each as left before it asks for the next.
        """
        done: set[int] = set()
        while True:
            orders = [o for o in (self._rest, *self._orders.values()) if id(o) not in done]
            orders = [order for order in orders if self._may_lose(order)]
            if not orders:
                return
            coldest = min(orders, key=lambda order: order.age())
            others = min((o.age() for o in orders if o is not coldest), default=None)
            last: Node | None = None
            for last in coldest.victims(wanted=wanted):
                yield last
                if not self._may_lose(coldest):
                    break
                if others is not None and coldest.age() > others:
                    break
            else:
                done.add(id(coldest))
            if last is not None:
                coldest.freed(last.parent)

    @staticmethod
    def _victims_of(order: _Order) -> Iterator[Node]:
        """Take the coldest blocks of a tenant out, until it is within its quota."""
        for victim in order.victims():
            yield victim
            if not order.share.is_over:
                return

    def _may_lose(self, order: LeafLRU) -> bool:
        if not isinstance(order, _Order):
            return True
        return order.share.used_bytes - self._block_bytes >= order.share.floor_bytes
