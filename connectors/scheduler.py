"""The scheduler half: which blocks to load, store and fence in each engine step.

Engine-neutral: requests are anything with the attributes of EngineRequest, block tables come in
as lists of ids per group. Called from the engine's step thread only; never blocks beyond the
budgets below, and what a step spends is proportional to what changed in it.

A request's life here:

    NEW --asked--> ASKED --answer used--> LOADING --worker reported--> LOADED --> RUNNING
     |               |                       |failed: NEW again, once
     |               +--nothing to load, or given up--> RUNNING
     +--preempted later: NEW again, with the tokens generated since
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import dropwhile, islice, zip_longest
from typing import Protocol

import msgspec

from connectors.client import NOWHERE, Grant, Places, StoreClient
from connectors.jobs import EngineSpec, LoadJob, StepMeta, StoreJob, StoreSpec
from kvstore.lookup import Answer, common_hit
from kvstore.types import GroupRule, LookupResult, make_key

IDLE_WAIT_S = 0.001
BUSY_WAIT_S = 0.0002
TIMEOUTS_IN_A_ROW_MAX = 3
ANSWER_LIMIT_NS = 500_000_000  # beyond what the store may defer: it does not answer
LOADING_LIMIT_NS = 5_000_000_000  # waiting for another request's load
FAILURES_MAX = 2  # after a failed load other copies are tried once, then it is computed
MEDIUM = "cpu"

NO_GRANT = Grant(0, 0, (), {})

BlockTable = Sequence[Sequence[int]]
"""Engine block ids by group; 0 is the null block."""


class EngineRequest(Protocol):
    """What a request must have; vLLM's Request does."""

    request_id: str
    block_hashes: Sequence[bytes]
    num_tokens: int
    num_computed_tokens: int


