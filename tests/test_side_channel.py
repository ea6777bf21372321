"""The side channel's sockets, over real TCP on this machine."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from cryptography import x509

from kvstore.core.errors import ConfigError
from kvstore.handover import side_channel
from kvstore.handover.cluster_key import ClusterKey
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness.patience import WAIT_S
from tests.harness.posts import Post, make_posts, until

WANT = m.Want(1, b"h" * 32, 32, (b"\0\0\0\0",))


made = pytest.fixture(make_posts)


def connected(server: Post) -> socket.socket:
    """Connect to a channel as anybody can."""
    host, _, port = server.channel.address.rpartition(":")
    return socket.create_connection((host, int(port)))


@pytest.mark.parametrize("key", [None, ClusterKey(b"k" * 32)])
def test_messages_go_both_ways_in_order(made: Callable[..., Post], key: ClusterKey | None) -> None:
    server, client = made(key, listens=True), made(key)
    number = client.channel.connect(server.channel.address)
    for job in range(1, 50):
        client.channel.send(number, m.Settle(job, 0))
    until(lambda: len(server.got) == 49, server, client)
    assert [message for _, message in server.got] == [m.Settle(job, 0) for job in range(1, 50)]
    server.channel.send(server.got[0][0], m.Settled(3, end="all"))
    until(lambda: client.got, server, client)
    assert client.got == [(number, m.Settled(3, end="all"))]


@pytest.mark.parametrize("key", [None, ClusterKey(b"k" * 32)])
def test_two_stores_that_dial_each_other_at_once_have_a_connection_each(
    made: Callable[..., Post], key: ClusterKey | None
) -> None:
    """Each end decodes what its side of a connection may say; the other's would be no message."""
    posts = made(key, listens=True), made(key, listens=True)
    numbers = [
        post.channel.connect(other.channel.address)
        for post, other in zip(posts, reversed(posts), strict=True)
    ]
    for job, (post, number) in enumerate(zip(posts, numbers, strict=True)):
        post.channel.send(number, m.Settle(job, 0))
    until(lambda: all(post.got for post in posts), *posts)
    for post in posts:
        post.channel.send(post.got[0][0], m.Welcome())
    until(lambda: all(len(post.got) == 2 for post in posts), *posts)
    for job, (post, number) in enumerate(zip(posts, numbers, strict=True)):
        assert [message for _, message in post.got] == [m.Settle(1 - job, 0), m.Welcome()]
        assert post.got[1][0] == number != post.got[0][0]
        assert not post.lost
        assert not post.channel.counts


@pytest.mark.parametrize("theirs", [None, ClusterKey(b"x" * 32)])
def test_who_has_no_key_or_another_one_is_not_heard(
    made: Callable[..., Post], theirs: ClusterKey | None
) -> None:
    key = ClusterKey(b"k" * 32)
    server, stranger, friend = made(key, listens=True), made(theirs), made(key)
    strange = stranger.channel.connect(server.channel.address)
    stranger.channel.send(strange, WANT)
    until(lambda: stranger.lost, server, stranger)
    number = friend.channel.connect(server.channel.address)
    friend.channel.send(number, m.Settle(1, 0))
    until(lambda: server.got, server, friend)
    assert [message for _, message in server.got] == [m.Settle(1, 0)]
    assert not stranger.got


@pytest.mark.parametrize("theirs", [None, ClusterKey(b"x" * 32)], ids=["none", "another"])
def test_S1_who_takes_any_certificate_still_has_to_prove_the_key(
    made: Callable[..., Post], theirs: ClusterKey | None
) -> None:
    server = made(ClusterKey(b"k" * 32), listens=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if theirs is None else theirs.tls(accepts=False)
    tls.check_hostname = False
    tls.verify_mode = ssl.CERT_NONE
    answers: list[bytes] = []

    def ask() -> None:
        with contextlib.suppress(OSError), tls.wrap_socket(connected(server)) as stranger:
            stranger.sendall(framing.framed(msgspec.msgpack.encode(WANT)))
            answers.append(stranger.recv(100))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: server.channel.counts["unauthorised"] and not asking.is_alive(), server)
    assert not server.got
    assert not any(answers)


def test_S1_all_but_the_newest_tls_is_refused(made: Callable[..., Post]) -> None:
    key = ClusterKey(b"k" * 32)
    server, old = made(key, listens=True), key.tls(accepts=False)
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    failed: list[str] = []

    def ask() -> None:
        with connected(server) as tcp:
            try:
                old.wrap_socket(tcp)
            except OSError as exc:
                failed.append(str(exc))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: failed and server.channel.counts["unauthorised"], server)
    asking.join()


