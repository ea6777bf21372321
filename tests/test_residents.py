"""Blocks that a prefill engine still has in its own memory: both stores, without processes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import msgspec
import pytest

from connectors.partial_block import PartialBlock
from kvstore.core.errors import ProtocolError
from kvstore.core.layout import PageRun, RankPages
from kvstore.core.types import BlockKey
from kvstore.handover.engine_blocks import Resident
from kvstore.wire import engine as p
from kvstore.wire import peer as m
from tests.harness.fakes import SLOT_BYTES, Engine, Town, from_u32, hashes, keys_of, u32
from tests.harness.handover_pair import Pair, stored
from tests.harness.script import Request, Script
from tests.test_direct_fetch import offered, reading
from tests.test_direct_push import TARGETS, claimed, filled

RANK = RankPages("theirs", b"md", ((),))


class Announced:
    """What the prefill engine has in its own memory, as the test likes."""

    def __init__(self, pair: Pair) -> None:
        self.here: dict[BlockKey, Resident] = {}
        pair.source.engines = self  # type: ignore[assignment]

    def add(self, chain: list[bytes], *positions: int) -> None:
        keys = keys_of(chain)
        self.here |= {keys[at]: Resident(1, (10 * at, 10 * at + 1), (0, 0)) for at in positions}

    def find(self, key: BlockKey) -> Resident | None:
        return self.here.get(key)

    def holds(self, place: Resident) -> bool:
        return place in self.here.values()

    def ranks(self, _number: int) -> list[RankPages]:
        return [RANK]


def test_P3_direct_what_an_engine_has_itself_is_pushed_from_slots() -> None:
    """No engine writes, and a peer that is pushed to refuses to be told of an engine's memory."""
    pair, chain = stored(3)
    Announced(pair).add(chain, 0, 2)
    number = claimed(pair, chain)
    pair.name(number, TARGETS)
    pair.run(20)
    assert sorted(block for job in filled(pair) for block in job[3]) == [10, 10, 11, 11, 12, 12]
    assert pair.passed == {(number, position): True for position in range(3)}
    assert pair.consumer.fetched == {"cpu": 3}
    pair.check_nothing_left()


def test_L1_direct_what_an_engine_has_itself_is_told_to_be_there() -> None:
    pair, chain = stored(4)
    shown = Announced(pair)
    shown.add(chain, 0, 2)
    number = reading(pair, chain)
    (read,) = pair.in_engines
    assert (from_u32(read.positions), from_u32(read.numbers)) == ([0, 2], [0, 1, 20, 21])
    assert [rank.agent for rank in read.ranks] == ["theirs"]
    assert sorted(pair.passed_on) == [(number, at) for at in range(4)]
    pair.read(number, range(4))
    pair.run(5)
    assert pair.passed == {(number, at): True for at in range(4)}
    assert pair.consumer.fetched == {"gpu": 2, "cpu": 2}
    pair.check_nothing_left()


def test_L1_direct_an_engines_memory_is_told_once_for_each_want() -> None:
    pair, chain = stored(3, held=1)
    Announced(pair).add(chain, 0, 1, 2)
    for _ in range(2):
        number = offered(pair, chain)
        pair.claim(number, range(3))
        for at in range(3):  # held one after the other
            pair.run(5)
            pair.read(number, [at])
        pair.run(5)
    told = [message for message in pair.down.sent if isinstance(message, m.Have)]
    assert [len(message.ranks) for message in told] == [1, 0, 0] * 2
    assert [len(read.ranks) for read in pair.in_engines] == [1, 0, 0] * 2


def test_direct_blocks_of_other_sizes_are_told_apart() -> None:
    """Of groups whose engine blocks are larger: all are told before any is claimed."""
    pair, chain = stored(4)
    shown, keys = Announced(pair), keys_of(chain)
    shown.here = {key: Resident(1, (at,) * (1 + at % 2), (0, 0)) for at, key in enumerate(keys)}
    number = offered(pair, chain)
    pair.run(5)
    pair.claim(number, range(4))
    found = [(from_u32(read.positions), from_u32(read.numbers)) for read in pair.in_engines]
    assert found == [([0, 2], [0, 2]), ([1, 3], [1, 1, 3, 3])]


