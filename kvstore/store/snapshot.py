"""What the tiers have when an engine attaches, in pages, for its KV events.

First what the disk has with token ids, in the order in which it was written, so parents first;
then what is in memory only. What changes meanwhile is told as any change is: a page says what there
is when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.core.index import Entry
from kvstore.core.tier import TokenRows
from kvstore.core.types import BlockKey, LookupResult
from kvstore.store.key_news import DISK, MEMORY, KeyNews
from kvstore.store.namespace import Namespace
from kvstore.wire import engine as p

PAGE_BLOCKS = 64
LOOKS_MAX = 512  # at blocks in memory, for one page


class SnapshotPages:
    """The pages for one engine, in one scope."""

    def __init__(self, namespace: Namespace, keys: KeyNews, asked: p.Snapshot) -> None:
        """Begin at the first. keys: what the engine knows, which is not told again."""
        self._namespace, self._keys, self._asked = namespace, keys, asked
        self._mark: int | None = 0  # how far the disk's are read; None: all are
        self._memory = self._in_memory()

    def next(self) -> p.Page | None:
        """Return the next page; None: call again soon."""
        if self._mark is not None:
            return self._of_disk(self._mark)
        found: list[p.Held] = []
        for looked, held in enumerate(self._memory):
            found += () if held is None else (held,)
            if len(found) == PAGE_BLOCKS:
                return p.Page(tuple(found))
            if looked >= LOOKS_MAX:
                return p.Page(tuple(found)) if found else None
        return p.Page(tuple(found), last=True)

    def _of_disk(self, mark: int) -> p.Page | None:
        tier = self._namespace.tiering.describing
        kept = TokenRows((), mark, last=True) if tier is None else tier.token_rows(mark)
        if kept is None:
            return None
        self._mark = None if kept.last else kept.mark
        found = [self._held(row.key, row.parent, row.tokens) for row in kept.rows]
        blocks = tuple(held for held in found if held is not None)
        return p.Page(blocks) if blocks else None

    def _in_memory(self) -> Iterator[p.Held | None]:
        """Go through what is in memory, parents first; None for what is not to be told."""
        namespace, sent = self._namespace, bytearray()  # by slot
        for part in namespace.manager.index.parts():
            for entry in part:
                path: list[Entry] = []
                at: Entry | None = entry
                while at is not None:
                    sent.extend(bytes(max(0, at.slot + 1 - len(sent))))
                    if sent[at.slot]:
                        break
                    sent[at.slot] = 1
                    path.append(at)
                    at = at.parent
                    yield None  # each is one of a page's looks: a path may be long
                if not path:
                    yield None
                for above in reversed(path):
                    parent = None if above.parent is None else above.parent.key
                    yield self._held(above.key, parent, namespace.tokens_of(above.key))

    def _held(self, key: BlockKey, parent: BlockKey | None, tokens: bytes) -> p.Held | None:
        """Return what is to be told of a block now, if anything is."""
        namespace, width, tell = self._namespace, self._asked.width, self._keys.tell
        wanted = key[width + 2 :] == self._asked.scope and namespace.layout.is_full(key, width)
        if not wanted or not tokens:
            return None
        memory = namespace.manager.ready(key) is not None and tell(key, MEMORY)
        on_disk = any(tier.lookup(key) is LookupResult.HIT for tier in namespace.tiering.telling)
        disk = on_disk and tell(key, DISK)
        return p.Held(key, parent or b"", tokens, memory, disk) if memory or disk else None
