"""What `kvstore fsck` reports of the directory of an NVMe tier; tiers.nvme.fsck finds it out."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Amount(msgspec.Struct):
    """How many, and how many bytes they have."""

    count: int = 0
    bytes: int = 0

    def add(self, size: int, count: int = 1) -> None:
        """Add some that have this size each."""
        self.count += count
        self.bytes += count * size


MEANINGS = {
    "blocks": {
        "ok": "read, and their checksums are right",
        "damaged": "their checksums are wrong",
        "unreadable": "I/O error, or beyond the end of file",
        "foreign": "no such extent or size; place taken",
        "unreachable": "a block before them is not ok",
    },
    "extents": {
        "ok": "as the index has them",
        "short": "end before a block in the index",
        "lost": "in the index; cannot be opened",
        "orphan": "not in the index",
    },
}


def _amounts(what: str) -> dict[str, Amount]:
    return msgspec.field(default_factory=lambda: {state: Amount() for state in MEANINGS[what]})


class Repair(msgspec.Struct):
    """What was done."""

    blocks_dropped: int = 0
    extents_dropped: int = 0  # from the index
    files_removed: int = 0
    index_kept_as: str | None = None


class FsckReport(msgspec.Struct):
    """What is in a directory."""

    directory: str
    ok: bool = True  # nothing was wrong, before a repair
    index_error: str | None = None  # why it cannot be read; then no block is counted
    in_order: bool = True  # the last store had time to end; else its last second may be missing
    namespaces: int = 0
    blocks: dict[str, Amount] = _amounts("blocks")  # in the index, by cause; bytes of payload
    extents: dict[str, Amount] = _amounts("extents")  # files; bytes that they take on disk
    used_bytes: int = 0  # on disk: extent files and index
    read_bytes: int = 0  # payload
    read_s: float = 0.0
    repair: Repair | None = None

    def rows(self) -> Iterator[tuple[str, str, Amount]]:
        """Yield what, in which state, and how much of it."""
        for name, part in (("blocks", self.blocks), ("extents", self.extents)):
            for state, amount in part.items():
                yield name, state, amount

    def wrong(self) -> bool:
        """Tell whether anything that was counted is not ok."""
        return self.index_error is not None or any(
            amount.count for _, state, amount in self.rows() if state != "ok"
        )
