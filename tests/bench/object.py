"""`tests.bench object`: runs of blocks to an S3 server and back, against the client alone.

The real tier with its threads, names, checksums and copies, fed as the store feeds it. The server
is moto, a process on this machine: slow, so only the ratio says something. In each round all
systems put all objects anew, and read them back, with as many requests under way. The
client alone puts bytes that are there, and copies what it reads nowhere.
"""

from __future__ import annotations

import os
import select
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial

import msgspec
import obstore

from kvstore.config import ObjectConfig, parse
from kvstore.core.errors import KVStoreError
from kvstore.core.tier import TierContext
from kvstore.core.types import BlockKey, JobId, JobKind, Slot, TransferJob
from kvstore.units import MIB, sized
from tests.bench.raw_disk import Moved, filled, timed
from tests.bench.report import Result, alternate, compared, progress
from tests.harness.s3 import CREDENTIALS, URL, S3Server
from tiers.object.bucket import Bucket, client_of
from tiers.object.tier import ObjectTier

PAIRS = 5
GETS = 8  # the default of `threads`
PUTS = GETS // 2
NAMES = {JobKind.LOAD: "get", JobKind.STORE: "put"}
Passes = dict[JobKind, Moved]


class Sizes(msgspec.Struct, frozen=True):
    """How much is moved."""

    object_bytes: tuple[int, ...] = (2 * MIB, 4 * MIB, 8 * MIB)
    block_bytes: int = MIB
    data_bytes: int = 128 * MIB


class Alone:
    """obstore, on as many threads."""

    def __init__(self, endpoint: str, objects: Sequence[bytes]) -> None:
        self._client = client_of(_settings(endpoint, MIB), 60.0)
        self._objects = objects
        self._blocks = [memoryview(each) for each in objects]

    def passes(self) -> Passes:
        """Put all objects, and read them back."""
        put = timed(self._blocks, partial(self._each, PUTS, self._put))
        return {
            JobKind.STORE: put,
            JobKind.LOAD: timed(self._blocks, partial(self._each, GETS, self._get)),
        }

    def _each(self, threads: int, move: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(move, range(len(self._objects))))

    def _put(self, number: int) -> None:
        obstore.put(self._client, f"{number}", self._objects[number], use_multipart=False)

    def _get(self, number: int) -> None:
        found = obstore.get(self._client, f"{number}").bytes()
        if len(found) != len(self._objects[number]):
            raise KVStoreError(f"object {number}: {len(found)} bytes")


class Ours:
    """The tier."""

    def __init__(
        self, endpoint: str, blocks: Sequence[memoryview], run_bytes: int, secret: bytes | None
    ) -> None:
        self._blocks, self._run = blocks, run_bytes // len(blocks[0])
        self._bucket = Bucket(_settings(endpoint, run_bytes), secret)
        context = TierContext("object", "bench", len(blocks[0]), self, {})
        self._tier = ObjectTier(context, self._bucket)
        self._job = 0

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes."""
        return self._blocks[slot]

    def passes(self) -> Passes:
        """Put all runs, and read them back."""
        self._tier.clear()  # as after a lookup that found none of them
        put = timed(self._blocks, partial(self._move, JobKind.STORE))
        return {
            JobKind.STORE: put,
            JobKind.LOAD: timed(self._blocks, partial(self._move, JobKind.LOAD)),
        }

    def _move(self, kind: JobKind) -> None:
        opened = 0
        for first in range(0, len(self._blocks), self._run):
            numbers = range(first, first + self._run)
            keys = tuple(BlockKey(b"%034d" % number) for number in numbers)
            self._job += 1
            self._tier.submit(TransferJob(JobId(self._job), kind, keys, tuple(map(Slot, numbers))))
            opened += 1
        while opened:
            select.select([self._bucket], [], [])
            self._bucket.ended.heard()
            for result in self._tier.poll():
                opened -= 1
                if result.error is not None:
                    raise KVStoreError(f"{NAMES[kind]} failed: {result.error}")

    def close(self) -> None:
        """End its threads."""
        self._tier.close()
        self._bucket.close()


def run(pairs: int | None, sizes: Sizes | None = None) -> list[Result]:
    """Measure everything; pairs: rounds, instead of the default."""
    sizes, rounds = sizes or Sizes(), pairs or PAIRS
    os.environ.update(CREDENTIALS)
    memory, _ = filled(sizes.data_bytes)
    size, results = sizes.block_bytes, []
    blocks = [memory[at : at + size] for at in range(0, len(memory), size)]
    with progress(len(sizes.object_bytes) * (1 + rounds)) as tell:
        for object_bytes in sizes.object_bytes:
            tell(f"objects of {sized(object_bytes)}", 0)
            with S3Server() as server, ExitStack() as ends:
                objects = [
                    bytes(memory[at : at + object_bytes])
                    for at in range(0, len(memory), object_bytes)
                ]
                systems: dict[str, Callable[[], Passes]] = {
                    "reference": Alone(server.endpoint, objects).passes
                }
                for name, secret in (("plain", None), ("encrypted", bytes(32))):
                    ours = Ours(server.endpoint, blocks, object_bytes, secret)
                    systems[name] = ends.enter_context(closing(ours)).passes
                found, disturbed = alternate(systems, rounds, tell)
            results += _results(object_bytes, found, disturbed)
    return results


def _results(size: int, found: dict[str, list[Passes]], disturbed: int) -> list[Result]:
    results = []
    for kind, name in NAMES.items():
        theirs = [passes[kind].bytes_per_s for passes in found["reference"]]
        for variant in ("plain", "encrypted"):
            ours = [passes[kind].bytes_per_s for passes in found[variant]]
            cpu_us = [passes[kind].cpu_us_per_block for passes in found[variant]]
            more: dict[str, object] = {
                "object_bytes": size,
                "encrypted": variant == "encrypted",
                "disturbed_rounds": disturbed,
                "cpu_us_per_block": round(statistics.median(cpu_us), 1),
                "depth": GETS if kind is JobKind.LOAD else PUTS,
                "rounds": len(ours),
            }
            results.append(compared(name, ours, theirs, "GB/s", "obstore", more))
    return results


def _settings(endpoint: str, run_bytes: int) -> ObjectConfig:
    found = {"url": URL, "endpoint": endpoint, "run": run_bytes, "timeout": "60s"}
    config = parse({"cpu": {"capacity": "16MiB"}, "object": found}).bucket
    if config is None:
        raise KVStoreError("no [object]")
    return config
