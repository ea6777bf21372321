"""All settings: of the store, from one TOML file, and of an engine's connector.

The classes say what each setting means; the tables at the end say how it is read and what it is
when left out. Sizes and durations become plain bytes and nanoseconds, relative ones are resolved,
and the result is one frozen tree.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from kvstore.core.errors import ConfigError
from kvstore.numa import NODE_MAX
from kvstore.settings import (
    Required,
    Setting,
    optional,
    read_flag,
    read_section,
    refuse_unknown,
    section_of,
    text_of,
    whole_number,
)
from kvstore.units import GIB, MIB, parse_bytes, parse_duration_ns, shown
from kvstore.wire.credentials import read_users

HUGE_PAGE_BYTES = 2 * MIB
EXTENT_BYTES_MIN = 16 * MIB
EXTENT_BYTES_MAX = GIB
DISK_BYTES_MIN = 64 * MIB
DISK_BYTES_MAX = 256 << 40  # for more, a process has not enough addresses for the index
FILE_BYTES_MAX = MIB
THREADS_MAX = 64
# sun_path of a unix socket address is 108 bytes, the last of them a zero.
SOCKET_PATH_BYTES_MAX = 107
PORT_MAX = 65535
# Beyond any use, and small enough to multiply by.
CREDIT_BYTES_DEFAULT = 512 * MIB
# Labels that the tiers of the store itself and of the engine have in the metrics.
RESERVED_TIER_NAMES = ("gpu", "cpu", "nvme", "peer")


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a TCP listener binds."""

    host: str
    port: int


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[server]`: where the store can be reached.

    socket: path of the unix socket for engines and admin commands, `unix://` allowed in front.
        Default "/run/kvstore/kvstore.sock": emptied at boot.
    allow: names or numbers of users whose engines may attach, beside the store's own and root.
        Default none: another user could read what these store, and have them load other things.
    metrics: host:port of the Prometheus endpoint, "" for none. Default "127.0.0.1:9400":
        reachable from outside only by decision.
    """

    socket: str
    metrics: Address | None
    allow: tuple[int, ...] = ()


class CpuConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[cpu]`: the memory that holds KV blocks.

    capacity (bytes, required): all KV memory of this store, for all engines together. It is
        taken an extent at a time as engines fill it, and never exceeded. Without a default:
        only the operator knows what the engines need.
    extent (bytes): the unit in which memory is handed to a namespace, registered, pinned, grown
        and shrunk; a multiple of 2 MiB (one huge page). Default "auto", capacity / 8 between
        16 MiB and 1 GiB: several models can share a small store, a large one has few regions.
    numa: number of the NUMA node whose memory is taken while it has room, that of the GPUs. Default
        none, the kernel decides: most machines have one, and a wrong one is slower.
    """

    capacity_bytes: int = msgspec.field(name="capacity")
    extent_bytes: int = msgspec.field(name="extent")
    numa: int | None = None


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[engine]`: what each attached engine may hold.

    credit (bytes): empty slots granted in advance, which the engine fills without asking.
        Default "512MiB", at most a quarter of the capacity: covers the blocks completed between
        two answers of the store, and is lost to other engines meanwhile.
    lease (duration): how long the blocks of an answered hit stay pinned for a request that was
        not admitted yet. Default "30s": longer than a busy queue's turn; after it the engine
        asks again.
    leased (bytes, or percent of the capacity): most that is pinned at one time for such
        requests of one engine. Default "25%": a long queue cannot pin the whole cache.
    defer (duration): how long an answer may wait for blocks that are still being written;
        then the request goes on with what is ready. Default "100ms": about what
        computing a few hundred tokens costs. "0s" never waits.
    promote (duration): how long a request may wait for blocks that come from lower tiers or peers
        while none of them arrives; then it is computed. An engine that still computes them at a
        peer is waited for. Default "2s": a disk or a peer that is silent for longer hangs, and
        holds a request no longer than this. "0s" reads nothing from lower tiers.
    promote_limit (duration): how long it may wait for all of them, and how long for the next one
        while a peer's engine computes; what a peer computes before does not count. Default "60s":
        more than a long prompt takes, and the most that what only drips costs.
    """

    credit_bytes: int = msgspec.field(name="credit")
    lease_ns: int = msgspec.field(name="lease")
    leased_bytes: int = msgspec.field(name="leased")
    defer_ns: int = msgspec.field(name="defer")
    promote_ns: int = msgspec.field(name="promote")
    promote_limit_ns: int = msgspec.field(name="promote_limit", default=60_000_000_000)


class NvmeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[nvme]`: blocks on disk, below the CPU memory; left out, there are none.

    path (required): a directory of its own, on a local file system with direct I/O. One store
        at a time uses it, and what it holds is there again after a restart. Without a default:
        a guess could fill the wrong disk.
    capacity (bytes, required): most that the directory takes on disk, index included. Made
        smaller, the coldest extents go at the next start. Without a default, as the path.
    extent (bytes): size of one file, and the unit of growth. Default "auto", capacity / 16
        between 16 MiB and 1 GiB: several models can share the disk.
    durability (duration): how much of what was written last a power cut may take. Default "1s":
        a commit costs the disk some milliseconds. "0s" commits at once.
    threads: reads under way at one time. Default 4: disks are flat beyond 4 to 8.
    backlog (duration): how long a block may wait to be written, at the rate that the disk shows;
        beyond, blocks are not copied. Default "10s": what waits for longer has left memory.
    write_budget (bytes per day): most that is written for blocks used only once; beyond it, only
        what was used again is copied. Default none, all is copied: only the operator knows how
        much a drive is to endure.
    """

    path: str
    capacity_bytes: int = msgspec.field(name="capacity")
    extent_bytes: int = msgspec.field(name="extent")
    durability_ns: int = msgspec.field(name="durability")
    threads: int
    backlog_ns: int = msgspec.field(name="backlog", default=10**10)
    write_budget_bytes: int | None = msgspec.field(name="write_budget", default=None)


class PeerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[peer]`: hand-over of blocks to and from other stores; left out, there is none.

    listen: host:port of the side channel, where other stores ask. Default "127.0.0.1:0", loopback
        and a free port: reachable from outside only by decision.
    key: path of the cluster key (`kvstore keygen` makes one), which all stores that speak to each
        other share. Default none: loopback only.
    held (bytes, or percent of the capacity): most that is held for one peer at one time. Default
        "25%": a slow peer cannot pin the whole cache.
    landing (bytes): memory of each model that blocks arrive in before they are checked. Default
        "64MiB": some milliseconds of a fast network. It comes on top of the capacity.
    devices: network devices that the bytes travel over, as UCX names them. Default "lo": whoever
        reaches them can read and change what the exporter has mapped.
    eager: the exporter process and landing memory are there before they are needed. Default true;
        false: from the first hand-over on, which takes a second longer.
    """

    listen: Address
    key: str | None
    held_bytes: int = msgspec.field(name="held")
    landing_bytes: int = msgspec.field(name="landing")
    devices: str
    eager: bool


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[tier]]`: a place below CPU memory, asked in the order of the file.

    class (required): dotted name, "package.module:Class" or "package.module.Class"; kept in the
        first form. Without a default: tiers are plug-ins.
    name (required): label in metrics and logs, unique; lower-case letters, digits and _.
    options: table passed to the class as keyword arguments. Default: empty.
    backlog (duration): as in [nvme]. Default "10s".
    """

    class_name: str = msgspec.field(name="class")
    name: str
    options: dict[str, Any]
    backlog_ns: int = msgspec.field(name="backlog")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one store process; made by `load` or `parse`, never by hand."""

    server: ServerConfig
    cpu: CpuConfig
    engine: EngineConfig
    nvme: NvmeConfig | None
    tiers: tuple[TierConfig, ...] = msgspec.field(name="tier")
    peer: PeerConfig | None = None


def load(path: str | Path) -> Config:
    """Read the settings from a TOML file; ConfigError says in one line what is wrong."""
    try:
        text = _text_of(path)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: not UTF-8 text (byte {exc.start})") from exc
    try:
        table = tomllib.loads(text)
    except ValueError as exc:  # not TOMLDecodeError alone: a number can have too many digits
        raise ConfigError(f"{path}: not valid TOML: {exc}") from exc
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep") from None
    return parse(table, source=str(path))


def _text_of(path: str | Path) -> str:
    """Read a file, without the mark that some editors put before UTF-8. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would hold it
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path}: expected a file, found a device or pipe")
        if found.st_size > FILE_BYTES_MAX:
            raise ConfigError(
                f"{path}: expected a file of {FILE_BYTES_MAX} bytes at most, found {found.st_size}"
            )
        return file.read(FILE_BYTES_MAX).decode("utf-8-sig")


def parse(table: Mapping[str, Any], *, source: str = "config") -> Config:
    """Check settings that are already a table, as in the file; source names them in errors."""
    refuse_unknown(table, ("server", "cpu", "engine", "nvme", "tier", "peer"), source)
    server = read_section(section_of(table, "server", source), SERVER, f"{source}: [server]")
    cpu = read_section(section_of(table, "cpu", source), CPU, f"{source}: [cpu]")
    engine = read_section(
        section_of(table, "engine", source),
        ENGINE,
        f"{source}: [engine]",
        given={"capacity": cpu["capacity"]},
    )
    nvme = None
    if "nvme" in table:
        nvme = read_section(section_of(table, "nvme", source), NVME, f"{source}: [nvme]")
    peer = None
    if "peer" in table:
        given = {"capacity": cpu["capacity"]}
        peer = read_section(section_of(table, "peer", source), PEER, f"{source}: [peer]", given)
    entries = table.get("tier", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{source}: expected a list [[tier]], found {shown(entries)}")
    tiers = [
        read_section(entry, TIER, f"{source}: [[tier]] {count}")
        for count, entry in enumerate(entries, start=1)
    ]
    names = [tier["name"] for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f'{source}: [[tier]] name: expected unique names, found "{name}" twice'
            )
    return msgspec.convert(
        {
            "server": server,
            "cpu": cpu,
            "engine": engine,
            "nvme": nvme,
            "tier": tiers,
            "peer": peer,
        },
        Config,
    )


def parse_socket(value: object) -> str:
    """Turn "unix:///run/kvstore.sock" or a plain absolute path into the path."""
    return _read_socket(value, {})


def _read_folder(value: object, _found: Mapping[str, Any]) -> str:
    expected = 'an absolute path such as "/nvme/kv"'
    path = text_of(value, expected)
    if not path.startswith("/") or "\0" in path:
        raise ConfigError(f"expected {expected}, found {shown(value)}")
    return path


def _read_budget(value: object, _found: Mapping[str, Any]) -> int:
    budget_bytes = parse_bytes(value)
    if budget_bytes == 0:
        raise ConfigError(
            f"expected more than 0 bytes per day, found {shown(value)}; left out, there is no limit"
        )
    return budget_bytes


def _read_disk_capacity(value: object, _found: Mapping[str, Any]) -> int:
    capacity_bytes = parse_bytes(value)
    if capacity_bytes < DISK_BYTES_MIN:
        raise ConfigError(f"expected at least 64MiB, found {shown(value)}")
    if capacity_bytes > DISK_BYTES_MAX:
        raise ConfigError(f"expected at most 256TiB, found {shown(value)}")
    return capacity_bytes


def _read_disk_extent(value: object, found: Mapping[str, Any]) -> int:
    if value == "auto":
        pages = int(found["capacity"]) // 16 // HUGE_PAGE_BYTES
        return min(max(pages * HUGE_PAGE_BYTES, EXTENT_BYTES_MIN), EXTENT_BYTES_MAX)
    return _read_extent(value, found)


def _read_socket(value: object, _found: Mapping[str, Any]) -> str:
    expected = 'an absolute path such as "/run/kvstore/kvstore.sock"'
    path = text_of(value, expected).removeprefix("unix://")
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ConfigError(f"expected {expected}, found {shown(value)}")
    if len(path.encode()) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"expected at most {SOCKET_PATH_BYTES_MAX} bytes, the system's limit for a socket "
            f"path, found {len(path.encode())}"
        )
    return path


def _read_address(value: object, _found: Mapping[str, Any]) -> dict[str, Any] | None:
    expected = f'"host:port" with a port up to {PORT_MAX}, such as "127.0.0.1:9400", or "" for none'
    text = text_of(value, expected)
    if not text:
        return None
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})", text, re.ASCII)
    if match is None or int(match[2]) > PORT_MAX:
        raise ConfigError(f"expected {expected}, found {shown(value)}")
    return {"host": match[1].strip("[]"), "port": int(match[2])}


def _read_listen(value: object, found: Mapping[str, Any]) -> dict[str, Any]:
    address = _read_address(value, found)
    if address is None:
        raise ConfigError('expected "host:port", such as "127.0.0.1:9500", found ""')
    with contextlib.suppress(ValueError):  # a name
        if ipaddress.ip_address(address["host"]).is_unspecified:
            raise ConfigError(
                "expected the address that other stores reach this one by, since they are told it, "
                f'such as "10.0.0.5:9500", found {shown(value)}'
            )
    return address


def _read_landing(value: object, _found: Mapping[str, Any]) -> int:
    landing_bytes = parse_bytes(value)
    if landing_bytes < HUGE_PAGE_BYTES:
        raise ConfigError(f"expected at least 2MiB, found {shown(value)}")
    return landing_bytes


def _read_devices(value: object, _found: Mapping[str, Any]) -> str:
    expected = 'names of network devices such as "lo" or "eth0,eth1"'
    devices = text_of(value, expected)
    if not re.fullmatch(r"[\w.:-]+(,[\w.:-]+)*", devices, re.ASCII):
        raise ConfigError(f"expected {expected}, found {shown(value)}")
    return devices


def _read_capacity(value: object, _found: Mapping[str, Any]) -> int:
    capacity_bytes = parse_bytes(value)
    if capacity_bytes < EXTENT_BYTES_MIN:
        raise ConfigError(f"expected at least 16MiB (one extent), found {shown(value)}")
    return capacity_bytes


def _read_extent(value: object, found: Mapping[str, Any]) -> int:
    capacity_bytes: int = found["capacity"]
    if value == "auto":
        pages = round(capacity_bytes / 8 / HUGE_PAGE_BYTES)
        return min(max(pages * HUGE_PAGE_BYTES, EXTENT_BYTES_MIN), EXTENT_BYTES_MAX)
    extent_bytes = parse_bytes(value)
    if extent_bytes == 0 or extent_bytes % HUGE_PAGE_BYTES or extent_bytes > capacity_bytes:
        raise ConfigError(
            'expected "auto" or a multiple of 2MiB (a huge page) up to the capacity '
            f"({capacity_bytes} bytes), found {shown(value)}"
        )
    return extent_bytes


def _read_credit(value: object, found: Mapping[str, Any]) -> int:
    capacity_bytes: int = found["capacity"]
    if value is None:
        return min(CREDIT_BYTES_DEFAULT, capacity_bytes // 4)
    return _part(parse_bytes(value), value, capacity_bytes)


def _read_leased(value: object, found: Mapping[str, Any]) -> int:
    capacity_bytes: int = found["capacity"]
    percent = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *%", str(value).strip(), re.ASCII)
    if percent:
        return _part(int(capacity_bytes * Fraction(percent[1]) / 100), value, capacity_bytes)
    try:
        leased_bytes = parse_bytes(value)
    except ConfigError as exc:
        raise ConfigError(str(exc).replace("expected ", 'expected "25%" or ', 1)) from None
    return _part(leased_bytes, value, capacity_bytes)


def _part(part_bytes: int, value: object, capacity_bytes: int) -> int:
    if not 0 < part_bytes <= capacity_bytes:
        raise ConfigError(
            f"expected more than 0 and at most the capacity ({capacity_bytes} bytes), "
            f"found {shown(value)}"
        )
    return part_bytes


def _read_lease(value: object, _found: Mapping[str, Any]) -> int:
    lease_ns = parse_duration_ns(value)
    if lease_ns == 0:
        raise ConfigError(f"expected more than 0, found {shown(value)}: no hit could be loaded")
    return lease_ns


def _read_backlog(value: object, _found: Mapping[str, Any]) -> int:
    backlog_ns = parse_duration_ns(value)
    if backlog_ns == 0:
        raise ConfigError(f"expected more than 0, found {shown(value)}: nothing could be written")
    return backlog_ns


def _read_defer(value: object, _found: Mapping[str, Any]) -> int:
    return parse_duration_ns(value)


def _read_limit(value: object, _found: Mapping[str, Any]) -> int:
    limit_ns = parse_duration_ns(value)
    if limit_ns == 0:
        raise ConfigError(f"expected more than 0, found {shown(value)}: no load could end")
    return limit_ns


def _read_class(value: object, _found: Mapping[str, Any]) -> str:
    expected = 'a dotted name such as "package.module:Class"'
    text = text_of(value, expected)
    module, colon, name = text.partition(":") if ":" in text else text.rpartition(".")
    if not (colon and name.isidentifier() and all(p.isidentifier() for p in module.split("."))):
        raise ConfigError(f"expected {expected}, found {shown(value)}")
    return f"{module}:{name}"


def _read_tier_name(value: object, _found: Mapping[str, Any]) -> str:
    expected = "a label of lower-case letters, digits and _"
    name = text_of(value, expected)
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name):
        raise ConfigError(f"expected {expected} (up to 32, a letter first), found {shown(value)}")
    if name in RESERVED_TIER_NAMES:
        raise ConfigError(f'expected another name than "{name}", which is taken by the store')
    return name


def _read_options(value: object, _found: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"expected a table, found {shown(value)}")
    return value


SERVER = {
    "socket": Setting(_read_socket, "/run/kvstore/kvstore.sock"),
    "metrics": Setting(_read_address, "127.0.0.1:9400"),
    "allow": Setting(read_users, []),
}
CPU = {
    "capacity": Setting(_read_capacity, Required('capacity = "8GiB"')),
    "extent": Setting(_read_extent, "auto"),
    "numa": optional(whole_number(0, NODE_MAX)),
}
ENGINE = {
    "credit": Setting(_read_credit, None),
    "lease": Setting(_read_lease, "30s"),
    "leased": Setting(_read_leased, "25%"),
    "defer": Setting(_read_defer, "100ms"),
    "promote": Setting(_read_defer, "2s"),
    "promote_limit": Setting(_read_limit, "60s"),
}
NVME = {
    "path": Setting(_read_folder, Required('path = "/nvme/kv"')),
    "capacity": Setting(_read_disk_capacity, Required('capacity = "200GiB"')),
    "extent": Setting(_read_disk_extent, "auto"),
    "durability": Setting(_read_defer, "1s"),
    "threads": Setting(whole_number(1, THREADS_MAX), 4),
    "backlog": Setting(_read_backlog, "10s"),
    "write_budget": optional(_read_budget),
}
TIER = {
    "class": Setting(_read_class, Required('class = "package.module:Class"')),
    "name": Setting(_read_tier_name, Required('name = "disk"')),
    "options": Setting(_read_options, {}),
    "backlog": Setting(_read_backlog, "10s"),
}
PEER = {
    "listen": Setting(_read_listen, "127.0.0.1:0"),
    "key": optional(_read_folder),
    "held": Setting(_read_leased, "25%"),
    "landing": Setting(_read_landing, "64MiB"),
    "devices": Setting(_read_devices, "lo"),
    "eager": Setting(read_flag, True),
}
