"""What commands have in common: arguments, and JSON on standard output.

What is wrong with an argument is one line, with what was meant.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from kvstore.core.errors import ConfigError
from kvstore.units import one_line, parse_duration_ns, shown

ERROR_MAX = 1000  # characters
EVERY_S_MIN, EVERY_S_MAX = 0.1, 3600.0


class Parser(argparse.ArgumentParser):
    """Ends a command in one line where argparse prints its usage; `--help` has the rest."""

    def parse_known_args(  # type: ignore[override] # two forms in one
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[Any, list[str]]:
        """Refuse an option that the command does not have before one that is missing."""
        if self._subparsers is None:  # this parser has the arguments of one command
            for name in (argument.partition("=")[0] for argument in args or ()):
                known = self._option_string_actions
                if name.startswith("--") and not any(each.startswith(name) for each in known):
                    self.error(f"unknown option {name}{_likely(name, known)}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        missing = "^the following arguments are required: (.*)"
        text = re.sub(missing, r"expected \1, found none", message)
        if choice := re.match(r".*invalid choice: '(.*)' \(choose from (.*)\)$", text):
            text += _likely(choice[1], re.findall(r"[\w.-]+", choice[2]))
        self.exit(2, f"kvstore: error: {one_line(text, ERROR_MAX)}; see {self.prog} --help\n")


def _likely(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def count(least: int, most: int) -> Callable[[str], int]:
    """Read a whole number from least to most."""

    def read(text: str) -> int:
        if not re.fullmatch("[0-9]{1,18}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {least} to {most}, found {shown(text)}"
            )
        return int(text)

    return read


def seconds(text: str) -> float:
    """Read a duration."""
    try:
        return parse_duration_ns(text) / 1e9
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def every(text: str) -> float:
    """Read how often something is to be done."""
    found = seconds(text)
    if not EVERY_S_MIN <= found <= EVERY_S_MAX:
        raise argparse.ArgumentTypeError(f'expected "100ms" to "1h", found {text!r}')
    return found


def price(text: str) -> float:
    """Read an amount of money."""
    if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f'expected a number such as "0.25", found {shown(text)}')
    return float(text)


def print_json(value: object) -> None:
    """Print one line of JSON."""
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # a path that is no UTF-8
        text = json.dumps(msgspec.to_builtins(value), separators=(",", ":"))
    sys.stdout.write(f"{text}\n")


def prepare_streams() -> None:
    """Have the standard streams take any text, also where the caller has closed them.

    Without this, the next file that is opened would be one of them.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    nowhere = Path(os.devnull)
    sys.stdin = sys.stdin or nowhere.open(encoding="utf-8")
    sys.stdout = sys.stdout or nowhere.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or nowhere.open("w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error has it
