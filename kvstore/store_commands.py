"""The commands that ask a running store something, or have it do something."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType
from rich.text import Text

from kvstore.arguments import print_json
from kvstore.config import CpuConfig, NvmeConfig, read_file
from kvstore.config_edit import NotWritten, persist
from kvstore.core.errors import ConfigError
from kvstore.printing import output, share, table
from kvstore.settings import read_tenant, settings_of
from kvstore.store import admin
from kvstore.store.advise import advise, sentence
from kvstore.store.drain import DRAIN, DRAIN_CANCEL, DRAIN_NOW
from kvstore.store.pins import Pinned
from kvstore.store.record import Written, record
from kvstore.store.top import of_tenants, watch, words
from kvstore.units import one_line, parse_bytes, sized

PINS_FILE_MAX = 64 << 20  # bytes; all that a store pins at most has fewer in hexadecimal digits


def _print(chosen: argparse.Namespace, found: object, view: RenderableType) -> None:
    """Print what was found, for programs or for people."""
    if chosen.json:
        print_json(found)
    elif isinstance(view, str):
        print(view)
    else:
        output().print(view)


def _status(chosen: argparse.Namespace) -> None:
    found = admin.status(chosen.store, user=chosen.user)
    _print(chosen, found, words(found))


def _top(chosen: argparse.Namespace) -> None:
    ask = partial(admin.status, chosen.store, user=chosen.user)
    watch(ask, chosen.every, once=chosen.once, as_json=chosen.json)


def _stats(chosen: argparse.Namespace) -> None:
    found = admin.stats(chosen.store, user=chosen.user)
    shown = table("metric", "labels", "value>")
    for stat in found:
        labels = " ".join(f"{name}={label}" for name, label in stat.labels.items())
        shown.add_row(stat.name, labels, f"{stat.value:,.10g}")
    _print(chosen, found, shown)


def _clear(chosen: argparse.Namespace) -> None:
    left = sum(
        int(stat.value)
        for stat in admin.clear(chosen.store, user=chosen.user)
        if stat.name == "kvstore_slots" and stat.labels.get("state") == "used"
    )
    print(f"cleared; {left} blocks are in use and stay until their requests end")


def _resize(chosen: argparse.Namespace) -> int:
    kind = CpuConfig if chosen.tier == "cpu" else NvmeConfig
    try:
        capacity = int(settings_of(kind)["capacity"].read(chosen.capacity, {}))
    except ConfigError as exc:
        raise ConfigError(f"capacity: {exc}") from None
    deadline_s = time.monotonic() + chosen.wait
    with Console(stderr=True).status("resizing") as status:
        for used, cap, held in admin.resize(chosen.store, chosen.tier, capacity, chosen.user):
            waits = f", waits for {held:,} slots that requests or engines hold" if held else ""
            now = f"{chosen.tier}: capacity {sized(cap)}, {sized(used)} in use"
            status.update(now + waits)
            if time.monotonic() >= deadline_s:
                break
    print(now)
    if used > cap:
        print(f"not yet within its capacity{waits}; the store goes on", file=sys.stderr)
    if chosen.persist:
        _persist(chosen)
    else:
        text = "after a restart the capacity of the configuration file holds again (--persist)"
        print(text, file=sys.stderr)
    return int(used > cap)


def _persist(chosen: argparse.Namespace) -> None:
    """Write a capacity that the store has to the file that it was started with."""
    source = admin.source(chosen.store, user=chosen.user)
    if source is None:
        raise NotWritten("not written: this store has no file of settings; it is an engine's own")
    capacity = chosen.capacity.strip()
    value = capacity if capacity.isdecimal() else f'"{capacity}"'
    persist(source, chosen.tier, "capacity", value)
    admin.reload(chosen.store, user=chosen.user)  # so that it knows the file as it is now
    print(f"{source.path}: [{chosen.tier}] capacity = {value}")


def _reload(chosen: argparse.Namespace) -> None:
    found = admin.reload(chosen.store, user=chosen.user)
    lines = [difference.text for difference in found.differing]
    _print(chosen, found.differing, "\n".join(lines or ["nothing differs from the file"]))


def _quota(chosen: argparse.Namespace) -> None:
    if chosen.tenant is None and chosen.floor is None:
        found = admin.quotas(chosen.store, chosen.user)
    elif chosen.bytes is None:
        raise ConfigError("quota: expected a tenant, a tier and a quota, or nothing")
    else:
        read_tenant(chosen.tenant, {})
        limit = None if chosen.bytes == "none" else parse_bytes(chosen.bytes)
        keeps = 0 if chosen.floor is None else parse_bytes(chosen.floor)
        found = admin.set_quota(chosen.store, chosen.tenant, chosen.tier, limit, keeps, chosen.user)
        print("after a restart the limits of the configuration file hold again", file=sys.stderr)
    _print(chosen, found, of_tenants(found))


def _pin(chosen: argparse.Namespace) -> None:
    for wanted in () if chosen.file is None else _pins_in(chosen.file):
        admin.pin(chosen.store, wanted, chosen.user)
    found = admin.pins(chosen.store, chosen.user)
    shown = table("name", "tenant", "model", "namespace", "blocks>", "of>", "size>")
    for each in found:
        blocks, asked = f"{each.blocks:,}", f"{each.asked:,}"
        named = each.name, each.tenant, each.model, one_line(each.namespace[:12], 12)
        shown.add_row(*map(Text, named), blocks, asked, sized(each.bytes))
    _print(chosen, found, shown)


def _unpin(chosen: argparse.Namespace) -> None:
    left = admin.unpin(chosen.store, chosen.name, chosen.user)
    print(f"{chosen.name} may leave memory from now on; {len(left)} pins are left")


def _warm(chosen: argparse.Namespace) -> None:
    wanted, found = _pins_in(chosen.file), list[dict[str, object]]()
    with share() as tell:
        for count, each in enumerate(wanted):
            tell(count / len(wanted), each.name)
            blocks = admin.warm(chosen.store, each, chosen.user)
            asked = len(each.prefix.hashes) // max(1, each.width)
            found.append({"name": each.name, "blocks": blocks, "asked": asked})
    lines = (
        f"{row['name']}: {row['blocks']:,} of {row['asked']:,} blocks in memory" for row in found
    )
    _print(chosen, found, "\n".join(lines) or f"{chosen.file} has no pins")


def _pins_in(path: Path) -> list[Pinned]:
    """Read what `kvstore pin --json` has printed. Raises ConfigError."""
    try:
        return msgspec.json.decode(read_file(path, PINS_FILE_MAX), type=list[Pinned])
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"{path}: expected what `kvstore pin --json` prints: {exc}") from exc


def _log_level(chosen: argparse.Namespace) -> None:
    admin.log_level(chosen.store, chosen.level, user=chosen.user)
    print(f"log level {chosen.level}, until the store ends")


def _drain(chosen: argparse.Namespace) -> int:
    what = DRAIN_CANCEL if chosen.cancel else DRAIN_NOW if chosen.now else DRAIN
    deadline_s = time.monotonic() + chosen.wait
    with share() as tell:
        for state in admin.drain(chosen.store, what, chosen.user):
            text = f"{state.engines} engines attached, {state.queued:,} blocks to write"
            tell(state.written / max(1, state.written + state.queued), text)
            if time.monotonic() >= deadline_s:
                break
    if chosen.json:
        print_json(state)
    elif chosen.cancel:
        print("the store takes engines and peers again")
    elif state.done:
        print(f"drained: {state.written:,} blocks written, no engine is attached")
    elif not state.draining:
        print("the drain was cancelled: the store takes engines and peers again")
    else:
        print(f"not drained yet: {text}; the store goes on")
    if state.failed:
        print(f"{state.failed:,} blocks could not be written; see the log", file=sys.stderr)
    return int(not chosen.cancel and (not state.done or state.failed > 0))


def _record(chosen: argparse.Namespace) -> None:
    most = parse_bytes(chosen.max)

    def told(done: Written) -> str:
        counts = f"{done.requests:,} requests, {done.blocks:,} blocks"
        return f"{done.seconds:.0f} s: {counts}, {sized(done.bytes)}"

    with Console(stderr=True).status("recording") as status:
        done = record(
            chosen.store, chosen.file, chosen.seconds, most, chosen.user,
            lambda done: status.update(told(done)),
        )  # fmt: skip
    _print(chosen, done, f"{chosen.file}: {told(done)}")
    if done.dropped:
        print(f"{done.dropped:,} lookups came too fast and are missing", file=sys.stderr)


def _advise(chosen: argparse.Namespace) -> None:
    prices = {"cpu": chosen.cpu_price, "nvme": chosen.nvme_price}
    given = {tier: price for tier, price in prices.items() if price is not None}
    found = advise(admin.status(chosen.store, user=chosen.user), given)
    nothing = "nothing to say yet: no engine has asked for blocks since the store's start"
    _print(chosen, found, "\n".join(map(sentence, found)) or nothing)


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "status": _status, "top": _top, "stats": _stats, "clear": _clear, "resize": _resize,
    "reload": _reload, "drain": _drain, "quota": _quota, "pin": _pin, "unpin": _unpin,
    "warm": _warm, "log-level": _log_level, "record": _record, "advise": _advise,
}  # fmt: skip
