"""Which block leaves memory next where what was used again is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from kvstore.core.ghosts import ENTRY_BYTES, Ghosts
from kvstore.core.manager import Manager
from kvstore.core.odds import Odds
from kvstore.core.segmented import KEPT_SHARE, SEGMENTED, SOON, SegmentedLRU, _kept_by
from kvstore.core.types import BlockKey, Chain, GroupRule, Slot
from kvstore.handover.request_leases import RequestLeases
from tests.harness.fakes import generations_of, hashes

SLOTS = 100
KEPT = int(KEPT_SHARE * SLOTS)


class Rig:
    """A manager that keeps what is used."""

    def __init__(self, slots: int = SLOTS) -> None:
        ghosts = Ghosts(memoryview(bytearray(ENTRY_BYTES << 13)))
        self.manager = Manager((GroupRule(),), generations_of(slots), ghosts, policy=SEGMENTED)
        self.manager.slots.add([Slot(number) for number in range(slots)])
        assert isinstance(self.manager._policy, SegmentedLRU)
        self.policy = self.manager._policy

    def put(self, name: str, count: int = 1, first: int = 0, *, wanted: bool = False) -> int:
        """Store blocks of a chain, one after the other; count those that found a slot."""
        keys = self.keys(name, count)
        for at in range(first, count):
            slots = self.manager.prepare_store(1, wanted=wanted)
            if not slots:
                return at
            self.manager.begin_store(keys[at], keys[at - 1] if at else None, slots[0])
            self.manager.complete_store(slots[0], ok=True)
        return count

    def use(self, name: str, count: int = 1) -> int:
        """Load what is here of a chain; count the blocks."""
        chain = Chain(b"".join(hashes(count, name)), 32, 1)
        lease = self.manager.prepare_load(chain, count, 1, 10**18)
        if lease is None:
            return 0
        self.manager.complete_load(lease.lease_id)
        return len(lease.entries)

    def here(self, name: str, count: int = 1) -> list[int]:
        keys = self.keys(name, count)
        return [at for at, key in enumerate(keys) if self.manager.ready(key) is not None]

    @staticmethod
    def keys(name: str, count: int) -> Sequence[BlockKey]:
        return Chain(b"".join(hashes(count, name)), 32, 1).keys(0, count)


def test_Q64_what_is_used_once_more_outlives_what_is_not() -> None:
    rig = Rig()
    rig.put("used")
    assert rig.use("used") == 1
    for number in range(10 * SLOTS):
        rig.put(f"once {number}")
    assert rig.here("used") == [0]
    assert rig.here(f"once {10 * SLOTS - 1}") == [0], "there is always room for what is new"


def test_Q64_a_long_prompt_that_is_new_displaces_nothing_that_was_used() -> None:
    rig = Rig()
    for number in range(KEPT):
        rig.put(f"used {number}")
        rig.use(f"used {number}")
    rig.put("long", 2 * SLOTS)
    assert 0 < len(rig.here("long", 2 * SLOTS)) <= SLOTS - KEPT
    assert all(rig.here(f"used {number}") for number in range(KEPT))


def test_Q64_beyond_its_share_what_was_used_longest_ago_leaves_first() -> None:
    rig = Rig()
    for number in range(SLOTS):
        rig.put(f"used {number}")
        rig.use(f"used {number}")
    assert rig.policy.kept == SLOTS, "there is room"
    for number in range(SLOTS):
        rig.put(f"once {number}")
    assert rig.policy.kept == KEPT
    gone = [number for number in range(SLOTS) if not rig.here(f"used {number}")]
    assert gone == list(range(SLOTS - KEPT)), "the coldest"


STAYED, LAST = SLOTS - KEPT, SLOTS - KEPT + 1
"""Of so many used ones, with shrunk(): the first that stays at the start, the last to leave."""


def shrunk(rig: Rig, between: int) -> int:
    """Have two new blocks leave and come back after so many others; return what is kept then."""
    for number in range(SLOTS):
        rig.put(f"used {number}")
        rig.use(f"used {number}")
    for number in range(STAYED):  # into slots of blocks that were used
        rig.put(f"once {number}")
    for number in range(2 + between):
        rig.put(f"other {number}")
    assert not rig.here("once 1")
    rig.manager.now_s = 100
    for number in range(STAYED, SLOTS):  # so that what comes back is not kept at once
        rig.use(f"used {number}")
    for number in range(2):
        rig.put(f"once {number}")
    rig.put("next")
    return rig.policy.kept


def test_Q64_what_comes_back_soon_and_was_never_used_shrinks_the_share_of_what_was() -> None:
    assert shrunk(Rig(), 0) == KEPT - 2
    assert shrunk(Rig(), int(SOON * SLOTS)) == KEPT, "it is not soon"


def test_Q64_what_comes_back_and_was_used_has_the_share_grow() -> None:
    rig = Rig()
    kept = shrunk(rig, 0)
    assert not rig.here(f"used {LAST}")
    rig.put(f"used {LAST}")
    for number in range(SLOTS):
        rig.put(f"more {number}")
    assert rig.policy.kept == kept + 1


def test_Q64_what_is_brought_up_for_a_request_tells_as_much() -> None:
    rig = Rig()
    kept = shrunk(rig, 0)
    name = f"used {LAST}"
    (key,) = rig.keys(name, 1)
    slots = rig.manager.prepare_store(1)
    rig.manager.begin_promotions([key], [None], slots)
    lease = rig.manager.prepare_load(Chain(hashes(1, name)[0], 32, 1), 1, 1, 10**18)
    assert lease is not None
    rig.manager.complete_promotions(slots, 1)
    assert [node.key for node in rig.manager.index if node.next is not None and node.pins] == []
    rig.manager.complete_load(lease.lease_id)
    for number in range(SLOTS):
        rig.put(f"more {number}")
    assert rig.policy.kept == kept + 1


@pytest.mark.parametrize(("used", "grows"), [(f"used {LAST + 1}", True), ("fresh", False)])
def test_Q64_the_share_grows_for_what_is_used_when_it_would_soon_be_gone(
    used: str, grows: bool
) -> None:
    rig = Rig()
    kept = shrunk(rig, 0)
    rig.manager.now_s = 125  # the others were used 25 s ago
    rig.put("fresh")
    rig.use("fresh")
    rig.manager.now_s = 130
    rig.use(used)
    for number in range(4):
        rig.put(f"more {number}")
        rig.use(f"more {number}")
    rig.put("next")
    assert rig.policy.kept == kept + grows


def test_Q64_of_a_cold_path_what_is_kept_for_its_end_alone_counts() -> None:
    rig = Rig()
    rig.put("talk", 3)
    rig.use("talk", 3)
    rig.use("talk", 1)
    manager = rig.manager
    chain = Chain(b"".join([hashes(1, "talk")[0], *hashes(2, "other")]), 32, 1)
    for at in (1, 2):
        (slot,) = manager.prepare_store(1)
        manager.begin_store(chain.key(0, at), chain.key(0, at - 1), slot)
        manager.complete_store(slot, ok=True)
    lease = manager.prepare_load(chain, 3, 1, 10**18)
    assert lease is not None
    manager.complete_load(lease.lease_id)
    talk = rig.keys("talk", 3)
    ends = [manager.ready(talk[2]), manager.ready(chain.key(0, 2)), manager.ready(talk[0])]
    assert [_kept_by(entry) for entry in ends if entry is not None] == [2, 2, 0]


@pytest.mark.parametrize(("others", "grows"), [(SLOTS - 2, True), (SLOTS, False)])
def test_Q64_the_share_grows_for_what_would_be_here_with_all_of_memory(
    others: int, grows: bool
) -> None:
    rig = Rig()
    kept = shrunk(rig, 0)
    for number in range(others):
        rig.put(f"more {number}")
    rig.put(f"used {LAST}")
    for number in range(SLOTS):
        rig.put(f"yet more {number}")
    assert rig.policy.kept == kept + grows


def test_Q64_the_share_stays_within_its_limit() -> None:
    rig = Rig()
    for number in range(2 * SLOTS):
        rig.put(f"used {number}")
        rig.use(f"used {number}")
    for number in range(SLOTS):
        rig.put(f"used {number}")  # each left soon before
    for number in range(SLOTS):
        rig.put(f"once {number}")
    assert rig.policy.kept == KEPT
    assert rig.policy._share == KEPT_SHARE, "it is not beyond its limit, and shrinks at once"


def test_Q64_what_comes_back_soon_is_kept_at_once() -> None:
    rig = Rig()
    rig.put("back")
    for number in range(2 * SLOTS):
        rig.put(f"once {number}")
    assert not rig.here("back")
    rig.put("back")
    assert rig.policy.kept == 1
    for number in range(2 * SLOTS):
        rig.put(f"other {number}")
    assert rig.here("back")


@pytest.mark.parametrize("late", [False, True])
def test_Q64_what_takes_longer_to_come_back_than_others_stay_is_not_kept(late: bool) -> None:
    rig = Rig()
    for number in range(KEPT):
        rig.put(f"used {number}")
        rig.use(f"used {number}")
    rig.manager.now_s = 600
    rig.put("back")
    for number in range(2 * SLOTS):
        rig.put(f"once {number}")
    assert not rig.here("back")
    if late:
        rig.manager.now_s = 1000
        for number in range(KEPT):
            rig.use(f"used {number}")
    rig.manager.now_s = 1010  # 410 s later; the coldest kept one was used 10 s ago, or 1,010
    rig.put("back")
    entry = rig.manager.ready(rig.keys("back", 1)[0])
    assert entry is not None
    assert bool(entry.kept) is not late


def in_turns(rig: Rig, count: int, blocks: int) -> None:
    """Fill memory: paths, one second after the other, and blocks that are hotter than these."""
    for number in range(count):
        rig.manager.now_s += 1
        rig.put(f"turn {number}", blocks)
    rig.manager.now_s += 1
    for number in range(SLOTS - count * blocks):
        rig.put(f"once {number}")


def test_Q64_of_what_comes_in_turns_and_does_not_fit_the_first_part_stays() -> None:
    rig = Rig()
    in_turns(rig, 7, 10)
    for turn in range(2):
        hits = []
        for number in range(7):
            rig.manager.now_s += 1
            hits.append(min(10, rig.use(f"turn {number}", 12)))
            rig.put(f"turn {number}", 12, hits[-1])
        assert sum(hits) > 60, turn


def first_to_leave(rig: Rig, name: str, used: int, more: int) -> bool:
    """Use a path, store a block below it, and then others; tell whether that leaves before them."""
    rig.manager.now_s += 1
    assert rig.use(name, used) == used
    rig.put(name, more, more - 1)
    rig.put("next 0")
    rig.put("next 1")
    return not rig.here(name, more)[more - 1 :]


@pytest.mark.parametrize("number", [0, 1])
def test_Q64_only_what_is_below_the_coldest_path_is_the_next_to_leave(number: int) -> None:
    rig = Rig()
    in_turns(rig, 7, 10)
    assert first_to_leave(rig, f"turn {number}", 10, 11) == (number == 0)


def test_Q64_while_there_is_room_nothing_is_the_next_to_leave() -> None:
    rig = Rig(SLOTS + 10)
    in_turns(rig, 7, 10)
    assert not first_to_leave(rig, "turn 0", 10, 11)
    rig.put("long", 10)
    assert len(rig.here("turn 0", 11)) == 11


def test_Q64_where_requests_are_handed_over_what_is_new_stays_for_other_stores() -> None:
    rig = Rig()
    in_turns(rig, 7, 10)
    RequestLeases(1 << 20, Counter()).running("handed over", rig.manager, 1, 1)
    assert not first_to_leave(rig, "turn 0", 10, 11)


@pytest.mark.parametrize("used_s", [1, 3])
def test_B18_what_is_stored_while_a_request_is_handed_over_outlives_what_was_kept(
    used_s: int,
) -> None:
    """Kept blocks have less than their share. used_s: when the one that is kept was last used."""
    rig, leases = Rig(3), RequestLeases(1 << 20, Counter())
    rig.manager.now_s = 1
    rig.put("kept")
    rig.use("kept")
    rig.manager.now_s = 2
    leases.running("handed over", rig.manager, 1, 1)
    rig.put("awaited", 2)
    rig.manager.now_s = used_s
    rig.use("kept")
    rig.put("more")
    assert rig.here("awaited", 2) == ([0, 1] if used_s == 1 else [0])


@pytest.mark.parametrize("ended", ["named", "gone", "still to come"])
def test_B18_what_was_kept_stays_once_a_request_has_all_its_blocks(ended: str) -> None:
    rig, leases = Rig(2), RequestLeases(1 << 20, Counter())
    rig.put("kept")
    rig.use("kept")
    rig.manager.now_s = 1
    leases.running("handed over", rig.manager, 1, 1)
    rig.put("awaited")
    if ended == "gone":
        leases.gone("handed over", rig.manager, 1)
    else:
        named = rig.keys("awaited", 1 + (ended == "still to come"))
        leases.done("handed over", rig.manager, 1, named, 10**9, 0)
    leases.tick(0)
    rig.manager.unpin([entry for lease in leases._leases.values() for entry in lease.pinned])
    rig.put("more")
    assert rig.here("kept") == ([] if ended == "still to come" else [0])


def test_B18_what_was_stored_before_a_request_began_leaves_as_ever() -> None:
    rig = Rig(2)
    rig.put("kept")
    rig.use("kept")
    rig.manager.now_s = 1
    rig.put("once")
    rig.manager.now_s = 2
    RequestLeases(1 << 20, Counter()).running("handed over", rig.manager, 1, 1)
    rig.put("more")
    assert (rig.here("kept"), rig.here("once")) == ([0], [])


def test_B18_kept_blocks_make_room_when_all_that_is_new_is_held() -> None:
    rig, leases = Rig(2), RequestLeases(1 << 20, Counter())
    rig.put("kept")
    rig.use("kept")
    rig.put("held")
    rig.manager.pin(rig.keys("held", 1)[0])
    assert rig.put("awaited") == 0
    leases.running("handed over", rig.manager, 1, 1)
    assert rig.put("awaited") == 1


@pytest.mark.parametrize("used_s", [1, 3])
def test_Q64_in_one_order_what_was_used_or_stored_longest_ago_leaves_first(used_s: int) -> None:
    """In two orders what was used stays in both cases."""
    rig = Rig(2)
    rig.manager.slots.by_recency = True
    rig.put("used")
    if used_s == 3:
        rig.manager.now_s = 2
        rig.put("once")
    rig.manager.now_s = used_s
    assert rig.use("used") == 1
    if used_s == 1:
        rig.manager.now_s = 2
        rig.put("once")
    rig.manager.now_s = 4
    rig.put("more")
    assert (rig.here("used"), rig.here("once")) == (([], [0]) if used_s == 1 else ([0], []))


@pytest.mark.parametrize(
    ("of_used", "used_s", "stored_s", "now_s", "leaves"),
    [
        (1.0, 1, 30, 31, "used"),  # those that are used are used after 10 s
        (1.0, 1, 5, 6, "once"),
        (1.0, 1, 2, 50, "once"),  # neither is used so late
        (0.0, 1, 5, 6, "used"),  # no block is used twice
        (0.0, 5, 1, 6, "once"),  # but what is older leaves first in one order, too
        (0.2, 1, 5, 6, "once"),  # a fifth is no eighth
    ],
)
def test_Q64_a_session_that_has_ended_makes_room_for_those_that_begin(
    of_used: float, used_s: int, stored_s: int, now_s: int, leaves: str
) -> None:
    """of_used: how many of those that are used are used again. Used, stored, and full at once."""
    rig, odds, some = Rig(2), Odds(64, fades=64), [BlockKey(key) for key in hashes(20)]
    odds.note(some, 0)
    odds.note(some, 10)
    odds.note(some[: int(20 * of_used)], 20)
    odds.note([BlockKey(key) for key in hashes(4, "once")], 20)
    rig.manager.slots.odds = odds
    rig.put("used")
    for second in sorted((used_s, stored_s)):
        rig.manager.now_s = second
        if second == used_s:
            assert rig.use("used") == 1
        else:
            rig.put("once")
    rig.manager.now_s = now_s
    rig.put("more")
    assert [name for name in ("used", "once") if not rig.here(name)] == [leaves]


def test_Q64_what_is_next_to_leave_and_has_failed_below_is_in_the_order_once() -> None:
    rig = Rig(10)
    rig.put("other", 4)
    rig.put("turn", 2)
    keys, manager = rig.keys("turn", 4), rig.manager
    end = manager.ready(keys[1])
    assert end is not None
    manager.slots.barely[end.slot] = 1
    slots = manager.prepare_store(2)
    assert manager.begin_promotions(keys[2:], keys[1:3], slots) == [0, 1]
    manager.complete_promotions(slots, 1)
    assert len(manager.prepare_store(10)) == 10, "all can leave"


@pytest.mark.parametrize("by_recency", [False, True])
def test_Q64_what_was_used_and_got_a_block_below_while_it_was_held_leaves_later(
    by_recency: bool,
) -> None:
    rig = Rig(10)
    rig.manager.slots.by_recency = by_recency
    rig.put("used")
    rig.use("used")
    held = rig.manager.pin_run(rig.keys("used", 1))
    rig.put("used", 2, 1)
    rig.manager.unpin(held)
    rig.put("other", 8)
    assert len(rig.manager.prepare_store(3)) == 3
    assert len(rig.manager.prepare_store(7, wanted=True)) == 7


@pytest.mark.parametrize("by_recency", [False, True])
def test_Q64_a_block_that_was_dropped_and_stored_again_leaves_after_what_is_below(
    by_recency: bool,
) -> None:
    rig = Rig(10)
    rig.put("path", 3)
    rig.use("path", 3)
    rig.manager.drop(rig.keys("path", 2)[1], "damaged")
    rig.put("path", 2, 1)
    assert rig.use("path", 3) == 3
    rig.put("other", 7)
    rig.use("other", 7)
    rig.manager.slots.by_recency = by_recency
    found = sum(len(rig.manager.prepare_store(10, wanted=True)) for _ in range(2))
    assert found == 10, "a second search has what the first one has put in the order"


def test_Q64_in_one_order_too_of_what_comes_in_turns_the_first_part_stays() -> None:
    """20 sessions at a time, each turn 8 blocks longer, and room for half; by LRU .115."""
    rig = Rig(320)
    rig.manager.slots.by_recency = True
    hits = asked = 0
    for crowd in range(5):
        for turn in range(1, 5):
            for session in range(20):
                rig.manager.now_s += 2
                name, blocks = f"{crowd} {session}", 8 * turn
                found = min(blocks, rig.use(name, blocks))
                rig.put(name, blocks, found)
                hits, asked = hits + found, asked + blocks
    assert hits / asked == pytest.approx(0.499, abs=0.005)


def test_Q64_a_path_that_comes_back_sooner_has_its_blocks_stay() -> None:
    rig = Rig()
    in_turns(rig, 7, 10)
    assert first_to_leave(rig, "turn 0", 10, 11)
    rig.manager.now_s += 1
    rig.use("turn 1", 10)
    rig.use("turn 2", 10)
    assert not first_to_leave(rig, "turn 0", 10, 11), "others are colder now"


def test_Q64_once_there_is_room_nothing_is_the_next_to_leave() -> None:
    rig = Rig()
    in_turns(rig, 7, 10)
    assert first_to_leave(rig, "turn 0", 10, 11)
    for number in range(3, 7):
        for key in reversed(rig.keys(f"turn {number}", 10)):
            rig.manager.drop(key, "discard")
    rig.use("turn 0", 10)
    end = rig.manager.ready(rig.keys("turn 0", 10)[-1])
    assert end is not None
    assert not rig.manager.slots.barely[end.slot]
    rig.put("turn 0", 11, 10)
    for number in range(SLOTS // 2):
        rig.put(f"fill {number}")
    assert not rig.manager.slots.free
    assert rig.here("turn 0", 11) == list(range(11))


def test_Q64_the_time_of_a_block_is_not_that_of_a_path_that_goes_on_below_it() -> None:
    rig = Rig()
    in_turns(rig, 7, 10)
    rig.manager.now_s += 1
    assert rig.use("turn 0", 5) == 5
    chain = Chain(b"".join([*hashes(5, "turn 0"), *hashes(1, "other")]), 32, 1)
    (slot,) = rig.manager.prepare_store(1)
    rig.manager.begin_store(chain.key(0, 5), chain.key(0, 4), slot)
    rig.manager.complete_store(slot, ok=True)
    rig.put("next 0")
    rig.put("next 1")
    assert rig.manager.ready(chain.key(0, 5)) is not None


def test_Q64_of_a_path_that_comes_back_longer_its_beginning_is_kept() -> None:
    """As a request's next turn, or as what is brought up from a disk at once."""
    rig = Rig()
    rig.put("talk", 3)
    for number in range(2 * SLOTS):
        rig.put(f"once {number}")
    assert not rig.here("talk", 3)
    keys = rig.keys("talk", 5)
    slots = rig.manager.prepare_store(5)
    rig.manager.begin_promotions(keys, [None, *keys[:-1]], slots)
    rig.manager.complete_promotions(slots, 5)
    kept = [entry.kept > 0 for key in keys if (entry := rig.manager.ready(key)) is not None]
    assert kept == [True, True, True, False, False]
    for number in range(2 * SLOTS):
        rig.put(f"other {number}")
    assert rig.here("talk", 5) == [0, 1, 2]


