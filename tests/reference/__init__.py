"""A small engine after contract E, for simulation, tests and benchmarks.

It schedules as vLLM does and shows what vLLM on a CPU cannot: steps scheduled before the last
one's tokens are known, rejected drafts, many ranks. It has no model: the bytes of a token's KV
follow from the tokens up to it, so every attention read is compared with what must be there.

    shape, text   what kind of engine it is; tokens, and the bytes that follow from them
    requests      requests, and the work of one step
    pool, tables  engine blocks, and which of them a request has, by kind of KV group
    book          who waits, who runs, and what is let go of when
    scheduler     plans a step
    updates       takes in what came out of it
    ranks, device what the workers do in a step, and what they report
    attached      real worker halves for the ranks
    engine        steps, up to `batches` of them under way

Left out on purpose: encoder inputs, structured output, LoRA, draft models, pooling, logprobs.
"""

from tests.reference.connector import SchedulerSide, TieredWorker, WorkerResults, WorkerSide
from tests.reference.engine import Engine
from tests.reference.ranks import Rank
from tests.reference.requests import Request, State
from tests.reference.shape import Group, Shape
from tests.reference.stats import HitStats, Output
from tests.reference.text import VOCABULARY, block_bytes

__all__ = [
    "VOCABULARY",
    "Engine",
    "Group",
    "HitStats",
    "Output",
    "Rank",
    "Request",
    "SchedulerSide",
    "Shape",
    "State",
    "TieredWorker",
    "WorkerResults",
    "WorkerSide",
    "block_bytes",
]
