"""Fetch blocks from a store without an engine: to look at a hand-over, and for tools.

    with Puller("10.0.0.5:9500", namespace, ClusterKey.read(path)) as peer:
        for block in peer.pull(peer.held("cmpl-1")):
            print(block.key.hex(), block.tier, block.problem or len(block.data))

It is a consumer as a store is one: the same messages, exporter process, landing slots, checksums
and leases. Only its slots are other: a few that the caller reads and that are used again. What is
pulled stays where it is, and stays held for whom it was handed over to.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import time
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from kvstore.errors import ConfigError, KVStoreError, PeerError
from kvstore.export import messages as m
from kvstore.export.consumer import Consumer
from kvstore.layout import SlotLayout
from kvstore.metrics import Numbers
from kvstore.plugins import find_class
from kvstore.protocol import Message, u32
from kvstore.service.channel import Channel, ClusterKey
from kvstore.service.namespace import Namespace
from kvstore.service.peers import Peers
from kvstore.service.server import PEER_MOVER
from kvstore.types import (
    BlockKey,
    GroupRule,
    JobId,
    JobKind,
    JobResult,
    Slot,
    TransferJob,
    make_key,
)

ANSWER_S = 10.0  # a store that has just started has no exporter for a second or two
START_S = 30.0  # of our exporter, on a machine that does other things, too
WINDOW = 16  # blocks under way
FETCH_BLOCKS = 4096  # of one question
HASH_BYTES = 32
DIGEST_DIGITS = 64
_KEY_BYTES = HASH_BYTES + 2
_LOOK_S = 0.01
_LINGER_S = 0.05  # for the last message to leave

ABSENT = "not there"
CORRUPT = "its checksum is wrong"
LOST = "did not arrive"


class Pulled(msgspec.Struct, frozen=True):
    """One block that was asked for.

    key: hash, then group as u16, then scope. tier: where the peer had it ("cpu", "nvme", or
    "prefill" while an engine computed it), None when it has it nowhere. data: `block_bytes` bytes
    whose checksum is right, of a slot's layout; None with a problem. seconds: from asking for the
    bytes until they were checked here; blocks that are under way together share that time.
    """

    key: bytes
    tier: str | None = None
    data: bytes | None = None
    seconds: float = 0.0
    problem: str = ""


class Puller:
    """One store and one of its namespaces. Use it as a context; one thread."""

    def __init__(
        self, peer: str, namespace: str, key: ClusterKey | None = None, *, devices: str = "lo"
    ) -> None:
        """peer: host:port of the store's side channel. namespace: digest, 64 hexadecimal digits.

        key: the cluster key, None where that store has none. devices: as in `[peer]`.
        Raises ConfigError for a namespace that cannot be one.
        """
        if len(namespace) != DIGEST_DIGITS or set(namespace) - set("0123456789abcdef"):
            raise ConfigError(
                f"namespace {namespace!r}: expected {DIGEST_DIGITS} hexadecimal digits, as"
                " kvstore keys shows them on the peer's node"
            )
        self.peer = peer
        self.namespace = namespace
        self.block_bytes = 0  # of each block; known inside the context, as is groups
        self.groups = 0
        self._key = key
        self._devices = devices
        self._bench: _Bench | None = None
        self._peers: Peers | None = None

    def __enter__(self) -> Self:
        """Meet the peer, and start an exporter. Raises PeerError, saying what can be done."""
        traits = dict(self._talk()[0].traits)
        try:
            self.block_bytes, self.groups = (
                int(traits["slot bytes"]),
                len(traits["groups"].split(",")),
            )
        except (KeyError, ValueError) as exc:
            raise PeerError(f"{self.peer} does not say how large its blocks are") from exc
        rules = (GroupRule(),) * self.groups
        layout = SlotLayout(self.namespace, self.block_bytes, rules, (), traits)
        self._bench = _Bench(layout)
        name = f"kvstore-pull-{secrets.token_hex(4)}"
        mover = find_class(PEER_MOVER)(name, self._devices, WINDOW * self.block_bytes)
        self._peers = Peers(self._key, mover, held_bytes_max=0)
        self._peers.serve({self.namespace: self._bench}, Numbers())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the exporter, and free all memory."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def held(self, request: str) -> list[bytes]:
        """Return the keys of the blocks that the peer holds for a request it handed over.

        request: its id on the engine that computed it, `remote_request_id` of the parameters.
        Raises PeerError for one that still runs or is not known.
        """
        found = self._talk(m.Locate(request))[1]
        if found is None or found.state == "unknown":
            raise PeerError(
                f"{self.peer} holds nothing for request {request!r}: it was not handed over, its"
                " blocks were fetched, or its lease is over"
            )
        if found.state == "running":
            raise PeerError(f"request {request!r} still runs there: ask again when it has ended")
        return list(found.keys)

    def keys_of(self, block: bytes) -> list[bytes]:
        """Return the keys that a block hash (32 bytes) stands for, one in each group.

        A whole key stays what it is. Raises ConfigError for what is neither.
        """
        if len(block) == HASH_BYTES:
            return [make_key(block, group) for group in range(self.groups)]
        if len(block) < _KEY_BYTES or self._group(block) >= self.groups:
            raise ConfigError(
                f"block {block.hex()}: expected {HASH_BYTES} bytes of hash, or these with a group"
                f" below {self.groups} as two bytes, and a scope if it has one"
            )
        return [block]

    def pull(self, keys: Iterable[bytes]) -> Generator[Pulled, None, None]:
        """Fetch blocks, and yield each once, as they come.

        Raises PeerError when the peer is lost or does not answer; what came before was yielded.
        """
        scopes: dict[bytes, dict[bytes, None]] = defaultdict(dict)
        for key in keys:
            for whole in self.keys_of(key):
                scopes[whole[_KEY_BYTES:]][whole] = None
        for scope, found in scopes.items():
            named = list(found)
            for first in range(0, len(named), FETCH_BLOCKS):
                yield from self._fetch(named[first : first + FETCH_BLOCKS], scope)

    # Talking

    def _talk(self, question: m.Locate | None = None) -> tuple[m.Welcome, m.Located | None]:
        """Say Hello on a connection of its own, and ask one thing there."""
        got: deque[Message] = deque()
        lost: list[str] = []
        channel = Channel(
            self._key,
            lambda _number, message: got.append(message),
            lambda _number, reason: lost.append(reason),
        )
        with contextlib.closing(channel):
            number = channel.connect(self.peer)
            channel.send(number, m.Hello(m.VERSION, self.namespace, {}))
            welcome = self._answer(channel, got, lost)
            if not isinstance(welcome, m.Welcome):
                raise PeerError(f"{self.peer}: {type(welcome).__name__} instead of Welcome")
            if question is None:
                return welcome, None
            channel.send(number, question)
            found = self._answer(channel, got, lost)
            if not isinstance(found, m.Located):
                raise PeerError(f"{self.peer}: {type(found).__name__} instead of Located")
            return welcome, found

    def _answer(self, channel: Channel, got: deque[Message], lost: Sequence[str]) -> Message:
        end_s = time.monotonic() + ANSWER_S
        while not got or isinstance(got[0], m.Starting):
            if got:
                got.popleft()  # Welcome comes later
            if lost:
                raise PeerError(_why(self.peer, lost[0]))
            if time.monotonic() > end_s:
                raise PeerError(
                    f"{self.peer} does not answer: is it the address of a store's side channel?"
                )
            select.select(list(channel.fds()), [], [], _LOOK_S)
            channel.poll(time.monotonic_ns())
        message = got.popleft()
        if isinstance(message, m.Refused):
            raise PeerError(
                f"{self.peer} refuses: {message.reason};"
                " kvstore keys lists what a store has, on its node"
            )
        return message

    # Fetching

    @staticmethod
    def _group(key: bytes) -> int:
        return int.from_bytes(key[HASH_BYTES:_KEY_BYTES], "big")

    def _fetch(self, keys: Sequence[bytes], scope: bytes) -> Iterator[Pulled]:
        """Fetch blocks of one scope, in the order in which the peer will have them ready."""
        peers, bench = self._peers, self._bench
        if peers is None or bench is None:
            raise KVStoreError("a Puller is used inside its context")
        hashes = {key[:HASH_BYTES]: None for key in keys}
        places = {block: index for index, block in enumerate(hashes)}
        named = sorted((self._group(key), places[key[:HASH_BYTES]], key) for key in keys)
        indices = [
            u32([index for group, index, _ in named if group == mine])
            for mine in range(self.groups)
        ]
        consumer = peers.inlet(bench)
        want = m.Want(0, b"".join(hashes), HASH_BYTES, tuple(indices), scope)
        number, offered = self._offered(peers, bench, want)
        order = sorted(offered, key=lambda position: named[position][1::-1])
        wanted = deque((named[position][2], offered[position]) for position in order)
        try:
            for position, (_, _, key) in enumerate(named):
                if position not in offered:
                    yield Pulled(key, problem=ABSENT)
            yield from self._load(peers, bench, consumer, wanted)
        finally:
            consumer.claimed(number)
            self._linger(peers)

    def _offered(self, peers: Peers, bench: _Bench, want: m.Want) -> tuple[int, dict[int, str]]:
        """Ask until the peer says what it has: a store has less time than we have."""
        consumer, end_s = peers.inlet(bench), time.monotonic() + START_S
        while True:
            troubles = _troubles(consumer)
            number = peers.fetch(bench, self.peer, want, time.monotonic_ns())
            while number is not None and (offered := consumer.offered(number)) is None:
                self._turn(peers)
            if number is not None and _troubles(consumer) == troubles:
                return number, offered or {}
            if time.monotonic() > end_s:
                raise PeerError(
                    f"{self.peer} does not answer any more, or our exporter does not start:"
                    " does that store run, and does the log say more?"
                )

    def _load(
        self, peers: Peers, bench: _Bench, consumer: Consumer, wanted: deque[tuple[bytes, str]]
    ) -> Iterator[Pulled]:
        """Load blocks through the bench's slots; each is a job of its own, and has its own end."""
        under_way: dict[JobId, _Load] = {}
        free = [Slot(number) for number in range(WINDOW)]
        try:
            while wanted or under_way:
                while wanted and free:
                    (key, tier), slot = wanted.popleft(), free.pop()
                    job = TransferJob(bench.number(), JobKind.LOAD, (BlockKey(key),), (slot,))
                    under_way[job.job_id] = _Load(key, tier, slot, time.monotonic())
                    consumer.submit(job)
                ended = [
                    self._ended(bench, consumer, result, under_way.pop(result.job_id))
                    for result in consumer.poll()
                ]
                for slot, block in ended:
                    free.append(slot)
                    yield block
                if not ended:
                    self._turn(peers)
        finally:
            if under_way:  # the caller has had enough; until its end a copy may fill a slot
                consumer.clear()
            while under_way:
                for result in consumer.poll():
                    under_way.pop(result.job_id)
                self._turn(peers)

    @staticmethod
    def _ended(
        bench: _Bench, consumer: Consumer, result: JobResult, load: _Load
    ) -> tuple[Slot, Pulled]:
        """Return the slot of a load that has ended, and what it held."""
        seconds = time.monotonic() - load.since_s
        if result.done:
            return load.slot, Pulled(load.key, load.tier, bytes(bench.view(load.slot)), seconds)
        corrupt = consumer.counts["corrupt"] > bench.corrupt
        bench.corrupt += corrupt
        return load.slot, Pulled(load.key, load.tier, None, seconds, CORRUPT if corrupt else LOST)

    @staticmethod
    def _turn(peers: Peers) -> None:
        wait_s = peers.wait_s(time.monotonic_ns())
        select.select(list(peers.fds()), [], [], _LOOK_S if wait_s is None else wait_s)
        peers.poll(time.monotonic_ns())

    def _linger(self, peers: Peers) -> None:
        """Let the peer hear that nothing more is wanted, or it holds blocks until a lease ends."""
        end_s = time.monotonic() + _LINGER_S
        while time.monotonic() < end_s:
            self._turn(peers)


