"""Settings: what is read, what is refused, and what the refusal says."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.config import parse_extra
from kvstore import config
from kvstore.config import Address, parse
from kvstore.core.errors import ConfigError
from kvstore.units import GIB, MIB, parse_bytes, parse_duration_ns, sized

FULL = """
[server]
socket = "unix:///tmp/kv.sock"
metrics = "[::1]:0"
allow = ["root", 1001]
group = "root"
mode = "0600"

[cpu]
capacity = "8GiB"
extent = "256MiB"
numa = 1
policy = "lru"

[engine]
credit = "1GiB"
lease = "1m"
leased = "12.5%"
defer = "0s"

[nvme]
path = "/nvme"
capacity = "1TiB"
write_budget = "1TB"

[[tier]]
class = "my.package.Disk"
name = "disk"
backlog = "7s"
options = { path = "/nvme", depth = { reads = 8 } }

[[tier]]
class = "my.package:Shelf"
name = "shelf"
"""
LEAST = {"cpu": {"capacity": "8GiB"}}
DISK = {"path": "/nvme/kv", "capacity": "1GiB"}
BUCKET = {"url": "s3://kv/cluster"}
TIER = {"class": "a.b:C", "name": "disk"}


def refusal(read: Any, *arguments: Any) -> str:  # noqa: ANN401 - any reader
    """The message with which a reader refuses a value; in one line."""
    with pytest.raises(ConfigError) as caught:
        read(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def lacking(message: str, *parts: str) -> list[str]:
    """What a message should contain, and does not."""
    return [f"{part!r} is not in {message!r}" for part in parts if part not in message]


def test_a_full_file_is_read_into_bytes_and_nanoseconds(tmp_path: Path) -> None:
    (tmp_path / "kvstore.toml").write_text(FULL)
    found = config.load(tmp_path / "kvstore.toml")
    path = "/tmp/kv.sock"  # noqa: S108 - never opened
    assert found.server == config.ServerConfig(path, Address("::1", 0), (0, 1001), 0, 0o600)
    assert found.cpu == config.CpuConfig(8 * GIB, 256 * MIB, 1, "lru")
    engine = found.engine
    assert (engine.credit_bytes, engine.leased_bytes) == (GIB, GIB)
    assert (engine.lease_ns, engine.defer_ns) == (60 * 10**9, 0)
    assert found.nvme is not None
    assert found.nvme.write_budget_bytes == 10**12
    options = {"path": "/nvme", "depth": {"reads": 8}}
    assert found.tiers == (
        config.TierConfig("my.package:Disk", "disk", options, 7 * 10**9),
        config.TierConfig("my.package:Shelf", "shelf", {}, 10**10),
    )


def test_only_the_capacity_is_needed() -> None:
    found = parse(LEAST)
    assert found == config.Config(
        config.ServerConfig(
            "/run/kvstore/kvstore.sock", Address("127.0.0.1", 9400), (), None, 0o600
        ),
        config.CpuConfig(8 * GIB, GIB, None, "segmented"),
        config.EngineConfig(
            512 * MIB,
            30 * 10**9,
            2 * GIB,
            8 * GIB // 10,
            10**8,
            2 * 10**9,
            promote_limit_ns=60 * 10**9,
            event_tokens_bytes=0,
        ),
        None,
        (),
    )
    disk = parse({**LEAST, "nvme": DISK}).nvme
    assert disk == config.NvmeConfig(
        "/nvme/kv", GIB, 64 * MIB, 10**9, 4, 10**10, write_budget_bytes=None
    )
    assert parse({**LEAST, "object": BUCKET}).bucket == config.ObjectConfig(
        "s3://kv/cluster", "", None, 2 * MIB, 5 * 10**9, 8, None, 200
    )
    peer = parse({**LEAST, "peer": {}}).peer
    assert peer == config.PeerConfig(
        Address("127.0.0.1", 0), None, 2 * GIB, 64 * MIB, "lo", eager=True, hints=()
    )


def test_the_tree_is_frozen_and_refuses_unknown_fields() -> None:
    found = parse(LEAST)
    with pytest.raises(AttributeError):
        found.cpu.capacity_bytes = 1  # type: ignore[misc]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**msgspec.to_builtins(found), "more": 1}, config.Config)


def test_what_depends_on_the_capacity() -> None:
    extents = {
        "16MiB": 16 * MIB,  # the least
        "100MiB": 16 * MIB,  # an eighth would be less
        "1GiB": 128 * MIB,
        "1001MiB": 126 * MIB,  # rounded to whole huge pages
        "1TiB": GIB,  # the most
    }
    found = {size: parse({"cpu": {"capacity": size}}).cpu.extent_bytes for size in extents}
    assert found == extents
    assert parse({"cpu": {"capacity": "64MiB"}}).engine.credit_bytes == 16 * MIB
    sizes = {"credit": "10%", "leased": "1GiB"}
    engine = parse({"cpu": {"capacity": "10GiB"}, "engine": sizes}).engine
    assert (engine.credit_bytes, engine.leased_bytes) == (GIB, GIB)


def test_metrics_can_be_off() -> None:
    assert parse({**LEAST, "server": {"metrics": ""}}).server.metrics is None


WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("[cpu] capacity", "missing", '"8GiB"')),
    ({"cpus": {}}, ("unknown cpus", "did you mean cpu?")),
    ({"zzz": 1}, ("unknown zzz", "known are server, cpu, engine, nvme, tier")),
    ({"cpu": {"capcity": "8GiB"}}, ("[cpu]", "unknown capcity", "did you mean capacity?")),
    ({"cpu": 3}, ("[cpu]", "expected a table", "found 3")),
    ({"cpu": {"capacity": True}}, ("[cpu] capacity", "found true")),
    ({"cpu": {"capacity": "1MiB"}}, ("[cpu] capacity", "at least 16MiB", '"1MiB"')),
    ({**LEAST, "tier": {}}, ("[[tier]]", "a table")),
    ({**LEAST, "tier": [3]}, ("[[tier]] 1", "found 3")),
    ({**LEAST, "tier": [TIER, TIER]}, ("[[tier]] name", "unique", '"disk" twice')),
]
WRONG_IN: list[tuple[str, str, Any, tuple[str, ...]]] = [
    ("cpu", "extent", "3MiB", ("2MiB", '"3MiB"')),
    ("cpu", "extent", 0, ("found 0",)),
    ("cpu", "extent", "16GiB", (str(8 * GIB), '"16GiB"')),
    ("cpu", "numa", -1, ("from 0 to 1023", "found -1")),
    ("cpu", "numa", True, ("found true",)),
    ("cpu", "numa", "0", ('found "0"',)),
    ("engine", "credit", "9GiB", (str(8 * GIB), '"9GiB"')),
    ("engine", "leased", "101%", (str(8 * GIB), '"101%"')),
    ("engine", "leased", "0%", ("more than 0", '"0%"')),
    ("engine", "leased", "half", ('"25%"', '"half"')),
    ("engine", "leased", "9" * 5000 + "%", ('"25%"', "found ")),
    ("engine", "leased", 1 << 20_000, ('"25%"', "found a number of 20001 bits")),
    ("engine", "lease", 1 << 20_000, ('"30s"', "found a number of 20001 bits")),
    ("engine", "lease", "0s", ("more than 0", '"0s"')),
    ("engine", "lease", 30, ('"30s"', "found 30")),
    ("engine", "defer", "-1s", ('"-1s"',)),
    ("server", "socket", "kv.sock", ('"kv.sock"',)),
    ("server", "socket", "/" + 107 * "a", ("107", "108")),
    ("server", "socket", "/a\0b", ("absolute path",)),
    ("server", "socket", "a\nb", (r'"a\nb"',)),
    ("server", "metrics", "localhost", ('"localhost"',)),
    ("server", "metrics", "a:65536", ("65535", '"a:65536"')),
    ("nvme", "capacity", None, ('"8GiB"', "found None")),
    ("nvme", "capacity", "300TiB", ("at most 256TiB", '"300TiB"')),
    ("nvme", "write_budget", "0GB", ("at least 1B per day", '"0GB"')),
    ("nvme", "write_budget", "much", ('"8GiB"', '"much"')),
    ("nvme", "backlog", "0s", ("more than 0", '"0s"')),
    ("object", "url", "kv", ('"s3://bucket/folder"', '"kv"')),
    ("object", "endpoint", "storage", ('"https://storage:8080"', '"storage"')),
    ("object", "run", "1GiB", ("at most 256MiB", '"1GiB"')),
    ("object", "timeout", "0s", ("more than 0", '"0s"')),
    ("object", "requests", 0, ("from 1 to 100000", "found 0")),
    ("tier", "clas", "x", ("unknown clas", "did you mean class?")),
    ("tier", "class", "Disk", ('"Disk"',)),
    ("tier", "class", "a-b:C", ('"a-b:C"',)),
    ("tier", "name", "cpu", ('"cpu"', "which the store uses")),
    ("tier", "name", "My Disk", ('"My Disk"',)),
    ("tier", "options", 3, ("found 3",)),
    ("tier", "backlog", True, ("found true",)),
]


def test_a_wrong_setting_is_refused_with_place_found_and_expected() -> None:
    wrong = list(WRONG)
    for section, name, value, parts in WRONG_IN:
        right: dict[str, Any] = {**LEAST, "nvme": DISK, "tier": TIER, "engine": {}, "server": {}}
        right["object"] = BUCKET
        changed = {**right, section: {**right[section], name: value}}
        place = "[[tier]] 1" if section == "tier" else f"[{section}]"
        wrong.append(({**changed, "tier": [changed["tier"]]}, (place, name, *parts)))
    found = []
    for table, parts in wrong:
        message = refusal(lambda table=table: parse(table, source="kv.toml"))
        found += lacking(message, "kv.toml: ", *parts)
    assert not found


def test_a_broken_file_is_one_clear_line(tmp_path: Path) -> None:
    files = {
        b"[cpu]\ncapacity = ": "not valid TOML",
        b"[cpu]\ncapacity = '\xff'": "not UTF-8",
        b"[cpu]\ncapacity = 2020-01-01": "found 2020-01-01",
        b"[cpu]\ncapacity = " + b"9" * 5000: "not valid TOML",
        b"[cpu]\n": "missing",
    }
    path = tmp_path / "kvstore.toml"
    found = []
    for content, part in files.items():
        path.write_bytes(content)
        found += lacking(refusal(config.load, path), f"{path}: ", part)
    found += lacking(refusal(config.load, tmp_path / "none.toml"), "No such file")
    found += lacking(refusal(config.load, tmp_path), "Is a directory")
    assert not found


def test_sizes_and_durations() -> None:
    sizes = {
        "8GiB": 8 * GIB, " 8 GiB ": 8 * GIB, "1.5GiB": 3 * GIB // 2, "0.1KB": 100,
        "1TB": 10**12, "512": 512, "512B": 512, 512: 512, 0: 0,
    }  # fmt: skip
    assert {text: parse_bytes(text) for text in sizes} == sizes
    durations = {"200us": 200_000, "1.5ms": 1_500_000, "30s": 30 * 10**9, "2h": 7200 * 10**9}
    assert {text: parse_duration_ns(text) for text in durations} == durations
    shown = {0: "0 B", 1 << 10: "1 KiB", 3 * GIB // 2: "1.5 GiB", 256 << 40: "256 TiB"}
    assert {size: sized(size) for size in shown} == shown


def test_other_sizes_and_durations_are_refused_with_the_value() -> None:
    wrong: dict[Any, tuple[str, list[Any]]] = {
        parse_bytes: (
            'expected a size such as "8GiB"',
            ["", "GiB", "-1GiB", "1e9", "8 apples", "1.GiB", "٣GiB", "9" * 5000, "9" * 19 + "TiB",
             -1, 1.5, True, None, []],
        ),
        parse_duration_ns: (
            'expected a duration such as "30s"', ["30", 30, "1d", "", None, True, "1 s s"],
        ),
    }  # fmt: skip
    for read, (expected, values) in wrong.items():
        for value in values:
            assert not lacking(refusal(read, value), expected, "found ")
    assert not lacking(refusal(parse_bytes, "8gib"), "did you mean 8GiB?")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from([
    "server", "cpu", "engine", "tier", "socket", "metrics", "capacity", "extent", "credit",
    "lease", "leased", "defer", "class", "name", "options", "backlog", "store", "block_tokens",
    "two_way", "recompute_threshold", "decode_ttl", "listen",
])  # fmt: skip
_TABLE = st.dictionaries(_NAMES, _JSON | st.dictionaries(_NAMES, _JSON, max_size=4), max_size=4)


@given(_TABLE)
def test_any_table_gives_settings_or_a_config_error(table: dict[str, Any]) -> None:
    for read in (parse, parse_extra):
        try:
            read(table)
        except ConfigError:
            continue


# What an engine is given

SHARED = {
    "store": "/run/kvstore.sock", "cpu": None, "nvme": None, "promote": None,
    "promote_limit": None, "event_tokens": None, "block_tokens": None, "transfer": "auto",
    "lease": 30 * 10**9,
    "listen": None, "metrics": None, "two_way": False, "recompute_threshold": 0,
    "decode_ttl": 480 * 10**9,
    "direct": False, "store_user": None, "always_load": False, "storing": "eager",
    "max_load_tokens": None, "max_offload_tokens": None,
    "kv_load_tiers": None, "kv_store_tiers": None, "offload_prompt_only": False, "tenant": None,
}  # fmt: skip


def test_extra_config_names_a_shared_store() -> None:
    table = {"store": "unix:///run/kvstore.sock", "block_tokens": 64, "transfer": "push"}
    found = msgspec.to_builtins(parse_extra(table))
    assert found == SHARED | {"block_tokens": 64, "transfer": "push"}


def test_extra_config_sizes_a_private_store() -> None:
    same = {"listen": "127.0.0.1:9", "promote": "5s", "two_way": True, "recompute_threshold": 64,
            "direct": True}  # fmt: skip
    found = parse_extra({"cpu": "8GiB", "lease": "1m", "decode_ttl": "5m", **same})
    read = {"store": None, "cpu": "8GiB", "lease": 60 * 10**9, "decode_ttl": 300 * 10**9}
    assert msgspec.to_builtins(found) == SHARED | same | read
    settings = found.private_settings("engine")
    assert settings["engine"] == {"promote": "5s"}
    assert parse(settings).cpu.capacity_bytes == 8 * GIB


def test_direct_goes_with_every_way_to_transfer() -> None:
    for transfer, way in {"auto": "pull", "pull": "pull", "push": "push"}.items():
        found = parse_extra({"cpu": "8GiB", "direct": True, "transfer": transfer})
        assert (found.transfer, found.direct_way) == (transfer, way)
        assert parse_extra({"cpu": "8GiB", "transfer": transfer}).direct_way == ""


def test_S3_a_private_store_has_no_port_unless_told_to() -> None:
    assert parse_extra({"cpu": "8GiB"}).listen is None
    assert parse_extra({"cpu": "8GiB", "listen": "127.0.0.1:0"}).listen == "127.0.0.1:0"
    assert parse_extra({"store": "/run/kv.sock"}).listen is None


def test_S1_users_are_named_or_numbered() -> None:
    assert parse_extra({"store": "/s", "store_user": "root"}).store_user == 0
    assert parse_extra({"store": "/s", "store_user": 1001}).store_user == 1001
    assert parse({**LEAST, "server": {"allow": ["root", 1001]}}).server.allow == (0, 1001)


@pytest.mark.parametrize(
    ("allow", "part"),
    [
        ("root", 'found "root"'),
        (["no such user"], 'found "no such user"'),
        ([-1], "found -1"),
        ([2**32 - 1], "found 4294967295"),
        ([True], "found true"),
        (["a\0b"], "found"),
        ([7] * 1001, "found 1001 of them"),
    ],
)
def test_S1_what_is_no_user_is_refused(allow: object, part: str) -> None:
    message = refusal(parse, {**LEAST, "server": {"allow": allow}})
    assert not lacking(message, "allow: expected", part)


WRONG_EXTRA: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("one of store and cpu", "neither")),
    ({"store": "/run/kv.sock", "cpu": "8GiB"}, ("one of store and cpu", "both")),
    ({"cpu": "8GiB", "nvme": {"path": "/nvme"}}, ("nvme: in it capacity: is required",)),
    ({"cpu": "8GiB", "nvme": {**DISK, "capacity": None}}, ("nvme: in it capacity: expected",)),
    ({"cpu": "8GiB", "nvme": "/nvme"}, ("nvme: expected a table", '"/nvme"')),
    ({"cpu": "8GiB", "nvme": {**DISK, "path": "kv"}}, ("nvme: in it path: expected", '"kv"')),
    ({"store": "/s", "nvme": DISK}, ("nvme is for a private store",)),
    ({"cpu": "8GiB", "block_token": 64}, ("unknown block_token", "block_tokens?")),
    ({"cpu": "8GiB", "block_tokens": "64"}, ("block_tokens", 'found "64"')),
    ({"cpu": "8GiB", "block_tokens": 0}, ("block_tokens", "from 1 to", "found 0")),
    ({"cpu": "8GiB", "transfer": "wave"}, ('"auto" or "pull" or "push"', '"wave"')),
    ({"cpu": "8GiB", "storing": "lazy"}, ('storing: expected "eager" or "late"', '"lazy"')),
    ({"cpu": "lots"}, ("cpu", '"8GiB"', '"lots"')),
    ({"store": "tcp://host"}, ("store", '"tcp://host"')),
    ({"store": "/s", "listen": "127.0.0.1:0"}, ("listen is for a private store",)),
    ({"cpu": "8GiB", "listen": ""}, ("listen", '"host:port"', 'found ""')),
    ({"cpu": "8GiB", "listen": "here"}, ("listen", '"host:port"', '"here"')),
    ({"cpu": "8GiB", "promote": "soon"}, ("promote", '"30s"', '"soon"')),
    ({"cpu": "8GiB", "promote_limit": "0s"}, ("promote_limit", "more than 0", '"0s"')),
    ({"cpu": "8GiB", "event_tokens": "-1"}, ("event_tokens", "a size", '"-1"')),
    ({"cpu": "8GiB", "store_user": 0}, ("store_user is for a shared store",)),
    ({"cpu": "8GiB", "two_way": 1}, ("two_way: expected true or false, found 1",)),
    ({"cpu": "8GiB", "recompute_threshold": 64}, ("recompute_threshold is for two_way = true",)),
    ({"cpu": "8GiB", "recompute_threshold": -1}, ("recompute_threshold", "found -1")),
    ({"cpu": "8GiB", "recompute_threshold": True}, ("recompute_threshold", "found true")),
    ({"cpu": "8GiB", "decode_ttl": "0s"}, ("decode_ttl", '"0s"')),
]


def test_a_wrong_extra_config_is_refused() -> None:
    found = []
    for table, parts in WRONG_EXTRA:
        found += lacking(refusal(parse_extra, table), "kv_connector_extra_config", *parts)
    assert not found


@pytest.mark.parametrize(
    ("server", "mode"),
    [
        ({}, 0o600),
        ({"allow": [0]}, 0o666),
        ({"group": 0}, 0o660),
        ({"allow": [0], "group": 0}, 0o660),
    ],
)
def test_Q17_who_can_connect_follows_from_group_and_allow(
    server: dict[str, Any], mode: int
) -> None:
    assert parse({**LEAST, "server": server}).server.mode == mode
    assert parse({**LEAST, "server": {**server, "mode": "0666"}}).server.mode == 0o666
