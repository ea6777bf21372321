"""`kvstore replay`: what a trace of requests would have hit, by the manager that stores run.

Each request of the trace looks up its blocks, uses those that are present, and stores the others.
The trace's timestamps are the time; without any, a request takes a second. Slots have no memory.
The offline bound is Belady's MIN with bypass: of all present blocks and the one that comes, it
evicts the one whose next use is farthest. Each use of a block is one of those above it, too, so
that what is present stays a set of prefixes, and the bound is exact.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated

import msgspec

from kvstore.core.errors import ConfigError
from kvstore.core.eviction import LRU
from kvstore.core.leases import NEVER_NS
from kvstore.core.policy import MakePolicy
from kvstore.core.segmented import SEGMENTED
from kvstore.core.tier import leading_alike
from kvstore.core.tiering import Found, Tiering
from kvstore.core.trial import Cache, Trial
from kvstore.core.types import BlockKey, Chain, JobKind, JobResult, LookupResult, TransferJob
from kvstore.core.write_budget import WriteBudget
from kvstore.metrics import MEMORY, NVME
from kvstore.units import parse_bytes, wrong

LINE_BYTES_MAX = 16 << 20
BLOCKS_MAX = 1 << 28  # of a trace, repeats included
DIGITS_MAX = 1000
_ID_BYTES = 8
_NAMED = 1 << 63  # no hash_ids from here on
_OWNER = 1
_NEVER = 1 << 62  # the next use of a block that is not used again
_WATCHED = 64  # requests between two reports of progress

Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=4e12)]  # a manager's seconds are u32
Seconds = Annotated[float, msgspec.Meta(ge=0, le=4e9)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Request(msgspec.Struct, frozen=True):
    """One request of a trace. An id stands for its block and all blocks before it."""

    hash_ids: list[Id]
    timestamp: float = 0.0  # in ms
    input_length: int = 0  # in tokens


class _Line(msgspec.Struct, frozen=True):
    """A line of a trace: the first three fields are Mooncake's, the others our plain ones.

    blocks: names of any kind, which stand for what ids stand for.
    """

    hash_ids: list[Id] | None = None
    timestamp: Milliseconds = 0.0
    input_length: Tokens = 0
    blocks: list[int | str] | None = None
    time: Seconds = 0.0
    tokens: Tokens = 0

    def request(self, names: dict[int | str, int]) -> Request:
        """Return the request. names: the numbers of blocks that have names. Raises ValueError."""
        if (self.hash_ids is None) is (self.blocks is None):
            found = "none" if self.blocks is None else "both"
            raise ValueError(f"expected hash_ids or blocks, found {found}")
        if self.blocks is None:
            return Request(self.hash_ids or [], self.timestamp, self.input_length)
        ids = [names.setdefault(name, _NAMED + len(names)) for name in self.blocks]
        return Request(ids, self.time * 1000, self.tokens)


class Trace(msgspec.Struct, frozen=True):
    """All requests of a file. unique: blocks that differ; blocks: repeats included."""

    requests: list[Request]
    unique: int
    blocks: int

    @property
    def ns(self) -> int:
        """Return the time from the first request to the last."""
        return int((self.requests[-1].timestamp - self.requests[0].timestamp) * 1_000_000)


class TierHits(msgspec.Struct, frozen=True):
    """What a tier served, of all blocks looked up."""

    name: str
    blocks: int  # that it holds
    block_hit_ratio: float


class Replayed(msgspec.Struct, frozen=True):
    """What came of a replay. min_block_hit_ratio: no policy has more at this capacity in all.

    policy: by the name that a command was given.
    """

    requests: int
    lookups: int
    unique_blocks: int
    block_hit_ratio: float
    token_hit_ratio: float
    min_block_hit_ratio: float
    tiers: list[TierHits]
    written_blocks_per_lookup: float
    policy: str = ""

    @property
    def percent(self) -> float:
        """Return the size of memory, of the trace's unique blocks."""
        return 100 * self.tiers[0].blocks / self.unique_blocks


