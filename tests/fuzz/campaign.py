"""Millions of wrong messages, on all cores: `python -m tests.fuzz --messages 10000000`.

Each world has a seed; one that fails is printed with its seed, its last input and the command that
runs it again.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from tests.fuzz.world import MIB, World

WORLD = 100_000  # messages
GROWN_MAX = 24 * MIB


def play(seed: int, messages: int) -> Counter[str]:
    """Run one world. Raises Failed."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    gc.collect()
    try:
        world = World(seed)
        world.run(messages)
    finally:
        logging.disable(level)
    assert world.counts["grown"] < GROWN_MAX, f"seed {seed}: {world.counts['grown']} bytes more"
    return world.counts


def _attempt(task: tuple[int, int]) -> tuple[Counter[str], str]:
    try:
        return play(*task), ""
    except BaseException:  # noqa: BLE001 - of any kind: that is what is looked for
        return Counter(), traceback.format_exc()


def attempts(first: int, messages: int, world: int = WORLD) -> Iterator[tuple[Counter[str], str]]:
    """Run worlds on all cores; yield what each counted, or what it broke."""
    tasks = [
        (first + number, min(world, messages - at))
        for number, at in enumerate(range(0, messages, world))
    ]
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        yield from pool.map(_attempt, tasks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run worlds, with a bar; 1 if any was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, help="of one world, which is run here")
    parser.add_argument("--first", type=int, default=0, help="seed of the first of many worlds")
    given = parser.parse_args(arguments)
    if given.seed is not None:
        sys.stdout.write(f"{dict(play(given.seed, min(given.messages, WORLD)))}\n")
        return 0
    console, total, broken = Console(stderr=True), Counter[str](), 0
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as bar:
        task = bar.add_task("messages", total=given.messages)
        for counts, error in attempts(given.first, given.messages):
            broken += bool(error)
            if error:
                console.print(error, markup=False)
            grown = max(total["grown"], counts.pop("grown", 0))
            total.update(counts)
            total["grown"] = grown
            bar.advance(task, counts["messages"])
    sys.stdout.write(", ".join(f"{n} {what}" for what, n in sorted(total.items())) + "\n")
    return 1 if broken else 0
