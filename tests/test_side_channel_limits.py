"""What peers and strangers cannot do to a side channel; peers that flood are real processes."""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvstore.core.errors import ConfigError
from kvstore.handover import loopback, name_lookups, side_channel
from kvstore.handover.cluster_key import ClusterKey
from kvstore.handover.line import Line
from kvstore.handover.side_channel import Channel
from kvstore.logs import LINES_MAX, WINDOW_NS, RateLog
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness.live import eventually
from tests.harness.posts import Post, make_posts, until
from tests.test_side_channel import connected

KEY = ClusterKey(b"k" * 32)
WRONG = b"\xc1"
NO_NAMES = ("node..cluster:9", f"{'a' * 64}.cluster:9", ".:9", "a\0b:9", "a\tb:9", "\ud800:9")


def flood(address: str, key: ClusterKey | None, body: bytes, seconds: float) -> None:
    """Say one thing as fast as can be, read nothing, and go away."""
    host, _, port = address.rpartition(":")
    peer: socket.socket = socket.create_connection((host, int(port)))
    if key is not None:
        peer = key.tls(accepts=False).wrap_socket(peer)
    peer.settimeout(0.05)
    end, frame = time.monotonic() + seconds, framing.framed(body)
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                peer.sendall(frame * max(1, 1000 // len(frame)))
    os._exit(0)


def serve(said: Any, key: ClusterKey | None) -> None:  # noqa: ANN401 - a pipe
    """Be a listener that tells how long its longest poll was, and by how much its memory grew."""
    logging.disable()
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what we have now
    before_kb = most_kb()
    post = Post(key)
    post.channel.listen("127.0.0.1", 0)
    said.send(post.channel.address)
    longest = 0.0
    while not said.poll():
        began = time.monotonic()
        post.channel.poll(time.monotonic_ns())
        longest = max(longest, time.monotonic() - began)
        post.got.clear()
        time.sleep(0.0005)
    malformed = post.channel.counts["malformed"]
    said.send((longest, most_kb() - before_kb, malformed))
    said.recv()


def most_kb() -> int:
    """How much memory this process has had at most, in KiB; our parent may have a lot."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


made = pytest.fixture(make_posts)


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "keyed"])
@pytest.mark.parametrize(("size", "rounds", "seconds"), [(1, 4, 1.2), (15 << 20, 1, 4.0)])
def test_B2_peers_that_flood_and_go_cost_a_store_neither_its_life_nor_memory_nor_turns(
    key: ClusterKey | None, size: int, rounds: int, seconds: float
) -> None:
    spawn = multiprocessing.get_context("fork")
    ours, theirs = spawn.Pipe()
    store = spawn.Process(target=serve, args=(theirs, key))
    store.start()
    theirs.close()
    address = ours.recv()
    for _ in range(rounds):
        peers = [
            spawn.Process(target=flood, args=(address, key, WRONG * size, seconds))
            for _ in range(2)
        ]
        for peer in peers:
            peer.start()
        for peer in peers:
            peer.join()
        time.sleep(0.2)
        assert store.is_alive(), f"the store ended with {store.exitcode}"
    ours.send("stop")
    longest, grown_kb, malformed = ours.recv()
    ours.send("end")
    store.join()
    assert store.exitcode == 0
    assert malformed > 0
    assert grown_kb < 300 << 10
    assert longest < 0.5, "one turn; a machine that is busy takes some of it"


def test_S2_what_peers_leave_unfinished_is_bounded_in_sum(
    made: Callable[..., Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "UNFINISHED_BYTES_MAX", 1 << 20)
    server, friend = made(listens=True), made()
    number = friend.channel.connect(server.channel.address)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(server)) for _ in range(4)]
        for sock in socks:
            sock.sendall((15 << 20).to_bytes(4, "little"))
            sock.setblocking(False)

        def hung_up() -> bool:
            for sock in socks:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    sock.send(bytes(1 << 16))
            return server.channel.counts["too_many"] > 0

        until(hung_up, server, friend)
        assert server.channel.lines.unfinished <= 2 << 20
    friend.channel.send(number, m.Settle(1, 0))
    until(lambda: server.got, server, friend)
    assert not server.channel.counts["malformed"], "none of them got to the end of its message"
    until(lambda: len(server.channel.lines.came()) == 1, server, friend)
    assert server.channel.lines.unfinished == 0


def test_S2_what_peers_do_not_read_is_bounded_in_sum(
    made: Callable[..., Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "UNREAD_BYTES_MAX", 1 << 20)
    server, friend = made(listens=True), made()
    number = friend.channel.connect(server.channel.address)
    friend.channel.send(number, m.Settle(1, 0))
    until(lambda: server.got, server, friend)
    with connected(server) as deaf:
        deaf.sendall(framing.encode(m.Settle(2, 0)))
        until(lambda: len(server.got) == 2, server, friend)
        large = m.Welcome("agent", bytes(1 << 19))
        for _ in range(100):
            if server.channel.counts["too_many"]:
                break
            server.channel.send(server.got[1][0], large)
            server.channel.send(server.got[0][0], m.Settled(1, computing=True))
            server.channel.poll(time.monotonic_ns())
            friend.channel.poll(time.monotonic_ns())
    assert [number for number, _ in server.lost] == [server.got[1][0]]
    until(lambda: friend.got, server, friend)
    until(lambda: not server.channel.lines.unread, server, friend)


def test_S2_connections_that_prove_nothing_are_few_and_keep_nobody_out(
    made: Callable[..., Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "GREETINGS_MAX", 3)
    monkeypatch.setattr(side_channel, "GREETING_NS", 10**12)  # no time is over, at first
    server, friend = made(KEY, listens=True), made(KEY)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(connected(server))
        until(lambda: server.channel.counts["unauthorised"] >= 7, server)
        assert len(server.channel.lines.all) <= 3
        number = friend.channel.connect(server.channel.address)
        friend.channel.send(number, m.Settle(1, 0))
        until(lambda: server.got, server, friend)
        for line in server.channel.lines.young.values():
            line.due_ns = 0
        until(lambda: len(server.channel.lines.all) == 1, server, friend)
        assert not server.lost


def test_S2_a_hello_that_is_dear_to_answer_is_refused(made: Callable[..., Post]) -> None:
    """Anybody can send one: with the largest group it took 100 ms of a turn."""
    server = made(KEY, listens=True)
    groups = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    groups.check_hostname, groups.verify_mode = False, ssl.CERT_NONE
    groups.set_ecdh_curve("secp521r1")
    failed: list[str] = []

    def ask() -> None:
        with contextlib.closing(connected(server)) as tcp:
            try:
                groups.wrap_socket(tcp)
            except OSError as exc:
                failed.append(str(exc))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: failed and server.channel.counts["unauthorised"], server)
    asking.join()


def test_S2_a_connection_that_is_reset_as_it_is_greeted_leaves_nothing(
    made: Callable[..., Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS that cannot begin closes the descriptor: the next connection may have its number."""
    client, server = made(KEY), made(KEY, listens=True)
    check = Line.check_connected
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reset(line: Line) -> socket.socket:
            there, _ = listener.accept()
            there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            there.close()
            return check(line)

        with monkeypatch.context() as patch:
            patch.setattr(Line, "check_connected", reset)
            client.channel.connect(f"127.0.0.1:{listener.getsockname()[1]}")
            until(lambda: client.lost, client)
    assert not client.channel.lines._by_fd
    number = client.channel.connect(server.channel.address)
    client.channel.send(number, m.Settle(1, 0))
    until(lambda: server.got, server, client)


def test_B9_what_a_peer_said_before_it_closed_is_heard(made: Callable[..., Post]) -> None:
    """Though we have something for it, and sending that fails."""
    server = made(listens=True)
    with connected(server) as peer:
        peer.sendall(framing.encode(m.Settle(1, 0)))
        until(lambda: server.got, server)
        server.channel.send(server.got[0][0], m.Welcome("agent", bytes(1 << 20)))
        server.channel.send(server.got[0][0], m.Welcome("agent", bytes(1 << 20)))
        peer.sendall(framing.encode(m.Settle(2, 0)))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
    until(lambda: server.lost, server)
    assert [message for _, message in server.got] == [m.Settle(1, 0), m.Settle(2, 0)]


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "keyed"])
def test_B9_what_a_peer_said_before_it_was_gone_is_heard_though_we_speak_first(
    made: Callable[..., Post], key: ClusterKey | None
) -> None:
    """The error of our send tells that it is gone, before what it said is read."""
    server = made(key, listens=True)
    peers: list[socket.socket] = []

    def connect() -> None:
        tcp = connected(server)
        peers.append(tcp if key is None else key.tls(accepts=False).wrap_socket(tcp))
        peers[0].sendall(framing.encode(m.Settle(1, 0)))

    connecting = threading.Thread(target=connect)
    connecting.start()
    until(lambda: server.got, server)
    connecting.join()
    number = server.got[0][0]
    peers[0].sendall(framing.encode(m.Settle(2, 0)))
    peers[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peers[0].close()

    def unsent() -> bool:
        server.channel.send(number, m.Settled(1, end="x"))
        return server.channel.counts["unsent"] > 0

    eventually(unsent)
    assert not server.lost, "nobody is told while something is being sent"
    until(lambda: server.lost, server)
    assert [message for _, message in server.got] == [m.Settle(1, 0), m.Settle(2, 0)]


@pytest.mark.parametrize("first", ["refuses", "silent", "stranger"])
def test_a_name_with_several_addresses_is_dialled_at_the_next_one(
    made: Callable[..., Post], monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Where nothing listens, where TCP ends in a backlog, where somebody has no key."""
    monkeypatch.setattr(side_channel, "GREETING_NS", 200_000_000)
    server, client, stranger = made(KEY, listens=True), made(KEY), made(ClusterKey(b"x" * 32))
    port = int(server.channel.address.rpartition(":")[2])
    found = [(socket.AF_INET, 0, 0, "", (f"127.0.0.{host}", port)) for host in (2, 1, 2)]

    def look_up(host: str, *_: object, flags: int = 0, **__: object) -> object:
        assert host == "node.cluster"
        if flags:
            raise socket.gaierror
        return found

    with contextlib.ExitStack() as stack:
        if first == "silent":
            stack.enter_context(socket.create_server(("127.0.0.2", port)))
        if first == "stranger":
            stranger.channel.listen("127.0.0.2", port)
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        number = client.channel.connect(f"node.cluster:{port}")
        client.channel.send(number, m.Settle(1, 0))
        until(lambda: server.got, server, client, stranger)
        assert not client.lost
        assert not stranger.got
        assert len(client.channel.lines._by_fd) == len(client.channel.lines.all) == 1
        server.channel.close()
        until(lambda: client.lost, client)
        assert client.lost == [(number, "connection: disconnected")], "it is not dialled again"
        again = client.channel.connect(f"node.cluster:{port}")
        until(lambda: len(client.lost) == 2, client, stranger)
        assert client.lost[1][0] == again, "none of them is left"
        assert not client.channel.lines._by_fd
    server.channel = Post().channel


def test_S2_much_of_one_peer_is_read_a_little_at_a_time(
    made: Callable[..., Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "READ_BYTES", 1)
    server, friend, chatty = made(listens=True), made(), made()
    for post in (chatty, friend):
        number = post.channel.connect(server.channel.address)
        for job in range(1, 3 if post is friend else 50_000):
            post.channel.send(number, m.Settle(job, 0))
    until(lambda: len(server.got) > 2, server, friend, chatty)
    first = dict.fromkeys(number for number, _ in server.got)
    until(lambda: len({number for number, _ in server.got}) == 2, server, friend, chatty)
    before = len(server.got)
    assert before < 49_000, "it was heard between"
    assert len(first) <= 2


def test_S3_without_a_key_only_loopback_is_dialled() -> None:
    lost: list[tuple[int, str]] = []
    channel = Channel(None, lambda *_: None, lambda *how: lost.append(how))
    for address in ("192.0.2.2:9", "example.com:9", "[2001:db8::1]:9", "127.0.0.1.nip.io:9"):
        assert "is not a loopback address and no cluster key" in channel.refusal(address)
        number = channel.connect(address)
        channel.poll(1)
        assert [found for found, _ in lost] == [number]
        assert not channel.lines.all, "nothing was begun"
        lost.clear()
    for address in ("127.0.0.1:9", "127.9.9.9:9", "[::1]:9", "localhost:9"):
        assert not channel.refusal(address)
    channel.close()
    keyed = Channel(KEY, lambda *_: None, lambda *_: None)
    assert not keyed.refusal("192.0.2.2:9")
    keyed.listen("0.0.0.0", 0)  # noqa: S104
    keyed.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.7", "example.com", "127.0.0.1.x"])  # noqa: S104
def test_S3_without_a_key_only_loopback_is_listened_on_however_it_is_spelled(host: str) -> None:
    channel = Channel(None, lambda *_: None, lambda *_: None)
    with pytest.raises(ConfigError, match="not a loopback address and no cluster key"):
        channel.listen(host, 0)
    channel.close()


def test_S1_without_a_key_another_users_process_is_not_spoken_to(
    made: Callable[..., Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as this process is another user's than the kernel says, both ways."""
    server, client = made(listens=True), made()
    number = client.channel.connect(server.channel.address)
    monkeypatch.setattr(side_channel, "may_ask", lambda _sock: False)
    client.channel.send(number, m.Hello(1, "n", {}))
    until(lambda: client.lost, server, client)
    assert server.channel.counts["unauthorised"] == 1
    assert not client.got
    monkeypatch.undo()
    monkeypatch.setattr(side_channel, "may_answer", lambda _sock: False)
    client.lost.clear()
    client.channel.connect(server.channel.address)
    until(lambda: client.lost, server, client)
    assert "another user's process listens there" in client.lost[0][1]
    assert not server.got


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_S1_the_kernel_says_whose_a_connection_on_loopback_is(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        name = listener.getsockname()[:2]
        for uid, expected in ((0, True), (65534, False)):
            reader, writer = os.pipe()
            pid = os.fork()
            if not pid:
                os.setuid(uid)
                with socket.create_connection(name):
                    os.read(reader, 1)
                    os._exit(0)
            tcp, _ = listener.accept()
            assert loopback.may_ask(tcp) is expected
            os.write(writer, b"x")
            os.waitpid(pid, 0)
            assert not loopback.may_ask(tcp), "a socket that was closed is nobody's"
            tcp.close()
        with socket.create_connection(name) as own:
            assert loopback.may_answer(own)


def test_S2_a_listener_without_descriptors_goes_on_when_there_are_some(
    made: Callable[..., Post], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = made(listens=True), made()
    number = client.channel.connect(server.channel.address)
    client.channel.send(number, m.Settle(1, 0))

    def none_left(_listener: socket.socket) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", none_left)
        until(lambda: server.channel.counts["too_many"], server, client)
        assert server.channel.counts["too_many"] == 1, "it is not asked in each turn"
    until(lambda: server.got, server, client)


def test_S2_log_lines_that_outsiders_cause_are_few_and_the_rest_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0]
    said = RateLog(logging.getLogger("test"), lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for number in range(10_000):
            said.warn("wrong ones", "wrong: %d", number)
        said.warn("others", "other")
        assert len(caplog.records) == LINES_MAX + 1
        now[0] = WINDOW_NS
        said.tick()
        said.tick()
    assert caplog.messages[-1] == "wrong ones: 9,995 more in the last 10 s"
    assert len(caplog.records) == LINES_MAX + 2


@pytest.mark.meets_bugs
def test_S2_a_bug_that_outsiders_meet_again_and_again_has_one_traceback_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0]
    said = RateLog(logging.getLogger("test"), lambda: now[0])
    for _ in range(2):
        for number in range(1000):
            try:
                raise ValueError(number)
            except ValueError:
                said.bug("bugs", "job %d", number)
        now[0] += WINDOW_NS
        said.tick()
    assert caplog.text.count("Traceback") == 2
    assert [record.levelname for record in caplog.records].count("ERROR") == 2 * LINES_MAX
    assert caplog.messages.count("bugs: 995 more in the last 10 s") == 2


def test_S2_what_is_no_address_is_refused_before_it_is_used() -> None:
    wrong = ("", "x", "a b:1", "[::1", "127.0.0.1:0", "127.0.0.1:99999", "h:1\n", ":1")
    for address in (*wrong, *NO_NAMES):
        with pytest.raises(ConfigError, match=r"is no host:port|has no port"):
            loopback.host_and_port(address)
    for port in ("00000165536", f"000001{'9' * 200}", f"1{'0' * 5000}"):  # cut off, 0 or 22 say
        with pytest.raises(ConfigError, match="has no port of 1 to 65535"):
            loopback.host_and_port(f"127.0.0.1:{port}")
    assert loopback.host_and_port("[::1]:5") == ("::1", 5)
    for host in ("node.cluster", "node.cluster.", "a" * 63 + ".x", "n\u00f6de"):
        assert loopback.host_and_port(f"{host}:5") == (host, 5)


@pytest.mark.parametrize("address", NO_NAMES)
def test_S2_a_host_that_no_resolver_takes_is_lost_and_leaves_nothing(address: str) -> None:
    """getaddrinfo raises for it, and not OSError."""
    lost: list[tuple[int, str]] = []
    with closing(Channel(KEY, lambda *_: None, lambda *how: lost.append(how))) as channel:
        counts = []
        for _ in range(5):
            number = channel.connect(address)
            channel.poll(1)
            assert lost.pop()[0] == number
            counts.append(len(list(Path("/proc/self/fd").iterdir())))
        assert "is no host:port" in channel.refusal(address)
        assert not channel.lines.all
        eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= counts[0])


@pytest.mark.parametrize(
    "broken",
    [
        "kvstore.handover.name_lookups.socket.getaddrinfo",
        "kvstore.handover.name_lookups.threading.Thread",
    ],
)
def test_S2_a_name_that_cannot_be_looked_up_is_lost_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Whatever it raises: without memory for a thread, say."""
    lost: list[tuple[int, str]] = []
    error = ValueError if broken.endswith("getaddrinfo") else RuntimeError

    def fails(*_arguments: object, **_how: object) -> NoReturn:
        raise error("can't")

    monkeypatch.setattr(broken, fails)
    with closing(Channel(KEY, lambda *_: None, lambda *how: lost.append(how))) as channel:
        for _ in range(name_lookups.LOOKUPS_MAX + 1):
            number = channel.connect("node.cluster:9")
            channel.poll(1)
            found, why = lost.pop()
            assert found == number
            assert "can't" in why
        assert not channel.lines.all
        assert channel._names._open == 0


def test_S3_a_name_of_another_address_is_no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as /etc/hosts says so."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    channel = Channel(None, lambda *_: None, lambda *_: None)
    with pytest.raises(ConfigError, match=r"localhost is 192\.0\.2\.7, not a loopback address"):
        channel.listen("localhost", 0)
    channel.close()
