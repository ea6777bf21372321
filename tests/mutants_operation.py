"""Lines that keep what operators and requests are promised (rows Q), as LINES in mutants.py."""

from __future__ import annotations

OPERATION: dict[str, tuple[tuple[str, str] | tuple[str, str, str], ...]] = {
    "kvstore/store/sessions.py": (
        ("drain -k Q24", 'early = self.refuses if session is None else ""', 'early = ""'),
        ("logs -k Q30", 'self.end(session, "died",', 'self.end(session, "left",'),
    ),
    "kvstore/store/server.py": (
        (
            "disk_faults -k fails_for_a_moment",
            "        self._await_disk()\n        started",
            "        started",
        ),
        (
            "disk_faults -k fails_for_a_moment",
            "            failed |= self._disk is not None and self._disk.fails\n",
            "",
        ),
        ("advise -k Q62_no_answer", "        if not ready:", "        if True:"),
        ("advise -k S2_a_bug", "            with self._around_curves:", "            if True:"),
        ("reload -k Q20_sighup", "signal.signal(signal.SIGHUP, server.hang_up)"),
        (
            "attach_again -k Q26_an_idle_engine_is_back_when",
            "if isinstance(message, p.Detach) and not self.store.sessions.may_write(number):",
        ),
        ("health -k Q15_a_store_that_starts", "self.health.ends()"),
        (
            "health -k Q15_a_store_that_starts",
            "            self.health.turned(time.monotonic_ns())\n            now, stored",
            "            now, stored",
        ),
        ("systemd -k Q16_a_store_tells", "            self.health.serves()\n", ""),
    ),
    "kvstore/store/edge_thread.py": (
        ("reload -k Q20_a_file", "name=name, daemon=True", "daemon=False"),
        (
            "reload -k Q20_a_reload",
            "            self._free.release()\n            raise",
            "            raise",
        ),
        ("reload -k Q20_a_file", "timeout=READ_S", "timeout=None"),
        ("reload -k Q20_a_file_system", "future.set_running_or_notify_cancel()", "pass"),
        (
            "reload -k Q20_a_reload_for",
            'future.set_exception(ConfigError(f"nothing',
            'print((f"nothing',
        ),
        ("reload -k Q20_a_file", "if not self._free.acquire(blocking=False):"),
    ),
    "kvstore/store/extents.py": (
        ("memory_limits -k S5_a_store_in", "if self._short and self.pool.has_room", "if False"),
    ),
    "kvstore/store/live_settings.py": (
        ("reload -k Q21", "if capacity_bytes < self._extent_bytes:"),
        ("reload -k Q21_what", "self._use(config, tenants)"),
    ),
    "kvstore/store/drain.py": (
        ("drain -k Q25", "namespace.tiering.enqueue_lacking(part, state)"),
        ("drain -k Q25", "if not self._engines and not self._alone:"),
        ("drain -k Q25", "looked < _LOOK_MAX", "True"),
        ("drain -k Q24", "done=self.active and self._alone and", "done=self.active and"),
    ),
    "kvstore/config_edit.py": (
        ("config_edit -k Q23", "if tomllib.loads(changed) == expected:", "if True:"),
    ),
    "connectors/store_connection.py": (
        (
            "attach_again -k Q26",
            'log.info("kvstore: attached again, session %d", welcome.session)',
        ),
        ("attach_again -k Q24", "log.warning(line, answer)"),
        ("logs -k Q30", "self.send(p.Detach(fault[: limits.TEXT_MAX]))"),
    ),
    "kvstore/handover/peers.py": (
        ("drain -k Q24_new_peers", "if isinstance(message, m.Hello) and why:"),
        (
            "peer_limits -k B14_nobody_waits",
            "if self._mover.exporter.broken or (landing.failed and not direct):",
        ),
    ),
    "kvstore/store/sharing.py": (("logs -k Q32", " and _same_model(ours, theirs)", ""),),
    "kvstore/logs.py": (
        ("logs -k Q28_a_record", '"\\n" * self._cut + text', "text"),
        ("logs -k Q28", "one_line(value, FIELD_MAX) if isinstance(value, str) else value", "value"),
        ("logs -k Q29", "root.setLevel(now)"),
    ),
    "kvstore/engine_check.py": (
        ("engine_check -k Q10_wrong", "refuse_unknown(table, KEYS, SOURCE)"),
        ("engine_check -k Q10_wrong", 'refuse_engine_id(str(table["engine_id"]))'),
        ("engine_check -k Q10_wrong", 'if role != REQUIRED["kv_role"]:'),
        ("engine_check -k Q10_our", 'if table.get("kv_connector") == "MultiConnector":'),
        (
            "engine_check -k Q10_what",
            "if isinstance(exc.__cause__, OtherUserError | ProtocolError):",
        ),
        (
            "engine_check -k Q10_a_model",
            'yield Finding(Level.FAIL, "room", str(exc))',
            "pass",
        ),
        (
            "engine_check -k Q10_block",
            "if block_size is None and tokens % BLOCK_SIZE_CPU and extra.block_tokens:",
        ),
    ),
    "kvstore/model_size.py": (
        (
            "engine/size model_size",
            "pages = self._ranks if not latent else 1",
            "pages = self._ranks",
        ),
        ("model_size -k Q11_ranks", "return max(1, heads // self._ranks) *", "return heads *"),
        ("model_size -k Q11_a_tier", "return min(1, blocks)", "return blocks"),
        ("model_size -k Q11_a_tier", "if self.window is not None:"),
        ("model_size -k Q11_a_block", "if extent_bytes < self.slot_bytes:"),
        ("model_size -k Q11_a_model", "for name in UNKNOWN:", "for name in ():"),
        ("model_size -k Q13", "if not found:\n            raise self._unknown"),
    ),
    "kvstore/check.py": (
        ("check_serve", "; it stops growing when {sized(spare)} are left, and the", " and the"),
        ("check_serve", "if capacity + MARGIN_BYTES > left.bytes:"),
        ("doors -k Q17_a_group", "if group is not None:"),
        ("doors -k Q17_check", "if server.mode != OWN_MODE and not server.allow:"),
    ),
    "kvstore/cli.py": (
        ("check_serve", "for finding in notes(config):", "for finding in ():"),
        ("cli -k S6_streams", "    prepare_streams()\n", ""),
    ),
    "kvstore/store/embedded.py": (("doors -k S6_a_private", "    prepare_streams()", "    pass"),),
    "kvstore/arguments.py": (
        (
            "bad_input",
            'if name.startswith("--") and not any(each.startswith(name) for each in known):',
        ),
        ("bad_input", 'text += _likely(choice[1], re.findall(r"[\\w.-]+", choice[2]))'),
        ("bad_input", "re.sub(missing, ", "re.sub('', "),
    ),
    "kvstore/store/health.py": (
        ("health -k Q15_a_loop", "if still_s < STILL_S:", "if True:"),
        ("health -k Q15_a_store_that_starts", "if refuses := self.refuses or self._drains():"),
        (
            "health -k Q15_a_store_whose",
            'reasons + [_WORDS["off"].format(name) for name in off]',
            "reasons",
        ),
        ("systemd -k Q16_three", "systemd.watchdog_ns // 3", "systemd.watchdog_ns"),
        ("systemd -k Q16_the_status", "if lines or status != self._status:", "if True:"),
        ("systemd -k Q16_the_status", "if now_ns - self._status_ns >= _STATUS_NS:"),
    ),
    "kvstore/systemd.py": (
        ("systemd -k Q16_a_store_tells", 'environment.pop("NOTIFY', 'environment.get("NOTIFY'),
        ("systemd -k Q16_no_sign", "and pid == str(os.getpid())", ""),
        ("systemd -k Q16_a_manager", "if not self._failed:", "if True:"),
    ),
    "kvstore/listener.py": (
        ("doors -k Q17_a_user", "os.chown(path, -1, group)"),
        (
            "doors -k Q17_a_group",
            "if group is not None:\n        refuse_group(group)\n    lock_fd",
            "lock_fd",
        ),
        ("doors -k Q17_the_mode", "path.chmod(mode)"),
        ("doors -k Q17_a_user", "_give(folder, _FOLDER_MODES[mode], group)"),
    ),
    "kvstore/store/status.py": (
        ("status -k Q44_the_last", "[-kept:]", ""),
        ("status -k Q44_the_last", "first = before[-1:] or", "first ="),
        ("status -k Q48", 'c if c.isprintable() else "?"', "c"),
        ("status -k Q45_what", "if count := sum(counts.get(value, 0) for value in values):"),
        ("status -k Q45_each", "if seconds > OLD_S", "if False"),
        ("status -k Q45_each", "if seconds > STALLED_S", "if False"),
        ("status -k Q45_each", 'if tier.state in ("read_only", "loading"):'),
        (
            "status -k Q45_each",
            "if tier.budget_bytes and (tier.budget_left_bytes or 0) <= 0:",
        ),
    ),
    "kvstore/store/top.py": (
        ("status -k Q46_top_keeps", "console.control(Control.home())"),
        ("status -k Q46_top_keeps", "max_width=most if width else None", "max_width=None"),
        ("status -k Q46_top_keeps", "status.engines[: rows[1]]", "status.engines"),
        ("status -k Q46_top_shows", "termios.tcsetattr(terminal, termios.TCSANOW, before)"),
        ("status -k Q46_top_shows", "except StoreUnreachable as exc:", "except IndexError as exc:"),
        ("status -k Q46_top_needs", " and not console.is_dumb_terminal", ""),
        ("status -k Q46_rates", " or now.uptime_s <= before.uptime_s", ""),
    ),
    "kvstore/store/admin.py": (("status -k Q43", "; --store names another one", ""),),
    "kvstore/store/status.html": (
        ("status -k Q48_the_page", "element.append(...inside);", "element.innerHTML = inside;"),
        (
            "status -k Q48_the_page",
            'say("health", "no answer from the store: what is below is old");',
            "",
        ),
    ),
    "kvstore/store/metrics_endpoint.py": (
        ("descriptors -k asks_no_name", "TCPServer.server_bind(self)", "super().server_bind()"),
        ("status -k Q47_the_page_loads", "\"default-src 'none'\", ", ""),
        ("status -k Q48_the_page", "hashlib.sha256(inner)", "hashlib.sha256(body)"),
        ("health -k Q15_other", "if path not in pages:"),
        ("health -k Q15_a_page", 'if asked["REQUEST_METHOD"] not in ("GET", "HEAD"):'),
        ("health -k Q15_a_page", '[] if asked["REQUEST_METHOD"] == "HEAD" else [body]', "[body]"),
    ),
    "kvstore/core/copy_queue.py": (
        ("request_policy -k Q36_blocks_kept", " and above.key not in kept_off", ""),
        ("late_writes", "self._manager.slots.total if full else 0", "self._manager.slots.total"),
        ("late_writes", "self._held.lost(len(ripe) - len(here))"),
        ("late_writes", "if twice or seen(key) is not None", "if twice"),
        ("tiering -k budget", "if twice or seen(key) is not None", "if seen(key) is not None"),
        ("late_writes", "if self.full:\n            for key", "if False:\n            for key"),
    ),
    "kvstore/core/policy.py": (
        ("policies -k Q66_a_wrong", "or chosen not in self._entered", "or False"),
        ("policies -k NewestFirst", "if not evictable(chosen):", "if False:"),
        ("policies -k Q66_memory", "            self._off(verb, exc)", "            pass"),
        ("policies -k Q66_memory", "yield from super().victims(wanted=wanted)"),
        (
            "policies -k NewestFirst",
            "yield chosen\n            self.freed(chosen.parent)",
            "yield chosen",
        ),
        ("policies -k PluginMachine", "self._unlink(chosen)"),
        (
            "policies -k Q66_a_block_that",
            'has a child from now on."""\n        self._sync(entry)',
            'has a child from now on."""',
        ),
    ),
    "kvstore/store/plugins.py": (
        ("policies -k Q66_a_wrong_policy", "partial(found, lambda: 1)", "lambda: None"),
    ),
    "kvstore/core/late_writes.py": (
        ("late_writes", "self._blocks.pop(key, None)"),
        ("late_writes", "self._most = min(self._most, limit)"),
        ("late_writes", "self._most += count * _IN_TIME"),
    ),
    "kvstore/core/manager.py": (
        (
            "tenants -k Q41_of_a_read",
            "above_failed.append(entry.parent)",
            "self._policy.freed(entry.parent)",
        ),
        (
            "manager -k copy",
            "if not entry.children:\n                    self._used_until_now(entry)",
        ),
        (
            "manager -k copy",
            "else:\n                self._policy.freed(entry)",
            "else:\n                self._used_until_now(entry)",
        ),
    ),
    "tiers/nvme/extent_allocator.py": (
        ("nvme_extent_allocator -k Q65", " or space.free > space.total // FULL_PART", ""),
        (
            "nvme_extent_allocator -k Q65",
            "return not self._fits(cost(self._disk.settings",
            "return bool(cost(self._disk.settings",
        ),
    ),
    "kvstore/core/tiering.py": (
        (
            "load_or_compute -k clear",
            "return None if work is None or work.cleared else work",
            "return work",
        ),
        (
            "request_policy -k Q36_once",
            "self.difference_update([key for key in removed if index.get(key) is None])",
        ),
    ),
    "connectors/scheduler.py": (
        (
            "request_policy -k Q34_a_shorter",
            "inside = query.inside if most == query.blocks else 0",
            "most, inside = query.blocks, query.inside",
        ),
        (
            "request_policy -k Q35_what_another",
            "if not self._hand_overs.is_running(request.request_id):",
            "if True:",
        ),
    ),
    "connectors/store_planner.py": (
        (
            "request_policy -k Q36_blocks_that_stay",
            "if self._gathered:\n            self._close_job()\n        self._apart",
            "self._apart",
        ),
    ),
    "kvstore/core/tenants.py": (
        (
            "tenants -k Q41_Q42_whatever",
            "if found is not None and found.counts(key):\n            self._count(found, -1)",
        ),
        (
            "tenants -k Q41_a_tenant_that_comes",
            "return (hash(key) >> TABLE_SHIFT) % TABLES < self.looked",
            "return True",
        ),
        (
            "tenants -k Q42_up_to",
            "return order.share.used_bytes - self._block_bytes >= order.share.floor_bytes",
            "return True",
        ),
        (
            "tenants -k Q41_Q42_whoevers",
            "if others is not None and coldest.age() > others:",
            "if False:",
        ),
        (
            "nvme_tenants -k after_a_clear",
            "order.share.used_bytes -= order.blocks * self._block_bytes",
        ),
    ),
    "kvstore/core/hit_curve.py": (
        (
            "hit_curve -k Q62_what_was_stored",
            "if hashed not in self._hot:\n                self._used(hashed)",
            "pass",
        ),
        ("hit_curve -k Q62_a_block_of_every", "if count < _HOT or", "if True or"),
        ("hit_curve -k Q62_it_stays", "len(self._last) >= SAMPLES and ", "False and "),
        ("hit_curve -k Q62_the_curve", "sampled * (_HASHES / self._limit) + hot", "sampled + hot"),
        (
            "hit_curve -k Q62_a_sample",
            "if SAMPLES * (_HASHES / lower) <= self.covered:",
            "if True:",
        ),
        ("hit_curve -k Q62_a_request", "for hashed in reversed(", "for hashed in list("),
    ),
    "kvstore/store/asked.py": (
        ("advise -k Q62_a_store", "lookup.again or not blocks", "not blocks"),
        ("advise -k Q62_a_long", " or self._bytes + size > WAITING_BYTES_MAX", ""),
        ("advise -k Q62_a_tenants", "lookup.width, groups, lookup.scope)", "lookup.width, groups)"),
        ("trial -k each_prompt", "trial.sampled(keys) + self._sampled", "trial.sampled(keys)"),
        ("trial -k each_prompt", "                self._sampled = []", "                pass"),
    ),
    "kvstore/store/record.py": (
        ("record -k Q61_what", "digest_size=_ID_BYTES, key=salt", "digest_size=_ID_BYTES"),
    ),
    "kvstore/store/recorder.py": (
        ("record -k Q61_a_store", "if self._bytes + len(lookup.hashes) > KEPT_BYTES:"),
        ("record -k Q61_what", " or lookup.again", ""),
        ("record -k Q61_a_store", "if number != self._number and now_ns < self._until_ns:"),
    ),
    "kvstore/replay.py": (
        ("replay -k Q60_a_trace_may", "raw.peek(2)", "raw.read(2)"),
        ("replay -k Q60_the_bound", "(-following, -depth, block)", "(following, -depth, block)"),
        ("replay -k Q60_Q65_a_disk", "tiering.used(chain, lease)"),
        ("replay -k published", "manager.complete_load(lease.lease_id)"),
        ("replay -k however_fast", "since_ms / 1000", "since_ms // 1000"),
        ("replay -k however_fast", " if trace.ns else float(number)", ""),
    ),
    "kvstore/store/pins.py": (
        ("pins -k Q50_a_clear", "if not self._keys.keys().isdisjoint(keys):"),
        ("pins -k Q50_a_pinned", "pin.release()\n", "pass\n"),
        ("pins -k Q50_pins_have", "self._bytes_max - sum(map(self._bytes, others))", "1 << 40"),
        ("pins -k Q50_pins_have", "// _OWN_PART - beside", "- beside"),
        (
            "pins -k Q50_a_tenants",
            "room = min(room, share.quota_bytes - same)",
        ),
        (
            "pins -k Q50_a_tenants",
            "named = digest, prefix.scope, prefix.name",
            'named = digest, b"", prefix.name',
        ),
        (
            "pins -k Q50_blocks_that",
            "pin.look_ns = None if whole else now_ns + waits_ns",
            "pin.look_ns = None",
        ),
    ),
    "connectors/direct_reads.py": (
        ("direct_worker -k B20_direct_a_GPU_is", "self._agent.check_reach(devices)"),
        ("direct_worker -k come_and_go", "self._fetches[number] = self._fetches.pop(number)"),
    ),
    "connectors/copies/gpu/plan.py": (
        (
            "gpu_device -k copy_engines_begin",
            "step = max(1, COPIES_MAX // len(runs))",
            "step = len(places)",
        ),
    ),
    "kvstore/store/lookups.py": (
        ("load_or_compute -k O21_a_slow_tier_with", "if cut.blocks < end and", "if False and"),
        (
            "direct_fetch -k B20_direct_over_TCP",
            "direct = direct and not push",
            "pass",
        ),
        ("load_or_compute -k O21_an_engine_that", "lookup.block_ns or namespace.block_ns", "0"),
        (
            "tiers -k O20_a_hit_waits",
            "promote, whole = namespace.tiering.promote, ask.direct is None",
            "promote, whole = namespace.tiering.promote, False",
        ),
        (
            "load_or_compute -k O21_a_load_of_another",
            "limit = found.end if found.there else chain.blocks",
            "limit = chain.blocks",
        ),
        (
            "load_or_compute -k O21_a_slow",
            "measure(namespace, chain, found.slow, now_ns, off_disk=ask.off_disk)",
        ),
        (
            "pins -k Q51_after",
            "namespace.tiering.promote(chain, found.blocks, found.below, now_ns)\n        return",
            "pass\n        return",
        ),
    ),
    "kvstore/handover/jobs.py": (
        (
            "slow_peers -k O21_a_peer_compares",
            "since = index if rule.trailing is None else 0",
            "since = index",
        ),
        ("slow_peers -k O21_a_peer_does", "if not block_ns or ", "if True or "),
        ("slow_peers -k O21_a_peer_counts", "end if gap is None else min(end, gap)", "len(tiers)"),
        (
            "slow_peers -k O21_a_peer_offers",
            " or self.leases.computes(self.request, self.source.manager):",
            ":",
        ),
        (
            "slow_peers -k O21_a_peer_does",
            "self.source.block_ns if self.block_ns == 0",
            "0 if False",
        ),
    ),
    "kvstore/handover/consumer.py": (
        (
            "direct_fetch -k S2_direct_memory",
            "check_ranks(self._source.layout, message.ranks)",
            "pass",
        ),
        ("export_turns -k B20_a_read", "fetch.not_late(part.positions)"),
        (
            "slow_peers -k O21_what_a_peer_still",
            "if fetch is None or tier == PREFILL:",
            "if not fetch:",
        ),
    ),
    "kvstore/store/load_or_compute.py": (
        ("load_or_compute -k O21_what", "max(waits_ns, default=0) - end * block_ns", "0"),
        ("load_or_compute -k O21_a_load_of_another", "if first < end]", "if False]"),
        ("load_or_compute -k O21_a_load_that_is_late", "now_ns - work.began_ns if late else ", ""),
        ("load_or_compute -k O21_a_hit_with_many", "LOOKS_MAX // (1 + len(below))", "LOOKS_MAX"),
    ),
    "kvstore/core/segmented.py": (
        ("segmented -k stored_again", "self.freed(entry.parent)  # it", "pass  # it"),
        (
            "segmented -k stored_again",
            "yield entry\n                self.freed(",
            "yield entry\n                print(",
        ),
        ("segmented -k while_it_was_held", "self.freed(above)", "pass"),
        ("segmented -k Q64_what_comes_back_soon_is", "and self._stays(left):", "and 0:"),
        (
            "segmented -k Q64_what_takes_longer",
            "return before_s >= self._last_s(coldest)",
            "return True",
        ),
        (
            "trial -k in_turns_and_does_not_fit",
            "left.last_s if self._slots.keeps_longer else left.left_s",
            "left.left_s",
        ),
        ("segmented -k Q64_a_prefix", "if coldest.kept == 1:  #", "if True:  #"),
        ("segmented -k Q64_beyond", "if not slots.by_recency and self.kept > self._most:", "if 0:"),
        ("segmented -k has_ended", "of_kept * HARDLY <", "of_kept <"),
        ("segmented -k has_ended", " or kept_s > new_s", ""),
        ("segmented -k has_ended", "kept_s, used=True", "kept_s, used=False"),
        ("segmented -k has_ended", "self._now_s - kept_s", "0"),
        ("segmented -k Q64_what_a_request", "while wanted and (entry", "while (entry"),
        ("segmented -k never_used_shrinks", "self._grow(-1)", "pass"),
        ("segmented -k brought_up", "if entry.pins:\n            return", "pass"),
        ("segmented -k never_used_shrinks", "elif left.since <= SOON * capacity", "elif 1"),
        ("segmented -k was_used_has", "self._grow(1)", "pass"),
        ("segmented -k share_grows_for_what_would", "if left.since <= capacity:", "if True:"),
        ("segmented -k share_stays", "min(self._largest, max(0.0, share))", "max(0.0, share)"),
        ("segmented -k was_used_has", "self._slots.was_used[at.slot] = 1", "pass"),
        ("segmented -k would_soon_be_gone", "self._grow(_kept_by(entry))", "pass"),
        ("segmented -k would_soon_be_gone", "if self._now_s - last_s >= COLD * ", "if 1 or "),
        ("segmented -k kept_for_its_end", "at.kept == kept:", "at.kept:"),
        ("segmented -k Q64_of_what_comes", "if barely[entry.slot]:", "if False:"),
        ("segmented -k below_the_coldest", "last_s <= coldest_s", "True"),
        ("segmented -k once_there_is_room", "slots.barely[entry.slot] = 0", "pass"),
        ("segmented -k there_is_room", "if not full or", "if"),
        ("segmented -k where_requests_are_handed", " and not slots.hands_over", ""),
        ("segmented -k B18_what_is", "slots.awaits(new_s) and kept_s <= new_s", "False"),
        ("segmented -k B18_what_is", "awaits(new_s) and kept_s <= new_s", "awaits(new_s)"),
        ("segmented -k B18_what_was_stored", "slots.awaits(new_s) and kept_s", "kept_s"),
        (
            "segmented -k B18_kept_blocks",
            "(slots.by_recency or bool(slots.awaited_s))",
            "slots.by_recency",
        ),
        ("segmented -k goes_on_below", "if not entry.children:  #", "if True:  #"),
        ("segmented -k in_one_order", "        if slots.by_recency:\n", "        if False:\n"),
        ("segmented -k in_one_order", "not slots.barely[new.slot] and", ""),
        ("segmented -k in_one_order", "slot] and kept_s <= new_s", "slot]"),
        (
            "segmented -k in_one_order_too",
            "left is not None and not waits and",
            "left is not None and",
        ),
        (
            "segmented -k in_one_order_too",
            "entry.kept or (slots.by_recency and self.kept)",
            "entry.kept",
        ),
    ),
    "kvstore/core/odds.py": (
        ("odds -k as_likely", "self._again[before.used] += 1", "self._again[0] += 1"),
        (
            "odds -k as_likely",
            "self._asked.add(keys, now_s, known)",
            "self._asked.add(keys, now_s)",
        ),
        ("odds -k as_likely", "accumulate(reversed(self._times))", "accumulate(self._times)"),
        ("odds -k as_likely", "self._first[known[-1]] += 1", "self._first[0] += 1"),
        ("odds -k fades", "[count * stays for count in counts]", "counts"),
        ("odds -k one_at_most", "min(1.0, self._again[used] / self._first[used])", "2"),
    ),
    "kvstore/core/trial.py": (
        ("replay -k Q64_sessions", "slots.odds = self._odds\n        for", "for"),
        ("replay -k Q64_sessions", "            cache.manager.slots.odds = self._odds\n", ""),
        ("trial -k becomes_small", "self._slots.odds = None", "pass"),
        ("trial -k hits_more", "_go(cache.manager.slots, way)", "pass"),
        ("trial -k hits_more", "self._go(_WAYS[way])", "pass"),
        ("trial -k an_eighth", "BLOCKS if _RECENT in (way, mine) else BLOCKS // 2", "BLOCKS // 2"),
        ("trial -k a_64th", "BLOCKS if _RECENT in (way, mine) else BLOCKS // 2", "BLOCKS"),
        (
            "trial -k hits_more",
            "_WAYS.index((slots.by_recency, slots.keeps_more, slots.keeps_longer))",
            "0",
        ),
        ("trial -k an_eighth", "1 - len(keys) / fades", "1"),
        ("trial -k a_64th", "_FADES if _RECENT in (way, mine) else _FADES_SLOWLY", "_FADES"),
        ("trial -k nearly_all", "(False, True, False),", "(False, False, False),"),
        ("trial -k small_memory", "if capacity < BLOCKS:", "if False:"),
        ("trial -k becomes_small", "self._go(_WAYS[0])", "pass"),
        ("trial -k stands_for", "self._slots.capacity // self._groups", "self._slots.capacity"),
        ("trial -k stands_for", "_HASHES // capacity * BLOCKS", "_HASHES"),
        ("trial -k handed_over", "cache.manager.slots.hands_over = slots.hands_over", "pass"),
    ),
    "kvstore/core/ghosts.py": (
        ("ghosts -k Q64", "self._count += 1", "pass"),
        ("ghosts -k Q64_parts", "int(time_s * TICKS) + 1", "(int(time_s) + 1) * TICKS"),
        (
            "ghosts -k Q64_parts",
            "min(int(time_s * TICKS) + 1, _COUNT)",
            "int(time_s * TICKS) + 1",
        ),
        (
            "ghosts -k nine_in_ten",
            "last[at + 1] = table[at], before[at], last[at]",
            "_ = (0, 0, 0)",
        ),
        ("ghosts -k Q64", "- self._before[place] & _COUNT", "- self._before[place]"),
    ),
    "kvstore/core/load_paces.py": (
        (
            "slow_peers -k O21_what_a_slow",
            "return tier.name if placing is None else placing.place(key)",
            "return None if tier.name == 'peer' else tier.name",
        ),
        ("load_or_compute -k twentieth", "if now_ns < self._try_ns.get(place, 0):", "if False:"),
        ("load_or_compute -k twentieth", "TRY_EVERY * wait_ns), _TRY_NS_MAX)", "0), _TRY_NS_MAX)"),
        ("load_or_compute -k within_a_minute", "_TRY_NS_MAX)", "1 << 60)"),
        ("load_or_compute -k become_quick", "return place in self._reading or", "return"),
        ("load_or_compute -k become_quick", "pace = Pace()  # whatever", "pass  # whatever"),
        ("load_or_compute -k O21_a_queue", "self._reading[place] + blocks) *", "blocks) *"),
        ("load_or_compute -k O21_a_slow", "self._reading[place] -= blocks"),
    ),
    "kvstore/core/pace.py": (
        ("load_or_compute -k a_line", "start >= 0:", "False:"),
        ("load_or_compute -k of_little", "min(amount, most) * each", "amount * each"),
        ("load_or_compute -k of_like", "each > 0 and ", ""),
    ),
    "connectors/compute_pace.py": (
        ("load_or_compute -k O21_an_engine", "if self._tokens < _KNOWN_TOKENS:", "if False:"),
        ("load_or_compute -k O21_steps", "max(scheduled_ns, self._ended_ns)", "scheduled_ns"),
        ("load_or_compute -k O21_an_engine", "if scheduled:", "if True:"),
        (
            "load_or_compute -k O21_steps_that_only_decode",
            " if max(scheduled) >= _PROMPT_TOKENS else 0",
            "",
        ),
    ),
    "kvstore/store/namespace.py": (
        ("policies -k Q66_a_store", 'self._numbers.add("kvstore_policy_bugs")', "pass"),
        (
            "pins -k Q50_extents",
            "return kept[mapping.first], on_credit[mapping.first]",
            "return 0, on_credit[mapping.first]",
        ),
    ),
    "kvstore/store/tenants.py": (
        ("tenants_store -k Q41_tenants_are", " or len(self.names) >= limits.TENANTS_MAX", ""),
        ("tenants_store -k S2", "read_tenant(name, {})"),
        ("tenants_store -k Q41_a_reload", "share.quota_bytes, share.floor_bytes = None, 0"),
    ),
    "connectors/store_client.py": (
        (
            "request_policy -k Q41_the_store",
            "self._untold_tenants = sorted(self._tenants)",
        ),
    ),
    "connectors/vllm_scheduler.py": (
        ("engine/adapter -k Q40_a_request", " and policy is not NOTHING", ""),
        ("engine/adapter -k S2_lines_of", "        self._said.tick()\n", ""),
    ),
    "connectors/request_policy.py": (
        (
            "request_policy -k Q34_the_tighter",
            "min(self.max_load_tokens, other.max_load_tokens)",
            "other.max_load_tokens",
        ),
        ("request_policy -k Q35_a_request_that_stores", "if not self.kv_store_tiers.memory:"),
    ),
}
