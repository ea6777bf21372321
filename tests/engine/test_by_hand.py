"""The block of docs/how-to/attach-vllm.md that a newcomer pastes, as it stands there."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.pages import ROOT, shown

pytestmark = pytest.mark.vllm
FIRST_HIT_S = 180.0
PATIENCE_S = 600.0


@pytest.mark.long
def test_Q14_the_block_of_the_docs_shows_a_first_hit(tmp_path: Path) -> None:
    (block,) = [text for _, text in shown("bash")]
    for name in ("kvstore", "tiers", "connectors", "tests"):  # a clone of one's own
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    # What other tests' engines need is being imported; on two cores a store would wait for that.
    imported = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    imported.start()
    imported.join()
    began = time.monotonic()
    shell = subprocess.Popen(
        ["/bin/bash", "-c", block], cwd=tmp_path, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, error = shell.communicate(timeout=PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    log = (tmp_path / "vllm.log").read_text()
    assert re.findall(r'"cached_tokens":(\d+)', out) == ["0", "896"], log[-3000:] + error
    assert re.search(r"kvstore_hit_tokens .* 896", out)
    assert "kvstore: attached, blocks of 128 tokens" in log
    assert time.monotonic() - began < FIRST_HIT_S
