"""Eight engines on one store, killed and started again, while an operator changes its limits.

KVSTORE_SOAK_S=1200 for twenty minutes instead of two.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from kvstore.metrics import MEMORY, NVME
from kvstore.store import admin
from tests.bench.engine import Engine, EngineFailed, Request, Result
from tests.bench.store import StoreProcess
from tests.engine.identity import assert_same, divergences
from tests.engine.support import (
    TOKENS_OUT,
    assert_given_back,
    attach,
    eventually,
    families,
    numbers,
)
from tests.harness.nvme_blocks import disk_bytes
from tests.harness.prometheus import prometheus, queries

pytestmark = [pytest.mark.vllm, pytest.mark.long]

SECONDS = float(os.environ.get("KVSTORE_SOAK_S", "120"))
MIB = 1 << 20
MODELS = ("llama_s", "llama_s", "gemma3", "gemma3")
REFERENCES = 4
ROUNDS = 3  # of prompts, of each model
BETWEEN_S = 4.0  # an operator's acts
SOON_S = 120.0
MEMORY_SIZES = (64 * MIB, 96 * MIB, 128 * MIB)
DISK_SIZES = (96 * MIB, 192 * MIB)
QUOTAS = (None, 8 * MIB, 24 * MIB)
GROWTH_MAX = 24 * MIB  # of the store's own memory, from its first third to its last

Round = tuple[Sequence[Request], Sequence[Result]]  # prompts, and answers of an empty cache


class Right:
    """What an engine without connector makes of a model's prompts."""

    def __init__(self, emptied: Callable[[str], Engine], model: str) -> None:
        """emptied: of a model's name, such an engine with nothing in its cache."""
        self._emptied, self._model = emptied, model
        self._one_at_a_time = threading.Lock()
        prompts = [families(12, seed) for seed in range(70, 70 + ROUNDS)]
        self.rounds = [(some, emptied(model).run(some, max_tokens=TOKENS_OUT)) for some in prompts]

    def see(self, asked: Round, got: Sequence[Result]) -> None:
        """Fail unless all tokens are right, near ties apart.

        Where the computing of a prompt begins decides its rounding, too: what differs from the
        answer of an empty cache has to be the answer with as many tokens in the engine's own.
        """
        requests = {request.id: request for request in asked[0]}
        results = {result.id: result for result in got}
        found = [each.id for each in divergences(asked[1], got) if each.counts]
        for id_ in set(found) & set(results):
            again = self._answer(requests[id_], results[id_].cached_tokens)
            assert_same([again], [results.pop(id_)])
            del requests[id_]
        expected = [result for result in asked[1] if result.id in requests]
        assert_same(expected, list(results.values()))

    def _answer(self, request: Request, cached_tokens: int) -> Result:
        whole = msgspec.structs.replace(request, arrive_step=0)
        beginning = msgspec.structs.replace(whole, tokens=request.tokens[: cached_tokens + 1])
        with self._one_at_a_time:
            engine = self._emptied(self._model)
            if cached_tokens:
                engine.run([beginning], max_tokens=1)
            (found,) = engine.run([whole], max_tokens=TOKENS_OUT)
        assert found.cached_tokens == cached_tokens
        return found


