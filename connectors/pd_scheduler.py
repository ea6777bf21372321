"""Requests that two engines share: what a prefill hands over, and where a decode finds it.

A request that ends hands over all it has computed. Most of it was stored while it ran. Blocks that
have found no slot by then stay in the engine's memory until they do, as their only copy is there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from connectors import kv_hints
from connectors.engine_interface import BlockTable, EngineRequest, Geometry
from connectors.kv_transfer_params import (
    NO_REMOTE,
    Remote,
    Transfer,
    as_engines_name_it,
    common_id,
    is_handed_over,
    parameters,
    remote_of,
)
from connectors.partial_block import PartialBlock, partial_block_of
from connectors.request_state import NEVER, TrackedRequest
from connectors.store_client import StoreClient
from connectors.store_planner import StorePlanner
from kvstore.core import limits
from kvstore.core.errors import ConfigError
from kvstore.core.limits import TEXT_MAX
from kvstore.logs import RateLog
from kvstore.units import one_line
from kvstore.wire import engine as p
from kvstore.wire.framing import is_sendable

log = logging.getLogger(__name__)

STORE_LIMIT_NS = 1_000_000_000  # without a slot for so long, the engine gets its blocks back
_LOGGED_MAX = 100  # characters of a request's id


class _Unstored(msgspec.Struct, eq=False):
    """What a request that has ended still has to store; end: its tokens."""

    tracked: TrackedRequest
    table: BlockTable
    end: int
    partial: PartialBlock | None
    session: int
    until_ns: int


class HandOvers:
    """The hand-overs of one engine, both those it makes and those it receives."""

    def __init__(
        self,
        geometry: Geometry,
        client: StoreClient,
        stores: StorePlanner,
        transfer: Transfer,
        *,
        world: int,
    ) -> None:
        """transfer: this engine's id and lease. world: its ranks."""
        self._geometry = geometry
        self._client = client
        self._stores = stores
        self._transfer = transfer
        self._world = world
        self._running: dict[str, bool] = {}  # computed for another engine; True: for a next turn
        self._holders: dict[str, Remote] = {}  # hold blocks for requests of this engine
        self._unstored: dict[str, _Unstored] = {}
        self._said = RateLog(log)

    def start(
        self, request: EngineRequest, params: Mapping[str, Any] | None, cached: int
    ) -> Remote:
        """Take note of a request with these parameters; return where to fetch its prompt.

        A request that another engine continues may be fetched while it is computed here.
        cached: tokens that the engine has itself.
        """
        name, size = request.request_id, self._geometry.block_tokens
        remote = self._remote(name, params)
        turn = remote is not NO_REMOTE and not remote.turn and self._transfer.two_way
        if (turn or is_handed_over(params)) and self._has_a_name_to_send(name):
            self._running[name] = turn
            running = p.HandedOver(name, "running", common=common_id(name))
            self._client.report_hand_over(running)
        if remote is NO_REMOTE:
            return self._hinted(request, params)
        remote = remote._replace(request=as_engines_name_it(remote.request, name))
        self._holders[name] = remote
        if request.num_tokens - 1 < cached + (1 if remote.tokens else size):
            return NO_REMOTE  # a full hit
        least = self._transfer.recompute_threshold if remote.turn else 0
        known = min(remote.tokens or request.num_tokens, request.num_tokens)
        return remote if known - cached >= max(least, 1) else NO_REMOTE

    def _has_a_name_to_send(self, request_id: str) -> bool:
        """Tell whether the store can be told of a request; one with another id is warned of."""
        if is_sendable(request_id, TEXT_MAX):
            return True
        self._said.warn(
            "requests that are not handed over",
            "request %s is not handed over: expected an id of up to %d characters, found %d",
            one_line(request_id, _LOGGED_MAX), TEXT_MAX, len(request_id),
        )  # fmt: skip
        self._client.count("transfer_refused")
        return False

    def _remote(self, request_id: str, params: Mapping[str, Any] | None) -> Remote:
        try:
            return remote_of(params, self._transfer)
        except ConfigError as exc:
            name = one_line(request_id, _LOGGED_MAX)
            self._said.warn(
                "wrong hand-over parameters", "request %s is computed here: %s", name, exc
            )
            self._client.count("transfer_refused")
            return NO_REMOTE

    def _hinted(self, request: EngineRequest, params: Mapping[str, Any] | None) -> Remote:
        """Return the store that a hint names, if it says anything of the request's own blocks."""
        envelope = params.get(kv_hints.PARAMETER) if isinstance(params, Mapping) else None
        if envelope is None:
            return NO_REMOTE
        try:
            hint = kv_hints.hint_of(envelope)
            if hint is None:
                return NO_REMOTE
            covered = hint.covered(request.block_hashes) * self._geometry.hash_tokens
            if blocks := covered // self._geometry.block_tokens:
                return Remote(hint.address, hinted=blocks)
            raise ConfigError("block_hashes: the last one is of no block of the request")
        except ConfigError as exc:
            log.debug("hint of request %s: %s", one_line(request.request_id, _LOGGED_MAX), exc)
            self._client.count("hint_refused")
        return NO_REMOTE

    def finish(
        self, tracked: TrackedRequest, table: BlockTable, scope: bytes
    ) -> dict[str, Any] | None:
        """Have the store hold a request's blocks; return the parameters for the next engine.

        None: no engine continues the request, or its blocks cannot be fetched.
        """
        request, geometry, transfer = tracked.request, self._geometry, self._transfer
        name = request.request_id
        here = self._client.side_channel if self._client.session else ""
        if name not in self._running or not here or tracked.cursor == NEVER:
            return None
        turn = self._running[name]
        hashed = len(request.block_hashes) * geometry.hash_tokens
        most = limits.LOOKUP_BLOCKS_MAX * geometry.block_tokens
        end = min(request.num_computed_tokens, request.num_tokens - 1)  # the last was just sampled
        end = min(end, most)  # no lookup asks beyond that
        partial = None if turn else partial_block_of(geometry, request, end, name)
        if partial is not None and not self._stores.has_partial(partial, table):
            partial = None
        blocks = min(end, hashed) // geometry.block_tokens
        hashes = [geometry.block_hash(request, block) for block in range(blocks)]
        if partial is None:
            end = blocks * geometry.block_tokens
        else:
            hashes.append(partial.hash)
        if hashes:  # without any, end() tells the store
            del self._running[name]
            done = p.HandedOver(
                name,
                "done",
                b"".join(hashes),
                geometry.hash_bytes,
                scope,
                lease_ms=transfer.decode_ttl_ms if turn else transfer.lease_ms,
                fixed=turn,
            )
            self._client.report_hand_over(done)
            until_ns = self._client.clock() + STORE_LIMIT_NS
            rest = _Unstored(tracked, table, end, partial, self._client.session, until_ns)
            if not self._store(rest):
                self._unstored[name] = rest
        ids = table if hashes else [()] * len(table)
        return parameters(transfer, name, here, ids, end, self._world, turn=turn)

    def _store(self, rest: _Unstored) -> bool:
        """Store what is not stored yet; True if that was all."""
        tracked, size = rest.tracked, self._geometry.block_tokens
        self._stores.store_complete(tracked, rest.end, lambda _: rest.table)
        if tracked.cursor < rest.end // size:
            return False
        partial = rest.partial
        return partial is None or self._stores.store_partial(tracked, partial, rest.table)

    def has_unstored(self, request_id: str = "") -> bool:
        """Return True while a request that has ended, or any, keeps engine blocks to store."""
        return request_id in self._unstored if request_id else bool(self._unstored)

    def store_rest(self) -> tuple[str, ...]:
        """Store more; return the requests whose engine blocks may be freed.

        These are stored, and fenced until the copies end, or will not be stored any more.
        """
        self._said.tick()
        now_ns, ended = self._client.clock(), []
        for name, rest in self._unstored.items():
            lost = rest.tracked.cursor == NEVER or rest.session != self._client.session
            if not lost and self._stores.can_store():
                if self._store(rest):
                    ended.append(name)
                    continue
                rest.until_ns = now_ns + STORE_LIMIT_NS
            if lost or now_ns >= rest.until_ns:
                self._client.count("hand_over_unstored")
                ended.append(name)
        for name in ended:
            del self._unstored[name]
        return tuple(ended)

    def drop_rest(self) -> None:
        """Stop storing for requests that have ended: the cache was reset."""
        for rest in self._unstored.values():
            rest.tracked.cursor = NEVER

    def release(self, request_id: str) -> None:
        """Tell the store that computed a request's prompt that we need no more of it."""
        holder = self._holders.pop(request_id, None)
        if holder is not None:
            self._client.release_remote(holder.address, holder.request)

    def is_running(self, request_id: str) -> bool:
        """Return True if a request is being computed for another engine."""
        return request_id in self._running

    def end(self, request_id: str) -> None:
        """End a request. If finish() has not handed it over, no engine can fetch it."""
        self.release(request_id)
        if self._running.pop(request_id, None) is not None:
            self._client.report_hand_over(p.HandedOver(request_id, "gone"))
