"""How much memory can be had now, by every limit that there is: the machine's, cgroups', ulimit's.

A limit that is reached kills (the machine's and a cgroup's), so memory is asked for before it is
taken. All of it changes while a store runs, so it is looked at each time.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvstore.units import KIB, MIB

PROC = Path("/proc")
MARGIN_BYTES = 64 * MIB
"""Left alone: what else the store takes, and its neighbours under the same limit."""
_ENDLESS_BYTES = 1 << 62  # cgroup v1 has a limit always, of nearly 2^63 for none
_MOUNT_ROOT, _MOUNT_POINT = 3, 4  # fields of a line of mountinfo
_ESCAPES = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}


class Left(NamedTuple):
    """Bytes that one limit leaves, and its name for people."""

    bytes: int
    of: str


class _Files(NamedTuple):
    """How one version of cgroups names what it tells: limits, usage, a row of memory.stat."""

    limits: tuple[str, ...]
    usage: str
    cache: str  # of files, which the kernel drops before it kills anybody


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files(("memory.max", "memory.high"), "memory.current", "inactive_file")


def memory_left(proc: Path = PROC) -> Left:
    """Return the tightest limit. proc: the kernel's view of processes."""
    return min(_limits(proc))


def _limits(proc: Path) -> Iterator[Left]:
    yield Left(_machine_bytes(proc), "the machine")
    for folder, files in _groups(proc):
        left = _group_bytes(folder, files)
        if left is not None:
            yield Left(left, f"the memory cgroup {folder}")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = "".join(_lines(proc / "self/statm")).partition(" ")[0]
        yield Left(max(0, limit - int(pages or 0) * mmap.PAGESIZE), "ulimit -v")


def _machine_bytes(proc: Path) -> int:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    return _ENDLESS_BYTES  # a system that does not say


def _groups(proc: Path) -> Iterator[tuple[Path, _Files]]:
    """Go through the cgroups that count this process's memory, up to the one mounted on top."""
    for line in _lines(proc / "self/cgroup"):
        _, names, path = line.split(":", 2)
        if names and "memory" not in names.split(","):
            continue
        files = _V1 if names else _V2
        for root, top in _mounts(proc, "memory" if names else None):
            # In a container the path is one of the host's, or of its own: then root is all of it.
            inside = Path(path).is_relative_to(root) and ".." not in Path(path).parts
            folder = top / Path(path).relative_to(root) if inside else top
            while True:
                yield folder, files
                if folder == top:
                    break
                folder = folder.parent


def _mounts(proc: Path, controller: str | None) -> Iterator[tuple[Path, Path]]:
    """Yield which part of a hierarchy of cgroups is mounted where; None: that of version 2."""
    for line in _lines(proc / "self/mountinfo"):
        place, _, kind = line.partition(" - ")
        name, _, options = kind.split(" ", 2)
        wanted = name == "cgroup2" if controller is None else name == "cgroup"
        if wanted and (controller is None or controller in options.split(",")):
            fields = place.split(" ")
            yield Path(_plain(fields[_MOUNT_ROOT])), Path(_plain(fields[_MOUNT_POINT]))


def _plain(text: str) -> str:
    for escaped, character in _ESCAPES.items():
        text = text.replace(escaped, character)
    return text


def _group_bytes(folder: Path, files: _Files) -> int | None:
    """Return what a cgroup's limit leaves; None where it has none, or does not count memory."""
    limits = [limit for name in files.limits if (limit := _number(folder / name)) is not None]
    used = _number(folder / files.usage)
    if used is None or not limits or min(limits) >= _ENDLESS_BYTES:
        return None
    cache = 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == files.cache:
            cache = int(value)
    return max(0, min(limits) - max(0, used - cache))


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    """Read a file of the kernel's; nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
