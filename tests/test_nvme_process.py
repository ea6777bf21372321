"""The index lives in a process of its own: what happens when that ends, fails, or stays behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.config import NvmeConfig
from kvstore.core.errors import ConfigError, TierIOError
from kvstore.core.types import LookupResult
from tests.harness.live import eventually
from tests.harness.nvme_blocks import Shelf, key, shelf
from tests.harness.nvme_trouble import wait, wait_for
from tiers.nvme import attached, index_client
from tiers.nvme.disk import NvmeDisk
from tiers.nvme.index_client import IndexClient, IndexProcess
from tiers.nvme.messages import FOLDER, Answer, Commit, Load, Page, Request

pytestmark = pytest.mark.usefixtures("quick_disk")
STORE = """
import sys, time
from pathlib import Path
from tests.harness.nvme_blocks import Shelf, settings_for
from tiers.nvme.disk import NvmeDisk
shelf = Shelf(NvmeDisk(settings_for(Path(sys.argv[1]))))
shelf.settle()
shelf.put(1, 0, 5)
shelf.settle()
print(shelf.disk.attached.index.process.pid, flush=True)
time.sleep(60)
"""


def pid_of(found: Shelf) -> int:
    process = found.disk.attached.index.process
    assert process is not None
    return process.pid


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False


def freeze(pid: int) -> None:
    """Stop a process as if it hung. A signal stops its threads one after another."""
    os.kill(pid, signal.SIGSTOP)
    states = list(Path(f"/proc/{pid}/task").glob("*/status"))
    eventually(lambda: all("State:\tT" in state.read_text() for state in states))


# The process is killed


def test_records_go_on_where_the_process_that_sent_them_was_killed(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with shelf(settings) as before:
        before.fill(100)
        before.settle()
        kept = set(before.keys())
    real, killed = IndexProcess.ask, list[int]()

    def ask(process: IndexProcess, request: Request) -> Answer:
        if isinstance(request, Load) and request.first and not killed:
            killed.append(request.first)
            os.kill(process.pid, signal.SIGKILL)
        return real(process, request)

    monkeypatch.setattr(IndexProcess, "ask", ask)
    monkeypatch.setattr(index_client, "PAGE_ROWS", 1000)
    with shelf(settings, settled=False) as after:
        after.settle()
        assert killed == [1000]
        assert set(after.keys()) == kept
        assert len(after.tier.space.index) == len(kept), "none came twice"
        assert after.tier.space.counts == {}
    assert not list(Path(settings.path).glob("index.damaged*"))
    assert "damaged" not in caplog.text


def test_S2_records_are_no_answer_to_a_commit(
    empty: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = empty.disk.attached.index
    with monkeypatch.context() as patched:
        patched.setattr(IndexProcess, "ask", lambda *_: Page())
        with pytest.raises(TierIOError, match="Page is no answer"):
            client.commit(Commit())
    assert client.process is None, "what else it sends is not taken"
    client.commit(Commit())


def test_a_commit_whose_process_is_killed_is_done_again(settings: NvmeConfig) -> None:
    with shelf(settings) as found:
        found.put(1, 0, 5)
        found.settle()
        first = pid_of(found)
        freeze(first)
        found.put(2, 0, 5)
        wait(found, lambda: found.disk.attached.commits.under_way)
        time.sleep(0.2)  # for the data to be synced first
        os.kill(first, signal.SIGKILL)
        assert found.whole(1, 5)
        found.settle()
    with shelf(settings) as after:
        assert after.whole(2, 5)
        assert after.tier.space.counts == {}


def test_a_process_that_hangs_is_not_joined_by_another(tmp_path: Path) -> None:
    lock_fd = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    first = IndexClient(tmp_path, 100, lock_fd)
    assert first.process is not None
    freeze(pid := first.process.pid)  # as if in a write
    with pytest.raises(TierIOError, match="temporarily unavailable"):
        IndexClient(tmp_path, 100, lock_fd)
    os.kill(pid, signal.SIGCONT)
    first.close()
    IndexClient(tmp_path, 100, lock_fd).close()
    os.close(lock_fd)


# The process fails


def test_a_commit_that_fails_in_the_process_is_done_again_by_another(
    settings: NvmeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with shelf(settings) as found:
        found.put(1, 0, 2)
        found.settle()
        resource.prlimit(pid_of(found), resource.RLIMIT_FSIZE, (0, 0))  # writes fail from now on
        found.put(2, 0, 2)
        wait_for(found, "read_only")
        found.settle()
        assert found.put(3, 0, 2).done == 2
        found.settle()
    assert "damaged" not in caplog.text
    with shelf(settings) as after:
        for chain in (1, 2, 3):
            assert after.get([key(chain, 0), key(chain, 1)]).done == 2


def test_an_index_that_is_cut_under_a_running_store_kills_its_process_only(
    settings: NvmeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with shelf(settings) as found:
        found.fill(40)
        found.settle()
        os.truncate(Path(settings.path) / FOLDER / "data.mdb", 8192)
        found.put(90, 0, 5)
        wait(found, lambda: "SIGBUS" in caplog.text)
        assert not list(Path(settings.path).glob("index.damaged*")) or found.disk.state != "ok"
    with shelf(settings) as after:
        assert after.put(1, 0, 5).done == 5
    assert list(Path(settings.path).glob("index.damaged*")), "it is kept"


def test_a_disk_that_cannot_be_read_is_no_damage(settings: NvmeConfig, tmp_path: Path) -> None:
    with shelf(settings) as before:
        before.put(1, 0, 3)
    path = Path(settings.path) / FOLDER / "data.mdb"
    path.rename(tmp_path / "aside")
    path.mkdir()  # reading it is an error, and not one of its content
    with pytest.raises(ConfigError, match="cannot be used"):
        NvmeDisk(settings)
    path.rmdir()
    (tmp_path / "aside").rename(path)
    with shelf(settings) as after:
        assert after.whole(1, 3)


def test_a_closed_client_starts_no_process(tmp_path: Path) -> None:
    lock_fd = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    client = IndexClient(tmp_path, 100, lock_fd)
    client.close()
    with pytest.raises(TierIOError, match="is not open"):
        client.commit(Commit(extents=[(1, 4096, "a")]))
    os.close(lock_fd)


# The store ends


@pytest.fixture
def store(settings: NvmeConfig) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STORE, settings.path]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def index_pid(store: subprocess.Popen[str]) -> int:
    assert store.stdout is not None
    return int(store.stdout.readline())


def end(store: subprocess.Popen[str]) -> None:
    store.kill()
    store.communicate()


def test_the_process_ends_with_a_store_that_is_killed(store: subprocess.Popen[str]) -> None:
    pid = index_pid(store)
    assert alive(pid)
    end(store)
    eventually(lambda: not alive(pid))


def test_a_process_that_is_busy_ends_with_its_store_too() -> None:
    code = (
        "import sys, threading; from tiers.nvme.index_server import end_with\n"
        "threading.Thread(target=end_with, args=(int(sys.argv[1]),), daemon=True).start()\n"
        "while True: pass"
    )
    life_out, life = os.pipe()
    busy = subprocess.Popen([sys.executable, "-c", code, str(life_out)], pass_fds=(life_out,))
    os.close(life_out)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            busy.wait(0.3)
        os.close(life)
        assert busy.wait(600) == 0
    finally:
        busy.kill()


def test_what_a_terminal_sends_does_not_end_the_process(store: subprocess.Popen[str]) -> None:
    pid = index_pid(store)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    time.sleep(0.1)
    assert alive(pid)
    end(store)


def test_a_process_that_outlives_its_store_keeps_the_directory(
    settings: NvmeConfig, store: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = index_pid(store)
    freeze(pid)  # as if its disk did
    end(store)
    monkeypatch.setattr(attached, "LOCK_WAIT_S", 0.2)
    with pytest.raises(ConfigError, match=f"process id {store.pid} or what is left of it"):
        NvmeDisk(settings)
    os.kill(pid, signal.SIGCONT)
    monkeypatch.setattr(attached, "LOCK_WAIT_S", 5.0)
    with shelf(settings) as after:
        assert after.whole(1, 5)


# While it loads


def test_what_is_not_loaded_yet_is_asked_for_again_and_can_be_discarded(
    settings: NvmeConfig,
) -> None:
    with shelf(settings) as before:
        before.put(1, 0, 3)
    with shelf(settings, settled=False) as after:
        assert after.tier.lookup(key(1, 0)) is LookupResult.RETRY
        after.settle()
        assert after.tier.lookup(key(1, 0)) is LookupResult.HIT
        assert after.tier.lookup(key(9, 0)) is LookupResult.MISS
    with shelf(settings, settled=False) as again:
        again.tier.discard([key(1, 1)])  # before it is loaded
        again.settle()
        assert [again.has(1, index) for index in range(3)] == [True, False, False]


def test_what_is_written_while_others_are_loaded_is_newer_than_what_was_there(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that is not younger than its parent is refused by the next start."""
    names = ("aaaaaaaaaaaa", "bbbbbbbbbbbb")
    for name in names:
        with shelf(settings, name) as before:
            before.fill(3)
    monkeypatch.setattr(attached, "LOAD_S", 0.0)
    made = NvmeDisk(settings)
    shelves, seen = [Shelf(made, name) for name in names], 0
    while made.state == "loading":
        made.poll()
        for space in (found.tier.space for found in shelves):
            if space.free and made.state == "loading":
                seen += 1
                assert made.attached.generation > max(r.generation for r in space.index)
    assert seen
    for found in shelves:
        found.tier.close()
    made.close()


