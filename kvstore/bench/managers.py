"""The managers that `kvstore bench index` compares: ours, and vLLM's where that is installed.

Each step of an iterator is one call of the manager, so that single calls can be timed.
"""

from __future__ import annotations

import contextlib
import random
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

from kvstore.bench.report import SEED
from kvstore.errors import check
from kvstore.index import Entry
from kvstore.manager import Manager
from kvstore.types import BlockKey, Chain, GroupRule, Slot

PREFIX = 1000  # blocks of one request
WIDTH = 32  # bytes of a block's hash


class Request(msgspec.Struct, eq=False):
    """The blocks of one prompt."""

    number: int
    chain: Chain
    keys: list[BlockKey]
    native_keys: list[bytes]  # vLLM's: the group has four bytes


def request(number: int, shared: int | None = None, of: int = 0) -> Request:
    """Make up a prompt; the same numbers give the same blocks.

    shared: it begins with so many blocks of request `of`.
    """
    packed = random.Random(f"{SEED} {number}").randbytes(WIDTH * PREFIX)
    if shared is not None:
        packed = (request(of).chain.packed[: WIDTH * shared] + packed)[: WIDTH * PREFIX]
    chain = Chain(packed, WIDTH, 1)
    keys = [chain.key(0, index) for index in range(PREFIX)]
    return Request(number, chain, keys, [key[:WIDTH] + bytes(4) for key in keys])


class System(Protocol):
    """A manager of so many slots, empty at first."""

    name: str

    def store(self, wanted: Request, batch: int) -> Iterator[None]:
        """Store a request, `batch` blocks at a time, evicting as needed."""
        ...

    def lookup(self, wanted: Request) -> int:
        """Count the leading blocks that are here."""
        ...

    def load(self, wanted: Request) -> Iterator[None]:
        """Pin all blocks of a request for a load, and let them go."""
        ...

    def pin(self, wanted: Request) -> Iterator[None]:
        """Pin all blocks of a request for a transfer."""
        ...

    def unpin(self) -> Iterator[None]:
        """End all pins."""
        ...


class Ours:
    """The product's manager with one full-attention group; compares evictions with a model.

    The model: requests share no block, so the coldest goes whole before the next, its end first.
    """

    name = "kvstore"

    def __init__(self, slots: int) -> None:
        """Take all slots at once."""
        self.manager = Manager([GroupRule()], array("L", [0] * slots))
        self.manager.add_slots([Slot(slot) for slot in range(slots)])
        self._order: OrderedDict[int, Request] = OrderedDict()  # the coldest first
        self._left: dict[int, int] = {}  # blocks of it that are here
        self._pinned: list[tuple[Request, list[Entry]]] = []

    def store(self, wanted: Request, batch: int) -> Iterator[None]:
        """Grant, write and complete."""
        manager, keys = self.manager, wanted.keys
        parent: BlockKey | None = None
        for first in range(0, PREFIX, batch):
            slots = manager.prepare_store(min(batch, PREFIX - first))
            yield
            for key, slot in zip(keys[first:], slots, strict=False):
                manager.begin_store(key, parent, slot)
                yield
                parent = key
            for slot in slots:
                manager.complete_store(slot, ok=True)
                yield
        self.settle(wanted)

    def store_all(self, wanted: Request) -> None:
        """Store in one batch, without stopping after each call."""
        manager = self.manager
        slots = manager.prepare_store(PREFIX)
        parent: BlockKey | None = None
        for key, slot in zip(wanted.keys, slots, strict=True):
            manager.begin_store(key, parent, slot)
            parent = key
        for slot in slots:
            manager.complete_store(slot, ok=True)

    def settle(self, stored: Request) -> None:
        """Compare what was evicted for a request with the model."""
        for key in self.manager.take_changes().removed:
            number, oldest = next(iter(self._order.items()))
            self._left[number] -= 1
            check(key == oldest.keys[self._left[number]], "eviction was not leaf-first LRU")
            if self._left[number] == 0:
                del self._order[number], self._left[number]
        self._order[stored.number] = stored
        self._left[stored.number] = PREFIX
        check(self.lookup(stored) == PREFIX, "a request was not stored whole")

    def lookup(self, wanted: Request) -> int:
        """Look up as a store process does."""
        return self.manager.lookup(wanted.chain, PREFIX).blocks

    def load(self, wanted: Request) -> Iterator[None]:
        """Lease, and give back."""
        lease = self.manager.prepare_load(wanted.chain, PREFIX, 1, 1 << 62)
        yield
        check(lease is not None and len(lease.entries) == PREFIX, "a request was not leased whole")
        if lease is not None:
            self.manager.complete_load(lease.lease_id)
        yield
        self._order.move_to_end(wanted.number)

    def pin(self, wanted: Request) -> Iterator[None]:
        """Pin as copies to a lower tier do."""
        del self._order[wanted.number]
        entries: list[Entry] = []
        for key in wanted.keys:
            entry = self.manager.pin(key)
            if entry is not None:
                entries.append(entry)
            yield
        self._pinned.append((wanted, entries))

    def unpin(self) -> Iterator[None]:
        """End the copies."""
        for pinned, entries in self._pinned:
            for entry in entries:
                self.manager.unpin(entry)
                yield
            self._order[pinned.number] = pinned
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

    def store(self, wanted: Request, batch: int) -> Iterator[None]:
        """Prepare and complete; the request's end sets the recency of its blocks."""
        manager, context = self._manager, self._context(str(wanted.number))
        manager.on_new_request(context)
        yield
        for first in range(0, PREFIX, batch):
            plan = manager.prepare_store(wanted.native_keys[first : first + batch], context)
            yield
            check(plan is not None, f"{self.name} found no room")
            manager.complete_store(plan.keys_to_store, context)
            yield
        manager.on_request_finished(context)
        yield

    def store_all(self, wanted: Request) -> None:
        """Store in one batch."""
        for _ in self.store(wanted, PREFIX):
            pass

    def settle(self, stored: Request) -> None:
        """Nothing: its order is not checked."""

    def lookup(self, wanted: Request) -> int:
        """Ask block by block until one is missing: there is no other way."""
        manager, context, hit = self._manager, self._context("lookup"), self._hit
        for index, key in enumerate(wanted.native_keys):
            if manager.lookup(key, context) is not hit:
                return index
        return PREFIX

    def load(self, wanted: Request) -> Iterator[None]:
        """Pin, unpin, and finish the request."""
        manager, context = self._manager, self._context(f"load {wanted.number}")
        manager.on_new_request(context)
        yield
        manager.prepare_load(wanted.native_keys, context)
        yield
        manager.complete_load(wanted.native_keys, context)
        yield
        manager.on_request_finished(context)
        yield

    def pin(self, wanted: Request) -> Iterator[None]:
        """Pin for a load that goes on."""
        self._manager.prepare_load(wanted.native_keys, self._context("pin"))
        self._pinned.append(wanted)
        yield

    def unpin(self) -> Iterator[None]:
        """End those loads."""
        for pinned in self._pinned:
            self._manager.complete_load(pinned.native_keys, self._context("pin"))
            yield
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
