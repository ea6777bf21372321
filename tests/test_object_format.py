"""Names and content of objects: two stores agree, and nothing else passes for a run."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import pytest

from kvstore.core.errors import BlockCorrupt
from kvstore.core.types import BlockKey, Chain, GroupRule, make_key, tag_of, window_rule
from tiers.object.format import Format, Run

SLOT = 96
RUN = 4 * SLOT  # four blocks
FULL = GroupRule()
SECRET = bytes(range(32))


def form(secret: bytes | None = None, namespace: str = "0123abcd", run: int = RUN) -> Format:
    return Format(namespace, SLOT, run, secret)


def chain(blocks: int, text: str = "a", scope: bytes = b"", groups: int = 1) -> Chain:
    names = [hashlib.sha256(f"{text}{n}".encode()).digest() for n in range(blocks)]
    return Chain(b"".join(names), 32, groups, scope)


def run_of(made: Format, number: int = 0, path: Chain | None = None) -> Run:
    path = path or chain(12)
    keys = path.keys_at(0, made.kept(FULL, number))
    return Run(made.name_of(keys[-1]), keys)


def blocks_of(run: Run) -> list[memoryview]:
    return [memoryview(bytearray(hashlib.shake_128(key).digest(SLOT))) for key in run.keys]


def read(made: Format, run: Run, data: bytes, positions: Sequence[int]) -> list[bytes | None]:
    """Return the blocks that came whole."""
    places = [memoryview(bytearray(SLOT)) for _ in positions]
    rest = made.unpack(run, memoryview(data))
    whole = list(made.copy(run, rest, list(zip(positions, places, strict=True))))
    return [bytes(place) if ok else None for ok, place in zip(whole, places, strict=True)]


def packed(made: Format, run: Run, blocks: Sequence[memoryview]) -> bytes:
    return b"".join(made.pack(run, blocks))


@pytest.mark.parametrize("secret", [None, SECRET])
def test_Q70_what_was_packed_is_read(secret: bytes | None) -> None:
    made = form(secret)
    run = run_of(made, 1)
    blocks = blocks_of(run)
    data = packed(made, run, blocks)
    assert len(data) == made.size(run)
    assert read(form(secret), run_of(form(secret), 1), data, [0, 3, 2]) == [
        bytes(blocks[at]) for at in (0, 3, 2)
    ]


def test_Q70_runs_lie_on_a_fixed_grid() -> None:
    """A longer prompt with the same beginning has the same runs; a shorter one a part of them."""
    made = form()
    long, short = chain(12), chain(9)
    names = [made.name_of(long.key(0, made.kept(FULL, n)[-1])) for n in range(3)]
    assert [list(made.kept(FULL, n)) for n in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [made.name_of(short.key(0, made.kept(FULL, n)[-1])) for n in range(2)] == names[:2]
    assert len(set(names)) == 3


def test_Q70_of_a_window_or_a_state_a_run_has_what_a_hit_at_its_end_needs() -> None:
    made = form()
    assert list(made.kept(GroupRule(1, exact=True), 1)) == [7]
    assert list(made.kept(window_rule(33, 16), 1)) == [6, 7]
    assert list(made.kept(window_rule(1000, 16), 1)) == [4, 5, 6, 7]


def test_Q70_an_object_has_at_least_the_bytes_of_a_run() -> None:
    assert [Format("n", size, 2 << 20).run_blocks for size in (4096, 1 << 20, 3 << 20)] == [
        *(512, 2, 1)
    ]
    assert Format("n", (2 << 20) - 1, 2 << 20).run_blocks == 2


def test_Q71_all_that_decides_the_bytes_is_in_the_name() -> None:
    """Namespace, tokens, group, scope of a reset, tenant, length of a run, cluster key."""
    key = chain(1).key(0, 0)
    others = [
        form(namespace="0123abce").name_of(key),
        form(run=RUN + 1).name_of(key),
        form(SECRET).name_of(key),
        form(SECRET[::-1]).name_of(key),
        form().name_of(chain(1, "b").key(0, 0)),
        form().name_of(chain(1, groups=2).key(1, 0)),
        form().name_of(chain(1, scope=b"reset").key(0, 0)),
        form().name_of(chain(1, scope=tag_of("team-a")).key(0, 0)),
        form().name_of(chain(1, scope=tag_of("team-b")).key(0, 0)),
    ]
    names = {form().name_of(key), *others}
    assert len(names) == len(others) + 1
    assert all(name.startswith("v1/") and len(name) < 1024 for name in names)


def test_Q71_no_change_of_an_object_is_read() -> None:
    """Each byte flipped: the block is not whole, or the object not this run's."""
    for secret in (None, SECRET):
        made = form(secret)
        run = run_of(made)
        blocks = blocks_of(run)
        data = bytearray(packed(made, run, blocks))
        for at in range(len(data)):
            data[at] ^= 1
            try:
                found = read(made, run, bytes(data), range(4))
            except BlockCorrupt:
                found = [None] * 4
            data[at] ^= 1
            assert None in found
            assert all(
                got in (None, bytes(block)) for got, block in zip(found, blocks, strict=True)
            )


