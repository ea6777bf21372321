"""Values for people: sizes, durations, and how those of others are shown in a part of a line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from fractions import Fraction

from kvstore.core.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_BYTE_UNITS = {
    "B": 1,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_DURATION_UNITS_NS = {"us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}

_BITS_MAX = 128  # of a number that is written out
_SHOWN_MAX = 80  # characters: a part of one line

# What the system's own interfaces take as a size.
QUANTITY_MAX = 2**63 - 1


def parse_bytes(value: object) -> int:
    """Turn "8GiB", "1.5TB" or a plain number of bytes into bytes; ConfigError otherwise."""
    return _quantity(value, _BYTE_UNITS, 'a size such as "8GiB"', plain=1)


def parse_duration_ns(value: object) -> int:
    """Turn "30s" or "100ms" into nanoseconds; ConfigError otherwise, also for a bare number."""
    return _quantity(value, _DURATION_UNITS_NS, 'a duration such as "30s"', plain=None)


def _quantity(value: object, units: Mapping[str, int], expected: str, plain: int | None) -> int:
    """Read a number with a unit; plain is the unit of a bare integer, None to refuse those."""
    error = wrong(f"{expected} (units {', '.join(units)})", value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise error
    text = value.strip() if isinstance(value, str) else written(value)
    match = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) *([A-Za-z]*)", text)
    if match is None:
        raise error
    number, unit = match.groups()
    scale = units.get(unit) if unit else plain
    if scale is None:
        close = [name for name in units if name.lower() == unit.lower()]
        raise ConfigError(str(error) + (f"; did you mean {number}{close[0]}?" if close else ""))
    amount = math.floor(Fraction(number) * scale)
    if amount > QUANTITY_MAX:
        raise ConfigError(f"{error}, which does not fit in 63 bits")
    return amount


def sized(count: int) -> str:
    """Show bytes with the largest unit that leaves no long fraction."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= size:
            return f"{count / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{count} B"


def one_line(text: str, length_max: int) -> str:
    """Escape what is not printable, line ends and terminal codes among it, and cut what is long."""
    rest = len(text) - length_max
    if rest > 0:
        text = text[:length_max]
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
            for char in text
        )
    return f"{text}... ({rest} more characters)" if rest > 0 else text


def wrong(expected: str, found: object) -> ConfigError:
    """Make the error for a setting that has another value than one may have."""
    return ConfigError(f"expected {expected}, found {shown(found)}")


def written(number: int) -> str:
    """Write a number; one of thousands of digits, for which Python raises, by its size."""
    bits = number.bit_length()
    return str(number) if bits <= _BITS_MAX else f"a number of {bits} bits"


def shown(value: object) -> str:
    """Show a value as its file would, short enough for one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = one_line(json.dumps(value[:_SHOWN_MAX], ensure_ascii=False), _SHOWN_MAX * 10)
    elif isinstance(value, dict):
        text = "a table"
    elif isinstance(value, list):
        text = "a list"
    elif isinstance(value, int):
        text = written(value)
    else:
        text = str(value)
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 3] + "..."
