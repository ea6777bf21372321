"""Rooms of the shipped code: `python -m tests.rooms` lists each module, its size and purpose."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvstore", "tiers", "connectors")
PART_OF = {"connectors/copies/gpu/": "connectors/copies/"}


def modules() -> dict[str, int]:
    """Return the lines of each shipped file, whatever its suffix, by path."""
    return {
        path.relative_to(ROOT).as_posix(): len(path.read_bytes().splitlines())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }


def room_of(path: str) -> str:
    """Return the folder that a file counts for."""
    folder = path.rpartition("/")[0] + "/"
    return PART_OF.get(folder, folder)


def rooms() -> Counter[str]:
    """Return the lines of each room."""
    lines: Counter[str] = Counter()
    for path, count in modules().items():
        lines[room_of(path)] += count
    return lines


def purpose_of(path: str) -> str:
    """Return the first line of a module's docstring."""
    if not path.endswith(".py"):
        return ""
    text = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


if __name__ == "__main__":
    for room, total in rooms().items():
        sys.stdout.write(f"\n{room}  {total:,}\n")
        sys.stdout.writelines(
            f"{count:6}  {name.rpartition('/')[2]:24}  {purpose_of(name)}\n"
            for name, count in modules().items()
            if room_of(name) == room
        )
