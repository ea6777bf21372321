"""A real headless browser: Debian's package `chromium`.

Where it is missing a test of it is skipped, in CI it fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

LIMIT_S = 120
PAGE_MS = 6_000  # of the page's own time: three looks at the store


def program() -> str:
    """Return the browser's path; end the test where there is none."""
    found = shutil.which("chromium")
    if found is None:
        text = "there is no `chromium` (Debian: apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    return found


def browse(browser: str, folder: Path, url: str, *options: str) -> str:
    """Open a page, run its scripts for a while, and return what the browser prints.

    folder: takes the browser's profile.
    """
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--disable-background-networking", "--no-first-run", "--enable-logging=stderr"),
        *(f"--user-data-dir={folder / 'profile'}", f"--virtual-time-budget={PAGE_MS}"),
        *options,
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "Content Security Policy" not in done.stderr, done.stderr
    assert "Uncaught" not in done.stderr, done.stderr
    return done.stdout
