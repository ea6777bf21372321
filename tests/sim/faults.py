"""What goes wrong in a simulated world, and in which of its states it did: every pair is counted.

A world with faults aims at one state: while it holds, faults are likely. So all pairs are met in
some hundred worlds, rare states included.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from connectors.request_state import Phase as Asking
from kvstore.core.index import State
from kvstore.store import drain
from kvstore.store.session import Phase
from kvstore.wire import engine as p
from tests.sim.host import Host
from tests.sim.store import MS

if TYPE_CHECKING:
    from tests.sim.world import World

AIMED = 0.1  # chance of a fault at a moment at which the state aimed at holds
AIMED_MAX = 24  # of them in a world

PROMOTION = "promotion under way"
STATES: dict[str, Callable[[World], bool]] = {
    "idle": lambda w: all(host.engine.idle for host in w.hosts),
    "asking": lambda w: any(_phase(host, Asking.ASKED) for host in w.hosts),
    "load under way": lambda w: any(k.loads_open for h in w.hosts for k in h.workers),
    "store under way": lambda w: any(k.stores_open for h in w.hosts for k in h.workers),
    "detached": lambda w: any(not host.client.session for host in w.hosts),
    "no store": lambda w: w.net.store is None,
    "session joining": lambda w: _session(w, Phase.JOINING),
    "session ending": lambda w: _session(w, Phase.ENDING),
    "lookup waits": lambda w: any(s.asks for s in w.sessions()),
    "block half written": lambda w: any(s.writing for s in w.sessions()),
    "lease held": lambda w: any(len(n.manager.leases) for n in w.namespaces()),
    PROMOTION: lambda w: any(n.tiering.coming for n in w.namespaces()),
    "copy to disk under way": lambda w: any(
        sum(n.tiering._storing.values()) for n in w.namespaces()
    ),
    "disk full": lambda w: any(disk.full for disk in w.disks),
    "dropped block pinned": lambda w: any(n.manager.slots.lingering for n in w.namespaces()),
    "memory coming": lambda w: any(n.coming for n in w.namespaces()),
    "memory leaving": lambda w: any(
        m.state in ("retiring", "unmapping") for n in w.namespaces() for m in n.extents.values()
    ),
    "disk's index loading": lambda w: any(disk.loading for disk in w.disks),
}
AIMS = tuple(STATES)


def _phase(host: Host, phase: Asking) -> bool:
    return any(tracked.phase is phase for tracked in host.half._requests.values())


def _session(world: World, phase: Phase) -> bool:
    return any(session.phase is phase for session in world.sessions())


# Faults: each returns whether it could happen.


def _kill(world: World, _: Host, __: random.Random) -> bool:
    """The store dies and is there again at once."""
    if world.net.store is None:
        return False
    world.net.kill()
    world.start_store()
    return True


def _down(world: World, _: Host, __: random.Random) -> bool:
    """The store dies and stays away until another fault brings it back."""
    if world.net.store is None:
        world.start_store()
        return False
    world.net.kill()
    return True


def _freeze(world: World, _: Host, rng: random.Random) -> bool:
    world.net.frozen_until = world.net.now + rng.choice((50, 1_000)) * MS
    return world.net.store is not None


def _delay(world: World, _: Host, rng: random.Random) -> bool:
    world.net.slow_until = world.net.now + rng.choice((50, 1_000)) * MS
    return True


def _worker(_: World, host: Host, rng: random.Random) -> bool:
    """A worker's connection breaks."""
    rng.choice(host.workers).lose()
    return True


def _stall(world: World, host: Host, rng: random.Random) -> bool:
    rng.choice(host.workers).stalled_until = world.net.now + world.stall_ns
    return True


def _scheduler(_: World, host: Host, __: random.Random) -> bool:
    """The scheduler half's connection breaks."""
    host.client.detach("simulated")
    return True


def _engine(world: World, host: Host, rng: random.Random) -> bool:
    """An engine's scheduler dies; its workers live on for a while. Another engine takes over."""
    world.replace(host, rng.choice((0, 30, 300)) * MS)
    return True


