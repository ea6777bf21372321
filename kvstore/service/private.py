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

from kvstore.config import parse
from kvstore.errors import ConfigError
from kvstore.service.server import serve

LINGER_S = 3.0
_children: list[subprocess.Popen[bytes]] = []  # kept, so that they are reaped with the process


def address_of(engine_id: str) -> str:
    """Return the abstract address of an engine's private store."""
    digest = hashlib.sha256(engine_id.encode()).hexdigest()[:24]
    return f"\0kvstore-{os.getuid()}-{digest}"


def ensure(engine_id: str, cpu_bytes: int) -> str:
    """Start the engine's private store unless it runs; return its address.

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
        settings = json.dumps({"cpu": {"capacity": cpu_bytes}, "server": {"metrics": ""}})
        command = [sys.executable, "-m", "kvstore.service.private", settings]
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
    serve(config, listener, linger_s=LINGER_S)


if __name__ == "__main__":
    main()