def test_a_want_is_told_of_a_few_engines_only() -> None:
    pair, chain = stored(m.ENGINES_MAX + 2)
    shown, keys = Announced(pair), keys_of(chain)
    shown.here = {key: Resident(at + 1, (at,), (0,)) for at, key in enumerate(keys)}
    number = offered(pair, chain)
    pair.claim(number, range(len(chain)))
    pair.run(5)
    assert len(pair.in_engines) == m.ENGINES_MAX
    assert len(pair.passed_on) == len(chain), "the others in their slots"
    more = m.Have(number, u32([0]), u32([7]), engine=99, ranks=(RankPages("a", b"", ((),)),))
    with pytest.raises(ProtocolError, match="more than 4 of them"):
        pair.consumer.on_message(pair.peer, more, pair.taker.now_ns)


def test_B15_direct_what_cannot_be_read_in_an_engine_is_told_anew() -> None:
    pair, chain = stored(3)
    Announced(pair).add(chain, 0, 1)
    number = reading(pair, chain)
    pair.passed_on.clear()
    pair.read(number, [0, 1], ok=False)
    pair.run(5)
    assert pair.passed_on == [(number, 0), (number, 1)]
    assert not pair.passed
    pair.read(number, [0, 1])
    pair.read(number, [2], ok=False)
    pair.run(5)
    assert pair.passed == {(number, 0): True, (number, 1): True, (number, 2): False}
    assert pair.consumer.fetched == {"cpu": 2}
    pair.check_nothing_left()


def test_B19_direct_what_an_engine_overwrites_meanwhile_is_told_anew_and_read_again() -> None:
    pair, chain = stored(3)
    shown = Announced(pair)
    shown.add(chain, 0, 1)
    number = reading(pair, chain)
    pair.passed_on.clear()
    shown.here[keys_of(chain)[1]] = Resident(2, (7, 8), (0, 0))  # another engine computed it
    pair.read(number, range(3))
    pair.run(5)
    assert pair.passed == {(number, 0): True, (number, 2): True}
    assert pair.passed_on == [(number, 1)], "in its slot now"
    assert pair.producer.counts["stale"] == 1
    pair.read(number, [1])
    pair.run(5)
    assert pair.passed[number, 1]
    assert pair.consumer.fetched == {"gpu": 1, "cpu": 2}
    pair.check_nothing_left()


def test_what_is_not_read_by_workers_is_never_told_to_be_in_an_engine() -> None:
    pair, chain = stored(2)
    Announced(pair).add(chain, 0, 1)
    pair.want(chain)
    pair.run(3)
    told = [message for message in pair.down.sent if isinstance(message, m.Have)]
    assert [message.engine for message in told] == [None]
    number = next(iter(pair.consumer._fetches))
    have = m.Have(number, u32([0]), u32([7]), engine=1)
    with pytest.raises(ProtocolError, match="was not asked to be read in an engine"):
        pair.consumer.on_message(pair.peer, have, pair.taker.now_ns)


def test_direct_wants_cost_no_sums() -> None:
    pair, chain = stored(3)
    pair.moves.sum = None  # type: ignore[assignment, method-assign]
    number = reading(pair, chain)
    pair.read(number, range(3))
    pair.run(5)
    assert pair.passed == {(number, at): True for at in range(3)}


