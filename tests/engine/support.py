"""What the real-engine tests share: attaching, prompts, asking stores, looking at processes."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from kvstore.launch import address_of
from kvstore.listener import taken
from tests.bench.engine import Engine, Request, Result
from tests.bench.models import prompt
from tests.bench.store import StoreProcess
from tests.bench.store import numbers as store_numbers

ENGINE_BLOCK = 32
TOKENS_OUT = 24
CAPACITY = "256MiB"
# Bytes of one block of 32 tokens: layers x (K and V) x KV heads x head size x bfloat16 x tokens.
LLAMA_BLOCK_BYTES = 4 * 2 * 2 * 64 * 2 * ENGINE_BLOCK
GROUPS = {"llama_s": 1, "gemma3": 4}
# Two layers in each of the four groups of gemma3.
BLOCK_BYTES = {"llama_s": LLAMA_BLOCK_BYTES, "gemma3": LLAMA_BLOCK_BYTES // 2}

T = TypeVar("T")
Reference = Callable[[str, Sequence[Request], int], list[Result]]  # model, prompts, tokens each


ENVIRONMENT = {
    # Where the processor has AMX, half of the prompts differ at near ties with it.
    "KVSTORE_NO_TILES": "1",
    # Otherwise each engine compiles one function, which ranks tokens for logprobs: 2 s.
    "TORCHDYNAMO_DISABLE": "1",
}
OURS = "connectors.vllm.TieredConnector"
TROUBLES = "KVSTORE_TEST_TROUBLES"  # variable of the folder in which tests ask for trouble


def only_long(*values: object) -> Any:
    """Leave a case to `make test-long`: `make test` shows each kind of failure once."""
    return pytest.param(*values, marks=pytest.mark.long)


def attach(store: StoreProcess | None = None, *, by: str = OURS, **extra: object) -> dict[str, Any]:
    """A kv_transfer_config for a shared store, or for a private one.

    by: dotted name of the connector class. extra: more of kv_connector_extra_config. What is there
    is loaded, however fast these small models compute.
    """
    module, _, name = by.rpartition(".")
    place = {"cpu": CAPACITY} if store is None else {"store": store.address}
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": place | {"always_load": True} | extra,
    }


def broken(name: str) -> str:
    """Dotted name of one of the connectors that do something wrong, or slowly."""
    return f"tests.engine.broken.{name}"


class Trouble(StrEnum):
    """What broken.TroubledConnector does while a test asks for it; each names a file."""

    PAUSES = "pauses"  # each copy takes a few steps of the engine: fences and waits have work
    LONG_PAUSES = "long-pauses"  # sources have new owners before they are copied
    SLOW_STORE = "slow-store"  # so slow that something can be done to the store meanwhile
    SLOW_LOAD = "slow-load"
    OUTSIDE = "outside"  # no load ends in the step that admits its request
    NO_FENCE = "no-fence"  # nobody waits for stores whose sources are about to be overwritten
    FORGETFUL = "forgetful"  # loads report success, yet one engine block of each stays empty
    REUSED = "reused"  # one slot of each load has another generation than the store promised
    FAILING = "failing"  # every load fails half-way: the memory of its last slot is not there


def wanted_file(folder: Path, trouble: Trouble) -> Path:
    """Is there while a test wants trouble."""
    return folder / f"{trouble}.wanted"


def seen_file(folder: Path, trouble: Trouble) -> Path:
    """Is there once a slow copy has begun."""
    return folder / trouble


class Troubled:
    """An engine that gets into trouble when a test asks for it."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        store: StoreProcess | None = None,
        *,
        settings: dict[str, Any] | None = None,
        **extra: object,
    ) -> None:
        """Start it. folder: of the troubles; settings: of the engine; extra: of the connector."""
        self.folder, self.store = folder, store
        connector = attach(store, by=broken("TroubledConnector"), **extra)
        self.engine = Engine(
            model, connector=connector, env={TROUBLES: str(folder)}, **(settings or {})
        )
        self.engine.__enter__()

    @contextlib.contextmanager
    def trouble(self, *kinds: Trouble) -> Iterator[None]:
        """Ask for trouble."""
        for kind in kinds:
            wanted_file(self.folder, kind).touch()
        try:
            yield
        finally:
            for kind in kinds:
                wanted_file(self.folder, kind).unlink(missing_ok=True)
                seen_file(self.folder, kind).unlink(missing_ok=True)

    def end(self, kind: Trouble) -> None:
        """Ask for no more of it."""
        wanted_file(self.folder, kind).unlink()

    def close(self) -> None:
        """End the engine, not the store."""
        self.engine.close()

    def has_begun(self, kind: Trouble) -> bool:
        """Whether a slow copy has begun."""
        return seen_file(self.folder, kind).exists()


# Prompts


