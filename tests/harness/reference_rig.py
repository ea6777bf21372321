"""A reference engine whose connector says what the test wants."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import cast

import msgspec

from connectors.engine_interface import BlockTable, EngineRequest, Step
from connectors.events import BlockEvent
from connectors.scheduler import SchedulerHalf
from connectors.step_meta import StepMeta
from tests.reference import (
    Engine,
    Group,
    Output,
    Rank,
    Request,
    Shape,
    State,
    TieredWorker,
    WorkerResults,
    block_bytes,
)

FULL = Shape(groups=(Group(4),), block_tokens=4, blocks=41, budget=100)


def but(**changes: object) -> Shape:
    return msgspec.structs.replace(FULL, **changes)


class Script:
    """The scheduler's side: answers by request, and a record of every call."""

    def __init__(self) -> None:
        self.answers: dict[str, deque[tuple[int | None, bool]]] = {}
        self.asked: list[tuple[str, int]] = []
        self.allocated: list[tuple[str, int]] = []
        self.steps: list[Step] = []
        self.outputs: list[tuple[list[str], set[str]]] = []
        self.ended: dict[str, list[list[int]]] = {}
        self.delays: set[str] = set()
        self.loads: list[tuple[str, int, int, list[list[int]]]] = []  # first, end, table
        self.resets: list[bytes] = []
        self.events: list[BlockEvent] = []
        self.stats: Counter[str] = Counter()
        self._computed: dict[str, int] = {}

    def on_new_request(self, request: EngineRequest) -> None:
        self.answers.setdefault(request.request_id, deque())

    def get_num_new_matched_tokens(self, request_id: str, computed: int) -> tuple[int | None, bool]:
        self.asked.append((request_id, computed))
        self._computed[request_id] = computed
        answers = self.answers[request_id]
        return answers.popleft() if answers else (0, False)

    def update_state_after_alloc(self, request_id: str, table: BlockTable, external: int) -> None:
        self.allocated.append((request_id, external))
        if external:
            first = self._computed[request_id]
            rows = [list(row) for row in table]
            self.loads.append((request_id, first, first + external, rows))

    def hit_sources(self, _request_id: str, external: int) -> Mapping[str, int]:
        return {"cpu": external}

    def build_meta(self, step: Step) -> StepMeta:
        tables = {name: step.table(name) for name in step.scheduled}
        kept = {name: [list(row) for row in table] for name, table in tables.items()}
        self.steps.append(
            Step(dict(step.scheduled), list(step.written), kept.__getitem__, step.preempted)
        )
        return StepMeta()

    def on_output(
        self, _stores_over: Mapping[int, int], loaded: Iterable[str], failed: Iterable[str]
    ) -> None:
        self.outputs.append((list(loaded), set(failed)))

    def step_loads_failed(self, _blocks: AbstractSet[int]) -> AbstractSet[int]:
        return set()

    def request_finished(self, request_id: str, table: BlockTable) -> bool:
        self.ended[request_id] = [list(row) for row in table]
        return request_id in self.delays

    def has_pending_work(self) -> bool:
        return False

    def reset_cache(self, nonce: bytes) -> bool:
        self.resets.append(nonce)
        return True

    def take_events(self) -> list[BlockEvent]:
        events, self.events = self.events, []
        return events

    def take_stats(self) -> Mapping[str, int]:
        stats, self.stats = self.stats, Counter()
        return stats


class Side(TieredWorker):
    """A rank's side: reports what the test has put down for the next step."""

    def __init__(self) -> None:
        self.next = WorkerResults()
        self.before_step = self.start_loads = self.after_forward = lambda meta: None  # noqa: ARG005

    def results(self, _meta: StepMeta) -> WorkerResults:
        results, self.next = self.next, WorkerResults()
        return results


class Rig:
    """An engine, and what a test does with it."""

    def __init__(
        self, shape: Shape = FULL, *, accepted: float = 1.0, stopped: float = 0.0, seed: int = 0
    ) -> None:
        self.shape = shape
        self.script = Script()
        self.sides = [Side() for _ in range(shape.world)]
        self.ranks = [Rank(shape, rank, side) for rank, side in enumerate(self.sides)]
        self.engine = Engine(
            shape,
            cast("SchedulerHalf", self.script),
            self.ranks,
            random.Random(seed),
            accepted=accepted,
            stopped=stopped,
        )
        self.tokens: dict[str, list[int]] = {}

    def add(
        self,
        name: str,
        tokens: int | Sequence[int],
        new: int = 1,
        *answers: tuple[int | None, bool],
        priority: int = 0,
    ) -> Request:
        """Queue a request. tokens: a prompt, or its length (its own first token then)."""
        prompt = [len(self.tokens) + 1] * tokens if isinstance(tokens, int) else tokens
        request = Request(name, prompt, new, self.shape, priority)
        self.script.answers[name] = deque(answers)
        self.tokens[name] = []
        self.engine.add(request)
        return request

    def step(self, *, expect: dict[str, int] | None = None) -> Output | None:
        """Make a step; expect: the tokens that it schedules."""
        outputs = self.engine.step()
        for output in outputs:
            for name, tokens in output.tokens.items():
                self.tokens[name] += tokens
        if expect is not None:
            assert dict(self.script.steps[-1].scheduled) == expect
        return outputs[-1] if outputs else None

    def output(self, *, expect: dict[str, int] | None = None) -> Output:
        """Make a step that ends within it."""
        made = self.step(expect=expect)
        assert made is not None
        return made

    def run(self, steps: int = 200) -> list[Output]:
        """Step until all is done."""
        found: list[Output] = []
        for _ in range(steps):
            if self.engine.idle:
                return found
            output = self.step()
            if output is not None:
                found.append(output)
        raise AssertionError(f"{[(r, q.state) for r, q in self.engine.requests.items()]} remain")

    def fill(self, number: int = -1) -> None:
        """Do what a load that was planned has to: put its bytes where they belong."""
        name, first, end, table = self.script.loads[number]
        request = self.engine.requests[name]
        for rank in self.ranks:
            for group, kind in enumerate(self.shape.groups):
                for index in range(first // kind.tokens, -(-end // kind.tokens)):
                    block = table[group][index]
                    if block:
                        data = block_bytes(self.shape, request.text, group, rank.number, index)
                        at = block * self.shape.page_bytes
                        rank.memory[at : at + len(data)] = data

    def report(self, results: WorkerResults, *ranks: int) -> None:
        """Let ranks report this in the next step; all by default."""
        for rank in ranks or range(self.shape.world):
            self.sides[rank].next = results

    def load_over(self, name: str, *, failed: bool = False) -> None:
        self.report(WorkerResults({name}, {name} if failed else set()))

    def states(self) -> dict[str, State]:
        return {name: request.state for name, request in self.engine.requests.items()}

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.engine.book.waiting]

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.engine.book.running]

    @property
    def all_free(self) -> bool:
        return self.engine.free_blocks == self.shape.blocks - 1


def loading(shape: Shape = FULL, *later: tuple[int | None, bool]) -> Rig:
    """A request of 17 tokens loads 16. later: what is said when it is looked up again."""
    rig = Rig(shape)
    rig.add("a", 17, 1, (16, True), *later)
    rig.step()
    return rig
