"""Slot memory that the device may touch: registered piece by piece, and let go of again.

Registering locks pages and takes a fraction of a second a GiB, in which CUDA may make others of the
process wait. So it goes in pieces, on a thread that nobody waits for. A piece ends where a slot
ends, since a copy engine refuses a range that lies in two registrations.
"""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import time
from collections.abc import Callable

from connectors.copies.gpu.cuda import Cuda
from connectors.copies.host import MappedExtent
from kvstore import numa
from kvstore.core.errors import TierError, TierIOError

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
_LOG_S = 10.0
_PAGE = 4096


class Pins:
    """The extents that are registered; used by one thread."""

    def __init__(self, cuda: Cuda, clock: Callable[[], float] = time.monotonic) -> None:
        self._cuda = cuda
        self._clock = clock
        self._pieces: dict[int, list[tuple[int, int]]] = {}  # extent's address -> address, bytes
        self._logged = clock()
        self._node: int | None = None  # not known, or it was told already
        with contextlib.suppress(TierIOError):  # it is for a line in the log only
            self._node = numa.node_of_gpu(cuda.bus_id())

    @property
    def bytes(self) -> int:
        """Count what is registered."""
        return sum(size for pieces in self._pieces.values() for _, size in pieces)

    def pin(self, extent: MappedExtent, stopped: Callable[[], bool]) -> None:
        """Register an extent's slots; nothing of it is registered if that fails.

        Raises TierError, saying what may be the reason, and when stopped() between two pieces.
        """
        self.unpin(extent)  # pieces at this address that CUDA refused to release before
        pieces = self._pieces.setdefault(extent.address, [])
        try:
            for address, size in pieces_of(extent):
                if stopped():
                    raise TierError("stopped while memory was being pinned")
                self._cuda.pin(address, size)
                pieces.append((address, size))
                self._say(extent)
        except TierIOError as exc:
            done = self.bytes
            self.unpin(extent)
            locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            raise TierError(explain(str(exc), done, extent.bytes, locked)) from exc
        except TierError:
            self.unpin(extent)
            raise
        self._say_where(extent)

    def _say_where(self, extent: MappedExtent) -> None:
        """Log once that slot memory is on another NUMA node than the GPU."""
        if self._node is None:
            return
        try:
            found = numa.nodes_of(extent.address, extent.bytes)
        except OSError as exc:
            log.info("kvstore: the NUMA nodes of memory cannot be found: %s", exc)
            self._node = None
            return
        if found[self._node] * 2 < found.total():
            log.warning(
                "kvstore: the GPU is at NUMA node %d, slot memory is on node %s, so copies take the"
                " link between processors: set numa = %d in [cpu] of the store (if it is, that node"
                " has no room)",
                self._node,
                " and ".join(map(str, sorted(found))),
                self._node,
            )
            self._node = None

    def _say(self, extent: MappedExtent) -> None:
        now = self._clock()
        if now - self._logged > _LOG_S:
            self._logged = now
            part = sum(size for _, size in self._pieces[extent.address])
            log.info(
                "kvstore: pinning memory, %d MiB so far; %d of %d MiB of this extent",
                self.bytes >> 20,
                part >> 20,
                extent.bytes >> 20,
            )

    def unpin(self, extent: MappedExtent) -> None:
        """Let go of an extent that no copy uses; of what is not registered, too.

        Pieces that CUDA refuses to release stay known; pin() at the same address tries them again.
        """
        left, refused = [], None
        for address, size in self._pieces.pop(extent.address, []):
            try:
                self._cuda.unpin(address)
            except TierIOError as exc:
                left.append((address, size))
                refused = exc
        if refused is not None:
            self._pieces[extent.address] = left
            log.error(
                "kvstore: %d MiB of slot memory stay pinned: %s",
                sum(size for _, size in left) >> 20,
                refused,
            )


def pieces_of(extent: MappedExtent) -> list[tuple[int, int]]:
    """Cut an extent's slots into what to register, (address, bytes), where slots and pages end."""
    whole = math.lcm(extent.slot_bytes, _PAGE)
    step = max(1, PIECE_BYTES // whole) * whole
    total = extent.count * extent.slot_bytes
    return [(extent.address + at, min(step, total - at)) for at in range(0, total, step)]


def explain(problem: str, pinned: int, wanted: int, locked: int) -> str:
    """Say what stands in the way of pinned memory. locked: RLIMIT_MEMLOCK, -1 without limit."""
    limit = "unlimited" if locked < 0 else f"{locked >> 20} MiB"
    return (
        f"{problem}; {pinned >> 20} of {wanted >> 20} MiB of the cpu tier are pinned. Possible"
        " causes: the memory limit of this worker's container (pinned pages count there), the"
        f" locked-memory limit (ulimit -l: {limit}), a kernel that does not let drivers pin shared"
        " memory (some sandboxes)"
    )
