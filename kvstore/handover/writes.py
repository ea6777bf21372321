"""What a producer writes to a peer: to its landing slots, or into its engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvstore.core.errors import ProtocolError
from kvstore.core.layout import RankPages, SlotLayout
from kvstore.handover.jobs import Fill, Give, Job, Peer, Source, Tag, Write
from kvstore.handover.news import is_overwritten
from kvstore.wire import peer as m

Placed = tuple[int, list[int], list[int]]  # a position, and what goes where
FILL_BYTES = 8 << 20  # of one write into an engine: what waits for nobody is in quarantine whole
FILL_PIECES = 1 << 15  # of one, of all ranks together
RUNS_MAX = 1 << 13  # of pages, of all ranks together
PIECES_MAX = 1 << 16  # of one block there


def tags_of(peer: Peer, job: Job, positions: Sequence[int]) -> list[Tag]:
    """Name blocks of a job to whoever works on them."""
    return [Tag(peer.number, job.number, position) for position in positions]


def slot_writes(
    peer: Peer, job: Job, positions: Sequence[int]
) -> Iterator[tuple[list[Tag], Write]]:
    """Gather what goes to landing slots, in one go for each pair of extents."""
    batches: dict[tuple[int, m.Region], list[tuple[int, int, int]]] = {}
    for position in positions:
        block = job.blocks[position]
        if block.slot is not None and block.landing is not None:
            extent, number = peer.source.place(block.slot)
            region, slot = block.landing
            batches.setdefault((extent, region), []).append((position, number, slot))
    size = peer.source.layout.slot_bytes
    for (extent, region), moves in batches.items():
        numbers, slots = [move[1] for move in moves], [move[2] for move in moves]
        tags = tags_of(peer, job, [move[0] for move in moves])
        yield tags, Write(extent, numbers, size, region, slots)


def gives(peer: Peer, job: Job, positions: Sequence[int]) -> Iterator[tuple[list[Tag], Give]]:
    """Gather what one of our engines still has, and writes itself, some blocks at a time."""
    layout, engines = peer.source.layout, peer.source.engines
    batches: dict[tuple[int, int], list[Placed]] = {}
    for position in positions:
        block, group = job.blocks[position], job.order[position][1]
        block.resident = None if block.moved or block.target is None else engines.find(block.key)
        place, target = block.resident, block.target or ()
        pieces = _pieces(job, group) * len(target)
        if place is None or len(place.blocks) < len(target) or pieces > FILL_PIECES:
            block.resident = None
            continue
        pairs = [(own, at) for own, at in zip(place.blocks, target, strict=False) if at]
        own, there = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        batches.setdefault((place.engine, group), []).append((position, own, there))
    for (engine, group), found in batches.items():
        ranks = tuple(
            RankPages(rank.agent, b"", (rank.pages[group],), rank.gpu)
            for rank in job.ranks
            if rank.pages[group]
        )
        for batch in _batches(layout, job, group, found):
            own = [block for _, blocks, _ in batch for block in blocks]
            there = [block for _, _, blocks in batch for block in blocks]
            tags = tags_of(peer, job, [position for position, _, _ in batch])
            yield _counted(job, tags), Give(engine, group, ranks, own, there)


def _counted(job: Job, tags: list[Tag]) -> list[Tag]:
    for tag in tags:
        job.blocks[tag.position].writes += 1
    return tags


def written_of(
    source: Source, job: Job, tags: list[Tag], *, ok: bool
) -> tuple[list[Tag], list[Tag]]:
    """Tell what has been written from what an engine has not, or not as it was: slots have that."""
    rest, again = [], []
    for tag in tags:
        block = job.blocks[tag.position]
        if block.resident is None or (ok and not is_overwritten(source, block)):
            rest.append(tag)
        else:
            block.moved, block.resident, block.writes = True, None, 0
            again.append(tag)
    return rest, again


def _batches(
    layout: SlotLayout, job: Job, group: int, found: list[Placed]
) -> Iterator[list[Placed]]:
    pieces = _pieces(job, group) * max(len(blocks) for _, _, blocks in found)
    step = max(1, min(FILL_BYTES // layout.slot_bytes, FILL_PIECES // max(1, pieces)))
    return (found[at : at + step] for at in range(0, len(found), step))


def _pieces(job: Job, group: int) -> int:
    """Count those of an engine block, in all ranks."""
    return sum(run.pieces for rank in job.ranks for run in rank.pages[group])


def fills(peer: Peer, job: Job, positions: Sequence[int]) -> Iterator[tuple[list[Tag], Fill]]:
    """Gather what goes to an engine from slots, for each rank, extent and group."""
    layout = peer.source.layout
    batches: dict[tuple[int, int], list[Placed]] = {}
    for position in positions:
        block, group = job.blocks[position], job.order[position][1]
        if block.slot is None or block.target is None or block.resident is not None:
            continue
        extent, number = peer.source.place(block.slot)
        first, stride = number * layout.slot_bytes, _stride(layout, group)
        offsets = [first + part * stride for part, at in enumerate(block.target) if at]
        wanted = [at for at in block.target if at]
        batches.setdefault((extent, group), []).append((position, offsets, wanted))
    for (extent, group), found in batches.items():
        for batch in _batches(layout, job, group, found):
            offsets = [offset for _, offsets, _ in batch for offset in offsets]
            blocks = [block for _, _, blocks in batch for block in blocks]
            for rank in job.ranks:
                if rank.pages[group]:
                    tags = tags_of(peer, job, [position for position, _, _ in batch])
                    yield _counted(job, tags), Fill(extent, rank, group, offsets, blocks)


def learn(layout: SlotLayout, job: Job, fill: m.Fill) -> list[int]:
    """Take note of where blocks go in the peer's engine; return which. Raises ProtocolError."""
    if not (job.push and job.direct) or bool(fill.ranks) == bool(job.ranks):
        raise ProtocolError(
            f"engine blocks with {len(fill.ranks)} ranks for job {job.number}, expected a direct"
            " push, and ranks once"
        )
    if fill.ranks:
        check_ranks(layout, fill.ranks)
        job.ranks = tuple(msgspec.structs.replace(rank, metadata=b"") for rank in fill.ranks)
    targets = m.residents_of(fill, len(job.blocks))
    for position, blocks in targets.items():
        _check_target(layout, job, position, blocks)
        job.blocks[position].target = blocks
    return list(targets)


