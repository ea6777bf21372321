"""Memory that can be had: read from trees like the kernel's, and looked at before it is taken."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.core.errors import TierFull
from kvstore.memory_limits import MARGIN_BYTES, Left, memory_left
from tiers.cpu import CpuExtent

MIB = 1 << 20
GIB = 1 << 30
ENDLESS = 9223372036854771712  # what version 1 has for no limit


class Version(NamedTuple):
    """How a version of cgroups calls what it tells."""

    line: str  # of /proc/self/cgroup
    mount: str  # of mountinfo: root, place
    limit: str
    usage: str
    cache: str
    none: str


V1 = Version(
    "4:cpu,memory:{}",
    "35 31 0:32 {} {} rw,relatime shared:9 - cgroup cgroup rw,memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
    str(ENDLESS),
)
V2 = Version(
    "0::{}",
    "35 31 0:32 {} {} rw,relatime - cgroup2 cgroup2 rw,nsdelegate",
    "memory.max",
    "memory.current",
    "inactive_file",
    "max",
)
BOTH = pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])


class Tree:
    """A /proc and a /sys/fs/cgroup."""

    def __init__(self, folder: Path, version: Version, path: str = "/a/b", root: str = "/") -> None:
        self.proc, self.top, self.version = folder / "proc", folder / "sys fs cgroup", version
        (self.proc / "self").mkdir(parents=True)
        self.top.mkdir()
        (self.proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {20 * GIB >> 10} kB\n")
        (self.proc / "self/cgroup").write_text(f"9:name=systemd:/\n{version.line.format(path)}\n")
        place = str(self.top).replace(" ", "\\040")
        mount = version.mount.format(root, place)
        (self.proc / "self/mountinfo").write_text(f"1 1 0:1 / / rw - ext4 /dev/vda rw\n{mount}\n")

    def group(self, path: str, limit: int | None, used: int, cache: int = 0) -> None:
        folder = self.top / path
        folder.mkdir(parents=True, exist_ok=True)
        text = self.version.none if limit is None else str(limit)
        (folder / self.version.limit).write_text(f"{text}\n")
        (folder / self.version.usage).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"cache 7\n{self.version.cache} {cache}\n")


@BOTH
def test_S5_a_cgroup_leaves_its_limit_less_what_is_used_and_no_cache(
    tmp_path: Path, version: Version
) -> None:
    tree = Tree(tmp_path, version)
    tree.group("a/b", 400 * MIB, 300 * MIB, cache=50 * MIB)
    tree.group("a", None, 900 * MIB)
    left = memory_left(tree.proc)
    assert left.bytes == 150 * MIB
    assert left.of.endswith("/a/b")


@BOTH
@pytest.mark.parametrize("tight", ["a/b", "a", "."])
def test_S5_every_ancestor_counts(tmp_path: Path, version: Version, tight: str) -> None:
    tree = Tree(tmp_path, version)
    for path in ("a/b", "a", "."):
        tree.group(path, (1 if path == tight else 3) * GIB, GIB // 2)
    assert memory_left(tree.proc).bytes == GIB // 2


@BOTH
def test_S5_no_limit_leaves_what_the_machine_has(tmp_path: Path, version: Version) -> None:
    tree = Tree(tmp_path, version)
    tree.group("a/b", None, 300 * MIB)
    assert memory_left(tree.proc) == Left(20 * GIB, "the machine")


@BOTH
@pytest.mark.parametrize(
    ("path", "root", "folder"),
    [
        ("/docker/x/inner", "/docker/x", "inner"),  # of the host's, part of it mounted
        ("/", "/", "."),  # a namespace of its own
        ("/../../other", "/", "."),  # outside of it
        ("/docker/x", "/docker/y", "."),
    ],
)
def test_S5_containers_see_their_group(
    tmp_path: Path, version: Version, path: str, root: str, folder: str
) -> None:
    tree = Tree(tmp_path, version, path, root)
    tree.group(".", 2 * GIB, 0)
    tree.group(folder, GIB, GIB // 4)
    assert memory_left(tree.proc).bytes == GIB - GIB // 4


@BOTH
def test_S5_more_used_than_allowed_is_nothing_left(tmp_path: Path, version: Version) -> None:
    tree = Tree(tmp_path, version)
    tree.group("a/b", GIB, 2 * GIB)
    assert memory_left(tree.proc).bytes == 0


def test_S5_version_2_has_a_limit_that_only_slows_down(tmp_path: Path) -> None:
    tree = Tree(tmp_path, V2)
    tree.group("a/b", 2 * GIB, GIB // 2)
    (tree.top / "a/b/memory.high").write_text(f"{GIB}\n")
    assert memory_left(tree.proc).bytes == GIB // 2


def test_S5_a_system_that_tells_nothing_has_no_limit(tmp_path: Path) -> None:
    assert memory_left(tmp_path).bytes >= 1 << 60


def test_S5_ulimit_counts() -> None:
    code = (
        "import resource; from kvstore.memory_limits import memory_left\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({GIB}, {GIB}))\n"
        "print(*memory_left())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    size, _, name = done.stdout.strip().partition(" ")
    assert name == "ulimit -v"
    assert 0 < int(size) < GIB
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_S5_an_extent_that_does_not_fit_is_not_begun() -> None:
    before = descriptors()
    left = Left(MARGIN_BYTES + MIB - 1, "a test")
    with pytest.raises(TierFull, match=r"takes 1 MiB more.* a test leaves 6.*MiB"):
        CpuExtent(MIB, 4096, look=lambda: left)
    assert descriptors() == before
    CpuExtent(MIB, 4096, look=lambda: Left(MARGIN_BYTES + MIB, "a test")).close()


def test_S5_an_extent_is_given_up_half_way_when_others_take_the_memory() -> None:
    looks = iter([Left(GIB, "first"), Left(GIB, "second"), Left(MARGIN_BYTES + 31 * MIB, "third")])
    before = descriptors()
    with pytest.raises(TierFull, match=r"takes 32 MiB more.* third leaves"):
        CpuExtent(96 * MIB, 4096, look=lambda: next(looks))
    assert descriptors() == before, "its memory goes with its descriptor"
