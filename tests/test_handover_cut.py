"""Two nodes in network namespaces of their own, and the cable between them is pulled.

Needs the right to make network namespaces (root); without it nothing is shown, and it says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from kvstore.handover.cluster_key import ClusterKey
from tests.harness.fakes import hashes
from tests.harness.handover_nodes import Node, nothing_left, signal_now, started
from tests.test_handover_faults import NOTICED_S, computed, let_go, under_way

pytestmark = pytest.mark.slow

HOSTS = ("10.213.7.1", "10.213.7.2")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)  # noqa: S607
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Cable:
    """Two namespaces and a pair of virtual devices."""

    def __init__(self) -> None:
        self.names = [f"kvs{os.getpid()}{end}" for end in "ab"]

    def lay(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        one, other = self.names
        ip("link", "add", "eth0", "netns", one, "type", "veth", "peer", "eth0", "netns", other)
        for name, host in zip(self.names, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")

    def pull(self) -> None:
        ip("-n", self.names[0], "link", "set", "eth0", "down")

    def plug(self) -> None:
        ip("-n", self.names[0], "link", "set", "eth0", "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)  # noqa: S607


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    made = Cable()
    try:
        made.lay()
    except OSError as exc:
        made.remove()
        pytest.skip(f"no network namespaces here: {exc}")
    yield made
    made.remove()


@pytest.fixture(scope="module")
def nodes(cable: Cable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    folder = tmp_path_factory.mktemp("cut")
    ClusterKey.make(folder / "key")
    made = []
    for name, host in zip(cable.names, HOSTS, strict=True):
        made.append(
            Node(
                folder / name,
                host=host,
                settings=f'key = "{folder}/key"\ndevices = "eth0"\n',
                environment={"KVSTORE_TEST_NETNS": name, "UCX_TLS": "tcp,self"},
            )
        )
    with started(*made):
        yield made[0], made[1]


def test_over_tcp_blocks_are_pushed_unless_somebody_says_otherwise(
    nodes: tuple[Node, Node],
) -> None:
    prefill, decode = nodes
    for push, mover, name in ((None, prefill, "pushed"), (False, decode, "pulled")):
        before = mover.gauge(f"moved_bytes{{{name}}}") or 0
        decode.get_all(computed(prefill, f"auto {push}", 3), prefill.address, push=push)
        assert (mover.gauge(f"moved_bytes{{{name}}}") or 0) - before == 3 << 20


@pytest.mark.parametrize(
    ("when", "push"),
    [
        ("during", True),
        *(
            pytest.param(when, push, marks=pytest.mark.long)
            for when, push in (("during", False), ("before", False), ("before", True))
        ),
    ],
)
def test_B15_P4_a_cable_that_is_pulled_and_plugged_in_again(
    nodes: tuple[Node, Node], cable: Cable, when: str, push: bool
) -> None:
    """Nobody is told: only time says so. Healed, blocks come again by themselves."""
    prefill, decode = nodes
    decode.get_all(computed(prefill, f"whole {when} {push}", 3), prefill.address, push=push)
    chain = computed(prefill, f"cut {when} {push}")
    with nothing_left(prefill, decode):
        if when == "during":
            granted, exporter = under_way(nodes, chain, push=push)
            cable.pull()
            signal_now(exporter, signal.SIGCONT)
            assert decode.engine.load(granted, 1.0) == []
        else:
            cable.pull()
            assert decode.get(chain, prefill.address, push=push) == 0
        mine = hashes(3, f"mine {when} {push}")
        decode.engine.put(mine)
        assert decode.get(mine) == len(mine), "its own blocks are served"
        time.sleep(4)  # beyond all leases and deadlines
        assert decode.gauge("open{fetches}") == 0
        prefill.wait(lambda: not prefill.held(), NOTICED_S)
        cable.plug()
        decode.get_all(chain, prefill.address, push=push)
        let_go(nodes)
