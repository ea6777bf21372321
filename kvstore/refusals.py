"""What keeps a store from starting with a configuration on this machine.

`kvstore serve` looks at all of it before it begins, and `kvstore check` shows it: one list, so that
what one refuses the other does, with the same words. Nothing here stays, and nothing hangs.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from kvstore import numa
from kvstore.config import Address, Config, PeerConfig
from kvstore.errors import ConfigError
from kvstore.guard import refuse_tier
from kvstore.service.channel import Channel, ClusterKey
from kvstore.service.listener import TakenError, taken

NVME_REFUSALS = "tiers.nvme.refusals"
_DEVICES = (Path("/sys/class/net"), Path("/sys/class/infiniband"))
_ANY_DEVICE = "all"


def refusals(config: Config) -> Iterator[tuple[str, Callable[[], None]]]:
    """Go through what is looked at: its name, and a call that raises ConfigError."""
    server, nvme, peer = config.server, config.nvme, config.peer
    yield "socket", lambda: refuse_socket(server.socket)
    if config.cpu.numa is not None:
        node = config.cpu.numa
        yield "numa", lambda: numa.check(node)
    if nvme is not None:
        yield "nvme", lambda: import_module(NVME_REFUSALS).refuse(nvme)
    if peer is not None:
        yield "peer", lambda: refuse_peer(peer)
    for tier in config.tiers:
        yield f"tier {tier.name}", lambda tier=tier: refuse_tier(tier)  # type: ignore[misc]
    if server.metrics is not None:
        address = server.metrics
        yield "metrics", lambda: refuse_metrics(address)


def require(config: Config) -> None:
    """Raise ConfigError for the first thing that keeps a store from starting."""
    for _, look in refusals(config):
        look()


def refuse_socket(path: str) -> None:
    """Raise ConfigError where no store can listen, or one does, be it one that hangs."""
    try:
        if taken(path):
            raise TakenError(f"a store is running at {path} already")
        if Path(path).exists() and not Path(path).is_socket():
            raise ConfigError(f"cannot listen at {path}: it exists and is no socket")
        writable_folder(Path(path).parent, f"cannot listen at {path}")
    except OSError as exc:
        raise ConfigError(f"cannot listen at {path}: {exc.strerror}") from exc


def writable_folder(folder: Path, what: str) -> Path:
    """Return the folder that is to be written in, or the first above it that there is.

    Raises ConfigError, which begins with `what`, and OSError.
    """
    there = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not there.is_dir():
        raise ConfigError(f"{what}: expected a directory, found a file there ({there})")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{what}: no permission to write in {there}")
    try:  # /proc, say, gives a permission that is worth nothing
        tempfile.NamedTemporaryFile(dir=there, prefix=".kvstore-check-").close()
    except OSError as exc:
        raise ConfigError(f"{what}: nothing can be made in {there}: {exc.strerror}") from exc
    return there


def refuse_metrics(address: Address) -> None:
    """Raise ConfigError where the endpoint cannot be."""
    host, port = address.host, address.port
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except OSError as exc:
        raise ConfigError(f"metrics endpoint {host}:{port}: {exc.strerror}") from exc


def refuse_peer(peer: PeerConfig) -> None:
    """Raise ConfigError for a key that is none, devices that are not here, or a wrong address."""
    key = None if peer.key is None else ClusterKey.read(Path(peer.key))
    refuse_devices(peer.devices)
    channel = Channel(key, lambda *_: None, lambda *_: None)
    try:
        channel.listen(peer.listen.host, peer.listen.port)
    finally:
        channel.close()


def refuse_devices(devices: str) -> None:
    """Raise ConfigError for a network device that this machine does not have."""
    there = sorted(
        {entry.name for folder in _DEVICES if folder.is_dir() for entry in folder.iterdir()}
    )
    for device in devices.split(","):
        name = device.partition(":")[0]  # of a port, "mlx5_0:1"
        if there and name not in (*there, _ANY_DEVICE):
            raise ConfigError(
                f"[peer] devices: expected some of {', '.join(there)}, found {device}"
            )