@pytest.mark.parametrize("secret", [None, SECRET])
def test_Q71_any_bytes_are_a_miss(secret: bytes | None) -> None:
    """Too short, too long, random, of another run, namespace or key: before a length is read."""
    made, rng = form(secret), random.Random(1)
    run = run_of(made)
    data = packed(made, run, blocks_of(run))
    other = run_of(made, 1)
    foreign = form(secret, namespace="ffff")
    wrong = [
        b"",
        data[:-1],
        data[: len(data) // 2],
        data + b"x",
        rng.randbytes(len(data)),
        bytes(len(data)),
        b"\xff" * len(data),
        packed(made, other, blocks_of(other)),
        packed(foreign, run_of(foreign), blocks_of(run)),
        packed(form(None if secret else SECRET), run, blocks_of(run)),
        packed(form(SECRET[::-1]), run, blocks_of(run)),
    ]
    for each in wrong:
        with pytest.raises(BlockCorrupt):
            made.unpack(run, memoryview(each))


def test_Q71_a_checksum_is_of_its_block() -> None:
    """The sums and bytes of two blocks exchanged are damage, too."""
    made = form()
    run = run_of(made)
    blocks = blocks_of(run)
    swapped = Run(run.name, [run.keys[1], run.keys[0], *run.keys[2:]])
    data = (
        made.head(run.keys)
        + packed(made, swapped, [blocks[1], blocks[0], *blocks[2:]])[len(made.head(swapped.keys)) :]
    )
    assert read(made, run, data, range(4)) == [None, None, bytes(blocks[2]), bytes(blocks[3])]


def test_Q75_an_encrypted_object_and_its_name_tell_nothing() -> None:
    made = form(SECRET)
    run = run_of(made)
    blocks = blocks_of(run)
    data = packed(made, run, blocks)
    for each in (*run.keys, *map(bytes, blocks), b"0123abcd", b"kvst"):
        assert each not in data
    assert run.keys[-1].hex() not in run.name
    assert "0123abcd" not in run.name
    assert packed(made, run, blocks) != data  # each with a nonce of its own


def test_Q75_an_encrypted_object_under_another_name_is_a_miss() -> None:
    made = form(SECRET)
    run = run_of(made)
    moved = Run(run.name + "0", run.keys)
    with pytest.raises(BlockCorrupt):
        made.unpack(moved, memoryview(packed(made, run, blocks_of(run))))


def test_a_key_of_any_width_is_named() -> None:
    made = form()
    wide = [make_key(bytes([n]) * 64, 1, b"s" * 190) for n in range(4)]
    run = Run(made.name_of(BlockKey(wide[-1])), wide)
    assert len(run.name) < 1024  # what S3 allows
    assert read(made, run, packed(made, run, blocks_of(run)), [0]) == [bytes(blocks_of(run)[0])]
