"""C for tests: sources in this folder, made into libraries by the compiler that is there."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path


def library(source: str, folder: Path) -> ctypes.CDLL:
    """Compile a file of tests/ into a folder, and load it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "this test needs a C compiler (cc)"
    made = folder / "made.so"
    done = subprocess.run(
        [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(made),
         str(Path(__file__).with_name(source))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(made))
