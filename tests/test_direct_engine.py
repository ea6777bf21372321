"""What a peer's engine has in its own memory, read there: real stores, workers and NIXL."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from connectors.copies.host import Device, LayerCache
from connectors.engine_agent import overlaps_of
from connectors.step_meta import StepMeta
from connectors.store_client import BlockVersions
from kvstore.core.errors import ProtocolError, TierError, TierIOError
from kvstore.core.layout import PIECES_MAX, PageRun, RankPages
from kvstore.core.types import BlockKey, Slot
from kvstore.handover.engine_blocks import BLOCKS_MAX, NAMED_TIMES, Engines
from kvstore.logs import LINES_MAX
from kvstore.wire import engine as p
from kvstore.wire.peer import RANKS_MAX
from tests.engine.support import since
from tests.harness.fakes import u32
from tests.harness.live import LiveStore, eventually
from tests.harness.peers import config
from tests.harness.worker_rig import BLOCKS, Rank, Rig
from tests.test_direct import Nodes, nodes

PAGES = (PageRun(0, 512, 1, 4096, 512, 0),)
LONG_S = 0.1
GPU, CPU = "kvstore_fetched_blocks{gpu}", "kvstore_fetched_blocks{cpu}"


def overwrite(made: Nodes, blocks: Sequence[int]) -> None:
    """The prefill engine has other content in these from now on, and says so before."""
    made.rigs[0].client.overwritten(blocks)
    for rank in made.rigs[0].ranks:
        for block in blocks:
            for layer in range(3):
                rank.view(block, layer).fill_(0x55)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_L1_direct_a_prompt_goes_from_engine_memory_into_engine_memory(
    tmp_path: Path, ranks: tuple[int, int]
) -> None:
    with nodes(tmp_path, ranks, serving=True, stored=5) as made:
        found = made.brings(made.ask(), range(9, 14))
        assert all(rank.untouched([*range(9), *range(14, BLOCKS)]) for rank in made.rigs[1].ranks)
        assert (found[GPU], found.get(CPU)) == (5, None)
        moved = 5 * sum(
            cache.page_bytes for rank in made.rigs[1].ranks for cache in rank.caches.values()
        )
        assert found["kvstore_hand_over_moved_bytes{direct}"] == moved


def test_L1_direct_what_an_engine_has_itself_is_pushed_from_slots(tmp_path: Path) -> None:
    with nodes(tmp_path, (2, 1), serving=True, push=True, stored=5) as made:
        found = made.brings(made.ask(), range(9, 14))
        assert (found.get(GPU), found[CPU]) == (None, 5)


def test_L1_direct_what_the_engine_has_overwritten_comes_from_slots(tmp_path: Path) -> None:
    with nodes(tmp_path, serving=True, stored=6) as made:
        overwrite(made, [1, 4])
        found = made.brings(made.ask(), range(6))
        assert (found[GPU], found[CPU]) == (4, 2)


def test_B19_direct_what_was_overwritten_while_it_was_read_is_read_again_from_slots(
    tmp_path: Path,
) -> None:
    with nodes(tmp_path, (2, 2), serving=True, stored=6) as made:
        grant = made.ask()
        eventually(lambda: all(told(rank) for rank in made.rigs[1].ranks))
        overwrite(made, [0, 3])
        found = made.brings(grant, range(6))
        assert (found[GPU], found[CPU]) == (4, 2)
        assert since(made.stores[0].address, {})["kvstore_hand_over_blocks{stale}"] == 2


def test_B20_direct_that_no_rdma_device_reaches_a_gpu_is_said_once_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("connectors.engine_agent.gpu_of", lambda _: 1)
    with LiveStore(config(tmp_path)) as store:
        rig = Rig(store.path, world=2, direct="pull")
        try:
            eventually(lambda: not any(rank.half._copies.direct for rank in rig.ranks))
            rig.attach()  # with all ranks, by way of the store
        finally:
            rig.close()
    ours = [record for record in caplog.records if record.name.startswith("connectors")]
    lines = [record.levelname for record in ours if "names no RDMA device" in record.message]
    assert lines == ["ERROR"]


def told(rank: Rank) -> bool:
    """Whether a worker has been told where blocks are."""
    direct = rank.half._copies.direct
    return direct is not None and bool(direct._inbox)


def test_B19_direct_what_an_engine_has_that_detached_is_read_from_slots(tmp_path: Path) -> None:
    """Nobody tells any more what it overwrites."""
    with nodes(tmp_path, serving=True, stored=4) as made:
        grant = made.ask()
        eventually(lambda: all(told(rank) for rank in made.rigs[1].ranks))
        made.rigs[0].client.detach("a test")
        overwrite(made, range(4))
        assert made.brings(grant, range(4))[CPU] == 4


def test_B15_direct_what_an_engine_whose_agent_is_gone_has_is_read_from_slots(
    tmp_path: Path,
) -> None:
    with nodes(tmp_path, (2, 2), serving=True, stored=4) as made:
        assert made.brings(made.ask(), range(4))[GPU] == 4  # agents that never met can hang
        grant = made.ask()
        eventually(lambda: all(told(rank) for rank in made.rigs[1].ranks))
        direct = made.rigs[0].ranks[0].half._copies.direct
        assert direct is not None
        direct._agent._agent = None  # of one rank
        assert made.brings(grant, range(4))[CPU] == 4


def test_L1_direct_blocks_of_several_engine_blocks_come_from_engine_memory(tmp_path: Path) -> None:
    with nodes(tmp_path, serving=True, per=2, stored=3) as made:
        grant = made.ask()
        assert made.brings(grant, range(10, 16))[GPU] == 3


def test_direct_the_other_way_an_engine_that_only_stores_needs_no_direct(tmp_path: Path) -> None:
    """Without it, its workers have no agents: nothing is shown, slots are read."""
    with nodes(tmp_path, stored=3) as made:
        assert made.brings(made.ask(), range(3))[CPU] == 3


# What a store keeps of it


def engines(world: int = 1, blocks: int = 8) -> Engines:
    made = Engines()
    for rank in range(world):
        made.serves(1, world, rank, p.Serves(RankPages(f"a{rank}", b"md", (PAGES,)), blocks))
    return made


def with_board(world: int = 1) -> tuple[Engines, BlockVersions]:
    made = engines(world)
    taken = made.take_block_versions(1)
    assert taken is not None
    message, fd = taken
    return made, BlockVersions(os.dup(fd), message.blocks)


def show(made: Engines, board: BlockVersions, slot: int, key: bytes, blocks: Sequence[int]) -> None:
    shown = p.EngineBlocks(u32([slot]), (key,), u32(blocks), board.packed(blocks))
    made.announce(1, shown, {Slot(3)})


def test_E_a_board_is_given_once_all_ranks_can_be_read_and_once_only() -> None:
    made = Engines()
    made.serves(1, 2, 0, p.Serves(RankPages("a", b"", (PAGES,)), 8))
    assert made.take_block_versions(1) is None
    made.serves(1, 2, 1, p.Serves(RankPages("b", b"", (PAGES,)), 8))
    assert made.take_block_versions(1) is not None
    assert made.take_block_versions(1) is None
    assert [rank.agent for rank in made.ranks(1)] == ["a", "b"]
    assert made.take_block_versions(2) is None
    assert made.ranks(2) == ()


def test_S2_an_engine_that_gets_no_board_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However often its workers say that they can be read."""
    tries = 0

    def none_left(*_arguments: object) -> int:
        nonlocal tries
        tries += 1
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    made = Engines()
    for session in range(20):
        for _ in range(50):
            made.serves(session, 1, 0, p.Serves(RankPages("a", b"md", (PAGES,)), 8))
            assert made.take_block_versions(session) is None
    assert tries == 20
    assert 0 < len(caplog.records) <= LINES_MAX
    assert "[Errno 24]" in caplog.text


