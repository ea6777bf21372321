"""Requests that two engines share, as the store is told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from connectors.client import StoreClient
from connectors.offers import Offers
from connectors.requests import NEVER, BlockTable, EngineRequest, Geometry, Tracked
from connectors.tails import tail_of
from connectors.transfer import (
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
from kvstore import protocol as p
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)


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
    ) -> None:
        """transfer: this engine's id and lease. world: its ranks. count(event)."""
        self._offers = offers
        self._count = count
        self._geometry = geometry
        self._client = client
        self._transfer = transfer
        self._world = world
        self._running: dict[str, bool] = {}  # whether for a next turn
        self._holders: dict[str, Remote] = {}  # that have not heard that we are done

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
        name, here = request.request_id, self._client.side_channel
        if name not in self._running or not here or tracked.cursor == NEVER:
            return None
        turn = self._running[name]
        hashed = len(request.block_hashes) * geometry.hash_tokens
        end = min(request.num_computed_tokens, request.num_tokens - 1)  # the last was just sampled
        tail = None if turn else tail_of(geometry, request, end, name)  # a next turn is longer
        self._offers.offer(tracked, end, lambda _: table)
        # What found no slot is not named: somebody would wait for it.
        blocks = min(end, hashed, tracked.cursor * geometry.block_tokens) // geometry.block_tokens
        hashes = [geometry.block_hash(request, block) for block in range(blocks)]
        if tail is not None and self._offers.offer_tail(tracked, tail, table):
            hashes.append(tail.hash)
        else:
            end = blocks * geometry.block_tokens
        if hashes:  # else ended() tells the store
            del self._running[name]
            lease_ms = transfer.decode_ttl_ms if turn else transfer.lease_ms
            packed, width = b"".join(hashes), geometry.hash_bytes
            self._client.hand(p.Handing(name, "done", packed, width, scope, lease_ms, fixed=turn))
        ids = table if hashes else [()] * len(table)
        return parameters(transfer, name, here, ids, end, self._world, turn=turn)

    def let_go(self, request_id: str) -> None:
        """A request wants nothing more of who computed its prompt."""
        holder = self._holders.pop(request_id, None)
        if holder is not None:
            self._client.let_go(holder.address, holder.request)

    def ended(self, request_id: str) -> None:
        """A request has ended; one that was not handed over is wanted by nobody."""
        self.let_go(request_id)
        if self._running.pop(request_id, None) is not None:
            self._client.hand(p.Handing(request_id, "gone"))
