"""What a client says at the local socket costs its own connection: not the store, nor its memory.

Against a store process, whose address space is limited, so that taking too much would end it.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil
import pytest

from kvstore.core import limits
from kvstore.core.errors import InvariantBroken
from kvstore.core.types import Chain
from kvstore.listener import listen
from kvstore.store import server
from kvstore.store.lookups import Lookups
from kvstore.store.server import Server, serve
from kvstore.store.session import Ask, Session
from kvstore.store.store import Store
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.bench.store import StoreProcess
from tests.harness.fakes import blocks, from_u32, geometry, hashes, value_of
from tests.harness.live import (
    Client,
    LiveEngine,
    LiveStore,
    client,
    engine,
    eventually,
    store_settings,
)

SPACE_BYTES = 2 << 30  # more than a store of 64 MiB takes
PROMPT_S = 3.0  # an answer that takes longer is a stall, also on a machine that does other things


class Kept(StoreProcess):
    """A store that is still expected to be there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "64MiB", scraped=False)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def rss_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Kept]:
    with Kept(tmp_path) as made:
        resource.prlimit(made.pid, resource.RLIMIT_AS, (SPACE_BYTES, SPACE_BYTES))
        yield made


def serves(store: Kept, name: str) -> float:
    """Have an engine attach, store and read; return how long that took."""
    started = time.monotonic()
    with engine(store, name, page_bytes=1 << 16) as live:
        live.put(chain := hashes(2, name))
        # Another socket than that of put(): the store may hear of it first.
        while blocks(granted := live.ask(chain)) != [0, 1]:
            assert time.monotonic() - started < PROMPT_S
        assert live.read(granted) == [live.content(block) for block in chain]
    return time.monotonic() - started


def raw(message: framing.Message, **change: object) -> bytes:
    """The frame of a Hello with other values in its geometry, whatever these are."""
    items = ["Hello", *msgspec.to_builtins(message)[1:]]
    items[1 + p.Hello.__struct_fields__.index("geometry")].update(change)
    body = msgspec.msgpack.encode(items)
    return struct.pack("<I", len(body)) + body


def hellos(world: int = 1, **layer: object) -> Iterator[bytes]:
    """Say Hello as each rank, with one layer that has these values."""
    good = geometry()
    for rank in range(world):
        fields = {"name": "layer", "page_bytes": 4096, "head_first": rank, "heads_total": world}
        groups = [{"rule": {}, "layers": [fields | layer]}]
        hello = p.Hello(p.VERSION, "bad", "worker", rank, world, geometry=good)
        yield raw(hello, groups=groups)


def heads(count: int) -> list[bytes]:
    return list(hellos(heads=count, heads_total=count))


def many_layers(count: int) -> list[bytes]:
    layers = [{"name": f"layer{number}", "page_bytes": 1024} for number in range(count)]
    hello = p.Hello(p.VERSION, "bad", "worker", 0, 1, geometry=geometry())
    return [raw(hello, groups=[{"rule": {}, "layers": layers}])]


def many_groups(count: int) -> list[bytes]:
    hello = p.Hello(p.VERSION, "bad", "worker", 0, 1, geometry=geometry())
    groups = [{"rule": {}, "layers": [{"name": "layer", "page_bytes": 4096}]}] * count
    return [
        raw(hello, groups=groups, blocks_per_chunk=[1] * count),
        framing.encode(p.Hello(p.VERSION, "bad", "scheduler", 0, 1, 4)),
        framing.encode(p.Step((p.Lookup(1, b"h" * 32, 32),))),
    ]


BAD = {
    "pages of 2^63 bytes on 2 ranks": list(hellos(2, page_bytes=1 << 63)),
    "2^40 heads": heads(1 << 40),
    "2^24 heads": heads(1 << 24),
    "2^26 heads": heads(1 << 26),
    "65,537 groups": many_groups(65_537),
    "20,000 layers": many_layers(20_000),
    "a name of 20 MiB": [framing.encode(p.Hello(p.VERSION, "e" * (20 << 20), "scheduler", 0, 1))],
    "2^31 ranks": [framing.encode(p.Hello(p.VERSION, "e", "scheduler", 0, 1 << 31))],
    "2^62 credits": [framing.encode(p.Hello(p.VERSION, "e", "scheduler", 0, 1, 1 << 62))],
}


