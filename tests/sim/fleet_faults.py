"""What goes wrong between the nodes of a fleet, and in which state of a hand-over it did.

What goes wrong in one node is in faults: the nodes have all of that, too, and what matters most to
hand-overs is here once more, so that it meets their states.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvstore.handover.fetches import Fetch
from kvstore.handover.jobs import Job
from kvstore.handover.moves import CHECKED, CLAIMED, LANDED, MOVING, OFFERED, STAGING, SUMMING, TOLD
from tests.sim import faults
from tests.sim.store import MS

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet
    from tests.sim.node import Node


def _running(fleet: Fleet) -> Iterator[Node]:
    return (node for node in fleet.nodes if node.net.store is not None)


def _fetches(fleet: Fleet) -> Iterator[Fetch]:
    for node in _running(fleet):
        for consumer in node.consumers():
            yield from consumer._fetches.values()


def _jobs(fleet: Fleet) -> Iterator[Job]:
    for node in _running(fleet):
        yield from node.peers.producer.jobs


def _fetch_in(state: int, *, push: bool | None = None) -> Callable[[Fleet], bool]:
    def holds(fleet: Fleet) -> bool:
        return any(f.states.count(state) for f in _fetches(fleet) if push in (None, f.push))

    return holds


def _job_in(state: int) -> Callable[[Fleet], bool]:
    return lambda fleet: any(job.states.count(state) for job in _jobs(fleet))


def _leases(fleet: Fleet, *, running: bool) -> bool:
    return any(
        lease.running is running
        for node in _running(fleet)
        for lease in node.peers.producer.request_leases._leases.values()
    )


STATES: dict[str, Callable[[Fleet], bool]] = {
    "no hand-over": lambda fleet: not any(_fetches(fleet)),
    "link greets": lambda fleet: any(
        link.stage in ("dialled", "greeted", "starting") and link.waiting
        for node in _running(fleet)
        for link in node.peers.links.all.values()
    ),
    "no answer yet": lambda fleet: any(not fetch.offered for fetch in _fetches(fleet)),
    "offered": _fetch_in(OFFERED),
    "claimed": _fetch_in(CLAIMED),
    "read under way": _fetch_in(MOVING, push=False),
    "write awaited": _fetch_in(MOVING, push=True),
    "landed": _fetch_in(LANDED),
    "not confirmed": _fetch_in(CHECKED),
    "quarantine": lambda fleet: any(
        consumer.arrivals.quarantined for node in _running(fleet) for consumer in node.consumers()
    ),
    "sums taken": _job_in(SUMMING),
    "read from disk": _job_in(STAGING),
    "told": _job_in(TOLD),
    "lease is over": lambda fleet: any(job.over for job in _jobs(fleet)),
    "released": lambda fleet: any(job.released for job in _jobs(fleet)),
    "awaits the prefill": lambda fleet: any(job.computes for job in _jobs(fleet)),
    "request runs": lambda fleet: _leases(fleet, running=True),
    "request held": lambda fleet: _leases(fleet, running=False),
    "exporter down": lambda fleet: any(not node.exporter.up for node in _running(fleet)),
    "store down": lambda fleet: any(node.net.store is None for node in fleet.nodes),
}


# Faults: each returns whether it could happen.


def _pair(fleet: Fleet, rng: random.Random) -> tuple[str, str]:
    one, other = rng.sample(fleet.nodes, 2)
    return one.address, other.address


def _cut(fleet: Fleet, rng: random.Random) -> bool:
    """A connection breaks."""
    if not fleet.cables.all:
        return False
    rng.choice(fleet.cables.all).cut(rng)
    return True


def _part(fleet: Fleet, rng: random.Random) -> bool:
    """Two nodes do not reach each other for some time."""
    fleet.cables.part(*_pair(fleet, rng), rng.choice((20, 400, 3_000, 7_000)))
    return True


def _echo(fleet: Fleet, rng: random.Random) -> bool:
    """The next messages are heard twice, which no connection does: a peer that is wrong does."""
    if not fleet.cables.all:
        return False
    for road in rng.choice(fleet.cables.all).roads.values():
        road.echoes = rng.choice((1, 3))
    return True


def _exporter(fleet: Fleet, rng: random.Random) -> bool:
    """An exporter dies, and is started again."""
    node = rng.choice(fleet.nodes)
    if node.net.store is None or not node.exporter.up:
        return False
    node.exporter.restart("simulated")
    return True


def _spoil(fleet: Fleet, rng: random.Random) -> bool:
    """Blocks that are under way change after they have landed."""
    node = rng.choice(fleet.nodes)
    if node.net.store is None:
        return False
    fetches = [fetch for consumer in node.consumers() for fetch in consumer._fetches.values()]
    coming = bytes((OFFERED, CLAIMED, MOVING))
    keys = [
        key
        for f in fetches
        for run in f.states.within(f.all, coming)
        for key in f.keys[slice(*run)]
    ]
    node.exporter.damage.update(rng.sample(keys, (len(keys) + 1) // 2))
    return bool(keys)


def _jump(fleet: Fleet, rng: random.Random) -> bool:
    """All processes stand still for some time, as on a machine that was suspended."""
    fleet.clock.ns += rng.choice((200, 1_500, 6_000, 31_000)) * MS
    return True


def _of_node(kind: str) -> Callable[[Fleet, random.Random], bool]:
    def fault(fleet: Fleet, rng: random.Random) -> bool:
        node = rng.choice(fleet.nodes)
        return faults.FAULTS[kind](node, rng.choice(node.hosts), rng)

    return fault


FAULTS: dict[str, Callable[[Fleet, random.Random], bool]] = {
    "cut": _cut,
    "part": _part,
    "echo": _echo,
    "exporter": _exporter,
    "spoil": _spoil,
    "jump": _jump,
    **{
        kind: _of_node(kind)
        for kind in (
            "kill",
            "down",
            "freeze",
            "engine",
            "memory",
            "clear",
            "damage",
            "drain",
            "reset",
        )
    },
}
IMPOSSIBLE: dict[tuple[str, str], str] = {
    ("spoil", "no hand-over"): "there is nothing to spoil",
}


def inject(fleet: Fleet, kind: str, rng: random.Random) -> bool:
    """Let one thing go wrong, and count the states that it met."""
    met = [state for state, holds in STATES.items() if holds(fleet)]
    if not FAULTS[kind](fleet, rng):
        return False
    fleet.counts[kind] += 1
    fleet.met.update((kind, state) for state in met)
    fleet.note(f"fault: {kind}")
    return True
