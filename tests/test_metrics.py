"""What Prometheus sees, read with its own parser."""

from __future__ import annotations

import ast
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from connectors.config import parse_extra
from kvstore import __version__, launch
from kvstore.config import parse as parse_config
from kvstore.core.errors import ConfigError
from kvstore.core.types import JobResult
from kvstore.core.write_budget import WriteBudget
from kvstore.metrics import (
    DISK_EVENTS,
    EVICTIONS,
    HAND_OVERS,
    MEMORY,
    NAMESPACES_MAX,
    NVME,
    OBJECT,
    OTHER,
    PEER,
    TABLE,
    TIER_EVENTS,
    Numbers,
)
from kvstore.store.metrics_endpoint import StoreCollector
from kvstore.wire import engine as p
from tests.bench.store import get
from tests.harness.fakes import SLOT_BYTES, Town, hashes, keys_of, value_of
from tests.harness.live import LiveStore, engine, eventually
from tests.reference.memory_tier import MemoryTier

UNITS = (
    "bugs",
    "requests",
    "steps",
    "bytes",
    "seconds",
    "tokens",
    "blocks",
    "lookups",
    "hints",
    "slots",
    "leases",
    "sessions",
    "tiers",
)
NO_UNIT = {
    "events",
    "refused",
    "started",
    "ended",
    "open",
    "info",
    "starts",
    "up",
    "draining",
    "ratio",
}
ROOT = Path(__file__).parent.parent
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def exposed(numbers: Numbers) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StoreCollector(numbers, lambda: None))
    return generate_latest(registry).decode()


def scrape(numbers: Numbers) -> Samples:
    return parse(exposed(numbers))


def busy_town() -> Town:
    """A store with something to tell about each of its parts."""
    town = Town(tiers=[("shelf", MemoryTier)])
    live = town.attach()
    for number in range(20):
        live.put(hashes(3, f"request{number}"))
    live.hit(hashes(3, "request19"))
    live.hit(hashes(3, "nobody"))
    hits = {"cpu": 30, "shelf": 10}
    missed = {"evicted": 35, "tail": 25}
    live.step(lookup_tokens=100, hit_tokens=hits, missed_tokens=missed, counts={"deferred": 2})
    town.say(live.workers[0], p.Loaded(1, 4096, 0.5))
    town.say(town.connect(), p.Step())
    town.settle(live)
    town.store.refresh_gauges()
    return town


@pytest.fixture(scope="module")
def samples() -> Samples:
    return scrape(busy_town().store.numbers)


# The table


def value(samples: Samples, name: str, **labels: str) -> float:
    """Add up the series of a name that have these labels."""
    found = [v for (n, have), v in samples.items() if n == name and labels.items() <= set(have)]
    assert found, f"no {name} with {labels}"
    return sum(found)


def test_names_and_helps_follow_the_rules() -> None:
    for spec in TABLE:
        assert re.fullmatch(r"kvstore_[a-z]+(_[a-z]+)*", spec.name)
        assert spec.kind in ("counter", "gauge", "histogram")
        assert (spec.kind == "histogram") == (spec.labels == ("le",))
        assert not spec.name.endswith("_total"), "the exposition appends it"
        assert spec.name.rsplit("_", 1)[1] in {*UNITS, *NO_UNIT}, spec.name
        assert re.fullmatch(r"[A-Z].*\.", spec.help), spec.name


def test_M3_no_label_can_take_any_value() -> None:
    allowed = {"tier", "outcome", "reason", "event", "namespace", "direction", "state", "phase"}
    allowed |= {"call", "le", "what", "model", "dtype", "block_tokens", "block_bytes"}
    allowed |= {"cause", "queue", "version", "protocol", "tenant", "size"}
    assert {label for spec in TABLE for label in spec.labels} <= allowed
    assert len({spec.name for spec in TABLE}) == len(TABLE)


# A scrape


