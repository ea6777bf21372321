"""The object tier on a real S3 server: a tier's contract, paths, budgets, and bad servers."""

from __future__ import annotations

import hashlib
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self
from unittest.mock import Mock

import obstore
import pytest

from kvstore import clock
from kvstore.config import ObjectConfig, parse
from kvstore.core.copy_queue import RunQueue
from kvstore.core.errors import BlockCorrupt, TierIOError
from kvstore.core.tier import SlotMemory, Tier, TierContext
from kvstore.core.types import (
    BlockKey,
    Chain,
    GroupRule,
    JobId,
    JobKind,
    JobResult,
    LookupResult,
    Slot,
    TransferJob,
)
from kvstore.testing import SLOT_BYTES, TierContract, finish
from kvstore.testing.contract import ArrayMemory
from tests.harness.patience import WAIT_S
from tests.harness.s3 import CREDENTIALS, URL, Proxy, S3Server
from tiers.object import bucket as of_bucket
from tiers.object import health as of_health
from tiers.object import search as of_search
from tiers.object import tier as of_tier
from tiers.object.bucket import Bucket, Request
from tiers.object.format import Run
from tiers.object.tier import ObjectTier

FULL = [GroupRule()]
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(of_tier, "DELAY_NS", 0)
    # However busy the machine is; tests of deadlines have their own.
    monkeypatch.setattr(of_tier, "SEARCH_NS", int(WAIT_S * 1e9))
    monkeypatch.setattr(of_bucket, "LOOK_S", WAIT_S)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as found:
        yield found


@pytest.fixture
def s3(server: S3Server) -> S3Server:
    """An empty bucket."""
    server.empty()
    return server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with Proxy(s3) as found:
        yield found


def settings(endpoint: str, **more: object) -> ObjectConfig:
    found = {"url": URL, "endpoint": endpoint, "timeout": f"{WAIT_S}s", **more}
    config = parse({"cpu": {"capacity": "16MiB"}, "object": found}).bucket
    assert config is not None
    return config


