"""An engine that the connector does not know: an unknown version, or a name that is gone."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.facts import IMPORTS_VLLM

pytestmark = IMPORTS_VLLM

ROOT = Path(__file__).parent.parent.parent
COUNTED = ("connectors/*.py", "connectors/nixl/*.py")


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0", "0.3.2"])
@pytest.mark.parametrize("module", ["vllm", "vllm_compat", "vllm_scheduler", "vllm_worker"])
def test_O22_an_unknown_engine_version_is_refused_before_its_insides_are_imported(
    tmp_path: Path, version: str, module: str
) -> None:
    """The stand-in has a version and nothing else, as one whose modules have moved."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import connectors.{module}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.stderr.splitlines()[-1] == (
        "kvstore.core.errors.NotSupported: kvstore does not serve this engine:"
        f" vLLM {version}, served are 0.32, 0.33"
    )


def manager(**changes: object) -> Any:
    group = SimpleNamespace(req_to_blocks={})
    coordinator = SimpleNamespace(
        find_longest_cache_hit=None, single_type_managers=(group, SimpleNamespace(req_to_blocks={}))
    )
    parts = {"coordinator": coordinator, "group": group}
    made = SimpleNamespace(
        coordinator=coordinator, evict_blocks=None, prefix_cache_lookup_enabled=None
    )
    for name in changes:
        part, _, attribute = name.rpartition("__")
        delattr(parts.get(part, made), attribute)
    return made


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("coordinator", "KVCacheManager.coordinator"),
        ("evict_blocks", "KVCacheManager.evict_blocks"),
        ("prefix_cache_lookup_enabled", "KVCacheManager.prefix_cache_lookup_enabled"),
        ("coordinator__find_longest_cache_hit", "KVCacheCoordinator.find_longest_cache_hit"),
        ("coordinator__single_type_managers", "KVCacheCoordinator.single_type_managers"),
        ("group__req_to_blocks", "SimpleNamespace.req_to_blocks"),
    ],
)
def test_O22_a_block_manager_without_a_name_is_refused_at_start(gone: str, told: str) -> None:
    from connectors.vllm_private import check_private
    from connectors.vllm_scheduler import SchedulerSide
    from kvstore.core.errors import NotSupported

    check_private(manager())
    side = object.__new__(SchedulerSide)
    with pytest.raises(NotSupported, match=r"vLLM 0\.\d+ has no ") as caught:
        side.bind(manager(**{gone: None}))
    assert f" has no {told}, expected" in str(caught.value)


def test_O22_a_field_that_was_renamed_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from connectors import vllm_private
    from kvstore.core.errors import NotSupported

    classes = vllm_private.CLASSES
    assert len(classes) > 10
    for at, (kind, names) in enumerate(classes):
        for gone in names:
            stand_in = type(kind.__name__, (), dict.fromkeys({*names} - {gone}))
            changed = (*classes[:at], (stand_in, names), *classes[at + 1 :])
            monkeypatch.setattr(vllm_private, "CLASSES", changed)
            with pytest.raises(NotSupported, match=rf" has no {kind.__name__}\.{gone}, expected"):
                vllm_private.check_private(manager())


ADAPTER = ("vllm.py", "vllm_compat.py", "vllm_scheduler.py", "vllm_worker.py")
# What a step reads of vLLM's objects, by the name of the variable, and whose name it is there.
READ = {
    "block": "KVCacheBlock",
    "blocks": "KVCacheBlocks",
    "cache": "KVCacheConfig",
    "cache.kv_cache_groups[group]": "KVCacheGroupSpec",
    "cached": "CachedRequestData",
    "CacheHitSource": "CacheHitSource",
    "connector_output": "KVConnectorOutput",
    "coordinator": "KVCacheCoordinator",
    "copy": "KVCacheBlockCopy",
    "feature": "MultiModalFeatureSpec",
    "hashed": "Request",
    "kv_cache_manager": "KVCacheManager",
    "kv_cache_manager.coordinator": "KVCacheCoordinator",
    "manager": "SingleTypeKVCacheManager",
    "new": "NewRequestData",
    "output": "SchedulerOutput",
    "place": "PlaceholderRange",
    "request": "Request",
    "self._blocks[index]": "KVCacheBlock",
    "self.manager": "KVCacheManager",
    "state": "KVConnectorBlockState",
    "wanted": "SamplingParams",
}
# Variables of ours, modules, and what Python's own types have.
OURS = {
    *("RequestStatus", "_SOURCES", "boundaries", "compat", "event", "half", "half.take_stats()"),
    *("side", "side.half"),
    *("hand_overs", "log", "past"),
    *("kv_connector_metadata", "metadata", "meta", "other", "p", "params", "secrets"),
    *("sources", "stats", "step", "super()", "tokens", "torch", "written"),
    *("manager.req_to_blocks", "type(metadata)", "type(other)", "get_kv_cache_spec_kind(spec)"),
}
AT_START = {
    *("__init__", "register_kv_caches"),
    *("check_supported", "group_rule", "geometry", "layer_caches"),
    *("rank_geometry", "supports_sleep_mode", "build_kv_connector_stats", "build_prom_metrics"),
    *("start_scheduler", "start_half", "start_worker", "transfer_of_engine"),
    *("loads_in_steps", "late_step_blocks"),
}


