"""Which settings a running store takes over from its file, and which need a restart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kvstore.config import DISK_BYTES_MAX, DISK_BYTES_MIN, Address, Config, TenantConfig
from kvstore.core.errors import ConfigError
from kvstore.metrics import MEMORY, NVME
from kvstore.settings import Section
from kvstore.units import shown, sized

Live = Mapping[str, Collection[str]]
S = TypeVar("S", bound=Section | None)

LIVE: Live = {
    "server": ("allow",),
    "cpu": ("capacity",),
    "engine": ("credit", "lease", "leased", "pinned", "defer", "promote", "promote_limit"),
    "nvme": ("capacity", "backlog", "write_budget"),
    "peer": ("held",),
    "tier": ("backlog",),  # of each
    "tenant": ("cpu", "cpu_floor", "nvme", "nvme_floor"),  # and all of one that is new, or gone
}
"""The settings, by section, that change in a running store. Any other needs a restart."""


class Difference(msgspec.Struct, frozen=True):
    """A setting whose value in the file is not the running one; live: it is now."""

    setting: str  # "cpu capacity"
    found: str
    running: str
    live: bool

    @property
    def text(self) -> str:
        """Say it in one line."""
        if self.live:
            return f"{self.setting}: {self.found} now, was {self.running}"
        return (
            f"{self.setting}: the file has {self.found}, the store runs with {self.running}"
            " until it is started again"
        )


class Reloaded(msgspec.Struct, frozen=True):
    """What came of a reload: an error, and nothing has changed, or what differs."""

    differing: list[Difference] = []
    error: str = ""


def _flat(config: Config) -> dict[str, tuple[str, Any]]:
    """Return each setting's field and value by the names of its section and itself."""
    found: dict[str, tuple[str, Any]] = {}
    for part in msgspec.structs.fields(Config):
        value = getattr(config, part.name)
        several = isinstance(value, tuple)
        kind = part.encode_name
        sections = {f"{kind} {v.name}": v for v in value} if several else {kind: value}
        for name, section in sections.items():
            for field in () if section is None else msgspec.structs.fields(type(section)):
                found[f"{name} {field.encode_name}"] = field.name, getattr(section, field.name)
    found["tier order"] = "", tuple(tier.name for tier in config.tiers)
    return found


def text_of(field: str, value: object) -> str:
    """Show a value as a file would have it; field: its name, with its unit."""
    if value is None:
        return "none"
    if isinstance(value, Address):
        return f"{value.host}:{value.port}"
    if isinstance(value, int) and field.endswith("_bytes"):
        return sized(value).replace(" ", "")
    if isinstance(value, int) and field.endswith("_ns"):
        return f"{value / 1e9:g}s"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return shown(value)


def _differences(running: Config, found: Config, live: Live) -> Iterator[Difference]:
    old, new = _flat(running), _flat(found)
    for setting in dict.fromkeys((*old, *new)):
        values = [flat.get(setting) for flat in (new, old)]
        if values[0] != values[1]:
            texts = ["none" if value is None else text_of(*value) for value in values]
            if None in values and texts[0] == texts[1]:  # left out, of a section that has come
                continue
            if texts[0] == texts[1]:  # rounded
                texts = [str(value[1]) for value in values if value is not None]
            section, *_, name = setting.split()
            taken = name in live.get(section, ()) and None not in values
            taken = taken or section == "tenant"
            yield Difference(setting, texts[0], texts[1], live=taken)


def _taken(running: S, found: S, live: Collection[str]) -> S:
    """Return a section with those settings that are live as found; as it runs if either is None."""
    if running is None or found is None:
        return running
    fields = [field for field in msgspec.structs.fields(type(running)) if field.encode_name in live]
    taken = {field.name: getattr(found, field.name) for field in fields}
    return msgspec.structs.replace(running, **taken)