def families(count: int = 24, seed: int = 0, longest: int = 1500) -> list[Request]:
    """Prompts of many lengths that share prefixes in groups of four, arriving over some steps.

    Among the lengths are those next to a block's end, and less than a block.
    """
    rng = random.Random(seed)
    made = []
    for index in range(count):
        family = 1000 * (seed + 1) + index // 4
        shared = prompt(family, rng.randrange(40, longest // 2))
        own = prompt(family * 100 + index % 4 + 1, rng.randrange(10, longest // 2))
        tokens = shared + own
        if index % 6 in (1, 2, 3):  # ends with a block, one token before, one after
            tokens = tokens[: len(tokens) // 64 * 64 + (index % 6) - 2 or 20]
        made.append(Request(id=f"{seed}.{index}", tokens=tokens, arrive_step=index // 3))
    return made


def together(requests: Iterable[Request]) -> list[Request]:
    """The same prompts, all at once."""
    return [Request(id=request.id, tokens=request.tokens) for request in requests]


def servable(tokens: int, block_tokens: int = ENGINE_BLOCK) -> int:
    """Tokens of a prompt that can come from a cache: whole blocks, never the last token."""
    return (tokens - 1) // block_tokens * block_tokens


def given(model: str, tokens: int) -> int:
    """Tokens of a prompt that an engine gets which another has computed.

    All, its partly filled last block included. vLLM computes the last one again in any case; what
    that one's window reaches it only keeps if it is not among those that it gets.
    """
    return tokens if GROUPS[model] == 1 else tokens - 1


def blocks_kept(requests: Sequence[Request], tokens_out: int) -> int:
    """Whole blocks that requests without common prefixes leave; the last token has no KV."""
    return sum((len(r.tokens) + tokens_out - 1) // ENGINE_BLOCK for r in requests)


# Engines and stores


def forget(engine: Engine, *, connector_too: bool = False) -> None:
    """Empty the engine's own cache. Fails if one of its blocks stays in use."""
    engine.go_idle()  # a load that nobody wants any more may still run
    assert engine.reset_prefix_cache(connector_too=connector_too), "a block is still in use"


def grown(engine: Engine, before: dict[str, float], name: str) -> int:
    """How much one of vLLM's counters has grown."""
    return int(engine.metrics().get(name, 0) - before.get(name, 0))


TURNS = "kvstore_turn_seconds"


def numbers(address: str) -> dict[str, float]:
    """A store's numbers that are not 0, by name{label}, but for its turns, which never end."""
    found = store_numbers(address).items()
    return {name: value for name, value in found if value and not name.startswith(TURNS)}


def since(address: str, before: dict[str, float]) -> dict[str, float]:
    """What has changed in a store's numbers."""
    after = numbers(address)
    names = after.keys() | before.keys()
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    return {name: change for name, change in changes.items() if change}


def settled(read: Callable[[], T], quiet_s: float = 0.4, within_s: float = 600.0) -> T:
    """What read returns once it has stayed the same for a while."""
    deadline_s = time.monotonic() + within_s
    value, since_s = read(), time.monotonic()
    while time.monotonic() - since_s < quiet_s:
        assert time.monotonic() < deadline_s, f"keeps changing: {value}"
        time.sleep(0.05)
        latest = read()
        if latest != value:
            value, since_s = latest, time.monotonic()
    return value


def eventually(happened: Callable[[], T], within_s: float = 600.0) -> T:
    """Wait until a condition is true, and return what made it so."""
    deadline_s = time.monotonic() + within_s
    while not (value := happened()):
        assert time.monotonic() < deadline_s, f"not within {within_s:.0f} s"
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Do something in another thread while an engine runs; end when both are done."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as exc:  # noqa: BLE001 - told below
            failed.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not failed, failed


def assert_given_back(address: str, within_s: float = 600.0) -> None:
    """Nothing in a store is held for an engine; what survives of one may come back for a moment."""

    def held() -> list[str]:
        signs = ("kvstore_slots{granted}", "kvstore_sessions{", "kvstore_leases")
        return [name for name in numbers(address) if name.startswith(signs)]

    deadline_s = time.monotonic() + within_s
    while left := held():
        assert time.monotonic() < deadline_s, f"still there: {left}"
        time.sleep(0.05)


def is_attached(engine: Engine, address: str) -> bool:
    """Whether an engine is with its store; it looks for that when it has something to do."""
    engine.run([Request(id="tick", tokens=[3, 4, 5])], max_tokens=1)
    engine.go_idle()
    return "kvstore_sessions{active}" in numbers(address)


# Processes


def private_store_of(engine: Engine) -> psutil.Process:
    """The store process that an engine with a private one has started."""
    roots = [psutil.Process(pid) for pid in engine.pids().values()]
    children = [child for root in roots for child in root.children(recursive=True)]
    found = {child.pid: child for child in children if _is_private_store(child)}
    assert len(found) == 1, f"private stores: {sorted(found)}"
    return next(iter(found.values()))


def _is_private_store(process: psutil.Process) -> bool:
    try:
        return "kvstore.store.embedded" in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def memory_of(store: int) -> set[int]:
    """Inodes of the memory that a store process has made."""
    found = set()
    for link in Path(f"/proc/{store}/fd").iterdir():
        with contextlib.suppress(OSError):  # a descriptor that has just been closed
            if "memfd:kvstore" in str(link.readlink()):
                found.add(link.stat().st_ino)
    return found


def holders(inodes: set[int]) -> set[int]:
    """Processes that have any of these mapped or open."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            maps = (folder / "maps").read_text().splitlines()
            mapped = {int(line.split()[4]) for line in maps if "memfd:kvstore" in line}
            if mapped & inodes or memory_of(pid) & inodes:
                found.add(pid)
        except OSError:  # it has just ended
            continue
    return found


def has_private_address(engine_id: str) -> bool:
    """Whether the address of an engine's private store is in use."""
    return taken(address_of(engine_id))


def shared_memory_files() -> set[str]:
    """Our files in /dev/shm, of which there should be none."""
    folder = Path("/dev/shm")  # noqa: S108 - only looked at
    return {path.name for path in folder.iterdir() if "kvstore" in path.name}
