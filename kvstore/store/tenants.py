"""The tenants of a store: who they are, and what each has and may have in each tier.

A tenant is known once the configuration, an engine or an operator has named it. Memory and disk
look at its share themselves (core/tenants.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvstore.config import TenantConfig, refuse_floors
from kvstore.core import limits
from kvstore.core.errors import ConfigError, ProtocolError
from kvstore.core.tenants import Share
from kvstore.core.types import tag_of
from kvstore.metrics import MEMORY, NVME
from kvstore.settings import read_tenant
from kvstore.store.status import TenantStatus


class Tenants:
    """Shares by tier and tag."""

    def __init__(self, *, disk: bool) -> None:
        self.names: dict[str, bytes] = {}  # to their tags
        self._configured: Sequence[str] = ()
        self._capacities: Mapping[str, int] = {}  # by tier
        self.shares: dict[str, dict[bytes, Share]] = {MEMORY: {}}
        if disk:
            self.shares[NVME] = {}

    def join(self, names: Iterable[str]) -> bool:
        """Know of these from now on; True if one is new. Raises ProtocolError for a wrong name.

        A name beyond the limit is ignored: its blocks count for no tenant.
        """
        before = len(self.names)
        for name in names:
            if name in self.names or len(self.names) >= limits.TENANTS_MAX:
                continue
            try:
                read_tenant(name, {})
            except ConfigError as exc:
                raise ProtocolError(f"tenant: {exc}") from None
            self.names[name] = tag_of(name)
            for shares in self.shares.values():
                shares[self.names[name]] = Share()
        return len(self.names) > before

    def use(
        self, capacities: Mapping[str, int], tenants: Sequence[TenantConfig] | None = None
    ) -> None:
        """Have tiers of these capacities, by name, and tenants as a configuration has them.

        Those of the last one that are not in it have no limits any more. tenants: None: the limits
        of all stay. Raises ConfigError, and changes nothing, when too many others have been named,
        or what tenants keep is too much.
        """
        self._refuse(capacities, () if tenants is None else tenants, reset=tenants is not None)
        self._capacities = capacities
        if tenants is None:
            return
        before = self._configured
        self._configured = [tenant.name for tenant in tenants]
        self.join(self._configured)
        for name in {*before, *self._configured}:  # all at once: old floors need not fit any more
            for shares in self.shares.values():
                share = shares[self.names[name]]
                share.quota_bytes, share.floor_bytes = None, 0
        for tenant in tenants:
            for tier in self.shares:
                self.limit(tenant.name, tier, *tenant.limits_of(tier))

    def _refuse(
        self, capacities: Mapping[str, int], new: Sequence[TenantConfig], *, reset: bool
    ) -> None:
        """Raise ConfigError for too many tenants, or too much that they keep.

        reset: the limits of the last configuration end.
        """
        named = {tenant.name for tenant in new}
        count = len(self.names.keys() | named)
        if count > limits.TENANTS_MAX:
            raise ConfigError(
                f"[[tenant]]: {count} with those named since the store's start, expected up to"
                f" {limits.TENANTS_MAX}; start it again to have it forget these"
            )
        changed = named.union(self._configured if reset else ())
        for tier, shares in self.shares.items():
            floors = [tenant.limits_of(tier)[1] for tenant in new]
            floors += [shares[tag].floor_bytes for n, tag in self.names.items() if n not in changed]
            refuse_floors(tier, sum(floors), capacities[tier])

    def limit(self, name: str, tier: str, quota_bytes: int | None, floor_bytes: int) -> None:
        """Change what a tenant may have, and keeps. Raises ConfigError."""
        if tier not in self.shares:
            expected = " or ".join(self.shares)
            raise ConfigError(f"tier {tier!r}, expected {expected}: the store has no other")
        if quota_bytes is not None and floor_bytes > quota_bytes:
            raise ConfigError(
                f"a floor of {floor_bytes} bytes, expected up to the quota of {quota_bytes}"
            )
        tag = tag_of(name)
        floors = sum(s.floor_bytes for other, s in self.shares[tier].items() if other != tag)
        refuse_floors(tier, floors + floor_bytes, self._capacities[tier])
        self.join((name,))
        if name not in self.names:
            raise ConfigError(f"tenant {name!r}: there are {limits.TENANTS_MAX} already")
        share = self.shares[tier][tag]
        share.quota_bytes, share.floor_bytes = quota_bytes, floor_bytes

    def gauges(self) -> dict[tuple[str, ...], float]:
        """Return what tenants have and may have, by metric name and label values."""
        found: dict[tuple[str, ...], float] = {}
        for each in self.every():
            metric = "kvstore_tenant_bytes", each.tenant, each.tier
            found[*metric, "used"], found[*metric, "floor"] = each.used_bytes, each.floor_bytes
            if each.quota_bytes is not None:
                found[*metric, "quota"] = each.quota_bytes
        return found

    def every(self) -> Iterator[TenantStatus]:
        """Go through all tenants and tiers."""
        for name, tag in self.names.items():
            for tier, shares in self.shares.items():
                share = shares[tag]
                yield TenantStatus(
                    name, tier, share.used_bytes, share.quota_bytes, share.floor_bytes
                )
