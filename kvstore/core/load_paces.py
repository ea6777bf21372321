"""How long a load takes, by the place that it reads from and by the loads under way there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvstore.core.pace import SHARE, Pace
from kvstore.core.tier import Placing, Tier
from kvstore.core.types import BlockKey

_ALONE_SHARE = 1 / 4  # that a load counts which began while no other was under way
PLACES_MAX = 256  # whose paces are known
TRY_EVERY = 20  # times what that takes, a slow place is read to see whether it still is
_QUICKER = 4  # times: a load that ran alone shows that the place has changed
_TRY_NS_MIN, _TRY_NS_MAX = 1_000_000_000, 60_000_000_000


class LoadPaces:
    """How long it takes to read blocks at each place after all that are being read.

    A place is a tier, or a tier of a peer; None: one that is not measured.
    """

    def __init__(self, tiers: Iterable[Tier] = ()) -> None:
        self._placing = {tier.name: tier for tier in tiers if isinstance(tier, Placing)}
        self._paces: dict[str, Pace] = {}  # those that were read last come last
        self._reading: Counter[str] = Counter()  # blocks of loads under way
        self._try_ns: dict[str, int] = {}  # when a place that is too slow is read again

    def place_of(self, tier: Tier, key: BlockKey) -> str | None:
        """Name the place where a tier reads a block."""
        placing = self._placing.get(tier.name)
        return tier.name if placing is None else placing.place(key)

    def wait_ns(self, place: str | None, blocks: int) -> int:
        """Return how long it takes until so many more blocks are read; 0: not known."""
        pace = None if place is None else self._paces.get(place)
        if place is None or pace is None:
            return 0
        return int(pace.seconds(self._reading[place] + blocks) * 1e9)

    def too_slow(self, place: str | None, blocks: int, saved_ns: int, now_ns: int) -> bool:
        """Tell whether reading so many blocks takes longer than so long.

        Now and then they are to be read in any case, to see whether the place is still so slow.
        """
        wait_ns = self.wait_ns(place, blocks)
        if place is None or wait_ns <= saved_ns:
            return False
        return place in self._reading or not self._due(place, wait_ns, now_ns)

    def take_turn(self, place: str | None, blocks: int, now_ns: int) -> bool:
        """Tell whether so many blocks are to be read at a slow place, only to see how slow it is.

        Not while anything is being read there: that tells as much.
        """
        if place is None or place not in self._paces or place in self._reading:
            return False
        return self._due(place, self.wait_ns(place, blocks), now_ns)

    def _due(self, place: str, wait_ns: int, now_ns: int) -> bool:
        if now_ns < self._try_ns.get(place, 0):
            return False
        self._try_ns.pop(place, None)
        if len(self._try_ns) >= PLACES_MAX:
            del self._try_ns[next(iter(self._try_ns))]
        later_ns = min(max(_TRY_NS_MIN, TRY_EVERY * wait_ns), _TRY_NS_MAX)
        self._try_ns[place] = now_ns + later_ns
        return True

    def began(self, place: str | None, blocks: int) -> tuple[int, int]:
        """Note a load; return how long it will take, or 0, and how many blocks are being read."""
        if place is None:
            return 0, blocks
        wait_ns = self.wait_ns(place, blocks)
        self._reading[place] += blocks
        return wait_ns, self._reading[place]

    def ended(self, place: str | None, blocks: int, ahead: int, took_ns: int | None) -> None:
        """Note its end. ahead: as began() said. took_ns: None for one that failed."""
        if place is None:
            return
        self._reading[place] -= blocks
        if not self._reading[place]:
            del self._reading[place]
        if took_ns is not None:
            pace = self._paces.pop(place, None) or Pace()
            if ahead == blocks and pace.seconds(blocks) * 1e9 > _QUICKER * took_ns:
                pace = Pace()  # whatever made it slow has gone
            if len(self._paces) >= PLACES_MAX:
                del self._paces[next(iter(self._paces))]
            self._paces[place] = pace
            pace.note(ahead, took_ns / 1e9, _ALONE_SHARE if ahead == blocks else SHARE)
