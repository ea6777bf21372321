"""`tests.bench waiting`: a long queue of prompts whose blocks are on a disk.

PROMPTS prompts are given to an engine at once, which answers SEQUENCES at a time. Their blocks are
on disk and take 50 times the memory that the store has, of which an engine may lease a quarter. If
requests of the queue took memory from each other blocks would be read more than once, or not at
all; if they waited for their turn in vain their prompts would be computed.

Three engines are alive at once: without a connector; with a store with a disk; and with one whose
lower tier takes SLOW_MS for each block, ten times as long as computing it. The latter has to cost
next to nothing.

Results: wall, by system. hit_share: of the tokens that could be hits. reads: of each block.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvstore.core.errors import check
from tests.bench.engine import Engine, Request, tiered
from tests.bench.models import make_model, prompt
from tests.bench.report import Result, compared, in_turn, measured, progress
from tests.bench.store import StoreProcess, numbers

PAIRS = 5
MODEL = "llama_s"
TOKEN_BYTES, BLOCK_TOKENS = 2048, 32
PROMPTS, TOKENS, SEQUENCES = 400, 1001, 4
BLOCKS = PROMPTS * (TOKENS // BLOCK_TOKENS)
BLOCK_BYTES = TOKEN_BYTES * BLOCK_TOKENS
MEMORY = 16 << 20
ENGINE_BYTES = 10 << 20  # five prompts
OUTPUT_TOKENS = 8
SLOW_MS = 25
SEED_FIRST = 140_000
ROOT = str(Path(__file__).parents[2])  # where the slow tier is
QUIET_S, WITHIN_S = 1.0, 120.0

NONE, DISK, SLOW = "none", "disk", "slow tier"
TIERS = {DISK: "nvme", SLOW: "slow"}


def run(pairs: int | None) -> list[Result]:
    """Measure; pairs: rounds after the one that computes and stores all."""
    rounds = (pairs or PAIRS) + 1
    walls: dict[str, list[float]] = defaultdict(list)
    hits: dict[str, list[float]] = defaultdict(list)
    reads: dict[str, list[float]] = defaultdict(list)
    requests = [Request(id=f"q{n}", tokens=prompt(SEED_FIRST + n, TOKENS)) for n in range(PROMPTS)]
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name,
        progress((rounds + 1) * 3) as tell,
        ExitStack() as stack,
    ):
        tell("making a model", 0)
        model = make_model(MODEL, Path(name))
        stores = {system: stack.enter_context(_store(Path(name), system)) for system in TIERS}
        engines = {}
        for system in (NONE, *TIERS):
            tell(f"starting engine: {system}")
            connector = tiered(store=stores[system].address) if system in stores else None
            settings = {"max_num_seqs": SEQUENCES, "max_model_len": 2 * TOKENS}
            engine = Engine(model, connector=connector, kv_cache_bytes=ENGINE_BYTES, extra=settings)
            engines[system] = stack.enter_context(engine)
        for number in range(rounds):
            for system in in_turn(list(engines), number):
                tell(f"round {number} of {rounds - 1}: {system}")
                engine, store = engines[system], stores.get(system)
                before = _read(store, system)
                began_s = time.perf_counter()
                answers = engine.run(requests, max_tokens=OUTPUT_TOKENS)
                took_s = time.perf_counter() - began_s
                engine.go_idle()
                check(engine.reset_prefix_cache(), "a block is still in use")
                if number:
                    walls[system].append(took_s)
                    cached = sum(answer.cached_tokens for answer in answers)
                    hits[system].append(cached / (BLOCKS * BLOCK_TOKENS))
                    reads[system].append((_read(store, system) - before) / BLOCKS)
                else:
                    _settle(store, system)
    return results(walls, hits, reads)


def _store(folder: Path, system: str) -> StoreProcess:
    own = folder / TIERS[system]
    own.mkdir()
    disk = f'[nvme]\npath = "{own}/kv"\ncapacity = {4 * BLOCKS * BLOCK_BYTES}\n'
    slow = (
        '[[tier]]\nname = "slow"\nclass = "tests.harness.paced_tier:PacedTier"\n'
        f"options = {{ block_ms = {SLOW_MS}, blocks = {2 * BLOCKS} }}\n"
    )
    text = disk if system == DISK else slow
    return StoreProcess(own, str(MEMORY), text, environment={"PYTHONPATH": ROOT})


def _read(store: StoreProcess | None, system: str, event: str = "loaded") -> float:
    """Count the blocks that a store has read from its lower tier, or written there."""
    if store is None:
        return 0.0
    return numbers(store.address).get(f"kvstore_tier_blocks{{{TIERS[system]},{event}}}", 0.0)


def _settle(store: StoreProcess | None, system: str) -> None:
    """Wait until nothing more is written down."""
    deadline_s, stored = time.monotonic() + WITHIN_S, -1.0
    while stored != (stored := _read(store, system, "stored")) and time.monotonic() < deadline_s:
        time.sleep(QUIET_S)


def results(
    walls: dict[str, list[float]], hits: dict[str, list[float]], reads: dict[str, list[float]]
) -> list[Result]:
    """Turn the rounds into results: medians, and ratios within rounds."""
    made = []
    for system, values in walls.items():
        how: dict[str, Any] = {"system": system, "prompts": PROMPTS, "pairs": len(values)}
        if system == NONE:
            made.append(measured("wall", values, "ms", how))
            continue
        how["hit_share"] = round(statistics.median(hits[system]), 3)
        how["reads"] = round(statistics.median(reads[system]), 3)
        made.append(compared("wall", values, walls[NONE], "ms", NONE, how))
    return made
