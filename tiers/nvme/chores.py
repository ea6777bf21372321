"""What the keeper thread does, one thing after the other: whatever has to sync."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvstore.errors import TierError


class Chore(msgspec.Struct, eq=False):
    """Something for the keeper thread, and what happens here when it is done."""

    work: Callable[[], None]
    done: Callable[[Exception | None], None]


def run_chore(chore: Chore) -> tuple[Chore, Exception | None]:
    """Do it, and say what went wrong."""
    try:
        chore.work()
    except (OSError, TierError) as exc:
        return chore, exc
    return chore, None
