"""Where slot memory is: the kernel's own answers, refusals, and what a worker on a GPU says.

With one node, what can be seen is the policy that an extent's pages follow, not that they move.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from connectors.copies.gpu.pins import Pins
from kvstore import cli, numa
from kvstore.check import Level, _nodes
from kvstore.core.errors import ConfigError, TierIOError
from tests.harness.fake_cuda import FakeCuda
from tests.harness.fakes import SLOT_BYTES
from tests.harness.gpu_layouts import extent_of
from tests.harness.live import LiveStore, store_settings
from tests.harness.worker_rig import Rig
from tests.test_cpu_tier import descriptors, wait_for
from tiers.cpu import CpuExtent, CpuMemory

SIZE = 4 << 20
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
OF_ADDRESS = 2  # MPOL_F_ADDR
DEFAULT, PREFERRED = 0, 1


def refused() -> str:
    """Say why nothing of this can be seen here."""
    if platform.machine() not in GET_MEMPOLICY or not numa.nodes():
        return "needs x86-64 or ARM64, and a kernel with NUMA"
    try:
        numa.check(numa.nodes()[0])
    except ConfigError as exc:  # a container without SYS_NICE
        return str(exc)
    return ""


pytestmark = pytest.mark.skipif(bool(refused()), reason=refused() or "it is not")


def policy_of(extent: CpuExtent) -> tuple[int, list[int]]:
    """Return the policy of the slot in the middle, and its nodes."""
    return policy_at(np.frombuffer(extent.slot(extent.count // 2), np.uint8).ctypes.data)


def policy_at(address: int) -> tuple[int, list[int]]:
    """Ask the kernel for the policy of a page, and its nodes."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    call = ctypes.c_long(GET_MEMPOLICY[platform.machine()])
    place = ctypes.c_void_p(address // mmap.PAGESIZE * mmap.PAGESIZE)
    flags = ctypes.c_long(OF_ADDRESS)
    done = numa._kernel(call, ctypes.byref(mode), mask, ctypes.c_long(1025), place, flags)
    assert done == 0, os.strerror(ctypes.get_errno())
    return mode.value, [n for n in range(1024) if mask[n // 64] >> n % 64 & 1]


def answers(pool: CpuMemory) -> Iterator[CpuExtent]:
    """Make one extent and give it back."""
    assert pool.request("a", SLOT_BYTES)
    ((_, made),) = wait_for(pool)
    assert isinstance(made, CpuExtent)
    yield made
    pool.release(made)
    pool.close()


# The store


def test_pages_of_an_extent_follow_the_setting() -> None:
    node = numa.nodes()[-1]
    for made in answers(CpuMemory(SIZE, SIZE, node)):
        assert policy_of(made) == (PREFERRED, [node])
        found = made.nodes()
        assert found.keys() <= set(numa.nodes())
        assert 1 <= sum(found.values()) <= numa.SAMPLES
    for made in answers(CpuMemory(SIZE, SIZE)):
        assert policy_of(made) == (DEFAULT, []), "without a setting the kernel decides"


def test_a_worker_maps_memory_that_follows_the_setting(tmp_path: Path) -> None:
    """From the file to the extents of a store; the policy is seen in anybody's mapping."""
    node = numa.nodes()[-1]
    with LiveStore(store_settings(tmp_path, cpu={"capacity": "16MiB", "numa": node})) as store:
        rig = Rig(store.path)
        try:
            rig.attach()
            session = rig.ranks[0].half._copies.session
            assert session is not None
            (extent,) = session.slots._extents.values()
            assert policy_at(extent.address) == (PREFERRED, [node])
        finally:
            rig.close()


def test_memory_that_is_elsewhere_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node without room is no error: the policy is a preference."""
    monkeypatch.setattr(numa, "nodes_of", lambda *_: Counter({0: 3, 1: 9, 5: 4}))
    list(answers(CpuMemory(SIZE, SIZE, 0)))
    assert "NUMA node 0 has no room: an extent is on node 1 and 5" in caplog.text
    caplog.clear()
    list(answers(CpuMemory(SIZE, SIZE)))
    assert caplog.text == ""


def test_a_node_that_is_not_there_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(numa, "NODES", tmp_path)
    (tmp_path / "has_memory").write_text("0-1,4\n")
    with pytest.raises(ConfigError, match=r"numa: expected a node with memory \(0 or 1 or 4\), fo"):
        CpuMemory(SIZE, SIZE, 3)
    (tmp_path / "has_memory").write_text("\n")
    assert numa.nodes() == []
    (tmp_path / "has_memory").unlink()
    with pytest.raises(ConfigError, match=r"the kernel knows of no nodes\), found 0"):
        numa.check(0)


def test_a_node_that_the_kernel_refuses_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one outside of the store's cpuset: the kernel's own error, of a node that is not there."""
    monkeypatch.setattr(numa, "NODES", tmp_path)
    (tmp_path / "has_memory").write_text("0-1023\n")
    before = descriptors()
    expected = r"on node 1023, .*Invalid argument.*service excludes the n"
    with pytest.raises(ConfigError, match=expected):
        numa.check(1023)
    assert descriptors() == before


def test_a_processor_whose_calls_are_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match=r"Function not implemented.*Leave the setting out"):
        numa.check(numa.nodes()[0])


# A filter as sandboxes install: the call that places memory answers EPERM.
SANDBOX = """
import ctypes, struct, sys
from kvstore import cli, numa
import platform
place = numa._CALLS[platform.machine()][0]
rules = struct.pack("HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, place, 0x06, 0, 0, 0x00050001,
                    0x06, 0, 0, 0x7FFF0000)
held = ctypes.create_string_buffer(rules)
program = struct.pack("HxxxxxxP", 4, ctypes.addressof(held))
prctl = ctypes.CDLL(None, use_errno=True).prctl
if prctl(38, 1, 0, 0, 0) or prctl(22, 2, program, 0, 0):
    sys.exit(77)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_sandbox_that_refuses_the_call_is_named(command: str, tmp_path: Path) -> None:
    """It is not passed over in silence: the store does not start."""
    node = numa.nodes()[0]
    path = config(tmp_path, f"numa = {node}")
    arguments = [sys.executable, "-c", SANDBOX, command, "--config", str(path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode == 77:
        pytest.skip("this machine lets no process filter its calls")
    expected = (
        f"[cpu] numa: expected to place memory on node {node}, found that the system refuses it"
        " (Operation not permitted). Sandboxes do, and containers without the capability SYS_NICE"
    )
    assert expected in (done.stderr if command == "serve" else done.stdout), done
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


# kvstore check


def config(folder: Path, more: str = "") -> Path:
    path = folder / "kvstore.toml"
    server = f'[server]\nsocket = "{folder}/kv.sock"\nmetrics = ""\n'
    path.write_text(f'{server}[cpu]\ncapacity = "64MiB"\n{more}')
    return path


def test_check_shows_the_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = numa.nodes()[0]
    assert cli.main(["check", "--config", str(config(tmp_path, f"numa = {node}"))]) == 0
    assert f"taken from node {node} while it has room; nodes with" in capsys.readouterr().out
    assert cli.main(["check", "--config", str(config(tmp_path))]) == 0
    assert "taken from any node, as the kernel decides" in capsys.readouterr().out
    assert cli.main(["check", "--config", str(config(tmp_path, "numa = 1023"))]) == 2
    assert "fail  numa" in capsys.readouterr().out


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two nodes and a GPU at node 1, that lets memory be placed anywhere."""
    monkeypatch.setattr(numa, "NODES", tmp_path)
    monkeypatch.setattr(numa, "PCI", tmp_path)
    monkeypatch.setattr(numa, "prefer", lambda *_: None)
    (tmp_path / "has_memory").write_text("0-1\n")
    device = tmp_path / "devices" / "0000:ab:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    driver = tmp_path / "drivers" / "nvidia"
    driver.mkdir(parents=True)
    (driver / device.name).symlink_to(device)
    (driver / "module").mkdir()
    return device


@pytest.mark.parametrize(("chosen", "level"), [(None, Level.NOTE), (0, Level.NOTE), (1, Level.OK)])
def test_check_notes_memory_far_from_a_gpu(machine: Path, chosen: int | None, level: Level) -> None:
    found = _nodes(chosen)
    assert found.level is level
    assert "nodes with memory: 0, 1, GPUs at nodes: 1" in found.text
    (machine / "numa_node").write_text("-1\n")
    assert "GPUs at nodes: none known" in _nodes(None).text


# The worker


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "the GPU is at NUMA node" in r.getMessage()]


@pytest.mark.usefixtures("machine")
def test_a_worker_says_once_that_slots_are_on_another_node_than_its_gpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """These are real pages, which are on node 0 of a machine with one; the GPU is at 1."""
    if numa.nodes_of(*touched()).keys() != {0}:
        pytest.skip("needs memory on node 0")
    pins = Pins(FakeCuda([]))
    for _ in range(3):
        pins.pin(extent_of(7, 12288), lambda: False)
    (said,) = warnings(caplog)
    assert said.startswith("kvstore: the GPU is at NUMA node 1, slot memory is on node 0, so")
    assert "set numa = 1 in [cpu] of the store" in said


HELD = np.ones(SIZE, np.uint8)


def touched() -> tuple[int, int]:
    return -(-HELD.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE, SIZE - mmap.PAGESIZE


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({1: 16}, False),
        ({0: 8, 1: 8}, False),
        ({0: 9, 1: 7}, True),
        ({0: 8, 2: 8}, True),
        ({}, False),
    ],
)
def test_it_is_told_when_most_pages_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    found: dict[int, int],
    told: bool,
) -> None:
    monkeypatch.setattr(numa, "nodes_of", lambda *_: Counter(found))
    Pins(FakeCuda([])).pin(extent_of(7, 12288), lambda: False)
    assert bool(warnings(caplog)) is told


