"""Framing, whatever the bytes, and a store on a real socket that survives whatever arrives."""

from __future__ import annotations

import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.errors import ConfigError, ProtocolError
from kvstore.core.layout import PageRun, RankPages, slot_layout
from kvstore.listener import listen
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.harness.fakes import geometry, hashes, u32, value_of
from tests.harness.live import Client, LiveStore, client, engine, store_settings

SHAPE = geometry(world=2)
TO_STORE: tuple[framing.Message, ...] = (
    p.Hello(p.VERSION, "engine", "scheduler", 0, 2, 17),
    p.Hello(p.VERSION, "engine", "worker", 1, 2, geometry=SHAPE),
    p.Step(),
    p.Step(
        (p.Lookup(1, b"h" * 64, 32), p.Lookup(2, b"", 32, b"scope")),
        (5,),
        100,
        {"cpu": 40, "disk": 2},
        {"deferred": 1},
    ),
    p.Mapped(1),
    p.Mapped(2, gone=True),
    p.Stored(u32([1, 2]), (b"a", b"b"), (b"", b"a"), ok=False, seconds=0.25),
    p.Loading(7),
    p.Loaded(7, 4096, 0.5, u32([9]), 2),
    p.Target(5, "agent", u32([3]), u32([7, 0])),
    p.Arrived(5, u32([0, 2]), 8192, ok=True),
    p.Serves(RankPages("agent", b"md", ((PageRun(0, 512, 2, 4096, 1024, 512),),), 3), 8),
    p.Step(engine_blocks=(p.EngineBlocks(u32([1]), (b"a",), u32([2]), u32([3])),)),
    p.Query("stats"),
    p.Query("log-level", level="debug"),
    p.Detach(""),
)
TO_ENGINE: tuple[framing.Message, ...] = (
    p.Welcome(1),
    p.Welcome(1, "digest", slot_layout([geometry()]).ranks[0]),
    p.Refused("no", retry=True),
    p.Extent(1, 0, 15, 4096, 61440, 65536),
    p.Extent(1),
    p.Coming(7, 250, 1000),
    p.Answers(),
    p.Answers(
        (p.Granted(1, 2, 3, (p.Hit(u32([0]), u32([4]), u32([5])),), {"disk": 1}, capped=True),),
        u32([6]),
        (b"new",),
        (b"old",),
    ),
    p.Places(5, u32([0, 2]), u32([7, 1]), "agent", b"md", 4096),
    p.Places(5, push=True),
    p.Passed(5, u32([2]), ok=False),
    p.Places(5, u32([0]), u32([7]), engine=2),
    p.BlockVersions(8),
    p.Detach("over"),
    p.Report(b"[]"),
)


def decode(kinds: object, pieces: Sequence[bytes]) -> list[framing.Message]:
    decoder = framing.Decoder(kinds)
    return [message for piece in pieces for message in decoder.feed(piece)]


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


# Framing


@pytest.mark.parametrize(
    ("kinds", "messages"),
    [(p.ToStore, TO_STORE), (p.ToEngine, TO_ENGINE)],
    ids=["to-store", "to-engine"],
)
def test_every_message_survives_the_wire(
    kinds: UnionType, messages: Sequence[framing.Message]
) -> None:
    assert {type(message) for message in messages} == set(get_args(kinds))
    for message in messages:
        assert decode(kinds, [framing.encode(message)]) == [message]


@given(st.lists(st.sampled_from(TO_STORE), max_size=6), st.data())
def test_a_stream_may_be_cut_anywhere(messages: list[framing.Message], data: st.DataObject) -> None:
    stream = b"".join(map(framing.encode, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(edges)]
    assert decode(p.ToStore, pieces) == messages


def test_messages_before_a_bad_one_are_delivered() -> None:
    messages = framing.Decoder(p.ToStore).feed(framing.encode(p.Mapped(1)) + framed(b"garbage"))
    assert next(messages) == p.Mapped(1)
    with pytest.raises(ProtocolError):
        next(messages)


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match=r"frame of 4294967295 bytes, at most 268435456"):
        decode(p.ToStore, [b"\xff\xff\xff\xff"])


def hello_with(**change: object) -> bytes:
    """A Hello whose geometry has other fields, as no client of ours could send it."""
    hello = p.Hello(p.VERSION, "engine", "worker", 0, 1, geometry=geometry())
    raw = ["Hello", *msgspec.to_builtins(hello)[1:]]
    raw[1 + p.Hello.__struct_fields__.index("geometry")].update(change)
    return msgspec.msgpack.encode(raw)


