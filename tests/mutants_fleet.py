"""Lines that simulated fleets found to be missing, as LINES in mutants.py."""

from __future__ import annotations

FLEET: dict[str, tuple[tuple[str, str] | tuple[str, str, str], ...]] = {
    "kvstore/handover/producer.py": (
        ("export -k exporter_ended_is_not_wrong", "self._turned_away.add(peer.number)"),
        (
            "export -k exporter_ended_is_not_wrong",
            "        self._turned_away.discard(number)\n        peer =",
            "        peer =",
        ),
    ),
}