def test_Q64_a_prefix_that_many_share_is_kept_as_long_as_one_of_them_is() -> None:
    rig = Rig()
    shared = hashes(2, "shared")
    manager = rig.manager

    def turn(number: int, *, use: bool) -> None:
        chain = Chain(b"".join([*shared, *hashes(1, f"own {number}")]), 32, 1)
        keys = chain.keys(0, 3)
        for at in range(3):
            if manager.ready(keys[at]) is None:
                (slot,) = manager.prepare_store(1)
                manager.begin_store(keys[at], keys[at - 1] if at else None, slot)
                manager.complete_store(slot, ok=True)
        if use:
            lease = manager.prepare_load(chain, 3, 1, 10**18)
            assert lease is not None
            manager.complete_load(lease.lease_id)

    turn(0, use=True)
    first = manager.prepare_load(Chain(shared[0], 32, 1), 1, 1, 10**18)  # by itself
    assert first is not None
    manager.complete_load(first.lease_id)
    turn(0, use=True)
    turn(1, use=True)
    for number in range(KEPT - 4):
        rig.put(f"used {number}")
        rig.use(f"used {number}")
    assert rig.policy.kept == KEPT
    rig.put("next")
    rig.use("next")
    assert len(rig.manager.prepare_store(SLOTS - KEPT)) == SLOTS - KEPT
    # The end of the first conversation has left, and what is above it has not.
    kept = {entry.key: entry.kept for entry in manager.index if entry.kept}
    keys = Chain(b"".join([*shared, *hashes(1, "own 1")]), 32, 1).keys(0, 3)
    assert [kept.get(key) for key in keys] == [2, 2, 1]


