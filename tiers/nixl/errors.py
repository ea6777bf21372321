"""How a transfer can fail."""

from __future__ import annotations

from typing import Literal

from kvstore.core.errors import TierIOError

ErrorClass = Literal["gone", "refused", "stopped", "failed"]
"""The peer was lost; it was asked for wrongly; nobody waited for the rest; anything else."""


class MoveError(TierIOError):
    """What a transfer ends with."""

    def __init__(self, text: str, error: ErrorClass, *, begun: bool = False) -> None:
        """text: in words. begun: some of it may have been moved."""
        super().__init__(text)
        self.error: ErrorClass = error
        self.begun = begun
