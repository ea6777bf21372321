"""How long the engine computes a token of a prompt, measured by its steps.

A step begins when it was scheduled and the one before has ended, and ends with its output. Its time
is a line over its tokens; what counts for one more token is how steep that is. A step that only
decodes says nothing of it: there a token takes many times as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from kvstore.core.limits import BLOCK_NS_MAX
from kvstore.core.pace import Pace

_KEPT_TOKENS = 32_768  # what was computed so many tokens ago counts a third
_SHARE_MAX = 0.25
_KNOWN_TOKENS = 512  # before, too little was computed
_PROMPT_TOKENS = 32  # of one request in a step: it decodes fewer
_AHEAD_MAX = 8  # steps


class ComputePace:
    """Takes the time of an engine's steps."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """clock: nanoseconds that never go back."""
        self._clock = clock
        self._pace = Pace()
        self._tokens = 0
        self._under_way: deque[tuple[int, int]] = deque()  # when scheduled, tokens; 0: not measured
        self._ended_ns = 0  # the last step

    def began(self, scheduled: Collection[int]) -> None:
        """A step was scheduled, with so many tokens of each request; without any: no output."""
        if scheduled:
            if len(self._under_way) >= _AHEAD_MAX:
                self._under_way.clear()
            tokens = sum(scheduled) if max(scheduled) >= _PROMPT_TOKENS else 0
            self._under_way.append((self._clock(), tokens))

    def ended(self) -> None:
        """The output of a step is here."""
        now_ns = self._clock()
        if self._under_way:
            scheduled_ns, tokens = self._under_way.popleft()
            seconds = (now_ns - max(scheduled_ns, self._ended_ns)) / 1e9
            if tokens:
                self._pace.note(tokens, seconds, min(_SHARE_MAX, tokens / _KEPT_TOKENS))
            self._tokens += tokens
        self._ended_ns = now_ns

    def block_ns(self, block_tokens: int) -> int:
        """Return how long the engine computes a block, in ns; 0: that is not known yet."""
        if self._tokens < _KNOWN_TOKENS:
            return 0
        _, each_s, _ = self._pace.line
        return min(BLOCK_NS_MAX, int(each_s * block_tokens * 1e9))
