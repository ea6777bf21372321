"""`tests.bench gpu-ttft`: time to first token of a long prompt, by where its KV is.

A stand-in engine that computes with torch, our own connector halves in it, and a store process of
its own with memory and a disk. Each round has a prompt that nobody has seen: computed, again from
the engine's own cache, and from the store's memory when that cache was emptied; then the prompt of
two rounds before from disk, which others have pushed out of memory meanwhile. It is an error when
a prompt gives another token than before, when a block of its KV has another content, and when the
connector or the store counts a token for another source than the one that is measured.

What a hit in memory is measured against is one copy of as many bytes in one piece from pinned
memory, in the same round. The store's memory and what it is given in advance are all there before
the first round, so no round waits for memory to be pinned.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress

from kvstore.config import DISK_BYTES_MIN, HUGE_PAGE_BYTES
from kvstore.core.errors import KVStoreError, NotSupported
from kvstore.metrics import MEMORY, NVME
from kvstore.store import admin
from kvstore.units import GIB
from tests.bench.paged import Shape
from tests.bench.paged_engine import OWN, Answer, PagedEngine, Prompt, credit_blocks
from tests.bench.report import Result, paired_ratio
from tests.bench.store import StoreProcess

ROUNDS = 5
COLD, GPU_HIT, CPU_HIT, NVME_HIT = "ttft_cold", "ttft_gpu_hit", "ttft_cpu_hit", "ttft_nvme_hit"
SOURCES = {COLD: None, GPU_HIT: OWN, CPU_HIT: MEMORY, NVME_HIT: NVME}
# In prompts. A store gives a quarter of its memory in advance; what is left holds nearly two, so a
# prompt has left it when two others have come. On disk four others are used until it is asked for,
# two that were written and two that were read; what is left is for the index and the last extent.
MEMORY_PROMPTS = 2.5
ROUNDS_BEFORE = 2
DISK_PROMPTS = 7
GPU_PROMPTS = 4  # the engine's two, one for the copy in one piece, and what computing takes
FILL_S = 300.0  # memory is made and pinned at about a second for each GiB
AS_EXPECTED = ("stored", "loaded", "evicted")  # the disk is full after some rounds
SETTLE_S = 300.0  # a slow disk writes a prompt in that time
TOLD_S = 5.0
_LOOK_S = 0.02

Times = dict[str, list[float]]
"""Seconds by name, one value for each round."""


class Bus:
    """One copy in one piece, from pinned memory to the GPU: as fast as bytes can come."""

    def __init__(self, size: int, device: torch.device) -> None:
        """size: bytes. On a device in host memory it is a copy there."""
        self._cuda = device.type == "cuda"
        self._there = torch.empty(size, dtype=torch.uint8, device=device)
        self._here = torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)
        self._here.copy_(self._there.random_(0, 256))  # zeros may go faster

    def copy_s(self) -> float:
        """Return how long the copy takes, with nothing else under way."""
        self.quiet()
        begun = time.perf_counter()
        self._there.copy_(self._here, non_blocking=True)
        self.quiet()
        return time.perf_counter() - begun

    def quiet(self) -> None:
        """Wait until the device has nothing to do."""
        if self._cuda:
            torch.cuda.synchronize()


class Counts(msgspec.Struct, frozen=True):
    """What the store counted so far. memory: bytes that it holds, and may hold.

    lost: blocks that it could not store, here or on disk, or not read again.
    """

    stored: int
    on_disk: int
    lost: int
    hits: dict[str, int]
    memory: tuple[int, int]


def counts(address: str) -> Counts:
    """Ask the store."""
    hits, memory = {}, {"kvstore_memory_bytes": 0, "kvstore_capacity_bytes": 0}
    stored = on_disk = lost = 0
    for stat in admin.stats(address):
        labels, value = stat.labels, int(stat.value)
        if stat.name == "kvstore_hit_tokens" and value:
            hits[labels["tier"]] = value
        elif stat.name in memory and labels["tier"] == MEMORY:
            memory[stat.name] = value
        elif stat.name == "kvstore_stored_blocks":
            stored += value * (labels["outcome"] == "stored")
            lost += value * (labels["outcome"] != "stored")
        elif stat.name == "kvstore_tier_blocks" and labels["tier"] == NVME:
            on_disk += value * (labels["event"] == "stored")
            lost += value * (labels["event"] not in AS_EXPECTED)
    held, cap = memory.values()
    return Counts(stored, on_disk, lost, hits, (held, cap))


class Rounds:
    """One engine, one store, and the prompts so far."""

    def __init__(self, engine: PagedEngine, store: StoreProcess, bus: Bus) -> None:
        """Nothing has run yet."""
        self.times: Times = defaultdict(list)
        self._engine = engine
        self._address = store.address
        self._bus = bus
        self._answers: dict[int, Answer] = {}
        self._next = 1
        self._enough = engine.shape.prompt_blocks // 2

    def fill(self, tell: Callable[[str], None]) -> None:
        """Store prompts until the store holds all the memory that it may, and we our credits.

        Of these prompts some blocks find no slot: its memory grows while they come.
        """
        extent = extent_bytes(self._engine.shape)
        limit_s = time.monotonic() + FILL_S
        number = 0
        while time.monotonic() < limit_s:
            number += 1
            tell(f"filling the store: prompt {number}")
            self._engine.run(Prompt(self._engine.shape, -number))
            self._engine.end()
            held, cap = self._settle(0).memory
            self._engine.drop_cache()
            credits_held = len(self._engine.client.credits)
            if held + extent > cap and credits_held >= self._enough:
                return
        raise KVStoreError(
            f"after {FILL_S:.0f} s and {number} prompts the store holds {held} of {cap} bytes, the"
            f" engine {credits_held} free slots, expected {self._enough}"
        )

    def take(self, *, measured: bool) -> None:
        """Take a round; the first ones have no prompt from disk."""
        times: dict[str, float] = {}
        number, self._next = self._next, self._next + 1
        prompt = Prompt(self._engine.shape, number)
        for name in (COLD, GPU_HIT, CPU_HIT):
            times[name] = self._visit(name, number, prompt)
            if name != COLD:
                self._engine.drop_cache()
        times["copy"] = self._bus.copy_s()
        if number > ROUNDS_BEFORE:
            before = number - ROUNDS_BEFORE
            times[NVME_HIT] = self._visit(NVME_HIT, before, Prompt(self._engine.shape, before))
            self._engine.drop_cache()
            del self._answers[before]
        if measured:
            for name, seconds in times.items():
                self.times[name].append(seconds)

    def _visit(self, name: str, number: int, prompt: Prompt) -> float:
        """Run a prompt, see that its KV came from where it should, and return the seconds."""
        what, source, shape = f"{name}, prompt {number}", SOURCES[name], self._engine.shape
        served = {} if source is None else {source: shape.whole_tokens}
        before = counts(self._address)
        self._bus.quiet()
        answer = self._engine.run(prompt)
        _same(f"{what}: tokens by source, as the connector says", answer.sources, served)
        same_answer(what, answer, self._answers.setdefault(number, answer))
        self._settle(self._enough)  # what found no slot in time is offered at the end
        self._engine.end()
        served.pop(OWN, None)
        stored = before.stored + (shape.prompt_blocks if source is None else 0)
        hits = Counter(before.hits) + Counter(served)
        after = self._settle(self._enough, stored, hits.total())
        counted = dict(Counter(after.hits) - Counter(before.hits))
        _same(f"{what}: tokens by source, as the store says", counted, served)
        _same(f"{what}: blocks that were stored so far", after.stored, stored)
        _same(f"{what}: blocks that were lost so far", after.lost, before.lost)
        return answer.seconds

    def _settle(self, credits_min: int, stored: int = 0, hits: int = 0) -> Counts:
        """Wait until all that was offered is in the store's memory and on disk, and for credits.

        Wait a moment, too, for the store to count that many blocks and tokens: it hears of them
        beside our question.
        """
        limit_s, told_s = time.monotonic() + SETTLE_S, 0.0
        while True:
            self._engine.idle()
            found, now_s = counts(self._address), time.monotonic()
            credits_held = len(self._engine.client.credits)
            on_disk = not self._engine.storing and found.stored == found.on_disk
            if on_disk and credits_held >= credits_min:
                told_s = told_s or now_s + TOLD_S
                told = found.stored >= stored and sum(found.hits.values()) >= hits
                if told or now_s > told_s:
                    return found
            if now_s > limit_s:
                raise KVStoreError(
                    f"after {SETTLE_S:.0f} s {found.on_disk} of {found.stored} blocks are on disk,"
                    f" and {credits_held} slots are free, expected {credits_min}"
                )
            time.sleep(_LOOK_S)


def _same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise KVStoreError(f"{what}: {found}, expected {expected}")


def same_answer(what: str, answer: Answer, first: Answer) -> None:
    """Raise KVStoreError if a prompt's answer is another one than when it was computed."""
    pairs = zip(answer.fingerprint, first.fingerprint, strict=True)
    wrong = [block for block, (one, other) in enumerate(pairs) if one != other]
    if wrong:
        raise KVStoreError(
            f"{what}: {len(wrong)} of {len(first.fingerprint)} blocks are not as they were"
            f" computed, the first is {wrong[0]}"
        )
    if answer.token != first.token:
        raise KVStoreError(f"{what}: token {answer.token}, computed was {first.token}")


