"""The store's disk is pulled away and given back under a real engine, which keeps serving."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.bench.engine import Engine, Request, Result
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.engine.identity import assert_same
from tests.engine.support import (
    TOKENS_OUT,
    attach,
    eventually,
    forget,
    grown,
    meanwhile,
    numbers,
    servable,
)
from tests.harness.faults import Call, Faults
from tests.harness.loopfs import loop_disk

pytestmark = pytest.mark.vllm

MEMORY = "16MiB"  # 255 blocks of 32 tokens
PROMPTS, TOKENS = 10, 1000  # 310 blocks
EXTERNAL = "external_prefix_cache_hits"
FROM_DISK = "prompt_tokens_cached_by_source{source=disk}"
STORED = "kvstore_tier_blocks{nvme,stored}"
PULL_S = 0.3  # after the engine has begun to run
BACK_S = 120.0
TIMES = 2

Away = Callable[[], AbstractContextManager[object]]  # the disk is away within it
Place = tuple[Path, Mapping[str, str], Away]  # folder of the tier, environment of its store


@contextmanager
def pulled_mount(tmp_path: Path, _library: Path) -> Iterator[Place]:
    with loop_disk(tmp_path) as disk:

        @contextmanager
        def away() -> Iterator[None]:
            disk.pull()
            yield
            assert list(disk.folder.iterdir()) == [], "written to where the disk should be"
            disk.mount()

        yield disk.folder / "kv", {}, away


@contextmanager
def failing_calls(tmp_path: Path, library: Path) -> Iterator[Place]:
    folder = tmp_path / "disk"
    folder.mkdir()
    faults = Faults(library, tmp_path / "control", folder)
    yield folder / "kv", faults.environment, lambda: faults.of(Call.ALL, error=errno.EIO)


class Held:
    """An engine, and the outputs that it gave when nothing was wrong."""

    def __init__(self, engine: Engine, store: StoreProcess) -> None:
        self.engine, self.store = engine, store
        self.requests = [
            Request(id=f"d{i}", tokens=prompt(99_000 + i, TOKENS)) for i in range(PROMPTS)
        ]
        self.tokens = PROMPTS * servable(TOKENS)
        self.reference: list[Result] = []

    def run(self) -> tuple[int, int]:
        """Run all prompts; tokens that came from the store, and those of them from disk."""
        forget(self.engine)
        before = self.engine.metrics()
        got = [self.engine.run([one], max_tokens=TOKENS_OUT)[0] for one in self.requests]
        self.reference = self.reference or got
        assert_same(self.reference, got)
        return grown(self.engine, before, EXTERNAL), grown(self.engine, before, FROM_DISK)

    def run_while(self, act: Callable[[], object]) -> None:
        """Do something in the middle of a run."""

        def later() -> None:
            time.sleep(PULL_S)
            act()

        with meanwhile(later):
            self.run()

    def state_is(self, state: str) -> bool:
        return f"kvstore_tiers{{nvme,{state}}}" in numbers(self.store.address)


@pytest.mark.parametrize("how", [pulled_mount, pytest.param(failing_calls, marks=pytest.mark.long)])
def test_the_engine_serves_while_the_disk_is_away_and_from_it_when_it_is_back(
    how: Callable[[Path, Path], AbstractContextManager[Place]],
    model: Callable[[str], Path],
    fault_library: Path,
    tmp_path: Path,
) -> None:
    with how(tmp_path, fault_library) as (folder, environment, away):
        settings = f'\n[nvme]\npath = "{folder}"\ncapacity = "256MiB"\nextent = "16MiB"\n'
        store = StoreProcess(tmp_path, MEMORY, settings, environment=environment)
        with store, Engine(model("llama_s"), connector=attach(store)) as engine:
            held = Held(engine, store)
            held.run()
            for _ in range(2):  # what left memory before it was copied is copied now
                held.run()
            assert held.run()[1] > held.tokens // 2
            for _ in range(TIMES):
                gone = away()
                held.run_while(gone.__enter__)
                eventually(lambda: held.state_is("off"), BACK_S)
                assert held.run()[1] == 0, "from a disk that is not there"
                held.run_while(lambda gone=gone: gone.__exit__(None, None, None))  # type: ignore[misc]
                eventually(lambda: held.state_is("ok"), BACK_S)
                held.run()
                assert held.run()[1] > held.tokens // 2, numbers(store.address)
            assert "kvstore_tier_blocks{nvme,damaged}" not in numbers(store.address)
