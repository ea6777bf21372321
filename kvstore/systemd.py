"""What systemd is told: the store is ready or ends, what it does, and that it is alive.

sd_notify(3): lines in a datagram to the socket that the environment names. Nothing is sent if it
names none.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import MutableMapping

from kvstore.units import one_line

log = logging.getLogger(__name__)

STATUS_MAX = 200  # characters


class Systemd:
    """The service manager that started this process, or none."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Take what systemd has set out of the environment: no child of the store has it."""
        place = environment.pop("NOTIFY_SOCKET", "")
        limit_us = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", str(os.getpid()))
        asked = re.fullmatch("[0-9]{1,15}", limit_us, re.ASCII) and pid == str(os.getpid())
        self.watchdog_ns = int(limit_us) * 1000 if asked else 0  # without a sign of life; 0: any
        self._address = "\0" + place[1:] if place.startswith("@") else place
        self._failed = False  # as it was told last

    def tell(self, *lines: str, status: str = "") -> None:
        """Send lines such as READY=1, and a status in words; never waits."""
        if not self._address:
            return
        if status:
            lines = (*lines, f"STATUS={one_line(status, STATUS_MAX)}")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as exc:
            if not self._failed:
                log.warning("systemd cannot be told %s: %s", " ".join(lines), exc)
            self._failed = True
        else:
            self._failed = False
