"""What a real Prometheus makes of a store's endpoint, by the queries in the documentation."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from kvstore import config
from kvstore.metrics import DEFERRED_STEPS, TABLE
from kvstore.wire import engine as p
from tests.bench.store import free_port
from tests.harness.fakes import hashes
from tests.harness.live import LiveEngine, LiveStore, client, engine
from tests.harness.pages import text
from tests.harness.prometheus import prometheus, queries

BY_MODEL, WHY = (
    next(query for query in queries() if every in query and "5m" in query and "instance" in query)
    for every in ("group_left (model)", "kvstore_missed_tokens_total")
)
OF_STORE = [query for query in queries() if "vllm:" not in query]


TOKENS = {
    "hit_tokens": {"cpu": 60, "nvme": 0},
    "missed_tokens": {"evicted": 30, "tail": 10},
    "lookup_tokens": 100,
    "counts": {"timed_out": 1},
}
PAGE = 256 << 10


def traffic(live: LiveEngine) -> None:
    """More blocks than memory holds: the first leave it, are asked for, and read from disk."""
    live.read(live.ask(hashes(4, "first")))
    for number in range(100):
        live.put(hashes(1, f"other{number}"))
    live.scheduler.send(p.Step(**TOKENS))  # type: ignore[arg-type]
    live.read(live.ask(hashes(2, "first")))


@pytest.mark.slow
def test_M1_M3_Q6_every_query_in_the_docs_returns_data(tmp_path: Path) -> None:
    """Alerts, too: the first event of a kind is an increase, since its counter was there before."""
    port = free_port()
    server = {"socket": f"{tmp_path}/kv.sock", "metrics": f"127.0.0.1:{port}"}
    nvme = {"path": f"{tmp_path}/kv", "capacity": "256MiB", "write_budget": "10TiB"}
    cpu = {"capacity": "16MiB", "policy": "lru"}  # what was used leaves, too
    settings = config.parse({"cpu": cpu, "nvme": nvme, "server": server})
    with LiveStore(settings) as store, prometheus(tmp_path, [port]) as watch:
        with engine(store, page_bytes=PAGE, model="qwen") as live:
            live.put(hashes(4, "first"))
            watch.seen()
            traffic(live)
            with client(store) as stranger:
                stranger.sock.sendall(b"\xff" * 64)
                stranger.read_to_end()
            watch.seen()
            (alert,) = watch.wait_for(
                'increase(kvstore_refused_total{reason="malformed"}[2m])', "the first refusal"
            )
            assert alert[0]["reason"] == "malformed"
            watch.wait_for('increase(kvstore_engine_events_total{event="timed_out"}[2m])', "event")
            for query in OF_STORE:
                found = watch.ask(query)
                assert any(not math.isnan(value) for _, value in found), f"{query}: {found}"
            (rate,) = [value for _, value in watch.ask(OF_STORE[0])]
            assert rate == pytest.approx(0.6)
            assert {labels["model"] for labels, _ in watch.ask(BY_MODEL)} == {"qwen"}
            missed = {labels["reason"]: value for labels, value in watch.ask(WHY)}
            assert (missed["evicted"], missed["tail"]) == pytest.approx((0.3, 0.1))
            assert sum(missed.values()) + rate == pytest.approx(1)
            for event in p.EVENTS - {DEFERRED_STEPS}:
                assert watch.ask(f'kvstore_engine_events_total{{event="{event}"}}')
        for spec in TABLE:
            name = {"counter": f"{spec.name}_total", "histogram": f"{spec.name}_bucket"}
            elsewhere = spec.of_peers or spec.name == "kvstore_object_requests"  # it has no bucket
            if spec.kind in name and not elsewhere:
                assert watch.ask(name[spec.kind]), spec.name


def test_Q6_the_docs_answer_each_question_of_operators() -> None:
    page = text("docs/how-to/read-metrics.md")
    asked = re.findall(r"^\| ([A-Z].*\?) \| (.*) \|$", page, re.MULTILINE)
    assert len(asked) == 10
    for question, sections in asked:
        for anchor in re.findall(r"\(#([a-z-]+)\)", sections):
            (title,) = [
                t for t in re.findall(r"^## (.*)$", page, re.MULTILINE) if slug(t) == anchor
            ]
            section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
            assert "```promql" in section, question


def slug(title: str) -> str:
    return re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-")
