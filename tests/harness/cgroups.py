"""A real memory cgroup below our own, and `kvstore serve` that runs in it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import cli
from kvstore.memory_limits import _V1, PROC, _Files, _groups

PLACE = "KVSTORE_TEST_CGROUP"
WAIT_S = 60.0


class Group:
    """A cgroup with a limit."""

    def __init__(self, folder: Path, files: _Files) -> None:
        self.folder = folder
        self._files = files

    def limit(self, size: int) -> None:
        (self.folder / self._files.limits[0]).write_text(str(size))

    def kills(self) -> int:
        name = "memory.oom_control" if self._files is _V1 else "memory.events"
        rows = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return int(rows.get("oom_kill", 0))


@contextlib.contextmanager
def group(size: int) -> Iterator[Group]:
    """Make one below ours; skips the test, saying why, where that cannot be done."""
    why = "no memory cgroup is mounted"
    seen = set()
    for folder, files in _groups(PROC):
        if files in seen:  # an ancestor
            continue
        seen.add(files)
        made = Group(folder / f"kvstore-test-{os.getpid()}", files)
        try:
            made.folder.mkdir()
        except OSError as exc:
            why = f"{folder}: {exc.strerror}"
            continue
        try:
            if not (made.folder / files.usage).exists():
                why = f"{folder}: no memory controller for what is below"
                continue
            made.limit(size)
            yield made
            return
        finally:
            end = time.monotonic() + WAIT_S
            while made.folder.exists() and time.monotonic() < end:
                with contextlib.suppress(OSError):  # its last process is not gone yet
                    made.folder.rmdir()
                time.sleep(0.05)
    pytest.skip(f"a memory cgroup cannot be made: {why}")


def main() -> int:
    (Path(os.environ[PLACE]) / "cgroup.procs").write_text(str(os.getpid()))
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
