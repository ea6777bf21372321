"""A real engine computes what it would wait longer for, and measures how fast it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.bench.engine import Engine, Request, Result
from tests.bench.handover import HANDED
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.engine.identity import assert_same
from tests.engine.support import (
    attach,
    eventually,
    forget,
    is_attached,
    numbers,
    servable,
    settled,
    since,
)

pytestmark = pytest.mark.vllm

TOKENS_OUT = 8
CAPACITY = "16MiB"  # eight prompts
ROOT = str(Path(__file__).parents[2])  # where the tier is
ATTIC = '\n[[tier]]\nname = "attic"\nclass = "tests.harness.paced_tier:PacedTier"\n'
TOO_SLOW = "kvstore_missed_tokens{too_slow}"
FROM_ATTIC = "kvstore_hit_tokens{attic}"


def test_O21_an_engine_loads_from_a_quick_tier_and_computes_what_a_slow_one_has(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    requests = [Request(id=f"n{i}", tokens=prompt(91_000 + i, 1001)) for i in range(20)]
    every = sum(servable(len(request.tokens)) for request in requests)
    slow, quick = (
        StoreProcess(
            tmp_path,
            CAPACITY,
            f"{ATTIC}options = {{ block_ms = {block_ms} }}\n",
            environment={"PYTHONPATH": ROOT},
        )
        for block_ms in (50, 0)
    )
    with slow, Engine(model("llama_s"), connector=attach(slow, always_load=False)) as engine:

        def answers() -> list[Result]:
            forget(engine)
            found = [engine.run([one], max_tokens=TOKENS_OUT)[0] for one in requests]
            settled(lambda: numbers(slow.address))
            return found

        def parts() -> tuple[float, float]:
            """Which part of the tokens came from the attic, and which would have come too late."""
            before = numbers(slow.address)
            assert_same(reference, answers())
            found = since(slow.address, before)
            return found.get(FROM_ATTIC, 0) / every, found.get(TOO_SLOW, 0) / every

        reference = answers()
        loaded, too_slow = parts()
        assert loaded < 1 / 2 <= too_slow
        slow.stop()
        with quick:  # at the same place
            eventually(lambda: is_attached(engine, quick.address))
            answers()
            eventually(lambda: parts()[0] >= 1 / 2)


def test_O21_an_engine_computes_what_the_disk_of_another_node_reads_for_longer(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    """It has computed nothing itself before: it goes by what the other engine took."""
    requests = [Request(id=f"p{i}", tokens=prompt(92_000 + i, 1001)) for i in range(20)]
    attic = f"{ATTIC}options = {{ block_ms = 50 }}\n"
    settings = {"prefill": f'policy = "lru"\n[peer]\n{attic}', "decode": "[peer]\n"}
    stores, engines = dict[str, StoreProcess](), dict[str, Engine]()
    with ExitStack() as ends:
        for name, text in settings.items():
            (tmp_path / name).mkdir()
            store = StoreProcess(tmp_path / name, CAPACITY, text, environment={"PYTHONPATH": ROOT})
            stores[name] = ends.enter_context(store)
            connector = attach(store, always_load=False)
            engines[name] = ends.enter_context(Engine(model("llama_s"), connector=connector))
        prefill, decode = engines["prefill"], engines["decode"]
        reference, handed = [], []
        for one in requests:
            reference += prefill.run([one], max_tokens=TOKENS_OUT)
            forget(prefill)
            (made,) = prefill.run([replace(one, kv_transfer_params=HANDED)], max_tokens=1)
            handed.append(replace(one, kv_transfer_params=made.kv_transfer_params))
            forget(prefill)
        settled(lambda: numbers(stores["prefill"].address))
        got = [decode.run([one], max_tokens=TOKENS_OUT)[0] for one in handed]
        assert_same(reference, got)
        found = settled(lambda: numbers(stores["decode"].address))
        from_peer = found.get("kvstore_hit_tokens{peer}", 0) / sum(len(r.tokens) for r in requests)
        assert from_peer < 0.5, found
