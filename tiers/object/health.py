"""Whether a bucket is used, from what its requests come back with. Decides; sends nothing.

state      runs are         comes from                             ends with
---------  ---------------  -------------------------------------  ----------------------------
ok         read, written    any other
read_only  read             a put that was refused (no right,      a put that succeeds; one is
                            quota), or several in a row failed     tried after RETRY_S
off        misses, and no   a read that was refused, or several    a request that is answered;
           request is made  in a row failed or were not answered   one is made after RETRY_S
                            in time

Off goes before read_only. Each trial that fails doubles the time until the next one. Each kind of
request has a row of its own: where questions are answered and objects do not come, a trial that is
answered lets one be read, and doubles that time, too, if it does not come.
"""

from __future__ import annotations

import logging
from collections import Counter

log = logging.getLogger(__name__)

RETRY_S = 5.0
RETRY_MAX_S = 60.0
FAILURES_MAX = 3  # in a row
HEAD, GET, PUT = "head", "get", "put"
OK, MISSING, REFUSED, CORRUPT = "ok", "missing", "refused", "corrupt"
FAILED = ("timeout", "error")


class _Switch:
    """Something that is used until it fails, and tried again later."""

    def __init__(self, name: str, state: str, means: str) -> None:
        """state: while it is not used; means: what that costs."""
        self.reason = ""  # why it is not used, "" if it is
        self._name, self._state, self._means = name, state, means
        self._rows: Counter[str] = Counter()  # failures, by what was asked for
        self._retry_s = RETRY_S
        self._retry_at_s = 0.0

    def good(self, verb: str) -> None:
        """A request was answered."""
        del self._rows[verb]
        if not self._rows:
            self._retry_s = RETRY_S
        if self.reason:
            self.reason = ""
            log.info("the bucket %s is not %s any more", self._name, self._state)

    def bad(self, verb: str, why: str, now_s: float, *, at_once: bool) -> None:
        """A request failed. at_once: others will, too."""
        self._rows[verb] += 1
        if self.reason:
            self.reason = why
        elif at_once or self._rows[verb] >= FAILURES_MAX:
            self.reason, self._retry_at_s = why, now_s + self._retry_s
            log.error("the bucket %s is %s: %s; %s", self._name, self._state, why, self._means)

    def due(self, now_s: float) -> bool:
        """Tell whether a request may be made."""
        return not self.reason or now_s >= self._retry_at_s

    def may_try(self, now_s: float) -> bool:
        """Tell whether a request may be made, which is a trial if it is not used."""
        due = self.due(now_s)
        if due and self.reason:
            self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
            self._retry_at_s = now_s + self._retry_s
        return due


class Health:
    """The state of a bucket."""

    def __init__(self, name: str) -> None:
        self.reads = _Switch(name, "off", "its blocks are misses; it is tried again and again")
        self.writes = _Switch(name, "read_only", "nothing is put; it is tried again and again")

    @property
    def state(self) -> str:
        """Return ok, read_only or off."""
        return "off" if self.off else "read_only" if self.writes.reason else "ok"

    @property
    def off(self) -> bool:
        """Tell whether no request is to be made."""
        return bool(self.reads.reason)

    def ended(self, verb: str, outcome: str, why: str, now_s: float) -> None:
        """A request has ended; what a put finds missing is the bucket."""
        switch = self.writes if verb == PUT else self.reads
        if outcome in ((OK,) if verb == PUT else (OK, MISSING, CORRUPT)):
            switch.good(verb)
        elif outcome in (REFUSED, MISSING, *FAILED):
            switch.bad(verb, why, now_s, at_once=outcome not in FAILED)
