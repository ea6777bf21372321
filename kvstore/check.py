"""Checks of a configuration on this machine, without starting a store.

`kvstore serve` goes through refusals() before it begins, and `kvstore check` prints them. It is one
list, so both refuse the same configurations with the same words. A check leaves nothing behind and
cannot hang.
"""

from __future__ import annotations

import enum
import errno
import resource
import shutil
import socket
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

import msgspec

from kvstore import numa
from kvstore.config import Address, Config, ObjectConfig, PeerConfig, ServerConfig
from kvstore.core.errors import ConfigError
from kvstore.handover.cluster_key import ClusterKey
from kvstore.handover.side_channel import Channel
from kvstore.listener import OWN_MODE, TakenError, refuse_group, taken
from kvstore.memory_limits import MARGIN_BYTES, memory_left
from kvstore.open_files import DISK_PART, MEMORY_PART, WAY_OUT, extents_max, files_max
from kvstore.owned_files import writable_folder
from kvstore.store import metrics_endpoint
from kvstore.store.plugins import refuse_policy, refuse_tier
from kvstore.units import sized
from tiers.nvme.directory import SPARE_BYTES, SPARE_PART
from tiers.nvme.refusals import refuse as refuse_nvme
from tiers.nvme.refusals import user_of
from tiers.object.refusals import look as look_at_bucket
from tiers.object.refusals import refuse as refuse_object

_DEVICES = (Path("/sys/class/net"), Path("/sys/class/infiniband"))
_ANY_DEVICE = "all"
_SMALL_PAGES = "so disks are read more slowly"
SHMEM_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


class Level(enum.Enum):
    """How serious a finding is: the store works, works less well, or does not start."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    level: Level
    what: str
    text: str


def examine(config: Config) -> list[Finding]:
    """Check everything that a store needs on this machine."""
    failed = [Finding(Level.FAIL, what, text) for what, text in _refused(config)]
    wrong = {finding.what for finding in failed}
    at = config.server.metrics
    metrics = "no endpoint" if at is None else f"http://{at.host}:{at.port}/metrics"
    rest = [
        _socket(config.server),
        Finding(Level.OK, "metrics", metrics),
        *_memory(config),
        *_disk(config),
        _peer(config),
        *_bucket(config),
        _huge_pages(),
        *(Finding(Level.OK, f"tier {t.name}", f"{t.class_name} loads") for t in config.tiers),
    ]
    return failed + [finding for finding in rest if finding.what not in wrong]


def notes(config: Config) -> list[Finding]:
    """Return what a store logs at its start: it works, but not with all that it may have."""
    found = [*_memory(config), *_disk(config)]
    return [finding for finding in found if finding.level is Level.NOTE]


def _refused(config: Config) -> Iterator[tuple[str, str]]:
    for what, look in refusals(config):
        try:
            look()
        except ConfigError as exc:
            yield what, str(exc)
    if config.nvme is not None:
        user = user_of(Path(config.nvme.path))
        if user is not None:
            yield "nvme", user


def _socket(server: ServerConfig) -> Finding:
    text = f"unix://{server.socket}, mode {server.mode:04o}"
    if server.mode != OWN_MODE and not server.allow:
        text += "; users whom [server] allow does not name can connect, and are refused"
        return Finding(Level.NOTE, "socket", text)
    return Finding(Level.OK, "socket", text)


def _peer(config: Config) -> Finding:
    peer = config.peer
    if peer is None:
        return Finding(Level.OK, "peer", "no hand-over")
    secret = "without a key" if peer.key is None else "with a key"
    text = f"{peer.listen.host}:{peer.listen.port} {secret}, over {peer.devices}"
    return Finding(Level.OK, "peer", text)


def _bucket(config: Config) -> Iterator[Finding]:
    if config.bucket is None:
        return
    try:
        for good, text in look_at_bucket(config.bucket):
            yield Finding(Level.OK if good else Level.NOTE, "object", text)
    except (ConfigError, ImportError):
        return  # _refused() has it


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
    yield from _extents("cpu", count, extent, MEMORY_PART)
    text = f"{count} extents of {sized(extent)}"
    if rest:
        text += f"; {sized(rest)} of the capacity fill no extent and stay unused"
    yield Finding(Level.NOTE if rest else Level.OK, "cpu", text)
    yield _nodes(config.cpu.numa)


def _nodes(chosen: int | None) -> Finding:
    """Name the NUMA node that memory is taken from, and the nodes of the GPUs."""
    there, gpus = numa.nodes(), numa.nodes_of_gpus()
    text = "taken from any node, as the kernel decides"
    if chosen is not None:
        text = f"taken from node {chosen} while it has room"
    text += f"; nodes with memory: {_listed(there)}, GPUs at nodes: {_listed(gpus)}"
    far = len(there) > 1 and bool(gpus) and gpus != [chosen]
    if far:
        text += "; copies of GPUs at other nodes are slower"
    return Finding(Level.NOTE if far else Level.OK, "numa", text)


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, numbers)) or "none known"


def _disk(config: Config) -> Iterator[Finding]:
    nvme = config.nvme
    if nvme is None:
        yield Finding(Level.OK, "nvme", "no disk")
        return
    path = Path(nvme.path)
    try:
        folder = writable_folder(path, str(path))
        held = sum(file.lstat().st_blocks * 512 for file in path.glob("*.extent"))
        usage = shutil.disk_usage(folder)
        spare = max(SPARE_BYTES, usage.total // SPARE_PART)
        free = max(0, usage.free - spare) + held
    except (ConfigError, OSError):
        return  # _refused() has it
    count = nvme.capacity_bytes // nvme.extent_bytes
    yield from _extents("nvme", count, nvme.extent_bytes, DISK_PART)
    text = f"{path}: capacity {sized(nvme.capacity_bytes)}, {sized(free)} are free or hold blocks"
    if nvme.capacity_bytes <= free:
        yield Finding(Level.OK, "nvme", text)
        return
    text += f"; it stops growing when {sized(spare)} are left, and the coldest blocks make room"
    yield Finding(Level.NOTE, "nvme", text)


def _extents(tier: str, count: int, extent_bytes: int, part: int) -> Iterator[Finding]:
    """Say how much of a capacity the limit of open files leaves, where that is not all."""
    most = extents_max(part)
    if count > most:
        text = (
            f"{count:,} extents of {sized(extent_bytes)}; the limit of {files_max():,} open files"
        )
        text += f" allows {most:,}, {sized(most * extent_bytes)}: {WAY_OUT}"
        yield Finding(Level.NOTE, tier, text)


def _huge_pages() -> Finding:
    try:
        setting = Path(SHMEM_HUGE_PAGES).read_text(encoding="ascii")
    except OSError:
        return Finding(
            Level.NOTE, "huge pages", f"this kernel has none for shared memory: {_SMALL_PAGES}"
        )
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "force"):
        return Finding(Level.OK, "huge pages", f"{SHMEM_HUGE_PAGES} is {chosen}")
    text = f"off, {_SMALL_PAGES}: {SHMEM_HUGE_PAGES} is {chosen}; within_size turns them on"
    return Finding(Level.NOTE, "huge pages", text)


def refusals(config: Config) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield each check: its name, and a call that raises ConfigError if it fails."""
    server, nvme, peer = config.server, config.nvme, config.peer
    yield "socket", partial(refuse_socket, server.socket, server.group)
    yield "file size", partial(refuse_file_limit, config)
    if config.cpu.numa is not None:
        yield "numa", partial(numa.check, config.cpu.numa)
    if nvme is not None:
        yield "nvme", partial(refuse_nvme, nvme)
    if peer is not None:
        yield "peer", partial(refuse_peer, peer)
    if config.bucket is not None:
        yield "object", partial(refuse_bucket, config.bucket)
    yield "policy", partial(refuse_policy, config.cpu.policy)
    for tier in config.tiers:
        yield f"tier {tier.name}", partial(refuse_tier, tier)
    if server.metrics is not None:
        yield "metrics", partial(refuse_metrics, server.metrics, peer)


