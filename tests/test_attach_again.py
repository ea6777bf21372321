"""An engine that was refused, or whose store went while it was idle, attaches again by itself."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic_ns

import pytest

from connectors import store_connection as links
from connectors import worker
from connectors.copies.host import MappedExtent
from connectors.scheduler import SchedulerHalf
from connectors.store_client import StoreClient
from connectors.store_connection import Attacher, Refusals
from kvstore.config import Config
from kvstore.core.errors import NotSupported
from kvstore.store import admin, drain
from kvstore.store.session import Phase
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.harness.live import LiveStore, eventually, store_settings
from tests.harness.script import ONE_GROUP, Request
from tests.harness.worker_rig import Rig, heard

OLD = "protocol 2, ours is 1"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return store_settings(tmp_path)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again after 20 to 100 ms."""
    monkeypatch.setattr(links, "REFUSED_FIRST_S", 0.02, raising=False)
    monkeypatch.setattr(links, "REFUSED_MOST_S", 0.1, raising=False)


class OtherStore:
    """Refuses every Hello for good."""

    def __init__(self, path: str) -> None:
        self.refused: list[tuple[str, float]] = []  # role, when
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self._path = Path(path)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            with sock:
                for hello in framing.Decoder(p.ToStore).feed(sock.recv(1 << 16)):
                    assert isinstance(hello, p.Hello)
                    self.refused.append((hello.role, time.monotonic()))
                    sock.sendall(framing.encode(p.Refused(OLD, retry=False)))
                    break
                else:
                    return

    def times(self, role: str) -> list[float]:
        return [at for who, at in self.refused if who == role]

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as last:
            last.connect(str(self._path))
        self._thread.join()
        self._listener.close()
        self._path.unlink()


@pytest.fixture
def other() -> Iterator[Callable[[str], OtherStore]]:
    """Make one that ends with the test if it did not before."""
    made: list[OtherStore] = []

    def make(path: str) -> OtherStore:
        made.append(OtherStore(path))
        return made[-1]

    yield make
    for store in made:
        if store._thread.is_alive():
            store.close()


@pytest.fixture
def rig(config: Config) -> Iterator[Rig]:
    made = Rig(config.server.socket)
    yield made
    made.close()


def active(store: LiveStore) -> bool:
    """Whether an engine is attached with both its halves, as its store sees it."""
    sessions = list(store.server.store.sessions.values())
    return any(s.phase is Phase.ACTIVE and s.scheduler is not None for s in sessions)


def offered(rig: Rig, store: LiveStore) -> bool:
    """Whether an idle engine's next step finds the connection to this store."""
    attacher, sessions = rig.client._attacher, store.server.store.sessions.values()
    assert isinstance(attacher, links.Attacher)
    numbers = {session.number for session in list(sessions)}
    there = active(store) and any(w.session in numbers for _, w in list(attacher._ready))
    return there and not any(c.outbox for c in list(store.server._connections.values()))


