"""Why a lookup's answer ends where it does.

One block is looked at: the first that the answer lacks. How many after it lack for the same reason
is searched for by bisection: a path leaves memory from its end, and is written from its beginning.
"""

from __future__ import annotations

from kvstore.core.index import State
from kvstore.core.types import BlockKey, LookupResult
from kvstore.store.namespace import Namespace
from kvstore.store.session import Ask

NEVER_SEEN = "never_seen"


def missed(
    ask: Ask, reach: int, found: int, *, waited: bool
) -> tuple[tuple[str, int], float | None]:
    """Return why block `reach` of a lookup is no hit, and up to which block that is so.

    That is a reason of MISSES; no block behind was ever seen. Also how long ago the block was
    evicted from memory, if it was. reach: blocks in the answer. found: those that were there, of
    memory and tiers, pending or not. waited: it is answered because its time is over.
    """
    if reach >= ask.blocks:
        return ("", 0), None
    namespace, key, reason = ask.namespace, ask.chain.key(0, reach), ""
    for group in namespace.full_first:
        key = ask.chain.key(group, reach)
        reason = _why(namespace, key)
        if reason:
            break
    gap_s = left_s_ago(ask, key) if reason == "evicted" else None
    if reach < found and reason != "pending":
        return ("no_slot", found), gap_s
    if reason == NEVER_SEEN and waited and _undecided(ask, key):
        return ("too_late", ask.blocks), None
    if reason in ("", NEVER_SEEN):
        return (NEVER_SEEN, reach), None
    low, high = reach + 1, ask.blocks  # all before low lack for this reason
    while low < high:
        middle = (low + high) // 2
        if _why(namespace, ask.chain.key(group, middle)) == reason:
            low = middle + 1
        else:
            high = middle
    return (reason, low), gap_s


def left_s_ago(ask: Ask, key: BlockKey) -> float | None:
    """Return how long ago a block was evicted from memory, if that is known."""
    manager = ask.namespace.manager
    left_s = manager.ghosts.left_s(key)
    return None if left_s is None else manager.now_s - left_s


def _why(namespace: Namespace, key: BlockKey) -> str:
    """Say why a block is no hit; "": it is here."""
    manager = namespace.manager
    entry = manager.index.get(key)
    if entry is not None:
        return "" if entry.state is State.READY else "pending"
    evicted_s, unstored_s = manager.ghosts.left_s(key), namespace.unstored.left_s(key)
    if unstored_s is not None and (evicted_s is None or evicted_s <= unstored_s):
        return "not_stored"
    return NEVER_SEEN if evicted_s is None else "evicted"


def _undecided(ask: Ask, key: BlockKey) -> bool:
    """Tell whether a tier or a peer may still have a block."""
    if ask.fetch is not None and ask.offered is None:
        return True
    tiering = ask.namespace.tiering
    if ask.memory_only or not tiering.sources:
        return False
    return tiering.leading([key], 0)[0] is not LookupResult.MISS
