"""What a scheduler half tells of blocks that enter and leave the tiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from connectors import events as events_module
from connectors import store_client as client_module
from connectors.engine_interface import Geometry
from connectors.events import EVENTS_PER_STEP, BlockEvent, joined
from connectors.store_client import DISK, MEMORY
from kvstore.config import parse
from kvstore.core.types import BlockKey, GroupRule, make_key
from kvstore.store import admin
from kvstore.wire import engine as p
from tests.harness.live import LiveEngine, LiveStore, engine, store_settings
from tests.harness.nvme_blocks import key, settings_for, shelf
from tests.harness.script import Request, Script, hashes

TABLE = [[1, 2, 3, 4]]
SMALL = 1 << 16  # bytes of a block: all fit
TWO = Geometry(32, 16, (16, 32, 32), (GroupRule(), GroupRule(), GroupRule(2)))


def listening(geometry: Geometry | None = None) -> Script:
    script = Script() if geometry is None else Script(geometry)
    script.client.collect_events = True
    return script


def run(script: Script, request: Request, table: Sequence[Sequence[int]] = TABLE) -> None:
    script.arrive(request)
    script.admit(request)
    script.step(request, request.num_tokens, table)


def happened(
    script: Script,
    added: Sequence[bytes] = (),
    removed: Sequence[bytes] = (),
    disk_added: Sequence[bytes] = (),
    disk_removed: Sequence[bytes] = (),
) -> list[BlockEvent]:
    """What is told of one turn of the store."""
    script.inbox.append(
        p.Answers(
            added=tuple(added),
            removed=tuple(removed),
            disk_added=tuple(disk_added),
            disk_removed=tuple(disk_removed),
        )
    )
    script.step()
    return script.half.take_events()


def stored(request: Request, block: int, medium: str = MEMORY) -> BlockEvent:
    names, tokens = request.block_hashes, list(request.all_token_ids)
    parent = names[block - 1] if block else None
    return BlockEvent(medium, True, 0, [names[block]], parent, tokens[block * 16 : block * 16 + 16])


def gone(request: Request, block: int, medium: str = MEMORY) -> BlockEvent:
    return BlockEvent(medium, False, 0, [request.block_hashes[block]])


def plain(events: Sequence[BlockEvent]) -> list[BlockEvent]:
    return [event._replace(tokens=list(event.tokens) if event.stored else ()) for event in events]


def test_O16_events_have_tokens_and_parent_and_name_the_tier() -> None:
    script, request = listening(), Request("r", 40)
    run(script, request)
    first, second = (script.key(request, index) for index in range(2))
    got = happened(script, added=[first, second])
    assert plain(got) == [stored(request, 0), stored(request, 1)]
    assert plain(happened(script, disk_added=[first])) == [stored(request, 0, DISK)]
    assert happened(script, removed=[first, second]) == [gone(request, 0), gone(request, 1)]
    assert happened(script, disk_removed=[first]) == [gone(request, 0, DISK)]
    assert script.half.take_events() == []


def test_O24_an_engine_is_told_of_what_it_stored_or_asked_for_and_of_no_other(
    tmp_path: Path,
) -> None:
    config = store_settings(tmp_path)
    with (
        LiveStore(config) as store,
        engine(store, "a", page_bytes=SMALL, events=True) as one,
        engine(store, "b", page_bytes=SMALL, events=True) as other,
    ):
        mine, theirs, both = hashes(3), hashes(3, "b"), hashes(2, "c")
        assert not other.ask(both).lease, "it will compute these"
        one.put([*mine])
        other.put([*theirs])
        one.put([*both])
        expected = {make_key(name, 0) for name in (*mine, *both)}
        assert heard(one, expected) == expected
        expected = {make_key(name, 0) for name in (*theirs, *both)}
        assert heard(other, expected) == expected
        other.put(mine[:1])  # twice the same: the first copy stays, and the other one hears of it
        assert heard(other, {make_key(mine[0], 0)}) == {make_key(mine[0], 0)}
        admin.clear(store.path)
        expected = {make_key(name, 0) for name in (*theirs, *both, mine[0])}
        assert heard(other, expected, "removed") == expected


def heard(one: LiveEngine, expected: set[BlockKey], what: str = "added") -> set[bytes]:
    """What an engine is told until it has heard all that is expected."""
    found = list[bytes]()
    while not expected <= set(found):
        found += getattr(one.hear(), what)
    assert len(found) == len(set(found)), "each once"
    return set(found)


def test_O16_a_run_of_blocks_has_tokens_too() -> None:
    script, request = listening(), Request("r", 16 * 6)
    run(script, request, [[1, 2, 3, 4, 5, 6]])
    keys = [script.key(request, index) for index in range(6)]
    assert plain(happened(script, added=keys)) == [stored(request, index) for index in range(6)]


def test_O16_O24_blocks_that_go_on_with_one_another_are_published_as_one_event() -> None:
    """Else a step of 16,384 tokens has more events than a router takes at once."""
    one, other = Request("r", 16 * 1024), Request("o", 32)
    blocks = [stored(one, index) for index in range(1024)]
    ends = [gone(one, index, DISK) for index in range(1024)]
    salted = [stored(other, index)._replace(extra=[("salt",)]) for index in range(2)]
    made = list(joined([*blocks, *ends, *salted, stored(other, 0), stored(one, 3), gone(one, 3)]))
    assert [len(event.hashes) for event in made] == [1024, 1024, 2, 1, 1, 1]
    whole, left, salty, *rest = made
    assert (whole.hashes, whole.parent) == (one.block_hashes, None)
    assert list(whole.tokens) == list(one.all_token_ids)
    assert (left.medium, left.stored, left.hashes) == (DISK, False, one.block_hashes)
    assert salty.extra == [("salt",), ("salt",)]
    assert [(event.parent, event.hashes) for event in rest] == [
        (None, other.block_hashes[:1]),
        (one.block_hashes[2], one.block_hashes[3:4]),
        (None, one.block_hashes[3:4]),
    ]


def test_O16_O24_a_block_that_was_stored_once_more_is_published_once() -> None:
    """The store tells again of a block that it has: an engine may have forgotten its key."""
    script, request = listening(), Request("r", 16)
    run(script, request)
    key = script.key(request, 0)
    assert len(happened(script, added=[key])) == 1
    assert happened(script, added=[key]) == []
    assert script.client._heard == 2
    assert len(happened(script, removed=[key])) == 1
    assert len(happened(script, added=[key])) == 1


def test_O16_the_request_need_not_live_until_its_blocks_are_stored() -> None:
    script, request = listening(), Request("r", 16)
    run(script, request)
    script.half.request_finished("r", TABLE)
    assert plain(happened(script, added=[script.key(request, 0)])) == [stored(request, 0)]
    assert plain(happened(script, disk_added=[script.key(request, 0)])) == [
        stored(request, 0, DISK)
    ]


def test_O16_what_comes_up_for_a_request_has_its_tokens() -> None:
    script, request, other = listening(), Request("r", 40), Request("o", 40, "other")
    script.arrive(request, [0, 1])
    assert plain(happened(script, added=[script.key(request, 1)])) == [stored(request, 1)]
    script.half.request_finished("r", ())
    script.arrive(other)
    script.half.request_finished("o", ())
    assert plain(happened(script)) == []
    assert happened(script, added=[script.key(other, 0)]) == []
    assert script.half.take_stats()["events_untold"] == 1
    assert not script.half.events._asked, "nothing stays of requests that are gone"


def test_O16_what_comes_up_for_a_prefill_of_one_token_is_told_though_that_has_ended() -> None:
    """The step in which its blocks are heard of is its last, and events are taken after it."""
    script, request = listening(), Request("r", 40)
    script.arrive(request, [0, 1])
    script.inbox.append(p.Answers(added=(script.key(request, 0), script.key(request, 1))))
    script.step()
    script.half.request_finished("r", ())
    assert plain(script.half.take_events()) == [stored(request, 0), stored(request, 1)]
    assert "events_untold" not in script.half.take_stats()
    assert script.half.take_events() == []
    assert not script.half.events._asked


def test_O16_of_requests_that_have_ended_few_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events_module, "ENDED_MAX", 2)
    script = listening()
    for number in range(4):
        request = Request(f"r{number}", 40, f"r{number}")
        script.arrive(request, [0])
        script.half.request_finished(f"r{number}", ())
    told = script.half.events
    assert len(told._ended) == 2
    assert len(told._asked) == 4, "two blocks of each"


def test_O16_what_this_engine_has_no_tokens_of_is_counted_not_told() -> None:
    script, theirs = listening(), Request("t", 32)
    keys = [script.key(theirs, index) for index in range(2)]
    assert happened(script, added=keys, disk_added=keys[:1]) == []
    assert script.half.take_stats() == {"events_untold": 3}
    (step,) = [step for step in script.steps() if step.counts]
    assert step.counts == {"events_untold": 3}


def test_O16_a_prompt_that_was_shortened_meanwhile_tells_nothing_wrong() -> None:
    script, request = listening(), Request("r", 40)
    script.arrive(request)
    name = script.key(request, 1)
    request.block_hashes = hashes(2, "changed")
    assert happened(script, added=[name]) == []
    request.block_hashes = []
    assert happened(script, added=[name]) == []


def test_O16_a_block_of_several_engine_blocks_is_told_as_these() -> None:
    script, request = listening(TWO), Request("r", 64)
    run(script, request, [[1, 2, 3, 4], [1, 2], [1, 2]])
    names, tokens = request.block_hashes, list(range(32, 64))
    keys = [script.key(request, 1, group) for group in range(3)]
    assert plain(happened(script, added=keys)) == [  # the window's group is not told
        BlockEvent(MEMORY, True, 0, [names[2], names[3]], names[1], tokens),
        BlockEvent(MEMORY, True, 1, [names[3]], names[1], tokens),
    ]
    assert happened(script, removed=keys) == [
        BlockEvent(MEMORY, False, 0, [names[2], names[3]]),
        BlockEvent(MEMORY, False, 1, [names[3]]),
    ]
    unknown = Request("u", 32, "u")
    assert happened(script, removed=[script.key(unknown, 0)]) == [
        BlockEvent(MEMORY, False, 0, [unknown.block_hashes[1]])  # all that is known of it
    ]


def test_O16_what_else_is_in_a_hash_is_told_for_each_engine_block() -> None:
    """Without it an index takes one image's blocks for another's, one salt's for no salt's."""
    script, request, plainly = listening(TWO), Request("r", 64), Request("p", 32, "p")
    script.half.events.extra_of = lambda one: None if one is plainly else keys_of
    run(script, request, [[1, 2, 3, 4], [1, 2], [1, 2]])
    keys = [script.key(request, 1, group) for group in range(2)]
    one, other = happened(script, added=keys)
    assert one.extra == [("k", 32), ("k", 48)]
    assert other.extra == [("k", 32)]
    assert [event.extra for event in happened(script, disk_added=keys)] == [one.extra, other.extra]
    assert [event.extra for event in happened(script, removed=keys)] == [(), ()]
    run(script, plainly, [[5, 6], [3], [3]])
    (event,) = happened(script, added=[script.key(plainly, 0)])
    assert event.extra == ()
    script.arrive(found := Request("f", 33, "f"))
    (event,) = happened(script, added=[script.key(found, 0, 1)])
    assert event.extra == [("k", 0)], "of what a lookup brings up, too"


def keys_of(first: int, end: int, step: int) -> list[object]:
    return [("k", at) for at in range(first, end, step)]


def test_O16_what_is_remembered_for_events_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "TOKENS_MAX", 64)
    monkeypatch.setattr(events_module, "HASHES_MAX", 4)
    script = listening(TWO)
    names = []
    for number in range(5):
        request = Request(f"r{number}", 48, f"r{number}")
        run(script, request, [[1, 2, 3], [1, 2], [1, 2]])
        names.append(script.key(request, 0))
    told = script.half.events
    assert len(told._described) == 2
    assert len(happened(script, added=names)) == 5, "they are here yet, and were asked for"
    assert len(told._described) == len(told._published) == 2
    for number in range(5):
        script.half.request_finished(f"r{number}", ())
    script.half.take_events()
    script.half.take_stats()
    assert len(happened(script, disk_added=names)) == 2
    assert script.half.take_stats()["events_untold"] == 3


def test_O24_a_burst_is_told_a_limited_number_of_blocks_in_each_step() -> None:
    script, request = listening(), Request("r", 16 * 200)
    run(script, request, [list(range(1, 201))])
    script.half.take_events()
    gone_keys = [make_key(name, 0) for name in hashes(1000, "x")]
    steps = [happened(script, removed=gone_keys)]
    while events := script.half.take_events():
        steps.append(events)
    assert [len(events) for events in steps] == [EVENTS_PER_STEP] * 15 + [40]
    told = [name for events in steps for event in events for name in event.hashes]
    assert told == hashes(1000, "x"), "each once, in order"


def test_O24_an_engine_that_stores_much_tells_as_much_in_a_step() -> None:
    script, request = listening(), Request("r", 16 * 90)
    run(script, request, [list(range(1, 91))])
    keys = [script.key(request, index) for index in range(90)]
    got = happened(script, added=keys, removed=keys, disk_added=keys)
    assert len(got) == 270, "of each block what can become of it"
    assert happened(script, disk_removed=keys) == [gone(request, n, DISK) for n in range(64)]


def test_O24_the_store_hears_what_was_told_and_sends_the_next() -> None:
    script = listening()
    keys = [make_key(name, 0) for name in hashes(600, "x")]
    happened(script, removed=keys)
    heard = 0
    for _ in range(10):
        script.half.take_events()
        script.step()
        heard += sum(step.heard for step in script.steps())
    assert heard >= client_module.HEARD, "or the store would wait for ever"
    silent = Script()
    silent.inbox.append(p.Answers(added=tuple(keys)))
    silent.step()
    assert [step.heard for step in silent.steps()] == [600], "without events at once"


def test_O24_what_the_store_could_not_keep_is_counted() -> None:
    script = listening()
    script.inbox.append(p.Answers(lost=7))
    script.step()
    assert script.half.take_stats()["events_untold"] == 7


@pytest.mark.parametrize("events", [True, False])
def test_O24_after_lost_news_no_block_counts_as_stored(*, events: bool) -> None:
    """Those that have left may be among what was lost, and would never be stored again."""
    script = listening() if events else Script()
    before, after = (make_key(name, 0) for name in hashes(2, "x"))
    script.inbox.append(p.Answers(added=(before,)))
    script.step()
    assert before in script.client.known
    script.inbox.append(p.Answers(added=(after,), lost=1))
    script.step()
    assert before not in script.client.known
    assert after in script.client.known


def test_O16_an_engine_without_events_remembers_nothing() -> None:
    script, request = Script(), Request("r", 40)
    run(script, request)
    assert happened(script, added=[script.key(request, 0)]) == []
    assert not script.half.events._described
    assert not script.half.events._asked
    assert script.client.take_changes(10) == []


def test_O16_the_disk_is_told_of_to_those_who_asked(tmp_path: Path) -> None:
    config = parse(
        {
            "cpu": {"capacity": "16MiB", "extent": "16MiB"},
            "server": {"socket": str(tmp_path / "store.sock"), "metrics": ""},
            "nvme": {"path": str(tmp_path / "kv"), "capacity": "64MiB", "durability": "50ms"},
        }
    )
    expected = {make_key(name, 0) for name in hashes(3)}
    with (
        LiveStore(config) as store,
        engine(store, "a", events=True) as one,
        engine(store, "b") as other,
    ):
        one.put(hashes(3))
        heard = list[bytes]()
        while not expected <= set(heard):
            heard += one.scheduler.take(p.Answers).disk_added
        assert sorted(heard) == sorted(expected)
        other.scheduler.send(p.Step((p.Lookup(1, hashes(1)[0], 32),)))
        answers = other.scheduler.take(p.Answers)
        while not answers.granted:
            assert not answers.disk_added
            answers = other.scheduler.take(p.Answers)
        assert not answers.disk_added


def test_O16_a_disk_tier_tells_what_can_be_read_and_what_cannot(tmp_path: Path) -> None:
    with shelf(settings_for(tmp_path / "kv")) as made:
        made.put(0, 0, 2)
        assert made.tier.take_changes().added == [], "nobody wants to know yet"
        made.tier.tell()
        made.put(1, 0, 3)
        names = [key(1, index) for index in range(3)]
        assert made.tier.take_changes().added == names
        made.tier.discard([names[1]])  # and what hangs below it
        changes = made.tier.take_changes()
        assert (changes.added, sorted(changes.removed)) == ([], sorted(names[1:]))
        made.put(1, 1, 2)
        assert made.tier.take_changes().added == [names[1]]
        made.tier.clear()
        made.put(1, 0, 1)  # is here again before all that was cleared is told
        made.settle()
        changes = made.tier.take_changes()
        left = {key(0, 0), key(0, 1), names[1]}
        assert set(changes.removed) - set(changes.added) == left
        assert names[0] not in changes.removed or names[0] in changes.added
        assert len(changes.removed) == len(set(changes.removed))
        made.tier.close()
        assert made.tier.space.index.changes is None, "take_changes() is not called any more"


def test_O16_a_write_that_fails_is_no_event(tmp_path: Path) -> None:
    with shelf(settings_for(tmp_path / "kv")) as made:
        made.tier.tell()
        space = made.tier.space
        made.put(0, 0, 1)
        made.tier.take_changes()
        (place,) = space.take_places(1)
        record = space.begin(key(5, 0), None, place, 99)
        space.written(record, 0, ok=False)
        changes = made.tier.take_changes()
        assert (changes.added, changes.removed) == ([], [])
