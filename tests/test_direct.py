"""What a peer has, read straight into an engine's tensors: real stores, exporters and NIXL."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from connectors.config import DirectWay
from connectors.store_client import Grant
from kvstore.handover.consumer import STALL_NS
from kvstore.wire import engine as p
from tests.bench.steal import Watch
from tests.bench.store import StoreProcess, free_port
from tests.engine.support import numbers, since
from tests.harness.fakes import hashes
from tests.harness.handover_nodes import exporter_of
from tests.harness.live import eventually
from tests.harness.worker_rig import Rig, heard
from tiers.nixl.agent import Agent
from tiers.nixl.messages import MoveError
from tiers.nixl.ucx import ucx_settings

CAPACITY = "16MiB"
PATIENT = 'promote = "60s"\n'  # however slow the machine is


class Nodes:
    """A prefill and a decode store as processes, an engine's workers at each."""

    def __init__(
        self,
        folder: Path,
        ends: ExitStack,
        *,
        ranks: tuple[int, int],
        more: str,
        engine: str,
        serving: bool,
        per: int,
        push: bool,
        place: tuple[str, str],
        stored: int,
    ) -> None:
        """more: sections of the prefill store's settings; engine: of both stores' [engine].

        stored: blocks of a chain that the prefill engine has computed, in its first engine blocks.
        serving: the prefill engine's memory can be read, too. per: engine blocks in a block.
        push: the decode engine is written to. place: where the engines' tensors are.
        """
        self.push = push
        ends.callback(os.unsetenv, "UCX_TLS")  # of agents that are written to
        self.stores, self.rigs = [], []
        for name, world in zip("pd", ranks, strict=True):
            (folder / name).mkdir()
            port = free_port()
            sections = f'[engine]\n{engine}[peer]\nlisten = "127.0.0.1:{port}"\n'
            disk = more.format(folder=folder / name) if name == "p" else ""
            store = StoreProcess(folder / name, CAPACITY, sections + disk)
            self.stores.append(ends.enter_context(store))
            path = store.address.removeprefix("unix://")
            way: DirectWay = "pull" if serving else ""
            if name == "d":
                way = "push" if push else "pull"
            rig = Rig(path, world=world, per=per, direct=way, place=place[name == "d"])
            ends.callback(rig.close)
            rig.attach()
            self.rigs.append(rig)
            if name == "p":
                self.address = f"127.0.0.1:{port}"
        if not more:  # a store waits 10 s for an exporter to start, a slow machine takes longer
            self.rigs[0].put(hashes(1, "first"), range(per))
            eventually(lambda: self._reached(hashes(1, "first")))
        self.chain = hashes(stored)
        if stored:
            self.rigs[0].put(self.chain, range(stored * per))

    def _reached(self, chain: list[bytes]) -> bool:
        """Whether the decode store is offered a block, which it lets go of."""
        client = self.rigs[1].client
        number = client.ask(p.Lookup(0, b"".join(chain), 32, peer=self.address, direct=True))
        assert number
        client.send_step()
        eventually(lambda: heard(client) and client.grant(number))
        grant = client.grant(number)
        client.drop(number)
        client.send_step()
        return grant is not None and bool(grant.lease) and not self.left()

    def ask(self, chain: list[bytes] | None = None, **how: object) -> Grant:
        chain = self.chain if chain is None else chain
        return self.rigs[1].ask(chain, peer=self.address, direct=True, push=self.push, **how)

    def load(self, grant: Grant, blocks: range, name: str = "r") -> list[bool]:
        return self.rigs[1].load(self.rigs[1].load_job(name, grant, blocks))

    def holds(self, blocks: range, first: int = 0) -> bool:
        """Whether engine blocks have the bytes of the chain's blocks from `first` on."""
        pairs = [(block, first + at) for at, block in enumerate(blocks)]
        return all(rank.holds(*pair) for rank in self.rigs[1].ranks for pair in pairs)

    def brings(self, grant: Grant, blocks: range, name: str = "r") -> dict[str, float]:
        """Load the chain into engine blocks; return what the decode store has counted so far."""
        assert self.load(grant, blocks, name) == [False] * len(self.rigs[1].ranks)
        assert self.holds(blocks)
        eventually(lambda: not self.left())
        return self.numbers(1)

    def numbers(self, side: int) -> dict[str, float]:
        return numbers(self.stores[side].address)

    def left(self) -> dict[str, float]:
        """What is still held on either side for a hand-over."""
        hand_over = ("bytes{held}", "open{fetches}", "open{jobs}")
        names = ["kvstore_leases", *(f"kvstore_hand_over_{name}" for name in hand_over)]
        found = [(side, name, self.numbers(side).get(name)) for side in (0, 1) for name in names]
        return {f"{side} {name}": value for side, name, value in found if value}


