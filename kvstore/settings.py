"""How a setting is declared, and how a section of the settings is read.

A section is a struct; each of its fields is one setting, declared once:

    lease_ns: Annotated[int, Setting(duration(zero="no hit could be loaded"), "30s")]

From that follow the values that a file may have, the suggestion for a wrong name, and the error
that names the found and the expected value. The name in the file is the field's without its unit.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

from kvstore.core.errors import ConfigError
from kvstore.units import QUANTITY_MAX, parse_bytes, parse_duration_ns, shown, sized, wrong

# sun_path of a unix socket address is 108 bytes, the last of them a zero.
SOCKET_PATH_BYTES_MAX = 107

# From a value in the file, and the settings read before it, to the value of the field.
Reader = Callable[[Any, Mapping[str, Any]], Any]


class Setting(msgspec.Struct, frozen=True):
    """How one setting is read, and its default.

    default: a value as in a file, or a function that makes one from the settings read before; None:
        the field of a setting that is left out is None.
    default_text: the default in words, for the reference, where it depends on something.
    required: an example; the setting has to be given, and has no default.
    """

    read: Reader
    default: Any = None
    default_text: str = ""
    required: str = ""


def _name_in_file(field: str) -> str:
    return re.sub("_(bytes|ns|name)$", "", field)


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=_name_in_file):
    """Settings that stand together; a subclass declares them."""


S = TypeVar("S", bound=Section)


@cache
def settings_of(kind: type[Section]) -> dict[str, Setting]:
    """Return a section's settings by their names in the file, in the order they are read."""
    hints = get_type_hints(kind, include_extras=True)
    fields = msgspec.structs.fields(kind)
    return {field.encode_name: hints[field.name].__metadata__[0] for field in fields}


def read_section(
    kind: type[S], table: object, where: str, given: Mapping[str, Any] | None = None
) -> S:
    """Read a section from its table; given: settings of other sections that readers need."""
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected a table, found {shown(table)}")
    settings = settings_of(kind)
    refuse_unknown(table, settings, where)
    found: dict[str, Any] = {}
    for name, setting in settings.items():
        if setting.required and name not in table:
            example = f"{name} = {shown(setting.required)}"
            raise ConfigError(f"{where} {name}: is required and missing, for example {example}")
        known = {**(given or {}), **found}
        default = setting.default(known) if callable(setting.default) else setting.default
        raw = table.get(name, default)
        try:
            absent = raw is None and default is None and not setting.required
            found[name] = None if absent else setting.read(raw, known)
        except ConfigError as exc:
            raise ConfigError(f"{where} {name}: {exc}") from None
    return kind(**{field.name: found[field.encode_name] for field in msgspec.structs.fields(kind)})


def refuse_unknown(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise ConfigError for a name that is not known, with what may have been meant."""
    for name in table:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown {name}; {hint}")


# Readers, and functions that make readers


def flag(value: object, _found: Mapping[str, Any]) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise wrong("true or false", value)
    return value


def table_of_any(value: object, _found: Mapping[str, Any]) -> dict[str, Any]:
    """Read a table with any names."""
    if not isinstance(value, dict):
        raise wrong("a table", value)
    return value


def read_socket(value: object, _found: Mapping[str, Any]) -> str:
    """Read the path of a unix socket, with or without unix:// in front."""
    path = value.removeprefix("unix://") if isinstance(value, str) else ""
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise wrong('an absolute path such as "/run/kvstore/kvstore.sock"', value)
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        limit = f"at most {SOCKET_PATH_BYTES_MAX} bytes, the system's limit for a socket path"
        raise wrong(limit, len(os.fsencode(path)))
    return path


def whole_number(least: int, most: int) -> Reader:
    """Read a whole number from least to most."""

    def read(value: object, _found: Mapping[str, Any]) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise wrong(f"a whole number from {least} to {most}", value)
        return value

    return read


def choice(*names: str) -> Reader:
    """Read one of these names."""
    return matching("|".join(names), " or ".join(f'"{name}"' for name in names))


def matching(pattern: str, expected: str) -> Reader:
    """Read text that the pattern matches as a whole."""

    def read(value: object, _found: Mapping[str, Any]) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII | re.DOTALL):
            raise wrong(expected, value)
        return value

    return read


read_tenant = matching(
    "[A-Za-z0-9][A-Za-z0-9._-]{0,62}", "up to 63 letters, digits, dots, hyphens and underscores"
)
"""Read the name of a tenant."""


def size(least_bytes: int, most_bytes: int = QUANTITY_MAX, of: str = "") -> Reader:
    """Read a size; of: what the least one is, for the error."""
    least, most = (sized(count).replace(" ", "") for count in (least_bytes, most_bytes))

    def read(value: object, _found: Mapping[str, Any]) -> int:
        found_bytes = parse_bytes(value)
        if found_bytes < least_bytes:
            raise wrong(f"at least {least}{of}", value)
        if found_bytes > most_bytes:
            raise wrong(f"at most {most}", value)
        return found_bytes

    return read


def duration(zero: str = "") -> Reader:
    """Read a duration; zero: why it has to be more than 0, if it has to."""

    def read(value: object, _found: Mapping[str, Any]) -> int:
        found_ns = parse_duration_ns(value)
        if zero and found_ns == 0:
            raise ConfigError(f"expected more than 0, found {shown(value)}: {zero}")
        return found_ns

    return read
