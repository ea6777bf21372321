"""The scheduler half: which blocks to load, store and fence in each engine step.

Engine-neutral: requests are anything with the attributes of EngineRequest, block tables come in
as lists of ids per group. Called from the engine's step thread only; never blocks beyond the
budgets below, and what a step spends is proportional to what changed in it.

A request's life here:

    NEW --asked--> ASKED --answer used--> LOADING --worker reported--> LOADED --> RUNNING
     |               |                       |failed: NEW again, once
     |               +--loaded in the step that admits it--> RUNNING
     |               +--nothing to load, or given up--> RUNNING
     +--preempted later: NEW again, with the tokens generated since
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import dropwhile
from typing import Any, NamedTuple

from connectors.engine_interface import BlockTable, EngineRequest, Geometry, Step
from connectors.events import BlockEvent, BlockEvents
from connectors.kv_transfer_params import NO_REMOTE, NO_TRANSFER, Transfer
from connectors.partial_block import query_for
from connectors.pd_scheduler import HandOvers
from connectors.request_state import NEVER, LeaseQueue, Phase, TrackedRequest
from connectors.step_loads import StepLoads
from connectors.step_meta import EngineSpec, LoadJob, StepMeta, StoreJob
from connectors.store_client import NO_HITS, Grant, GroupHits, StoreClient
from connectors.store_planner import StorePlanner
from kvstore.core.lookup import Answer, common_hit
from kvstore.core.types import LookupResult
from kvstore.wire import engine as p

IDLE_WAIT_S = 0.001
BUSY_WAIT_S = 0.0002
TIMEOUTS_IN_A_ROW_MAX = 3
ANSWER_LIMIT_NS = 500_000_000  # beyond what the store may defer: it does not answer
LOADING_LIMIT_NS = 5_000_000_000  # waiting for another request's load, or for room for a lease
FAILURES_MAX = 2  # after a failed load other copies are tried once, then it is computed
CPU = "cpu"  # the tier that loads come from, unless the answer names another
NO_GRANT = Grant(0, 0, (), {})


class SchedulerHalf:
    """Plans loads and stores of one engine."""

    def __init__(
        self,
        geometry: Geometry,
        client: StoreClient,
        *,
        world: int = 1,
        shares_prefixes: bool = True,
        transfer: Transfer = NO_TRANSFER,
        beside: bool = False,
        step_loads: StepLoads | None = None,
    ) -> None:
        """world: ranks that report each job.

        shares_prefixes: the engine has a prefix cache, so loading a block twice is waste.
        transfer: how blocks are handed over between engines.
        beside: other connectors load, too, and may report after a step that its input was bad.
        step_loads: the engine ends each step before it schedules the next, so that a load may end
            in the step that admits its request; None: it does not.
        """
        self._geometry = geometry
        self._client = client
        self._shares_prefixes = shares_prefixes
        self._absent = (NO_HITS,) * len(geometry.rules)
        self._scope = b""
        self._direct = transfer.direct
        self._beside = beside
        asynchronous = beside or transfer.direct or not StepLoads.serves(geometry.rules)
        self._step_loads = None if asynchronous else step_loads
        self._next_load: TrackedRequest | None = None  # whose load the next step waits for
        self._step_load: TrackedRequest | None = None  # likewise, of the step under way
        self._loaded_blocks: Sequence[int] = ()  # it has from its first loaded block on
        self._requests: dict[str, TrackedRequest] = {}
        self._untracked: dict[str, int] = {}  # requests without keys here: the engine's tokens
        self._arrivals = 0
        self._lease_queue = LeaseQueue()
        self._scheduled: Mapping[str, int] = {}  # in the last step
        self._ended: set[str] = set()  # requests that have ended since
        self._tokens_left: dict[str, int] = {}  # to compute until a block can be complete
        self._loading_hashes: Counter[bytes] = Counter()
        self._loads: list[LoadJob] = []
        self._load_targets: set[int] = set()
        self._final_stores: list[StoreJob] = []  # of requests that have ended
        self._events = BlockEvents(geometry, client)
        self._stores = StorePlanner(geometry, client, world, self._events)
        self._hand_overs = HandOvers(geometry, client, self._stores, transfer, world=world)
        self._waited_s = 0.0
        self._timeouts = 0

    # Requests arrive, are looked up and admitted

    def on_new_request(
        self,
        request: EngineRequest,
        transfer: Mapping[str, Any] | None = None,
        cached: int = 0,
        *,
        reads: bool = True,
        repeatable: bool = True,
    ) -> None:
        """Take note of a request and queue its lookup; its keys are sent once.

        transfer: hand-over parameters, if it has any; wrong ones are logged and not used.
        cached: tokens that the engine has of a request with parameters.
        reads: False: it computes its whole prompt. Nothing is asked; its blocks are stored.
        repeatable: a step whose output is dropped changes nothing of what it samples later.
        """
        if not self._requests:
            self._client.receive()  # the store may have gone while no step was taken
        if not self._client.session:
            self._client.receive()  # and may be back
        self._arrivals += 1
        tracked = TrackedRequest(
            request, self._absent, self._arrivals, may_load=reads, repeatable=repeatable
        )
        self._requests[request.request_id] = tracked
        tracked.remote = self._hand_overs.start(request, transfer, cached)
        self._ask(tracked)

    def _ask(self, tracked: TrackedRequest) -> None:
        """Look up a request's blocks.

        After a failed load only in memory, so that a request waits for a disk or a peer once.
        """
        if not tracked.may_load or self._lease_queue.blocks(tracked):
            return
        again = tracked.failures > 0
        remote = NO_REMOTE if again else tracked.remote
        query = query_for(self._geometry, tracked.request, remote)
        if not query.blocks:
            return
        lookup = p.Lookup(
            ask=0,
            hashes=b"".join(query.hashes),
            width=self._geometry.hash_bytes,
            scope=self._scope,
            memory_only=again,
            peer=remote.address,
            request=remote.request,
            push=remote.push,
            inside=query.inside,
            loadable=query.blocks,
            direct=self._direct,
        )
        tracked.ask = self._client.ask(lookup)
        if tracked.ask:
            tracked.phase, tracked.query = Phase.ASKED, query
            self._events.asked(tracked.request, query.hashes[: query.own])

    def _worth_loading(self, tracked: TrackedRequest, computed: int) -> int | None:
        """Return how many tokens a load has to reach; None if it cannot.

        Less than a block is no hit, except for what another engine computed for this request.
        """
        request, size = tracked.request, self._geometry.block_tokens
        if tracked.remote.tokens:
            return computed + 1 if computed < request.num_tokens - 1 else None
        hashed = len(request.block_hashes) * self._geometry.hash_tokens
        whole = min(hashed, request.num_tokens - 1) // size * size
        return computed + size if computed + size <= whole else None

    def get_num_new_matched_tokens(self, request_id: str, computed: int) -> tuple[int | None, bool]:
        """Answer how many tokens beyond `computed` can be loaded; None: ask again later.

        And whether the request waits for the load, or runs in this step, which does.
        """
        tracked = self._requests.get(request_id)
        if tracked is None:
            self._untracked[request_id] = computed
            return 0, False
        tracked.local = computed
        self._lease_queue.mark_seen(tracked)
        tokens = self._loadable(tracked, computed)
        if tokens is not None:
            tracked.deferred_ns = None
        tracked.in_step = bool(tokens) and self._fits_in_step(tracked, tokens or 0)
        return tokens, bool(tokens) and not tracked.in_step

    def _fits_in_step(self, tracked: TrackedRequest, tokens: int) -> bool:
        """Return True if a load may hold up the step that admits its request.

        Nothing else may be there to run, or to read what is loaded; all must be readable now.
        """
        loads, grant = self._step_loads, self._client.grant(tracked.ask)
        return (
            loads is not None
            and grant is not None
            and len(self._requests) == 1
            and self._scheduled.keys() <= self._ended | self._requests.keys()
            and tracked.remote is NO_REMOTE
            and tracked.repeatable
            and not grant.sources
            and not any(hits.has_direct for hits in grant.hits)
            and loads.fits(-(-tokens // self._geometry.block_tokens))
        )

    def _loadable(self, tracked: TrackedRequest, computed: int) -> int | None:
        least = self._worth_loading(tracked, computed)
        if least is None:
            return 0
        if tracked.phase is Phase.LOADED:
            tracked.phase = Phase.NEW
        if tracked.phase in (Phase.NEW, Phase.RUNNING) and tracked.failures < FAILURES_MAX:
            self._ask(tracked)
        grant = self._grant(tracked)
        if grant is None:
            waits = tracked.phase is Phase.ASKED or self._lease_queue.blocks(tracked)
            return self._defer(tracked) if waits else 0
        tokens = self._usable(tracked, grant, computed)
        if tokens < least:
            return 0
        if self._loaded_by_another(tracked, computed // self._geometry.block_tokens):
            return self._defer(tracked)
        return tokens - computed

    def _grant(self, tracked: TrackedRequest) -> Grant | None:
        """Return the answer, waiting for it within this step's budget."""
        self._client.receive()
        if tracked.ask and self._client.asked_ns(tracked.ask) is None:  # lost with its session
            self._drop_lookup(tracked)
            self._ask(tracked)
        if not tracked.ask:
            return None
        grant = self._client.grant(tracked.ask)
        if grant is not None:
            self._timeouts = 0
        else:
            self._client.send_step()
            self._wait(tracked)
            grant = self._client.grant(tracked.ask)
        if grant is None:
            return None
        if self._client.clock() >= grant.until_ns:
            self._drop_lookup(tracked)  # its pins may be gone, or more is there now
            self._ask(tracked)
            return None
        if grant.capped:
            self._make_room(tracked)
            return None
        self._lease_queue.remove(tracked)
        return grant

    def _wait(self, tracked: TrackedRequest) -> None:
        idle = self._requests.keys().isdisjoint(self._scheduled)
        if tracked.waited and not idle:
            return  # with nothing else to run an empty step would cost more
        if not idle and self._timeouts >= TIMEOUTS_IN_A_ROW_MAX:
            return
        budget_s = IDLE_WAIT_S if idle else BUSY_WAIT_S
        end = self._client.clock() + int((budget_s - self._waited_s) * 1e9)
        started = self._client.clock()
        while self._client.grant(tracked.ask) is None and self._client.session:
            left_ns = end - self._client.clock()
            if left_ns <= 0:
                break
            self._client.receive(left_ns / 1e9)
        self._waited_s += (self._client.clock() - started) / 1e9
        tracked.waited = True
        if not idle:
            found = self._client.grant(tracked.ask) is not None
            self._timeouts = 0 if found else self._timeouts + 1

    def _make_room(self, tracked: TrackedRequest) -> None:
        """Leases are at their cap: release those of requests that arrived later."""
        self._lease_queue.add(tracked)
        later = dropwhile(lambda other: other is not tracked, self._requests.values())
        for other in later:
            grant = self._client.grant(other.ask)
            if grant is not None and (grant.lease or other is tracked):
                self._drop_lookup(other)
                other.capped = True
        self._ask(tracked)

    def _drop_lookup(self, tracked: TrackedRequest) -> None:
        """Give up a request's lookup, if it has one, and its answer."""
        if tracked.ask:
            self._client.drop(tracked.ask)
            tracked.ask, tracked.phase = 0, Phase.NEW

    def _defer(self, tracked: TrackedRequest) -> int | None:
        """Answer "ask again later", or 0 when that has gone on for too long."""
        now = self._client.clock()
        if tracked.deferred_ns is None:
            tracked.deferred_ns = now
            self._client.count("deferred")
        limit_ns = ANSWER_LIMIT_NS + self._client.defer_ms * 1_000_000
        silent = self._client.unanswered_ns(tracked.ask) > limit_ns
        if silent or now - tracked.deferred_ns > max(LOADING_LIMIT_NS, limit_ns):
            self._client.count("timed_out")
            self._give_up(tracked)
            if silent:
                self._client.detach("no answer in time")
            return 0
        self._client.count("deferred_steps")
        return None

    def _give_up(self, tracked: TrackedRequest) -> None:
        self._drop_lookup(tracked)
        tracked.phase, tracked.failures = Phase.RUNNING, FAILURES_MAX
        self._lease_queue.remove(tracked)

    def _usable(self, tracked: TrackedRequest, grant: Grant, computed: int) -> int:
        """Count the leading tokens that all groups have, the engine's own included."""
        query, size = tracked.query, self._geometry.block_tokens
        if not grant.lease:
            return 0

        def probe(group: int, index: int) -> LookupResult:
            return LookupResult.HIT if index in grant.hits[group] else LookupResult.MISS

        def prefix(group: int, limit: int) -> Answer:
            return Answer(min(limit, len(grant.hits[group])))  # leading blocks, without gaps

        hit = common_hit(
            self._geometry.rules, probe, query.blocks, computed // size, prefix, inside=query.inside
        ).blocks
        return query.end if hit == query.blocks else hit * size

    def _loaded_by_another(self, tracked: TrackedRequest, block: int) -> bool:
        if not self._shares_prefixes or not self._loading_hashes:
            return False
        return self._loading_hashes[tracked.query.hashes[block]] > 0

    def update_state_after_alloc(self, request_id: str, table: BlockTable, external: int) -> None:
        """The engine has allocated a request's blocks: plan the load, if there is one.

        Without a load another connector may fill them, also for a request unknown here.
        """
        tracked = self._requests.get(request_id)
        if tracked is None:
            self._may_fill(table, self._untracked.pop(request_id, 0))
            return
        if tracked.phase is Phase.LOADING:
            return
        self._lease_queue.remove(tracked)
        if tracked.phase is Phase.LOADED:  # counted before, and its present blocks are known
            tracked.phase = Phase.RUNNING
            return
        grant = self._client.grant(tracked.ask) or NO_GRANT
        kept = min(tracked.query.own, grant.kept)
        tracked.present = tuple(hits.before(kept) for hits in grant.hits) or self._absent
        self._rewind(tracked)
        tracked.sources = self._split_by_source(grant, external)
        if tracked.may_load:
            self._client.count_usage(tracked.request.num_tokens - tracked.local, tracked.sources)
        if external and self._plan_load(tracked, grant, table, external):
            self._client.take(tracked.ask)
        else:
            self._client.drop(tracked.ask)
        if not external:
            self._may_fill(table, tracked.local)  # by another
            # Until it is scheduled nothing of it is whole, whatever the engine counts as computed.
            tracked.phase, tracked.remote, tracked.in_step = Phase.NEW, NO_REMOTE, False
            self._hand_overs.release(request_id)
        tracked.ask = 0

    def _may_fill(self, table: BlockTable, computed: int) -> None:
        """Note that blocks of a table that begin at a token or behind it may be filled."""
        for ids, tokens in zip(table, self._geometry.engine_block_tokens, strict=False):
            self._load_targets.update(ids[computed // tokens :])

    def _split_by_source(self, grant: Grant, external: int) -> dict[str, int]:
        """Split the loaded tokens by the tier that the bytes were first found in."""
        left = external if grant.lease else 0
        split: dict[str, int] = {}
        for tier, blocks in grant.sources.items():
            tokens = min(left, blocks * self._geometry.block_tokens)
            if tokens:
                split[tier] = tokens
                left -= tokens
        if left:
            split[CPU] = left
        return split

    def hit_sources(self, request_id: str, external: int) -> dict[str, int]:
        """Return where the tokens of the load just planned come from, by tier."""
        tracked = self._requests.get(request_id)
        return (tracked.sources if tracked is not None else {}) or {CPU: external}

    def _plan_load(
        self, tracked: TrackedRequest, grant: Grant, table: BlockTable, external: int
    ) -> bool:
        """Plan a load; False if the grant lacks a block of it.

        Such a load names no session, so that the workers copy nothing and report it as failed.
        """
        local = tracked.local
        plan = plan_load(self._geometry, grant.hits, table, local, local + external)
        job = LoadJob(
            tracked.request.request_id,
            session=self._client.session if plan.complete else 0,
            lease=grant.lease,
            engine=plan.engine,
            slots=plan.slots,
            generations=plan.generations,
            source=", ".join(filter(None, [*grant.sources, tracked.remote.address])),
            in_step=tracked.in_step,
        )
        self._loads.append(job)
        self._load_targets.update(plan.engine.block_ids)
        tracked.remote = NO_REMOTE
        self._client.stats["load_tokens"] += external
        if tracked.in_step:
            tracked.phase, self._next_load = Phase.NEW, tracked
            self._hand_overs.release(tracked.request.request_id)
        else:
            tracked.phase = Phase.LOADING
            tracked.loading_hash = tracked.query.hashes[local // self._geometry.block_tokens]
            self._loading_hashes[tracked.loading_hash] += 1
        return plan.complete

    # Every step

    def build_meta(self, step: Step) -> StepMeta:
        """Plan this step's copies. Called once per step, empty ones included."""
        self._lease_queue.next_step()
        targets, self._load_targets = self._load_targets, set()
        written = (*step.written, *targets)
        self._client.overwritten(written)
        idle = not step.scheduled
        self._client.receive(IDLE_WAIT_S if idle and self._hand_overs.has_unstored() else 0.0)
        sent = self._hand_overs.store_rest()
        self._begin_step_load(step)
        tokens_left = self._tokens_left
        for request_id, tokens in step.scheduled.items():  # every running request, in every step
            left = tokens_left.get(request_id, 0) - tokens
            if left > 0:
                tokens_left[request_id] = left
            else:
                self._store_complete(request_id, tokens, step)
        stores = self._stores.take_jobs()
        self._scheduled, self._ended = step.scheduled, set()
        early, self._final_stores = tuple(self._final_stores), []
        loads, self._loads = tuple(self._loads), []
        flush = self._stores.fence(written)
        flush.difference_update(job.job_id for job in stores)
        self._client.send_step()
        self._waited_s = 0.0
        return StepMeta(early, stores, loads, tuple(flush), idle, sent)

    def _begin_step_load(self, step: Step) -> None:
        """Note what is bad if the load that this step waits for fails."""
        tracked, self._next_load = self._next_load, None
        self._step_load = tracked
        if tracked is not None:
            (ids,) = step.table(tracked.request.request_id) or ((),)
            first = tracked.local // self._geometry.engine_block_tokens[0]
            self._loaded_blocks = list(ids[first:])

    def _store_complete(self, request_id: str, tokens: int, step: Step) -> None:
        """Store what a request completes in a step."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if tracked.phase in (Phase.NEW, Phase.LOADED):
            tracked.phase = Phase.RUNNING
            may_fail = self._beside or tracked.in_step
            tracked.started_at = tracked.request.num_computed_tokens if may_fail else None
        if self._may_be_undone(tracked):
            return
        computed = tracked.request.num_computed_tokens + tokens
        complete_at = self._stores.store_complete(tracked, computed, step.table)
        self._tokens_left[request_id] = complete_at - computed

    @staticmethod
    def _may_be_undone(tracked: TrackedRequest) -> bool:
        """Return True while what a request started with may still be reported as bad.

        A load within a step fails with the step's output, and the request goes back. It may be
        ours, or another connector's.
        """
        request = tracked.request
        if tracked.started_at is not None:
            settled = request.num_computed_tokens - request.num_in_flight_tokens
            if settled <= tracked.started_at:
                return True
            tracked.started_at = None
        return False

    def on_output(
        self, stores_over: Mapping[int, int], loaded: Iterable[str], failed: Iterable[str]
    ) -> None:
        """Take the workers' reports: store jobs over, on how many ranks; loads ended, failed."""
        self._stores.on_jobs_ended(stores_over)
        bad = set(failed)
        for request_id in loaded:
            tracked = self._requests.get(request_id)
            if tracked is not None and tracked.phase is Phase.LOADING:
                self._loaded(tracked, failed=request_id in bad)

    def step_load_failed(self) -> Sequence[int]:
        """Take the workers' report that the load in the last step failed.

        Returns the engine blocks that hold wrong bytes until they are computed; the engine must
        not find them by their hashes.
        """
        tracked = self._step_load
        if tracked is None:
            return ()
        tracked.started_at = None
        self._load_failed(tracked)
        return self._loaded_blocks

    def copied(self, copied_bytes: int, seconds: float) -> None:
        """Take the workers' report of what loads have copied, and how long that took."""
        if self._step_loads is not None:
            self._step_loads.measured(copied_bytes, seconds)

    def _rewind(self, tracked: TrackedRequest) -> None:
        """Store everything again that the store does not have."""
        tracked.cursor = min(places.leading for places in tracked.present)
        self._tokens_left.pop(tracked.request.request_id, None)

    def _loaded(self, tracked: TrackedRequest, *, failed: bool) -> None:
        self._end_loading(tracked)
        self._hand_overs.release(tracked.request.request_id)
        tracked.phase = Phase.NEW if failed else Phase.LOADED
        tracked.deferred_ns = None
        if failed:
            self._load_failed(tracked)

    def _load_failed(self, tracked: TrackedRequest) -> None:
        self._client.count("load_failed")
        tracked.failures += 1
        tracked.present = self._absent
        self._rewind(tracked)

    def _end_loading(self, tracked: TrackedRequest) -> None:
        if tracked.loading_hash is not None:
            self._loading_hashes[tracked.loading_hash] -= 1
            if not self._loading_hashes[tracked.loading_hash]:
                del self._loading_hashes[tracked.loading_hash]
            tracked.loading_hash = None

    # The end of things

    def hand_over(self, request_id: str, table: BlockTable) -> dict[str, Any] | None:
        """Have the store hold what a request has computed; return parameters for the next engine.

        Called before request_finished, for a request that ended by length or stop. None: no engine
        continues it, or its blocks cannot be fetched.
        """
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.phase is not Phase.RUNNING:
            return None
        return self._hand_overs.finish(tracked, table[: len(self._absent)], self._scope)

    def handed_over(self, request_ids: Iterable[str]) -> list[EngineRequest]:
        """Return those of these requests that another engine continues."""
        return [
            self._requests[name].request
            for name in request_ids
            if self._hand_overs.is_running(name)
        ]

    def request_finished(self, request_id: str, table: BlockTable) -> bool:
        """Store what is complete and not stored yet; release what was not used.

        False: the engine may free the blocks at once; the next step's fence protects their bytes.
        True: they are handed over and found no slot yet; a later step names the request as sent.
        """
        tracked = self._requests.pop(request_id, None)
        self._ended.add(request_id)
        self._tokens_left.pop(request_id, None)
        self._untracked.pop(request_id, None)
        if tracked is None:
            return False
        self._lease_queue.remove(tracked)
        self._events.ended(tracked.request)
        if tracked.phase is Phase.RUNNING and not self._may_be_undone(tracked):
            computed = tracked.request.num_computed_tokens
            self._stores.store_complete(tracked, computed, lambda _: table)
        self._final_stores.extend(self._stores.take_jobs())
        self._client.drop(tracked.ask)
        self._hand_overs.end(request_id)
        self._end_loading(tracked)
        return self._hand_overs.has_unstored(request_id)

    def has_pending_work(self) -> bool:
        """Return True if one more step is needed although no request is left."""
        return (
            bool(self._final_stores)
            or self._client.has_hand_overs_to_send
            or self._hand_overs.has_unstored()
        )

    def reset_cache(self, nonce: bytes) -> bool:
        """Leave everything stored so far behind; False while a load is under way.

        nonce: a scope that was never used before. Other engines keep their blocks.
        """
        self._scope = nonce
        self._stores.use_scope(nonce)
        self._hand_overs.drop_rest()
        for tracked in self._requests.values():
            self._drop_lookup(tracked)
            tracked.cursor = NEVER  # until the engine allocates afresh: its blocks are of before
        return not any(t.phase is Phase.LOADING for t in self._requests.values())

    def take_events(self) -> list[BlockEvent]:
        """Return what entered and left the tiers, of blocks of the current scope."""
        return list(self._events.take(self._scope))

    def take_stats(self) -> Counter[str]:
        """Return what was counted since the last call."""
        return self._client.take_stats()

    def shutdown(self) -> None:
        """Close the connection; safe to call twice."""
        self._client.close()


class LoadPlan(NamedTuple):
    """What a load copies; complete: the answer has all that it needs."""

    engine: EngineSpec
    slots: tuple[int, ...]
    generations: tuple[int, ...]
    complete: bool


def plan_load(
    geometry: Geometry, hits: Sequence[GroupHits], table: BlockTable, local: int, total: int
) -> LoadPlan:
    """Pair a request's engine blocks with slots, from token `local` up to token `total`.

    hits: the blocks found, by group; empty if there was no answer. Of each group only what a hit
    of so many tokens needs. Blocks missing from the answer get slot 0.
    """
    size = geometry.block_tokens
    blocks, inside = -(-total // size), total % size
    ids: list[int] = []
    sizes: list[int] = []
    firsts: list[int] = []
    slots: list[int] = []
    generations: list[int] = []
    complete = True
    for group, tokens in enumerate(geometry.engine_block_tokens):
        per_block, end = size // tokens, -(-total // tokens)
        needed = geometry.rules[group].first_of(blocks, inside=inside) * per_block
        first = max(local // tokens, needed)
        wanted = table[group][first:end]
        skipped = next((i for i, block in enumerate(wanted) if block), len(wanted))
        wanted = wanted[skipped:]
        first += skipped
        ids.extend(wanted)
        sizes.append(len(wanted))
        firsts.append(first)
        if not wanted:
            continue
        block_first, block_end = first // per_block, (end - 1) // per_block + 1
        found = hits[group].run(block_first, block_end) if hits else None
        if found is None:
            complete = False
            nothing = (0,) * (block_end - block_first)
            found = nothing, nothing
        slots.extend(found[0])
        generations.extend(found[1])
    engine = EngineSpec(tuple(ids), tuple(sizes), tuple(firsts))
    return LoadPlan(engine, tuple(slots), tuple(generations), complete)