def pull(
    peer: str,
    namespace: str,
    keys: Iterable[bytes] = (),
    request: str | None = None,
    key: ClusterKey | None = None,
) -> list[Pulled]:
    """Fetch blocks from a store, by their keys and those held for a request; see Puller."""
    with Puller(peer, namespace, key) as puller:
        held = [] if request is None else puller.held(request)
        return list(puller.pull([*keys, *held]))


class _Load(NamedTuple):
    """One block under way."""

    key: bytes
    tier: str
    slot: Slot
    since_s: float


class _Bench(Namespace):
    """A namespace that has nothing but slots to lay blocks down in."""

    def __init__(self, layout: SlotLayout) -> None:
        super().__init__(layout, lambda *_: ())
        self.corrupt = 0  # blocks of the consumer's count that were told
        self._slots = memoryview(bytearray(WINDOW * layout.slot_bytes))
        self._jobs = 0

    def view(self, slot: Slot) -> memoryview:
        """Return a slot's bytes."""
        size = self.layout.slot_bytes
        return self._slots[slot * size : (slot + 1) * size]

    def number(self) -> JobId:
        """Return a number that no job had yet."""
        self._jobs += 1
        return JobId(self._jobs)


def _troubles(consumer: Consumer) -> int:
    return sum(consumer.counts[event] for event in ("late", "ended", "lost", "exporter"))


def _why(peer: str, reason: str) -> str:
    """Say in words what the transport noticed."""
    if any(word in reason for word in ("refused", "timed out", "unreachable", "no route")):
        return (
            f"nobody listens at {peer}: does that store run, does its [peer] listen there, and"
            " may this machine reach it?"
        )
    if "closed" in reason or "disconnected" in reason:
        return (
            f"{peer} ends the connection: both sides need the same cluster key, or none;"
            " give the file that [peer] key names there"
        )
    return f"{peer}: {reason}"
