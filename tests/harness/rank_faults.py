"""A rank's side whose copies stop half-way, take their time, or lose their connection, when told.

The test and the rank share a page, which the rank's threads look at whatever they are doing.
Loaded into the rank's process by its name.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from connectors.copies.host import Copying, HostCopier, SlotMap
from connectors.step_meta import StepMeta
from kvstore.core.layout import Move
from tests.reference import WorkerResults
from tests.reference.processes import RankSpec
from tests.reference.rank_process import AttachedSide

SIDE = "tests.harness.rank_faults:FaultySide"
STORE, LOAD = 1, 2
LOOK_S = 0.001


class Faults(ctypes.Structure):
    """The page. hold: the kind of copies that stop half-way; held: it does.

    report_ms: passes before each report. copy_ms: in the middle of each copy. cut: the rank
    loses its connection to the store in its next step, and clears this. fencing: it is to end
    copies whose sources the step overwrites.
    """

    hold: int
    held: int
    report_ms: int
    copy_ms: int
    cut: int
    fencing: int

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("hold", "held", "report_ms", "copy_ms", "cut", "fencing")
    ]


def faults_at(path: Path) -> Faults:
    """Map the page that lies at a path."""
    with path.open("a+b") as file:
        file.truncate(mmap.PAGESIZE)
        return Faults.from_buffer(mmap.mmap(file.fileno(), mmap.PAGESIZE))


class FaultySide(AttachedSide):
    """The real side. This process is ours alone, so its copier is changed for good."""

    def __init__(self, spec: RankSpec, memory: bytearray) -> None:
        super().__init__(spec, memory)
        self._faults = faults = faults_at(Path(spec.options["faults"]))
        copy, before_step = HostCopier.copy, self.before_step

        def halting(
            copier: HostCopier,
            moves: Iterable[Move],
            slots: SlotMap,
            *,
            store: bool,
            after: int = 0,
        ) -> Copying:
            moves = list(moves)
            half = len(moves) // 2
            copied = copy(copier, moves[:half], slots, store=store, after=after)
            time.sleep(faults.copy_ms / 1000)
            while faults.hold == (STORE if store else LOAD):
                faults.held = 1
                time.sleep(LOOK_S)
            faults.held = 0
            rest = copy(copier, moves[half:], slots, store=store, after=after)
            return Copying(copied.bytes + rest.bytes)

        def fencing(meta: StepMeta) -> None:
            faults.fencing = bool(meta.flush)
            before_step(meta)
            faults.fencing = 0

        for owner, name, changed in ((HostCopier, "copy", halting),):
            setattr(owner, name, changed)
        self.before_step = fencing

    def results(self, meta: StepMeta) -> WorkerResults:
        if self._faults.cut and self.worker._link is not None:
            self._faults.cut = 0
            self.worker._link._sock.shutdown(socket.SHUT_RDWR)
        time.sleep(self._faults.report_ms / 1000)
        return super().results(meta)