def check_ranks(layout: SlotLayout, ranks: Sequence[RankPages]) -> None:
    """Raise ProtocolError for pages that are not of parts of such slots, but of other blocks'."""
    runs = [run for rank in ranks for pages in rank.pages for run in pages]
    if len(runs) > RUNS_MAX:
        raise ProtocolError(f"{len(runs)} runs of pages, expected up to {RUNS_MAX}")
    if (pieces := sum(run.pieces for run in runs)) > PIECES_MAX:
        raise ProtocolError(f"{pieces} pieces of a block, expected up to {PIECES_MAX}")
    for number, rank in enumerate(ranks):
        if len(rank.pages) != len(layout.rules):
            raise ProtocolError(
                f"pages of {len(rank.pages)} groups of rank {number}, expected {len(layout.rules)}"
            )
        for group, pages in enumerate(rank.pages):
            end = max((run.offset + run.pieces * run.piece_bytes for run in pages), default=0)
            if end > _stride(layout, group):
                raise ProtocolError(
                    f"pages of rank {number} up to byte {end} of a part of group {group},"
                    f" expected up to {_stride(layout, group)}"
                )


def _check_target(layout: SlotLayout, job: Job, position: int, blocks: Sequence[int]) -> None:
    group = job.order[position][1]
    most = layout.slot_bytes // _stride(layout, group)
    if len(blocks) > most or not any(blocks):
        raise ProtocolError(
            f"engine blocks {list(blocks[:8])} for position {position}, expected up to {most},"
            " and one that is not 0"
        )
    if not any(rank.pages[group] for rank in job.ranks):
        raise ProtocolError(f"no pages of group {group}, which position {position} is of")
    if job.blocks[position].target is not None:
        raise ProtocolError(f"a second place for position {position}")


def _stride(layout: SlotLayout, group: int) -> int:
    return layout.ranks[0].groups[group].stride
