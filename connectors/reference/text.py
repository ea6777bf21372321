"""A request's tokens, and the KV bytes that follow from them.

Each token has a mark, a checksum of all tokens up to it and of the weights. A word of its KV is
the mark, changed by group, rank and place in the token, so that bytes of another prompt, position,
group or rank are seen to be wrong. A recurrent state is made of the last token's mark alone.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from connectors.reference.shape import WORD_BYTES, Shape

VOCABULARY = 50
JUNK = 0xDEADBEEF  # mark of what a rejected draft leaves behind
_GROUP_RANK = 0x9E3779B1
_WORD = 0x85EBCA6B
_RANKS_MAX = 64

Words = NDArray[np.uint32]


class Text:
    """Tokens as the device has them; the scheduler learns of sampled ones later."""

    def __init__(self, prompt: Sequence[int], room: int, hash_tokens: int) -> None:
        """room: tokens it can grow to. Raises ValueError for tokens outside of the vocabulary."""
        if not prompt or not all(0 <= token < VOCABULARY for token in prompt):
            raise ValueError(f"a prompt of {len(prompt)} tokens, expected some below {VOCABULARY}")
        self.tokens: list[int] = []
        self.hashes: list[bytes] = []
        self._hash_tokens = hash_tokens
        self._weights = 0
        self._marks = np.zeros(room, dtype=np.uint32)
        for token in prompt:
            self.append(token)
        self.know(len(prompt))

    def __len__(self) -> int:
        return len(self.tokens)

    def _last(self) -> int:
        return int(self._marks[len(self.tokens) - 1]) if self.tokens else self._weights

    def weigh(self, weights: int) -> None:
        """Use other weights: the same tokens give other bytes."""
        tokens, self.tokens, self._weights = self.tokens, [], weights
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Add a token."""
        mark = zlib.crc32(token.to_bytes(4, "big"), self._last())
        self._marks[len(self.tokens)] = mark
        self.tokens.append(token)

    def sample(self) -> int:
        """Add the token that the model gives next, and return it."""
        token = self._last() % VOCABULARY
        self.append(token)
        return token

    def cut(self, count: int) -> None:
        """Forget the tokens from number `count` on."""
        del self.tokens[count:]

    def know(self, count: int) -> None:
        """Hash the full blocks among the first `count` tokens."""
        size = self._hash_tokens
        while (len(self.hashes) + 1) * size <= count:
            first = len(self.hashes) * size
            before = self.hashes[-1] if self.hashes else b""
            data = before + bytes(self.tokens[first : first + size])
            self.hashes.append(hashlib.blake2b(data, digest_size=16).digest())

    def marks(self, count: int) -> bytes:
        """Return the marks of the first `count` tokens, as u32."""
        return self._marks[:count].tobytes()


@cache
def _salts(group: int, rank: int, token_words: int) -> Words:
    base = _GROUP_RANK * (_RANKS_MAX * group + rank + 1) & 0xFFFFFFFF
    return np.array([base ^ (_WORD * n & 0xFFFFFFFF) for n in range(token_words)], dtype=np.uint32)


def words_of(marks: Words, group: int, rank: int, token_words: int) -> Words:
    """Return the KV of tokens with these marks: [tokens, token_words]."""
    words: Words = marks[:, None] ^ _salts(group, rank, token_words)[None, :]
    return words


def state_of(mark: int, tokens: int, group: int, rank: int, token_words: int) -> Words:
    """Return the page of a state after the token with this mark: [tokens, token_words]."""
    return words_of(np.full(tokens, mark, dtype=np.uint32), group, rank, token_words)


def block_bytes(shape: Shape, text: Text, group: int, rank: int, index: int) -> bytes:
    """Return what an engine block of a group must hold on a rank once it is complete."""
    kind = shape.groups[group]
    first, end = index * kind.tokens, (index + 1) * kind.tokens
    marks = np.frombuffer(text.marks(end), dtype=np.uint32)
    if kind.state:
        return state_of(int(marks[-1]), kind.tokens, group, rank, shape.token_words).tobytes()
    return words_of(marks[first:], group, rank, shape.token_words).tobytes()


def page_words(shape: Shape) -> int:
    """Count the words of an engine block on one rank."""
    return shape.page_bytes // WORD_BYTES
