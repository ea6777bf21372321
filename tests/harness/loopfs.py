"""A small ext4 file system in a file: it can be filled, frozen, shut down and pulled away.

It needs root and loop devices; where there are none its tests are skipped, except in CI.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.faults import missing
from tests.harness.patience import WAIT_S

MIB = 1 << 20
BLOCK_BYTES = 4096
BYTES = 512 * MIB  # its file has holes
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_JOURNAL = 2  # what is not on the device yet is lost
_FREEZE, _THAW = 0xC0045877, 0xC0045878  # FIFREEZE, FITHAW


class LoopDisk:
    """One file system on a loop device; `folder` is where it is mounted, if it is."""

    def __init__(self, where: Path) -> None:
        """Make it, not mounted. where: folder of its image, and of where it is mounted."""
        self.folder = where / "disk"
        self.folder.mkdir(exist_ok=True)
        self._image = where / "disk.img"
        with self._image.open("wb") as file:
            file.truncate(BYTES)
        # No blocks only for root; nothing that writes later on its own.
        options = f"-q -F -b {BLOCK_BYTES} -m 0 -N 256 -E lazy_itable_init=0"
        _run("mkfs.ext4", *options.split(), str(self._image))
        self.device = Path(_run("losetup", "--show", "-f", str(self._image)).strip())

    @property
    def mounted(self) -> bool:
        """Whether the folder leads to a disk."""
        return self.folder.is_mount()

    @property
    def in_use(self) -> bool:
        """Whether the kernel still has it: mounted, or unmounted with files of it open."""
        return Path(f"/sys/fs/ext4/{self.device.name}").exists()

    def mount(self) -> None:
        _run("mount", str(self.device), str(self.folder))

    def pull(self) -> None:
        """Unmount it at once, whoever has files open there."""
        _run("umount", "-l", str(self.folder))

    def turn_read_only(self) -> None:
        """As the kernel does after an error of the device; until it is mounted anew."""
        _run("mount", "-o", "remount,abort", str(self.folder))

    def fill(self) -> None:
        """Let another file take the space that is free."""
        path = self.folder / "somebody's"
        with path.open("ab", buffering=0) as file:
            while found := os.statvfs(self.folder).f_bavail:
                free = found * BLOCK_BYTES
                size = path.stat().st_size
                try:
                    os.posix_fallocate(file.fileno(), size, min(free, max(4096, free // 2)))
                except OSError:  # the last pages go to the file's own map
                    return

    def empty(self) -> None:
        """Give back what fill() took."""
        (self.folder / "somebody's").unlink()

    def shut_down(self) -> None:
        """Let every call fail from now on, as if the device had gone, until it is mounted anew."""
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_JOURNAL))
        finally:
            os.close(fd)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Let every write hang, in a way that no signal ends."""
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _FREEZE, 0)
            try:
                yield
            finally:
                fcntl.ioctl(fd, _THAW, 0)
        finally:
            os.close(fd)

    def wait_unused(self) -> None:
        """Wait until nobody has it any more. Raises AssertionError."""
        end_s = time.monotonic() + WAIT_S
        while self.in_use:
            assert time.monotonic() < end_s, f"{self.device} is still in use"
            time.sleep(0.02)

    def close(self) -> None:
        """Unmount it and let go of the device."""
        while self.mounted:
            self.pull()
        _run("losetup", "-d", str(self.device))


def _try(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _run(*command: str) -> str:
    done = _try(*command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


def _why_not() -> str:
    """What is missing here, or nothing."""
    if os.geteuid() != 0:
        return "root, who may mount file systems"
    for tool in ("mkfs.ext4", "losetup", "mount", "umount"):
        if shutil.which(tool) is None:
            return tool
    found = _try("losetup", "-f")
    return "" if found.returncode == 0 else f"loop devices ({found.stderr.strip()})"


@contextmanager
def loop_disk(where: Path) -> Iterator[LoopDisk]:
    """A mounted file system of its own; skips the test where that is not possible."""
    why = _why_not()
    if why:
        missing(why)
    disk = LoopDisk(where)
    try:
        disk.mount()
        yield disk
    finally:
        disk.close()
