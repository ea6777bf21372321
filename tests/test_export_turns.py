"""When the two sides of a hand-over go on: as soon as they can, and with all there is at once."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore import protocol as p
from kvstore.export import fetches, jobs
from kvstore.export import messages as m
from tests.export_rig import LANDING, Pair
from tests.fakes import hashes, keys_of


@pytest.mark.parametrize("push", [False, True])
def test_landing_slots_are_free_as_soon_as_their_blocks_are_copied(push: bool) -> None:
    pair, chain = Pair(), hashes(2 * LANDING)
    pair.put(chain)
    late, take = list[p.Message](), pair.down.take

    def all_but_the_last_word(message: p.Message) -> None:
        late.append(message) if isinstance(message, m.Valid | m.End) else take(message)

    pair.down.take = all_but_the_last_word
    number = pair.want(chain, push=push)
    pair.decode.ask(chain)
    pair.run(60)
    states = {block.state for block in pair.consumer._fetches[number].blocks}
    assert states == {fetches.State.CHECKED}, "more than there are landing slots"
    for message in late:
        take(message)
    pair.run(3)
    assert pair.arrived(chain) == len(chain)
    pair.check_nothing_left()


def test_what_ends_one_by_one_in_a_turn_is_gone_on_with_in_one_go() -> None:
    pair, chain, asked = Pair(), hashes(8), list[int]()
    pair.put(chain)
    for key in keys_of(chain)[::-1]:
        pair.source.manager.drop(key, "test")
    take = pair.sum

    def counted(tags: list[jobs.Tag], *of: Any) -> None:  # noqa: ANN401 - as Work.sum has it
        asked.append(len(tags))
        take(tags, *of)

    pair.sum = counted  # type: ignore[method-assign,assignment]
    pair.want(chain)
    pair.decode.ask(chain)
    pair.run(40)
    assert pair.arrived(chain) == len(chain)
    assert asked == [len(chain)], "the shelf has given all of them in one turn"
    told = [message for message in pair.down.sent if isinstance(message, m.Have)]
    assert len(told) == 1
