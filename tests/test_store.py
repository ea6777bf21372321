"""Sessions of the store: how they join, work, and end. Connections here are lists."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.core import limits
from kvstore.core.errors import ProtocolError
from kvstore.core.layout import GroupGeometry
from kvstore.core.types import GroupRule, make_key
from kvstore.store.session import Phase
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.harness.fakes import (
    SLOT_BYTES,
    Engine,
    HeapPool,
    Town,
    blocks,
    geometry,
    hashes,
    pending_town,
    phase,
    u32,
    value_of,
)
from tests.reference.memory_tier import MemoryTier


def refusals(town: Town, connection: int) -> list[p.Refused]:
    return town.take(connection, p.Refused)


# Joining


def test_an_engine_is_active_when_all_its_parts_are_there_and_memory_is_mapped() -> None:
    town = Town()
    engine = Engine(town, "engine", world=2, maps=False)
    engine.join_rank(0, engine.workers[0])
    engine.join_rank(1, engine.workers[1])
    town.settle(engine)
    assert phase(town, engine) is Phase.JOINING
    town.say(engine.scheduler, p.Hello(p.VERSION, "engine", "scheduler", 0, 2, 4))
    town.settle(engine)
    assert phase(town, engine) is Phase.JOINING
    for worker in engine.workers:
        assert engine.active is None
        for extent in engine.extents:
            town.say(worker, p.Mapped(extent))
        town.settle(engine)
    assert phase(town, engine) is Phase.ACTIVE
    assert engine.active is not None
    (namespace,) = town.store.namespaces.values()
    assert namespace.manager.slots.total == 8
    assert len(engine.credits) > 0
    session = {message.session for message in (engine.active, *engine.layouts)}
    assert session == {town.store.sessions["engine"].number}


@pytest.mark.parametrize("workers", [False, True])
def test_S2_a_scheduler_half_that_asks_before_its_session_is_welcome_is_refused(
    *, workers: bool
) -> None:
    """Its workers are not there yet, and so no model to look into; or have mapped no memory."""
    town = Town()
    early = Engine(town, "early", world=1, maps=False)
    town.say(early.scheduler, p.Hello(p.VERSION, "early", "scheduler", 0, 1, 4))
    if workers:
        early.join_rank(0, early.workers[0])
        town.settle(early)
        assert early.active is None
    early.step(lookups=(p.Lookup(1, bytes(32), 32),))
    (detach,) = town.take(early.scheduler, p.Detach)
    assert detach.reason == "Step before Welcome"
    assert town.store.numbers.counts["kvstore_refused", "protocol"] == 1
    assert not town.store.numbers.counts["kvstore_refused", "internal"]


def test_S2_a_worker_that_reports_before_its_session_is_welcome_is_refused() -> None:
    """The other rank is not there yet, and so no model to have blocks of."""
    town = Town()
    early = Engine(town, "early", world=2)
    early.join_rank(0, early.workers[0])
    early.report(0, [0], [b"key"], [b""])
    (detach,) = town.take(early.workers[0], p.Detach)
    assert detach.reason == "Stored before Welcome"


def test_a_worker_that_does_not_map_what_is_there_ends_its_session_only() -> None:
    town = Town()
    good = town.attach("good")
    bad = Engine(town, "bad", maps=False)
    bad.join()
    town.settle(bad, good)
    assert bad.extents
    assert bad.active is None
    town.tick(ms=61_000)
    town.settle(bad, good)
    assert bad.detached
    assert not good.detached
    assert phase(town, good) is Phase.ACTIVE


def test_an_engine_id_can_be_attached_once() -> None:
    town = Town()
    engine = town.attach()
    other = town.connect()
    town.say(other, p.Hello(p.VERSION, "engine", "scheduler", 0, 1))
    assert "attached already" in refusals(town, other)[0].reason
    town.settle(engine)
    assert phase(town, engine) is Phase.ACTIVE
    assert not engine.detached


@pytest.mark.parametrize(
    ("hello", "told"),
    [
        (p.Hello(p.VERSION, "e", "worker", 1, 1, geometry=geometry()), "rank 1, expected 0..0"),
        (p.Hello(p.VERSION, "e", "worker", -1, 1, geometry=geometry()), "rank -1, expected 0..0"),
        (p.Hello(p.VERSION, "e", "worker", 0, 1), "role 'worker'"),
        (p.Hello(p.VERSION, "e", "router", 0, 1), "role 'router'"),
        (p.Step(), "Step before Hello"),
    ],
)
def test_a_wrong_first_message_is_refused_and_leaves_no_session(
    hello: framing.Message, told: str
) -> None:
    town = Town()
    connection = town.connect()
    town.say(connection, hello)
    assert told in refusals(town, connection)[0].reason
    assert not town.store.sessions


@pytest.mark.parametrize("world", [0, -1])
def test_S2_a_hello_of_an_engine_without_ranks_is_no_message(world: int) -> None:
    said = framing.encode(p.Hello(p.VERSION, "e", "scheduler", 0, world))
    with pytest.raises(ProtocolError, match="expected `int` >= 1"):
        list(framing.Decoder(p.ToStore).feed(said))


def test_a_different_world_is_refused_and_the_session_goes_on_joining() -> None:
    town = Town()
    engine = Engine(town, "engine", world=2)
    engine.join_rank(0, engine.workers[0])
    stranger = town.connect()
    town.say(stranger, p.Hello(p.VERSION, "engine", "scheduler", 0, 4))
    assert "world of 4, the session has 2" in refusals(town, stranger)[0].reason
    engine.join_rank(1, engine.workers[1])
    town.say(engine.scheduler, p.Hello(p.VERSION, "engine", "scheduler", 0, 2, 4))
    town.settle(engine)
    assert phase(town, engine) is Phase.ACTIVE


def test_B3_ranks_that_do_not_fit_are_refused_naming_both_values() -> None:
    town = Town()
    engine = Engine(town, "engine", world=2)
    engine.geometries[1] = msgspec.structs.replace(engine.geometries[1], identity="other model")
    engine.join()
    (refused,) = refusals(town, engine.scheduler)
    assert not refused.retry
    assert "'other model'" in refused.reason
    assert "'model'" in refused.reason
    engine.leave()
    assert not town.store.sessions


def test_O22_a_block_larger_than_an_extent_is_refused_at_start() -> None:
    town = Town(pool=HeapPool(slots_per_extent=1))
    engine = Engine(town, "engine", rules=[GroupRule()])
    group = engine.geometries[0].groups[0]
    layer = msgspec.structs.replace(group.layers[0], page_bytes=64 * SLOT_BYTES)
    groups = (GroupGeometry(GroupRule(), (layer,)),)
    engine.geometries[0] = msgspec.structs.replace(engine.geometries[0], groups=groups)
    engine.join()
    (refused,) = refusals(town, engine.scheduler)
    assert "a block takes 262144 bytes, an extent has 4100" in refused.reason


# The end


def test_O23_slots_of_a_dead_session_come_back_after_its_last_worker() -> None:
    town = Town()
    engine = town.attach(world=2)
    manager = next(iter(town.store.namespaces.values())).manager
    credits_out = len(manager.slots.granted)
    assert credits_out > 0
    for connection in (engine.scheduler, *engine.workers):
        assert len(manager.slots.granted) == credits_out
        town.close(connection)
        town.tick()
    assert len(manager.slots.granted) == 0
    assert len(manager.slots.free) == manager.slots.total
    assert not town.store.sessions


def test_O23_a_scheduler_that_sleeps_does_not_hold_the_slots() -> None:
    """An idle engine reads its Detach only when it wakes up; it writes no slots itself."""
    town = Town()
    engine = town.attach(world=2)
    manager = next(iter(town.store.namespaces.values())).manager
    for worker in engine.workers:
        assert len(manager.slots.granted) > 0
        town.close(worker)
    assert len(manager.slots.free) == manager.slots.total
    assert not town.store.sessions
    town.store.on_message(engine.scheduler, p.Step(), 0)  # it had not heard yet
    town.close(engine.scheduler)
    assert town.attach(world=2).scheduler != engine.scheduler


def test_O23_a_write_under_way_is_given_up_with_the_last_connection_only() -> None:
    town, engine, _, slot = pending_town()
    manager = next(iter(town.store.namespaces.values())).manager
    town.close(engine.scheduler)
    town.close(engine.workers[0])
    assert slot in set(manager.slots.granted)
    town.close(engine.workers[1])
    assert len(manager.slots.free) == manager.slots.total
    assert len(manager.index) == 0


def test_O17_what_workers_report_of_a_session_that_ends_is_stored() -> None:
    town, engine, chain, slot = pending_town()
    manager = next(iter(town.store.namespaces.values())).manager
    town.close(engine.scheduler)
    engine.report(1, [slot], [make_key(chain[0], 0)], [b""])  # had not heard yet
    assert manager.ready(make_key(chain[0], 0))
    for worker in engine.workers:
        town.close(worker)
    assert len(manager.slots.free) == manager.slots.total - 1


def test_the_others_are_told_to_detach_once() -> None:
    town = Town()
    engine = town.attach(world=2)
    town.close(engine.scheduler)
    engine.pump()
    town.close(engine.workers[0])
    engine.pump()
    assert engine.detached == ["its scheduler closed without a goodbye: killed, or crashed"] * 2


def test_an_engine_that_comes_back_while_its_session_ends_is_asked_to_try_again() -> None:
    town = Town()
    engine = town.attach()
    town.close(engine.scheduler)
    early = town.connect()
    hello = p.Hello(p.VERSION, "engine", "scheduler", 0, 1, 4)
    town.say(early, hello)
    (refused,) = refusals(town, early)
    assert refused.retry
    town.close(engine.workers[0])
    again = town.attach()
    assert again.active is not None


def test_O20_leases_end_with_their_session() -> None:
    town = Town()
    engine, chain = town.attach(), hashes(1)
    engine.put(chain)
    engine.hit(chain)
    leases = next(iter(town.store.namespaces.values())).manager.leases
    assert len(leases) == 1
    engine.leave()
    assert len(leases) == 0


def test_an_ending_session_is_granted_nothing() -> None:
    town = Town()
    engine = town.attach(world=2)
    town.close(engine.workers[1])
    engine.pump()
    engine.credits.clear()
    town.settle(engine)
    assert not engine.credits
    engine.step(lookups=(p.Lookup(1, hashes(1)[0], 32),))
    engine.pump()
    assert not engine.granted


# Wrong messages


WRONG = {
    "stored-without-credit": p.Stored(u32([7]), (b"k",), (b"",), ok=True, seconds=0.0),
    "stored-too-few-keys": p.Stored(u32([0, 1]), (b"k",), (b"",), ok=True, seconds=0.0),
    "stored-broken-array": p.Stored(b"123", (b"k",), (b"",), ok=True, seconds=0.0),
    "loaded-broken-array": p.Loaded(1, 0, 0.0, b"1"),
    "step-from-a-worker": p.Step(),
    "a-second-hello": p.Hello(p.VERSION, "bad", "worker", 0, 1, geometry=geometry()),
    "not-for-the-store": p.Coming(1, 0),
    "unknown-query": p.Query("everything"),
}
WRONG_OF_SCHEDULERS = {
    "unknown-event": p.Step(counts={"made_up": 1}),
    "unknown-tier": p.Step(lookup_tokens=1, hit_tokens={"made_up": 1}),
    "unknown-reason": p.Step(lookup_tokens=1, missed_tokens={"made_up": 1}),
    "tokens-neither-hit-nor-missed": p.Step(lookup_tokens=3, missed_tokens={"tail": 2}),
    "no-width": p.Step(lookups=(p.Lookup(1, b"1234", 0),)),
    "broken-hashes": p.Step(lookups=(p.Lookup(1, b"12345", 4),)),
    "stored-from-a-scheduler": p.Stored(b"", (), (), ok=True, seconds=0.0),
}


@pytest.mark.parametrize("name", [*WRONG, *WRONG_OF_SCHEDULERS])
def test_wrong_messages_end_only_their_session(name: str) -> None:
    town = Town()
    good, bad = town.attach("good", credit_slots=2), town.attach("bad", credit_slots=2)
    good.put(chain := hashes(2))
    sender = bad.workers[0] if name in WRONG else bad.scheduler
    town.say(sender, (WRONG | WRONG_OF_SCHEDULERS)[name])
    town.settle(good, bad)
    assert bad.detached
    assert not good.detached
    assert blocks(good.hit(chain)) == [0, 1]
    assert value_of(town.store.numbers, "kvstore_refused", "protocol") == 1
    bad.leave()
    town.settle(good)
    assert phase(town, bad) is None


def test_a_rank_that_reports_twice_ends_its_session() -> None:
    town, engine, chain, slot = pending_town()
    engine.report(0, [slot], [make_key(chain[0], 0)], [b""])
    town.settle(engine)
    assert "twice" in engine.detached[0]


# Admin


def test_O17_clear_empties_memory_for_everybody() -> None:
    town = Town()
    one, other, chain = town.attach("one"), town.attach("other", identity="another"), hashes(2)
    one.put(chain)
    other.put(chain)
    admin = town.connect()
    town.say(admin, p.Query("clear"))
    town.tick()
    assert town.take(admin, p.Report)
    assert (one.hit(chain).lease, other.hit(chain).lease) == (0, 0)
    assert [n.manager.index.holes for n in town.store.namespaces.values()] == [0, 0]


def test_O3_a_hit_that_ends_inside_of_a_block_brings_the_block_in_which_a_window_begins() -> None:
    """From a lower tier, too; of a state only the last one."""
    rules = (GroupRule(), GroupRule(2, reach=7), GroupRule(1, exact=True))
    town = Town(tiers=[("shelf", MemoryTier)])
    engine, chain = town.attach(rules=rules, credit_slots=30), hashes(5)
    engine.put(chain, groups=3)
    (namespace,) = town.store.namespaces.values()
    for index in reversed(range(5)):
        for group in range(3):
            assert namespace.manager.drop(make_key(chain[index], group), "test")
    for ask, inside in ((1, 0), (2, 7), (3, 6)):
        lookup = p.Lookup(ask, b"".join(chain), 32, inside=inside)
        engine.step(lookups=(lookup,))
        town.settle(engine)
        granted = engine.granted[ask]
        first = 2 if inside == 6 else 3
        assert [blocks(granted, g) for g in range(3)] == [[*range(5)], [*range(first, 5)], [4]]


# Limits of sums


def test_S2_layers_of_all_engines_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    town = Town()
    good = town.attach("good")
    layers = geometry().layers
    monkeypatch.setattr(limits, "STORE_LAYERS_MAX", 2 * layers)
    second = town.attach("second")
    third = Engine(town, "third")
    third.join_rank(0, third.workers[0])
    (refused,) = refusals(town, third.workers[0])
    assert f"{layers} layers more than the {2 * layers} of attached engines" in refused.reason
    assert phase(town, good) is phase(town, second) is Phase.ACTIVE
    second.leave()
    town.settle(good)
    assert phase(town, town.attach("fourth")) is Phase.ACTIVE, "there is room again"


def test_S2_a_lookup_has_a_limit_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOOKUP_BLOCKS_MAX", 3)
    town = Town()
    good, bad = town.attach("good"), town.attach("bad")
    good.ask(hashes(3))
    bad.ask(hashes(4))
    town.settle(good, bad)
    assert bad.detached
    assert not good.detached


@pytest.mark.parametrize("limit", ["ASKS_MAX", "ASKED_BYTES_MAX"])
def test_S2_lookups_that_wait_have_a_limit_and_the_next_is_answered_at_once(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    town, engine, chain, _ = pending_town()
    monkeypatch.setattr(limits, limit, 1 if limit == "ASKS_MAX" else sum(map(len, chain)))
    first, second = engine.ask(chain), engine.ask(chain)
    town.tick()
    engine.pump()
    assert first not in engine.granted
    assert engine.granted[second].lease == 0
    town.tick(60_000)
    engine.pump()
    assert engine.granted[first].lease == 0, "its time is over"
    third = engine.ask(chain)
    town.tick()
    engine.pump()
    assert third not in engine.granted, "there is room again"
