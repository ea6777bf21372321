"""`tests.bench load`: what users feel when many sessions share an engine with little memory.

SESSIONS users talk in TURNS turns: a turn is what was said so far, the engine's own words included,
and NEW_TOKENS more, and is answered with OUTPUT_TOKENS. Each user says the next thing once the
answer is there, so all are always there, and an engine answers as many at a time as its own memory
has room for, a seventh of all. By a session's next turn its blocks have left that memory.

Seven engines, one for each system, are alive at once, and have the same sessions in a round, one
after the other: without a connector; likewise, with room for all sessions in its own memory, which
is the limit of what a cache can save; vLLM's own offloading, and ours, with room for all in CPU
memory; ours with room for an eighth and a disk for all; and both with room for what is 1.8 times
too much. Each round has sessions that are new.

Results: wall, ttft_mean, ttft_p99 and output_tokens_per_s, each by system. unlike: answers that
differ from those without a connector where the best two tokens were no near tie, up to a session's
first difference.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.bench.engine import Engine, tiered
from tests.bench.engine import Result as Answer
from tests.bench.models import make_model, prompt
from tests.bench.native import native_config
from tests.bench.report import Result, compared, in_turn, measured, percentile, progress
from tests.bench.store import StoreProcess

PAIRS = 5
MODEL = "llama_s"
TOKEN_BYTES = 2048
SESSIONS, TURNS = 35, 4
NEW_TOKENS, OUTPUT_TOKENS = 480, 32
SESSION_TOKENS = TURNS * (NEW_TOKENS + OUTPUT_TOKENS)
SESSION_BYTES = SESSION_TOKENS * TOKEN_BYTES
ALL_BYTES = SESSIONS * SESSION_BYTES
ENGINE_BYTES = ALL_BYTES // 7
ROOM_BYTES = ALL_BYTES * 5 // 4  # blocks of the round before leave as those of this one come
LITTLE_BYTES = ALL_BYTES // 8
PRESSED_BYTES = int(ALL_BYTES / 1.8)
EXTENT = "extent = 4194304\n"  # in large extents less of the memory would be used
SEED_FIRST = 120_000
NEAR_TIE = 0.05  # logprob; what other orders of addition make of these models

NONE, LIMIT, NATIVE, OURS, DISK = "none", "limit", "native", "ours", "ours with a disk"
NATIVE_PRESSED, OURS_PRESSED = "native, pressed", "ours, pressed"
AGAINST = {
    NATIVE: NONE,
    LIMIT: NATIVE,
    OURS: NATIVE,
    DISK: NATIVE,
    NATIVE_PRESSED: NONE,
    OURS_PRESSED: NATIVE_PRESSED,
}
WALL, MEAN, P99, RATE = "wall", "ttft_mean", "ttft_p99", "output_tokens_per_s"

Numbers = dict[tuple[str, str], list[float]]
"""Seconds, or tokens per second, by (name, system): one value for each round."""


def run(pairs: int | None) -> list[Result]:
    """Measure; pairs: rounds after the first, which warms up."""
    rounds = (pairs or PAIRS) + 1
    found: Numbers = defaultdict(list)
    unlike: dict[str, int] = dict.fromkeys(AGAINST, 0)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name,
        progress((rounds + 1) * (len(AGAINST) + 1)) as tell,
        ExitStack() as stack,
    ):
        tell("making a model", 0)
        model = make_model(MODEL, Path(name))
        engines = {}
        for system, connector in _systems(Path(name), stack).items():
            tell(f"starting engine: {system}")
            settings = {"max_num_seqs": SESSIONS // 7, "max_model_len": SESSION_TOKENS}
            own = ROOM_BYTES if system == LIMIT else ENGINE_BYTES
            engine = Engine(model, connector=connector, kv_cache_bytes=own, extra=settings)
            engines[system] = stack.enter_context(engine)
        for number in range(rounds):
            sessions = _sessions(number)
            answers = {}
            for system in in_turn(list(engines), number):
                tell(f"round {number} of {rounds - 1}: {system}")
                began_s = time.perf_counter()
                answers[system] = engines[system].converse(sessions, max_tokens=OUTPUT_TOKENS)
                took_s = time.perf_counter() - began_s
                engines[system].go_idle()
                if number:
                    _note(found, system, took_s, answers[system])
            for system in unlike:
                unlike[system] += _unlike(answers[NONE], answers[system])
    return results(found, unlike)


def _systems(folder: Path, stack: ExitStack) -> dict[str, dict[str, Any] | None]:
    """Start our stores; return the connector configuration of each system."""
    stores = {
        OURS: (ROOM_BYTES, 0),
        DISK: (LITTLE_BYTES, 2 * ROOM_BYTES),
        OURS_PRESSED: (PRESSED_BYTES, 0),
    }
    made: dict[str, dict[str, Any] | None] = {
        NONE: None,
        LIMIT: None,
        NATIVE: native_config(ROOM_BYTES),
        NATIVE_PRESSED: native_config(PRESSED_BYTES),
    }
    for number, (system, (cpu_bytes, disk_bytes)) in enumerate(stores.items()):
        own = folder / f"store{number}"
        own.mkdir()
        disk = f'[nvme]\npath = "{own}/kv"\ncapacity = {disk_bytes}\n' if disk_bytes else ""
        store = stack.enter_context(StoreProcess(own, str(cpu_bytes), EXTENT + disk))
        made[system] = tiered(store=store.address)
    return {system: made[system] for system in (NONE, *AGAINST)}


def _sessions(number: int) -> list[list[list[int]]]:
    """Return what each user says in each turn of a round."""
    first = SEED_FIRST + number * SESSIONS * TURNS
    return [
        [prompt(first + session * TURNS + turn, NEW_TOKENS) for turn in range(TURNS)]
        for session in range(SESSIONS)
    ]


def _note(found: Numbers, system: str, took_s: float, answers: Sequence[Sequence[Answer]]) -> None:
    waits_s = [turn.ttft_s for session in answers for turn in session if turn.ttft_s is not None]
    tokens = sum(len(turn.tokens) for session in answers for turn in session)
    found[WALL, system].append(took_s)
    found[MEAN, system].append(statistics.fmean(waits_s))
    found[P99, system].append(percentile(waits_s, 0.99))
    found[RATE, system].append(tokens / took_s)


def _unlike(ours: Sequence[Sequence[Answer]], others: Sequence[Sequence[Answer]]) -> int:
    """Count the sessions whose first difference is at a token that was no near tie."""
    count = 0
    for one, other in zip(ours, others, strict=True):
        pairs = ((a, b) for a, b in zip(one, other, strict=True) if a.tokens != b.tokens)
        for a, b in pairs:
            at = next(n for n, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y)
            count += min(a.margins[at], b.margins[at]) > NEAR_TIE
            break
    return count


def results(found: Numbers, unlike: Mapping[str, int]) -> list[Result]:
    """Turn the rounds into results: medians, and ratios within rounds."""
    made = []
    for (name, system), values in sorted(found.items()):
        unit = "tokens/s" if name == RATE else "ms"
        how: dict[str, Any] = {"system": system, "sessions": SESSIONS, "pairs": len(values)}
        if system in unlike:
            how["unlike"] = unlike[system]
        against = AGAINST.get(system)
        if against is None:
            made.append(measured(name, values, unit, how))
        else:
            made.append(compared(name, values, found[name, against], unit, against, how))
    return made
