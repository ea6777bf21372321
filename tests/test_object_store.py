"""Stores that share a bucket, and what they do when it fails: each a miss, and nothing stranded."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import obstore
import pytest

from kvstore.store import admin
from kvstore.store import hints as of_hints
from tests.harness.fakes import hashes, value_of
from tests.harness.live import LiveEngine, LiveStore, engine, eventually, store_settings
from tests.harness.patience import WAIT_S
from tests.harness.s3 import CREDENTIALS, URL, Proxy, S3Server
from tiers.object import bucket as of_bucket
from tiers.object import health as of_health
from tiers.object import tier as of_tier

RUN = 2  # blocks of 1 MiB


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(of_tier, "DELAY_NS", 1_000_000)
    # However busy the machine is; tests of deadlines have their own.
    monkeypatch.setattr(of_tier, "SEARCH_NS", 25_000_000_000)
    monkeypatch.setattr(of_bucket, "LOOK_S", 25.0)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as found:
        yield found


@pytest.fixture
def s3(server: S3Server) -> S3Server:
    server.empty()
    return server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with Proxy(s3) as found:
        yield found


def live(folder: Path, endpoint: str, **more: object) -> LiveStore:
    """A store that has the bucket; more: of [object], or other sections."""
    bucket = {"url": URL, "endpoint": endpoint, "timeout": "25s"}
    sections = {name: value for name, value in more.items() if isinstance(value, dict)}
    bucket |= {name: str(value) for name, value in more.items() if name not in sections}
    # A lookup may come before the store has heard that the last one's blocks have been read.
    sections.setdefault("engine", {"promote": "30s", "leased": "100%"})
    return LiveStore(store_settings(folder, object=bucket, **sections))


def numbers(store: LiveStore) -> dict[str, float]:
    """Of the bucket and its tier, by name{label}."""
    found: dict[str, float] = {}
    for stat in admin.stats(f"unix://{store.path}", timeout_s=WAIT_S):
        if stat.labels.get("tier") == "object" or stat.name == "kvstore_object_requests":
            label = stat.labels.get("state") or stat.labels.get("event", "")
            name = f"{stat.name.removeprefix('kvstore_')}{{{label}}}"
            found[name] = found.get(name, 0) + stat.value
    return found


def stat(store: LiveStore, name: str) -> float:
    found = [s.value for s in admin.stats(f"unix://{store.path}", timeout_s=WAIT_S)
             if s.name == name]  # fmt: skip
    return sum(found)


def read(attached: LiveEngine, chain: Sequence[bytes]) -> tuple[int, dict[str, int]]:
    """Ask for blocks and read them, with the right bytes; return how many came, and from where."""
    granted = attached.ask(chain)
    found = attached.load(granted, WAIT_S)
    assert found == [attached.content(block) for block in chain[: len(found)]], "wrong bytes"
    return len(found), dict(granted.sources)


def share(attached: LiveEngine, s3: S3Server, chain: Sequence[bytes]) -> None:
    """Store blocks, use them once more, and wait until all whole runs of them are put."""
    before = len(s3.names())
    attached.put(chain)
    eventually(
        lambda: (
            read(attached, chain)[0] == len(chain) and len(s3.names()) == before + len(chain) // RUN
        )
    )


def assert_at_rest(store: LiveStore) -> None:
    """No lease, job or pinned block is left."""
    eventually(lambda: not stat(store, "kvstore_leases") and not stat(store, "kvstore_jobs_open"))
    pinned = [
        each
        for each in admin.stats(f"unix://{store.path}", timeout_s=WAIT_S)
        if each.name == "kvstore_pinned_bytes" and each.labels["cause"] != "credit" and each.value
    ]
    assert not pinned


def test_Q70_two_stores_share_a_prefix(s3: S3Server, tmp_path: Path) -> None:
    """Also with the first store gone, and what is loaded is in memory and on disk from then on."""
    chain = hashes(7, "shared")
    with live(tmp_path / "a", s3.endpoint) as a, engine(a) as first:
        share(first, s3, chain)
        assert_at_rest(a)
    disk: dict[str, object] = {"path": str(tmp_path / "disk"), "capacity": "64MiB"}
    with live(tmp_path / "b", s3.endpoint, nvme=disk) as b, engine(b) as second:
        assert read(second, chain) == (6, {"object": 6})  # the seventh is in no whole run
        assert read(second, chain) == (6, {})
        found = numbers(b)
        assert found["tier_blocks{loaded}"] == 6
        assert found["object_requests{get_ok}"] == 3
        assert found["object_requests{put_ok}"] == 0
        eventually(lambda: stat(b, "kvstore_tier_slots"))
        assert_at_rest(b)


def test_Q70_what_was_used_once_is_not_put(s3: S3Server, tmp_path: Path) -> None:
    with live(tmp_path / "a", s3.endpoint) as a, engine(a) as attached:
        attached.put(hashes(6, "once"))
        share(attached, s3, hashes(4, "twice"))
        assert numbers(a)["object_requests{put_ok}"] == 2
        assert len(s3.names()) == 2


def test_Q70_stores_that_lost_everything_hit(s3: S3Server, tmp_path: Path) -> None:
    """Both restarted, with empty memory and disks."""
    chains = [hashes(4, "x"), hashes(6, "y")]
    for number, chain in enumerate(chains):
        with live(tmp_path / f"s{number}", s3.endpoint) as store, engine(store) as attached:
            share(attached, s3, chain)
    for number in range(2):
        with live(tmp_path / f"t{number}", s3.endpoint) as store, engine(store) as attached:
            for chain in chains:
                assert read(attached, chain) == (len(chain), {"object": len(chain)})


def test_Q70_a_request_that_keeps_off_the_disk_is_not_put(s3: S3Server, tmp_path: Path) -> None:
    with live(tmp_path / "a", s3.endpoint) as a, engine(a) as attached:
        chain = hashes(4, "private")
        attached.put(chain, off_disk=True)
        eventually(lambda: read(attached, chain)[0] == 4)
        eventually(lambda: numbers(a)["tier_blocks{late}"] + len(s3.names()) >= RUN)
        share(attached, s3, hashes(4, "public"))
    with live(tmp_path / "b", s3.endpoint) as b, engine(b) as second:
        assert read(second, chain) == (0, {})


@pytest.mark.parametrize("source", ["refused", "dead", "mute"])
def test_Q70_what_a_hints_source_lacks_is_looked_for_in_the_bucket(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    if source == "dead":
        monkeypatch.setattr(of_hints, "WAIT_NS", int(WAIT_S * 1e9))
    hosts = ["10.0.0.1"] if source == "refused" else ["127.0.0.0/8"]
    chain, outcome = hashes(4, "hinted"), {"dead": "nothing", "mute": "late"}.get(source, source)
    with live(tmp_path / "a", s3.endpoint) as a, engine(a) as attached:
        share(attached, s3, chain)
    with ExitStack() as stack:
        b = stack.enter_context(live(tmp_path / "b", s3.endpoint, peer={"hints": hosts}))
        second = stack.enter_context(engine(b))
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        if source == "dead":
            sock.close()
        else:
            stack.enter_context(sock)
        granted = second.ask(chain, peer=f"127.0.0.1:{port}", hinted=4)
        assert second.load(granted, WAIT_S) == [second.content(block) for block in chain]
        assert granted.sources == {"object": 4}
        assert value_of(b.server.store.numbers, "kvstore_hints", outcome) == 1


def test_Q72_a_server_that_freezes_or_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer comes in time; the store stays ready, and goes on once the server is back."""
    monkeypatch.setattr(of_health, "RETRY_S", 0.2)
    monkeypatch.setattr(of_health, "RETRY_MAX_S", 0.2)
    chain, other = hashes(4, "before"), hashes(6, "frozen")
    with ExitStack() as stack:
        s3 = stack.enter_context(S3Server())
        with live(tmp_path / "first", s3.endpoint) as a, engine(a) as attached:
            share(attached, s3, chain)
        memory = {"capacity": "64MiB"}  # room for all: what is new would be the first to leave
        b = stack.enter_context(live(tmp_path / "second", s3.endpoint, timeout="3s", cpu=memory))
        second = stack.enter_context(engine(b))
        with s3.frozen():
            began_s = time.monotonic()
            assert read(second, chain) == (0, {})
            assert time.monotonic() - began_s < 20
            asked = iter(range(1000))

            def off() -> bool:
                assert read(second, hashes(4, f"asked {next(asked)}")) == (0, {})
                return bool(numbers(b)["tiers{off}"])

            eventually(off)
            assert numbers(b)["object_requests{head_timeout}"] >= 3
            second.put(other)
            assert read(second, other)[0] == 6  # memory serves as ever
            assert b.server.health.not_ready() == []
        eventually(lambda: numbers(b)["tiers{ok}"])
        eventually(lambda: read(second, chain)[0] == 4)
        assert_at_rest(b)
        s3.kill()
        eventually(off)
        assert read(second, other)[0] == 6
        s3.start()  # it has forgotten all
        eventually(lambda: numbers(b)["tiers{ok}"])
        share(second, s3, hashes(4, "after"))
        assert_at_rest(b)


