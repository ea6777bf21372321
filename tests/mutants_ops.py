"""Mutants of how a store ends, what is closed meanwhile, and what each turn asks."""

from __future__ import annotations

OPS: dict[str, tuple[tuple[str, str] | tuple[str, str, str], ...]] = {
    "tiers/nvme/disk.py": (
        (
            "nvme_failing -k O17_what_is_written",
            "close = self.attached.closing(self.attached.commits.take(clean=clean)[1])",
        ),
    ),
    "tiers/nvme/attached.py": (("turns -k S4_a_disk_forgets", "self._left.update(space.counts)"),),
    "tiers/nvme/files.py": (
        ("nvme_fsck -k S2_an_index", "if exc.errno == errno.ENXIO:", "if False:"),
    ),
    "tiers/nvme/directory.py": (
        ("open_files -k once_it_is_made", "self.remove_extent(number)\n            raise", "raise"),
        ("nvme_extent_allocator -k refuses", "if exc.errno in _FULL:", "if False:"),
        (
            "nvme_fsck -k S2_an_extent",
            "min(found.st_size, max(extent_bytes, found.st_blocks * 512))",
            "found.st_size",
        ),
    ),
    "tiers/nvme/extent_allocator.py": (
        ("open_files -k S5_a_disk", "fits = fits and open_files < self._disk.extents_max"),
        ("open_files -k a_disk_is_full", " or scarce(made):", ":"),
        (
            "turns -k S4_a_disk_forgets",
            "if space.unused:",
        ),
    ),
    "tiers/nvme/refusals.py": (
        ("open_files -k S6_a_disk", "if folder == path and count + _OTHERS > files_max():"),
    ),
    "tiers/cpu.py": (
        (
            "open_files -k S5_memory",
            "min(self.capacity_bytes, self.extents_max * self.extent_bytes)",
            "self.capacity_bytes",
        ),
        ("cpu_tier -k Q22_memory", "contextlib.suppress(BufferError)", "contextlib.nullcontext()"),
    ),
    "tiers/nvme/block_io.py": (("nvme_block_io -k Q22", ".with_traceback(None)", ""),),
    "kvstore/check.py": (("open_files -k S6_check", "if count > most:"),),
    "kvstore/open_files.py": (
        ("open_files -k all_files", "resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))"),
    ),
    "kvstore/store/plugins.py": (
        (
            "tier_guard -k S2_a_tier_that_is_slow",
            "if took_s < CLOSE_LIMIT_S:",
        ),
        (
            "tier_guard -k S2_a_tier_that_does_not_close",
            'self._failed("close", TimeoutError(f"it has not ended for {took_s:.0f} s"))',
        ),
    ),
    "kvstore/core/tiering.py": (
        (
            "tier_guard -k S2_a_tier_that_is_slow",
            "if self._under_way[tier.name]:\n                tier.drain()",
            "tier.drain()",
        ),
    ),
    "kvstore/store/sessions.py": (
        (
            "tier_guard -k S2_a_tier_that_is_slow",
            "retry = isinstance(exc, NotYet)",
            "retry = False",
        ),
    ),
    "kvstore/store/server.py": (
        (
            "tier_guard -k S2_a_store_that_ends",
            "for plugin in self._plugins:\n            plugin.close()",
        ),
        (
            "endings -k O23_a_worker_that_says",
            "if connection.last == _GOODBYE:  # its last copy is over",
            "if False:",
        ),
        (
            "endings -k O23_a_killed_engine",
            'return b"" if ended else None',
            "return None",
        ),
    ),
    "kvstore/store/store.py": (
        (
            "store_disk -k O17_what_workers",
            "if isinstance(message, p.Stored):\n            self._dispatch",
            "if False:\n            self._dispatch",
        ),
        (
            "turns -k S4_a_turn_calls_no_more_for_engines",
            "if s.stirred or seldom]",
            "]",
        ),
    ),
    "kvstore/store/tenants.py": (
        (
            "tenants_store -k Q42_floors",
            "refuse_floors(tier, floors + floor_bytes, self._capacities[tier])",
        ),
        ("tenants_store -k Q42_floors", "refuse_floors(tier, sum(floors), capacities[tier])"),
    ),
    "kvstore/config.py": (
        (
            "tenants_store -k Q42_floors",
            'refuse_floors(tier, floors, capacity_bytes, f"{source}: ")',
        ),
    ),
    "kvstore/store/live_settings.py": (
        (
            "tenants_store -k Q41_a_resize",
            "self._run(config, None)",
            "self._run(config, config.tenants)",
        ),
    ),
}
