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

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import dropwhile
from typing import Any

import msgspec

from connectors.engine_interface import BlockTable, EngineRequest, Geometry, Step
from connectors.events import BlockEvent, Events
from connectors.kv_transfer_params import NO_REMOTE, NO_TRANSFER, Transfer
from connectors.lease_queue import Room
from connectors.load_planner import plan_of
from connectors.partial_block import question_of
from connectors.pd_scheduler import HandOvers
from connectors.request_state import NEVER, Phase, Tracked
from connectors.step_meta import LoadJob, StepMeta, StoreJob, StoreSpec
from connectors.store_client import NOWHERE, Grant, StoreClient
from connectors.store_planner import MEDIUM, Offers
from kvstore.core.lookup import Answer, common_hit
from kvstore.core.types import LookupResult
from kvstore.wire import engine as p

IDLE_WAIT_S = 0.001
BUSY_WAIT_S = 0.0002
TIMEOUTS_IN_A_ROW_MAX = 3
ANSWER_LIMIT_NS = 500_000_000  # beyond what the store may defer: it does not answer
LOADING_LIMIT_NS = 5_000_000_000  # waiting for another request's load, or for room for a lease
FAILURES_MAX = 2  # after a failed load other copies are tried once, then it is computed
NO_GRANT = Grant(0, 0, (), {})


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
        transfer: Transfer = NO_TRANSFER,
        beside: bool = False,
    ) -> None:
        """world: ranks that report each job.

        shares_prefixes: the engine has a prefix cache, so loading a block twice is waste.
        transfer: how blocks are handed over between engines.
        beside: other connectors load, too, and may say after a step that what it used was bad.
        """
        self.stats: Counter[str] = Counter()
        self._geometry = geometry
        self._client = client
        self._clock = clock
        self._shares_prefixes = shares_prefixes
        self._groups = len(geometry.rules)
        self._scope = b""
        self._direct = transfer.direct
        self._beside = beside
        self._requests: dict[str, Tracked] = {}
        self._left_out: dict[str, int] = {}  # tokens that the engine has of requests not told of
        self._arrived = 0
        self._room = Room()
        self._scheduled: Mapping[str, int] = {}  # in the last step
        self._left: dict[str, int] = {}  # tokens to compute until a block can be complete
        self._loading_hashes: Counter[bytes] = Counter()
        self._loads: list[LoadJob] = []
        self._load_targets: set[int] = set()
        self._early: list[StoreJob] = []
        self._events = Events(geometry, client, self._count)
        told = self._count, self._events
        self._offers = Offers(geometry, client, world, *told)
        how = transfer, world, self._offers, self._count, clock
        self._hands = HandOvers(geometry, client, *how)
        self._waited_s = 0.0
        self._timeouts = 0

    # Requests arrive, are looked up, are admitted

    def on_new_request(
        self,
        request: EngineRequest,
        transfer: Mapping[str, Any] | None = None,
        cached: int = 0,
        *,
        reads: bool = True,
    ) -> None:
        """Take note of a request and queue its lookup; its keys are sent once.

        transfer: hand-over parameters, if it has any; wrong ones are told and not used.
        cached: tokens that the engine has of a request with parameters.
        reads: False: it computes its whole prompt. Nothing is asked; its blocks are stored.
        """
        if not self._requests:
            self._client.receive()  # the store may have gone while no step was taken
        if not self._client.session:
            self._client.receive()  # and have let us in again
        self._arrived += 1
        tracked = Tracked(request, self._groups, self._arrived, reads=reads)
        self._requests[request.request_id] = tracked
        tracked.remote = self._hands.begun(request, transfer, cached)
        self._ask(tracked)

    def _ask(self, tracked: Tracked) -> None:
        """Ask about a request's blocks.

        After a load that failed only about what is in memory: nobody waits for a disk twice.
        """
        if not tracked.reads or self._room.is_for_another(tracked):
            return
        remote, again = NO_REMOTE if tracked.failures else tracked.remote, tracked.failures > 0
        question = question_of(self._geometry, tracked.request, remote)
        if not question.blocks:
            return
        packed, width = b"".join(question.hashes), self._geometry.hash_bytes
        where = remote.address, remote.request, remote.push
        how = question.inside, question.blocks, self._direct
        lookup = p.Lookup(0, packed, width, self._scope, again, *where, *how)
        tracked.ask = self._client.ask(lookup)
        if tracked.ask is not None:
            tracked.phase, tracked.question = Phase.ASKED, question
            self._events.asked(tracked.request, question.hashes[: question.own])

    def _worth_loading(self, tracked: Tracked, computed: int) -> int | None:
        """Return how many tokens a load has to reach; None if it cannot.

        Less than a block is no hit; of what was computed for us by another engine all is loaded.
        """
        request, size = tracked.request, self._geometry.block_tokens
        if tracked.remote.tokens:
            return computed + 1 if computed < request.num_tokens - 1 else None
        hashed = len(request.block_hashes) * self._geometry.hash_tokens
        whole = min(hashed, request.num_tokens - 1) // size * size
        return computed + size if computed + size <= whole else None

    def get_num_new_matched_tokens(self, request_id: str, computed: int) -> tuple[int | None, bool]:
        """Answer how many tokens beyond `computed` can be loaded; None: ask again later."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            self._left_out[request_id] = computed
            return 0, False
        tracked.local = computed
        self._room.seen(tracked)
        tokens = self._loadable(tracked, computed)
        if tokens is not None:
            tracked.deferred_ns = None
        return tokens, bool(tokens)

    def _loadable(self, tracked: Tracked, computed: int) -> int | None:
        least = self._worth_loading(tracked, computed)
        if least is None:
            return 0
        if tracked.phase is Phase.LOADED:
            tracked.phase = Phase.NEW
        if tracked.phase in (Phase.NEW, Phase.RUNNING) and tracked.failures < FAILURES_MAX:
            self._ask(tracked)
        grant = self._grant(tracked)
        if grant is None:
            waits = tracked.phase is Phase.ASKED or self._room.is_for_another(tracked)
            return self._defer(tracked) if waits else 0
        tokens = self._usable(tracked, grant, computed)
        if tokens < least:
            return 0
        if self._loaded_by_another(tracked, computed // self._geometry.block_tokens):
            return self._defer(tracked)
        return tokens - computed

    def _grant(self, tracked: Tracked) -> Grant | None:
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
        if grant is not None and grant.capped:
            self._make_room(tracked)
            return None
        if grant is not None:
            self._room.served(tracked)
        return grant

    def _wait(self, tracked: Tracked) -> None:
        idle = self._requests.keys().isdisjoint(self._scheduled)
        if tracked.ask is None or (tracked.waited and not idle):
            return  # with nothing else to run an empty step would cost more
        if not idle and self._timeouts >= TIMEOUTS_IN_A_ROW_MAX:
            return
        budget_s = IDLE_WAIT_S if idle else BUSY_WAIT_S
        end = self._clock() + int((budget_s - self._waited_s) * 1e9)
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

    def _make_room(self, tracked: Tracked) -> None:
        """Our leases are at their cap: requests that arrived later give theirs back."""
        self._room.wanted(tracked)
        later = dropwhile(lambda other: other is not tracked, self._requests.values())
        for other in later:
            grant = self._client.grant(other.ask) if other.ask is not None else None
            if other.ask is not None and grant is not None and (grant.lease or other is tracked):
                self._client.drop(other.ask)
                other.ask, other.phase, other.capped = None, Phase.NEW, True
        self._ask(tracked)

    def _defer(self, tracked: Tracked) -> int | None:
        """Answer "ask again later", or 0 when that has gone on for too long."""
        now = self._clock()
        if tracked.deferred_ns is None:
            tracked.deferred_ns = now
            self._count("deferred")
        silent = self._client.unanswered_ns(tracked.ask) > self._answer_limit_ns()
        if silent or now - tracked.deferred_ns > max(LOADING_LIMIT_NS, self._answer_limit_ns()):
            self._count("timed_out")
            self._give_up(tracked)
            if silent:
                self._client.detach("no answer in time")
            return 0
        self._count("deferred_steps")
        return None

    def _answer_limit_ns(self) -> int:
        return ANSWER_LIMIT_NS + self._client.defer_ms * 1_000_000

    def _give_up(self, tracked: Tracked) -> None:
        if tracked.ask is not None:
            self._client.drop(tracked.ask)
        tracked.ask, tracked.phase, tracked.failures = None, Phase.RUNNING, FAILURES_MAX
        self._room.served(tracked)

    def _usable(self, tracked: Tracked, grant: Grant, computed: int) -> int:
        """Count the leading tokens that all groups have, the engine's own included."""
        question, size = tracked.question, self._geometry.block_tokens
        if not grant.lease:
            return 0

        def probe(group: int, index: int) -> LookupResult:
            return LookupResult.HIT if index in grant.hits[group] else LookupResult.MISS

        def prefix(group: int, limit: int) -> Answer:
            return Answer(min(limit, len(grant.hits[group])))  # leading blocks, without gaps

        rules, limit, local = self._geometry.rules, question.blocks, computed // size
        hit = common_hit(rules, probe, limit, local, prefix, inside=question.inside).blocks
        return question.end if hit == limit else hit * size

    def _loaded_by_another(self, tracked: Tracked, block: int) -> bool:
        if not self._shares_prefixes or not self._loading_hashes:
            return False
        return self._loading_hashes[tracked.question.hashes[block]] > 0

    def update_state_after_alloc(self, request_id: str, table: BlockTable, external: int) -> None:
        """The engine has given the request its blocks: plan the load, if there is one.

        Without a load of ours another connector may fill them, also for a request unknown here.
        """
        tracked = self._requests.get(request_id)
        if tracked is None:
            self._load_targets.update(self._fresh(table, self._left_out.pop(request_id, 0)))
            return
        if tracked.phase is Phase.LOADING:
            return
        self._room.served(tracked)
        if tracked.phase is Phase.LOADED:  # counted before, and its present blocks are known
            tracked.phase = Phase.RUNNING
            return
        grant = self._client.grant(tracked.ask) if tracked.ask is not None else None
        found = grant.hits if grant is not None else ()
        kept = tracked.question.own if grant is None else min(tracked.question.own, grant.kept)
        own = tuple(places.before(kept) for places in found)
        tracked.present = own or (NOWHERE,) * self._groups
        self._rewind(tracked)
        hits = self._sources_of(tracked, grant, external)
        if tracked.reads:
            self._client.used(tracked.request.num_tokens - tracked.local, hits)
        if external:
            whole = self._plan_load(tracked, grant or NO_GRANT, table, external)
            if tracked.ask is not None:
                (self._client.take if whole else self._client.drop)(tracked.ask)
        else:
            if tracked.ask is not None:
                self._client.drop(tracked.ask)
            self._load_targets.update(self._fresh(table, tracked.local))  # another may fill them
            # Until it is scheduled nothing of it is whole, whatever the engine counts as computed.
            tracked.phase, tracked.remote = Phase.NEW, NO_REMOTE
            self._hands.let_go(request_id)
        tracked.ask = None

    def _fresh(self, table: BlockTable, computed: int) -> Iterator[int]:
        """Go through the engine blocks of a table that begin at a token or behind it."""
        for ids, tokens in zip(table, self._geometry.engine_block_tokens, strict=False):
            yield from ids[computed // tokens :]

    def _sources_of(self, tracked: Tracked, grant: Grant | None, external: int) -> dict[str, int]:
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

    def _plan_load(self, tracked: Tracked, grant: Grant, table: BlockTable, external: int) -> bool:
        """Plan a load; False if the grant lacks some of it, so that no worker reads anything."""
        local = tracked.local
        engine, slots, generations, whole = plan_of(
            self._geometry, grant.hits, table, local, local + external
        )
        # A load that lacks a block it promised is given to the workers as one that fails.
        session, request_id = self._client.session if whole else 0, tracked.request.request_id
        store = StoreSpec(MEDIUM, slots)
        where = ", ".join((*grant.sources, *filter(None, [tracked.remote.address])))
        job = LoadJob(request_id, session, grant.lease, engine, store, generations, where)
        self._loads.append(job)
        self._load_targets.update(engine.block_ids)
        tracked.phase, tracked.remote = Phase.LOADING, NO_REMOTE
        tracked.key_hash = tracked.question.hashes[local // self._geometry.block_tokens]
        self._loading_hashes[tracked.key_hash] += 1
        self.stats["load_tokens"] += external
        return whole

    # Every step

    def build_meta(self, step: Step) -> StepMeta:
        """Plan this step's copies. Called once per step, empty ones included."""
        self._room.next_step()
        targets, self._load_targets = self._load_targets, set()
        written = (*step.written, *targets)
        self._client.overwritten(written)
        idle = not step.scheduled
        self._client.receive(IDLE_WAIT_S if idle and self._hands.unstored() else 0.0)
        sent = self._hands.store_rest()
        left_of = self._left
        for request_id, tokens in step.scheduled.items():  # every running request, in every step
            left = left_of.get(request_id, 0) - tokens
            if left > 0:
                left_of[request_id] = left
            else:
                self._offer(request_id, tokens, step)
        stores = self._offers.take_jobs()
        self._scheduled = step.scheduled
        early, self._early = tuple(self._early), []
        loads, self._loads = tuple(self._loads), []
        flush = self._offers.fence(written)
        flush.difference_update(job.job_id for job in stores)
        self._client.send_step()
        self._waited_s = 0.0
        return StepMeta(early, stores, loads, tuple(flush), idle, sent)

    def _offer(self, request_id: str, tokens: int, step: Step) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if tracked.phase in (Phase.NEW, Phase.LOADED):
            tracked.phase = Phase.RUNNING
            tracked.begun = tracked.request.num_computed_tokens if self._beside else None
        if self._can_be_taken_back(tracked):
            return
        computed = tracked.request.num_computed_tokens + tokens
        self._left[request_id] = self._offers.offer(tracked, computed, step.table) - computed

    @staticmethod
    def _can_be_taken_back(tracked: Tracked) -> bool:
        """Tell whether another connector can still call bad what a request has begun with.

        One that loads within a step says so with the step's output, and the request goes back.
        """
        request = tracked.request
        if tracked.begun is not None:
            settled = request.num_computed_tokens - request.num_in_flight_tokens
            if settled <= tracked.begun:
                return True
            tracked.begun = None
        return False

    def on_output(
        self, stores_over: Mapping[int, int], loaded: Iterable[str], failed: Iterable[str]
    ) -> None:
        """Take the workers' reports: store jobs over, on how many ranks; loads ended, failed."""
        self._offers.over(stores_over)
        bad = set(failed)
        for request_id in loaded:
            tracked = self._requests.get(request_id)
            if tracked is not None and tracked.phase is Phase.LOADING:
                self._loaded(tracked, failed=request_id in bad)

    def _rewind(self, tracked: Tracked) -> None:
        """Offer everything again that the store does not have."""
        tracked.cursor = min(places.leading for places in tracked.present)
        self._left.pop(tracked.request.request_id, None)

    def _loaded(self, tracked: Tracked, *, failed: bool) -> None:
        self._end_loading(tracked)
        self._hands.let_go(tracked.request.request_id)
        tracked.phase = Phase.LOADED
        tracked.deferred_ns = None
        if failed:
            self._count("load_failed")
            tracked.failures += 1
            tracked.present = (NOWHERE,) * self._groups
            self._rewind(tracked)
            tracked.phase = Phase.NEW

    def _end_loading(self, tracked: Tracked) -> None:
        if tracked.key_hash is not None:
            self._loading_hashes[tracked.key_hash] -= 1
            if not self._loading_hashes[tracked.key_hash]:
                del self._loading_hashes[tracked.key_hash]
            tracked.key_hash = None

    # The end of things

    def hand_over(self, request_id: str, table: BlockTable) -> dict[str, Any] | None:
        """Have the store hold what a request has computed, and return where it is.

        Called before request_finished, for one that ended by length or stop. None: nobody wants
        it, or nobody could fetch it.
        """
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.phase is not Phase.RUNNING:
            return None
        return self._hands.over(tracked, table[: self._groups], self._scope)

    def handed_over(self, request_ids: Iterable[str]) -> list[EngineRequest]:
        """Return those of these requests that another engine goes on with."""
        return [self._requests[name].request for name in request_ids if self._hands.runs(name)]

    def request_finished(self, request_id: str, table: BlockTable) -> bool:
        """Offer what is complete and was not offered; give back what was not used.

        False: the engine may free the blocks at once; the next step's fence protects their bytes.
        True: somebody is to have them, and they found no slot yet; a later step names it as sent.
        """
        tracked = self._requests.pop(request_id, None)
        self._left.pop(request_id, None)
        self._left_out.pop(request_id, None)
        if tracked is None:
            return False
        self._room.served(tracked)
        self._events.ended(tracked.request)
        if tracked.phase is Phase.RUNNING and not self._can_be_taken_back(tracked):
            computed = tracked.request.num_computed_tokens
            self._offers.offer(tracked, computed, lambda _: table)
        self._early.extend(self._offers.take_jobs())
        if tracked.ask is not None:
            self._client.drop(tracked.ask)
        self._hands.ended(request_id)
        self._end_loading(tracked)
        return self._hands.unstored(request_id)

    def has_pending_work(self) -> bool:
        """Tell whether one more step is needed although no request is left."""
        return bool(self._early) or self._client.hands_over or self._hands.unstored()

    def reset_cache(self, nonce: bytes) -> bool:
        """Leave everything stored so far behind; False while a load is under way.

        nonce: a scope that nobody used before. Other engines keep their blocks.
        """
        self._scope = nonce
        self._offers.use_scope(nonce)
        self._hands.forget_rest()
        for tracked in self._requests.values():
            if tracked.ask is not None:
                self._client.drop(tracked.ask)
                tracked.ask, tracked.phase = None, Phase.NEW
            tracked.cursor = NEVER  # until the engine allocates afresh: its blocks are of before
        return not any(t.phase is Phase.LOADING for t in self._requests.values())

    def take_events(self) -> list[BlockEvent]:
        """Return what entered and left the tiers, of blocks of the current scope."""
        return list(self._events.take(self._scope))

    def take_stats(self) -> dict[str, int]:
        """Return what was counted since the last call."""
        if blocks := self._offers.take_count():
            self.stats["store_blocks"] += blocks
        if self._client.detached:
            self.stats["detached"] += self._client.detached
            self._client.detached = 0
        stats = dict(self.stats)
        self.stats.clear()
        return stats

    def _count(self, event: str, by: int = 1) -> None:
        self.stats[event] += by
        self._client.counts[event] += by

    def shutdown(self) -> None:
        """Close the connection; safe to call twice."""
        self._client.close()
