"""An engine's worker halves with real tensors, whose scheduler half is the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any

import torch

from connectors.config import DirectWay
from connectors.copies.host import Device, LayerCache
from connectors.step_meta import EngineSpec, LoadJob, StepMeta, StoreJob
from connectors.store_client import Grant, StoreClient
from connectors.store_connection import Attacher
from connectors.worker import WorkerHalf
from kvstore.core.layout import GroupGeometry, LayerGeometry, RankGeometry
from kvstore.core.types import GroupRule, make_key
from kvstore.wire import engine as p
from tests.harness.live import eventually

MakeDevice = Callable[[dict[str, LayerCache]], Device]

LAYERS, HEADS, HEAD_BYTES = 3, 2, 512
BLOCKS = 24
POISON = 0xEE


def truth(block: int, layer: int) -> torch.Tensor:
    """What an engine block holds in one layer, [heads, bytes]."""
    made = torch.Generator().manual_seed(100 * block + layer)
    return torch.randint(0, 256, (HEADS, HEAD_BYTES), dtype=torch.uint8, generator=made)


def heard(client: StoreClient) -> bool:
    """Take in what the store says; True, so that a condition can follow."""
    client.receive()
    return True


class Rank:
    """One rank: its KV tensors, layer after layer, with `pad` bytes after each page."""

    def __init__(
        self,
        engine: str,
        rank: int,
        world: int,
        per: int,
        pad: int,
        path: str,
        device: MakeDevice | None = None,
        *,
        direct: DirectWay = "",
        place: str = "cpu",
    ) -> None:
        heads = HEADS // world
        self.heads = slice(rank * heads, (rank + 1) * heads)
        self.page = heads * HEAD_BYTES
        self.stride = (self.page + pad) * LAYERS  # a block's layers lie side by side
        size = (BLOCKS * self.stride,)
        self.storage = torch.full(size, POISON, dtype=torch.uint8, device=place)
        caches = {
            f"layer.{i}": LayerCache(self.storage, i * (self.page + pad), self.stride, self.page)
            for i in range(LAYERS)
        }
        layers = tuple(
            LayerGeometry(name, self.page, heads, rank * heads, HEADS) for name in caches
        )
        group = GroupGeometry(GroupRule(), layers)
        self.geometry = RankGeometry("model", 16, (per,), (group,))
        self.caches = caches
        self.device = None if device is None else device(caches)
        self.half = WorkerHalf(
            engine, rank, world, self.geometry, caches, lambda: path, self.device, direct=direct
        )

    def view(self, block: int, layer: int) -> torch.Tensor:
        cache = self.caches[f"layer.{layer}"]
        at = cache.offset + block * self.stride
        return self.storage[at : at + self.page]

    def fill(self, block: int) -> None:
        for layer in range(LAYERS):
            self.view(block, layer).copy_(truth(block, layer)[self.heads].flatten())

    def holds(self, block: int, of: int) -> bool:
        """Whether a block has the bytes that block `of` had."""
        return all(
            torch.equal(self.view(block, layer).cpu(), truth(of, layer)[self.heads].flatten())
            for layer in range(LAYERS)
        )

    def untouched(self, blocks: Sequence[int]) -> bool:
        return all(
            bool((self.storage[b * self.stride : (b + 1) * self.stride] == POISON).all())
            for b in blocks
        )


class Rig:
    """An engine of `world` ranks; its scheduler half is this test."""

    def __init__(
        self,
        path: str,
        name: str = "engine",
        *,
        world: int = 1,
        per: int = 1,
        pad: int = 0,
        device: MakeDevice | None = None,
        direct: DirectWay = "",
        place: str = "cpu",
    ) -> None:
        """place: where its tensors are, as torch says it."""
        self.per = per
        made = per, pad, path, device
        self.ranks = [
            Rank(name, rank, world, *made, direct=direct, place=place) for rank in range(world)
        ]
        hello = p.Hello(p.VERSION, name, "scheduler", 0, world, credit_slots=16)
        self.client = StoreClient(Attacher(lambda: path, hello), monotonic_ns)
        self.ended: list[tuple[int, str, bool]] = []  # (rank, request, failed)
        self.over: list[tuple[int, int]] = []  # (rank, store job)
        self._next = 1

    def attach(self) -> None:
        assert self.client.wait_attached(20)
        self.credits(4)

    def credits(self, count: int) -> None:
        eventually(lambda: heard(self.client) and len(self.client.credits) >= count)

    def close(self) -> None:
        for rank in self.ranks:
            rank.half.shutdown()
        self.client.close()

    def store_job(self, chain: Sequence[bytes], blocks: Sequence[int], first: int = 0) -> StoreJob:
        """Blocks first.. of a chain, from these engine blocks, into granted slots."""
        count = len(blocks) // self.per
        self.credits(count)
        keys = [make_key(block, 0) for block in chain]
        self._next += 1
        return StoreJob(
            self._next,
            self.client.session,
            EngineSpec(tuple(blocks), (len(blocks),), (first * self.per,)),
            tuple(self.client.credits.popleft() for _ in range(count)),
            tuple(keys[first : first + count]),
            tuple([keys[i - 1] if i else b"" for i in range(first, first + count)]),
        )

    def put(self, chain: Sequence[bytes], blocks: Sequence[int]) -> StoreJob:
        """Store a chain whole, and wait until the store has it."""
        for rank in self.ranks:
            for block in blocks:
                rank.fill(block)
        job = self.store_job(chain, blocks)
        self.client.publish_blocks(job.slots, job.keys, blocks)
        self.client.send_step()
        for rank in self.ranks:
            rank.half.after_forward(StepMeta(stores=(job,)))
        last = make_key(chain[-1], 0)
        eventually(lambda: heard(self.client) and last in self.client.known)
        return job

    def ask(self, chain: Sequence[bytes], **how: Any) -> Grant:  # noqa: ANN401 - of a lookup
        number = self.client.ask(p.Lookup(0, b"".join(chain), len(chain[0]), **how))
        assert number
        self.client.send_step()
        eventually(lambda: heard(self.client) and self.client.grant(number))
        grant = self.client.grant(number)
        assert grant is not None
        self.client.take(number)
        return grant

    def load_job(
        self, name: str, grant: Grant, blocks: Sequence[int], first: int = 0, stale: int = 0
    ) -> LoadJob:
        """Engine blocks first.. of what was granted."""
        end = -(-(first + len(blocks)) // self.per)
        places = grant.hits[0].run(first // self.per, end)
        assert places is not None
        return LoadJob(
            name,
            self.client.session,
            grant.lease,
            EngineSpec(tuple(blocks), (len(blocks),), (first,)),
            tuple(places[0]),
            tuple(generation + stale for generation in places[1]),
        )

    def collect(self, *, idle: bool = False) -> bool:
        """Take in what the ranks report; True, so that a condition can follow."""
        for number, rank in enumerate(self.ranks):
            ended, failed = rank.half.finished_loads(StepMeta(idle=idle))
            assert failed <= ended
            self.ended.extend((number, name, name in failed) for name in sorted(ended))
            self.over.extend((number, job) for job in rank.half.take_stores_over())
        return True

    def load(self, job: LoadJob) -> list[bool]:
        """Run a load on all ranks; returns who failed, in order of the ranks."""
        for rank in self.ranks:
            rank.half.start_loads(StepMeta(loads=(job,)))
        before = len(self.ended)
        eventually(lambda: self.collect() and len(self.ended) == before + len(self.ranks))
        assert {name for _, name, _ in self.ended[before:]} == {job.request_id}
        return [failed for _, _, failed in sorted(self.ended[before:])]