def test_every_metric_of_the_table_is_there_under_its_kind(samples: Samples) -> None:
    families = text_string_to_metric_families(exposed(busy_town().store.numbers))
    found = {family.name: (family.type, family.documentation) for family in families}
    assert found == {spec.name: (spec.kind, spec.help) for spec in TABLE}
    for name, _ in samples:
        spec = next(
            s for s in TABLE if re.fullmatch(f"{s.name}(_total|_bucket|_sum|_count)?", name)
        )
        assert name.endswith("_total") == (spec.kind == "counter")


def test_a_histogram_is_one_for_prometheus() -> None:
    numbers = Numbers()
    for seconds in (0.0, 0.02, 0.02, 100.0):
        numbers.observe("kvstore_hand_over_held_seconds", seconds)
    found = scrape(numbers)
    name = "kvstore_hand_over_held_seconds"
    buckets = {
        dict(labels)["le"]: value for (n, labels), value in found.items() if n == f"{name}_bucket"
    }
    assert buckets == {
        **dict.fromkeys(("0.0001", "0.0003", "0.001", "0.003", "0.01"), 1),
        **dict.fromkeys(("0.03", "0.1", "0.3", "1.0", "3.0", "10.0"), 3),
        "+Inf": 4,
    }
    assert found[f"{name}_sum", ()] == 100.04
    assert found[f"{name}_count", ()] == 4


def test_everything_that_is_counted_is_in_the_table_and_not_negative() -> None:
    numbers = busy_town().store.numbers
    labels = {spec.name: len(spec.labels) for spec in TABLE}
    for key, value in numbers.values().items():
        assert labels[key[0]] == len(key) - 1, key
        assert value >= 0, key


def counters(found: Samples) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {key for key in found if key[0].endswith("_total")}


def test_M3_every_counter_is_there_at_0_from_the_start(samples: Samples) -> None:
    town = Town(tiers=[("shelf", MemoryTier)])
    assert set(scrape(town.store.numbers).values()) == {0}
    town.attach()
    before = scrape(town.store.numbers)
    assert counters(before) == counters(samples), "what a busy store counts was there before"


def test_M3_a_store_with_a_disk_and_peers_has_their_counters_too() -> None:
    numbers = Numbers()
    numbers.start([MEMORY, NVME, OBJECT, PEER])
    found = scrape(numbers)
    assert set(found.values()) == {0}
    for spec in TABLE:
        if spec.kind == "counter":
            assert any(name == f"{spec.name}_total" for name, _ in found), spec.name
    for tier, event in [(NVME, "stored_failed"), (NVME, "damaged"), (PEER, "corrupt")]:
        labels = (("event", event), ("namespace", OTHER), ("tier", tier))
        assert found["kvstore_tier_blocks_total", labels] == 0
    assert found["kvstore_side_channel_refused_total", (("reason", "unauthorised"),)] == 0


