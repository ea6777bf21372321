"""Makes NIXL's GDS backend and says how that went: JSON, the last line of standard output.

A program of its own, run by gds.py: what the plugin loads may end the process, and NIXL writes its
log to both outputs.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata

import msgspec

PLUGIN = "GDS"


class Tried(msgspec.Struct, frozen=True):
    """What came of it; wrong: in NIXL's or the loader's words, empty if the backend was made."""

    wrong: str = ""
    package: bool = True  # False: NIXL itself is not here


def attempt() -> Tried:
    """Make the backend. It opens cuFile, and that the driver."""
    try:
        mover = import_module("tiers.nvme.nixl_mover")
        metadata.version("nixl")
    except (ImportError, OSError) as exc:
        return Tried(str(exc), package=False)
    try:
        mover.make_agent().create_backend(PLUGIN, {})
    except mover.LOAD_ERRORS as exc:
        return Tried(str(exc) or repr(exc))
    return Tried()


if __name__ == "__main__":
    sys.stdout.write("\n" + msgspec.json.encode(attempt()).decode())
