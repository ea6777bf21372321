"""Arguments of a command: what is wrong with them is one line, with what was meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from kvstore.units import one_line, shown

ERROR_MAX = 1000  # characters


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
