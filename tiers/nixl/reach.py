"""Which way bytes travel between this machine and another."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

RDMA_DEVICES = Path("/sys/class/infiniband")


def over_tcp(host: str, devices: str, rdma: Path = RDMA_DEVICES) -> bool:
    """Tell whether UCX has TCP only to reach a host: no memory in common, and no RDMA device.

    devices: what UCX may use, as in exporter Settings; rdma: a folder with an entry for each such
    device of the machine. A name is not looked up: that may take seconds.
    """
    names = (device.partition(":")[0] for device in devices.split(","))  # of a port, "mlx5_0:1"
    return not is_here(host) and not any((rdma / name).exists() for name in names)


def is_here(host: str) -> bool:
    """Tell whether an address, or a name that needs no looking up, is this machine's."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET  # noqa: PLR2004
    except ValueError:
        return host in {"localhost", socket.gethostname()}
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))  # nothing is sent
        except OSError:
            return False
    return True
