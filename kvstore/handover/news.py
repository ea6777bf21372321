"""How a producer tells where blocks can be read: in slots, or in an engine's own memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

from kvstore.handover.engine_blocks import Resident
from kvstore.handover.jobs import Block, Job, Peer, Source
from kvstore.wire import peer as m
from kvstore.wire.framing import Message, u32

Region = Callable[[int], tuple[m.Region, bytes] | None]
"""Where the exporter has an extent, and its metadata then; None: not yet."""


def is_overwritten(source: Source, block: Block) -> bool:
    """Tell whether a block was in an engine's memory, as was told or written, and is not now."""
    return block.resident is not None and not source.engines.holds(block.resident)


def news(peer: Peer, job: Job, region: Region) -> Iterator[Message]:
    """Take what is to be told of a job, and say it; what cannot be said yet stays."""
    waiting, job.news = job.news, []
    waiting = [position for position in waiting if job.blocks[position].slot is not None]
    if job.direct and not job.push:
        engines = set(job.engines)
        for position in waiting:
            block = job.blocks[position]
            block.resident = None if block.moved else _resident(peer.source, engines, block)
        yield from _in_engines(peer, job, waiting)
        waiting = [position for position in waiting if job.blocks[position].resident is None]
    message = _in_slots(peer, job, waiting, region)
    if message is not None:
        yield message


def _resident(source: Source, engines: set[int], block: Block) -> Resident | None:
    """Return where an engine has a block. A job is told of a few engines only: those, and more."""
    found = source.engines.find(block.key)
    if found is None or (found.engine not in engines and len(engines) >= m.ENGINES_MAX):
        return None
    engines.add(found.engine)
    return found


def _in_engines(peer: Peer, job: Job, waiting: list[int]) -> Iterator[Message]:
    """Name what engines have, of each size of blocks apart."""
    found: dict[tuple[int, int], list[tuple[int, Resident]]] = {}
    for position in waiting:
        place = job.blocks[position].resident
        if place is not None:
            found.setdefault((place.engine, len(place.blocks)), []).append((position, place))
    for (engine, _), places in found.items():
        new = () if engine in job.engines else tuple(peer.source.engines.ranks(engine))
        job.engines.add(engine)
        positions = u32([position for position, _ in places])
        blocks = u32([block for _, place in places for block in place.blocks])
        yield m.Resident(job.number, positions, engine, blocks, new)


def _in_slots(peer: Peer, job: Job, waiting: list[int], region: Region) -> Message | None:
    positions: list[int] = []
    places: list[int] = []
    generations: list[int] = []
    sums = array("Q")
    given: list[int] = []
    regions: list[m.Region] = []
    metadata = b""
    for position in waiting:
        block = job.blocks[position]
        if block.slot is None:
            continue
        extent, number = peer.source.place(block.slot)
        if extent not in peer.regions:
            found = region(extent)
            if found is None:
                job.news.append(position)  # it is being mapped
                continue
            peer.regions.add(extent)
            regions.append(found[0])
            metadata = found[1]
        positions.append(position)
        given += [] if block.resident is None else [position]
        places += extent, number
        generations.append(peer.source.generations[block.slot])
        sums.append(block.sum)
    if not positions:
        return None
    packed = u32(positions), u32(places), u32(generations), sums.tobytes()
    return m.Have(job.number, *packed, tuple(regions), metadata, u32(given))
