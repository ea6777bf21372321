"""`tests.bench service`: many engines on one store, against a bare echo server.

Each client is a process with an engine's connections. It asks for the blocks of a prompt that the
store has, and gives the last answer back, as an engine's step does. The echo server is one process
with one loop on a socket of the same kind; its messages have the same sizes.

lookups     of all clients together, one after the other in each
step_p50, step_p99   from question to answer, when every client asks once in STEP_S
scrape      processor time of the store for a scrape of its metrics, of all that it uses meanwhile
"""

from __future__ import annotations

import multiprocessing
import random
import select
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import msgspec

from kvstore.core.errors import KVStoreError
from kvstore.wire import engine as p
from kvstore.wire import framing
from tests.bench.clock import Clock
from tests.bench.report import Result, compared, percentile, progress
from tests.bench.store import StoreProcess
from tests.harness.fakes import hashes
from tests.harness.live import LiveEngine

CLIENTS = (1, 4, 16)
BLOCKS = 64  # of a prompt: 1,024 tokens in blocks of 16
PAGE_BYTES = 4096
STEP_S = 0.03
ROUND_S = 2.0
ROUNDS = 5
SCRAPES = 50
_MODES = ("lookups", "steps")


class _Place(msgspec.Struct, frozen=True):
    """Where a store listens."""

    path: str


class _System(Protocol):
    def step(self) -> None:
        """Ask, and wait for the answer."""
        ...


