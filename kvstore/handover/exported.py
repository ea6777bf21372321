"""Memory of this store that peers read: extents that the exporter maps, and the exporter itself.

When the exporter is started again it has another name, and its memory other addresses.
"""

from __future__ import annotations

from kvstore.handover.jobs import OwnExporter
from kvstore.handover.transfers import Reachable, Transfers
from kvstore.wire import peer as m
from kvstore.wire.engine import Extent
from kvstore.wire.framing import Message
from tiers.nixl import messages as nixl


class ExportedMemory:
    """Extents of slots in the exporter, and the regions by which peers reach them.

    settled: extents for which the store need not wait: just exported, or unmapped.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self.up: nixl.Ready | None = None  # the exporter that runs now
        self.settled: list[int] = []
        self._slots: dict[int, int] = {}  # of each extent; 0: it is being unmapped
        self._regions: dict[int, m.Region] = {}

    def change(self, message: Message, fd: int | None) -> None:
        """Export a new extent, or stop exporting one, as the message to workers says."""
        if isinstance(message, Extent) and fd is not None:
            self._transfers.export(message.extent, fd, message.count * message.slot_bytes)
            self._slots[message.extent] = message.count
            self.settled.append(message.extent)
        elif isinstance(message, Extent):
            self._slots[message.extent] = 0
            self._regions.pop(message.extent, None)
            self._transfers.unexport(message.extent)

    def introduce(self) -> OwnExporter | None:
        """Start our exporter if it does not run, and return it; None until it runs."""
        self._transfers.exporter.wake()
        up = self.up
        return None if up is None else OwnExporter(up.name, up.metadata, self._regions)

    def reachable(self, found: Reachable) -> None:
        """Note how peers reach an extent."""
        if slots := self._slots.get(found.extent):
            self._regions[found.extent] = m.Region(found.extent, found.base, slots)

    def unmapped(self, extent: int) -> None:
        """Note that the exporter maps an extent no more."""
        self._slots.pop(extent, None)
        self.settled.append(extent)

    def down(self) -> None:
        """Note that the exporter has ended: its addresses mean nothing any more."""
        self.up = None
        self._regions.clear()

    def end(self) -> None:
        """Export nothing any more."""
        self.down()
        self.settled += self._slots
        self._slots.clear()
