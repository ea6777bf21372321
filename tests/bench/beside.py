"""This tree beside another one: whole runs of one benchmark in turn, compared in pairs.

    python -m tests.bench.beside export ../old "kvstore bench" --runs 3 --more="--pairs 5"

Both trees are run with their own environment, in their own folder. Nothing else may run meanwhile.
With --keep FILE each run is added to a file, and a comparison that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.core.errors import KVStoreError
from tests.bench.__main__ import pairs
from tests.bench.report import paired_ratio, progress

HERE = Path(__file__).parents[2]
OURS = "python -m tests.bench"
WHICH = (
    *("block_bytes", "transport", "checksum", "blocks", "asked", "case"),
    *("system", "prompt_tokens"),
)
SLOWER = 1.05  # and more, even at the lower end of the interval: this tree is slower

Rows = dict[str, tuple[list[float], bool]]
"""By name and parameters: the rounds' values, and whether higher ones are better."""


def main(arguments: list[str] | None = None) -> int:
    """Run both trees in turn and print one line for each result; exit status 1 if one is slower."""
    chosen = parser().parse_args(arguments)
    trees = {"this": (HERE, OURS), "other": (chosen.other.resolve(), chosen.command)}
    runs: dict[str, list[Rows]] = defaultdict(list)
    kept = chosen.keep.read_text().splitlines() if chosen.keep and chosen.keep.exists() else []
    try:
        with progress(chosen.runs * len(trees)) as tell:
            for number, (pair, tree) in enumerate(_in_order(chosen.runs, sorted(trees))):
                tell(f"run {pair + 1} of {chosen.runs}: {tree} tree", 0)
                what = f"{tree} tree: {chosen.name} {chosen.more}".strip()
                if number < len(kept):
                    found = _kept(chosen.keep, kept[number], what)
                else:
                    found = run(*trees[tree], [chosen.name, *shlex.split(chosen.more)])
                    if chosen.keep:
                        with chosen.keep.open("a") as file:
                            file.write(json.dumps([what, found]) + "\n")
                runs[tree].append(found)
                tell()
    except KVStoreError as exc:
        print(f"tests.bench.beside: error: {exc}", file=sys.stderr)
        return 2
    rows = list(compared(runs["this"], runs["other"]))
    if chosen.json:
        print(json.dumps({"bench": chosen.name, "runs": chosen.runs, "results": rows}))
    else:
        print(f"{chosen.name}: {chosen.runs} pairs of runs; how much longer this tree takes")
        for row in rows:
            print(
                f"{row['slower']:6.3f} ({row['low']:.3f} to {row['high']:.3f})"
                f"  {row['other']:10.4g} -> {row['this']:<10.4g} {row['what']}"
            )
    return int(any(row["low"] > SLOWER for row in rows))


def _kept(file: Path, line: str, expected: str) -> Rows:
    """Read a run of an interrupted comparison. Raises KVStoreError for another one's."""
    try:
        what, rows = json.loads(line)
    except ValueError:
        what, rows = "no run", {}
    if what != expected:
        raise KVStoreError(f"{file}: found {what!r}, expected {expected!r}: name another file")
    found: Rows = rows
    return found


def _in_order(pairs: int, trees: list[str]) -> Iterator[tuple[int, str]]:
    """Go through all runs: the tree that began a pair ends the next one."""
    for pair in range(pairs):
        for tree in sorted(trees, reverse=bool(pair % 2)):
            yield pair, tree


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m tests.bench.beside", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("name", help="the benchmark")
    made.add_argument("other", type=Path, help="folder of the other tree, with its .venv")
    made.add_argument("command", nargs="?", default=OURS, help=f"its command (default: {OURS})")
    made.add_argument("--runs", type=pairs, default=15, help="of each tree (default: 15)")
    made.add_argument("--keep", type=Path, metavar="FILE", help="add each run to a file, and go on")
    made.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    made.add_argument("--more", default="", help="arguments of both trees' benchmarks")
    return made


def run(folder: Path, command: str, arguments: list[str]) -> Rows:
    """Run a tree's benchmark once. Raises KVStoreError if it fails."""
    program, *rest = shlex.split(command)
    whole = [str(folder / ".venv/bin" / program), *rest, *arguments, "--json"]
    if not Path(whole[0]).exists():
        raise KVStoreError(f"{whole[0]} is not there: run `make setup` in {folder}")
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(whole, cwd=folder, env=own, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise KVStoreError(f"{shlex.join(whole)} ended with {ended.returncode}: {ended.stderr}")
    found = json.loads(ended.stdout)["results"]
    return {
        _name(row): (row.get("values", [row["value"]]), row["better"] == "higher") for row in found
    }


def _name(row: dict[str, Any]) -> str:
    return " ".join([row["name"], *(f"{key}={row[key]}" for key in WHICH if key in row)])


def compared(this: list[Rows], other: list[Rows]) -> list[dict[str, Any]]:
    """Return one row for each result that both trees have in every run."""
    trees = this, other
    names = set.intersection(*(set(rows) for rows in (*this, *other)))
    found = []
    for name in (name for name in this[0] if name in names):
        ours, theirs = ([value for rows in runs for value in rows[name][0]] for runs in trees)
        if len(ours) != len(theirs) or not all((*ours, *theirs)):
            continue  # rounds of a case that one tree has twice, or nothing was measured
        higher_is_better = this[0][name][1]
        ratio = paired_ratio(theirs, ours) if higher_is_better else paired_ratio(ours, theirs)
        values = {"this": statistics.median(ours), "other": statistics.median(theirs)}
        interval = {"slower": ratio.median, "low": ratio.low, "high": ratio.high}
        found.append({"what": name, **values, **interval})
    return found


if __name__ == "__main__":
    sys.exit(main())
