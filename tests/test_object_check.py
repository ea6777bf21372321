"""What `kvstore check` says of a bucket, and that a bad one refuses no start."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.check import Level, examine, require
from kvstore.config import Config, parse
from kvstore.core.errors import ConfigError
from tests.harness.s3 import BUCKET, CREDENTIALS, OF_CEPH, URL, Proxy, S3Server


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as found:
        yield found


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    server.api.delete_bucket_lifecycle(Bucket=BUCKET)
    with Proxy(server) as found:
        yield found


def settings(folder: Path, endpoint: str, url: str = URL) -> Config:
    server = {"socket": str(folder / "kv.sock"), "metrics": ""}
    bucket = {"url": url, "endpoint": endpoint}
    return parse({"cpu": {"capacity": "16MiB"}, "server": server, "object": bucket})


def said(config: Config) -> list[tuple[Level, str]]:
    return [(f.level, f.text) for f in examine(config) if f.what == "object"]


def rule(days: int, prefix: str = "", status: str = "Enabled", **more: Any) -> dict[str, Any]:  # noqa: ANN401 - of S3
    expiration = {"Days": days} if days else {"ExpiredObjectDeleteMarker": True}
    found = {"Filter": {"Prefix": prefix}, "Status": status, "Expiration": expiration}
    return {"ID": f"r{days}{prefix}{status}", **found, **more}


def test_Q76_a_bucket_without_bounds_is_warned_about(proxy: Proxy, tmp_path: Path) -> None:
    assert [level for level, _ in said(settings(tmp_path, proxy.endpoint))] == [
        *(Level.OK, Level.NOTE, Level.NOTE)
    ]


@pytest.mark.parametrize(
    ("rules", "days"),
    [
        ([rule(7)], 7),
        ([rule(7), rule(3, "cluster/")], 3),
        ([rule(7, "other/")], 0),
        ([rule(7, status="Disabled")], 0),
        ([rule(0)], 0),
        ([rule(7) | {"Filter": {"Tag": {"Key": "a", "Value": "b"}}}], 0),
    ],
)
def test_Q76_the_life_cycle_is_read_back(
    server: S3Server, proxy: Proxy, tmp_path: Path, rules: list[dict[str, Any]], days: int
) -> None:
    server.api.put_bucket_lifecycle_configuration(
        Bucket=BUCKET, LifecycleConfiguration={"Rules": rules}
    )
    level, text = said(settings(tmp_path, proxy.endpoint))[1]
    assert level is (Level.OK if days else Level.NOTE)
    assert (f"{days} days" in text) == bool(days)


def test_Q76_versions_that_are_kept_are_warned_about(tmp_path: Path) -> None:
    """Objects that expire become old versions, which take as much room."""
    with S3Server() as server, Proxy(server) as proxy:
        server.api.put_bucket_versioning(
            Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"}
        )
        noncurrent: dict[str, Any] = {"NoncurrentVersionExpiration": {"NoncurrentDays": 1}}
        for rules, level in (
            ([rule(7)], Level.NOTE),
            ([rule(7), rule(0, "other/", **noncurrent)], Level.NOTE),
            ([rule(7, **noncurrent)], Level.OK),
        ):
            server.api.put_bucket_lifecycle_configuration(
                Bucket=BUCKET, LifecycleConfiguration={"Rules": rules}
            )
            assert said(settings(tmp_path, proxy.endpoint))[1][0] is level


@pytest.mark.skipif(OF_CEPH, reason="it has quotas of its own: tests/test_object_ceph.py")
def test_Q76_a_quota_is_read_back_where_the_storage_shows_it(proxy: Proxy, tmp_path: Path) -> None:
    for name in ("X-RGW-Quota-Bucket-Size", "X-RGW-Quota-User-Size"):
        proxy.headers = [(name, "1099511627776")]
        level, text = said(settings(tmp_path, proxy.endpoint))[2]
        assert level is Level.OK
        assert "1099511627776" in text
    for none in ("-1", "0"):
        proxy.headers = [("X-RGW-Quota-Bucket-Size", none)]
        assert said(settings(tmp_path, proxy.endpoint))[2][0] is Level.NOTE


@pytest.mark.parametrize("fault", ["refuse", "drop", "fail"])
def test_Q76_a_bucket_that_does_not_answer_refuses_no_start(
    proxy: Proxy, tmp_path: Path, fault: str
) -> None:
    proxy.always(fault, "HEAD", "GET")
    config = settings(tmp_path, proxy.endpoint)
    require(config)
    ((level, text),) = said(config)
    assert level is Level.NOTE
    assert URL in text
    assert ("s3:ListBucket" in text) == (fault == "refuse")


def test_Q76_a_bucket_that_does_not_exist_does_not_answer(proxy: Proxy, tmp_path: Path) -> None:
    ((level, text),) = said(settings(tmp_path, proxy.endpoint, "s3://not-there/kv"))
    assert level is Level.NOTE
    assert "no such bucket" in text


def test_Q76_a_page_of_a_server_in_between_is_no_answer(proxy: Proxy, tmp_path: Path) -> None:
    proxy.always("page", "GET")
    ((level, text),) = said(settings(tmp_path, proxy.endpoint))
    assert level is Level.NOTE
    assert "no store puts" in text


@pytest.mark.parametrize(
    ("lacks", "told"),
    [("profile", "not-there"), ("life cycle", "cannot be read"), ("boto3", "boto3")],
)
def test_Q76_what_keeps_the_life_cycle_from_being_read_is_said_and_nothing_else(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str, told: str
) -> None:
    if lacks == "profile":
        monkeypatch.setenv("AWS_PROFILE", "not-there")
    elif lacks == "boto3":
        monkeypatch.setitem(sys.modules, "boto3", None)
    else:
        proxy.fault = lambda _method, path: "refuse" if "lifecycle" in path else ""
    (_, (level, text)) = said(settings(tmp_path, proxy.endpoint))
    assert level is Level.NOTE
    assert told in text


def test_Q76_without_the_client_the_store_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    for name in [name for name in sys.modules if name.startswith("tiers.object.")]:
        if name != "tiers.object.refusals":
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match="obstore"):
        require(settings(tmp_path, "http://127.0.0.1:1"))
