"""`make demo`: a real vLLM engine loses its KV blocks and gets them back from a store.

Four long prompts run five times: cold, again (the engine's own prefix cache), after that cache
was emptied (our CPU tier), in a new engine on the same store, and after the store was restarted,
too (our NVMe tier). The exit status is 0 only if all outputs are identical and every token came
from where it had to.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvstore.core.errors import KVStoreError
from kvstore.units import sized
from tests.bench.engine import Engine, Request, Result, tiered
from tests.bench.models import make_model, prompt
from tests.bench.store import StoreProcess, end_as_interrupted

CAPACITY = "256MiB"
DISK_CAPACITY = "512MiB"
PROMPT_TOKENS = 4000
OUTPUT_TOKENS = 8
BLOCK_TOKENS = 32
# Where these four prompts continue, the second best token is at least 0.56 behind in logits:
# rounding, which differs between a short and a long forward pass, cannot turn it.
PROMPT_SEEDS = (178, 237, 285, 298)
SETTLE_S = 20.0

ALL = len(PROMPT_SEEDS) * PROMPT_TOKENS
# Full blocks, but never the one with the last token: a prompt's last token is always computed.
REUSABLE = len(PROMPT_SEEDS) * ((PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
STORED_BLOCKS = len(PROMPT_SEEDS) * (PROMPT_TOKENS // BLOCK_TOKENS)
SHOWN_METRICS = (
    "kvstore_lookup_tokens_total",
    "kvstore_hit_tokens_total",
    "kvstore_stored_blocks_total",
    "kvstore_tier_blocks_total",
    "kvstore_copied_bytes_total",
    "kvstore_memory_bytes",
    "kvstore_capacity_bytes",
)


class Served(msgspec.Struct, frozen=True):
    """Prompt tokens by where their KV came from."""

    gpu: int = 0
    cpu: int = 0
    nvme: int = 0
    computed: int = ALL - REUSABLE


COLD = Served(computed=ALL)
FROM_GPU = Served(gpu=REUSABLE)
FROM_CPU = Served(cpu=REUSABLE)
FROM_NVME = Served(nvme=REUSABLE)


class Pass(msgspec.Struct, frozen=True):
    """All prompts, once."""

    name: str
    expected: Served
    served: Served
    results: list[Result]

    @property
    def ttft_s(self) -> float:
        """Median time to first token."""
        return statistics.median(result.ttft_s or 0.0 for result in self.results)

    def identical(self, other: Pass) -> int:
        """Count the prompts with the same output tokens in both."""
        pairs = zip(self.results, other.results, strict=True)
        return sum(mine.tokens == theirs.tokens for mine, theirs in pairs)


class Demo:
    """The run, with what it says on the way."""

    def __init__(self, console: Console, folder: Path) -> None:
        self.passes: list[Pass] = []
        self._console = console
        self._folder = folder
        self._started_s = time.monotonic()

    def run(self) -> dict[str, float]:
        """Do everything; return the store's metrics at the end."""
        self._say("making a random 4-layer model on disk")
        model = make_model("llama_s", self._folder)
        disk = f'[nvme]\npath = "{self._folder}/kv"\ncapacity = "{DISK_CAPACITY}"\n'
        self._say(
            f"starting a store: kvstore serve, {CAPACITY} of CPU memory, {DISK_CAPACITY} of disk"
        )
        with StoreProcess(self._folder, CAPACITY, disk) as store:
            self._say("starting a vLLM engine attached to it (5 to 20 s)")
            with self._engine(model, store) as engine:
                self._pass(engine, "cold", COLD)
                self._pass(engine, "again", FROM_GPU)
                self._settle(engine, store)
                self._say("emptying the engine's prefix cache")
                if not engine.reset_prefix_cache():
                    raise KVStoreError("some engine blocks are still in use")
                self._pass(engine, "after reset", FROM_CPU)
            self._say("the engine has ended; starting another on the same store")
            with self._engine(model, store) as engine:
                self._pass(engine, "after engine restart", FROM_CPU)
                engine.go_idle()
            found = store.metrics()
            self._say("the store ends, too, and starts again with what is on disk")
        with StoreProcess(self._folder, CAPACITY, disk) as store:
            with self._engine(model, store) as engine:
                self._pass(engine, "after store restart", FROM_NVME)
                engine.go_idle()
            for name, value in store.metrics().items():  # counters of both lives together
                found[name] = value + (found.get(name, 0) if "_total" in name else 0)
        return found

    def _say(self, text: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._started_s:5.1f} s[/dim]  {text}")

    def _engine(self, model: Path, store: StoreProcess) -> Engine:
        connector = tiered(store=store.address)
        return Engine(model, connector=connector, block_size=BLOCK_TOKENS)

    def _pass(self, engine: Engine, name: str, expected: Served) -> None:
        self._say(f"{len(PROMPT_SEEDS)} prompts of {PROMPT_TOKENS:,} tokens, {name}")
        before = engine.metrics()
        results = []
        with self._console.status(name) as status:
            for number, seed in enumerate(PROMPT_SEEDS, start=1):
                status.update(f"prompt {number} of {len(PROMPT_SEEDS)}")
                request = Request(id=f"{name} {number}", tokens=prompt(seed, PROMPT_TOKENS))
                results += engine.run([request], max_tokens=OUTPUT_TOKENS)
        after = engine.metrics()

        def tokens(source: str, of: str = "prompt_tokens_cached_by_source") -> int:
            key = f"{of}{{source={source}}}"
            return int(after.get(key, 0) - before.get(key, 0))

        computed = tokens("local_compute", of="prompt_tokens_by_source")
        served = Served(tokens("device"), tokens("host"), tokens("disk"), computed)
        self.passes.append(Pass(name, expected, served, results))

    def _settle(self, engine: Engine, store: StoreProcess) -> None:
        """Let copies that the last steps started come to their end."""
        engine.go_idle()
        _wait(lambda: _stored(store.metrics()) >= STORED_BLOCKS, "blocks to be stored")


