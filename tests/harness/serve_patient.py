"""`kvstore serve` that waits for engines' writes, and for sources, however busy a machine is."""

from __future__ import annotations

import sys

from kvstore.handover import engine_writes
from kvstore.store import hints
from tests.harness.serve_brief import S, serve

if __name__ == "__main__":
    waits = {(hints, "WAIT_NS"): 60 * S, (hints, "WAIT_NS_MAX"): 60 * S}
    sys.exit(serve({(engine_writes, "WAIT_NS"): 60 * S, **waits}))
