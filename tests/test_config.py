"""Settings: what is read, what is refused, and what the refusal says."""

import inspect
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.config import ExtraConfig, parse_extra
from kvstore import config
from kvstore.config import Address, parse
from kvstore.core.errors import ConfigError
from kvstore.units import parse_bytes, parse_duration_ns

MIB = 1 << 20
GIB = 1 << 30

FULL = """
[server]
socket = "unix:///tmp/kv.sock"
metrics = "[::1]:0"

[cpu]
capacity = "8GiB"
extent = "256MiB"
numa = 1

[engine]
credit = "1GiB"
lease = "1m"
leased = "12.5%"
defer = "0s"

[[tier]]
class = "my.package.Disk"
name = "disk"
backlog = "7s"
options = { path = "/nvme", depth = { reads = 8 } }

[[tier]]
class = "my.package:Shelf"
name = "shelf"
"""


def with_setting(section: str, name: str, value: object) -> dict[str, Any]:
    table: dict[str, Any] = {"cpu": {"capacity": "8GiB"}}
    table.setdefault(section, {})[name] = value
    return table


def with_disk(**changes: object) -> dict[str, Any]:
    return {
        "cpu": {"capacity": "8GiB"},
        "nvme": {"path": "/nvme/kv", "capacity": "1GiB", **changes},
    }


def with_tier(**changes: object) -> dict[str, Any]:
    return {
        "cpu": {"capacity": "8GiB"},
        "tier": [{"class": "a.b:C", "name": "disk", **changes}],
    }