def literals(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (metric or attribute, label) of all that a module counts under a constant label."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
            name = node.target.value.attr if isinstance(node.target.value, ast.Attribute) else ""
            yield from ((name.lstrip("_"), label) for label in constants(node.target.slice))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called, places = node.func.attr, [p for a in node.args for p in constants(a)]
            if called == "add" and places and places[0].startswith("kvstore_"):
                yield from ((places[0], label) for label in places[-1:] if len(places) > 1)
            if called in ("drop", "end") and places:
                yield called, places[0]


def constants(node: ast.expr) -> list[str]:
    """Return the strings that an expression may stand for, the last part of a tuple."""
    if isinstance(node, ast.Tuple):
        return constants(node.elts[-1]) if node.elts else []
    if isinstance(node, ast.IfExp):
        return [*constants(node.body), *constants(node.orelse)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


VALUES = {spec.name: spec.values for spec in TABLE}


@pytest.mark.parametrize(
    ("where", "what", "allowed"),
    [
        ("kvstore/handover/*.py", "counts", tuple(e for es in HAND_OVERS.values() for e in es)),
        ("kvstore/core/tiering.py", "counts", TIER_EVENTS),
        ("kvstore/core/manager.py", "drop", EVICTIONS),
        ("kvstore/core/manager.py", "evictions", EVICTIONS),
        ("tiers/nvme/*.py", "counts", DISK_EVENTS),
        ("tiers/nvme/*.py", "drop", DISK_EVENTS),
        ("kvstore/store/s*.py", "end", VALUES["kvstore_sessions_ended"]),
        *(("kvstore/**/*.py", name, values) for name, values in VALUES.items() if values),
    ],
)
def test_M3_nothing_is_counted_under_a_label_that_is_not_there_from_the_start(
    where: str, what: str, allowed: tuple[str, ...]
) -> None:
    found = {label for path in ROOT.glob(where) for name, label in literals(path) if name == what}
    assert found <= set(allowed), f"{where} counts {found - set(allowed)} under {what}"
    assert found or what.startswith("kvstore_"), f"{where} counts nothing under {what}"


def test_every_value_of_a_label_is_documented() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text()
    values = {value for spec in TABLE for value in spec.values} | {*TIER_EVENTS, *DISK_EVENTS}
    assert not [value for value in sorted(values) if f"`{value}`" not in page]


def test_M3_what_a_forgotten_namespace_has_counted_stays_in_the_totals() -> None:
    town = busy_town()
    before = scrape(town.store.numbers)
    town.store.namespaces.clear()
    town.store.refresh_gauges()
    after = scrape(town.store.numbers)
    assert value(before, "kvstore_evicted_blocks_total", reason="capacity") > 0
    for key in counters(before):
        assert after[key] == before[key], key


def test_M1_tokens_hit_by_tier_over_tokens_looked_up_is_the_hit_rate(samples: Samples) -> None:
    asked = value(samples, "kvstore_lookup_tokens_total")
    hits = {
        dict(labels)["tier"]: value
        for (name, labels), value in samples.items()
        if name == "kvstore_hit_tokens_total" and ("namespace", OTHER) not in labels
    }
    assert hits == {"cpu": 30, "shelf": 10}
    assert sum(hits.values()) / asked == 0.4


def test_outcomes_and_events_are_counted(samples: Samples) -> None:
    assert value(samples, "kvstore_lookups_total", outcome="hit") == 1
    assert value(samples, "kvstore_lookups_total", outcome="miss") == 1
    assert value(samples, "kvstore_stored_blocks_total", outcome="stored") == 60
    assert value(samples, "kvstore_engine_events_total", event="deferred") == 2
    assert value(samples, "kvstore_refused_total", reason="protocol") == 1
    assert value(samples, "kvstore_copied_bytes_total", direction="load") == 4096
    assert value(samples, "kvstore_copy_seconds_total", direction="load") == 0.5
    assert value(samples, "kvstore_tier_blocks_total", tier="shelf", event="stored") == 60
    assert value(samples, "kvstore_evicted_blocks_total", reason="capacity") > 0
    assert value(samples, "kvstore_sessions", phase="active") == 1
    used = value(samples, "kvstore_memory_bytes", tier="cpu")
    assert used <= value(samples, "kvstore_capacity_bytes", tier="cpu")


def test_M3_label_values_do_not_grow_with_requests(samples: Samples) -> None:
    town = busy_town()
    live = town.attach("another")
    for number in range(50):
        live.put(hashes(2, f"more{number}"))
        granted = live.hit(hashes(2, f"more{number}"))
        town.say(live.workers[0], p.Loaded(granted.lease, 1, 0.1))
        live.step(lookup_tokens=1, hit_tokens={"cpu": 1}, counts={"deferred": 1})
    town.store.refresh_gauges()
    more = scrape(town.store.numbers)
    assert set(more) == set(samples)
    for step in (p.Step(counts={"made_up": 1}), p.Step(lookup_tokens=1, hit_tokens={"made_up": 1})):
        town.say(live.scheduler, step)
    assert not [key for key in town.store.numbers.counts if "made_up" in key]


# Namespaces


OF_LOWER_TIERS = {"kvstore_tier_blocks", "kvstore_tier_bytes"}


def series_of(town: Town, namespace: str) -> set[str]:
    """The names of the counters that have a series of a namespace."""
    found = scrape(town.store.numbers)
    return {name for name, labels in counters(found) if ("namespace", namespace) in labels}


def test_Q1_a_namespace_is_named_by_the_first_engine_and_its_counters_bear_its_label() -> None:
    town = Town()
    first = town.attach("first", model="qwen\n" + "x" * 200, dtype="bfloat16")
    second = town.attach("second", model="another-name")
    other = town.attach("other", identity="another model")
    for live in (first, other):
        live.put(hashes(3))
        live.step(lookup_tokens=50, hit_tokens={"cpu": 16}, missed_tokens={"tail": 34})
    second.step(lookup_tokens=50, hit_tokens={"cpu": 32}, missed_tokens={"tail": 18})
    town.store.refresh_gauges()
    found = scrape(town.store.numbers)
    told = [dict(labels) for (name, labels) in found if name == "kvstore_namespace_info"]
    by_model = {each["model"]: each for each in told}
    cut = "qwen?" + "x" * 95
    assert by_model.keys() == {cut, "another model"}
    label = by_model[cut]["namespace"]
    assert by_model[cut] == {
        "namespace": label, "model": cut, "dtype": "bfloat16", "block_tokens": "16",
        "block_bytes": "4096",
    }  # fmt: skip
    assert value(found, "kvstore_missed_tokens_total", namespace=label, reason="tail") == 52
    assert value(found, "kvstore_lookup_tokens_total", namespace=label) == 100
    assert value(found, "kvstore_hit_tokens_total", namespace=label, tier="cpu") == 48
    assert value(found, "kvstore_stored_blocks_total", namespace=label, outcome="stored") == 3
    assert value(found, "kvstore_stored_blocks_total", namespace=OTHER) == 0
    assert value(found, "kvstore_lookup_tokens_total") == 150
    counted = {s.name for s in TABLE if "namespace" in s.labels and s.kind == "counter"}
    assert series_of(town, label) == {f"{name}_total" for name in counted - OF_LOWER_TIERS}


def test_Q1_namespaces_that_are_gone_keep_no_unbounded_series() -> None:
    numbers = Numbers()
    numbers.start([MEMORY])
    served = [numbers.open_namespace(f"{n:012x}") for n in range(NAMESPACES_MAX)]
    assert numbers.open_namespace("one more of them") == OTHER, "there is no room"
    full = len(numbers.counts)
    for label in served[:2]:
        numbers.add("kvstore_lookup_tokens", label, by=5)
        numbers.close_namespace(label)
    assert numbers.open_namespace(served[0]) == served[0]
    assert value_of(numbers, "kvstore_lookup_tokens", served[0]) == 5, "it goes on where it was"
    for n in range(1000):
        label = numbers.open_namespace(f"unnamed{n:05}")
        assert label == f"unnamed{n:05}"
        numbers.close_namespace(label)
    assert len(numbers.counts) == full
    assert value_of(numbers, "kvstore_lookup_tokens", served[1]) == 0, "it made room"
    assert numbers.label_of("unnamed00001") == OTHER


# Times, bytes, queues


def test_Q4_times_of_lookups_promotions_loads_and_turns_are_there_and_counted(
    tmp_path: Path,
) -> None:
    server = {"socket": f"{tmp_path}/kv.sock", "metrics": ""}
    nvme = {"path": f"{tmp_path}/kv", "capacity": "64MiB", "extent": "2MiB"}
    read = parse_config({"cpu": {"capacity": "16MiB"}, "nvme": nvme, "server": server})
    with LiveStore(read) as store, engine(store, page_bytes=64 << 10) as live:
        numbers = store.server.store.numbers
        names = [f"kvstore_{what}_seconds" for what in ("lookup", "promotion", "load")]
        assert [value_of(numbers, name, "+Inf") for name in names] == [0, 0, 0]
        assert value_of(numbers, "kvstore_turn_seconds", "+Inf") > 0
        live.put(chain := hashes(8))

        def moved(way: str) -> float:
            store.server.await_gauges()
            return value_of(numbers, "kvstore_tier_bytes", "nvme", way)

        eventually(lambda: moved("store") == 8 * (64 << 10))
        for number in range(300):
            live.put(hashes(1, f"other{number}"))
        live.read(live.ask(chain))

        def all_counted() -> bool:
            return all(value_of(numbers, name, "+Inf") > 0 for name in names)

        eventually(all_counted)
        assert 0 < value_of(numbers, "kvstore_promotion_seconds", "sum") < 5
        assert 0 <= value_of(numbers, "kvstore_lookup_seconds", "sum") < 5
        loaded = moved("load")
        assert loaded == value_of(numbers, "kvstore_tier_blocks", "nvme", "loaded") * (64 << 10) > 0
        assert moved("store") >= loaded


def test_Q4_what_is_pinned_and_what_waits_is_shown_by_cause() -> None:
    town = Town(tiers=[("shelf", Stuck)])
    live = town.attach(world=2)
    (namespace,) = town.store.namespaces.values()
    live.put(hashes(20))
    held = live.hit(hashes(3))
    assert held.lease
    keys = keys_of(hashes(4, "late"))
    live.report(0, live.credits[:2], keys[1:3], keys[:2])
    live.ask(hashes(3, "late"))
    town.store.refresh_gauges()
    before = town.store.numbers.values()
    town.tick(5)
    town.store.refresh_gauges()
    found = town.store.numbers.values()

    def pinned(cause: str) -> float:
        return found["kvstore_pinned_bytes", namespace.label, cause] / SLOT_BYTES

    assert (pinned("lease"), pinned("copy"), pinned("coming")) == (3, 8, 0)
    assert pinned("credit") == len(namespace.manager.slots.granted) > 0
    assert found["kvstore_queued_blocks", "shelf"] == 12
    queue = "kvstore_queue_seconds"
    assert (before[queue, "shelf"], found[queue, "shelf"]) == (0, 0.005)
    assert found["kvstore_build_info", __version__, str(p.VERSION)] == 1


class Stuck(MemoryTier):
    """A tier whose writes never end."""

    def poll(self) -> list[JobResult]:
        return []


def test_Q4_what_is_left_of_the_write_budget_is_shown() -> None:
    budget = WriteBudget(24 << 20)
    town = Town()
    town.store.namespaces.budgets["nvme"] = budget
    town.store.refresh_gauges()
    name = "kvstore_write_budget_bytes"
    assert value_of(town.store.numbers, name, "nvme", "day") == 24 << 20
    assert value_of(town.store.numbers, name, "nvme", "left") == 1 << 20
    budget.spend(3 << 20)
    town.store.refresh_gauges()
    assert value_of(town.store.numbers, name, "nvme", "left") == -2 << 20


def test_Q5_a_private_store_shows_its_metrics_where_the_engine_has_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = {"cpu": "64MiB", "metrics": "127.0.0.1:0"}
    address = parse_extra(given).find_store(f"test-{secrets.token_hex(8)}")
    process = psutil.Process(launch._children[-1].pid)
    with engine(SimpleNamespace(path=address)):
        (port,) = re.findall(r"metrics at http://127.0.0.1:(\d+)/metrics", capfd.readouterr().err)
        status, body = get(int(port), "/metrics")
        assert status == 200
        assert 'kvstore_sessions{phase="active"} 1.0' in body.decode()
        ports = {c.laddr.port for c in process.net_connections("tcp") if c.status == "LISTEN"}
        assert ports == {int(port)}, "it opens no other"
    process.wait(30)


def test_Q5_of_a_shared_store_or_with_a_wrong_address_they_are_refused() -> None:
    for given, text in (
        ({"store": "unix:///run/kv.sock", "metrics": "127.0.0.1:0"}, "for a private store"),
        ({"cpu": "64MiB", "metrics": "127.0.0.1:99999"}, '"127.0.0.1:99999"'),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            parse_extra(given)
