"""Engines of four rank processes on one store process, and what a test does with them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic_ns

import msgspec
import pytest

from connectors.scheduler import SchedulerHalf
from connectors.store_client import StoreClient
from connectors.store_connection import Attacher
from kvstore.store import admin
from kvstore.wire import engine as p
from tests.bench.store import StoreProcess
from tests.harness.patience import WAIT_S
from tests.harness.rank_faults import Faults, faults_at
from tests.reference import Engine, Group, Request, Shape, State
from tests.reference.processes import ProcessRank, RankSpec, RankStarter, end_ranks

WORLD = 4
BLOCK_TOKENS = 8
BLOCKS = 5  # of a prompt, and one token more
# Without a prefix cache of its own: whatever was computed before is loaded.
SHAPE = Shape(
    groups=(Group(4),),
    block_tokens=BLOCK_TOKENS,
    blocks=41,
    world=WORLD,
    prefix_cache=False,
    token_bytes=16384,  # a slot of 512 KiB: there are few
)
CAPACITY = "16MiB"
SLOTS = 31
SETTINGS = '[engine]\nlease = "{lease}"\nleased = "100%"\ndefer = "50ms"\n'
CREDITS = 16
LOOK_S = 0.002


def wait_for(done: Callable[[], object], what: str, meanwhile: Callable[[], object]) -> None:
    """Wait until something holds, and do this meanwhile."""
    end_s = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > end_s:
            pytest.fail(f"not in {WAIT_S:.0f} s: {what}")
        meanwhile()


def doze() -> None:
    time.sleep(LOOK_S)


def prompt_of(number: int) -> list[int]:
    """Five blocks that no other number has, and a token."""
    made = random.Random(number)
    return [made.randrange(50) for _ in range(BLOCKS * BLOCK_TOKENS + 1)]


class Half(SchedulerHalf):
    """Keeps in mind on how many ranks each store job is over."""

    over: Counter[int]

    def on_output(
        self, stores_over: Mapping[int, int], loaded: Iterable[str], failed: Iterable[str]
    ) -> None:
        self.over.update(stores_over)
        super().on_output(stores_over, loaded, failed)


class RankedEngine:
    """One engine."""

    def __init__(
        self, starter: RankStarter, path: str, name: str, pages: Sequence[Path], shape: Shape
    ) -> None:
        """pages: of the ranks' faults."""
        self.name = name
        self.faults: list[Faults] = [faults_at(page) for page in pages]
        self.ranks: list[ProcessRank] = []
        self.counts: Counter[str] = Counter()  # of both halves
        self.shape = shape
        hello = p.Hello(p.VERSION, name, "scheduler", 0, WORLD, credit_slots=CREDITS)
        self.client = StoreClient(Attacher(lambda: path, hello), monotonic_ns)
        self.half = Half(
            shape.geometry,
            self.client,
            world=WORLD,
            shares_prefixes=shape.prefix_cache,
        )
        self.half.over = Counter()
        try:
            for rank, page in enumerate(pages):
                spec = RankSpec(name, "model", shape, rank, path, {"faults": str(page)})
                self.ranks.append(starter.start(spec))
                self.ranks[-1].report_s = WAIT_S
            self.engine = Engine(shape, self.half, self.ranks, random.Random(0), stopped=0.0)
            assert self.client.wait_attached(WAIT_S), f"{name} is not attached"
            self.catch_up()
        except BaseException:
            self.close()
            raise

    def close(self, *, wait_s: float = 0.0) -> None:
        """End all its processes, in order within wait_s. Safe to call twice."""
        self.half.shutdown()
        end_ranks(self.ranks, wait_s)

    # What the engine does

    def step(self) -> None:
        for output in self.engine.step():
            self.counts.update(output.connector)

    def step_until(self, done: Callable[[], object], what: str) -> None:
        wait_for(done, what, self.step)

    def add(self, name: str, number: int, new: int = 1) -> Request:
        """Queue a request for a prompt."""
        request = Request(name, prompt_of(number), new, self.shape)
        self.engine.add(request)
        return request

    def finish(self, *names: str) -> None:
        """Step until requests are gone."""
        open_ = self.engine.requests
        self.step_until(lambda: open_.keys().isdisjoint(names), f"{names} finished")

    def compute(self, number: int, name: str = "") -> int:
        """Run a prompt to its end; return how many of its tokens were loaded."""
        before, name = self.engine.counts["loaded_tokens"], name or f"p{number}"
        self.add(name, number)
        self.finish(name)
        return self.engine.counts["loaded_tokens"] - before

    def store(self, number: int) -> None:
        """Have a prompt's blocks in the store, all of them."""
        self.compute(number)
        wait_for(lambda: self.ready(number) == BLOCKS, f"{number} is stored", doze)

    def catch_up(self) -> None:
        """Wait for enough credits to store a prompt."""
        wait_for(lambda: len(self.client.credits) >= BLOCKS, "credits", self.hear)

    def hear(self) -> None:
        """Take in what the store says."""
        self.client.receive(LOOK_S)
        doze()

    def ready(self, number: int) -> int:
        """How many leading blocks of a prompt the store has, ready at this moment."""
        request = Request("asked", prompt_of(number), 1, self.shape)
        ends = range(BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS + 1, BLOCK_TOKENS)
        hashes = [request.hash_at(end) for end in ends]
        ask = self.client.ask(p.Lookup(0, b"".join(hashes), len(hashes[0])))
        assert ask, f"{self.name} is not attached"
        self.client.send_step()
        wait_for(lambda: self.client.grant(ask), "an answer", self.hear)
        grant = self.client.grant(ask)
        assert grant is not None
        self.client.drop(ask)
        self.client.send_step()
        return grant.hits[0].leading if grant.hits else 0

    def state(self, name: str) -> State | None:
        request = self.engine.requests.get(name)
        return None if request is None else request.state

    @property
    def all_free(self) -> bool:
        return self.engine.free_blocks == self.shape.blocks - 1

    def unreported(self, name: str) -> set[int]:
        """Ranks that have not reported a load as over."""
        return set(self.engine.book.reports._loads.get(name, ()))

    # What a rank does

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks]

    def hold(self, kind: int, *ranks: int) -> None:
        """Let the next copy of this kind stop half-way, on these ranks."""
        for rank in ranks:
            self.faults[rank].hold = kind

    def release(self) -> None:
        for faults in self.faults:
            faults.hold = 0

    def step_until_held(self, *ranks: int) -> None:
        self.step_until(lambda: all(self.faults[rank].held for rank in ranks), "copies held")


