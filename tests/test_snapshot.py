"""What was in the tiers when an engine attaches is published again, with token ids."""

from __future__ import annotations

import gc
import hashlib
import weakref
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connectors import events as of_events
from connectors import store_client as of_client
from connectors.events import EVENTS_PER_STEP, BlockEvent
from connectors.store_client import DISK, HELD_COST, MEMORY
from kvstore.config import Config, parse
from kvstore.core.errors import ProtocolError
from kvstore.core.index import Entry, State
from kvstore.core.types import BlockKey, Slot, make_key
from kvstore.metrics import Numbers
from kvstore.store import admin
from kvstore.store import snapshot as of_snapshot
from kvstore.store.key_news import KeyNews
from kvstore.store.namespace import Namespace
from kvstore.store.token_ids import ENTRY_BYTES, TABLES, TokenIds
from kvstore.wire import engine as p
from tests.harness.fakes import Town, keys_of
from tests.harness.fakes import settings as town_settings
from tests.harness.live import LiveEngine, LiveStore, engine
from tests.harness.nvme_blocks import key, settings_for, shelf
from tests.harness.script import Request, Script, hashes
from tests.test_events import SMALL, TWO, plain
from tiers.nvme import tier as of_tier
from tiers.nvme.messages import VALUE, Commit

TOKENS = 16


def settings(folder: Path, tokens: str = "1MiB", **disk: str) -> Config:
    nvme = {"path": str(folder / "kv"), "capacity": "64MiB", "durability": "10ms", **disk}
    return parse(
        {
            "cpu": {"capacity": "16MiB", "extent": "16MiB"},
            "server": {"socket": str(folder / "kv.sock"), "metrics": ""},
            "engine": {"event_tokens": tokens},
            "nvme": nvme,
        }
    )


def of_block(number: int) -> bytes:
    return array("I", range(number * TOKENS, (number + 1) * TOKENS)).tobytes()


def put(one: LiveEngine, names: Sequence[bytes], *, described: bool = True) -> None:
    """Store a chain, and say its token ids."""
    if described:
        tokens = b"".join(map(of_block, range(len(names))))
        one.scheduler.send(p.Step(tokens=(p.BlockTokens(b"".join(names), 32, tokens),)))
    one.put(names)


def pages(one: LiveEngine, scope: bytes = b"") -> list[p.Held]:
    """The whole snapshot."""
    found: list[p.Held] = []
    while True:
        one.scheduler.send(p.Step(snapshot=p.Snapshot(32, scope)))
        page = None
        while page is None:
            page = one.hear().page
        assert len(page.blocks) <= 64
        found += page.blocks
        if page.last:
            return found


def held(names: Sequence[bytes], *, memory: bool, disk: bool) -> list[p.Held]:
    parents = [b"", *(make_key(name, 0) for name in names)]
    return [
        p.Held(make_key(name, 0), parents[at], of_block(at), memory, disk)
        for at, name in enumerate(names)
    ]


def until_on_disk(one: LiveEngine, count: int) -> None:
    found = 0
    while found < count:
        found += len(one.hear().disk_added)


def test_O27_an_engine_that_comes_later_hears_what_is_in_memory_and_on_disk(
    tmp_path: Path,
) -> None:
    chain, other = hashes(9), hashes(2, "b")
    with LiveStore(settings(tmp_path)) as store:
        with engine(store, "a", page_bytes=SMALL, events=True) as one:
            assert one.active.tokens
            put(one, chain)
            put(one, other, described=False)
            until_on_disk(one, 11)
            assert pages(one) == [], "this one has heard all of it"
        with (
            engine(store, "a", page_bytes=SMALL, events=True) as one,
            engine(store, "b", page_bytes=SMALL, events=True) as two,
        ):
            expected = held(chain, memory=True, disk=True)
            assert pages(one) == expected, "parents first, without what has no tokens"
            assert pages(one) == [], "once"
            assert pages(two) == expected, "each engine has a router's entry of its own"
            assert pages(two, scope=b"another") == []
            admin.clear(store.path)
            gone = list[bytes]()
            while len(gone) < len(chain):
                gone += one.hear().removed
            assert sorted(gone) == sorted(make_key(name, 0) for name in chain)
            assert pages(two) == []
            assert store.server.store.tokens.of(chain[0]) == b""