def _taken_over(running: Config, found: Config, live: Live) -> Config:
    tiers = {tier.name: tier for tier in found.tiers}
    taken = {
        name: _taken(getattr(running, name), getattr(found, name), settings)
        for name, settings in live.items()
        if name not in ("tier", "tenant")
    }
    shelves = tuple(_taken(t, tiers.get(t.name, t), live["tier"]) for t in running.tiers)
    return msgspec.structs.replace(running, tiers=shelves, tenants=found.tenants, **taken)


def _at_capacity(config: Config, capacity_bytes: int) -> Config:
    """Return settings for another capacity of memory.

    What engines and peers may hold of it keeps its share of a smaller one.
    """
    whole = config.cpu.capacity_bytes

    def part(size: int) -> int:
        return min(size, max(1, size * capacity_bytes // whole))

    engine, peer, replace = config.engine, config.peer, msgspec.structs.replace
    return replace(
        config,
        cpu=replace(config.cpu, capacity_bytes=capacity_bytes),
        engine=replace(
            engine,
            credit_bytes=part(engine.credit_bytes),
            leased_bytes=part(engine.leased_bytes),
            pinned_bytes=part(engine.pinned_bytes),
        ),
        peer=None if peer is None else replace(peer, held_bytes=part(peer.held_bytes)),
    )


class LiveSettings:
    """The settings that a store runs with: its file's, until it is told others."""

    def __init__(
        self,
        config: Config,
        extent_bytes: int,
        use: Callable[[Config, Sequence[TenantConfig] | None], None],
    ) -> None:
        """extent_bytes: of memory. use(config, tenants): have the store run with other settings.

        tenants: whose limits change; None: no reload.
        """
        self.running = self._whole = config
        self._extent_bytes = extent_bytes
        self._use = use
        # Without any user to allow at the start, no other one can reach the socket.
        self._live = LIVE if config.server.allow else {**LIVE, "server": ()}

    def take_over(self, found: Config) -> list[Difference]:
        """Run with what can change; return all that differs. A ConfigError changes nothing."""
        self._refuse_small(found.cpu.capacity_bytes)
        every = list(_differences(self.running, found, self._live))
        whole = _taken_over(self.running, found, self._live)
        self._run(whole, whole.tenants)
        self._whole = whole
        return every

    def resize(self, tier: str, capacity_bytes: int) -> None:
        """Give a tier another capacity. Raises ConfigError for what it cannot have."""
        config = self.running
        if tier == MEMORY:
            self._refuse_small(capacity_bytes)
            nvme = config.nvme
            config = msgspec.structs.replace(_at_capacity(self._whole, capacity_bytes), nvme=nvme)
        elif tier != NVME:
            raise ConfigError(f"resize of {tier!r}, expected {MEMORY} or {NVME}")
        elif config.nvme is None:
            raise ConfigError(
                "expected [nvme] in the store's configuration, found none;"
                " add it and start the store again"
            )
        elif not DISK_BYTES_MIN <= capacity_bytes <= DISK_BYTES_MAX:
            least, most = sized(DISK_BYTES_MIN), sized(DISK_BYTES_MAX)
            found = f"found {capacity_bytes} bytes"
            raise ConfigError(f"[nvme] capacity: expected {least} to {most}, {found}")
        else:
            nvme = msgspec.structs.replace(config.nvme, capacity_bytes=capacity_bytes)
            config = msgspec.structs.replace(config, nvme=nvme)
        self._run(config, None)

    def _refuse_small(self, capacity_bytes: int) -> None:
        if capacity_bytes < self._extent_bytes:
            least, found = text_of("_bytes", self._extent_bytes), text_of("_bytes", capacity_bytes)
            raise ConfigError(
                f"[cpu] capacity: expected at least {least} (one extent of the running store),"
                f" found {found}"
            )

    def _run(self, config: Config, tenants: Sequence[TenantConfig] | None) -> None:
        self._use(config, tenants)
        self.running = config
