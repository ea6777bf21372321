"""Start the private store of an engine, unless it runs: all that an engine needs of a store's side.

Its socket lies in a folder that only its user can look into, under a name that follows from the
engine's id. Locking that name is the choice: the winner hands the listening socket and the lock to
the store it spawns, everybody else connects, and the kernel holds them until the store accepts.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore.core.errors import ConfigError
from kvstore.listener import TakenError, listen, sweep
from kvstore.owned_files import OPEN, refuse_folder

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


def ensure(settings: Mapping[str, Any]) -> str:
    """Start a private store unless it runs; return its address. Raises ConfigError."""
    address: str = settings["server"]["socket"]
    folder = Path(address).parent
    _own_folder(folder)
    try:
        listener = listen(address)
    except TakenError:
        return address
    sweep(folder)
    command = [sys.executable, "-P", "-m", "kvstore.store.embedded", json.dumps(settings)]
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
