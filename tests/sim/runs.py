"""Runs worlds of the simulation: one again, with its trace, or many, on all cores."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import msgspec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from kvstore.core.errors import InvariantBroken
from tests.harness import bugs
from tests.sim.faults import FAULTS, IMPOSSIBLE, STATES, never_met
from tests.sim.shrink import shrink
from tests.sim.world import Cut, World

CHUNK = 4  # worlds that a process is given at a time


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


def replay_command(seed: int, cut: Cut) -> str:
    given = msgspec.json.encode(cut).decode()
    return f"python -m tests.sim {seed}" + (f" --cut '{given}'" if cut != Cut() else "")


def replay(seed: int, cut: Cut | None = None) -> World:
    """Run a world. Raises what it broke, with the end of its trace."""
    world = World(seed, cut)
    try:
        with _calm(), bugs.escaping():
            world.run()
    except BaseException as error:
        trace = "\n".join(world.trace)
        error.add_note(f"{trace}\nseed {seed}: replay with {replay_command(seed, world.cut)}")
        error.add_note(f"{world.steps} steps, {world.fault_count} faults")
        raise
    return world


def attempt(seed: int, cut: Cut | None = None) -> Outcome:
    """Run a world in a process of many; return what it broke as text."""
    try:
        world = replay(seed, cut)
    except (Exception, InvariantBroken) as error:  # noqa: BLE001 - told with its seed
        frames = traceback.extract_tb(error.__traceback__)
        last = [frame for frame in frames if frame.name != "check"][-1]
        where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        return Outcome(seed, f"{where}: {error}", where)
    return Outcome(seed, "", "", world.counts, world.met, world.steps)


def attempts(seeds: range) -> Iterator[Outcome]:
    """Run many worlds on all cores; in the order of their seeds.

    The order of a set of strings is another in each process unless PYTHONHASHSEED is set.
    """
    context = multiprocessing.get_context("spawn")
    with (
        patch.dict(os.environ, PYTHONHASHSEED="0"),
        ProcessPoolExecutor(os.cpu_count(), context, gc.freeze) as pool,
    ):
        yield from pool.map(attempt, seeds, chunksize=CHUNK)


def cut_short(seed: int) -> tuple[Cut, str]:
    """Find a small part of a failing world that fails at the same place; return it as told."""
    where = attempt(seed).where
    if not where:
        return Cut(), f"seed {seed} breaks nothing"
    cut, tries = shrink(seed, lambda smaller: attempt(seed, smaller).where == where)
    told = attempt(seed, cut).error
    try:
        replay(seed, cut)
    except BaseException as error:  # noqa: BLE001 - shown as text
        told = "\n".join([told, *error.__notes__])
    return cut, f"{told}\nin {tries} tries cut to {cut}"


def table(met: Counter[tuple[str, str]], console: Console) -> None:
    """Print how often each fault met each state."""
    shown = Table("fault", *STATES, title="faults, by the state they met")
    for fault in FAULTS:
        cells = ("-" if (fault, s) in IMPOSSIBLE else f"{met[fault, s]:,}" for s in STATES)
        shown.add_row(fault, *cells)
    console.print(shown)


def campaign(first: int, count: int) -> int:
    """Run many worlds on all cores; return how many broke a promise, or 1 for a pair never met."""
    started_s, steps, broken = time.monotonic(), 0, list[int]()
    counts, met = Counter[str](), Counter[tuple[str, str]]()
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns) as progress:
        bar = progress.add_task("worlds", total=count)
        for outcome in attempts(range(first, first + count)):
            counts.update(outcome.counts)
            met.update(outcome.met)
            steps += outcome.steps
            progress.advance(bar)
            if outcome.error:
                broken.append(outcome.seed)
                progress.console.print(f"seed {outcome.seed}: {outcome.error}", markup=False)
    took_s = time.monotonic() - started_s
    table(met, Console(width=240))
    missed = never_met(met)
    events = ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()))
    sys.stdout.write(
        f"{events}\n{count} worlds, {steps:,} steps, {len(broken)} broken,"
        f" {len(missed)} pairs of fault and state never met, {count / took_s:.1f} seeds/s;"
        " python -m tests.sim SEED replays one\n"
    )
    for seed in broken[:1]:
        sys.stdout.write(f"{cut_short(seed)[1]}\n")
    return len(broken) or int(bool(missed) and count >= ENOUGH)


ENOUGH = 2000
"""Worlds after which every pair of fault and state has been met."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Simulated worlds.")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="the world, or the first")
    parser.add_argument("--seeds", type=int, help="run that many worlds, on all cores")
    parser.add_argument("--cut", default="{}", help="what to leave out of the world, as printed")
    parser.add_argument("--shrink", action="store_true", help="find the smallest that fails")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings in another order: another world
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]])  # noqa: S606
    if given.seeds is not None:
        sys.exit(campaign(given.seed, given.seeds) > 0)
    if given.shrink:
        sys.stdout.write(f"{cut_short(given.seed)[1]}\n")
        return
    cut = msgspec.json.decode(given.cut, type=Cut)
    sys.stdout.write(f"{dict(replay(given.seed, cut).counts)}\n")
