"""What a policy owes memory, one test for each promise. A subclass names its `policy`."""

from __future__ import annotations

import random

import pytest

from kvstore.core.index import Node
from kvstore.core.leases import Lease
from kvstore.core.policy import MakePolicy
from kvstore.core.trial import Cache
from kvstore.core.types import BlockKey, Chain, LookupResult, Slot

_WIDTH = 8
_STEPS = 3000


class Memory(Cache):
    """Memory of one model, with a policy that must not fail."""

    def __init__(self, policy: MakePolicy, slots: int) -> None:
        super().__init__(slots, policy, self._failed)

    @staticmethod
    def _failed(call: str, why: BaseException) -> None:
        raise AssertionError(f"the policy failed in {call}") from why

    def chain(self, *numbers: int) -> Chain:
        """Name the blocks of a prompt; prompts that begin alike share blocks."""
        hashes, name = [], 0
        for number in numbers:
            name = hash((name, number)) & 2**63 - 1
            hashes.append(name.to_bytes(_WIDTH, "big"))
        return Chain(b"".join(hashes), _WIDTH, 1)

    def fill(self, chain: Chain) -> int:
        """Use a prompt and store its missing blocks; return how many of its blocks are stored."""
        return sum(self.use(chain))

    def lease(self, chain: Chain) -> Lease | None:
        """Lease the stored blocks of a prompt; they stay until complete_load()."""
        here = self.manager.lookup(chain, chain.blocks).blocks
        return self.manager.prepare_load(chain, here, 1, 1 << 60) if here else None

    def has(self, key: BlockKey) -> bool:
        """Tell whether a block can be read."""
        return self.manager.index.probe(key) is LookupResult.HIT


class PolicyContract:
    """What a policy owes. A subclass gives a `policy`: a class, as the configuration names it."""

    @pytest.fixture
    def policy(self) -> MakePolicy:
        """The class."""
        raise NotImplementedError("give the fixture `policy`")

    def test_every_block_that_can_go_goes_when_room_is_needed(self, policy: MakePolicy) -> None:
        """Single blocks and paths, until nothing is left."""
        memory = Memory(policy, 60)
        prompts = [memory.chain(number) for number in range(20)]
        prompts += [memory.chain(100, *range(number, number + 3)) for number in range(10)]
        for chain in prompts:
            assert memory.fill(chain) == chain.blocks
        assert len(memory.manager.prepare_store(60)) == 60
        assert not len(memory.manager.index)

    def test_what_is_read_stays_and_goes_later(self, policy: MakePolicy) -> None:
        """A lease of a path holds all of it."""
        memory = Memory(policy, 10)
        path, other = memory.chain(1, 2, 3), memory.chain(4, 5)
        memory.fill(path)
        memory.fill(other)
        lease = memory.lease(path)
        assert lease is not None
        taken = memory.manager.prepare_store(10)
        assert len(taken) == 7
        assert all(memory.has(path.key(0, at)) for at in range(3))
        memory.manager.complete_load(lease.lease_id)
        assert len(memory.manager.prepare_store(10)) == 3

    def test_a_path_goes_from_its_end(self, policy: MakePolicy) -> None:
        """A block that has gone takes nothing along."""
        memory = Memory(policy, 8)
        path = memory.chain(*range(8))
        memory.fill(path)
        for left in range(7, -1, -1):
            assert len(memory.manager.prepare_store(1)) == 1
            assert [memory.has(path.key(0, at)) for at in range(8)] == [True] * left + [False] * (
                8 - left
            )

    def test_after_a_clear_it_starts_anew(self, policy: MakePolicy) -> None:
        """It names no block of before."""
        memory = Memory(policy, 6)
        for number in range(6):
            memory.fill(memory.chain(number))
        memory.manager.clear()
        memory.manager.clear_some()
        assert memory.fill(memory.chain(7, 8)) == 2
        assert len(memory.manager.prepare_store(6)) == 6

    def test_it_names_what_it_was_given(self, policy: MakePolicy) -> None:
        """As the manager calls it: choose() after enter(), leave() after choose()."""
        made = policy(lambda: 4)
        blocks = [Node(BlockKey(bytes([n])), None, Slot(n)) for n in range(4)]
        for number, block in enumerate(blocks):
            made.enter(block, number)
        made.used(blocks[1], 9)
        made.leave(blocks[2])
        left: list[Node] = []
        for _ in range(3):
            left.append(made.choose())
            made.leave(left[-1])
        assert sorted(left, key=blocks.index) == [blocks[0], blocks[1], blocks[3]]

    @pytest.mark.parametrize("seed", range(5))
    def test_any_order_of_calls(self, policy: MakePolicy, seed: int) -> None:
        """Prompts of a few kinds, leases that overlap, blocks that are dropped and copied."""
        draw = random.Random(seed)
        slots = draw.choice([8, 30, 100])
        memory = Memory(policy, slots)
        manager = memory.manager
        leases: list[Lease] = []
        for step in range(_STEPS):
            manager.now_s = step // 10
            chain = memory.chain(*(draw.randrange(3) for _ in range(draw.randrange(1, 6))))
            match draw.randrange(8):
                case 0:
                    lease = memory.lease(chain)
                    leases += [] if lease is None else [lease]
                case 1 if leases:
                    manager.complete_load(leases.pop(draw.randrange(len(leases))).lease_id)
                case 2:
                    manager.drop(chain.key(0, chain.blocks - 1), "damaged")
                case 3:
                    entry = manager.pin(chain.key(0, draw.randrange(chain.blocks)))
                    for _ in range(draw.randrange(2) * slots):
                        memory.fill(memory.chain(draw.randrange(50, 1000)))
                    if entry is not None:
                        assert memory.has(entry.key), "a block went that is being copied"
                        manager.unpin([entry], used=False)
                case 4 if step % 500 == 0:
                    manager.clear()
                case _:
                    memory.fill(chain)
        for lease in leases:
            manager.complete_load(lease.lease_id)
        manager.clear_some(slots)
        assert len(manager.prepare_store(slots)) == slots, "blocks that could go were not named"
