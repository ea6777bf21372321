"""Which blocks of a hit are worth reading from elsewhere: an engine may compute them sooner.

An engine computes from the end of a hit on, and waits until the hit is there. So of all ends that
the hit could have the best is where reading what lies before it takes least, beyond what computing
that would take.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from kvstore.core.tiering import Found, Tiering
from kvstore.core.types import Chain
from kvstore.store.namespace import Namespace

ENDS_MAX = 32  # that are compared
LOOKS_MAX = 4096
"""At all runs, for all ends together. Blocks that are by turns in memory and on disk make as many
runs; then few ends are compared."""


def worth_loading(
    namespace: Namespace,
    chain: Chain,
    blocks: int,
    below: Sequence[Found],
    block_ns: int,
    now_ns: int,
    other: int | None = None,
) -> int:
    """Return how many of the leading blocks of a hit an engine is to load.

    below: what lower tiers have of them. block_ns: how long the engine computes a block. other: the
    only shorter hit that there is, if that is known.
    """
    tiering, rules = namespace.tiering, namespace.layout.rules
    full = namespace.full_first[0]
    here = next((run.first for run in below if run.group == full), blocks)
    coming = list(_arrivals(tiering, chain, full, here, now_ns)) if tiering.coming else []
    ends = sorted({run.first for run in below} | {first for first, _ in coming})
    if other is not None:
        ends = [other]

    def beyond_ns(end: int) -> int:
        """Return how much longer loading takes than computing; below 0: how much less."""
        read: Counter[str | None] = Counter()
        for run in below:
            first = max(run.first, chain.first_of(rules[run.group], end))
            read[run.place] += max(0, min(run.end, end) - first)
        waits_ns = [tiering.loads.wait_ns(place, count) for place, count in read.items() if count]
        waits_ns += [wait_ns for first, wait_ns in coming if first < end]
        return max(waits_ns, default=0) - end * block_ns

    most = max(1, min(ENDS_MAX, LOOKS_MAX // (1 + len(below))))
    return min((blocks, *ends[:: -(-len(ends) // most) or 1]), key=beyond_ns)


def _arrivals(
    tiering: Tiering, chain: Chain, group: int, limit: int, now_ns: int
) -> Iterator[tuple[int, int]]:
    """Yield the first block of each job that brings leading blocks, and how long it takes.

    What hangs below a block that is on its way is on its way, too. A job that is late takes as long
    again as it has taken.
    """
    bringing = tiering.bringing
    at = bisect_left(
        range(limit), 1, key=lambda index: bringing(chain.key(group, index)) is not None
    )
    while at < limit and (work := bringing(chain.key(group, at))) is not None:
        late = 0 < work.due_ns <= now_ns
        yield at, now_ns - work.began_ns if late else max(0, work.due_ns - now_ns)
        at += len(work.job.keys)


def measure(namespace: Namespace, chain: Chain, run: Found, now_ns: int, *, off_disk: bool) -> None:
    """Read some blocks at a place that is too slow to be used; no request waits for them.

    The place would not be measured otherwise, and be taken for slow for ever. off_disk: none of
    the blocks is copied down.
    """
    tiering = namespace.tiering
    end = min(run.end, run.first + tiering.load_blocks)
    if tiering.loads.take_turn(run.place, end - run.first, now_ns):
        run = run._replace(end=end)
        tiering.promote(chain, end, [run], now_ns, off_disk=off_disk)
