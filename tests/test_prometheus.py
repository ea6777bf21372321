"""What a real Prometheus makes of a store's endpoint, by the queries in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import config
from kvstore.metrics import TABLE
from kvstore.wire import engine as p
from tests.bench.store import free_port
from tests.harness.fakes import hashes
from tests.harness.live import LiveStore, client, engine
from tests.harness.prometheus import prometheus, queries

OF_STORE = [query for query in queries() if "vllm:" not in query]


@pytest.mark.slow
def test_M1_M3_every_query_in_the_docs_returns_data(tmp_path: Path) -> None:
    """Alerts, too: the first event of a kind is an increase, since its counter was there before."""
    port = free_port()
    server = {"socket": f"{tmp_path}/kv.sock", "metrics": f"127.0.0.1:{port}"}
    settings = config.parse({"cpu": {"capacity": "64MiB"}, "server": server})
    with LiveStore(settings) as store, prometheus(tmp_path, [port]) as watch:
        with engine(store) as live:
            watch.seen()
            live.put(chain := hashes(4))
            live.read(live.ask(chain))
            used = p.Step(
                lookup_tokens=100,
                hit_tokens={"cpu": 60},
                missed_tokens={"tail": 40},
                counts={"timed_out": 1},
            )
            live.scheduler.send(used)
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
                assert watch.ask(query), f"no data: {query}"
            (rate,) = [value for _, value in watch.ask(OF_STORE[0])]
            assert rate == pytest.approx(0.6)
            for event in p.EVENTS:
                assert watch.ask(f'kvstore_engine_events_total{{event="{event}"}}')
        for spec in TABLE:
            if spec.kind == "counter" and not spec.of_peers and spec.labels != ("tier", "event"):
                assert watch.ask(f"{spec.name}_total"), spec.name
