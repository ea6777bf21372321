"""What a router reads of a real engine with a store: the engine's events and the tiers' agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore.store import admin
from tests.bench.engine import Request
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.engine.served import Served
from tests.engine.support import ENGINE_BLOCK, TOKENS_OUT, eventually, forget, numbers

pytestmark = pytest.mark.vllm

FULL = "full_attention"


class Block(NamedTuple):
    """What an event says of one engine block."""

    group: int
    parent: object
    tokens: tuple[int, ...]


def unique(seed: int, count: int = 6) -> list[Request]:
    return [
        Request(id=f"e{i}", tokens=prompt(91_000 + 100 * seed + i, 120 + 83 * i))
        for i in range(count)
    ]


def stored(events: Sequence[Any], medium: str) -> dict[object, Block]:
    """Engine blocks by hash, of the groups that need the whole prefix; each is told once."""
    found: dict[object, Block] = {}
    for event in events:
        if type(event).__name__ != "BlockStored" or event.medium != medium:
            continue
        if event.kv_cache_spec_kind != FULL:
            assert medium == "GPU", "no other group's blocks are told"
            continue
        assert event.block_size == ENGINE_BLOCK
        assert len(event.token_ids) == ENGINE_BLOCK * len(event.block_hashes)
        assert (event.lora_id, event.lora_name) == (None, None)
        parent = event.parent_block_hash
        for at, name in enumerate(event.block_hashes):
            tokens = event.token_ids[at * ENGINE_BLOCK : (at + 1) * ENGINE_BLOCK]
            assert name not in found, "told twice"
            found[name] = Block(event.group_idx, parent, tuple(tokens))
            parent = name
    return found


def removed(events: Sequence[Any], medium: str) -> list[object]:
    return [
        name
        for event in events
        if type(event).__name__ == "BlockRemoved" and event.medium == medium
        for name in event.block_hashes
    ]


def test_O16_what_enters_memory_is_told_as_the_engine_tells_its_own(served: Served) -> None:
    served.events()
    requests = unique(1)
    served.engine.run(requests, max_tokens=TOKENS_OUT)
    served.stats()
    events = served.events()
    own, ours = stored(events, "GPU"), stored(events, "CPU")
    assert len(own) >= sum((len(one.tokens) - 1) // ENGINE_BLOCK for one in requests)
    assert all(isinstance(name, int) for name in ours), "the form of vLLM's default"
    assert ours == own
    for one in requests:
        blocks, parent = {block.parent: (name, block) for name, block in ours.items()}, None
        first = next(n for n, b in ours.items() if b.tokens == tuple(one.tokens[:ENGINE_BLOCK]))
        assert ours[first].parent is None
        parent, got = first, list(ours[first].tokens)
        while len(got) + ENGINE_BLOCK <= len(one.tokens):
            parent, block = blocks[parent]
            got += block.tokens
        assert got == one.tokens[: len(got)]
    forget(served.engine)
    served.events()
    served.engine.run(requests, max_tokens=TOKENS_OUT)
    events = served.events()
    assert not stored(events, "CPU"), "hits are no news"
    admin.clear(served.store.address)
    gone = removed(served.events(), "CPU")
    assert len(gone) == len(set(gone))
    assert set(ours) <= set(gone)  # and what earlier tests left
    forget(served.engine)


def test_O16_what_leaves_memory_and_stays_on_disk_is_told_so(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    disk = f'\n[nvme]\npath = "{tmp_path / "kv"}"\ncapacity = "256MiB"\n'
    with (
        StoreProcess(tmp_path, "16MiB", disk) as store,
        closing(Served("llama_s", model("llama_s"), tmp_path, store)) as served,
    ):
        served.events()
        requests = unique(3, 12)
        for _ in range(2):  # the second time from the tiers
            for one in requests:
                served.engine.run([one], max_tokens=2)
            forget(served.engine)
        queued = "kvstore_tier_queued_blocks{nvme}"
        eventually(lambda: not numbers(served.store.address).get(queued))
        served.stats()
        events = served.events()
        own = {}
        for event in (e for e in events if type(e).__name__ == "BlockStored"):
            own.update(stored([event], "GPU"))
        gone, on_disk = removed(events, "CPU"), stored(events, "STORAGE")
        assert gone, "16 MiB have less room than that"
        assert not removed(events, "STORAGE")
        assert on_disk
        assert on_disk.items() <= own.items()
        assert set(gone) & set(on_disk), "left memory, is on disk"
        admin.clear(served.store.address)
        eventually(lambda: bool(served.engine.run([Request(id="t", tokens=[3, 4])], max_tokens=1)))
        dropped: list[object] = []

        def told() -> bool:
            dropped.extend(removed(served.events(), "STORAGE"))
            return set(dropped) == set(on_disk)

        eventually(told)
        assert len(dropped) == len(set(dropped))
