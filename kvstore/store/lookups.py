"""Answers lookups: at once, or when blocks that are being written have arrived.

What lower tiers have is answered at once, too: its reading starts with the answer, which leases
the slots that it will fill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

import msgspec

from kvstore.config import EngineConfig
from kvstore.core import limits
from kvstore.core.errors import ProtocolError
from kvstore.core.index import State
from kvstore.core.leases import PINS, Lease
from kvstore.core.lookup import Answer
from kvstore.core.tiering import Found
from kvstore.core.types import BlockKey, Chain, LeaseId, LookupResult, Slot
from kvstore.handover.direct_fetches import Positions, reaching_on, with_reads
from kvstore.handover.peers import Peers
from kvstore.metrics import PEER
from kvstore.store.hints import BLOCKS_MAX as HINT_BLOCKS_MAX
from kvstore.store.hints import Hints
from kvstore.store.load_or_compute import measure, worth_loading
from kvstore.store.misses import left_s_ago, missed
from kvstore.store.namespace import Namespace
from kvstore.store.namespaces import StoreContext
from kvstore.store.session import Ask, Session
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire import peer as m

_FOLLOWED_MAX = 1024  # of one lookup: a quarter of a millisecond
_OWED_NS = 20_000_000  # a peer answers in less: before it does, a look seldom tells anything new


class _Hit(msgspec.Struct, frozen=True):
    """A hit in all tiers.

    pending: waiting could make it longer. below: of the blocks that it needs, those that memory
    lacks, and the first tier that has them; blocks of a peer that workers read are not among them.
    there: blocks that are here, of which those from end on take longer to load than to compute;
    0: none does. slow: the first of these that a tier has.
    """

    blocks: int
    pending: bool
    below: Sequence[Found]
    there: int = 0
    end: int = 0
    slow: Found | None = None


class _Below:
    """What lower tiers have of a chain that an engine asks for, each block asked for once."""

    def __init__(self, ask: Ask, wait_ns: int, *, wait: bool) -> None:
        """wait_ns: for tiers that do not know yet. wait: such blocks are pending, not missing."""
        self.found: dict[tuple[int, int], Found] = {}  # by group and first block
        self._ask = ask
        self._wait_ns = wait_ns
        self._wait = wait

    def probe(self, group: int, index: int) -> LookupResult:
        """Say what is known about a block."""
        return self._leading(group, index, [self._ask.chain.key(group, index)], 0)[0]

    def prefix(self, group: int, first: int, limit: int) -> Answer:
        """Count the blocks from `first` on that are present, as prefix_hit does."""
        keys, at, pending = self._ask.chain.keys_at(group, range(first, limit)), 0, False
        while at < len(keys):
            result, count = self._leading(group, first + at, keys, at)
            if result is LookupResult.MISS:
                break
            pending = pending or result is not LookupResult.HIT
            at += count
        return Answer(at, pending)

    def _leading(
        self, group: int, index: int, keys: Sequence[BlockKey], at: int
    ) -> tuple[LookupResult, int]:
        ask = self._ask
        result, tier, count = ask.namespace.tiering.leading(keys, at)
        if result is LookupResult.HIT and tier is not None:
            before = self.found.get((group, index))
            if before is None or before.end < index + count:
                place = ask.namespace.tiering.loads.place_of(tier, keys[at])
                self.found[group, index] = Found(group, index, index + count, tier, place)
        elif result is LookupResult.MISS and ask.direct is not None:
            result, count = ask.of_peer(group, index), 1
        if result is LookupResult.RETRY:  # a tier that does not know yet what it has
            ask.deadline_ns = max(ask.deadline_ns, ask.asked_ns + self._wait_ns)
        if result is not LookupResult.HIT and not self._wait:
            result = LookupResult.MISS
        return result, count


class Lookups:
    """Where engines ask; an answer is a lease on what it names."""

    def __init__(self, context: StoreContext, can_grow: Callable[[Namespace], bool]) -> None:
        """can_grow: more memory is coming or to be had."""
        self._settings, self._numbers = context.settings, context.numbers
        self._peers = context.peers
        peer = context.settings.running.peer
        self._hints = Hints(() if peer is None else peer.hints, context.numbers)
        self._can_grow = can_grow

    @property
    def _engine(self) -> EngineConfig:
        """Return the limits of each attached engine; leases that are there keep theirs."""
        return self._settings.running.engine

    @property
    def _lease_ms(self) -> int:
        return self._engine.lease_ns // 1_000_000

    def ask(
        self, session: Session, namespace: Namespace, lookup: p.Lookup, now_ns: int
    ) -> p.Granted | None:
        """Answer a lookup, or keep it while an answer could get longer."""
        if lookup.width <= 0 or len(lookup.hashes) % lookup.width:
            raise ProtocolError(f"{len(lookup.hashes)} bytes of hashes, {lookup.width} each")
        blocks = len(lookup.hashes) // lookup.width
        if blocks > limits.LOOKUP_BLOCKS_MAX:
            raise ProtocolError(f"{blocks} blocks, expected up to {limits.LOOKUP_BLOCKS_MAX}")
        groups, inside = len(namespace.layout.rules), lookup.inside
        chain = Chain(lookup.hashes, lookup.width, groups, lookup.scope, inside=inside)
        loadable = blocks if lookup.loadable is None else min(lookup.loadable, blocks)
        memory_only = lookup.memory_only or self._engine.promote_ns == 0
        deadline_ns = now_ns + self._engine.defer_ns
        namespace.block_ns = lookup.block_ns or namespace.block_ns
        ask = Ask(
            lookup.ask,
            namespace,
            chain,
            loadable,
            now_ns,
            deadline_ns,
            memory_only,
            lookup.off_disk,
            lookup.block_ns,
        )
        alone = memory_only or namespace.layout.unnamed
        if lookup.peer and self._peers is not None and not alone:
            self._ask_peer(self._peers, ask, lookup, direct=lookup.direct and session.direct)
        if not alone and (not lookup.peer or (lookup.hinted and ask.fetch is None)):
            self._search(ask, now_ns)
        if self._owed(ask, now_ns):
            ask.look_ns = ask.hint_ns or now_ns + _OWED_NS
        else:
            found = self._settled(ask, now_ns)
            if found is not None or now_ns >= ask.deadline_ns:
                return self._answer(session, ask, now_ns, found)
        if ask.ask in session.asks:
            raise ProtocolError(f"lookup {ask.ask} is open already")
        if (
            len(session.asks) >= limits.ASKS_MAX
            or session.asked_bytes + len(lookup.hashes) > limits.ASKED_BYTES_MAX
        ):
            return self._answer(session, ask, now_ns)
        session.asks[ask.ask] = ask
        session.asked_bytes += len(lookup.hashes)
        return None

    def _search(self, ask: Ask, now_ns: int) -> None:
        """Have shared tiers look for what no tier of ours has."""
        shared = ask.namespace.tiering.shared
        if not shared:
            return
        lacking = self._lacking(ask, ask.blocks, direct=False)[ask.namespace.full_first[0]]
        for queue in shared if lacking else ():
            rules = ask.namespace.layout.rules
            queue.sharing.search(rules, ask.chain, lacking[0], ask.blocks, now_ns)

    def _ask_peer(self, peers: Peers, ask: Ask, lookup: p.Lookup, *, direct: bool) -> None:
        """Ask a peer for what no tier of ours has, if there is anything to ask for.

        What a hint names goes into the store's memory: others may have the same hint.
        """
        if lookup.hinted and not self._hints.follows(lookup.peer, ask.asked_ns):
            return
        push, direct = lookup.push, direct and not lookup.hinted
        if push is None:
            # Over TCP a process that is read may crash when its reader dies, and only slots can be
            # kept out of use until a write has ended.
            push = peers.pushes(lookup.peer)
            direct = direct and not push
        blocks, lacking = self._wanted(ask, lookup, direct=direct)
        if lookup.hinted and not self._hints.begins(ask, lookup.peer, max(map(len, lacking))):
            return
        if not any(lacking):
            return
        indices = tuple(framing.u32(group) for group in lacking)
        hashes = lookup.hashes[: blocks * lookup.width]
        scope, request, block_ns = lookup.scope, lookup.request, lookup.block_ns
        want = m.Want(0, hashes, lookup.width, indices, scope, request, push=push,
                      block_ns=block_ns)  # fmt: skip
        ask.fetch = peers.fetch(ask.namespace, lookup.peer, want, ask.asked_ns, direct=direct,
                                hinted=lookup.hinted > 0)  # fmt: skip
        if ask.fetch is None:
            self._hints.ends(ask, "refused")
        elif direct:
            pairs = ((group, index) for group, found in enumerate(lacking) for index in found)
            ask.direct = {pair: position for position, pair in enumerate(pairs)}

    def _wanted(
        self, ask: Ask, lookup: p.Lookup, *, direct: bool
    ) -> tuple[int, list[Sequence[int]]]:
        """Return of how many leading blocks a peer is to be asked, and for which, by group.

        Of more blocks than one job can have the leading ones are asked for.
        """
        rules, blocks = ask.namespace.layout.rules, ask.blocks
        blocks = min(blocks, m.MESSAGE_BYTES_MAX // 2 // lookup.width)
        if lookup.hinted:
            return self._hinted(ask, min(blocks, lookup.hinted))
        lacking = self._lacking(ask, blocks, direct=direct)
        if sum(map(len, lacking)) > m.JOB_BLOCKS_MAX:
            # So many fit into one job, whatever is lacking of them.
            full = sum(rule.trailing is None for rule in rules)
            trailing = sum(rule.trailing + 1 for rule in rules if rule.trailing is not None)
            blocks = min(blocks, max(1, (m.JOB_BLOCKS_MAX - trailing) // max(1, full)))
            lacking = self._lacking(ask, blocks, direct=direct)
        return blocks, lacking

    def _hinted(self, ask: Ask, blocks: int) -> tuple[int, list[Sequence[int]]]:
        """As _wanted(), for a hint: a few blocks from the first that lacks, found bit by bit."""
        rules, index = ask.namespace.layout.rules, ask.namespace.manager.index
        full = [group for group, rule in enumerate(rules) if rule.trailing is None]
        most = max(1, HINT_BLOCKS_MAX // len(rules))
        first = min((index.prefix(ask.chain, group, blocks)[0] for group in full), default=0)
        while True:
            end = min(first + most, blocks)
            lacking = self._lacking(ask, end, first=first)
            if end == blocks or any(lacking[group] for group in full):
                return end, lacking
            first = end

    @staticmethod
    def _lacking(
        ask: Ask, blocks: int, *, direct: bool = False, first: int = 0
    ) -> list[Sequence[int]]:
        """List, for each group, which of the leading blocks a peer is to be asked for.

        first: those before it are here, of groups that need all.
        """
        namespace, chain, writing = ask.namespace, ask.chain, State.WRITING
        lacking: list[Sequence[int]] = []
        for group, rule in enumerate(namespace.layout.rules):
            indices = m.clip(rule, blocks)
            if rule.trailing is None:
                indices = indices[first:]
            entries = namespace.manager.index.find(chain.keys_at(group, indices))
            missing: Sequence[int] = indices
            if any(entries):
                missing = [
                    index
                    for index, entry in zip(indices, entries, strict=True)
                    if entry is None or entry.state is writing
                ]
            absent: list[int] = []  # from all our tiers
            keys, at = chain.keys_at(group, missing), 0
            while at < len(keys):
                result, _, count = namespace.tiering.leading(keys, at)
                if result is not LookupResult.HIT:
                    absent += missing[at : at + count]
                at += count
            lacking.append(absent)
        return reaching_on(namespace.layout.rules, lacking, blocks) if direct else lacking

    def _hint_ends(self, ask: Ask, outcome: str, now_ns: int) -> None:
        """A hint, if the ask has one, has come to this; a bucket may have what its peer lacks."""
        if ask.hint:
            self._hints.ends(ask, outcome)
            self._search(ask, now_ns)

    def _owed(self, ask: Ask, now_ns: int) -> bool:
        """Tell whether the peer that was asked has still to answer; once it has, look at once."""
        if ask.fetch is None or self._peers is None or ask.offered is not None:
            return False
        ask.offered = self._peers.inlet(ask.namespace).offered(ask.fetch)
        if ask.offered is not None:
            ask.look_ns = 0
            self._hint_ends(ask, "offered" if ask.offered else "nothing", now_ns)
        return ask.offered is None

    def _settled(self, ask: Ask, now_ns: int) -> _Hit | None:
        """Look in all tiers; None if waiting could make the answer longer."""
        found, namespace = self._look(ask, now_ns), ask.namespace
        if found.pending:
            return None
        slotless = ask.memory_only or ask.direct is not None
        if slotless or not found.below or not self._can_grow(namespace):
            return found
        # What lower tiers have needs slots; there may be more of them soon.
        namespace.slots_wanted = sum(run.end - run.first for run in found.below)
        if namespace.slots_wanted <= len(namespace.manager.slots.free):
            return found
        ask.deadline_ns = max(ask.deadline_ns, ask.asked_ns + self._engine.promote_ns)
        return None

    def _look(self, ask: Ask, now_ns: int, *, wait: bool = True) -> _Hit:
        """Look in all tiers, each block once; wait: those that may be there soon are pending.

        Where workers read from a peer all is loaded in any case.
        """
        found, block_ns = self._look_for(ask, ask.blocks, wait=wait), ask.compute_ns
        loads = found.below or ask.namespace.tiering.coming
        if not block_ns or ask.memory_only or ask.direct is not None or not loads:
            return found
        hit = ask.namespace, ask.chain, found.blocks, found.below, block_ns, now_ns
        end = worth_loading(*hit)
        if end == found.blocks:
            return found
        slow = next((run for run in found.below if run.first >= end), None)
        cut = self._look_for(ask, end, wait=wait)
        # A group that needs its last blocks only may have none for a hit that ends there.
        if cut.blocks < end and worth_loading(*hit, other=cut.blocks) == found.blocks:
            return found
        return msgspec.structs.replace(cut, there=found.blocks, end=end, slow=slow)

    def _look_for(self, ask: Ask, blocks: int, *, wait: bool) -> _Hit:
        namespace, coming = ask.namespace, not ask.memory_only
        below = _Below(ask, self._engine.promote_ns, wait=wait)
        lower = below if namespace.tiering.sources and coming else None
        answer = namespace.manager.lookup(ask.chain, blocks, below=lower, coming=coming)
        used: list[Found] = []
        for _, run in sorted(below.found.items()):
            first = ask.chain.first_of(namespace.layout.rules[run.group], answer.blocks)
            first, end = max(first, run.first), min(answer.blocks, run.end)
            last = used[-1] if used else run
            if first < end and (last.group, last.end, last.place) == (run.group, first, run.place):
                used[-1] = last._replace(end=end)
            elif first < end:
                used.append(run._replace(first=first, end=end))
        return _Hit(answer.blocks, answer.pending, used)

    def _fetch(self, session: Session, ask: Ask, pinned: int, found: _Hit, now_ns: int) -> bool:
        """Start reading what lower tiers have of the answer; False if it cannot be leased now."""
        namespace, chain, blocks = ask.namespace, ask.chain, found.blocks
        if found.below:
            needs = sum(blocks - chain.first_of(rule, blocks) for rule in namespace.layout.rules)
            if ask.direct is None and self._too_many(namespace, pinned, needs):
                return False
            for run in found.below:
                session.keys.follow(chain.keys_at(run.group, range(run.first, run.end)))
            promote, whole = namespace.tiering.promote, ask.direct is None
            if not promote(chain, blocks, found.below, now_ns, off_disk=ask.off_disk, whole=whole):
                return False
        if found.slow is not None:
            measure(namespace, chain, found.slow, now_ns, off_disk=ask.off_disk)
        return True

    @staticmethod
    def _follow_missed(session: Session, ask: Ask, first: int) -> None:
        """Have an engine hear of the blocks that it will compute: another one may be first."""
        if len(ask.namespace.sessions) == 1:
            return
        missed = range(first, min(ask.chain.blocks, first + _FOLLOWED_MAX))
        for group in range(len(ask.namespace.layout.rules)):
            session.keys.follow(ask.chain.keys_at(group, missed))

    def hold(
        self, namespace: Namespace, chain: Chain, blocks: int, end_ns: int, now_ns: int
    ) -> Lease | None:
        """Lease the leading blocks that are here for no engine; what lower tiers have is read."""
        found = self._look(Ask(0, namespace, chain, blocks, now_ns, now_ns), now_ns, wait=False)
        if found.below:
            namespace.tiering.promote(chain, found.blocks, found.below, now_ns)
        return namespace.manager.prepare_load(chain, blocks, PINS, end_ns)

    def _let_go(self, ask: Ask) -> None:
        if ask.fetch is not None and self._peers is not None:
            self._peers.inlet(ask.namespace).claimed(ask.fetch)

    def _too_many(self, namespace: Namespace, pinned: int, wanted: int) -> bool:
        """Tell whether an engine that leases `pinned` blocks may not lease so many more.

        One request alone may exceed the cap: it could never be served otherwise.
        """
        leased = (pinned + wanted) * namespace.layout.slot_bytes
        return pinned > 0 and leased > self._engine.leased_bytes

    @staticmethod
    def _sources(ask: Ask, lease: Lease) -> dict[str, int]:
        """Say from which tiers the blocks of the first full group are read for this answer."""
        tiering, group = ask.namespace.tiering, ask.namespace.full_first[0]
        if not tiering.coming:
            return {}
        keys = ask.chain.keys_at(group, lease.groups[group].indices)
        return dict(Counter(filter(None, tiering.sources_of(keys))))

    def retry(self, session: Session, now_ns: int) -> list[p.Granted]:
        """Answer the lookups whose time has come."""
        answers: list[p.Granted] = []
        for ask in list(session.asks.values()):
            owed = self._owed(ask, now_ns)
            if ask.hint and now_ns >= ask.hint_ns:
                self._let_go(ask)
                self._hint_ends(ask, "late", now_ns)
                owed, ask.fetch, ask.look_ns = False, None, 0
            if now_ns < min(ask.look_ns, ask.deadline_ns):
                continue
            found = self._settled(ask, now_ns)  # which may move the deadline
            if found is not None or now_ns >= ask.deadline_ns:
                del session.asks[ask.ask]
                session.asked_bytes -= len(ask.chain.packed)
                answers.append(self._answer(session, ask, now_ns, found))
            else:
                # A look costs its length: the longer it has waited, the less often.
                waited_ns = (now_ns - ask.asked_ns) // 8
                ask.look_ns = now_ns + max(waited_ns, _OWED_NS if owed else 0)
        return answers

    def _answer(
        self, session: Session, ask: Ask, now_ns: int, found: _Hit | None = None
    ) -> p.Granted:
        namespace, chain = ask.namespace, ask.chain
        manager = namespace.manager
        self._owed(ask, now_ns)  # it may have answered since the last look
        waited = found is None
        if found is None:
            found = self._look(ask, now_ns, wait=False)
        session.answered_ns.append(ask.asked_ns)
        self._follow_missed(session, ask, found.blocks)
        pinned = manager.leases.blocks_of(session.number)
        deadline_ns = now_ns + self._engine.lease_ns
        lease, capped = None, not self._fetch(session, ask, pinned, found, now_ns)
        if ask.direct is None:
            self._let_go(ask)
        if not capped:
            coming = not ask.memory_only
            limit = found.end if found.there else chain.blocks
            lease = manager.prepare_load(chain, limit, session.number, deadline_ns, coming=coming)
        if lease is not None and self._too_many(namespace, pinned, len(lease.entries)):
            manager.complete_load(lease.lease_id)
            lease, capped = None, True
        if ask.direct is not None:
            reads = None if capped else self._reads(ask, lease, found.blocks)
            if reads is not None and self._peers is not None and ask.fetch is not None:
                if lease is None:
                    lease = manager.leases.empty(session.number, deadline_ns, len(reads))
                why = self._why(ask, found, found.blocks, waited=waited)
                return self._with_reads(self._peers, session, ask, lease, reads, ask.fetch, why)
            self._let_go(ask)
        outcome = "capped" if capped else "miss" if lease is None else "hit"
        self._numbers.add("kvstore_lookups", outcome)
        if capped:
            why = ("lease_limit", found.blocks)
            return p.Granted(ask.ask, 0, self._lease_ms, (), capped=True, missed=why)
        why = self._why(ask, found, _reach(namespace, lease, found.blocks), waited=waited)
        if lease is None:
            return p.Granted(ask.ask, 0, self._lease_ms, (), missed=why)
        hits = tuple(
            p.Hit(framing.u32(hit.indices), framing.u32(hit.slots), framing.u32(hit.generations))
            for hit in lease.groups
        )
        namespace.tiering.used(chain, lease)
        sources = self._sources(ask, lease)
        return p.Granted(ask.ask, lease.lease_id, self._lease_ms, hits, sources, missed=why)

    def _why(self, ask: Ask, found: _Hit, reach: int, *, waited: bool) -> tuple[str, int]:
        """Say why an answer of `reach` blocks ends there; waited: its time is over.

        And note how long ago the first block that memory lacks was evicted, if it was.
        """
        if found.there > reach:
            return ("too_slow", found.there)
        there = reach if ask.direct is not None else found.blocks
        why, gap_s = missed(ask, reach, there, waited=waited)
        if found.below:
            gap_s = left_s_ago(ask, ask.chain.key(found.below[0].group, found.below[0].first))
        if gap_s is not None:
            self._numbers.observe("kvstore_evicted_gap_seconds", gap_s)
        return why

    @staticmethod
    def _reads(ask: Ask, lease: Lease | None, blocks: int) -> list[Positions] | None:
        """Say which blocks workers have to read for a hit; None: none, or not all can be had."""
        reads: list[Positions] = []
        direct, offered = ask.direct or {}, ask.offered or {}
        for group, rule in enumerate(ask.namespace.layout.rules):
            here = set(lease.groups[group].indices) if lease is not None else ()
            needed = range(ask.chain.first_of(rule, blocks), blocks)
            lacking = [index for index in needed if index not in here]
            places = {index: direct.get((group, index)) for index in lacking}
            found = {i: at for i, at in places.items() if at is not None and at in offered}
            if len(found) < len(lacking):
                return None
            reads.append(found)
        return reads if any(reads) else None

    def _with_reads(
        self,
        peers: Peers,
        session: Session,
        ask: Ask,
        lease: Lease,
        reads: list[Positions],
        fetch: int,
        why: tuple[str, int],
    ) -> p.Granted:
        """Answer with what is here, and what workers are to read from a peer.

        why: of what is missed, as in Granted.
        """
        namespace = ask.namespace
        namespace.tiering.used(ask.chain, lease)
        session.fetches[lease.lease_id] = fetch
        positions = [at for group in reads for at in group.values()]
        inlet = peers.inlet(namespace)
        inlet.claim(fetch, session.number, session.workers, positions)
        self._numbers.add("kvstore_lookups", "hit")
        hits = tuple(map(partial(with_reads, fetch), lease.groups, reads))
        kept = min(index for group in reads for index in group)
        sources = self._sources(ask, lease) | {PEER: len(reads[namespace.full_first[0]])}
        lease_id = lease.lease_id
        return p.Granted(ask.ask, lease_id, self._lease_ms, hits, sources, kept=kept, missed=why)

    def end(self, session: Session) -> None:
        """A session asks nothing more: its peers are not kept waiting."""
        for ask in session.asks.values():
            self._let_go(ask)
        session.asks.clear()
        session.asked_bytes = 0

    # Leases that are loaded

    def loading(
        self, session: Session, namespace: Namespace, lease_id: LeaseId, now_ns: int
    ) -> p.Coming | None:
        """A worker waits for what a lease names: it goes on. Say what a peer has said of that."""
        leases = namespace.manager.leases
        if not leases.owned_by(lease_id, session.number):
            return None
        leases.extend(lease_id, now_ns + self._engine.lease_ns)
        fetch = session.fetches.get(lease_id)
        keys: Sequence[BlockKey] = ()
        if fetch is None:
            entries = leases.entries_of(lease_id)
            first = next((entry for entry in entries if entry.state is State.COMING), None)
            work = None if first is None else namespace.tiering.bringing(first.key)
            keys = () if work is None else work.job.keys
        if self._peers is None or (fetch is None and not keys):
            return None
        sign = self._peers.inlet(namespace).progress(fetch, keys, now_ns)
        return None if sign is None else p.Coming(lease_id, *sign)

    # The ends of leases

    def end_lease(
        self,
        session: Session,
        namespace: Namespace,
        lease_id: LeaseId,
        damaged: Collection[Slot] = (),
    ) -> None:
        """End a session's own lease; it may have ended before."""
        if namespace.manager.leases.owned_by(lease_id, session.number):
            namespace.manager.complete_load(lease_id, damaged)
            self.lease_ended(session, namespace, lease_id)

    def lease_ended(self, session: Session, namespace: Namespace, lease_id: LeaseId) -> None:
        """What workers were to read for it is not read any more."""
        fetch = session.fetches.pop(lease_id, None)
        if fetch is not None and self._peers is not None:
            self._peers.inlet(namespace).end(fetch)


def _reach(namespace: Namespace, lease: Lease | None, found: int) -> int:
    """Count the blocks of a hit of `found` blocks that a lease has."""
    group = namespace.full_first[0]
    if lease is None:
        return 0
    if namespace.layout.rules[group].trailing is not None:
        return found
    return min(found, len(lease.groups[group].indices))