def test_a_block_is_found_once_its_copy_has_ended_and_until_it_is_overwritten() -> None:
    made, board = with_board()
    key = BlockKey(b"k" * 34)
    show(made, board, 3, key, [5, 6])
    assert made.find(key) is None, "it may not be computed yet"
    made.stored(1, Slot(3), key, ok=True)
    place = made.find(key)
    assert place is not None
    assert place.blocks == (5, 6)
    board.advance([4, 7])
    assert made.holds(place)
    board.advance([6, 6, 99])
    assert not made.holds(place)
    assert made.find(key) is None


@pytest.mark.parametrize("case", ["failed", "other key", "not shown", "other session", "gone"])
def test_a_block_is_not_found_for(case: str) -> None:
    made, board = with_board()
    key, other = BlockKey(b"k" * 34), BlockKey(b"o" * 34)
    if case != "not shown":
        show(made, board, 3, other if case == "other key" else key, [5])
    session = 2 if case == "other session" else 1
    made.stored(session, Slot(3), key, ok=case != "failed")
    if case == "gone":
        made.end_of(1)
    assert made.find(key) is None
    made.stored(1, Slot(3), other, ok=True)
    if case != "other session":
        assert made.find(other) is None, "what was shown is of one copy"


def test_an_engine_block_is_found_under_its_last_key_only() -> None:
    made, board = with_board()
    first, second = BlockKey(b"1" * 34), BlockKey(b"2" * 34)
    for key in (first, second):
        board.advance([5])
        show(made, board, 3, key, [5])
        made.stored(1, Slot(3), key, ok=True)
    assert made.find(first) is None
    assert made.find(second) is not None
    assert len(made._engines[1].here) == 1, "no more than there are engine blocks"


