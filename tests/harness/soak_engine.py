"""A reference engine that works on a store until it is killed, on prompts that others have, too.

It compares every byte that it reads. A line tells of each round: how many tokens were loaded.
"""

from __future__ import annotations

import itertools
import random
import sys
from types import SimpleNamespace
from typing import cast

from tests.harness.handover_rig import node, prompt
from tests.harness.live import LiveStore
from tests.reference import Group, Shape

SHAPE = Shape(
    groups=(Group(16),), block_tokens=16, blocks=257, budget=512, hash_tokens=16, token_bytes=1024
)
SLOTS = 64  # credits: 1 MiB
FAMILIES = 40  # of prompts: 20 MiB
TOGETHER = 6  # prompts of a round


def main(path: str, name: str) -> None:
    """Work on the store at a socket, under a name."""
    rng = random.Random()
    store = cast("LiveStore", SimpleNamespace(path=path))
    with node(store, name, SHAPE, slots=SLOTS) as engine:
        for turn in itertools.count():
            families = [rng.randrange(FAMILIES) for _ in range(TOGETHER)]
            prompts = {
                f"{turn}.{n}": prompt(family, 512) + prompt((turn, n), rng.randrange(1, 40))
                for n, family in enumerate(families)
            }
            loaded = engine.run(prompts, 4, {})
            for known in (engine.half.given, engine.half.requests, engine.half.handed):
                known.clear()
            sys.stdout.write(f"loaded {sum(loaded.values())}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
