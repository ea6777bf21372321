"""What a step gives to the engine's user: tokens, statistics, events."""

from __future__ import annotations

import msgspec

from connectors.events import BlockEvent


class HitStats(msgspec.Struct):
    """Tokens of requests that started to run, by where their KV came from.

    Requests that were preempted before are counted apart (`again`).
    """

    asked: int = 0
    local: int = 0
    external: int = 0
    sources: dict[str, int] = {}
    asked_again: int = 0
    hit_again: int = 0


class Output(msgspec.Struct):
    """What came out of one step.

    tokens: by request, those it got. finished: requests that ended in this step. connector: the
    counts of its scheduler side and of all ranks, added up. events: (stored or removed, block
    hash, group) of the engine's blocks, then the connector's.
    """

    tokens: dict[str, list[int]]
    finished: list[str]
    hits: HitStats
    connector: dict[str, int]
    events: list[tuple[bool, bytes, int] | BlockEvent]
