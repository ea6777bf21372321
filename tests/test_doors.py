"""Who may listen, who may connect, and whose a path is: other users, links, and two at a time."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from connectors.config import parse_extra
from connectors.store_connection import LinkLost, attach, connect
from kvstore import check, cli, launch
from kvstore.config import parse
from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.listener import TakenError, listen, taken
from kvstore.store import admin
from kvstore.units import shown
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.harness.fakes import geometry, value_of
from tests.harness.live import LiveEngine, LiveStore, engine, eventually, store_settings

STRANGER = 65534
GROUP = 4242
MODULE = "kvstore.cli"
ROOT = Path(__file__).parent.parent
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def as_stranger(code: str, *arguments: str, groups: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Run Python as another user; what it needs is imported before, who knows what it may read."""
    text = (
        f"import os, socket, sys; os.setgroups({[*groups]}); os.setgid({STRANGER});"
        f" os.setuid({STRANGER})\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", text + textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
    )


def private(engine: str) -> str:
    """Start an engine's private store, as its connector does; return its address."""
    return parse_extra({"cpu": "64MiB"}).find_store(engine)


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are killed at the end."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can reach and write in."""
    folder = Path("/tmp") / f"kvstore-test-{secrets.token_hex(6)}"  # noqa: S108 - as /tmp is
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


LISTENS = """
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1].replace("@", chr(0)))
if not sys.argv[1].startswith("@"):
    os.chmod(sys.argv[1], 0o777)
sock.listen()
print("listens", flush=True)
got = b""
while True:
    other, _ = sock.accept()
    other.settimeout(1)
    try:
        got = other.recv(1000)
    except OSError:
        got = b""
    other.close()
    print("got", len(got), flush=True)
"""


