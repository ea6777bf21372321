"""The harness itself: it starts, sees and ends engines, and it would notice a wrong block."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.bench.engine import Engine, EngineFailed, Request
from tests.bench.models import make_model, prompt
from tests.bench.native import native_config
from tests.engine.identity import assert_same, divergences
from tests.engine.support import TROUBLES, Trouble, forget, grown, wanted_file

pytestmark = pytest.mark.vllm

HOST_BYTES = 64 << 20
TOKENS_OUT = 24


def requests(seed: int = 0) -> list[Request]:
    """Prompts of many lengths, none of which ends with a block."""
    return [Request(id=f"p{i}", tokens=prompt(seed + i, 300 + 97 * i)) for i in range(8)]


def all_gone(pids: Iterable[int], within_s: float = 600.0) -> bool:
    """Whether all processes end in time; one that init has yet to reap has ended."""
    deadline_s = time.monotonic() + within_s
    for pid in pids:
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
    return True


@pytest.fixture
def engine(plain: Callable[[str], Engine]) -> Engine:
    """One without a connector, and with nothing in its cache."""
    return plain("llama_s")


@pytest.fixture(scope="module", params=["llama_s", pytest.param("gemma3", marks=pytest.mark.long)])
def native(
    request: pytest.FixtureRequest,
    model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Engine, Path]]:
    """An engine with vLLM's own offloading, and the folder in which it can be asked for trouble."""
    folder = tmp_path_factory.mktemp("native")
    config = native_config(HOST_BYTES)
    config["kv_connector_extra_config"] |= {
        "spec_name": "ForgetfulSpec",
        "spec_module_path": "tests.engine.forgetful",
    }
    env = {TROUBLES: str(folder)}
    with Engine(model(request.param), connector=config, env=env) as engine:
        yield engine, folder


def test_a_model_is_made_once(tmp_path: Path) -> None:
    first = make_model("llama_s", tmp_path)
    written_ns = (first / "model.safetensors").stat().st_mtime_ns
    assert make_model("llama_s", tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written_ns
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_the_same_run_gives_the_same_tokens(engine: Engine) -> None:
    reference = engine.run(requests(), max_tokens=TOKENS_OUT)
    assert all(result.finished and len(result.tokens) == TOKENS_OUT for result in reference)
    assert all(result.cached_tokens == 0 for result in reference)
    assert all(len(set(result.tokens)) > TOKENS_OUT / 3 for result in reference)
    engine.idle_steps(2)
    assert engine.reset_prefix_cache()
    assert_same(reference, engine.run(requests(), max_tokens=TOKENS_OUT))


def test_a_prefix_hit_shows_in_result_and_metrics(engine: Engine) -> None:
    long = Request(id="long", tokens=prompt(50, 5000))
    before = engine.metrics()
    cold, hit = (engine.run([long], max_tokens=4)[0] for _ in range(2))
    after = engine.metrics()
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 4992)
    assert cold.steps_to_first_token == 3  # 5000 tokens, 2048 at a time
    assert hit.steps_to_first_token == 1
    assert cold.ttft_s is not None
    assert hit.ttft_s is not None
    assert hit.ttft_s < cold.ttft_s
    source = "prompt_tokens_cached_by_source{source=device}"
    assert after[source] - before[source] == 4992


def test_aborts_land_on_their_step(engine: Engine) -> None:
    never = Request(id="never", tokens=prompt(60, 4096), abort_step=0)
    prefill = Request(id="prefill", tokens=prompt(61, 6000), abort_step=1)
    decode = Request(id="decode", tokens=prompt(62, 100), arrive_step=4, abort_step=10)
    stays = Request(id="stays", tokens=prompt(63, 100), max_tokens=7)
    results = engine.run([never, prefill, decode, stays], max_tokens=100)
    assert [result.id for result in results] == ["never", "prefill", "decode", "stays"]
    assert [result.aborted for result in results] == [True, True, True, False]
    assert [len(result.tokens) for result in results] == [0, 0, 6, 7]
    engine.idle_steps(2)
    assert engine.reset_prefix_cache()


def test_other_salt_is_no_hit(engine: Engine) -> None:
    tokens = prompt(70, 320)
    salted = [Request(id=f"s{i}", tokens=tokens, cache_salt=salt) for i, salt in enumerate("aab")]
    cached = [engine.run([request], max_tokens=2)[0].cached_tokens for request in salted]
    assert cached == [0, 288, 0]  # the last token is always computed, and with it its block


def test_the_native_peer_loads_what_it_stored(native: tuple[Engine, Path]) -> None:
    engine, _ = native
    reference = engine.run(requests(), max_tokens=TOKENS_OUT)
    forget(engine)
    before = engine.metrics()
    again = engine.run(requests(), max_tokens=TOKENS_OUT)
    assert_same(reference, again)
    assert [result.cached_tokens for result in again] == [
        len(request.tokens) // 32 * 32 for request in requests()
    ]
    hits = grown(engine, before, "external_prefix_cache_hits")
    assert hits == sum(result.cached_tokens for result in again)
    forget(engine)


def test_one_lost_block_is_noticed(native: tuple[Engine, Path]) -> None:
    engine, folder = native
    first = requests(seed=80)
    reference = engine.run(first, max_tokens=TOKENS_OUT)
    forget(engine)
    wanted_file(folder, Trouble.FORGETFUL).touch()
    again = engine.run(first, max_tokens=TOKENS_OUT)
    wanted_file(folder, Trouble.FORGETFUL).unlink()
    assert len(divergences(reference, again)) > len(reference) / 2
    with pytest.raises(AssertionError, match="prompts differ"):
        assert_same(reference, again)
    forget(engine)


def test_a_failed_start_says_why(model: Callable[[str], Path]) -> None:
    engine = Engine(model("llama_s"), connector={"kv_connector": "NoSuchConnector"})
    with pytest.raises(EngineFailed, match="NoSuchConnector"):
        engine.__enter__()
    engine.close()


def test_a_hung_engine_is_ended(model: Callable[[str], Path]) -> None:
    with Engine(model("llama_s")) as engine:
        driver = engine.pids()["driver"]
        engine.kill("driver", signal.SIGSTOP)
        with pytest.raises(EngineFailed, match="not answered in 1 s"):
            engine.run(requests(), max_tokens=1, timeout_s=1)
        assert all_gone([driver])


@pytest.mark.long
def test_two_workers_are_processes_and_agree(model: Callable[[str], Path]) -> None:
    connector = native_config(HOST_BYTES)
    with Engine(
        model("llama_s"), connector=connector, in_process=False, tensor_parallel_size=2
    ) as engine:
        pids = engine.pids()
        assert set(pids) == {"driver", "core", "worker0", "worker1"}
        assert os.getpid() not in pids.values()
        reference = engine.run(requests(), max_tokens=TOKENS_OUT)
        engine.idle_steps(2)
        assert engine.reset_prefix_cache()
        again = engine.run(requests(), max_tokens=TOKENS_OUT)
        assert_same(reference, again)
        assert all(result.cached_tokens > 0 for result in again)
    assert all_gone(pids.values())


@pytest.mark.long
@pytest.mark.parametrize("which", ["core", "worker0"])
def test_a_death_during_a_run_is_reported(model: Callable[[str], Path], which: str) -> None:
    with Engine(model("llama_s"), in_process=False) as engine:
        threading.Timer(0.5, engine.kill, [which]).start()
        with pytest.raises(EngineFailed, match=r"(?i)died|dead"):
            engine.run(requests(), max_tokens=8000, timeout_s=600)
    assert all_gone(engine.pids().values())
