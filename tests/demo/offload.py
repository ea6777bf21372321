"""`make demo`: a real vLLM engine loses its KV blocks and gets them back from a store.

Four long prompts run five times: cold, again (the engine's own prefix cache), after that cache
was emptied (our CPU tier), in a new engine on the same store, and after the store was restarted,
too (our NVMe tier). The exit status is 0 only if all outputs are identical and every token came
from where it had to.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
from rich.console import Console

from kvstore.core.errors import KVStoreError
from kvstore.units import sized
from tests.bench.engine import Engine, Request, Result, tiered
from tests.bench.models import make_model, prompt
from tests.bench.store import StoreProcess
from tests.demo.stage import Demo, table

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


class Offload(Demo):
    """One engine after the other on one store after the other."""

    def __init__(self, console: Console, folder: Path) -> None:
        super().__init__(console, folder)
        self.passes: list[Pass] = []
        self.metrics: dict[str, float] = {}  # of the stores, at the end

    def run(self) -> None:
        """Run all prompts five times."""
        self.say("making a random 4-layer model on disk")
        model = make_model("llama_s", self.folder)
        disk = f'[nvme]\npath = "{self.folder}/kv"\ncapacity = "{DISK_CAPACITY}"\n'
        self.say(
            f"starting a store: kvstore serve, {CAPACITY} of CPU memory, {DISK_CAPACITY} of disk"
        )
        with StoreProcess(self.folder, CAPACITY, disk) as store:
            self.say("starting a vLLM engine attached to it (5 to 20 s)")
            with _engine(model, store) as engine:
                self._pass(engine, "cold", COLD)
                self._pass(engine, "again", FROM_GPU)
                engine.go_idle()  # copies that the last steps started come to their end
                stored = 'kvstore_stored_blocks_total{outcome="stored"}'
                self.wait(
                    lambda: store.metrics().get(stored, 0) >= STORED_BLOCKS,
                    "blocks to be stored",
                    SETTLE_S,
                )
                self.say("emptying the engine's prefix cache")
                if not engine.reset_prefix_cache():
                    raise KVStoreError("some engine blocks are still in use")
                self._pass(engine, "after reset", FROM_CPU)
            self.say("the engine has ended; starting another on the same store")
            with _engine(model, store) as engine:
                self._pass(engine, "after engine restart", FROM_CPU)
                engine.go_idle()
            found = store.metrics()
            self.say("the store ends, too, and starts again with what is on disk")
        with StoreProcess(self.folder, CAPACITY, disk) as store:
            with _engine(model, store) as engine:
                self._pass(engine, "after store restart", FROM_NVME)
                engine.go_idle()
            for name, value in store.metrics().items():  # counters of both lives together
                found[name] = value + (found.get(name, 0) if "_total" in name else 0)
        self.metrics = found

    def _pass(self, engine: Engine, name: str, expected: Served) -> None:
        self.say(f"{len(PROMPT_SEEDS)} prompts of {PROMPT_TOKENS:,} tokens, {name}")
        before = engine.metrics()
        results = []
        with self.console.status(name) as status:
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

    def problems(self) -> list[str]:
        """Compare what came from where, outputs, and what the store counted."""
        found = []
        for one in self.passes:
            if one.served != one.expected:
                found.append(f"{one.name}: tokens came from {one.served}, expected {one.expected}")
            if one.identical(self.passes[0]) != len(one.results):
                found.append(f"{one.name}: outputs differ from the cold run's")
        for tier in ("cpu", "nvme"):
            hits = self.metrics.get(f'kvstore_hit_tokens_total{{tier="{tier}"}}', 0)
            expected = sum(getattr(one.expected, tier) for one in self.passes)
            if hits != expected:
                found.append(
                    f"the store counted {hits:.0f} hit tokens of {tier}, expected {expected}"
                )
        return found

    def show(self) -> None:
        """Print the passes, and what the store counted."""
        self.console.print(
            f"{len(PROMPT_SEEDS)} prompts of {PROMPT_TOKENS:,} tokens: median time to first token,"
            " and where their tokens' KV came from"
        )
        shown = table(["run"], ["TTFT", "GPU", "CPU", "NVMe", "computed"], "outputs")
        for one in self.passes:
            same, count = one.identical(self.passes[0]), len(one.results)
            outputs = "same" if same == count else f"{count - same} of {count} DIFFER"
            shown.add_row(
                one.name,
                f"{one.ttft_s * 1000:.1f} ms",
                *(f"{count:,}" for count in msgspec.structs.astuple(one.served)),
                "-" if one is self.passes[0] else outputs,
            )
        self.console.print(shown)
        self.console.print("from the store's /metrics, what is not 0:")
        for name, value in self.metrics.items():
            if value and name.startswith(SHOWN_METRICS):
                unit = f"  ({sized(int(value))})" if "bytes" in name else ""
                self.console.print(f"  {name} {value:,.0f}{unit}", highlight=False)


def _engine(model: Path, store: StoreProcess) -> Engine:
    return Engine(model, connector=tiered(store=store.address), block_size=BLOCK_TOKENS)
