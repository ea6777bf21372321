"""Ceph's S3 gateway (Debian's radosgw, ceph-mon, ceph-osd) as processes; objects are in memory."""

from __future__ import annotations

import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.harness.patience import WAIT_S

_CONFIG = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}/0
keyring = {folder}/keyring
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = {bytes_max}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
run dir = {folder}
admin socket = {folder}/$name.$pid.asok
log file = {folder}/$name.log
rgw frontends = beast endpoint=127.0.0.1:{port}
"""


class Ceph:
    """One monitor, one OSD and one gateway, as the user who runs the tests."""

    def __init__(self, port: int, mon_port: int, bytes_max: int = 2 << 30) -> None:
        """Start them and wait until the gateway knows the user `tests`.

        port, mon_port: of the gateway and of the monitor, on loopback. bytes_max: of all objects.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="kvstore-ceph-")
        self._processes: list[subprocess.Popen[bytes]] = []
        folder = Path(self._folder.name)
        (folder / "mon").mkdir()
        (folder / "osd").mkdir()
        fsid = uuid.uuid4()
        self._config = folder / "ceph.conf"
        self._config.write_text(
            _CONFIG.format(
                fsid=fsid, folder=folder, port=port, mon_port=mon_port, bytes_max=bytes_max
            )
        )
        try:
            self._make_keys(folder / "keyring")
            self._do("ceph-mon", "--mkfs", "-i", "a", "--keyring", str(folder / "keyring"))
            self._start("ceph-mon", "-i", "a")
            osd = str(uuid.uuid4())
            self._do("ceph", "osd", "new", osd)
            self._do("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
            self._start("ceph-osd", "-i", "0")
            self.gateway = self._start("radosgw", "-n", "client.admin")
            keys = ("--access-key", "tests", "--secret-key", "tests")
            self._do(
                "radosgw-admin", "user", "create", "--uid", "tests", "--display-name", "t", *keys
            )
        except BaseException:
            self.kill()
            raise

    def _make_keys(self, keyring: Path) -> None:
        create = ["--create-keyring"]
        caps = [word for daemon in ("mon", "osd", "mgr") for word in ("--cap", daemon, "allow *")]
        for name in ("mon.", "client.admin", "osd.0"):
            command = ["ceph-authtool", *create, str(keyring), "--gen-key", "-n", name, *caps]
            subprocess.run(command, check=True, capture_output=True, timeout=WAIT_S)
            create = []

    def _command(self, words: Sequence[str]) -> list[str]:
        program, *options = words
        return [program, "-c", str(self._config), *options]

    def _do(self, *words: str) -> None:
        done = subprocess.run(
            self._command(words), check=False, capture_output=True, text=True, timeout=WAIT_S
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-2000:]}"

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*self._command(words), "-f"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._processes.append(process)
        return process

    def bound(self, bytes_max: int, scope: str, name: str) -> None:
        """Set a quota; 0: without one. scope: "bucket" or "user", which has this name."""
        of = (f"--quota-scope={scope}", f"--{'uid' if scope == 'user' else scope}={name}")
        if bytes_max:
            self._do("radosgw-admin", "quota", "set", *of, f"--max-size={bytes_max}")
        self._do("radosgw-admin", "quota", "enable" if bytes_max else "disable", *of)

    def kill(self) -> None:
        """End all of them at once; their objects are gone."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()
        self._folder.cleanup()
