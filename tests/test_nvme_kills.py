"""Processes with a disk under load, killed again and again on one directory.

KVSTORE_KILLS=300 for a long campaign, KVSTORE_SEED for another one. The seed decides what each
process is killed at, and what its load is; at which moment, the machine decides.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.forked import Forked
from tests.harness.nvme_child import CAPS, POINTS, forked
from tests.harness.nvme_crash import Campaign, watch_leaving
from tests.harness.nvme_load import Name
from tests.harness.patience import WAIT_S
from tiers.nvme.directory import Directory
from tiers.nvme.fsck import examine

KILLS = int(os.environ.get("KVSTORE_KILLS", "30"))
SEED = int(os.environ.get("KVSTORE_SEED", "1"))
# How lives end: at each point of nvme_child once, and otherwise, in thirty lives.
ENDS = (*POINTS, *["time"] * 10, *["loading"] * 4, "row")
OFTEN = {"read": 60, "half-written": 20, "written": 60, "sync": 10, "gone": 40}
ONCE = ("load", "loaded", "clear", "resize", "made", "known", "forgotten")
RARE = 3  # times that other points are passed before
POINT_S = 30.0  # until a point is reached, however busy the machine is


class Killed:
    """One life: it ends with a SIGKILL, by its own hand or ours, or in order."""

    def __init__(self, folder: Path, log: Path, *arguments: object) -> None:
        log.unlink(missing_ok=True)
        self._log, self._errors = log, log.with_suffix(".errors")
        with self._errors.open("wb") as stderr:
            self._process = Forked(
                forked, [stderr.fileno()], [str(each) for each in (folder, log, *arguments)]
            )

    @property
    def lines(self) -> list[list[str]]:
        """What it has said so far: time, word, and what belongs to it."""
        text = self._log.read_text() if self._log.exists() else ""
        return [line.split(" ") for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait(self, seconds: float, done: Callable[[], object] = lambda: False) -> None:
        """Wait until something holds, it took longer, or the process ended."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and self._process.poll() is None and not done():
            time.sleep(0.002)

    def said(self, word: str) -> bool:
        return any(line[1] == word for line in self.lines)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it, if it has not done so itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)
        code, errors = self._process.wait(WAIT_S), self._errors.read_text()
        expected = -signal.SIGKILL if number == signal.SIGKILL else 0
        assert code == expected, f"exit status {code}:\n{errors}"
        assert not [line for line in errors.splitlines() if not line.startswith("WARNING")], errors

    def abandon(self) -> None:
        """End it, whatever it has come to; safe to call twice."""
        self._process.kill()
        self._process.wait()


