"""A store on a real unix socket, run in a thread, and clients that speak its protocol."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import pytest

from kvstore.config import Config, ConfigFile, parse
from kvstore.core.layout import RankGeometry
from kvstore.core.types import make_key
from kvstore.listener import listen
from kvstore.store.server import Server
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire.framing import from_u32, u32
from tests.harness import fakes
from tests.harness.patience import WAIT_S
from tiers.cpu import CpuExtent

M = TypeVar("M", bound=framing.Message)


def store_settings(folder: Path, **sections: object) -> Config:
    """A small store's settings; its socket is in a folder. sections: more of them, or others."""
    folder.mkdir(exist_ok=True)
    server = {"socket": str(folder / "kv.sock"), "metrics": ""}
    return parse({"cpu": {"capacity": "16MiB"}, "server": server, **sections})


class Reachable(Protocol):
    """A store that listens at a path."""

    @property
    def path(self) -> str: ...


class LiveStore:
    """Runs a Server until the block ends; seconds: how long its end took."""

    def __init__(self, config: Config, source: ConfigFile | None = None) -> None:
        at = config.server
        listener = listen(at.socket, at.mode, at.group)
        self.server = Server(config, listener, source=source)
        self.path = config.server.socket
        self.seconds = 0.0
        self._thread = threading.Thread(target=self.server.run, name="store")

    def __enter__(self) -> Self:
        self.server._listener.start()  # the thread does it as well, but who knows when
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        started = time.monotonic()
        self.server.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if not self.seconds:
            self.seconds = time.monotonic() - started
            self._close_memory()

    def _close_memory(self) -> None:
        """Close descriptors that a store leaves to the end of its process."""
        for namespace in self.server.store.namespaces.values():
            for mapping in namespace.extents.values():
                if isinstance(mapping.memory, CpuExtent):
                    os.close(mapping.memory.fd)


