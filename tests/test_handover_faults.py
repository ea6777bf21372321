"""Two nodes that hand over blocks, and one of them dies, freezes or changes its mind.

Whatever happens, an engine waits no longer than it was told it may, what it gets has the right
bytes, and in the end nothing is held for it anywhere: slots, leases, landing slots, descriptors.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvstore.wire import engine as p
from tests.harness.fakes import hashes
from tests.harness.handover_nodes import (
    Node,
    gone,
    nothing_left,
    release,
    signal_now,
    started,
)

pytestmark = pytest.mark.slow

NOTICED_S = 15.0  # until all of a hand-over that failed is let go of; leases last 3 s here
TRANSPORTS = {"shm": {}, "tcp": {"UCX_TLS": "tcp,self"}}
Pair = tuple[Node, Node]


@pytest.fixture(scope="module", params=["shm", pytest.param("tcp", marks=pytest.mark.long)])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def nodes(transport: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nodes")
    made = [Node(folder / name, environment=TRANSPORTS[transport]) for name in "pd"]
    with started(*made):
        yield made[0], made[1]


@pytest.fixture
def pair(nodes: Pair, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Both there, and known to each other, whatever the test before did."""
    prefill, decode = nodes
    for node in nodes:
        node.revive()
    chain = computed(prefill, request.node.name, 2)
    decode.get_all(chain, prefill.address)
    decode.get_all(computed(prefill, f"{request.node.name} pushed", 2), prefill.address, push=True)
    yield nodes
    for node in nodes:
        node.revive()


def computed(node: Node, name: str, count: int = 8) -> list[bytes]:
    """Blocks that a node has."""
    chain = hashes(count, name)
    node.engine.put(chain)
    node.get_all(chain)
    return chain


def let_go(pair: Pair) -> None:
    for node in pair:
        node.wait(lambda: not node.held(), NOTICED_S)  # noqa: B023 - asked at once


def goes_on(pair: Pair, name: str) -> None:
    """Both nodes hand over again, both ways."""
    for push in (False, True):
        chain = computed(pair[0], f"{name} again {push}", 3)
        pair[1].get_all(chain, pair[0].address, push=push)


both_ways = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
one_way = pytest.mark.parametrize(
    "push", [False, pytest.param(True, marks=pytest.mark.long)], ids=["pull", "push"]
)


# Killed


@one_way
@pytest.mark.parametrize("when", ["before", "after"])
def test_B15_a_prefill_store_that_is_killed_beside_the_transfer(
    pair: Pair, push: bool, when: str
) -> None:
    prefill, decode = pair
    chain = computed(prefill, f"{when} {push}")
    if when == "after":
        decode.get_all(chain, prefill.address, push=push)
    with nothing_left(decode):
        prefill.kill()
        if when == "before":
            assert decode.get(chain, prefill.address, push=push) == 0
            decode.engine.put(chain)  # it was computed
        assert decode.get(chain) == len(chain)
        decode.wait(lambda: not decode.held(), NOTICED_S)
    prefill.revive()
    goes_on(pair, f"{when} {push}")


def under_way(pair: Pair, chain: list[bytes], *, push: bool) -> tuple[p.Granted, psutil.Process]:
    """Stop a transfer in the middle: by freezing the exporter that does it."""
    prefill, decode = pair
    mover = prefill if push else decode
    exporter = mover.exporter
    assert exporter is not None
    mover.freeze(store=False)
    granted = decode.engine.ask(chain, peer=prefill.address, push=push)
    assert granted.sources == {"peer": len(chain)}
    decode.wait(lambda: decode.gauge("bytes{landing}") == len(chain) << 20)
    time.sleep(0.1)  # it is told to its exporter now, as far as that reads
    return granted, exporter


@both_ways
def test_B15_B19_a_prefill_store_that_is_killed_during_the_transfer(pair: Pair, push: bool) -> None:
    prefill, decode = pair
    chain = computed(prefill, f"during {push}")
    with nothing_left(decode):
        granted, exporter = under_way(pair, chain, push=push)
        prefill.kill()
        assert decode.engine.load(granted, 1.0) == []
        if not gone(exporter):
            signal_now(exporter, signal.SIGCONT)
        decode.wait(lambda: not decode.held(), NOTICED_S)
        assert decode.get(chain, prefill.address, push=push) == 0
    prefill.revive()
    goes_on(pair, f"during {push}")