class _Ours:
    """An engine of a store, which has a prompt's blocks there."""

    def __init__(self, path: str, number: int) -> None:
        self._engine = LiveEngine(_Place(path), f"engine {number}", PAGE_BYTES, "bench")
        self._chain = hashes(BLOCKS, f"prompt {number}")
        self._engine.put(self._chain)
        self._packed, self._width = b"".join(self._chain), len(self._chain[0])
        self._asks = 1_000_000
        self._release: tuple[int, ...] = ()
        deadline_s = time.monotonic() + 10
        while not self._found():
            if time.monotonic() > deadline_s:
                raise KVStoreError("a prompt was not stored within 10 s")

    def _found(self) -> bool:
        self.step()
        return self._blocks == BLOCKS

    def step(self) -> None:
        self._asks += 1
        lookup = p.Lookup(self._asks, self._packed, self._width)
        self._engine.scheduler.send(p.Step((lookup,), release=self._release))
        (granted,) = self._engine.answers([self._asks])
        self._release = (granted.lease,) if granted.lease else ()
        self._blocks = len(granted.hits[0].slots) // framing.WORD if granted.lease else 0

    @staticmethod
    def sizes() -> tuple[int, int]:
        """Return the bytes of a question and of its answer."""
        packed = b"".join(hashes(BLOCKS, "prompt 1"))
        question = p.Step((p.Lookup(1_000_001, packed, len(packed) // BLOCKS),), release=(1_000,))
        words = bytes(framing.WORD * BLOCKS)
        granted = p.Granted(1_000_001, 1_000, 30_000, (p.Hit(words, words, words),))
        return len(framing.encode(question)), len(framing.encode(p.Answers(granted=(granted,))))


class _Bare:
    """A client of the echo server."""

    def __init__(self, path: str, request_bytes: int, reply_bytes: int) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(path)
        self._request, self._reply_bytes = bytes(request_bytes), reply_bytes

    def step(self) -> None:
        self._sock.sendall(self._request)
        left = self._reply_bytes
        while left:
            data = self._sock.recv(left)
            if not data:
                raise KVStoreError("the echo server has ended")
            left -= len(data)


def _serve(listener: socket.socket, request_bytes: int, reply_bytes: int) -> None:
    """Answer each request_bytes of every client with reply_bytes, on one thread with one epoll."""
    reply = bytes(reply_bytes)
    epoll, clients, came = select.epoll(), dict[int, socket.socket](), dict[int, int]()
    epoll.register(listener, select.EPOLLIN)
    while True:
        for fd, _ in epoll.poll():
            if fd == listener.fileno():
                sock, _ = listener.accept()
                clients[sock.fileno()], came[sock.fileno()] = sock, 0
                epoll.register(sock, select.EPOLLIN)
                continue
            data = clients[fd].recv(1 << 16)
            came[fd] += len(data)
            if not data:
                clients.pop(fd).close()
            while came.get(fd, 0) >= request_bytes:
                came[fd] -= request_bytes
                clients[fd].sendall(reply)


def _client(pipe: Connection, number: int, ours: str, bare: str) -> None:
    """Do what the parent says: a system's name and a mode; answer with seconds of each step."""
    systems: dict[str, _System] = {
        "ours": _Ours(ours, number),
        "echo": _Bare(bare, *_Ours.sizes()),
    }
    rng = random.Random(number)
    pipe.send([])
    while True:
        try:
            name, mode = pipe.recv()
        except EOFError:
            return
        step, found = systems[name].step, list[float]()
        end_s = time.perf_counter() + ROUND_S
        if mode == "steps":  # engines' steps are not in time with one another
            time.sleep(rng.random() * STEP_S)
        while (began_s := time.perf_counter()) < end_s:
            step()
            found.append(time.perf_counter() - began_s)
            if mode == "steps":
                time.sleep(STEP_S * (0.5 + rng.random()))
        pipe.send(found)


@contextmanager
def _clients(count: int, ours: str, bare: str) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for number in range(count):
        mine, theirs = context.Pipe()
        with theirs:
            child = context.Process(target=_client, args=(theirs, number, ours, bare), daemon=True)
            child.start()
        pipes.append(mine)
        children.append(child)
    try:
        for pipe in pipes:
            pipe.recv()
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for child in children:
            child.join(10)
            child.kill()


def _round(pipes: Sequence[Connection], system: str, mode: str) -> list[float]:
    for pipe in pipes:
        pipe.send((system, mode))
    return [seconds for pipe in pipes for seconds in pipe.recv()]


@contextmanager
def _echo(path: Path) -> Iterator[str]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=_serve, args=(listener, *_Ours.sizes()), daemon=True)
        child.start()
        try:
            yield str(path)
        finally:
            child.kill()
            child.join()


def run(pairs: int | None) -> list[Result]:
    """Measure everything; pairs: rounds of each number of clients."""
    rounds = pairs or ROUNDS
    results: list[Result] = []
    with progress(len(CLIENTS) * rounds) as tell, ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-")))
        store = ends.enter_context(StoreProcess(folder, "256MiB"))
        bare = ends.enter_context(_echo(folder / "echo.sock"))
        for count in CLIENTS:
            with _clients(count, store.path, bare) as pipes:
                tell(f"{count} clients", 0)
                found: dict[tuple[str, str], list[list[float]]] = {}
                for _ in range(rounds):
                    for mode in _MODES:
                        for system in ("ours", "echo"):
                            seconds = _round(pipes, system, mode)
                            found.setdefault((system, mode), []).append(seconds)
                    tell(f"{count} clients")
                if count == CLIENTS[-1]:
                    results.append(_scrape(store, pipes))
            results += _results(count, found)
    return results


def _results(count: int, found: dict[tuple[str, str], list[list[float]]]) -> Iterator[Result]:
    parameters = {"clients": count, "blocks": BLOCKS, "step_ms": STEP_S * 1e3}
    rates = {
        system: [len(steps) / ROUND_S for steps in found[system, "lookups"]]
        for system in ("ours", "echo")
    }
    value, other = (statistics.median(rates[system]) for system in ("ours", "echo"))
    yield Result("lookups", value, "per s", reference=other, parameters=parameters)
    for name, share in (("step_p50", 0.5), ("step_p99", 0.99)):
        ours, echo = (
            [percentile(steps, share) for steps in found[system, "steps"]]
            for system in ("ours", "echo")
        )
        yield compared(name, ours, echo, "ms", "echo", parameters)


def _scrape(store: StoreProcess, pipes: Sequence[Connection]) -> Result:
    """Return the processor time of a scrape, and its share of what a loaded store uses."""
    clock = Clock(store.pid)
    before_us, began_s = clock.now_us(), time.monotonic()
    _round(pipes, "ours", "steps")
    loaded = (clock.now_us() - before_us) / 1e6 / (time.monotonic() - began_s)
    before_us = clock.now_us()
    for _ in range(SCRAPES):
        store.metrics()
    took_ms = (clock.now_us() - before_us) / 1e3 / SCRAPES
    every_s = 15.0
    share = round(took_ms / 1e3 / every_s / loaded, 4)
    parameters = {"clients": len(pipes), "every_s": every_s, "of_store": share}
    return Result("scrape", took_ms, "ms", parameters=parameters)
