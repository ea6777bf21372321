"""Copies as tests write them, in lists of Move, and as copiers take them, in rows of an array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from connectors.step_meta import Moves
from kvstore.core.layout import Move


def rows(moves: Sequence[Move]) -> Moves:
    found = [(move.group, move.block_id, move.slot, move.part) for move in moves]
    return np.array(found, np.int64).reshape(len(moves), 4)


def listed(moves: Moves) -> list[Move]:
    return [Move(*row) for row in moves.tolist()]
