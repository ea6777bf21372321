"""Requests of a prefill engine that another engine goes on with, as the store is told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from connectors.client import StoreClient
from connectors.offers import Offers
from connectors.requests import BlockTable, Geometry, Tracked
from connectors.tails import tail_of
from connectors.transfer import NO_REMOTE, Remote, Transfer, is_handed_over, parameters, source_of
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
        self._running: set[str] = set()

    def begun(self, request_id: str, params: Mapping[str, Any] | None) -> Remote:
        """Take note of a request with these parameters; return where its prompt was computed.

        One that another engine goes on with may be asked for while it is computed.
        """
        if is_handed_over(params):
            self._running.add(request_id)
            self._client.hand(p.Handing(request_id, "running"))
        try:
            return source_of(params, push=self._transfer.push)
        except ConfigError as exc:
            log.warning("request %s is computed here: %s", request_id, exc)
            self._count("transfer_refused")
            return NO_REMOTE

    def over(self, tracked: Tracked, table: BlockTable, scope: bytes) -> dict[str, Any] | None:
        """Have the store hold a request's blocks; return what a router passes along."""
        request, geometry = tracked.request, self._geometry
        name, here = request.request_id, self._client.side_channel
        if name not in self._running or not here:
            return None
        hashed = len(request.block_hashes) * geometry.hash_tokens
        end = min(request.num_computed_tokens, request.num_tokens - 1)  # the last was just sampled
        blocks = min(end, hashed) // geometry.block_tokens
        hashes = [geometry.block_hash(request, block) for block in range(blocks)]
        tail = tail_of(geometry, request, end, name)
        self._offers.offer(tracked, end, lambda _: table)
        if tail is not None and self._offers.offer_tail(tracked, tail, table):
            hashes.append(tail.hash)
        else:
            end = blocks * geometry.block_tokens
        if not hashes:
            return None
        self._running.discard(name)
        packed, width = b"".join(hashes), geometry.hash_bytes
        self._client.hand(p.Handing(name, "done", packed, width, scope, self._transfer.lease_ms))
        return parameters(self._transfer.engine, name, here, table, end, self._world)

    def ended(self, request_id: str) -> None:
        """A request has ended; one that was not handed over is wanted by nobody."""
        if request_id in self._running:
            self._running.discard(request_id)
            self._client.hand(p.Handing(request_id, "gone"))