@pytest.mark.parametrize("fault", ["short", "flip", "gone", "fail", "drop", "hang", "refuse"])
def test_Q72_a_load_that_fails_is_a_miss(
    s3: S3Server, proxy: Proxy, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects are found, and cannot be read: no block comes, none stays pinned, all is counted."""
    monkeypatch.setattr(of_health, "RETRY_S", 0.2)
    chain = hashes(4, "bad")
    with live(tmp_path / "a", s3.endpoint) as a, engine(a) as attached:
        share(attached, s3, chain)
    with live(tmp_path / "b", proxy.endpoint, timeout="500ms") as b, engine(b) as second:
        proxy.always(fault, "GET")
        assert read(second, chain)[0] == 0
        eventually(lambda: numbers(b)["tier_blocks{loaded_failed}"] >= 4)
        assert_at_rest(b)
        corrupt = numbers(b)["tier_blocks{corrupt}"]
        assert (corrupt > 0) == (fault in ("short", "flip"))
        proxy.always("")
        second.put(chain)  # the engine has computed
        assert read(second, chain)[0] == 4
        assert_at_rest(b)


def test_Q72_an_object_that_expired_between_lookup_and_load(s3: S3Server, tmp_path: Path) -> None:
    chain = hashes(6, "expires")
    memory: dict[str, object] = {"capacity": "16MiB", "policy": "lru"}
    with live(tmp_path / "a", s3.endpoint, cpu=memory) as a, engine(a) as attached:
        share(attached, s3, chain)
        fill = hashes(14, "other")
        attached.put(fill)  # the chain leaves memory
        eventually(lambda: read(attached, fill)[0] > 0)
        for name in s3.names():
            obstore.delete(s3.client, name)
        count, _ = read(attached, chain)
        assert count < 6
        assert_at_rest(a)
        attached.put(chain)
        eventually(lambda: read(attached, chain)[0] == 6)


def test_Q72_a_slow_bucket_costs_a_request_no_more_than_its_wait(
    s3: S3Server, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = hashes(4, "slow")
    with live(tmp_path / "a", s3.endpoint) as a, engine(a) as attached:
        share(attached, s3, chain)
    monkeypatch.setattr(of_tier, "SEARCH_NS", 1_500_000_000)
    with live(tmp_path / "b", proxy.endpoint) as b, engine(b) as second:
        proxy.slow_s = 30.0
        proxy.always("slow", "HEAD")
        began_s = time.monotonic()
        assert read(second, chain) == (0, {})
        assert time.monotonic() - began_s < 20  # and not 30
        proxy.ended.set()


def test_Q73_a_refused_put_costs_nothing_but_the_put(
    s3: S3Server, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_health, "RETRY_S", 0.2)
    monkeypatch.setattr(of_health, "RETRY_MAX_S", 0.2)
    with live(tmp_path / "a", proxy.endpoint) as a, engine(a) as attached:
        share(attached, s3, hashes(4, "good"))
        proxy.always("quota", "PUT")
        chain = hashes(4, "refused")
        attached.put(chain)
        assert read(attached, chain)[0] == 4
        eventually(lambda: numbers(a)["tiers{read_only}"])
        found = numbers(a)
        assert found["object_requests{put_refused}"] >= 1
        assert found["tier_blocks{stored_failed}"] >= RUN
        assert_at_rest(a)
        status: Any = admin.status(f"unix://{a.path}")
        assert [f.what for f in status.findings if "object" in f.what] == [
            "tier object is read_only"
        ]
        proxy.always("")

        def back() -> bool:
            read(attached, chain)
            return bool(numbers(a)["tiers{ok}"])

        eventually(back)


def test_Q72_a_store_that_ends_begins_no_put(
    proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its log does not say that the blocks of an open put were only in memory."""
    caplog.set_level("INFO")
    disk = {"path": str(tmp_path / "disk"), "capacity": "64MiB"}
    with live(tmp_path / "a", proxy.endpoint, nvme=disk) as a, engine(a) as attached:
        proxy.slow_s = WAIT_S
        proxy.always("slow", "PUT")
        chain = hashes(10, "slow")
        attached.put(chain)
        assert read(attached, chain)[0] == 10
        eventually(lambda: proxy.seen["PUT"] == 2)  # of five: no more may be pinned
        eventually(lambda: a.server.store.drain.stored() == 10)  # to disk
        assert not a.server.store.namespaces.queued_blocks
        a.server.stop()
        eventually(lambda: "detached" in caplog.text)
        proxy.ended.set()
    assert "only" not in caplog.text
    assert proxy.seen["PUT"] == 2


def test_the_loop_sleeps_while_the_bucket_works_and_is_woken_once(
    proxy: Proxy, tmp_path: Path
) -> None:
    with live(tmp_path / "a", proxy.endpoint) as a, engine(a) as attached:
        proxy.slow_s = WAIT_S
        proxy.always("slow", "PUT")
        chain = hashes(4, "sleep")
        attached.put(chain)
        assert read(attached, chain)[0] == 4
        eventually(lambda: proxy.seen["PUT"] == 2)
        assert a.server.store.namespaces.awake[0].tiering.jobs_open
        eventually(lambda: not a.server.store.busy)
        proxy.ended.set()
        eventually(lambda: not stat(a, "kvstore_jobs_open"))
        bucket = a.server.store.bucket
        assert bucket is not None
        eventually(lambda: not select.select([bucket], [], [], 0)[0])


def test_Q74_a_hit_that_memory_has_asks_the_bucket_nothing(
    s3: S3Server, proxy: Proxy, tmp_path: Path
) -> None:
    chain = hashes(4, "hot")
    with live(tmp_path / "a", proxy.endpoint) as a, engine(a) as attached:
        share(attached, s3, chain)
        before = proxy.seen.total()
        for _ in range(20):
            assert read(attached, chain) == (4, {})
        assert proxy.seen.total() == before
        assert read(attached, hashes(1, "short")) == (0, {})  # no whole run
        assert proxy.seen.total() == before


def test_Q77_a_cleared_store_uses_no_object_of_before(s3: S3Server, tmp_path: Path) -> None:
    chain = hashes(4, "old")
    with live(tmp_path / "a", s3.endpoint) as a, engine(a) as attached:
        share(attached, s3, chain)
        admin.clear(f"unix://{a.path}")
        assert read(attached, chain) == (0, {})
        assert len(s3.names()) == 2
        attached.put(chain)
        eventually(lambda: read(attached, chain)[0] == 4)
        eventually(lambda: numbers(a)["object_requests{put_ok}"] == 4)


def test_Q77_a_model_that_comes_after_a_clear_uses_none_either(
    s3: S3Server, tmp_path: Path
) -> None:
    chain = hashes(4, "later")
    with live(tmp_path / "a", s3.endpoint) as a, engine(a) as attached:
        share(attached, s3, chain)
    with live(tmp_path / "b", s3.endpoint) as b:
        admin.clear(f"unix://{b.path}")
        with engine(b) as attached:
            assert read(attached, chain) == (0, {})


def test_Q75_stores_with_the_cluster_key_share_and_others_see_nothing(
    s3: S3Server, tmp_path: Path
) -> None:
    from kvstore.handover.cluster_key import ClusterKey

    keys = [tmp_path / "one.key", tmp_path / "two.key"]
    for path in keys:
        ClusterKey.make(path)
    chain = hashes(4, "secret")
    with live(tmp_path / "a", s3.endpoint, key=keys[0]) as a, engine(a) as attached:
        share(attached, s3, chain)
        data = [bytes(obstore.get(s3.client, name).bytes()) for name in s3.names()]
        assert not any(block in each for block in chain for each in data)
    for number, (key, expected) in enumerate(((keys[0], 4), (keys[1], 0))):
        with live(tmp_path / f"b{number}", s3.endpoint, key=key) as b, engine(b) as second:
            assert read(second, chain)[0] == expected
