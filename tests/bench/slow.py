"""`tests.bench slow`: what blocks in a slow place cost an engine that would compute them sooner.

PROMPTS prompts are given to an engine one after the other. Their blocks are in a lower tier of its
store, or of another store whose engine has computed them. That tier takes 2 ms for each block,
which is 50 times what a disk of 2 GB/s takes, or 25 ms. The engine's own cache and its store's
memory hold fewer prompts than there are.

Of each place there are two engines: one loads in any case (`always_load`), the other compares with
what computing takes. All are compared with an engine without a connector, in turn.

Results: wall, by place, block_ms and always_load. hit_share: of the tokens that could be hits.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.core.errors import check
from tests.bench.engine import Engine, Request, tiered
from tests.bench.handover import HANDED
from tests.bench.models import make_model, prompt
from tests.bench.report import Result, compared, in_turn, measured, progress
from tests.bench.store import StoreProcess, numbers

PAIRS = 5
MODEL = "llama_s"
PROMPTS, TOKENS, BLOCK_TOKENS = 20, 1001, 32
BLOCKS = PROMPTS * (TOKENS // BLOCK_TOKENS)
MEMORY = 16 << 20  # eight prompts
ENGINE_BYTES = 10 << 20
OUTPUT_TOKENS = 8
SLOW_MS = (2, 25)
SEED_FIRST = 150_000
FIRST_ROUNDS = 2  # all is stored; and measured
ROOT = str(Path(__file__).parents[2])  # where the slow tier is

TIER, PEER = "tier", "peer"


class Case(NamedTuple):
    """An engine: where its prompts' blocks are, how slow that is, and whether it compares."""

    place: str
    block_ms: int
    always_load: bool


NONE = Case("none", 0, False)
Walls = dict[Case, list[float]]


def run(pairs: int | None) -> list[Result]:
    """Measure; pairs: rounds after the first two."""
    rounds = (pairs or PAIRS) + FIRST_ROUNDS
    walls: Walls = defaultdict(list)
    hits: Walls = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        folder = Path(name)
        with progress(1 + len(SLOW_MS) * (6 + 5 * rounds)) as tell:
            tell("making a model", 0)
            model = make_model(MODEL, folder)
            for block_ms in SLOW_MS:
                with ExitStack() as ends:
                    engines, requests = _start(folder, model, block_ms, ends, tell)
                    for number in range(rounds):
                        for case in in_turn(list(engines), number):
                            tell(f"round {number} of {rounds - 1}: {case.place}, {block_ms} ms")
                            wall_s, share = engines[case].run(requests[case.place])
                            if number >= FIRST_ROUNDS:
                                walls[case].append(wall_s)
                                hits[case].append(share)
    return results(walls, hits)


def _start(
    folder: Path,
    model: Path,
    block_ms: int,
    ends: ExitStack,
    tell: Any,
) -> tuple[dict[Case, _Side], dict[str, list[Request]]]:
    """Start engines and stores; return the engines, and the requests for each place."""
    attic = (
        '[[tier]]\nname = "attic"\nclass = "tests.harness.paced_tier:PacedTier"\n'
        f"options = {{ block_ms = {block_ms}, blocks = {2 * BLOCKS} }}\n"
    )

    def engine(what: str, more: str, **extra: Any) -> _Side:
        tell(f"starting engine: {what}, {block_ms} ms")
        connector = store = None
        if more:
            own = folder / f"{what} {block_ms}"
            own.mkdir()
            settings = f'policy = "lru"\n{more}'
            store = StoreProcess(own, str(MEMORY), settings, environment={"PYTHONPATH": ROOT})
            connector = tiered(store=ends.enter_context(store).address, **extra)
        made = Engine(
            model,
            connector=connector,
            kv_cache_bytes=ENGINE_BYTES,
            extra={"max_model_len": 2 * TOKENS},
        )
        return _Side(ends.enter_context(made), store)

    plain = [Request(id=f"q{n}", tokens=prompt(SEED_FIRST + n, TOKENS)) for n in range(PROMPTS)]
    prefill = engine("prefill", f"[peer]\n{attic}").engine
    computed = [Request(id=r.id, tokens=r.tokens, kv_transfer_params=HANDED) for r in plain]
    answers = [prefill.run([one], max_tokens=1)[0] for one in computed]
    prefill.go_idle()
    handed = [
        Request(id=r.id, tokens=r.tokens, kv_transfer_params=answer.kv_transfer_params)
        for r, answer in zip(plain, answers, strict=True)
    ]
    engines = {NONE._replace(block_ms=block_ms): engine("none", "")}
    for place, more in ((TIER, attic), (PEER, "[peer]\n")):
        for always in (True, False):
            case = Case(place, block_ms, always)
            what = f"{place}, {'always' if always else 'compares'}"
            engines[case] = engine(what, more, always_load=always)
    return engines, {NONE.place: plain, TIER: plain, PEER: handed}


class _Side:
    """An engine, and its store, if it has one."""

    def __init__(self, engine: Engine, store: StoreProcess | None) -> None:
        self.engine = engine
        self._store = store

    def run(self, requests: Sequence[Request]) -> tuple[float, float]:
        """Run all prompts one after the other; return the seconds, and the share of hits."""
        check(self.engine.reset_prefix_cache(), "a block is still in use")
        before = self._hit_tokens()
        began_s = time.perf_counter()
        for one in requests:
            self.engine.run([one], max_tokens=OUTPUT_TOKENS)
        took_s = time.perf_counter() - began_s
        self.engine.go_idle()
        return took_s, (self._hit_tokens() - before) / (BLOCKS * BLOCK_TOKENS)

    def _hit_tokens(self) -> float:
        found = {} if self._store is None else numbers(self._store.address)
        return sum(v for name, v in found.items() if name.startswith("kvstore_hit_tokens{"))


def results(walls: Walls, hits: Walls) -> list[Result]:
    """Turn the rounds into results: medians, and ratios within rounds."""
    made = []
    for case, values in walls.items():
        how: dict[str, Any] = {"place": case.place, "prompts": PROMPTS, "pairs": len(values)}
        if case.place == NONE.place:
            made.append(measured("wall", values, "ms", how | {"block_ms": case.block_ms}))
            continue
        how |= case._asdict() | {"hit_share": round(statistics.median(hits[case]), 3)}
        others = walls[NONE._replace(block_ms=case.block_ms)]
        made.append(compared("wall", values, others, "ms", NONE.place, how))
    return made
