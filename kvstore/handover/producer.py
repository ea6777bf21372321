"""The side of a hand-over that has the blocks: serves all peers of a store.

moves.py has the states of a block. Once its lease is over nothing of a job is valid any more, but
what it holds stays for GRACE, because a reader cannot be stopped.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.tier import Tier
from kvstore.core.tiering import LEADING_MAX
from kvstore.core.types import LookupResult
from kvstore.handover.held_memory import HeldMemory
from kvstore.handover.jobs import Job, Look, OwnExporter, Peer, Source
from kvstore.handover.moves import DONE, MOVING, SUMMED, SUMMING, TOLD, WANTED
from kvstore.handover.request_leases import RequestLeases
from kvstore.handover.runs import Part, Run, at, joined, put_at, runs_of
from kvstore.handover.transfers import Slots, Transfers
from kvstore.wire import peer as m
from kvstore.wire.framing import Message, u32
from tiers.nixl.messages import Fill, Transfer

GRACE_NS = 5_000_000_000
WANTED_MAX = 1 << 21  # blocks in open jobs of all peers: a few hundred bytes each
LOOKS_MAX = 8192  # blocks that are looked for in a turn, for all peers: each takes a microsecond
OPEN_MAX = 1 << 13  # jobs of all peers: each turn goes through them
LATE_MAX = 512  # blocks that may still come and are passed over in a turn, for all peers
EARLY_MAX = 64  # Hellos that wait for the exporter, of a megabyte each

Send = Callable[[int, Message], None]
Guard = Callable[[int], AbstractContextManager[object]]
OfJob = m.Land | m.Settle


class Producer:
    """Serves all peers of a store."""

    def __init__(
        self,
        served: Callable[[], Mapping[str, Source]],
        exporter: Callable[[], OwnExporter | None],
        transfers: Transfers,
        send: Send,
        held_bytes_max: int,
        meet: Callable[[int, str, bytes], None],
    ) -> None:
        """served(): namespaces by digest. exporter(): ours; None while there is none.

        transfers: take sums and write blocks. Each block's end comes once, later, by summed() or
            written(); its slot keeps its bytes until then.
        held_bytes_max: for each peer, of what is held for it at one time, half of what is held for
            all of them, and of what is held for requests whose peer has not asked yet.
        meet(peer, agent, metadata): a peer is accepted, and has this exporter.
        """
        self._served = served
        self._exporter = exporter
        self._transfers = transfers
        self._send = send
        self._meet = meet
        self.held = HeldMemory(held_bytes_max)
        self._peers: dict[int, Peer] = {}
        self._early: dict[int, m.Hello] = {}  # peers that came before the exporter was there
        self.looking = False  # for blocks, and more of them at the next turn
        self._late_left = LATE_MAX  # in this turn
        self._turned_away: set[int] = set()  # peers of an exporter before; they will hang up
        self.counts: Counter[str] = Counter()
        self.request_leases = RequestLeases(held_bytes_max, self.counts)

    # Messages of consumers

    def on_message(self, number: int, message: Message, now_ns: int) -> None:
        """Act on one message of a peer. Raises ProtocolError for a wrong one."""
        if isinstance(message, m.Hello):
            self._hello(number, message)
            return
        if isinstance(message, m.Keep):
            self._of_request(number, message, now_ns)
            return
        peer = self._peers.get(number)
        if peer is None or peer.closed:
            if number in self._turned_away:  # said before it heard of that
                return
            raise ProtocolError(f"{type(message).__name__} before Hello")
        if isinstance(message, m.Want):
            self._want(peer, message, now_ns)
        elif isinstance(message, OfJob):
            job = peer.jobs.get(message.job)
            if job is None:
                self._send(peer.number, m.Settled(message.job, end=m.UNKNOWN))
            elif job.released:
                pass  # its end follows once nothing is written any more
            elif isinstance(message, m.Land):
                self._land(job, message)
            else:
                self._judge(job, message, now_ns)
        else:
            raise ProtocolError(f"{type(message).__name__} is not for a producer")

    def _of_request(self, number: int, keep: m.Keep, now_ns: int) -> None:
        source, leases = self._served().get(keep.namespace), self.request_leases
        manager = None if source is None else source.manager
        if keep.lease_ms:
            leases.keep(manager, keep.request, now_ns + m.lease_ns(keep.lease_ms))
        else:
            state = leases.report(manager, keep.request, keep.rank, keep.consumers)
            self._send(number, m.Noted(keep.request, state))

    def _land(self, job: Job, land: m.Land) -> None:
        job.write(job.land(land))
        for rank in land.ranks:
            self._meet(job.peer.number, rank.agent, rank.metadata)
        self._settle(job)

    def on_closed(self, number: int) -> None:
        """A peer is gone: free what is held for it, once no transfer uses it."""
        self._early.pop(number, None)
        self._turned_away.discard(number)
        peer = self._peers.get(number)
        if peer is not None:
            peer.closed = True
            self._drop(peer)

    def serves(self, source: Source) -> bool:
        """Tell whether a peer may ask for blocks of a namespace, without another Hello."""
        return any(peer.source is source for peer in self._peers.values())

    @property
    def jobs(self) -> list[Job]:
        """The open jobs, released or not."""
        return [job for peer in self._peers.values() for job in peer.jobs.values()]

    def sources(self) -> list[Source]:
        """List the namespaces that a job is open in."""
        peers = [peer for peer in self._peers.values() if peer.jobs]
        return list({peer.source.layout.digest: peer.source for peer in peers}.values())

    def on_unmapped(self, extent: int) -> None:
        """The exporter maps an extent no more; peers are told anew if it comes back."""
        for peer in self._peers.values():
            peer.regions.discard(extent)

    def on_exporter_lost(self, reason: str) -> None:
        """Our exporter was restarted and has other memory: peers have to say Hello again."""
        for peer in list(self._peers.values()):
            if not peer.closed:
                self._send(peer.number, m.Refused(reason, retry=True))
                self._turned_away.add(peer.number)
                peer.closed = True
            self._drop(peer)

    def end(self) -> None:
        """Hand nothing over any more: free all but what a lower tier still reads into."""
        self.on_exporter_lost("hand-overs are off")
        for job in self.jobs:
            job.unsummed.clear()
            for run in job.states.within(job.all, bytes((SUMMING, MOVING))):
                self._done(job, run)
            self._settle(job)

    def _drop(self, peer: Peer) -> None:
        for job in list(peer.jobs.values()):
            self._release(job)
            self._settle(job)
        if not peer.jobs:
            self._peers.pop(peer.number, None)

    def _hello(self, number: int, hello: m.Hello) -> None:
        if number in self._peers or number in self._early:
            raise ProtocolError("a second Hello")
        served = self._served()
        source = served.get(hello.namespace)
        if hello.version != m.VERSION:
            refused = m.Refused(f"side channel {hello.version}, expected {m.VERSION}")
        elif source is None and served:
            refused = m.Refused(_difference(hello, served)[: m.TEXT_MAX])
        elif source is None:
            refused = m.Refused(f"namespace {hello.namespace[:12]} is not served here yet", True)
        elif (ours := self._exporter()) is None:
            if len(self._early) < EARLY_MAX:
                self._early[number] = hello
                self._send(number, m.Welcome())
                return
            refused = m.Refused(f"{EARLY_MAX} others wait for the exporter to start", True)
        else:
            self._peers[number] = Peer(number, source, hello.agent)
            self._meet(number, hello.agent, hello.metadata)
            self._send(number, m.Welcome(ours.agent, ours.metadata))
            return
        self.counts["refused"] += 1
        self._send(number, refused)

    def _want(self, peer: Peer, want: m.Want, now_ns: int) -> None:
        blocks = sum(other.blocks for other in self._peers.values())
        if blocks >= WANTED_MAX or sum(len(p.jobs) for p in self._peers.values()) >= OPEN_MAX:
            self.counts["refused"] += 1
            self._send(peer.number, m.Settled(want.job, end="busy"))
            return
        job = peer.open(want, self.request_leases, now_ns)
        if self.request_leases.ambiguous(want.request, peer.source.manager):
            self.counts["ambiguous"] += 1
            self._send(peer.number, m.Settled(want.job, end="ambiguous"))
            return
        peer.jobs[job.number] = job
        peer.blocks += len(job.keys)

    def _look(self, job: Job, look: Look, most: int, now_ns: int) -> int:
        """Look for blocks of a job, and offer what there is after the last of them.

        Returns how many were looked for.
        """
        count = look.go_on(most, now_ns)
        if not look.done:
            self.looking |= not look.missing
            return count
        job.look = None
        self.counts["unknown"] += look.unknown
        self._send(job.peer.number, job.offer(look.tiers, now_ns))
        return count

    def _judge(self, job: Job, settle: m.Settle, now_ns: int) -> None:
        """Answer by the lease that held until now; then extend it, or end it."""
        arrived = m.positions_of(settle.arrived, len(job.keys))
        unread = m.positions_of(settle.unread, len(job.keys))
        extended_ns = now_ns + m.lease_ns(settle.lease_ms) if settle.lease_ms else None
        told, again = job.told(arrived), set(job.told(unread))
        if job.residents:
            again.update(position for position in told if job.is_overwritten(position))
        valid = told if not again else [position for position in told if position not in again]
        job.moved |= again
        for run in runs_of(valid):
            self._done(job, run)
        self.counts["confirmed"] += len(valid)
        self.counts["stale"] += len(arrived) - len(valid)
        job.untold += sorted(again)
        if extended_ns is None:
            self._release(job)
        elif not job.over:
            job.deadline_ns = max(job.deadline_ns, extended_ns)
        self._advance(job)
        computing = not job.over and job.computes
        if arrived or unread or computing:
            end = m.LEASE_OVER if job.over else ""
            answer = m.Settled(job.number, u32(valid), u32(sorted(again)), computing, end)
            self._settle(job, answer)
        else:
            self._settle(job)

    # Time, and ends of work

    def tick(self, now_ns: int, guard: Guard = nullcontext) -> None:
        """Move every job along; end the leases that are over.

        guard(peer): what is done for a peer is done inside of it.
        """
        self.request_leases.tick(now_ns)
        while self._early and self._transfers.has_room and self._exporter() is not None:
            number = next(iter(self._early))
            hello = self._early.pop(number)
            with guard(number):
                self._hello(number, hello)
        self.looking, looks, self._late_left = False, LOOKS_MAX, LATE_MAX
        peers = [peer for peer in self._peers.values() if peer.jobs]
        for left, peer in zip(range(len(peers), 0, -1), peers, strict=True):
            with guard(peer.number):
                looks -= self._tick_peer(peer, max(1, looks // left), now_ns)

    def _tick_peer(self, peer: Peer, looks: int, now_ns: int) -> int:
        """Move a peer's jobs along; looks: for so many blocks at most. Returns for how many."""
        left = looks
        for job in list(peer.jobs.values()):
            if not job.over and not job.released and now_ns >= job.deadline_ns:
                job.over = True
                self.counts["expired"] += 1
                self._send(peer.number, m.Settled(job.number, end=m.LEASE_OVER))
            if job.look is not None:
                left -= self._look(job, job.look, left, now_ns)
            if job.over and now_ns >= job.deadline_ns + GRACE_NS:
                self._release(job)
            self._advance(job)
            self._start_writes(job)
            self._settle(job)
        return looks - left

    def forget(self, number: int) -> None:
        """Have nothing more to do with a peer; what is held for it stays held."""
        self._early.pop(number, None)
        self._turned_away.discard(number)
        self._peers.pop(number, None)

    def _job_of(self, part: Part) -> Job:
        """Return a part's job, which is there as long as anything of it is under way."""
        return self._peers[part.peer].jobs[part.job]

    def take_staged(self, guard: Guard = nullcontext) -> None:
        """Go on with blocks that lower tiers have read into their slots, or could not."""
        for source in self.sources():
            staged: dict[tuple[int, int, bool], list[int]] = {}
            for part, ok in source.tiering.take_staged():
                staged.setdefault((part.peer, part.job, ok), []).extend(part.positions)
            for (peer, number, ok), positions in staged.items():
                with guard(peer):
                    self.counts["failed"] += 0 if ok else len(positions)
                    self._ended(self._peers[peer].jobs[number], positions, ok=ok)

    def summed(self, part: Part, sums: array[int]) -> None:
        """Checksums of blocks of one job were taken."""
        job = self._job_of(part)
        put_at(job.sums, part.positions, sums)
        self._ended(job, part.positions, ok=True)

    def written(self, part: Part, *, ok: bool, stopped: bool = False) -> None:
        """A write has ended; stopped: it was cut short, and nothing of it still arrives."""
        job, ended = self._job_of(part), part.positions
        ok = ok or (stopped and job.released)
        self.counts["failed"] += 0 if ok else len(ended)
        if job.direct:
            ended = [position for position in ended if job.last_write(position, ok=ok)]
        self._ended(job, ended, ok=ok)

    def _ended(self, job: Job, positions: Sequence[int], *, ok: bool) -> None:
        """Go on with blocks of one job, all of one state.

        What follows is done at the next tick, for all that has ended until then in one go.
        """
        for run in runs_of(positions):
            good = ok and not job.released
            if good and job.failed and not job.failed.isdisjoint(range(*run)):
                good = False
            if good:
                job.go_on(run)
                continue
            self._done(job, run)
            if job.push and job.direct:  # its load has failed, too
                self._release(job)

    # Of one job

    def _advance(self, job: Job) -> None:
        """Hold what can be held now of what is awaited, first blocks first.

        Where many may still come, some are passed over; the others come first next.
        """
        peer, source = job.peer, job.source
        most = max(1, self._late_left)
        room = self.held.room(peer) // source.layout.slot_bytes
        below: dict[str, tuple[Tier, list[int]]] = {}
        late: list[int] = []
        while job.awaited and room > 0 and not job.over and len(late) < most:
            pinned = self.held.pin(job, room)
            room -= pinned
            if pinned:
                continue
            if source.manager.index.get(job.keys[job.awaited[0]]) is not None:
                break  # is being written, or brought up
            first = islice(job.awaited, min(room, LEADING_MAX, most - len(late)))
            keys = [job.keys[position] for position in first]
            found, tier, alike = source.tiering.leading(keys, 0)
            entries = source.manager.index.find(keys[1:alike])
            alike = next((n for n, entry in enumerate(entries, 1) if entry is not None), alike)
            if tier is not None and found is LookupResult.HIT:
                staged = below.setdefault(tier.name, (tier, []))[1]
                staged += [job.awaited.popleft() for _ in range(alike)]
                room -= alike
                continue
            if self.request_leases.computes(job.request, job.source.manager):
                break  # they come in order
            undecided = found is not LookupResult.MISS
            for key in keys[:alike]:
                position = job.awaited.popleft()
                if self.request_leases.may_come(
                    job.request, job.source.manager, key, undecided=undecided
                ):
                    late.append(position)  # or never: a window may have left it without a slot
                else:
                    self.counts["gone"] += 1
                    self._done(job, (position, position + 1))
        self._late_left -= len(late)
        job.awaited.extend(late)
        if len(late) < most:
            job.awaited.rotate(len(late))
        for tier, positions in below.values():
            self.held.stage(job, tier, positions)

    def _take_sums(self, job: Job) -> None:
        positions, job.unsummed = joined(runs_of(job.unsummed)), []
        keys, layout = [job.keys[position] for position in positions], job.source.layout
        slots = Slots(job.source.view, at(job.slots, positions))
        self._transfers.sum(job.part(positions), layout.digest, keys, slots, layout.slot_bytes)

    def _start_writes(self, job: Job) -> None:
        """Start writes that are due; others follow in later turns, as the exporter keeps up."""
        while self._transfers.has_room and (positions := job.take_unwritten()):
            writes: Iterable[tuple[Part, Transfer | Fill]]
            writes = job.direct_writes(positions) if job.direct else job.slot_writes(positions)
            for part, write in writes:
                self._transfers.start(part, write)

    def _done(self, job: Job, run: Run) -> None:
        """Free blocks of one state that no transfer uses."""
        self.held.free(job, run)
        job.states.put(run, DONE)
        job.left -= run[1] - run[0]

    def _release(self, job: Job) -> None:
        """Free the blocks that no transfer uses; the others follow as their transfers end.

        Writes are abandoned: what has not begun is not begun; the answer still comes.
        """
        if job.released:
            return
        job.released = True
        job.look = None
        job.awaited.clear()
        job.untold.clear()
        for run in runs_of(job.unwritten):
            job.states.put(run, SUMMED)
        job.unwritten.clear()
        writing = [p for run in job.states.within(job.all, bytes((MOVING,))) for p in range(*run)]
        if writing:
            self._transfers.abandon(job.part(writing))
        for run in job.states.within(job.all, bytes((WANTED, SUMMED, TOLD))):
            self._done(job, run)

    def _settle(self, job: Job, answer: m.Settled | None = None) -> None:
        """Send what is due, an answer first, and forget a job that has nothing left."""
        peer = job.peer
        if job.left or job.look is not None:
            if answer is not None:
                self._send(peer.number, answer)
            if job.unsummed:
                self._take_sums(job)
            if job.untold:
                for message in job.messages(self._exporter()):
                    self._send(peer.number, message)
            return
        if peer.jobs.pop(job.number, None) is None:
            return
        peer.blocks -= len(job.keys)
        if not peer.closed:
            failed = job.push and job.direct and bool(job.failed)
            end = m.FAILED if failed else "released" if job.released else "all"
            last = m.Settled(job.number) if answer is None else answer
            self._send(peer.number, msgspec.structs.replace(last, end=end))
        elif not peer.jobs:
            self._peers.pop(peer.number, None)


def _difference(hello: m.Hello, served: Mapping[str, Source]) -> str:
    """Name what differs from the namespace that is nearest, with both values."""

    def differ(ours: Mapping[str, str]) -> list[str]:
        return [
            f"{name} is {hello.traits.get(name, 'not named')}, expected {ours.get(name, 'nothing')}"
            for name in sorted(hello.traits.keys() | ours.keys())
            if hello.traits.get(name) != ours.get(name)
        ]

    digest, source = min(served.items(), key=lambda item: len(differ(item[1].layout.traits)))
    found = differ(source.layout.traits) if hello.traits else []
    return ", ".join(found) or f"namespace is {hello.namespace[:12]}, expected {digest[:12]}"
