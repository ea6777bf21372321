"""`kvstore advise`: what tiers of other sizes would bring, and what a point more would cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from kvstore.store.status import Status, TierStatus
from kvstore.units import GIB, sized

_NOW = "1"
_POINT_MIN = 0.05  # less is shown as 0.0


class Advice(msgspec.Struct, frozen=True):
    """A tier of another size.

    capacity_bytes: it would have; more_bytes: than it has, below 0: less. hit_rate: the part of the
    blocks asked for that would be hit, in memory or on disk. points: percentage points more than
    with the size that it has. cost: of more_bytes, None without a price.
    """

    tier: str
    capacity_bytes: int
    more_bytes: int
    hit_rate: float
    points: float
    cost: float | None


def advise(status: Status, prices: Mapping[str, float]) -> list[Advice]:
    """Say what each tier would bring with other sizes. prices: of a GiB, by tier."""
    return [each for tier in status.tiers for each in _of_tier(status, tier, prices)]


def _of_tier(status: Status, tier: TierStatus, prices: Mapping[str, float]) -> Iterator[Advice]:
    """Models count by the tokens that were looked up, as blocks of them differ in size."""
    tokens = {model.namespace: model.looked_up_tokens for model in status.models}
    of_tier = [each for each in status.predictions if each.tier == tier.name]
    found = [(tokens.get(each.namespace, 0), each.ratios) for each in of_tier]
    every = sum(count for count, _ in found)
    has = tier.capacity_bytes
    if not every or not has:
        return
    rates = {
        size: sum(count * ratios[size] for count, ratios in found) / every for size in found[0][1]
    }
    for size, rate in rates.items():
        more = int(has * float(size)) - has
        price = prices.get(tier.name)
        cost = None if price is None else price * more / GIB
        yield Advice(tier.name, has + more, more, rate, 100 * (rate - rates[_NOW]), cost)


def sentence(advice: Advice) -> str:
    """Say it in words."""
    size = sized(advice.capacity_bytes)
    if not advice.more_bytes:
        rate = f"{100 * advice.hit_rate:.1f} %"
        return f"{advice.tier}: {size} now: {rate} of blocks hit, by its size"
    more = ("+" if advice.more_bytes > 0 else "-") + sized(abs(advice.more_bytes))
    text = f"{advice.tier}: {more} ({size}): {advice.points:+.1f} points"
    if advice.cost is None:
        return text
    text += f", {advice.cost:+,.2f}"
    if advice.points < _POINT_MIN:
        return text
    return f"{text}, {advice.cost / advice.points:,.2f} a point"
