"""Lines that keep what is promised of a bucket (rows Q70 to Q77), as LINES in mutants.py."""

from __future__ import annotations

OBJECT: dict[str, tuple[tuple[str, str] | tuple[str, str, str], ...]] = {
    "tiers/object/format.py": (
        ("object_format -k Q70_of_a_window", "min(self.run_blocks, rule.trailing)", "1"),
        (
            "object_format -k Q70_an_object",
            "-(-run_bytes // slot_bytes)",
            "run_bytes // slot_bytes",
        ),
        ("object_format -k Q71_all_that", 'f"{namespace}.{self.run_blocks}"', "namespace"),
        ("object_format -k Q71_any", "if data[: len(head)] != head:"),
        ("object_format -k Q71_any", "if len(data) != self.size(run):"),
        (
            "object_format -k Q71_no_change",
            "self._sum(run.keys[position], block) == expected",
            "True",
        ),
        (
            "object_format -k Q71_a_checksum",
            'b"".join((self._space.encode(), b"\\0", key))',
            "self._space.encode()",
        ),
        ("object_format -k Q75_an_encrypted_object_and", "os.urandom(_NONCE_BYTES)", "bytes(12)"),
        (
            "object_format -k Q75_an_encrypted_object_and",
            "return hmac.new(self._secret, data, hashlib.sha256).hexdigest()",
            "return plain",
        ),
        (
            "object_format -k Q75_an_encrypted_object_under",
            "self._cipher.decrypt(nonce, data[_NONCE_BYTES:], run.name.encode())",
            "self._cipher.decrypt(nonce, data[_NONCE_BYTES:], run.name.encode()[:-1])",
        ),
    ),
    "tiers/object/health.py": (
        ("object_tier -k Q72_a_bucket", "elif at_once or self._rows[verb] >= FAILURES_MAX:"),
        ("object_tier -k Q72_objects", "del self._rows[verb]", "self._rows.clear()"),
        ("object_tier -k Q72_a_bucket", "            switch.good(verb)", "            pass"),
        ("object_tier -k Q73", "self.writes if verb == PUT else self.reads", "self.reads"),
        ("object_tier -k Q73", "(OK,) if verb == PUT else ", ""),
        ("object_tier -k Q73", "at_once=outcome not in FAILED", "at_once=False"),
    ),
    "kvstore/store/server.py": (("object_store -k woken_once", "key.data.ended.heard()", "pass"),),
    "tiers/object/bucket.py": (
        ("object_tier -k wakes_the_loop", ", threads, self.ended.wake)", ", threads)"),
        (
            "object_tier -k Q72_a_bucket",
            "unwanted or self._closed or (self.health.off and request.name != TRIAL)",
            "unwanted or self._closed",
        ),
        ("object_tier -k Q72_a_bucket", "if self.health.off and self.health.reads.may_try(now_s):"),
        ("object_tier -k Q72_an_object_in", "CORRUPT if _ARCHIVED in str(exc) else ", ""),
        ("object_tier -k Q72_a_refusal", "asked=not request.changes", "asked=True"),
        ("object_tier -k Q72_a_refusal", 'f"{text} ({_TO_LIST})"', "text"),
        ("object_tier -k Q74_a_put_that_asks", "spend(2 - anew)", "spend(1)"),
        ("object_tier -k Q74_questions", "self._crowded or", ""),
        ("object_tier -k Q74_questions", "count >= LOOKS_MIN and", ""),
        ("object_tier -k Q74_questions", "if unwanted or", "if"),
        ("object_tier -k Q74_a_day", "not self.budget.left(now_ns) or ", ""),
        ("object_tier -k Q73_no_trial", " or not writes.due(now_s)", ""),
        ("object_store -k Q72_a_store_that", "self.ends or self", "self"),
        ("object_tier -k Q74_a_second", "(now_ns) or not self._requests.left(now_ns)", "(now_ns)"),
        ("object_tier -k Q74_a_second", "_crowded or not self._requests.left(now_ns)", "_crowded"),
        ("object_tier -k Q72_the_reason_has", "if cause:"),
        ("object_tier -k Q71_an_object", "size != request.size:", "size < request.size:"),
    ),
    "tiers/object/known.py": (
        ("object_tier -k Q74_what_is_known", "while len(self._places) > BLOCKS_MAX:"),
        ("object_tier -k Q74_what_is_known", "if len(self._absent) >= ABSENT_MAX:"),
        ("object_tier -k Q74_what_is_known", "now_ns - run.seen_ns < THERE_NS", "True"),
        ("object_tier -k Q70_after_one", " and run.seen_ns > self._gone_ns", ""),
        ("object_tier -k Q77", "if self.cleared or now_ns <", "if now_ns <"),
    ),
    "tiers/object/search.py": (
        ("object_tier -k Q70_one_round", "after = self._low > self._begin", "after = True"),
        ("object_tier -k Q70_few", "width = min(PARALLEL, count)", "width = count"),
        (
            "object_tier -k Q70_groups",
            "self._look(self.run(group, numbers[-1]), told, self.wanted)",
            "self._owed -= 1",
        ),
    ),
    "tiers/object/tier.py": (
        ("object_tier -k Q70_a_hit_may", "self.wanted.append((work, place))", "return False"),
        (
            "object_tier -k Q70_few",
            "            self._known.absent(run.name, self._now_ns + ABSENT_NS)\n        told",
            "            pass\n        told",
        ),
        (
            "object_tier -k Q71_a_damaged",
            "            self._known.absent(run.name, self._now_ns + DAMAGED_NS)\n        elif",
            "            pass\n        elif",
        ),
        ("object_tier -k Q71_a_page", "MISSING: False, CORRUPT: False", "MISSING: False"),
        (
            "object_tier -k Q72_a_bucket",
            " or self._bucket.health.off:\n            return _MISS",
            ":\n            return _MISS",
        ),
        (
            "object_tier -k Q72_a_search",
            "if (search.over and room) or self._now_ns >= until_ns:",
            "if search.over and room:",
        ),
        ("object_tier -k Q72_a_closed", "                fetch.revoke()", "                pass"),
        ("object_tier -k Q73_no_trial", "if wanted and not self._bucket", "if not self._bucket"),
        ("object_tier -k Q74_a_use", "if self._known.has(last, now_ns):"),
        ("object_tier -k Q74_a_turn", "if room < 0:"),
        ("object_tier -k Q74_a_turn", "islice(search.found, room)", "search.found"),
        ("object_tier -k Q74_a_turn", "(search.over and room)", "search.over"),
        ("object_tier -k Q74_what_another", "if not request.changes:"),
        ("object_tier -k Q74_a_put_that_asks", "anew=known is False)", "anew=False)"),
        ("object_tier -k Q74_what_waits", "if len(self._queue) >= QUEUE_MAX:"),
        ("object_tier -k Q74_what_waits", "or len(self._searches) >= SEARCHES_MAX", ""),
        ("object_tier -k Q77_a_clear", "clears == self._clears:", "True:"),
        ("object_tier -k Q77_after", "        self._known.clear()", "        pass"),
    ),
    "tiers/object/refusals.py": (
        ("object_check -k Q76_the_life", 'rule.get("Status") == "Enabled"', "True"),
        ("object_check -k Q76_the_life", 'f"{folder}/".startswith(prefix)', "True"),
        ("object_check -k Q76_the_life", " and not narrow", ""),
        (
            "object_check -k Q76_versions",
            "if days and kept and not any",
            "if days and False and not any",
        ),
        (
            "object_check -k exist",
            " if any(code in str(exc) for code in _NO_BUCKET) else ",
            " if False else ",
        ),
        (
            "object_check -k Q76_what_keeps",
            "except (BotoCoreError, ValueError) as exc:",
            "except OSError as exc:",
        ),
        ("object_check -k Q76_a_quota", " and int(value) > 0", ""),
    ),
    "kvstore/core/types.py": (
        (
            "object_tier -k Q74_what_is_named",
            "named[indices.start : indices.stop : indices.step]",
            "named[: indices.stop][indices.start :: indices.step]",
        ),
    ),
    "kvstore/core/copy_queue.py": (
        (
            "object_tier -k Q73_a_run",
            "all(self._manager.ready(key) is not None for key in keys)",
            "True",
        ),
        ("object_store -k Q70_a_request", " and kept_off.isdisjoint(keys)", ""),
    ),
    "kvstore/core/tiering.py": (
        ("object_store -k woken_once", "for tier in self.tiers)", "for tier in self.sources)"),
        (
            "object_store -k Q70_two",
            "            shared.use(chain, lease, self._now_ns)",
            "            pass",
        ),
    ),
    "kvstore/store/store.py": (("object_store -k Q77", "self.bucket.cleared = True"),),
    "kvstore/store/lookups.py": (
        (
            "object_store -k Q70_two",
            "queue.sharing.search(rules, ask.chain, lacking[0], ask.blocks, now_ns)",
        ),
    ),
}
