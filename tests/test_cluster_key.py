"""Who has no cluster key, or another one, or plays back what it has heard, learns nothing."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.core.errors import ConfigError
from kvstore.handover.cluster_key import ClusterKey
from kvstore.wire import peer as m
from tests.harness.fakes import hashes, u32, value_of
from tests.harness.live import LiveStore, engine, eventually
from tests.harness.peers import address, config
from tests.harness.posts import Post, make_posts, until

KEY = ClusterKey(b"k" * 32)
GREETING_BYTES = 2048  # of TLS


class Tap:
    """Passes bytes between a client and a server, and keeps them."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.up, self.down = b"", b""
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._socks += [client, server]
                for one, other, name in ((client, server, "up"), (server, client, "down")):
                    threading.Thread(
                        target=self._pass, args=(one, other, name), daemon=True
                    ).start()

    def _pass(self, one: socket.socket, other: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                setattr(self, name, getattr(self, name) + data)
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in (self._listener, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


made = pytest.fixture(make_posts)


def test_what_was_recorded_is_refused_and_counted_when_it_is_said_again(
    made: Callable[..., Post],
) -> None:
    """Even all of it, in order: each connection has keys of its own."""
    server, friend = made(KEY, listens=True), made(KEY)
    tap = Tap(server.channel.address)
    number = friend.channel.connect(tap.address)
    friend.channel.send(number, m.Settle(1, 0))
    until(lambda: server.got, server, friend)
    assert b"Settle" not in tap.up, "it is encrypted"
    host, _, port = server.channel.address.rpartition(":")
    with socket.create_connection((host, int(port))) as thief:
        thief.sendall(tap.up)
        until(lambda: server.channel.counts["unauthorised"], server, friend)
    friend.channel.send(number, m.Settle(2, 0))
    until(lambda: len(server.got) == 2, server, friend)
    assert [message for _, message in server.got] == [m.Settle(1, 0), m.Settle(2, 0)]
    tap.close()


@pytest.mark.parametrize("key", [None, ClusterKey(b"x" * 32)], ids=["none", "another"])
def test_strangers_are_counted_and_get_no_more_than_a_greeting_whatever_they_ask_for(
    made: Callable[..., Post], key: ClusterKey | None
) -> None:
    server = made(KEY, listens=True)
    answers = []
    for job in (1, 2):
        tap = Tap(server.channel.address)
        stranger = made(key)
        number = stranger.channel.connect(tap.address)
        for message in (m.Hello(1, "n" * 64, {}), m.Want(job, bytes([job]) * 32, 32, (u32([0]),))):
            stranger.channel.send(number, message)
        until(lambda stranger=stranger: stranger.lost, server, stranger)  # type: ignore[misc]
        until(lambda job=job: server.channel.counts["unauthorised"] >= job, server)  # type: ignore[misc]
        assert not stranger.got
        answers.append(tap.down)
        tap.close()
    assert max(map(len, answers)) <= GREETING_BYTES
    assert not server.got


@pytest.mark.parametrize(
    "says", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f", bytes(200), b"\x01" * 64]
)
@pytest.mark.parametrize("key", [None, KEY], ids=["open", "keyed"])
def test_B2_bytes_that_are_no_handshake_end_their_connection_and_no_other(
    made: Callable[..., Post], key: ClusterKey | None, says: bytes
) -> None:
    server, friend = made(key, listens=True), made(key)
    number = friend.channel.connect(server.channel.address)
    host, _, port = server.channel.address.rpartition(":")
    socks = [socket.create_connection((host, int(port))) for _ in range(3)]
    for sock in socks:
        sock.sendall(says)
    friend.channel.send(number, m.Settle(1, 0))
    until(lambda: server.got, server, friend)
    for sock in socks:
        sock.close()
    if key is not None:  # without one, what is said is a message or none
        until(lambda: server.channel.counts["unauthorised"] >= 1, server, friend)
    friend.channel.send(number, m.Settle(2, 0))
    until(lambda: len(server.got) == 2, server, friend)
    assert not friend.lost


# Stores


def served(tmp_path: Path, peer: str) -> subprocess.CompletedProcess[str]:
    """Start a store that cannot; returns its end."""
    path = tmp_path / "kvstore.toml"
    path.write_text(
        f'[server]\nsocket = "{tmp_path}/s"\nmetrics = ""\n'
        f'[cpu]\ncapacity = "16MiB"\n[peer]\n{peer}'
    )
    command = [sys.executable, "-m", "kvstore.cli", "serve", "--config", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_B1_an_open_address_without_a_key_is_an_error_at_the_start(tmp_path: Path) -> None:
    done = served(tmp_path, 'listen = "192.0.2.7:9500"\n')
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "kvstore: error: peer listen 192.0.2.7:9500: not a loopback address and no cluster key; "
        "make one with kvstore keygen, or listen on 127.0.0.1"
    )


def test_B1_a_key_for_which_there_is_no_room_leaves_no_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(ConfigError, match=f"cluster key {tmp_path / 'key'}: File too large"):
            ClusterKey.make(tmp_path / "key")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "key").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])  # noqa: S104