@both_ways
@pytest.mark.parametrize("whose", [0, 1], ids=["prefill", "decode"])
def test_B20_an_exporter_that_is_killed_during_the_transfer(
    pair: Pair, push: bool, whose: int
) -> None:
    """Its store starts another one; whoever was moving something says Hello again."""
    prefill, decode = pair
    chain = computed(prefill, f"exporter {push} {whose}")
    starts = pair[whose].numbers()["exporter_starts"]
    with nothing_left(prefill, decode):
        granted, frozen = under_way(pair, chain, push=push)
        signal_now(pair[whose].exporter, signal.SIGKILL)
        if not gone(frozen):
            signal_now(frozen, signal.SIGCONT)
        found = decode.engine.load(granted, 1.0)
        assert found == [decode.engine.content(block) for block in chain[: len(found)]]
        let_go(pair)
        decode.get_all(chain, prefill.address, push=push)
    goes_on(pair, f"exporter {push} {whose}")
    told = pair[whose].numbers()
    assert (told["exporter_starts"], told["exporter_up"]) == (starts + 1, 1)


@both_ways
def test_B15_a_decode_store_that_is_killed_costs_one_lease(pair: Pair, push: bool) -> None:
    prefill, decode = pair
    chain = computed(prefill, f"decode {push}")
    with nothing_left(prefill):
        _, exporter = under_way(pair, chain, push=push)
        assert prefill.gauge("bytes{held}")
        decode.kill()
        if not gone(exporter):
            signal_now(exporter, signal.SIGCONT)
        prefill.wait(lambda: not prefill.held(), NOTICED_S)
    decode.revive()
    goes_on(pair, f"decode {push}")


# Frozen


@both_ways
@pytest.mark.parametrize(
    "what", ["exporter", "both", pytest.param("store", marks=pytest.mark.long)]
)
def test_B15_B20_P8_a_prefill_node_that_freezes_and_goes_on(
    pair: Pair, push: bool, what: str, transport: str
) -> None:
    """What it writes late lands where nobody reads it; others are served meanwhile."""
    prefill, decode = pair
    chain = computed(prefill, f"frozen {push} {what}")
    with nothing_left(prefill, decode):
        parts = {"store": what != "exporter", "exporter": what != "store"}
        prefill.freeze(**parts)
        came = decode.get(chain, prefill.address, push=push)
        if parts["store"] or (transport == "tcp") or push:
            assert came == 0
        mine = hashes(4, f"mine {push} {what}")
        decode.engine.put(mine)
        assert decode.get(mine) == len(mine)
        time.sleep(4)  # beyond its deadlines
        assert decode.gauge("open{fetches}") == 0
        prefill.freeze(**parts, go_on=True)
        let_go(pair)
        assert decode.get(mine) == len(mine)
        decode.get_all(chain, prefill.address, push=push)
    goes_on(pair, f"frozen {push} {what}")


@one_way
def test_B15_a_decode_node_that_freezes_and_goes_on(pair: Pair, push: bool) -> None:
    prefill, decode = pair
    chain = computed(prefill, f"late {push}")
    with nothing_left(prefill, decode):
        granted, exporter = under_way(pair, chain, push=push)
        decode.freeze()
        prefill.wait(lambda: not prefill.held() or push, NOTICED_S)
        time.sleep(2)
        if not gone(exporter):
            signal_now(exporter, signal.SIGCONT)
        decode.freeze(go_on=True)
        found = decode.engine.load(granted, 1.0)
        assert found == [decode.engine.content(block) for block in chain[: len(found)]]
        let_go(pair)
        decode.get_all(chain, prefill.address, push=push)
    goes_on(pair, f"late {push}")


def test_B16_B19_a_lease_that_is_over_before_the_read_gives_no_wrong_bytes(pair: Pair) -> None:
    """The blocks were reused since then."""
    prefill, decode = pair
    chain = computed(prefill, "over")
    with nothing_left(prefill, decode):
        granted, exporter = under_way(pair, chain, push=False)
        decode.freeze()
        prefill.wait(lambda: not prefill.held(), NOTICED_S)
        for number in range(16):
            prefill.engine.put(hashes(8, f"other {number}"))
        assert prefill.get(chain) == 0, "its slots have other blocks"
        signal_now(exporter, signal.SIGCONT)  # it reads now
        time.sleep(0.5)
        decode.freeze(go_on=True)
        assert decode.engine.load(granted, 1.0) == []
        decode.wait(lambda: not decode.held(), NOTICED_S)
        assert decode.get(chain, prefill.address) == 0
    goes_on(pair, "over")


def test_B20_an_own_exporter_that_hangs_is_started_again(pair: Pair) -> None:
    prefill, decode = pair
    chain = computed(prefill, "hangs")
    exporter = decode.exporter
    with nothing_left(decode):
        decode.freeze(store=False)
        decode.wait(lambda: exporter is not None and gone(exporter), NOTICED_S)
        assert "has not answered" in decode.store.log_path.read_text()
        decode.get_all(chain, prefill.address)


# Under the same address


