"""Tenants of a running store: named by engines, limited by the configuration and by operators."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvstore import cli
from kvstore.config import Config, parse
from kvstore.core.errors import ConfigError
from kvstore.core.limits import TENANTS_MAX
from kvstore.core.types import make_key, tag_of
from kvstore.store import admin
from kvstore.store.status import TenantStatus
from kvstore.store.tenants import Tenants
from kvstore.store.top import words
from kvstore.wire import engine as p
from tests.harness.fakes import u32
from tests.harness.live import LiveEngine, LiveStore, engine, eventually, store_settings
from tests.harness.script import hashes

MIB = 1 << 20  # of a block


def settings(folder: Path, *tenants: dict[str, str], disk: bool = False) -> Config:
    more: dict[str, Any] = {"tenant": list(tenants)}
    if disk:
        more["nvme"] = {"path": str(folder / "kv"), "capacity": "128MiB", "extent": "16MiB"}
    return store_settings(folder, cpu={"capacity": "16MiB", "extent": "16MiB"}, **more)


def put(one: LiveEngine, tenant: str, text: str, blocks: int) -> None:
    """Store a prompt of a tenant's; its first block's bytes do not matter here."""
    one.scheduler.send(p.Step(tenants=(tenant,)))
    chain = hashes(blocks, text)
    for index, block in enumerate(chain):
        while not one.credits:
            (answers,) = (one.scheduler.take(p.Answers),)
            one.credits.extend(
                int.from_bytes(answers.credits[n : n + 4], "little")
                for n in range(0, len(answers.credits), 4)
            )
        parent = make_key(chain[index - 1], 0, tag_of(tenant)) if index else b""
        keys = (make_key(block, 0, tag_of(tenant)),)
        slot = u32([one.credits.pop(0)])
        one.worker.send(p.Stored(slot, keys, (parent,), ok=True, seconds=0.001))


def here(one: LiveEngine, tenant: str, text: str, blocks: int) -> int:
    """Count the leading blocks that a tenant's request finds."""
    granted = one.ask(hashes(blocks, text), scope=tag_of(tenant) if tenant else b"")
    if not granted.lease:
        return 0
    one.worker.send(p.Loaded(granted.lease, 0, 0.0))
    return len(granted.hits[0].slots) // 4


def used(store: LiveStore, tenant: str, tier: str = "cpu") -> int:
    """Blocks of a tenant, as the store tells it."""
    found = {(each.tenant, each.tier): each.used_bytes for each in admin.quotas(store.path)}
    return found.get((tenant, tier), 0) // MIB


def test_Q40_what_one_tenant_stored_is_a_miss_for_the_others(tmp_path: Path) -> None:
    with LiveStore(settings(tmp_path)) as store, engine(store) as one:
        put(one, "a", "same", 3)
        eventually(lambda: here(one, "a", "same", 3) == 3)
        assert [here(one, who, "same", 3) for who in ("b", "")] == [0, 0]
        put(one, "b", "same", 3)
        eventually(lambda: here(one, "b", "same", 3) == 3)
        assert (used(store, "a"), used(store, "b")) == (3, 3)


def test_Q41_quotas_of_the_configuration_hold_in_memory(tmp_path: Path) -> None:
    limits = {"name": "a", "cpu": "5MiB"}
    with LiveStore(settings(tmp_path, limits)) as store, engine(store) as one:
        put(one, "b", "others", 6)
        for number in range(4):
            put(one, "a", f"mine {number}", 4)
        eventually(lambda: here(one, "a", "mine 3", 4) == 4)
        assert used(store, "a") == 5
        assert here(one, "b", "others", 6) == 6, "whose quota it is not"
        told = {tuple(stat.labels.values()): stat.value for stat in admin.stats(store.path)}
        assert told["a", "cpu", "quota"] == told["a", "cpu", "used"] == 5 * MIB
        status = admin.status(store.path)
        assert [msgspec.structs.astuple(each) for each in status.tenants] == [
            ("a", "cpu", 5 * MIB, 5 * MIB, 0),
            ("b", "cpu", 6 * MIB, None, 0),
        ]
        with (shown := Console(width=100)).capture() as printed:
            shown.print(words(status))
        *_, head, first, second = printed.get().splitlines()
        assert head.split() == ["tenant", "tier", "used", "quota", "floor"]
        assert first.split() == ["a", "cpu", "5", "MiB", "5", "MiB", "0", "B"]
        assert second.split() == ["b", "cpu", "6", "MiB", "-", "0", "B"]


