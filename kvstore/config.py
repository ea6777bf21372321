"""All settings of a store, read from one TOML file into one frozen tree.

Each field is declared as kvstore/settings.py says. Sizes and durations become plain bytes and
nanoseconds, and settings that depend on the capacity are resolved.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvstore.core.errors import ConfigError
from kvstore.core.limits import PORT_MAX
from kvstore.numa import NODE_MAX
from kvstore.settings import (
    Reader,
    S,
    Section,
    Setting,
    duration,
    flag,
    matching,
    read_section,
    read_socket,
    refuse_unknown,
    size,
    table_of_any,
    whole_number,
)
from kvstore.text import shown
from kvstore.units import GIB, MIB, TIB, parse_bytes
from kvstore.wire.credentials import read_users

HUGE_PAGE_BYTES = 2 * MIB
EXTENT_BYTES_MIN = 16 * MIB
EXTENT_BYTES_MAX = GIB
DISK_BYTES_MIN = 64 * MIB
DISK_BYTES_MAX = 256 * TIB  # for more, a process has not enough addresses for the index
CREDIT_BYTES_DEFAULT = 512 * MIB
FILE_BYTES_MAX = MIB
THREADS_MAX = 64
# Labels that the tiers of the store itself and of the engine have in the metrics.
RESERVED_TIER_NAMES = ("gpu", "cpu", "nvme", "peer")


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a TCP listener binds."""

    host: str
    port: int


# Readers of single settings; `found` has the settings read before, the capacity among them.


def _read_address(value: object, _found: Mapping[str, Any]) -> Address | None:
    expected = f'"host:port" with a port up to {PORT_MAX}, such as "127.0.0.1:9400", or "" for none'
    if value == "":
        return None
    pattern = r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})"
    match = re.fullmatch(pattern, value, re.ASCII) if isinstance(value, str) else None
    if match is None or int(match[2]) > PORT_MAX:
        raise ConfigError(f"expected {expected}, found {shown(value)}")
    return Address(match[1].strip("[]"), int(match[2]))


def read_listen(value: object, found: Mapping[str, Any]) -> Address:
    """Read an address that other stores can be told."""
    address = _read_address(value, found)
    if address is None:
        raise ConfigError('expected "host:port", such as "127.0.0.1:9500", found ""')
    with contextlib.suppress(ValueError):  # a name
        if ipaddress.ip_address(address.host).is_unspecified:
            raise ConfigError(
                "expected the address at which other stores reach this one, "
                f'such as "10.0.0.5:9500", found {shown(value)}'
            )
    return address


def _extent(parts: int, rounded: Callable[[Fraction], int]) -> Reader:
    """Read an extent's size; "auto" is this part of the capacity, in whole huge pages."""

    def read(value: object, found: Mapping[str, Any]) -> int:
        capacity_bytes: int = found["capacity"]
        if value == "auto":
            pages = rounded(Fraction(capacity_bytes, parts * HUGE_PAGE_BYTES))
            return min(max(pages * HUGE_PAGE_BYTES, EXTENT_BYTES_MIN), EXTENT_BYTES_MAX)
        extent_bytes = parse_bytes(value)
        if extent_bytes == 0 or extent_bytes % HUGE_PAGE_BYTES or extent_bytes > capacity_bytes:
            raise ConfigError(
                'expected "auto" or a multiple of 2MiB (a huge page) up to the capacity '
                f"({capacity_bytes} bytes), found {shown(value)}"
            )
        return extent_bytes

    return read


def _read_part(value: object, found: Mapping[str, Any]) -> int:
    """Read a part of the capacity, in bytes or percent."""
    capacity_bytes: int = found["capacity"]
    percent = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *%", str(value).strip(), re.ASCII)
    try:
        part_bytes = (
            int(capacity_bytes * Fraction(percent[1]) / 100) if percent else parse_bytes(value)
        )
    except ConfigError as exc:
        raise ConfigError(str(exc).replace("expected ", 'expected "25%" or ', 1)) from None
    if not 0 < part_bytes <= capacity_bytes:
        raise ConfigError(
            f"expected more than 0 and at most the capacity ({capacity_bytes} bytes), "
            f"found {shown(value)}"
        )
    return part_bytes


def _default_credit(found: Mapping[str, Any]) -> int:
    return min(CREDIT_BYTES_DEFAULT, int(found["capacity"]) // 4)


def _read_class(value: object, _found: Mapping[str, Any]) -> str:
    text = value if isinstance(value, str) else ""
    module, separator, name = text.partition(":") if ":" in text else text.rpartition(".")
    parts = (*module.split("."), name)
    if not separator or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f'expected a dotted name such as "package.module:Class", found {shown(value)}'
        )
    return f"{module}:{name}"


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
_read_backlog = duration(zero="nothing could be written")


