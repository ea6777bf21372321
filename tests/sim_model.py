"""What the simulated engine is made of: requests whose KV follows from their tokens, and blocks."""

from __future__ import annotations

import enum
import hashlib
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

HASH_TOKENS = 4
TOKEN_BYTES = 4
VOCABULARY = 50
POISON = b"\xee"


class Shape(msgspec.Struct, frozen=True):
    """What kind of engine it is. group_tokens: tokens of an engine block, per group."""

    group_tokens: tuple[int, ...]
    windows: tuple[int | None, ...]
    block_tokens: int
    world: int
    blocks: int
    budget: int
    running_max: int
    lookahead: int
    prefix_cache: bool
    ahead: bool
    reuse_newest: bool
    token_bytes: int = TOKEN_BYTES

    @property
    def page_bytes(self) -> int:
        return max(self.group_tokens) * self.token_bytes


class State(enum.Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"


class Request:
    """One request. device: its tokens, those sampled but not yet known to the scheduler too."""

    def __init__(self, request_id: str, prompt: Sequence[int], new: int, shape: Shape) -> None:
        self.request_id = request_id
        self.num_computed_tokens = 0
        self.num_tokens = len(prompt)
        self.tokens_max = len(prompt) + new
        self._hashes: list[bytes] = []
        self.block_hashes: Sequence[bytes] = self._hashes
        self.state = State.WAITING
        self.placeholders = 0
        self.epoch = 0
        self.local = 0
        self.table: list[list[int]] = [[] for _ in shape.group_tokens]
        self._shape = shape
        self._hash = b""
        self.device = list(prompt)

    def weigh(self, weights: int) -> None:
        """Start over with other weights: the same tokens give other bytes."""
        self.learned = 0  # blocks whose content the simulation has written down
        shape = self._shape
        self.kv = [[array("I") for _ in range(shape.world)] for _ in shape.group_tokens]
        self._mark = weights
        known, self.device = self.device[: self.num_tokens], []
        for token in known:
            self.append(token)
        self.know(self.num_tokens)

    def append(self, token: int) -> None:
        self.device.append(token)
        self._mark = zlib.crc32(token.to_bytes(4, "big"), self._mark)
        for group, ranks in enumerate(self.kv):
            for rank, values in enumerate(ranks):
                values.append(self._mark ^ (0x9E3779B1 * (8 * group + rank + 1) & 0xFFFFFFFF))

    def sample(self) -> None:
        self.append(self._mark % VOCABULARY)

    def know(self, tokens: int) -> None:
        """The scheduler learns of sampled tokens."""
        self.num_tokens = tokens
        while (len(self._hashes) + 1) * HASH_TOKENS <= tokens:
            first = len(self._hashes) * HASH_TOKENS
            text = self._hash + bytes(self.device[first : first + HASH_TOKENS])
            self._hash = hashlib.blake2b(text, digest_size=16).digest()
            self._hashes.append(self._hash)

    def page(self, group: int, rank: int, first: int, end: int) -> bytes:
        return self.kv[group][rank][first:end].tobytes()

    def hash_at(self, tokens: int) -> bytes:
        return self.block_hashes[tokens // HASH_TOKENS - 1]


class BlockPool:
    """Engine blocks, and which of them hold what by content hash. 0 is the null block."""

    def __init__(self, count: int, *, reuse_newest: bool) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))
        self.cached: dict[tuple[int, bytes], int] = {}
        self._refs = [0] * count
        self._names: dict[int, tuple[int, bytes]] = {}
        self._reuse_newest = reuse_newest

    def take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            block, _ = self.free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        for block in filter(None, blocks):
            self.free.pop(block, None)
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        for block in filter(None, reversed(list(blocks))):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} freed twice"
            if not self._refs[block]:
                self.free[block] = None
                if self._reuse_newest:
                    self.free.move_to_end(block, last=False)

    def publish(self, block: int, group: int, block_hash: bytes) -> None:
        if block and block not in self._names and (group, block_hash) not in self.cached:
            self.cached[group, block_hash] = block
            self._names[block] = (group, block_hash)

    def forget_all(self) -> None:
        self.cached.clear()
        self._names.clear()

    def _forget(self, block: int) -> None:
        name = self._names.pop(block, None)
        if name is not None:
            del self.cached[name]
