"""What the parts of a disk have in common."""

from __future__ import annotations

import msgspec

from kvstore.config import NvmeConfig
from tiers.nvme.directory import Volume
from tiers.nvme.health import Health
from tiers.nvme.index_client import IndexDamagedError
from tiers.nvme.maintenance import Keeper
from tiers.nvme.namespace import Space
from tiers.nvme.startup import Opening


class Shared(msgspec.Struct, eq=False):
    """A disk's settings, its directory, what is in it, how it is, and the thread that keeps it."""

    settings: NvmeConfig
    capacity_bytes: int
    volume: Volume
    opening: Opening  # another one after a return to a directory that is not as it was left
    health: Health
    keeper: Keeper

    def write_failed(self, what: str, error: Exception, now_s: float) -> None:
        """Something that changes the disk has failed; a damaged index is read anew, and set aside.

        It stays as it is, so that to try again would be of no use.
        """
        if isinstance(error, IndexDamagedError):
            self.opening.damage = error
            self.health.lost(f"{what} failed: {error}", now_s)
        else:
            self.health.write_failed(what, error, now_s)

    @property
    def spaces(self) -> list[Space]:
        """List the namespaces that have been seen."""
        return list(self.opening.spaces.values())
