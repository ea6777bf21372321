"""`kvstore serve` whose file of settings may be on a file system that hangs: a FIFO holds it."""

from __future__ import annotations

import os
import sys

from kvstore.store import edge_thread
from tests.harness.serve_brief import serve

READ_S = 0.5

if __name__ == "__main__":
    setattr(edge_thread, "open_settings", os.open)  # noqa: B010 - it is imported there
    sys.exit(serve({(edge_thread, "READ_S"): READ_S}))
