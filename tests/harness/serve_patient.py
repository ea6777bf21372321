"""`kvstore serve` that waits for engines' writes as long as it takes on a busy machine."""

from __future__ import annotations

import sys

from kvstore.handover import engine_writes
from tests.harness.serve_brief import S, serve

if __name__ == "__main__":
    sys.exit(serve({(engine_writes, "WAIT_NS"): 60 * S}))