def read_trace(path: Path) -> Trace:
    """Read a trace, compressed or not. Raises ConfigError with the number of a wrong line."""
    requests: list[Request] = []
    seen: set[int] = set()
    blocks = 0
    names: dict[int | str, int] = {}
    decoder = msgspec.json.Decoder(_Line)
    for number, line in _lines(path):
        try:
            request = decoder.decode(line).request(names)
        except (msgspec.DecodeError, ValueError, RecursionError) as exc:
            expected = 'expected a request such as {"timestamp": 0, "hash_ids": [1, 2]}'
            raise ConfigError(f"{path}:{number}: {expected}: {exc}") from None
        count = len(request.hash_ids)
        if len(set(request.hash_ids)) < count:
            raise ConfigError(f"{path}:{number}: expected blocks that differ, found one twice")
        blocks += count
        if blocks > BLOCKS_MAX:
            raise ConfigError(f"{path}:{number}: expected up to {BLOCKS_MAX:,} blocks, found more")
        seen.update(request.hash_ids)
        requests.append(request)
    if not blocks:
        raise ConfigError(f"{path}: expected requests with blocks, found none")
    return Trace(requests, len(seen), blocks)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))  # once: a pipe has no second beginning
            zipped = raw.peek(2).startswith(b"\x1f\x8b")
            file = stack.enter_context(gzip.open(raw)) if zipped else raw
            number = 0
            while line := file.readline(LINE_BYTES_MAX):
                number += 1
                if len(line) == LINE_BYTES_MAX:
                    most = f"expected lines of up to {LINE_BYTES_MAX} bytes"
                    raise ConfigError(f"{path}:{number}: {most}, found a longer one")
                if line.strip():
                    yield number, line
    except (OSError, EOFError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"{path}: cannot be read: {reason}") from exc


def blocks_of(text: str, unique: int, block_bytes: int | None) -> int:
    """Read a capacity: a part of a trace's unique blocks, blocks, or bytes. Raises ConfigError."""
    percent = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) *%", text.strip(), re.ASCII)
    if percent:
        blocks = math.floor(unique * float(percent[1]) / 100 + 1e-9)
    elif text.isdecimal() and len(text) <= DIGITS_MAX:
        blocks = int(text)
    elif block_bytes is None:
        raise ConfigError(
            f"{wrong('a part such as 5%, or blocks', text)}; bytes need --block-bytes"
        )
    else:
        blocks = parse_bytes(text) // block_bytes
    if not 0 < blocks <= BLOCKS_MAX:
        raise ConfigError(f"{text!r}: expected 1 to {BLOCKS_MAX:,} blocks, found {blocks:,}")
    return blocks


def budget_of(text: str, trace: Trace, block_bytes: int | None) -> WriteBudget:
    """Read a write budget: a part of the lookups, or blocks or bytes a day. Raises ConfigError."""
    blocks = blocks_of(text, trace.blocks, block_bytes)
    return WriteBudget(blocks, max(1, trace.ns)) if "%" in text else WriteBudget(blocks)


def _policy_failed(verb: str, why: BaseException) -> None:
    raise ConfigError(f"the policy failed in {verb}: {type(why).__name__}: {why}") from why


class _Disk:
    """A tier that has what it is given until it is full, and moves it at once."""

    name = NVME

    @property
    def full(self) -> bool:
        """Tell whether the next block has one evicted."""
        return not self._memory.manager.slots.free

    def __init__(self, blocks: int) -> None:
        self._memory = Cache(blocks)
        self._results: list[JobResult] = []

    def lookup(self, key: BlockKey) -> LookupResult:
        here = self._memory.manager.ready(key) is not None
        return LookupResult.HIT if here else LookupResult.MISS

    def leading(self, keys: Sequence[BlockKey], first: int) -> tuple[LookupResult, int]:
        return leading_alike(self.lookup, keys, first)

    def touch(self, key: BlockKey) -> None:
        self._memory.manager.touch(key)

    def submit(self, job: TransferJob) -> None:
        done = len(job.keys)
        if job.kind is JobKind.STORE:
            done = sum(self._memory.store(keys, above) for keys, above in self._runs(job))
            self._memory.manager.take_changes()
        self._results.append(JobResult(job.job_id, done))

    @staticmethod
    def _runs(job: TransferJob) -> Iterator[tuple[Sequence[BlockKey], BlockKey | None]]:
        """Cut a job into blocks that follow one another; also return what each run is below."""
        first = 0
        for at, key in enumerate(job.keys, 1):
            if at == len(job.keys) or job.parent(at) != key:
                yield job.keys[first:at], job.parent(first)
                first = at

    def poll(self) -> Sequence[JobResult]:
        results, self._results = self._results, []
        return results

    def discard(self, keys: Collection[BlockKey]) -> None:
        for key in keys:
            self._memory.manager.drop(key, "discard")

    def clear(self) -> None:
        self._memory.manager.clear()

    def drain(self) -> None:
        """All is done at once."""

    def close(self) -> None:
        """Nothing is open."""