class Kills(Campaign):
    """One directory, and the processes that use it one after the other."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(f"seed {seed}", max(CAPS))
        self._folder, self._look_at, self._log = folder / "kv", folder / "look", folder / "log"
        self._seed = seed
        self._rng = random.Random(seed)
        self._life: Killed | None = None

    def start(self, *point: object) -> Killed:
        """Start with the cap as it was left, or another."""
        if self._rng.random() < 0.1:
            self.capacity_bytes = self._rng.choice(CAPS)
        seed = self._rng.randrange(1 << 30)
        self._life = Killed(self._folder, self._log, seed, self.capacity_bytes, *point)
        return self._life

    def kill(self, number: int) -> None:
        """One life, of the kind that the number has in this seed."""
        self._rng = rng = random.Random(f"{self._seed}/{number}")
        deck = list(ENDS)
        random.Random(f"{self._seed} {number // len(deck)}").shuffle(deck)
        end = deck[number % len(deck)]
        if end == "row":
            for _ in range(rng.randint(2, 4)):
                life = self.start()
                life.wait(rng.uniform(0.0, 0.6))
                self._bury(life)
            return
        if end in POINTS:
            most = 1 if end in ONCE else OFTEN.get(end, RARE)
            life = self.start(end, rng.randint(1, most))
            life.wait(WAIT_S, lambda: life.said("serving"))
            life.wait(0.0 if end == "load" else POINT_S)  # a small index may be read in one turn
        else:
            life = self.start()
            begins = ("loading", "serving") if end == "loading" else ("serving",)
            life.wait(WAIT_S, lambda: any(life.said(word) for word in begins))
            life.wait(rng.uniform(0.0, 0.08) if end == "loading" else rng.uniform(0.1, 1.2))
        self._bury(life)

    def _bury(self, life: Killed) -> None:
        life.end()
        self._follow(life.lines)
        self.seen["kills"] += 1
        self._compare(self.ledger.committed)

    def finish(self) -> None:
        """Start once more and end in order: everything is there, and the directory is right."""
        life = self.start()
        life.wait(WAIT_S, lambda: life.said("within") or life.said("resize"))
        life.wait(0.5)
        life.end(signal.SIGTERM)
        self._follow(life.lines)
        self._compare(self.ledger.stored_before(float("inf")))
        report = examine(self._folder, repair=False)
        assert report.ok, report
        assert report.in_order

    def _follow(self, lines: list[list[str]]) -> None:
        """Take what a process has said into account."""
        ledger, seen, words = self.ledger, self.seen, Counter[str]()
        for time_s, word, *rest in lines:
            now_s = float(time_s)
            words[word] += 1
            match word:
                case "stored":
                    ledger.store(_names(rest), now_s)
                case "gone":
                    ledger.lose(_names(rest), now_s)
                    seen["gone"] += len(rest)
                case "cleared":
                    ledger.clear(int(rest[0]), now_s)
                case "committed":
                    ledger.commit(_names(rest[1:]), float(rest[0]))
                case "resize":
                    seen["resizes down"] += int(rest[0]) < self.capacity_bytes
                    seen["resizes up"] += int(rest[0]) > self.capacity_bytes
                    self.capacity_bytes = int(rest[0])
                case "killed":
                    seen[f"killed at {rest[0]}"] += 1
        seen["within a smaller cap"] += words["within"]
        seen["killed in a commit"] += words["planned"] > words["committed"]
        seen["killed while loading"] += "loading" in words and "serving" not in words

    def _compare(self, required: set[Name]) -> None:
        """Start on a copy of the directory, as the next process does on itself."""
        volume = Directory(self._folder)
        volume.open(WAIT_S)  # once the process of the index has ended, too
        volume.close()
        shutil.copytree(self._folder, self._look_at)
        self.ledger.begin(self.look(self._look_at, self._rng, required))

    def close(self) -> None:
        """End what runs, well or not."""
        if self._life is not None:
            self._life.abandon()


def _names(words: list[str]) -> list[Name]:
    return [Name(*map(int, word.split("/"))) for word in words]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_kill_costs_durable_blocks_or_gives_wrong_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign, number = Kills(tmp_path, SEED), 0
    watch_leaving(monkeypatch, campaign.left.update, lambda _: None)
    try:
        for number in range(KILLS):
            campaign.kill(number)
        campaign.finish()
    except BaseException as exc:
        again = f"KVSTORE_SEED={SEED} KVSTORE_KILLS={KILLS} pytest tests/{Path(__file__).name}"
        exc.add_note(f"Life {number} of seed {SEED}; to see it again: {again}")
        exc.add_note(f"{dict(campaign.seen)}")
        raise
    finally:
        campaign.close()
    if len(ENDS) <= KILLS:
        check_states_met(campaign.seen)


def check_states_met(seen: Counter[str]) -> None:
    """What it has shown, it has shown in these states."""
    for what in ("killed in a commit", "killed while loading", "within a smaller cap"):
        assert seen[what], f"{what}: {seen}"
    missed = {point for point in POINTS if not seen[f"killed at {point}"]}
    assert missed <= {"load"}, seen
    assert seen["gone"] > 10 * KILLS, "the cap was hardly reached"
    assert seen["resizes up"]
    assert seen["resizes down"]
    assert seen["required"] > 100 * KILLS, "little was durable: this shows nothing"
