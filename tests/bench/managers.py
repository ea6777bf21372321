"""The managers that `tests.bench index` compares: ours, and vLLM's where that is installed.

Each step of an iterator is one call of the manager, and yields what was called, so that single
calls can be timed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kvstore.core.errors import check
from kvstore.core.index import Entry
from kvstore.core.leases import Generations
from kvstore.core.manager import Manager
from kvstore.core.types import GroupRule, Slot
from tests.bench.prompts import Request


class Ours:
    """The product's manager with one full-attention group."""

    name = "kvstore"

    def __init__(self, slots: int) -> None:
        """Take all slots at once."""
        generations = Generations()
        generations.add(memoryview(bytearray(4 * slots)).cast("I"))
        self.manager = Manager([GroupRule()], generations)
        self.manager.slots.add([Slot(slot) for slot in range(slots)])
        self._pinned: list[Entry] = []

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
        self.settle()

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

    def settle(self) -> None:
        """Take what has changed, as a store's turn does."""
        self.manager.take_changes()

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

    def pin(self, wanted: Request) -> Iterator[str]:
        """Pin as copies to a lower tier do; shared blocks with the first that has them."""
        for key in wanted.keys[wanted.shared :]:
            entry = self.manager.pin(key)
            if entry is not None:
                self._pinned.append(entry)
            yield "pin"

    def unpin(self) -> Iterator[str]:
        """End the copies."""
        for entry in self._pinned:
            self.manager.unpin([entry], used=False)
            yield "unpin"
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

    def settle(self) -> None:
        """Nothing: it tells of no changes."""

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
