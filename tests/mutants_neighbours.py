"""Lines that neighbours put to the test, vLLM's and fleets of stores, as LINES in mutants.py."""

from __future__ import annotations

NEIGHBOURS: dict[str, tuple[tuple[str, str] | tuple[str, str, str], ...]] = {
    "kvstore/core/index.py": (("policies -k hang_below_again", "self.covered(parent)", "pass"),),
    "kvstore/core/manager.py": (
        ("policies -k hang_below_again", "Index(self.index.covered)", "Index()"),
    ),
    "kvstore/clock.py": (
        ("clock -k O20", "min(read_ns - self._read_ns, MOMENT_NS)", "read_ns - self._read_ns"),
    ),
    "kvstore/store/endings.py": (
        (
            "endings -k machine_stood_still",
            "done, now_s = [], clock.now_s()",
            "done, now_s = [], clock.now_ns._read() / 1e9",
        ),
    ),
    "tiers/nvme/disk.py": (
        (
            "clock -k does_not_hang",
            "now_s = clock.now_s()\n        under_way",
            "now_s = clock.now_ns._read() / 1e9\n        under_way",
        ),
    ),
    "connectors/worker_copies.py": (
        (
            "long_loads -k machine_stood_still",
            "self.session, clock.now_ns()",
            "self.session, clock.now_ns._read()",
        ),
    ),
    "connectors/request_lookups.py": (
        (
            "lease_queue -k hears_of_the_cap",
            "if not tracked.ask:  # leases were at their cap",
            "if False:",
        ),
        (
            "scheduler_half -k machine_stood_still",
            "min(now_ns - since_ns, OVERDUE_STEP_NS)",
            "now_ns - since_ns",
        ),
        (
            "scheduler_half -k machine_stood_still",
            "return tracked.overdue_ns > OVERDUE_NS",
            "return True",
        ),
        (
            "scheduler_half -k engine_of_long_steps",
            "if overdue and tracked.overdue_ns:  # of",
            "if silent:  # of",
        ),
        (
            "scheduler_half -k answer_came_late",
            "if overdue and tracked.overdue_ns:  # of",
            "if tracked.overdue_ns:  # of",
        ),
        (
            "scheduler_half -k store_that_does_not_answer",
            "return tracked.overdue_ns > OVERDUE_NS",
            "return False",
        ),
        ("lease_queue -k asks_again_says_so", " or tracked.query is not NO_QUERY", ""),
        ("lease_queue -k comes_later", "late and grant.lease and", "False and"),
        ("lease_queue -k finds_nothing", "late and grant.lease and", "late and"),
        ("lease_queue -k what_a_peer", " and not tracked.remote.address", ""),
        ("lease_queue -k before_the_engine", "self._room = True  # for the next one, it may be"),
        (
            "lease_queue -k before_the_engine",
            "if self._room and first is not None and not first.ask:",
            "if first is not None and not first.ask:",
        ),
        (
            "lease_queue -k before_the_engine",
            "if grant is not None and grant.lease:\n            self._room = True",
            "if False:\n            self._room = True",
        ),
        (
            "lease_queue -k before_the_engine",
            "self._room = False\n            self.ask",
            "self.ask",
        ),
    ),
    "connectors/scheduler.py": (
        (
            "lease_queue -k before_the_engine",
            "self._loads.ended(tracked)\n        self._lookups.lease_ended()",
            "self._loads.ended(tracked)",
        ),
        ("step_loads -k O20_the_queue", "self._step_loads.current:", "False:"),
        ("lease_queue -k before_the_engine", "self._lookups.line_up()"),
        (
            "scheduler_half -k O15_after_a_failed",
            "if tracked.gives_way and tokens is not None",
            "if False",
        ),
        ("scheduler_half -k O15_after_a_failed", "tracked.gives_way = False", "pass"),
        ("scheduler_half -k O15_a_load_that_an", "tracked.refused > REFUSED_MAX and", "False and"),
        (
            "scheduler_half -k O15_an_engine_that_has_no_room",
            "other.request.num_computed_tokens for other in requests",
            "()",
        ),
        (
            "scheduler_offers -k O17_a_later_turn",
            "is Phase.LOADING or tracked.request.num_computed_tokens:",
            "is Phase.LOADING:",
        ),
    ),
    "connectors/step_loads.py": (
        (
            "step_loads -k O6",
            "(tracked.remote is NO_REMOTE or tracked.remote.hinted > 0)\n            and ",
            "",
        ),
        ("step_loads -k O6", "and tracked.repeatable", ""),
        ("step_loads -k O6", "and not grant.sources", ""),
        ("step_loads -k O6", "and blocks * self._block_bytes <= self._rate * limit_s", ""),
        ("step_loads -k O6_a_long_copy", "ALONE_S_MAX if alone else COPY_S_MAX", "COPY_S_MAX"),
        ("step_loads -k O6", "blocks += sum(load.loaded for load in self._next)"),
        ("step_loads -k O15", "self._next.append(load)"),
        ("step_loads -k O15_of_the_loads", " if not blocks.isdisjoint(load.blocks)", ""),
    ),
    "connectors/vllm_scheduler.py": (
        ("engine/adapter -k O6_O15_only", " and not request.mm_features", ""),
        (
            "engine/walks -k O15",
            "self.manager.evict_blocks(self.half.step_loads_failed(blocks))",
            "self.half.step_loads_failed(blocks)",
        ),
    ),
    "connectors/vllm.py": (
        ("engine/adapter -k O6_loads_begin", "self._worker_half().start_loads(self._step())"),
        (
            "engine/adapter -k O22_handshakes",
            "def set_xfer_handshake_metadata_pp_aware",
            "def unused",
        ),
    ),
    "connectors/events.py": (
        ("events -k O16_what_comes_up_for_a_prefill", "self._ended.append(request)"),
        ("events -k O16_of_requests_that_have_ended", "if len(self._ended) > ENDED_MAX:", "if 0:"),
        ("events -k O16_what_else", "made = made._replace(extra=of_steps)", "pass"),
    ),
    "connectors/late_stores.py": (
        (
            "late_stores -k O16_O28",
            "request.block_hashes, tokens, extra)",
            "request.block_hashes, tokens)",
        ),
    ),
    "connectors/kv_transfer_params.py": (
        ("kv_transfer_params -k P9", "return own if named else given", "return given"),
        ("kv_transfer_params -k P9", " and is_sendable(own, limits.TEXT_MAX)", ""),
        ("kv_transfer_params -k B7_parameters_of_a_router", "and not unsaid and", "and"),
        (
            "kv_transfer_params -k B7_parameters_of_a_router",
            "unsaid = push is None and",
            "unsaid =",
        ),
    ),
    "kvstore/listener.py": (
        (
            "doors -k a_store_whose_files_were_removed",
            "if _identity(path + _LOCK) == _identity(lock_fd):",
            "if True:",
        ),
    ),
    "kvstore/handover/engine_blocks.py": (
        ("direct_engine -k S2_an_engine_names", "        engine.trim()\n", ""),
        ("direct_engine -k S2_an_engine_names", "if len(blocks) > engine.blocks:", "if False:"),
    ),
    "kvstore/handover/heartbeats.py": (
        ("request_leases -k S2_a_request_of_more", ") > LOOKUP_BLOCKS_MAX:", ") < 0:"),
        (
            "peer_limits -k B9_what_two",
            "if sessions:\n            return False",
            "if False:\n            return False",
        ),
    ),
    "kvstore/handover/jobs.py": (
        (
            "export -k B18_a_block_that_a_lower",
            "undecided = result is not LookupResult.MISS",
            "undecided = False",
        ),
    ),
    "kvstore/handover/request_leases.py": (
        (
            "export -k B18_blocks_that_leave",
            "(undecided or not _was_lost(manager, key, lease.began_s))",
            "True",
        ),
        ("export -k B18_a_block_that_left", "each_s > first_s", "True"),
        ("segmented -k where_requests_are_handed", "manager.slots.hands_over = True", "pass"),
        ("segmented -k B18_what", "manager.slots.awaited_s[request] = lease.began_s", "pass"),
        (
            "segmented -k B18_what_was_kept",
            "lease.request]\n        lease.manager.slots.awaited_s.pop(lease.request, None)",
            "lease.request]",
        ),
        (
            "segmented -k B18_what_was_kept",
            "slots.awaited_s.pop(lease.request, None)\n                if now_ns",
            "slots.awaited_s\n                if now_ns",
        ),
        (
            "request_leases -k S2_what_requests",
            "room = self._keys + keys <= KEYS_MAX",
            "room = True",
        ),
        ("request_leases -k S2_what_requests", "self._keys -= len(lease.keys)", "pass"),
        (
            "request_leases -k S2_of_blocks_that",
            "islice(lease.missing, most)",
            "islice(lease.missing, None)",
        ),
        (
            "request_leases -k S2_of_blocks_that",
            "lease.missing[key] = lease.missing.pop(key)",
            "pass",
        ),
    ),
    "kvstore/store/metrics_endpoint.py": (
        (
            "descriptors -k S2_what_a_client",
            "except (TypeError, ValueError):  #",
            "except KeyError:  #",
        ),
        ("descriptors -k S2_an_answer", "return io.StringIO()", "return sys.stderr"),
        ("descriptors -k S2_a_bug", "with barrier.around(f", "with open(f"),
    ),
    "kvstore/store/server.py": (
        (
            "clock -k O20",
            "now_ns = clock.now_ns()\n        if now_ns",
            "now_ns = clock.now_ns._read()\n        if now_ns",
        ),
        (
            "local_limits -k S2_connections_that_say",
            "self._drop_silent()\n                self",
            "self",
        ),
        ("local_limits -k S2_who_asks", "if clock.now_s() > until_s:", "if False:"),
        ("reload -k Q20_many", "elif self._reloading:", "elif False:"),
        ("reload -k Q20_many", "            self._reload(*waiting)", "            pass"),
    ),
    "kvstore/store/session.py": (
        (
            "export -k B18_blocks_that_leave",
            "manager.unkept.add((key,), manager.now_s)",
            "pass",
        ),
        (
            "store_blocks -k S2_slots_that",
            "{entry.slot for entry in entries}.intersection(map(Slot, damaged))",
            "map(Slot, damaged)",
        ),
    ),
    "kvstore/handover/producer.py": (
        (
            "export -k B18_a_block_that_a_lower",
            "undecided = found is not LookupResult.MISS",
            "undecided = False",
        ),
        ("export -k exporter_ended_is_not_wrong", "self._turned_away.add(peer.number)"),
        (
            "export -k exporter_ended_is_not_wrong",
            "        self._turned_away.discard(number)\n        peer =",
            "        peer =",
        ),
    ),
}
