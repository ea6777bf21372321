"""The store's side of an exporter: it starts, ends and is started again, and waits for nothing."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from kvstore.core.errors import ProtocolError
from kvstore.logs import LINES_MAX
from kvstore.wire.framing import Decoder, Message, encode, u32
from tests.bench.steal import Watch
from tests.harness.exporter_rig import EXPORT, KIB, LANDING, MIB, Side, end, start_all, wait
from tests.harness.patience import WAIT_S
from tiers.nixl import supervisor
from tiers.nixl.messages import Ended, Map, Mapped, Meets, Ready, ToStore, Transfer
from tiers.nixl.supervisor import Down, Exporter

pytestmark = pytest.mark.slow

PROMPTLY_S = 2.0  # a second, and what a busy machine adds


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side("alone", extent_bytes=MIB)
    yield side
    side.close()


def sent(side: Side, number: signal.Signals) -> None:
    assert side.exporter.pid is not None
    os.kill(side.exporter.pid, number)


def move(name: str = "nobody") -> Transfer:
    return Transfer(0, name, False, LANDING, 4096, MIB, 64 * KIB, u32([0]), u32([0]))


def promptly(call: Callable[[], object]) -> float:
    watch = Watch()
    call()
    return watch.own_s()


def gone(pid: int, limit_s: float) -> bool:
    watch = Watch()
    while watch.own_s() < limit_s:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_it_closes_in_time_even_while_it_is_stopped(side: Side) -> None:
    wait(side, lambda: side.ready)
    pid = side.exporter.pid
    assert pid is not None
    sent(side, signal.SIGSTOP)
    number = side.exporter.start(move())
    assert promptly(lambda: side.take(side.exporter.close())) < PROMPTLY_S
    assert gone(pid, 0.1)
    assert side.ended[number].error == "failed"
    assert {event.extent for event in side.unmapped} == {EXPORT, LANDING}
    assert side.exporter.close() == []
    assert side.exporter.poll(time.monotonic_ns()) == []


def test_a_stopped_process_holds_nothing_up(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent waits in memory, up to a limit; then the next process is started."""
    wait(side, lambda: side.ready)
    assert side.exporter.has_room
    sent(side, signal.SIGSTOP)
    large = msgspec.structs.replace(move(), local=bytes(4 * MIB), remote=bytes(4 * MIB))
    numbers: list[int] = []
    assert promptly(lambda: numbers.extend(side.exporter.start(large) for _ in range(3))) < 5
    side.poll()
    assert not side.of(Down)
    assert not side.exporter.has_room, "what can wait is not sent"
    monkeypatch.setattr(supervisor, "OUTBOX_BYTES_MAX", 16 * MIB)
    wait(side, lambda: side.of(Down))
    assert side.of(Down)[0].reason == "it does not read: it was ended by SIGKILL"
    assert set(numbers) == set(side.ended)


def test_signals_of_a_terminal_are_for_the_store(side: Side) -> None:
    wait(side, lambda: side.ready)
    pid = side.exporter.pid
    assert pid is not None
    sent(side, signal.SIGINT)
    sent(side, signal.SIGTERM)
    side.exporter.unmap(LANDING)
    wait(side, lambda: side.unmapped)
    assert side.exporter.pid == pid
    assert os.getsid(pid) == pid


