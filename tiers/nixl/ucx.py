"""UCX as this machine has it: its environment, and which hosts it reaches over TCP only."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from pathlib import Path

MUTEX = "UCX_USE_MT_MUTEX"
RDMA_DEVICES = Path("/sys/class/infiniband")
# Peers can read the memory of a process with an agent, so it gets no other variables.
_HANDED_ON = (
    *("UCX_", "NIXL_", "CUDA_", "NVIDIA_", "LD_", "LC_", "LANG", "PATH"),
    *("PYTHONPATH", "PYTHONHASHSEED"),
)


def environment(devices: str, transports: str | None) -> dict[str, str]:
    """Return a process's environment, without secrets that the store's may hold."""
    ours = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = {name: value for name, value in ours.items() if name.startswith(_HANDED_ON)}
    return found | ucx_settings(devices, transports)


def ucx_settings(devices: str, transports: str | None = None) -> dict[str, str]:
    """Return the variables that UCX reads when an agent is made."""
    # Without it, a thread that waits for UCX's lock spins. The operator's value takes precedence.
    mutex = {MUTEX: "y", **os.environ}[MUTEX]
    found = {"UCX_NET_DEVICES": devices, MUTEX: mutex}
    if transports is not None:
        found["UCX_TLS"] = transports
    if not RDMA_DEVICES.is_dir() or not any(RDMA_DEVICES.iterdir()):
        found["UCX_MODULES"] = "^ib"  # it would end with a segmentation fault
    return found


def over_tcp(host: str, devices: str, rdma: Path = RDMA_DEVICES) -> bool:
    """Tell whether UCX has TCP only to reach a host: no memory in common, and no RDMA device.

    devices: what UCX may use, as in exporter Settings; rdma: a folder with an entry for each such
    device of the machine. Names are not looked up, which may take seconds.
    """
    return not _is_here(host) and not has_rdma(devices, rdma)


def has_rdma(devices: str, rdma: Path = RDMA_DEVICES) -> bool:
    """Tell whether there is an RDMA device among those that UCX may use; rdma: as above."""
    names = (device.partition(":")[0] for device in devices.split(","))  # of a port, "mlx5_0:1"
    return any((rdma / name).exists() for name in names)


def _is_here(host: str) -> bool:
    """Tell whether an address, or a name that needs no looking up, is this machine's."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET  # noqa: PLR2004
    except ValueError:
        return host in {"localhost", socket.gethostname()}
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # nothing is sent
    except (OSError, TypeError, ValueError):  # the last two: an odd scope, as of "fe80::1%\0"
        return False
    return True
