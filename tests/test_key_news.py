"""What a store tells an engine of blocks that enter and leave the tiers, and when."""

from __future__ import annotations

import pytest

from kvstore.core.types import BlockKey, Changes
from kvstore.store import key_news
from kvstore.store.key_news import DISK, MEMORY, KeyNews, Told, net_of
from kvstore.wire.engine import NEWS_MAX


def names(count: int, first: int = 0) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(34, "big")) for number in range(first, first + count)]


def following(count: int) -> tuple[KeyNews, list[BlockKey]]:
    news, keys = KeyNews(), names(count)
    news.follow(keys)
    return news, keys


def follows(news: KeyNews, key: BlockKey) -> bool:
    return any(key in table for table in news._tables)


def test_O16_O24_a_block_is_told_of_once_for_each_tier() -> None:
    news, (a, b) = following(2)
    news.entered([a, b], MEMORY)
    news.entered([a], MEMORY)
    news.entered([a], DISK)
    assert news.take() == Told([a, b], [], [a], [])
    news.left([a, b], MEMORY)
    news.left([a], MEMORY)
    assert news.take() == Told([], [a, b], [], [])
    assert follows(news, a), "it is on disk"
    assert not follows(news, b), "what is nowhere is of no interest"
    news.left([a, b], DISK)
    assert news.take() == Told([], [], [], [a])
    assert news.take() is None


def test_O16_what_came_and_went_before_it_was_told_is_no_news() -> None:
    news, (a, b) = following(2)
    news.entered([a], MEMORY)
    news.take()
    news.left([a], MEMORY)
    news.follow([a])
    news.entered([a, b], MEMORY)
    news.left([b], MEMORY)
    assert news.take() is None, "a is here as before, and b never was"


def test_O16_O24_what_an_engine_stores_once_more_it_is_told_again_and_of_its_end_too() -> None:
    """An engine knows a limited number of keys, and copies a block whose key it has forgotten."""
    news, (a, b) = following(2)
    news.there(a)
    news.entered([b], MEMORY)
    news.there(b)
    assert news.take() == Told([a, b], [], [], []), "once, while it waits"
    news.there(a)
    assert news.take() == Told([a], [], [], [])
    news.there(a)
    news.left([a], MEMORY)
    assert news.take() == Told([], [a], [], [])
    news.there(b)
    assert not news.tell(b, MEMORY)
    assert news.take() == Told([b], [], [], [])


def test_O16_one_turns_changes_are_in_no_order() -> None:
    a, b, c, d = names(4)
    # a left and came back, b left, c came and left, d came
    changes = net_of(Changes([a, c, d], [a, b, c]))
    assert (changes.added, changes.removed) == ([d], [b])
    assert net_of(Changes([a], [])).added == [a]


def test_O24_what_an_engine_has_nothing_to_do_with_is_not_told() -> None:
    news, (a,) = following(1)
    others = names(50, 100)
    news.entered([*others, a], MEMORY)
    news.left(others[:10], MEMORY)
    news.left([BlockKey(b"never seen")], DISK)
    assert news.take() == Told([a], [], [], [])


def test_O24_an_engine_that_hears_nothing_is_sent_a_limited_number() -> None:
    news, keys = following(3 * NEWS_MAX)
    news.entered(keys, MEMORY)
    told = news.take()
    assert told is not None
    assert told.added == keys[:NEWS_MAX]
    assert news.take() is None
    news.heard(10)
    told = news.take()
    assert told is not None
    assert told.added == keys[NEWS_MAX : NEWS_MAX + 10]
    news.heard(10 * NEWS_MAX)  # of a session before, say
    told = news.take()
    assert told is not None
    assert len(told.added) == NEWS_MAX, "never more at one time"


def test_O24_what_waits_is_bounded_and_what_is_lost_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_news, "WAITING_MAX", 4)
    news, keys = following(6)
    news.entered(keys, MEMORY)
    assert news.take() == Told(keys[2:], [], [], [])
    assert news.lost == 2
    for key in keys:
        news.there(key)
    assert news.take() == Told(keys[2:], [], [], [])
    assert news.lost == 4


def test_O24_the_blocks_of_an_engine_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_news, "KEYS_MAX", 2 * key_news.TABLES)
    news, keys = following(5000)
    kept = [key for key in keys if follows(news, key)]
    assert len(kept) == 2 * key_news.TABLES, "two in each table"
    assert set(keys[-50:]) & set(kept), "the oldest are forgotten"
    assert news.lost == 0, "the engine knew of none of them"
    news.entered(kept, DISK)
    news.follow(BlockKey(b"more %d" % number) for number in range(5000))
    assert news.lost == len(kept), "their removal is not told"