@pytest.mark.parametrize(
    "message",
    [
        m.Have(1, u32([0, 1]), u32([7]), engine=1, ranks=(RANK,)),
        m.Have(1, u32([0]), b"", engine=1, ranks=(RANK,)),
        m.Have(1, u32([9]), u32([7]), engine=1, ranks=(RANK,)),
    ],
)
def test_engine_blocks_that_are_not_as_many_for_each_are_refused(message: m.Have) -> None:
    pair, chain = stored(2)
    number = offered(pair, chain)
    wrong = msgspec.structs.replace(message, job=number)
    with pytest.raises(ProtocolError, match=r"engine blocks for|expected different ones"):
        pair.consumer.on_message(pair.peer, wrong, pair.taker.now_ns)


# What a store does with it

SERVES = p.Serves(RankPages("agent", b"md", ((PageRun(0, 512, 1, 4096, 512, 0),),)), 8)


def joined(town: Town, *, serves: bool) -> Engine:
    """An engine that has read nothing yet of what its store says."""
    made = Engine(town, "engine", direct=True)
    made.join()
    if serves:
        town.say(made.workers[0], SERVES)
    return made


@pytest.mark.parametrize("before", [True, False])
def test_E_an_engine_gets_its_board_once_it_is_attached(before: bool) -> None:
    town = Town()
    engine = joined(town, serves=before)
    town.settle(engine)
    assert engine.active is not None
    if not before:
        assert not engine.boards
        town.say(engine.workers[0], SERVES)
    town.settle(engine)
    assert engine.boards == [p.BlockVersions(8)]
    town.say(engine.workers[0], SERVES)
    town.settle(engine)
    assert engine.boards == [p.BlockVersions(8)], "once"


def test_B2_direct_pages_that_are_not_of_its_slots_are_no_workers_to_serve() -> None:
    town = Town()
    engine = joined(town, serves=False)
    town.settle(engine)
    long = PageRun(0, SLOT_BYTES + 1, 1, 4096, 2 * SLOT_BYTES, 0)
    serves = p.Serves(RankPages("agent", b"md", ((long,),)), 8)
    town.say(engine.workers[0], serves)
    town.settle(engine)
    (reason,) = set(engine.detached)
    assert "up to byte 4097 of a part of group 0, expected up to 4096" in reason


@pytest.mark.parametrize("whole", [True, False], ids=["all of it", "one of its processes"])
def test_E_what_an_engine_shows_is_found_until_it_is_gone(whole: bool) -> None:
    """Of one that is about to go nothing is found: what serves its memory may be gone, too."""
    town = Town()
    engine = joined(town, serves=True)
    town.settle(engine)
    (namespace,) = town.store.namespaces.values()
    (key,) = keys_of(hashes(1))
    shown = p.EngineBlocks(u32(engine.credits[:1]), (key,), u32([5]), u32([0]))
    engine.step(engine_blocks=(shown,))
    engine.put(hashes(1))
    assert namespace.engines.find(key) is not None
    if whole:
        engine.leave()
    else:
        town.close(engine.scheduler)
    assert namespace.engines.find(key) is None
    assert bool(namespace.engines._engines) is not whole, "until its workers have closed"


def test_E_an_engine_that_shows_without_a_board_ends_its_session_only() -> None:
    town = Town()
    engine = joined(town, serves=False)
    town.settle(engine)
    engine.step(engine_blocks=(p.EngineBlocks(u32([1]), (b"k",), u32([5]), u32([0])),))
    town.settle(engine)
    assert set(engine.detached) == {"blocks shown by an engine that has no board"}


# What the scheduler half shows, and takes back


def with_board(blocks: int = 16) -> tuple[Script, memoryview]:
    script = Script()
    board = os.memfd_create("board")
    os.ftruncate(board, 4 * blocks)
    words = memoryview(mmap.mmap(board, 4 * blocks)).cast("I")
    script.fds.append(board)
    script.inbox.append(p.BlockVersions(blocks))
    script.client.receive()
    return script, words


def computed(script: Script, blocks: Sequence[int] = (1, 2)) -> Request:
    """A request that has just computed these engine blocks."""
    request = Request("r", 16 * len(blocks) + 1)
    script.arrive(request)
    script.admit(request)
    script.steps()
    script.step(request, 16 * len(blocks), [list(blocks)], written=blocks)
    return request


