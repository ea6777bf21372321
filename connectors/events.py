"""KV events for a router's index: blocks by the engine's own hashes, with tokens and parent.

The store names keys only. A key's tokens are known while a request that has them is here: blocks
are described when they are stored, or when a lookup brings them up from a lower tier or a peer.
A store that keeps token ids is told them, and tells those of blocks that were there before an
engine attached. Their hashes are computed again: with other tokens, or with images or a salt in
them, they are others. Blocks without tokens are counted and not published: such an event is of no
use to an index. Only groups that need the whole prefix are published, since indexes count leading
blocks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from connectors.engine_interface import EngineRequest, Geometry
from connectors.partial_block import is_partial_block
from connectors.store_client import DISK, MEMORY, BlockChange, StoreClient
from kvstore.wire.engine import BlockTokens, Held
from kvstore.wire.framing import U32

EVENTS_PER_STEP = 64
EVENTS_PER_BLOCK = 4  # into memory, out of it, and the same on disk
TOLD_BLOCKS = 128  # with token ids in one item of a message; a step sends several items
TOKENS_MAX = 1 << 20  # of described blocks; the oldest are forgotten
ENDED_MAX = 64  # requests whose last blocks may not have been told yet
HASHES_MAX = 1 << 19  # of published blocks that are several engine blocks each


NextHash = Callable[[bytes | None, Sequence[int]], bytes]
"""The engine's hash of some tokens behind those of another hash, None for none."""

Extra = Callable[[int, int, int], Sequence[object]]
"""What else is in the hashes of tokens first..end-1: one entry for each engine block of a size."""
ExtraOf = Callable[[EngineRequest], Extra | None]
"""That of a request, such as its images and its salt; None: its blocks have tokens only."""


class BlockEvent(NamedTuple):
    """A block entered (stored) or left a medium, as the engine blocks of a group.

    hashes: one for each engine block. parent: the hash before them, None at the beginning of a
    prompt. tokens: of all of them; none of what left. extra: for each hash what else is in it,
    without which an index takes the blocks of one image for those of another; none: nothing.
    """

    medium: str
    stored: bool
    group: int
    hashes: Sequence[bytes]
    parent: bytes | None = None
    tokens: Sequence[int] = ()
    extra: Sequence[object] = ()


def joined(events: Iterable[BlockEvent]) -> Iterator[BlockEvent]:
    """Make one event of those that go on with one another: blocks of a prompt, or what left.

    vLLM's router takes up to 4,096 events at once, and nothing of a step that has more.
    """
    run: list[BlockEvent] = []
    for event in events:
        if run and not _goes_on(run[-1], event):
            yield _one_of(run)
            run = []
        run.append(event)
    if run:
        yield _one_of(run)


def _goes_on(before: BlockEvent, event: BlockEvent) -> bool:
    if before[:3] != event[:3] or bool(before.extra) != bool(event.extra):
        return False
    return not event.stored or event.parent == before.hashes[-1]


def _one_of(run: Sequence[BlockEvent]) -> BlockEvent:
    return run[0]._replace(
        hashes=[name for event in run for name in event.hashes],
        tokens=[token for event in run for token in event.tokens],
        extra=[keys for event in run for keys in event.extra],
    )


