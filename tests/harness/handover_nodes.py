"""Stores of several nodes as processes, with their exporters, and scripted engines between them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from kvstore.metrics import HAND_OVERS
from kvstore.wire import engine as p
from tests.bench.steal import Watch
from tests.bench.store import StoreProcess, free_port, numbers
from tests.harness.live import LiveEngine
from tests.harness.patience import WAIT_S

PROMOTE_S = 1.0  # most that an engine waits for blocks
SLACK_S = 3.0  # of a machine that does other things, too
CAPACITY = "64MiB"  # 63 blocks of 1 MiB
LANDING = "16MiB"
CREDITS = 4  # slots that an engine of tests.harness.live has in advance
FILES_SPARE = 16  # descriptors that come and go: of queries, and an exporter's for a peer it meets


class Node:
    """A store that others hand over to, and an engine."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        settings: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """settings: more lines of [peer]. environment: added to ours; see serve_brief."""
        folder.mkdir()
        self.address = f"{host}:{free_port()}"
        self.store = StoreProcess(
            folder,
            CAPACITY,
            f'extent = "{CAPACITY}"\npolicy = "lru"\n'
            f'[engine]\npromote = "{PROMOTE_S}s"\nleased = "100%"\n'
            f'[peer]\nlisten = "{self.address}"\nlanding = "{LANDING}"\n{settings}',
            module="tests.harness.serve_brief",
            scraped=False,
            environment=environment,
        )
        self.path = self.store.path
        self._engine: LiveEngine | None = None

    # Its processes

    def start(self) -> None:
        self.store.__enter__()
        self.wait(lambda: self.numbers().get("exporter_up"))  # peers wait for it only so long
        self._engine = LiveEngine(self)

    def stop(self) -> None:
        self.leave()
        self.store.stop()

    def leave(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @property
    def engine(self) -> LiveEngine:
        assert self._engine is not None, "not started"
        return self._engine

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.store.pid)

    @property
    def exporter(self) -> psutil.Process | None:
        """The exporter's process, if it is there."""
        return exporter_of(self.process)

    def kill(self) -> None:
        """End the store at once, and all that it had."""
        exporter = self.exporter
        self.process.kill()
        self.wait(lambda: exporter is None or gone(exporter))
        self.leave()
        self.store.stop()

    def revive(self) -> None:
        """Start what was killed, continue what was stopped."""
        with contextlib.suppress(Exception):
            self.freeze(go_on=True)
        if self._engine is None:
            self.store.stop()
            self.start()

    def freeze(self, *, store: bool = True, exporter: bool = True, go_on: bool = False) -> None:
        """Stop processes, or have them go on."""
        child = self.exporter if exporter else None
        chosen = [self.process] if store else []
        chosen += [] if child is None else [child]
        for process in reversed(chosen) if go_on else chosen:
            process.send_signal(signal.SIGCONT if go_on else signal.SIGSTOP)
        for process in () if go_on else chosen:
            self.wait(lambda: process.status() == psutil.STATUS_STOPPED)  # noqa: B023

    # What it says of itself

    def numbers(self) -> dict[str, float]:
        """Its numbers, by the part of the name behind `kvstore_`, with labels."""
        found = numbers(self.store.address)
        return {name.removeprefix("kvstore_"): value for name, value in found.items()}

    def gauge(self, name: str) -> float | None:
        """One of a hand-over's numbers: its name behind `kvstore_hand_over_`."""
        return self.numbers().get(f"hand_over_{name}")

    def event(self, name: str) -> float:
        metric = next(metric for metric, events in HAND_OVERS.items() if name in events)
        return self.numbers().get(f"{metric.removeprefix('kvstore_')}{{{name}}}") or 0

    def held(self) -> dict[str, float]:
        """All that is held for hand-overs, or that an engine's answers pin."""
        names = (
            *("hand_over_bytes{held}", "hand_over_bytes{landing}", "hand_over_bytes{quarantined}"),
            *("hand_over_open{fetches}", "hand_over_open{jobs}", "hand_over_open{requests}"),
            *("leases", "jobs_open"),
        )
        found = self.numbers()
        left = {name: found[name] for name in names if found.get(name)}
        granted = found.get("slots{granted}", 0)
        return left | ({"slots{granted}": granted} if granted > CREDITS else {})

    def files(self) -> list[int]:
        """Open descriptors of its processes."""
        child = self.exporter
        return [self.process.num_fds(), 0 if child is None else child.num_fds()]

    def wait(self, happened: Callable[[], object], limit_s: float = WAIT_S) -> float:
        """Wait until something holds; returns the seconds, those that were stolen left out."""
        watch = Watch()
        while not happened():
            assert watch.own_s() < limit_s, f"not within {limit_s} s: {self.numbers()}"
            time.sleep(0.01)
        return watch.own_s()

    # What its engine does

    def get(self, chain: list[bytes], peer: str = "", **how: object) -> int:
        """Ask for a chain's blocks and read them, in time; how many came, all of them right."""
        watch = Watch()
        granted = self.engine.ask(chain, peer=peer, **how)
        found = self.engine.load(granted, PROMOTE_S)
        took = watch.own_s()
        assert took < 2 * PROMOTE_S + SLACK_S, f"a request waited for {took:.1f} s"
        assert found == [self.engine.content(block) for block in chain[: len(found)]], "wrong bytes"
        return len(found)

    def get_all(self, chain: list[bytes], peer: str = "", **how: object) -> None:
        """Have all blocks come, after as many requests as it takes."""
        watch = Watch()
        while self.get(chain, peer, **how) < len(chain):
            assert watch.own_s() < WAIT_S, f"never all of them: {self.numbers()}"
            time.sleep(0.05)


def exporter_of(store: psutil.Process) -> psutil.Process | None:
    """The exporter's process of a store, if it is there."""
    found = [child for child in store.children(recursive=True) if _exports(child)]
    assert len(found) <= 1, "two exporters"
    return found[0] if found else None


def _exports(process: psutil.Process) -> bool:
    try:
        return "tiers.nixl.exporter" in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def started(*nodes: Node) -> Iterator[None]:
    """Start nodes, and stop them in the end, frozen ones too."""
    try:
        for node in nodes:
            node.start()
        yield
    finally:
        for node in nodes:
            with contextlib.suppress(Exception):
                node.freeze(go_on=True)
            node.stop()


@contextlib.contextmanager
def nothing_left(*nodes: Node, within_s: float = 20.0) -> Iterator[None]:
    """Whatever happens, in the end nodes hold nothing for it, and have no more descriptors."""
    for node in nodes:
        node.wait(lambda: node.exporter, within_s)  # noqa: B023 - asked at once; it may be starting
    before = [node.files() for node in nodes]
    yield
    for node, files in zip(nodes, before, strict=True):
        node.wait(lambda: not node.held(), within_s)  # noqa: B023 - asked at once
        node.wait(lambda: node.exporter, within_s)  # noqa: B023 - it may be starting again
        limits = [count + FILES_SPARE for count in files]
        node.wait(  # a connection that is not used is closed a little later
            lambda: all(a <= b for a, b in zip(node.files(), limits, strict=True)),  # noqa: B023
            within_s,
        )
        assert "Traceback" not in node.store.log_path.read_text(errors="replace")


def signal_now(process: psutil.Process | None, number: signal.Signals) -> None:
    assert process is not None
    os.kill(process.pid, number)


def release(engine: LiveEngine, ask: int) -> None:
    """The request of a lookup is aborted."""
    engine.scheduler.send(p.Step(release=(ask,)))
