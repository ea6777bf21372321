"""Pins: prefixes that stay in memory until they are unpinned.

A pin has a name and the blocks of a prompt. What memory has of them is leased without an end, what
only a lower tier has is read first, and what is stored later is leased then: an incomplete pin is
looked at again, less and less often. Pins have a cap in bytes; within it a tenant's have its quota,
and half of a namespace's slots stay for other blocks. Pins end with the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import msgspec

from kvstore.core import limits
from kvstore.core.errors import ConfigError, ProtocolError
from kvstore.core.index import Entry, State
from kvstore.core.leases import NEVER_NS, Lease
from kvstore.core.manager import Manager
from kvstore.core.types import TAG_BYTES, BlockKey, Chain
from kvstore.logs import RateLog
from kvstore.metrics import MEMORY
from kvstore.settings import read_tenant
from kvstore.store.lookups import Lookups
from kvstore.store.namespace import Namespace
from kvstore.store.namespaces import Namespaces
from kvstore.store.status import told
from kvstore.store.tenants import Tenants
from kvstore.wire.engine import Prefix

_LOOK_NS = 100_000_000
_LOOK_NS_MAX = 10_000_000_000
_LOOKED_MAX = 4096  # blocks in one turn, and those of one pin more
_NAMED_MAX = 10  # pins that an error names
_OWN_PART = 2  # of a namespace's slots: half may be pinned

Name = tuple[str, bytes, str]  # namespace, scope, name


class Pinned(msgspec.Struct, frozen=True):
    """A pin, for people and for the file that makes it again.

    blocks: of the leading `asked` ones of a prompt in memory now, of the group that has most.
    """

    name: str
    namespace: str
    model: str
    tenant: str
    blocks: int
    asked: int
    bytes: int
    hashes: str  # in hexadecimal digits, like scope
    width: int
    scope: str

    @property
    def prefix(self) -> Prefix:
        """Return what pins it again. Raises ConfigError."""
        try:
            hashes, scope = bytes.fromhex(self.hashes), bytes.fromhex(self.scope)
        except ValueError:
            raise ConfigError(f"pin {self.name!r}: expected hexadecimal digits") from None
        return Prefix(self.name, hashes, self.width, scope)


class _Pin(msgspec.Struct, eq=False):
    """held: its lease, and whose that is. look_ns: when it is looked at next; None: it is whole.

    logged: how many blocks it had when the log said that it had no more room.
    """

    prefix: Prefix
    digest: str
    asked_ns: int
    look_ns: int | None
    held: tuple[Manager, Lease] | None = None
    logged: int | None = None

    @property
    def asked(self) -> int:
        return len(self.prefix.hashes) // self.prefix.width

    @property
    def tag(self) -> bytes:
        return self.prefix.scope[-TAG_BYTES:]

    @property
    def entries(self) -> Sequence[Entry]:
        return () if self.held is None else self.held[1].entries

    def release(self) -> None:
        """Let go of what it has."""
        if self.held is not None:
            manager, lease = self.held
            manager.complete_load(lease.lease_id)
            self.held = None


class Pins:
    """All pins of a store."""

    def __init__(
        self, namespaces: Namespaces, lookups: Lookups, tenants: Tenants, said: RateLog
    ) -> None:
        """Start without any; use() sets their cap."""
        self._namespaces = namespaces
        self._lookups = lookups
        self._tenants = tenants
        self._said = said
        self._pins: dict[Name, _Pin] = {}
        self._keys: Counter[BlockKey] = Counter()  # of blocks that are pinned, and how often
        self._bytes_max = 0
        self.due_ns = NEVER_NS  # of the first that is looked at next

    def use(self, bytes_max: int) -> None:
        """Set another cap; the next turn unpins what is beyond it."""
        self._bytes_max = bytes_max
        self.look_again()

    def look_again(self) -> None:
        """A limit has changed, or blocks have left: look at all pins at the next turn."""
        for pin in self._pins.values():
            pin.look_ns = self.due_ns = 0

    def hold(self, digest: str, prefix: Prefix, now_ns: int) -> None:
        """Pin a prefix, instead of what has its name; without hashes: let that go.

        Raises ProtocolError for a wrong name or hashes, ConfigError when there are too many pins.
        """
        blocks = _blocks_of(prefix)
        try:
            read_tenant(prefix.name, {})
        except ConfigError as exc:
            raise ProtocolError(f"name of a pin: {exc}") from None
        named = digest, prefix.scope, prefix.name
        before = self._pins.get(named)
        if not blocks:
            if before is not None:
                self._end(named)
            return
        if before is None and len(self._pins) >= limits.PINS_MAX:
            raise ConfigError(f"pin {prefix.name!r}: there are {limits.PINS_MAX} already")
        others = sum(len(p.prefix.hashes) for p in self._pins.values() if p is not before)
        if others + len(prefix.hashes) > limits.PINS_BYTES_MAX:
            most = f"expected up to {limits.PINS_BYTES_MAX} bytes of hashes of all pins"
            raise ConfigError(f"pin {prefix.name!r}: {most}, found more")
        if before is None:
            self._pins[named] = _Pin(prefix, digest, now_ns, now_ns)
        else:  # what it has stays until there is a lease on what it is to have
            before.prefix, before.asked_ns, before.look_ns = prefix, now_ns, now_ns
        self.due_ns = min(self.due_ns, now_ns)

    def warm(self, digest: str, prefix: Prefix, now_ns: int, lease_ns: int) -> int:
        """Bring what lower tiers have of a prefix into memory; count the blocks, these included.

        They are leased for lease_ns, as a lookup's. Raises ProtocolError, ConfigError.
        """
        blocks, namespace = _blocks_of(prefix), self._namespaces.get(digest)
        if namespace is None:
            raise ConfigError(f"no engine of namespace {digest[:12]!r} has been here yet")
        room = namespace.manager.slots.total // _OWN_PART // len(namespace.layout.rules)
        end_ns = now_ns + lease_ns
        return _blocks_in(self._lease(namespace, prefix, min(blocks, room), now_ns, end_ns))

    def let_go(self, name: str) -> None:
        """End the pins of this name, in all namespaces. Raises ConfigError if there is none."""
        found = [named for named in self._pins if named[2] == name]
        if not found:
            names = sorted({named[2] for named in self._pins})
            there = ", ".join(names[:_NAMED_MAX]) or "none"
            there += ", ..." if len(names) > _NAMED_MAX else ""
            raise ConfigError(f"unpin {name!r}: expected the name of a pin, there are {there}")
        for named in found:
            self._end(named)

    def removed(self, keys: Collection[BlockKey]) -> None:
        """Blocks have left memory; pinned ones do if their memory is taken away, or damaged."""
        if not self._keys.keys().isdisjoint(keys):
            self.look_again()

    def tick(self, now_ns: int) -> None:
        """Look at pins whose time has come, at some each turn."""
        left = _LOOKED_MAX
        for pin in self._pins.values():
            if left > 0 and pin.look_ns is not None and pin.look_ns <= now_ns:
                left -= pin.asked
                self._look(pin, now_ns)
        due = (pin.look_ns for pin in self._pins.values() if pin.look_ns is not None)
        self.due_ns = min(due, default=NEVER_NS)

    def _look(self, pin: _Pin, now_ns: int) -> None:
        """Pin what is present now, then unpin what was pinned before."""
        namespace = self._namespaces.get(pin.digest)
        before = msgspec.structs.replace(pin)
        self._count(pin, -1)
        pin.held = None
        whole = False
        if namespace is not None:
            room = self._room(pin, namespace)
            lease = self._lease(namespace, pin.prefix, min(pin.asked, room), now_ns, NEVER_NS)
            pin.held = None if lease is None else (namespace.manager, lease)
            self._count(pin, 1)
            found = _blocks_in(lease)
            whole = found == pin.asked and all(e.state is State.READY for e in pin.entries)
            if found == room < pin.asked and found != pin.logged:
                pin.logged = found
                self._said.warn(
                    "pins that are not whole",
                    "pin %r has %d of %d blocks: [engine] pinned, its tenant's quota, or half of"
                    " the memory of its namespace, is used up",
                    pin.prefix.name,
                    found,
                    pin.asked,
                )
            before.release()  # but what a namespace has that was given up stays its own
        waits_ns = min(_LOOK_NS_MAX, max(_LOOK_NS, (now_ns - pin.asked_ns) // 4))
        pin.look_ns = None if whole else now_ns + waits_ns

    def _count(self, pin: _Pin, by: int) -> None:
        """Note the keys of what a pin has, or had."""
        for entry in pin.entries:
            self._keys[entry.key] += by
            if not self._keys[entry.key]:
                del self._keys[entry.key]

    def _lease(
        self, namespace: Namespace, prefix: Prefix, blocks: int, now_ns: int, end_ns: int
    ) -> Lease | None:
        """Lease up to so many leading blocks, those that are coming included."""
        groups = len(namespace.layout.rules)
        chain = Chain(prefix.hashes, prefix.width, groups, prefix.scope)
        return self._lookups.hold(namespace, chain, blocks, end_ns, now_ns)

    def _room(self, pin: _Pin, namespace: Namespace) -> int:
        others = [other for other in self._pins.values() if other is not pin]
        room = self._bytes_max - sum(map(self._bytes, others))
        share = self._tenants.shares[MEMORY].get(pin.tag)
        if share is not None and share.quota_bytes is not None:
            same = sum(self._bytes(other) for other in others if other.tag == pin.tag)
            room = min(room, share.quota_bytes - same)
        beside = sum(len(other.entries) for other in others if other.digest == pin.digest)
        slots = namespace.manager.slots.total // _OWN_PART - beside
        slots = min(slots, room // namespace.layout.slot_bytes)
        return max(0, slots // len(namespace.layout.rules))

    def _bytes(self, pin: _Pin) -> int:
        namespace = self._namespaces.get(pin.digest)
        return 0 if namespace is None else len(pin.entries) * namespace.layout.slot_bytes

    def _end(self, named: Name) -> None:
        pin = self._pins.pop(named)
        self._count(pin, -1)
        pin.release()

    def every(self) -> Iterator[Pinned]:
        """Go through all pins."""
        tenants = {tag: name for name, tag in self._tenants.names.items()}
        for pin in self._pins.values():
            namespace, prefix = self._namespaces.get(pin.digest), pin.prefix
            model = "" if namespace is None else told(namespace.layout.traits.get("model", ""))
            ready = sum(entry.state is State.READY for entry in pin.entries)
            groups = 1 if namespace is None else len(namespace.layout.rules)
            yield Pinned(
                prefix.name,
                pin.digest,
                model,
                tenants.get(pin.tag, ""),
                -(-ready // groups),
                pin.asked,
                self._bytes(pin),
                prefix.hashes.hex(),
                prefix.width,
                prefix.scope.hex(),
            )


def _blocks_of(prefix: Prefix) -> int:
    """Count a prefix's blocks. Raises ProtocolError."""
    size, width = len(prefix.hashes), prefix.width
    if size and (width <= 0 or size % width):
        raise ProtocolError(f"pin {prefix.name!r}: {size} bytes of hashes, {width} each")
    return size // width if size else 0


def _blocks_in(lease: Lease | None) -> int:
    return 0 if lease is None else max(len(hit.indices) for hit in lease.groups)