class _Described(NamedTuple):
    hashes: bytes  # all of the engine's in the block, one after another
    parent: bytes | None
    tokens: Sequence[int]
    extra: Mapping[int, Sequence[object]] = {}  # by the tokens of an engine block


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
        self._ended = deque[EngineRequest]()  # what came up for them may not have been told yet
        self.next_hash: NextHash | None = None  # none: what was there before is not published
        self.extra_of: ExtraOf = lambda _: None
        self._stored = 0  # blocks, since the last events were taken
        self._published: dict[bytes, bytes] = {}  # last hash of a block: all of its hashes
        self._published_max = max(1, HASHES_MAX // self._every)

    def stored(self, request: EngineRequest, first: int, end: int) -> None:
        """Blocks first..end-1 of a request are being stored."""
        if self._client.collect_events:
            self._stored += end - first
            extra = self.extra_of(request)
            self._tell([self._describe(request, block, extra) for block in range(first, end)])

    def asked(self, request: EngineRequest, hashes: Sequence[bytes]) -> None:
        """A lookup may bring up a request's leading blocks, by their hashes."""
        if self._client.collect_events:
            blocks = zip(repeat(request), range(len(hashes)), strict=False)
            self._asked.update(zip(hashes, blocks, strict=True))

    def ended(self, request: EngineRequest) -> None:
        """A request has ended: no lookup of it brings up blocks any more.

        A prefill of one token ends in its first step, and the engine takes events after that.
        """
        if self._asked:
            self._ended.append(request)
            if len(self._ended) > ENDED_MAX:
                self._forget(self._ended.popleft())

    def _forget(self, request: EngineRequest) -> None:
        for block_hash in request.block_hashes[self._every - 1 :: self._every]:
            if self._asked.get(block_hash, (None, 0))[0] is request:
                del self._asked[block_hash]

    def _describe(self, request: EngineRequest, block: int, extra: Extra | None) -> _Described:
        every, size = self._every, self._geometry.block_tokens
        hashes = request.block_hashes[block * every : (block + 1) * every]
        parent = request.block_hashes[block * every - 1] if block else None
        tokens = array(U32, request.all_token_ids[block * size : (block + 1) * size])
        made = _Described(b"".join(hashes), parent, tokens)
        if extra is not None:
            steps, first = set(self._geometry.engine_block_tokens), block * size
            of_steps = {step: extra(first, first + size, step) for step in steps}
            made = made._replace(extra=of_steps)
        self._described[hashes[-1]] = made
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
        made = self._describe(request, block, self.extra_of(request))
        self._tell([made])
        return made

    def _tell(self, blocks: Sequence[_Described]) -> None:
        """Tell a store that keeps token ids those of some blocks."""
        if self._client.keeps_tokens:
            width = self._geometry.hash_bytes
            for first in range(0, len(blocks), TOLD_BLOCKS):
                part = blocks[first : first + TOLD_BLOCKS]
                hashes = b"".join(block.hashes[-width:] for block in part)
                tokens = b"".join(array(U32, block.tokens).tobytes() for block in part)
                self._client.describe(BlockTokens(hashes, width, tokens))

    def take(self, scope: bytes) -> Iterator[BlockEvent]:
        """Yield what happened in a scope, a limited number of blocks for each step.

        An engine that stores much has more of them, as its steps are longer; what many blocks at
        once are, of a clear, say, is told over many steps.
        """
        width, rules = self._geometry.hash_bytes, self._geometry.rules
        most, self._stored = EVENTS_PER_STEP + EVENTS_PER_BLOCK * self._stored, 0
        all_told = True
        for change in self._client.take_changes(most):
            all_told = False
            key = change.key
            group = int.from_bytes(key[width : width + 2], "big")
            known = key[width + 2 :] == scope and group < len(rules) and not is_partial_block(key)
            if not known or rules[group].trailing is not None:
                continue
            if isinstance(change, Held):
                yield from self._before(change, group)
            else:
                yield from self._changed(change, group)
        while all_told and self._ended:
            self._forget(self._ended.popleft())
        if self.next_hash is not None:
            self._client.ask_page(width, scope)

    def _changed(self, change: BlockChange, group: int) -> Iterator[BlockEvent]:
        medium, stored, key = change
        block_hash = key[: self._geometry.hash_bytes]
        if not stored:
            names = self._hashes_of_group(self._published.get(block_hash, block_hash), group)
            yield BlockEvent(medium, stored, group, names)
        elif (found := self._description(block_hash)) is None:
            self._client.count("events_untold")
        else:
            yield self._stored_event(medium, group, block_hash, found)

    def _stored_event(
        self, medium: str, group: int, block_hash: bytes, found: _Described
    ) -> BlockEvent:
        self._remember(block_hash, found.hashes)
        names = self._hashes_of_group(found.hashes, group)
        extra = found.extra.get(self._geometry.engine_block_tokens[group], ())
        return BlockEvent(medium, True, group, names, found.parent, found.tokens, extra)

    def _before(self, held: Held, group: int) -> Iterator[BlockEvent]:
        """Publish a block that was there when the engine attached, if its tokens are its own."""
        width, size = self._geometry.hash_bytes, self._geometry.hash_tokens
        parent = held.parent[:width] or None
        tokens = array(U32, held.tokens)
        hashes, last = list[bytes](), parent
        for first in range(0, len(tokens), size):
            last = self.next_hash(last, tokens[first : first + size]) if self.next_hash else b""
            hashes.append(last)
        if len(tokens) != self._geometry.block_tokens or last != held.key[:width]:
            self._client.count("events_untold")
            return
        found = _Described(b"".join(hashes), parent, tokens)
        for medium in (MEMORY,) * held.memory + (DISK,) * held.disk:
            yield self._stored_event(medium, group, last, found)

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
