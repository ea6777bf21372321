"""The documentation's fenced blocks: what a page shows is read, run and used by tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
# tests/test_prometheus.py runs promql, tests/engine/test_by_hand.py runs bash.
LANGUAGES = {"", "bash", "json", "promql", "python", "sh", "toml"}

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def shown(language: str) -> Iterator[tuple[str, str]]:
    """Yield place and text of each block of a language."""
    for name in NAMES:
        for match in _FENCE.finditer(text(name)):
            assert match[2] in LANGUAGES, f"{name}: a block in {match[2]!r}"
            if match[2] == language:
                line = text(name)[: match.start()].count("\n") + 1
                yield f"{name}:{line}", match[3]


def write_modules(folder: Path) -> None:
    """Write the files of Python that the pages show: blocks that begin with their name."""
    for place, block in shown("python"):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name, f"{place}: a block of Python without the name of its file"
        (folder / name[1]).write_text(block, encoding="utf-8")
