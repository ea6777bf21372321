"""Runs worlds of the simulation: one again, with its trace, or many, on all cores."""

from __future__ import annotations

import argparse
import gc
import logging
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from kvstore.core.errors import InvariantBroken
from tests.harness import bugs
from tests.sim import faults, fleet_faults
from tests.sim.fleet import Fleet
from tests.sim.shrink import shrink
from tests.sim.world import Cut, World

CHUNK = 4  # worlds that a process is given at a time


class Kind(msgspec.Struct, frozen=True):
    """What is simulated: one store with two engines, or several that hand over.

    given: the command's option. enough: worlds after which each fault has met each state; None:
    not known.
    """

    given: str
    make: type[World | Fleet]
    faults: Sequence[str]
    states: Sequence[str]
    impossible: Mapping[tuple[str, str], str]
    enough: int | None

    def never_met(self, met: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
        """List the pairs of fault and state that did not come about though they could."""
        pairs = ((fault, state) for fault in self.faults for state in self.states)
        return [pair for pair in pairs if pair not in self.impossible and not met[pair]]


STORE = Kind("", World, tuple(faults.FAULTS), tuple(faults.STATES), faults.IMPOSSIBLE, 2000)
FLEET = Kind(
    "--fleet ",
    Fleet,
    tuple(fleet_faults.FAULTS),
    tuple(fleet_faults.STATES),
    fleet_faults.IMPOSSIBLE,
    None,
)


class Outcome(msgspec.Struct):
    """What came of a world: what it broke, as text, or else what it met."""

    seed: int
    error: str = ""
    where: str = ""
    counts: Counter[str] = msgspec.field(default_factory=Counter)
    met: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    steps: int = 0


@contextmanager
def _calm() -> Iterator[None]:
    """No log, which would have thousands of faults, and no garbage collector."""
    level, collects = logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        logging.disable(level)
        if collects:
            gc.enable()
        gc.collect()


def replay_command(seed: int, cut: Cut, kind: Kind = STORE) -> str:
    given = msgspec.json.encode(cut).decode()
    command = f"python -m tests.sim {kind.given}{seed}"
    return command + (f" --cut '{given}'" if cut != Cut() else "")


def replay(seed: int, cut: Cut | None = None, kind: Kind = STORE) -> World | Fleet:
    """Run a world. Raises what it broke, with the end of its trace."""
    world = kind.make(seed, cut)
    try:
        with _calm(), bugs.escaping():
            world.run()
    except BaseException as error:
        trace = "\n".join(world.trace)
        error.add_note(f"{trace}\nseed {seed}: replay with {replay_command(seed, world.cut, kind)}")
        error.add_note(f"{world.steps} steps, {world.fault_count} faults")
        raise
    return world


def attempt(seed: int, cut: Cut | None = None, kind: Kind = STORE) -> Outcome:
    """Run a world in a process of many; return what it broke as text."""
    try:
        world = replay(seed, cut, kind)
    except (Exception, InvariantBroken) as error:  # noqa: BLE001 - told with its seed
        frames = traceback.extract_tb(error.__traceback__)
        last = [frame for frame in frames if frame.name != "check"][-1]
        where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        return Outcome(seed, f"{where}: {error}", where)
    return Outcome(seed, "", "", world.counts, world.met, world.steps)


def attempts(seeds: range, kind: Kind = STORE) -> Iterator[Outcome]:
    """Run many worlds on all cores; in the order of their seeds.

    The order of a set of strings is another in each process unless PYTHONHASHSEED is set.
    """
    context = multiprocessing.get_context("spawn")
    with (
        patch.dict(os.environ, PYTHONHASHSEED="0"),
        ProcessPoolExecutor(os.cpu_count(), context, gc.freeze) as pool,
    ):
        yield from pool.map(partial(attempt, kind=kind), seeds, chunksize=CHUNK)


def cut_short(seed: int, kind: Kind = STORE) -> tuple[Cut, str]:
    """Find a small part of a failing world that fails at the same place; return it as told."""
    where = attempt(seed, kind=kind).where
    if not where:
        return Cut(), f"seed {seed} breaks nothing"

    def fails(cut: Cut) -> bool:
        return attempt(seed, cut, kind).where == where

    cut, tries = shrink(partial(kind.make, seed), fails)
    told = attempt(seed, cut, kind).error
    try:
        replay(seed, cut, kind)
    except BaseException as error:  # noqa: BLE001 - shown as text
        told = "\n".join([told, *error.__notes__])
    return cut, f"{told}\nin {tries} tries cut to {cut}"


def table(met: Counter[tuple[str, str]], console: Console, kind: Kind) -> None:
    """Print how often each fault met each state."""
    shown = Table("fault", *kind.states, title="faults, by the state they met")
    for fault in kind.faults:
        pairs = ((fault, state) for state in kind.states)
        shown.add_row(
            fault, *("-" if pair in kind.impossible else f"{met[pair]:,}" for pair in pairs)
        )
    console.print(shown)


def campaign(first: int, count: int, kind: Kind = STORE) -> int:
    """Run many worlds on all cores; return how many broke a promise, or 1 for a pair never met."""
    started_s, steps, broken = time.monotonic(), 0, list[int]()
    counts, met = Counter[str](), Counter[tuple[str, str]]()
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("worlds", total=count)
        for outcome in attempts(range(first, first + count), kind):
            counts.update(outcome.counts)
            met.update(outcome.met)
            steps += outcome.steps
            progress.advance(bar)
            if outcome.error:
                broken.append(outcome.seed)
                progress.console.print(f"seed {outcome.seed}: {outcome.error}", markup=False)
    took_s = time.monotonic() - started_s
    table(met, Console(width=240), kind)
    missed = kind.never_met(met)
    events = ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()))
    sys.stdout.write(
        f"{events}\n{count} worlds, {steps:,} steps, {len(broken)} broken,"
        f" {len(missed)} pairs of fault and state never met, {count / took_s:.1f} seeds/s;"
        f" python -m tests.sim {kind.given}SEED replays one\n"
    )
    for seed in broken[:1]:
        sys.stdout.write(f"{cut_short(seed, kind)[1]}\n")
    return len(broken) or int(bool(missed) and count >= (kind.enough or math.inf))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Simulated worlds.")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="the world, or the first")
    parser.add_argument("--seeds", type=int, help="run that many worlds, on all cores")
    parser.add_argument("--cut", default="{}", help="what to leave out of the world, as printed")
    parser.add_argument("--fleet", action="store_true", help="several stores that hand over")
    parser.add_argument("--shrink", action="store_true", help="find the smallest that fails")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings in another order: another world
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]])  # noqa: S606
    kind = FLEET if given.fleet else STORE
    if given.seeds is not None:
        sys.exit(campaign(given.seed, given.seeds, kind) > 0)
    if given.shrink:
        sys.stdout.write(f"{cut_short(given.seed, kind)[1]}\n")
        return
    cut = msgspec.json.decode(given.cut, type=Cut)
    sys.stdout.write(f"{dict(replay(given.seed, cut, kind).counts)}\n")
