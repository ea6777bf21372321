"""Why an engine shares no blocks with others, in words for both logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvstore.core import limits
from kvstore.store.namespace import Namespace
from kvstore.units import one_line

# What operators set, by trait, and how. The other traits of a layout follow from these.
WAYS_OUT = {
    "hash": "set the same --prefix-caching-hash-algo",
    "hash seed": "set the same PYTHONHASHSEED, or none",
    "block tokens": "set the same block_tokens and --block-size",
}
TRAITS_TOLD = 4
_VALUE_MAX = 60
_UNNAMED = "its blocks stay in memory, for itself only, until it detaches"


def why_alone(namespace: Namespace, all_of_them: Iterable[Namespace]) -> str:
    """Return why engines of a namespace share nothing with attached ones of their model.

    "" if they do, or there are none. A namespace whose blocks have no name is always alone.
    """
    if namespace.layout.unnamed:
        return one_line(f"{_UNNAMED}: {namespace.layout.unnamed!r}", limits.TEXT_MAX // 2)
    ours, nearest = namespace.layout.traits, None
    for other in all_of_them:
        theirs = other.layout.traits
        apart = other is not namespace and not other.layout.unnamed
        if apart and other.sessions and _same_model(ours, theirs):
            differ = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
            if nearest is None or len(differ) < len(nearest[1]):
                nearest = other, differ
    if nearest is None:
        return ""
    other, differ = nearest
    told = [name for name in WAYS_OUT if name in differ] or differ[:TRAITS_TOLD]
    values = ", ".join(
        f"{name} {_value(ours, name)}, there {_value(other.layout.traits, name)}" for name in told
    )
    engine = next(iter(other.sessions.values())).engine
    text = f"shares no blocks with engine {engine!r} of the same model: {values}"
    way_out = "; ".join(WAYS_OUT[name] for name in told if name in WAYS_OUT)
    return one_line(f"{text}; {way_out}" if way_out else text, limits.TEXT_MAX // 2)


def _same_model(ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Tell whether two engines run the same weights, or the same name where these have none."""
    trait = "weights" if "weights" in ours and "weights" in theirs else "model"
    return ours.get(trait, "") == theirs.get(trait, "") != ""


def _value(traits: Mapping[str, str], name: str) -> str:
    return traits.get(name, "not named")[:_VALUE_MAX]
