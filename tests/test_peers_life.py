"""Stores that speak of requests by name: what starts when, who lets go, and what lapses."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from connectors.config import parse_extra
from kvstore import launch
from kvstore.handover.consumer import STALL_NS
from kvstore.handover.peers import Peers
from kvstore.handover.request_leases import RequestLeases
from kvstore.wire import engine as p
from tests.bench.steal import Watch
from tests.harness.fakes import hashes, value_of
from tests.harness.live import LiveEngine, LiveStore, engine, eventually
from tests.harness.patience import WAIT_S
from tests.harness.peers import address, config, exporter_of

REQUEST = "r-1a2b3c4d"


class Node:
    """A store whose exporter starts late, with one engine."""

    def __init__(self, folder: Path, name: str, ends: ExitStack, **how: object) -> None:
        settings = config(folder / name, peer={"eager": False})
        self.store = ends.enter_context(LiveStore(settings))
        self.ends = ends.enter_context(ExitStack())
        self.engine: LiveEngine = self.ends.enter_context(engine(self.store, name, **how))

    @property
    def peers(self) -> Peers:
        found = self.store.server._peers
        assert found is not None
        return found

    @property
    def hands(self) -> RequestLeases:
        return self.peers.producer.request_leases

    @property
    def namespace(self) -> str:
        (digest,) = self.store.server.store.namespaces
        return digest

    @property
    def started(self) -> bool:
        """Whether anything runs or lies there for hand-overs."""
        exporter = exporter_of(self.store)
        return exporter.pid is not None or bool(exporter._extents.keys() - self._slots())

    def _slots(self) -> set[int]:
        return {e for n in self.store.server.store.namespaces.values() for e in n.extents}

    def counted(self, event: str) -> float:
        return next(n for (*_, last), n in self.peers.gauges().items() if last == event)

    def step(self, **fields: object) -> None:
        self.engine.scheduler.send(p.Step(**fields))  # type: ignore[arg-type]

    def hand_over(self, chain: list[bytes], lease_ms: int, request: str = REQUEST) -> None:
        """Compute a request and end it."""
        self.engine.put(chain)
        self.step(handed_over=(p.HandedOver(request, "running", common="r"),))
        done = p.HandedOver(request, "done", b"".join(chain), 32, lease_ms=lease_ms)
        self.step(handed_over=(done,))
        eventually(lambda: self.hands.held_bytes == len(chain) << 20)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    with ExitStack() as ends:
        yield Node(tmp_path, "a", ends), Node(tmp_path, "b", ends)


def test_nothing_is_started_until_something_is_handed_over(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = nodes
    chain = hashes(6)
    prefill.engine.put(chain)
    eventually(lambda: prefill.engine.ask(chain).hits)
    assert address(prefill.store)
    assert not prefill.started
    assert not decode.started
    consumer, patience_ns = decode.peers._inlets[decode.namespace], list[int]()
    heard = consumer.heard

    def note(peer: int, at_ns: int, more_ns: int = 0) -> None:
        patience_ns.append(more_ns)
        heard(peer, at_ns, more_ns)

    monkeypatch.setattr(consumer, "heard", note)
    granted = decode.engine.ask(chain, peer=address(prefill.store))
    assert granted.sources == {"peer": 6}
    assert decode.engine.read(granted) == [decode.engine.content(block) for block in chain]
    assert decode.started
    assert exporter_of(prefill.store).pid is not None
    # Our exporter starts, says Hello, theirs starts, says Welcome.
    assert patience_ns == [STALL_NS, 0, STALL_NS, 0]


def test_B3_another_model_is_refused_and_its_prompt_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = hashes(2)
    with ExitStack() as ends:
        prefill = Node(tmp_path, "a", ends)
        decode = Node(tmp_path, "b", ends, model="small", page_bytes=8192)
        prefill.engine.put(chain)
        eventually(lambda: prefill.engine.ask(chain).hits)
        assert decode.engine.ask(chain, peer=address(prefill.store)).lease == 0
        assert prefill.counted("refused") == 1
        assert not prefill.started
    told = f"peer {address(prefill.store)}: layout is "
    (said,) = [text for text in caplog.messages if text.startswith(told)]
    assert "model is small, expected model, slot bytes is 8192, expected 1048576" in said


def test_nothing_is_fetched_from_oneself(nodes: tuple[Node, Node]) -> None:
    node, _ = nodes
    chain = hashes(2)
    node.engine.put(chain[:1])
    eventually(lambda: node.engine.ask(chain).hits)
    granted = node.engine.ask(chain, peer=address(node.store), request=REQUEST)
    assert len(granted.hits[0].indices) == 4
    assert not node.started
    assert not node.peers._inlets[node.namespace].open


def test_B8_B9_letting_go_reaches_the_other_store_within_a_second(
    nodes: tuple[Node, Node],
) -> None:
    prefill, decode = nodes
    prefill.hand_over(hashes(4), 60_000)
    eventually(lambda: prefill.started)  # somebody will ask soon
    watch = Watch()
    decode.step(unwanted=(p.Unwanted(address(prefill.store), REQUEST),))
    eventually(lambda: len(prefill.hands) == 0)
    assert watch.own_s() < 1
    assert prefill.hands.held_bytes == 0
    assert prefill.counted("released") == decode.counted("done") == 1
    assert not decode.started, "nothing was moved"


def test_B9_a_fetch_ends_with_the_request_it_was_for(nodes: tuple[Node, Node]) -> None:
    """What has not been computed there yet is not waited for any more."""
    prefill, decode = nodes
    chain = hashes(4)
    prefill.step(handed_over=(p.HandedOver(REQUEST, "running"),))
    prefill.engine.put(chain[:2])
    here = address(prefill.store)
    lookup = p.Lookup(1, b"".join(chain), 32, peer=here, request=REQUEST)
    decode.step(lookups=(lookup,))
    eventually(lambda: prefill.peers.producer.jobs)
    decode.step(unwanted=(p.Unwanted(here, REQUEST), p.Unwanted("127.0.0.1:1", "another")))
    eventually(lambda: not prefill.peers.producer.jobs)
    eventually(lambda: not any(i.open for i in decode.peers._inlets.values()))


def test_B9_a_fetch_ends_at_once_though_its_peer_is_silent(nodes: tuple[Node, Node]) -> None:
    _, decode = nodes
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        here = f"127.0.0.1:{silent.getsockname()[1]}"
        lookup = p.Lookup(1, b"".join(hashes(4)), 32, peer=here, request=REQUEST)
        decode.step(lookups=(lookup,))
        consumer = decode.peers._inlets[decode.namespace]
        eventually(lambda: consumer.open)
        decode.step(unwanted=(p.Unwanted(here, REQUEST),))
        eventually(lambda: not consumer.open)
        assert consumer.counts["late"] == 0


def test_B11_heartbeats_come_from_the_store_and_end_with_the_request(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines of both sides say nothing all the while."""
    prefill, decode = nodes
    monkeypatch.setattr("kvstore.handover.heartbeats.LEASE_MS", 1500)
    decode.peers.requests._period_ns = 300_000_000
    chain = hashes(2)
    prefill.hand_over(chain, 1500)
    here = address(prefill.store)
    decode.engine.put(chain)  # it lacks nothing, and waits all the same
    decode.engine.ask(chain, peer=here, request=REQUEST)
    eventually(lambda: prefill.counted("extended") > 10)
    assert len(prefill.hands) == 1
    decode.ends.close()
    eventually(lambda: len(prefill.hands) == 0)
    assert prefill.counted("lapsed") == 1
    sent = decode.counted("heartbeats")
    time.sleep(0.5)
    assert decode.counted("heartbeats") == sent > 10