def test_O27_a_store_that_starts_again_tells_what_its_disk_has(tmp_path: Path) -> None:
    chain, branch = hashes(8), [*hashes(3), *hashes(4, "branch")]
    with (
        LiveStore(settings(tmp_path)) as store,
        engine(store, "a", page_bytes=SMALL, events=True) as one,
    ):
        put(one, chain)
        put(one, branch[3:])
        until_on_disk(one, 12)
    with (
        LiveStore(settings(tmp_path)) as store,
        engine(store, "a", page_bytes=SMALL, events=True) as one,
    ):
        found = pages(one)
        assert [block for block in found if block in held(chain, memory=False, disk=True)] == held(
            chain, memory=False, disk=True
        )
        assert len(found) == 12
    with (
        LiveStore(settings(tmp_path)) as store,
        engine(store, "a", page_bytes=SMALL, events=True) as one,
    ):
        admin.clear(store.path)
        assert pages(one) == [], "nor after a clear"
    with (
        LiveStore(settings(tmp_path)) as store,
        engine(store, "a", page_bytes=SMALL, events=True) as one,
    ):
        assert pages(one) == []


def test_O27_without_the_setting_no_token_ids_are_kept_and_those_of_before_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = hashes(5)
    with (
        LiveStore(settings(tmp_path)) as store,
        engine(store, "a", page_bytes=SMALL, events=True) as one,
    ):
        put(one, names)
        until_on_disk(one, 5)
    words = of_block(3)
    assert words in (tmp_path / "kv" / "index" / "data.mdb").read_bytes()
    caplog.set_level("INFO")
    with (
        LiveStore(settings(tmp_path, "0")) as store,
        engine(store, "a", page_bytes=SMALL, events=True) as one,
    ):
        assert not one.active.tokens
        assert one.ask(names).lease, "the blocks are there all the same"
        put(one, hashes(3, "x"))
        until_on_disk(one, 3)
        assert not store.server.store.tokens.of(hashes(3, "x")[0])
    assert "token ids of 5 blocks removed" in caplog.text
    with (
        LiveStore(settings(tmp_path)) as store,
        engine(store, "a", page_bytes=SMALL, events=True) as one,
    ):
        assert pages(one) == []


def test_O27_a_disk_of_before_is_read_and_its_blocks_are_counted(tmp_path: Path) -> None:
    with LiveStore(settings(tmp_path, "0")) as store:
        with engine(store, "a", page_bytes=SMALL, events=True) as one:
            one.put(hashes(4))
            until_on_disk(one, 4)
        with engine(store, "a", page_bytes=SMALL, events=True) as one:
            assert one.active.there == 8, "in memory, and on disk"
    with (
        LiveStore(settings(tmp_path)) as store,
        engine(store, "a", page_bytes=SMALL, events=True) as one,
    ):
        assert pages(one) == []
        granted = one.ask(hashes(4))
        assert one.read(granted) == [one.content(name) for name in hashes(4)]


def test_O27_rows_of_token_ids_come_and_go_with_their_blocks(tmp_path: Path) -> None:
    with shelf(settings_for(tmp_path / "kv"), tokens=True) as made:
        made.tier.describe(lambda name: b"of " + name)
        made.put(1, 0, 6)
        made.settle()
        rows = made.token_rows()
        names = [key(1, index) for index in range(6)]
        assert [row.key for row in rows] == names
        assert [row.parent for row in rows] == [None, *names[:-1]]
        assert [row.tokens for row in rows] == [b"of " + name for name in names]
        made.tier.discard([names[3]])
        made.settle()
        assert [row.key for row in made.token_rows()] == names[:3]
        assert len(made.disk.attached.index.tokens(made.tier.space.digest, 0, 100).rows) == 3
        made.tier.clear()
        made.settle()
        assert made.disk.attached.index.tokens(made.tier.space.digest, 0, 100).rows == []


def test_O27_a_row_of_another_copy_of_a_block_is_none(tmp_path: Path) -> None:
    with shelf(settings_for(tmp_path / "kv"), tokens=True) as made:
        made.tier.describe(lambda name: b"of " + name)
        made.put(1, 0, 1)
        made.settle()
        (row,) = made.disk.attached.index.tokens(made.tier.space.digest, 0, 100).rows
        assert made.tier._token_row(*row) is not None
        made.tier.discard([key(1, 0)])
        assert made.tier._token_row(*row) is None
        made.settle()
        made.put(1, 0, 1)
        assert made.tier._token_row(*row) is None, "its children may have been written before"


