"""`kvstore status` and `kvstore top`: a store's status in words and tables, once or live."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

import msgspec
from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.table import Table
from rich.text import Text

from kvstore.metrics import MEMORY, NVME
from kvstore.store.admin import StoreUnreachable
from kvstore.store.status import Status, TenantStatus, TierStatus, Tokens
from kvstore.units import sized

_BAR = 8  # characters
_FIXED_LINES = 14  # of a frame, beside tiers, models and engines
_TIERS_MAX = 4


class Rates(msgspec.Struct, frozen=True):
    """What went on in some seconds, each second.

    tiers: bytes stored and loaded. models: tokens looked up and hit, by namespace.
    """

    seconds: float
    looked_up_tokens: float
    hit_tokens: float
    stored_blocks: float
    evicted_blocks: float
    tiers: dict[str, tuple[float, float]]
    models: dict[str, tuple[float, float]]


def rates_of(now: Status, before: Status | None) -> Rates | None:
    """Compare two looks at a store; None where it was started anew in between."""
    if before is None or now.uptime_s <= before.uptime_s:
        return None
    seconds = now.uptime_s - before.uptime_s
    tokens = now.since_start.since(before.since_start)
    tiers = {tier.name: (tier.stored_bytes, tier.loaded_bytes) for tier in before.tiers}
    models = {each.namespace: (each.looked_up_tokens, each.hit_tokens) for each in before.models}

    def each_second(now: tuple[int, int], was: tuple[int, int] | None) -> tuple[float, float]:
        first, second = was or (0, 0)
        return max(0, now[0] - first) / seconds, max(0, now[1] - second) / seconds

    return Rates(
        seconds,
        tokens.looked_up / seconds,
        sum(tokens.hit.values()) / seconds,
        (now.stored_blocks - before.stored_blocks) / seconds,
        (now.evicted_blocks - before.evicted_blocks) / seconds,
        {
            t.name: each_second((t.stored_bytes, t.loaded_bytes), tiers.get(t.name))
            for t in now.tiers
        },
        {
            m.namespace: each_second((m.looked_up_tokens, m.hit_tokens), models.get(m.namespace))
            for m in now.models
        },
    )


def words(status: Status) -> RenderableType:
    """Describe a store: how it is, what is wrong, and what to do; then tables."""
    lines = [_head(status)]
    lines += [
        f"  {each.what}{'' if each.now else ' since the start'}: {each.todo}"
        for each in status.findings
    ]
    lines += ["", f"hit rate: {_hits(status.since_start)} since the start"]
    lines += [
        f"          {_hits(status.last_minute)} in the last {status.last_minute.seconds:.0f} s"
    ]
    missed = {why: count for why, count in status.missed_tokens.items() if count}
    shares = (_share(count, status.since_start.looked_up, why) for why, count in missed.items())
    lines += [f"missed:   {', '.join(shares)} of the tokens looked up"] if missed else []
    every = len(status.models), len(status.engines)
    tables = [*_tables(status, None, None, every)]
    if status.tenants:
        tables += ["", of_tenants(status.tenants)]
    return Group(*map(Text, lines), "", *tables)


def frame(
    status: Status, rates: Rates | None, gone: str, width: int, height: int
) -> RenderableType:
    """Show a store in so many lines and columns, at least 80 x 23. gone: why it does not answer."""
    minute, leases = status.last_minute, sum(model.leases for model in status.models)
    flows: tuple[str, ...] = ("-",) * 4
    if rates is not None:
        numbers = (
            rates.looked_up_tokens,
            rates.hit_tokens,
            rates.stored_blocks,
            rates.evicted_blocks,
        )
        flows = tuple(f"{number:,.0f}" for number in numbers)
    trouble = [f"{each.what}{'' if each.now else ' since the start'}" for each in status.findings]
    more = f" (and {len(trouble) - 1} more: kvstore status)" if len(trouble) > 1 else ""
    lines = [
        f"{_head(status)}  {time.strftime('%H:%M:%S')}",
        gone or (f"{trouble[0]}{more}" if trouble else ""),
        "",
        "a second: {} tokens looked up, {} hit, {} blocks stored, {} evicted".format(*flows),
        f"hit rate: {_hits(status.since_start)} since the start",
        f"          {_hits(minute)} in the last {minute.seconds:.0f} s",
        f"leases: {leases:,}   oldest lookup without an answer: {status.lookups_s:.1f} s",
    ]
    shown = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
    rows = max(2, height - _FIXED_LINES - min(len(status.tiers), _TIERS_MAX))
    models = min(len(status.models), max(rows // 2, rows - len(status.engines)))
    return Group(*shown, "", *_tables(status, rates, width, (models, rows - models)))


def _head(status: Status) -> str:
    wrong = sum(each.now for each in status.findings)
    state = f"{'ready' if status.ready else 'not ready'}, {wrong or 'nothing'} wrong now"
    up = timedelta(seconds=int(status.uptime_s))
    return f"kvstore {status.version}, up {up}: {state}"


def _hits(tokens: Tokens) -> str:
    tiers = (_share(count, tokens.looked_up, tier) for tier, count in tokens.hit.items() if count)
    of_tiers = ", ".join(tiers)
    hit = sum(tokens.hit.values())
    return f"{_percent(hit, tokens.looked_up)} of {tokens.looked_up:,} tokens" + (
        f" ({of_tiers})" if of_tiers else ""
    )


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _share(part: float, whole: float, name: str) -> str:
    return f"{name} {_percent(part, whole)}"


def _bar(tier: TierStatus) -> str:
    if not tier.capacity_bytes or tier.used_bytes is None:
        return ""
    full = min(_BAR, round(_BAR * tier.used_bytes / tier.capacity_bytes))
    return "#" * full + "." * (_BAR - full)


def _bytes(count: float | None) -> str:
    return "-" if count is None else sized(int(count))


def _table(width: int | None, *headings: tuple[str, int]) -> Table:
    """Make a table; numbers stand below a heading that ends with ">". width: to be kept."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for heading, most in headings:
        made.add_column(
            heading.rstrip(">"),
            justify="right" if heading.endswith(">") else "left",
            no_wrap=True,
            max_width=most if width else None,
        )
    return made