def test_what_cannot_be_read_is_answered_and_counted_and_others_are_served(
    made: Callable[..., Post],
) -> None:
    server, good = made(listens=True), made()
    rng = random.Random(1)
    rough = connected(server)
    whole = msgspec.msgpack.encode(WANT)
    for _ in range(300):
        cut = bytearray(whole[: rng.randint(0, len(whole))])
        if cut:
            cut[rng.randrange(len(cut))] ^= 1 << rng.randrange(8)
        rough.sendall(framing.framed(bytes(cut)))
    rough.sendall(framing.encode(m.Settle(666, 0)))
    number = good.channel.connect(server.channel.address)
    good.channel.send(number, m.Settle(1, 0))
    until(lambda: any(message == m.Settle(1, 0) for _, message in server.got), server, good)
    until(lambda: server.channel.counts["malformed"] > 100, server, good)
    (answer, *more) = framing.Decoder(m.ToConsumer).feed(rough.recv(1 << 20))
    assert isinstance(answer, m.Refused)
    assert answer.reason.startswith("not understood")
    assert len(more) < side_channel.ANSWERS_MAX, "and not all of them are answered"
    rough.close()


def test_what_is_no_frame_ends_its_connection(made: Callable[..., Post]) -> None:
    server = made(listens=True)
    with connected(server) as rough:
        rough.sendall(b"\xff\xff\xff\x7f")
        until(lambda: server.channel.counts["malformed"], server)
        until(lambda: not server.channel.lines.came(), server)


def test_a_peer_that_ends_is_lost_at_once_and_can_be_asked_again(made: Callable[..., Post]) -> None:
    first, client = made(listens=True), made()
    port = int(first.channel.address.rpartition(":")[2])
    number = client.channel.connect(first.channel.address)
    client.channel.send(number, m.Settle(1, 0))
    until(lambda: first.got, first, client)
    first.channel.close()
    until(lambda: client.lost, client)
    assert client.lost[0] == (number, "connection: disconnected")
    second = Post()
    second.channel.listen("127.0.0.1", port)
    again = client.channel.connect(second.channel.address)
    client.channel.send(again, m.Settle(2, 0))
    until(lambda: second.got, second, client)
    second.channel.close()
    first.channel = Post().channel


def test_nobody_there_is_told(made: Callable[..., Post]) -> None:
    client = made()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = client.channel.connect(f"127.0.0.1:{free.getsockname()[1]}")
    until(lambda: client.lost, client)
    assert client.lost[0][0] == number


def test_B2_who_says_too_much_in_a_second_is_hung_up_on_and_may_come_back(
    made: Callable[..., Post],
) -> None:
    server, client = made(listens=True), made()
    number = client.channel.connect(server.channel.address)
    client.channel.send(number, m.Settle(1, 0))
    until(lambda: server.got, server, client)
    line = server.channel.lines.all[server.got[0][0]]
    line.heard_s, line.messages = 5, 9_999
    for job in (2, 3, 4):
        client.channel.send(number, m.Settle(job, 0))
    end = time.monotonic() + WAIT_S
    while not server.channel.counts["too_many"] or not client.lost:
        assert time.monotonic() < end
        server.channel.poll(5 * 10**9)
        client.channel.poll(time.monotonic_ns())
    assert [message for _, message in server.got] == [m.Settle(1, 0), m.Settle(2, 0)]
    assert server.lost == [(server.got[0][0], "it sent too many messages")]
    assert client.lost == [(number, "connection: disconnected")]
    again = client.channel.connect(server.channel.address)
    client.channel.send(again, m.Settle(5, 0))
    until(lambda: len(server.got) == 3, server, client)


def test_a_key_file_is_private_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "key"
    ClusterKey.make(path)
    assert ClusterKey.read(path)._pem() == ClusterKey.read(path)._pem()
    assert ClusterKey.read(path)._pem() != ClusterKey(b"k" * 32)._pem()
    with pytest.raises(ConfigError, match="File exists"):
        ClusterKey.make(path)
    certificate = x509.load_pem_x509_certificate(ClusterKey.read(path)._pem()[1])
    assert certificate.not_valid_before_utc.timestamp() == 0, "a clock that was never set"
    assert certificate.not_valid_after_utc.year == 9999
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 644, expected 600"):
        ClusterKey.read(path)
    path.chmod(0o600)
    for text, why in (("00" * 31, "62 digits"), ("zz" * 32, "64 hexadecimal"), ("", "0 digits")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            ClusterKey.read(path)
    with pytest.raises(ConfigError, match="No such file or directory; kvstore keygen makes one"):
        ClusterKey.read(tmp_path / "none")


@pytest.mark.parametrize(
    "address", ["", "nowhere", "a b:1", "127.0.0.1:99999", "127.0.0.1:x", "[::1"]
)
def test_what_is_no_address_is_a_peer_that_is_lost(made: Callable[..., Post], address: str) -> None:
    client = made()
    number = client.channel.connect(address)
    client.channel.send(number, m.Settle(1, 0))
    assert not client.lost, "nobody is told while something is being sent"
    until(lambda: client.lost, client)
    assert client.lost[0][0] == number