def test_clear_while_the_index_loads_clears_what_comes_later(settings: NvmeConfig) -> None:
    with shelf(settings) as before:
        before.fill(20)
    with shelf(settings, settled=False) as after:
        after.tier.clear()
        assert after.tier.lookup(key(1, 0)) is LookupResult.MISS
        after.settle()
        assert after.keys() == []
        assert after.put(1, 0, 5).done == 5
    with shelf(settings) as again:
        assert set(again.keys()) == {key(1, index) for index in range(5)}


def test_clear_while_records_are_asked_for_leaves_those_of_others_alone(
    settings: NvmeConfig,
) -> None:
    names = ("aaaaaaaaaaaa", "bbbbbbbbbbbb")
    for namespace in names:
        with shelf(settings, namespace) as before:
            before.fill(3)
    made = NvmeDisk(settings)
    one, other = (Shelf(made, namespace) for namespace in names)
    made.poll()  # asks for the records of the second
    other.tier.clear()
    one.settle()
    assert other.keys() == []
    assert set(one.keys()) == {key(chain, index) for chain in range(3) for index in range(30)}
    for found in (one, other):
        assert found.put(9, 0, 5).done == 5
        found.tier.close()
    made.close()


def test_clear_between_two_parts_of_records_clears_those_to_come(
    settings: NvmeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "LOAD_S", 0.0)
    monkeypatch.setattr("tiers.nvme.namespace._ROWS", 100)
    with shelf(settings) as before:
        before.fill(100)
    with shelf(settings, settled=False) as after:
        wait(after, lambda: (under_way := after.disk.spaces[0].loading) and under_way._loaded)
        assert after.disk.state == "loading"
        after.tier.clear()
        after.settle()
        assert after.keys() == []
