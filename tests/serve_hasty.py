"""`kvstore serve` that tries a disk that failed again after moments, and ends without patience."""

from __future__ import annotations

import sys
from importlib import import_module

from kvstore import cli

SECONDS = {
    "RETRY_S": 0.3, "RETRY_MAX_S": 0.6, "FULL_S": 0.3, "EVERY_S": 0.1, "HANG_S": 1.0,
    "CLOSE_S": 0.7, "DRAIN_S": 0.7, "_FLUSH_S": 0.7,
}  # fmt: skip


def main() -> int:
    import_module("tiers.nvme")
    import_module("kvstore.service.server")
    for module in [module for name, module in sys.modules.items() if name.startswith("tiers.nvme")
                   or name == "kvstore.service.server"]:  # fmt: skip
        for name, seconds in SECONDS.items():
            if hasattr(module, name):
                setattr(module, name, seconds)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
