"""The managers that `tests.bench index` compares: ours, and vLLM's where that is installed.

Each step of an iterator is one call of the manager, and yields what was called, so that single
calls can be timed.
"""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kvstore.core.errors import check
from kvstore.core.index import Entry
from kvstore.core.manager import Manager
from kvstore.core.types import GroupRule, Slot
from tests.bench.prompts import Request


class Stored(msgspec.Struct, eq=False):
    """A prompt in the model of the order: blocks of it that are here, and those that stay longer.

    What it shares with a younger prompt leaves with that one.
    """

    request: Request
    here: int
    kept: int = 0


class Ours:
    """The product's manager with one full-attention group; compares evictions with a model.

    The model: the coldest prompt goes whole before the next, its end first; its blocks that others
    share go with the last of these.
    """

    name = "kvstore"

    def __init__(self, slots: int) -> None:
        """Take all slots at once."""
        self.manager = Manager([GroupRule()], array("L", [0] * slots))
        self.manager.slots.add([Slot(slot) for slot in range(slots)])
        self._order: OrderedDict[int, Stored] = OrderedDict()  # the coldest first
        self._pinned: list[tuple[Stored, list[Entry]]] = []

    def store(self, wanted: Request, batch: int) -> Iterator[str]:
        """Look up, then grant, write and complete what is not here."""
        manager, keys = self.manager, wanted.keys
        check(self.lookup(wanted) == wanted.shared, "other blocks are here than were stored")
        yield "lookup"
        parent = keys[wanted.shared - 1] if wanted.shared else None
        for first in range(wanted.shared, len(keys), batch):
            slots = manager.prepare_store(min(batch, len(keys) - first))
            yield "prepare_store"
            for key, slot in zip(keys[first:], slots, strict=False):
                manager.begin_store(key, parent, slot)
                yield "begin_store"
                parent = key
            for slot in slots:
                manager.complete_store(slot, ok=True)
                yield "complete_store"
        self.settle(wanted)

    def store_all(self, wanted: Request) -> None:
        """Store in one batch, without stopping after each call."""
        manager, own = self.manager, wanted.keys[wanted.shared :]
        slots = manager.prepare_store(len(own))
        parent = wanted.keys[wanted.shared - 1] if wanted.shared else None
        for key, slot in zip(own, slots, strict=True):
            manager.begin_store(key, parent, slot)
            parent = key
        for slot in slots:
            manager.complete_store(slot, ok=True)

    def settle(self, stored: Request) -> None:
        """Compare what was evicted for a request with the model."""
        for key in self.manager.take_changes().removed:
            number, oldest = next(iter(self._order.items()))
            oldest.here -= 1
            check(key == oldest.request.keys[oldest.here], "eviction was not leaf-first LRU")
            if oldest.here == oldest.kept:
                del self._order[number]
        self._order[stored.number] = Stored(stored, len(stored.keys))
        if stored.of is not None:
            self._order[stored.of].kept = stored.shared
        check(self.lookup(stored) == len(stored.keys), "a request was not stored whole")

    def lookup(self, wanted: Request) -> int:
        """Look up as a store process does."""
        return self.manager.lookup(wanted.chain, wanted.chain.blocks).blocks

    def load(self, wanted: Request) -> Iterator[str]:
        """Lease, and give back."""
        blocks = wanted.chain.blocks
        lease = self.manager.prepare_load(wanted.chain, blocks, 1, 1 << 62)
        yield "prepare_load"
        check(lease is not None and len(lease.entries) == blocks, "a request was not leased whole")
        if lease is not None:
            self.manager.complete_load(lease.lease_id)
        yield "complete_load"
        self._order.move_to_end(wanted.number)

    def pin(self, wanted: Request) -> Iterator[str]:
        """Pin as copies to a lower tier do; shared blocks with the first that has them."""
        entries: list[Entry] = []
        for key in wanted.keys[wanted.shared :]:
            entry = self.manager.pin(key)
            if entry is not None:
                entries.append(entry)
            yield "pin"
        self._pinned.append((self._order.pop(wanted.number), entries))

    def unpin(self) -> Iterator[str]:
        """End the copies."""
        for pinned, entries in self._pinned:
            for entry in entries:
                self.manager.unpin(entry)
                yield "unpin"
            self._order[pinned.request.number] = pinned
        self._pinned.clear()


class Native:
    """vLLM's CPU offloading manager with one of its policies, called as its scheduler does."""

    def __init__(self, name: str, manager: Any, context: Callable[[str], Any], hit: Any) -> None:
        """manager: a CPUOffloadingManager; context: makes a ReqContext; hit: LookupResult.HIT."""
        self.name = name
        self._manager = manager
        self._context = context
        self._hit = hit
        self._pinned: list[Request] = []

    def store(self, wanted: Request, batch: int) -> Iterator[str]:
        """Prepare and complete; the request's end sets the recency of its blocks."""
        manager, context = self._manager, self._context(str(wanted.number))
        manager.on_new_request(context)
        yield "on_new_request"
        for first in range(0, len(wanted.native_keys), batch):
            plan = manager.prepare_store(wanted.native_keys[first : first + batch], context)
            yield "prepare_store"
            check(plan is not None, f"{self.name} found no room")
            manager.complete_store(plan.keys_to_store, context)
            yield "complete_store"
        manager.on_request_finished(context)
        yield "on_request_finished"

    def store_all(self, wanted: Request) -> None:
        """Store in one batch."""
        for _ in self.store(wanted, len(wanted.native_keys)):
            pass

    def settle(self, stored: Request) -> None:
        """Nothing: its order is not checked."""

    def lookup(self, wanted: Request) -> int:
        """Ask block by block until one is missing: there is no other way."""
        manager, context, hit = self._manager, self._context("lookup"), self._hit
        for index, key in enumerate(wanted.native_keys):
            if manager.lookup(key, context) is not hit:
                return index
        return len(wanted.native_keys)

    def load(self, wanted: Request) -> Iterator[str]:
        """Pin, unpin, and finish the request."""
        manager, context = self._manager, self._context(f"load {wanted.number}")
        manager.on_new_request(context)
        yield "on_new_request"
        manager.prepare_load(wanted.native_keys, context)
        yield "prepare_load"
        manager.complete_load(wanted.native_keys, context)
        yield "complete_load"
        manager.on_request_finished(context)
        yield "on_request_finished"

    def pin(self, wanted: Request) -> Iterator[str]:
        """Pin for a load that goes on."""
        self._manager.prepare_load(wanted.native_keys, self._context("pin"))
        self._pinned.append(wanted)
        yield "prepare_load"

    def unpin(self) -> Iterator[str]:
        """End those loads."""
        for pinned in self._pinned:
            self._manager.complete_load(pinned.native_keys, self._context("pin"))
            yield "complete_load"
        self._pinned.clear()


def natives() -> tuple[list[tuple[str, Callable[[int], Native]]], str]:
    """Return vLLM's managers, each as its name and what makes one of so many slots.

    Also returns what is told of vLLM: its version, or that there is none.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it logs when it is imported
            from vllm import __version__
            from vllm.v1.kv_offload.base import LookupResult, ReqContext
            from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    except ImportError as exc:
        return [], f"not installed ({exc})"

    def maker(policy: str) -> Callable[[int], Native]:
        def make(slots: int) -> Native:
            manager = CPUOffloadingManager(slots, cache_policy=policy)
            return Native(policy.upper(), manager, ReqContext, LookupResult.HIT)

        return make

    return [(p.upper(), maker(p)) for p in ("lru", "arc")], __version__
