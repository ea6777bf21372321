"""Lines that keep the mends of hand-over, and what hints promise (O26), as LINES in mutants.py."""

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
    "kvstore/handover/consumer.py": (
        ("hints -k O26_a_source_that_is", "if not direct and not hinted:", "if not direct:"),
    ),
    "kvstore/handover/fetches.py": (
        ("hints -k O26_blocks_come", "if self.hinted:"),
        ("export -k B14_what_two", "if not ok and other.states[at] in UNCLAIMED:"),
    ),
    "kvstore/handover/producer.py": (
        (
            "export_turns -k S2_of_what_peers_want",
            "max(1, looks // left)",
            "1 << 62",
        ),
        ("export_turns -k S2_a_peer_that_wants_much", "looks // left", "looks"),
        (
            "export_turns -k S2_of_blocks_that_may",
            "not job.over and len(late) < most:",
            "not job.over:",
        ),
        ("export_turns -k S2_of_blocks_that_may", "self._late_left -= len(late)"),
        ("peer_limits -k S2_jobs_of", ">= OPEN_MAX:", ">= 1 << 62:"),
        ("export_turns -k S2_of_what_peers_want", "self.looking |= not look.missing"),
        (
            "request_leases -k those_who_wait",
            "if len(self._early) < EARLY_MAX:",
            "if True:",
        ),
    ),
    "tiers/nixl/supervisor.py": (
        ("exporter_client -k B15", "if extent.again_ns is not None and now_ns >= extent.again_ns:"),
        ("exporter_client -k B15", "if not extent.failed:", "if True:"),
        ("exporter_client -k B15", "found.again_ns is not None or ", ""),
        ("exporter_client -k why_blocks", 'if error in {"refused", "failed"}:'),
    ),
    "kvstore/handover/exported.py": (("peer_memory -k L1", "self._slots[message.extent] = 0"),),
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
    "connectors/kv_hints.py": (
        ("kv_hints -k O26_a_block_is_found", "if not inside:", "if True:"),
        ("kv_hints -k O26_a_wrong", '_expect(envelope, "protocol_version", PROTOCOL)'),
        ("kv_hints -k O26_a_wrong", '_expect(action, "action_version", VERSION)'),
        ("kv_hints -k O26_a_wrong", '_expect(payload, "mode", "copy")'),
        ("kv_hints -k O26_a_wrong", " or len(actions) > ACTIONS_MAX", ""),
        ("kv_hints -k O26_a_wrong", " or not is_sendable(address, limits.NAME_MAX)", ""),
        ("kv_hints -k O26_a_wrong", "or not 0 <= last < 1 << 8 * NAME_BYTES", ""),
    ),
    "connectors/pd_scheduler.py": (
        (
            "kv_hints -k O26_a_wrong",
            'raise ConfigError("block_hashes: the last one is of no block of the request")',
        ),
        ("kv_hints -k O26_a_wrong", 'self._client.count("hint_refused")'),
        ("kv_hints -k O26_a_lookup", "return self._hinted(request, params)", "return NO_REMOTE"),
    ),
    "connectors/request_lookups.py": (
        ("kv_hints -k O26_a_lookup", "hinted=remote.hinted", "hinted=0"),
    ),
    "connectors/step_loads.py": (
        ("kv_hints -k O26_a_hint_whose", " or tracked.remote.hinted > 0", ""),
    ),
    "connectors/vllm_scheduler.py": (
        ("engine/adapter -k O26_for_a_hint", "set(transfer) != {HINT}", "True"),
    ),
    "kvstore/store/hints.py": (
        ("hints -k O26_a_source_is_waited", " // PART if block_ns", " if block_ns"),
        ("hints -k O26_a_source_is_waited", "min(wait_ns, WAIT_NS_MAX)", "wait_ns"),
        ("hints -k O26_a_source_that_was", "elif now_ns < self._resting.get(address, 0):"),
        ("hints -k O26_what_is_soon", " or wait_ns < WAIT_NS_MIN", ""),
        ("hints -k O26_what_is_here", "not blocks or ", ""),
        ("hints -k O26_only_hosts", "if not self._allows(address):"),
        ("hints -k O26_addresses", "if len(self._resting) > RESTING_MAX:"),
    ),
    "kvstore/store/lookups.py": (
        ("hints -k O26_no_more", "max(1, HINT_BLOCKS_MAX // len(rules))", "blocks"),
        (
            "hints -k O26_only_hosts",
            "if lookup.hinted and not self._hints.follows(lookup.peer, ask.asked_ns):",
        ),
        ("hints -k O26_a_source_is_waited", "if ask.hint and now_ns >= ask.hint_ns:"),
        (
            "hints -k O26_a_source_is_waited",
            "self._let_go(ask)\n                self._hint_ends",
            "self._hint_ends",
        ),
        ("hints -k O26_no_more", "direct and not lookup.hinted", "direct"),
        (
            "hints -k O26_what_memory",
            "first = min((index.prefix(ask.chain, group, blocks)[0] for group in full), default=0)",
            "first = 0",
        ),
        ("object_store -k Q70_what_a_hints", "(lookup.hinted and ask.fetch is None)", "False"),
        (
            "object_store -k Q70_what_a_hints",
            "            self._search(ask, now_ns)\n\n    def _owed",
            "\n    def _owed",
        ),
    ),
    "connectors/store_connection.py": (
        (
            "direct_engine -k B20_direct_that",
            "if self._rank > 0 and isinstance(why, SameOnAllRanks):",
        ),
    ),
}