def _disk(kind: str) -> Callable[[World, Host, random.Random], bool]:
    def fault(world: World, _: Host, rng: random.Random) -> bool:
        for disk in world.disks:
            disk.suffer(kind, rng.choice((100, 3_000)) * MS)
        return bool(world.disks)

    return fault


def _memory(world: World, _: Host, rng: random.Random) -> bool:
    """Memory is needed elsewhere: an extent is given up, as for another model."""
    namespaces = [n for n in world.namespaces() if n.shrinkable() is not None]
    if not namespaces:
        return False
    donor = rng.choice(namespaces)
    mapping = donor.shrinkable()
    if mapping is not None:
        mapping.state, mapping.since_ns = "retiring", world.net.now
    return True


def _clear(world: World, _: Host, __: random.Random) -> bool:
    if world.net.store is None:
        return False
    store = world.net.store
    if 0 not in store._clearing:  # an operator waits for an answer before the next one
        store.on_message(0, p.Query("clear"), world.net.now)
    return True


def _resize(world: World, _: Host, rng: random.Random) -> bool:
    """An operator gives memory another cap."""
    return world.resize(rng.randint(world.models, world.extents))


def _reload(world: World, _: Host, rng: random.Random) -> bool:
    """An operator changes how long engines may hold blocks, and wait for them."""
    store, change = world.net.store, msgspec.structs.replace
    if store is None:
        return False
    engine = change(
        store.settings.running.engine,
        lease_ns=rng.choice((15, 2_000)) * MS,
        defer_ns=rng.choice((0, 100)) * MS,
        promote_limit_ns=rng.choice((100, 60_000)) * MS,
    )
    store.settings.take_over(change(store.settings.running, engine=engine))
    return True


def _drain(world: World, _: Host, rng: random.Random) -> bool:
    """An operator drains the store, or takes that back."""
    return world.query(rng.choice(drain.DRAINS))


def _damage(world: World, _: Host, rng: random.Random) -> bool:
    """A block in memory turns out damaged, as a reader's report says: one in use, if any is."""
    ready = [(n, e) for n in world.namespaces() for e in n.manager.index if e.state is State.READY]
    blocks = [(n, e.key) for n, e in ready if e.pins] or [(n, e.key) for n, e in ready]
    if not blocks:
        return False
    blocks.sort(key=lambda block: block[1])
    namespace, key = rng.choice(blocks)
    namespace.manager.drop(key, "damaged")
    return True


def _reset(world: World, host: Host, _: random.Random) -> bool:
    world.reset(host)
    return True


FAULTS: dict[str, Callable[[World, Host, random.Random], bool]] = {
    "kill": _kill,
    "down": _down,
    "freeze": _freeze,
    "delay": _delay,
    "worker": _worker,
    "stall": _stall,
    "scheduler": _scheduler,
    "engine": _engine,
    "disk freezes": _disk("freezes"),
    "disk fails": _disk("fails"),
    "disk fills": _disk("fills"),
    "disk lies": _disk("lies"),
    "memory": _memory,
    "clear": _clear,
    "resize": _resize,
    "reload": _reload,
    "drain": _drain,
    "damage": _damage,
    "reset": _reset,
}
BETWEEN_STEPS = ("engine", "reset")  # done by who takes the steps
KINDS = tuple(FAULTS)
_OF_STORE = ("kill", "down", "freeze", "memory", "clear", "damage", "resize", "reload", "drain")
_OF_DISK = ("disk freezes", "disk fails", "disk fills", "disk lies")
IMPOSSIBLE: dict[tuple[str, str], str] = {
    **{(fault, "no store"): "there is nothing to hit" for fault in (*_OF_STORE, *_OF_DISK)},
    ("damage", "disk's index loading"): "memory is empty: the store has just started",
}


def inject(world: World, kind: str, rng: random.Random) -> bool:
    """Let one thing go wrong, and count the states that it met."""
    met = [state for state, holds in STATES.items() if holds(world)]
    host = rng.choice(world.hosts)
    if not FAULTS[kind](world, host, rng):
        return False
    world.counts[kind] += 1
    world.met.update((kind, state) for state in met)
    world.note(f"fault: {kind} {host.name}")
    return True
