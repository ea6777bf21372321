"""Every row of the contract is shown by a test that is named after it."""

from __future__ import annotations

from tests.rows import by_row, names_of, problems, read, rows_of

PAGE = """
| row | promise |
|---|---|
| O1 | One. |
| O2 | Two, see P3 | with a bar. |
| P3 | Three. |
| P4 | Four. |
| P5 | Five. |

## Not yet

| rows | why |
|---|---|
| O2, P3, P5 | Later, O1 is done. |
"""


def test_every_row_has_a_test_and_every_test_a_row() -> None:
    rows, later, tests = read()
    assert len(rows) > 60
    assert problems(rows, later, tests) == []


def test_rows_and_those_for_later_are_read_off_the_page() -> None:
    assert rows_of(PAGE) == (["O1", "O2", "P3", "P4", "P5"], {"O2", "P3", "P5"})


def test_tests_are_found_by_their_names_wherever_they_are() -> None:
    source = (
        "class A:\n def test_O1_a(self): ...\nasync def test_O1_P12_b(): ...\ndef test_c(): ..."
    )
    found = by_row(names_of(source))
    assert found == {"O1": ["test_O1_P12_b", "test_O1_a"], "P12": ["test_O1_P12_b"]}


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
