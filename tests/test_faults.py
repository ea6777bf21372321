"""The library that injects faults does so: each kind of call, and nothing else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.faults import Call, Faults, Kind

# Does one thing per line that it reads; says "ok", or the number of the error.
CHILD = """
import ctypes, mmap, os, sys
folder = sys.argv[1]
path, index = folder + "/000001.extent", folder + "/index/data.mdb"
os.makedirs(folder + "/index", exist_ok=True)
fds = {p: os.open(p, os.O_RDWR | os.O_CREAT) for p in (path, index, folder + "/lock")}
page = mmap.mmap(-1, 4096)
libc = ctypes.CDLL(None, use_errno=True)
def fallocate(fd):
    if libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(4096)):
        raise OSError(ctypes.get_errno(), "fallocate")
def openat(path):
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.close(os.open(os.path.basename(path), os.O_RDONLY, dir_fd=folder))
    finally:
        os.close(folder)
def rename(path):
    os.rename(path, path + ".new")
    os.rename(path + ".new", path)
todo = {
    "open": lambda p, fd: os.close(os.open(p, os.O_RDONLY)),
    "openat": lambda p, fd: openat(p),
    "scandir": lambda p, fd: os.listdir(os.path.dirname(p)),
    "read": lambda p, fd: os.read(fd, 10),
    "pread": lambda p, fd: os.pread(fd, 10, 0),
    "preadv": lambda p, fd: os.preadv(fd, [page], 0),
    "pwrite": lambda p, fd: os.pwrite(fd, page, 0),
    "pwritev": lambda p, fd: os.pwritev(fd, [page], 0),
    "writev": lambda p, fd: os.writev(fd, [page]),
    "fsync": lambda p, fd: os.fsync(fd),
    "fdatasync": lambda p, fd: os.fdatasync(fd),
    "posix_fallocate": lambda p, fd: os.posix_fallocate(fd, 0, 4096),
    "fallocate": lambda p, fd: fallocate(fd),
    "ftruncate": lambda p, fd: os.ftruncate(fd, 8192),
    "statvfs": lambda p, fd: os.statvfs(p),
    "fstatvfs": lambda p, fd: os.statvfs(fd),
    "unlink": lambda p, fd: os.unlink(p + ".none"),
    "rename": lambda p, fd: rename(p),
    "stat": lambda p, fd: os.stat(p),
    "fstat": lambda p, fd: os.fstat(fd),
    "mkdir": lambda p, fd: os.mkdir(os.path.dirname(p)),
}
for line in sys.stdin:
    what, name = line.split()
    p = {"extent": path, "index": index, "lock": folder + "/lock"}[name]
    try:
        todo[what](p, fds[p])
        said = "ok"
    except OSError as exc:
        said = str(exc.errno)
    print(said, flush=True)
"""
CALLS = {
    Call.OPEN: ("open", "openat", "scandir"),
    Call.READ: ("read", "pread", "preadv"),
    Call.WRITE: ("pwrite", "pwritev", "writev"),
    Call.SYNC: ("fsync", "fdatasync"),
    Call.SPACE: ("posix_fallocate", "fallocate", "ftruncate", "statvfs", "fstatvfs"),
    Call.META: ("unlink", "rename", "stat", "fstat", "mkdir"),
}
WITHOUT = {"unlink": str(errno.ENOENT), "mkdir": str(errno.EEXIST)}  # others: ok


class Victim:
    """A process that does what it is told to a few files."""

    def __init__(self, faults: Faults, folder: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env=os.environ | faults.environment,
        )  # fmt: skip
        assert self._child.stdin
        assert self._child.stdout
        self._to, self._from = self._child.stdin, self._child.stdout

    def do(self, what: str, name: str = "extent") -> str:
        self._to.write(f"{what} {name}\n")
        return self._from.readline().strip()

    def close(self) -> None:
        self._to.close()
        self._child.wait(600)
        self._from.close()


@pytest.fixture(scope="module")
def faults(fault_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Faults:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "kv").mkdir()
    return Faults(fault_library, folder / "control", folder / "kv")


@pytest.fixture(scope="module")
def victim(faults: Faults) -> Iterator[Victim]:
    made = Victim(faults, faults.folder)
    yield made
    made.close()


@pytest.mark.parametrize("call", CALLS)
def test_each_call_of_a_class_fails_and_no_other(
    faults: Faults, victim: Victim, call: Call
) -> None:
    every = [name for names in CALLS.values() for name in names]
    assert [victim.do(name) for name in every] == [WITHOUT.get(name, "ok") for name in every]
    with faults.of(call, error=errno.EACCES) as fault:
        for name in every:
            expected = str(errno.EACCES) if name in CALLS[call] else WITHOUT.get(name, "ok")
            assert victim.do(name) == expected, name
        assert fault.hurt >= len(CALLS[call])
    assert victim.do(CALLS[call][0]) == WITHOUT.get(CALLS[call][0], "ok")


def test_a_fault_is_for_some_files_only(faults: Faults, victim: Victim) -> None:
    eio = str(errno.EIO)
    for kind, name in ((Kind.EXTENTS, "extent"), (Kind.INDEX, "index"), (Kind.OTHER, "lock")):
        with faults.of(Call.WRITE, kind, error=errno.EIO):
            for other in ("extent", "index", "lock"):
                assert victim.do("pwrite", other) == (eio if other == name else "ok")


def test_a_fault_does_not_leave_its_folder(fault_library: Path, tmp_path: Path) -> None:
    faults = Faults(fault_library, tmp_path / "control", tmp_path / "kv")
    (tmp_path / "kv2").mkdir()
    victim = Victim(faults, tmp_path / "kv2")
    with faults.of(Call.ALL, error=errno.EIO) as fault:
        assert victim.do("pwrite") == victim.do("open") == "ok"
        assert fault.hurt == 0
    victim.close()
