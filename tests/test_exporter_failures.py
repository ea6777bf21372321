"""Exporters that die, freeze and come back: what was open ends once, and the others go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.wire.framing import u32
from tests.harness.exporter_rig import EXPORT, KIB, LANDING, MIB, Side, end, start_all, wait
from tiers.nixl import messages as m
from tiers.nixl.supervisor import Down

pytestmark = pytest.mark.slow

ALL = 64 * MIB


def signalled(side: Side, number: signal.Signals) -> None:
    pid = side.exporter.pid
    assert pid is not None
    os.kill(pid, number)
    side.stopped = number == signal.SIGSTOP


def back(side: Side) -> None:
    wait(side, lambda: side.ready)


def settled(*sides: Side) -> None:
    """Have peers go on that were to answer one that is gone by now: UCX may end them for that."""
    for side in sides:
        if side.exporter.pid is not None:  # else it has ended it already
            signalled(side, signal.SIGCONT)
    time.sleep(0.5)
    for side in sides:
        side.poll()
        back(side)


def everything(side: Side) -> list[tuple[int, int]]:
    return [(position, position) for position in range(side.count)]


TRANSPORTS = {"cma": None, "tcp": "tcp,self"}


@pytest.fixture(scope="module", params=TRANSPORTS)
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side, Side]]:
    """A decode node's exporter, and two prefill nodes'."""
    transports = TRANSPORTS[request.param]
    sides = (
        Side("decode", transports, extent_bytes=ALL, seed=1),
        Side("one", transports, extent_bytes=ALL, seed=2),
        Side("other", transports, extent_bytes=ALL, seed=3),
    )
    start_all(*sides)
    yield sides
    for side in sides:
        side.close()


@pytest.fixture
def trio(shared: tuple[Side, Side, Side]) -> Iterator[tuple[Side, Side, Side]]:
    """All there and known to each other, whatever the test before did."""
    for side in shared:
        back(side)
    for side in shared:
        side.events.clear()
        side.exporter._peers._held.clear()  # it may have been killed while it met a peer
        for peer in list(side.exporter._peers.known):
            side.exporter.remove_peer(peer)
    start_all(*shared)
    yield shared
    settled(*shared)


@pytest.fixture
def over_tcp(shared: tuple[Side, Side, Side]) -> bool:
    return shared[0].exporter._how[2] is not None


def test_a_peer_that_is_frozen(trio: tuple[Side, Side, Side], over_tcp: bool) -> None:
    """B15, B20: nobody says so; what nobody waits for stays in quarantine until it has ended."""
    ours, theirs, other = trio
    assert end(ours, ours.start(theirs, [(0, 0)])).error is None  # connected
    signalled(theirs, signal.SIGSTOP)
    stuck = ours.start(theirs, everything(ours))
    behind = [ours.start(theirs, [(0, 0)]) for _ in range(8)]
    assert end(ours, ours.start(other, everything(ours))).error is None, "the others go on"
    if not over_tcp:
        assert end(ours, stuck, *behind).error is None, "shared memory needs nobody's help"
        return
    assert not set(ours.ended) & {stuck, *behind}

    for number in (stuck, *behind):
        ours.exporter.abandon(number)
    done = end(ours, *behind[-4:])
    assert (done.error, done.bytes, done.text) == ("stopped", 0, "abandoned"), "not begun"
    time.sleep(0.3)
    ours.poll()
    assert stuck not in ours.ended
    begun = [number for number in behind if number not in ours.ended]
    assert ours.exporter.quarantined_bytes == (ours.count + len(begun)) * ours.slot_bytes
    assert end(ours, ours.start(other, [(0, 0)])).error is None

    signalled(theirs, signal.SIGCONT)
    done = end(ours, *begun, stuck)
    assert (done.error, done.text) == ("stopped", "abandoned")
    assert ours.exporter.quarantined_bytes == 0
    assert end(ours, ours.start(theirs, everything(ours))).error is None, "as if nothing had been"


def test_B20_a_quarantine_ends_with_the_exporter(
    trio: tuple[Side, Side, Side], over_tcp: bool
) -> None:
    """A peer that was removed is in the way of nothing."""
    if not over_tcp:
        pytest.skip("in shared memory nothing stays under way")
    ours, theirs, other = trio
    assert end(ours, ours.start(theirs, [(0, 0)])).error is None
    signalled(theirs, signal.SIGSTOP)
    stuck = [ours.start(theirs, everything(ours)) for _ in range(2)]
    wait(ours, lambda: len(ours.exporter._open) == len(stuck))
    assert end(ours, ours.start(other, [(0, 0)])).error is None
    ours.exporter.abandon(stuck[0])
    ours.exporter.abandon(stuck[0])
    ours.poll()
    assert ours.exporter.quarantined_bytes == ours.count * ours.slot_bytes, "counted once"
    behind = [ours.start(theirs, everything(ours)) for _ in range(4)]
    for number in behind:
        ours.exporter.abandon(number)
    assert end(ours, *behind).text == "abandoned", "what has not begun ends at once"

    number = ours.start(theirs, [(0, 0)])
    ours.exporter.remove_peer(theirs.name)
    assert end(ours, number).error == "gone"
    ours.exporter.restart("too much in quarantine")
    wait(ours, lambda: ours.of(Down))
    assert "in quarantine" in ours.of(Down)[0].reason
    assert set(stuck) <= set(ours.ended)
    assert ours.exporter.quarantined_bytes == 0
    back(ours)
    ours.meet(other)
    assert end(ours, ours.start(other, everything(ours))).error is None
    settled(theirs)


def test_read_only_memory_is_not_written_by_a_peer(
    trio: tuple[Side, Side, Side], over_tcp: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its bytes stay. In shared memory the writer is refused; over TCP it ends the target."""
    ours, theirs, other = trio
    before = [bytes(theirs.memory[EXPORT].slot(position)) for position in range(3)]
    assert end(ours, ours.start(theirs, [(0, 0)])).error is None
    move = m.Transfer(
        0,
        theirs.name,
        True,
        EXPORT,
        theirs.addresses[EXPORT],
        theirs.size,
        64 * KIB,
        u32([0, 1, 2]),
        u32([0, 1, 2]),
    )
    pid, name = theirs.exporter.pid, theirs.name
    done = end(ours, ours.exporter.start(move))
    assert (done.error, done.bytes) == ("gone", 0)
    if not over_tcp:
        theirs.poll()
        assert theirs.exporter.pid == pid
        assert end(ours, ours.start(theirs, [(0, 0)])).error == "gone", "until it is added again"
    else:
        wait(theirs, lambda: theirs.of(Down))
        assert theirs.of(Down)[0].reason == "it was ended by SIGSEGV"
        back(theirs)
        ours.exporter.remove_peer(name)
    ours.meet(theirs)
    assert end(ours, ours.start(theirs, everything(ours))).error is None
    assert [bytes(theirs.memory[EXPORT].slot(position)) for position in range(3)] == before
    assert end(ours, ours.start(other, [(0, 0)])).error is None
    capfd.readouterr()


