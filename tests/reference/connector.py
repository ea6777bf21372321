"""What the engine asks of a connector's two sides, and how the worker half answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from connectors.engine_interface import BlockTable, EngineRequest, Step
from connectors.events import BlockEvent
from connectors.step_meta import StepMeta


class SchedulerSide(Protocol):
    """The side that plans; connectors.scheduler.SchedulerHalf is one, and says more."""

    def on_new_request(self, request: EngineRequest) -> None: ...

    def get_num_new_matched_tokens(self, request_id: str, computed: int) -> tuple[int | None, bool]:
        """Answer how many tokens beyond `computed` can be loaded, and whether asynchronously.

        None: ask again later. An asynchronous load may bring all tokens, another all but one.
        """
        ...

    def update_state_after_alloc(
        self, request_id: str, table: BlockTable, external: int
    ) -> None: ...

    def hit_sources(self, request_id: str, external: int) -> Mapping[str, int]: ...

    def build_meta(self, step: Step) -> StepMeta: ...

    def on_output(
        self, stores_over: Mapping[int, int], loaded: Iterable[str], failed: Iterable[str]
    ) -> None: ...

    def step_load_failed(self) -> Sequence[int]:
        """Take it that the load in the last step failed; return what must not be found."""
        ...

    def request_finished(self, request_id: str, table: BlockTable) -> bool:
        """Let go of a request. True: its blocks are kept until it is reported as sent."""
        ...

    def has_pending_work(self) -> bool: ...

    def reset_cache(self, nonce: bytes) -> bool: ...

    def take_events(self) -> list[BlockEvent]: ...

    def take_stats(self) -> Mapping[str, int]: ...


class WorkerResults(msgspec.Struct, frozen=True):
    """What a rank's side has to say after a step; each fact once.

    ended: requests whose load is over; failed: which of them brought nothing. sent: finished
    requests whose blocks may go. invalid: engine blocks that a load left wrong, reported no
    later than the load's end. over: store jobs that ended.
    """

    ended: set[str] = set()
    failed: set[str] = set()
    sent: set[str] = set()
    invalid: set[int] = set()
    over: frozenset[int] = frozenset()
    stats: Mapping[str, int] = {}


class Copies(Protocol):
    """What a rank's side does in every step, in this order."""

    def before_step(self, meta: StepMeta) -> None:
        """End the copies whose sources this step overwrites."""
        ...

    def start_loads(self, meta: StepMeta) -> None:
        """Start asynchronous loads; do the others."""
        ...

    def after_forward(self, meta: StepMeta) -> None:
        """Start the copies of what this step has computed."""
        ...


class WorkerSide(Copies, Protocol):
    """The side that copies, one for each rank."""

    def results(self, meta: StepMeta) -> WorkerResults:
        """Report what ended since the last call."""
        ...


class CopyingHalf(Copies, Protocol):
    """What connectors.worker.WorkerHalf and its simulations have in common."""

    def finished_loads(self, meta: StepMeta) -> tuple[set[str], set[str]]:
        """Return requests whose load ended, and which failed."""
        ...

    def take_bad_blocks(self) -> set[int]:
        """Return engine blocks that loads in this step did not fill."""
        ...

    def take_stores_over(self) -> frozenset[int]: ...

    def take_stats(self) -> Counter[str]: ...


class TieredWorker:
    """A worker half under the engine's names."""

    def __init__(self, half: CopyingHalf) -> None:
        self.half = half
        self.before_step = half.before_step
        self.start_loads = half.start_loads
        self.after_forward = half.after_forward

    def results(self, meta: StepMeta) -> WorkerResults:
        """Report what ended; a load that fails does so as a whole."""
        ended, failed = self.half.finished_loads(meta)
        stats = {name: number for name, number in self.half.take_stats().items() if number}
        return WorkerResults(
            ended,
            failed,
            set(meta.sent),
            self.half.take_bad_blocks(),
            self.half.take_stores_over(),
            stats,
        )