def read_in_steps() -> Iterator[tuple[str, str]]:
    """Each (expression, attribute) of the adapter's code that runs after the start."""
    for name in ADAPTER:
        tree = ast.parse((ROOT / "connectors" / name).read_text(encoding="utf-8"))
        top = [*tree.body, *(part for node in tree.body for part in getattr(node, "body", ()))]
        for function in top:
            if isinstance(function, ast.FunctionDef) and function.name not in AT_START:
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute):
                        yield ast.unparse(node.value), node.attr


def checked() -> dict[str, set[str]]:
    """Names that are checked at start, by their owner."""
    from connectors import vllm_private as names

    found = {kind.__name__: set(fields) for kind, fields in names.CLASSES}
    return found | {
        "KVCacheCoordinator": set(names.COORDINATOR),
        "KVCacheManager": set(names.MANAGER),
        "Request": set(names.REQUEST),
        "SingleTypeKVCacheManager": set(names.GROUP),
    }


def test_O22_every_name_that_a_step_reads_is_checked_at_start() -> None:
    found = {
        (where, name)
        for where, name in read_in_steps()
        if where not in OURS and not (where.startswith("self") and where not in READ)
    }
    assert {where for where, _ in found} == set(READ), "say in READ or OURS what it is"
    there = checked()
    assert {
        (READ[where], name) for where, name in found if name not in there.get(READ[where], ())
    } == set()
    read: dict[str, set[str]] = {}
    for where, name in found:
        read.setdefault(READ[where], set()).add(name)
    unread = {owner: names - read[owner] for owner, names in there.items() if owner != "Request"}
    assert {owner: names for owner, names in unread.items() if names} == ONLY_CHECKED


# Read when the module is loaded.
ONLY_CHECKED = {"CacheHitSource": {"DISK", "HOST", "P2P"}}


def built() -> Iterator[tuple[str, tuple[str, ...]]]:
    """What the adapter makes with arguments by name, of classes of vLLM's that steps need."""
    for name in ADAPTER:
        for node in ast.walk(ast.parse((ROOT / "connectors" / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in BUILT:
                assert not node.args, "by name, so that it can be checked"
                yield ast.unparse(node.func), tuple(sorted(str(k.arg) for k in node.keywords))


BUILT = ("BlockRemoved", "BlockStored", "KVConnectorTransferResults")


def test_O22_what_steps_make_is_made_at_start() -> None:
    from connectors import vllm_private as names

    assert sorted(built()) == sorted((kind.__name__, fields) for kind, fields in names.BUILT)


def lacking(fields: tuple[str, ...]) -> type:
    """A class that takes all of these but the last."""
    return dataclasses.make_dataclass("Lacking", fields[:-1])


def wanting(fields: tuple[str, ...]) -> type:
    """A class that takes all of these and wants one more."""
    return dataclasses.make_dataclass("Wanting", [*fields, "added"])


@pytest.mark.parametrize("number", range(len(BUILT)))
@pytest.mark.parametrize("change", [lacking, wanting])
def test_O22_what_can_no_longer_be_made_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[tuple[str, ...]], type], number: int
) -> None:
    from connectors import vllm_private as names
    from kvstore.core.errors import NotSupported

    entries = list(names.BUILT)
    fields = entries[number][1]
    other = change(fields)
    entries[number] = (other, fields)
    monkeypatch.setattr(names, "BUILT", tuple(entries))
    with pytest.raises(NotSupported, match=rf" has no {other.__name__}\(") as caught:
        names.check_private(manager())
    assert (fields[-1] if change is lacking else "added") in str(caught.value)


def _request_names() -> list[str]:
    """What the connector reads or writes of vLLM's requests."""
    found = set()
    for path in (ROOT / "connectors").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and (
                ast.unparse(node.value) in {"request", "tracked.request"}
            ):
                found.add(node.attr)
    return sorted(found)


def test_O22_every_name_read_of_a_request_is_checked() -> None:
    from connectors.vllm_private import REQUEST

    assert set(_request_names()) <= set(REQUEST)


@pytest.mark.parametrize("name", ["mm_features", "num_in_flight_tokens", "prompt_is_token_ids"])
def test_O22_a_request_without_a_name_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from vllm.v1.request import Request

    from connectors import vllm_private
    from kvstore.core.errors import NotSupported

    def lacking(*arguments: object) -> Any:
        request = Request(*arguments)
        delattr(request, name)
        return request

    monkeypatch.setattr(vllm_private, "Request", lacking)
    with pytest.raises(NotSupported, match=rf" has no Request\.{name}, expected"):
        vllm_private.check_private(manager())


def pool(**changes: object) -> Any:
    """What storing late reads of a block manager: two free blocks, one of which holds something."""
    end = SimpleNamespace(block_id=-1, block_hash=None, next_free_block=None)
    last = SimpleNamespace(block_id=1, block_hash=None, next_free_block=end)
    first = SimpleNamespace(block_id=2, block_hash=b"hash\0\0\0\0", next_free_block=last)
    head = SimpleNamespace(block_id=-1, block_hash=None, next_free_block=first)
    queue = SimpleNamespace(fake_free_list_head=head, num_free_blocks=2)
    made = SimpleNamespace(blocks=[None, last, first], free_block_queue=queue)
    parts = {"manager": SimpleNamespace(block_pool=made), "pool": made, "queue": queue}
    for name in changes:
        part, _, attribute = name.partition("__")
        delattr((parts | {"block": head})[part], attribute)
    return parts["manager"]


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("manager__block_pool", "KVCacheManager.block_pool"),
        ("pool__blocks", "BlockPool.blocks"),
        ("pool__free_block_queue", "BlockPool.free_block_queue"),
        ("queue__fake_free_list_head", "FreeKVCacheBlockQueue.fake_free_list_head"),
        ("queue__num_free_blocks", "FreeKVCacheBlockQueue.num_free_blocks"),
        ("block__block_hash", "KVCacheBlock.block_hash"),
        ("block__block_id", "KVCacheBlock.block_id"),
        ("block__next_free_block", "KVCacheBlock.next_free_block"),
    ],
)
def test_O22_O28_a_name_that_storing_late_reads_is_missed_at_start(gone: str, told: str) -> None:
    from connectors.vllm_private import OwnCache
    from kvstore.core.errors import NotSupported

    assert list(OwnCache(pool()).next_free(9)) == [(2, b"hash"), (1, None)]
    with pytest.raises(NotSupported, match=r"vLLM 0\.\d+ has no ") as caught:
        OwnCache(pool(**{gone: None}))
    assert f" has no {told}, expected" in str(caught.value)


