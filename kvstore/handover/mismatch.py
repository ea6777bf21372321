"""Why a namespace is not served here: what its peer's engine says of it, and what ours does."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.handover.jobs import Source
from kvstore.wire import peer as m


def difference(hello: m.Hello, served: Mapping[str, Source]) -> str:
    """Name what differs from the namespace that is nearest, with both values."""

    def differ(ours: Mapping[str, str]) -> list[str]:
        return [
            f"{name} is {hello.traits.get(name, 'not named')}, expected {ours.get(name, 'nothing')}"
            for name in sorted(hello.traits.keys() | ours.keys())
            if hello.traits.get(name) != ours.get(name)
        ]

    digest, source = min(served.items(), key=lambda item: len(differ(item[1].layout.traits)))
    found = differ(source.layout.traits) if hello.traits else []
    return ", ".join(found) or f"namespace is {hello.namespace[:12]}, expected {digest[:12]}"
