"""A private store: started by whoever of an engine comes first, ended by its last client.

Its address is an abstract unix socket derived from the engine id, so nothing is left on any file
system, and binding it is the lock: the winner hands the listening socket to the store it spawns,
everybody else connects, and the kernel holds them until the store accepts.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from kvstore.config import parse
from kvstore.errors import ConfigError, KVStoreError
from kvstore.service.server import serve

log = logging.getLogger(__name__)

LINGER_S = 3.0
_children: list[subprocess.Popen[bytes]] = []  # kept, so that they are reaped with the process


def address_of(engine_id: str) -> str:
    """Return the abstract address of an engine's private store."""
    digest = hashlib.sha256(engine_id.encode()).hexdigest()[:24]
    return f"\0kvstore-{os.getuid()}-{digest}"


def ensure(
    engine_id: str,
    cpu_bytes: int,
    nvme: Mapping[str, Any] | None = None,
    listen: str | None = "",
    engine: Mapping[str, str] | None = None,
) -> str:
    """Start the engine's private store unless it runs; return its address.

    nvme: its `[nvme]`, None for no disk. listen: of its `[peer]`, empty for no hand-over. engine:
    its `[engine]`.
    Raises ConfigError when no process can be started.
    """
    address = address_of(engine_id)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
    except OSError as exc:
        listener.close()
        if exc.errno == errno.EADDRINUSE:
            return address
        raise ConfigError(f"cannot make an address for a private store: {exc}") from exc
    with listener:
        listener.listen(128)
        settings: dict[str, Any] = {"cpu": {"capacity": cpu_bytes}, "server": {"metrics": ""}}
        if engine:
            settings["engine"] = dict(engine)
        if nvme is not None:
            settings["nvme"] = dict(nvme)
        if listen:
            settings["peer"] = {"listen": listen, "eager": False}
        command = [sys.executable, "-m", "kvstore.service.private", json.dumps(settings)]
        try:
            child = subprocess.Popen(  # noqa: S603 - our own module
                [*command, str(listener.fileno())],
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except OSError as exc:
            raise ConfigError(f"cannot start a private store: {exc}") from exc
    _children.append(child)
    return address


def main() -> None:
    """Run as the child that ensure() starts: settings as JSON, then the listener's number."""
    logging.basicConfig(level=logging.INFO, format="kvstore %(levelname)s %(message)s")
    config = parse(json.loads(sys.argv[1]), source="private store")
    listener = socket.socket(fileno=int(sys.argv[2]))
    try:
        serve(config, listener, linger_s=LINGER_S)
    except KVStoreError as exc:
        log.error("the private store cannot run: %s", exc)
        sys.exit(1)


if __name__ == "__main__":
    main()
