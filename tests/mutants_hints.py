"""Lines that keep what hand-overs promise to stores and engines, as LINES in mutants.py."""

from __future__ import annotations

HINTS: dict[str, tuple[tuple[str, str] | tuple[str, str, str], ...]] = {
    "kvstore/handover/jobs.py": (
        ("peer_limits -k S2_an_unknown", "(patient and now_ns < self._next_ns)", "False"),
        ("peer_limits -k P7_blocks_that_come", "now_ns + LOOK_NS", "self._until_ns"),
        (
            "export_turns -k S2_of_an_unknown",
            "(1 if patient and self.missing else most)",
            "most",
        ),
        (
            "export_turns -k S2_of_an_unknown",
            "if not most or (patient and now_ns < self._next_ns):",
            "if not most:",
        ),
        ("export_turns -k S2_of_what_peers_want", "self.tiers += found", "self.tiers = found"),
    ),
    "kvstore/handover/producer.py": (
        (
            "export_turns -k S2_of_what_peers_want",
            "max(1, looks // left)",
            "LOOKS_MAX",
        ),
        ("export_turns -k S2_a_peer_that_wants_much", "looks // left", "looks"),
        ("export_turns -k S2_of_what_peers_want", "self.looking |= not look.missing"),
        (
            "request_leases -k those_who_wait",
            "if number in self._early or len(self._early) < EARLY_MAX:",
            "if True:",
        ),
    ),
    "kvstore/handover/transfers.py": (
        (
            "peer_memory -k B15_slots",
            "self.exporter.map(extent, export.fd, export.bytes, writable=False)",
        ),
        (
            "peer_memory -k B15_slots",
            "if export is None or export.again_ns is None:",
            "if True:",
        ),
        ("peer_memory -k B15_slots", "self._exports.pop(extent, None)"),
    ),
    "kvstore/check.py": (("check_serve -k Q12", "if exc.errno == errno.EADDRINUSE:"),),
    "kvstore/engine_check.py": (
        ("engine_check -k S6", '"huge pages", "metrics")', '"huge pages")'),
    ),
    "connectors/store_planner.py": (
        ("scheduler_half -k O15_what_failed", "if first < tracked.doubted.stop:"),
        (
            "scheduler_half -k O15_what_failed",
            "first, end = max(first, doubted.start), min(end, doubted.stop)",
        ),
    ),
    "connectors/scheduler.py": (
        (
            "scheduler_half -k O15_what_failed",
            "range(tracked.local // size, -(-end // size))",
            "range(0)",
        ),
    ),
    "connectors/store_connection.py": (
        (
            "direct_engine -k B20_direct_that",
            "if self._rank > 0 and isinstance(why, SameOnAllRanks):",
        ),
    ),
}
