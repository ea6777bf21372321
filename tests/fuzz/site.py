"""Two stores that hand over blocks, without sockets, exporters or threads: all else is real.

What a peer or a client says goes through the real decoders and the real decisions, one message
after another in one thread, so that whatever happens happens again from the same seed.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import cast
from unittest.mock import patch

import msgspec

from kvstore.config import parse
from kvstore.core.errors import ProtocolError
from kvstore.core.types import Slot, make_key
from kvstore.handover import peers
from kvstore.handover import transfers as moves
from kvstore.handover.line import Line
from kvstore.handover.peers import EXPORTER, Peers
from kvstore.handover.side_channel import Channel
from kvstore.handover.transfers import Transfers
from kvstore.store.namespace import Namespace
from kvstore.store.store import Store
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness.fakes import SLOT_BYTES, Engine, HeapPool, Town, from_u32
from tests.harness.handover_moves import LandingSlots, Moves
from tests.harness.handover_pair import content
from tiers.nixl import messages as nixl
from tiers.nixl.messages import Fill
from tiers.nixl.supervisor import Down
from tiers.nixl.ucx import over_tcp

LANDING = 32
LANDING_EXTENT = 1 << 30
CROWD = 1 << 20  # bytes of abandoned transfers
HELD = 16 * SLOT_BYTES
ENGINES = "giver", "taker", "victim"
PATIENCE_MS = 2600  # an answer may wait for memory for two seconds
SENT = 0.9999  # of all messages, others are not taken
SETTINGS = {"cpu": {"capacity": "64MiB"}, "server": {"metrics": ""}, "peer": {}}

Decode = Callable[[bytes], framing.Message]


Hear = Callable[[bytes], None]


class End(msgspec.Struct, eq=False):
    """The other end of a connection: hear(bytes) is where what is sent goes; b"": it has ended."""

    hear: Hear


class Cable:
    """Carries what both ends of a connection say: at once, as it is."""

    def forth(self, hear: Hear) -> Hear:
        """Return what to call for what is to be heard at the end that was connected to."""
        return hear

    def back(self, hear: Hear) -> Hear:
        """Return what to call for what is to be heard at the end that connected."""
        return hear


class Wire(Channel):
    """A side channel whose frames wait in a list; reading them is as it is."""

    def __init__(self, net: Net, *how: object) -> None:
        super().__init__(*how)  # type: ignore[arg-type]
        self._net = net
        self.inbox: list[tuple[int, bytes, Decode]] = []
        self._ends: dict[int, End] = {}

    def name(self, address: str) -> None:
        self.address = address
        self._net.places[address] = self.accept

    def _open(self, end: End, *, came: bool) -> int:
        line = self.lines.add(0, came=came)
        self._ends[line.number] = end
        line.agree()
        self._opened(line)
        return line.number

    def accept(self, end: End) -> tuple[int, Hear]:
        """Somebody connects; returns the number, and where to say something."""
        number = self._open(end, came=True)
        return number, lambda frame: self.inbox.append((number, frame, m.decode_for_producer))

    def refusal(self, _address: str) -> str:
        """Anything: no name of the net is an address."""
        return ""

    def connect(self, address: str) -> int:
        """Connect to whatever the net has at an address."""
        place = self._net.places.get(address)
        if place is None:
            number = self._open(End(lambda _: None), came=False)
            self._fail(self.lines.all[number], "nobody is there")
            return number
        numbers, cable = list[int](), self._net.cable(self.address, address)
        end = End(
            cable.back(lambda frame: self.inbox.append((numbers[0], frame, m.decode_for_consumer)))
        )
        _, say = place(end)
        numbers.append(self._open(End(cable.forth(say)), came=False))
        return numbers[0]

    def send(self, number: int, message: framing.Message) -> None:
        """Send to whoever is there."""
        end = self._ends.get(number)
        if end is not None and self._net.rng.random() < self._net.sent:
            end.hear(msgspec.msgpack.encode(message))
        elif end is not None:
            self._fail(self.lines.all[number], "it does not read")

    def poll(self, now_ns: int) -> None:
        """Read what has come."""
        self._now_ns = now_ns
        failed, self._ready = self._ready, set()
        for line in [self.lines.all[number] for number in failed & self.lines.all.keys()]:
            self._lose(line, line.failed)
        inbox, self.inbox = self.inbox, []
        for number, frame, decode in inbox:
            found = self.lines.all.get(number)
            self._net.reading = frame
            if found is not None and frame:
                self._take(found, frame, decode, now_ns)
            elif found is not None:
                self._lose(found, "disconnected")

    def _lose(self, line: Line, reason: str) -> None:
        end = self._ends.pop(line.number, None)
        super()._lose(line, reason)
        if end is not None:
            end.hear(b"")


class Mover(Moves):
    """Moves bytes between sites of a net; each piece of work ends a few polls later."""

    def __init__(self, net: Net, name: str) -> None:
        super().__init__()
        self._net, self._name = net, name
        self._starts = itertools.count(1)
        self.agent, self.devices = "", "lo"
        self.exporter = self
        self.site: Site | None = None
        self.landings: dict[str, LandingSlots] = {}
        self.known: dict[str, bytes] = {}
        self.restarts = self.abandoned = 0
        self._events: list[moves.Event] = []
        self._later: list[tuple[int, Callable[[], moves.Event]]] = []
        self._polls = 0
        self._start()

    def _start(self) -> None:
        self.agent = f"{self._name}-{next(self._starts)}"
        self._net.movers[self.agent] = self
        if self.site is not None:
            self._events += [
                nixl.Mapped(extent, 4096 * extent)
                for namespace in self.site.store.namespaces.values()
                for extent in namespace.extents
            ]
        self._events.append(nixl.Ready(self.agent, b"metadata"))

    def poll(self, _now_ns: int) -> Sequence[moves.Event]:
        self._polls += 1
        due = [work for at, work in self._later if at <= self._polls]
        self._later = [(at, work) for at, work in self._later if at > self._polls]
        events, self._events = self._events, []
        return [*events, *(work() for work in due)]

    def do(self, work: Callable[[], moves.Event]) -> None:
        self._later.append((self._polls + self._net.rng.randint(1, 3), work))

    def restart(self, _why: str) -> None:
        """End all that is under way, then be another one."""
        self.restarts += 1
        self._events += [work() for _, work in self._later]
        self._later.clear()
        self.known.clear()
        del self._net.movers[self.agent]
        self._events.append(Down("test"))
        self._start()

    def map(self, extent: int, _fd: int, _size: int, *, writable: bool) -> None:
        assert not writable
        self._events += [nixl.Mapped(extent, 4096 * extent), nixl.Ready(self.agent, b"metadata")]

    def unmap(self, extent: int) -> None:
        self._events.append(nixl.Mapped(extent))

    def fds(self) -> tuple[int, ...]:
        return ()

    def wait_s(self, _now_ns: int) -> float:
        return math.inf

    def landing(self, namespace: str, _slot_bytes: int) -> LandingSlots:
        if namespace not in self.landings:
            self.landings[namespace] = LandingSlots(LANDING_EXTENT + len(self.landings), LANDING)
        return self.landings[namespace]

    def wake(self) -> None:
        """It is awake."""

    def over_tcp(self, host: str) -> bool:
        return over_tcp(host, self.devices)

    def add_peer(self, agent: str, metadata: bytes) -> None:
        self.known[agent] = metadata

    def remove_peer(self, agent: str) -> None:
        del self.known[agent]

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        return {}

    @property
    def quarantined_bytes(self) -> int:
        return self.abandoned

    @property
    def crowded(self) -> bool:
        return self.abandoned > CROWD

    is_up, starts, broken = True, 1, ""

    def landing_at(self, agent: str, address: int) -> LandingSlots | None:
        other = self._net.movers.get(agent)
        found = [] if other is None else list(other.landings.values())
        return next((at for at in found if at.base == address), None)

    def filled(self, fill: Fill) -> bool:
        return fill.peer == "evil"

    def slot(self, agent: str, extent: int, number: int) -> bytes | None:
        mover = self._net.movers.get(agent) if agent else self
        site = None if mover is None else mover.site
        for namespace in () if site is None else site.store.namespaces.values():
            mapping = namespace.extents.get(extent)
            if mapping is not None and number < mapping.memory.count:
                return bytes(mapping.memory.slot(number))
        return None

    def close(self) -> None:
        """Nothing to do."""


class Net:
    """Addresses, and exporters by name."""

    sent = SENT

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.places: dict[str, Callable[[End], tuple[int, Hear]]] = {}
        self.movers: dict[str, Mover] = {}
        self.reading = b""  # the last input that anybody has read

    def cable(self, _one: str, _other: str) -> Cable:
        """Return what carries a new connection from one address to another."""
        return Cable()


class Site(Town):
    """A store and its peers."""

    def __init__(self, net: Net, name: str) -> None:
        config = parse(SETTINGS)
        super().__init__(config, HeapPool(12, 16))
        self.mover = Mover(net, name)
        with patch.object(peers, "Channel", lambda *how: Wire(net, *how)):
            self.peers = Peers(None, cast("Transfers", self.mover), HELD)
        self.wire: Wire = self.peers.channel  # type: ignore[assignment]
        self.wire.name(f"{name}:1")
        self.store = Store(config, self.pool, self._make_tiers, self._send, peers=self.peers)
        self.mover.site = self
        self.decoders: dict[int, framing.Decoder] = {}

    def _send(self, connection: int, message: framing.Message, fd: int | None) -> None:
        if connection == EXPORTER:
            self.peers.on_memory(message, fd)
        super()._send(connection, message, fd)

    def tick(self, ms: int = 0) -> None:
        self.now_ns += ms * 1_000_000
        self.peers.poll(self.now_ns)
        self.store.on_tick(self.now_ns)
        self.pump()

    def hear(self, connection: int, data: bytes) -> bool:
        """Take bytes of a client as the server does; False: its connection is closed."""
        decoder = self.decoders.setdefault(connection, framing.Decoder(p.ToStore))
        try:
            for message in decoder.feed(data):
                self.say(connection, message)
        except ProtocolError:
            self.store.numbers.add("kvstore_refused", "malformed")
            self.forget(connection)
            return False
        return True

    def pump(self) -> None:
        """Let clients map memory, whatever else they do: others would wait for them."""
        for connection in self.decoders:
            said, self.inbox[connection] = self.inbox[connection], []
            for message in said:
                if isinstance(message, p.Extent) and message.count:
                    self.say(connection, p.Mapped(message.extent))

    def forget(self, connection: int) -> None:
        self.decoders.pop(connection, None)
        self.close(connection)

    def namespace(self, engine: Engine) -> Namespace:
        found = self.store.sessions[engine.name].namespace
        assert found is not None
        return found


class Good:
    """A prefill engine, a decode engine, and hand-overs between them."""

    def __init__(self, prefill: Site, decode: Site) -> None:
        self.sites = prefill, decode
        self.giver = prefill.attach("prefill", credit_slots=8)
        self.taker = decode.attach("decode", credit_slots=8)
        self.victim = decode.attach("victim", credit_slots=4, direct=True)  # asks bad peers
        self.chains: list[list[bytes]] = []
        self.done = self.again = 0

    def turn(self, ms: int = 1) -> None:
        for site, engine in zip(self.sites, (self.giver, self.taker), strict=True):
            site.tick(ms)
            engine.pump()
        self.victim.pump()

    def until(self, done: Callable[[], object], what: str) -> None:
        for _ in range(PATIENCE_MS):
            if done():
                return
            self.turn()
        raise AssertionError(f"a good client: no {what} in time")

    def put(self, chain: Sequence[bytes]) -> None:
        namespace = self.sites[0].namespace(self.giver)
        for index, block in enumerate(chain):
            self.until(lambda: self.giver.credits, "slot")
            slot = self.giver.credits.pop(0)
            namespace.view(Slot(slot))[:] = content(block)
            parent = make_key(chain[index - 1], 0) if index else b""
            self.giver.report(0, [slot], [make_key(block, 0)], [parent])

    def hand_over(self, chain: list[bytes], *, push: bool) -> None:
        """Have one engine go on with what another one computed. Raises AssertionError.

        As an engine does, it stores and asks again what did not stay or come: other models take
        memory away, with what is in it, and with that each try may lose a slot that it was granted.
        """
        self.chains = [*self.chains[-7:], chain]
        for _ in range(self.giver.credit_slots + 1):
            self._attach_again()
            self.put(chain)
            if self._fetched(chain, push=push):
                self.done += 1
                return
            self.again += 1
        raise AssertionError("a good client: not all blocks came")

    def _attach_again(self) -> None:
        """Do as engines do whose session has ended: they held slots of memory that was to go."""
        for site, name in zip((*self.sites, self.sites[1]), ENGINES, strict=True):
            engine: Engine = getattr(self, name)
            if engine.detached:
                for connection in (engine.scheduler, *engine.workers):
                    site.close(connection)
                how = {"credit_slots": engine.credit_slots, "direct": engine.direct}
                setattr(self, name, site.attach(engine.name, **how))

    def _fetched(self, chain: list[bytes], *, push: bool) -> bool:
        """Ask for all blocks, and read them; False if some do not come."""
        taker, site = self.taker, self.sites[1]
        taker._asks += 1
        lookup = p.Lookup(
            taker._asks, b"".join(chain), 32, peer=self.sites[0].wire.address, push=push
        )
        taker.step(lookups=(lookup,))
        self.until(lambda: lookup.ask in taker.granted, "answer")
        granted, found = taker.granted.pop(lookup.ask), 0
        if not granted.lease:
            return False
        (hit,), ages = granted.hits, site.namespace(taker).generations
        slots = zip(chain, from_u32(hit.slots), from_u32(hit.generations), strict=False)
        for block, slot, leased in slots:
            self.until(lambda: ages[slot] != leased - 1, "block")  # noqa: B023 - asked at once
            if ages[slot] != leased:
                break
            view = site.namespace(taker).view(Slot(slot))
            assert view == content(block), "a good client: wrong bytes"
            found += 1
        taker.town.say(taker.workers[0], p.Loaded(granted.lease, 1, 0.001))
        return found == len(chain)
