"""How fast peers are: workers that read their blocks, or they that write them; and their engines.

What would take longer than the decode engine takes to compute it is not worth it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.core.load_paces import LoadPaces
from kvstore.handover.direct_fetches import DirectFetch, Reading
from kvstore.handover.fetches import Fetch
from kvstore.handover.jobs import PREFILL
from kvstore.handover.links import Links


class DirectPaces:
    """Paces of all direct fetches into one namespace. A place is a peer and its tier."""

    def __init__(self, fetches: Mapping[int, Fetch], peers: Links) -> None:
        """fetches: those that are open, by number; the caller's."""
        self._fetches = fetches
        self._peers = peers
        self._paces = LoadPaces()

    def place(self, fetch: Fetch, positions: Sequence[int]) -> str | None:
        """Name the place of offered blocks, by the first and the last one.

        None: they are at several, or its engine still computes them.
        """
        tiers = {fetch.tier_of(positions[end]) for end in (0, -1)} if positions else {PREFILL}
        known = len(tiers) == 1 and PREFILL not in tiers
        return f"{self._peers.address_of(fetch.connection)} {tiers.pop()}" if known else None

    def block_ns(self, number: int) -> int:
        """Return how long the peer's engine computes a block; 0: that is not known."""
        fetch = self._fetches.get(number)
        return 0 if fetch is None else fetch.block_ns

    def too_slow(self, number: int, positions: Sequence[int], saved_ns: int, now_ns: int) -> bool:
        """Tell whether workers would read these blocks of a direct fetch for longer than so long.

        See LoadPaces.
        """
        fetch = self._fetches.get(number)
        place = None if fetch is None else self.place(fetch, positions)
        return self._paces.too_slow(place, len(positions), saved_ns, now_ns)

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
