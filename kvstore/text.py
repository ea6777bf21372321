"""Values and texts of others, as a short part of one line: for errors and logs."""

from __future__ import annotations

import json

_SHOWN_MAX = 80  # characters: a part of one line


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
    else:
        text = str(value)
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 3] + "..."