def test_Q41_quotas_of_the_configuration_hold_on_disk(tmp_path: Path) -> None:
    limits = {"name": "a", "nvme": "6MiB"}
    with LiveStore(settings(tmp_path, limits, disk=True)) as store, engine(store) as one:
        put(one, "b", "others", 3)
        eventually(lambda: used(store, "b", "nvme") == 3)
        for number in range(4):
            put(one, "a", f"mine {number}", 4)
            expected = min(6, 4 * number + 4)
            eventually(lambda: used(store, "a", "nvme") == expected)  # noqa: B023 - at once
        assert used(store, "b", "nvme") == 3


def test_Q41_a_quota_set_at_run_time_takes_effect_at_once_also_while_nothing_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(tmp_path, disk=True)
    with LiveStore(config) as store:
        with engine(store) as one:
            put(one, "a", "mine", 9)
            eventually(lambda: used(store, "a", "nvme") == 9)
        place = ["--store", f"unix://{store.path}"]
        assert cli.main(["quota", "a", "nvme", "4MiB", *place]) == 0
        assert cli.main(["quota", "a", "cpu", "2MiB", "--floor", "1MiB", *place]) == 0
        eventually(lambda: (used(store, "a"), used(store, "a", "nvme")) == (2, 4))
        capsys.readouterr()
        assert cli.main(["quota", "--json", *place]) == 0
        found = msgspec.json.decode(capsys.readouterr().out, type=list[dict[str, Any]])
        assert TenantStatus(**found[0]) == TenantStatus("a", "cpu", 2 * MIB, 2 * MIB, MIB)
        for words in (["--floor", "1MiB"], ["a", "cpu"]):
            assert cli.main(["quota", *words, *place]) == 2
            assert "expected a tenant, a tier and a quota" in capsys.readouterr().err
        assert cli.main(["quota", "a", "cpu", "none", "--floor", "", *place]) == 2
        capsys.readouterr()
        assert cli.main(["quota", "a", "cpu", "none", *place]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].split() == ["tenant", "tier", "used", "quota", "floor"]
        assert shown[1].split() == ["a", "cpu", "2", "MiB", "-", "0", "B"]
    with LiveStore(config) as store, engine(store) as one:
        put(one, "a", "more", 1)
        eventually(lambda: used(store, "a", "nvme") == 5)  # what it had before, too


def test_Q42_a_floor_of_the_configuration_keeps_what_a_tenant_has(tmp_path: Path) -> None:
    limits = {"name": "a", "cpu_floor": "3MiB"}
    with LiveStore(settings(tmp_path, limits)) as store, engine(store) as one:
        put(one, "a", "mine", 3)
        for number in range(9):
            put(one, "b", f"other {number}", 4)
        eventually(lambda: here(one, "b", "other 8", 4) == 4)
        assert here(one, "a", "mine", 3) == 3


def test_Q41_a_reload_changes_the_limits_of_all_tenants(tmp_path: Path) -> None:
    before = settings(tmp_path, {"name": "a", "cpu": "5MiB"}, {"name": "b", "cpu": "6MiB"})
    after = settings(tmp_path, {"name": "b", "cpu": "3MiB"}, {"name": "c", "cpu": "1MiB"})
    with LiveStore(before) as store:
        differing = store.server.store.settings.take_over(after)
        assert [each.text for each in differing if not each.live] == []
        assert {each.setting for each in differing} >= {"tenant b cpu", "tenant c cpu"}
        assert "tenant c nvme" not in {each.setting for each in differing}, "none, and was none"
        found = {each.tenant: each.quota_bytes for each in store.server.store.tenants.every()}
        assert found == {"a": None, "b": 3 * MIB, "c": MIB}


def test_Q42_floors_become_smaller_together_with_their_tier() -> None:
    def use(tenants: Tenants, capacity: int, floor: int) -> None:
        tables = [{"name": name, "cpu_floor": f"{floor}MiB"} for name in "abc"]
        found = parse({"cpu": {"capacity": f"{capacity}MiB"}, "tenant": tables})
        tenants.use({"cpu": capacity * MIB}, found.tenants)

    tenants = Tenants(disk=False)
    use(tenants, 1024, 300)
    use(tenants, 512, 100)  # less than two of the floors before
    assert {each.floor_bytes for each in tenants.every()} == {100 * MIB}


