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
_BISECTED = ("evicted", "not_stored", "pending")


def missed(ask: Ask, reach: int, found: int, *, waited: bool) -> tuple[str, int]:
    """Return a reason of MISSES and the block up to which it holds; behind it none was ever seen.

    reach: blocks in the answer; found: those that were there, of memory and tiers, pending or not.
    waited: it is answered because its time is over.
    """
    if reach >= ask.blocks:
        return "", 0
    group, reason = _lacking(ask, reach)
    if reach < found and reason != "pending":
        return "no_slot", found
    if reason == NEVER_SEEN and waited and _undecided(ask, group, reach):
        return "too_late", ask.blocks
    if reason not in _BISECTED:
        return reason, reach
    low, high = reach + 1, ask.blocks  # all before low lack for this reason
    while low < high:
        middle = (low + high) // 2
        if _why(ask.namespace, ask.chain.key(group, middle)) == reason:
            low = middle + 1
        else:
            high = middle
    return reason, low


def left_s_ago(ask: Ask, group: int, block: int) -> int | None:
    """Return how long ago a block was evicted from memory, if that is known."""
    manager = ask.namespace.manager
    left_s = manager.ghosts.left_s(ask.chain.key(group, block))
    return None if left_s is None else manager.now_s - left_s


def _lacking(ask: Ask, block: int) -> tuple[int, str]:
    """Return the group that lacks a block, and why; the prefix of a group that needs all first."""
    namespace = ask.namespace
    for group in namespace.full_first:
        reason = _why(namespace, ask.chain.key(group, block))
        if reason:
            return group, reason
    return 0, NEVER_SEEN


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


def _undecided(ask: Ask, group: int, block: int) -> bool:
    """Tell whether a tier or a peer may still have it."""
    if ask.fetch is not None and ask.offered is None:
        return True
    tiering = ask.namespace.tiering
    if ask.memory_only or not tiering.sources:
        return False
    result, _, _ = tiering.leading([ask.chain.key(group, block)], 0)
    return result is not LookupResult.MISS