def said(caplog: pytest.LogCaptureFixture, level: int, words: str) -> int:
    return sum(r.levelno == level and words in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("busy", [True, False])
def test_O22_an_engine_that_was_refused_attaches_once_it_may(
    config: Config,
    rig: Rig,
    other: Callable[[str], OtherStore],
    caplog: pytest.LogCaptureFixture,
    busy: bool,
) -> None:
    """busy: it takes steps meanwhile, and finds out what becomes of its store."""
    caplog.set_level(logging.INFO)
    half = SchedulerHalf(ONE_GROUP, rig.client)
    with LiveStore(config):
        rig.attach()
    first = rig.client.session
    refuses = other(config.server.socket)

    def again(role: str) -> bool:
        return (not busy or heard(rig.client)) and len(refuses.times(role)) >= 4

    eventually(lambda: again("worker"))
    eventually(lambda: again("scheduler"))
    assert bool(rig.client.session) is not busy, "an idle one takes no notice, and no step"
    refuses.close()
    with LiveStore(config) as store:
        eventually(lambda: heard(rig.client) and active(store) if busy else offered(rig, store))
        if busy:
            eventually(lambda: heard(rig.client) and rig.client.session)
        else:
            half.on_new_request(Request("first", 64))
            assert half.get_num_new_matched_tokens("first", 0) is not None
        assert rig.client.session not in (0, first)
        rig.put([b"%032d" % n for n in range(2)], (1, 2))
        assert len(rig.ask([b"%032d" % n for n in range(2)]).hits[0]) == 2
    assert said(caplog, logging.ERROR, OLD) == 2, "each half says it once"
    assert said(caplog, logging.INFO, "attached again") == 1


def test_O22_a_worker_that_cannot_map_the_stores_memory_tries_again(
    config: Config, rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = list[int]()

    def short_of_memory(fd: int, extent: p.Extent) -> MappedExtent:
        if refused:
            return MappedExtent(fd, extent)
        refused.append(fd)
        os.close(fd)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(worker, "MappedExtent", short_of_memory)
    with LiveStore(config):
        rig.attach()
        rig.put([b"%032d" % n for n in range(2)], (1, 2))
    assert refused
    assert said(caplog, logging.ERROR, "cannot be mapped: [Errno 12] Cannot allocate memory") == 1


def test_O22_the_first_request_after_an_idle_engines_store_came_back_is_asked_about(
    config: Config, rig: Rig
) -> None:
    half = SchedulerHalf(ONE_GROUP, rig.client)
    with LiveStore(config):
        rig.attach()
    with LiveStore(config) as store:
        eventually(lambda: offered(rig, store))
        half.on_new_request(Request("first", 64))
        assert half._requests["first"].ask


def test_Q26_an_idle_engine_is_back_two_seconds_after_its_store_and_says_so_once(
    config: Config, rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no step: neither half is called. It does not try all the time either."""
    caplog.set_level(logging.INFO)
    with LiveStore(config):
        rig.attach()
    tries, connect = list[float](), links.connect

    def counted(address: str, user: int | None = None) -> links.Link:
        tries.append(time.monotonic())
        return connect(address, user)

    monkeypatch.setattr(links, "connect", counted)
    for restart in (1, 2):
        tries.clear()
        time.sleep(2)  # long enough for the longest waits between two tries
        assert 4 <= len(tries) <= 20, "of both halves"
        started = time.monotonic()
        with LiveStore(config) as store:
            eventually(lambda: offered(rig, store))
            assert time.monotonic() - started < 2
        assert said(caplog, logging.INFO, "attached again, session") == restart


def test_Q24_an_engine_that_a_draining_store_refuses_says_why_and_is_back_with_the_next_one(
    config: Config, rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    with LiveStore(config) as store:
        rig.attach()
        list(admin.drain(store.path, drain.DRAIN_NOW))
        reason = f"the store takes this engine later: {drain.REFUSAL}"
        eventually(lambda: said(caplog, logging.WARNING, reason) >= 1)
        eventually(lambda: said(caplog, logging.WARNING, reason) == 2)
    with LiveStore(config) as store:
        started = time.monotonic()
        eventually(lambda: offered(rig, store))
        assert time.monotonic() - started < 2


def test_Q26_an_idle_engine_is_back_when_its_session_has_ended_and_its_store_has_not(
    config: Config, rig: Rig
) -> None:
    """Its worker was back at once, and its session was joining until a request came."""
    with LiveStore(config) as store:
        rig.attach()
        (session,) = store.server.store.sessions.values()
        list(admin.drain(store.path, drain.DRAIN_NOW))
        list(admin.drain(store.path, drain.DRAIN_CANCEL))
        started = time.monotonic()
        eventually(lambda: offered(rig, store))
        assert time.monotonic() - started < 2
        assert session.number not in {s.number for s in store.server.store.sessions.values()}
        eventually(lambda: heard(rig.client) and rig.client.session not in (0, session.number))


def test_O22_who_is_refused_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "REFUSED_FIRST_S", 1.0)
    monkeypatch.setattr(links, "REFUSED_MOST_S", 60.0)
    refusals, why = Refusals(), NotSupported("no")
    for most in (1, 2, 4, 8, 16, 32, 60, 60):
        assert 0.8 * most <= refusals.wait_s(why) <= most
    refusals.attached()  # and refused again at once: nothing has lasted
    assert refusals.wait_s(why) >= 0.8 * 60
    refusals.attached()
    later = time.monotonic() + 61
    monkeypatch.setattr("connectors.store_connection.time.monotonic", lambda: later)
    assert refusals.wait_s(why) <= 1


def test_O22_at_the_start_a_refusal_is_an_error(
    tmp_path: Path, other: Callable[[str], OtherStore]
) -> None:
    path = str(tmp_path / "store.sock")
    other(path)
    hello = p.Hello(p.VERSION, "engine", "scheduler", 0, 1)
    client = StoreClient(Attacher(lambda: path, hello), monotonic_ns)
    try:
        with pytest.raises(NotSupported, match=OLD):
            client.wait_attached(20)
    finally:
        client.close()


def test_O22_an_engine_ends_at_once_while_it_waits(
    tmp_path: Path, other: Callable[[str], OtherStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "REFUSED_FIRST_S", 600.0, raising=False)
    monkeypatch.setattr(links, "REFUSED_MOST_S", 600.0, raising=False)
    path = str(tmp_path / "store.sock")
    refuses, rig = other(path), Rig(path)
    eventually(lambda: refuses.times("worker") and refuses.times("scheduler"))
    started = time.monotonic()
    rig.close()
    assert time.monotonic() - started < 60
