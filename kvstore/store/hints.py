"""Hints: stores that requests name as the source of their blocks, as a router has told them.

A hint may be wrong in any way, and what a request waits for it is a part of what computing takes.
A store that has not answered in time is left alone for a while: the next requests wait for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.config import network_of
from kvstore.core.errors import ConfigError
from kvstore.handover.loopback import host_and_port
from kvstore.metrics import Numbers
from kvstore.store.session import Ask

PART = 10  # of the time that computing the blocks takes, an answer is waited for
WAIT_NS = 20_000_000  # where that is not known
WAIT_NS_MAX = 1_000_000_000
WAIT_NS_MIN = 5_000_000  # a shorter one is of no use, and its blocks are soon computed
RESTS = 50  # a store that was late is not asked for so many times what was waited
RESTING_MAX = 256  # addresses
BLOCKS_MAX = 4096  # of one hint, in each group: more would hold up the loop


class Hints:
    """Decides which hints are followed, and counts what comes of them."""

    def __init__(self, hosts: Sequence[str], numbers: Numbers) -> None:
        """hosts: names, addresses and networks that a source may be at."""
        self._numbers = numbers
        self._names = frozenset(map(str.lower, hosts))
        self._networks = [network for network in map(network_of, hosts) if network is not None]
        self._resting: dict[str, int] = {}  # until when, by address

    def follows(self, address: str, now_ns: int) -> bool:
        """Tell whether the store at an address may be asked now; else count why not."""
        if not self._allows(address):
            self._count("refused")
        elif now_ns < self._resting.get(address, 0):
            self._count("resting")
        else:
            return True
        return False

    def begins(self, ask: Ask, address: str, blocks: int) -> bool:
        """Have an ask wait for the answer of a store on so many blocks; False: it is needless."""
        block_ns = ask.compute_ns or ask.namespace.block_ns
        wait_ns = blocks * block_ns // PART if block_ns else WAIT_NS
        if not blocks or wait_ns < WAIT_NS_MIN:
            self._count("needless")
            return False
        ask.hint, ask.hint_ns = address, ask.asked_ns + min(wait_ns, WAIT_NS_MAX)
        ask.deadline_ns = max(ask.deadline_ns, ask.hint_ns)
        return True

    def _allows(self, address: str) -> bool:
        try:
            host, _ = host_and_port(address)
        except ConfigError:
            return False
        if (network := network_of(host)) is None:
            return host.lower() in self._names
        return any(network.network_address in allowed for allowed in self._networks)

    def ends(self, ask: Ask, outcome: str) -> None:
        """A hint, if the ask has one, has come to this; a store that was late rests."""
        address, ask.hint = ask.hint, ""
        if not address:
            return
        self._count(outcome)
        if outcome == "late":
            self._resting.pop(address, None)
            self._resting[address] = ask.hint_ns + RESTS * (ask.hint_ns - ask.asked_ns)
            if len(self._resting) > RESTING_MAX:
                del self._resting[next(iter(self._resting))]

    def _count(self, outcome: str) -> None:
        self._numbers.add("kvstore_hints", outcome)
