"""What a peer says of its model, and what it hears when that is another one."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.core.errors import ProtocolError
from kvstore.core.types import GroupRule
from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.harness.handover_pair import Pair


def refusal(pair: Pair, traits: dict[str, str], version: int = m.VERSION) -> framing.Message:
    """What a peer of another model hears."""
    said = list[framing.Message]()
    pair.producer._send = lambda _peer, message: said.append(message)
    pair.producer.on_message(99, m.Hello(version, "other", traits), 0)
    return said[0]


def test_B3_another_version_or_model_is_refused_with_both_values() -> None:
    pair = Pair()
    traits = pair.source.layout.traits
    assert traits["model"] == "model"
    wrong = {**traits, "model": "x", "slot bytes": "1", "dtype": "int8"}
    del wrong["groups"]
    assert refusal(pair, wrong) == m.Refused(
        "dtype is int8, expected nothing, groups is not named, expected all blocks,"
        " model is x, expected model, slot bytes is 1, expected 4096"
    )
    assert refusal(pair, {}, version=9) == m.Refused(f"side channel 9, expected {m.VERSION}")
    assert refusal(pair, traits) == m.Refused(
        f"namespace is other, expected {pair.source.layout.digest[:12]}"
    )
    assert pair.producer.counts["refused"] == 3


def test_B3_of_several_models_the_nearest_is_named() -> None:
    pair = Pair()
    pair.giver.attach("another", identity="bigger", rules=[GroupRule(), GroupRule(4)])
    said = refusal(pair, {**pair.source.layout.traits, "model": "x"})
    assert said == m.Refused("model is x, expected model")


def test_B3_a_model_that_has_not_come_yet_may_come() -> None:
    pair = Pair()
    pair.giver.store.namespaces.clear()
    assert refusal(pair, {}) == m.Refused("namespace other is not served here yet", retry=True)


@pytest.mark.parametrize(
    "traits", [{str(n): "" for n in range(65)}, {"model": 4097 * "x"}, {257 * "x": ""}]
)
def test_B3_traits_are_few_and_short(traits: dict[str, str]) -> None:
    hello = msgspec.msgpack.decode(msgspec.msgpack.encode(m.Hello(m.VERSION, "n", {})))
    hello[3] = traits
    with pytest.raises(ProtocolError, match=r"[Ee]xpected .* of length <="):
        m.decode_for_producer(msgspec.msgpack.encode(hello))
