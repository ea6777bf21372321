"""Lines that keep what routers are promised of KV events (O24, O27), as LINES in mutants.py."""

from __future__ import annotations

EVENTS: dict[str, tuple[tuple[str, str] | tuple[str, str, str], ...]] = {
    "kvstore/store/key_news.py": (
        (
            "key_news -k O24_what_an_engine",
            "            if known is not None and not known & medium:\n",
            "            known = known or 0\n            if not known & medium:\n",
        ),
        (
            "key_news -k O24_an_engine_that_hears",
            "count = min(len(self._waiting), p.NEWS_MAX - self._unheard)",
            "count = len(self._waiting)",
        ),
        ("key_news -k O24_what_waits", "if len(self._waiting) > WAITING_MAX:"),
        ("key_news -k O24_what_waits", "            self.lost += 1\n", ""),
        ("key_news -k O24_the_blocks", "if len(table) > KEYS_MAX // TABLES:"),
        (
            "key_news -k O16_what_came",
            "if self._waiting.pop((medium, key), None) is None:",
            "if True:",
        ),
        (
            "snapshot -k O27_an_engine_that_comes_later",
            "return not known & medium and self._waiting.pop((medium, key), None) is None",
            "return True",
        ),
    ),
    "kvstore/store/lookups.py": (
        (
            "events -k O24_an_engine_is_told",
            "        self._follow_missed(session, ask, found.blocks)\n",
            "",
        ),
    ),
    "kvstore/store/session.py": (
        (
            "events -k O24_an_engine_is_told",
            "self.keys.there(key)",
        ),
    ),
    "kvstore/store/store.py": (
        (
            "snapshot -k O27_an_engine_that_comes_later",
            "            self.tokens.clear()\n",
            "",
        ),
    ),
    "connectors/events.py": (
        ("snapshot -k O27_a_step_tells", "len(blocks), TOLD_BLOCKS)", "len(blocks), 10**6)"),
        (
            "events -k O24_a_burst",
            "in self._client.take_changes(most):",
            "in self._client.take_changes(10**6):",
        ),
        (
            "events -k O24_an_engine_that_stores",
            "EVENTS_PER_STEP + EVENTS_PER_BLOCK * self._stored, 0",
            "EVENTS_PER_STEP, 0",
        ),
        ("snapshot -k O27_what_is_stored", "if self._client.keeps_tokens:", "if True:"),
        (
            "snapshot -k O27_token_ids_that",
            "if len(tokens) != self._geometry.block_tokens or last != held.key[:width]:",
        ),
    ),
    "connectors/store_client.py": (
        ("snapshot -k O27_a_step_tells", "_fitting(self._tokens, TOKENS_BYTES)", "None"),
        (
            "snapshot -k O16_an_engine_that_loses",
            "self._changes.extend(BlockChange(MEMORY, False, key) for key in self.known.all())",
            "pass",
        ),
        ("snapshot -k O16_an_engine_that_loses", "(self._older - self._newer)", "self._older"),
        ("snapshot -k O16_an_engine_that_loses", "if held.memory])", "if False])"),
        (
            "snapshot -k O16_an_engine_that_loses",
            "-sum(isinstance(change, BlockChange) for change in self._changes)",
            "0",
        ),
        ("snapshot -k O27_a_step_tells", "while self._tokens_bytes > TOKENS_BYTES_MAX:"),
        (
            "snapshot -k O27_a_step_tells",
            "            self._tokens_bytes -= sum(map(_bytes_of, step.tokens))\n",
            "",
        ),
        ("events -k O24_the_store_hears", "self._heard += not held"),
        ("events -k O24_what_the_store", "if answers.lost and self.collect_events:"),
        (
            "snapshot -k O27_an_engine_publishes",
            "if self.has_pages and not self._changes:",
            "if self.has_pages:",
        ),
    ),
    "kvstore/store/token_ids.py": (
        ("snapshot -k O27_tokens_that", "if odd or odd_tokens or not size:"),
        (
            "snapshot -k O27_the_side_table",
            "while table and self._bytes[number] > self.bytes_max // TABLES:",
            "while False:",
        ),
    ),
    "kvstore/store/snapshot.py": (
        (
            "snapshot -k O27_a_page_looks",
            "                    yield None  #",
            "                    #",
        ),
        ("snapshot -k O27_a_page_looks", "if not path:"),
        ("snapshot -k O27_a_page_looks", "if looked >= LOOKS_MAX:"),
    ),
    "tiers/nvme/index_server.py": (
        (
            "snapshot -k O27_without",
            "gone = tokens - known if self._keeps_tokens else tokens",
            "gone = tokens - known",
        ),
        (
            "snapshot -k O27_rows",
            "                    txn.drop(self._table(txn, digest, TOKENS), delete=False)\n",
            "                    pass\n",
        ),
        (
            "snapshot -k O27_rows",
            "                txn.delete(GENERATION.pack(VALUE.unpack(value)[2]), db=tokens)\n",
            "                pass\n",
        ),
        (
            "snapshot -k O27_a_record_that_is_refused",
            "if tokens is not None and value is not None and len(value) == VALUE.size:",
        ),
    ),
    "kvstore/store/sessions.py": (
        (
            "snapshot -k O27_a_page_that_is_due",
            "            session.page_due, session.snapshot = False, None\n",
            "",
        ),
    ),
    "kvstore/store/namespace.py": (
        (
            "snapshot -k O27_what_a_disk_asks",
            "describe(partial(_tokens_of, layout, tokens))",
            "describe(self.tokens_of)",
        ),
        ("snapshot -k O27_what_a_disk_asks", "if width and layout.is_full", "if layout.is_full"),
    ),
    "tiers/nvme/tier.py": (
        (
            "snapshot -k O27_token_ids_that_were",
            "            del pages[old]\n",
            "            pass\n",
        ),
        ("snapshot -k O27_token_ids_that_were", "            self._token_pages.clear()\n", ""),
        (
            "snapshot -k O27_a_row",
            "or record.generation != generation:",
            "or generation < 0:",
        ),
    ),
}
