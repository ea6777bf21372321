"""Requests that two engines share, as the store is told of them.

One that ends hands over all it has computed. Most of it was stored while it ran; what has found no
slot by then keeps the engine's blocks until it does, since nobody else has its bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from connectors.engine_interface import BlockTable, EngineRequest, Geometry
from connectors.kv_transfer_params import (
    NO_REMOTE,
    NO_SOURCE,
    Remote,
    Source,
    Transfer,
    common_id,
    is_handed_over,
    parameters,
    source_of,
)
from connectors.partial_block import Tail, tail_of
from connectors.request_state import NEVER, Tracked
from connectors.store_client import StoreClient
from connectors.store_planner import Offers
from kvstore.core.errors import ConfigError
from kvstore.wire import engine as p

log = logging.getLogger(__name__)

STORE_LIMIT_NS = 1_000_000_000  # without a slot for so long, the engine gets its blocks back


class _Rest(msgspec.Struct, eq=False):
    """What a request that has ended has to store; end: its tokens."""

    tracked: Tracked
    table: BlockTable
    end: int
    tail: Tail | None
    session: int
    until_ns: int


class HandOvers:
    """Those that run now."""

    def __init__(
        self,
        geometry: Geometry,
        client: StoreClient,
        transfer: Transfer,
        world: int,
        offers: Offers,
        count: Callable[[str], None],
        clock: Callable[[], int],
    ) -> None:
        """transfer: this engine's id and lease. world: its ranks. count(event)."""
        self._clock = clock
        self._offers = offers
        self._count = count
        self._geometry = geometry
        self._client = client
        self._transfer = transfer
        self._world = world
        self._running: dict[str, bool] = {}  # whether for a next turn
        self._holders: dict[str, Remote] = {}  # that have not heard that we are done
        self._unstored: dict[str, _Rest] = {}

    def begun(
        self,
        request: EngineRequest,
        params: Mapping[str, Any] | None,
        cached: int,
    ) -> Remote:
        """Take note of a request with these parameters; return whom to ask for its prompt.

        One that another engine goes on with may be asked for while it is computed. cached: tokens
        that the engine has itself.
        """
        name, size = request.request_id, self._geometry.block_tokens
        source = self._source(name, params)
        turn = source.remote is not NO_REMOTE and not source.turn and self._transfer.two_way
        if turn or is_handed_over(params):
            self._running[name] = turn
            self._client.hand(p.Handing(name, "running", common=common_id(name)))
        if source.remote is NO_REMOTE:
            return NO_REMOTE
        self._holders[name] = source.remote
        if request.num_tokens - 1 < cached + (1 if source.remote.tokens else size):
            return NO_REMOTE  # a full hit
        least = self._transfer.recompute_threshold if source.turn else 0
        known = min(source.remote.tokens or request.num_tokens, request.num_tokens)
        return source.remote if known - cached >= max(least, 1) else NO_REMOTE

    def _source(self, request_id: str, params: Mapping[str, Any] | None) -> Source:
        try:
            return source_of(params, self._transfer)
        except ConfigError as exc:
            log.warning("request %s is computed here: %s", request_id, exc)
            self._count("transfer_refused")
            return NO_SOURCE

    def over(self, tracked: Tracked, table: BlockTable, scope: bytes) -> dict[str, Any] | None:
        """Have the store hold a request's blocks; return what a router passes along."""
        request, geometry, transfer = tracked.request, self._geometry, self._transfer
        name = request.request_id
        here = self._client.side_channel if self._client.session else ""
        if name not in self._running or not here or tracked.cursor == NEVER:
            return None
        turn = self._running[name]
        hashed = len(request.block_hashes) * geometry.hash_tokens
        end = min(request.num_computed_tokens, request.num_tokens - 1)  # the last was just sampled
        tail = None if turn else tail_of(geometry, request, end, name)  # a next turn is longer
        if tail is not None and not self._offers.has_tail(tail, table):
            tail = None
        blocks = min(end, hashed) // geometry.block_tokens
        hashes = [geometry.block_hash(request, block) for block in range(blocks)]
        if tail is None:
            end = blocks * geometry.block_tokens
        else:
            hashes.append(tail.hash)
        if hashes:  # else ended() tells the store
            del self._running[name]
            lease_ms = transfer.decode_ttl_ms if turn else transfer.lease_ms
            packed, width = b"".join(hashes), geometry.hash_bytes
            self._client.hand(p.Handing(name, "done", packed, width, scope, lease_ms, fixed=turn))
            until_ns = self._clock() + STORE_LIMIT_NS
            rest = _Rest(tracked, table, end, tail, self._client.session, until_ns)
            if not self._store(rest):
                self._unstored[name] = rest
        ids = table if hashes else [()] * len(table)
        return parameters(transfer, name, here, ids, end, self._world, turn=turn)

    def _store(self, rest: _Rest) -> bool:
        """Offer what was not offered; tell whether that was all."""
        tracked, size = rest.tracked, self._geometry.block_tokens
        self._offers.offer(tracked, rest.end, lambda _: rest.table)
        if tracked.cursor < rest.end // size:
            return False
        return rest.tail is None or self._offers.offer_tail(tracked, rest.tail, rest.table)

    def unstored(self, request_id: str = "") -> bool:
        """Tell whether a request, or any, has ended and keeps engine blocks to be stored."""
        return request_id in self._unstored if request_id else bool(self._unstored)

    def store_rest(self) -> tuple[str, ...]:
        """Offer more; return the requests whose engine blocks may go.

        These are stored then, and fenced until they are, or nothing more of them will be.
        """
        now_ns, over = self._clock(), []
        for name, rest in self._unstored.items():
            lost = rest.tracked.cursor == NEVER or rest.session != self._client.session
            if not lost and self._offers.may_offer():
                if self._store(rest):
                    over.append(name)
                    continue
                rest.until_ns = now_ns + STORE_LIMIT_NS
            if lost or now_ns >= rest.until_ns:
                self._count("hand_over_unstored")
                over.append(name)
        for name in over:
            del self._unstored[name]
        return tuple(over)

    def forget_rest(self) -> None:
        """What is not stored yet is not wanted any more."""
        for rest in self._unstored.values():
            rest.tracked.cursor = NEVER

    def let_go(self, request_id: str) -> None:
        """A request wants nothing more of who computed its prompt."""
        holder = self._holders.pop(request_id, None)
        if holder is not None:
            self._client.let_go(holder.address, holder.request)

    def runs(self, request_id: str) -> bool:
        """Tell whether another engine goes on with what a request computes."""
        return request_id in self._running

    def ended(self, request_id: str) -> None:
        """A request has ended; one that was not handed over is wanted by nobody."""
        self.let_go(request_id)
        if self._running.pop(request_id, None) is not None:
            self._client.hand(p.Handing(request_id, "gone"))
