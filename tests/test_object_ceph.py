"""What only Ceph's gateway shows: a real quota. All tests of the bucket run on it, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.check import Level, examine
from kvstore.store import admin
from tests.harness.fakes import hashes
from tests.harness.live import LiveEngine, LiveStore, engine, eventually, store_settings
from tests.harness.patience import WAIT_S
from tests.harness.s3 import BUCKET, CREDENTIALS, OF_CEPH, URL, S3Server
from tiers.object import health as of_health
from tiers.object import tier as of_tier

pytestmark = pytest.mark.skipif(not OF_CEPH, reason="it needs Ceph: make test-ceph")
QUOTA = 6 << 20
OBJECTS = 2  # of two blocks of 1 MiB and a header; three do not fit


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(of_tier, "DELAY_NS", 1_000_000)
    monkeypatch.setattr(of_health, "RETRY_S", 0.2)
    monkeypatch.setattr(of_health, "RETRY_MAX_S", 0.2)
    with S3Server() as found:
        yield found


def read(attached: LiveEngine, store: LiveStore, prompts: list[list[bytes]]) -> str:
    """Use all prompts, with the right bytes; return the state of the bucket's tier."""
    for chain in prompts:
        found = attached.load(attached.ask(chain), WAIT_S)
        assert found == [attached.content(block) for block in chain[: len(found)]], "wrong bytes"
    states = admin.stats(f"unix://{store.path}", timeout_s=WAIT_S)
    (state,) = [
        stat.labels["state"]
        for stat in states
        if stat.name == "kvstore_tiers" and stat.labels["tier"] == "object" and stat.value
    ]
    return state


def test_Q73_Q76_a_bucket_at_its_quota_is_read_only_until_there_is_room(
    server: S3Server, tmp_path: Path
) -> None:
    bucket = {"url": URL, "endpoint": server.endpoint, "timeout": "25s"}
    config = store_settings(tmp_path, object=bucket)
    assert server.ceph is not None
    server.ceph.bound(QUOTA, "bucket", BUCKET)
    said = f"quota: x-rgw-quota-bucket-size {QUOTA}"
    found = [finding.level for finding in examine(config) if finding.text == said]
    assert found == [Level.OK]
    prompts = [hashes(4, f"prompt {number}") for number in range(4)]  # of 1 MiB each
    with LiveStore(config) as store, engine(store) as attached:
        for chain in prompts:
            attached.put(chain)
        eventually(lambda: read(attached, store, prompts) == "read_only")
        assert len(server.names()) == OBJECTS
        server.ceph.bound(0, "bucket", BUCKET)
        eventually(lambda: read(attached, store, prompts) == "ok")
        assert len(server.names()) > OBJECTS
