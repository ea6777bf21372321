"""The NIXL agent of one worker: moves bytes between its KV tensors and memory of peers.

It reads a peer's slots or its engine's tensors into ours. Peers read and write our tensors through
it, too. The tensors are on a GPU or in host memory.

Only for engines that asked for it: a process that reaches an agent over the network can read and
write all memory of the agent's process. Restarting the agent ends all its transfers: nothing is
written by them afterwards.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from connectors.copies.host import LayerCache, cache_of
from connectors.store_connection import SameOnAllRanks
from kvstore.core.errors import NotSupported, TierError, TierIOError
from kvstore.core.layout import LayerRun, Move, PageRun, RankLayout, RankPages
from tiers.nixl.messages import MoveError
from tiers.nixl.pages import rows
from tiers.nixl.ucx import has_rdma, ucx_settings

if TYPE_CHECKING:
    from tiers.nixl.agent import Agent, Flight, Places

log = logging.getLogger(__name__)

ENGINES_MAX = 64  # of peers, with known overlaps of their memory and ours
PEERS_MAX = 1024  # agents
NETWORKS = "^shm,cuda_ipc"  # UCX's transports but those between processes of one machine
Pages = list[tuple[tuple[PageRun, ...], ...]]
"""Of each rank of an engine, by group."""
BINDINGS = (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError)
READ_BYTES = 16 << 20  # of one read; through shared memory the starting call does all of it


class AgentTransfer(msgspec.Struct, eq=False):
    """A read that was started. agent: the number of the agent that does it.

    flights: parts under way; none: it is over. failure: of a part that could not be moved; others
    may still be under way.
    """

    bytes: int
    agent: int
    flights: list[Flight]
    failure: str = ""


class EngineAgent:
    """Moves bytes for one worker; called from one thread at a time."""

    def __init__(self, caches: dict[str, LayerCache], *, transports: str | None = None) -> None:
        """caches: by layer name. transports: as in exporter Settings.

        Raises NotSupported where they cannot be read into, or NIXL is not installed.
        """
        self.gpu = gpu_of(caches)  # its number; None: the tensors are in host memory
        try:
            from tiers.nixl.agent import Agent  # noqa: PLC0415 - it loads NIXL, if that is there
        except ImportError as exc:
            raise NotSupported(f"direct = true needs the package nixl: {exc}") from exc
        self._make: Callable[[str], Agent] = Agent
        self._caches = caches
        self._transports = transports
        self.part_bytes: list[int] = []  # of an engine block, by group
        self._part_strides: list[int] = []  # in a slot, from an engine block's part to the next
        self._slot_overlaps: list[list[Overlap]] = []  # with a part of a slot, by group
        self._pages: list[tuple[PageRun, ...]] = []  # by group
        # By a peer's agents: their pages, and the overlaps of each group.
        self._overlaps: dict[tuple[str, ...], tuple[Pages, list[list[Overlap]]]] = {}
        self._agent: Agent | None = None
        self._agents = 0  # made so far
        self._peers: dict[str, bytes] = {}  # agent -> metadata; the last one heard of is last
        self._met: set[str] = set()  # peers that the agent knows

    def check_reach(self, devices: str) -> None:
        """Raise SameOnAllRanks for tensors on a GPU that no RDMA device reaches.

        Without one UCX moves their bytes through host memory, slower than the store does. A process
        that is read takes part in the read, and may crash when its reader dies.
        """
        if self.gpu is not None and not has_rdma(devices):
            raise SameOnAllRanks(
                f"direct = true: the engine is on a GPU, and [peer] devices = {devices!r} names no"
                " RDMA device such as mlx5_0:1"
            )

    def open(self, layout: RankLayout, devices: str) -> None:
        """Start a session with a store's layout, over these network devices.

        Raises TierError, NotSupported where NIXL does not take the tensors' memory.
        """
        self._pages = [
            tuple(page_run(run, cache_of(run, self._caches)) for run in group.runs)
            for group in layout.groups
        ]
        self.part_bytes = [sum(run.length for run in group.runs) for group in layout.groups]
        for name, value in ucx_settings(devices, self._transports).items():
            os.putenv(name, value)  # UCX reads them when the first agent is made
        self._part_strides = [group.stride for group in layout.groups]
        # The parts of slots are the blocks of a peer of one rank, numbered by their addresses.
        self._slot_overlaps = [
            [Overlap(0, own.size, own.base, own.stride, own.offset, 1) for own in _pieces(pages)]
            for pages in self._pages
        ]
        self._peers.clear()
        self._met.clear()
        self._overlaps.clear()
        if self._agent is None and (wrong := self._recreate()):
            raise NotSupported(wrong)

    @property
    def name(self) -> str:
        """The agent's name; "" without one."""
        return "" if self._agent is None else self._agent.name

    def serves(self) -> tuple[RankPages, int] | None:
        """Return how peers reach this rank's blocks, and how many there are; None: they cannot.

        Raises TierError, and ValueError for pages of too many pieces.
        """
        if self._agent is None:
            return None
        blocks = max(cache.storage.nbytes // cache.block_stride for cache in self._caches.values())
        try:
            metadata = self._agent.metadata()
        except MoveError as exc:
            raise TierIOError(str(exc)) from exc
        return RankPages(self._agent.name, metadata, tuple(self._pages), self.gpu), blocks

    def restart(self) -> None:
        """End all transfers by making a new agent. Raises TierError."""
        if wrong := self._recreate():
            raise TierIOError(wrong)

    def _recreate(self) -> str:
        """Make a new agent; return "", or what went wrong, and there is no agent then.

        As a text: an exception would keep the agent that failed.
        """
        self._agent, self._agents = None, self._agents + 1  # the only reference: that ends it
        self._met.clear()
        try:
            self._agent = self._make(f"kvstore-engine-{secrets.token_hex(8)}")
            storages = (cache.storage for cache in self._caches.values())
            for address, size in {(each.data_ptr(), each.nbytes) for each in storages}:
                self._agent.register(address, size, self.gpu)
        except MoveError as exc:
            self._agent = None
            return f"direct = true: {exc}"
        return ""

    def close(self) -> None:
        """End the agent and all its transfers."""
        self._agent = None

    def meet(self, peer: str, metadata: bytes) -> None:
        """Take note of how to reach a peer's agent."""
        if self._peers.pop(peer, None) != metadata:
            self._met.discard(peer)
        self._peers[peer] = metadata
        if len(self._peers) > PEERS_MAX:
            self._forget(next(iter(self._peers)))

    def _forget(self, peer: str) -> None:
        del self._peers[peer]
        if peer in self._met and self._agent is not None:
            self._met.discard(peer)
            try:
                self._agent.remove_peer(peer)
            except MoveError as exc:
                log.debug("%s", exc)

    def read(self, peer: str, moves: Sequence[tuple[Move, int]]) -> AgentTransfer:
        """Start reading slots, from these addresses on, into engine blocks. Raises TierError."""
        parts = [(move, at + move.part * self._part_strides[move.group]) for move, at in moves]
        return self._start([(peer, None, *_places(self._slot_overlaps, 0, parts))])

    def read_engine(
        self, ranks: Sequence[RankPages], moves: Sequence[tuple[Move, int]]
    ) -> AgentTransfer:
        """Start reading a peer's engine blocks into ours, of any ranks. Raises TierError."""
        shared, parts = self._overlaps_with(ranks), []
        for number, rank in enumerate(ranks):
            local, remote = _places(shared, number, moves)
            if local:
                parts.append((rank.agent, rank.gpu, local, remote))
        return self._start(parts)

    def _overlaps_with(self, ranks: Sequence[RankPages]) -> list[list[Overlap]]:
        """Return the overlaps of each group, and take note of the ranks. Raises TierError."""
        agents = tuple(rank.agent for rank in ranks)
        for rank in ranks:
            self.meet(rank.agent, rank.metadata)
        theirs = [rank.pages for rank in ranks]
        found = self._overlaps.get(agents)
        if found is None or found[0] != theirs:  # another peer may have named these agents
            if len(self._overlaps) >= ENGINES_MAX:
                self._overlaps.clear()
            overlaps = [
                overlaps_of(own, [pages[group] if group < len(pages) else () for pages in theirs])
                for group, own in enumerate(self._pages)
            ]
            found = self._overlaps[agents] = theirs, overlaps
        return found[1]

    def _start(
        self, parts: Sequence[tuple[str, int | None, list[Places], list[Places]]]
    ) -> AgentTransfer:
        """Start reading, by peer and the GPU that it has them on, from its places into ours."""
        if self._agent is None:
            raise TierIOError("no agent")
        transfer = AgentTransfer(0, self._agents, [])
        rows_of = [
            (peer, gpu, np.concatenate(own), np.concatenate(far)) for peer, gpu, own, far in parts
        ]
        try:
            for peer, gpu, local, remote in rows_of:
                self._meet(self._agent, peer)
                flight, over = self._agent.move(
                    peer, local, remote, write=False, gpu=self.gpu, peer_gpu=gpu
                )
                if over:
                    self._agent.let_go(flight)
                else:
                    transfer.flights.append(flight)
                transfer.bytes += int(local[:, 1].sum())
        except MoveError as exc:
            transfer.failure = str(exc)  # what was started of it is not over
        except BINDINGS as exc:  # nor is it then
            log.exception("a direct transfer was not started")
            transfer.failure = repr(exc)
        return transfer

    def _meet(self, agent: Agent, peer: str) -> None:
        """Make a peer known to the agent. Raises MoveError."""
        if peer not in self._met:  # one that cannot be reached fails its own transfers
            if agent.add_peer(self._peers.get(peer, b"")) != peer:
                raise MoveError(f"metadata of another exporter than {peer!r}", "refused")
            self._met.add(peer)

    def over(self, transfer: AgentTransfer) -> bool:
        """Return True if a transfer has ended. Raises TierError if it failed, and has ended."""
        if transfer.flights:
            if self._agent is None or transfer.agent != self._agents:
                raise TierIOError("its agent has ended")
            self._collect(self._agent, transfer)
        if transfer.failure and not transfer.flights:
            raise TierIOError(transfer.failure)
        return not transfer.flights

    @staticmethod
    def _collect(agent: Agent, transfer: AgentTransfer) -> None:
        flying, transfer.flights = transfer.flights, []
        for flight in flying:
            try:
                over = agent.over(flight)
            except MoveError as exc:
                over, transfer.failure = True, str(exc)
            if over:
                agent.let_go(flight)
            else:
                transfer.flights.append(flight)


def gpu_of(caches: dict[str, LayerCache]) -> int | None:
    """Return the number of the GPU that tensors are on; None: host memory. Raises NotSupported."""
    kinds = {str(cache.storage.device) for cache in caches.values()}
    kind, _, number = next(iter(kinds), "").partition(":")
    if len(kinds) != 1 or kind not in {"cpu", "cuda"}:
        raise NotSupported(
            f"direct = true: KV tensors are on {sorted(kinds)}, expected 'cpu' or one GPU"
        )
    return int(number or 0) if kind == "cuda" else None


def page_run(run: LayerRun, cache: LayerCache) -> PageRun:
    """Say where a layer's run lies in a tensor's memory."""
    return PageRun(
        run.offset,
        cache.piece_bytes,
        cache.pieces,
        base=cache.storage.data_ptr() + cache.offset,
        block_stride=cache.block_stride,
        piece_stride=cache.piece_stride,
    )


class Overlap(msgspec.Struct, frozen=True):
    """Bytes of an engine block's part that one piece here and one of a rank there have."""

    rank: int
    size: int
    base: int
    stride: int
    base_there: int
    stride_there: int

    def here(self, blocks: Places) -> Places:
        """Return the addresses of our engine blocks."""
        return np.uint64(self.base) + blocks * np.uint64(self.stride)

    def there(self, blocks: Places) -> Places:
        """Return the addresses of the peer's engine blocks."""
        return np.uint64(self.base_there) + blocks * np.uint64(self.stride_there)


def _places(
    overlaps: Sequence[Sequence[Overlap]], rank: int, moves: Sequence[tuple[Move, int]]
) -> tuple[list[Places], list[Places]]:
    """Return the places of moves here and at a rank there, whose blocks have these numbers.

    overlaps: by group.
    """
    local, remote = [], []
    for group, shared in enumerate(overlaps):
        numbers = [(move.block_id, there) for move, there in moves if move.group == group]
        blocks = np.array(numbers, np.uint64).reshape(-1, 2)
        for each in shared if numbers else ():
            if each.rank == rank:
                local.append(rows(each.here(blocks[:, 0]), each.size))
                remote.append(rows(each.there(blocks[:, 1]), each.size))
    return local, remote


class _Piece(msgspec.Struct, frozen=True, order=True):
    offset: int
    size: int
    base: int
    stride: int
    rank: int = 0


def _pieces(runs: Iterable[PageRun], rank: int = 0) -> Iterator[_Piece]:
    for run in runs:
        for n in range(run.pieces):
            offset, base = run.offset + n * run.piece_bytes, run.base + n * run.piece_stride
            yield _Piece(offset, run.piece_bytes, base, run.block_stride, rank)


def overlaps_of(own: Iterable[PageRun], theirs: Sequence[Iterable[PageRun]]) -> list[Overlap]:
    """Cut our runs of a part where those of a peer's ranks begin and end.

    Raises TierError if they do not have all of it.
    """
    there = sorted(piece for rank, runs in enumerate(theirs) for piece in _pieces(runs, rank))
    found, at = list[Overlap](), 0
    for piece in sorted(_pieces(own)):
        reached, end = piece.offset, piece.offset + piece.size
        while reached < end:
            while at < len(there) and there[at].offset + there[at].size <= reached:
                at += 1
            if at == len(there) or there[at].offset > reached:
                raise TierError(f"the peer's ranks lack byte {reached} of a block's part")
            other = there[at]
            here, far = piece.base + reached - piece.offset, other.base + reached - other.offset
            size = min(end, other.offset + other.size) - reached
            found.append(Overlap(other.rank, size, here, piece.stride, far, other.stride))
            reached += size
    return found