def extent_bytes(shape: Shape) -> int:
    """Return the unit that the store's memory grows by: half a prompt."""
    return max(1, shape.prompt_bytes // 2 // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def settings(shape: Shape, disk: Path) -> tuple[str, str]:
    """Return the capacity of the store's memory, and the other settings.

    Nothing that is to be measured may be cut short: a prompt is leased as a whole, all of it may
    wait for the disk, and all is written to it.
    """
    extent = extent_bytes(shape)
    capacity = int(MEMORY_PROMPTS * shape.prompt_bytes) // extent * extent
    on_disk = max(DISK_BYTES_MIN, DISK_PROMPTS * shape.prompt_bytes)
    credit = credit_blocks(shape) * shape.block_bytes
    return str(capacity), (
        f"extent = {extent}\n[engine]\ncredit = {credit}\n"
        'leased = "100%"\nlease = "5m"\npromote = "2m"\n'
        f'[nvme]\npath = "{disk}"\ncapacity = {on_disk}\nbacklog = "30m"\n'
    )


def measure(shape: Shape, rounds: int, device: torch.device, progress: Progress) -> list[Result]:
    """Measure on a device; the store's disk is a folder below the current one, gone after it."""
    task = progress.add_task("starting the store and the engine", total=ROUNDS_BEFORE + rounds)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name,
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=Path.cwd()) as disk,
        StoreProcess(Path(name), *settings(shape, Path(disk) / "kv"), scraped=False) as store,
        PagedEngine(store.address, shape, device) as engine,
    ):
        run_of = Rounds(engine, store, Bus(shape.prompt_bytes, device))
        run_of.fill(lambda text: progress.update(task, description=text))
        for number in range(ROUNDS_BEFORE + rounds):
            progress.update(task, description=f"round {number + 1} of {ROUNDS_BEFORE + rounds}")
            run_of.take(measured=number >= ROUNDS_BEFORE)
            progress.advance(task)
    return results(run_of.times, shape, device)