class Client:
    """One connection."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(path)
        self.fds: list[int] = []
        self.messages: list[framing.Message] = []
        self.closed = False
        self._decoder = framing.Decoder(p.ToEngine)

    def send(self, *messages: framing.Message) -> None:
        self.sock.sendall(b"".join(map(framing.encode, messages)))

    def read(self) -> None:
        """Wait for bytes and take in what they are."""
        data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 16)
        self.fds.extend(fds)
        self.closed = self.closed or not data
        self.messages.extend(self._decoder.feed(data))

    def take(self, kind: type[M]) -> M:
        """Wait for the next message of a kind; others are kept."""
        while True:
            for message in self.messages:
                if isinstance(message, kind):
                    self.messages.remove(message)
                    return message
            assert not self.closed, f"closed before {kind.__name__}; got {self.messages}"
            self.read()

    def read_to_end(self) -> None:
        while not self.closed:
            try:
                self.read()
            except ConnectionResetError:
                self.closed = True

    def close(self) -> None:
        self.sock.close()
        for descriptor in self.fds:
            os.close(descriptor)
        self.fds.clear()


def client(store: Reachable) -> closing[Client]:
    """Make a connection that is closed after the context."""
    return closing(Client(store.path))


class LiveEngine:
    """An engine of one rank that fills and reads slots itself; detached after the context."""

    def __init__(
        self,
        store: Reachable,
        name: str = "engine",
        page_bytes: int = 1 << 20,
        model: str = "model",
        geometry: RankGeometry | None = None,
        *,
        events: bool = False,
        direct: bool = False,
    ) -> None:
        """geometry: of a block of page_bytes in all. direct: its worker reads from peers."""
        geometry = geometry or fakes.geometry(model, page_bytes=page_bytes)
        self.worker, self.scheduler = Client(store.path), Client(store.path)
        who = p.VERSION, name, "worker", 0, 1
        self.worker.send(p.Hello(*who, geometry=geometry, direct=direct))
        self.scheduler.send(p.Hello(p.VERSION, name, "scheduler", 0, 1, 4, events=events))
        self.credits: list[int] = []
        self._unheard: list[p.Answers] = []  # that brought credits
        self._maps: list[tuple[p.Extent, mmap.mmap]] = []
        self._page_bytes, self.geometry = page_bytes, geometry
        self._asks = 0
        self.map_extent()
        self.active = self.scheduler.take(p.Welcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def map_extent(self) -> None:
        message, fd = self.worker.take(p.Extent), self.worker.fds.pop(0)
        self._maps.append((message, mmap.mmap(fd, message.bytes)))
        os.close(fd)
        self.worker.send(p.Mapped(message.extent))

    def _map_of(self, slot: int) -> tuple[p.Extent, mmap.mmap]:
        for extent, memory in self._maps:
            if extent.first <= slot < extent.first + extent.count:
                return extent, memory
        raise KeyError(slot)

    def _place(self, slot: int) -> tuple[mmap.mmap, int]:
        extent, memory = self._map_of(slot)
        return memory, (slot - extent.first) * extent.slot_bytes

    def generation(self, slot: int) -> int:
        extent, memory = self._map_of(slot)
        at = extent.generations_offset + 4 * (slot - extent.first)
        return int.from_bytes(memory[at : at + 4], sys.byteorder)

    def content(self, block: bytes) -> bytes:
        return (block * (self._page_bytes // len(block) + 1))[: self._page_bytes]

    def put(self, chain: Sequence[bytes], *, off_disk: bool = False) -> None:
        """Store a request's blocks; their bytes follow from their hashes."""
        for index, block in enumerate(chain):
            while not self.credits:
                answers = self.scheduler.take(p.Answers)
                self.credits.extend(from_u32(answers.credits))
                self._unheard.append(answers)
            slot = self.credits.pop(0)
            memory, at = self._place(slot)
            memory[at : at + self._page_bytes] = self.content(block)
            parent = make_key(chain[index - 1], 0) if index else b""
            keys = (make_key(block, 0),)
            slots, parents = u32([slot]), (parent,)
            self.worker.send(p.Stored(slots, keys, parents, True, 0.001, off_disk=off_disk))

    def hear(self) -> p.Answers:
        """Return the next message to the scheduler half, also one that brought credits before."""
        if self._unheard:
            return self._unheard.pop(0)
        answers = self.scheduler.take(p.Answers)
        self.credits.extend(from_u32(answers.credits))
        return answers

    def ask(self, chain: Sequence[bytes], **how: Any) -> p.Granted:  # noqa: ANN401 - of Lookup
        self._asks += 1
        lookup = p.Lookup(self._asks, b"".join(chain), len(chain[0]), **how)
        self.scheduler.send(p.Step((lookup,)))
        return self.answers([self._asks])[0]

    def answers(self, asks: Sequence[int]) -> list[p.Granted]:
        """Wait for the answers to some lookups, and return them in no order."""
        found: list[p.Granted] = []
        while len(found) < len(asks):
            answers = self.scheduler.take(p.Answers)
            self.credits.extend(from_u32(answers.credits))
            found += [granted for granted in answers.granted if granted.ask in asks]
        return found

    def read(self, granted: p.Granted) -> list[bytes]:
        """Return the bytes of the blocks in an answer once they are there, and end its lease."""
        found = self.load(granted, WAIT_S)
        expected = len(from_u32(granted.hits[0].slots)) if granted.lease else 0
        assert len(found) == expected, f"{len(found)} blocks came, {expected} were granted"
        return found

    def load(self, granted: p.Granted, within_s: float) -> list[bytes]:
        """Read as a worker does: up to the first block that fails, or is not there in time."""
        end_s = time.monotonic() + within_s
        found: list[bytes] = []
        damaged: list[int] = []
        hit = granted.hits[0] if granted.lease else p.Hit(b"", b"", b"")
        for slot, leased in zip(from_u32(hit.slots), from_u32(hit.generations), strict=True):
            while (leased - self.generation(slot)) & 0xFFFFFFFF == 1 and time.monotonic() < end_s:
                time.sleep(0.0003)
            if self.generation(slot) != leased:
                damaged = [slot] if (leased - self.generation(slot)) & 0xFFFFFFFF != 1 else []
                break
            memory, at = self._place(slot)
            found.append(memory[at : at + self._page_bytes])
            assert self.generation(slot) == leased, "a leased slot has changed"
        if granted.lease:
            done = p.Loaded(granted.lease, len(found) * self._page_bytes, 0.001, u32(damaged))
            self.worker.send(done)
        return found

    def close(self) -> None:
        with suppress(OSError):  # the store has gone
            self.worker.send(p.Detach(""))
        self.scheduler.close()
        self.worker.close()
        for _, memory in self._maps:
            memory.close()


def engine(store: Reachable, name: str = "engine", **how: Any) -> LiveEngine:  # noqa: ANN401 - of it
    return LiveEngine(store, name, **how)


def eventually(done: Callable[[], object]) -> None:
    """Wait until something holds; what takes long is looked at less often, as looking costs."""
    end, pause_s = time.monotonic() + WAIT_S, 0.002
    while not done():
        if time.monotonic() > end:
            pytest.fail("did not happen in time")
        time.sleep(pause_s)
        pause_s = min(0.02, 1.2 * pause_s)
