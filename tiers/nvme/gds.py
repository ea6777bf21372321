"""Whether NIXL's GDS plugin could move blocks between a disk and a GPU here, for `kvstore check`.

The tier does not use it: docs/decisions/013-no-gds.md. A plugin that is listed need not load, so it
is tried, in a child (nixl_gds.py) that may fail in any way, or hang.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from kvstore.gds import Gds
from tiers.nvme.nixl_gds import PLUGIN, Tried

DEVICES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia")
MODULE = Path("/proc/driver/nvidia-fs")
MOUNTS = Path("/proc/self/mountinfo")
COMMAND = (sys.executable, "-P", "-m", "tiers.nvme.nixl_gds")
LIMIT_S = 20.0
END_S = 1.0  # for a killed child: one that waits inside a driver is left behind
DIRECT = ("ext4", "xfs")  # local file systems that cuFile reads past host memory
# In NIXL's log, at its most talkative: why a plugin's library does not load, and errors.
_NOT_LOADED = re.compile(rf"Failed to load plugin from \S*libplugin_{PLUGIN}\.so: (.+)")
_ERROR = re.compile(r"^E\d+ .*?\] (.+)", re.MULTILINE)


def examine(folder: Path) -> Gds:
    """Find out what stands in the way for a disk's directory, which has to be there."""
    gpu = _no_gpu()
    stopping = [reason for reason in (gpu, attempt()) if reason]
    detours = [] if gpu else list(_detours(folder))
    return Gds(usable=not stopping, direct=not stopping + detours, reasons=stopping + detours)


def _no_gpu() -> str:
    """Say why no GPU can be used, empty if one can."""
    if list(DEVICES.glob("nvidia[0-9]*")):
        return ""
    if DRIVER.exists():
        return (
            f"the NVIDIA driver is loaded, but no GPU is in {DEVICES}, as in a container that was"
            " started without"
        )
    return f"no GPU here: no NVIDIA driver ({DRIVER}), and no GPU in {DEVICES}"


def attempt() -> str:
    """Make the backend in a child; return why that does not work, empty if it does."""
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as log:
        status = _run(answer, log)
        said = _text(log)
        if status is None:
            return f"NIXL's {PLUGIN} plugin does not answer within {LIMIT_S:g} s"
        try:
            if status == 0:
                line = _text(answer).rpartition("\n")[2]
                return _wrong(msgspec.json.decode(line, type=Tried), said)
        except msgspec.DecodeError:
            pass  # it ended in good order, but in the middle
        how = signal.strsignal(-status) if status < 0 else f"status {status}"
        return f"NIXL's {PLUGIN} plugin ends the process that loads it ({how}){_first(said)}"


def _wrong(tried: Tried, said: str) -> str:
    """Say what the child found; said: NIXL's log."""
    if not tried.package:
        return f"NIXL cannot be loaded: {tried.wrong}"
    if not tried.wrong:
        return ""
    missing = _NOT_LOADED.search(said)
    if missing:
        return f"NIXL's {PLUGIN} plugin does not load: {missing[1]}"
    return f"NIXL's {PLUGIN} plugin refuses: {tried.wrong}{_first(said)}"


def _run(answer: IO[bytes], log: IO[bytes]) -> int | None:
    """Run the child; None if it did not end in time."""
    child = subprocess.Popen(  # noqa: S603 - our own module
        COMMAND,
        stdin=subprocess.DEVNULL,
        stdout=answer,
        stderr=log,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "NIXL_LOG_LEVEL": "DEBUG",
        },
    )
    try:
        return child.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:  # too late, or Ctrl-C
            child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(END_S)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _first(said: str) -> str:
    """Return the first error of a log, to go behind a sentence: later ones follow from it."""
    error = _ERROR.search(said)
    return f": {error[1]}" if error else ""


def _detours(folder: Path) -> Iterator[str]:
    """Say what would make cuFile take the way through host memory all the same."""
    if not MODULE.exists():
        yield (
            "the nvidia-fs module is not loaded, so that cuFile goes through host memory itself"
            " (compatibility mode), unless `gdscheck -p` says that it has PCI peer-to-peer DMA"
        )
    kind = file_system_of(folder)
    if kind not in DIRECT:
        yield (
            f"{folder} is on {kind}: of local file systems, cuFile goes past host memory for"
            f" {' and '.join(DIRECT)} only"
        )


def file_system_of(folder: Path) -> str:
    """Return the type of the file system that a directory is on."""
    path, found = folder.resolve(), (-1, "an unknown file system")
    for line in MOUNTS.read_text(encoding="utf-8").splitlines():
        place, _, rest = line.partition(" - ")
        mount = Path(place.split()[4].replace("\\040", " "))
        if path.is_relative_to(mount) and len(mount.parts) >= found[0]:  # later ones lie on top
            found = (len(mount.parts), rest.split()[0])
    return found[1]
