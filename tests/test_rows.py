"""Every row of the contract is shown by a test that is named after it."""

from __future__ import annotations

from tests.rows import by_row, problems, read


def test_every_row_has_a_test_and_every_test_a_row() -> None:
    rows, later, tests = read()
    assert len(rows) > 60
    assert problems(rows, later, tests) == []


def test_what_is_missing_or_too_much_is_told() -> None:
    for later, names, wrong in [
        ({"O2"}, ["test_O1_a"], []),
        (set(), ["test_O1_a"], ["O2 has no test"]),
        ({"O2"}, ["test_O1_O2_a"], ["O2 is listed for later, but there is test_O1_O2_a"]),
        ({"O2", "O3"}, ["test_O1_a"], ["O3 is listed for later, and is no row"]),
        ({"O2"}, ["test_O1_a", "test_O7_b"], ["test_O7_b shows O7, which is no row"]),
    ]:
        assert problems(["O1", "O2"], later, by_row(names)) == wrong
    assert problems(["O1", "O1"], {"O1"}, {}) == ["O1 is there twice"]
