"""S2: however much requests say, each message of the scheduler half is one that a store takes.

The wire of these tests reads what is sent as a store does, which would end the session for it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from connectors import store_client
from connectors.config import parse_extra, refuse_engine_id
from kvstore.core import limits
from kvstore.core.errors import ConfigError
from kvstore.wire import peer as m
from tests.harness.fakes import blocks, hashes
from tests.harness.live import LiveStore, engine, store_settings
from tests.harness.script import BLOCK, Request, Script
from tests.test_kv_transfer_params import HANDED, attached

MIB = 1 << 20


def long(name: str, count: int) -> Request:
    """A prompt of so many blocks; which ones is all the same."""
    request = Request(name, 0)
    request.num_tokens = count * BLOCK + 1
    request.block_hashes = [name.encode().rjust(32)] * count
    return request


def test_S2_a_burst_of_long_prompts_is_asked_about_in_several_steps() -> None:
    """40 MiB in one message would be none, and end the session each time it is tried."""
    script = Script()
    asked = [long(f"r{number}", 2 * MIB // 32) for number in range(20)]
    for request in asked:
        script.half.on_new_request(request)
    steps = [step for _ in asked for step in script.steps()]
    assert all(sum(len(one.hashes) for one in step.lookups) <= 4 * MIB for step in steps)
    lookups = [lookup for step in steps for lookup in step.lookups]
    assert [lookup.hashes[:32] for lookup in lookups] == [r.block_hashes[0] for r in asked]
    assert script.client.session


def test_S2_requests_that_are_handed_over_are_told_in_several_steps() -> None:
    script = attached()
    ending = [long(f"r{number}", 2 * MIB // 32) for number in range(20)]
    for request in ending:
        script.half.on_new_request(request, HANDED, reads=False)
        script.admit(request, computed=request.num_tokens - 1)
        script.step(request, 1, [[]])
    for request in ending:
        script.half.hand_over(request.request_id, [[]])
        script.half.request_finished(request.request_id, [[]])
    handed_over = []
    for _ in range(50):
        script.now_ns += 10**10  # nothing more of them is stored
        script.step()
        handed_over += [handing for step in script.steps() for handing in step.handed_over]
    assert [h.request for h in handed_over if h.state == "done"] == [f"r{n}" for n in range(20)]


def test_S2_much_that_is_given_up_at_once_is_told_in_several_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script()
    monkeypatch.setattr(limits, "STEP_ITEMS_MAX", 10)
    script.client._release.extend(range(1, 26))
    for number in range(25):
        script.client.release_remote("h:1", f"r{number}")
    steps = [step for _ in range(4) for step in script.steps()]
    assert [len(step.release) for step in steps] == [10, 10, 5]
    assert [gone.request for step in steps for gone in step.unwanted] == [
        f"r{n}" for n in range(25)
    ]
    assert not script.half.has_pending_work()


def test_S2_a_store_that_is_behind_is_told_more_once_it_has_read() -> None:
    script = Script()
    script.half.on_new_request(long("r", 10))
    script.waiting_bytes = store_client.STEP_BYTES
    assert script.steps() == []
    script.waiting_bytes = 0
    assert len(script.lookups()) == 1


def test_S2_of_a_prompt_longer_than_a_store_answers_the_leading_blocks_are_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "LOOKUP_BLOCKS_MAX", 8)
    script = Script()
    script.half.on_new_request(request := Request("r", 10 * BLOCK + 5))
    (lookup,) = script.lookups()
    assert (len(lookup.hashes), lookup.loadable) == (8 * 32, 8)
    script.answer(lookup.ask, range(8))
    assert script.matched(request) == (8 * BLOCK, True)
    script.load(request, [range(1, 12)])
    script.half.on_output({}, ["r"], [])


def test_S2_of_a_longer_prompt_the_leading_blocks_are_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "LOOKUP_BLOCKS_MAX", 8)
    script = attached()
    script.half.on_new_request(request := Request("r", 10 * BLOCK + 5), HANDED)
    script.admit(request)
    script.step(request, request.num_tokens, [range(1, 12)])
    request.num_tokens += 1
    params = script.half.hand_over("r", [range(1, 12)])
    assert params is not None
    assert params["remote_num_tokens"] == 8 * BLOCK
    (held,) = [h for step in script.steps() for h in step.handed_over if h.state == "done"]
    assert len(held.hashes) == 8 * 32


# Of settings


@pytest.mark.parametrize("name", ["lease", "decode_ttl"])
def test_S2_a_lease_that_no_message_can_hold_is_refused_at_the_start(name: str) -> None:
    for found in ("25h", "10us"):
        with pytest.raises(
            ConfigError, match=f'{name}: expected .* "1ms" to "24h", found "{found}"'
        ):
            parse_extra({"cpu": "1GiB", name: found})
    parse_extra({"cpu": "1GiB", name: "24h"})
    parse_extra({"cpu": "1GiB", name: "1ms"})


def test_S2_an_engines_id_that_no_message_can_hold_is_refused_at_the_start() -> None:
    refuse_engine_id("e" * limits.NAME_MAX)
    for found in ("e" * (limits.NAME_MAX + 1), "e\ud800"):
        with pytest.raises(ConfigError, match=f"up to 256 characters, found {len(found)}"):
            refuse_engine_id(found)


# What a store asks its peers


def test_S2_of_more_blocks_than_peers_hand_over_at_once_the_leading_ones_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer would refuse it, and so does our own side: it ended the session of who asked."""
    monkeypatch.setattr(m, "JOB_BLOCKS_MAX", 5)
    wants: list[m.Want] = []
    with LiveStore(store_settings(tmp_path, peer={})) as store, engine(store) as one:
        peers = store.server._peers
        assert peers is not None
        fetch = peers.fetch

        def noted(*arguments: Any, **how: Any) -> int | None:  # noqa: ANN401 - of fetch
            wants.append(arguments[2])
            return fetch(*arguments, **how)

        monkeypatch.setattr(peers, "fetch", noted)
        one.put(chain := hashes(2))
        with caplog.at_level(logging.WARNING):
            granted = one.ask([*chain, *hashes(12)[2:]], peer="127.0.0.1:9")
        assert blocks(granted) == [0, 1]
        (want,) = wants
        assert len(want.hashes) <= 12 * 32
        assert m.wanted_of(want, 1) == [range(2, 5)], "of five blocks three"
        assert not caplog.messages