class Geometry(msgspec.Struct, frozen=True):
    """Token counts: per block, per hash, and per engine block of each group."""

    block_tokens: int
    hash_tokens: int
    engine_block_tokens: tuple[int, ...]
    rules: tuple[GroupRule, ...]

    @property
    def blocks_per_chunk(self) -> tuple[int, ...]:
        """Engine blocks in one block, per group."""
        return tuple(self.block_tokens // tokens for tokens in self.engine_block_tokens)


class Phase(enum.Enum):
    """Where a request is; see the module's picture."""

    NEW = "new"
    ASKED = "asked"
    LOADING = "loading"
    LOADED = "loaded"  # the engine allocates once more before the request runs
    RUNNING = "running"


class Step(msgspec.Struct, frozen=True):
    """What the engine scheduled: tokens per request, blocks about to be written, tables.

    written: engine blocks that get a new owner or content in this step. table(request_id):
    the request's block ids by group, valid during the call.
    """

    scheduled: Mapping[str, int]
    written: Iterable[int]
    table: Callable[[str], BlockTable | None]
    preempted: Iterable[str] = ()


class _Tracked:
    """One request."""

    __slots__ = (
        "ask", "asked_blocks", "capped", "cursor", "deferred_ns", "failures", "grant", "key_hash",
        "local", "phase", "present", "request", "waited",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, groups: int) -> None:
        self.request = request
        self.phase = Phase.NEW
        self.ask: int | None = None
        self.asked_blocks = 0
        self.capped = False  # the store would not pin more for us
        self.waited = False  # the bounded wait is for first asks only
        self.deferred_ns: int | None = None
        self.failures = 0
        self.grant: Grant | None = None
        self.local = 0
        self.present: tuple[Places, ...] = (NOWHERE,) * groups
        self.cursor = [0] * groups
        self.key_hash: bytes | None = None  # first block being loaded, see O7


class SchedulerHalf:
    """Plans loads and stores of one engine."""

    def __init__(
        self,
        geometry: Geometry,
        client: StoreClient,
        clock: Callable[[], int],
        *,
        world: int = 1,
        shares_prefixes: bool = True,
    ) -> None:
        """world: ranks that report each job.

        shares_prefixes: the engine has a prefix cache, so loading a block twice is waste.
        """
        self.stats: Counter[str] = Counter()
        self._geometry = geometry
        self._client = client
        self._clock = clock
        self._shares_prefixes = shares_prefixes
        self._groups = len(geometry.rules)
        self._scope = b""
        self._requests: dict[str, _Tracked] = {}
        self._running: set[str] = set()
        self._loading_hashes: Counter[bytes] = Counter()
        self._loads: list[LoadJob] = []
        self._load_targets: set[int] = set()
        self._early: list[StoreJob] = []
        self._sources: dict[int, set[int]] = {}
        self._jobs: dict[int, tuple[int, ...]] = {}
        self._next_job = 1
        self._world = world
        self._ranks_over: Counter[int] = Counter()
        self._waited_s = 0.0
        self._timeouts = 0

    # Requests arrive, are looked up, are admitted

    def on_new_request(self, request: EngineRequest) -> None:
        """Take note of a request and queue its lookup; its keys are sent once."""
        tracked = _Tracked(request, self._groups)
        self._requests[request.request_id] = tracked
        self._ask(tracked)

    def _ask(self, tracked: _Tracked) -> None:
        blocks = self._askable(tracked.request)
        if blocks == 0:
            return
        every = self._geometry.block_tokens // self._geometry.hash_tokens
        hashes = tracked.request.block_hashes
        wanted = [hashes[index] for index in range(every - 1, blocks * every, every)]
        tracked.ask = self._client.ask(b"".join(wanted), len(wanted[0]), self._scope)
        if tracked.ask is not None:
            tracked.phase, tracked.asked_blocks = Phase.ASKED, blocks
            tracked.deferred_ns = None

    def _askable(self, request: EngineRequest) -> int:
        """Blocks that could be served: all full ones, but the last token is always computed."""
        hashed = len(request.block_hashes) * self._geometry.hash_tokens
        return min(hashed, request.num_tokens - 1) // self._geometry.block_tokens

    def get_num_new_matched_tokens(self, request_id: str, computed: int) -> tuple[int | None, bool]:
        """Answer how many tokens beyond `computed` can be loaded; None: ask again later."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return 0, False
        size = self._geometry.block_tokens
        tracked.local = computed
        if self._askable(tracked.request) * size < computed + size:
            return 0, False
        if tracked.phase is Phase.LOADED:
            tracked.phase = Phase.NEW
        if tracked.phase in (Phase.NEW, Phase.RUNNING) and tracked.failures < FAILURES_MAX:
            self._ask(tracked)
        grant = self._grant(tracked)
        if grant is None:
            return self._defer(tracked) if tracked.phase is Phase.ASKED else (0, False)
        hit = self._usable(tracked, grant, computed)
        if hit * size < computed + size:
            return 0, False
        if self._loaded_by_another(tracked, computed // size):
            return self._defer(tracked)
        return hit * size - computed, True

    def _grant(self, tracked: _Tracked) -> Grant | None:
        """Return the answer, waiting for it within this step's budget."""
        self._client.receive()
        if tracked.ask is not None and self._client.asked_ns(tracked.ask) is None:
            tracked.ask, tracked.phase = None, Phase.NEW  # lost with its session
            self._ask(tracked)
        if tracked.ask is None:
            return None
        grant = self._client.grant(tracked.ask)
        if grant is not None:
            self._timeouts = 0
        else:
            self._client.send_step()
            self._wait(tracked)
            grant = self._client.grant(tracked.ask)
        if grant is not None and self._clock() >= grant.until_ns:
            self._client.drop(tracked.ask)  # its pins may be gone, or more is there now
            self._ask(tracked)
            return None
        tracked.capped = grant is not None and grant.capped
        if tracked.capped:
            self._make_room(tracked)
            return None
        return grant

    def _wait(self, tracked: _Tracked) -> None:
        idle = not self._running
        if tracked.waited or tracked.ask is None:
            return
        if not idle and self._timeouts >= TIMEOUTS_IN_A_ROW_MAX:
            return
        end = self._clock() + int((self._budget(idle) - self._waited_s) * 1e9)
        started = self._clock()
        while self._client.grant(tracked.ask) is None and self._client.session:
            left_ns = end - self._clock()
            if left_ns <= 0:
                break
            self._client.receive(left_ns / 1e9)
        self._waited_s += (self._clock() - started) / 1e9
        tracked.waited = True
        if not idle:
            found = self._client.grant(tracked.ask) is not None
            self._timeouts = 0 if found else self._timeouts + 1

    def _budget(self, idle: bool) -> float:  # noqa: FBT001 - a fact, not an option
        return IDLE_WAIT_S if idle else BUSY_WAIT_S

    def _make_room(self, tracked: _Tracked) -> None:
        """Our leases are at their cap: requests that arrived later give theirs back."""
        later = dropwhile(lambda other: other is not tracked, self._requests.values())
        for other in islice(later, 1, None):
            grant = self._client.grant(other.ask) if other.ask is not None else None
            if other.ask is not None and grant is not None and grant.lease:
                self._client.drop(other.ask)
                other.ask, other.phase = None, Phase.NEW
        if tracked.ask is not None:
            self._client.drop(tracked.ask)
        deferred_ns = tracked.deferred_ns
        self._ask(tracked)
        tracked.deferred_ns = deferred_ns

    def _defer(self, tracked: _Tracked) -> tuple[int | None, bool]:
        """Answer "ask again later", or give up when that has gone on for too long."""
        now = self._clock()
        if tracked.deferred_ns is None:
            tracked.deferred_ns = now
            self._count("deferred")
        answered = tracked.ask is not None and self._client.grant(tracked.ask) is not None
        waiting_for_store = not answered and not tracked.capped
        limit = ANSWER_LIMIT_NS + self._client.defer_ms * 1_000_000
        if not waiting_for_store:
            limit = LOADING_LIMIT_NS
        if now - tracked.deferred_ns > limit:
            self._count("timed_out")
            self._give_up(tracked)
            if waiting_for_store:
                self._client.detach("no answer in time")
            return 0, False
        self._count("deferred_steps")
        return None, False

    def _give_up(self, tracked: _Tracked) -> None:
        if tracked.ask is not None:
            self._client.drop(tracked.ask)
        tracked.ask, tracked.phase, tracked.failures = None, Phase.RUNNING, FAILURES_MAX

    def _usable(self, tracked: _Tracked, grant: Grant, computed: int) -> int:
        if not grant.lease:
            return 0

        def probe(group: int, index: int) -> LookupResult:
            return LookupResult.HIT if index in grant.hits[group] else LookupResult.MISS

        def prefix(group: int, limit: int) -> Answer:
            return Answer(min(limit, len(grant.hits[group])))  # leading blocks, without gaps

        local = computed // self._geometry.block_tokens
        limit = min(tracked.asked_blocks, self._askable(tracked.request))
        return common_hit(self._geometry.rules, probe, limit, local, prefix).blocks

    def _loaded_by_another(self, tracked: _Tracked, block: int) -> bool:
        if not self._shares_prefixes or not self._loading_hashes:
            return False
        return self._loading_hashes[self._block_hash(tracked.request, block)] > 0

    def _block_hash(self, request: EngineRequest, block: int) -> bytes:
        every = self._geometry.block_tokens // self._geometry.hash_tokens
        return request.block_hashes[(block + 1) * every - 1]

    def update_state_after_alloc(self, request_id: str, table: BlockTable, external: int) -> None:
        """The engine has given the request its blocks: plan the load, if there is one."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.phase is Phase.LOADING:
            return
        if tracked.phase is Phase.LOADED:  # counted before, and its present blocks are known
            tracked.phase = Phase.RUNNING
            return
        grant = self._client.grant(tracked.ask) if tracked.ask is not None else None
        tracked.present = (
            grant.hits if grant is not None and grant.hits else (NOWHERE,) * self._groups
        )
        tracked.cursor = [0] * self._groups
        hits = self._sources_of(tracked, grant, external)
        self._client.used(tracked.request.num_tokens - tracked.local, hits)
        if external:
            self._plan_load(tracked, grant or NO_GRANT, table, external)
            if tracked.ask is not None:
                self._client.take(tracked.ask)
        else:
            if tracked.ask is not None:
                self._client.drop(tracked.ask)
            tracked.phase = Phase.RUNNING
        tracked.ask = None

    def _sources_of(self, tracked: _Tracked, grant: Grant | None, external: int) -> dict[str, int]:
        """Split the loaded tokens by the tier that the bytes were first found in."""
        if not external or grant is None:
            return {}
        size = self._geometry.block_tokens
        left = external
        split: dict[str, int] = {}
        for tier, blocks in grant.sources.items():
            tokens = min(left, blocks * size)
            if tokens:
                split[tier] = tokens
                left -= tokens
        if left:
            split[MEDIUM] = left
        tracked.grant = msgspec.structs.replace(grant, sources=split)
        return split

    def hit_sources(self, request_id: str, external: int) -> dict[str, int]:
        """Return where the tokens of the load just planned come from, by tier."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.grant is None:
            return {MEDIUM: external}
        return tracked.grant.sources

    def _plan_load(self, tracked: _Tracked, grant: Grant, table: BlockTable, external: int) -> None:
        total = tracked.local + external
        ids: list[int] = []
        sizes: list[int] = []
        firsts: list[int] = []
        slots: list[int] = []
        generations: list[int] = []
        whole = True
        for group, tokens in enumerate(self._geometry.engine_block_tokens):
            per = self._geometry.block_tokens // tokens
            first, end = tracked.local // tokens, total // tokens
            trailing = self._geometry.rules[group].trailing
            if trailing is not None:
                first = max(first, end - trailing * per)
            wanted = table[group][first:end]
            skip = next((i for i, block in enumerate(wanted) if block), len(wanted))
            wanted = wanted[skip:]
            ids.extend(wanted)
            sizes.append(len(wanted))
            firsts.append(first + skip)
            if wanted:
                chunks = ((first + skip) // per, (end - 1) // per + 1)
                places = grant.hits[group].run(*chunks) if grant.hits else None
                if places is None:
                    whole = False
                    places = ((0,) * (chunks[1] - chunks[0]),) * 2
                slots.extend(places[0])
                generations.extend(places[1])
        # A load that lacks a block it promised is given to the workers as one that fails.
        session = self._client.session if whole else 0
        self._loads.append(
            LoadJob(
                tracked.request.request_id,
                session,
                grant.lease,
                EngineSpec(tuple(ids), tuple(sizes), tuple(firsts)),
                StoreSpec(MEDIUM, tuple(slots)),
                tuple(generations),
            )
        )
        self._load_targets.update(ids)
        tracked.phase = Phase.LOADING
        tracked.key_hash = self._block_hash(
            tracked.request, tracked.local // self._geometry.block_tokens
        )
        self._loading_hashes[tracked.key_hash] += 1
        self.stats["load_tokens"] += external

    # Every step

    def build_meta(self, step: Step) -> StepMeta:
        """Plan this step's copies. Called once per step, empty ones included."""
        self._client.receive()
        stores: list[StoreJob] = []
        for request_id, tokens in step.scheduled.items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                if tracked.phase in (Phase.NEW, Phase.LOADED):
                    tracked.phase = Phase.RUNNING
                computed = tracked.request.num_computed_tokens + tokens
                stores.extend(self._offer(tracked, computed, step.table))
        self._running = set(step.scheduled)
        early, self._early = tuple(self._early), []
        loads, self._loads = tuple(self._loads), []
        targets, self._load_targets = self._load_targets, set()
        flush: set[int] = set()
        if self._sources:
            for block in (*step.written, *targets):
                flush.update(self._sources.get(block, ()))
        flush.difference_update(job.job_id for job in stores)
        self._client.send_step()
        self._waited_s = 0.0
        return StepMeta(early, tuple(stores), loads, tuple(flush), idle=not step.scheduled)

    def _offer(
        self, tracked: _Tracked, computed: int, table: Callable[[str], BlockTable | None]
    ) -> list[StoreJob]:
        """Store the blocks that are complete now and not stored yet, as far as credits go."""
        if not self._client.session:
            return []
        hashed = len(tracked.request.block_hashes) * self._geometry.hash_tokens
        end = min(computed, hashed) // self._geometry.block_tokens
        if min(tracked.cursor) >= end:
            return []
        blocks = table(tracked.request.request_id)
        if blocks is None:
            return []
        taken: list[list[tuple[int, int, bytes]]] = [[] for _ in range(self._groups)]
        for index in range(min(tracked.cursor), end):
            block_hash = self._block_hash(tracked.request, index)
            for group in range(self._groups):
                if tracked.cursor[group] != index:
                    continue
                key = make_key(block_hash, group, self._scope)
                if self._wanted(tracked, group, index, key, blocks[group]):
                    if not self._client.credits:
                        self._count("store_declined")
                        return self._store_jobs(tracked, taken, blocks)
                    taken[group].append((index, self._client.credits.popleft(), key))
                tracked.cursor[group] = index + 1
        return self._store_jobs(tracked, taken, blocks)

    def _wanted(
        self, tracked: _Tracked, group: int, index: int, key: bytes, table: Sequence[int]
    ) -> bool:
        """Tell whether a block should be stored: whole in the engine, and not ready already."""
        per = self._geometry.blocks_per_chunk[group]
        ids = table[index * per : (index + 1) * per]
        if len(ids) < per or not all(ids):
            return False
        return index not in tracked.present[group] and not self._client.known_ready(key)

    def _store_jobs(
        self,
        tracked: _Tracked,
        taken: Sequence[Sequence[tuple[int, int, bytes]]],
        table: BlockTable,
    ) -> list[StoreJob]:
        """Make jobs of leading runs: one run of neighbouring blocks per group and job."""
        runs = [_runs(blocks) for blocks in taken]
        return [self._store_job(tracked, row, table) for row in zip_longest(*runs, fillvalue=[])]

    def _store_job(
        self,
        tracked: _Tracked,
        row: Sequence[Sequence[tuple[int, int, bytes]]],
        table: BlockTable,
    ) -> StoreJob:
        ids: list[int] = []
        sizes, firsts, slots, keys, parents = [], [], [], [], []
        for group, run in enumerate(row):
            per = self._geometry.blocks_per_chunk[group]
            first = run[0][0] if run else 0
            listed = table[group][first * per : (first + len(run)) * per]
            ids.extend(listed)
            sizes.append(len(listed))
            firsts.append(first * per)
            for index, slot, key in run:
                slots.append(slot)
                keys.append(key)
                rooted = index == 0 or self._geometry.rules[group].trailing is not None
                above = b"" if rooted else self._block_hash(tracked.request, index - 1)
                parents.append(b"" if rooted else make_key(above, group, self._scope))
        number = self._next_job
        self._next_job += 1
        self._jobs[number] = tuple(ids)
        for block in ids:
            self._sources.setdefault(block, set()).add(number)
        self.stats["store_blocks"] += len(slots)
        return StoreJob(
            number,
            self._client.session,
            EngineSpec(tuple(ids), tuple(sizes), tuple(firsts)),
            StoreSpec(MEDIUM, tuple(slots)),
            tuple(keys),
            tuple(parents),
        )

    def on_output(
        self, stores_over: Mapping[int, int], loaded: Iterable[str], failed: Iterable[str]
    ) -> None:
        """Take the workers' reports: store jobs over, on how many ranks; loads ended, failed."""
        for number, ranks in stores_over.items():
            self._ranks_over[number] += ranks
            if self._ranks_over[number] < self._world:
                continue
            del self._ranks_over[number]
            for block in self._jobs.pop(number, ()):
                jobs = self._sources.get(block)
                if jobs is not None:
                    jobs.discard(number)
                    if not jobs:
                        del self._sources[block]
        bad = set(failed)
        for request_id in loaded:
            tracked = self._requests.get(request_id)
            if tracked is not None and tracked.phase is Phase.LOADING:
                self._loaded(tracked, failed=request_id in bad)

    def _loaded(self, tracked: _Tracked, *, failed: bool) -> None:
        self._end_loading(tracked)
        tracked.phase = Phase.LOADED
        tracked.deferred_ns = None
        if failed:
            self._count("load_failed")
            tracked.failures += 1
            tracked.present = (NOWHERE,) * self._groups
            tracked.cursor = [0] * self._groups
            tracked.phase = Phase.NEW

    def _end_loading(self, tracked: _Tracked) -> None:
        if tracked.key_hash is not None:
            self._loading_hashes[tracked.key_hash] -= 1
            if not self._loading_hashes[tracked.key_hash]:
                del self._loading_hashes[tracked.key_hash]
            tracked.key_hash = None

    # The end of things

    def request_finished(self, request_id: str, table: BlockTable) -> None:
        """Offer what is complete and was not offered; give back what was not used.

        The engine may free the blocks at once: the next step's fence protects their bytes.
        """
        tracked = self._requests.pop(request_id, None)
        self._running.discard(request_id)
        if tracked is None:
            return
        if tracked.phase is Phase.RUNNING:
            computed = tracked.request.num_computed_tokens
            self._early.extend(self._offer(tracked, computed, lambda _: table))
        if tracked.ask is not None:
            self._client.drop(tracked.ask)
        self._end_loading(tracked)

    def has_pending_work(self) -> bool:
        """Tell whether one more step is needed although no request is left."""
        return bool(self._early)

    def reset_cache(self, nonce: bytes) -> bool:
        """Leave everything stored so far behind; False while a load is under way.

        nonce: a scope that nobody used before. Other engines keep their blocks.
        """
        self._scope = nonce
        for tracked in self._requests.values():
            if tracked.ask is not None:
                self._client.drop(tracked.ask)
                tracked.ask, tracked.phase = None, Phase.NEW
            tracked.present = (NOWHERE,) * self._groups
            tracked.cursor = [0] * self._groups
        return not any(t.phase is Phase.LOADING for t in self._requests.values())

    def take_events(self) -> list[tuple[bool, bytes, int]]:
        """Return (stored or removed, block hash, group) for blocks of the current scope."""
        events = []
        tail = 2 + len(self._scope)
        while self._client.events:
            stored, key = self._client.events.popleft()
            if key[-tail:][2:] == self._scope:
                events.append((stored, key[:-tail], int.from_bytes(key[-tail:][:2], "big")))
        return events

    def take_stats(self) -> dict[str, int]:
        """Return what was counted since the last call."""
        stats = dict(self.stats)
        self.stats.clear()
        return stats

    def _count(self, event: str) -> None:
        self.stats[event] += 1
        self._client.counts[event] += 1

    def shutdown(self) -> None:
        """Close the connection; safe to call twice."""
        self._client.close()


def _runs(blocks: Sequence[tuple[int, int, bytes]]) -> list[list[tuple[int, int, bytes]]]:
    runs: list[list[tuple[int, int, bytes]]] = []
    for block in blocks:
        if runs and runs[-1][-1][0] + 1 == block[0]:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
