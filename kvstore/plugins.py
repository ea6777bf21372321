"""Tiers of third parties: their classes are loaded by the dotted names in the configuration."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvstore.core.errors import ConfigError
from kvstore.core.tier import Tier

_VERBS = sorted(name for name in vars(Tier) if not name.startswith("_") and name != "name")


def find_class(dotted: str) -> Any:  # noqa: ANN401 - any object can have the name
    """Import "package.module:Class". Raises ConfigError with the reason why it cannot."""
    module, _, name = dotted.partition(":")
    try:
        return getattr(import_module(module), name)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # it is somebody else's code: whatever it raises
        raise ConfigError(f"{dotted!r} cannot be loaded: {exc}") from exc


def find_tier(name: str, dotted: str) -> Any:  # noqa: ANN401 - a class that makes tiers
    """Import the class of a `[[tier]]`. Raises ConfigError for an object that is no such class."""
    found = find_class(dotted)
    if not isinstance(found, type):
        raise ConfigError(
            f"tier {name}: expected a class, found {dotted}, a {type(found).__name__}"
        )
    if missing := [verb for verb in _VERBS if not callable(getattr(found, verb, None))]:
        raise ConfigError(f"tier {name}: {dotted} is no tier: it has no {', '.join(missing)}")
    return found
