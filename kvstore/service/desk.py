"""Answers lookups: at once, or when blocks that are being written or promoted have arrived."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvstore import protocol as p
from kvstore.config import EngineConfig
from kvstore.errors import ProtocolError
from kvstore.leases import Lease
from kvstore.manager import Chain
from kvstore.metrics import Numbers
from kvstore.service.namespace import Namespace
from kvstore.service.session import Ask, Phase, Session

_ASK_AGAIN_MS = 1000


class Desk:
    """Where engines ask; an answer is a lease on what it names."""

    def __init__(self, engine: EngineConfig, numbers: Numbers) -> None:
        """engine: limits of each attached engine."""
        self._engine = engine
        self._numbers = numbers

    def ask(self, session: Session, lookup: p.Lookup, now_ns: int) -> p.Granted | None:
        """Answer a lookup, or keep it while an answer could get longer."""
        if lookup.width <= 0 or len(lookup.hashes) % lookup.width:
            raise ProtocolError(f"{len(lookup.hashes)} bytes of hashes, {lookup.width} each")
        namespace = session.namespace
        rules = 0 if namespace is None else len(namespace.layout.rules)
        chain = Chain(lookup.hashes, lookup.width, rules, lookup.scope)
        ask = Ask(lookup.ask, chain, now_ns + self._engine.defer_ns)
        if session.phase is not Phase.ACTIVE or namespace is None:
            return p.Granted(ask.ask, 0, _ASK_AGAIN_MS, ())
        if self._ready(namespace, ask, now_ns):
            return self._answer(session, ask, now_ns)
        session.asks[ask.ask] = ask
        return None

    def settle(self, session: Session, number: int, now_ns: int) -> p.Granted | None:
        """Answer a lookup now, with what is ready."""
        ask = session.asks.pop(number, None)
        return None if ask is None else self._answer(session, ask, now_ns)

    def _ready(self, namespace: Namespace, ask: Ask, now_ns: int) -> bool:
        """Tell whether waiting cannot make the answer longer; start promotions it needs."""
        if ask.promotion is not None and ask.promotion.jobs_left:
            return False
        tiering, chain = namespace.tiering, ask.chain

        def below(group: int, index: int) -> Any:  # noqa: ANN401 - a LookupResult
            return tiering.where(chain.key(group, index))[0]

        lower = below if tiering.tiers else None
        answer = namespace.manager.lookup(chain, chain.blocks, below=lower)
        if answer.pending:
            return False
        if lower is not None and ask.promotion is None:
            ask.promotion = tiering.promote(chain, answer.blocks)
            ask.deadline_ns = max(ask.deadline_ns, now_ns + self._engine.promote_ns)
            return ask.promotion.jobs_left == 0
        return True

    def _sources(self, namespace: Namespace, ask: Ask, lease: Lease) -> dict[str, int]:
        """Say from which tiers the blocks of the first full group were read for this answer."""
        if ask.promotion is None:
            return {}
        rules = namespace.layout.rules
        group = next((g for g, rule in enumerate(rules) if rule.trailing is None), 0)
        keys = [ask.chain.key(group, index) for index in lease.groups[group].indices]
        return Counter(ask.promotion.keys[key] for key in keys if key in ask.promotion.keys)

    def retry(self, session: Session, now_ns: int) -> list[p.Granted | None]:
        """Answer the lookups whose time has come."""
        namespace = session.namespace
        answers: list[p.Granted | None] = []
        if namespace is not None:
            for ask in list(session.asks.values()):
                if now_ns >= ask.deadline_ns or self._ready(namespace, ask, now_ns):
                    del session.asks[ask.ask]
                    answers.append(self._answer(session, ask, now_ns))
        return answers

    def _answer(self, session: Session, ask: Ask, now_ns: int) -> p.Granted | None:
        namespace = session.namespace
        if namespace is None:
            return None
        manager, engine = namespace.manager, self._engine
        pinned = manager.leases.blocks_of(session.number)
        deadline = now_ns + engine.lease_ns
        lease = manager.prepare_load(ask.chain, ask.chain.blocks, session.number, deadline)
        wanted = 0 if lease is None else len(lease.entries)
        # One request alone may exceed the cap: it could never be served otherwise.
        capped = (
            pinned > 0 and (pinned + wanted) * namespace.layout.slot_bytes > engine.leased_bytes
        )
        if capped and lease is not None:
            manager.complete_load(lease.lease_id)
            lease = None
        lease_ms = engine.lease_ns // 1_000_000
        outcome = "capped" if capped else "miss" if lease is None else "hit"
        self._numbers.add("kvstore_lookups", outcome)
        if lease is None:
            return p.Granted(ask.ask, 0, lease_ms, (), capped=capped)
        hits = tuple(
            p.Hit(p.u32(hit.indices), p.u32(hit.slots), p.u32(hit.generations))
            for hit in lease.groups
        )
        namespace.tiering.used(ask.chain, lease)
        sources = self._sources(namespace, ask, lease)
        return p.Granted(ask.ask, lease.lease_id, lease_ms, hits, sources)
