"""Limits that a request or its engine sets: what is loaded, what is stored, and in which tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from connectors.config import parse_extra
from connectors.engine_interface import Geometry, Step
from connectors.kv_transfer_params import Transfer
from connectors.request_policy import NO_LIMITS, NOTHING, RequestPolicy, Tiers, policy_of
from kvstore.config import Config
from kvstore.core.errors import ConfigError
from kvstore.core.limits import PINS_MAX
from kvstore.core.types import GroupRule, make_key, tag_of
from kvstore.store import admin
from kvstore.wire import engine as p
from tests.harness.live import LiveStore, engine, eventually, store_settings
from tests.harness.script import BLOCK, Request, Script, hashes

WINDOW = Geometry(BLOCK, BLOCK, (BLOCK, BLOCK), (GroupRule(), GroupRule(2)))
MEMORY_ONLY = Tiers(memory=True, disk=False, peers=False)


def limited(
    tokens: int,
    script: Script | None = None,
    **limits: Any,  # noqa: ANN401 - the fields of RequestPolicy
) -> tuple[Script, Request]:
    """A request with these limits has come; its lookup waits for an answer."""
    script, request = script or Script(), Request("r", tokens)
    script.half.on_new_request(request, policy=NO_LIMITS._replace(**limits))
    return script, request


# What is given


def test_Q34_a_request_names_its_limits_as_vllms_offloading_does() -> None:
    assert policy_of(None) == policy_of({}) == policy_of({"do_remote_decode": True}) == NO_LIMITS
    given = {
        "max_load_tokens": 0,
        "max_offload_tokens": 64,
        "offload_prompt_only": True,
        "kv_load_tiers": [{"medium": "cpu", "locality": "LOCAL"}],
        "kv_store_tiers": [],
    }
    nowhere = Tiers(memory=False, disk=False, peers=False)
    assert policy_of(given) == RequestPolicy(0, 64, MEMORY_ONLY, nowhere, offload_prompt_only=True)


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ([{}], Tiers()),
        ([{"medium": "CPU"}], MEMORY_ONLY),
        ([{"locality": "LOCAL"}], Tiers(peers=False)),
        ([{"medium": "CPU"}, {"medium": "STORAGE", "locality": "REMOTE"}], Tiers(disk=False)),
        ([{"medium": None, "locality": "local"}], Tiers(peers=False)),
    ],
)
def test_Q36_tiers_are_those_that_an_entry_fits(tiers: list[Any], expected: Tiers) -> None:
    assert policy_of({"kv_load_tiers": tiers}).kv_load_tiers == expected


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_load_tokens", -1, "whole number from 0 to 1000000000"),
        pytest.param("max_load_tokens", 10**5000, "found a number of 16610 bits", id="long"),
        ("max_load_tokens", True, "whole number"),
        ("max_offload_tokens", "8", "whole number"),
        ("offload_prompt_only", 1, "true or false"),
        ("kv_load_tiers", "CPU", "a list such as"),
        ("kv_load_tiers", [{}] * 17, "a list such as"),
        ("kv_load_tiers", [["CPU"]], "a list such as"),
        ("kv_store_tiers", [{"medium": "GPU"}], "expected CPU or STORAGE"),
        ("kv_store_tiers", [{"locality": 3}], "expected LOCAL or REMOTE"),
        ("kv_store_tiers", [{"place": "LOCAL"}], "a list such as"),
    ],
)
def test_Q34_a_wrong_limit_is_named_with_what_is_expected(
    name: str, value: object, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_of({name: value})
    assert name in str(caught.value)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 400
    with pytest.raises(ConfigError, match=name):
        parse_extra({"cpu": "1GiB", name: value})


def test_Q34_the_tighter_of_the_engines_and_the_requests_limits_counts() -> None:
    engine_has = parse_extra(
        {"cpu": "1GiB", "max_load_tokens": 64, "kv_store_tiers": [{"medium": "CPU"}]}
    ).policy
    assert engine_has == NO_LIMITS._replace(max_load_tokens=64, kv_store_tiers=MEMORY_ONLY)
    assert policy_of({}, engine_has) is engine_has
    more = {"max_load_tokens": 128, "max_offload_tokens": 16, "kv_store_tiers": [{}]}
    assert policy_of(more, engine_has) == engine_has._replace(max_offload_tokens=16)
    assert policy_of({"max_load_tokens": 16}, engine_has).max_load_tokens == 16
    assert parse_extra({"cpu": "1GiB"}).policy == NO_LIMITS


# Loading


def test_Q34_no_more_is_loaded_than_a_request_may() -> None:
    script, request = limited(81, max_load_tokens=40)
    script.answer(script.lookups()[0].ask, [0, 1, 2, 3, 4])
    assert script.matched(request) == (32, True), "whole blocks"
    assert script.matched(request, 16) == (32, True), "beyond what the engine has"
    assert script.matched(request, 64) == (16, True)


def test_Q34_a_shorter_hit_has_the_windows_it_needs() -> None:
    script, request = limited(81, Script(WINDOW), max_load_tokens=48)
    script.answer(script.lookups()[0].ask, [0, 1, 2, 3, 4], [0, 1, 3, 4])
    assert script.matched(request) == (32, True), "the window of 48 lacks block 2, that of 80 none"


def test_Q34_a_request_that_may_load_nothing_asks_nothing_and_is_stored() -> None:
    for limits in ({"max_load_tokens": 0}, {"kv_load_tiers": Tiers(memory=False)}):
        script, request = limited(48, **limits)
        assert script.lookups() == []
        script.admit(request)
        assert script.indices(request, script.step(request, 48, [[1, 2, 3]])) == [0, 1, 2]


def test_Q36_what_a_request_leaves_out_is_not_asked() -> None:
    script, _ = limited(48, kv_load_tiers=MEMORY_ONLY)
    (lookup,) = script.lookups()
    assert lookup.memory_only
    assert not lookup.off_disk
    script, _ = limited(48, kv_store_tiers=MEMORY_ONLY)
    (lookup,) = script.lookups()
    assert not lookup.memory_only
    assert lookup.off_disk


def test_Q36_other_stores_are_not_asked_for_a_request_that_leaves_them_out() -> None:
    there = {
        "do_remote_prefill": True,
        "remote_engine_id": "engine",
        "remote_request_id": "r-1",
        "remote_host": "127.0.0.1",
        "remote_port": 9500,
        "remote_block_ids": [[1, 2]],
    }
    asked = []
    for tiers in (Tiers(), Tiers(peers=False)):
        script, request = Script(), Request("r", 48)
        policy = NO_LIMITS._replace(kv_load_tiers=tiers)
        script.half.on_new_request(request, there, policy=policy)
        asked.append(script.lookups()[0].peer)
    assert asked == ["127.0.0.1:9500", ""]


# Storing


def test_Q35_no_more_of_a_request_is_stored_than_its_first_tokens() -> None:
    script, request = limited(64, max_offload_tokens=40)
    script.admit(request)
    assert script.indices(request, script.step(request, 64, [[1, 2, 3, 4]])) == [0, 1]
    script.half.request_finished("r", [[1, 2, 3, 4]])
    assert script.step().early == ()


@pytest.mark.parametrize("offload_prompt_only", [True, False])
def test_Q35_what_a_request_generates_may_be_left_out(offload_prompt_only: bool) -> None:
    script, request = limited(40, offload_prompt_only=offload_prompt_only)
    script.admit(request)
    table = [[1, 2, 3, 4]]
    assert script.indices(request, script.step(request, 40, table)) == [0, 1]
    request.num_tokens, request.block_hashes = 64, hashes(4)
    stored = script.indices(request, script.step(request, 24, table))
    assert stored == ([] if offload_prompt_only else [2, 3])


def test_Q35_a_request_that_stores_nothing_is_loaded() -> None:
    for limits in ({"max_offload_tokens": 0}, {"kv_store_tiers": Tiers(memory=False)}):
        script, request = limited(49, **limits)
        script.answer(script.lookups()[0].ask, [0, 1])
        assert script.matched(request) == (32, True)
        script.half.update_state_after_alloc("r", [[1, 2, 3, 4]], 32)
        script.half.on_output({}, ["r"], [])
        request.num_computed_tokens = 32
        assert script.step(request, 17, [[1, 2, 3, 4]]).stores == ()


def test_Q35_what_another_engine_goes_on_with_is_stored_whole() -> None:
    script, request = Script(transfer=Transfer("engine")), Request("r", 48)
    script.half.on_new_request(request, {"do_remote_decode": True}, policy=NOTHING)
    script.admit(request)
    assert script.indices(request, script.step(request, 48, [[1, 2, 3]])) == [0, 1, 2]


def test_Q36_blocks_that_stay_off_the_disk_have_jobs_of_their_own() -> None:
    script, tables = Script(), {"a": [[1, 2]], "b": [[3, 4]], "c": [[5, 6]]}
    for name, tiers in zip("abc", (Tiers(), MEMORY_ONLY, Tiers()), strict=True):
        request = Request(name, 32, name)
        script.half.on_new_request(request, policy=NO_LIMITS._replace(kv_store_tiers=tiers))
        script.admit(request)
    meta = script.half.build_meta(Step(dict.fromkeys("abc", 32), (), tables.__getitem__))
    found = [(job.engine.block_ids, job.off_disk) for job in meta.stores]
    assert found == [((1, 2), False), ((3, 4), True), ((5, 6), False)]


# In the store


@pytest.fixture
def config(tmp_path: Path) -> Config:
    nvme = {"path": str(tmp_path / "kv"), "capacity": "64MiB", "extent": "16MiB"}
    return store_settings(tmp_path, nvme=nvme)


def on_disk(store: LiveStore) -> int:
    (namespace,) = store.server.store.namespaces.values()
    return namespace.tiering.counts["nvme", "stored"]


def test_Q36_blocks_kept_off_the_disk_are_in_memory_only(config: Config) -> None:
    with LiveStore(config) as store, engine(store) as one:
        one.put(hashes(2, "secret"), off_disk=True)
        one.put(hashes(2, "open"))
        eventually(lambda: on_disk(store) == 2)
        granted = one.ask(hashes(2, "secret"))
        assert granted.lease, "it is a hit in memory"
        one.worker.send(p.Loaded(granted.lease, 0, 0.0))
        one.put(hashes(1, "more"))  # a use is a reason to write what the disk lacks
        eventually(lambda: on_disk(store) == 3)
    with LiveStore(config) as store, engine(store) as one:
        assert one.ask(hashes(2, "open")).lease
        assert not one.ask(hashes(2, "secret")).lease, "nor were they written at the end"


def test_Q36_once_it_has_left_memory_a_block_may_be_stored_anywhere(config: Config) -> None:
    with LiveStore(config) as store, engine(store) as one:
        one.put(hashes(1, "a"), off_disk=True)
        (namespace,) = store.server.store.namespaces.values()
        eventually(lambda: bool(namespace.tiering.off_disk))
        admin.clear(config.server.socket)
        eventually(lambda: not namespace.tiering.off_disk)
        one.put(hashes(1, "a"))
        eventually(lambda: on_disk(store) == 1)


# Tenants


def test_Q40_a_tenants_requests_ask_and_store_under_names_of_its_own() -> None:
    script, tables = Script(), {"a": [[1, 2]], "b": [[3, 4]], "c": [[5, 6]]}
    for name, tenant in zip("abc", ("one", "two", ""), strict=True):
        request = Request(name, 32)  # the same prompt
        script.half.on_new_request(request, policy=NO_LIMITS._replace(tenant=tenant))
        script.admit(request)
    tags = [tag_of("one"), tag_of("two"), b""]
    assert [lookup.scope for lookup in script.lookups()] == tags
    meta = script.half.build_meta(Step(dict.fromkeys("abc", 32), (), tables.__getitem__))
    keys = [make_key(block, 0, tag) for tag in tags for block in hashes(2)]
    assert [key for job in meta.stores for key in job.keys] == keys
    assert [key for job in meta.stores for key in job.parents] == [
        key for first in (0, 2, 4) for key in (b"", keys[first])
    ]


def test_Q40_a_tenants_blocks_of_before_a_reset_are_not_found() -> None:
    script, request = Script(), Request("r", 48)
    script.half.reset_cache(b"nonce")
    script.half.on_new_request(request, policy=NO_LIMITS._replace(tenant="one"))
    assert script.lookups()[0].scope == b"nonce" + tag_of("one")
    script.admit(request)
    meta = script.step(request, 48, [[1, 2, 3]])
    assert all(key.endswith(b"nonce" + tag_of("one")) for job in meta.stores for key in job.keys)


def test_Q40_a_handed_over_prompt_is_asked_for_in_its_tenants_scope() -> None:
    script, request = Script(transfer=Transfer("engine")), Request("r", 48)
    policy = NO_LIMITS._replace(tenant="one")
    script.half.on_new_request(request, {"do_remote_decode": True}, policy=policy)
    script.admit(request)
    script.client.side_channel = "127.0.0.1:9"
    script.step(request, 48, [[1, 2, 3]])
    request.num_tokens += 1
    script.half.hand_over("r", [[1, 2, 3]])
    script.step()
    done = [state for step in script.steps() for state in step.handed_over if state.hashes]
    assert [state.scope for state in done] == [tag_of("one")]


def test_Q41_the_store_is_told_of_each_tenant_once_in_each_session() -> None:
    script = Script()
    for number, tenant in enumerate(("one", "two", "one")):
        request = Request(str(number), 32, tenant)
        script.half.on_new_request(request, policy=NO_LIMITS._replace(tenant=tenant))
        script.step()
    assert [name for step in script.steps() for name in step.tenants] == ["one", "two"]
    script.client.detach("for the test")
    script.attach()
    script.step()
    assert [name for step in script.steps() for name in step.tenants] == ["one", "two"]


def test_Q40_a_request_names_its_tenant_else_its_engine_does() -> None:
    engine_has = parse_extra({"cpu": "1GiB", "tenant": "own"}).policy
    assert policy_of({}, engine_has).tenant == "own"
    assert policy_of({"tenant": "other"}, engine_has).tenant == "other"
    for wrong in ("", "a" * 64, "a b", "-a", "ä", 3):
        with pytest.raises(ConfigError, match="tenant"):
            policy_of({"tenant": wrong})


# Pins


def test_Q50_a_request_pins_its_whole_blocks_under_its_tenants_names() -> None:
    script, policy = Script(), policy_of({"kv_pin": "system", "kv_unpin": "old", "tenant": "one"})
    script.client.detach("for the test")
    script.half.on_new_request(Request("r", 40), policy=policy)
    script.attach()
    script.step()
    script.half.on_new_request(Request("s", 40), policy=policy_of({"kv_unpin": "system"}))
    script.step()
    hashed = hashes(2)
    assert [prefix for step in script.steps() for prefix in step.pins] == [
        p.Prefix("old", scope=tag_of("one")),
        p.Prefix("system", b"".join(hashed), len(hashed[0]), tag_of("one")),
        p.Prefix("system"),
    ]
    with pytest.raises(ConfigError, match="kv_pin"):
        policy_of({"kv_pin": ["system"]})
    with pytest.raises(ConfigError, match="kv_pin"):
        parse_extra({"cpu": "1GiB", "kv_pin": "system"})


def test_Q50_an_engine_without_a_store_keeps_the_last_pins_only() -> None:
    script = Script()
    script.client.detach("for the test")
    for number in range(PINS_MAX + 3):
        script.client.pin(p.Prefix(str(number)))
    script.attach()
    script.step()
    found = [prefix.name for step in script.steps() for prefix in step.pins]
    assert found == [str(number) for number in range(3, PINS_MAX + 3)]
