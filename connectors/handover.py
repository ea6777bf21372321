"""Requests that two engines share, as the store is told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from connectors.client import StoreClient
from connectors.requests import EngineRequest, Geometry
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
        count: Callable[[str], None],
    ) -> None:
        """transfer: this engine's id and lease. world: its ranks. count(event)."""
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
        servable: int,
        cached: int = 0,
    ) -> Remote:
        """Take note of a request with these parameters; return whom to ask for its prompt.

        One that another engine goes on with may be asked for while it is computed. servable:
        tokens that could be loaded; cached: those that the engine has itself.
        """
        name, source = request.request_id, self._source(request.request_id, params)
        turn = source.remote is not NO_REMOTE and not source.turn and self._transfer.two_way
        if turn or is_handed_over(params):
            self._running[name] = turn
            self._client.hand(p.Handing(name, "running", common=common_id(name)))
        if source.remote is NO_REMOTE:
            return NO_REMOTE
        self._holders[name] = source.remote
        if servable < cached + self._geometry.block_tokens:
            return NO_REMOTE  # nothing of it is needed
        least = self._transfer.recompute_threshold if source.turn else 0
        known = min(source.tokens or request.num_tokens, request.num_tokens)
        return source.remote if known - cached >= max(least, 1) else NO_REMOTE

    def _source(self, request_id: str, params: Mapping[str, Any] | None) -> Source:
        try:
            return source_of(params, self._transfer)
        except ConfigError as exc:
            log.warning("request %s is computed here: %s", request_id, exc)
            self._count("transfer_refused")
            return NO_SOURCE

    def over(
        self, request: EngineRequest, table: Sequence[Sequence[int]], scope: bytes
    ) -> dict[str, Any] | None:
        """Have the store hold a request's whole blocks; return what a router passes along."""
        here, size = self._client.side_channel, self._geometry.block_tokens
        name, transfer = request.request_id, self._transfer
        if name not in self._running or not here:
            return None
        hashed = len(request.block_hashes) * self._geometry.hash_tokens
        blocks = min(request.num_computed_tokens, hashed) // size
        if not blocks:  # ended() tells the store
            nothing = [()] * len(table)
            turn = self._running[name]
            return parameters(transfer, name, here, nothing, 0, self._world, turn=turn)
        turn = self._running.pop(name)
        hashes = b"".join(self._geometry.block_hash(request, block) for block in range(blocks))
        lease_ms = transfer.decode_ttl_ms if turn else transfer.lease_ms
        width = len(hashes) // blocks
        done = p.Handing(name, "done", hashes, width, scope, lease_ms, fixed=turn)
        self._client.hand(done)
        return parameters(transfer, name, here, table, blocks * size, self._world, turn=turn)

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
