"""KV events for a router's index: blocks by the engine's own hashes, with tokens and parent.

The store names keys only. A key's tokens are known while a request that has them is here: blocks
are described when they are stored, or when a lookup brings them up from a lower tier or a peer.
Other blocks (other engines store them, or did before) are counted and not published: an event
without tokens is of no use to an index. Only groups that need the whole prefix are published,
since indexes count leading blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

from connectors.engine_interface import EngineRequest, Geometry
from connectors.partial_block import is_partial_block
from connectors.store_client import StoreClient

TOKENS_MAX = 1 << 20  # of described blocks; the oldest are forgotten
HASHES_MAX = 1 << 19  # of published blocks that are several engine blocks each


class BlockEvent(NamedTuple):
    """A block entered (stored) or left a medium, as the engine blocks of a group.

    hashes: one for each engine block. parent: the hash before them, None at the beginning of a
    prompt. tokens: of all of them; none of what left.
    """

    medium: str
    stored: bool
    group: int
    hashes: Sequence[bytes]
    parent: bytes | None = None
    tokens: Sequence[int] = ()


class _Described(NamedTuple):
    hashes: bytes  # all of the engine's in the block, one after another
    parent: bytes | None
    tokens: Sequence[int]


class BlockEvents:
    """Turns keys that entered and left the tiers into events, for engines that publish them."""

    def __init__(self, geometry: Geometry, client: StoreClient) -> None:
        """client: has the keys, and counts blocks that cannot be described."""
        self._geometry = geometry
        self._client = client
        self._every = geometry.block_tokens // geometry.hash_tokens
        self._described: dict[bytes, _Described] = {}  # by hash, the oldest first
        self._described_max = max(1, TOKENS_MAX // geometry.block_tokens)
        self._asked: dict[bytes, tuple[EngineRequest, int]] = {}  # by hash: request and its block
        self._published: dict[bytes, bytes] = {}  # last hash of a block: all of its hashes
        self._published_max = max(1, HASHES_MAX // self._every)

    def stored(self, request: EngineRequest, first: int, end: int) -> None:
        """Blocks first..end-1 of a request are being stored."""
        if self._client.collect_events:
            for block in range(first, end):
                self._describe(request, block)

    def asked(self, request: EngineRequest, hashes: Sequence[bytes]) -> None:
        """A lookup may bring up a request's leading blocks, by their hashes."""
        if self._client.collect_events:
            blocks = zip(repeat(request), range(len(hashes)), strict=False)
            self._asked.update(zip(hashes, blocks, strict=True))

    def ended(self, request: EngineRequest) -> None:
        """A request has ended: no lookup of it brings up blocks any more."""
        if self._asked:
            for block_hash in request.block_hashes[self._every - 1 :: self._every]:
                if self._asked.get(block_hash, (None, 0))[0] is request:
                    del self._asked[block_hash]

    def _describe(self, request: EngineRequest, block: int) -> _Described:
        every, size = self._every, self._geometry.block_tokens
        hashes = request.block_hashes[block * every : (block + 1) * every]
        parent = request.block_hashes[block * every - 1] if block else None
        tokens = array("I", request.all_token_ids[block * size : (block + 1) * size])
        self._described[hashes[-1]] = made = _Described(b"".join(hashes), parent, tokens)
        if len(self._described) > self._described_max:
            del self._described[next(iter(self._described))]
        return made

    def _description(self, block_hash: bytes) -> _Described | None:
        found = self._described.get(block_hash)
        if found is not None or block_hash not in self._asked:
            return found
        request, block = self._asked[block_hash]
        hashes, last = request.block_hashes, (block + 1) * self._every - 1
        if last >= len(hashes) or hashes[last] != block_hash:
            return None  # the engine has shortened the prompt meanwhile
        return self._describe(request, block)

    def take(self, scope: bytes) -> Iterator[BlockEvent]:
        """Yield what happened in a scope since the last call."""
        width, rules = self._geometry.hash_bytes, self._geometry.rules
        events = self._client.events
        if self._client.events_lost:
            self._client.count("events_untold", self._client.events_lost)
            self._client.events_lost = 0
        while events:
            medium, stored, key = events.popleft()
            group = int.from_bytes(key[width : width + 2], "big")
            known = key[width + 2 :] == scope and group < len(rules) and not is_partial_block(key)
            if not known or rules[group].trailing is not None:
                continue
            block_hash = key[:width]
            if not stored:
                names = self._hashes_of_group(self._published.get(block_hash, block_hash), group)
                yield BlockEvent(medium, stored, group, names)
            elif (found := self._description(block_hash)) is None:
                self._client.count("events_untold")
            else:
                self._remember(block_hash, found.hashes)
                names = self._hashes_of_group(found.hashes, group)
                yield BlockEvent(medium, stored, group, names, found.parent, found.tokens)

    def _hashes_of_group(self, packed: bytes, group: int) -> list[bytes]:
        """List the hashes of a group's engine blocks; of a block that is forgotten the last."""
        width = self._geometry.hash_bytes
        step = self._geometry.engine_block_tokens[group] // self._geometry.hash_tokens * width
        return [packed[max(0, end - width) : end] for end in range(len(packed), 0, -step)][::-1]

    def _remember(self, block_hash: bytes, hashes: bytes) -> None:
        if len(hashes) > len(block_hash):
            self._published[block_hash] = hashes
            if len(self._published) > self._published_max:
                del self._published[next(iter(self._published))]
