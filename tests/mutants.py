"""Lines that keep a promise, taken out one at a time: some test has to fail for each.

    python -m tests.mutants [--list] [WORD ...]

Each runs in a copy of the working tree; only those whose file or tests have every WORD in their
name, if any is given. It ends with 1 when a line went that no test missed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

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


STORE, SERVER = "kvstore/store/sessions.py", "kvstore/store/server.py"
CHANNEL = "kvstore/handover/side_channel.py"
LOOKUPS = "kvstore/store/lookups.py"
MANAGER = "kvstore/core/manager.py"
CONSUMER = "kvstore/handover/consumer.py"
RUNS = "kvstore/handover/runs.py"
PRODUCER = "kvstore/handover/producer.py"
REQUESTS = "kvstore/handover/request_leases.py"
EVENTS, LOADS = "connectors/events.py", "connectors/load_progress.py"
SCHEDULER, WORKER = "connectors/scheduler.py", "connectors/worker.py"

MUTANTS = (
    # A session that raises costs itself only.
    Mutant(
        STORE,
        "        except Exception:  # noqa: BLE001 - the barrier of a connection",
        "        except ZeroDivisionError:  # noqa: BLE001 - the barrier of a connection",
        "tests/test_local_limits.py -k S2_what_raises",
    ),
    Mutant(
        STORE,
        "with self._barrier.around(what, partial(self._end, session, *bug)):",
        "if what:",
        "tests/test_local_limits.py -k S2_what_raises",
    ),
    Mutant(
        STORE,
        'self._turn_away(connection, "internal", what)',
        "pass",
        "tests/test_local_limits.py -k S2_what_raises",
    ),
    # Who is spoken to over the side channel, and how much of it is kept.
    Mutant(
        "kvstore/handover/cluster_key.py",
        "        made.verify_mode = ssl.CERT_REQUIRED",
        "        made.verify_mode = ssl.CERT_OPTIONAL",
        "tests/test_side_channel.py -k S1_who_takes_any",
    ),
    Mutant(
        "kvstore/handover/cluster_key.py",
        "        made.minimum_version = ssl.TLSVersion.TLSv1_3",
        "        pass",
        "tests/test_side_channel.py -k S1_all_but",
    ),
    Mutant(
        CHANNEL,
        "        while self._unfinished > UNFINISHED_BYTES_MAX:",
        "        while False:",
        "tests/test_side_channel_limits.py -k S2_what_peers_leave_unfinished",
    ),
    Mutant(
        CHANNEL,
        "        while self._unread > UNREAD_BYTES_MAX:",
        "        while False:",
        "tests/test_side_channel_limits.py -k S2_what_peers_do_not_read",
    ),
    Mutant(
        CHANNEL,
        "        if len(young) >= GREETINGS_MAX:",
        "        if False:",
        "tests/test_side_channel_limits.py -k S2_connections_that_prove_nothing",
    ),
    Mutant(
        CHANNEL,
        "        if self._key is None and not is_loopback(host):\n            raise ConfigError(f",
        "        if False:\n            raise ConfigError(f",
        "tests/test_side_channel_limits.py -k S3_without_a_key_only_loopback_is_dialled",
    ),
    Mutant(
        CHANNEL,
        "            if self._key is None and not is_loopback(str(name[0])):",
        "            if False:",
        "tests/test_side_channel_limits.py -k S3_a_name",
    ),
    Mutant(
        CHANNEL,
        "        if self._key is None and not may_ask(tcp):",
        "        if False:",
        "tests/test_side_channel_limits.py -k S1_without_a_key",
    ),
    Mutant(
        CHANNEL,
        "            if self._key is None and not may_answer(sock):",
        "            if False:",
        "tests/test_side_channel_limits.py -k S1_without_a_key",
    ),
    Mutant(
        CHANNEL,
        " and now_ns >= self._paused_ns",
        " and not self._paused_ns",
        "tests/test_side_channel_limits.py -k S2_a_listener_without_descriptors",
    ),
    Mutant(
        "kvstore/rate_log.py",
        "LINES_MAX = 5",
        "LINES_MAX = 5_000",
        "tests/test_side_channel_limits.py -k S2_log_lines",
    ),
    # What an engine's configuration says of its private store reaches the store.
    Mutant(
        "kvstore/launch.py",
        '        settings["engine"] = dict(engine)',
        "        pass",
        "tests/test_doors.py -k settings_that_an_engine_gives",
    ),
    Mutant(
        "connectors/config.py",
        "self.nvme, self.listen, self.engine)",
        "self.nvme, self.listen)",
        "tests/test_doors.py -k settings_that_an_engine_gives",
    ),
    Mutant(
        "connectors/vllm.py",
        "        refuse_engine_id(engine_id)\n",
        "",
        "tests/engine/test_connector.py -k S2_an_engine_whose_id",
    ),
    # Events that a router can read.
    Mutant(
        EVENTS,
        "names, found.parent, found.tokens)",
        "names, None, found.tokens)",
        "tests/test_events.py -k O16_events_have_tokens",
    ),
    Mutant(
        EVENTS,
        "        if last >= len(hashes) or hashes[last] != block_hash:",
        "        if False:",
        "tests/test_events.py -k O16_a_prompt_that_was_shortened",
    ),
    Mutant(
        EVENTS,
        "            if not known or rules[group].trailing is not None:",
        "            if not known:",
        "tests/test_events.py -k O16_a_block_of_several",
    ),
    Mutant(
        EVENTS,
        '                self._client.count("events_untold")',
        "                pass",
        "tests/test_events.py -k O16_what_this_engine_has_no_tokens_of",
    ),
    Mutant(
        EVENTS,
        "        if len(self._described) > self._described_max:",
        "        if False:",
        "tests/test_events.py -k O16_what_is_remembered",
    ),
    Mutant(
        EVENTS,
        "            if len(self._published) > self._published_max:",
        "            if False:",
        "tests/test_events.py -k O16_what_is_remembered",
    ),
    Mutant(
        EVENTS,
        "                    del self._asked[block_hash]",
        "                    pass",
        "tests/test_events.py -k O16_what_comes_up_for_a_request",
    ),
    # A model that cannot go on from loaded KV.
    Mutant(
        "connectors/vllm_compat.py",
        "            not config.cache_config.enable_prefix_caching\n"
        "            and not config.scheduler_config.enable_chunked_prefill,",
        "            False,",
        "tests/engine/test_unsupported.py -k O22_a_model_that_cannot_go_on",
    ),
    # Loads end for want of arrivals.
    Mutant(
        LOADS,
        "self._heard_ns = max(self._heard_ns, now_ns - coming.quiet_ms * 1_000_000)",
        "pass",
        "tests/test_long_loads.py -k P2_P7_B15_blocks",
    ),
    Mutant(
        LOADS,
        "        self._arrived_ns = now_ns\n\n    def restart",
        "        pass\n\n    def restart",
        "tests/test_long_loads.py -k B15_O8_a_disk_that_is_slow",
    ),
    Mutant(
        LOADS,
        "return self.quiet_ns(now_ns) >= self._quiet_ns or",
        "return",
        "tests/test_long_loads.py -k 'B15_a_peer_that_stalls and exporter'",
    ),
    Mutant(
        LOADS,
        "return self.quiet_ns(now_ns) >= self._quiet_ns or",
        "return",
        "tests/test_long_loads.py -k B15_a_disk_that_stalls",
    ),
    Mutant(
        LOADS,
        "or self.spent_ns(now_ns) >= self._limit_ns",
        "",
        "tests/test_long_loads.py -k B15_what_only_drips",
    ),
    # Limits of local messages.
    Mutant(
        LOOKUPS,
        "        if len(lookup.hashes) // lookup.width > limits.LOOKUP_BLOCKS_MAX:",
        "        if False:",
        "tests/test_store.py -k S2_a_lookup_has",
    ),
    Mutant(
        LOOKUPS,
        "        if len(session.asks) >= limits.ASKS_MAX:",
        "        if False:",
        "tests/test_store.py -k S2_lookups_that_wait",
    ),
    Mutant(
        REQUESTS,
        "        if len(self._leases) >= REQUESTS_MAX:",
        "        if False:",
        "tests/test_request_leases.py -k S2_requests",
    ),
    Mutant(
        "kvstore/core/layout.py",
        "    if layers > limits.ENGINE_LAYERS_MAX:",
        "    if False:",
        "tests/test_layout.py -k S2_layers",
    ),
    Mutant(
        STORE,
        "        self._check_layers(hello)\n",
        "",
        "tests/test_store.py -k S2_layers",
    ),
    Mutant(
        SERVER,
        "                if connection.refused or connection.outbox_bytes"
        " > limits.OUTBOX_BYTES_MAX:\n                    break\n",
        "",
        "tests/test_local_limits.py -k S2_one_read",
    ),
    # What wakes a namespace.
    Mutant(
        STORE,
        "            session.namespace.sessions.add(session.number)\n"
        "            self._wake(session.namespace)\n",
        "            session.namespace.sessions.add(session.number)\n",
        "tests/test_turns.py -k S4_a_namespace_is_visited",
    ),
    Mutant(
        STORE,
        "                namespace.tiering.clear()\n                self._wake(namespace)\n",
        "                namespace.tiering.clear()\n",
        "tests/test_turns.py -k S4_a_namespace_is_visited",
    ),
    Mutant(
        "kvstore/store/extents.py",
        "                self._wake(donor)\n",
        "",
        "tests/test_turns.py -k S4_a_namespace_wakes_when_its_memory",
    ),
    Mutant(
        "tiers/nvme/disk.py",
        "            self.wake(space)\n            self._commits.hurry()\n",
        "            self._commits.hurry()\n",
        "tests/test_turns.py -k S4_what_is_written",
    ),
    # What decides the bytes, who may say what, and what ends when.
    Mutant(
        "connectors/vllm_identity.py",
        'facts["lengths"] = [decided_by_length(model, code, length) for length in lengths]',
        'facts["lengths"] = []',
        "tests/engine/test_length.py -x",
    ),
    Mutant(
        SERVER,
        "        self._leave_all_but_engines()\n",
        "",
        "tests/test_store_disk.py -k while_a_peer_calls",
    ),
    # Others.
    Mutant(
        "tiers/nixl/exporter_child.py",
        '[sys.executable, "-P", "-m", "tiers.nixl.exporter", service]',
        '[sys.executable, "-m", "tiers.nixl.exporter", service]',
        "tests/test_doors.py -k S1_children",
    ),
    Mutant(
        "tiers/nvme/startup.py",
        "                fresh.open(damage)",
        "                fresh.open()",
        "tests/test_nvme_failing.py -k damaged_before",
    ),
    Mutant(
        "kvstore/handover/peers.py",
        "        if asked or self.producer.serves(namespace) or"
        " (inlet is not None and inlet.in_use):",
        "        if False:",
        "tests/test_peers_life.py -k S4_a_namespace",
    ),
    # What a slot holds, and until when.
    Mutant(
        MANAGER,
        "elif parent is not None and (above is None or above.state is not _READY):",
        "elif parent is not None and above is None and False:",
        "tests/test_manager.py",
    ),
    Mutant(
        MANAGER,
        "            generations[slot] = (generations[slot] + 1) & 0xFFFFFFFF\n",
        "",
        "tests/test_manager.py -k O20_each_grant",
    ),
    Mutant(
        MANAGER,
        "        self._grow_generation(slot, 2)\n",
        "        self._grow_generation(slot, 1)\n",
        "tests/test_tiering.py tests/test_manager.py -k O15_O20",
    ),
    Mutant(
        MANAGER,
        "        elif entry is not None and entry.state is not _WRITING:\n"
        "            outcome = StoreOutcome.DUPLICATE",
        "        elif entry is not None and entry.state is _READY:\n"
        "            outcome = StoreOutcome.DUPLICATE",
        "tests/test_tiering.py -k O11_O20",
    ),
    Mutant(
        MANAGER,
        '        if entry.slot in self._retiring:\n            self.drop(entry.key, "resize")\n',
        "",
        "tests/test_manager.py",
    ),
    Mutant(
        MANAGER,
        "                if entry.slot in bad and entry.state is _READY and self._is_here(entry):",
        "                if False:",
        "tests/test_manager.py -k O15_damaged",
    ),
    Mutant(
        "kvstore/core/leases.py",
        "            entry.pins += 1\n",
        "            pass\n",
        "tests/test_manager.py -k O20_a_leased_block",
    ),
    Mutant(
        "kvstore/core/lookup.py",
        "wanted = need if at_limit is None or end < limit else at_limit",
        "wanted = need",
        "tests/test_lookup.py -k O3",
    ),
    Mutant(
        "kvstore/core/lookup.py",
        "return Answer(answer.blocks, pending=coming.blocks > answer.blocks)",
        "return Answer(answer.blocks, pending=True)",
        "tests/test_lookup.py -k O3",
    ),
    Mutant(
        "kvstore/core/tiering.py",
        "            if tier.lookup(queue[0][0]) is LookupResult.RETRY:\n                return",
        "            if False:\n                return",
        "tests/test_tiering.py tests/test_tiers.py",
    ),
    Mutant(
        "kvstore/core/layout.py",
        "_digest((FORMAT, orders))",
        "_digest((FORMAT,))",
        "tests/test_layout.py",
    ),
    Mutant(
        "kvstore/core/tiering.py",
        "            work.cleared = True\n",
        "            pass\n",
        "tests/test_tiers.py -k O17",
    ),
    # The store: an engine's own slots, leases and blocks only.
    Mutant(
        STORE,
        "            if slot not in session.granted:",
        "            if False:",
        "tests/test_store_blocks.py tests/test_store.py -k O23_a_report",
    ),
    Mutant(
        STORE,
        "            writing.ok = writing.ok and message.ok\n",
        "            writing.ok = message.ok\n",
        "tests/test_store_blocks.py tests/test_store.py -k O18",
    ),
    Mutant(
        STORE,
        "        namespace.manager.give_back(session.granted)\n",
        "",
        "tests/test_store.py tests/test_store_blocks.py -k O23",
    ),
    Mutant(
        LOOKUPS,
        "        return pinned > 0 and leased > self._engine.leased_bytes",
        "        return False",
        "tests/test_store.py tests/test_store_blocks.py -k O20_leases_are_capped",
    ),
    Mutant(
        SERVER,
        "        if not trusted(uid, self._config.server.allow):",
        "        if False:",
        "tests/test_doors.py -k S1",
    ),
    Mutant(
        "kvstore/store/tier_guard.py",
        "except BaseException",
        "except ZeroDivisionError",
        "tests/test_tier_guard.py",
    ),
    Mutant(
        STORE,
        "        for lease_id in namespace.manager.leases.of_owner(session.number):\n"
        "            self._lookups.end_lease(session, lease_id)\n",
        "",
        "tests/test_store.py tests/test_store_blocks.py -k O20_leases_end",
    ),
    Mutant(
        LOOKUPS,
        "        leases.extend(lease_id, now_ns + self._engine.lease_ns)\n",
        "",
        "tests/test_long_loads.py -k B15_O8_a_disk_that_is_slow",
    ),
    Mutant(
        STORE,
        "        if namespace.layout.unnamed:\n            namespace.manager.clear()",
        "        if False:\n            namespace.manager.clear()",
        "tests/test_unnamed.py",
    ),
    Mutant(
        LOOKUPS,
        "        alone = memory_only or namespace.layout.unnamed",
        "        alone = memory_only",
        "tests/test_unnamed.py",
    ),
    Mutant(
        LOOKUPS,
        "if ask.direct is None and self._too_many(namespace, pinned, needs):",
        "if False:",
        "tests/test_tiers.py -k O20_what_an_engine",
    ),
    # Doors.
    Mutant(
        "kvstore/wire/credentials.py",
        "        if not trusted(uid, named):",
        "        if False:",
        "tests/test_doors.py -k S1",
    ),
    # Hand-over: what arrives is checked, confirmed and late writes land nowhere else.
    Mutant(
        CONSUMER,
        "        if fetch.peer != peer:\n            raise ProtocolError",
        "        if False:\n            raise ProtocolError",
        "tests/test_export.py tests/test_peers.py tests/test_peer_limits.py",
    ),
    Mutant(
        CONSUMER,
        "            fetch.ended = reason not in m.MAY_BE_WRITTEN",
        "            fetch.ended = True",
        "tests/test_direct_push.py -k B20_direct_a_slot",
    ),
    Mutant(
        CONSUMER,
        "        if end.reason not in m.MAY_BE_WRITTEN:",
        "        if True:",
        "tests/test_export.py -k P8_a_write",
    ),
    Mutant(
        CONSUMER,
        "        if waited_for and now_ns - fetch.arrived_ns < self._waits.limit_ns:",
        "        if waited_for:",
        "tests/test_long_loads.py -k B15_an_engine_that_hangs",
    ),
    Mutant(
        PRODUCER,
        "if not job.over and not job.released and now_ns >= job.deadline_ns:",
        "if False:",
        "tests/test_export.py",
    ),
    Mutant(
        PRODUCER,
        "        if job.over:\n            return ()\n",
        "",
        "tests/test_export.py",
    ),
    Mutant(
        PRODUCER,
        "            again.update(position for position in told if job.is_overwritten(position))",
        "            pass",
        "tests/test_direct_engine.py tests/test_export.py",
    ),
    Mutant(
        PRODUCER,
        "        if self.request_leases.ambiguous(want.request):",
        "        if False:",
        "tests/test_export.py tests/test_request_leases.py tests/test_peers.py",
    ),
    Mutant(
        CONSUMER,
        "        given_up = part.positions if fetch.released else wrong",
        "        given_up = part.positions if fetch.released else ()",
        "tests/test_export.py tests/test_peers.py -k 'sum or corrupt or B19'",
    ),
    Mutant(
        CONSUMER,
        "            self._late_writes.setdefault(fetch.number, []).extend(slots)",
        "            self._landing.give_back(slots)",
        "tests/test_export.py tests/test_peers.py tests/test_peers_life.py",
    ),
    Mutant(
        REQUESTS,
        "            hand.deadline_ns = max(hand.deadline_ns, end_ns)\n\n    def report",
        "            pass\n\n    def report",
        "tests/test_request_leases.py",
    ),
    Mutant(
        REQUESTS,
        "        if hand.consumers not in {0, consumers}:",
        "        if False:",
        "tests/test_request_leases.py",
    ),
    Mutant(
        REQUESTS,
        '        if hand.running or hand.wanted:\n            return "waits"\n',
        "",
        "tests/test_request_leases.py -k L6",
    ),
    Mutant(
        PRODUCER,
        "if hello.version != m.VERSION:",
        "if False:",
        "tests/test_export.py -k B3_another",
    ),
    Mutant(
        RUNS,
        "        if max(slots, default=0) >= region.slots:",
        "        if False:",
        "tests/test_export.py -k S2_landing",
    ),
    Mutant(
        CONSUMER,
        "            if not fetch.states.are(run, CHECKED):",
        "            if False:",
        "tests/test_export.py -k B19_a_peer",
    ),
    Mutant(
        REQUESTS,
        "            if self.held_bytes + hand.slot_bytes <= self._held_bytes_max:",
        "            if True:",
        "tests/test_request_leases.py -k S2_no_more",
    ),
    # A turn asks the system nothing that nothing has changed for.
    Mutant(
        "tiers/nixl/supervisor.py",
        "            told = bool(self._epoll.poll(0))",
        "            told = True",
        "tests/test_turns.py -k asks_nothing",
    ),
    Mutant(
        "tiers/nvme/disk.py",
        "        if now_s < self._idle_until_s and not (under_way or self.visits):",
        "        if False:",
        "tests/test_turns.py -k asks_nothing",
    ),
    Mutant(
        "connectors/vllm_compat.py",
        "    if all((*runner.values(), *blocks.values())):",
        "    if False:",
        "tests/engine/test_geometry.py -k O13_a_runner",
    ),
    # Memory is taken where there is some.
    Mutant(
        "tiers/cpu.py",
        "    if wanted + MARGIN_BYTES > left.bytes:",
        "    if False:",
        "tests/test_memory_limits.py -k S5_an_extent",
    ),
    Mutant(
        "tiers/cpu.py",
        "        if self._used + self.extent_bytes > self.capacity_bytes:",
        "        if False:",
        "tests/test_cpu_tier.py",
    ),
    # Counters.
    Mutant(
        "kvstore/metrics.py",
        "        self.counts.update(dict.fromkeys(zeros(tiers), 0))",
        "        pass",
        "tests/test_metrics.py -k M3",
    ),
    # A load holds up a step only where nothing else could run, and all is there to be copied.
    *(
        Mutant(SCHEDULER, found, "", "tests/test_step_loads.py -k O6")
        for found in (
            "            and len(self._requests) == 1\n",
            "            and self._scheduled.keys() <= self._ended | self._requests.keys()\n",
            "            and tracked.remote is NO_REMOTE\n",
            "            and tracked.repeatable\n",
            "            and not grant.sources\n",
            "            and not any(hits.has_direct for hits in grant.hits)\n",
            "            and loads.fits(-(-tokens // self._geometry.block_tokens))\n",
        )
    ),
    *(
        Mutant(SCHEDULER, found, instead, "tests/test_step_loads.py -k O6")
        for found, instead in (
            ("asynchronous = beside or ", "asynchronous = "),
            ("beside or transfer.direct or ", "beside or "),
            (" or not StepLoads.serves(geometry.rules)", ""),
            ("        self._ended.add(request_id)\n", ""),
        )
    ),
    # What it left wrong is neither stored, nor found by others, nor taken for loaded.
    Mutant(
        SCHEDULER,
        "may_fail = self._beside or tracked.in_step",
        "may_fail = self._beside",
        "tests/test_step_loads.py -k O15",
    ),
    Mutant(
        SCHEDULER,
        "list(ids[tracked.local // self._geometry.engine_block_tokens[0] :])",
        "()",
        "tests/test_step_loads.py -k O15",
    ),
    Mutant(
        WORKER,
        "self._bad_blocks.update(task.job.engine.block_ids)",
        "pass",
        "tests/test_worker_half.py -k O15_a_load_in_a_step",
    ),
    Mutant(
        WORKER,
        "self._runner.wait(lambda: all(task.outcome is not None for task in tasks))",
        "pass",
        "tests/test_worker_half.py -k O6_a_load_in_a_step",
    ),
    Mutant(
        WORKER,
        "wait_ns = 0 if job.in_step else self._wait_ns",
        "wait_ns = self._wait_ns",
        "tests/test_worker_half.py -k O8_a_load_in_a_step",
    ),
    Mutant(
        WORKER,
        "names = () if outcome.task.job.in_step else (outcome.task.job.request_id,)",
        "names = (outcome.task.job.request_id,)",
        "tests/test_worker_half.py -k in_a_step",
    ),
    Mutant(
        LOADS,
        "        if reused.size:\n",
        "        if False:\n",
        "tests/test_worker_half.py -k O15_a_slot_that_is_reused_while",
    ),
    Mutant(
        "connectors/known_keys.py",
        "            if len(known) >= SET_KEYS_MAX:\n",
        "            if False:\n",
        "tests/test_scheduler_edges.py -k O8_no_set",
    ),
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
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *words]
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
    if done.returncode == 1 and _FAILED.search(done.stdout):
        return ""
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    return f"no test failed: {last[0] if last else done.returncode}"


def main() -> None:
    """Run those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="what the names have to contain")
    parser.add_argument("--list", action="store_true", help="name them, and run none")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if all(word in str(m) for word in args.words)]
    if args.list:
        print(*chosen, sep="\n")
        return
    if not chosen:
        sys.exit(f"none of {len(MUTANTS)} has {' '.join(args.words)!r} in its name; see --list")
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        for copied in _COPIED:
            source = ROOT / copied
            if source.is_dir():
                skipped = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, folder / copied, ignore=skipped)
            elif source.exists():
                shutil.copy(source, folder)
        for number, mutant in enumerate(chosen, 1):
            began = time.monotonic()
            found = run(mutant, folder)
            wrong += bool(found)
            took_s = time.monotonic() - began
            counted = f"{number}/{len(chosen)} {took_s:4.0f} s"
            print(f"{counted}  {mutant}  {found or 'noticed'}", flush=True)
    if wrong:
        sys.exit(f"{wrong} of {len(chosen)} lines went and no test missed them")


if __name__ == "__main__":
    main()
