"""All settings of a store, read from one TOML file into one frozen tree.

Each field is declared as kvstore/settings.py says; docs/reference/config.md says what each is for.
Sizes and durations become plain bytes and nanoseconds, and settings that depend on the capacity are
resolved.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from kvstore.core.errors import ConfigError
from kvstore.core.limits import PORT_MAX, TENANTS_MAX
from kvstore.numa import NODE_MAX
from kvstore.settings import (
    Reader,
    S,
    Section,
    Setting,
    choice,
    duration,
    flag,
    matching,
    read_section,
    read_socket,
    read_tenant,
    refuse_unknown,
    size,
    table_of_any,
    whole_number,
)
from kvstore.units import GIB, MIB, TIB, parse_bytes, sized, wrong
from kvstore.wire.credentials import read_group, read_users

HUGE_PAGE_BYTES = 2 * MIB
EXTENT_BYTES_MIN = 16 * MIB
EXTENT_BYTES_MAX = GIB
DISK_BYTES_MIN = 64 * MIB
DISK_BYTES_MAX = 256 * TIB  # for more, a process has not enough addresses for the index
CREDIT_BYTES_DEFAULT = 512 * MIB
FILE_BYTES_MAX = MIB
THREADS_MAX = 64
HOSTS_MAX = 256
RUN_BYTES_MIN = 4096
RUN_BYTES_MAX = 256 * MIB
REQUESTS_MAX = 100_000
FLOORS_PERCENT = 90  # of a tier: what tenants keep in sum
# Labels that the tiers of the store itself and of the engine have in the metrics.
RESERVED_TIER_NAMES = ("gpu", "cpu", "nvme", "peer", "object")


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a TCP listener binds."""

    host: str
    port: int


# Readers of single settings; `found` has the settings read before, the capacity among them.


def _read_address(value: object, _found: Mapping[str, Any]) -> Address | None:
    if value == "":
        return None
    pattern = r"(\[[0-9a-fA-F:.]+\]|[^\s\0:/\[\]]+):([0-9]{1,5})"
    match = re.fullmatch(pattern, value, re.ASCII) if isinstance(value, str) else None
    if match is None or int(match[2]) > PORT_MAX or not may_be_host(match[1]):
        address = f'"host:port" with a port up to {PORT_MAX}, such as "127.0.0.1:9400"'
        raise wrong(f'{address}, or "" for none', value)
    return Address(match[1].strip("[]"), int(match[2]))


def may_be_host(name: str) -> bool:
    """Tell whether a resolver takes a name: no label of it is empty, or too long."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def _read_mode(value: object, found: Mapping[str, Any]) -> int:
    return int(choice("0600", "0660", "0666")(value, found), 8)


_DEFAULT_MODES = '`"0660"` with `group`, `"0666"` with `allow`, else `"0600"`'


def _default_mode(found: Mapping[str, Any]) -> str:
    if found["group"] is not None:
        return "0660"
    return "0666" if found["allow"] else "0600"


def read_listen(value: object, found: Mapping[str, Any]) -> Address:
    """Read an address that other stores can be told."""
    address = _read_address(value, found)
    if address is None:
        raise wrong('"host:port", such as "127.0.0.1:9500"', value)
    with contextlib.suppress(ValueError):  # a name
        if ipaddress.ip_address(address.host).is_unspecified:
            own = "the address at which other stores reach this one"
            raise wrong(f'{own}, such as "10.0.0.5:9500"', value)
    return address


def network_of(host: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return an address, or a network of them; None for a name."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_network(host)
    return None


def _read_hosts(value: object, _found: Mapping[str, Any]) -> tuple[str, ...]:
    hosts = f'a list of up to {HOSTS_MAX} hosts such as "10.0.0.7", "10.0.0.0/8" or "prefill-1"'
    if not isinstance(value, list) or len(value) > HOSTS_MAX:
        raise wrong(hosts, value)
    for host in value:
        named = isinstance(host, str) and re.fullmatch(r"[\w.-]{1,253}", host, re.ASCII)
        if not named and (not isinstance(host, str) or network_of(host) is None):
            raise wrong(hosts, host)
    return tuple(value)


def _extent(parts: int, rounded: Callable[[Fraction], int]) -> Reader:
    """Read an extent's size; "auto" is this part of the capacity, in whole huge pages."""

    def read(value: object, found: Mapping[str, Any]) -> int:
        capacity_bytes: int = found["capacity"]
        if value == "auto":
            pages = rounded(Fraction(capacity_bytes, parts * HUGE_PAGE_BYTES))
            return min(max(pages * HUGE_PAGE_BYTES, EXTENT_BYTES_MIN), EXTENT_BYTES_MAX)
        extent_bytes = parse_bytes(value)
        if extent_bytes == 0 or extent_bytes % HUGE_PAGE_BYTES or extent_bytes > capacity_bytes:
            multiple = "a multiple of 2MiB (a huge page) up to the capacity"
            raise wrong(f'"auto" or {multiple} ({capacity_bytes} bytes)', value)
        return extent_bytes

    return read