def say(store: Kept, frames: Sequence[bytes]) -> list[Client]:
    """Send each frame on a connection of its own; return those that are still open."""
    clients = []
    for frame in frames:
        client = Client(store.path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dropped in mid-sentence
            client.sock.sendall(frame)
        clients.append(client)
    return clients


@pytest.mark.parametrize("name", BAD)
def test_S2_numbers_of_a_hello_have_limits(store: Kept, name: str) -> None:
    assert serves(store, "before") < PROMPT_S
    before_bytes = store.rss_bytes
    clients = say(store, BAD[name])
    assert serves(store, "meanwhile") < PROMPT_S
    for bad in clients:
        bad.close()
    assert serves(store, "after") < PROMPT_S
    assert store.rss_bytes - before_bytes < 64 << 20
    assert "Traceback" not in store.log


def test_S2_a_hello_of_thousands_of_layers_holds_nobody_up(store: Kept) -> None:
    started = time.monotonic()
    (client,) = say(store, many_layers(4096))
    assert client.take(p.Welcome).namespace
    assert time.monotonic() - started < PROMPT_S
    client.close()


def test_S2_unfinished_input_is_bounded_in_sum(store: Kept) -> None:
    """Ten connections with 20 MiB each of a frame that does not end, and one that behaves."""
    good = LiveEngine(store, "good", page_bytes=1 << 16)
    before_bytes = store.rss_bytes
    bad = []
    for number in range(10):
        bad.append(LiveEngine(store, f"bad{number}", page_bytes=1 << 16))
        send_unfinished(bad[-1].scheduler.sock, 30 << 20, 20 << 20)
    assert store.rss_bytes - before_bytes < 160 << 20
    good.put(chain := hashes(2))
    assert blocks(good.ask(chain)) == [0, 1]
    assert "of messages that have not ended" in store.log
    for each in (good, *bad):
        each.close()


def test_S2_before_hello_a_message_is_small(store: Kept) -> None:
    bad = Client(store.path)
    send_unfinished(bad.sock, (1 << 20) + 1, 1 << 16)
    bad.read_to_end()
    assert isinstance(bad.messages[0], p.Refused)
    assert "at most 1048576" in bad.messages[0].reason
    bad.close()


def send_unfinished(sock: socket.socket, size: int, sent: int) -> None:
    """Begin a frame of `size` bytes, and send so many of them."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(struct.pack("<I", size) + bytes(sent))


def test_S2_connections_that_say_nothing_keep_no_engine_out(store: Kept) -> None:
    """Without descriptors for one more, who is in no session and silent makes room."""
    with engine(store, "first", page_bytes=1 << 16) as first, contextlib.ExitStack() as ends:
        resource.prlimit(store.pid, resource.RLIMIT_NOFILE, (128, 128))
        for _ in range(150):
            silent = ends.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(store.path)
        eventually(lambda: "a connection cannot be taken" in store.log)
        with engine(store, "second", page_bytes=1 << 16) as second:
            assert blocks(second.ask(hashes(2))) == []
        assert blocks(first.ask(hashes(2))) == [], "an engine may be silent"


def test_S2_who_asks_much_at_once_keeps_no_engine_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what one read brings, some is acted on in a turn; all of it is, in order."""
    monkeypatch.setattr(server, "_READ_S", 0.0)
    with LiveStore(store_settings(tmp_path)) as store, engine(store, page_bytes=1 << 16) as good:
        query, tick = store.server.store._query, store.server.store.on_tick
        order: list[str] = []

        def asked(connection: int, message: p.Query) -> None:
            order.append("query")
            query(connection, message)

        def turned(now_ns: int) -> None:
            order.append("turn")
            tick(now_ns)

        monkeypatch.setattr(store.server.store, "_query", asked)
        monkeypatch.setattr(store.server.store, "on_tick", turned)
        with client(store) as asking:
            asking.send(*[p.Query("quota")] * 100)
            for _ in range(100):
                asking.take(p.Report)
        assert "".join(order).count("queryquery") == 0, "no turn without the others"
        good.put(chain := hashes(4))  # what an engine says is acted on in order, too
        good.scheduler.send(*[p.Step((p.Lookup(number, b"x", 1),)) for number in range(100, 150)])
        assert [found.ask for found in good.answers(range(100, 150))] == [*range(100, 150)]
        eventually(lambda: blocks(good.ask(chain)) == [0, 1, 2, 3])


def test_S2_a_client_that_asks_and_does_not_read_is_dropped(store: Kept) -> None:
    """Each answer is longer than its question: they must not pile up within one turn."""
    engine = LiveEngine(store, "good", page_bytes=1 << 12)
    for number in range(10):
        engine.put(hashes(100, f"r{number}"))
    assert blocks(engine.ask(hashes(100, "r9"))) == list(range(100))
    before_bytes = store.rss_bytes
    bad = Client(store.path)
    frame = framing.encode(p.Query("stats"))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        bad.sock.sendall(frame * 5000)
    assert blocks(engine.ask(hashes(100, "r9"))) == list(range(100))
    assert store.rss_bytes - before_bytes < 200 << 20
    bad.close()
    engine.close()


def test_S2_one_read_of_many_questions_stops_where_the_answers_are_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All the questions are there in one piece: nothing is written while they are answered."""
    monkeypatch.setattr(limits, "OUTBOX_BYTES_MAX", 1 << 20)
    answered, query = 0, Store._query

    def counted(store: Store, connection: int, message: p.Query) -> None:
        nonlocal answered
        answered += 1
        query(store, connection, message)

    monkeypatch.setattr(Store, "_query", counted)
    with LiveStore(store_settings(tmp_path)) as store, engine(store) as good, client(store) as bad:
        store.server._read_s = 60  # so that nothing is written meanwhile
        bad.send(question := p.Query("stats"))
        size = len(framing.encode(bad.take(p.Report)))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            bad.sock.sendall(framing.encode(question) * 5000)
        good.put(chain := hashes(2))
        assert blocks(good.ask(chain)) == [0, 1]
        assert 1 < answered <= 2 + limits.OUTBOX_BYTES_MAX // size + 1


# What an engine says though its session is over


def lines(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.name.startswith("kvstore.store") for record in caplog.records)


@pytest.mark.parametrize("half", ["scheduler", "worker"])
@pytest.mark.parametrize("again", ["hello", "query"])
def test_S2_a_connection_that_goes_on_in_a_session_that_ends_is_closed(
    tmp_path: Path, half: str, again: str, caplog: pytest.LogCaptureFixture
) -> None:
    """50,000 times Hello on one connection were 50,000 lines of the log."""
    hello = p.Hello(p.VERSION, "bad", "scheduler", 0, 1)
    message = hello if again == "hello" else p.Query("stats")
    with LiveStore(store_settings(tmp_path)) as store, engine(store) as good:
        bad = LiveEngine(store, "bad")
        sock = (bad.scheduler if half == "scheduler" else bad.worker).sock
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(framing.encode(hello))
            for _ in range(50):
                sock.sendall(framing.encode(message) * 1000)
        (bad.scheduler if half == "scheduler" else bad.worker).read_to_end()
        good.put(chain := hashes(2))
        assert good.read(good.ask(chain)) == [good.content(block) for block in chain]
        bad.close()
        eventually(lambda: "bad" not in store.server.store.sessions)
        assert value_of(store.server.store.numbers, "kvstore_refused", "protocol") <= 4
    assert lines(caplog) < 20


def test_S2_wrong_messages_of_many_sessions_are_few_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LiveStore(store_settings(tmp_path)) as store:
        for number in range(60):
            for message in (p.Step(), p.Query("what"), p.Hello(1 << 40, "e", "worker", 0, 1)):
                with client(store) as bad:
                    bad.send(message)
                    bad.take(p.Refused)
            with client(store) as bad:  # refused with its geometry
                wide = geometry(page_bytes=1 << 30)
                bad.send(p.Hello(p.VERSION, f"{number}", "worker", 0, 1, geometry=wide))
                bad.take(p.Refused)
    assert value_of(store.server.store.numbers, "kvstore_refused", "protocol") == 180
    assert lines(caplog) < 20


def test_S2_engines_that_come_and_go_are_limited_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), LiveStore(store_settings(tmp_path)) as store:
        for number in range(300):
            with client(store) as worker:
                shape = geometry(page_bytes=1 << 16)
                worker.send(p.Hello(p.VERSION, f"{number}", "worker", 0, 1, geometry=shape))
                worker.take(p.Welcome)
        eventually(lambda: not store.server.store.sessions)
    assert 0 < sum("detached" in message for message in caplog.messages) < 100


def test_O23_a_worker_that_says_what_is_no_message_keeps_its_slots_until_it_closes(
    tmp_path: Path,
) -> None:
    """It may be in the middle of a copy: the store closes its own half only."""
    with LiveStore(store_settings(tmp_path)) as store:
        bad = LiveEngine(store, "bad", page_bytes=1 << 16)
        bad.credits.extend(bad_credits(bad))
        session = store.server.store.sessions["bad"]
        assert session.granted
        (namespace,) = store.server.store.namespaces.values()
        free = len(namespace.manager.slots.free)
        bad.worker.sock.sendall(struct.pack("<I", 3) + b"bad")
        bad.worker.read_to_end()
        bad.scheduler.take(p.Detach)
        bad.scheduler.close()
        eventually(lambda: session.scheduler is None)
        for _ in range(3):
            bad.worker.sock.sendall(framing.encode(p.Loading(1)) * 1000)  # is not looked at
        with engine(store, "good", page_bytes=1 << 16) as good:
            good.put(hashes(1))
            assert session.granted
            assert set(session.granted) <= set(namespace.manager.slots.granted)
        bad.worker.close()
        eventually(lambda: len(namespace.manager.slots.free) >= free)


def bad_credits(engine: LiveEngine) -> list[int]:
    return from_u32(engine.scheduler.take(p.Answers).credits)


# What nobody foresaw


class Surprise(Exception):
    """Of a kind that no code here expects."""


def surprised(*_arguments: object, **_how: object) -> NoReturn:
    raise Surprise("nobody foresaw this")


def broken(*_arguments: object, **_how: object) -> NoReturn:
    raise InvariantBroken("two blocks in one slot")


@pytest.mark.meets_bugs
@pytest.mark.parametrize("where", ["ask", "retry"])
def test_S2_what_raises_costs_its_session_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """In a message, and in a later turn about what was said."""
    real = getattr(Lookups, where)

    def maybe(desk: Lookups, session: Session, *rest: object) -> object:
        return surprised() if session.engine == "bad" else real(desk, session, *rest)

    with LiveStore(store_settings(tmp_path)) as store, engine(store) as good:
        bad = LiveEngine(store, "bad")
        monkeypatch.setattr(Lookups, where, maybe)
        if where == "retry":
            session = store.server.store.sessions["bad"]
            assert session.namespace is not None
            asked = Chain(b"h" * 32, 32, 1)
            session.asks[9] = Ask(9, session.namespace, asked, 1, 0, 1 << 62)
        bad.scheduler.send(p.Step((p.Lookup(1, b"h" * 32, 32),)))
        assert "a bug of the store" in bad.scheduler.take(p.Detach).reason
        good.put(chain := hashes(2))
        assert good.read(good.ask(chain)) == [good.content(block) for block in chain]
        assert value_of(store.server.store.numbers, "kvstore_refused", "internal") == 1
        bad.close()
        with engine(store, "bad2"):
            eventually(lambda: "bad" not in store.server.store.sessions)
    assert caplog.text.count("Traceback") == 1


@pytest.mark.meets_bugs
@pytest.mark.parametrize("where", ["_tick_session", "on_message"])
def test_S2_what_raises_again_and_again_has_one_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    with LiveStore(store_settings(tmp_path)) as store, engine(store, page_bytes=1 << 16) as good:
        bad = LiveEngine(store, "bad", page_bytes=1 << 16)
        if where == "on_message":
            monkeypatch.setattr(Store, "_query", surprised)
            for _ in range(50):
                with client(store) as asking:
                    asking.send(p.Query("stats"))
                    assert "a bug of the store in Query" in asking.take(p.Refused).reason
                    asking.read_to_end()  # it is closed
        else:
            tick = Store._tick_session

            def maybe(found: Store, session: Session) -> None:
                if session.engine == "bad":
                    surprised()
                tick(found, session)

            monkeypatch.setattr(Store, "_tick_session", maybe)
            bad.scheduler.take(p.Detach)
        for number in range(20):
            good.put(chain := hashes(1, f"{number}"))
            eventually(lambda: good.read(good.ask(chain)))
        bad.close()
        found = value_of(store.server.store.numbers, "kvstore_refused", "internal")
        assert found == (50 if where == "on_message" else 1)
    assert caplog.text.count("Traceback") == 1
    assert lines(caplog) < 10


def test_S2_a_broken_invariant_ends_the_store_and_copies_nothing_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its memory is not to be trusted: it ends, in order, and says so."""
    monkeypatch.setattr(Lookups, "ask", broken)
    monkeypatch.setattr(Server, "_copy_down", surprised)
    settings = store_settings(tmp_path)
    listener = listen(settings.server.socket)
    listener.start()  # serve() does it as well, when the other thread may have asked
    asking = threading.Thread(target=ask_once, args=(settings.server.socket,))
    asking.start()
    with pytest.raises(SystemExit) as ended:
        serve(settings, listener)
    asking.join()
    assert ended.value.code == 70
    assert "copies nothing down" in caplog.text
    assert "two blocks in one slot" in caplog.text


def ask_once(path: str) -> None:
    engine = LiveEngine(Somewhere(path))
    engine.scheduler.send(p.Step((p.Lookup(1, b"h" * 32, 32),)))
    engine.scheduler.read_to_end()
    engine.close()


class Somewhere:
    """A store somewhere."""

    def __init__(self, path: str) -> None:
        self.path = path