def test_a_full_file_is_read_into_bytes_and_nanoseconds(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text(FULL)
    found = config.load(path)
    assert found.server.socket == "/tmp/kv.sock"  # noqa: S108  never opened
    assert found.server.metrics == Address("::1", 0)
    assert (found.cpu.capacity_bytes, found.cpu.extent_bytes) == (8 * GIB, 256 * MIB)
    assert found.cpu.numa == 1
    assert found.engine.credit_bytes == GIB
    assert found.engine.lease_ns == 60 * 10**9
    assert found.engine.leased_bytes == GIB
    assert found.engine.defer_ns == 0
    disk, shelf = found.tiers
    assert (disk.class_name, disk.name, disk.backlog_ns) == ("my.package:Disk", "disk", 7 * 10**9)
    assert disk.options == {"path": "/nvme", "depth": {"reads": 8}}
    assert (shelf.class_name, shelf.options) == ("my.package:Shelf", {})


def test_only_the_capacity_is_needed() -> None:
    found = parse({"cpu": {"capacity": "8GiB"}})
    assert found.server.socket == "/run/kvstore/kvstore.sock"
    assert found.server.metrics == Address("127.0.0.1", 9400)
    assert found.cpu.extent_bytes == GIB
    assert found.cpu.numa is None
    assert found.engine.credit_bytes == 512 * MIB
    assert found.engine.lease_ns == 30 * 10**9
    assert found.engine.leased_bytes == 2 * GIB
    assert found.engine.defer_ns == 100 * 10**6
    assert found.tiers == ()


def test_the_tree_is_frozen_and_refuses_unknown_fields() -> None:
    found = parse({"cpu": {"capacity": "8GiB"}})
    with pytest.raises(AttributeError):
        found.cpu.capacity_bytes = 1  # type: ignore[misc]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**msgspec.to_builtins(found), "more": 1}, config.Config)


@pytest.mark.parametrize(
    "kind", [config.ServerConfig, config.CpuConfig, config.EngineConfig, config.NvmeConfig]
)
def test_every_setting_is_explained_with_its_default(kind: type[msgspec.Struct]) -> None:
    text = inspect.cleandoc(kind.__doc__ or "")
    for field in msgspec.structs.fields(kind):
        entry = re.search(rf"(?ms)^{field.encode_name}\b.*?:(.+?)(?=^\w|\Z)", text)
        assert entry is not None, field.encode_name
        assert re.search(r"[Dd]efault", entry[1]), field.encode_name


def test_metrics_can_be_off() -> None:
    assert parse(with_setting("server", "metrics", "")).server.metrics is None


@pytest.mark.parametrize(
    ("capacity", "extent"),
    [
        ("16MiB", 16 * MIB),  # the least
        ("100MiB", 16 * MIB),  # an eighth would be less
        ("1GiB", 128 * MIB),
        ("1001MiB", 126 * MIB),  # rounded to whole huge pages
        ("1TiB", GIB),  # the most
    ],
)
def test_auto_extent_is_an_eighth_in_huge_pages_within_bounds(capacity: str, extent: int) -> None:
    assert parse({"cpu": {"capacity": capacity}}).cpu.extent_bytes == extent


def test_default_credit_leaves_room_in_a_small_store() -> None:
    assert parse({"cpu": {"capacity": "64MiB"}}).engine.credit_bytes == 16 * MIB


def test_without_a_write_budget_all_may_be_written() -> None:
    found = parse(with_disk()).nvme
    assert found is not None
    assert found.write_budget_bytes is None


def test_a_write_budget_is_bytes() -> None:
    found = parse(with_disk(write_budget="1TB")).nvme
    assert found is not None
    assert found.write_budget_bytes == 10**12


def test_leased_may_be_a_size() -> None:
    assert parse(with_setting("engine", "leased", "1GiB")).engine.leased_bytes == GIB


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ({}, ["[cpu] capacity", "missing", '"8GiB"']),
        ({"cpus": {}}, ["unknown cpus", "did you mean cpu?"]),
        ({"zzz": 1}, ["unknown zzz", "known are server, cpu, engine, nvme, tier"]),
        ({"cpu": {"capcity": "8GiB"}}, ["[cpu]", "unknown capcity", "did you mean capacity?"]),
        ({"cpu": 3}, ["[cpu]", "found 3"]),
        ({"cpu": {"capacity": True}}, ["[cpu] capacity", "found true"]),
        ({"cpu": {"capacity": "1MiB"}}, ["[cpu] capacity", "at least 16MiB", '"1MiB"']),
        (with_setting("cpu", "extent", "3MiB"), ["[cpu] extent", "2MiB", '"3MiB"']),
        (with_setting("cpu", "extent", 0), ["[cpu] extent", "found 0"]),
        (with_setting("cpu", "extent", "16GiB"), ["[cpu] extent", str(8 * GIB), '"16GiB"']),
        (with_setting("cpu", "numa", -1), ["[cpu] numa", "from 0 to 1023", "found -1"]),
        (with_setting("cpu", "numa", 1024), ["[cpu] numa", "from 0 to 1023", "found 1024"]),
        (with_setting("cpu", "numa", True), ["[cpu] numa", "found true"]),
        (with_setting("cpu", "numa", "0"), ["[cpu] numa", 'found "0"']),
        (with_setting("engine", "credit", "9GiB"), ["[engine] credit", str(8 * GIB), '"9GiB"']),
        (with_setting("engine", "leased", "101%"), ["[engine] leased", '"101%"']),
        (with_setting("engine", "leased", "0%"), ["[engine] leased", '"0%"']),
        (with_setting("engine", "leased", "half"), ["[engine] leased", '"25%"', '"half"']),
        (with_setting("engine", "lease", "0s"), ["[engine] lease", '"0s"']),
        (with_setting("engine", "lease", 30), ["[engine] lease", '"30s"', "found 30"]),
        (with_setting("engine", "defer", "-1s"), ["[engine] defer", '"-1s"']),
        (with_setting("server", "socket", "kv.sock"), ["[server] socket", '"kv.sock"']),
        (with_setting("server", "socket", "/" + 107 * "a"), ["[server] socket", "107", "108"]),
        (with_setting("server", "socket", "/a\0b"), ["[server] socket", "absolute path"]),
        (with_setting("server", "socket", "a\nb"), ["[server] socket", r'"a\nb"']),
        (with_setting("server", "metrics", "localhost"), ["[server] metrics", '"localhost"']),
        (with_setting("server", "metrics", "a:65536"), ["[server] metrics", "65535"]),
        (with_disk(write_budget="0GB"), ["[nvme] write_budget", "more than 0", '"0GB"']),
        (with_disk(write_budget="much"), ["[nvme] write_budget", '"8GiB"', '"much"']),
        ({"cpu": {"capacity": "8GiB"}, "tier": {}}, ["[[tier]]", "a table"]),
        ({"cpu": {"capacity": "8GiB"}, "tier": [3]}, ["[[tier]]"]),
        (with_tier(clas="x"), ["[[tier]] 1", "unknown clas", "did you mean class?"]),
        (with_tier(**{"class": "Disk"}), ["[[tier]] 1 class", '"Disk"']),
        (with_tier(**{"class": "a-b:C"}), ["[[tier]] 1 class", '"a-b:C"']),
        (with_tier(name="cpu"), ["[[tier]] 1 name", '"cpu"', "taken"]),
        (with_tier(name="My Disk"), ["[[tier]] 1 name", '"My Disk"']),
        (with_tier(options=3), ["[[tier]] 1 options", "found 3"]),
        (with_tier(backlog="0s"), ["[[tier]] 1 backlog", "more than 0", '"0s"']),
        (with_tier(backlog=True), ["[[tier]] 1 backlog", "found true"]),
        (with_disk(backlog="0s"), ["[nvme] backlog", "more than 0", '"0s"']),
    ],
)
def test_a_wrong_setting_is_refused_with_place_found_and_expected(
    table: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(table, source="kv.toml")
    message = str(caught.value)
    assert message.startswith("kv.toml: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_two_tiers_of_one_name_are_refused() -> None:
    table = with_tier()
    table["tier"] *= 2
    with pytest.raises(ConfigError, match=r'unique names, found "disk" twice'):
        parse(table)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"[cpu]\ncapacity = ", "not valid TOML"),
        (b"[cpu]\ncapacity = '\xff'", "not UTF-8"),
        (b"[cpu]\ncapacity = 2020-01-01", "found 2020-01-01"),
        (b"[cpu]\ncapacity = " + b"9" * 5000, "not valid TOML"),
        (b"[cpu]\n", "missing"),
    ],
)
def test_a_broken_file_is_one_clear_line(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        config.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        config.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * GIB),
        (" 8 GiB ", 8 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("0.1KB", 100),
        ("1TB", 10**12),
        ("512", 512),
        ("512B", 512),
        (512, 512),
        (0, 0),
    ],
)
def test_sizes(text: object, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "value",
    [
        "",
        "GiB",
        "-1GiB",
        "1e9",
        "8 apples",
        "1.GiB",
        "٣GiB",
        "9" * 5000,
        "9" * 19 + "TiB",
        -1,
        1.5,
        True,
        None,
        [],
    ],
)
def test_other_sizes_are_refused_with_the_value(value: object) -> None:
    with pytest.raises(ConfigError, match=r'expected a size such as "8GiB".*found '):
        parse_bytes(value)