def _read_part(value: object, found: Mapping[str, Any]) -> int:
    """Read a part of the capacity, in bytes or percent."""
    capacity_bytes: int = found["capacity"]
    text = value.strip() if isinstance(value, str) else ""
    percent = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) *%", text, re.ASCII)
    try:
        part_bytes = (
            int(capacity_bytes * Fraction(percent[1]) / 100) if percent else parse_bytes(value)
        )
    except ConfigError as exc:
        raise ConfigError(str(exc).replace("expected ", 'expected "25%" or ', 1)) from None
    if not 0 < part_bytes <= capacity_bytes:
        raise wrong(f"more than 0 and at most the capacity ({capacity_bytes} bytes)", value)
    return part_bytes


def _default_credit(found: Mapping[str, Any]) -> int:
    return min(CREDIT_BYTES_DEFAULT, int(found["capacity"]) // 4)


def _read_class(value: object, _found: Mapping[str, Any]) -> str:
    text = value if isinstance(value, str) else ""
    module, separator, name = text.partition(":") if ":" in text else text.rpartition(".")
    parts = (*module.split("."), name)
    if not separator or not all(part.isidentifier() for part in parts):
        raise wrong('a dotted name such as "package.module:Class"', value)
    return f"{module}:{name}"


def read_policy(value: object, found: Mapping[str, Any]) -> str:
    """Read a policy of memory. Raises ConfigError."""
    if isinstance(value, str) and value in ("segmented", "lru"):
        return value
    try:
        return _read_class(value, found)
    except ConfigError as exc:
        expected = '"segmented", "lru", or a dotted name such as "package.module:Class"'
        raise wrong(expected, value) from exc


def _read_tier_name(value: object, found: Mapping[str, Any]) -> str:
    expected = "a label of lower-case letters, digits and _ (up to 32, a letter first)"
    name: str = matching("[a-z][a-z0-9_]{0,31}", expected)(value, found)
    if name in RESERVED_TIER_NAMES:
        raise ConfigError(f'expected another name than "{name}", which the store uses')
    return name


_read_folder = matching("/[^\0]*", 'an absolute path such as "/nvme/kv"')
_read_devices = matching(
    r"[\w.:-]+(,[\w.:-]+)*", 'names of network devices such as "lo" or "eth0,eth1"'
)
_read_bucket = matching(
    r"(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)*",
    'a bucket and a folder in it, such as "s3://bucket/folder" (or gs://, az://)',
)
_read_endpoint = matching(
    r"|https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?",
    'an address such as "https://storage:8080", or "" for the one that the URL has',
)
_read_backlog = duration(zero="nothing could be written")


# Settings


class ServerConfig(Section, frozen=True):
    """`[server]`: how engines, commands and Prometheus reach the store."""

    socket: Annotated[str, Setting(read_socket, "/run/kvstore/kvstore.sock")]
    metrics: Annotated[Address | None, Setting(_read_address, "127.0.0.1:9400")]
    allow: Annotated[tuple[int, ...], Setting(read_users, [])]
    group: Annotated[int | None, Setting(read_group)]
    mode: Annotated[int, Setting(_read_mode, _default_mode, _DEFAULT_MODES)]


class CpuConfig(Section, frozen=True):
    """`[cpu]`: the memory that holds KV blocks."""

    capacity_bytes: Annotated[
        int, Setting(size(EXTENT_BYTES_MIN, of=" (one extent)"), required="8GiB")
    ]
    extent_bytes: Annotated[int, Setting(_extent(8, round), "auto")]
    numa: Annotated[int | None, Setting(whole_number(0, NODE_MAX))]
    policy: Annotated[str, Setting(read_policy, "segmented")]


class EngineConfig(Section, frozen=True):
    """`[engine]`: what each attached engine may hold, and how long its requests may wait."""

    credit_bytes: Annotated[
        int, Setting(_read_part, _default_credit, "512 MiB, at most a quarter of the capacity")
    ]
    lease_ns: Annotated[int, Setting(duration(zero="no hit could be loaded"), "30s")]
    leased_bytes: Annotated[int, Setting(_read_part, "25%")]
    pinned_bytes: Annotated[int, Setting(_read_part, "10%")]
    defer_ns: Annotated[int, Setting(duration(), "100ms")]
    promote_ns: Annotated[int, Setting(duration(), "2s")]
    promote_limit_ns: Annotated[int, Setting(duration(zero="no load could end"), "60s")]
    event_tokens_bytes: Annotated[int, Setting(size(0), 0)]


class NvmeConfig(Section, frozen=True):
    """`[nvme]`: blocks on disk, below the CPU memory; left out, there are none."""

    path: Annotated[str, Setting(_read_folder, required="/nvme/kv")]
    capacity_bytes: Annotated[int, Setting(size(DISK_BYTES_MIN, DISK_BYTES_MAX), required="200GiB")]
    extent_bytes: Annotated[int, Setting(_extent(16, math.floor), "auto")]
    durability_ns: Annotated[int, Setting(duration(), "1s")]
    threads: Annotated[int, Setting(whole_number(1, THREADS_MAX), 4)]
    backlog_ns: Annotated[int, Setting(_read_backlog, "10s")]
    write_budget_bytes: Annotated[
        int | None, Setting(size(1, of=" per day (leave it out for no limit)"))
    ]


class PeerConfig(Section, frozen=True):
    """`[peer]`: hand-over of blocks to and from other stores; left out, there is none."""

    listen: Annotated[Address, Setting(read_listen, "127.0.0.1:0")]
    key: Annotated[str | None, Setting(_read_folder)]
    held_bytes: Annotated[int, Setting(_read_part, "25%")]
    landing_bytes: Annotated[int, Setting(size(HUGE_PAGE_BYTES), "64MiB")]
    devices: Annotated[str, Setting(_read_devices, "lo")]
    eager: Annotated[bool, Setting(flag, default=True)]
    hints: Annotated[tuple[str, ...], Setting(_read_hosts, [])]


class ObjectConfig(Section, frozen=True):
    """`[object]`: blocks in a bucket that several stores share; left out, there are none."""

    url: Annotated[str, Setting(_read_bucket, required="s3://bucket/folder")]
    endpoint: Annotated[str, Setting(_read_endpoint, "")]
    key: Annotated[str | None, Setting(_read_folder)]
    run_bytes: Annotated[int, Setting(size(RUN_BYTES_MIN, RUN_BYTES_MAX), "2MiB")]
    timeout_ns: Annotated[int, Setting(duration(zero="nothing could be moved"), "5s")]
    threads: Annotated[int, Setting(whole_number(1, THREADS_MAX), 8)]
    write_budget_bytes: Annotated[
        int | None, Setting(size(1, of=" per day (leave it out for no limit)"))
    ]
    requests: Annotated[int, Setting(whole_number(1, REQUESTS_MAX), 200)]


class TierConfig(Section, frozen=True):
    """One `[[tier]]`: a place below CPU memory, asked in the order of the file."""

    class_name: Annotated[str, Setting(_read_class, required="package.module:Class")]
    name: Annotated[str, Setting(_read_tier_name, required="disk")]
    options: Annotated[dict[str, Any], Setting(table_of_any, {})]
    backlog_ns: Annotated[int, Setting(_read_backlog, "10s")]


class TenantConfig(Section, frozen=True):
    """One `[[tenant]]`: what the blocks of its requests may take, and keep."""

    name: Annotated[str, Setting(read_tenant, required="team-a")]
    cpu_bytes: Annotated[int | None, Setting(size(0))]
    cpu_floor_bytes: Annotated[int, Setting(size(0), 0)]
    nvme_bytes: Annotated[int | None, Setting(size(0))]
    nvme_floor_bytes: Annotated[int, Setting(size(0), 0)]

    def limits_of(self, tier: str) -> tuple[int | None, int]:
        """Return what the tenant may have in "cpu" or "nvme", and keeps."""
        if tier == "cpu":
            return self.cpu_bytes, self.cpu_floor_bytes
        return self.nvme_bytes, self.nvme_floor_bytes


N = TypeVar("N", TierConfig, TenantConfig)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one store process; made by `load` or `parse`, never by hand."""

    server: ServerConfig
    cpu: CpuConfig
    engine: EngineConfig
    nvme: NvmeConfig | None
    tiers: tuple[TierConfig, ...] = msgspec.field(name="tier")
    peer: PeerConfig | None = None
    tenants: tuple[TenantConfig, ...] = msgspec.field(name="tenant", default=())
    bucket: ObjectConfig | None = msgspec.field(name="object", default=None)


class ConfigFile(msgspec.Struct, frozen=True):
    """Where a store's settings are from. digest: of the text that was read last."""

    path: str
    digest: str

    @classmethod
    def of(cls, path: str | Path, data: bytes) -> ConfigFile:
        """Name a file and its content."""
        return cls(str(Path(path).absolute()), hashlib.sha256(data).hexdigest())


def load(path: str | Path) -> Config:
    """Read the settings from a TOML file; ConfigError says in one line what is wrong."""
    return of_text(text_of(path), path)


def of_text(data: bytes, path: str | Path) -> Config:
    """Check settings as a file has them; path names it in errors. Raises ConfigError."""
    try:
        text = data.decode("utf-8-sig")  # some editors put a mark before UTF-8
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: not UTF-8 text (byte {exc.start})") from exc
    try:
        table = tomllib.loads(text)
    except ValueError as exc:  # not TOMLDecodeError alone: a number can have too many digits
        raise ConfigError(f"{path}: not valid TOML: {exc}") from exc
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep") from None
    return parse(table, source=str(path))


def text_of(path: str | Path) -> bytes:
    """Read a file of settings. Raises ConfigError."""
    try:
        return read_file(path)
    except OSError as exc:
        raise unreadable(path, exc) from exc


def read_file(path: str | Path, bytes_max: int = FILE_BYTES_MAX) -> bytes:
    """Read a regular file of limited size. Raises OSError, or ConfigError for another file."""
    with open(path, "rb", opener=open_settings) as file:
        refuse_no_settings(path, os.fstat(file.fileno()), bytes_max)
        return file.read(bytes_max)


def open_settings(path: str, flags: int) -> int:
    """Open a file of settings: a pipe would hold the caller otherwise."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)


def refuse_no_settings(
    path: str | Path, found: os.stat_result, bytes_max: int = FILE_BYTES_MAX
) -> None:
    """Raise ConfigError for what cannot be a file of settings, before anything of it is read."""
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{path}: expected a file, found a device or pipe")
    if found.st_size > bytes_max:
        raise ConfigError(
            f"{path}: expected a file of {bytes_max} bytes at most, found {found.st_size}"
        )


def unreadable(path: str | Path, exc: OSError) -> ConfigError:
    """Make the error for a file of settings that cannot be read."""
    return ConfigError(f"{path}: cannot be read: {exc.strerror}; expected a TOML file")


def parse(table: Mapping[str, Any], *, source: str = "config") -> Config:
    """Check settings that are already a table, as in the file; source names them in errors."""
    refuse_unknown(table, [field.encode_name for field in msgspec.structs.fields(Config)], source)

    def section(kind: type[S], name: str, **given: int) -> S:
        return read_section(kind, table.get(name, {}), f"{source}: [{name}]", given)

    server = section(ServerConfig, "server")
    cpu = section(CpuConfig, "cpu")
    engine = section(EngineConfig, "engine", capacity=cpu.capacity_bytes)
    nvme = section(NvmeConfig, "nvme") if "nvme" in table else None
    peer = section(PeerConfig, "peer", capacity=cpu.capacity_bytes) if "peer" in table else None
    bucket = section(ObjectConfig, "object") if "object" in table else None
    tiers = _several(TierConfig, "tier", table, source)
    tenants = _several(TenantConfig, "tenant", table, source)
    if len(tenants) > TENANTS_MAX:
        raise ConfigError(f"{source}: {len(tenants)} [[tenant]], expected up to {TENANTS_MAX}")
    _refuse_tenants(tenants, "cpu", cpu.capacity_bytes, source)
    _refuse_tenants(tenants, "nvme", 0 if nvme is None else nvme.capacity_bytes, source)
    return Config(server, cpu, engine, nvme, tiers, peer, tenants, bucket)


def _refuse_tenants(
    tenants: Sequence[TenantConfig], tier: str, capacity_bytes: int, source: str
) -> None:
    """Raise ConfigError for floors above what there may be."""
    for tenant in tenants:
        quota, floor = tenant.limits_of(tier)
        limit = capacity_bytes if quota is None else min(quota, capacity_bytes)
        if floor > limit:
            where = f"{source}: [[tenant]] {tenant.name} {tier}_floor"
            raise ConfigError(f"{where}: expected up to {sized(limit)}, found {sized(floor)}")
    floors = sum(tenant.limits_of(tier)[1] for tenant in tenants)
    refuse_floors(tier, floors, capacity_bytes, f"{source}: ")


def refuse_floors(tier: str, floors_bytes: int, capacity_bytes: int, where: str = "") -> None:
    """Raise ConfigError for tenants that keep so much of a tier that nothing else is stored."""
    most = capacity_bytes * FLOORS_PERCENT // 100
    if floors_bytes > most:
        expected = f"expected up to {sized(most)} in sum, {FLOORS_PERCENT} % of the capacity"
        found = sized(floors_bytes)
        raise ConfigError(f"{where}floors of tenants in {tier}: {expected}, found {found}")


def _several(kind: type[N], section: str, table: Mapping[str, Any], source: str) -> tuple[N, ...]:
    """Read the sections of a list, whose names differ."""
    entries = table.get(section, [])
    if not isinstance(entries, list):
        raise ConfigError(f"{source}: {wrong(f'a list [[{section}]]', entries)}")
    found = tuple(
        read_section(kind, entry, f"{source}: [[{section}]] {count}")
        for count, entry in enumerate(entries, start=1)
    )
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f'{source}: [[{section}]] name: expected unique names, found "{name}" twice'
            )
    return found
