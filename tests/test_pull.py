"""Blocks fetched without an engine: by the Python API, and by `kvstore keys` and `kvstore pull`."""

from __future__ import annotations

import json
import logging
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvstore import admin, cli
from kvstore import protocol as p
from kvstore.bench.steal import Watch
from kvstore.bench.store import StoreProcess
from kvstore.errors import ConfigError, PeerError
from kvstore.export import messages as m
from kvstore.export.consumer import LEASE_MS
from kvstore.pull import ABSENT, CORRUPT, FETCH_BLOCKS, LOST, WINDOW, Puller, pull
from kvstore.service.channel import ClusterKey
from kvstore.service.listing import KEYS_MAX, Listed, listing
from kvstore.service.private import address_of, ensure
from kvstore.types import LookupResult, Slot, make_key
from tests.export_rig import Pair
from tests.fakes import hashes, keys_of
from tests.live import LiveEngine, LiveStore, engine, eventually
from tests.patience import WAIT_S
from tests.test_peers import address, config, inside
from tiers.peer import PeerMover

BLOCK = 1 << 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStore]:
    """A store with a disk; its engine's blocks are 1 MiB."""
    folder = tmp_path_factory.mktemp("pull")
    disk = {"path": str(folder / "kv"), "capacity": "128MiB", "extent": "16MiB"}
    with LiveStore(config(folder / "store", nvme=disk)) as made:
        yield made


@pytest.fixture(scope="module")
def one(store: LiveStore) -> Iterator[LiveEngine]:
    with engine(store, "prefill") as made:
        yield made


def namespace_of(store: LiveStore) -> str:
    (digest,) = store.server.store.namespaces
    return digest


def put(one: LiveEngine, name: str, count: int) -> list[bytes]:
    chain = hashes(count, name)
    one.put(chain)
    eventually(lambda: asked(one, chain) == count)
    return chain


def asked(one: LiveEngine, chain: list[bytes]) -> int:
    """How many blocks memory has; what was leased for the answer is given back."""
    granted = one.ask(chain, memory_only=True)
    if granted.lease:
        one.worker.send(p.Loaded(granted.lease, 0, 0.0))
    return len(granted.hits[0].indices) // 4 if granted.hits else 0


def hand(one: LiveEngine, request: str, chain: list[bytes], lease_ms: int = 600_000) -> None:
    running = p.Handing(request, "running")
    done = p.Handing(request, "done", b"".join(chain), 32, b"", lease_ms)
    one.scheduler.send(p.Step(handing=(running, done)))
    asked(one, chain)  # answered after it


def test_blocks_come_from_memory_and_from_disk_with_their_bytes(
    store: LiveStore, one: LiveEngine
) -> None:
    chain = put(one, "both", 8)
    keys = [make_key(block, 0) for block in chain]
    (namespace,) = store.server.store.namespaces.values()
    (disk,) = namespace.tiering.tiers
    eventually(lambda: all(disk.lookup(key) is LookupResult.HIT for key in keys))
    inside(store, lambda: [namespace.manager.drop(key, "test") for key in keys[:4:-1]])
    absent = hashes(1, "nobody has it")[0]
    found = {
        block.key: block for block in pull(address(store), namespace_of(store), [*keys, absent])
    }
    assert [found[key].tier for key in keys] == ["cpu"] * 5 + ["nvme"] * 3
    assert [found[key].data for key in keys] == [one.content(block) for block in chain]
    assert all(found[key].seconds > 0 for key in keys)
    missing = found.pop(make_key(absent, 0))
    assert (missing.tier, missing.data, missing.problem) == (None, None, ABSENT)
    assert len(found) == len(keys)


def test_more_blocks_than_are_under_way_at_once_all_come(store: LiveStore, one: LiveEngine) -> None:
    chain = put(one, "many", WINDOW + 7)
    with Puller(address(store), namespace_of(store)) as peer:
        for _ in range(2):  # its slots are used again
            found = {block.key[:32]: block.data for block in peer.pull(chain)}
            assert found == {block: one.content(block) for block in chain}
        half = peer.pull(chain)
        next(half)
        half.close()  # what was under way writes into no slot of the next
        assert {b.key[:32]: b.data for b in peer.pull(chain)} == found