def results(times: Times, shape: Shape, device: torch.device) -> list[Result]:
    """Turn the rounds into results: medians, and ratios within rounds."""
    shown = torch.cuda.get_device_name(device) if device.type == "cuda" else "none, host memory"
    common: dict[str, object] = {
        "gpu": shown,
        "prompt_tokens": shape.whole_tokens + 1,
        "layers": shape.layers,
        "page_kib": shape.page_bytes / 1024,
        "blocks": shape.prompt_blocks,
        "pairs": len(times[COLD]),
    }
    beyond = [one - other for one, other in zip(times[CPU_HIT], times[GPU_HIT], strict=True)]
    rows: tuple[tuple[str, list[float], str], ...] = (
        (COLD, times[COLD], ""),
        (GPU_HIT, times[GPU_HIT], COLD),
        (CPU_HIT, times[CPU_HIT], "copy"),
        ("cpu_hit_beyond_gpu_hit", beyond, "copy"),
        (NVME_HIT, times[NVME_HIT], COLD),
    )
    found = []
    for name, values, against in rows:
        reference = ratio = None
        parameters = dict(common)
        if against:
            pair = paired_ratio(values, times[against])
            reference, ratio = statistics.median(times[against]) * 1000, pair.median
            parameters |= {
                "against": "one copy" if against == "copy" else against,
                "ratio_low": pair.low,
                "ratio_high": pair.high,
            }
        value = statistics.median(values)
        if name in (CPU_HIT, NVME_HIT):
            parameters["gib_s"] = round(shape.prompt_bytes / value / GIB, 2)
        found.append(
            Result(
                name=name,
                value=value * 1000,
                unit="ms",
                better="lower",
                reference=reference,
                ratio=ratio,
                parameters=parameters,
            )
        )
    return found


def run(rounds: int | None) -> list[Result]:
    """Measure on the first GPU. Raises NotSupported where there is none, or too small a one."""
    shape = Shape()
    if not torch.cuda.is_available():
        raise NotSupported(
            f"bench gpu-ttft needs a GPU that torch can use, torch is {torch.__version__}"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    for what, free, prompts in (
        ("the GPU", torch.cuda.mem_get_info(device)[0], GPU_PROMPTS),
        (str(Path.cwd()), shutil.disk_usage(Path.cwd()).free, DISK_PROMPTS),
    ):
        needed = prompts * shape.prompt_bytes
        if free < needed:
            raise NotSupported(
                f"{what}: {free / GIB:.1f} GiB free, the benchmark needs {needed / GIB:.0f}"
            )
    with Progress(console=Console(stderr=True), transient=True) as progress:
        return measure(shape, rounds or ROUNDS, device, progress)