class Site:
    """A store process, and its engines."""

    def __init__(self, starter: RankStarter, folder: Path, lease: str = "3600s") -> None:
        self.store = StoreProcess(folder, CAPACITY, SETTINGS.format(lease=lease), scraped=False)
        self.engines: list[RankedEngine] = []
        self._starter, self._folder = starter, folder

    def engine(self, name: str, **changes: object) -> RankedEngine:
        """Start an engine and attach it."""
        path = self.store.address.removeprefix("unix://")
        number = len(self.engines)
        pages = [self._folder / f"faults-{number}-{rank}" for rank in range(WORLD)]
        shape = msgspec.structs.replace(SHAPE, **changes)
        made = RankedEngine(self._starter, path, name, pages, shape)
        self.engines.append(made)
        return made

    def gauge(self, name: str, label: str = "") -> int:
        """A number of the store, over all its other labels."""
        return sum(
            int(stat.value)
            for stat in admin.stats(self.store.address, timeout_s=WAIT_S)
            if stat.name == name and (not label or label in stat.labels.values())
        )

    def granted(self) -> int:
        return self.gauge("kvstore_slots", "granted")

    def wait(self, name: str, label: str, value: int) -> None:
        wait_for(lambda: self.gauge(name, label) == value, f"{name} {label} {value}", doze)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.store.stop()


@contextmanager
def site(starter: RankStarter, folder: Path, lease: str = "3600s") -> Iterator[Site]:
    made = Site(starter, folder, lease)
    try:
        made.store.__enter__()
        yield made
    finally:
        made.close()
