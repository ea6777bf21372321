"""The demo of a hand-over, whole: three real engines behind a real router."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.vllm
@pytest.mark.long
def test_the_demo_ends_well() -> None:
    """It checks by itself where each token came from, and that outputs are the same."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.demo", "--pd"],
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all outputs identical, all tokens from where they had to come" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