DEEP = b"\x97\xa4Step\x90\x90\x90\xc0\x80" + b"\x91" * 100_000  # deeper than any stack
# A number beyond its limit, beside it what is nested deep.
DEEP_AND_BEYOND = (
    b"\x95" + b"".join(msgspec.msgpack.encode(part) for part in ("Loaded", 1, 1 << 61, 0.1)) + DEEP
)
NO_MESSAGES = [
    b"",
    b"\xc1",
    b"\x80",
    msgspec.msgpack.encode(["Nonsense", 1]),
    msgspec.msgpack.encode(["Mapped", "one"]),
    msgspec.msgpack.encode(["Mapped"]),
    b"\x92\xa5Query\xa2\xff\xfe",  # not UTF-8
    b"\x92\xa4Step\xdd\xff\xff\xff\xff",  # says four thousand million lookups
    DEEP,
    hello_with(groups=[]),
    hello_with(blocks_per_chunk=[1, 1]),
    hello_with(groups=[{"rule": {"trailing": -5}, "layers": []}]),
    hello_with(groups=[{"rule": {}, "layers": [{"name": "x", "page_bytes": 64, "heads": 0}]}]),
]
NO_MESSAGES_OF_THESE_FIELDS: list[framing.Message] = [
    p.Extent(1),  # of the other direction
    # Numbers that no counter can take.
    p.Stored(b"", (), (), ok=True, seconds=float("nan")),
    p.Stored(b"", (), (), ok=True, seconds=-1.0),
    p.Loaded(1, -1, 0.1),
    p.Loaded(1, 1 << 61, 0.1),
    p.Loaded(1, 1, float("inf")),
    p.Step(lookup_tokens=-1),
    p.Step(hit_tokens={"cpu": -1}),
    p.Step(counts={"deferred": -1}),
    p.Step(handed_over=(p.HandedOver("r", "done", lease_ms=-1),)),
]


def test_what_is_no_message_is_a_protocol_error() -> None:
    for body in [
        DEEP_AND_BEYOND,
        *NO_MESSAGES,
        *(framing.encode(m)[4:] for m in NO_MESSAGES_OF_THESE_FIELDS),
    ]:
        with pytest.raises(ProtocolError, match="not a message of this protocol"):
            decode(p.ToStore, [framed(body)])


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(framed)))
def test_any_bytes_give_messages_or_a_protocol_error(data: bytes) -> None:
    for kinds in (p.ToStore, p.ToEngine):
        try:
            found = decode(kinds, [data])
        except ProtocolError:
            continue
        assert all(isinstance(message, framing.Message) for message in found)


@settings(max_examples=300)
@given(st.sampled_from(TO_STORE), st.data())
def test_a_damaged_message_gives_a_message_or_a_protocol_error(
    message: framing.Message, data: st.DataObject
) -> None:
    body = bytearray(framing.encode(message)[4:])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        (found,) = decode(p.ToStore, [framed(bytes(body))])
    except ProtocolError:
        return
    assert isinstance(found, framing.Message)


# A store on a socket


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LiveStore]:
    with LiveStore(store_settings(tmp_path)) as made:
        yield made


def refused(connection: Client) -> p.Refused:
    """Read until the store hangs up, and return why."""
    connection.read_to_end()
    (message,) = connection.messages
    assert isinstance(message, p.Refused)
    return message


BAD = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "random": framed(bytes(range(256))),
    "unknown-kind": framed(msgspec.msgpack.encode(["Nonsense", 1])),
    "oversized": b"\xff" * 8,
    "deep": framed(DEEP),
    "deep-and-beyond": framed(DEEP_AND_BEYOND),
}


@pytest.mark.parametrize("name", BAD)
def test_garbage_closes_its_connection_and_no_other(store: LiveStore, name: str) -> None:
    with engine(store) as live, client(store) as bad:
        live.put(chain := hashes(2))
        bad.sock.sendall(BAD[name])
        assert not refused(bad).retry
        assert live.read(live.ask(chain)) == [live.content(block) for block in chain]
    assert value_of(store.server.store.numbers, "kvstore_refused", "malformed") == 1


def test_B3_a_wrong_version_is_told_both_numbers(store: LiveStore) -> None:
    with client(store) as old:
        old.send(p.Hello(p.VERSION + 1, "engine", "scheduler", 0, 1))
        message = old.take(p.Refused)
        text = f"protocol {p.VERSION + 1}, ours is {p.VERSION}"
        assert (message.reason, message.retry) == (text, False)


# Where it listens


def test_a_socket_left_behind_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "kv.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    with closing(listen(path)) as found, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        found.start()
        probe.connect(path)
        with pytest.raises(ConfigError, match=r"a store is running at .*kv.sock already"):
            listen(path)


@pytest.mark.parametrize(("mode", "folder"), [(0o600, 0o700), (0o660, 0o750), (0o666, 0o755)])
def test_S1_only_whom_the_settings_name_can_reach_it(
    tmp_path: Path, mode: int, folder: int
) -> None:
    path = tmp_path / "deep" / "kv.sock"
    with closing(listen(str(path), mode)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
        assert stat.S_IMODE(path.parent.stat().st_mode) == folder
    assert list(path.parent.iterdir()) == []


# The end


def test_O17_shutdown_tells_the_engines_and_takes_less_than_a_second(tmp_path: Path) -> None:
    with (
        LiveStore(store_settings(tmp_path)) as store,
        engine(store, "one") as one,
        engine(store, "two") as two,
    ):
        store.server.stop()
        for polite in (one, two):
            assert polite.scheduler.take(p.Detach).reason == "the store is shutting down"
            assert polite.worker.take(p.Detach)
    assert store.seconds < 1


def test_O17_a_client_that_does_not_close_does_not_hold_up_the_shutdown(tmp_path: Path) -> None:
    with LiveStore(store_settings(tmp_path)) as store, engine(store):
        store.stop()
        assert store.seconds < 1
        assert not store.server._connections