def test_what_is_not_wanted_any_more_is_let_go_of_at_once(
    store: LiveStore, one: LiveEngine
) -> None:
    chain, peers = put(one, "let go", 3), store.server._peers
    assert peers is not None
    with Puller(address(store), namespace_of(store)) as peer:
        begun = peer.pull([*chain, b"x" * 32])
        assert next(begun).problem == ABSENT
        begun.close()
        watch = Watch()
        eventually(lambda: not peers.producer.busy)
    assert watch.own_s() < LEASE_MS / 2000, "it was held until its lease was over"


def test_a_wrong_checksum_is_said_and_gives_no_bytes(
    store: LiveStore, one: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = put(one, "wrong", 3)
    real = PeerMover.sum

    def others(self: PeerMover, tags: list, _namespace: str, blocks: list) -> None:  # type: ignore[type-arg]
        real(self, tags, "another namespace", blocks)

    monkeypatch.setattr(PeerMover, "sum", others)
    with Puller(address(store), namespace_of(store)) as peer:
        assert [(b.data, b.problem) for b in peer.pull(chain)] == [(None, CORRUPT)] * 3
        monkeypatch.undo()
        ended = PeerMover._ended
        monkeypatch.setattr(
            PeerMover, "_ended", lambda m, at, moved, _: ended(m, at, moved, "failed")
        )
        assert [(b.data, b.problem) for b in peer.pull(chain)] == [(None, LOST)] * 3
        monkeypatch.undo()
        found = {b.key[:32]: b.data for b in peer.pull(chain)}
        assert found == {block: one.content(block) for block in chain}


def test_blocks_of_a_request_are_found_and_stay_held(store: LiveStore, one: LiveEngine) -> None:
    chain = put(one, "handed", 4)
    one.scheduler.send(p.Step(handing=(p.Handing("r0", "running"),)))
    hand(one, "r1", chain)
    peers = store.server._peers
    assert peers is not None
    with Puller(address(store), namespace_of(store)) as peer:
        assert peer.held("r1") == [make_key(block, 0) for block in chain]
        assert all(not block.problem for block in peer.pull(peer.held("r1")))
        assert peer.held("r1"), "looking takes nothing away"
        with pytest.raises(PeerError, match="'r0' still runs there"):
            peer.held("r0")
        with pytest.raises(PeerError, match="holds nothing for request 'r2'"):
            peer.held("r2")
    one.scheduler.send(p.Step(handing=(p.Handing("r0", "gone"), p.Handing("r1", "gone"))))
    eventually(lambda: peers.producer.held_bytes == 0 and not peers.producer.busy)


def test_a_store_that_is_not_there_or_not_that_models_is_said(store: LiveStore) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(PeerError, match=f"nobody listens at 127.0.0.1:{port}"):
            pull(f"127.0.0.1:{port}", "0" * 64)
    with pytest.raises(PeerError, match=r"namespace is 000000000000, expected .*; kvstore keys"):
        pull(address(store), "0" * 64)
    with pytest.raises(ConfigError, match="expected 64 hexadecimal digits"):
        pull(address(store), "0" * 12)


def test_a_block_that_cannot_be_one_is_said(store: LiveStore, one: LiveEngine) -> None:
    assert one.active
    with Puller(address(store), namespace_of(store)) as peer:
        for wrong in (b"x" * 31, make_key(b"x" * 32, 1)):
            with pytest.raises(ConfigError, match="a group below 1"):
                list(peer.pull([wrong]))


def test_who_only_looks_is_told_the_traits_and_a_request_of_another_model_is_unknown() -> None:
    pair, said = Pair(), list[p.Message]()
    pair.producer._send = lambda _peer, message: said.append(message)
    digest, now_ns = pair.source.layout.digest, pair.giver.now_ns
    pair.producer.on_message(99, m.Hello(m.VERSION, digest, {}), now_ns)
    assert said == [m.Welcome("agent", b"md", pair.source.layout.traits)]
    chain = hashes(2)
    pair.hand("r")
    pair.producer.hands.running("s", pair.target.manager, 1, 1)
    for request in ("r", "s", "t"):
        pair.producer.on_message(99, m.Locate(request), now_ns)
    pair.producer.hands.done("r", keys_of(chain), now_ns + 1, now_ns)
    pair.producer.on_message(99, m.Locate("r"), now_ns)
    assert said[1:] == [
        m.Located("r", "running"),
        m.Located("s", "unknown"),
        m.Located("t", "unknown"),
        m.Located("r", "held", tuple(keys_of(chain))),
    ]


def test_what_was_fetched_is_counted_by_the_tier_it_was_in() -> None:
    pair, chain = Pair(), hashes(5)
    pair.put(chain)
    for key in keys_of(chain)[:2:-1]:
        pair.source.manager.drop(key, "test")
    pair.want(chain)
    pair.run(3)
    pair.decode.ask(chain)
    pair.run(40)
    assert pair.arrived(chain) == 5
    assert pair.consumer.fetched == {"cpu": 3, "other": 2}, "a tier's name is the peer's to choose"


def test_keys_are_listed_by_the_local_socket_only(store: LiveStore, one: LiveEngine) -> None:
    chain = put(one, "listed", 3)
    (found,) = admin.blocks(f"unix://{store.path}")
    assert found.namespace == namespace_of(store)
    assert (found.block_bytes, found.groups) == (BLOCK, 1)
    assert {make_key(block, 0).hex() for block in chain} <= set(found.keys)
    assert len(found.keys) <= min(found.blocks, KEYS_MAX)
    assert all(tiers[0] == "cpu" for tiers in found.keys.values())


def test_the_program_in_the_docs_runs(store: LiveStore, one: LiveEngine) -> None:
    page = (Path(__file__).parent.parent / "docs/how-to/hand-over.md").read_text(encoding="utf-8")
    program = page.partition("```python\n")[2].partition("```")[0]
    chain = put(one, "docs", 2)
    hand(one, "docs", chain)
    arguments = [address(store), namespace_of(store), "docs"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    expected = {f"{block.hex()[:16]} cpu 1,048,576 bytes" for block in chain}
    assert set(done.stdout.splitlines()[1:]) == expected, done.stderr


def test_only_blocks_that_are_ready_are_listed_and_not_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, chain = Pair(), hashes(4)
    pair.put(chain[:3])
    written = make_key(chain[3], 0)
    pair.source.manager.begin_store(written, keys_of(chain)[2], Slot(pair.prefill.credits[0]))

    def keys() -> set[str]:
        (found,) = msgspec.json.decode(listing({"d": pair.source}), type=list[Listed])
        assert found.blocks == 4
        return set(found.keys)

    assert keys() == {key.hex() for key in keys_of(chain[:3])}
    monkeypatch.setattr("kvstore.service.listing.KEYS_MAX", 2)
    assert len(keys()) == 2


def test_a_private_store_is_named_by_its_engine() -> None:
    name = f"private {secrets.token_hex(4)}"
    ensure(name, 64 << 20)
    found = {stat.name for stat in admin.stats(f"engine:{name}", timeout_s=WAIT_S)}
    assert "kvstore_capacity_bytes" in found
    assert admin.blocks(f"engine:{name}", timeout_s=WAIT_S) == []

    eventually(lambda: not Path(address_of(name) + ".lock").exists())  # three seconds after that
    with pytest.raises(admin.StoreUnreachable, match=f"no store answers at engine:{name}"):
        admin.stats(f"engine:{name}")


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StoreProcess, str, Path]]:
    """A store process with a cluster key: itself, its side channel, and the key's file."""
    folder = tmp_path_factory.mktemp("process")
    ClusterKey.make(folder / "cluster.key")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        here = f"127.0.0.1:{probe.getsockname()[1]}"
    peer = f'[peer]\nkey = "{folder}/cluster.key"\nlisten = "{here}"\n'
    with StoreProcess(folder, "64MiB", peer, scraped=False) as made:
        yield made, here, folder / "cluster.key"