def of_tenants(tenants: Iterable[TenantStatus]) -> Table:
    """Show what tenants have, may have ("-": no limit) and keep."""
    made = _table(None, ("tenant", 0), ("tier", 0), ("used>", 0), ("quota>", 0), ("floor>", 0))
    for each in tenants:
        sizes = each.used_bytes, each.quota_bytes, each.floor_bytes
        made.add_row(*map(Text, (each.tenant, each.tier, *map(_bytes, sizes))))
    return made


def _tables(
    status: Status, rates: Rates | None, width: int | None, rows: tuple[int, int]
) -> Iterator[RenderableType]:
    """Show tiers, and up to so many models and engines. rates: None for totals since the start."""
    how = "/s" if width else ""
    ways = (f"stored{how}>", 10), (f"loaded{how}>", 10)
    sizes = ("used>", 10), ("of>", 10)
    tiers = _table(width, ("tier", 10), ("state", 9), ("", _BAR), *sizes, *ways, ("queue>", 6))
    for tier in status.tiers[: _TIERS_MAX if width else None]:
        moved: tuple[float | None, float | None] = tier.stored_bytes, tier.loaded_bytes
        if width:
            moved = (None, None) if rates is None else rates.tiers[tier.name]
        space = _bytes(tier.used_bytes), _bytes(tier.capacity_bytes)
        queue = f"{tier.queue_s:.1f} s"
        row = tier.name, tier.state, _bar(tier), *space, *map(_bytes, moved), queue
        tiers.add_row(*map(Text, row))
    yield from (tiers, "")
    columns = ("namespace", 12), ("memory>", 10), ("disk>", 10), (f"tokens{how}>", 9), ("hit>", 7)
    block = () if width else (("a block>", 0), ("of>", 0), ("pinned>", 0), ("leases>", 0))
    models = _table(width, ("model", 24), *columns, *block)
    for model in status.models[: rows[0]]:
        tokens: tuple[float, float] = model.looked_up_tokens, model.hit_tokens
        if width:
            tokens = (0, 0) if rates is None else rates.models[model.namespace]
        places = (_bytes(model.blocks.get(at, 0) * model.block_bytes) for at in (MEMORY, NVME))
        hit = f"{tokens[0]:,.0f}", _percent(tokens[1], tokens[0])
        row = model.model or "(only on disk)", model.namespace, *places, *hit
        if not width:
            size = f"{model.block_tokens} tokens", _bytes(model.block_bytes)
            row = *row, *size, _bytes(model.pinned_bytes), f"{model.leases:,}"
        models.add_row(*map(Text, row))
    yield from (models, "")
    rest = 20 if width is None else max(12, width - 66)
    names = ("namespace", 12), ("name", rest)
    engines = _table(width, ("engine of", 24), ("pid>", 8), ("ranks>", 5), ("state", 8), *names)
    for engine in status.engines[: rows[1]]:
        ranks = str(engine.ranks)
        if not width and engine.ranks > 1:
            ranks += f" (pids {', '.join(str(pid or '-') for pid in engine.worker_pids)})"
        who = engine.model or "(not told)", str(engine.pid or "-"), ranks
        engines.add_row(*map(Text, (*who, engine.phase, engine.namespace, engine.name)))
    yield engines
    left = len(status.models) - rows[0], len(status.engines) - rows[1]
    if max(left) > 0:
        yield f"not shown: {max(0, left[0])} models, {max(0, left[1])} engines"


