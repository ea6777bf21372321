"""Lines that keep a promise, taken out one at a time: some test has to fail for each.

    python -m tests.mutants [--list] [--workers N] [WORD ...]

Each runs in a copy of the working tree, N (2) at one time; only those whose file or tests have
every WORD in their name, if any is given. It ends with 1 when a line went that no test missed.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutants_events import EVENTS
from tests.mutants_hints import HINTS
from tests.mutants_late import LATE
from tests.mutants_neighbours import NEIGHBOURS
from tests.mutants_object import OBJECT
from tests.mutants_operation import OPERATION
from tests.mutants_ops import OPS

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300
_COPIED = ("kvstore", "tiers", "connectors", "tests", "pyproject.toml", "Makefile", "README.md")
_FAILED = re.compile(r"^\d+ failed|, \d+ failed|^FAILED ", re.MULTILINE)


class Mutant(NamedTuple):
    """A change of one place, and who has to notice it.

    found: text that is once in the file. instead: what is put there. tests: pytest's arguments.
    """

    path: str
    found: str
    instead: str
    tests: str

    def __str__(self) -> str:
        """Name it: a file, the line that goes, the tests."""
        return f"{self.path}: {' '.join(self.found.split())[:60]!r} ({self.tests})"


# By file: tests, the text that goes, and what is there instead. A test file is named by what is
# between `tests/test_` (or `tests/engine/test_`) and `.py`. Where nothing stands instead, a
# condition never holds, and a statement is not there.
LINES: dict[str, tuple[tuple[str, str] | tuple[str, str, str], ...]] = {
    "kvstore/store/store.py": (
        (
            "store -k S2_a_worker_that_reports",
            'raise ProtocolError(f"{type(message).__name__} before Welcome")',
        ),
        ("local_limits -k S2_what_raises", "except Exception:", "except ZeroDivisionError:"),
        (
            "local_limits -k S2_what_raises",
            "self._barrier.each(sessions, self._tick_session, self._end_of_bug, _turns_of)",
            "for session in sessions:\n            self._tick_session(session)",
        ),
        (
            "local_limits -k S2_what_raises",
            'self.sessions.turn_away(connection, "internal", what)',
        ),
        ("store -k S2_a_scheduler_half", "if session.phase is Phase.JOINING:\n            raise"),
        ("store_blocks store -k O23_a_report", "if slot not in session.granted:"),
        ("store_blocks store -k O18", ".ok = writing.ok and message.ok", ".ok = message.ok"),
    ),
    "kvstore/store/endings.py": (
        ("endings -k O23_a_process", "now_s >= until or _has_ended(end)", "_has_ended(end)"),
    ),
    "kvstore/store/sessions.py": (
        ("endings -k O23_slots", " and not self.endings.waits_for(session)", ""),
        (
            "endings -k O23_a_worker",
            " and connection not in self._parted",
            "",
        ),
        ("store -k S2_layers", "self._check_layers(hello)"),
        ("turns -k S4_a_namespace_is_visited", "self._namespaces.wake(namespace)"),
        ("store store_blocks -k O23", "namespace.manager.give_back(session.granted)"),
        (
            "store store_blocks -k O20_leases_end",
            "self._lookups.end_lease(session, namespace, lease.lease_id)",
        ),
        ("unnamed", "if namespace.layout.unnamed:\n            namespace.manager.clear()"),
    ),
    "kvstore/store/namespaces.py": (
        (
            "turns -k S4_a_namespace_is_visited",
            "namespace.tiering.clear()\n            self.wake(namespace)",
            "namespace.tiering.clear()",
        ),
    ),
    "kvstore/handover/cluster_key.py": (
        ("side_channel -k S1_who_takes_any", "= ssl.CERT_REQUIRED", "= ssl.CERT_OPTIONAL"),
        ("side_channel -k S1_all_but", "made.minimum_version = ssl.TLSVersion.TLSv1_3"),
    ),
    "kvstore/handover/side_channel.py": (
        (
            "side_channel_limits -k S2_what_peers_leave_unfinished",
            "while lines.unfinished > UNFINISHED_BYTES_MAX:",
        ),
        ("side_channel_limits -k S2_what_peers_do_not", "while lines.unread > UNREAD_BYTES_MAX:"),
        ("side_channel_limits -k S2_connections_that_prove", "if len(young) >= GREETINGS_MAX:"),
        (
            "side_channel_limits -k B9_what_a_peer_said_before_it_was_gone",
            'self.counts["unsent"] += 1\n            self._ready.add(number)',
            'self._fail(line, "unsent")',
        ),
        (
            "side_channel_limits -k a_name_with_several",
            'if line.addresses and line.stage != "open":',
        ),
        ("side_channel_limits -k a_name_with_several", ' and line.stage != "open":', ":"),
        ("side_channel_limits -k S1_without_a_key", "if self._key is None and not may_ask(tcp):"),
        ("side_channel_limits -k S1_without_a", "if self._key is None and not may_answer(sock):"),
    ),
    "kvstore/handover/line.py": (
        (
            "side_channel_limits -k S2_a_connection_that_is_reset",
            "if self._by_fd.get(line.fd) is line:",
        ),
        ("side_channel_limits -k S2_what_peers_leave", "self.unfinished -= line.counted[1]"),
    ),
    "kvstore/handover/listener.py": (
        (
            "side_channel_limits -k S3_a_name",
            "if not open_to_all and not is_loopback(str(name[0])):",
        ),
        (
            "side_channel_limits -k S2_a_listener_without_descriptors",
            "and now_ns >= self._paused_ns",
            "and not self._paused_ns",
        ),
    ),
    "kvstore/handover/loopback.py": (
        (
            "side_channel_limits -k S3_without_a_key_only_loopback_is_dialled",
            "if not open_to_all and not is_loopback(host):",
        ),
        (
            "side_channel_limits -k S2_what_is_no_address",
            "len(port) > len(str(PORT_MAX)) or not 0 < int(port) <= PORT_MAX",
            "not 0 < int(port[:6]) <= PORT_MAX",
        ),
    ),
    "kvstore/model_size.py": (
        ("engine/size", "size = most if most < fewest * 1.5 else fewest", "size = fewest"),
        ("engine/size", "unit * -(-state_bytes // (unit * token_bytes))", "unit"),
    ),
    "kvstore/logs.py": (
        ("side_channel_limits -k S2_log_lines", "LINES_MAX = 5", "LINES_MAX = 5_000"),
    ),
    "connectors/config.py": (
        (
            "doors -k settings_that_an_engine_gives",
            'settings["engine"] = {name: text for name, text in given.items() if text is not None}',
        ),
    ),
    "connectors/vllm.py": (
        ("engine/adapter -k S2_an_engine_whose_id", "refuse_engine_id(engine_id)"),
    ),
    "connectors/events.py": (
        ("events -k O16_events_have_tokens", "names, found.parent, found.", "names, None, found."),
        ("events -k O16_a_prompt_that", "if last >= len(hashes) or hashes[last] != block_hash:"),
        ("events -k O16_a_block_of_several", "known or rules[group].trailing is not None", "known"),
        (
            "events -k O16_what_this_engine_has_no_tokens_of",
            'self._client.count("events_untold")\n        else:',
            "pass\n        else:",
        ),
        ("events -k O16_what_is_remembered", "if len(self._described) > self._described_max:"),
        ("events -k O16_what_is_remembered", "if len(self._published) > self._published_max:"),
        ("events -k O16_what_comes_up_for_a_request", "del self._asked[block_hash]"),
    ),
    "connectors/vllm_compat.py": (
        (
            "engine/unsupported -k O22_a_model_that_cannot_go_on",
            "and not config.scheduler_config.enable_chunked_prefill,",
            "and False,",
        ),
        ("engine/geometry -k O13_a_runner", "if all((*runner.values(), *blocks.values())):"),
    ),
    "connectors/load_progress.py": (
        (
            "long_loads -k P2_P7_B15_blocks",
            "self._heard_ns = max(self._heard_ns, now_ns - coming.quiet_ms * 1_000_000)",
        ),
        (
            "long_loads -k B15_O8_a_disk_that_is_slow",
            "self._arrived_ns = now_ns\n\n    def restart",
            "pass\n\n    def restart",
        ),
        (
            "long_loads -k 'B15_a_peer_that_stalls and exporter'",
            "return self.quiet_ns(now_ns) >= self._quiet_ns or",
            "return",
        ),
        ("long_loads -k B15_a_disk", "return self.quiet_ns(now_ns) >= self._quiet_ns or", "return"),
        ("long_loads -k B15_what_only_drips", " or spent_ns >= self._limit_ns", ""),
        ("worker_half -k O15_a_slot_that_is_reused_while", "if reused.size:"),
    ),
    "kvstore/store/lookups.py": (
        (
            "store -k S2_a_lookup_has",
            "if blocks > limits.LOOKUP_BLOCKS_MAX:",
        ),
        ("store -k S2_lookups_that_wait", " > limits.ASKED_BYTES_MAX", " > 1 << 62"),
        (
            "store -k S2_lookups_that_wait",
            "session.asked_bytes += len(lookup.hashes)",
        ),
        ("store -k S2_lookups_that_wait", "session.asked_bytes -= len(ask.chain.packed)"),
        ("store -k S2_lookups_that_wait", "len(session.asks) >= limits.ASKS_MAX", "False"),
        (
            "store store_blocks -k O20_leases_are_capped",
            "return pinned > 0 and leased > self._engine.leased_bytes",
            "return False",
        ),
        ("long_loads -k B15_O8_a_disk", "leases.extend(lease_id, now_ns + self._engine.lease_ns)"),
        ("unnamed", "alone = memory_only or namespace.layout.unnamed", "alone = memory_only"),
        (
            "tiers -k O20_what_an_engine",
            "if ask.direct is None and self._too_many(namespace, pinned, needs):",
        ),
    ),
    "kvstore/wire/peer.py": (
        ("peer_limits -k large", 'scope: Hash = b""', 'scope: bytes = b""'),
        (
            "peer_limits -k S2_hashes",
            "if not 1 <= want.width <= HASH_BYTES_MAX:",
        ),
    ),
    "kvstore/handover/request_leases.py": (
        (
            "request_leases -k B18_a_request_is_its",
            "if before is not None and before.owner not in {owner, NOBODY}:",
        ),
        (
            "request_leases -k B18_a_request_is_its",
            "if lease is not None and lease.owner == owner:",
            "if lease is not None:",
        ),
        (
            "request_leases -k B18_a_request_is_its",
            "if lease is not None and lease.running and lease.owner == owner:",
            "if lease is not None and lease.running:",
        ),
        ("request_leases -k S2_requests", "if len(self._leases) >= REQUESTS_MAX:"),
        ("request_leases", "lease.deadline_ns = max(lease.deadline_ns, end_ns)", "pass"),
        ("request_leases", "if lease.consumers not in {0, consumers}:"),
        (
            "request_leases -k ended_requests_are",
            "None if manager is None else weakref.ref(manager), name",
            "manager, name",
        ),
        (
            "request_leases -k L6",
            'if lease.running or lease.wanted:\n            return "waits"',
            "",
        ),
        (
            "request_leases -k S2_no_more",
            "if self.held_bytes + lease.slot_bytes <= self.held_bytes_max:",
            "if True:",
        ),
    ),
    "kvstore/core/layout.py": (
        ("layout -k S2_layers", "if layers > limits.ENGINE_LAYERS_MAX:"),
        ("layout", "_digest((FORMAT, orders))", "_digest((FORMAT,))"),
    ),
    "kvstore/store/server.py": (
        ("turns -k M3", "self._gauges_fresh.wait(_GAUGES_S)", "self._gauges_fresh.wait()"),
        (
            "local_limits -k S2_one_read",
            "if connection.refused or connection.outbox.bytes > limits.OUTBOX_BYTES_MAX:",
        ),
        ("store_disk -k while_a_peer_calls", "self._leave_all_but_engines()"),
        (
            "turns -k asks_nothing",
            "if disk is not None and (disk_s <= _BUSY_TICK_S or now_ns >= self._disk_ns):",
            "if disk is not None:",
        ),
        ("turns -k asks_nothing", "(peers_due or peers.busy)", "True"),
        ("doors -k S1", "if not trusted(process.uid, self.store.settings.running.server.allow):"),
    ),
    "kvstore/store/live_settings.py": (
        ("cpu_resize -k keep_their_share", "leased_bytes=part(engine.leased_bytes),", ""),
    ),
    "kvstore/config_edit.py": (
        ("config_edit -k has_changed", "if ConfigFile.of(source.path, data) != source:"),
        ("config_edit -k not_writable", "if not os.access(path, os.W_OK):"),
        ("config_edit -k mode", "os.fchmod(fd, stat.S_IMODE(before.st_mode))"),
        ("config_edit -k mode", "os.fchown(fd, before.st_uid, before.st_gid)"),
        ("config_edit -k may_not_have", "of_text(changed, source.path)"),
    ),
    "kvstore/store/extents.py": (
        ("cpu_resize", "self._fit(namespaces.values())"),
        ("cpu_resize -k without_engines", "(not n.sessions, n.live_extents)", "n.live_extents"),
        ("turns -k S4_a_namespace_wakes_when_its_memory", "self._wake(donor)"),
    ),
    "tiers/nvme/disk.py": (
        (
            "nvme_failing -k removal_failed",
            "fresh.succeed(old)",
            "fresh.succeed(old)\n        fresh.room = old.room",
        ),
    ),
    "connectors/store_connection.py": (
        ("store_connection -k for_good", " and not message.retry:", " and False:"),
    ),
    "connectors/vllm_identity.py": (
        ("engine/length -x", "decided_by_length(model, code, length) for length in lengths", ""),
    ),
    "tiers/nvme/attached.py": (
        (
            "turns -k S4_what_is_written",
            "self.wake(space)\n            self.commits.",
            "self.commits.",
        ),
        (
            "nvme_process -k newer_than",
            "self.generation = max(self.generation, loading.newest + 1)",
            "pass",
        ),
    ),
    "tiers/nvme/index_server.py": (
        ("nvme_bits -k S2_what_only_damage", "os.strerror(errno.EFAULT),  #", "#"),
        (
            "nvme_namespace -k stored_after_a_clear",
            "txn.drop(self._table(txn, digest), delete=False)",
            "pass",
        ),
    ),
    "tiers/nvme/remount.py": (
        ("nvme_failing -k damaged_before", "old.directory.id, old.damage", "old.directory.id"),
    ),
    "kvstore/handover/links.py": (
        ("peer_limits -k S2_what_names", 'self._channel.counts["undialled"] += 1'),
        ("peer_limits -k S2_what_names", "oldest.used_ns >= RESTING_NS:", "oldest.used_ns >= 0:"),
        (
            "peer_limits -k P4",
            "elif isinstance(message, m.Settle) and not message.lease_ms:",
        ),
        (
            "links -k B2",
            'if link.stage != "greeted" and not (link.stage == "starting" and message.agent):',
        ),
        ("links -k B2", '"starting" and message.agent)', '"starting")'),
    ),
    "kvstore/handover/peers.py": (
        ("barriers -k S2_nothing_stays", "self.producer.request_leases.clear()"),
        (
            "barriers -k S2_nothing_stays",
            "if self.off:\n            return\n        for gone",
            "for gone",
        ),
        (
            "links -k reaches_itself",
            "message.agent == up.name:",
            "not message.agent:",
        ),
        (
            "peers_life -k S4_a_namespace",
            "if asked or self.producer.serves(namespace) or (inlet is not None and inlet.in_use):",
        ),
    ),
    "kvstore/handover/checksums.py": (
        ("checksums -k B19", "xxhash.xxh3_64_intdigest(namespace.encode())", "0"),
        ("checksums -k B19", "intdigest(key, ", 'intdigest(b"", '),
    ),
    "kvstore/core/index.py": (
        (
            "index -k wrong_place",
            "(not end or chain.starts_with(group, [e.key for e in path]))",
            "True",
        ),
        ("manager tiering -k coming", "ready = False", "pass"),
    ),
    "kvstore/core/types.py": (
        (
            "index -k cut_elsewhere",
            "if count > self.blocks or set(map(len, keys)) != {size}:",
            "if count > self.blocks:",
        ),
        ("index -k wrong_place", 'rows.tobytes() == b"".join(keys)', "True"),
    ),
    "tiers/nvme/namespace.py": (
        ("checksums -k O15", " + self.digest.encode()", ""),
        (
            "nvme_namespace -k goes_after_a_clear",
            "self.held = {}\n        self._free, ",
            "self._free, ",
        ),
        (
            "nvme_namespace -k was_leaving_taken",
            "for record in self._sinking:\n            self.unpin(record)",
        ),
    ),
    "kvstore/core/manager.py": (
        (
            "manager -k O20_what_is_in",
            "found = [each for each in found if each[1].slot not in retiring]",
        ),
        (
            "segmented -k Q64_a_lease",
            " and self.index.holds(entry):  # else it was",
            ":  # else it was",
        ),
        ("segmented -k Q64_what_a_request", "victims(wanted=wanted)", "victims()"),
        ("segmented -k was_used_has", "used.append(was_used[victim.slot])", "used.append(0)"),
        ("segmented -k never_used", "self.slots.was_used[entry.slot] = 0", "pass"),
        (
            "segmented -k Q64_a_copy",
            "self._policy.unpinned(entry)",
            "self._policy.used(entry)",
        ),
        ("manager -k O20_what_is_in", "if entry.slot in retiring), limit)", "if False), limit)"),
        ("manager", "(above is None or above.state is not _READY):", "above is None and False:"),
        ("tiering manager -k O15_O20", ".grow((slot,), 2)", ".grow((slot,), 1)"),
        (
            "manager -k O20_a_lease_holds",
            "run, linked, ready = paths[group]",
            "run, linked, ready = paths[group].entries, True, False",
        ),
        (
            "manager -k O20_a_lease_holds",
            "if entry.children:  # a hole",
            "if False:  # a hole",
        ),
        (
            "manager -k O20_a_leased_path",
            "self.leases.pin_all()\n        self._policy.inherit(entry)",
            "self._policy.inherit(entry)",
        ),
        (
            "manager -k O20_a_leased_path",
            "self.leases.pin_all()\n        for slot, entry in self.slots.granted",
            "for slot, entry in self.slots.granted",
        ),
        (
            "manager -k O20_a_leased_path",
            "self.leases.pin_all()\n            if late",
            "if late",
        ),
        ("tiering -k O11_O20", "and entry.state is not _WRITING:", "and entry.state is _READY:"),
        (
            "manager",
            "if entry.slot in self.slots.retiring:",
            "if False:",
        ),
        (
            "manager -k O15_damaged",
            "if entry.slot in bad and entry.state is _READY and self.index.holds(entry):",
        ),
    ),
    "kvstore/core/slots.py": (("manager -k O20_each_grant", "self.generations.grow(found, 1)"),),
    "kvstore/core/leases.py": (
        ("trial -k with_each_request", "if deadline_ns < NEVER_NS:", "if True:"),
        (
            "tiers -k O20_a_hit_does_not",
            "return sum(self._blocks.values()) - self.blocks_of(PINS)",
            "return sum(self._blocks.values())",
        ),
        (
            "manager -k O20_a_leased_block",
            "for entry in pinned:\n            entry.pins += 1",
            "pass",
        ),
    ),
    "kvstore/core/lookup.py": (
        ("lookup -k O3", "= need if at_limit is None or end < limit else at_limit", "= need"),
        ("lookup -k O3", ".blocks, pending=coming.blocks > answer.blocks", ".blocks, pending=True"),
    ),
    "kvstore/core/tiering.py": (
        (
            "tiers -k O20_a_hit_longer",
            "if whole and 0 < needed - len(slots) <= self._manager.leases.by_engines:",
            "if whole and 0 < needed - len(slots):",
        ),
        (
            "tiering tiers",
            "if tier.lookup(queue.first.key) is LookupResult.RETRY:\n                return",
        ),
        ("tiers -k O17", "work.cleared = True"),
    ),
    "kvstore/store/plugins.py": (
        (
            "tier_guard",
            "except BaseException as exc:\n        said",
            "except ZeroDivisionError as exc:\n        said",
        ),
    ),
    "kvstore/wire/credentials.py": (("doors -k S1", "if not trusted(uid, named):"),),
    "kvstore/handover/consumer.py": (
        (
            "export peers peer_limits",
            "if fetch.connection != peer:\n            raise ProtocolError",
        ),
        (
            "direct_fetch -k direct_what_has_failed",
            "ok=False)\n        direct.flush()",
            "ok=False)",
        ),
        (
            "direct_fetch -k B20_direct_what_is_given_up",
            "if direct is not None:\n            direct.flush()",
        ),
        (
            "direct_fetch -k B20_direct_what_was_under_way",
            "finally:\n            self._flush()",
            "finally:\n            pass",
        ),
    ),
    "kvstore/handover/fetches.py": (
        ("direct_push -k B20_direct_a_slot", "= settled.end not in m.MAY_BE_WRITTEN", "= True"),
        ("export -k P8_a_write", "if end not in m.MAY_BE_WRITTEN:", "if True:"),
        (
            "long_loads -k B15_an_engine_that_hangs",
            "if waited_for and now_ns - self.arrived_ns < limit_ns:",
            "if waited_for:",
        ),
        ("export -k B19_a_peer", "if any(self.states.within(run, UNASKED)):"),
        (
            "export_turns -k one_message",
            "self.released |= settled.end != m.LEASE_OVER",
        ),
    ),
    "kvstore/handover/arrivals.py": (
        ("export peers -k 'sum or corrupt or B19'", ".released else wrong", ".released else ()"),
        (
            "export peers peers_life",
            "self.quarantined += end - first\n        fetch.late.update(range(first, end))",
            "self.landing.give_back(fetch.landing[first:end])",
        ),
        ("export", "self.quarantined -= len(positions)"),
        ("export_turns -k S2", "while waiting and not waiting[0][0].left:", "while False:"),
    ),
    "kvstore/handover/direct_fetches.py": (
        (
            "direct_push -k B20_direct_a_late_end",
            "self.flush()  # no turn may come: its fetch is over",
        ),
    ),
    "kvstore/handover/producer.py": (
        ("peer_limits -k S2_jobs_of", "blocks >= WANTED_MAX or ", ""),
        ("export", "if not job.over and not job.released and now_ns >= job.deadline_ns:"),
        (
            "export -k B16_blocks_are_held",
            "elif not job.over:\n            job.deadline_ns",
            "else:\n            job.deadline_ns",
        ),
        ("export -k B16_blocks_are_held", 'end = m.LEASE_OVER if job.over else ""', 'end = ""'),
        (
            "direct_engine export",
            "again.update(position for position in told if job.is_overwritten(position))",
        ),
        (
            "export request_leases peers",
            "if self.request_leases.ambiguous(want.request, peer.source.manager):",
        ),
        ("traits -k B3_another", "if hello.version != m.VERSION:"),
    ),
    "kvstore/handover/jobs.py": (
        ("export", "if self.over:\n            return ()", ""),
        (
            "residents -k P3_direct",
            "self.direct and not self.push:\n            e",
            "self.direct:\n            e",
        ),
    ),
    "kvstore/handover/held_memory.py": (
        (
            "export peers peer_limits -k 'held or B20 or cap'",
            "manager.unpin(filter(None, entries))",
        ),
    ),
    "kvstore/handover/runs.py": (
        ("export -k S2_landing", "if max(slots, default=0) >= region.slots:"),
    ),
    "tiers/nixl/supervisor.py": (
        ("turns -k asks_nothing", "told = bool(self._epoll.poll(0))", "told = True"),
        ("doors -k S1_children", '"-P", "-m", "tiers.nixl.exporter', '"-m", "tiers.nixl.exporter'),
    ),
    "tiers/cpu.py": (
        ("memory_limits -k S5_an_extent", "if wanted + MARGIN_BYTES > left.bytes:"),
        ("cpu_tier", "if not self.has_room:"),
    ),
    "kvstore/metrics.py": (
        ("metrics -k M3", "self.counts.update(dict.fromkeys(zeros(tiers), 0))"),
    ),
    "connectors/scheduler.py": (
        (
            "step_loads -k O6_who_would_read",
            "return None, False  # the next step can admit it: by then these blocks are right",
            "pass",
        ),
        ("step_loads -k O6_a_long_copy", "len(requests) == 1 and ", ""),
        ("step_loads -k O6_an_adap", " and self._scheduled.keys() <= self._ended | requests", ""),
        ("step_loads -k O6_an_adap", "self._ended.add(request_id)"),
        ("step_loads -k O6", "asynchronous = beside or ", "asynchronous = "),
        ("step_loads -k O6", "beside or transfer.direct or ", "beside or "),
        ("step_loads -k O6", "or not is_one_full_group(geometry.rules)", ""),
        ("step_loads -k O15", "= self._beside or tracked.in_step", "= self._beside"),
    ),
    "kvstore/core/eviction.py": (
        ("manager -k no_grant_walks", "if not entry.pins:", "if True:"),
        ("eviction -k a_mark", "if isinstance(coldest, Mark):"),
    ),
    "connectors/worker.py": (
        ("worker_half -k O15_a_load_in_a", "self._bad_blocks.update(task.job.engine.block_ids)"),
        (
            "worker_half -k O6_a_load_in_a_step",
            "self._copies.runner.wait(lambda: all(task.over for task in awaited))",
        ),
        ("worker_half -k in_a_step", ") if task.job.in_step else (task.", "task."),
    ),
    "connectors/worker_copies.py": (
        ("worker_half -k O8_a_load_in_a_step", "wait_ns = 0 if job.in_step else", "wait_ns ="),
        (
            "worker_half -k O15_a_load_in_a_step_without_its_session",
            "or job.session != session.number:\n            return self._abandon",
            "or not job.slots:\n            return self._abandon",
        ),
    ),
    "connectors/copies/host.py": (
        ("host_copies -k one_run", " & (np.diff(number) == 0)", ""),
        ("host_copies -k one_run", "(np.diff(group) == 0) & ", ""),
    ),
    "connectors/load_planner.py": (
        (
            "scheduler_half step_loads -k O9",
            "session=0 if found is None else self._client.session",
            "session=self._client.session",
        ),
    ),
    "connectors/request_lookups.py": (
        ("scheduler_half -k O20", "if self._client.clock() >= grant.until_ns:"),
        ("scheduler_half -k no_place", "tracked.deferred_step < self._step - 1:", "False:"),
        (
            "scheduler_half -k goes_on_from_step",
            "tracked.deferred_step < self._step - 1:",
            "True:",
        ),
        ("lease_queue", "self.queue.add(tracked)"),
        (
            "lease_queue -k one_at_a_time",
            "return tracked.capped and tracked is not self.first",
            "return False",
        ),
        (
            "lease_queue -k as_long_as_it_moves",
            "self._stuck_ns, self._first_tried = None, True",
            "pass",
        ),
        ("lease_queue -k admits_nobody", "if not self._waited:"),
        (
            "lease_queue -k as_long_as_it_moves",
            "self.queue.stuck_ns(now) if tracked.capped else tracked.deferred_ns",
            "tracked.deferred_ns",
        ),
        (
            "scheduler_offers -k keeps_no_copy",
            "tracked.ask, tracked.query = 0, NO_QUERY",
            "tracked.ask = 0",
        ),
    ),
    "connectors/store_client.py": (
        ("scheduler_edges -k O8_no_set", "if len(self._newer) >= KNOWN_MAX:"),
        ("scheduler_edges -k O8_no_set", "self._forgotten.pop()"),
    ),
}


def _mutant(path: str, tests: str, found: str, instead: str | None = None) -> Mutant:
    if instead is None:
        instead = re.sub(r"^(if|elif|while) .*:$", r"\1 False:", found, count=1, flags=re.MULTILINE)
        instead = "pass" if instead == found else instead
    files, dash, word = tests.partition(" -")
    named = re.sub(r"(engine/)?(\w+)", r"tests/\1test_\2.py", files)
    return Mutant(path, found, instead, named + dash + word)


MUTANTS = tuple(
    _mutant(path, *line)
    for table in (LINES, OPERATION, EVENTS, HINTS, LATE, NEIGHBOURS, OBJECT, OPS)
    for path, lines in table.items()
    for line in lines
)


def run(mutant: Mutant, folder: Path) -> str:
    """Take one line out and run its tests; return what is wrong, nothing if they failed.

    folder: a copy of the tree, which is as it was afterwards.
    """
    path = folder / mutant.path
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.found) != 1:
        return f"the text is there {text.count(mutant.found)} times, expected once"
    path.write_text(text.replace(mutant.found, mutant.instead), encoding="utf-8")
    words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", mutant.tests)]
    options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
    command = [sys.executable, "-m", "pytest", *options, *words]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "KVSTORE_TESTS_WAIT_S": "20"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no test failed: they had not ended after {LIMIT_S} s"
    finally:
        path.write_text(text, encoding="utf-8")
        # Python takes it for what another change of the same length made in the same second.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
    if done.returncode == 1 and _FAILED.search(done.stdout):
        return ""
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    return f"no test failed: {last[0] if last else done.returncode}"


def copy_tree(folder: Path) -> None:
    """Copy what mutants and their tests need."""
    for copied in _COPIED:
        source = ROOT / copied
        if source.is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / copied, ignore=skipped)
        elif source.exists():
            shutil.copy(source, folder)


def main() -> None:
    """Run those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="what the names have to contain")
    parser.add_argument("--list", action="store_true", help="name them, and run none")
    parser.add_argument("--workers", type=int, default=2, help="how many run at one time (2)")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if all(word in str(m) for word in args.words)]
    if args.list:
        print(*chosen, sep="\n")
        return
    if not chosen:
        sys.exit(f"none of {len(MUTANTS)} has {' '.join(args.words)!r} in its name; see --list")
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as name,
        ThreadPoolExecutor(args.workers) as pool,
    ):
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(args.workers):
            folder = Path(name) / str(number)
            folder.mkdir()
            copy_tree(folder)
            free.put(folder)

        def judge(number: int, mutant: Mutant) -> str:
            folder, began = free.get(), time.monotonic()
            try:
                found = run(mutant, folder)
            finally:
                free.put(folder)
            counted = f"{number}/{len(chosen)} {time.monotonic() - began:4.0f} s"
            print(f"{counted}  {mutant}  {found or 'noticed'}", flush=True)
            return found

        wrong = sum(map(bool, pool.map(judge, range(1, len(chosen) + 1), chosen)))
    if wrong:
        sys.exit(f"{wrong} of {len(chosen)} lines went and no test missed them")


if __name__ == "__main__":
    main()
