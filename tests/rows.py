"""Which test shows which row of the contract: `python -m tests.rows` prints it.

The rows are those of docs/reference/contract.md. Exit status 1 if a row has no test, or a test
has no row.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONTRACT = ROOT / "docs" / "reference" / "contract.md"
COLLECTED = ("tests/**/test_*.py", "kvstore/testing/*.py")

_LATER = "## Not yet"
_ROW = re.compile(r"^\| ([A-Z]\d+) \| .+ \|$", re.MULTILINE)
_LATER_ROWS = re.compile(r"^\| ([A-Z]\d+(?:, [A-Z]\d+)*) \| .+ \|$", re.MULTILINE)
_NAMED = re.compile(r"test_((?:[A-Z]\d+_)+)")


def rows_of(page: str) -> tuple[list[str], set[str]]:
    """Return the ids of a contract's rows, and which of them are not to be kept yet."""
    table, _, later = page.partition(_LATER)
    named = (row for rows in _LATER_ROWS.findall(later) for row in rows.split(", "))
    return _ROW.findall(table), set(named)


def names_of(source: str) -> Iterator[str]:
    """Yield the test functions of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def by_row(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the tests named after each row."""
    found: dict[str, list[str]] = {}
    for name in names:
        named = _NAMED.match(name)
        for row in named[1].rstrip("_").split("_") if named else ():
            found.setdefault(row, []).append(name)
    return found


def problems(rows: list[str], later: set[str], tests: Mapping[str, list[str]]) -> list[str]:
    """Say what is wrong; nothing if every row that is to be kept is shown by a test."""
    wrong = [f"{row} is there twice" for row in sorted({r for r in rows if rows.count(r) > 1})]
    wrong += [f"{row} is listed for later, and is no row" for row in sorted(later - set(rows))]
    for row in rows:
        if row in later and row in tests:
            wrong.append(f"{row} is listed for later, but there is {tests[row][0]}")
        elif row not in later and row not in tests:
            wrong.append(f"{row} has no test")
    for row in sorted(set(tests) - set(rows)):
        wrong.append(f"{tests[row][0]} shows {row}, which is no row")
    return wrong


def places() -> dict[str, str]:
    """Return the file of each test of this repository."""
    files = sorted({path for pattern in COLLECTED for path in ROOT.glob(pattern)})
    return {
        name: path.relative_to(ROOT).as_posix()
        for path in files
        for name in names_of(path.read_text(encoding="utf-8"))
    }


def read() -> tuple[list[str], set[str], dict[str, list[str]]]:
    """Return rows, those for later, and tests by row, of this repository."""
    rows, later = rows_of(CONTRACT.read_text(encoding="utf-8"))
    return rows, later, by_row(places())


def main() -> int:
    """Print the table and what is wrong with it; 1 if anything is."""
    rows, later, tests = read()
    files = places()
    for row in rows:
        shown = [f"{files[name]}::{name}" for name in tests.get(row, ())]
        shown = shown or ["later" if row in later else "NO TEST"]
        sys.stdout.writelines(
            f"{'' if number else row:<4} {name}\n" for number, name in enumerate(shown)
        )
    wrong = problems(rows, later, tests)
    sys.stderr.writelines(f"rows: {line}\n" for line in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