def _stored(metrics: dict[str, float]) -> float:
    return metrics.get('kvstore_stored_blocks_total{outcome="stored"}', 0)


def _wait(done: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + SETTLE_S
    while not done():
        if time.monotonic() > deadline_s:
            raise KVStoreError(f"waited {SETTLE_S:.0f} s for {what}")
        time.sleep(0.05)


def problems(passes: list[Pass], metrics: dict[str, float]) -> list[str]:
    """Say what is not as it has to be; empty when all is well."""
    found = []
    for one in passes:
        if one.served != one.expected:
            found.append(f"{one.name}: tokens came from {one.served}, expected {one.expected}")
        if one.identical(passes[0]) != len(one.results):
            found.append(f"{one.name}: outputs differ from the cold run's")
    for tier in ("cpu", "nvme"):
        hits = metrics.get(f'kvstore_hit_tokens_total{{tier="{tier}"}}', 0)
        expected = sum(getattr(one.expected, tier) for one in passes)
        if hits != expected:
            found.append(f"the store counted {hits:.0f} hit tokens of {tier}, expected {expected}")
    return found


def show(console: Console, passes: list[Pass], metrics: dict[str, float]) -> None:
    """Print what happened."""
    console.print(
        f"{len(PROMPT_SEEDS)} prompts of {PROMPT_TOKENS:,} tokens: median time to first token,"
        " and where their tokens' KV came from"
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", no_wrap=True)
    for heading in ("TTFT", "GPU", "CPU", "NVMe", "computed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("outputs", no_wrap=True)
    for one in passes:
        same, count = one.identical(passes[0]), len(one.results)
        outputs = "same" if same == count else f"{count - same} of {count} DIFFER"
        table.add_row(
            one.name,
            f"{one.ttft_s * 1000:.1f} ms",
            *(f"{count:,}" for count in msgspec.structs.astuple(one.served)),
            "-" if one is passes[0] else outputs,
        )
    console.print(table)
    console.print("from the store's /metrics, what is not 0:")
    for name, value in metrics.items():
        if value and name.startswith(SHOWN_METRICS):
            unit = f"  ({sized(int(value))})" if "bytes" in name else ""
            console.print(f"  {name} {value:,.0f}{unit}", highlight=False)


def main() -> int:
    """Run the demo; 0 only if everything is as promised."""
    end_as_interrupted()
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as name:
        tempfile.tempdir = name  # engines' logs too
        demo = Demo(console, Path(name))
        try:
            metrics = demo.run()
        except KVStoreError as exc:
            console.print(f"the demo failed: {exc}", markup=False)
            return 1
        except KeyboardInterrupt:
            console.print("interrupted; engine and store were ended")
            return 130
    console.print()
    show(console, demo.passes, metrics)
    wrong = problems(demo.passes, metrics)
    for line in wrong:
        console.print(f"WRONG: {line}", markup=False)
    if not wrong:
        console.print("all outputs identical, all tokens from where they had to come")
    return 1 if wrong else 0
