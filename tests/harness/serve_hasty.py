"""`kvstore serve` that tries a disk that failed again after moments, and ends without patience."""

from __future__ import annotations

import sys

from kvstore.store import server
from tests.harness.serve_brief import serve
from tiers.nvme import disk, extent_allocator, health, tier

SECONDS = {
    (health, "RETRY_S"): 0.3,
    (health, "RETRY_MAX_S"): 0.6,
    (health, "HANG_S"): 1.0,
    (disk, "HANG_S"): 1.0,
    (extent_allocator, "FULL_S"): 0.3,
    (disk, "LOOK_EVERY_S"): 0.1,
    (disk, "CLOSE_S"): 0.7,
    (tier, "DRAIN_S"): 0.7,
    (server, "_FLUSH_S"): 1.2,
    (server, "_BACK_S"): 3.0,
}


if __name__ == "__main__":
    sys.exit(serve(SECONDS))
