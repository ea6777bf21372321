"""How a section of settings is read: one small function reads one setting.

So that an error can name file, section, setting, what was found and what was expected.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from kvstore.core.errors import ConfigError
from kvstore.units import shown

# Raw value and the settings read before it (those of the store's capacity, too), to the value.
Reader = Callable[[Any, Mapping[str, Any]], Any]


class Required(msgspec.Struct, frozen=True):
    """Instead of a default: an example for the error message."""

    example: str


class Setting(msgspec.Struct, frozen=True):
    """How one setting is read; the default is read like a given value."""

    read: Reader
    default: Any


def section_of(table: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    """Return a table of the file, empty when left out."""
    found = table.get(name, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{source}: expected a table [{name}], found {shown(found)}")
    return found


def read_section(
    table: Mapping[str, Any],
    settings: Mapping[str, Setting],
    where: str,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read all settings of one section, in the table's order; given is known from before."""
    refuse_unknown(table, settings, where)
    found: dict[str, Any] = {}
    for name, setting in settings.items():
        raw = table.get(name, setting.default)
        if isinstance(raw, Required):
            raise ConfigError(f"{where} {name}: is required and missing, for example {raw.example}")
        try:
            found[name] = setting.read(raw, {**(given or {}), **found})
        except ConfigError as exc:
            raise ConfigError(f"{where} {name}: {exc}") from None
    return found


def refuse_unknown(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise ConfigError for a name that is not known, with what may have been meant."""
    for name in table:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown {name}; {hint}")


def text_of(value: object, expected: str) -> str:
    """Return what has to be text."""
    if not isinstance(value, str):
        raise ConfigError(f"expected {expected}, found {shown(value)}")
    return value


def read_flag(value: object, _found: Mapping[str, Any]) -> bool:
    """Return what has to be true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"expected true or false, found {shown(value)}")
    return value


def whole_number(least: int, most: int) -> Reader:
    """Make what reads a whole number from least to most."""

    def read(value: object, _found: Mapping[str, Any]) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(
                f"expected a whole number from {least} to {most}, found {shown(value)}"
            )
        return value

    return read


def optional(read: Reader) -> Setting:
    """Make a setting that may be left out, and is None then."""
    return Setting(lambda value, found: None if value is None else read(value, found), None)
