"""A small engine after contract E, for simulation, tests and benchmarks.

It schedules as vLLM does and shows what vLLM on a CPU cannot: steps scheduled before the last
one's tokens are known, rejected drafts, many ranks. It has no model: the bytes of a token's KV
follow from the tokens up to it, so every attention read is compared with what must be there.

    shape, text   what kind of engine it is; tokens, and the bytes that follow from them
    requests      requests, the work of one step, and what comes out of it
    pool, tables  engine blocks, and which of them a request has, by kind of KV group
    book          who waits, who runs, and what is let go of when
    scheduler     plans a step
    updates       takes in what came out of it
    ranks, device what the workers do in a step, and what they report
    connector     worker halves for the ranks, real ones too
    engine        steps, up to `batches` of them under way

Left out on purpose: encoder inputs, structured output, LoRA, draft models, pooling, logprobs.
"""

from tests.reference.connector import TieredWorker, WorkerResults, attached
from tests.reference.engine import Engine
from tests.reference.ranks import Rank
from tests.reference.requests import HitStats, Output, Request, State
from tests.reference.shape import Group, Shape
from tests.reference.text import VOCABULARY, block_bytes

__all__ = [
    "VOCABULARY",
    "Engine",
    "Group",
    "HitStats",
    "Output",
    "Rank",
    "Request",
    "Shape",
    "State",
    "TieredWorker",
    "WorkerResults",
    "attached",
    "block_bytes",
]