def test_a_unit_in_the_wrong_case_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 8GiB\?"):
        parse_bytes("8gib")


@pytest.mark.parametrize(
    ("text", "duration_ns"),
    [("200us", 200_000), ("1.5ms", 1_500_000), ("30s", 30 * 10**9), ("2h", 7200 * 10**9)],
)
def test_durations(text: str, duration_ns: int) -> None:
    assert parse_duration_ns(text) == duration_ns


@pytest.mark.parametrize("value", ["30", 30, "1d", "", None, True, "1 s s"])
def test_other_durations_are_refused_with_the_value(value: object) -> None:
    with pytest.raises(ConfigError, match=r'expected a duration such as "30s".*found '):
        parse_duration_ns(value)


@given(st.integers(0, 2**32), st.sampled_from(["KiB", "MiB", "GiB", "B"]))
def test_a_size_is_its_number_times_its_unit(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == number * parse_bytes(f"1{unit}")


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


def test_extra_config_names_a_shared_store() -> None:
    table = {"store": "unix:///run/kvstore.sock", "block_tokens": 64, "transfer": "push"}
    found = parse_extra(table)
    assert found == ExtraConfig(
        "/run/kvstore.sock",
        None,
        None,
        None,
        None,
        64,
        "push",
        30 * 10**9,
        None,
        False,
        0,
        480 * 10**9,
        False,
    )


def test_extra_config_sizes_a_private_store() -> None:
    more = {"two_way": True, "recompute_threshold": 64, "decode_ttl": "5m", "direct": True}
    found = parse_extra(
        {"cpu": "8GiB", "listen": "127.0.0.1:9", "lease": "1m", "promote": "5s", **more}
    )
    assert found == ExtraConfig(
        None,
        8 * GIB,
        None,
        "5s",
        None,
        None,
        "auto",
        60 * 10**9,
        "127.0.0.1:9",
        True,
        64,
        300 * 10**9,
        True,
    )


@pytest.mark.parametrize("transfer", ["auto", "pull", "push"])
def test_direct_goes_with_every_way_to_transfer(transfer: str) -> None:
    found = parse_extra({"cpu": "8GiB", "direct": True, "transfer": transfer})
    assert (found.transfer, found.direct_way) == (transfer, {"push": "push"}.get(transfer, "pull"))
    assert parse_extra({"cpu": "8GiB", "transfer": transfer}).direct_way == ""


def test_S3_a_private_store_has_no_port_unless_told_to() -> None:
    assert parse_extra({"cpu": "8GiB"}).listen is None
    assert parse_extra({"cpu": "8GiB", "listen": "127.0.0.1:0"}).listen == "127.0.0.1:0"
    assert parse_extra({"store": "/run/kv.sock"}).listen is None


def test_S1_users_are_named_or_numbered() -> None:
    assert parse_extra({"store": "/s", "store_user": "root"}).store_user == 0
    assert parse_extra({"store": "/s", "store_user": 1001}).store_user == 1001
    found = parse({"server": {"allow": ["root", 1001]}, "cpu": {"capacity": "1GiB"}})
    assert found.server.allow == (0, 1001)


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
    with pytest.raises(ConfigError, match="allow: expected") as caught:
        parse({"server": {"allow": allow}, "cpu": {"capacity": "1GiB"}})
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ({}, ["one of store and cpu", "neither"]),
        ({"store": "/run/kv.sock", "cpu": "8GiB"}, ["one of store and cpu", "both"]),
        ({"cpu": "8GiB", "nvme": {"path": "/nvme"}}, ["nvme: in it capacity: is required"]),
        ({"cpu": "8GiB", "nvme": "/nvme"}, ["nvme: expected a table", '"/nvme"']),
        (
            {"cpu": "8GiB", "nvme": {"path": "kv", "capacity": "1GiB"}},
            ["nvme: in it path: expected an absolute path", '"kv"'],
        ),
        (
            {"store": "/s", "nvme": {"path": "/kv", "capacity": "1GiB"}},
            ["nvme is for a private store"],
        ),
        ({"cpu": "8GiB", "block_token": 64}, ["unknown block_token", "block_tokens?"]),
        ({"cpu": "8GiB", "block_tokens": "64"}, ["block_tokens", 'found "64"']),
        ({"cpu": "lots"}, ["cpu", '"8GiB"', '"lots"']),
        ({"store": "tcp://host"}, ["store", '"tcp://host"']),
        ({"store": "/s", "listen": "127.0.0.1:0"}, ["listen is for a private store"]),
        ({"cpu": "8GiB", "listen": ""}, ["listen", '"host:port"', 'found ""']),
        ({"cpu": "8GiB", "store_user": 0}, ["store_user is for a shared store"]),
        ({"cpu": "8GiB", "listen": "here"}, ["listen", '"host:port"', '"here"']),
        ({"cpu": "8GiB", "two_way": 1}, ["two_way: expected true or false, found 1"]),
        (
            {"cpu": "8GiB", "recompute_threshold": 64},
            ["recompute_threshold is for two_way = true"],
        ),
        ({"cpu": "8GiB", "recompute_threshold": -1}, ["recompute_threshold", "found -1"]),
        ({"cpu": "8GiB", "recompute_threshold": True}, ["recompute_threshold", "found true"]),
        ({"cpu": "8GiB", "decode_ttl": "0s"}, ["decode_ttl", '"0s"']),
    ],
)
def test_a_wrong_extra_config_is_refused(table: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_extra(table)
    assert str(caught.value).startswith("kv_connector_extra_config")
    for part in parts:
        assert part in str(caught.value)
