"""The partly filled last block of a prompt that one engine hands over to another.

An engine has no hash for it. Both ends of a hand-over make one from what both know, so that stores
and tiers see one more block of the request's chain. No other request makes that hash, so none
finds the block, in whichever tier it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from connectors.engine_interface import EngineRequest, Geometry
from connectors.kv_transfer_params import Remote
from connectors.request_state import BlockQuery
from kvstore.core import limits

MARK = b"\0kvtail\0"  # each of these hashes begins with it; an engine's do by chance of 2^-64


class PartialBlock(NamedTuple):
    """Its index and hash, and the request's tokens up to its last one."""

    block: int
    hash: bytes
    end: int


def partial_block_of(
    geometry: Geometry, request: EngineRequest, end: int, handed: str
) -> PartialBlock | None:
    """Name the block in which a request's first `end` tokens end; None if they end with one.

    handed: the hand-over's request. Also None if the engine has not hashed all blocks before it.
    """
    size = geometry.block_tokens
    index, filled = divmod(end, size)
    if not filled or len(request.block_hashes) * geometry.hash_tokens < index * size:
        return None
    parent = geometry.block_hash(request, index - 1) if index else b""
    tokens = request.all_token_ids[index * size : end]
    return PartialBlock(index, _hash(geometry.hash_bytes, handed, parent, tokens), end)


def _hash(width: int, handed: str, parent: bytes, tokens: Sequence[int]) -> bytes:
    """Bind the block to its request, to the block before it, and to its tokens and their number."""
    facts = msgspec.msgpack.encode((handed, parent, list(tokens)))
    return MARK + hashlib.blake2b(facts, digest_size=width - len(MARK)).digest()


def is_partial_block(key: bytes) -> bool:
    """Return True if a block key, or a hash, names a partly filled block."""
    return key.startswith(MARK)


def query_for(geometry: Geometry, request: EngineRequest, remote: Remote) -> BlockQuery:
    """Choose the blocks to ask for: all full ones, and of a hand-over its last one, however full.

    Of a prompt longer than a store answers for, the leading ones are asked for.
    The engine computes the last token in any case. So a block that only lacks it may be of no use,
    but asking for it shows that it need not be stored again.
    """
    size, tokens = geometry.block_tokens, request.num_tokens
    every = size // geometry.hash_tokens
    hashes = request.block_hashes[every - 1 : limits.LOOKUP_BLOCKS_MAX * every : every]
    whole = min(len(hashes), (tokens - 1) // size)
    plain = BlockQuery(hashes, len(hashes), whole, whole * size)
    end = min(remote.tokens, geometry.loadable(tokens))
    if tokens == 1 or remote.tokens < tokens - 1 or (geometry.exact and end != remote.tokens):
        return plain  # nothing to load, or nothing beyond full blocks was computed elsewhere
    index = (end - 1) // size
    inside = end % size
    if index >= limits.LOOKUP_BLOCKS_MAX:
        return plain
    if index < len(hashes) and (not inside or remote.tokens >= (index + 1) * size):
        return BlockQuery(hashes, len(hashes), index + 1, end, inside)
    partial = partial_block_of(geometry, request, remote.tokens, remote.request)
    if partial is None or partial.block != index or partial.end > tokens:
        return plain
    return BlockQuery([*hashes[:index], partial.hash], index, index + 1, end, inside)
