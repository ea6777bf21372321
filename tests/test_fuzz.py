"""A hundred thousand wrong messages; `make fuzz` sends ten million."""

from __future__ import annotations

from collections import Counter

import pytest

from kvstore.wire import framing
from kvstore.wire import peer as m
from tests.fuzz import site
from tests.fuzz.campaign import attempts
from tests.fuzz.world import Failed, World

MESSAGES = 96_000
WORLD = 24_000


@pytest.mark.slow
def test_B2_nothing_escapes_memory_stays_flat_and_a_good_client_is_served() -> None:
    total = Counter[str]()
    broken = []
    for counts, error in attempts(100, MESSAGES, WORLD):
        total.update(counts)
        if error:
            broken.append(error)
    assert not broken, "\n".join(broken)
    assert total["messages"] == MESSAGES
    assert total["handed over"] >= MESSAGES // 250
    assert total["again"] < total["handed over"] // 10
    # That many got as far as to do something.
    assert total["confirmed"] > 2 * total["handed over"]
    assert total["malformed"] > MESSAGES // 10


def test_what_escapes_is_told_with_its_input_and_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = m.decode_for_producer

    def breaks(data: bytes) -> framing.Message:
        message = decode(data)
        if isinstance(message, m.Settle):
            raise KeyError(message.job)
        return message

    monkeypatch.setattr(m, "decode_for_producer", breaks)
    with pytest.raises(Failed, match=r"KeyError: .*\nmessage \d+: [0-9a-f]+\nseed 3: replay with"):
        World(3).run(2000)


def test_a_client_that_is_not_served_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.Mover, "start", lambda *_: None)
    with pytest.raises(Failed, match="a good client: no block in time"):
        World(3).run(10)
