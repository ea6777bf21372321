"""All namespaces of a store: made for an engine that brings one, and forgotten when unused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvstore.barrier import Barrier, Ended
from kvstore.config import Config
from kvstore.core.errors import ConfigError
from kvstore.core.layout import SlotLayout
from kvstore.core.segmented import GHOSTS
from kvstore.core.tier import Sharing, SlotMemory, Tier
from kvstore.core.tiering import Tiering
from kvstore.core.write_budget import WriteBudget
from kvstore.handover.peers import Peers
from kvstore.metrics import NVME, Numbers
from kvstore.store.live_settings import LiveSettings
from kvstore.store.namespace import Namespace
from kvstore.store.token_ids import TokenIds
from kvstore.visits import Visits
from kvstore.wire import framing

log = logging.getLogger(__name__)

MakeTiers = Callable[[str, int, SlotMemory], Sequence[Tier]]
Send = Callable[[int, framing.Message, int | None], None]


class StoreContext(NamedTuple):
    """What several parts of a store use.

    settings: those that the store runs with now. send(connection, message, descriptor): queue a
    message. peers: other stores, if it has any. barrier: where bugs end. tokens: of blocks, for KV
    events.
    """

    settings: LiveSettings
    numbers: Numbers
    send: Send
    peers: Peers | None
    barrier: Barrier
    tokens: TokenIds


class Namespaces(dict[str, Namespace]):
    """Namespaces by digest, their lower tiers, and which of them a turn visits."""

    def __init__(self, context: StoreContext, extent_bytes: int, make_tiers: MakeTiers) -> None:
        """extent_bytes: of memory; a slot has to fit in."""
        super().__init__()
        self._settings, self._numbers = context.settings, context.numbers
        self._peers = context.peers
        self._barrier, self._tokens = context.barrier, context.tokens
        self._extent_bytes = extent_bytes
        self._make_tiers = make_tiers
        nvme = context.settings.running.nvme
        self._visits = Visits()
        self._broken: set[str] = set()  # that have met a bug
        self.budgets: dict[str, WriteBudget] = {}
        if nvme is not None:
            self.budgets[NVME] = WriteBudget(nvme.write_budget_bytes)

    def use(self, config: Config) -> None:
        """Run with other settings: what waits for lower tiers, and is written to them."""
        backlogs = _backlogs_of(config)
        if config.nvme is not None:
            self.budgets[NVME].change(config.nvme.write_budget_bytes)
        for namespace in self.values():
            for name, queue in namespace.tiering.queues.items():
                queue.backlog.limit_ns = backlogs.get(name, queue.backlog.limit_ns)

    def find(self, layout: SlotLayout) -> Namespace:
        """Return the namespace of a layout, a new one if need be.

        Raises ConfigError for blocks that are too large for this store, and where a bug was met.
        """
        cpu, disk = self._settings.running.cpu, self._settings.running.nvme
        if layout.slot_bytes + 4 > self._extent_bytes:
            raise ConfigError(
                f"a block takes {layout.slot_bytes} bytes, an extent has {self._extent_bytes}:"
                " use a larger cpu capacity or extent, or a smaller block_tokens"
            )
        if disk is not None and layout.slot_bytes > disk.extent_bytes:
            raise ConfigError(
                f"a block takes {layout.slot_bytes} bytes, an extent on disk has"
                f" {disk.extent_bytes}: use a larger [nvme] extent, or a smaller block_tokens"
            )
        if layout.digest in self._broken:
            raise ConfigError("a bug of the store: restart it to have this model served again")
        if layout.digest not in self:
            space = cpu.capacity_bytes + (0 if disk is None else disk.capacity_bytes)
            remembered = max(2 * space, GHOSTS * cpu.capacity_bytes)
            tokens = self._tokens if self._tokens.bytes_max else None
            made = Namespace(layout, self._numbers, self._tiering, remembered, cpu.policy, tokens)
            self[layout.digest] = made
            made.around_tiers = self._around_tiers(made)
        return self[layout.digest]

    def _tiering(self, namespace: Namespace) -> Tiering:
        """Make its tiers; none for blocks without a name: they could not be found again."""
        layout, tiers, remote = namespace.layout, list[Tier](), list[Tier]()
        if not layout.unnamed:
            made = self._make_tiers(layout.digest, layout.slot_bytes, namespace)
            tiers += [tier for tier in made if not isinstance(tier, Sharing)]
            remote += [] if self._peers is None else [self._peers.inlet(namespace)]
            remote += [tier for tier in made if isinstance(tier, Sharing)]
        return Tiering(
            namespace.manager,
            tiers,
            layout.slot_bytes,
            backlog_ns=_backlogs_of(self._settings.running),
            budgets=self.budgets,
            remote=remote,
            promoted=partial(self._numbers.observe, "kvstore_promotion_seconds"),
        )

    # Turns

    def wake(self, namespace: Namespace) -> None:
        """Visit a namespace in every turn from now on, until it is at rest."""
        self._visits.wake(namespace.layout.digest)

    @property
    def awake(self) -> list[Namespace]:
        """List the namespaces that an engine has, or where something goes on."""
        return self._visits.awake(self)

    def visited(self, now_ns: int) -> list[Namespace]:
        """List the namespaces that this turn visits: those awake, and a few of the others."""
        if self._peers is not None:
            for source in self._peers.producer.sources():
                self._visits.wake(source.layout.digest)
        return self._visits.take(self, now_ns)

    def settle(self, namespace: Namespace) -> None:
        """A turn is over: visit a namespace at rest only now and then."""
        if namespace.at_rest:
            self._visits.rest(namespace.layout.digest)
        else:
            self.wake(namespace)

    def _around_tiers(self, namespace: Namespace) -> Ended:
        """For a bug in the block the lower tiers of a namespace are used no more, and its peers."""

        def leave() -> None:
            digest = namespace.layout.digest[:12]
            log.error("the tiers of namespace %s are off until the store is started again", digest)
            namespace.tiering.stop()

        return self._barrier.around("the tiers of a namespace", leave)

    # Leaving

    def clear_blocks(self) -> None:
        """Put every block of all namespaces out of reach; their slots come back in later turns."""
        for namespace in self.values():
            namespace.manager.clear()
            namespace.tiering.clear()
            self.wake(namespace)

    def give_up(self, namespace: Namespace) -> None:
        """Serve a namespace no more that a bug was met in; what it has of memory stays its own."""
        digest = namespace.layout.digest
        log.error("namespace %s is off until the store is started again", digest[:12])
        self._broken.add(digest)
        if self.pop(digest, None) is not None:
            namespace.end_count()

    def forget(self, namespace: Namespace) -> None:
        """Forget a namespace that has given its memory back, unless a peer may ask for its blocks.

        What lower tiers keep of it is there when an engine comes that has it.
        """
        if self._peers is None or self._peers.forget(namespace):
            namespace.tiering.close()
            namespace.end_count()
            del self[namespace.layout.digest]
            log.debug("namespace %s is forgotten", namespace.layout.digest[:12])

    @property
    def queued_blocks(self) -> int:
        """Count the blocks that are not in a lower tier yet and will be."""
        return sum(namespace.tiering.queued for namespace in self.values())

    def close(self) -> None:
        """End the lower tiers in order."""
        for namespace in self.values():
            with self._barrier.around("the end of a namespace's tiers"):
                namespace.tiering.close()


def _backlogs_of(config: Config) -> dict[str, int]:
    """Return how long blocks may wait for each tier, by its name."""
    found = {tier.name: tier.backlog_ns for tier in config.tiers}
    return found if config.nvme is None else {**found, NVME: config.nvme.backlog_ns}
