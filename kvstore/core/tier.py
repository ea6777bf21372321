"""What a place below the memory pool must offer. A third party adds one by its dotted name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from kvstore.core.types import (
    BlockKey,
    Chain,
    Changes,
    GroupRule,
    JobResult,
    LookupResult,
    Slot,
    TransferJob,
)


class SlotMemory(Protocol):
    """The bytes of a namespace's slots, as a tier sees them."""

    def view(self, slot: Slot) -> memoryview:
        """Return the slot's bytes, writable, valid while the slot is pinned."""


class Tier(Protocol):
    """One place below the host pool where blocks can live.

    Called from one thread. No method blocks, except drain and close. Failures of a job come
    back in its JobResult; submit raises TierError only for a closed tier. A tier of others that
    raises anything else is used no more. A tier of others is closed on another thread, drained
    before, and is not called meanwhile.
    """

    name: str  # metric label, unique in the process

    def lookup(self, key: BlockKey) -> LookupResult:
        """Say whether the block is here; RETRY while a remote answer is outstanding."""

    def touch(self, key: BlockKey) -> None:
        """A request used the blocks up to this one, wherever it got them from."""

    def submit(self, job: TransferJob) -> None:
        """Start moving blocks; the slots are the tier's to use until the job's result."""

    def poll(self) -> Sequence[JobResult]:
        """Return finished jobs. Each submitted job appears exactly once, in any order."""

    def discard(self, keys: Collection[BlockKey]) -> None:
        """Forget these blocks; unknown keys are ignored."""

    def clear(self) -> None:
        """Forget every block; stores under way may still land."""

    def drain(self) -> None:
        """Wait until all submitted jobs have a result; poll still has to fetch them."""

    def close(self) -> None:
        """Release everything; results not polled are lost. Safe to call twice."""


@runtime_checkable
class Leading(Protocol):
    """A tier that can look many blocks up at once; NVMe and peers do, and others may."""

    def leading(self, keys: Sequence[BlockKey], first: int) -> tuple[LookupResult, int]:
        """Return what lookup() says of keys[first], and from there on of how many blocks."""


def leading_alike(
    lookup: Callable[[BlockKey], LookupResult], keys: Sequence[BlockKey], first: int
) -> tuple[LookupResult, int]:
    """Return what leading() is to return, of a tier that looks blocks up one by one."""
    result, end = lookup(keys[first]), first + 1
    while end < len(keys) and lookup(keys[end]) is result:
        end += 1
    return result, end - first


@runtime_checkable
class Telling(Protocol):
    """A tier that can say what enters and leaves it; NVMe does, and others may."""

    def tell(self) -> None:
        """Note changes from now on; somebody takes them in every turn."""

    def take_changes(self) -> Changes:
        """Return what can be read since the last call, and what cannot any more."""


class TokenRow(NamedTuple):
    """A block and its token ids, u32."""

    key: BlockKey
    parent: BlockKey | None
    tokens: bytes


class TokenRows(NamedTuple):
    """Some of them, each after its parent. mark: where the next ones begin, unless these are last.

    Another mark than 0 is of no meaning but to the tier.
    """

    rows: Sequence[TokenRow]
    mark: int
    last: bool


@runtime_checkable
class Describing(Protocol):
    """A tier that can keep token ids beside blocks, for KV events after a restart; NVMe can."""

    @property
    def blocks(self) -> int:
        """Count the blocks that are known to be here."""

    def describe(self, tokens_of: Callable[[BlockKey], bytes]) -> None:
        """Keep from now on what tokens_of says of a block; b"" for one that is not known."""

    def token_rows(self, mark: int) -> TokenRows | None:
        """Return blocks that can be read, from a mark on; None: it is not known yet, ask again."""


@runtime_checkable
class Placing(Protocol):
    """A tier that reads at several places, each at a pace of its own: other stores."""

    def place(self, key: BlockKey) -> str | None:
        """Name the place of a block that is a HIT; None: it is still being computed there."""


@runtime_checkable
class Bounded(Protocol):
    """A tier that can be full, so that it evicts a block for each that it is given; NVMe is."""

    @property
    def full(self) -> bool:
        """Tell whether it is now."""


@runtime_checkable
class Sharing(Protocol):
    """A tier of several stores: asked about paths, and given runs of blocks that are used again.

    The store copies nothing else to it. The object tier is one.
    """

    def search(
        self, rules: Sequence[GroupRule], chain: Chain, first: int, blocks: int, now_ns: int
    ) -> None:
        """Find out what is here of the leading blocks of a path, of which block `first` is wanted.

        lookup() of that block in the first group of full attention is RETRY meanwhile.
        """

    def use(self, rules: Sequence[GroupRule], chain: Chain, blocks: int, now_ns: int) -> int:
        """A request uses the leading blocks of a path; return how many cannot be queued."""

    def offered(
        self, now_ns: int, here: Callable[[Sequence[BlockKey]], bool]
    ) -> Sequence[BlockKey]:
        """Return blocks to store here next, as one job; none, if there are none now.

        here(keys): whether blocks can still be stored. Those of which that is False are passed
        over, and cost nothing of what bounds the tier.
        """

    @property
    def waiting(self) -> int:
        """Count the blocks that offered() is going to return."""


class TierContext(msgspec.Struct, frozen=True):
    """What a tier is made from; one tier object per namespace."""

    name: str
    namespace: str  # digest: everything that decides the bytes
    slot_bytes: int
    memory: SlotMemory
    options: Mapping[str, Any]
