"""Requests of a prefill engine that another engine goes on with, as the store is told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from connectors.client import StoreClient
from connectors.requests import EngineRequest, Geometry
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
        count: Callable[[str], None],
    ) -> None:
        """transfer: this engine's id and lease. world: its ranks. count(event)."""
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

    def over(
        self, request: EngineRequest, table: Sequence[Sequence[int]], scope: bytes
    ) -> dict[str, Any] | None:
        """Have the store hold a request's whole blocks; return what a router passes along."""
        here, size = self._client.side_channel, self._geometry.block_tokens
        hashed = len(request.block_hashes) * self._geometry.hash_tokens
        blocks = min(request.num_computed_tokens, hashed) // size
        if request.request_id not in self._running or not here or not blocks:
            return None
        self._running.discard(request.request_id)
        hashes = b"".join(self._geometry.block_hash(request, block) for block in range(blocks))
        lease_ms, width = self._transfer.lease_ms, len(hashes) // blocks
        name, engine = request.request_id, self._transfer.engine
        self._client.hand(p.Handing(name, "done", hashes, width, scope, lease_ms))
        return parameters(engine, name, here, table, blocks * size, self._world)

    def ended(self, request_id: str) -> None:
        """A request has ended; one that was not handed over is wanted by nobody."""
        if request_id in self._running:
            self._running.discard(request_id)
            self._client.hand(p.Handing(request_id, "gone"))