def test_memory_goes_once_nothing_uses_it(trio: tuple[Side, Side, Side]) -> None:
    """An extent that is unmapped takes its transfers along; others go on, and it can come back."""
    ours, theirs, _ = trio
    number = ours.start(theirs, everything(ours))
    pushed = ours.start(theirs, everything(ours), write=True)
    ours.exporter.unmap(LANDING)
    refused = ours.start(theirs, [(0, 0)])
    wait(ours, lambda: ours.unmapped)
    assert number in ours.ended, "before it is gone"
    if ours.ended[number].error:
        assert ours.ended[number].error == "refused"
        assert "extent 2 is being unmapped" in ours.ended[number].text
    assert "extent 2, expected one of" in end(ours, refused).text
    assert end(ours, pushed).error is None
    assert not [one for one in maps(ours) if one.size == ours.size and "w" in one.perms]

    del ours.addresses[LANDING]
    ours.exporter.map(LANDING, ours.memory[LANDING].fd, ours.size, writable=True)
    back(ours)
    assert end(ours, ours.start(theirs, everything(ours))).error is None


class Place:
    """A line of /proc/PID/maps."""

    def __init__(self, line: str) -> None:
        fields = line.split(maxsplit=5)
        first, last = (int(one, 16) for one in fields[0].split("-"))
        self.size = last - first
        self.perms = fields[1]
        self.path = fields[5].strip() if len(fields) > 5 else ""


def maps(side: Side) -> list[Place]:
    lines = Path(f"/proc/{side.exporter.pid}/maps").read_text(encoding="utf-8").splitlines()
    return [place for place in map(Place, lines) if "kvstore-extent" in place.path]