class At:
    """What an engine wants to know of a store."""

    def __init__(self, store: StoreProcess) -> None:
        self.path = store.address.removeprefix("unix://")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(list(arguments))
    found = capsys.readouterr()
    return status, found.out, found.err


def test_the_commands_show_what_a_store_process_has(
    process: tuple[StoreProcess, str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, here, key = process
    with engine(At(store)) as one:
        chain = put(one, "shown", 3)
        hand(one, "cmpl-1", chain)
        status, out, _ = run(capsys, "keys", "--store", store.address, "--json")
        (listed,) = json.loads(out)
        assert status == 0
        assert len(listed["keys"]) == 3
        status, out, _ = run(capsys, "keys", "--store", store.address, "--limit", "2")
        assert f"namespace {listed['namespace']}" in out
        assert "1 more are not shown" in out

        base = ["pull", "--from", here, "--namespace", listed["namespace"]]
        keyed = [*base, "--cluster-key", str(key)]
        out_dir = tmp_path / "blocks"
        status, out, _ = run(capsys, *keyed, "--request", "cmpl-1", "--out", str(out_dir))
        assert status == 0
        assert "3 of 3 blocks, 3 MiB" in out
        assert out.count("right") == 3
        for block in chain:
            written = (out_dir / f"{make_key(block, 0).hex()}.kv").read_bytes()
            assert written == one.content(block)

        status, out, _ = run(capsys, *keyed, "--json", "--key", chain[0].hex(), "ff" * 32)
        shown = json.loads(out)
        assert status == 1, "one of them is not there"
        assert [(b["ok"], b["tier"], b["problem"]) for b in shown["blocks"]] == [
            (True, "cpu", None),
            (False, None, ABSENT),
        ]
        assert shown["bytes"] == shown["block_bytes"] == BLOCK


@pytest.mark.parametrize("given", ["none", "other"])
def test_without_the_key_a_peer_says_nothing(
    process: tuple[StoreProcess, str, Path],
    given: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answer is the same whatever is asked for: also for what is there."""
    store, here, _ = process
    with engine(At(store), given) as one:
        chain = put(one, f"hidden {given}", 1)
        (listed,) = admin.blocks(store.address)
        ClusterKey.make(tmp_path / "other.key")
        option = [] if given == "none" else ["--cluster-key", str(tmp_path / "other.key")]
        said = []
        for namespace in (listed.namespace, "0" * 64):
            asked = ["pull", "--from", here, "--namespace", namespace, "--key", chain[0].hex()]
            with caplog.at_level(logging.DEBUG):
                said.append(run(capsys, *asked, *option))
        assert said[0] == said[1]
        assert said[0][0] == 1
        assert "both sides need the same cluster key, or none" in said[0][2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"--from": "localhost"}, '--from: expected "host:port"'),
        ({"--from": "127.0.0.1:0"}, "--from: expected a port from 1, found 0"),
        ({"--key": "xyz"}, "--key: expected hexadecimal digits, found 'xyz'"),
        ({"--key": None}, "expected --key or --request, found neither"),
        ({"--cluster-key": "/nowhere"}, "kvstore keygen makes one"),
        ({"--namespace": "12"}, "expected 64 hexadecimal digits"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(
    change: dict[str, str | None], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, str | None] = {"--from": "127.0.0.1:1", "--namespace": "0" * 64, "--key": "00"}
    options = [text for pair in (given | change).items() if pair[1] for text in pair if text]
    status, out, err = run(capsys, "pull", *options)
    assert status == 2
    assert says in err
    assert err.count("\n") == 1
    assert not out


def test_questions_of_many_blocks_are_split(
    store: LiveStore, one: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FETCH_BLOCKS < 1 << 16
    monkeypatch.setattr("kvstore.pull.FETCH_BLOCKS", 2)
    chain = put(one, "split", 5)
    found = {b.key[:32]: b.data for b in pull(address(store), namespace_of(store), chain)}
    assert found == {block: one.content(block) for block in chain}
