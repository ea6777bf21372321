"""Connections to a store: what arrives together, what is refused, and what is left behind."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors import store_connection as links
from connectors.store_connection import Link, LinkLost, attach
from kvstore.core.errors import NotSupported
from kvstore.wire import engine as p
from kvstore.wire import framing

HELLO = p.Hello(p.VERSION, "engine", "scheduler", 0, 1)
WELCOME = p.Welcome(7, "digest")
EXTENT = p.Extent(1, 0, 8, 4096, 32768, 32800)


class Store:
    """Listens, and answers each connection's Hello with the next script."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.accepted: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)

    def serve(self, *scripts: tuple[framing.Message, ...]) -> None:
        self._scripts = scripts
        self._thread.start()

    def _serve(self) -> None:
        for script in self._scripts:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # the test is over: a client did not come
                return
            self.accepted.append(sock)
            sock.recv(1 << 16)
            sock.sendall(b"".join(map(framing.encode, script)))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for sock in (self._listener, *self.accepted):
            sock.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "store.sock")
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = Link(ours)
    yield link, theirs
    link.close()
    theirs.close()


def test_what_comes_right_behind_the_welcome_is_kept(store: Store) -> None:
    answers = p.Answers(credits=framing.u32([1]))
    store.serve((WELCOME, answers))
    attached = attach(lambda: store.path, HELLO, threading.Event())
    assert attached is not None
    link, welcome = attached
    assert welcome == WELCOME
    assert link.receive(1.0) == [answers]
    link.close()


@pytest.mark.parametrize("first", [p.Refused("still ending", retry=True), p.Detach("later")])
def test_a_store_that_is_not_ready_is_asked_again(store: Store, first: framing.Message) -> None:
    store.serve((first,), (WELCOME,))
    attached = attach(lambda: store.path, HELLO, threading.Event())
    assert attached is not None
    attached[0].close()
    goodbye = framing.encode(p.Detach(""))
    assert store.accepted[0].recv(1 << 10) == goodbye
    assert store.accepted[0].recv(1) == b"", "the refused connection was closed"


def test_a_refusal_for_good_is_raised(store: Store) -> None:
    store.serve((p.Refused("protocol 1, ours is 2", retry=False),))
    stop = threading.Event()
    ends = threading.Timer(10.0, stop.set)  # one that asks again would do so for ever
    ends.start()
    with pytest.raises(NotSupported, match="ours is 2"):
        attach(lambda: store.path, HELLO, stop)
    ends.cancel()


def test_attaching_ends_when_told_to(tmp_path: Path) -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    assert attach(lambda: str(tmp_path / "nobody"), HELLO, stop) is None


def test_messages_that_came_before_the_end_are_returned(pair: tuple[Link, socket.socket]) -> None:
    link, theirs = pair
    theirs.sendall(framing.encode(WELCOME))
    theirs.close()
    assert link.receive(1.0) == [WELCOME]
    with pytest.raises(LinkLost):
        link.receive()


def test_rubbish_ends_the_link(pair: tuple[Link, socket.socket]) -> None:
    link, theirs = pair
    theirs.sendall(b"\xff" * 64)
    with pytest.raises(LinkLost):
        link.receive(1.0)


def test_a_store_that_does_not_read_is_given_up(
    pair: tuple[Link, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, _ = pair
    monkeypatch.setattr(links, "OUTBOX_BYTES_MAX", 1 << 20)
    lookup = p.Step((p.Lookup(1, bytes(1 << 16), 32),))

    def flood() -> None:
        for _ in range(100):
            link.send(lookup)

    with pytest.raises(LinkLost, match="does not read"):
        flood()


def test_what_the_socket_did_not_take_is_sent_later(pair: tuple[Link, socket.socket]) -> None:
    link, theirs = pair
    step = p.Step((p.Lookup(1, bytes(1 << 20), 32),))
    link.send(step)
    theirs.setblocking(False)
    decoder = framing.Decoder(p.ToStore)
    found: list[framing.Message] = []
    while not found:
        link.flush()
        found = list(decoder.feed(theirs.recv(1 << 16)))
    assert found == [step]


def test_descriptors_nobody_took_are_closed(pair: tuple[Link, socket.socket]) -> None:
    link, theirs = pair
    descriptor = os.memfd_create("extent")
    socket.send_fds(theirs, [framing.encode(EXTENT)], [descriptor])
    os.close(descriptor)
    assert link.receive(1.0) == [EXTENT]
    (received,) = link.fds
    link.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(received)