def watch(ask: Callable[[], Status], every_s: float, *, once: bool, as_json: bool) -> None:
    """Show a store until q comes, or once, after two looks at it. Raises StoreUnreachable."""
    console, before, status = Console(highlight=False), None, ask()
    live = console.is_terminal and not console.is_dumb_terminal and not (once or as_json)
    gone = ""
    with contextlib.ExitStack() as stack:
        quits = stack.enter_context(_keys())
        screen = stack.enter_context(console.screen()) if live else None
        if once and not quits(every_s):
            status, before = ask(), status
        while True:
            rates = rates_of(status, before)
            if as_json:
                told = msgspec.json.encode(_told(status, rates, gone)).decode()
                sys.stdout.write(f"{told}\n")
                sys.stdout.flush()
            else:
                view = frame(status, rates, gone, console.width, console.height - 1)
                if screen is None:
                    console.print(view)
                else:
                    console.control(Control.home())
                    screen.update(view)
            if once or quits(every_s):
                return
            try:
                status, before, gone = ask(), status, ""
            except StoreUnreachable as exc:
                before, gone = None, str(exc)


def _told(status: Status, rates: Rates | None, gone: str) -> dict[str, object]:
    if gone:
        return {"error": gone}
    return {**msgspec.structs.asdict(status), "history": [], "each_second": rates}


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Have keys come one by one; what it yields waits for seconds, or q: then it is True."""
    if not sys.stdin.isatty():
        yield _waits
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal, termios.TCSANOW)
    try:
        yield lambda seconds: _quits(terminal, seconds)
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def _waits(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _quits(terminal: int, seconds: float) -> bool:
    end_s, typed = time.monotonic() + seconds, select.poll()
    typed.register(terminal, select.POLLIN)
    while (left_s := end_s - time.monotonic()) > 0:
        if typed.poll(1000 * left_s):
            keys = os.read(terminal, 64)
            if b"q" in keys or not keys:  # or the terminal has gone
                return True
    return False
