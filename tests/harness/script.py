"""A scheduler half with a store that says what the test wants: the real client, a scripted wire."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import cast

from connectors.engine_interface import BlockTable, Geometry, Step
from connectors.kv_transfer_params import NO_TRANSFER, Transfer
from connectors.scheduler import SchedulerHalf
from connectors.step_loads import StepLoads
from connectors.step_meta import StepMeta
from connectors.store_client import StoreClient
from connectors.store_connection import Attacher, LinkLost
from kvstore.core import limits
from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey, GroupRule, make_key
from kvstore.wire import engine as p
from kvstore.wire import framing
from kvstore.wire.framing import u32

US = 1_000
MS = 1_000_000
BLOCK = 16
ONE_GROUP = Geometry(BLOCK, BLOCK, (BLOCK,), (GroupRule(),))


def hashes(count: int, text: str = "a") -> list[bytes]:
    """A chain; equal texts give equal leading hashes."""
    found, last = [], text.encode()
    for _ in range(count):
        last = hashlib.sha256(last).digest()
        found.append(last)
    return found


class Request:
    """What the half sees of a request of an engine that hashes every 16 tokens."""

    def __init__(self, name: str, tokens: int, text: str = "a", hash_tokens: int = BLOCK) -> None:
        self.request_id = name
        self.num_tokens = tokens
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.all_token_ids: Sequence[int] = range(tokens)
        self.block_hashes: Sequence[bytes] = hashes(tokens // hash_tokens, text)


class Wire:
    """The store's end of the connection, on paper."""

    def __init__(self, script: Script) -> None:
        self.closed = False
        self._lookups = script
        self._decoder = framing.Decoder(p.ToStore, limits.FRAME_BYTES_MAX)

    def send(self, message: framing.Message) -> None:
        self.flush()
        if isinstance(message, p.Step):
            assert message.counts.keys() <= p.EVENTS, "the store ends a session for others"
            assert message.missed_tokens.keys() <= set(p.MISSES)
            told = [*message.hit_tokens.values(), *message.missed_tokens.values()]
            assert sum(told) == message.lookup_tokens, "or if these are not all"
        taken = list(self._decoder.feed(framing.encode(message)))
        assert taken == [message], "a store takes it: else it ends the session"
        self._lookups.sent.append(message)

    @property
    def waiting_bytes(self) -> int:
        return self._lookups.waiting_bytes

    def flush(self) -> None:
        if self.closed or self._lookups.cut:
            raise LinkLost("cut")

    def receive(self, timeout_s: float = 0.0) -> list[framing.Message]:
        self.flush()
        script = self._lookups
        if timeout_s and not script.inbox:
            waited_ns = 1_000 if script.on_its_way else int(timeout_s * 1e9)
            script.waited_ns += waited_ns
            script.now_ns += waited_ns
            script.inbox, script.on_its_way = script.on_its_way, []
        messages, script.inbox = script.inbox, []
        return messages

    def take_fd(self) -> int:
        return self._lookups.fds.pop(0)

    def close(self, _fault: str = "") -> None:
        self.closed = True