def stranger_at(path: str, ended: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    ended.append(as_stranger(LISTENS, path))
    out = ended[-1].stdout
    assert out is not None
    assert out.readline() == b"listens\n"
    return ended[-1]


def heard(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


# S1: clients look who listens


@as_root
def test_S1_an_engine_tells_nothing_to_a_store_of_another_user(
    open_folder: Path, ended: list[subprocess.Popen[bytes]]
) -> None:
    path = str(open_folder / "kv.sock")
    fake = stranger_at(path, ended)
    with pytest.raises(LinkLost, match=rf"uid {STRANGER} listens at .*, expected uid 0 "):
        connect(path)
    assert heard(fake) == b"got 0\n"
    connect(path, STRANGER).close()  # the one that the configuration names

    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    assert attach(lambda: path, p.Hello(p.VERSION, "e", "scheduler", 0, 1), stop) is None
    assert {heard(fake) for _ in range(3)} == {b"got 0\n"}


@as_root
def test_S1_commands_ask_no_store_of_another_user(
    open_folder: Path, ended: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(open_folder / "kv.sock")
    fake = stranger_at(path, ended)
    for command in (["stats"], ["clear"], ["resize", "nvme", "1GiB"]):
        assert cli.main([*command, "--store", path]) == 1
        assert f"uid {STRANGER} listens at {path}" in capsys.readouterr().err
        assert heard(fake) == b"got 0\n"


@as_root
@pytest.mark.parametrize("user", ["nobody", str(STRANGER)])
def test_S1_a_command_can_name_who_runs_the_store(
    open_folder: Path,
    ended: list[subprocess.Popen[bytes]],
    capsys: pytest.CaptureFixture[str],
    user: str,
) -> None:
    path = str(open_folder / "kv.sock")
    fake = stranger_at(path, ended)
    assert cli.main(["stats", "--store", path, "--user", user]) == 1
    assert "is no kvstore" in capsys.readouterr().err
    assert int(heard(fake).split()[1]) > 0


# S1: a private store's name can be neither taken nor read


@as_root
def test_S1_another_user_cannot_take_the_name_of_a_private_store(
    ended: list[subprocess.Popen[bytes]],
) -> None:
    engine = f"prefill {secrets.token_hex(4)}"
    address = launch.address_of(engine)
    Path(address).parent.mkdir(mode=0o700, exist_ok=True)
    taker = as_stranger(LISTENS, address.replace("\0", "@"))
    ended.append(taker)
    assert heard(taker) == b"", "it has the name"
    found = private(engine)
    assert admin.stats(f"engine:{engine}")
    unix = as_stranger("sys.stdout.write(open('/proc/net/unix').read())")
    seen = unix.communicate()[0]
    names = [line.split()[-1] for line in seen.splitlines() if b" @" in line]
    assert not [name for name in names if Path(address).stem.encode() in name], "an abstract name"
    reader = as_stranger("socket.socket(socket.AF_UNIX).connect(sys.argv[1])", found)
    reader.communicate()
    assert reader.returncode != 0
    eventually(lambda: not taken(found))


def test_S6_a_private_store_serves_an_engine_that_has_closed_its_standard_error() -> None:
    engine = f"engine {secrets.token_hex(4)}"
    code = f"""
        import os
        from connectors.config import parse_extra
        from kvstore.store import admin
        os.close(2)
        assert os.open(os.devnull, os.O_RDONLY) == 2, "which the store does not get"
        parse_extra({{"cpu": "64MiB"}}).find_store({engine!r})
        print(len(admin.stats("engine:{engine}")))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, check=False, stdout=subprocess.PIPE).stdout
    eventually(lambda: not taken(launch.address_of(engine)))


@as_root
def test_S1_another_users_folder_is_not_used(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_FOLDERS", open_folder)
    mine = open_folder / "kvstore-0"
    mine.mkdir(mode=0o700)
    os.chown(mine, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=rf"{mine}: expected a directory of uid 0.* {STRANGER}"):
        private("engine")
    assert list(mine.iterdir()) == []


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_S1_an_open_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setattr(launch, "_FOLDERS", tmp_path)
    mine = tmp_path / f"kvstore-{os.geteuid()}"
    mine.mkdir()
    mine.chmod(mode)
    with pytest.raises(ConfigError, match=f"found mode {mode:04o}: chmod 0700"):
        private("engine")


def test_S1_a_folder_reached_through_a_link_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_FOLDERS", tmp_path)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"kvstore-{os.geteuid()}").symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="expected a directory, found something else"):
        private("engine")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_S1_a_folder_that_others_can_rename_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(launch, "_FOLDERS", shared)
    with pytest.raises(ConfigError, match="found mode 0777"):
        private("engine")


def test_a_private_store_that_was_killed_is_replaced_and_leaves_nothing() -> None:
    engine, other = (f"engine {secrets.token_hex(4)}" for _ in range(2))
    address = private(engine)
    killed = private(other)
    assert admin.stats(f"engine:{engine}")
    for child in launch._children[-2:]:
        child.kill()
        child.wait()
    assert not taken(address)
    assert Path(address).exists()
    assert private(engine) == address
    assert admin.stats(f"engine:{engine}")
    assert not Path(killed).exists(), "what another one has left is taken away"
    eventually(lambda: not taken(address))
    eventually(lambda: not Path(address).exists())
    assert not list(Path(address).parent.glob(f"{Path(address).name}*"))


def test_processes_of_an_engine_that_start_together_have_one_private_store() -> None:
    engine = f"engine {secrets.token_hex(4)}"
    before = len(launch._children)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(private(engine))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {launch.address_of(engine)}
    assert len(launch._children) == before + 1
    launch._children[-1].wait()


def test_settings_that_an_engine_gives_its_private_store_reach_its_workers() -> None:
    settings = parse_extra({"cpu": "64MiB", "promote": "7s", "promote_limit": "70s"})
    engine = f"engine {secrets.token_hex(4)}"
    hello = p.Hello(p.VERSION, engine, "worker", 0, 1, geometry=geometry())
    attached = attach(lambda: settings.find_store(engine), hello, threading.Event())
    assert attached is not None
    link, welcome = attached
    link.close()
    assert (welcome.wait_ms, welcome.limit_ms) == (7_000, 70_000)
    launch._children[-1].wait()


# S1: a store looks who connects


CONNECTS = """
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(20)
sock.connect(sys.argv[1])
sys.stdin.buffer.readline()
try:
    sock.sendall(bytes.fromhex(sys.argv[2]))
    sys.stdout.buffer.write(sock.recv(1000))
except BrokenPipeError:
    sys.stdout.buffer.write(sock.recv(1000))
"""


def asked_by_stranger(path: str, groups: Sequence[int] = ()) -> bytes:
    query = framing.encode(p.Query("stats")).hex()
    return as_stranger(CONNECTS, path, query, groups=groups).communicate(b"\n")[0]


@as_root
@pytest.mark.parametrize("allow", [[], [STRANGER]])
def test_S1_a_store_lets_in_whom_its_settings_name(
    open_folder: Path, allow: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    path = open_folder / "kv.sock"
    server = {"socket": str(path), "metrics": "", "allow": allow}
    with LiveStore(parse({"server": server, "cpu": {"capacity": "16MiB"}})) as store:
        path.chmod(0o777)  # whatever its mode is: the kernel says who it is
        answers = [asked_by_stranger(str(path)) for _ in range(3)]
        refused = value_of(store.server.store.numbers, "kvstore_refused", "user")
    told = f"uid {STRANGER} may not attach".encode()
    assert [told in answer for answer in answers] == [not allow] * 3
    assert [b"kvstore_capacity_bytes" in answer for answer in answers] == [bool(allow)] * 3
    assert refused == (0 if allow else 3)
    assert caplog.text.count("a process was refused") == (0 if allow else 1)


@as_root
def test_S1_an_engine_of_another_user_is_served_by_a_store_that_names_it(open_folder: Path) -> None:
    folder = open_folder / "new"
    server = {"socket": f"{folder}/kv.sock", "metrics": "", "allow": [STRANGER]}
    with LiveStore(parse({"server": server, "cpu": {"capacity": "16MiB"}})) as store:
        assert b"kvstore_capacity_bytes" in asked_by_stranger(store.path)
        with contextlib.closing(LiveEngine(store)):  # and ours is, too
            pass


# Q17: group and mode of the socket


@as_root
@pytest.mark.parametrize("allow", [[], [STRANGER]])
def test_Q17_a_user_has_to_be_of_the_group_and_be_named(
    open_folder: Path, allow: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    path = open_folder / "new" / "kv.sock"
    server = {"socket": str(path), "metrics": "", "allow": allow, "group": GROUP}
    with LiveStore(parse({"server": server, "cpu": {"capacity": "16MiB"}})) as store:
        for place, mode in ((path, 0o660), (path.parent, 0o750)):
            found = place.stat()
            assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (GROUP, mode)
        path.parent.chmod(0o755)  # of a folder that was there before, the socket's mode decides
        assert asked_by_stranger(str(path)) == b""
        assert "PermissionError" in capfd.readouterr().err
        answer = asked_by_stranger(str(path), groups=[GROUP])
        told = f"uid {STRANGER} may not attach".encode()
        assert (told in answer, b"kvstore_capacity_bytes" in answer) == (not allow, bool(allow))
        with contextlib.closing(LiveEngine(store)):
            pass


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_Q17_the_mode_is_that_of_the_configuration(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(0o711)
    path, group = tmp_path / "kv.sock", os.getegid()
    server = {"socket": str(path), "metrics": "", "mode": f"{mode:04o}", "allow": ["root"]}
    with LiveStore(parse({"server": {**server, "group": group}, "cpu": {"capacity": "16MiB"}})):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o711, "a folder that was there is kept"


def test_Q17_check_notes_a_socket_for_others_whom_the_store_refuses(tmp_path: Path) -> None:
    for more, level in (({}, "ok"), ({"group": os.getegid()}, "note"), ({"allow": [0]}, "ok")):
        server = {"socket": f"{tmp_path}/kv.sock", "metrics": "", **more}
        found = check.examine(parse({"server": server, "cpu": {"capacity": "16MiB"}}))
        (socket_line,) = [each for each in found if each.what == "socket" and "mode" in each.text]
        assert socket_line.level.value == level
        assert ("can connect, and are refused" in socket_line.text) == (level == "note")


@as_root
def test_Q17_a_group_that_the_store_is_not_in_ends_the_start_with_one_line(
    open_folder: Path,
) -> None:
    code = f"""
    sys.path[:] = {sys.path!r}
    from kvstore import check, listener
    from kvstore.core.errors import ConfigError
    os.setgroups([7]); os.setgid({STRANGER}); os.setuid({STRANGER})
    path = sys.argv[1]
    for look in (check.refuse_socket, lambda path, group: listener.listen(path, 0o660, group)):
        try:
            look(path, {GROUP})
        except ConfigError as exc:
            print(exc)
    print(os.listdir(os.path.dirname(path)))
    listener.listen(path, 0o660, 7)
    print(os.stat(path).st_gid)
    """
    done = subprocess.run(
        [sys.executable, "-c", "import os, sys\n" + textwrap.dedent(code), open_folder / "kv.sock"],
        capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    line = (
        f"[server] group: expected a group of uid {STRANGER}, which runs the store (7, {STRANGER}),"
        f" found {GROUP}"
    )
    assert done.stdout.splitlines() == [line, line, "[]", "7"]


# Whose a socket's path is


def serve(path: Path, log: Path, more: str = "") -> subprocess.Popen[bytes]:
    config = path.with_suffix(f".{secrets.token_hex(3)}.toml")
    text = f'[server]\nsocket = "{path}"\nmetrics = ""\n[cpu]\ncapacity = "16MiB"\n{more}'
    config.write_text(text, encoding="utf-8")
    with log.open("ab") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, "serve", "--config", str(config)], stderr=sink
        )


def test_of_stores_started_at_once_exactly_one_lives(tmp_path: Path) -> None:
    """30 rounds of 4 listeners in processes of their own, forked when all is imported."""
    path = str(tmp_path / "kv.sock")
    for number in range(30):
        if number % 3 == 0:  # else there is what the ones before have left, who were killed
            for left in tmp_path.iterdir():
                left.unlink()
        ready, go = os.pipe()
        results = []
        for _ in range(4):
            out, mine = os.pipe()
            if not (child := os.fork()):
                os.close(go)
                os.read(ready, 1)  # all at once, when it is closed
                try:
                    found = listen(path)
                    found.start()
                    os.write(mine, b"lives")
                    time.sleep(60)
                except ConfigError as exc:
                    os.write(mine, str(exc).encode())
                finally:
                    os._exit(0)
            os.close(mine)
            results.append((child, out))
        os.close(ready)
        os.close(go)
        said = [os.read(out, 1000).decode() for _, out in results]
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as client:
            client.connect(path)
        for child, out in results:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(out)
        assert sorted(said) == sorted(["lives", *[f"a store is running at {path} already"] * 3]), (
            f"round {number}"
        )


def test_a_file_of_somebody_else_at_the_path_is_left(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with closing(listen(str(path))):
        path.unlink()
        path.write_text("another")
    assert path.read_text() == "another"


def test_a_store_whose_files_were_removed_leaves_those_of_the_next_one(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    first = listen(path)
    for file in (path, f"{path}.lock"):  # by who cleans the folder of files that are old
        Path(file).unlink()
    with closing(listen(path)):
        first.close()
        assert Path(path).exists()
        with pytest.raises(TakenError):
            listen(path)


@pytest.mark.parametrize("what", ["kv.sock", "kv.sock kv.sock.lock", "."])
def test_a_store_whose_files_were_removed_listens_there_again(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "run"

    def answers() -> bool:
        with contextlib.suppress(KVStoreError):
            return len(admin.status(store.path).engines) == 1
        return False

    with LiveStore(store_settings(folder)) as store, engine(store):
        inode = Path(store.path).stat().st_ino
        if what == ".":
            shutil.rmtree(folder)
        else:
            for file in what.split():
                (folder / file).unlink()
        eventually(answers)
        assert Path(store.path).stat().st_ino != inode
        assert stat.S_IMODE(Path(store.path).stat().st_mode) == 0o600
        with pytest.raises(TakenError):
            listen(store.path)
    assert not Path(store.path).exists()


def test_a_store_whose_files_cannot_be_made_again_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    with LiveStore(store_settings(folder)) as store:
        shutil.rmtree(folder)
        folder.write_text("in its place")
        eventually(lambda: "cannot be made again" in caplog.text)
        time.sleep(0.05)
        folder.unlink()
        eventually(lambda: "listening there again" in caplog.text)
        assert admin.status(store.path).ready
    assert caplog.text.count("cannot be made again") == 1


def test_a_store_whose_files_were_removed_leaves_the_path_to_who_took_it(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    with closing(listen(path)) as first:
        assert first.renew() is None
        for file in (path, f"{path}.lock"):
            Path(file).unlink()
        with closing(listen(path)) as second:
            assert first.renew() is None
            Path(path).unlink()
            with pytest.raises(TakenError):
                first.renew()
            before = second.renew()
            assert before is not None
            before.close()


def test_a_second_store_beside_a_frozen_one_is_refused_at_once(tmp_path: Path) -> None:
    path, log = tmp_path / "kv.sock", tmp_path / "log"
    frozen = serve(path, log)
    try:
        eventually(lambda: log.exists() and "listening at" in log.read_text())
        frozen.send_signal(signal.SIGSTOP)
        waiting = []
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect(str(path))
        started = time.monotonic()
        with pytest.raises(ConfigError, match="a store is running at"):
            listen(str(path))
        with pytest.raises(admin.StoreUnreachable, match=r"did not answer within 0\.5 s"):
            admin.stats(str(path), timeout_s=0.5)
        assert time.monotonic() - started < 5
        for sock in waiting:
            sock.close()
    finally:
        frozen.kill()
        frozen.wait()


def test_S1_nobody_connects_before_the_disk_is_open_and_nothing_is_said_too_early(
    tmp_path: Path,
) -> None:
    path, log = tmp_path / "kv.sock", tmp_path / "log"
    disk = tmp_path / "disk"
    disk.write_text("a file")
    store = serve(path, log, f'[nvme]\npath = "{disk}"\ncapacity = "64MiB"\n')
    assert store.wait(60) == 2
    text = log.read_text()
    assert "listening at" not in text
    assert f"{disk}: expected a directory, found a file there" in text
    assert not path.exists()
    early = socket.socket(socket.AF_UNIX)
    with closing(listen(str(path))), early, pytest.raises(ConnectionRefusedError):
        early.connect(str(path))


def test_the_metrics_port_in_the_log_is_the_real_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = {"socket": f"{tmp_path}/kv.sock", "metrics": "127.0.0.1:0"}
    caplog.set_level("INFO")
    with LiveStore(parse({"server": server, "cpu": {"capacity": "16MiB"}})):
        eventually(lambda: "listening at" in caplog.text)
    (line,) = [line for line in caplog.messages if line.startswith("metrics at")]
    assert not line.endswith(":0/metrics")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_store_that_is_told_to_end_does_so_in_order(tmp_path: Path, end: signal.Signals) -> None:
    path, log = tmp_path / "kv.sock", tmp_path / "log"
    store = serve(path, log, f'[nvme]\npath = "{tmp_path}/disk"\ncapacity = "64MiB"\n')
    eventually(lambda: log.exists() and "listening at" in log.read_text())
    store.send_signal(end)
    assert store.wait(60) == 0
    assert "stopped" in log.read_text()
    assert not list(tmp_path.glob("kv.sock*"))


# Children import from where their parent does, not from where it was started


def test_S1_children_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    evil, marker = tmp_path / "evil", tmp_path / "marker"
    evil.mkdir()
    for name in ("kvstore", "tiers", "lmdb", "msgspec"):
        (evil / f"{name}.py").write_text(
            f"open({str(marker)!r}, 'a').write('{name} ')\nraise SystemExit(0)\n"
        )
    code = f"""
        from connectors.config import parse_extra
        from kvstore import launch
        from tiers.nixl.supervisor import Child
        from tiers.nvme.index_client import IndexClient
        import pathlib, os, select
        parse_extra({{"cpu": "64MiB"}}).find_store("engine {secrets.token_hex(4)}")
        launch._children[-1].wait()
        fd = os.open({str(tmp_path)!r}, os.O_RDONLY)
        IndexClient(pathlib.Path({str(tmp_path)!r}), 100, fd).close()
        child = Child(select.epoll(), "x", "lo", None)
        select.select([child._sock], [], [])  # it is there, or has ended
        child._process.kill()
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        cwd=evil,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    assert not marker.exists(), marker.read_text()
    assert done.returncode == 0, done.stderr.decode()


# S2: the log


def test_S2_a_record_is_one_line_whatever_is_in_it() -> None:
    code = """
        import logging
        from kvstore.logs import log_to_stderr
        log_to_stderr("%(levelname)s %(message)s")
        log = logging.getLogger("x")
        log.info("engine %s attached", "a\\nINFO engine b\\x1b[2J\\x9b1m\\u202e\\ud800 \u00fc")
        log.info("engine %s attached", "x" * (20 << 20))
        log.warning("%s")
        try:
            raise ValueError("two\\nlines")
        except ValueError:
            log.exception("a job raised")
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    first, second, third, fourth, *trace = done.stderr.splitlines()
    assert first == ("INFO engine a\\nINFO engine b\\x1b[2J\\x9b1m\\u202e\\ud800 \u00fc attached")
    assert second.startswith("INFO engine xxx")
    assert second.endswith("x... (20969536 more characters)")
    assert len(second) < 2100
    assert (third, fourth) == ("WARNING %s", "ERROR a job raised")
    assert trace[0] == "  Traceback (most recent call last):"
    assert trace[-2:] == ["  ValueError: two", "  lines"], "no line of it can pass for a record"


def test_S2_values_in_errors_are_escaped_and_cut() -> None:
    assert shown("a\n\x9b\u202e\x7f\ud800") == '"a\\n\\x9b\\u202e\\x7f\\ud800"'
    assert shown("\u00fcber /run/\u00e9") == '"\u00fcber /run/\u00e9"'
    assert len(shown("x" * (20 << 20))) == len(shown("\x00" * 100)) == 80
