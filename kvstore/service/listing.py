"""What a store has in memory, as somebody who looks for a block is told over the local socket.

Never over the side channel: who may ask for blocks there has to know their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import msgspec

from kvstore.index import State
from kvstore.metrics import MEMORY
from kvstore.service.namespace import Namespace
from kvstore.types import LookupResult

KEYS_MAX = 1000  # of one namespace: the store answers engines meanwhile


class Listed(msgspec.Struct, frozen=True):
    """One namespace; keys: some of its ready blocks, in hexadecimal, with the tiers they are in.

    blocks: how many memory has, those that are being written among them.
    """

    namespace: str
    block_bytes: int
    groups: int
    blocks: int
    keys: dict[str, list[str]]


def listing(namespaces: Mapping[str, Namespace]) -> bytes:
    """Return a list of Listed as JSON."""
    return msgspec.json.encode([_listed(digest, one) for digest, one in namespaces.items()])


def _listed(digest: str, namespace: Namespace) -> Listed:
    index, layout = namespace.manager.index, namespace.layout
    ready = (entry.key for entry in index if entry.state is State.READY)
    keys = {}
    for key in islice(ready, KEYS_MAX):
        below = [t.name for t in namespace.tiering.tiers if t.lookup(key) is LookupResult.HIT]
        keys[key.hex()] = [MEMORY, *below]
    return Listed(digest, layout.slot_bytes, len(layout.rules), len(index), keys)
