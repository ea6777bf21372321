"""Simulated worlds: `python -m tests.sim SEED` replays one."""

from __future__ import annotations

from tests.sim.runs import main

if __name__ == "__main__":
    main()
