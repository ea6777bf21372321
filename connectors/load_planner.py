"""The loading part of the scheduler half: what is loaded into which engine blocks, and by whom.

A load fills a request's new engine blocks from the slots of its lease. Workers copy while the
engine runs other requests. Another request that wants the same blocks waits for the load, and then
finds them in the engine's own cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from connectors.engine_interface import BlockTable, Geometry
from connectors.request_state import TrackedRequest
from connectors.step_meta import EngineSpec, LoadJob
from connectors.store_client import Grant, GroupHits, StoreClient

CPU = "cpu"  # the tier that loads come from, unless the answer names another


class LoadPlanner:
    """Plans loads, and knows which are under way and which engine blocks they fill."""

    def __init__(self, geometry: Geometry, client: StoreClient, *, shares_prefixes: bool) -> None:
        """shares_prefixes: the engine has a prefix cache, so loading a block twice is waste."""
        self._geometry = geometry
        self._client = client
        self._shares_prefixes = shares_prefixes
        self._loading: Counter[bytes] = Counter()  # hashes of the first blocks of open loads
        self._jobs: list[LoadJob] = []
        self._targets: set[int] = set()  # engine blocks

    def plan(self, tracked: TrackedRequest, grant: Grant, table: BlockTable, external: int) -> bool:
        """Plan a load of `external` tokens; False if the grant lacks a block of it.

        Such a load names no session, so that the workers copy nothing and report it as failed.
        """
        local = tracked.local
        engine = engine_blocks(self._geometry, table, local, local + external)
        found = leased_slots(self._geometry, grant.hits, engine)
        slots, generations = found or ((), ())
        job = LoadJob(
            tracked.request.request_id,
            session=0 if found is None else self._client.session,
            lease=grant.lease,
            engine=engine,
            slots=slots,
            generations=generations,
            source=", ".join(filter(None, [*grant.sources, tracked.remote.address])),
            in_step=tracked.in_step,
        )
        self._jobs.append(job)
        self._targets.update(engine.block_ids)
        self._client.stats["load_tokens"] += external
        if not tracked.in_step:
            tracked.loading_hash = tracked.query.hashes[local // self._geometry.block_tokens]
            self._loading[tracked.loading_hash] += 1
        return found is not None

    def may_fill(self, table: BlockTable, computed: int) -> None:
        """Note that blocks of a table from a token on may be filled, by another connector."""
        for ids, tokens in zip(table, self._geometry.engine_block_tokens, strict=False):
            self._targets.update(ids[computed // tokens :])

    def is_loading(self, block_hash: bytes) -> bool:
        """Return True if a load that is under way begins with a block, and others may use it."""
        return self._shares_prefixes and self._loading[block_hash] > 0

    def ended(self, tracked: TrackedRequest) -> None:
        """A request's load, if it has one, is not under way any more."""
        if tracked.loading_hash is not None:
            self._loading[tracked.loading_hash] -= 1
            if not self._loading[tracked.loading_hash]:
                del self._loading[tracked.loading_hash]
            tracked.loading_hash = None

    def take_jobs(self) -> tuple[LoadJob, ...]:
        """Return the loads planned since the last call."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def take_targets(self) -> set[int]:
        """Return the engine blocks that loads planned since the last call fill."""
        targets, self._targets = self._targets, set()
        return targets

    def split_by_source(self, grant: Grant, external: int) -> dict[str, int]:
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


def why_missed(tracked: TrackedRequest, grant: Grant | None, size: int) -> dict[str, int]:
    """Return why tokens of an admitted request are no hits, by reason; size: of a block.

    grant: the answer that was used. It says of the blocks up to one why; others were never seen.
    """
    at = tracked.local + sum(tracked.sources.values())
    tokens = tracked.request.num_tokens
    whole = max(at, (tokens - 1) // size * size)  # the last token is always computed
    end, reason = whole, tracked.gave_up
    if not reason and grant is None:
        reason = "load_failed" if tracked.failures else "no_store"
    elif not reason and grant is not None:
        reason, blocks = grant.missed
        reason, end = reason or "never_seen", blocks * size
    end = min(max(at, end), whole)
    found = {"never_seen": whole - end, "tail": tokens - whole}
    found[reason] = found.get(reason, 0) + end - at
    return {reason: tokens for reason, tokens in found.items() if tokens}


def engine_blocks(geometry: Geometry, table: BlockTable, local: int, total: int) -> EngineSpec:
    """Choose the engine blocks that a load fills, from token `local` up to token `total`.

    Of each group only what a hit of so many tokens needs, from its first block that is no null one.
    """
    size = geometry.block_tokens
    blocks, inside = -(-total // size), total % size
    ids: list[int] = []
    sizes: list[int] = []
    firsts: list[int] = []
    for group, tokens in enumerate(geometry.engine_block_tokens):
        needed = geometry.rules[group].first_of(blocks, inside=inside) * (size // tokens)
        first = max(local // tokens, needed)
        wanted = table[group][first : -(-total // tokens)]
        skipped = next((i for i, block in enumerate(wanted) if block), len(wanted))
        ids.extend(wanted[skipped:])
        sizes.append(len(wanted) - skipped)
        firsts.append(first + skipped)
    return EngineSpec(tuple(ids), tuple(sizes), tuple(firsts))


def leased_slots(
    geometry: Geometry, hits: Sequence[GroupHits], engine: EngineSpec
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the slots that hold engine blocks, and their generations; None if one lacks.

    hits: the blocks found, by group; empty if there was no answer.
    """
    slots: list[int] = []
    generations: list[int] = []
    for group, per_block in enumerate(geometry.blocks_per_chunk):
        first, size = engine.block_indices[group], engine.group_sizes[group]
        if not size:
            continue
        found = None
        if hits:
            found = hits[group].run(first // per_block, (first + size - 1) // per_block + 1)
        if found is None:
            return None
        slots.extend(found[0])
        generations.extend(found[1])
    return tuple(slots), tuple(generations)
