"""Which engine blocks a request has: hits in the prefix cache, allocation, what is left behind.

A group's table lists a block for each engine block of tokens; 0 where nothing is needed (before
a window, states passed by).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.reference.pool import BlockPool, Name
from tests.reference.requests import Request
from tests.reference.shape import Shape


class Tables:
    """The block tables of all requests."""

    def __init__(self, shape: Shape) -> None:
        self.pool = BlockPool(shape.blocks, reuse_newest=shape.reuse_newest)
        self._shape = shape
        self._unwritten: set[int] = set()  # given out, and nothing written yet
        self._states: list[tuple[int, Name]] = []  # to be found from the next step on

    # The prefix cache

    def local_hit(self, request: Request) -> tuple[int, list[list[int]]]:
        """Return the tokens that every group has, and the blocks; the last token never counts."""
        align = self._shape.alignment
        end = (request.num_tokens - 1) // align * align if self._shape.prefix_cache else 0
        for group, kind in enumerate(self._shape.groups):
            if kind.window is None and not kind.state:
                end = min(end, self._leading(request, group, end) // align * align)
        while end:
            found = [self._cached(request, group, end) for group in range(len(request.table))]
            if all(blocks is not None for blocks in found):
                return end, [blocks or [] for blocks in found]
            end -= align
        return 0, [[] for _ in request.table]

    def _leading(self, request: Request, group: int, end: int) -> int:
        size, cached, hashes = self._shape.hash_tokens, self.pool.cached, request.block_hashes
        every = self._shape.groups[group].tokens // size
        for index in range(every - 1, end // size, every):
            if (group, hashes[index]) not in cached:
                return (index + 1 - every) * size
        return end

    def _cached(self, request: Request, group: int, end: int) -> list[int] | None:
        kind = self._shape.groups[group]
        first = kind.first_block(end)
        blocks = [0] * first
        for index in range(first, end // kind.tokens):
            block = self.pool.cached.get((group, request.hash_at((index + 1) * kind.tokens)))
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def publish(self, request: Request, tokens: int, state_at: int) -> list[int]:
        """Let others find the blocks of the first `tokens` tokens; return the new ones.

        state_at: tokens after which the states are whole. They are found from the next step on:
        who reads a state must not do so in the step that writes it.
        """
        fresh: list[int] = []
        if not self._shape.prefix_cache:
            return fresh
        for group, kind in enumerate(self._shape.groups):
            size, table = kind.tokens, request.table[group]
            if kind.state:
                index = state_at // size - 1
                if state_at and state_at % size == 0 and state_at <= tokens and table[index]:
                    self._states.append((table[index], (group, request.hash_at(state_at))))
                continue
            whole, published = tokens // size, request.published[group]
            if published >= whole:
                continue
            for index in range(published, whole):
                name = group, request.hash_at((index + 1) * size)
                if self.pool.publish(table[index], name):
                    fresh.append(table[index])
            request.published[group] = whole
        return fresh

    def start_step(self) -> None:
        """Let the states that the last step wrote be found."""
        for block, name in self._states:
            self.pool.publish(block, name)
        self._states.clear()

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Let blocks whose content will not be computed not be found."""
        for block in blocks:
            self.pool.forget(block)
            self._states = [state for state in self._states if state[0] != block]

    def forget_all(self) -> None:
        self._states.clear()
        self.pool.forget_all()

    # Allocation

    def allocate(
        self,
        request: Request,
        settled: int,
        end: int,
        hit: Sequence[Sequence[int]] | None = None,
        keep: int = 0,
    ) -> list[int] | None:
        """Give a request blocks for its first `end` tokens; return the new ones.

        None if too few are free. settled: tokens that are there and stay; what only they read is
        let go of. hit: blocks of others that it gets to begin with. keep: blocks to leave free.
        """
        tables: list[list[int]] = []
        needs: list[int] = []
        shared: list[int] = []
        for group, kind in enumerate(self._shape.groups):
            table = request.table[group] if hit is None else list(hit[group])
            if skipped := kind.first_block(settled):
                if hit is None:
                    self.pool.release(table[:skipped])
                table[:skipped] = [0] * skipped
            total = -(-(end + (0 if kind.state else self._shape.lookahead)) // kind.tokens)
            need = max(0, total - len(table))
            if kind.state and need:
                table, need = table + [0] * (need - 1), 1
            tables.append(table)
            needs.append(need)
            if hit is not None:
                shared.extend(filter(None, table))
        if hit is None and not (keep or any(needs)):
            return []  # as in most steps
        used = sum(1 for block in shared if block in self.pool.free)
        if sum(needs) + used + keep > len(self.pool.free):
            return None
        self.pool.share(shared)
        fresh: list[int] = []
        for group, need in enumerate(needs):
            taken = self.pool.take(need)
            request.table[group] = tables[group] + taken
            fresh.extend(taken)
        self._unwritten.update(fresh)
        return fresh

    def first_written(self, blocks: Iterable[int]) -> list[int]:
        """Pick the blocks that nothing was written to since they were given out; once each."""
        first = [block for block in blocks if block in self._unwritten]
        self._unwritten.difference_update(first)
        return first

    def from_token(self, request: Request, first: int, end: int | None = None) -> list[int]:
        """List a request's blocks from the one that has token `first`, to before token `end`."""
        blocks: list[int] = []
        for table, kind in zip(request.table, self._shape.groups, strict=True):
            stop = None if end is None else -(-end // kind.tokens)
            blocks.extend(block for block in table[first // kind.tokens : stop] if block)
        return blocks

    def blocks_left(self, request: Request) -> int:
        """Count the blocks that a request still needs until its end."""
        tokens = request.tokens_max + self._shape.lookahead
        tokens += self._shape.batches * (self._shape.drafts + 1)
        return sum(
            max(0, -(-tokens // kind.tokens) - len(table))
            for table, kind in zip(request.table, self._shape.groups, strict=True)
        )

    def take_from(self, request: Request) -> list[list[int]]:
        """Return a request's blocks, which are no longer its own."""
        taken = request.table
        request.table = [[] for _ in taken]
        return taken

    def release(self, tables: Iterable[Sequence[int]]) -> None:
        for blocks in tables:
            self.pool.release(blocks)

    def shown(self, request: Request, end: int, *, last: bool = False) -> list[list[int]]:
        """Return a table as the connector may see it in a step that ends at token `end`.

        States are shown only where they are whole. last: no step follows, so that they are
        whole wherever it ended.
        """
        if not self._shape.has_state:
            return request.table
        tables = list(request.table)
        for group, kind in enumerate(self._shape.groups):
            if kind.state:
                table, index = [0] * len(tables[group]), -(-end // kind.tokens) - 1
                whole = last or end % self._shape.block_tokens == 0
                if end and whole and index < len(table):
                    table[index] = tables[group][index]
                tables[group] = table
        return tables
