"""Runs worlds of the simulation: one again, with its trace, or many, on all cores."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress

from kvstore.errors import InvariantBroken
from tests.sim import World


def replay(seed: int) -> Counter[str]:
    """Run a world. Raises what it broke, with the end of its trace."""
    world = World(seed)
    try:
        world.run()
    except BaseException as error:
        trace = "\n".join(world.trace)
        error.add_note(f"{trace}\nseed {seed}: replay with python -m tests.sim {seed}")
        raise
    return world.counts


def attempt(seed: int) -> tuple[int, str, Counter[str]]:
    """Run a world in a process of many; return what it broke as text."""
    logging.disable(logging.CRITICAL)
    try:
        return seed, "", replay(seed)
    except (Exception, InvariantBroken) as error:  # noqa: BLE001 - told with its seed
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return seed, f"{type(error).__name__}: {error} ({where})", Counter()


def campaign(first: int, count: int) -> int:
    """Run many worlds on all cores; return how many broke a promise."""
    started_s, counts, broken = time.monotonic(), Counter[str](), 0
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with ProcessPoolExecutor() as pool, Progress(*columns) as progress:
        bar = progress.add_task("worlds", total=count)
        for seed, error, met in pool.map(attempt, range(first, first + count), chunksize=4):
            counts.update(met)
            progress.advance(bar)
            if error:
                broken += 1
                progress.console.print(f"seed {seed}: {error}", markup=False)
    took_s = time.monotonic() - started_s
    events = ", ".join(f"{name} {number:,}" for name, number in sorted(counts.items()))
    sys.stdout.write(
        f"{events}\n{count} worlds, {broken} broken, {count / took_s:.1f} seeds/s;"
        " python -m tests.sim SEED replays one\n"
    )
    return broken


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description="Simulated worlds.")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="the world, or the first")
    parser.add_argument("--seeds", type=int, help="run that many worlds, on all cores")
    given = parser.parse_args()
    if given.seeds is not None:
        sys.exit(campaign(given.seed, given.seeds) > 0)
    logging.disable(logging.CRITICAL)
    sys.stdout.write(f"{dict(replay(given.seed))}\n")