# Settings


class ServerConfig(Section, frozen=True):
    """`[server]`: how engines, commands and Prometheus reach the store."""

    socket: Annotated[str, Setting(read_socket, "/run/kvstore/kvstore.sock")]
    """Path of the unix socket for engines and commands, with or without `unix://` in front. The
    file `PATH.lock` lies beside it while the store runs. `/run` is emptied at boot."""

    metrics: Annotated[Address | None, Setting(_read_address, "127.0.0.1:9400")]
    """host:port of the Prometheus endpoint, `""` for none. The default is on loopback: other
    machines reach the endpoint only if you decide so."""

    allow: Annotated[tuple[int, ...], Setting(read_users, [])]
    """Users whose engines and commands may connect, by name or number, besides the store's own user
    and root. With any, all users can reach the socket, and the store accepts only these, as the
    kernel names them. The default is none: an allowed user can read the blocks of all engines and
    store wrong ones."""


class CpuConfig(Section, frozen=True):
    """`[cpu]`: the memory that holds KV blocks."""

    capacity_bytes: Annotated[
        int, Setting(size(EXTENT_BYTES_MIN, of=" (one extent)"), required="8GiB")
    ]
    """Memory for KV blocks of all engines together. The store takes it extent by extent as engines
    fill it, and never takes more. No default: only you know the need of your engines."""

    extent_bytes: Annotated[int, Setting(_extent(8, round), "auto")]
    """Unit in which the store takes memory and assigns it to a model, a multiple of 2 MiB (a huge
    page). `"auto"` is capacity / 8, between 16 MiB and 1 GiB: several models can share a small
    store, and a large store has few regions."""

    numa: Annotated[int | None, Setting(whole_number(0, NODE_MAX))]
    """NUMA node whose memory the store takes, [that of the
    GPUs](../how-to/size-tiers.md#numa-nodes). When it has no room, the store takes memory of
    another one, and logs that. By default the kernel decides. A node that does not exist, or is not
    allowed, is an error at the start."""


class EngineConfig(Section, frozen=True):
    """`[engine]`: what each attached engine may hold, and how long its requests may wait."""

    credit_bytes: Annotated[
        int,
        Setting(_read_part, _default_credit, "512 MiB, at most a quarter of the capacity"),
    ]
    """Empty slots that an engine gets in advance and fills without asking, in bytes or percent of
    the capacity, at least one block of each group. They take the blocks that an engine completes
    between two answers of the store; other engines cannot use them meanwhile."""

    lease_ns: Annotated[int, Setting(duration(zero="no hit could be loaded"), "30s")]
    """How long the blocks of a hit stay pinned for a request that the engine has not admitted yet:
    longer than requests wait in a busy queue. After it the engine asks again."""

    leased_bytes: Annotated[int, Setting(_read_part, "25%")]
    """Most that is pinned for such requests of one engine, in bytes or percent of the capacity. A
    long queue cannot pin the whole cache."""

    defer_ns: Annotated[int, Setting(duration(), "100ms")]
    """Longest time a lookup waits for blocks that are still being written. After it, the request
    uses the ready blocks. The default is about the time to compute a few hundred tokens; `"0s"`
    never waits."""

    promote_ns: Annotated[int, Setting(duration(), "2s")]
    """Longest time a request waits for the next block from a lower tier or a peer. After it, the
    request uses the blocks that have arrived and computes the rest. It waits longer while the
    peer's engine still computes the block. The setting also limits how long a lookup waits for a
    tier's answer, and for memory that is being made. `"0s"` reads nothing from lower tiers."""

    promote_limit_ns: Annotated[int, Setting(duration(zero="no load could end"), "60s")]
    """Longest time such a request waits in all, counted from when a peer last computed for it, and
    longest time a peer's engine may compute without completing a block. Loading a long prompt takes
    less; a disk that delivers a block now and then costs no more."""


