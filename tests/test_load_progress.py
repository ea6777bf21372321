"""A load whose slots are filled while it is under way: what is copied, when, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from connectors.copies.host import Copying
from connectors.load_progress import LoadDeadline, SlotLoad
from connectors.step_meta import SLOT, EngineSpec, LoadJob, Moves

LEASED = 7


class Memory:
    """Slots' generations, and which of them were copied in which order."""

    def __init__(self, slots: int, generation: int = LEASED - 1) -> None:
        self.generations = [generation] * slots
        self.calls: list[list[int]] = []

    def copy(self, moves: Moves) -> Copying:
        self.calls.append(moves[:, SLOT].tolist())
        return Copying(len(moves))

    def now(self, slots: NDArray[np.int64]) -> NDArray[np.uint32]:
        return np.array([self.generations[slot] for slot in slots], np.uint32)


def load(slots: Sequence[int], per: int = 1, generation: int = LEASED) -> SlotLoad:
    blocks = tuple(range(len(slots) * per))
    spec = EngineSpec(blocks, (len(blocks),), (0,))
    job = LoadJob("r", 1, 1, spec, tuple(slots), (generation,) * len(slots))
    return SlotLoad(job, (per,), LoadDeadline(100, 1000, 0))


def test_what_is_ready_is_copied_in_one_call() -> None:
    memory = Memory(4, LEASED)
    work = load([3, 1, 2], per=2)
    assert work.advance(memory.copy, memory.now, 0)
    assert work.ok
    assert memory.calls == [[3, 3, 1, 1, 2, 2]]


def test_blocks_are_copied_as_their_slots_become_ready_each_once() -> None:
    memory = Memory(4)
    work = load([0, 1, 2, 3], per=2)
    assert not work.advance(memory.copy, memory.now, 0)
    assert memory.calls == []
    memory.generations[0] = memory.generations[2] = LEASED
    assert not work.advance(memory.copy, memory.now, 1)
    memory.generations[1] = LEASED
    assert not work.advance(memory.copy, memory.now, 2)
    memory.generations[3] = LEASED
    assert work.advance(memory.copy, memory.now, 3)
    assert memory.calls == [[0, 0], [1, 1, 2, 2], [3, 3]]
    assert work.ok
    assert work.copied_bytes == 8


def test_O15_slots_that_are_not_ready_in_time_fail_the_load_and_are_not_called_damaged() -> None:
    memory = Memory(3)
    memory.generations[0] = LEASED
    work = load([0, 1, 2])
    assert not work.advance(memory.copy, memory.now, 1)
    assert not work.advance(memory.copy, memory.now, 100)
    assert work.advance(memory.copy, memory.now, 101)
    assert not work.ok
    assert work.damaged == []
    assert work.late == 2


@pytest.mark.parametrize("generation", [LEASED + 1, LEASED - 2, 0])
def test_O15_a_slot_that_will_never_be_right_ends_the_load_at_once(generation: int) -> None:
    memory = Memory(3)
    memory.generations[2] = generation
    work = load([0, 1, 2])
    assert work.advance(memory.copy, memory.now, 0)
    assert not work.ok
    assert work.damaged == [2]
    assert memory.calls == []


def test_generations_go_round() -> None:
    memory = Memory(1, 0xFFFFFFFF)
    work = load([0], generation=0)
    assert not work.advance(memory.copy, memory.now, 0)
    memory.generations[0] = 0
    assert work.advance(memory.copy, memory.now, 1)
    assert work.ok