STORE = """
import sys, time
from tiers.nixl.supervisor import Exporter
exporter = Exporter("store")
while exporter._state != "up":
    exporter.poll(time.monotonic_ns())
    time.sleep(0.001)
print(exporter.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_it_ends_with_the_store_and_at_once(stopped: bool) -> None:
    store = subprocess.Popen(
        [sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert store.stdout is not None
    assert store.stdin is not None
    pid = int(store.stdout.readline())
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    store.kill()
    ended = gone(pid, PROMPTLY_S)
    if not ended:
        os.kill(pid, signal.SIGKILL)  # a failed test leaves nothing behind either
    assert ended
    store.wait()
    store.stdout.close()
    store.stdin.close()


def test_one_that_cannot_start_says_why_and_is_tried_less_and_less_often(
    capfd: pytest.CaptureFixture[str],
) -> None:
    exporter = Exporter("lost", devices="no-such-device")
    now_ns = time.monotonic_ns()
    waits: list[float] = []
    reasons: list[str] = []
    assert exporter.poll(now_ns) == []
    while len(waits) < 3:
        select.select([exporter.fileno()], [], [], WAIT_S)
        for event in exporter.poll(now_ns):
            assert isinstance(event, Down)
            reasons.append(event.reason)
            wait_s = exporter.wait_s(now_ns)
            waits.append(wait_s)
            now_ns += int(wait_s * 1e9)
            exporter.poll(now_ns)  # the next one
    assert [round(wait_s, 3) for wait_s in waits] == [0.1, 0.2, 0.4]
    assert exporter.broken == f"the exporter does not start: {reasons[-1]}"
    exporter._state = "starting"
    exporter._on(Ready("lost-1", b"md"))
    assert not exporter.broken
    assert all("NIXL's UCX plugin does not load" in reason for reason in reasons), reasons
    assert all(reason.endswith("it ended with 1") for reason in reasons)
    exporter.close()
    capfd.readouterr()


@pytest.mark.parametrize(("module", "call"), [(os, "pidfd_open"), (socket, "socketpair")])
def test_B20_one_that_finds_no_descriptor_is_started_later(
    monkeypatch: pytest.MonkeyPatch, module: object, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    exporter, now_ns = Exporter("short"), time.monotonic_ns()
    with monkeypatch.context() as patch:
        patch.setattr(module, call, refuse)
        exporter.poll(now_ns)
        (down,) = exporter.poll(now_ns)
        assert isinstance(down, Down)
        assert "Too many open files" in down.reason
        assert exporter.pid is None
    exporter.poll(now_ns + 10**9)
    assert exporter.pid is not None
    exporter.close()


def test_what_is_asked_while_it_is_down_ends_at_once(side: Side) -> None:
    number = side.exporter.start(move())
    assert side.exporter.wait_s(time.monotonic_ns()) == 0.0
    (ended,) = [event for event in side.exporter.poll(0) if isinstance(event, Ended)]
    assert (ended.id, ended.error) == (number, "failed")
    assert ended.text == "the exporter is not running"


def test_what_is_asked_while_it_is_starting_is_done_in_order(side: Side) -> None:
    side.poll()
    assert side.exporter._state == "starting"
    number = side.exporter.start(move())
    assert end(side, number).error == "refused", "nobody is no peer of it"
    assert [type(event) for event in side.events[:1]] == [Ready]
    assert side.name.startswith("alone-")


def test_why_blocks_were_not_moved_is_logged_a_few_times(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    wait(side, lambda: side.ready)
    for _ in range(3 * LINES_MAX):
        end(side, side.exporter.start(move()))
    line = "could not move blocks from or to another store: \"peer 'nobody', expected one of"
    assert caplog.text.count(line) == LINES_MAX


LIES: dict[str, list[Message]] = {
    "the end of transfer 99, which is not open": [Ended(99, 0)],
    "extent 1 unmapped, which was not asked for": [Mapped(1)],
    "extent 9 mapped, which was not asked for": [Mapped(9, 4096)],
    "extent 9 unmapped, which was not asked for": [Mapped(9, text="no")],
}


def test_an_exporter_that_was_tampered_with_is_ended(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers can overwrite its memory: whatever it says, the store goes on."""
    for cycle, (text, said) in enumerate(LIES.items()):
        wait(side, lambda: side.ready)
        child = side.exporter._child
        assert child is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(child, "receive", partial(iter, list(said)))
            patch.setattr(side.exporter, "_epoll", SimpleNamespace(poll=lambda timeout: [timeout]))
            side.poll()
        wait(side, lambda cycle=cycle: len(side.of(Down)) > cycle)  # type: ignore[misc]
        assert side.of(Down)[-1].reason.startswith(f"invalid message: {text}")
        side.exporter._pause_ns = side.exporter._start_ns = 0
    assert not side.unmapped
    assert not side.ended
    assert max(len(record.getMessage()) for record in caplog.records) < 1000


@pytest.mark.parametrize("message", [Mapped(1, -5), Mapped(1, 0), Mapped(1, 1 << 63), Ended(1, -1)])
def test_S2_numbers_that_no_exporter_has_are_no_message(message: Message) -> None:
    """Else what a peer has overwritten would switch all hand-overs off."""
    with pytest.raises(ProtocolError, match="not a message"):
        list(Decoder(ToStore).feed(encode(message)))


def said(side: Side, message: Message) -> None:
    """Have the process say something."""
    child = side.exporter._child
    assert child is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "receive", partial(iter, [message]))
        patch.setattr(side.exporter, "_epoll", SimpleNamespace(poll=lambda timeout: [timeout]))
        side.poll()


def test_an_extent_that_cannot_be_mapped_and_was_to_be_unmapped_is_unmapped(side: Side) -> None:
    """Else its store waits for ever: it asks for no other end."""
    wait(side, lambda: side.ready)
    side.exporter.unmap(EXPORT)
    said(side, Mapped(EXPORT, text="no"))
    assert side.unmapped == [Mapped(EXPORT)]