class NvmeConfig(Section, frozen=True):
    """`[nvme]`: blocks on disk, below the CPU memory; left out, there are none."""

    path: Annotated[str, Setting(_read_folder, required="/nvme/kv")]
    """Directory for blocks alone, on a local file system with direct I/O such as ext4 or xfs. One
    store at a time uses it, and finds its blocks again after a restart. No default: a guess could
    fill the wrong disk."""

    capacity_bytes: Annotated[int, Setting(size(DISK_BYTES_MIN, DISK_BYTES_MAX), required="200GiB")]
    """Most that the directory takes on disk, index included. If you make it smaller, the store
    drops the coldest extents at the next start."""

    extent_bytes: Annotated[int, Setting(_extent(16, math.floor), "auto")]
    """Size of one file, a multiple of 2 MiB, and the unit of growth. `"auto"` is capacity / 16,
    between 16 MiB and 1 GiB: several models can share the disk. A model with a larger block is
    refused."""

    durability_ns: Annotated[int, Setting(duration(), "1s")]
    """Longest time between a write and its commit: a power cut may lose the writes of this time.
    Each commit costs the disk some milliseconds; `"0s"` commits at once."""

    threads: Annotated[int, Setting(whole_number(1, THREADS_MAX), 4)]
    """Reads in flight at one time, from 1 to 64. Disks get no faster beyond 4 to 8."""

    backlog_ns: Annotated[int, Setting(_read_backlog, "10s")]
    """Longest time a block may wait to be written, at the rate that the disk shows. Above this
    backlog, a block is written only on its second use. Blocks evicted from memory before their turn
    are skipped (counted as `late`)."""

    write_budget_bytes: Annotated[
        int | None, Setting(size(1, of=" per day (leave it out for no limit)"))
    ]
    """Most bytes written per day for blocks that were used once, such as `"500GiB"`. Above it, a
    block is written only on its second use. By default all blocks are written: only you know the
    endurance of your drive."""


class PeerConfig(Section, frozen=True):
    """`[peer]`: hand-over of blocks to and from other stores; left out, there is none."""

    listen: Annotated[Address, Setting(read_listen, "127.0.0.1:0")]
    """host:port of the side channel, as other stores reach it; port 0 picks a free port. The
    default is on loopback: other machines reach the side channel only if you decide so, and only
    with a key."""

    key: Annotated[str | None, Setting(_read_folder)]
    """Path of the cluster key, which all stores that hand over blocks to each other share: 64
    hexadecimal digits in a file of mode 600, made by `kvstore keygen`. Without it the store listens
    on and connects to loopback only."""

    held_bytes: Annotated[int, Setting(_read_part, "25%")]
    """Most that is pinned for one peer at one time, in bytes or percent of the capacity. A slow
    peer cannot pin the whole cache."""

    landing_bytes: Annotated[int, Setting(size(HUGE_PAGE_BYTES), "64MiB")]
    """Memory of each model for blocks that have arrived unchecked, on top of the capacity. The
    default holds some milliseconds of a fast network."""

    devices: Annotated[str, Setting(_read_devices, "lo")]
    """Network devices that carry the blocks, as UCX names them. A machine that reaches these
    devices can read and change all memory that the exporter has mapped."""

    eager: Annotated[bool, Setting(flag, default=True)]
    """Start the exporter process and take the landing memory at the start. With `false` the first
    hand-over does both, and takes a second longer; a private store has `false`."""


class TierConfig(Section, frozen=True):
    """One `[[tier]]`: a place below CPU memory, asked in the order of the file."""

    class_name: Annotated[str, Setting(_read_class, required="package.module:Class")]
    """Dotted name of the tier's class, `"package.module:Class"` or `"package.module.Class"`. See
    [how to write a tier](../how-to/write-a-tier.md)."""

    name: Annotated[str, Setting(_read_tier_name, required="disk")]
    """Label in metrics and logs, unique: lower-case letters, digits and `_`. Not `gpu`, `cpu`,
    `nvme` or `peer`."""

    options: Annotated[dict[str, Any], Setting(table_of_any, {})]
    """Table that is passed to the class. Unknown options are an error at the start."""

    backlog_ns: Annotated[int, Setting(_read_backlog, "10s")]
    """Longest time a block may wait to be written, as in `[nvme]`."""


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
    refuse_unknown(table, [field.encode_name for field in msgspec.structs.fields(Config)], source)

    def section(kind: type[S], name: str, **given: int) -> S:
        return read_section(kind, table.get(name, {}), f"{source}: [{name}]", given)

    server = section(ServerConfig, "server")
    cpu = section(CpuConfig, "cpu")
    engine = section(EngineConfig, "engine", capacity=cpu.capacity_bytes)
    nvme = section(NvmeConfig, "nvme") if "nvme" in table else None
    peer = section(PeerConfig, "peer", capacity=cpu.capacity_bytes) if "peer" in table else None
    return Config(server, cpu, engine, nvme, _tiers(table.get("tier", []), source), peer)


def _tiers(entries: object, source: str) -> tuple[TierConfig, ...]:
    if not isinstance(entries, list):
        raise ConfigError(f"{source}: expected a list [[tier]], found {shown(entries)}")
    tiers = tuple(
        read_section(TierConfig, entry, f"{source}: [[tier]] {count}")
        for count, entry in enumerate(entries, start=1)
    )
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f'{source}: [[tier]] name: expected unique names, found "{name}" twice'
            )
    return tiers


def parse_socket(value: object) -> str:
    """Turn "unix:///run/kvstore.sock" or a plain absolute path into the path."""
    return read_socket(value, {})