class Script:
    """Plays the store, and the engine's calls that every test needs."""

    def __init__(
        self,
        geometry: Geometry = ONE_GROUP,
        *,
        world: int = 1,
        shares_prefixes: bool = True,
        credits: int = 100,  # noqa: A002 - the protocol's word
        beside: bool = False,
        step_loads: StepLoads | None = None,
        transfer: Transfer = NO_TRANSFER,
    ) -> None:
        self.refused: KVStoreError | None = None
        self.geometry = geometry
        self.now_ns = 10**12
        self.waited_ns = 0
        self.sent: list[framing.Message] = []
        self.inbox: list[framing.Message] = []
        self.on_its_way: list[framing.Message] = []  # arrives when somebody waits
        self.fds: list[int] = []
        self.cut = False
        self.warning = ""  # of a welcome,
        self.keeps_tokens, self.there = False, 0  # likewise
        self.waiting_bytes = 0  # that the store has not read
        self._session = 0
        self._wanted = self.welcomes = False
        self._slot = 0
        self._seen = 0
        self.client = StoreClient(cast("Attacher", self), lambda: self.now_ns)
        self.half = SchedulerHalf(
            geometry, self.client,
            world=world, shares_prefixes=shares_prefixes, beside=beside, step_loads=step_loads,
            transfer=transfer,
        )  # fmt: skip
        self.attach(credits)

    # Connections, as the client sees them

    def start(self) -> None:
        self._wanted = True

    def take(self) -> tuple[Wire, p.Welcome] | None:
        if not self._wanted or not self.welcomes:
            return None
        self._wanted = self.welcomes = False
        self._session += 1
        what = self.keeps_tokens, self.there
        return Wire(self), p.Welcome(
            self._session, defer_ms=100, warning=self.warning, tokens=what[0], there=what[1]
        )

    def close(self) -> None:
        self._wanted = False

    # The store

    def attach(self, credits: int = 100) -> None:  # noqa: A002 - the protocol's word
        """Let the client in, with slots to fill."""
        self.cut, self.welcomes = False, True
        self.inbox = []
        self.client.receive()
        self.grant_credits(credits)

    def grant_credits(self, count: int) -> list[int]:
        slots = list(range(self._slot, self._slot + count))
        self._slot += count
        self.inbox.append(p.Answers(credits=u32(slots)))
        self.client.receive()
        return slots

    def steps(self) -> list[p.Step]:
        """Messages of the half since the last call."""
        self.client.send_step()
        fresh, self._seen = self.sent[self._seen :], len(self.sent)
        return [message for message in fresh if isinstance(message, p.Step)]

    def lookups(self) -> list[p.Lookup]:
        return [lookup for step in self.steps() for lookup in step.lookups]

    def released(self) -> list[int]:
        """Leases given back since the last call."""
        return [lease for step in self.steps() for lease in step.release]

    def answer(
        self,
        ask: int,
        *present: Sequence[int],
        lease: int | None = None,
        lease_ms: int = 30_000,
        sources: Mapping[str, int] | None = None,
        capped: bool = False,
        missed: tuple[str, int] = ("", 0),
    ) -> None:
        """Answer a lookup: per group, what is present; block i is in slot 1000 * group + i."""
        hits = tuple(
            p.Hit(u32(found), u32([1000 * g + i for i in found]), u32([7] * len(found)))
            for g, found in enumerate(present)
        )
        number = (ask if hits else 0) if lease is None else lease
        granted = p.Granted(ask, number, lease_ms, hits, dict(sources or {}), capped, missed=missed)
        self.inbox.append(p.Answers(granted=(granted,)))

    def changed(self, added: Sequence[bytes] = (), removed: Sequence[bytes] = ()) -> None:
        self.inbox.append(p.Answers(added=tuple(added), removed=tuple(removed)))

    # The engine

    def arrive(
        self,
        request: Request,
        *present: Sequence[int],
        lease_ms: int = 30_000,
        capped: bool = False,
    ) -> int:
        """Add a request and answer its lookup; returns the number of the question, if any."""
        self.lookups()
        self.half.on_new_request(request)
        for lookup in self.lookups():
            self.answer(lookup.ask, *present, lease_ms=lease_ms, capped=capped)
            return lookup.ask
        return 0

    def matched(self, request: Request, computed: int = 0) -> tuple[int | None, bool]:
        return self.half.get_num_new_matched_tokens(request.request_id, computed)

    def load(self, request: Request, table: BlockTable, computed: int = 0) -> StepMeta:
        """Admit a request with all that was found for it, and make the step."""
        external, is_async = self.matched(request, computed)
        assert external
        assert is_async
        self.half.update_state_after_alloc(request.request_id, table, external)
        request.num_computed_tokens = computed + external
        return self.step()

    def admit(self, request: Request, computed: int = 0) -> None:
        """Let a request run without a load."""
        self.matched(request, computed)
        self.half.update_state_after_alloc(request.request_id, (), 0)
        request.num_computed_tokens = computed

    def step(
        self,
        request: Request | None = None,
        tokens: int = 0,
        table: BlockTable = (),
        written: Sequence[int] = (),
    ) -> StepMeta:
        """One step in which at most one request computes; its progress is booked afterwards."""
        if request is None:
            return self.half.build_meta(Step({}, written, lambda _: ()))
        scheduled = {request.request_id: tokens}
        meta = self.half.build_meta(Step(scheduled, written, lambda _: table))
        request.num_computed_tokens += tokens
        return meta

    def key(self, request: Request, index: int, group: int = 0, scope: bytes = b"") -> BlockKey:
        return make_key(self.geometry.block_hash(request, index), group, scope)

    def indices(self, request: Request, meta: StepMeta, group: int = 0) -> list[int]:
        """Which blocks of a request a step stores in one group."""
        per = self.geometry.block_tokens // self.geometry.hash_tokens
        blocks = len(request.block_hashes) // per
        known = {self.key(request, index, group): index for index in range(blocks)}
        stored = [key for job in meta.stores + meta.early for key in job.keys]
        return [known[BlockKey(key)] for key in stored if key in known]


def found(
    tokens: int,
    *present: Sequence[int],
    script: Script | None = None,
    lease_ms: int = 30_000,
    text: str = "a",
    hash_tokens: int = BLOCK,
) -> tuple[Script, Request]:
    """A request has come, and its lookup is answered: by group, which blocks are present."""
    script, request = script or Script(), Request("r", tokens, text, hash_tokens)
    script.arrive(request, *present, lease_ms=lease_ms)
    return script, request


def running(
    tokens: int, script: Script | None = None, hash_tokens: int = BLOCK
) -> tuple[Script, Request]:
    """A request that found nothing is admitted."""
    script, request = found(tokens, script=script, hash_tokens=hash_tokens)
    script.admit(request)
    return script, request