def require(config: Config) -> None:
    """Raise ConfigError for the first check that fails."""
    for _, look in refusals(config):
        look()


def refuse_socket(path: str, group: int | None = None) -> None:
    """Raise ConfigError if a store cannot listen at the path, or another store does."""
    try:
        if taken(path):
            raise TakenError(f"a store is running at {path} already")
        if Path(path).exists() and not Path(path).is_socket():
            raise ConfigError(f"cannot listen at {path}: it exists and is no socket")
        writable_folder(Path(path).parent, f"cannot listen at {path}")
        if group is not None:
            refuse_group(group)
    except OSError as exc:
        raise ConfigError(f"cannot listen at {path}: {exc.strerror}") from exc


def refuse_file_limit(config: Config) -> None:
    """Raise ConfigError if no file of this process may be as large as an extent."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    extent = max(part.extent_bytes for part in (config.cpu, config.nvme) if part is not None)
    if 0 <= limit < extent:
        raise ConfigError(
            f"expected files of up to {sized(extent)}, an extent, to be allowed, found a limit of"
            f" {sized(limit)} (ulimit -f, LimitFSIZE)"
        )


def refuse_peer(peer: PeerConfig) -> None:
    """Raise ConfigError for a bad key, missing network devices, or an address it cannot use."""
    key = None if peer.key is None else ClusterKey.read(Path(peer.key))
    refuse_devices(peer.devices)
    channel = Channel(key, lambda *_: None, lambda *_: None)
    try:
        channel.listen(peer.listen.host, peer.listen.port)
    finally:
        channel.close()


def refuse_metrics(address: Address, peer: PeerConfig | None) -> None:
    """Raise ConfigError for an address that the endpoint cannot use, beside the side channel."""
    endpoint = metrics_endpoint.listen(address)
    try:
        if peer is not None and peer.listen.port == address.port:
            family = socket.AF_INET6 if ":" in peer.listen.host else socket.AF_INET
            socket.create_server((peer.listen.host, address.port), family=family).close()
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:  # of others refuse_peer() tells
            raise ConfigError(
                "[server] metrics and [peer] listen: expected two ports,"
                f" found {address.port} for both"
            ) from exc
    finally:
        endpoint.server_close()


def refuse_bucket(bucket: ObjectConfig) -> None:
    """Raise ConfigError for a bad key, or where the client of buckets is missing."""
    if bucket.key is not None:
        ClusterKey.read(Path(bucket.key))
    refuse_object(bucket)


def refuse_devices(devices: str) -> None:
    """Raise ConfigError for a network device that this machine does not have."""
    there = sorted({entry.name for folder in _DEVICES for entry in folder.glob("*")})
    for device in devices.split(","):
        name = device.partition(":")[0]  # of a port, "mlx5_0:1"
        if there and name not in (*there, _ANY_DEVICE):
            some = ", ".join(there)
            raise ConfigError(f"[peer] devices: expected some of {some}, found {device}")
