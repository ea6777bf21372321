"""What `kvstore check` says about NIXL's GDS plugin, with NIXL itself and with stand-ins for it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from kvstore.gds import Gds
from tests.harness.compiled import compiled
from tiers.nvme import gds, nixl_gds

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /mnt rw - tmpfs tmpfs rw,size=1g
31 30 259:1 / {folder} rw,noatime - xfs /dev/nvme0n1 rw
"""


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let this program stand for the one that loads the plugin."""
    monkeypatch.setattr(gds, "COMMAND", (sys.executable, "-c", code))


def test_nixl_is_tried_for_real() -> None:
    """Where it does not load, the reason is NIXL's; nothing reaches our own output."""
    found = gds.attempt()
    assert found == "" or found.startswith("NIXL"), found
    assert "answer" not in found
    assert "NOT_FOUND" not in found, "a library that is missing is named"


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        ("open", ""),
        ("fail", "refuses: NIXL_ERR_BACKEND: cuFileDriverOpen failed: nvidia-fs driver is not loa"),
        ("abort", "ends the process that loads it (Aborted)"),
        ("hang", "does not answer within 5 s"),
    ],
)
def test_the_real_plugin_on_a_cufile_that_is_none(
    does: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled("cufile_stub.c", tmp_path / "libcufile.so.0")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("CUFILE_STUB", does)
    monkeypatch.setattr(gds, "LIMIT_S", 5.0 if does == "hang" else 600.0)
    found = gds.attempt()
    if "does not load" in found:  # of another version, or libcudart is not here either
        pytest.skip(found)
    if does == "open":
        assert found == ""
    else:
        assert found.startswith(f"NIXL's GDS plugin {expected}")


def test_a_plugin_that_nixl_does_not_have_is_refused_in_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_gds, "PLUGIN", "NONE")
    tried = nixl_gds.attempt()
    assert tried.package
    assert "NOT_FOUND" in tried.wrong


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiers.nvme.nixl_mover", None)
    tried = nixl_gds.attempt()
    assert not tried.package
    child(monkeypatch, """print('{"wrong": "No module named nixl", "package": false}', end="")""")
    assert gds.attempt() == "NIXL cannot be loaded: No module named nixl"


LOG = (
    "I1123 15:15:29.249135   23804 nixl_plugin_manager.cpp:352] Failed to load plugin from"
    " /a/libplugin_GDS.so: libcufile.so.0: cannot open shared object file\\n"
    "E1123 15:15:29.249167   23804 nixl_agent.cpp:334] createBackend: unsupported\\n"
)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("""print('a log\\n{}', end="")""", ""),
        (
            f"""import sys; sys.stderr.write("{LOG}"); print('{{"wrong": "NOT_FOUND"}}', end="")""",
            "plugin does not load: libcufile.so.0: cannot open shared object file",
        ),
        (
            """import sys; sys.stderr.write("E1 1 1 gds.cpp:1] cuFileDriverOpen: 5001\\n" * 9999)
print('{"wrong": "BACKEND"}', end="")""",
            "plugin refuses: BACKEND: cuFileDriverOpen: 5001",
        ),
        ("import os; os.abort()", "plugin ends the process that loads it (Aborted)"),
        (
            """import sys; sys.stderr.write("E1 1 1 gds.cpp:1] no driver\\n"); sys.exit(3)""",
            "plugin ends the process that loads it (status 3): no driver",
        ),
        ("pass", "plugin ends the process that loads it (status 0)"),
        ("print('no answer')", "plugin ends the process that loads it (status 0)"),
    ],
)
def test_whatever_the_plugin_does_is_words(
    monkeypatch: pytest.MonkeyPatch, code: str, expected: str
) -> None:
    child(monkeypatch, code)
    assert gds.attempt().removeprefix("NIXL's GDS ") == expected


def test_a_plugin_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(gds, "LIMIT_S", 0.2)
    start = time.monotonic()
    assert gds.attempt() == "NIXL's GDS plugin does not answer within 0.2 s"
    assert time.monotonic() - start < 60


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU, the module, and a plugin that loads; the disk is at disk/."""
    for name in ("dev", "nvidia", "nvidia-fs", "disk"):
        (tmp_path / name).mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "mounts").write_text(MOUNTS.format(folder=tmp_path / "disk"))
    monkeypatch.setattr(gds, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(gds, "DRIVER", tmp_path / "nvidia")
    monkeypatch.setattr(gds, "MODULE", tmp_path / "nvidia-fs")
    monkeypatch.setattr(gds, "MOUNTS", tmp_path / "mounts")
    child(monkeypatch, "print('{}', end='')")
    return tmp_path


def test_a_machine_that_could_use_it_is_told_that_kvstore_does_not(machine: Path) -> None:
    found = gds.examine(machine / "disk" / "kv")
    assert found == Gds(usable=True, direct=True, reasons=[])
    assert found.text.startswith("could be used. kvstore does not use it: what is on disk always")


def test_what_makes_it_go_through_host_memory_is_named(machine: Path) -> None:
    (machine / "nvidia-fs").rmdir()
    found = gds.examine(machine / "disk")
    assert (found.usable, found.direct, len(found.reasons)) == (True, False, 1)
    assert "would go through host memory: the nvidia-fs module is not loaded" in found.text
    (machine / "nvidia-fs").mkdir()
    (machine / "mounts").write_text(MOUNTS.format(folder="/elsewhere").replace("ext4", "btrfs"))
    found = gds.examine(machine / "disk")
    assert (found.usable, found.direct) == (True, False)
    assert found.reasons[0].startswith(f"{machine}/disk is on btrfs: ")


def test_no_gpu_is_told_from_one_that_is_not_visible(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "dev" / "nvidia0").unlink()
    (machine / "dev" / "nvidiactl").touch()
    found = gds.examine(machine / "disk")
    assert (found.usable, found.direct) == (False, False)
    assert "cannot be used: the NVIDIA driver is loaded, but no GPU is in" in found.text
    (machine / "nvidia").rmdir()
    child(monkeypatch, "import os; os.abort()")
    found = gds.examine(machine / "disk")
    assert found.reasons[0].startswith("no GPU here")
    assert "(Aborted)" in found.reasons[1], "what else is in the way is said as well"


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/", "ext4"), ("/mnt/x", "tmpfs"), ("/mnt/nv me/kv", "xfs"), ("/mnt2", "ext4")],
)
def test_the_file_system_is_that_of_the_deepest_mount(
    folder: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mounts").write_text(MOUNTS.format(folder="/mnt/nv\\040me"))
    monkeypatch.setattr(gds, "MOUNTS", tmp_path / "mounts")
    assert gds.file_system_of(Path(folder)) == kind