def test_nothing_is_asked_where_the_node_of_the_gpu_is_not_known(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def asked(*_: object) -> Counter[int]:
        raise AssertionError

    monkeypatch.setattr(numa, "nodes_of", asked)
    (machine / "numa_node").write_text("-1\n")
    Pins(FakeCuda([])).pin(extent_of(7, 12288), lambda: False)
    (machine / "numa_node").unlink()
    Pins(FakeCuda([])).pin(extent_of(7, 12288), lambda: False)

    def refuse(_cuda: FakeCuda) -> str:
        raise TierIOError("GPU 0: no")

    monkeypatch.setattr(FakeCuda, "bus_id", refuse)
    Pins(FakeCuda([])).pin(extent_of(7, 12288), lambda: False)
    assert warnings(caplog) == []


@pytest.mark.usefixtures("machine")
def test_a_system_that_does_not_tell_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> Counter[int]:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(numa, "nodes_of", refuse)
    caplog.set_level("INFO", "connectors.copies.gpu.pins")
    cuda = FakeCuda([])
    pins = Pins(cuda)
    for _ in range(2):
        pins.pin(extent_of(7, 12288), lambda: False)
    assert len([r for r in caplog.records if "cannot be found" in r.getMessage()]) == 1
    assert len(cuda.pinned_ranges) == 2
    for made in answers(CpuMemory(SIZE, SIZE, 0)):
        assert made.count