def test_no_engine_can_make_its_board_shorter() -> None:
    """A store that read what is not there any more would end."""
    made = engines()
    taken = made.take_block_versions(1)
    assert taken is not None
    with pytest.raises(PermissionError):
        os.ftruncate(taken[1], 0)


def test_without_memory_for_a_board_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError("too many open files")

    made = engines()
    monkeypatch.setattr(os, "memfd_create", full)
    assert made.take_block_versions(1) is None


def test_an_engine_of_more_ranks_than_can_be_told_has_no_board() -> None:
    assert engines(RANKS_MAX).take_block_versions(1) is not None
    assert engines(RANKS_MAX + 1).take_block_versions(1) is None


def test_after_the_board_is_left_nothing_is_found() -> None:
    made, board = with_board()
    key = BlockKey(b"k" * 34)
    show(made, board, 3, key, [5])
    made.stored(1, Slot(3), key, ok=True)
    board.invalidate_all()
    assert made.find(key) is None


@pytest.mark.parametrize(
    "shown",
    [
        p.EngineBlocks(u32([1]), (), u32([2]), u32([0])),
        p.EngineBlocks(u32([1, 2]), (b"a", b"b"), u32([2, 3, 4]), u32([0, 0, 0])),
        p.EngineBlocks(u32([1]), (b"a",), b"", b""),
        p.EngineBlocks(u32([1]), (b"a",), u32([2]), b""),
        p.EngineBlocks(u32([1]), (b"a",), u32([8]), u32([0])),
        p.EngineBlocks(b"", (), b"", b""),
        p.EngineBlocks(b"123", (b"a",), u32([2]), u32([0])),
    ],
)
def test_what_is_shown_wrongly_is_refused(shown: p.EngineBlocks) -> None:
    made, _ = with_board()
    with pytest.raises(ProtocolError):
        made.announce(1, shown, {Slot(1), Slot(2)})


