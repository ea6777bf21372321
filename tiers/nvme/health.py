"""The state of a disk, from what its calls come back with. Decides; touches nothing.

state      blocks are  comes from                             ends with
---------  ----------  -------------------------------------  ---------------------------------
loading    read where  a start, or a return to the directory  all records of the index are in
           known
ok         read and    any other
           written
read_only  read        a write or a commit failed (ENOSPC,    a page could be written, durably
                       EDQUOT, EROFS, EIO), or the making of
                       an extent did, not for its room; one
                       does not come back; the file system is
                       mounted read-only
off        misses      reads failed in a row, or none comes   the directory was opened again and
                       back; the directory is gone, another   is the same one
                       one, or may not be used (EACCES,
                       EPERM); the index cannot be read

Off goes before loading, that before read_only, that before ok. While it is off, the tier holds no
file open except where a call hangs. read_only and off end by themselves: what ends them is tried
after RETRY_S, and after longer each time that the trouble comes back at once.
"""

from __future__ import annotations

import enum
import errno
import logging

log = logging.getLogger(__name__)

RETRY_S = 5.0
RETRY_MAX_S = 60.0
READ_ERRORS_MAX = 3  # in a row: then it is the disk, not a block
HANG_S = 10.0  # no disk at work takes that long; a drive gives up on a sector before
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class HealthState(enum.Enum):
    """What a tier on a disk does now."""

    LOADING = "loading"
    OK = "ok"
    READ_ONLY = "read_only"
    OFF = "off"


_NEXT = {
    HealthState.LOADING: "serves the blocks whose index it has read",
    HealthState.OK: "reads and writes",
    HealthState.READ_ONLY: "serves its blocks; tries to write again in {:.1f} s",
    HealthState.OFF: "all its blocks are misses; closes its files and looks again in {:.1f} s",
}


class Pace:
    """How long calls have been under way with none coming back."""

    def __init__(self, width: int) -> None:
        """width: calls that run at one time; when fewer hang, the others go on."""
        self.open = 0
        self._width = width
        self._since_s = 0.0

    def began(self, now_s: float) -> None:
        """One more."""
        if self.open == 0:
            self._since_s = now_s
        self.open += 1

    def ended(self, now_s: float) -> None:
        """One less."""
        self.open -= 1
        self._since_s = now_s

    def stalled_s(self, now_s: float) -> float:
        """Seconds without a result while there is as much to do as can be done at one time."""
        return now_s - self._since_s if self.open >= self._width else 0.0


class Health:
    """The state, why it is so, and when to try to leave it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loading = False
        self._read_only = ""  # why, "" for not
        self._off = ""
        self._row: list[int] = []  # extents whose reads have failed since one was good
        self._retry_s = self._retry_at_s = 0.0
        self._back_at_s = float("-inf")
        self._told = HealthState.OK

    @property
    def state(self) -> HealthState:
        """The first that holds of off, loading, read_only, ok."""
        if self._off:
            return HealthState.OFF
        if self._loading:
            return HealthState.LOADING
        return HealthState.READ_ONLY if self._read_only else HealthState.OK

    @property
    def reason(self) -> str:
        """Why it is off or read-only."""
        return self._off or self._read_only

    @property
    def online(self) -> bool:
        """Tell whether blocks can be read."""
        return not self._off

    @property
    def writable(self) -> bool:
        """Tell whether blocks can be written."""
        return not self._off and not self._read_only

    # What happens

    def read(self, extent: int, error: Exception | None, now_s: float, extents: int) -> None:
        """A read has ended; extents: that there are. One bad extent of several is not the disk."""
        if error is None:
            self._row.clear()
            return
        if _errno(error) in _FORBIDDEN:
            self.lost(f"reading failed: {error}", now_s)
            return
        self._row.append(extent)
        alone = len(set(self._row)) == 1 < extents
        if len(self._row) >= READ_ERRORS_MAX and not alone:
            self.lost(f"{len(self._row)} reads in a row failed: {error}", now_s)

    def write_failed(self, what: str, error: Exception, now_s: float) -> None:
        """A write, a commit, or whatever else changes the disk has failed."""
        if _errno(error) in _FORBIDDEN:
            self.lost(f"{what} failed: {error}", now_s)
        else:
            self.only_reads(f"{what} failed: {error}", now_s)

    def look_failed(self, error: Exception, now_s: float) -> None:
        """The directory could not be looked at."""
        if not scarce(error):
            self.lost(f"the directory cannot be used: {error}", now_s)

    def only_reads(self, reason: str, now_s: float) -> None:
        """Nothing can be written."""
        if not self._read_only:
            self._later(now_s)
            self._read_only = reason
            self._tell()

    def lost(self, reason: str, now_s: float) -> None:
        """Nothing can be read."""
        self._row.clear()
        if not self._off:
            self._later(now_s)
            self._off = reason
            self._tell()

    def loading(self, *, on: bool) -> None:
        """Records are being read, or all are in."""
        self._loading = on
        self._tell()

    # Coming back

    @property
    def due_at_s(self) -> float:
        """When it is time to try again."""
        return self._retry_at_s if self.reason else float("inf")

    def not_yet(self, reason: str, now_s: float) -> None:
        """It was tried in vain."""
        self._retry_at_s = now_s + self._retry_s
        if reason in (self._off, self._read_only):
            return
        if self._off:
            self._off = reason
        else:
            self._read_only = reason
        still, again_s = self.state.value, self._retry_s
        log.warning(
            "%s: still %s: %s; tries again every %.1f s", self._name, still, reason, again_s
        )

    def back(self, now_s: float) -> None:
        """It was tried, and works."""
        self._off = self._read_only = ""
        self._back_at_s = now_s
        self._tell()

    def _later(self, now_s: float) -> None:
        relapse = now_s - self._back_at_s < 2 * self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S) if relapse else RETRY_S
        self._retry_at_s = now_s + self._retry_s

    def _tell(self) -> None:
        """One line for each change of the state."""
        old, new = self._told, self.state
        if old is new:
            return
        self._told = new
        level = logging.ERROR if self.reason else logging.INFO
        why = f": {self.reason}" if self.reason else ""
        log.log(
            level, "%s: %s -> %s%s; %s",
            self._name, old.value, new.value, why, _NEXT[new].format(self._retry_s),
        )  # fmt: skip


def scarce(error: Exception) -> bool:
    """Tell whether this process or the system lacks something: it says nothing of the disk."""
    return _errno(error) in _SCARCE


def _errno(error: Exception) -> int | None:
    return error.errno if isinstance(error, OSError) else None
