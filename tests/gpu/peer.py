"""A peer in a process of its own: a store's slots in host memory, and an engine's pages.

Also what a test needs of its own engine, so that both sides have the same pages.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np
import torch

from connectors.copies.host import LayerCache
from connectors.engine_agent import NETWORKS, AgentTransfer, EngineAgent
from kvstore.core.errors import TierError
from kvstore.core.layout import GroupLayout, LayerRun, RankLayout, RankPages
from tiers.nixl.agent import Agent
from tiers.nixl.pages import in_pages, in_slots

BLOCKS, LAYERS, PAGE = 24, 3, 16384
SLOT = LAYERS * PAGE
LIMIT_S = 60.0
DEVICES = "lo"


class Slots(msgspec.Struct):
    """Where a peer's slots are, and the agent that serves them."""

    agent: str
    metadata: bytes
    address: int


def truth(seed: int) -> torch.Tensor:
    """What slots or engine blocks hold: block, layer, bytes."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (BLOCKS, LAYERS, PAGE), dtype=torch.uint8, generator=made)


class Engine:
    """An engine's pages, layer after layer, and its agent."""

    def __init__(self, device: str, seed: int, *, written: bool) -> None:
        """written: by a peer's store, so networks are used only."""
        self.memory = truth(seed).transpose(0, 1).contiguous().to(device)
        storage = self.memory.view(-1)
        caches = {
            str(layer): LayerCache(storage, layer * BLOCKS * PAGE, PAGE, PAGE)
            for layer in range(LAYERS)
        }
        runs = tuple(LayerRun(str(at), at * PAGE, PAGE, writes=True) for at in range(LAYERS))
        self.agent = EngineAgent(caches, transports=NETWORKS if written else None)
        self.agent.open(RankLayout(SLOT, (GroupLayout(SLOT, runs),)), DEVICES)
        served = self.agent.serves()
        assert served is not None
        self.rank = served[0]

    def blocks(self) -> torch.Tensor:
        """What it holds now: block, layer, bytes."""
        return self.memory.cpu().transpose(0, 1)

    def over(self, moving: AgentTransfer) -> None:
        """Wait for a transfer."""
        limit = time.monotonic() + LIMIT_S
        while not self.agent.over(moving):
            assert time.monotonic() < limit, "a transfer has not ended"
            time.sleep(0.0001)


class Peer:
    """What the other process does."""

    def __init__(self, device: str, *, written: bool = False) -> None:
        self._engine = Engine(device, 1, written=written)
        self._slots = truth(2).contiguous()
        self._agent = Agent(f"slots of {self._engine.rank.agent}")
        self._agent.register(self._slots.data_ptr(), self._slots.numel())
        self._met: set[str] = set()

    def describe(self) -> tuple[RankPages, Slots]:
        agent = self._agent
        return self._engine.rank, Slots(agent.name, agent.metadata(), self._slots.data_ptr())

    def clear(self) -> None:
        """Overwrite its engine's memory."""
        self._engine.memory.zero_()

    def blocks(self) -> bytes:
        """What its engine holds now."""
        return self._engine.blocks().contiguous().numpy().tobytes()

    def write_on(self, rank: RankPages) -> str:
        """Write all slots to the blocks of an engine, until that fails; return how."""
        while True:
            try:
                self.write(rank, [(block, block) for block in range(BLOCKS)])
            except TierError as exc:
                return str(exc)

    def write(self, rank: RankPages, pairs: list[tuple[int, int]]) -> None:
        """Write slots to engine blocks, by pairs, as an exporter does it."""
        agent = self._agent
        if rank.agent not in self._met:
            assert agent.add_peer(rank.metadata) == rank.agent
            self._met.add(rank.agent)
        slots = np.array([self._slots.data_ptr() + slot * SLOT for slot, _ in pairs], np.uint64)
        blocks = np.array([block for _, block in pairs], np.uint64)
        here = np.concatenate([in_slots(page, slots) for page in rank.pages[0]])
        there = np.concatenate([in_pages(page, blocks) for page in rank.pages[0]])
        flight, over = agent.move(rank.agent, here, there, write=True, peer_gpu=rank.gpu)
        limit = time.monotonic() + LIMIT_S
        while not over:
            assert time.monotonic() < limit, "a write has not ended"
            over = agent.over(flight)
        agent.let_go(flight)
