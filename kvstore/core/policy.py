"""Which block leaves memory next, by a policy of others: a class that the configuration names.

A policy ranks the ends of paths: blocks that can be evicted, since no block hangs below them in
memory and no request reads them. The store tells it which these are and what requests use, and the
policy chooses one at a time. Its order is a LeafLRU, too, of the same ends: a policy that raises,
or chooses another block, is used no more, and memory goes on by least recent use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from kvstore.core.eviction import SKIPS_MAX, LeafLRU, evictable
from kvstore.core.index import Node


class Policy(Protocol):
    """Called from one thread. A call that takes long holds up all engines.

    Made with a function that returns how many blocks fit into memory, which can change. A block has
    a `key`, and as `parent` the block before it. now_s: seconds of a clock that only goes forward.
    """

    def enter(self, block: Node, now_s: float) -> None:
        """A block can be evicted from now on: it was stored, or what hung below it has gone."""

    def leave(self, block: Node) -> None:
        """A block that has entered cannot be evicted any more, or has gone."""

    def used(self, block: Node, now_s: float) -> None:
        """A request used a block, and so all above it, whether it has entered or not."""

    def choose(self) -> Node:
        """Say which of the blocks that have entered and not left goes next; leave() follows."""

    def clear(self) -> None:
        """All blocks have gone."""


MakePolicy = Callable[[Callable[[], int]], Policy]


class PluginOrder(LeafLRU):
    """What a LeafLRU is, for a policy of others."""

    def __init__(
        self,
        make: MakePolicy,
        blocks: Callable[[], int],
        now_s: Callable[[], float],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        """blocks(): how many fit into memory. failed(call, why): the policy is used no more."""
        super().__init__()
        self._now_s, self._failed = now_s, failed
        self._entered: set[Node] = set()
        self._policy: Policy | None = None
        try:
            self._policy = make(blocks)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # noqa: BLE001 - a plug-in's code may raise anything
            failed("the constructor", exc)

    def _call(self, verb: str, *given: object) -> Any:  # noqa: ANN401 - what a plug-in returns
        if self._policy is None:
            return None
        try:
            return getattr(self._policy, verb)(*given)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # noqa: BLE001 - as above
            self._off(verb, exc)
        return None

    def _off(self, verb: str, exc: BaseException) -> None:
        self._policy = None
        self._entered.clear()
        self._failed(verb, exc)

    def _sync(self, entry: Node | None) -> None:
        """Have the policy know whether a block can be evicted."""
        if entry is None or self._policy is None:
            return
        if not evictable(entry):
            self._leave(entry)
        elif entry not in self._entered:
            self._entered.add(entry)
            self._call("enter", entry, self._now_s())

    def _leave(self, entry: Node) -> None:
        if entry in self._entered:
            self._entered.remove(entry)
            self._call("leave", entry)

    def stored(self, entry: Node, now_s: float) -> None:
        """A block can be read now."""
        super().stored(entry, now_s)
        self._sync(entry.parent)
        self._sync(entry)

    def used(self, entry: Node, now_s: float) -> None:
        """A request used a block, and so all above it."""
        super().used(entry, now_s)
        self._sync(entry)
        self._call("used", entry, now_s)

    def unpinned(self, entry: Node) -> None:
        """A request used a block until now."""
        self.used(entry, self._now_s())

    def covered(self, entry: Node | None) -> None:
        """A block has a child from now on."""
        self._sync(entry)

    def freed(self, entry: Node | None) -> None:
        """A block lost its last child or pin."""
        super().freed(entry)
        self._sync(entry)

    def remove(self, entry: Node) -> None:
        """A block is pinned."""
        super().remove(entry)
        self._leave(entry)

    def clear(self) -> None:
        """Forget all blocks at once."""
        super().clear()
        self._entered.clear()
        self._call("clear")

    def victims(self, *, wanted: bool = False) -> Iterator[Node]:
        """Take out what the policy chooses; as LeafLRU does."""
        skipped = 0
        while self._policy is not None and self._entered and skipped < SKIPS_MAX:
            chosen = self._call("choose")
            if not isinstance(chosen, Node) or chosen not in self._entered:
                if self._policy is not None:  # else it has raised
                    found = type(chosen).__name__  # its repr is a plug-in's code, too
                    expected = "expected a block that has entered and not left"
                    self._off("choose", ValueError(f"{expected}, found another {found}"))
                break
            self._leave(chosen)
            if not evictable(chosen):  # it is being copied; freed() will tell
                skipped += 1
                continue
            self._unlink(chosen)
            yield chosen
            self.freed(chosen.parent)
        if self._policy is None:
            yield from super().victims(wanted=wanted)
