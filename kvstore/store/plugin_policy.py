"""Policies of others, by the dotted names in the configuration."""

from __future__ import annotations

from kvstore.core.errors import ConfigError
from kvstore.core.eviction import LRU
from kvstore.core.policy import MakePolicy, Policy
from kvstore.core.segmented import SEGMENTED
from kvstore.store.tier_guard import find_class


def find_policy(name: str) -> str | MakePolicy:
    """Return a policy of ours by its name, or the class of others. Raises ConfigError."""
    if name in (LRU, SEGMENTED):
        return name
    found: MakePolicy = find_class(name, "policy", Policy)
    return found


def refuse_policy(name: str) -> None:
    """Make a policy once. Raises ConfigError for one that cannot be made."""
    found = find_policy(name)
    if isinstance(found, str):
        return
    try:
        found(lambda: 1)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        said = " ".join(f"{type(exc).__name__}: {exc}".split())
        expected = "expected a class that is made with a function that returns how many blocks fit"
        raise ConfigError(f"policy {name}: {expected}, found {said}") from exc
