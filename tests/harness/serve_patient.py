"""`kvstore serve` that waits for sources that a router names, however busy a machine is."""

from __future__ import annotations

import sys

from kvstore.store import hints
from tests.harness.serve_brief import S, serve

if __name__ == "__main__":
    sys.exit(serve({(hints, "WAIT_NS"): 60 * S, (hints, "WAIT_NS_MAX"): 60 * S}))
