"""Faults of a disk in other processes: their I/O calls fail, are slow or hang (faults.c).

    with faults.of(Call.READ, error=errno.EIO) as fault:
        ...
    assert fault.hurt

A process meets them when it runs with `environment`, and so do its children.
"""

from __future__ import annotations

import enum
import mmap
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.compiled import compiled

CONTROL = "KVSTORE_FAULTS"  # variable of the file that steers
RULES = 8
_RULE_BYTES = 256
_FIELDS = ("calls", "kinds", "error", "per_million", "delay_ms", "hang", "serial", "seen", "hurt",
           "waiting")  # fmt: skip
_PREFIX_AT = 4 * len(_FIELDS)
_PREFIX_BYTES_MAX = _RULE_BYTES - _PREFIX_AT - 1
_ALWAYS = 1_000_000


class Call(enum.IntFlag):
    """What a process does with files."""

    OPEN = 1
    READ = 2
    WRITE = 4
    SYNC = 8
    SPACE = 16  # fallocate, ftruncate, statvfs
    META = 32  # stat, unlink, rename, mkdir
    ALL = 63


class Kind(enum.IntFlag):
    """Files of an NVMe tier's folder."""

    EXTENTS = 1
    INDEX = 2
    OTHER = 4  # the lock, and the folder itself
    ALL = 7


def missing(why: str) -> None:
    """Skip a test for what this machine lacks; in CI it has to be there, so there it fails."""
    if os.environ.get("CI"):
        pytest.fail(f"CI needs {why}", pytrace=False)
    pytest.skip(f"no {why}")


def build(folder: Path) -> Path:
    """Compile the library."""
    if not (shutil.which("cc") or shutil.which("gcc")):
        missing("a C compiler (cc), which makes the library that injects faults")
    return compiled("faults.c", folder, "-O2", "-U_FORTIFY_SOURCE", "-ldl")


class Fault:
    """One rule in the file that steers; its numbers count up while it is in force."""

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        self._memory = memory
        self._at = number * _RULE_BYTES

    def get(self, field: str) -> int:
        at = self._at + 4 * _FIELDS.index(field)
        return int(struct.unpack_from("I", self._memory, at)[0])

    def put(self, field: str, value: int) -> None:
        struct.pack_into("I", self._memory, self._at + 4 * _FIELDS.index(field), value)

    def set_prefix(self, path: str) -> None:
        """Hurt only what is below this path."""
        data = path.encode()
        assert len(data) <= _PREFIX_BYTES_MAX, f"{len(data)} bytes, not {_PREFIX_BYTES_MAX}: {path}"
        at = self._at + _PREFIX_AT
        self._memory[at : at + _PREFIX_BYTES_MAX + 1] = data.ljust(_PREFIX_BYTES_MAX + 1, b"\0")

    @property
    def hurt(self) -> int:
        """How many calls failed, or were slow, or hung."""
        return self.get("hurt")

    @property
    def waiting(self) -> int:
        """How many calls are slow or hang now; those of a process that was killed stay counted."""
        return self.get("waiting")

    def end(self) -> None:
        """Let everything pass; calls that hang go on."""
        self.put("calls", 0)
        self.put("hang", 0)
        self.put("serial", self.get("serial") + 1)


class Faults:
    """What can be injected into processes that run with `environment`."""

    def __init__(self, library: Path, control: Path, folder: Path) -> None:
        """control: file to make, which steers; folder: only files below it are hurt."""
        self.folder = Path(os.path.realpath(folder))
        control.write_bytes(bytes(RULES * _RULE_BYTES))
        with control.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._faults = [Fault(self._memory, number) for number in range(RULES)]
        self.environment = {"LD_PRELOAD": str(library), CONTROL: str(control)}

    @contextmanager
    def of(
        self,
        calls: Call,
        kinds: Kind = Kind.ALL,
        *,
        error: int = 0,
        chance: float = 1.0,
        delay_ms: int = 0,
        hang: bool = False,
    ) -> Iterator[Fault]:
        """Hurt calls until the block ends.

        error: an errno that they fail with, after the delay; chance: of each call; hang: until
        the fault ends.
        """
        fault = next(fault for fault in self._faults if not fault.get("calls"))
        fault.set_prefix(str(self.folder))
        for field, value in (
            ("kinds", kinds),
            ("error", error),
            ("per_million", int(chance * _ALWAYS)),
            ("delay_ms", delay_ms),
            ("hang", hang),
            ("seen", 0),
            ("hurt", 0),
            ("waiting", 0),
            ("calls", calls),  # last: now it holds
        ):
            fault.put(field, value)
        try:
            yield fault
        finally:
            fault.end()