def test_O28_the_free_blocks_are_those_that_vllm_allocates_next_in_its_order() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    from connectors.vllm_private import OwnCache

    blocks = BlockPool(9, enable_caching=True, hash_block_size=16)
    cache = OwnCache(SimpleNamespace(block_pool=blocks))
    table = blocks.get_new_blocks(4)
    for block in table:
        name = BlockHash(b"%032d" % block.block_id)
        blocks._insert_block_hash(make_block_hash_with_group_id(name, 0), block, 16)
    blocks.free_blocks(reversed(table))
    assert cache.free_count == 8
    found = list(cache.next_free(7))
    assert found == [*((n, None) for n in (5, 6, 7, 8)), *((n, b"%032d" % n) for n in (4, 3, 2))]
    assert cache.held(4) == b"%032d" % 4
    assert [block.block_id for block in blocks.get_new_blocks(7)] == [n for n, _ in found]
    assert cache.held(4) is None, "given out"
    assert list(cache.next_free(7)) == [(1, b"%032d" % 1)]
    assert cache.block_count == 9


# What is counted


def counted() -> set[str]:
    """Every event that the connector counts, wherever it does."""
    found = set()
    for pattern in COUNTED:
        for path in ROOT.glob(pattern):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".count"):
                    found |= {
                        ast.literal_eval(a) for a in node.args[:1] if isinstance(a, ast.Constant)
                    }
                elif (
                    isinstance(node, ast.Subscript)
                    and isinstance(node.slice, ast.Constant)
                    and ast.unparse(node.value).split(".")[-1] in {"stats", "_stats"}
                ):
                    found.add(node.slice.value)
    return {name for name in found if isinstance(name, str)}


def test_M1_every_event_that_is_counted_reaches_vllms_endpoint() -> None:
    from connectors.vllm_stats import COUNTERS

    there = [name for _, values in COUNTERS.values() for name in values]
    assert counted() == set(there)
    assert len(there) == len(set(there))
    assert {"hand_over_unstored", "transfer_refused", "load_bytes"} <= set(there)


def test_M1_every_event_on_vllms_endpoint_is_documented() -> None:
    from connectors.vllm_stats import COUNTERS

    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    for metric, (label, values) in COUNTERS.items():
        (row,) = [line for line in page.splitlines() if f"| `{metric}_total` | {label} |" in line]
        assert {name for name in values.values() if f"`{name}`" not in row} == set()


def test_M1_every_event_is_there_at_0_for_every_engine() -> None:
    from prometheus_client import Counter, Gauge, Histogram

    from connectors.vllm_stats import COUNTERS, TieredPromMetrics

    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    engines: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    metrics = TieredPromMetrics(config, types, ["model_name", "engine"], engines)
    metrics.observe({"load_bytes": 7, "deferred": 2, "foreign": 1}, 1)
    found = {
        (
            family.name,
            sample.labels["engine"],
            sample.labels[COUNTERS[family.name][0]],
        ): sample.value
        for counter in {counter for counter, _ in metrics._counters.values()}
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }
    every = [(name, value) for name, (_, values) in COUNTERS.items() for value in values.values()]
    expected = {(name, engine, value): 0.0 for engine in "01" for name, value in every}
    expected["vllm:kvstore_copied_bytes", "1", "load"] = 7.0
    expected["vllm:kvstore_events", "1", "deferred"] = 2.0
    assert found == expected
