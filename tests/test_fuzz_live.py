"""Wrong messages over real sockets, at a store process whose clients are served meanwhile.

KVSTORE_FUZZ_LIVE: how many.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec
import pytest

from kvstore.core.types import make_key
from kvstore.handover.cluster_key import ClusterKey
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.fuzz.inputs import Mutator
from tests.harness.fakes import geometry, hashes, u32
from tests.harness.handover_nodes import Node, nothing_left
from tests.harness.patience import WAIT_S

pytestmark = pytest.mark.slow

MESSAGES = int(os.environ.get("KVSTORE_FUZZ_LIVE", "6000"))
SEED = 1
GROWN_MAX = 24 << 20
PEERS = 3


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node, ClusterKey]]:
    ClusterKey.make(tmp_path / "key")
    settings = f'key = "{tmp_path}/key"\n'
    made = [Node(tmp_path / name, settings=settings) for name in "pd"]
    try:
        for node in made:
            node.start()
        yield made[0], made[1], ClusterKey.read(tmp_path / "key")
    finally:
        for node in made:
            node.stop()


class Rough:
    """Who says wrong things: peers with the right key, bytes at the port, clients at the socket."""

    def __init__(self, node: Node, key: ClusterKey, seed: int) -> None:
        self.rng = random.Random(seed)
        self.mutate = Mutator(self.rng)
        self.sent = 0
        self._node = node
        self._tls = key.tls(accepts=False)
        self._peers: list[ssl.SSLSocket] = []
        self._chain = hashes(4, "rough")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rough")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for peer in self._peers:
            peer.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            kind = self.rng.random()
            if kind < 0.6:
                self._to_peer()
            elif kind < 0.95:
                self._to_store()
            else:
                self._to_port()
            self.sent += 1

    def _shape(self, body: bytes) -> bytes:
        return body if self.rng.random() < 0.3 else self.mutate(body)

    def _to_peer(self) -> None:
        if len(self._peers) < PEERS or self.rng.random() < 0.001:
            host, _, port = self._node.address.rpartition(":")
            made = socket.create_connection((host, int(port)))
            peer = self._tls.wrap_socket(made)
            peer.settimeout(0.001)
            self._peers.append(peer)
            if len(self._peers) > PEERS:
                self._peers.pop(0).close()
        peer = self.rng.choice(self._peers)
        frame = framing.framed(self._shape(msgspec.msgpack.encode(self._say())))
        try:
            peer.sendall(self.mutate(frame) if self.rng.random() < 0.01 else frame)
            while peer.recv(1 << 16):
                pass
        except TimeoutError:
            return
        except OSError:  # it has hung up
            pass
        self._peers.remove(peer)
        peer.close()

    def _say(self) -> framing.Message:
        job, chain = self.rng.randint(1, 4), self._chain[: self.rng.randint(1, 4)]
        said: tuple[framing.Message, ...] = (
            m.Hello(m.VERSION, "n" * 64, {"model": "m"}, "rough", b"no metadata"),
            m.Want(job, b"".join(chain), 32, (u32(range(len(chain))),), lease_ms=1000),
            m.Land(job, u32([0]), u32([1]), m.Region(1, 4096, 4), metadata=b"no metadata"),
            m.Settle(job, 1000, u32([0, 1])),
            m.Settle(job, 1000),
            m.Settle(job, 0),
        )
        return self.rng.choice(said)

    def _to_store(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(self._node.path)
            sock.settimeout(WAIT_S)
            shape, key = geometry("rough"), make_key(self._chain[0], 0)
            for message in (
                p.Hello(p.VERSION, "rough", "worker", 0, 2, geometry=shape),
                p.Step((p.Lookup(1, self._chain[0], 32),)),
                p.Stored(u32([1]), (key,), (b"",), ok=True, seconds=0.1),
                p.Query("stats"),
            ):
                body = self._shape(framing.encode(message)[4:])
                try:
                    sock.sendall(len(body).to_bytes(4, "little") + body)
                except OSError:
                    break  # it has hung up

    def _to_port(self) -> None:
        host, _, port = self._node.address.rpartition(":")
        with (
            socket.create_connection((host, int(port))) as sock,
            contextlib.suppress(OSError),  # it has hung up
        ):
            sock.sendall(self._shape(b"\x16\x03\x01\x02\x00\x01" + bytes(50)))


def own_bytes(node: Node) -> int:
    """Memory of a store's process but for that of blocks."""
    found = node.process.memory_info()
    return int(found.rss - found.shared)


def test_B2_a_real_store_outlives_wrong_messages_and_serves_good_clients(
    nodes: tuple[Node, Node, ClusterKey],
) -> None:
    prefill, decode, key = nodes
    count = 0

    def hand_over() -> None:
        nonlocal count
        chain = hashes(3, f"good {count}")
        prefill.engine.put(chain)
        decode.get_all(chain, prefill.address, push=count % 2 == 1)
        count += 1

    hand_over()
    hand_over()
    with nothing_left(prefill, decode, within_s=60):
        with Rough(prefill, key, SEED) as rough:
            prefill.wait(lambda: rough.sent > MESSAGES // 2)
            before = own_bytes(prefill)
            served = 0
            while rough.sent < MESSAGES:
                hand_over()
                served += 1
            grown = own_bytes(prefill) - before
        assert served > 3
        assert grown < GROWN_MAX, f"{grown} bytes more"
        numbers = prefill.numbers()
        assert numbers["side_channel_refused{malformed}"] > MESSAGES // 10
        assert numbers["side_channel_refused{unauthorised}"] > 0
        assert numbers["refused{malformed}"] > 0
        hand_over()
