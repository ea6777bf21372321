"""Token ids of blocks, so that an engine that attaches can publish what was here before.

Prompts can be read from them: they are kept only where `[engine] event_tokens` says how much.
"""

from __future__ import annotations

from kvstore.core.errors import ProtocolError
from kvstore.wire.engine import BlockTokens
from kvstore.wire.framing import WORD

TABLES = 256  # a table of all would stop a turn for milliseconds when it grows
ENTRY_BYTES = 256  # of an entry beside its token ids


class TokenIds:
    """Token ids by block hash. Equal hashes have equal tokens, whatever model they are of."""

    def __init__(self, bytes_max: int) -> None:
        """bytes_max: of all; the oldest are forgotten. 0: none is kept."""
        self.bytes_max = bytes_max
        self._tables: list[dict[bytes, bytes]] = [{} for _ in range(TABLES)]
        self._bytes = [0] * TABLES
        self.width = 0  # of hashes, as engines have told last

    def add(self, told: BlockTokens) -> None:
        """Keep what an engine has told. Raises ProtocolError for what does not fit together."""
        count, odd = divmod(len(told.hashes), told.width)
        size, odd_tokens = divmod(len(told.tokens), max(1, count) * WORD)
        if odd or odd_tokens or not size:
            sizes = f"{len(told.tokens)} bytes of tokens, {len(told.hashes)} of hashes"
            raise ProtocolError(f"{sizes}, {told.width} each")
        self.width = told.width
        for at in range(count):
            block_hash = told.hashes[at * told.width : (at + 1) * told.width]
            self._put(block_hash, told.tokens[at * size * WORD : (at + 1) * size * WORD])

    def _put(self, block_hash: bytes, tokens: bytes) -> None:
        number = block_hash[-1]
        table = self._tables[number]
        if block_hash in table:
            return
        table[block_hash] = tokens
        self._bytes[number] += len(tokens) + ENTRY_BYTES
        while table and self._bytes[number] > self.bytes_max // TABLES:
            oldest = next(iter(table))
            self._bytes[number] -= len(table.pop(oldest)) + ENTRY_BYTES

    def of(self, block_hash: bytes) -> bytes:
        """Return a block's token ids, u32; b"" if they are not known."""
        return self._tables[block_hash[-1]].get(block_hash, b"")

    def clear(self) -> None:
        """Forget all of them."""
        self._tables = [{} for _ in range(TABLES)]
        self._bytes = [0] * TABLES
