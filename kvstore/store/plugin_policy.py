"""Policies of others, by the dotted names in the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.core.errors import ConfigError
from kvstore.core.eviction import LRU
from kvstore.core.policy import VERBS, MakePolicy
from kvstore.core.segmented import SEGMENTED
from kvstore.store.tier_guard import find_class

log = logging.getLogger(__name__)


def find_policy(name: str) -> str | MakePolicy:
    """Return a policy of ours by its name, or the class of others. Raises ConfigError."""
    if name in (LRU, SEGMENTED):
        return name
    found = find_class(name)
    if not isinstance(found, type):
        raise ConfigError(f"expected a policy's class, found {name}, a {type(found).__name__}")
    if missing := [verb for verb in VERBS if not callable(getattr(found, verb, None))]:
        raise ConfigError(f"{name} is no policy: it has no {', '.join(missing)}")
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


def on_failure(name: str, count: Callable[[], None]) -> Callable[[str, BaseException], None]:
    """Return what is called when a policy is used no more. count(): one more."""

    def tell(verb: str, exc: BaseException) -> None:
        log.error("policy %s is off: %s failed; lru from now on", name, verb, exc_info=exc)
        count()

    return tell