def test_Q64_what_a_request_reads_from_a_disk_may_displace_what_is_kept() -> None:
    rig = Rig()
    for number in range(KEPT):
        rig.put(f"used {number}")
        rig.use(f"used {number}")
    held = rig.manager.prepare_store(SLOTS)  # all that is not kept is on credit
    assert len(held) == SLOTS - KEPT
    assert len(rig.manager.prepare_store(SLOTS)) < KEPT // 2, "room for what is new"
    assert len(rig.manager.prepare_store(SLOTS, wanted=True)) > KEPT // 2


def test_Q64_a_copy_to_a_lower_tier_is_no_use() -> None:
    rig = Rig()
    rig.put("copied", 3)
    entries = rig.manager.pin_run(rig.keys("copied", 3))
    rig.manager.unpin(entries)
    assert rig.policy.kept == 0
    for number in range(SLOTS):
        rig.put(f"once {number}")
    assert not rig.here("copied", 3)


@pytest.mark.parametrize("used", [0, 2])
def test_Q64_what_hangs_above_a_kept_block_again_leaves_after_it(used: int) -> None:
    """A block was damaged, and stored again: it does not count those below it that are kept."""
    rig = Rig(4)
    for name, count in (("path", 3), ("other", 1)):
        rig.put(name, count)
        rig.use(name, count)
    rig.manager.drop(rig.keys("path", 3)[1], "damaged")
    rig.put("path", 2, first=1)
    rig.use("path", used)
    assert [rig.use("path", 3) for _ in range(2)] == [3, 3]
    rig.use("other")
    granted = [len(rig.manager.prepare_store(count, wanted=True)) for count in (4, 4)]
    assert sum(granted) == 4, "the rest is in no order, and never leaves"


