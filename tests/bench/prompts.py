"""The prompts that `tests.bench index` stores and asks for.

What is stored comes in units of PREFIX blocks, by turns: one long prompt, two conversations, a
head with many short tails, and a head with a few long ones. So each way in which half a prompt
can be here is asked for among blocks that are all over the index.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
from msgspec import structs

from kvstore.core.types import BlockKey, Chain
from tests.bench.report import SEED

PREFIX = 1000  # blocks of a unit, and of each prompt that is asked for
WIDTH = 32  # bytes of a block's hash
HALF, QUARTER = PREFIX // 2, PREFIX // 4
MEMBERS_MAX = 16  # prompts of a unit


class Request(msgspec.Struct, eq=False):
    """The blocks of one prompt; the first `shared` are those of the prompt `of`, too."""

    number: int
    chain: Chain
    keys: list[BlockKey]
    native_keys: list[bytes]  # vLLM's: the group has four bytes
    shared: int = 0
    of: int | None = None

    def received(self) -> Request:
        """Return a copy whose bytes have just been written, as a message's that has come in."""
        packed = bytes(bytearray(self.chain.packed))
        native_keys = [key[:WIDTH] + key[WIDTH:] for key in self.native_keys]
        return structs.replace(self, chain=Chain(packed, WIDTH, 1), native_keys=native_keys)


def request(
    number: int, blocks: int = PREFIX, head: Request | None = None, shared: int = 0
) -> Request:
    """Make up a prompt; the same numbers give the same blocks.

    head: it begins with `shared` blocks of this one.
    """
    own = blocks - shared
    packed = random.Random(f"{SEED} {number}").randbytes(WIDTH * own)
    suffix = Chain(b"", WIDTH, 1).suffixes[0]
    hashes = [packed[at : at + WIDTH] for at in range(0, WIDTH * own, WIDTH)]
    keys = [BlockKey(each + suffix) for each in hashes]
    native_keys = [each + bytes(4) for each in hashes]
    if head is None:
        return Request(number, Chain(packed, WIDTH, 1), keys, native_keys)
    chain = Chain(head.chain.packed[: WIDTH * shared] + packed, WIDTH, 1)
    keys = head.keys[:shared] + keys
    native_keys = head.native_keys[:shared] + native_keys
    return Request(number, chain, keys, native_keys, shared, head.number)


class Kind(msgspec.Struct, frozen=True):
    """Prompts of a unit: how many, the blocks of the first, and how many of them all share."""

    prompts: int
    blocks: int
    shared: int = 0


KINDS = (Kind(1, PREFIX), Kind(2, HALF), Kind(10, HALF + 50, HALF), Kind(3, HALF, QUARTER))


def unit(number: int, kind: Kind | None = None) -> list[Request]:
    """Return the prompts of a unit, which hold PREFIX blocks together; kind: not its own."""
    kind = kind or KINDS[number % len(KINDS)]
    first = number * MEMBERS_MAX
    requests = [request(first, kind.blocks)]
    for each in range(first + 1, first + kind.prompts):
        head = requests[-1] if kind.shared else None
        requests.append(request(each, kind.blocks, head, kind.shared))
    return requests


class Case(msgspec.Struct, frozen=True):
    """A way to ask: of a prompt of a kind's last unit, how many blocks of it the question has."""

    name: str  # of the result
    kind: int
    shared: Sequence[int]  # one of these
    case: str | None = None


CASES = (
    Case("lookup_full_hit", 0, (PREFIX,)),
    Case("lookup_half_hit", 1, (HALF,), "next turn"),
    Case("lookup_half_hit", 2, (HALF,), "shared head, new tail"),
    Case("lookup_half_hit", 3, (HALF,), "shared head, next turn"),
    Case("lookup_half_hit", 0, range(QUARTER, PREFIX - QUARTER), "edited"),
    Case("lookup_miss", 0, (0,)),
)


def question(case: Case, units: int, rng: random.Random) -> Request:
    """Make up a prompt of PREFIX blocks that asks in this way for one of so many units."""
    number = rng.randrange(case.kind, units, len(KINDS))
    stored = rng.choice(unit(number))
    return request(-1 - number, PREFIX, stored, rng.choice(case.shared))
