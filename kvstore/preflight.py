"""What a store would do with a configuration on this machine, found out without starting one."""

from __future__ import annotations

import enum
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import msgspec

from kvstore import numa
from kvstore.available import MARGIN_BYTES, memory_left
from kvstore.config import Config
from kvstore.errors import ConfigError
from kvstore.gds import Gds
from kvstore.ownfiles import refuse_folder
from kvstore.quantities import sized
from kvstore.service.listener import taken
from kvstore.service.server import CPU_TIER, find_class

GDS = "tiers.nvme.gds"
SHMEM_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


class Level(enum.Enum):
    """How a finding ends: the store works, works less well, or would not start."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    level: Level
    what: str
    text: str


def examine(config: Config) -> list[Finding]:
    """Look at everything a store needs here. Raises ConfigError for a tier that cannot load."""
    return [
        _socket(config),
        _metrics(config),
        *_memory(config),
        *_disk(config),
        _huge_pages(),
        _locked_memory(),
        *_tiers(config),
    ]


def _socket(config: Config) -> Finding:
    path = Path(config.server.socket)
    try:
        if taken(str(path)):
            return Finding(Level.FAIL, "socket", f"{path}: a store is running there already")
    except OSError as exc:
        return Finding(Level.FAIL, "socket", f"{path}: {exc.strerror}")
    folder = next(parent for parent in path.parents if parent.is_dir())
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(Level.FAIL, "socket", f"{path}: no permission to write in {folder}")
    return Finding(Level.OK, "socket", f"unix://{path}")


def _metrics(config: Config) -> Finding:
    address = config.server.metrics
    if address is None:
        return Finding(Level.OK, "metrics", "no endpoint")
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as exc:
            text = f"{address.host}:{address.port}: {exc.strerror}"
            return Finding(Level.FAIL, "metrics", text)
    return Finding(Level.OK, "metrics", f"http://{address.host}:{address.port}/metrics")


def _memory(config: Config) -> Iterator[Finding]:
    capacity, extent = config.cpu.capacity_bytes, config.cpu.extent_bytes
    left = memory_left()
    text = f"capacity {sized(capacity)}, {sized(left.bytes)} are available now"
    if capacity + MARGIN_BYTES > left.bytes:
        text += f" ({left.of}); it stops growing when {sized(MARGIN_BYTES)} are left"
        yield Finding(Level.NOTE, "cpu", text)
    else:
        yield Finding(Level.OK, "cpu", text)
    count, rest = divmod(capacity, extent)
    text = f"{count} extents of {sized(extent)}"
    if rest:
        text += f"; {sized(rest)} of the capacity fill no extent and stay unused"
    yield Finding(Level.NOTE if rest else Level.OK, "cpu", text)
    yield _nodes(config.cpu.numa)


def _nodes(chosen: int | None) -> Finding:
    """Say which NUMA node slots are taken from, and where the GPUs are."""
    there, gpus = numa.nodes(), numa.nodes_of_gpus()
    text = "taken from any node, as the kernel decides"
    if chosen is not None:
        try:
            numa.check(chosen)
        except ConfigError as exc:
            return Finding(Level.FAIL, "numa", str(exc))
        text = f"taken from node {chosen} while it has room"
    text += f"; nodes with memory: {_listed(there)}, GPUs at nodes: {_listed(gpus)}"
    far = len(there) > 1 and bool(gpus) and gpus != [chosen]
    return Finding(Level.NOTE if far else Level.OK, "numa", text)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none known"


def _disk(config: Config) -> Iterator[Finding]:
    nvme = config.nvme
    if nvme is None:
        yield Finding(Level.OK, "nvme", "no disk")
        return
    path = Path(nvme.path)
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "no permission to write" if folder.is_dir() else "it is no directory"
        yield Finding(Level.FAIL, "nvme", f"{path}: {why} ({folder})")
        return
    if folder == path:
        try:
            refuse_folder(nvme.path, path.stat())
        except ConfigError as exc:
            yield Finding(Level.FAIL, "nvme", str(exc))
            return
    held = sum(file.lstat().st_blocks * 512 for file in path.glob("*.extent"))
    free = shutil.disk_usage(folder).free + held
    text = f"{path}: capacity {sized(nvme.capacity_bytes)}, {sized(free)} are free or ours"
    yield Finding(Level.OK if nvme.capacity_bytes <= free else Level.NOTE, "nvme", text)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".kvstore-check-") as probe:
            os.close(os.open(probe.name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as exc:
        text = f"{folder}: {exc.strerror}: a file system with direct I/O is needed, as ext4 or xfs"
        yield Finding(Level.FAIL, "nvme", text)
    else:
        yield Finding(Level.OK, "nvme", "direct I/O works there")
    gds: Gds = import_module(GDS).examine(folder)
    yield Finding(Level.OK, "gds", gds.text)


def _huge_pages() -> Finding:
    try:
        setting = Path(SHMEM_HUGE_PAGES).read_text(encoding="ascii")
    except OSError:
        return Finding(Level.NOTE, "huge pages", "this kernel has none for shared memory")
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "force"):
        return Finding(Level.OK, "huge pages", f"{SHMEM_HUGE_PAGES} is {chosen}")
    text = f"off: {SHMEM_HUGE_PAGES} is {chosen}; within_size turns them on"
    return Finding(Level.NOTE, "huge pages", text)


def _locked_memory() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "no limit" if limit == resource.RLIM_INFINITY else f"limit {sized(limit)}"
    return Finding(Level.OK, "locked memory", f"{text}; this version locks none")


def _tiers(config: Config) -> Iterator[Finding]:
    for name, dotted in (("cpu", CPU_TIER), *((t.name, t.class_name) for t in config.tiers)):
        if not callable(find_class(dotted)):
            raise ConfigError(f"tier {name}: {dotted} is no class")
        yield Finding(Level.OK, f"tier {name}", f"{dotted} loads")