@contextmanager
def nodes(
    folder: Path,
    ranks: tuple[int, int] = (1, 1),
    more: str = "",
    engine: str = PATIENT,
    *,
    serving: bool = False,
    per: int = 1,
    push: bool = False,
    place: tuple[str, str] = ("cpu", "cpu"),
    stored: int = 0,
) -> Iterator[Nodes]:
    how = {"ranks": ranks, "more": more, "engine": engine, "serving": serving, "per": per}
    with ExitStack() as ends:
        yield Nodes(folder, ends, **how, push=push, place=place, stored=stored)  # type: ignore[arg-type]


ways = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])


@ways
def test_L1_direct_a_prompt_goes_from_the_peers_slots_into_engine_blocks(
    tmp_path: Path, *, push: bool
) -> None:
    with nodes(tmp_path, push=push, stored=6) as made:
        before = made.numbers(1)
        grant = made.ask()
        assert (grant.kept, grant.sources, len(grant.hits[0])) == (0, {"peer": 6}, 6)
        made.brings(grant, range(10, 16))
        assert made.rigs[1].ranks[0].untouched([*range(10), *range(16, 24)])
        eventually(lambda: not made.left())
        found = since(made.stores[1].address, before)
        assert found["kvstore_fetched_blocks{cpu}"] == 6
        moved = 6 * sum(cache.page_bytes for cache in made.rigs[1].ranks[0].caches.values())
        pushed = made.numbers(0).get("kvstore_hand_over_moved_bytes{pushed}", 0)
        assert found.get("kvstore_hand_over_moved_bytes{direct}", 0) == (0 if push else moved)
        assert pushed == (moved if push else 0)
        assert not found.get("kvstore_hand_over_moved_bytes{pulled}"), "not through its slots"
        assert not made.numbers(1).get("kvstore_stored_blocks{stored}"), (
            "its memory has none of them"
        )


@ways
@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2)])
def test_B13_direct_each_rank_gets_its_own_heads(
    tmp_path: Path, ranks: tuple[int, int], *, push: bool
) -> None:
    with nodes(tmp_path, ranks, push=push, stored=5) as made:
        made.brings(made.ask(), range(3, 8))


@ways
def test_B6_direct_only_what_the_decode_node_lacks_comes(tmp_path: Path, *, push: bool) -> None:
    with nodes(tmp_path, push=push, stored=6) as made:
        made.rigs[1].put(made.chain[:2], range(2))
        before = made.numbers(1)
        grant = made.ask()
        assert (grant.kept, grant.sources) == (2, {"peer": 4})
        made.brings(grant, range(10, 16))
        assert since(made.stores[1].address, before)["kvstore_fetched_blocks{cpu}"] == 4


@ways
def test_L1_direct_blocks_come_from_the_peers_disk(tmp_path: Path, *, push: bool) -> None:
    disk = '[nvme]\npath = "{folder}/kv"\ncapacity = "64MiB"\n'
    with nodes(tmp_path, more=disk, push=push, stored=6) as made:
        eventually(lambda: made.numbers(0).get("kvstore_tier_blocks{nvme,stored}") == 6)
        made.stores[0].stop()
        made.stores[0].__enter__()
        eventually(lambda: heard(made.rigs[0].client) and made.rigs[0].client.session)
        granted = made.ask()
        assert made.load(granted, range(6, 12)) == [False]
        assert made.holds(range(6, 12))
        assert made.numbers(1)["kvstore_fetched_blocks{nvme}"] == 6


def test_direct_what_NIXL_cannot_reach_goes_through_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU's memory, where NIXL was built without CUDA."""
    refused = []

    def refuse(agent: Agent, address: int, size: int, gpu: int | None) -> None:
        refused.append(weakref.ref(agent))
        raise MoveError(f"a test: {size} bytes at {address:#x} of {gpu}", "refused")

    monkeypatch.setattr(Agent, "register", refuse)
    with nodes(tmp_path, stored=3) as made:
        grant = made.ask()
        assert (grant.kept >= 3, grant.sources) == (True, {"peer": 3})
        found = made.brings(grant, range(4, 7))
        assert found["kvstore_hand_over_moved_bytes{pulled}"] > 0
        assert not found.get("kvstore_hand_over_moved_bytes{direct}")
        gc.collect()
        assert [agent() for agent in refused] == [None]


