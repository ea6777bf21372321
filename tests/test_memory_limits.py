"""Memory that can be had: read from trees like the kernel's, and looked at before it is taken."""

from __future__ import annotations

import resource
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.core.errors import TierFull
from kvstore.memory_limits import MARGIN_BYTES, Left, memory_left
from kvstore.store import admin
from kvstore.wire import engine as p
from tests.bench.store import StoreProcess
from tests.harness.cgroups import PLACE, group
from tests.harness.fakes import from_u32, hashes
from tests.harness.live import LiveEngine, eventually
from tests.test_cpu_tier import descriptors
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


def limits(tight: str) -> dict[str, tuple[int | None, int, int]]:
    """Groups in which half a GiB is used, one of which has a limit that is lower than others."""
    return {path: ((1 if path == tight else 3) * GIB, GIB // 2, 0) for path in ("a/b", "a", ".")}


def contained(folder: str) -> dict[str, tuple[int | None, int, int]]:
    return {".": (2 * GIB, 0, 0), folder: (GIB, GIB // 4, 0)}


# Path of the process's group, root of the mount, limit and usage and cache of groups, what is left.
TREES: dict[str, tuple[str, str, dict[str, tuple[int | None, int, int]], int]] = {
    "cache is not counted": (
        "/a/b", "/", {"a/b": (400 * MIB, 300 * MIB, 50 * MIB), "a": (None, GIB, 0)}, 150 * MIB,
    ),
    "its own": ("/a/b", "/", limits("a/b"), GIB // 2),
    "its parent's": ("/a/b", "/", limits("a"), GIB // 2),
    "the topmost": ("/a/b", "/", limits("."), GIB // 2),
    "none": ("/a/b", "/", {"a/b": (None, 300 * MIB, 0)}, 20 * GIB),
    "more used than allowed": ("/a/b", "/", {"a/b": (GIB, 2 * GIB, 0)}, 0),
    "path of the host": ("/docker/x/inner", "/docker/x", contained("inner"), GIB - GIB // 4),
    "namespace of its own": ("/", "/", contained("."), GIB - GIB // 4),
    "outside of the namespace": ("/../../other", "/", contained("."), GIB - GIB // 4),
    "another is mounted": ("/docker/x", "/docker/y", contained("."), GIB - GIB // 4),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", TREES)
def test_S5_the_tightest_limit_of_the_groups_above_and_the_machine_counts(
    tmp_path: Path, version: Version, name: str
) -> None:
    path, root, groups, left = TREES[name]
    tree = Tree(tmp_path, version, path, root)
    for folder, (limit, used, cache) in groups.items():
        tree.group(folder, limit, used, cache)
    found = memory_left(tree.proc)
    assert found.bytes == left
    assert (found.of == "the machine") == (name == "none")
    if name == "cache is not counted":
        assert found.of.endswith("/a/b")


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


# A store in a cgroup: it lives, serves what it has, and grows when there is more

LIMIT = 400 * MIB
WAIT_S = 120.0
HAS = 'kvstore_memory_bytes{tier="cpu"}'


class Growing(LiveEngine):
    """Maps what the store makes, as a worker does."""

    def put_one(self, block: bytes) -> None:
        end = time.monotonic() + WAIT_S
        while not self.credits and time.monotonic() < end:
            self.look()
        assert self.credits, "no empty slot for long"
        self.put([block])

    def look(self) -> None:
        both = {side.sock: side for side in (self.worker, self.scheduler)}
        for sock in select.select(list(both), [], [], 0.1)[0]:
            both[sock].read()
        while any(isinstance(message, p.Extent) for message in self.worker.messages):
            self.map_extent()
        for message in list(self.scheduler.messages):
            if isinstance(message, p.Answers):
                self.scheduler.messages.remove(message)
                self.credits.extend(from_u32(message.credits))


def test_S5_a_store_in_a_small_cgroup_lives_and_grows_when_it_may(tmp_path: Path) -> None:
    with group(LIMIT) as limited:
        store = StoreProcess(
            tmp_path,
            "2GiB",
            'extent = "32MiB"\n',
            module="tests.harness.cgroups",
            environment={PLACE: str(limited.folder)},
        )
        with store:
            engine = Growing(store)
            blocks = hashes(600, "x")
            for block in blocks:
                engine.put_one(block)
            has = store.metrics()[HAS]
            assert 4 * 32 * MIB <= has < LIMIT
            for block in blocks[-50:]:
                assert engine.read(engine.ask([block])) == [engine.content(block)]
            log = store.log_path.read_text()
            assert log.count("no memory for another extent") == 1
            assert "the memory cgroup" in log
            assert "looks again every 5 s" in log
            assert limited.kills() == 0
            found = admin.status(store.address).findings
            assert [each.now for each in found if "no memory for another" in each.what] == [True]

            limited.limit(1000 * MIB)
            more, end = iter(hashes(600, "y")), time.monotonic() + WAIT_S
            while store.metrics()[HAS] <= has and time.monotonic() < end:
                engine.put_one(next(more))
                time.sleep(0.1)
            assert store.metrics()[HAS] > has
            again = "there is memory for another extent again"
            eventually(lambda: again in store.log_path.read_text())
            assert "no memory" not in str(admin.status(store.address).findings)
            engine.close()
