"""The page on troubleshooting against the code: its log lines are those that there are."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.harness.pages import ROOT, text

PAGE = "docs/operate/troubleshooting.md"
LEVELS = {
    "info": "INFO", "warning": "WARNING", "warn": "WARNING", "error": "ERROR", "bug": "ERROR",
    "exception": "ERROR", "critical": "CRITICAL",
}  # fmt: skip
LOGGERS = {"log", "logger", "_log", "said", "_said", "_lives"}
_VALUE = re.compile(r"%(?:\.\d+)?[sdrif]|\{[^}]*\}")


def shape(line: str) -> str:
    """A line of the code, with ... for each value."""
    return _VALUE.sub("...", line)


@cache
def logged() -> dict[str, set[str]]:
    """Each line that the code logs, and its levels."""
    found: dict[str, set[str]] = {}
    for package in ("kvstore", "tiers", "connectors"):
        for path in (ROOT / package).rglob("*.py"):
            for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(function, ast.FunctionDef):
                    for line, level in lines_of(function):
                        found.setdefault(line, set()).add(level)
    return found


def lines_of(function: ast.FunctionDef) -> list[tuple[str, str]]:
    """Lines and levels of a function; a line may have a name there."""
    named: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            named |= {ast.unparse(target): str(node.value.value) for target in node.targets}
    found = []
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if ast.unparse(node.func.value).rpartition(".")[2] not in LOGGERS:
            continue
        for argument in node.args[:2]:  # of a RateLog the first one is the kind
            line = named.get(ast.unparse(argument))
            if isinstance(argument, ast.Constant):
                line = str(argument.value)
            if line is not None and node.func.attr in LEVELS:
                found.append((shape(line), LEVELS[node.func.attr]))
    return found


def test_Q19_each_log_line_of_the_page_is_one_of_the_code_at_its_level() -> None:
    rows = re.findall(r"^\| `(.+?)` \| ([A-Z]+) \| .+ \|$", text(PAGE), re.MULTILINE)
    assert len(rows) > 40
    assert [row for row in rows if row[1] not in logged().get(row[0], ())] == []
    assert len({line for line, _ in rows}) == len(rows), "each once"
