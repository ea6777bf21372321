"""SIGKILL of a store under load, again and again on one directory: what was durable is there.

KVSTORE_KILLS=300 for a long campaign. A failure names the child's seed; moments differ each time.
"""

from __future__ import annotations

import os
import random
import select
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.harness.nvme_blocks import disk_bytes
from tests.harness.nvme_child import CAPACITY_BYTES
from tests.harness.nvme_load import Name, parse, path_to

KILLS = int(os.environ.get("KVSTORE_KILLS", "12"))
ROOT = Path(__file__).resolve().parent.parent
WINDOW_S = 0.02  # of settings_for
SLACK_S = 0.05
START_S = 600.0
NEVER = float("inf")


class Commits:
    """When the last one that has ended was planned, and how long one has taken at most."""

    def __init__(self) -> None:
        self.done_s = self.longest_s = 0.0
        self._planned_s: float | None = None  # of the one under way

    def take(self, word: str, now_s: float) -> None:
        if self._planned_s is not None:
            self.longest_s = max(self.longest_s, now_s - self._planned_s)
        if word == "commit":
            self._planned_s = now_s
        elif word == "committed" and self._planned_s is not None:
            self.done_s, self._planned_s = self._planned_s, None


class Ledger:
    """What the directory must hold, by what its users have said."""

    def __init__(self) -> None:
        self.said: Counter[str] = Counter()
        self._stored: dict[Name, float] = {}  # when it was acknowledged
        self._required: set[Name] = set()

    def read(self, lines: list[str]) -> None:
        """Follow one process from its start to its end."""
        checked = False
        now_s, slowest_s, commits = 0.0, 0.0, Commits()
        for line in lines:
            time_s, word, *rest = line.split(" ")
            now_s = float(time_s)
            self.said[word] += 1
            commits.take(word, now_s)
            if word == "have":
                self._compare({parse(text) for text in rest})
                checked = True
            elif word == "stored":
                for text in rest:
                    self._stored.setdefault(parse(text), now_s)
            elif word == "gone":
                self._forget(rest)
            elif word == "slow":
                slowest_s = max(slowest_s, float(rest[0]))
        if checked:
            # A block may just miss one commit, wait the window and take part in the next. What was
            # there when a commit was planned, is durable with it.
            late_s = WINDOW_S + SLACK_S + slowest_s + 2 * commits.longest_s
            self._require(max(commits.done_s, now_s - late_s))

    def _forget(self, texts: list[str]) -> None:
        for name in map(parse, texts):
            self._stored.pop(name, None)
            self._required.discard(name)

    def _compare(self, found: set[Name]) -> None:
        missing = self._required - found
        assert not missing, f"{len(missing)} durable blocks are lost: {sorted(missing)[:9]}"
        self.said["required"] += len(self._required)
        self._stored = dict.fromkeys(found, 0.0)

    def _require(self, before_s: float) -> None:
        """Each block that was stored before that time, as were all above it."""
        self._required = {
            name
            for name in self._stored
            if max(self._stored.get(each, NEVER) for each in path_to(name)) < before_s
        }


class Child:
    """One process of the campaign."""

    def __init__(self, folder: Path, seed: int, errors: Path) -> None:
        self._errors = errors
        with errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.nvme_child", str(folder), str(seed)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
                cwd=ROOT,
            )
        self._said = bytearray()

    def listen(self, seconds: float, until: bytes | None = None) -> bool:
        """Take what it says; False when the time was over before it said that."""
        end_s = time.monotonic() + seconds
        pipe = self._process.stdout
        assert pipe is not None
        while (left := end_s - time.monotonic()) > 0:
            if until is not None and until in self._said:
                return True
            if select.select([pipe], [], [], left)[0]:
                data = pipe.read(1 << 20)
                if not data:
                    break
                self._said += data
        return False

    def kill(self) -> list[str]:
        """End it at once; return all that it has said in whole lines."""
        self._process.kill()
        self.listen(START_S)
        code = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        errors = self._errors.read_text()
        assert code == -9, f"ended by itself:\n{errors}"
        unexpected = [line for line in errors.splitlines() if "not shut down in order" not in line]
        assert not unexpected, errors
        return self._said.decode().split("\n")[:-1]


@pytest.mark.slow
def test_a_kill_while_a_directory_is_made_leaves_one_that_works(tmp_path: Path) -> None:
    rng = random.Random(2)
    for seed in range(max(1, KILLS // 5)):
        folder, ledger = tmp_path / f"kv{seed}", Ledger()
        for _ in range(3):
            child = Child(folder, seed, tmp_path / "stderr")
            child.listen(rng.uniform(0.06, 0.2))
            ledger.read(child.kill())
        child = Child(folder, seed, tmp_path / "stderr")
        assert child.listen(START_S, b" serving\n"), child.kill()
        ledger.read(child.kill())


@pytest.mark.slow
def test_no_kill_costs_durable_blocks_or_gives_wrong_ones(tmp_path: Path) -> None:
    folder, ledger = tmp_path / "kv", Ledger()
    rng = random.Random(1)
    for seed in range(KILLS + 1):
        child = Child(folder, seed, tmp_path / "stderr")
        if seed < KILLS and rng.random() < 0.25:
            child.listen(rng.uniform(0.0, 0.3))  # before it serves, mostly
        else:
            assert child.listen(START_S, b" serving\n"), child.kill()
            child.listen(rng.uniform(0.05, 0.6))
        ledger.read(child.kill())
        if folder.exists():
            assert disk_bytes(folder) <= CAPACITY_BYTES, f"seed {seed}"
            assert not list(folder.glob("index.damaged*")), f"seed {seed}"
    assert ledger.said["serving"] > KILLS // 2
    assert ledger.said["required"] > 100 * KILLS, "little was durable: the campaign shows nothing"
    assert ledger.said["gone"] > 100 * KILLS, "the cap was not reached"
