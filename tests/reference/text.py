"""A request's tokens, and the KV bytes that follow from them.

Each token has a mark, a checksum of all tokens up to it and of the weights. A word of its KV is
the mark, changed by group, rank and place in the token, so that bytes of another prompt, position,
group or rank are seen to be wrong. A recurrent state is made of the last token's mark alone.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tests.reference.shape import HASH_BYTES, WORD_BYTES, Shape

VOCABULARY = 50
JUNK = (0xDEADBEEF).to_bytes(WORD_BYTES, "little")  # mark of what a rejected draft leaves behind
_TOKENS = [token.to_bytes(4, "big") for token in range(VOCABULARY)]
_U32 = "I"
_WORD = 0x85EBCA6B


class Text:
    """Tokens as the device has them; the scheduler learns of sampled ones later."""

    def __init__(self, prompt: Sequence[int], hash_tokens: int) -> None:
        self.tokens: list[int] = []
        self.hashes: list[bytes] = []
        self._hash_tokens = hash_tokens
        self._weights = 0
        self._marks = array(_U32)
        self.extend(prompt)
        self.know(len(prompt))

    def __len__(self) -> int:
        return len(self.tokens)

    def weigh(self, weights: int) -> None:
        """Use other weights: the same tokens give other bytes."""
        if weights == self._weights:
            return
        tokens, self.tokens, self._weights = self.tokens, [], weights
        del self._marks[:]
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        marks = self._marks
        mark = marks[-1] if marks else self._weights
        for token in tokens:
            mark = zlib.crc32(_TOKENS[token], mark)
            marks.append(mark)
            self.tokens.append(token)

    def sample(self) -> int:
        """Add the token that the model gives next, and return it."""
        token = self._marks[-1] % VOCABULARY
        self.extend((token,))
        return token

    def cut(self, count: int) -> None:
        """Forget the tokens from number `count` on, and what hashes there are of them."""
        del self.tokens[count:], self._marks[count:], self.hashes[count // self._hash_tokens :]

    def know(self, count: int) -> None:
        """Hash the full blocks among the first `count` tokens."""
        size = self._hash_tokens
        while (len(self.hashes) + 1) * size <= count:
            first = len(self.hashes) * size
            before = self.hashes[-1] if self.hashes else b""
            data = before + bytes(self.tokens[first : first + size])
            self.hashes.append(hashlib.blake2b(data, digest_size=HASH_BYTES).digest())

    def marks(self, first: int, end: int) -> bytes:
        """Return the marks of tokens first..end-1, as u32."""
        return self._marks[first:end].tobytes()


@cache
def _table(group: int, rank: int) -> bytes:
    """Return what each byte of a mark becomes: on no two ranks of a group the same."""
    factor, term = 2 * group + 1, 29 * group + 101 * rank
    return bytes((factor * byte + term) & 0xFF for byte in range(256))


@cache
def _places(token_words: int) -> NDArray[np.uint32]:
    return np.array([_WORD * n & 0xFFFFFFFF for n in range(token_words)], dtype=np.uint32)


def words_of(marks: bytes, group: int, rank: int, token_words: int) -> bytes:
    """Return the KV of tokens with these marks: u32 [tokens, token_words]."""
    words = marks.translate(_table(group, rank))
    if token_words == 1:
        return words
    return (np.frombuffer(words, dtype=np.uint32)[:, None] ^ _places(token_words)).tobytes()


def block_bytes(shape: Shape, text: Text, group: int, rank: int, index: int) -> bytes:
    """Return what an engine block of a group must hold on a rank once it is complete."""
    kind = shape.groups[group]
    first, end = index * kind.tokens, (index + 1) * kind.tokens
    marks = text.marks(end - 1, end) * kind.tokens if kind.state else text.marks(first, end)
    return words_of(marks, group, rank, shape.token_words)


def slot_bytes(shape: Shape, text: Text, group: int, index: int) -> bytes:
    """Return what a slot must hold: engine block after engine block, in it these ranks.

    index: of the offload block.
    """
    tokens = shape.group_tokens[group]
    first = index * shape.block_tokens
    return b"".join(
        block_bytes(shape, text, group, rank, at // tokens)
        for at in range(first, first + shape.block_tokens, tokens)
        for rank in range(shape.world)
    )