def test_O27_a_record_that_is_refused_takes_its_token_ids_along(tmp_path: Path) -> None:
    with shelf(settings_for(tmp_path / "kv"), tokens=True) as made:
        made.tier.describe(lambda name: b"of " + name)
        made.put(1, 0, 3)
        made.settle()
        space, index = made.tier.space, made.disk.attached.index
        last = space.index.get(key(1, 2))
        assert last is not None
        orphan = VALUE.pack(last.slot, 7, last.generation, last.checksum, space.slot_bytes)
        index.commit(Commit(puts={space.digest: [(last.key, orphan)]}))
    with shelf(settings_for(tmp_path / "kv"), tokens=True) as made:
        assert made.tier.space.counts["unreachable"] == 1
        made.settle()
        rows = made.disk.attached.index.tokens(made.tier.space.digest, 0, 100).rows
        assert [name for _, name, _ in rows] == [key(1, 0), key(1, 1)]


def test_O27_token_ids_that_were_read_for_an_engine_that_has_gone_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_tier, "TOKENS_S", -1.0)
    with shelf(settings_for(tmp_path / "kv"), tokens=True) as made:
        made.tier.token_rows(5)
        made.tier.token_rows(9)
        assert list(made.tier._token_pages) == [9]
        made.tier.close()
        assert not made.tier._token_pages


def test_O27_what_a_disk_asks_for_token_ids_keeps_no_namespace() -> None:
    said: list[Callable[[BlockKey], bytes]] = []
    tiering: Any = SimpleNamespace(describing=SimpleNamespace(describe=said.append))
    town = Town()
    town.attach("one")
    (namespace,) = town.store.namespaces.values()
    tokens, (name,) = TokenIds(1 << 20), hashes(1)
    made = weakref.ref(Namespace(namespace.layout, Numbers(), lambda _: tiering, tokens=tokens))
    gc.collect()
    assert made() is None
    (of_key,) = said
    assert of_key(BlockKey(bytes(34))) == b"", "no engine has told any yet"
    tokens.add(p.BlockTokens(name, 32, of_block(0)))
    assert of_key(make_key(name, 0)) == of_block(0)


def test_O27_a_page_that_is_due_ends_with_its_session() -> None:
    """Else the store's loop would not rest until the last worker has gone."""
    town = Town(town_settings(event_tokens="1MiB"))
    one = town.attach("one")
    town.settle(one)
    one.step(snapshot=p.Snapshot(32))
    assert town.store.busy
    town.close(one.scheduler)
    town.tick()
    assert not town.store.busy
    assert town.store.sessions["one"].snapshot is None


@pytest.mark.parametrize("described", [True, False])
def test_O27_a_page_looks_at_a_limited_number_of_blocks(
    monkeypatch: pytest.MonkeyPatch, *, described: bool
) -> None:
    """Also of one long path, on the way up as on the way down, and of what it has told before."""
    monkeypatch.setattr(of_snapshot, "LOOKS_MAX", 9)
    town, chain = Town(town_settings(event_tokens="1MiB")), hashes(100)
    town.attach("one")
    (namespace,) = town.store.namespaces.values()
    above: Entry | None = None
    for number, name in enumerate(chain):
        key = make_key(name, 0)
        above = namespace.manager.index.hang(key, above, Slot(number), State.READY)
        if described:
            town.store.tokens.add(p.BlockTokens(name, 32, of_block(number)))
    snapshot = of_snapshot.SnapshotPages(namespace, KeyNews(), p.Snapshot(32))
    assert snapshot.next() is None, "what the disk has comes first"
    told, calls, page = list[BlockKey](), 0, None
    while page is None or not page.last:
        page, calls = snapshot.next(), calls + 1
        told += () if page is None else [BlockKey(held.key) for held in page.blocks]
    assert told == (keys_of(chain) if described else []), "parents first"
    assert calls == 3 * len(chain) // 10


def test_O27_the_side_table_is_bounded() -> None:
    table = TokenIds(TABLES * 5 * (ENTRY_BYTES + len(of_block(0))))
    names = [name[:-1] + b"\0" for name in hashes(9)]  # which are in one of its tables
    table.add(p.BlockTokens(b"".join(names), 32, b"".join(map(of_block, range(9)))))
    assert [table.of(name) for name in names] == [b""] * 4 + [of_block(n) for n in range(4, 9)]
    table.clear()
    assert not any(map(table.of, names))
    table.add(p.BlockTokens(names[0], 32, of_block(0)))
    assert table.of(names[0]) == of_block(0)