class Member:
    """A vLLM engine that serves rounds of prompts over and over, and is started when it died."""

    def __init__(
        self, model: Path, store: StoreProcess, name: str, tenant: str, right: Right
    ) -> None:
        self.served = self.kills = 0
        self.failure: BaseException | None = None
        self._over = threading.Event()
        self._killed = False
        self._engine: Engine | None = None
        self._rng = random.Random(name)
        self._model, self._right = model, right
        self._connector = attach(store, tenant=tenant) | {"engine_id": name}
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._killed = False
                self._life()
        except BaseException as exc:  # noqa: BLE001 - the test tells it
            self.failure = exc

    def _life(self) -> None:
        try:
            with Engine(self._model, connector=self._connector) as engine:
                self._engine = engine
                while not self._over.is_set():
                    asked = self._rng.choice(self._right.rounds)
                    self._right.see(asked, engine.run(asked[0], max_tokens=TOKENS_OUT))
                    engine.go_idle()
                    engine.reset_prefix_cache()
                    self.served += 1
                self._engine = None
        except EngineFailed:
            if not self._killed:
                raise

    def kill(self) -> None:
        """Kill it, if it serves."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._killed = True
            self.kills += 1
            engine.kill("driver")

    def end(self) -> None:
        """End it in order, and tell what went wrong."""
        self._over.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure


class Small:
    """A reference engine in a process."""

    def __init__(self, store: StoreProcess, name: str, folder: Path) -> None:
        self.kills = 0
        self._command = [sys.executable, "-m", "tests.harness.soak_engine", store.path, name]
        self.log = folder / f"{name}.log"
        self._start()

    def _start(self) -> None:
        with self.log.open("ab") as sink:
            self._child = subprocess.Popen(self._command, stdout=sink, stderr=sink)

    def kill(self) -> None:
        """Kill it, and start it again."""
        self.end()
        self.kills += 1
        self._start()

    def end(self) -> None:
        assert self._child.poll() is None, self.log.read_text()
        self._child.kill()
        self._child.wait()

    @property
    def loaded(self) -> int:
        """Tokens that it has loaded in all."""
        lines = self.log.read_text().splitlines()
        return sum(int(line.removeprefix("loaded ")) for line in lines if line[:7] == "loaded ")


class Site:
    """The store, and an operator who changes its limits and looks whether they hold."""

    def __init__(self, store: StoreProcess, disk: Path) -> None:
        self._store, self._disk = store, disk
        self._process = psutil.Process(store.pid)
        self.own_bytes: list[int] = []
        self.caps = {MEMORY: MEMORY_SIZES[-1], NVME: DISK_SIZES[-1]}

    def resize(self, tier: str, size: int) -> None:
        """Change a tier's size, and wait until it is kept."""
        for _ in admin.resize(self._store.address, tier, size):
            pass
        self.caps[tier] = size

    def limit(self, tenant: str, tier: str, quota: int | None) -> None:
        """Change a quota, and wait until it is kept."""
        admin.set_quota(self._store.address, tenant, tier, quota)
        eventually(lambda: not self._beyond(), SOON_S)

    def _beyond(self) -> list[str]:
        """Tenants that have more than they may."""
        shares = admin.quotas(self._store.address)
        return [
            f"{each.tenant} in {each.tier}: {each.used_bytes} of {each.quota_bytes}"
            for each in shares
            if each.quota_bytes is not None and each.used_bytes > each.quota_bytes
        ]

    def look(self) -> None:
        """See that every limit holds."""
        memory = self._process.memory_info()
        self.own_bytes.append(memory.rss - memory.shared)
        assert disk_bytes(self._disk) <= self.caps[NVME]
        assert numbers(self._store.address)["kvstore_memory_bytes{cpu}"] <= self.caps[MEMORY]
        eventually(lambda: not self._beyond(), SOON_S)  # blocks that are being written count


@contextlib.contextmanager
def all_at_work(
    model: Callable[[str], Path],
    store: StoreProcess,
    folder: Path,
    plain: Callable[[str], Engine],
) -> Iterator[tuple[list[Member], list[Small]]]:
    """Run eight engines; those of a model have a tenant of their own."""
    right = {name: Right(plain, name) for name in dict.fromkeys(MODELS)}
    large = [
        Member(model(name), store, f"{name}-{at}", name.replace("_", "-"), right[name])
        for at, name in enumerate(MODELS)
    ]
    small = [Small(store, f"reference-{at}", folder) for at in range(REFERENCES)]
    try:
        eventually(lambda: all(member.served or member.failure for member in large))
        yield large, small
    finally:
        for one in small:
            one.end()
        for member in large:
            member.end()


def test_eight_engines_come_and_go_while_limits_change(
    model: Callable[[str], Path], tmp_path: Path, plain: Callable[[str], Engine]
) -> None:
    disk, rng = tmp_path / "kv", random.Random(22)
    settings = (
        f'extent = "8MiB"\n[nvme]\npath = "{disk}"\ncapacity = "192MiB"\nextent = "4MiB"\n'
        'write_budget = "10TiB"\n'
    )
    with (
        StoreProcess(tmp_path, "128MiB", settings) as store,
        prometheus(tmp_path, [store.metrics_port]) as watch,
    ):
        site = Site(store, disk)
        with all_at_work(model, store, tmp_path, plain) as (large, small):
            acts: list[Callable[[], object]] = [
                lambda: rng.choice(large).kill(),
                lambda: rng.choice(small).kill(),
                lambda: site.resize(MEMORY, rng.choice(MEMORY_SIZES)),
                lambda: site.resize(NVME, rng.choice(DISK_SIZES)),
                lambda: site.limit("llama-s", rng.choice((MEMORY, NVME)), rng.choice(QUOTAS)),
                lambda: site.limit("gemma3", rng.choice((MEMORY, NVME)), rng.choice(QUOTAS)),
            ]
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                rng.choice(acts)()
                site.look()
                time.sleep(rng.uniform(0, 2 * BETWEEN_S))
                assert not [member.failure for member in large if member.failure]
            site.look()
            for query in (query for query in queries() if "vllm:" not in query):
                assert any(not math.isnan(value) for _, value in watch.ask(query)), query
        assert_given_back(store.address)
        assert sum(each.kills for each in large)
        assert sum(each.kills for each in small)
        assert all(each.loaded for each in small)
        found = numbers(store.address)
        assert all(found[f"kvstore_hit_tokens{{{tier}}}"] for tier in (MEMORY, NVME))
        log = store.log_path.read_text(errors="replace")
        assert "Traceback" not in log
    third = len(site.own_bytes) // 3
    first, last = site.own_bytes[:third], site.own_bytes[-third:]
    assert statistics.median(last) - statistics.median(first) < GROWTH_MAX