@ways
def test_B15_direct_an_agent_that_could_not_be_made_anew_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, push: bool
) -> None:
    def refuse(_agent: Agent, address: int, size: int, _gpu: int | None) -> None:
        raise MoveError(f"a test: {size} bytes at {address:#x}", "refused")

    with nodes(tmp_path, push=push, stored=3) as made:
        direct = made.rigs[1].ranks[0].half._copies.direct
        assert direct is not None
        with monkeypatch.context() as patch:
            patch.setattr(Agent, "register", refuse)
            direct._restart()
            assert not direct._agent.name
        made.brings(made.ask(), range(4, 7))


@pytest.mark.parametrize("how", ["dropped", "expired"])
def test_B9_B11_direct_an_answer_that_is_not_used_lets_the_peer_go(
    tmp_path: Path, how: str
) -> None:
    """At once, or with its lease; not only because nothing is heard."""
    lease = 'lease = "1s"\n' if how == "expired" else ""
    with nodes(tmp_path, engine=PATIENT + lease, stored=6) as made:
        client, watch = made.rigs[1].client, Watch()
        number = client.ask(p.Lookup(0, b"".join(made.chain), 32, peer=made.address, direct=True))
        assert number
        client.send_step()
        eventually(lambda: heard(client) and client.grant(number))
        assert made.left(), "the peer holds it"
        if how == "dropped":
            watch = Watch()
            client.drop(number)
            client.send_step()
        eventually(lambda: not made.left())
        assert watch.own_s() < STALL_NS / 2e9


@ways
def test_B16_direct_what_is_read_after_the_lease_is_not_used(tmp_path: Path, *, push: bool) -> None:
    """The prefill store has forgotten what it told: its blocks may be others' by now."""
    with nodes(tmp_path, push=push, stored=6) as made:
        grant = made.ask()
        store = psutil.Process(made.stores[0].pid)
        eventually(lambda: made.numbers(0).get("kvstore_hand_over_bytes{held}"))
        exporter = exporter_of(store)
        assert exporter is not None
        exporter.kill()
        eventually(lambda: exporter_of(store) not in {None, exporter})
        assert made.load(grant, range(1, 7)) == [True]
        eventually(lambda: not made.left())
        made.brings(made.ask(), range(7, 13), "again")


@ways
@pytest.mark.parametrize(
    "how", [signal.SIGSTOP, signal.SIGKILL], ids=["peers hangs", "own is gone"]
)
def test_O14_B15_direct_a_load_ends_though_a_store_does_nothing_more(
    tmp_path: Path, how: signal.Signals, *, push: bool
) -> None:
    with nodes(tmp_path, engine='promote = "2s"\n', push=push, stored=6) as made:
        grant, hangs = made.ask(), how is signal.SIGSTOP
        store = psutil.Process(made.stores[0 if hangs else 1].pid)
        store.send_signal(how)
        try:
            assert made.load(grant, range(1, 7)) == [True]
        finally:
            store.send_signal(signal.SIGCONT if hangs else how)
        if hangs:
            eventually(lambda: not made.left())


def test_B20_direct_a_push_that_hangs_ends_with_the_agent_and_the_next_one_goes_to_another(
    tmp_path: Path,
) -> None:
    """Engine blocks whose load has failed are others': nothing may come any more."""
    with nodes(tmp_path, engine='promote = "2s"\n', push=True, stored=6) as made:
        exporter = exporter_of(psutil.Process(made.stores[0].pid))
        assert exporter is not None
        exporter.send_signal(signal.SIGSTOP)
        assert made.load(made.ask(), range(1, 7)) == [True]
        rank = made.rigs[1].ranks[0]
        exporter.send_signal(signal.SIGCONT)
        eventually(lambda: not made.left())
        assert rank.untouched(range(1, 7))
        made.brings(made.ask(), range(7, 13), "again")
        assert rank.untouched(range(1, 7))


@pytest.mark.parametrize("side", ["reader", "target"])
def test_B20_direct_nothing_is_written_once_an_agent_has_ended(side: str) -> None:
    """Over TCP a read from a peer that hangs never ends by itself; nor does who writes to us.

    The reader has TCP only. Who writes may go any way, and the one that is written takes networks.
    """
    settings = {**os.environ, **ucx_settings("lo", "tcp,self" if side == "reader" else None)}
    command = [sys.executable, "-m", "tests.harness.direct_frozen", side]
    done = subprocess.run(
        command, env=settings, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "good" in done.stdout.splitlines()  # UCX prints there, too