@pytest.mark.parametrize(
    ("tenant", "text"),
    [
        ({"name": "a b"}, "up to 63 letters"),
        ({"name": "a", "cpu": "1GiB", "cpu_floor": "2GiB"}, "cpu_floor: expected up to 16 MiB"),
        ({"name": "a", "nvme_floor": "1GiB"}, "nvme_floor: expected up to 0"),
        ({"name": "a", "disk": "1GiB"}, "unknown disk"),
        ({"cpu": "1GiB"}, "name: is required"),
    ],
)
def test_Q41_a_wrong_tenant_is_named(tmp_path: Path, tenant: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        settings(tmp_path, tenant)


def test_Q41_tenants_are_named_once_and_not_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unique names"):
        settings(tmp_path, {"name": "a"}, {"name": "a"})
    many = [{"name": f"t{number}"} for number in range(TENANTS_MAX + 1)]
    with pytest.raises(ConfigError, match="expected up to 256"):
        parse({"cpu": {"capacity": "16MiB"}, "tenant": many})
    with LiveStore(settings(tmp_path, *many[:-1])) as store:
        for tenant, tier, text in (
            ("new", "cpu", "there are 256 already"),
            ("t1", "nvme", "expected cpu: the store has no other"),
        ):
            with pytest.raises(admin.StoreRefused, match=text):
                admin.set_quota(store.path, tenant, tier, 1)
        with pytest.raises(admin.StoreRefused, match="expected up to the quota of 1"):
            admin.set_quota(store.path, "t1", "cpu", 1, 2)


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 64])
def test_S2_an_engine_that_names_a_tenant_wrongly_loses_its_session_only(
    tmp_path: Path, name: str
) -> None:
    with LiveStore(settings(tmp_path)) as store, engine(store) as good:
        with engine(store, "bad") as bad:
            bad.scheduler.send(p.Step(tenants=(name,)))
            assert "up to 63 letters" in bad.scheduler.take(p.Detach).reason
        put(good, "a", "mine", 1)
        eventually(lambda: here(good, "a", "mine", 1) == 1)
        assert [each.tenant for each in admin.quotas(store.path)] == ["a"]


def test_Q42_floors_that_leave_no_room_are_refused(tmp_path: Path) -> None:
    """When tenants keep all of a tier, nothing is stored there any more."""
    keeps = re.escape("floors of tenants in cpu: expected up to 14.4 MiB in sum, 90 % of the ")
    with pytest.raises(ConfigError, match=f"{keeps}capacity, found 15 MiB"):
        settings(tmp_path, {"name": "a", "cpu_floor": "8MiB"}, {"name": "b", "cpu_floor": "7MiB"})
    disk = {"name": "a", "nvme_floor": "120MiB"}
    with pytest.raises(ConfigError, match=r"floors of tenants in nvme: expected up to 115\.2 MiB"):
        settings(tmp_path, disk, disk=True)
    half = {"name": "a", "cpu_floor": "8MiB"}
    with LiveStore(settings(tmp_path, half)) as store:
        tenants, live = store.server.store.tenants, store.server.store.settings
        tenants.limit("b", "cpu", None, 6 * MIB)
        with pytest.raises(ConfigError, match=f"{keeps}capacity, found 15 MiB"):
            tenants.limit("b", "cpu", None, 7 * MIB)
        with pytest.raises(ConfigError, match=f"{keeps}capacity, found 15 MiB"):
            tenants.limit("c", "cpu", None, MIB)
        with pytest.raises(ConfigError, match=f"{keeps}capacity, found 16 MiB"):
            live.take_over(settings(tmp_path, {"name": "a", "cpu_floor": "10MiB"}))
        found = {each.tenant: each.floor_bytes for each in tenants.every()}
        assert found == {"a": 8 * MIB, "b": 6 * MIB}, "nothing has changed"
        live.resize("cpu", 64 * MIB)
        tenants.limit("b", "cpu", None, 40 * MIB)
        with pytest.raises(ConfigError, match=r"expected up to 28\.8 MiB in sum"):
            live.resize("cpu", 32 * MIB)


def test_Q41_a_resize_leaves_limits_that_were_set_at_run_time(tmp_path: Path) -> None:
    """They were those of the file again."""
    with LiveStore(settings(tmp_path, {"name": "a", "cpu": "5MiB"})) as store:
        tenants, live = store.server.store.tenants, store.server.store.settings
        tenants.limit("a", "cpu", 3 * MIB, MIB)
        live.resize("cpu", 32 * MIB)
        assert [*tenants.every()] == [TenantStatus("a", "cpu", 0, 3 * MIB, MIB)]
        live.take_over(live.running)
        assert [*tenants.every()] == [TenantStatus("a", "cpu", 0, 5 * MIB, 0)]
