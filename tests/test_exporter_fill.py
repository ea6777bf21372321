"""Writes of an exporter into engines of peers, with an agent that does as it is told."""

from __future__ import annotations

import re
from array import array

import msgspec
import pytest

from kvstore.core.layout import PageRun
from kvstore.wire.framing import u32
from tests.test_exporter_mover import SIZE, SLOT, Rig, rig
from tiers.nixl import exporter as under_test
from tiers.nixl.messages import Ended, Fill

__all__ = ["rig"]

PAGES = (PageRun(0, 512, 2, 1 << 20, 4096, 2048), PageRun(1024, 256, 1, 1 << 30, 512, 0))


def fill(number: int, parts: list[int], blocks: list[int], **how: object) -> Fill:
    asked = Fill(number, "a", 1, PAGES, array("Q", parts).tobytes(), u32(blocks))
    return msgspec.structs.replace(asked, **how)


def test_parts_of_slots_are_written_to_engine_blocks_piece_by_piece(rig: Rig) -> None:
    rig.mover.add_peer("a", b"a")
    rig.mover.start(fill(7, [SLOT, 3 * SLOT], [5, 2]))
    rig.steps()
    ((here, there),) = rig.agent.placed
    base = rig.mover.extents[1].address
    parts = [base + SLOT, base + 3 * SLOT]
    assert here == [at + piece for at in parts for piece in (0, 512)] + [at + 1024 for at in parts]
    first = [(1 << 20) + block * 4096 + piece for block in (5, 2) for piece in (0, 2048)]
    assert there == first + [(1 << 30) + block * 512 for block in (5, 2)]
    (ended,) = [said for said in rig.said if isinstance(said, Ended)]
    assert (ended.id, ended.bytes, ended.error) == (7, 2 * (2 * 512 + 256), None)


def test_a_write_into_a_GPU_engine_names_its_GPU(rig: Rig) -> None:
    rig.mover.add_peer("a", b"a")
    for number, gpu in enumerate((None, 0, 3)):
        rig.mover.start(fill(number, [0], [1], gpu=gpu))
        rig.steps()
    assert rig.agent.gpus == [None, 0, 3]


@pytest.mark.parametrize(("limit", "most"), [("CHUNK_BYTES", 2 * 1280), ("CHUNK_PIECES", 7)])
def test_a_long_write_and_one_of_many_small_pieces_go_in_chunks(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(under_test, limit, most)
    rig.mover.add_peer("a", b"a")
    rig.mover.start(fill(7, [0] * 5, [1, 2, 3, 4, 5]))
    rig.steps()
    assert [len(here) for here, _ in rig.agent.placed] == [6, 6, 3]
    (ended,) = [said for said in rig.said if isinstance(said, Ended)]
    assert ended.bytes == 5 * 1280


def test_writes_into_an_engine_that_is_gone_fail(rig: Rig) -> None:
    rig.mover.add_peer("a", b"a")
    rig.agent.broken["a"] = "gone"
    for number in (7, 8):
        rig.mover.start(fill(number, [0], [1]))
        rig.steps()
    assert [said.error for said in rig.said if isinstance(said, Ended)] == ["gone", "gone"]
    assert len(rig.agent.placed) == 1, "until it is met again"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (fill(7, [0, 1], [1]), "2 parts for 1 engine blocks, expected as many"),
        (fill(7, [], []), "0 parts for 0 engine blocks, expected as many"),
        (
            msgspec.structs.replace(fill(7, [0], [1]), parts=b"abc"),
            "2 runs of pages, 3 bytes of parts",
        ),
        (fill(7, [0], [1], pages=()), "0 runs of pages, 8 bytes of parts"),
        (fill(7, [SIZE - 1024], [1]), f"a part that ends at {SIZE + 256}, expected up to {SIZE}"),
        (fill(7, [1 << 63], [1]), "a part that ends at"),
        (fill(7, [0], [1], extent=9), "extent 9, expected one of"),
        (fill(7, [0], [1], peer="z"), "peer 'z', expected one of"),
        (
            fill(7, [0], [1 << 31], pages=(PageRun(0, 1, 1, 0, (1 << 40) - 1, 0),)),
            "engine block 2147483648 of .*, expected addresses below 2",
        ),
    ],
)
def test_a_write_into_an_engine_that_cannot_be_is_refused(
    rig: Rig, asked: Fill, expected: str
) -> None:
    rig.mover.add_peer("a", b"a")
    rig.mover.start(asked)
    (ended,) = [said for said in rig.said if isinstance(said, Ended)]
    assert ended.error == "refused"
    assert re.match(expected, ended.text)
