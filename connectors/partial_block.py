"""The partly filled last block of a prompt that one engine hands to another: its *tail*.

An engine has no hash for it. Both ends of a hand-over make one from what both of them know, so to
everything between them it is one more block of the request's chain. Nobody else makes it: no other
request finds a tail, in whichever tier it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from connectors.engine_interface import EngineRequest, Geometry
from connectors.kv_transfer_params import Remote
from connectors.request_state import Question

MARK = b"\0kvtail\0"  # what each of these hashes begins with; an engine's do by chance of 2^-64


class Tail(NamedTuple):
    """A tail: its block's number and hash, and the request's tokens up to its last one."""

    block: int
    hash: bytes
    end: int


def tail_of(geometry: Geometry, request: EngineRequest, end: int, handed: str) -> Tail | None:
    """Name the block in which a request's first `end` tokens end; None if they end with one.

    handed: the hand-over's request. Also None if the engine has not hashed all blocks before it.
    """
    size = geometry.block_tokens
    index, filled = divmod(end, size)
    if not filled or len(request.block_hashes) * geometry.hash_tokens < index * size:
        return None
    above = geometry.block_hash(request, index - 1) if index else b""
    tokens = request.all_token_ids[index * size : end]
    return Tail(index, _hash(geometry.hash_bytes, handed, above, tokens), end)


def _hash(width: int, handed: str, above: bytes, tokens: Sequence[int]) -> bytes:
    """Bind a tail to its request, to the block before it, and to its tokens and their number."""
    facts = msgspec.msgpack.encode((handed, above, list(tokens)))
    return MARK + hashlib.blake2b(facts, digest_size=width - len(MARK)).digest()


def is_tail(key: bytes) -> bool:
    """Tell whether a block key, or a hash, is a tail's."""
    return key.startswith(MARK)


def question_of(geometry: Geometry, request: EngineRequest, remote: Remote) -> Question:
    """Say which blocks to ask for: all full ones, and of a hand-over its last one, however full.

    The last token is computed in any case: a block that only lacks it may be of no use, but need
    not be stored again either.
    """
    size, tokens = geometry.block_tokens, request.num_tokens
    every = size // geometry.hash_tokens
    hashes = request.block_hashes[every - 1 :: every]
    whole = min(len(hashes), (tokens - 1) // size)
    plain = Question(hashes, len(hashes), whole, whole * size)
    end = min(remote.tokens, geometry.loadable(tokens))
    if tokens == 1 or remote.tokens < tokens - 1 or (geometry.exact and end != remote.tokens):
        return plain  # nothing is to be loaded, or nothing else of what was computed elsewhere
    index = (end - 1) // size
    inside = end % size
    if index < len(hashes) and (not inside or remote.tokens >= (index + 1) * size):
        return Question(hashes, len(hashes), index + 1, end, inside)
    tail = tail_of(geometry, request, remote.tokens, remote.request)
    if tail is None or tail.block != index or tail.end > tokens:
        return plain
    return Question([*hashes[:index], tail.hash], index, index + 1, end, inside)