class Rig:
    """A tier, its memory, and paths of blocks whose bytes follow from their keys."""

    def __init__(
        self, endpoint: str, run_blocks: int = 4, secret: bytes | None = None, **more: object
    ) -> None:
        config = settings(endpoint, run=run_blocks * SLOT_BYTES, **more)
        self.bucket = Bucket(config, secret)
        self.memory = ArrayMemory()
        context = TierContext("object", "0123456789abcdef", SLOT_BYTES, self.memory, {})
        self.tier = ObjectTier(context, self.bucket)
        self._jobs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.tier.close()
        self.bucket.close()

    def until(self, done: Callable[[], object]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < end_s, "not in time"
            assert not self.tier.poll()
            time.sleep(0.001)

    @staticmethod
    def eventually(done: Callable[[], object]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < end_s, "not in time"
            time.sleep(0.02)

    def know(self, path: Chain, blocks: int) -> None:
        """Have the tier know of the runs that another one has put."""
        for at in range(0, blocks, 4):
            keys = path.keys_at(0, range(at, at + 4))
            run = Run(self.tier._form.name_of(keys[-1]), keys)
            self.tier._known.there(run, clock.now_ns())

    def job(self, kind: JobKind, keys: Sequence[BlockKey], first: int = 0) -> JobResult:
        """Do a job with the slots from `first` on."""
        self._jobs += 1
        slots = tuple(Slot(first + at) for at in range(len(keys)))
        self.tier.submit(TransferJob(JobId(self._jobs), kind, tuple(keys), slots))
        (result,) = finish(self.tier, 1)
        assert result.job_id == self._jobs
        return result

    def put(self, path: Chain, blocks: int, rules: Sequence[GroupRule] = FULL) -> int:
        """Have a path used, and store what the tier wants of it; return how many runs that was."""
        self.tier.use(rules, path, blocks, clock.now_ns())
        count = 0
        while keys := self.tier.offered(clock.now_ns(), all_here):
            for at, name in enumerate(keys):
                self.memory.view(Slot(at))[:] = content(name)
            assert self.job(JobKind.STORE, keys).error is None
            count += 1
        return count

    def search(self, path: Chain, blocks: int, first: int = 0) -> int:
        """Look a path up; return how many blocks from the first on are hits."""
        self.tier.search(FULL, path, first, blocks, clock.now_ns())
        self.until(lambda: self.tier.lookup(path.key(0, first)) is not RETRY)
        result, count = self.tier.leading(path.keys_at(0, range(first, blocks)), 0)
        return count if result is HIT else 0

    def load(self, keys: Sequence[BlockKey], first: int = 8) -> JobResult:
        """Load blocks; those that arrived have the right bytes, and no other slot was touched."""
        before = [bytes(self.memory.view(Slot(at))) for at in range(32)]
        result = self.job(JobKind.LOAD, keys, first)
        for at, name in enumerate(keys[: result.done]):
            assert self.memory.view(Slot(first + at)) == content(name)
        for at in range(32):
            if not first <= at < first + len(keys):
                assert self.memory.view(Slot(at)) == before[at]
        return result


def all_here(_keys: Sequence[BlockKey]) -> bool:
    """Whether memory has blocks: all."""
    return True


def content(name: BlockKey) -> bytes:
    return hashlib.shake_128(name).digest(SLOT_BYTES)


def chain(blocks: int, text: str = "a", groups: int = 1, scope: bytes = b"") -> Chain:
    names = [hashlib.sha256(f"{text}{n}".encode()).digest() for n in range(blocks)]
    return Chain(b"".join(names), 32, groups, scope)


class TestObjectTier(TierContract):
    """With runs of one block, whatever is stored can be found by its key."""

    secret: bytes | None = None

    @pytest.fixture
    def tier(self, context: TierContext, s3: S3Server) -> Iterator[ObjectTier]:
        bucket = Bucket(settings(s3.endpoint, run=SLOT_BYTES), self.secret)
        tier = ObjectTier(context, bucket)
        yield tier
        tier.close()
        bucket.close()

    def stock(self, tier: Tier, memory: SlotMemory, numbers: Sequence[int]) -> None:
        """A job is a run."""
        for number in numbers:
            super().stock(tier, memory, [number])


class TestEncryptedObjectTier(TestObjectTier):
    secret = SECRET


@pytest.mark.parametrize("blocks", [0, 3, 4, 7, 20, 27, 31])
def test_Q70_another_store_finds_the_whole_runs_of_a_prefix(s3: S3Server, blocks: int) -> None:
    path = chain(32)
    with Rig(s3.endpoint) as first, Rig(s3.endpoint) as second:
        assert first.put(path, blocks) == blocks // 4
        whole = blocks // 4 * 4
        assert second.search(path, 32) == whole
        for at in range(0, whole, 12):
            keys = path.keys_at(0, range(at, min(at + 12, whole)))
            assert second.load(keys).done == len(keys)
        assert second.put(path, blocks) == 0  # they are there
    assert len(s3.names()) == blocks // 4


def test_Q70_a_hit_may_begin_within_a_run(s3: S3Server) -> None:
    """Jobs that want parts of one object read it once."""
    path = chain(12)
    with Rig(s3.endpoint) as first, Rig(s3.endpoint) as second:
        first.put(path, 12)
        assert second.search(path, 12, first=6) == 6
        for number, part in enumerate((range(6, 7), range(7, 9), range(9, 12))):
            slots = tuple(Slot(at) for at in part)
            keys = tuple(path.keys_at(0, part))
            second.tier.submit(TransferJob(JobId(number), JobKind.LOAD, keys, slots))
        assert [result.error for result in finish(second.tier, 3)] == [None] * 3
        assert second.bucket.counts["get_ok"] == 2
        for at in range(6, 12):
            assert second.memory.view(Slot(at)) == content(path.key(0, at))


def test_Q70_few_questions_find_the_end_of_a_long_prefix(s3: S3Server) -> None:
    path = chain(2048)
    with Rig(s3.endpoint) as rig, Rig(s3.endpoint) as other:
        rig.put(path, 300)
        assert other.search(path, 2048) == 300
        assert other.bucket.counts["head_ok"] + other.bucket.counts["head_missing"] <= 24
        asked = other.bucket.counts.total()
        assert other.search(path, 2048, first=300) == 0
        assert other.bucket.counts.total() == asked  # what is not there is remembered


def test_Q70_one_round_of_questions_finds_that_nothing_is_there(s3: S3Server) -> None:
    with Rig(s3.endpoint) as rig:
        assert rig.search(chain(2048), 2048) == 0
        assert rig.bucket.counts == {"head_missing": of_search.PARALLEL}


def test_Q70_groups_that_need_the_end_only(s3: S3Server) -> None:
    """Of a window and a state what a hit needs that ends with the last run."""
    rules = [GroupRule(3), GroupRule(), GroupRule(1, exact=True)]
    path = chain(16, groups=3)
    with Rig(s3.endpoint) as first, Rig(s3.endpoint) as second:
        assert first.put(path, 13, rules) == 9
        second.tier.search(rules, path, 0, 16, clock.now_ns())
        second.until(lambda: second.tier.lookup(path.key(1, 0)) is not RETRY)
        for group, hits in enumerate(([9, 10, 11], range(12), [11])):
            found = [at for at in range(16) if second.tier.lookup(path.key(group, at)) is HIT]
            assert found == list(hits)
        assert second.load([path.key(0, 11), path.key(2, 11), path.key(1, 0)]).done == 3


def test_Q71_stores_with_other_blocks_share_nothing(s3: S3Server) -> None:
    path = chain(8)
    with Rig(s3.endpoint) as first:
        first.put(path, 8)
    for other in (
        Rig(s3.endpoint, secret=SECRET),
        Rig(s3.endpoint, run_blocks=2),
    ):
        with other:
            assert other.search(path, 8) == 0
    with Rig(s3.endpoint) as same:
        assert same.search(chain(8, scope=b"team"), 8) == 0
        assert same.search(path, 8) == 8


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("fault", ["short", "long", "flip", "other"])
def test_Q71_a_damaged_object_is_a_miss_and_put_anew(
    s3: S3Server, proxy: Proxy, fault: str, secret: bytes | None
) -> None:
    """It stays: what damages it may be on the way to this store, and others can read it."""
    path = chain(4)
    with Rig(s3.endpoint, secret=secret) as other, Rig(proxy.endpoint, secret=secret) as rig:
        rig.put(path, 4)
        proxy.always(fault, "GET")
        result = rig.load(path.keys_at(0, range(4)))
        assert isinstance(result.error, BlockCorrupt)
        assert result.done < 4
        assert rig.tier.lookup(path.key(0, 0)) is MISS
        rig.tier.discard(path.keys(0, 1))  # as the store does
        assert rig.bucket.counts["get_corrupt"] == 1
        assert other.search(path, 4) == 4
        assert other.load(path.keys_at(0, range(4))).done == 4
        assert rig.put(path, 4) == 1
        assert set(proxy.seen) == {"HEAD", "GET", "PUT"}
        assert rig.bucket.counts["put_ok"] == 2


def test_Q71_a_page_of_a_server_in_between_is_no_object(s3: S3Server, proxy: Proxy) -> None:
    """Nor is an object of another length: it is put."""
    path = chain(8)
    with Rig(proxy.endpoint) as rig, Rig(s3.endpoint) as other:
        proxy.always("page", "HEAD", "GET")
        assert rig.search(path, 8) == 0
        assert rig.bucket.counts["head_corrupt"] == 2
        assert rig.search(path, 8) == 0
        assert rig.bucket.counts["head_corrupt"] == 2  # it is remembered
        proxy.always("")
        names = [rig.tier._form.name_of(path.key(0, at)) for at in (3, 7)]
        for name in names:
            obstore.put(s3.client, name, b"short")
        assert other.put(path, 8) == 2
        assert [rig.bucket.counts["get_ok"], other.bucket.counts["put_ok"]] == [0, 2]
        assert {obstore.head(s3.client, name)["size"] for name in names} == {
            other.tier._form.size(Run(names[0], path.keys(0, 4)))
        }


def test_Q71_an_object_of_another_length_is_not_read(s3: S3Server) -> None:
    """No memory is taken for it."""
    taken: list[int] = []
    ended: list[Request] = []

    def take(data: memoryview) -> None:
        taken.append(len(data))

    obstore.put(s3.client, "v1/long", bytes(100))
    with Rig(s3.endpoint) as rig:
        for size in (50, 200, 100):
            rig.bucket.submit(Request("get", "v1/long", ended.append, size, take=take))
        rig.until(lambda: len(ended) == 3)
    assert sorted(request.outcome for request in ended) == ["corrupt", "corrupt", "ok"]
    assert taken == [100]


def test_Q72_an_object_that_has_expired_is_a_miss(s3: S3Server) -> None:
    path = chain(8)
    with Rig(s3.endpoint) as rig:
        rig.put(path, 8)
        obstore.delete(s3.client, s3.names()[0])
        results = [rig.load(path.keys_at(0, range(at, at + 4))) for at in (0, 4)]
        assert sorted(result.done for result in results) == [0, 4]
        assert any(isinstance(result.error, TierIOError) for result in results)
        assert rig.bucket.health.state == "ok"
        assert rig.bucket.counts["get_missing"] == 1


def test_Q70_after_one_is_missing_the_others_are_asked_for_and_put(s3: S3Server) -> None:
    """Of a bucket that was emptied, or whose objects expire together."""
    path = chain(16)
    with Rig(s3.endpoint) as rig:
        rig.put(path, 16)
        s3.empty()
        assert rig.put(path, 16) == 0  # as far as is known they are there
        assert rig.load(path.keys_at(0, range(8, 12))).done == 0
        assert rig.put(path, 16) == 4
    assert len(s3.names()) == 4


@pytest.mark.parametrize("fault", ["hang", "drop", "fail", "refuse"])
def test_Q72_a_bucket_that_does_not_answer_is_off_and_comes_back(
    proxy: Proxy, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs end within their deadlines, and the tier has no hits meanwhile."""
    monkeypatch.setattr(of_health, "RETRY_S", 0.2)
    monkeypatch.setattr(of_health, "RETRY_MAX_S", 0.2)
    paths = [chain(8, f"p{n}") for n in range(4)]
    limit = "3s" if fault == "hang" else f"{WAIT_S}s"
    with Rig(proxy.endpoint) as other, Rig(proxy.endpoint, timeout=limit) as rig:
        for path in paths:
            other.put(path, 8)
            rig.know(path, 8)
        proxy.always(fault, "GET", "HEAD")
        for number, path in enumerate(paths):
            keys, slots = tuple(path.keys_at(0, range(8))), tuple(map(Slot, range(8)))
            rig.tier.submit(TransferJob(JobId(number), JobKind.LOAD, keys, slots))
        results = finish(rig.tier, len(paths))
        assert [result.done for result in results] == [0] * len(paths)
        assert rig.bucket.health.state == "off"
        assert rig.tier.lookup(paths[0].key(0, 0)) is MISS
        before = proxy.seen["GET"]
        assert rig.load(paths[0].keys_at(0, range(8))).done == 0
        assert rig.search(chain(8, "unknown"), 8) == 0
        assert proxy.seen["GET"] == before  # nothing is sent
        proxy.always("")

        def loaded() -> bool:
            rig.until(lambda: rig.bucket.health.state == "ok")
            return rig.load(paths[0].keys_at(0, range(8))).done == 8

        rig.eventually(loaded)


def test_Q72_the_reason_names_what_the_storage_says(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """A clock that is wrong is no right that lacks."""
    with Rig(proxy.endpoint) as rig:
        proxy.always("skewed", "GET")
        rig.know(chain(4), 4)
        rig.load(chain(4).keys_at(0, range(4)))
    (line,) = [r.message for r in caplog.records if r.levelname == "ERROR"]
    assert "is off: RequestTimeTooSkewed: " in line
    assert "s3:ListBucket" not in line


@pytest.mark.parametrize(
    ("debug", "cause"),
    [
        ('Os { code: 111, kind: ConnectionRefused, message: "Connection refused" }', "refused"),
        ('"dns error", Custom { error: "Name or service not known" }', "service not known"),
        ("error: InvalidCertificate(\n    UnknownIssuer,\n)", "UnknownIssuer"),
        ("HttpError { kind: Timeout, source: reqwest::Error", "Timeout"),
        ("", "error sending request"),
    ],
)
def test_Q72_the_reason_has_the_cause_that_the_client_hides(debug: str, cause: str) -> None:
    """Its first line says that the request failed, whether a port, a name or a CA is wrong."""
    found = of_bucket.reason_of(OSError(f"HTTP error: error sending request\n\n{debug}"))
    assert found.startswith("HTTP error: error sending request")
    assert found.endswith(cause)


def test_Q72_a_port_where_none_listens_is_said(caplog: pytest.LogCaptureFixture) -> None:
    path = chain(4)
    with Rig("http://127.0.0.1:1") as rig:
        rig.know(path, 4)
        for _ in range(of_health.FAILURES_MAX):
            rig.load(path.keys_at(0, range(4)))
    (line,) = [r.message for r in caplog.records if r.levelname == "ERROR"]
    assert "error sending request: Connection refused;" in line


@pytest.mark.parametrize(("outcome", "times"), [("timeout", 3), ("refused", 1)])
def test_Q72_objects_that_do_not_come_switch_off_though_questions_are_answered(
    outcome: str, times: int
) -> None:
    """So does the first one after a trial that is answered, and the next trial is later."""
    health, now_s = of_health.Health("bucket"), 0.0

    def fail(times: int) -> None:
        for _ in range(times):
            health.ended("head", "ok", "", now_s)
            assert health.state == "ok"
            health.ended("get", outcome, "why", now_s)
        assert health.state == "off"

    fail(times)
    for wait_s in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
        assert not health.reads.may_try(now_s + wait_s - 0.1)
        now_s += wait_s
        assert health.reads.may_try(now_s)
        fail(1)
    health.ended("head", "missing", "", now_s)
    health.ended("get", "ok", "", now_s)
    fail(times)
    assert health.reads.may_try(now_s + 5.0)


def test_Q72_an_object_in_an_archive_is_a_miss_and_put_anew(proxy: Proxy) -> None:
    """A rule may move objects there: each read of one is refused, though it is there."""
    path = chain(8)
    with Rig(proxy.endpoint) as rig:
        rig.put(path, 8)
        archived = rig.tier._form.name_of(path.key(0, 3))
        proxy.fault = lambda method, at: "archived" if method == "GET" and archived in at else ""
        assert rig.load(path.keys_at(0, range(4))).done == 0
        assert rig.bucket.health.state == "ok"
        assert rig.load(path.keys_at(0, range(4, 8))).done == 4
        before = proxy.seen["PUT"]
        assert rig.put(path, 8) == 1
        assert proxy.seen["PUT"] == before + 1


@pytest.mark.parametrize(("method", "named"), [("HEAD", True), ("GET", True), ("PUT", False)])
def test_Q72_a_refusal_names_the_right_that_may_lack(
    proxy: Proxy, method: str, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the right to list, S3 refuses whatever is not there."""
    path = chain(4)
    with Rig(proxy.endpoint) as rig:
        proxy.always("refuse", method)
        rig.know(path, 4)
        if method == "HEAD":
            assert rig.search(chain(4, "unknown"), 4) == 0
        elif method == "GET":
            rig.load(path.keys_at(0, range(4)))
        else:
            rig.job(JobKind.STORE, chain(4, "new").keys_at(0, range(4)))
        (line,) = [r.message for r in caplog.records if r.levelname == "ERROR"]
        assert ("s3:ListBucket" in line) is named


def test_Q72_a_search_without_answers_ends(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its requests do; what they bring later is known then."""
    monkeypatch.setattr(of_tier, "SEARCH_NS", 50_000_000)
    proxy.slow_s = 2.0
    path = chain(8)
    with Rig(proxy.endpoint) as rig, Rig(proxy.endpoint) as other:
        other.put(path, 8)
        proxy.always("slow", "HEAD")
        began_s = time.monotonic()
        assert rig.search(path, 8) == 0
        assert time.monotonic() - began_s < proxy.slow_s or not rig.bucket.counts["head_ok"]
        rig.until(lambda: rig.bucket.counts["head_ok"] == 2)
        assert rig.search(path, 8) == 8


@pytest.mark.parametrize("fault", ["refuse", "quota", "gone", "fail", "hang"])
def test_Q73_refused_puts_make_the_tier_read_only_until_one_succeeds(
    s3: S3Server,
    proxy: Proxy,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(of_health, "RETRY_S", WAIT_S)
    monkeypatch.setattr(of_health, "RETRY_MAX_S", 0.2)
    caplog.set_level("INFO")
    here, path = chain(8, "here"), chain(32)
    limit = "3s" if fault == "hang" else f"{WAIT_S}s"
    with Rig(proxy.endpoint) as other, Rig(proxy.endpoint, timeout=limit) as rig:
        other.put(here, 8)
        rig.know(here, 8)
        proxy.always(fault, "PUT")
        rig.tier.use(FULL, path, 32, clock.now_ns())
        tried = 0
        while keys := rig.tier.offered(clock.now_ns(), all_here):
            assert rig.job(JobKind.STORE, keys).done == 0
            tried += 1
        assert tried == (1 if fault in ("refuse", "quota", "gone") else 3)
        assert rig.bucket.health.state == "read_only"
        rig.eventually(lambda: rig.load(here.keys_at(0, range(8))).done == 8)  # as before
        assert [r.levelname for r in caplog.records if "read_only" in r.message] == ["ERROR"]
        proxy.always("")
        rig.bucket.health.writes._retry_at_s = 0.0

        def back() -> bool:
            rig.tier.use(FULL, path, 32, clock.now_ns())
            while keys := rig.tier.offered(clock.now_ns(), all_here):
                rig.job(JobKind.STORE, keys)
            return rig.bucket.health.state == "ok"

        rig.eventually(back)
        assert len(s3.names()) > 2


def test_Q73_no_trial_is_spent_while_no_request_may_be_sent(s3: S3Server) -> None:
    """Lookups that take every request of a second put off the next trial, and did not spend it."""
    second_ns = 10**9
    with Rig(s3.endpoint, requests=1) as rig:
        rig.bucket.health.writes.bad("put", "why", 0.0, at_once=True)
        assert rig.bucket.may_look(5 * second_ns)
        assert not rig.bucket.may_put(5 * second_ns, anew=True)
        assert rig.bucket.may_put(6 * second_ns, anew=True)
        assert not rig.bucket.may_put(7 * second_ns, anew=True)
        assert rig.bucket.may_look(7 * second_ns)


def test_Q73_no_trial_is_spent_on_what_has_left_memory(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that is still there gets it."""
    monkeypatch.setattr(of_health, "RETRY_S", 0.0)
    monkeypatch.setattr(of_health, "RETRY_MAX_S", WAIT_S)
    gone, path = chain(32, "gone"), chain(4, "here")
    with Rig(proxy.endpoint, requests=4) as rig:
        proxy.always("refuse", "PUT")
        assert rig.job(JobKind.STORE, chain(4, "first").keys_at(0, range(4))).done == 0
        proxy.always("")
        rig.tier.use(FULL, gone, 32, clock.now_ns())
        rig.tier.use(FULL, path, 4, clock.now_ns())
        left, asked = set(gone.keys(0, 32)), []

        def in_memory(keys: Sequence[BlockKey]) -> bool:
            asked.append(keys)
            return left.isdisjoint(keys)

        keys = rig.tier.offered(clock.now_ns(), in_memory)
        assert list(keys) == path.keys(0, 4)
        assert len(asked) == 9
        assert rig.tier.waiting == 0


def test_Q73_a_run_that_memory_has_in_part_is_late() -> None:
    """The tier is asked to store whole runs only."""
    runs = [chain(2, text).keys(0, 2) for text in ("part", "whole")]
    counts: Counter[tuple[str, str]] = Counter()
    tier, manager = Mock(), Mock(pin_run=list)
    tier.name = "object"
    tier.offered = lambda _now_ns, here: next(filter(here, runs), ())
    manager.ready = lambda key: None if key == runs[0][1] else key
    taken: list[Any] = RunQueue(tier, tier, manager, counts).take(8, set(), 0)
    assert taken == runs[1]
    assert counts == {("object", "late"): 2}


def test_Q74_a_day_has_so_many_bytes(s3: S3Server) -> None:
    """An hour's share at first, strictly: what is beyond waits."""
    path = chain(32)
    object_bytes = 4 * SLOT_BYTES
    with Rig(s3.endpoint, write_budget=2 * 24 * object_bytes) as rig:
        assert rig.put(path, 32) == 2  # heads and sums are counted, so that the second goes beyond
        assert rig.tier.waiting == 32 - 8
        assert rig.bucket.budget.left_bytes < 0


def test_Q74_what_another_store_has_put_costs_no_budget(s3: S3Server) -> None:
    path = chain(16)
    with Rig(s3.endpoint) as other, Rig(s3.endpoint, write_budget=24 * SLOT_BYTES) as rig:
        other.put(path, 16)
        before = rig.bucket.budget.left_bytes
        assert rig.put(path, 16) == 4
        assert rig.bucket.budget.left_bytes >= before
        assert rig.put(chain(16, "new"), 16) == 1
        assert rig.bucket.budget.left_bytes < before


def test_Q74_a_put_that_asks_before_is_two_requests(s3: S3Server) -> None:
    with Rig(s3.endpoint, requests=4) as rig, Rig(s3.endpoint, requests=4) as cleared:
        cleared.tier.clear()  # it puts in any case
        for each, count in ((rig, 2), (cleared, 4)):
            each.tier.use(FULL, chain(32), 32, 0)
            found = [each.tier.offered(1, all_here) for _ in range(6)]
            assert [bool(keys) for keys in found] == [True] * count + [False] * (6 - count)


def test_Q74_a_second_has_so_many_requests(s3: S3Server) -> None:
    path = chain(256)
    with Rig(s3.endpoint, requests=3) as rig:
        began_s = time.monotonic()
        put = rig.put(path, 256)
        assert put <= 3 + 3 * (time.monotonic() - began_s)
        asked = [rig.search(chain(8, f"other{n}"), 8) for n in range(5)]
        assert asked == [0] * 5
        assert rig.bucket.counts["head_unsent"] > 0


def test_Q74_questions_to_a_slow_bucket_are_bounded_and_end_with_their_search(
    proxy: Proxy,
) -> None:
    """A question that still waits for a thread when its search is over is not sent."""
    proxy.slow_s = 0.3
    proxy.always("slow", "HEAD")
    with Rig(proxy.endpoint) as rig:
        assert rig.search(chain(4, "first"), 4) == 0
        proxy.slow_s = WAIT_S
        for number in range(20):  # of two questions each
            rig.tier.search(FULL, chain(8, f"q{number}"), 0, 8, clock.now_ns())
        threads, limit = of_bucket.LOOK_THREADS, of_bucket.LOOKS_MIN
        assert rig.bucket.counts["head_unsent"] == 40 - limit
        rig.eventually(lambda: proxy.seen["HEAD"] == 1 + threads)
        rig.tier.clear()
        proxy.ended.set()
        rig.until(lambda: rig.bucket.counts["head_unsent"] == 40 - threads)
        assert proxy.seen["HEAD"] == 1 + threads


def test_Q74_what_waits_is_bounded(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_tier, "QUEUE_MAX", 5)
    monkeypatch.setattr(of_tier, "SEARCHES_MAX", 2)
    with Rig(s3.endpoint) as rig:
        assert rig.tier.use(FULL, chain(32), 32, clock.now_ns()) == 12
        assert rig.tier.use(FULL, chain(32), 32, clock.now_ns()) == 12  # none twice
        assert rig.tier.waiting == 20
        for number in range(4):
            rig.tier.search(FULL, chain(8, f"q{number}"), 0, 8, clock.now_ns())
        waits = [rig.tier.lookup(chain(8, f"q{number}").key(0, 0)) for number in range(4)]
        assert waits.count(RETRY) <= 2


def test_Q74_a_turn_of_the_store_names_a_bounded_part_of_a_long_path(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_tier, "QUEUED_MAX", 4)
    monkeypatch.setattr(of_tier, "FOUND_MAX", 3)
    path = chain(120)
    with Rig(s3.endpoint) as first, Rig(s3.endpoint) as rig:
        assert [first.put(path, 120) for _ in range(9)] == [4] * 7 + [2, 0]
        rig.tier.search(FULL, path, 0, 120, clock.now_ns())
        grown, before = [0], 0

        def over() -> bool:
            nonlocal before
            known = len(rig.tier._known._runs)
            grown.append(known - before)
            before = known
            return rig.tier.lookup(path.key(0, 0)) is not RETRY

        rig.until(over)
        assert rig.search(path, 120) == 120
        assert max(grown) <= 3 + of_search.PARALLEL  # and what was asked for


def test_Q74_a_use_names_no_run_that_is_known_to_be_there() -> None:
    """With a key, naming the runs of a long path held the store for milliseconds at each lookup."""
    path = chain(64)
    with Rig("http://127.0.0.1:1", secret=SECRET) as rig:
        rig.know(path, 56)
        rig.tier._form.name_of = named = Mock(wraps=rig.tier._form.name_of)  # type: ignore[method-assign]
        assert rig.tier.use(FULL, path, 64, clock.now_ns()) == 0
        assert [rig.tier.waiting, named.call_count] == [8, 2]


def test_Q74_what_is_named_of_a_path_is_not_named_from_its_beginning() -> None:
    sizes: list[int] = []

    class Slices(list[BlockKey]):
        def __getitem__(self, at: Any) -> Any:  # noqa: ANN401 - as a list
            found = super().__getitem__(at)
            sizes.append(len(found))
            return found

    path = chain(64)
    path._leading[0] = Slices()
    for at in range(0, 64, 4):
        assert path.keys_at(0, range(at, at + 4)) == [path.key(0, at + n) for n in range(4)]
    assert sizes == [4] * 16


def test_Q74_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from tiers.object import known

    monkeypatch.setattr(known, "BLOCKS_MAX", 8)
    monkeypatch.setattr(known, "ABSENT_MAX", 3)
    made = known.Known()
    runs = [Run(f"r{n}", chain(4, f"r{n}").keys_at(0, range(4))) for n in range(4)]
    for run in runs:
        made.there(run, 0)
    assert [made.state(run.name, 1) for run in runs] == [None, None, True, True]
    assert [made.place(run.keys[0], 1) is not None for run in runs] == [False, False, True, True]
    for number in range(5):
        made.absent(f"a{number}", 100)
    assert [made.state(f"a{n}", 1) for n in range(5)] == [None, None, False, False, False]
    assert made.state("a4", 100) is None
    assert made.state("r3", known.THERE_NS) is None
    assert made.place(runs[3].keys[0], known.THERE_NS) is None


def test_the_end_of_a_request_wakes_the_loop(s3: S3Server) -> None:
    with Rig(s3.endpoint) as rig:
        slots = tuple(map(Slot, range(4)))
        keys = tuple(chain(4).keys_at(0, range(4)))
        rig.tier.submit(TransferJob(JobId(1), JobKind.STORE, keys, slots))
        assert select.select([rig.bucket], [], [], WAIT_S)[0]
        rig.bucket.ended.heard()
        assert rig.tier.poll()


def test_Q77_after_a_clear_nothing_of_before_is_used(s3: S3Server) -> None:
    """Objects stay, for other stores; this one puts its own over them."""
    path = chain(8)
    with Rig(s3.endpoint) as rig, Rig(s3.endpoint) as other:
        other.put(path, 8)
        rig.tier.clear()
        assert rig.search(path, 8) == 0
        assert not rig.bucket.counts.total()  # nothing is asked for
        assert len(s3.names()) == 2
        assert rig.put(path, 8) == 2
        assert rig.bucket.counts["put_ok"] == 2
        assert rig.search(path, 8) == 8
        assert other.search(path, 8) == 8


def test_Q77_a_clear_during_a_put_deletes_no_object(s3: S3Server, proxy: Proxy) -> None:
    """The store discards what it put meanwhile; that may be what another store has put."""
    path = chain(4)
    proxy.slow_s = WAIT_S
    with Rig(s3.endpoint) as other, Rig(proxy.endpoint) as rig:
        other.put(path, 4)
        proxy.always("slow", "HEAD")
        keys, slots = tuple(path.keys(0, 4)), tuple(map(Slot, range(4)))
        rig.tier.submit(TransferJob(JobId(1), JobKind.STORE, keys, slots))
        rig.tier.clear()
        proxy.ended.set()
        assert [result.done for result in finish(rig.tier, 1)] == [4]
        assert rig.tier.lookup(keys[0]) is MISS
        rig.tier.discard(keys)
    assert len(s3.names()) == 1


def test_Q72_a_closed_tier_writes_into_no_slot(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if a request takes longer than it may."""
    monkeypatch.setattr(of_tier, "DRAIN_S", 0.05)
    path = chain(4)
    proxy.slow_s = 0.5
    with Rig(proxy.endpoint) as rig:
        rig.put(path, 4)
        proxy.always("slow", "GET")
        keys, slots = tuple(path.keys_at(0, range(4))), tuple(map(Slot, range(8, 12)))
        rig.tier.submit(TransferJob(JobId(77), JobKind.LOAD, keys, slots))
        rig.tier.close()
        rig.bucket.close()
        assert all(rig.memory.view(slot) == bytes(SLOT_BYTES) for slot in slots)