def told(script: Script) -> list[p.EngineBlocks]:
    return [shown for step in script.steps() for shown in step.engine_blocks]


def test_E_what_is_stored_is_shown_with_what_the_board_says_from_this_step_on() -> None:
    script, words = with_board()
    words[1] = 5
    request = computed(script)
    (shown,) = told(script)
    keys = tuple(script.key(request, index) for index in (0, 1))
    assert shown == p.EngineBlocks(u32([0, 1]), keys, u32([1, 2]), u32([6, 1]))


def test_E_the_board_is_written_before_anybody_can_overwrite_blocks() -> None:
    script, words = with_board()
    computed(script)
    script.step(written=[2, 3])
    assert words.tolist()[:5] == [0, 1, 2, 1, 0]
    loaded = Request("l", 33)
    script.arrive(loaded, range(2))
    script.load(loaded, [[1, 4, 5]])
    assert words.tolist()[:5] == [0, 2, 2, 1, 1], "a load overwrites, too"
    script.step(written=[99, 3])
    assert words.tolist()[3] == 2


def test_E_blocks_that_another_connector_may_fill_are_not_what_they_were() -> None:
    """Beside others, what these load into is named by no step before it is written."""
    script, words = with_board()
    computed(script)
    other = Request("other", 49)
    script.arrive(other)
    script.matched(other, 16)
    script.half.update_state_after_alloc("other", [[1, 2, 6]], 0)
    meta = script.step()
    assert words.tolist()[:8] == [0, 1, 2, 0, 0, 0, 1, 0], "the first is its own cache's"
    assert meta.flush, "and copies of them end first"


def test_E_what_has_ended_before_the_step_is_not_shown_as_what_overwrites_it() -> None:
    """Its copy comes first, and is right; what is in the engine then is another's."""
    script, words = with_board()
    script.client.credits.clear()
    request = computed(script)
    assert not told(script), "no slots"
    script.grant_credits(2)
    script.half.request_finished("r", [[1, 2, 0]])
    script.step(written=[1])
    (shown,) = told(script)
    assert shown.keys == tuple(script.key(request, index) for index in (0, 1))
    then, now = from_u32(shown.generations), [words[block] for block in from_u32(shown.blocks)]
    assert [one == other for one, other in zip(then, now, strict=True)] == [False, True]


@pytest.mark.parametrize("how", ["detach", "close"])
def test_E_an_engine_that_leaves_says_so_on_the_board(how: str) -> None:
    script, words = with_board()
    computed(script)
    before = words.tolist()
    if how == "close":
        script.client.close()
    else:
        script.client.detach("a test")
    assert all(now != then for now, then in zip(words.tolist(), before, strict=True))
    script.client.overwritten([1])
    script.client.publish_blocks([1], [b"k"], [1])


def test_E_blocks_that_no_board_has_are_not_shown() -> None:
    for script, blocks in ((with_board(blocks=16)[0], [3, 16]), (Script(), [1, 2])):
        computed(script, blocks)
        assert not told(script)


def test_B17_a_partly_filled_block_is_not_shown() -> None:
    """The rest of it is somebody else's to fill."""
    script, _ = with_board()
    script.client.credits.clear()
    request = computed(script)
    script.grant_credits(4)
    tracked = script.half._requests["r"]
    script.half._stores.store_complete(tracked, 32, lambda _: [[1, 2, 3]])
    assert script.half._stores.store_partial(tracked, PartialBlock(2, b"t" * 32, 33), [[1, 2, 3]])
    (job,) = script.step().stores
    assert job.engine.block_ids == (1, 2, 3)
    (shown,) = told(script)
    assert shown.keys == tuple(script.key(request, index) for index in (0, 1))
    assert from_u32(shown.blocks) == [1, 2]
