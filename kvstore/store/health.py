"""Whether the store is alive and ready: what HTTP probes and systemd learn.

Alive: its loop turns. Ready: it takes engines, and each tier of its configuration works, for
reading at least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvstore.systemd import Systemd

STILL_S = 5.0  # of a turn; honest ones take milliseconds
_STATUS_NS = 1_000_000_000  # between two status lines for systemd
_WORDS = {
    "loading": "tier {} is reading its index",
    "read_only": "tier {} is read only",
    "off": "tier {} is off",
}


class Health:
    """Written by the store's thread; any thread may read it."""

    def __init__(
        self,
        tiers: Callable[[], Mapping[str, str]],
        systemd: Systemd,
        drains: Callable[[], str] = str,
    ) -> None:
        """tiers(): the state of each tier below memory. drains(): why no engine is taken; or ""."""
        self.refuses = "the store is starting"  # why no engine is taken; "": they are
        self.copied = ""  # as the store ends: how many blocks of how many
        self._tiers, self._drains = tiers, drains
        self._systemd = systemd
        self._watchdog_ns = systemd.watchdog_ns // 3
        self._turn_ns = time.monotonic_ns()
        self._alive_ns = self._status_ns = 0  # when systemd was told last
        self._status = ""

    def turned(self, now_ns: int) -> None:
        """After each turn of the loop."""
        self._turn_ns = now_ns
        if self._watchdog_ns and now_ns - self._alive_ns >= self._watchdog_ns:
            self._alive_ns = now_ns
            self._systemd.tell("WATCHDOG=1")
        if now_ns - self._status_ns >= _STATUS_NS:
            self._status_ns = now_ns
            self._tell()

    def serves(self) -> None:
        """Engines can connect from now on."""
        self.refuses = ""
        self._tell("READY=1")

    def ends(self) -> None:
        """The store takes no engine any more, and copies down what only memory has."""
        self.refuses = "the store is ending"
        self._tell("STOPPING=1")

    def _tell(self, *lines: str) -> None:
        """Tell systemd these lines, and the status in words if it is another one."""
        said = [self.refuses or self._drains() or "serving"]
        if self.copied:
            said.append(f"copied {self.copied} blocks that only memory had")
        states = self._tiers().items()
        said += [_WORDS[state].format(name) for name, state in states if state in _WORDS]
        status = "; ".join(said)
        if lines or status != self._status:
            self._status = status
            self._systemd.tell(*lines, status=status)

    def not_alive(self) -> list[str]:
        """Say why the store is not alive; nothing if it is."""
        still_s = (time.monotonic_ns() - self._turn_ns) / 1e9
        if still_s < STILL_S:
            return []
        return [
            f"the store's loop has not turned for {still_s:.0f} s, expected {STILL_S:g} s at most"
        ]

    def not_ready(self) -> list[str]:
        """Say why the store is not ready; nothing if it is."""
        reasons = self.not_alive()
        if refuses := self.refuses or self._drains():
            reasons.append(refuses)
        off = [name for name, state in self._tiers().items() if state == "off"]
        return reasons + [_WORDS["off"].format(name) for name in off]
