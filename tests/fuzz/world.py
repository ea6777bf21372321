"""A world of wrong messages: at the side channel, at a consumer, and at the local socket."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

import msgspec
import psutil

from kvstore.core.layout import PageRun, RankPages
from kvstore.core.types import make_key
from kvstore.handover import links, side_channel, transfers
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.fuzz.inputs import Mutator
from tests.fuzz.site import End, Good, Net, Site
from tests.harness import bugs
from tests.harness.fakes import geometry, hashes, u32

CONNECTIONS = 4  # of each kind at one time
GOOD_EVERY = 250  # messages between two hand-overs of the good client
TURN_EVERY = 20
MODELS = 6  # that engines attach with
KINDS = (*get_args(m.ToProducer), *get_args(m.ToConsumer), *get_args(p.ToStore))
MIB = 1 << 20


class Failed(AssertionError):
    """What an input broke; the message says how to see it again."""


class World:
    """Messages from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.net = Net(self.rng)
        self.prefill, self.decode = Site(self.net, "prefill"), Site(self.net, "decode")
        self.net.places["evil:1"] = self._evil
        self.good = Good(self.prefill, self.decode)
        self.mutate = Mutator(self.rng)
        self.counts: Counter[str] = Counter()
        self.sent = 0
        self._peers: list[Callable[[bytes], None]] = []  # connections to the prefill store
        self._evils: list[tuple[End, list[m.Want]]] = []  # those that the decode store made to us
        self._locals: list[tuple[Site, int]] = []
        self._recorded: list[bytes] = []
        self._rss = 0
        self._targets = (self._to_producer, self._to_consumer, self._to_store)

    # Running

    def run(self, messages: int) -> None:
        """Send so many. Raises Failed for whatever goes wrong, with what was sent last."""
        try:
            with bugs.escaping():
                self._play(messages)
        except BaseException as error:
            command = f"python -m tests.fuzz --seed {self.seed} --messages {messages}"
            text = f"{type(error).__name__}: {error}\nmessage {self.sent}: {self.net.reading.hex()}"
            raise Failed(f"{text}\nseed {self.seed}: replay with {command}") from error
        for site in (self.prefill, self.decode):
            self.counts.update(site.wire.counts + site.peers.producer.counts)
        self.counts |= {
            "messages": self.sent,
            "handed over": self.good.done,
            "again": self.good.again,
        }

    def _play(self, messages: int) -> None:
        process = psutil.Process()
        for number in range(messages):
            if number == messages // 2:
                self._rss = _kept(process)
            self._one(number)
        grown = _kept(process) - self._rss
        self.counts["grown"] = grown
        self._end()

    def _one(self, number: int) -> None:
        self.rng.choice(self._targets)()
        self.sent += 1
        if number % TURN_EVERY == 0:
            ms = self.rng.choice((1, 1, 5, 50, 700))
            self.good.turn(ms)
        if number % GOOD_EVERY == 0:
            self._serve()

    def _serve(self) -> None:
        chain = hashes(self.rng.randint(1, 6), f"{self.seed} {self.sent}")
        self.good.hand_over(chain, push=self.rng.random() < 0.5)

    def _shape(self, message: framing.Message, encode: Callable[[framing.Message], bytes]) -> bytes:
        """Encode a message: as it is, changed, or one that was said before."""
        body = encode(message)
        if self.rng.random() < 0.05:
            self._recorded = [*self._recorded[-63:], body]
        self.mutate.other = self._recorded
        way = self.rng.random()
        if way < 0.25:
            return body
        if way < 0.35 and self._recorded:
            return self.rng.choice(self._recorded)
        return self.mutate(body)

    # What there is to name

    def _chain(self) -> list[bytes]:
        known = self.good.chains
        if known and self.rng.random() < 0.7:
            chain = self.rng.choice(known)
            return chain[: self.rng.randint(1, len(chain))]
        return hashes(self.rng.randint(1, 5), f"x{self.rng.randrange(9)}")

    def _job(self) -> int:
        return self.rng.randint(1, 6)

    def _positions(self) -> bytes:
        return u32(self.rng.sample(range(6), self.rng.randint(0, 4)))

    def _number(self) -> int:
        return self.rng.choice((0, 1, 2, 7, 100, 1 << 31))

    def _digest(self) -> str:
        return self.prefill.namespace(self.good.giver).layout.digest

    # At the side channel of the prefill store

    def _to_producer(self) -> None:
        if len(self._peers) < CONNECTIONS or self.rng.random() < 0.002:
            _, say = self.prefill.wire.accept(End(lambda _: None))
            self._peers = [*self._peers[-CONNECTIONS + 1 :], say]
            if self.rng.random() < 0.9:
                say(msgspec.msgpack.encode(self._hello()))
        self.rng.choice(self._peers)(self._shape(self._ask(), msgspec.msgpack.encode))
        if self.rng.random() < 0.5:
            self.prefill.wire.poll(self.prefill.now_ns)

    def _hello(self) -> m.Hello:
        traits = self.prefill.namespace(self.good.giver).layout.traits
        agent = self.rng.choice(("", "evil", f"evil-{self.rng.randrange(1000)}", "decode-1"))
        return m.Hello(m.VERSION, self._digest(), traits, agent, b"metadata")

    def _ask(self) -> framing.Message:
        job, region = self._job(), m.Region(1 << 30, 4096, 32)
        kind = self.rng.randrange(11)
        if kind == 10:
            return self._fill(job)
        if kind > 7:
            name, rank = self.rng.choice(("", "r1", "r2", "r")), self.rng.randrange(3)
            lease_ms = self.rng.choice((1, 30_000, 600_000)) if kind == 8 else 0
            return m.Keep(self._digest(), name, lease_ms, rank, 3)
        if kind < 3:
            chain = self._chain()
            indices = u32(sorted(self.rng.sample(range(len(chain)), self.rng.randint(0, 1) or 1)))
            if self.rng.random() < 0.7:
                indices = u32(range(len(chain)))
            push, lease_ms = self.rng.random() < 0.4, self.rng.choice((1, 500, 5000, 600_000))
            request = self.rng.choice(("", "r1", "r2"))
            direct = self.rng.random() < 0.4
            how = b"", request, lease_ms, push, direct
            return m.Want(job, b"".join(chain), 32, (indices,), *how)
        if kind == 3:
            positions = self._positions()
            slots = u32([self.rng.randrange(32) for _ in range(len(positions) // 4)])
            return m.Land(
                job, positions, slots, region, metadata=self.rng.choice((b"", b"metadata"))
            )
        lease_ms = self.rng.choice((1, 1000, 30_000))
        arrived = self._positions() if self.rng.random() < 0.4 else b""
        settle = m.Settle(job, self.rng.choice((0, lease_ms, lease_ms)), arrived)
        return self._hello() if kind == 7 else settle

    def _fill(self, job: int) -> m.Land:
        ranks = (self._rank(),) if self.rng.random() < 0.7 else ()
        if self.rng.random() < 0.5:
            return m.Land(job, u32([0]), u32([5]), ranks=ranks)
        positions = self._positions()
        return m.Land(job, positions, self._blocks(len(positions) // 4), ranks=ranks)

    # At the decode store, as somebody that it asks

    def _evil(self, end: End) -> tuple[int, Callable[[bytes], None]]:
        wants: list[m.Want] = []

        def heard(frame: bytes) -> None:
            if not frame:  # it has hung up on us
                return
            said = m.decode_for_producer(frame)
            if isinstance(said, m.Hello) and self.rng.random() < 0.9:
                end.hear(msgspec.msgpack.encode(m.Welcome("evil", b"metadata")))
            elif isinstance(said, m.Want):
                wants.append(said)
                del wants[:-3]

        self._evils = [*self._evils[-CONNECTIONS + 1 :], (end, wants)]
        return 0, heard

    def _to_consumer(self) -> None:
        if not self._evils or self.rng.random() < 0.05:
            self._tempt()
        end, wants = self.rng.choice(self._evils)
        end.hear(self._shape(self._tell(wants), msgspec.msgpack.encode))
        if self.rng.random() < 0.5:
            self.decode.wire.poll(self.decode.now_ns)

    def _tempt(self) -> None:
        """An engine asks for what only we may have."""
        victim = self.good.victim
        if not victim.detached and self.decode.store.sessions.get("victim"):
            victim._asks += 1
            chain = hashes(self.rng.randint(1, 5), f"v{self.rng.randrange(1 << 20)}")
            push, direct = self.rng.random() < 0.4, self.rng.random() < 0.5
            asked = victim._asks, b"".join(chain), 32
            lookup = p.Lookup(*asked, peer="evil:1", push=push, direct=direct)
            victim.step(lookups=(lookup,))
            self.decode.tick(1)
            victim.pump()
            for told in victim.places:
                self.decode.say(victim.workers[0], self._arrived(told.fetch, told.positions))
            for fetch in victim.pushes:
                self.decode.say(victim.workers[0], p.Serves(self._rank(), 8))
                self.decode.say(victim.workers[0], self._target(fetch, u32(range(5))))
            victim.pushes.clear()
            victim.places.clear()
            for granted in victim.granted.values():
                if granted.lease and self.rng.random() < 0.7:
                    self.decode.say(victim.workers[0], p.Loaded(granted.lease, 0, 0.0))
            victim.granted.clear()

    def _tell(self, wants: Sequence[m.Want]) -> framing.Message:  # noqa: PLR0911 - one for each message
        job = self.rng.choice(wants).job if wants and self.rng.random() < 0.9 else self._job()
        positions = self._positions() if self.rng.random() < 0.6 else u32(range(5))
        count = len(positions) // 4
        kind = self.rng.randrange(9)
        if kind == 8:
            blocks = self._blocks(count)
            ranks = (self._rank(),) if self.rng.random() < 0.5 else ()
            return m.Have(job, positions, blocks, engine=self.rng.randrange(80), ranks=ranks)
        if kind < 2:
            return m.Offer(job, positions, ("cpu", "nvme"), bytes([0] * count))
        if kind < 4:
            places = u32([self.rng.choice((1, 1, self._number())) for _ in range(2 * count)])
            regions = (m.Region(1, 4096, 16),) if self.rng.random() < 0.5 else ()
            return m.Have(job, positions, places, bytes(8 * count), regions)
        if kind in {4, 5}:
            again = self._positions() if self.rng.random() < 0.2 else b""
            end = self.rng.choice(("", "", "all", "lease", "released"))
            return m.Settled(job, positions, again, self.rng.random() < 0.2, end)
        if kind == 6 and self.rng.random() < 0.5:
            return m.Settled(job, end=self.rng.choice(("all", "lease", "released")))
        if kind == 6:
            return m.Welcome(self.rng.choice(("", "evil")), b"metadata")
        return m.Refused("no", retry=self.rng.random() < 0.5)

    # At the local socket of both

    def _to_store(self) -> None:
        if len(self._locals) < CONNECTIONS:
            site = self.rng.choice((self.prefill, self.decode))
            self._locals.append((site, site.connect()))
            if self.rng.random() < 0.3 and len(self._locals) < CONNECTIONS:
                self._join(site)
        site, connection = self.rng.choice(self._locals)
        frame = self._framed(site)
        self.net.reading = frame
        at = self.rng.randint(0, len(frame)) if self.rng.random() < 0.1 else len(frame)
        alive = all(site.hear(connection, part) for part in (frame[:at], frame[at:]) if part)
        if alive and self.rng.random() < 0.02:
            site.forget(connection)
            alive = False
        if not alive:
            self._locals.remove((site, connection))

    def _join(self, site: Site) -> None:
        """Be an engine on the last connection and one more, if its name is free."""
        name, worker = f"e{self.rng.randrange(3)}", site.connect()
        self._locals.append((site, worker))
        if name not in site.store.sessions:
            shape = geometry(
                f"m{self.rng.randrange(MODELS)}" if self.rng.random() < 0.3 else "model"
            )
            site.hear(
                self._locals[-2][1], framing.encode(p.Hello(p.VERSION, name, "scheduler", 0, 1, 4))
            )
            site.hear(
                worker, framing.encode(p.Hello(p.VERSION, name, "worker", 0, 1, geometry=shape))
            )

    def _framed(self, site: Site) -> bytes:
        def encode(message: framing.Message) -> bytes:
            return framing.encode(message)[4:]

        body = self._shape(self._say(site), encode)
        if self.rng.random() < 0.02:  # a length that is not its own
            return self.mutate(len(body).to_bytes(4, "little") + body)
        if _makes_a_model(body):
            body = encode(p.Query("stats"))
        return len(body).to_bytes(4, "little") + body

    def _say(self, site: Site) -> framing.Message:  # noqa: PLR0911 - one for each message
        engine = f"e{self.rng.randrange(3)}"
        kind = self.rng.randrange(13)
        slots: list[int] = list(range(4))
        if kind == 0:
            return p.Hello(p.VERSION, engine, "scheduler", 0, 1, self._number())
        if kind == 1:
            model = f"m{self.rng.randrange(MODELS)}"
            able = self.rng.random() < 0.5
            who = p.VERSION, engine, "worker", 0, 1
            return p.Hello(*who, geometry=geometry(model), direct=able)
        if kind < 5:
            return self._step()
        if kind == 5:
            session = site.store.sessions.get(engine)
            slots = slots if session is None else [int(slot) for slot in session.granted][:3]
            keys = [make_key(block, 0) for block in self._chain()][: len(slots)]
            parents = [self.rng.choice((b"", *keys)) for _ in keys]
            ok = self.rng.random() < 0.9
            return p.Stored(u32(slots[: len(keys)]), tuple(keys), tuple(parents), ok, 0.1)
        if kind == 6:
            return p.Loaded(self.rng.randint(1, 40), 100, 0.1, u32(slots[:2]))
        if kind == 7:
            return p.Mapped(self.rng.randint(1, 12), gone=self.rng.random() < 0.5)
        if kind == 8:
            return p.Query("stats")
        if kind == 10:
            return p.Serves(self._rank(), self.rng.choice((8, 8, self._number())))
        if kind in {9, 11}:
            tell = self._target if kind == 11 else self._arrived
            return tell(self.rng.randint(0, 9), self._positions())
        return p.Hello(p.VERSION, engine, "worker", 1, 2, geometry=geometry("m0", 1, 2))

    def _rank(self) -> RankPages:
        sizes = 0, self.rng.choice((1, 512)), self.rng.randint(1, 3)
        gpu = self.rng.choice((None, 0, 3))
        return RankPages("evil", b"metadata", ((PageRun(*sizes, 4096, 4096, 1024),),), gpu)

    def _blocks(self, count: int) -> bytes:
        """Engine blocks for so many positions, one or two for each."""
        return u32([self._number()] * count * self.rng.choice((1, 1, 2)))

    def _target(self, fetch: int, positions: bytes) -> p.Target:
        agent = self.rng.choice(("evil", "evil", "evil", "other"))
        return p.Target(fetch, agent, positions, self._blocks(len(positions) // 4))

    def _arrived(self, fetch: int, positions: bytes) -> p.Arrived:
        return p.Arrived(fetch, positions, self.rng.randint(0, 1 << 20), self.rng.random() < 0.8)

    def _step(self) -> p.Step:
        chain = self._chain()
        address = self.rng.choice(("", "", "prefill:1", "evil:1", "nobody:1", "a b", "x" * 300))
        lookup = p.Lookup(
            self._number(),
            b"".join(chain),
            32,
            peer=address,
            push=self.rng.random() < 0.5,
            direct=self.rng.random() < 0.5,
        )
        handing = p.HandedOver(
            self.rng.choice(("r1", "r2")),
            self.rng.choice(("running", "done", "gone")),
            b"".join(chain),
            32,
            lease_ms=self.rng.choice((1, 1000, 30_000)),
        )
        hits = {"cpu": 1} if self.rng.random() < 0.3 else {}
        missed = {"tail": self.rng.randint(0, 3)}
        return p.Step(
            (lookup,) * self.rng.randint(0, 2),
            (self._number(), self.rng.randint(1, 40)),
            sum(hits.values()) + missed["tail"] + (self.rng.random() < 0.1),
            hits,
            {"deferred": 1},
            (handing,) * self.rng.randint(0, 1),
            engine_blocks=self._shown(chain),
            missed_tokens=missed,
            unstored=tuple(make_key(block, 0) for block in chain),
        )

    def _shown(self, chain: Sequence[bytes]) -> tuple[p.EngineBlocks, ...]:
        if self.rng.random() < 0.7:
            return ()
        slots = [self.rng.randrange(8) for _ in chain]
        keys = tuple(make_key(block, 0) for block in chain)
        blocks = [self.rng.randrange(9) for _ in chain]
        return (p.EngineBlocks(u32(slots), keys, u32(blocks), u32([0] * len(chain))),)

    # The end

    def _end(self) -> None:
        """All that was wrong goes away: then nothing is held, or known, for it."""
        for site, connection in self._locals:
            site.forget(connection)
        self.net.places.pop("evil:1")
        for _ in range(2):
            self._serve()
            for ms in (*(1,) * 50, 2000, 30_000, 400_000, *(500,) * 4, 300_000, *(500,) * 4):
                self.good.turn(ms)
        self._serve()
        for _ in range(20):
            self.good.turn(1)
        for site in (self.prefill, self.decode):
            check_nothing_left(site)


def _makes_a_model(body: bytes) -> bool:
    """Tell: each model that ever attached is remembered, and there would be thousands."""
    try:
        hello = msgspec.msgpack.decode(body, type=p.Hello)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    known = [geometry(), *(geometry(f"m{number}") for number in range(MODELS))]
    return hello.geometry not in (None, geometry("m0", 1, 2), *known)


def _kept(process: psutil.Process) -> int:
    """Return the bytes of memory in use; what one large message took for a moment is given back."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(process.memory_info().rss)


def check_nothing_left(site: Site) -> None:
    """Only what the good engines hold is held."""
    own = site.peers
    assert len(own.producer._peers) <= 1, "peers that are gone"
    assert not any(peer.jobs or peer.blocks for peer in own.producer._peers.values())
    assert own.producer.held.bytes == 0
    assert not own.producer._early
    assert own.producer.request_leases.held_bytes == 0
    assert len(own.links.all) <= links.LINKS_MAX
    assert len(own._agents) <= transfers.AGENTS_MAX
    assert len(site.wire.lines.all) <= side_channel.CAME_MAX + links.LINKS_MAX
    assert len(site.wire.lines.came()) <= 1, "connections that are gone"
    assert all(not session.fetches for session in site.store.sessions.values())
    for landing in site.mover.landings.values():
        landing.check_all_free()
    for consumer in own._inlets.values():
        assert not consumer._fetches
        assert not consumer._direct
        assert not consumer._located
        assert not consumer.arrivals.loads._open
        assert not consumer.arrivals.quarantined
    sessions = list(site.store.sessions.values())
    for namespace in site.store.namespaces.values():
        assert all(entry.pins == 0 for entry in namespace.manager.index), "pins"
        assert len(namespace.manager.leases) == 0
        granted = {slot for s in sessions if s.namespace is namespace for slot in s.granted}
        assert set(namespace.manager.slots.granted) == granted, "slots"
    known = {session.number for session in sessions}
    assert all(set(n.engines._engines) <= known for n in site.store.namespaces.values())
    assert {session.engine for session in sessions} <= {"prefill", "decode", "victim"}
    assert all(0 <= number < 1 << 63 for number in site.store.numbers.counts.values())
