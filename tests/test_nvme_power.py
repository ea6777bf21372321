"""Power cuts under load: moments of a simulated disk, each opened again by the real code.

KVSTORE_CUTS=1000 for a long campaign.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.harness.nvme_crash import (
    MIB,
    SLOT_BYTES,
    WINDOW_S,
    Campaign,
    names_in,
    settings_for,
    watch_leaving,
)
from tests.harness.nvme_load import Load, Name
from tests.harness.nvme_platter import DELAY_S, Platter, ProcessHere
from tiers.nvme.disk import NvmeDisk
from tiers.nvme.index_client import IndexProcess
from tiers.nvme.messages import Commit

FULL_BYTES = 11 * MIB // 4
# With room, commits wait for the window; at the cap, evictions hurry them.
ROOMY_BYTES = {0: 32 * MIB, 3: 6 * MIB, 6: 6 * MIB, 9: 6 * MIB}  # of these seeds
SEEDS = 10
CUTS = 20  # of each life
# Of each seed, each from where the power failed in the one before.
LIVES = int(os.environ.get("KVSTORE_CUTS", "200")) // (SEEDS * CUTS)
REAL_CHILD_SHARE = 0.03  # it starts a process
STEP_S = 0.004
# Just missed a commit, which takes its time; the window; the next commit.
DURABLE_S = WINDOW_S + 2 * (DELAY_S + 2 * STEP_S) + STEP_S


class PowerCuts(Campaign):
    """A store that loses power again and again, and a look at every other moment."""

    def __init__(self, seed: int, folder: Path, platter: Platter) -> None:
        super().__init__(f"seed {seed}", ROOMY_BYTES.get(seed, FULL_BYTES))
        self._folder = folder
        self._platter = platter
        self._rng = random.Random(seed)
        self._moments = 0  # until the next cut
        platter.at_any_moment = self._maybe_cut
        platter.at_commit = self._commit

    # What must be there

    def gone(self, names: list[Name]) -> None:
        if self._platter.live:
            self.seen["gone"] += len(names)
            self.ledger.lose(names, self._platter.now_s)
        else:
            self.left.update(names)

    def cleared(self, number: int) -> None:
        if self._platter.live:
            self.ledger.clear(number, self._platter.now_s)

    def _commit(self, changes: Commit, planned_s: float) -> None:
        self.ledger.commit(names_in(changes), planned_s)

    # Lives

    def live(self, start: Path, end: Path) -> None:
        """Run on one directory until the power fails; leave what the next start finds."""
        self._platter.start(start)
        disk = NvmeDisk(settings_for(start, self.capacity_bytes))
        loads = [
            Load(disk, number, size, self._rng, self._stored)
            for number, size in enumerate(SLOT_BYTES)
        ]
        goal = self.seen["cuts"] + CUTS
        while self.seen["cuts"] < goal:
            for load in loads:
                load.step()
            self._platter.pass_time()
            assert not self._platter.honest or not any(load.corrupt for load in loads)
        self._platter.live = False
        abandon(disk)
        self._platter.cut(end)
        shutil.copytree(end, self._folder / "look")
        self.ledger.begin(self._look_at(self._folder / "look"))

    def _stored(self, names: list[Name]) -> None:
        self.ledger.store(names, self._platter.now_s)

    def _maybe_cut(self) -> None:
        self._moments -= 1
        if self._moments > 0:
            return
        self._moments = self._rng.choice((1, 3, 10, 60, 300))
        self.seen["cuts"] += 1
        folder = self._folder / "look"
        self._platter.cut(folder)
        self._platter.live = False
        self._look_at(folder)
        self._platter.live = True

    def _look_at(self, folder: Path) -> set[Name]:
        rng = random.Random(f"{self.label}, cut {self.seen['cuts']}")  # threads of its own
        real = rng.random() < REAL_CHILD_SHARE
        self._platter.process = IndexProcess if real else ProcessHere
        ledger, now_s = self.ledger, self._platter.now_s
        required = ledger.committed | ledger.stored_before(now_s - DURABLE_S)
        found = self.look(folder, rng, required, honest=self._platter.honest)
        self._platter.process = ProcessHere
        return found


def abandon(disk: NvmeDisk) -> None:
    """Let go of what a process without power would have open."""
    disk.attached.index.close()
    for space in disk.spaces:
        for file in space.extents.values():
            file.close()
    disk.attached.directory.close()


@pytest.fixture
def platter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Platter:
    return Platter(random.Random(request.node.name), monkeypatch)


def run(seed: int, folder: Path, platter: Platter, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """A campaign of LIVES times CUTS cuts."""
    campaign = PowerCuts(seed, folder, platter)
    watch_leaving(monkeypatch, campaign.gone, campaign.cleared)
    places = [folder / f"life-{number}" for number in range(LIVES + 1)]
    places[0].mkdir()
    for start, end in itertools.pairwise(places):
        campaign.live(start, end)
        shutil.rmtree(start)
    return campaign.seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_power_cut_costs_no_durable_block(
    seed: int, tmp_path: Path, platter: Platter, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = run(seed, tmp_path, platter, monkeypatch)
    assert seen["required"] > 50 * seen["cuts"], "little was durable: the campaign shows nothing"
    assert seed in ROOMY_BYTES or seen["gone"] > 10 * seen["cuts"], "the cap was not reached"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS, SEEDS + 2))
def test_a_disk_that_lies_about_its_syncs_costs_blocks_and_gives_no_wrong_ones(
    seed: int, tmp_path: Path, platter: Platter, monkeypatch: pytest.MonkeyPatch
) -> None:
    platter.honest = False
    assert run(seed, tmp_path, platter, monkeypatch)["damaged"]