def test_B15_a_prefill_store_that_is_restarted_is_met_with_a_fresh_handshake(pair: Pair) -> None:
    prefill, decode = pair
    before = computed(prefill, "old")
    assert decode.get(before[:1], prefill.address) == 1
    prefill.kill()
    prefill.revive()
    chain = computed(prefill, "new")
    assert decode.get(chain[:1], prefill.address) == 1, "at once"
    with nothing_left(prefill, decode):
        assert decode.get(before, prefill.address) <= 1, "it has lost what it had"
        for push in (False, True):
            decode.get_all(chain[: 4 + 4 * push], prefill.address, push=push)


# Aborted


@both_ways
@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.03])
def test_P8_a_request_that_is_aborted_at_any_moment(pair: Pair, push: bool, after_s: float) -> None:
    prefill, decode = pair
    with nothing_left(prefill, decode):
        for number in range(4):
            chain = computed(prefill, f"aborted {push} {after_s} {number}", 6)
            decode.engine._asks += 1
            ask = decode.engine._asks
            packed = b"".join(chain)
            lookup = p.Lookup(ask, packed, 32, peer=prefill.address, push=push)
            decode.engine.scheduler.send(p.Step((lookup,)))
            time.sleep(after_s)
            release(decode.engine, ask)
            release(decode.engine, decode.engine.answers([ask])[0].lease)
            decode.get_all(chain, prefill.address, push=push)
        let_go(pair)


@both_ways
def test_P4_a_prefill_that_is_aborted_while_it_is_waited_for(pair: Pair, push: bool) -> None:
    prefill, decode = pair
    name = f"gone {push}"
    chain = hashes(6, name)
    with nothing_left(prefill, decode):
        prefill.engine.scheduler.send(p.Step(handed_over=(p.HandedOver(name, "running"),)))
        computed(prefill, name, 3)
        how: dict[str, object] = {"request": name, "push": push}
        granted = decode.engine.ask(chain, peer=prefill.address, **how)
        assert granted.sources == {"peer": 6}, "it may still compute them"
        prefill.engine.scheduler.send(p.Step(handed_over=(p.HandedOver(name, "gone"),)))
        found = decode.engine.load(granted, 1.0)
        assert found == [decode.engine.content(block) for block in chain[:3]][: len(found)]
        let_go(pair)


@both_ways
def test_P4_what_is_never_computed_is_given_up(pair: Pair, push: bool) -> None:
    """A request that runs for ever, and nobody says so."""
    prefill, decode = pair
    name = f"never {push}"
    with nothing_left(decode):
        prefill.engine.scheduler.send(p.Step(handed_over=(p.HandedOver(name, "running"),)))
        time.sleep(0.05)
        granted = decode.engine.ask(hashes(4, name), peer=prefill.address, request=name, push=push)
        assert decode.engine.load(granted, 1.0) == []
        decode.wait(lambda: not decode.held(), NOTICED_S)
        prefill.engine.scheduler.send(p.Step(handed_over=(p.HandedOver(name, "gone"),)))
        prefill.wait(lambda: not prefill.held(), NOTICED_S)


def test_B14_several_peers_at_a_time_one_of_which_hangs(
    pair: Pair, tmp_path: Path, transport: str
) -> None:
    prefill, decode = pair
    other = Node(tmp_path / "other", environment=TRANSPORTS[transport])
    with started(other):
        decode.get_all(computed(other, "met", 2), other.address)
        stuck = [computed(other, f"stuck {number}", 12) for number in range(2)]
        chain = computed(prefill, "beside", 12)
        other.freeze(store=False)
        asks = []
        for one in stuck:  # more than the landing memory has slots
            decode.engine._asks += 1
            asks.append(decode.engine._asks)
            lookup = p.Lookup(asks[-1], b"".join(one), 32, peer=other.address, push=True)
            decode.engine.scheduler.send(p.Step((lookup,)))
        leases = [granted.lease for granted in decode.engine.answers(asks)]
        decode.wait(lambda: (decode.gauge("bytes{landing}") or 0) >= 10 << 20)
        for part in (4, 8, 12):
            assert decode.get(chain[:part], prefill.address) == part
        other.freeze(store=False, go_on=True)
        for lease in leases:
            release(decode.engine, lease)
        decode.wait(lambda: not decode.held(), NOTICED_S)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_an_address_of_something_else_costs_a_moment(pair: Pair, says: bytes) -> None:
    _, decode = pair
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server, nothing_left(decode):

        def answer() -> None:
            taken.append(server.accept()[0])
            taken[0].sendall(says)

        answers = threading.Thread(target=answer)
        answers.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert decode.get(hashes(3, f"something else {says!r}"), address) == 0
        answers.join()
    taken[0].close()