def test_B1_an_address_that_nobody_can_be_given_is_an_error(tmp_path: Path, host: str) -> None:
    """Peers would ask themselves."""
    done = served(tmp_path, f'listen = "{host}:9500"\n')
    assert done.returncode == 2
    error = done.stderr.splitlines()[-1]
    assert "[peer] listen: expected the address at which other stores reach this one" in error
    assert error.endswith(f'such as "10.0.0.5:9500", found "{host}:9500"')


def test_B1_a_port_in_use_is_an_error_at_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = served(tmp_path, f'listen = "127.0.0.1:{port}"\n')
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"kvstore: error: peer listen 127.0.0.1:{port}: Address already in use")


@pytest.mark.slow
def test_B1_one_address_serves_all_engines_of_a_store_that_has_the_key(tmp_path: Path) -> None:
    """And a store with another key gets nothing, in a moment."""
    keys = []
    for name in ("a", "b"):
        keys.append(str(tmp_path / f"{name}.key"))
        ClusterKey.make(Path(keys[-1]))
    with (
        LiveStore(config(tmp_path / "p", peer={"key": keys[0]})) as prefill,
        LiveStore(config(tmp_path / "d", peer={"key": keys[0]})) as decode,
        LiveStore(config(tmp_path / "s", peer={"key": keys[1]})) as stranger,
        engine(prefill, "one") as one,
        engine(prefill, "two") as two,
        engine(decode, "other") as other,
        engine(stranger, "strange") as strange,
    ):
        chains = []
        for name, owner in (("one", one), ("two", two)):
            chains.append(hashes(4, name))
            owner.put(chains[-1])
            eventually(lambda owner=owner, chain=chains[-1]: len(owner.ask(chain).hits))  # type: ignore[misc]
        for chain in chains:
            started = time.monotonic()
            assert strange.ask(chain, peer=address(prefill)).lease == 0
            assert time.monotonic() - started < 30
            granted = other.ask(chain, peer=address(prefill))
            assert granted.sources == {"peer": 4}
            assert other.read(granted) == [other.content(block) for block in chain]
        peers = prefill.server._peers
        assert peers is not None
        assert peers.channel.counts["unauthorised"] >= 1


@pytest.mark.parametrize("host", ["node..cluster", "a" * 64])
def test_S2_a_host_that_is_no_name_costs_its_request_a_fetch_and_nothing_else(
    tmp_path: Path, host: str
) -> None:
    """With a key names are looked up. Heartbeats would find the same each time."""
    ClusterKey.make(tmp_path / "key")
    settings = config(tmp_path / "store", peer={"key": str(tmp_path / "key")})
    with LiveStore(settings) as store, engine(store) as one:
        peers = store.server._peers
        assert peers is not None
        one.put(chain := hashes(2))
        for _ in range(3):
            granted = one.ask([*chain, *hashes(4)[2:]], peer=f"{host}:9500", request="r")
            assert one.read(granted) == [one.content(block) for block in chain]
        eventually(lambda: peers.channel.counts["undialled"] >= 3)  # a thread looks names up
        assert len(peers.requests._waiting) == 0
        assert not peers.channel.lines.all
        assert value_of(store.server.store.numbers, "kvstore_refused", "internal") == 0
