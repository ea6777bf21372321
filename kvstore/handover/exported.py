"""Memory of this store that peers read: extents that the exporter maps, and the exporter itself.

When the exporter is started again it has another name, and its memory other addresses.
"""

from __future__ import annotations

from kvstore.handover.jobs import OwnExporter
from kvstore.wire import peer as m
from kvstore.wire.engine import Extent
from kvstore.wire.framing import Message
from tiers.nixl import messages as nixl
from tiers.nixl.supervisor import Exporter


class ExportedMemory:
    """Extents of slots in the exporter, and the regions by which peers reach them.

    settled: extents for which the store need not wait: just exported, or unmapped.
    """

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self.up: nixl.Ready | None = None  # the exporter that runs now
        self.settled: list[int] = []
        self._slots: dict[int, int] = {}  # of each extent; 0: it is being unmapped
        self._addresses: dict[int, int] = {}  # mapped, and their metadata has not come yet
        self._regions: dict[int, m.Region] = {}

    def change(self, message: Message, fd: int | None) -> None:
        """Export a new extent, or stop exporting one, as the message to workers says."""
        if isinstance(message, Extent) and fd is not None:
            size = message.count * message.slot_bytes
            self._exporter.map(message.extent, fd, size, writable=False)
            self._slots[message.extent] = message.count
            self.settled.append(message.extent)
        elif isinstance(message, Extent):
            self._slots[message.extent] = 0
            self._regions.pop(message.extent, None)
            self._exporter.unmap(message.extent)

    def introduce(self) -> OwnExporter | None:
        """Start our exporter if it does not run, and return it; None until it runs."""
        self._exporter.wake()
        up = self.up
        return None if up is None else OwnExporter(up.name, up.metadata, self._regions)

    def ready(self, up: nixl.Ready) -> None:
        """Note how peers reach the exporter, and all that it has mapped."""
        self.up = up
        for extent, address in self._addresses.items():
            if slots := self._slots.get(extent):
                self._regions[extent] = m.Region(extent, address, slots)
        self._addresses.clear()

    def mapped(self, event: nixl.Mapped) -> None:
        """Note that the exporter maps an extent, or maps it no more."""
        if event.address is not None:
            self._addresses[event.extent] = event.address
        elif not event.text:
            self._slots.pop(event.extent, None)
            self.settled.append(event.extent)

    def down(self) -> None:
        """Note that the exporter has ended: its addresses mean nothing any more."""
        self.up = None
        self._addresses.clear()
        self._regions.clear()

    def end(self) -> None:
        """Export nothing any more."""
        self.down()
        self.settled += self._slots
        self._slots.clear()
