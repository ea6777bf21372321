"""How long workers take to read blocks of a peer, or the peer to write them, to be worth it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.core.pace import PLACES_MAX, LoadPaces
from kvstore.handover.direct_fetches import DirectFetch, Reading
from kvstore.handover.fetches import Fetch
from kvstore.handover.jobs import PREFILL
from kvstore.handover.links import Links

TRY_EVERY = 20  # of the time: a direct fetch from a slow place is tried for a twentieth of it


class DirectPaces:
    """Paces of all direct fetches into one namespace. A place is a peer and its tier."""

    def __init__(self, fetches: Mapping[int, Fetch], peers: Links) -> None:
        """fetches: those that are open, by number; the caller's."""
        self._fetches = fetches
        self._peers = peers
        self._paces = LoadPaces()
        self._try_ns: dict[str, int] = {}  # of places that are too slow: when they are tried again

    def place(self, fetch: Fetch, positions: Sequence[int]) -> str | None:
        """Name the place of offered blocks, by the first and the last one.

        None: they are at several, or its engine still computes them.
        """
        tiers = {fetch.tier_of(positions[end]) for end in (0, -1)} if positions else {PREFILL}
        known = len(tiers) == 1 and PREFILL not in tiers
        return f"{self._peers.address_of(fetch.connection)} {tiers.pop()}" if known else None

    def too_slow(self, number: int, positions: Sequence[int], saved_ns: int, now_ns: int) -> bool:
        """Tell whether workers would read these blocks of a direct fetch for longer than so long.

        Now and then they are to read in any case, to see whether the place is still so slow.
        """
        fetch = self._fetches.get(number)
        place = None if fetch is None else self.place(fetch, positions)
        wait_ns = self._paces.wait_ns(place, len(positions))
        if place is None or wait_ns <= saved_ns:
            return False
        if now_ns < self._try_ns.get(place, 0):
            return True
        if len(self._try_ns) >= PLACES_MAX:
            self._try_ns.clear()
        self._try_ns[place] = now_ns + TRY_EVERY * wait_ns
        return False

    def began(self, direct: DirectFetch, fetch: Fetch, positions: Sequence[int]) -> None:
        """Note that these blocks are to be read from now on."""
        place = self.place(fetch, positions)
        _, ahead = self._paces.began(place, len(positions))
        direct.reading = Reading(place, len(positions), ahead, fetch.heard_ns)

    def ended(self, direct: DirectFetch, fetch: Fetch) -> None:
        """A fetch is over: note how long it took, if all of it has arrived."""
        reading, direct.reading = direct.reading, None
        if reading is not None:
            took_ns = fetch.arrived_ns - reading.began_ns if direct.whole else None
            self._paces.ended(reading.place, reading.blocks, reading.ahead, took_ns)