def test_B15_what_could_not_be_mapped_is_mapped_some_time_later(
    side: Side, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else nothing of that memory is handed over any more."""
    wait(side, lambda: side.ready)
    exporter, maps = side.exporter, list[Message]()
    monkeypatch.setattr(exporter, "_send", lambda message, *_: maps.append(message))
    for tries in (1, 2):
        said(side, Mapped(EXPORT, text="no"))
        side.poll()
        assert len(maps) == tries - 1, "not at once"
        exporter._looked_ns += supervisor.MAP_AGAIN_NS
        exporter._map_again(exporter._looked_ns)
        exporter._map_again(exporter._looked_ns)
        assert maps == [Map(EXPORT, side.size)] * tries
    assert caplog.text.count("cannot reach extent") == 1, "said once"
    said(side, Mapped(EXPORT, 4096))
    exporter._looked_ns += supervisor.MAP_AGAIN_NS
    exporter._map_again(exporter._looked_ns)
    assert len(maps) == 2, "it is mapped"
    said(side, Mapped(EXPORT, text="no"))
    exporter.unmap(EXPORT)
    side.poll()
    assert side.unmapped[-1] == Mapped(EXPORT), "it is gone at once"


def test_an_extent_that_is_unmapped_while_nothing_runs(side: Side) -> None:
    wait(side, lambda: side.ready)
    sent(side, signal.SIGSTOP)
    side.exporter.unmap(LANDING)
    side.exporter.restart("a test")
    assert not side.unmapped, "not before its end"
    wait(side, lambda: side.of(Down))
    assert [event.extent for event in side.unmapped] == [LANDING]
    assert side.of(Down)[0].reason == "a test: it was ended by SIGKILL"
    side.exporter.unmap(EXPORT)
    side.poll()
    assert [event.extent for event in side.unmapped] == [LANDING, EXPORT]


def test_S2_who_ends_the_exporter_pauses_and_others_come_again_at_once(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_HOLD_MIN_NS", 60_000_000_000)
    exporter = side.exporter

    def met(*peers: str) -> set[str]:
        for peer in peers:
            exporter.add_peer(peer, f"metadata of {peer}".encode())
        return set(exporter._peers.known)

    def ended_by(peer: str) -> None:
        child, downs = exporter._child, len(side.of(Down))
        assert child is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(child, "receive", partial(iter, [Meets(peer)]))
            patch.setattr(exporter, "_epoll", SimpleNamespace(poll=lambda timeout: [timeout]))
            side.poll()
        sent(side, signal.SIGKILL)
        wait(side, lambda: len(side.of(Down)) > downs and side.ready)

    def pause_s() -> float:
        ((pause_ns, _),) = exporter._peers._held.values()
        return pause_ns / 1e9

    wait(side, lambda: side.ready)
    assert met("good", "bad") == {"good", "bad"}
    assert end(side, exporter.start(move("good"))).error == "gone"  # it is no real metadata
    ended_by("bad")
    assert not exporter._peers.known, "each has to come again"
    assert met("bad", "good") == {"good"}
    assert "'bad', expected one of ['good']" in end(side, exporter.start(move("bad"))).text
    assert pause_s() == 60
    exporter._looked_ns += 60_000_000_000  # it is over
    number = exporter.start(move("bad"))
    assert met() == {"good", "bad"}, "it is met once it is needed"
    assert end(side, number).error == "gone"
    ended_by("bad")
    assert pause_s() == 120


def test_no_process_or_descriptor_is_left_behind() -> None:
    """Fifty processes, each ended as it starts."""
    here = Path("/proc/self/fd")
    before, children = len(list(here.iterdir())), psutil.Process().children()
    side = Side("brief", extent_bytes=MIB)
    held = len(list(here.iterdir()))
    for cycle in range(50):
        side.exporter._start_ns = 0  # without a pause
        side.poll()
        assert side.exporter._state == "starting"
        sent(side, signal.SIGKILL)
        wait(side, lambda cycle=cycle: len(side.of(Down)) > cycle)  # type: ignore[misc]
        assert len(list(here.iterdir())) == held
    side.close()
    assert len(list(here.iterdir())) == before
    assert psutil.Process().children() == children


def test_it_takes_no_core_while_nothing_is_to_do() -> None:
    pair = Side("one", extent_bytes=MIB), Side("other", extent_bytes=MIB)
    start_all(*pair)
    assert end(pair[0], pair[0].start(pair[1], [(0, 0)])).error is None
    spent = []
    for side in pair:
        process = psutil.Process(side.exporter.pid)
        before = sum(process.cpu_times()[:2])
        time.sleep(0.5)
        spent.append(sum(process.cpu_times()[:2]) - before)
    assert max(spent) < 0.15, spent
    for side in pair:
        assert psutil.Process(side.exporter.pid).memory_info().rss < 120 * MIB, (
            "torch is not loaded"
        )
        side.close()
