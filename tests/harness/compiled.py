"""C for tests: sources in this folder, made into libraries by the compiler that is there."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path


def compiled(source: str, folder: Path, *options: str) -> Path:
    """Compile a file of this folder into a library in another folder."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "this test needs a C compiler (cc)"
    made = (folder / source).with_suffix(".so")
    done = subprocess.run(
        [compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(made),
         str(Path(__file__).with_name(source)), *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{source} does not compile:\n{done.stderr}"
    return made


def library(source: str, folder: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(compiled(source, folder, "-O1")))