def test_B11_no_heartbeat_follows_the_report(nodes: tuple[Node, Node]) -> None:
    prefill, decode = nodes
    decode.peers.requests._period_ns = 10_000_000
    chain = hashes(2)
    prefill.hand_over(chain, 60_000)
    here = address(prefill.store)
    decode.engine.put(chain)
    decode.engine.ask(chain, peer=here, request=REQUEST)
    eventually(lambda: decode.counted("heartbeats") > 1)
    decode.step(unwanted=(p.Unwanted(here, REQUEST),))
    eventually(lambda: len(prefill.hands) == 0)
    sent = decode.counted("heartbeats")
    time.sleep(0.5)
    assert decode.counted("heartbeats") == sent


def test_P9_a_decode_engine_may_know_the_common_id_only(nodes: tuple[Node, Node]) -> None:
    prefill, decode = nodes
    chain = hashes(3)
    prefill.step(handed_over=(p.HandedOver(REQUEST, "running", common="r"),))
    prefill.engine.put(chain[:1])
    eventually(lambda: prefill.engine.ask(chain[:1]).hits)
    granted = decode.engine.ask(chain, peer=address(prefill.store), request="r", push=True)
    assert granted.sources == {"peer": 3}, "what it still computes comes, too"
    prefill.engine.put(chain)
    assert decode.engine.read(granted) == [decode.engine.content(block) for block in chain]


def test_a_peer_that_cannot_be_an_address_lets_go_of_nothing(nodes: tuple[Node, Node]) -> None:
    _, decode = nodes
    for peer in ("", "nowhere", "127.0.0.1:1", "\0:5"):
        decode.step(unwanted=(p.Unwanted(peer, REQUEST),))
    chain = hashes(1)
    decode.engine.put(chain)
    eventually(lambda: decode.engine.ask(chain).hits)


def test_how_long_engine_blocks_were_needed_is_measured(nodes: tuple[Node, Node]) -> None:
    prefill, _ = nodes
    prefill.hand_over(hashes(2), 60_000)
    name = "kvstore_hand_over_held_seconds"
    eventually(lambda: value_of(prefill.store.server.store.numbers, name, "+Inf") == 1)
    assert value_of(prefill.store.server.store.numbers, name, "sum") < 5


class Private:
    def __init__(self, path: str) -> None:
        self.path = path


@pytest.mark.parametrize("listen", ["127.0.0.1:0", None])
def test_a_private_store_can_be_asked_and_runs_nothing_for_it(listen: str | None) -> None:
    extra = parse_extra({"cpu": "64MiB"} | ({"listen": listen} if listen else {}))
    store = Private(extra.find_store(f"test-{secrets.token_hex(8)}"))
    process = psutil.Process(launch._children[-1].pid)
    with engine(store) as made:
        here = made.active.side_channel
        assert here.startswith("127.0.0.1:") == bool(listen)
        assert process.children() == []
    process.wait(WAIT_S)


def test_S4_a_namespace_that_peers_ask_for_or_send_to_is_not_forgotten(
    nodes: tuple[Node, Node],
) -> None:
    prefill, decode = nodes
    chain = hashes(2)
    prefill.hand_over(chain, 60_000)
    granted = decode.engine.ask(chain, peer=address(prefill.store), request=REQUEST)
    assert decode.engine.read(granted) == [decode.engine.content(block) for block in chain]
    for node in nodes:
        (namespace,) = node.store.server.store.namespaces.values()
        assert not node.peers.forget(namespace)