def test_Q64_what_hangs_above_a_block_that_was_pinned_as_its_turn_came_leaves_after_it() -> None:
    """It was being copied to a lower tier, as was the one above."""
    rig = Rig(4)
    for name, count in (("path", 2), ("other", 1), ("last", 1)):
        rig.put(name, count)
        rig.use(name, count)
    copied = [rig.manager.pin(key) for key in rig.keys("path", 2)]
    rig.manager.give_back(rig.manager.prepare_store(2, wanted=True))
    rig.manager.unpin([entry for entry in copied if entry is not None], used=False)
    rig.put("new")
    rig.put("newer")
    granted = [len(rig.manager.prepare_store(count, wanted=True)) for count in (4, 4)]
    assert sum(granted) == 4, "the rest is in no order, and never leaves"


def test_Q64_a_lease_that_ends_after_a_clear_keeps_nothing() -> None:
    rig = Rig()
    rig.put("cleared", 4)
    chain = Chain(b"".join(hashes(4, "cleared")), 32, 1)
    lease = rig.manager.prepare_load(chain, 4, 1, 10**18)
    assert lease is not None
    rig.manager.clear()
    rig.put("new", 3)
    rig.manager.complete_load(lease.lease_id)
    rig.manager.clear_some()
    assert rig.policy.kept == 0
    assert rig.policy._kept.coldest is None
    assert rig.use("new", 3) == 3
    assert rig.policy.kept == 3
    for number in range(3 * SLOTS):
        rig.put(f"once {number}")
    assert rig.here("new", 3) == [0, 1, 2]