def test_S2_an_engine_names_its_blocks_a_few_times_at_most() -> None:
    made = engines(blocks=8)
    assert made.take_block_versions(1) is not None
    all_of_them, slots = u32(range(8)), {Slot(slot) for slot in range(100)}
    for number in slots:
        shown = p.EngineBlocks(u32([number]), (b"%d" % number,), all_of_them, u32([0] * 8))
        made.announce(1, shown, slots)
        if number % 2:
            made.stored(1, number, BlockKey(b"%d" % number), ok=number % 4 == 1)
    engine = made._engines[1]
    kept = [place for _, place in engine.coming.values()] + [*engine.here.values()]
    assert sum(len(place.blocks) for place in kept) == engine.named <= NAMED_TIMES * 8
    with pytest.raises(ProtocolError, match="9 engine blocks, expected up to 8"):
        made.announce(1, p.EngineBlocks(u32([1]), (b"a",), u32([0] * 9), u32([0] * 9)), slots)


def test_an_engine_without_a_board_shows_nothing() -> None:
    good = p.EngineBlocks(u32([1]), (b"a",), u32([2]), u32([0]))
    with pytest.raises(ProtocolError, match="no board"):
        engines().announce(1, good, {Slot(1)})
    for blocks in (0, BLOCKS_MAX + 1):
        with pytest.raises(ProtocolError, match=f"expected 1 to {BLOCKS_MAX}"):
            engines(blocks=blocks)


# Which bytes of one memory are which of another


def of(cache: LayerCache, offset: int) -> PageRun:
    cut = cache.piece_bytes, cache.pieces
    return PageRun(
        offset,
        *cut,
        cache.storage.data_ptr() + cache.offset,
        cache.block_stride,
        cache.piece_stride,
    )


