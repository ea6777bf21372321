"""A private store: started by whoever of an engine comes first, ended by its last client.

Its socket lies in a folder that only its user can look into, under a name that follows from the
engine's id. Locking that name is the choice: the winner hands the listening socket and the lock to
the store it spawns, everybody else connects, and the kernel holds them until the store accepts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.config import parse
from kvstore.errors import ConfigError, KVStoreError
from kvstore.logs import log_to_stderr
from kvstore.ownfiles import OPEN, refuse_folder
from kvstore.service.listener import Listener, TakenError, listen, sweep
from kvstore.service.server import serve

log = logging.getLogger(__name__)

LINGER_S = 3.0
# Not TMPDIR or XDG_RUNTIME_DIR: the processes of one engine may have other environments, and the
# latter goes when its user logs out.
_FOLDERS = Path("/tmp")  # noqa: S108 - the folder in it is looked at before it is used
_children: list[subprocess.Popen[bytes]] = []  # kept, so that they are reaped with the process


def address_of(engine_id: str) -> str:
    """Return the path of the socket of an engine's private store."""
    digest = hashlib.sha256(engine_id.encode(errors="surrogatepass")).hexdigest()[:24]
    return str(_FOLDERS / f"kvstore-{os.geteuid()}" / f"{digest}.sock")


def _own_folder(folder: Path) -> None:
    """Make the folder of private stores, or see that nobody else can do anything in it.

    Raises ConfigError when it is another's, or open: its name could be taken by anybody.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        above, found = folder.parent.stat(), folder.lstat()
    except OSError as exc:
        raise ConfigError(f"no folder for private stores: {folder}: {exc.strerror}") from exc
    if not above.st_mode & stat.S_ISVTX:
        refuse_folder(str(folder.parent), above)
    refuse_folder(str(folder), found, OPEN)
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{folder}: expected uid {os.geteuid()}, found uid {found.st_uid}")


def ensure(
    engine_id: str,
    cpu_bytes: int,
    nvme: Mapping[str, Any] | None = None,
    peer: str | None = None,
    engine: Mapping[str, str] | None = None,
) -> str:
    """Start the engine's private store unless it runs; return its address.

    nvme: its `[nvme]`, None for no disk. peer: `listen` of its `[peer]`, None for no hand-over and
    no open port. engine: its `[engine]`. Raises ConfigError when no process can be started.
    """
    address = address_of(engine_id)
    folder = Path(address).parent
    _own_folder(folder)
    try:
        listener = listen(address)
    except TakenError:
        return address
    sweep(folder)
    server = {"socket": address, "metrics": ""}
    settings: dict[str, Any] = {"cpu": {"capacity": cpu_bytes}, "server": server}
    if engine:
        settings["engine"] = dict(engine)
    if nvme is not None:
        settings["nvme"] = dict(nvme)
    if peer is not None:
        settings["peer"] = {"listen": peer, "eager": False}
    command = [sys.executable, "-P", "-m", "kvstore.service.private", json.dumps(settings)]
    passed = (listener.sock.fileno(), listener.lock_fd)
    try:
        listener.start()
        child = subprocess.Popen(  # noqa: S603 - our own module
            [*command, *map(str, passed)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except OSError as exc:
        listener.close()
        raise ConfigError(f"cannot start a private store: {exc}") from exc
    listener.release()
    _children.append(child)
    return address


def main() -> None:
    """Run as the child that ensure() starts: settings as JSON, then the socket and its lock."""
    log_to_stderr("kvstore %(levelname)s %(message)s")
    config = parse(json.loads(sys.argv[1]), source="private store")
    sock, lock_fd = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    listener = Listener(config.server.socket, sock, lock_fd)
    try:
        serve(config, listener, linger_s=LINGER_S)
    except KVStoreError as exc:
        log.error("the private store cannot run: %s", exc)
        sys.exit(1)


if __name__ == "__main__":
    main()