class _Store:
    """What a store has of one model: memory, and a disk if it has one."""

    def __init__(
        self,
        memory_blocks: int,
        disk_blocks: int | None,
        policy: str | MakePolicy,
        budget: WriteBudget | None,
    ) -> None:
        self._memory = Cache(memory_blocks, policy, _policy_failed)
        slots = self._memory.manager.slots
        self._trial = Trial(slots) if policy == SEGMENTED else None
        self._disk = None if disk_blocks is None else _Disk(disk_blocks)
        tiers = () if self._disk is None else (self._disk,)
        budgets = {} if budget is None else {NVME: budget}
        self._tiering = Tiering(self._memory.manager, tiers, 1, budgets=budgets)

    @property
    def written_blocks(self) -> int:
        return self._tiering.counts[NVME, "stored"]

    def request(self, chain: Chain, now_ns: int, now_s: float) -> tuple[int, int]:
        """Use what is here of a prompt and store the rest; count the blocks of each tier.

        now_s: by the clock of memory's policy.
        """
        manager, tiering = self._memory.manager, self._tiering
        manager.now_s = now_s
        memory = found = manager.lookup(chain, chain.blocks).blocks
        if self._disk is not None and found < chain.blocks:
            result, count = self._disk.leading(chain.keys(0, chain.blocks), found)
            if result is LookupResult.HIT:
                found += count
                below = Found(0, memory, found, self._disk, self._disk.name)
                tiering.promote(chain, found, [below], now_ns)
        lease = manager.prepare_load(chain, found, _OWNER, NEVER_NS) if found else None
        found = 0 if lease is None else len(lease.entries)
        tiering.poll(now_ns)
        if found < chain.blocks:
            keys = chain.keys_at(0, range(found, chain.blocks))
            self._memory.store(keys, chain.key(0, found - 1) if found else None)
        if lease is not None:
            tiering.used(chain, lease)
            manager.complete_load(lease.lease_id)
        if self._trial is not None:
            self._trial.use(self._trial.sampled(chain.keys(0, chain.blocks)), manager.now_s)
        changes = manager.take_changes()
        if self._disk is not None:
            tiering.changed(changes)
            tiering.poll(now_ns)
        return memory, found - memory


def replay(
    trace: Trace,
    memory_blocks: int,
    disk_blocks: int | None = None,
    block_tokens: int = 512,
    watch: Callable[[float], object] = lambda _: None,
    policy: str | MakePolicy = LRU,
    budget: WriteBudget | None = None,
) -> Replayed:
    """Replay a trace. watch(share): so much of it is done. policy: of memory.

    budget: of the disk, in blocks.
    """
    store = _Store(memory_blocks, disk_blocks, policy, budget)
    hits, hit_tokens, tokens = [0, 0], 0, 0
    for number, request in enumerate(trace.requests):
        packed = b"".join([each.to_bytes(_ID_BYTES, "little") for each in request.hash_ids])
        chain = Chain(packed, _ID_BYTES, 1, b"")
        since_ms = request.timestamp - trace.requests[0].timestamp
        # Without times, or with one for all, a request takes a second.
        now_s = since_ms / 1000 if trace.ns else float(number)
        found = store.request(chain, int(request.timestamp * 1_000_000), now_s)
        hits = [hits[0] + found[0], hits[1] + found[1]]
        asked = request.input_length or chain.blocks * block_tokens
        tokens += asked
        hit_tokens += min(asked, sum(found) * block_tokens)
        if number % _WATCHED == 0:
            watch(number / len(trace.requests))
    tiers = [TierHits(MEMORY, memory_blocks, hits[0] / trace.blocks)]
    if disk_blocks is not None:
        tiers.append(TierHits(NVME, disk_blocks, hits[1] / trace.blocks))
    return Replayed(
        requests=len(trace.requests),
        lookups=trace.blocks,
        unique_blocks=trace.unique,
        block_hit_ratio=sum(hits) / trace.blocks,
        token_hit_ratio=hit_tokens / tokens,
        min_block_hit_ratio=offline_bound(trace, memory_blocks + (disk_blocks or 0)),
        tiers=tiers,
        written_blocks_per_lookup=store.written_blocks / trace.blocks,
    )


def offline_bound(trace: Trace, capacity: int) -> float:
    """Return the part of all blocks looked up that MIN hits, with so many blocks here."""
    later: list[list[int]] = []
    seen: dict[int, int] = {}
    for number in range(len(trace.requests) - 1, -1, -1):
        ids = trace.requests[number].hash_ids
        later.append([seen.get(each, _NEVER) for each in ids])
        seen.update(dict.fromkeys(ids, number))
    here: set[int] = set()
    # Also of uses that are over; those come after all others, and never have their turn.
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for request in trace.requests:
        for depth, (block, following) in enumerate(zip(request.hash_ids, later.pop(), strict=True)):
            hits += block in here
            here.add(block)
            heappush(farthest, (-following, -depth, block))
            if len(here) > capacity:
                here.remove(heappop(farthest)[2])
    return hits / trace.blocks
