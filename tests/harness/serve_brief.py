"""`kvstore serve` whose leases, deadlines and quarantines last seconds, so that tests see the end.

KVSTORE_TEST_NETNS: the network namespace that it runs in, as `ip netns` names it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from kvstore import cli
from kvstore.handover import (
    consumer,
    fetches,
    heartbeats,
    jobs,
    links,
    producer,
    side_channel,
    transfers,
)
from kvstore.store import server
from tiers.nixl import supervisor

S = 1_000_000_000
TIMES = {
    (consumer, "STALL_NS"): 2 * S,
    (consumer, "LEASE_MS"): 3_000,
    (fetches, "LEASE_MS"): 3_000,
    (heartbeats, "LEASE_MS"): 3_000,  # what it imported
    (producer, "GRACE_NS"): 1 * S,
    (jobs, "UNKNOWN_NS"): 1 * S,  # longer than in truth: other tests keep processors busy
    (links, "IDLE_NS"): 4 * S,
    (transfers, "QUIET_NS"): 3 * S,
    (side_channel, "FORGET_NS"): 8 * S,
    (supervisor, "SILENT_NS"): 5 * S,
    (server, "_FLUSH_S"): 1,
}
_CLONE_NEWNET = 0x40000000


def serve(times: Mapping[tuple[ModuleType, str], float]) -> int:
    """Run `kvstore` with other times in place of the constants of these modules."""
    for (module, name), value in times.items():
        assert hasattr(module, name), f"{module.__name__} has no {name} any more"
        setattr(module, name, value)
    return cli.main()


def main() -> int:
    netns = os.environ.get("KVSTORE_TEST_NETNS")
    if netns is not None:
        with Path("/run/netns", netns).open() as place:
            assert ctypes.CDLL(None).setns(place.fileno(), _CLONE_NEWNET) == 0
    return serve(TIMES)


if __name__ == "__main__":
    sys.exit(main())
