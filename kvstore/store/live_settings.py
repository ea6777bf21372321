"""Which settings a running store takes over from its file, and which need a restart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec

from kvstore.config import DISK_BYTES_MAX, DISK_BYTES_MIN, Address, Config
from kvstore.core.errors import ConfigError
from kvstore.metrics import MEMORY, NVME
from kvstore.settings import Section
from kvstore.units import shown, sized

LIVE: Mapping[str, Collection[str]] = {
    "server": ("allow",),
    "cpu": ("capacity",),
    "engine": ("credit", "lease", "leased", "defer", "promote", "promote_limit"),
    "nvme": ("capacity", "backlog", "write_budget"),
    "peer": ("held",),
    "tier": ("backlog",),  # of each
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


def _sections(config: Config) -> dict[str, Section | None]:
    """Return the sections by name, those of tiers with their own."""
    found: dict[str, Section | None] = {}
    for field in msgspec.structs.fields(Config):
        value = getattr(config, field.name)
        if isinstance(value, tuple):
            found |= {f"tier {tier.name}": tier for tier in value}
        else:
            found[field.encode_name] = value
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


def _differing(name: str, old: Section | None, new: Section | None) -> Iterator[Difference]:
    if old is None or new is None:
        if old is not new:
            texts = ["none" if section is None else f"[{name}]" for section in (new, old)]
            yield Difference(name, texts[0], texts[1], live=False)
        return
    live = LIVE.get(name.partition(" ")[0], ())
    for field in msgspec.structs.fields(type(old)):
        found, running = getattr(new, field.name), getattr(old, field.name)
        if found != running:
            texts = [text_of(field.name, value) for value in (found, running)]
            if texts[0] == texts[1]:  # rounded
                texts = [str(found), str(running)]
            setting = f"{name} {field.encode_name}"
            yield Difference(setting, texts[0], texts[1], live=field.encode_name in live)


def _differences(running: Config, found: Config) -> Iterator[Difference]:
    old, new = _sections(running), _sections(found)
    for name in dict.fromkeys((*old, *new)):
        yield from _differing(name, old.get(name), new.get(name))
    order = [[tier.name for tier in config.tiers] for config in (found, running)]
    if order[0] != order[1] and sorted(order[0]) == sorted(order[1]):
        yield Difference("tier order", ", ".join(order[0]), ", ".join(order[1]), live=False)


def _taken_over(running: Config, found: Config, live: Collection[str]) -> Config:
    """Return the running settings with those that are live, by name, as found."""

    def take(name: str, old: Section, new: Section) -> Section:
        fields = [f for f in msgspec.structs.fields(type(old)) if f"{name} {f.encode_name}" in live]
        return msgspec.structs.replace(old, **{f.name: getattr(new, f.name) for f in fields})

    new = _sections(found)
    taken: dict[str, Any] = {}
    for field in msgspec.structs.fields(Config):
        old = getattr(running, field.name)
        if isinstance(old, tuple):
            tiers = ((f"tier {tier.name}", tier) for tier in old)
            taken[field.name] = tuple(take(n, t, new[n] or t) if n in new else t for n, t in tiers)
        elif old is not None and (other := new.get(field.encode_name)) is not None:
            taken[field.name] = take(field.encode_name, old, other)
    return msgspec.structs.replace(running, **taken)


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
        ),
        peer=None if peer is None else replace(peer, held_bytes=part(peer.held_bytes)),
    )


class LiveSettings:
    """The settings that a store runs with: its file's, until it is told others."""

    def __init__(self, config: Config, extent_bytes: int, use: Callable[[Config], None]) -> None:
        """extent_bytes: of memory. use(): have the store run with other settings."""
        self.running = self._whole = config
        self._extent_bytes = extent_bytes
        self._use = use
        self._shared = bool(config.server.allow)  # other users can reach the socket

    def take_over(self, found: Config) -> list[Difference]:
        """Run with what can change; return all that differs. A ConfigError changes nothing."""
        self._refuse_small(found.cpu.capacity_bytes)
        every = [
            msgspec.structs.replace(difference, live=False)
            if difference.setting == "server allow" and not self._shared
            else difference
            for difference in _differences(self.running, found)
        ]
        live = {difference.setting for difference in every if difference.live}
        self._whole = _taken_over(self.running, found, live)
        self._run(self._whole)
        return every

    def resize(self, tier: str, capacity_bytes: int) -> None:
        """Give a tier another capacity. Raises ConfigError for what it cannot have."""
        config = self.running
        if tier == MEMORY:
            self._refuse_small(capacity_bytes)
            nvme = config.nvme
            config = msgspec.structs.replace(_at_capacity(self._whole, capacity_bytes), nvme=nvme)
        elif tier != NVME or config.nvme is None:
            have = MEMORY if config.nvme is None else f"{MEMORY} or {NVME}"
            raise ConfigError(f"resize of {tier!r}, expected {have}: there is no such tier")
        elif not DISK_BYTES_MIN <= capacity_bytes <= DISK_BYTES_MAX:
            least, most = sized(DISK_BYTES_MIN), sized(DISK_BYTES_MAX)
            found = f"found {capacity_bytes} bytes"
            raise ConfigError(f"[nvme] capacity: expected {least} to {most}, {found}")
        else:
            nvme = msgspec.structs.replace(config.nvme, capacity_bytes=capacity_bytes)
            config = msgspec.structs.replace(config, nvme=nvme)
        self._run(config)

    def _refuse_small(self, capacity_bytes: int) -> None:
        if capacity_bytes < self._extent_bytes:
            least, found = text_of("_bytes", self._extent_bytes), text_of("_bytes", capacity_bytes)
            raise ConfigError(
                f"[cpu] capacity: expected at least {least} (one extent of the running store),"
                f" found {found}"
            )

    def _run(self, config: Config) -> None:
        self.running = config
        self._use(config)