@pytest.mark.parametrize("seed", range(20))
def test_O20_any_cut_of_a_part_finds_its_bytes_in_any_other(seed: int) -> None:
    """Two engines whose ranks hold a part in pieces of other sizes, at other distances."""
    rng = random.Random(seed)
    part = 64 * rng.randint(1, 8)

    def engine(world: int) -> list[list[LayerCache]]:
        return [
            [
                LayerCache(torch.zeros(4 * 2048, dtype=torch.uint8), 64, 2048, size, pieces, gap)
                for size, pieces, gap in [cut(part // world)]
            ]
            for _ in range(world)
        ]

    def cut(size: int) -> tuple[int, int, int]:
        pieces = rng.choice([n for n in (1, 2, 4) if size % n == 0])
        return size, pieces, size // pieces + rng.choice([0, 8])

    mine, theirs = engine(rng.choice([1, 2, 4])), engine(rng.choice([1, 2, 4]))
    content = torch.randint(0, 256, (part,), dtype=torch.uint8)
    runs = []
    for number, caches in enumerate(theirs):
        offset = number * (part // len(theirs))
        for cache in caches:
            for piece in range(cache.pieces):
                at = cache.offset + 2 * cache.block_stride + piece * cache.piece_stride
                begin = offset + piece * cache.piece_bytes
                cache.storage[at : at + cache.piece_bytes] = content[
                    begin : begin + cache.piece_bytes
                ]
        runs.append([of(cache, offset) for cache in caches])
    for number, caches in enumerate(mine):
        offset = number * (part // len(mine))
        (cache,) = caches
        got = bytearray(cache.page_bytes)
        for each in overlaps_of([of(cache, offset)], runs):
            source = theirs[each.rank][0]
            at = each.base_there + 2 * each.stride_there - source.storage.data_ptr()
            here = each.base + each.stride - cache.storage.data_ptr()
            piece, inside = divmod(
                here - cache.offset - cache.block_stride, max(1, cache.piece_stride)
            )
            begin = piece * cache.piece_bytes + inside
            got[begin : begin + each.size] = source.storage[at : at + each.size].numpy().tobytes()
        expected = content[offset : offset + cache.page_bytes].numpy().tobytes()
        assert bytes(got) == expected


def test_ranks_that_lack_a_part_are_an_error_that_says_where() -> None:
    whole = [PageRun(0, 512, 1, 4096, 512, 0)]
    with pytest.raises(TierError, match="lack byte 0 of"):
        overlaps_of(whole, [])
    with pytest.raises(TierError, match="lack byte 256 of"):
        overlaps_of(whole, [[PageRun(0, 256, 1, 4096, 512, 0)]])
    with pytest.raises(TierError, match="lack byte 0 of"):
        overlaps_of(whole, [[PageRun(256, 256, 1, 4096, 512, 0)]])


@pytest.mark.parametrize(
    "wrong",
    [
        (-1, 1, 1, 0, 0, 0),
        (0, 0, 1, 0, 0, 0),
        (0, 1, 0, 0, 0, 0),
        (0, 1, 1, 1 << 62, 0, 0),
        (0, 1, 2, 0, 0, 1 << 61),
    ],
)
def test_pages_that_cannot_be_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        msgspec.convert(wrong, PageRun)
    with pytest.raises(ValueError, match="expected up to"):
        RankPages("a", b"", ((PageRun(0, 1, PIECES_MAX, 0, 0, 0), PageRun(0, 1, 1, 0, 0, 0)),))


def test_what_is_shown_of_a_slot_that_is_stored_already_is_not_kept() -> None:
    """The worker's word came first: what the slot gets next is another block's."""
    made, board = with_board()
    key = BlockKey(b"k" * 34)
    made.announce(1, p.EngineBlocks(u32([4]), (key,), u32([5]), board.packed([5])), {Slot(3)})
    made.stored(1, Slot(4), key, ok=True)
    assert made.find(key) is None
    assert not made._engines[1].coming


class Behind(Device):
    """What it computes is behind what it was asked for, as on a GPU."""

    def __init__(self) -> None:
        super().__init__({})
        self.done = False
        self.error: TierIOError | None = None

    def passed(self, _mark: int) -> bool:
        if self.error is not None:
            raise self.error
        return self.done


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_O13_direct_nothing_is_moved_into_blocks_that_are_still_computed_with(
    tmp_path: Path, *, push: bool
) -> None:
    with nodes(tmp_path, push=push, stored=3) as made:
        rig, device = made.rigs[1], Behind()
        rig.ranks[0].half._copies._device = device
        job = rig.load_job("r", made.ask(), range(4, 7))
        rig.ranks[0].half.start_loads(StepMeta(loads=(job,)))
        eventually(lambda: told(rig.ranks[0]))
        time.sleep(LONG_S)
        rig.collect()
        assert rig.ended == []
        assert rig.ranks[0].untouched(range(24))
        device.done = True
        eventually(lambda: rig.collect() and rig.ended)
        assert rig.ended == [(0, "r", False)]
        assert made.holds(range(4, 7))
        eventually(lambda: not made.left())


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_L1_direct_an_engine_that_is_far_ahead_of_its_GPU_has_time_for_its_loads(
    tmp_path: Path, *, push: bool
) -> None:
    """Longer than blocks may be late: that begins when they can be moved."""
    with nodes(tmp_path, push=push, engine='promote = "1s"\n', stored=3) as made:
        rig, device = made.rigs[1], Behind()
        rig.ranks[0].half._copies._device = device
        job = rig.load_job("r", made.ask(), range(4, 7))
        rig.ranks[0].half.start_loads(StepMeta(loads=(job,)))
        time.sleep(1.3)
        device.done = True
        eventually(lambda: rig.collect() and rig.ended)
        assert rig.ended == [(0, "r", False)]


def test_O15_direct_a_GPU_that_has_failed_fails_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nodes(tmp_path, stored=3) as made:
        device = Behind()
        device.error = TierIOError("a test")
        half = made.rigs[1].ranks[0].half
        half._copies._device = device
        job = made.rigs[1].load_job("r", made.ask(), range(4, 7))
        with pytest.MonkeyPatch.context() as patch:  # as if a disk still filled some of its slots
            patch.setattr(half._copies, "_advance_slots", lambda *_: False)
            half.start_loads(StepMeta(loads=(job,)))
            time.sleep(LONG_S)
        eventually(lambda: made.rigs[1].collect() and made.rigs[1].ended)
        assert made.rigs[1].ended == [(0, "r", True)]
        assert sum("nothing is read from a peer" in r.message for r in caplog.records) == 1
        assert made.rigs[1].ranks[0].untouched(range(24))
        eventually(lambda: not made.left())
