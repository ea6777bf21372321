"""The scheduler half: which blocks to load, store and fence in each engine step.

Engine-neutral: requests are anything with the attributes of EngineRequest, block tables come in
as lists of ids per group. Called from the engine's step thread only. A step waits for answers
within the budgets of request_lookups.py, and spends in proportion to what changed in it.

An engine calls, in this order:

    on_new_request               queue a lookup                                request_lookups.py
    get_num_new_matched_tokens   take the answer, or defer the request         request_lookups.py
    update_state_after_alloc     plan the load into the engine's blocks        load_planner.py
    build_meta                   store what becomes complete; fence            store_planner.py
                                 or only what the engine is to reuse           late_stores.py
    on_output                    take the workers' reports
    hand_over, request_finished  store the rest; hold it for another engine    pd_scheduler.py

A request's life here:

    NEW --asked--> ASKED --answer used--> LOADING --worker reported--> LOADED --> RUNNING
     |               |                       |failed: NEW again, once
     |               +--loaded in the step that admits it--> RUNNING
     |               +--nothing to load, or given up--> RUNNING
     +--preempted later: NEW again, with the tokens generated since
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from connectors.compute_pace import ComputePace
from connectors.engine_interface import (
    BlockTable,
    EngineCache,
    EngineRequest,
    Geometry,
    Step,
    is_one_full_group,
)
from connectors.events import BlockEvent, BlockEvents
from connectors.kv_transfer_params import NO_REMOTE, NO_TRANSFER, Transfer
from connectors.late_stores import LateStores
from connectors.load_planner import CPU, LoadPlanner, why_missed
from connectors.pd_scheduler import HandOvers
from connectors.request_lookups import IDLE_WAIT_S, RequestLookups
from connectors.request_policy import NO_LIMITS, RequestPolicy
from connectors.request_state import NEVER, Phase, TrackedRequest
from connectors.step_loads import StepLoad, StepLoads
from connectors.step_meta import StepMeta, StoreJob
from connectors.store_client import NO_HITS, Grant, StoreClient
from connectors.store_planner import StorePlanner
from kvstore.core.lookup import Answer, common_hit
from kvstore.core.types import LookupResult

NO_GRANT = Grant(0, 0, (), {})
REFUSED_MAX = 4  # steps without any request in which the engine does not take a load
_ADMITTED = (Phase.NEW, Phase.LOADED)  # and not scheduled yet


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
        self._absent = (NO_HITS,) * len(geometry.rules)
        self._scope = b""
        self.tag = b""  # of the tenant whose blocks' events are published
        self._beside = beside
        asynchronous = beside or transfer.direct or not is_one_full_group(geometry.rules)
        self._step_loads = None if asynchronous else step_loads
        self._requests: dict[str, TrackedRequest] = {}
        self._untracked: dict[str, int] = {}  # requests without keys here: the engine's tokens
        self._arrivals = 0
        self._scheduled: Mapping[str, int] = {}  # in the last step
        self._ended: set[str] = set()  # requests that have ended since
        self._tokens_left: dict[str, int] = {}  # to compute until a block can be complete
        self._final_stores: list[StoreJob] = []  # of requests that have ended
        self.events = BlockEvents(geometry, client)
        self._lookups = RequestLookups(
            geometry, client, self._requests, self.events, direct=transfer.direct
        )
        self._loads = LoadPlanner(geometry, client, shares_prefixes=shares_prefixes)
        self._stores = StorePlanner(geometry, client, world, self.events)
        self._late: LateStores | None = None
        self._hand_overs = HandOvers(geometry, client, self._stores, transfer, world=world)

    def prefer_computing(self, pace: ComputePace) -> None:
        """Load no block from a lower tier that takes longer than computing it does."""
        self._lookups.pace = pace

    def store_late(self, cache: EngineCache, step_blocks: int) -> None:
        """Store a block when the engine is about to reuse its own, not when it is complete.

        For engines with one full group. step_blocks: how many blocks of its own the engine gives
        out in a step at most, those that loads fill aside.
        """
        self._late = LateStores(cache, self._geometry, self._stores, step_blocks)
        self._lookups.late = self._late

    # Requests arrive, are looked up and admitted

    def on_new_request(
        self,
        request: EngineRequest,
        transfer: Mapping[str, Any] | None = None,
        cached: int = 0,
        *,
        reads: bool = True,
        repeatable: bool = True,
        policy: RequestPolicy = NO_LIMITS,
    ) -> None:
        """Take note of a request and queue its lookup; its keys are sent once.

        transfer: hand-over parameters, if it has any; wrong ones are logged and not used.
        cached: tokens that the engine has of a request with parameters.
        reads: False: it computes its whole prompt. Nothing is asked; its blocks are stored.
        repeatable: its first step may be taken back: what it loads can be computed, and it samples
            the same.
        policy: limits to what is loaded and stored. All that another engine goes on with is stored.
        """
        if not self._requests:
            self._client.receive()  # the store may have gone while no step was taken
        if not self._client.session:
            self._client.receive()  # and may be back
        self._arrivals += 1
        tracked = TrackedRequest(
            request,
            self._absent,
            self._arrivals,
            may_load=reads and policy.loads,
            repeatable=repeatable,
            policy=policy,
            tag=policy.tag,
            apart=(policy.tag, not policy.kv_store_tiers.disk),
        )
        if policy.tenant:
            self._client.name_tenant(policy.tenant)
        self._requests[request.request_id] = tracked
        tracked.remote = self._hand_overs.start(request, transfer, cached)
        if not self._hand_overs.is_running(request.request_id):
            tracked.store_tokens = policy.stored_tokens(request.num_tokens)
            tracked.late = self._late is not None and not policy.kv_pin
        self._lookups.ask(tracked)
        self._lookups.pin(tracked)

    def limits_refused(self) -> None:
        """Count a request whose limits are wrong."""
        self._client.count("transfer_refused")

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
        tracked.in_step = False
        self._lookups.queue.mark_tried(tracked)
        hashes, loads = tracked.request.block_hashes, self._step_loads
        if loads is not None and loads.will_fill(hashes, computed // self._geometry.hash_tokens):
            return None, False  # the next step can admit it: by then these blocks are right
        tokens = self._loadable(tracked, computed)
        if tracked.gives_way and tokens is not None and len(self._requests) > 1:
            tokens = self._lookups.defer(tracked)
        tracked.gives_way = False
        if tokens and _finds_no_room(tracked, self._requests.values(), idle=not self._scheduled):
            tokens = 0
        if tokens is not None:
            tracked.deferred_ns = None
        return tokens, bool(tokens) and not tracked.in_step

    def _loadable(self, tracked: TrackedRequest, computed: int) -> int | None:
        least = self._worth_loading(tracked, computed)
        if least is None:
            return 0
        lookups, size = self._lookups, self._geometry.block_tokens
        idle = self._requests.keys().isdisjoint(self._scheduled)
        grant = lookups.answer(tracked, idle=idle)
        if grant is None:
            return lookups.defer(tracked) if lookups.is_waiting(tracked) else 0
        end = self._usable(tracked, grant, computed)
        if end < least:
            return 0
        if self._loads.is_loading(tracked.query.hashes[computed // size]):
            return lookups.defer(tracked)
        tokens = end - computed
        if self._late is not None:
            self._late.make_way(tokens)
        if self._step_loads is not None:
            blocks, alone = -(-tokens // size), self._is_alone()
            tracked.in_step = self._step_loads.allows(tracked, grant, blocks, alone=alone)
        return tokens

    def _is_alone(self) -> bool:
        """Return True if the engine has one request, and no other ran in the last step."""
        requests = self._requests.keys()
        return len(requests) == 1 and self._scheduled.keys() <= self._ended | requests

    def _usable(self, tracked: TrackedRequest, grant: Grant, computed: int) -> int:
        """Count the leading tokens that all groups have, the engine's own included."""
        query, size = tracked.query, self._geometry.block_tokens
        if not grant.lease:
            return 0
        most = min(query.blocks, (computed + tracked.policy.max_load_tokens) // size)
        inside = query.inside if most == query.blocks else 0

        def probe(group: int, index: int) -> LookupResult:
            return LookupResult.HIT if index in grant.hits[group] else LookupResult.MISS

        def prefix(group: int, limit: int) -> Answer:
            return Answer(min(limit, len(grant.hits[group])))  # leading blocks, without gaps

        hit = common_hit(
            self._geometry.rules, probe, most, computed // size, prefix, inside=inside
        ).blocks
        return query.end if hit == query.blocks else hit * size

    def update_state_after_alloc(self, request_id: str, table: BlockTable, external: int) -> None:
        """The engine has allocated a request's blocks: plan the load, if there is one.

        Without a load another connector may fill them, also for a request unknown here. A request
        that has computed tokens goes on from them, and nothing was asked: another connector has
        loaded them, or they are of an earlier turn of its session.
        """
        tracked = self._requests.get(request_id)
        if tracked is None:
            local = self._untracked.pop(request_id, 0)
            self._loads.may_fill(table, local)
            if self._late is not None:
                self._late.begin(request_id, local)
            return
        tracked.refused = 0
        if tracked.phase is Phase.LOADED:  # counted before, and its present blocks are known
            tracked.phase = Phase.RUNNING
            self._lookups.end(tracked)
            return
        if tracked.phase is Phase.LOADING or tracked.request.num_computed_tokens:
            return
        grant = self._client.grant(tracked.ask) or NO_GRANT
        kept = min(tracked.query.own, grant.kept)
        tracked.present = tuple(hits.before(kept) for hits in grant.hits) or self._absent
        self._rewind(tracked)
        if self._late is not None:
            self._late.begin(request_id, tracked.local + external)
        tracked.sources = self._loads.split_by_source(grant, external)
        if tracked.may_load:
            answer = None if grant is NO_GRANT else grant
            missed = why_missed(tracked, answer, self._geometry.block_tokens)
            self._client.count_usage(tracked.sources, missed)
        used = False
        if external:
            used = self._loads.plan(tracked, grant, table, external)
        else:
            self._loads.may_fill(table, tracked.local)  # by another
            tracked.in_step = False
        if external and not tracked.in_step:
            tracked.phase = Phase.LOADING
        else:
            # Until it is scheduled nothing of it is whole, whatever the engine counts as computed.
            tracked.phase = Phase.NEW
            self._hand_overs.release(request_id)
        if tracked.in_step and self._step_loads is not None:
            geometry, local = self._geometry, tracked.local
            blocks = list(table[0][local // geometry.engine_block_tokens[0] :])
            loaded = -(-external // geometry.block_tokens)
            load = StepLoad(tracked, blocks, local // geometry.hash_tokens, loaded)
            self._step_loads.planned(load)
        tracked.remote = NO_REMOTE
        self._lookups.end(tracked, used=used)

    def hit_sources(self, request_id: str, external: int) -> dict[str, int]:
        """Return where the tokens of the load just planned come from, by tier."""
        tracked = self._requests.get(request_id)
        return (tracked.sources if tracked is not None else {}) or {CPU: external}

    # Every step

    def build_meta(self, step: Step) -> StepMeta:
        """Plan this step's copies. Called once per step, empty ones included."""
        self._lookups.next_step()
        written = (*step.written, *self._loads.take_targets())
        if self._late is not None:  # peers may read what it stores until that is overwritten
            self._final_stores.extend(self._late.step(written))
        self._client.overwritten(written)
        idle = not step.scheduled
        self._client.receive(IDLE_WAIT_S if idle and self._hand_overs.has_unstored() else 0.0)
        self._lookups.line_up()
        sent = self._hand_overs.store_rest()
        if self._step_loads is not None:
            self._step_loads.begin_step()
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
        flush = self._stores.fence(written)
        flush.difference_update(job.job_id for job in stores)
        self._client.send_step()
        if self._lookups.pace is not None:
            self._lookups.pace.began(step.scheduled.values())
        return StepMeta(early, stores, self._loads.take_jobs(), tuple(flush), idle, sent)

    def _store_complete(self, request_id: str, tokens: int, step: Step) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if tracked.phase in _ADMITTED:
            tracked.phase = Phase.RUNNING
            may_fail = self._beside or tracked.in_step
            tracked.started_at = tracked.request.num_computed_tokens if may_fail else None
        if tracked.started_at is not None and self._may_be_undone(tracked):
            return
        computed = tracked.request.num_computed_tokens + tokens
        stores = self._late if tracked.late and self._late is not None else self._stores
        complete_at = stores.store_complete(tracked, computed, step.table)
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
        if self._lookups.pace is not None:
            self._lookups.pace.ended()
        self._stores.on_jobs_ended(stores_over)
        if self._step_loads is not None and self._step_loads.current:
            self._lookups.lease_ended()
        bad = set(failed)
        for request_id in loaded:
            tracked = self._requests.get(request_id)
            if tracked is not None and tracked.phase is Phase.LOADING:
                self._loaded(tracked, failed=request_id in bad)

    def step_loads_failed(self, blocks: AbstractSet[int]) -> set[int]:
        """Take the workers' report of engine blocks that loads in the last step did not fill.

        Returns those that hold wrong bytes until they are computed; the engine must not find them
        by their hashes.
        """
        wrong: set[int] = set()
        for load in () if self._step_loads is None else self._step_loads.failed(blocks):
            load.tracked.started_at = None
            self._load_failed(load.tracked)
            wrong.update(load.blocks)
        return wrong

    def copied(self, copied_bytes: int, seconds: float) -> None:
        """Take the workers' report of what loads have copied, and how long that took."""
        if self._step_loads is not None:
            self._step_loads.measured(copied_bytes, seconds)

    def _rewind(self, tracked: TrackedRequest) -> None:
        """Store everything again that the store does not have."""
        tracked.cursor = min(places.leading for places in tracked.present)
        self._tokens_left.pop(tracked.request.request_id, None)

    def _loaded(self, tracked: TrackedRequest, *, failed: bool) -> None:
        self._loads.ended(tracked)
        self._lookups.lease_ended()
        self._hand_overs.release(tracked.request.request_id)
        tracked.phase = Phase.NEW if failed else Phase.LOADED
        tracked.deferred_ns = None
        if failed:
            # vLLM tries it before all whose loads have ended, and none of them if it finds no room
            # for it; what they hold may be what it lacks. Once deferred, it comes after them.
            tracked.gives_way = True
            self._load_failed(tracked)

    def _load_failed(self, tracked: TrackedRequest) -> None:
        self._client.count("load_failed")
        tracked.failures += 1
        tracked.present = self._absent
        size, end = self._geometry.block_tokens, tracked.local + sum(tracked.sources.values())
        tracked.doubted = range(tracked.local // size, -(-end // size))
        self._rewind(tracked)

    # The end of things

    def hand_over(self, request_id: str, table: BlockTable) -> dict[str, Any] | None:
        """Have the store hold what a request has computed; return parameters for the next engine.

        Called before request_finished, for a request that ended by length or stop. None: no engine
        continues it, or its blocks cannot be fetched.
        """
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.phase is not Phase.RUNNING:
            return None
        scope = self._scope + tracked.tag
        return self._hand_overs.finish(tracked, table[: len(self._absent)], scope)

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
        self.events.ended(tracked.request)
        if tracked.phase is Phase.RUNNING and not self._may_be_undone(tracked):
            self._store_last(tracked, table)
        self._final_stores.extend(self._stores.take_jobs())
        if self._late is not None:
            self._final_stores.extend(self._late.end(request_id))
        self._lookups.end(tracked)
        self._hand_overs.end(request_id)
        self._loads.ended(tracked)
        return self._hand_overs.has_unstored(request_id)

    def _store_last(self, tracked: TrackedRequest, table: BlockTable) -> None:
        computed = tracked.request.num_computed_tokens
        if tracked.late and self._late is not None:
            self._late.store_complete(tracked, computed, lambda _: table)
            return
        self._stores.store_complete(tracked, computed, lambda _: table)
        self._client.report_unstored(self._stores.left_out(tracked, computed))

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
        self._lookups.use_scope(nonce)
        if self._late is not None:
            self._late.clear()
        for tracked in self._requests.values():
            tracked.cursor = NEVER  # until the engine allocates afresh: its blocks are of before
        return not any(t.phase is Phase.LOADING for t in self._requests.values())

    def take_events(self) -> list[BlockEvent]:
        """Return what entered and left the tiers, of blocks of the current scope and the tenant."""
        return list(self.events.take(self._scope + self.tag))

    def take_stats(self) -> Counter[str]:
        """Return what was counted since the last call."""
        return self._client.take_stats()

    def shutdown(self) -> None:
        """Close the connection; safe to call twice."""
        self._client.close()


def _finds_no_room(
    tracked: TrackedRequest, requests: Iterable[TrackedRequest], *, idle: bool
) -> bool:
    """Return True if the engine asks again and again, and has no request that could end.

    vLLM keeps room for what a request whose load has failed may still need, from its own next
    load, too, but not from its computing: one that needs half of the engine's blocks would wait for
    ever. idle: the last step had no request.
    """
    tracked.refused = tracked.refused + 1 if idle else 0
    return tracked.refused > REFUSED_MAX and not any(
        other.request.num_computed_tokens for other in requests
    )
