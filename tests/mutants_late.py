"""Lines that keep what storing late promises (row O28), as LINES in mutants.py."""

from __future__ import annotations

LATE: dict[str, tuple[tuple[str, str] | tuple[str, str, str], ...]] = {
    "connectors/late_stores.py": (
        ("late_stores -k O28_never_the_new", "self._notes[block] = None"),
        (
            "late_stores -k holds_another",
            "block if name == (leaving.get(block) or (notes[block] and held(block))) else 0",
            "block if leaving.get(block) or (notes[block] and held(block)) else 0",
        ),
        ("late_stores -k has_forgotten", "notes[block] and held(block)", "notes[block] and name"),
        ("late_stores -k O28_O17", "self._notes = [None] * len(self._notes)"),
        ("late_stores -k alone", "if tracked.cursor == NEVER:"),
        ("late_stores -k a_load_takes", "if self._looked_at < count:"),
        ("late_stores -k a_load_takes", "self._leaving[block] = block_hash"),
        ("late_stores -k stored_whole", "self._look(2 * self._step_blocks)"),
        ("late_stores -k stored_whole", "self._looked_at -= len(written)"),
        ("late_stores -k two_loads", "self._looked_at -= tokens // self._engine_tokens"),
        ("late_stores -k no_room_for", "if load > self._cache.free_count:", "if False:"),
        ("late_stores -k limited_number", "and visits > 0 and", "and"),
        ("late_stores -k token_ids_of", "if tokens:", "if False:"),
        ("late_stores -k token_ids_of", " if self._stores.describes else ()"),
        ("late_stores -k few_free", "return self._store_due()", "return ()"),
        (
            "late_stores -k engine_keeps",
            "if self._looked_at >= self._step_blocks:",
            "if False:",
        ),
        ("late_stores -k preempted", "\n        self._paths.pop(request_id, None)\n", "\n"),
        ("late_stores -k each_tenants", "self._is_due(before)"),
        ("late_stores -k for_slots_is_bounded", "deque(maxlen=DUE_MAX)", "deque()"),
        ("late_stores -k without_slots", "return False, len(held)", "return True, len(held)"),
        ("late_stores -k asks_again_once", "frozenset(job.keys)", "frozenset[bytes]()"),
    ),
    "connectors/store_planner.py": (
        ("late_stores -k last_to_be_forgotten", "client.known.add(keys)"),
    ),
    "connectors/store_client.py": (
        (
            "events -k published_once",
            "[key for key in added if key not in self.known]",
            "list(added)",
        ),
        ("events -k published_once", "self._heard += len(answers.added) - len(added)"),
    ),
    "kvstore/store/key_news.py": (
        ("key_news -k once_more", "self._waiting.setdefault((MEMORY, key))", "pass"),
        (
            "key_news -k O24_what_waits",
            "key))\n            self._drop_oldest()\n",
            "key))\n",
        ),
    ),
    "kvstore/store/session.py": (
        ("store_blocks -k is_told_again", "self.keys.there(key)", "pass"),
    ),
    "connectors/request_lookups.py": (
        (
            "late_stores -k asks_again",
            "if self.late is not None and self._is_outdated(self.late, tracked, grant):",
        ),
        ("late_stores -k it_is_told", " or block == tracked.asked_again:", ":"),
        (
            "late_stores -k engine_has_itself",
            "max(reach, tracked.local // self._geometry.block_tokens)",
            "reach",
        ),
        ("late_stores -k asks_again_once", "tracked.stored_later = block"),
    ),
    "connectors/scheduler.py": (
        ("late_stores -k pinned", "self._late is not None and not policy.kv_pin", "True"),
        ("late_stores -k a_load_takes", "self._late.make_way(tokens)"),
        ("late_stores -k preempted", "self._late.begin(request_id, tracked.local + external)"),
        ("late_stores -k O28_O17", "self._late.clear()"),
        (
            "late_stores -k B16",
            """            self._final_stores.extend(self._late.step(written))
        self._client.overwritten(written)
""",
            """            self._client.overwritten(written)
            self._final_stores.extend(self._late.step(written))
""",
        ),
    ),
}