@pytest.mark.parametrize(
    "told",
    [
        p.BlockTokens(b"h" * 33, 32, bytes(64)),
        p.BlockTokens(b"h" * 64, 32, bytes(64 + 4)),
        p.BlockTokens(b"h" * 32, 32, bytes(7)),
        p.BlockTokens(b"h" * 32, 32, b""),
    ],
)
def test_O27_tokens_that_do_not_fit_their_hashes_are_refused(told: p.BlockTokens) -> None:
    with pytest.raises(ProtocolError, match=f"{len(told.tokens)} bytes of tokens"):
        TokenIds(1 << 20).add(told)


# The engine's side


def next_hash(parent: bytes | None, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256((parent or b"") + repr(list(tokens)).encode()).digest()


def named(count: int, hash_tokens: int = TOKENS) -> Request:
    """A request whose hashes follow from its tokens."""
    request, found = Request("r", count, hash_tokens=hash_tokens), list[bytes]()
    for at in range(0, count, hash_tokens):
        found.append(next_hash(found[-1] if found else None, range(at, at + hash_tokens)))
    request.block_hashes = found
    return request


def listening(geometry: object = None) -> Script:
    script = Script() if geometry is None else Script(TWO)
    script.client.collect_events = True
    script.half.events.next_hash = next_hash
    script.keeps_tokens = True
    script.client.detach("to hear the welcome")
    script.attach()
    script.half.take_stats()
    return script


def asked(script: Script) -> list[p.Snapshot]:
    """Whether the half asks for a page in its next step."""
    script.half.take_events()
    script.step()
    return [step.snapshot for step in script.steps() if step.snapshot is not None]


def block_of(request: Request, index: int, *, memory: bool = True, disk: bool = True) -> p.Held:
    parent = make_key(request.block_hashes[index - 1], 0) if index else b""
    return p.Held(make_key(request.block_hashes[index], 0), parent, of_block(index), memory, disk)


def test_O27_an_engine_publishes_what_was_there_some_of_it_in_each_step() -> None:
    script, request = listening(), named(TOKENS * 40)
    assert asked(script) == [p.Snapshot(32)]
    assert asked(script) == [], "one at a time"
    blocks = tuple(block_of(request, n, memory=n % 2 == 0) for n in range(40))
    script.inbox.append(p.Answers(page=p.Page(blocks)))
    script.step()
    steps = list[list[BlockEvent]]()
    while events := script.half.take_events():
        steps.append(events)
        done = sum(map(len, steps)) == 60
        assert (script.client._snapshot is not None) == done, "what has come is told first"
    assert max(map(len, steps)) <= 2 * EVENTS_PER_STEP // HELD_COST
    expected = list[BlockEvent]()
    for n in range(40):
        parent = request.block_hashes[n - 1] if n else None
        tokens = list(range(n * TOKENS, (n + 1) * TOKENS))
        for medium in (MEMORY, DISK)[n % 2 :]:
            expected.append(BlockEvent(medium, True, 0, [request.block_hashes[n]], parent, tokens))
    assert plain([event for events in steps for event in events]) == expected
    script.step()
    assert [step.snapshot for step in script.steps()] == [p.Snapshot(32)]
    script.inbox.append(p.Answers(page=p.Page(last=True)))
    script.step()
    assert asked(script) == []


def test_O27_token_ids_that_are_not_those_of_the_hash_are_counted_not_told() -> None:
    script, request = listening(), named(TOKENS * 6)
    good = block_of(request, 1, disk=False)
    wrong = [
        p.Held(good.key, good.parent, of_block(2), True, False),  # others
        p.Held(good.key, b"", good.tokens, True, False),  # behind others
        p.Held(good.key, good.parent, good.tokens[:-4], True, False),
        p.Held(good.key, good.parent, b"", True, False),
    ]
    script.inbox.append(p.Answers(page=p.Page((*wrong, good), last=True)))
    script.step()
    (event,) = script.half.take_events()
    assert event.hashes == [request.block_hashes[1]]
    assert script.half.take_stats()["events_untold"] == 4


def test_O27_a_block_of_several_engine_blocks_has_all_their_hashes() -> None:
    script, request = listening(TWO), named(64)
    name = make_key(request.block_hashes[3], 0)
    tokens = array("I", range(32, 64)).tobytes()
    held_block = p.Held(name, make_key(request.block_hashes[1], 0), tokens, True, False)
    script.inbox.append(p.Answers(page=p.Page((held_block,), last=True)))
    script.step()
    (event,) = script.half.take_events()
    assert (event.hashes, event.parent) == (request.block_hashes[2:4], request.block_hashes[1])
    script.inbox.append(p.Answers(removed=(name,)))
    script.step()
    (event,) = script.half.take_events()
    assert event.hashes == request.block_hashes[2:4]


def test_O16_an_engine_that_loses_its_store_publishes_that_blocks_have_left_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once it is attached again, the store names the blocks that are still there."""
    monkeypatch.setattr(of_client, "KNOWN_MAX", 50)  # its keys are in two sets
    script, request = listening(), named(TOKENS * 130)
    there = tuple(block_of(request, n, memory=n < 129, disk=n == 129) for n in range(100, 130))
    own = [make_key(name, 0) for name in request.block_hashes[:100]]
    script.inbox.append(p.Answers(added=tuple(own), page=p.Page(there, last=True)))
    script.step()
    while script.client._changes:
        script.half.take_events()
    script.client.known.add(own[:3])  # in both sets
    script.client.detach("the store is gone")
    script.attach()
    assert script.client._heard < 0
    assert not any(key in script.client.known for key in own)
    script.inbox.append(p.Answers(page=p.Page(there[:1], last=True)))
    script.step()
    steps = list[list[BlockEvent]]()
    while script.client._changes:
        steps.append(script.half.take_events())
    assert max(map(len, steps)) <= EVENTS_PER_STEP
    *removed, again = [event for events in steps for event in events]
    assert {event[:3] for event in removed} == {(MEMORY, False, 0)}
    names = [name for event in removed for name in event.hashes]
    assert sorted(names) == sorted(request.block_hashes[:129]), "each once, not those on disk"
    assert again[:4] == (MEMORY, True, 0, [request.block_hashes[100]])
    assert script.client._heard == 0, "the store that is there now has told none of these"


def test_O27_what_is_stored_is_described_to_a_store_that_keeps_token_ids() -> None:
    for keeps in (True, False):
        script, request = listening(), Request("r", TOKENS * 5)
        script.client.keeps_tokens = keeps
        script.arrive(request)
        script.admit(request)
        script.step(request, request.num_tokens, [[1, 2, 3, 4, 5]])
        told = [tokens for step in script.steps() for tokens in step.tokens]
        whole = p.BlockTokens(b"".join(request.block_hashes), 32, b"".join(map(of_block, range(5))))
        assert told == ([whole] if keeps else [])


def test_O27_a_step_tells_a_limited_number_of_token_ids_and_the_rest_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a_block = 32 + 4 * TOKENS
    monkeypatch.setattr(of_events, "TOLD_BLOCKS", 2)
    monkeypatch.setattr(of_client, "TOKENS_BYTES", 4 * a_block)
    monkeypatch.setattr(of_client, "TOKENS_BYTES_MAX", 10 * a_block)

    def told(count: int, name: str) -> tuple[list[int], int]:
        """Blocks in each step, and how many were dropped."""
        request = Request(name, TOKENS * count, name)
        script.arrive(request)
        script.admit(request)
        script.step(request, request.num_tokens, [list(range(1, count + 1))])
        for _ in range(5):
            script.step()
        steps = [b"".join(part.hashes for part in step.tokens) for step in script.steps()]
        lost = script.half.take_stats()["events_untold"]
        assert b"".join(steps) == b"".join(request.block_hashes[lost:]), "the oldest were dropped"
        return [len(step) // 32 for step in steps if step], lost

    script = listening()
    script.client.keeps_tokens = True
    assert told(10, "few") == ([4, 4, 2], 0)
    assert told(15, "many") == ([4, 4, 1], 6)
    assert told(10, "again") == ([4, 4, 2], 0), "those that waited before count no more"


def test_O27_without_the_stores_token_ids_what_was_there_is_counted() -> None:
    script = Script()
    script.client.collect_events = True
    script.there = 12
    script.client.detach("to hear the welcome")
    script.attach()
    assert script.half.take_stats()["events_untold"] == 12
    script.half.events.next_hash = next_hash
    assert asked(script) == []
