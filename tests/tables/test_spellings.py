"""Class names that are lists of class names."""

from __future__ import annotations

import pytest

from protonet.tables.spellings import describe_list_labels


@pytest.mark.parametrize(
    "names",
    [
        ["oak", "elm", "oak;elm"],
        ["oak", "elm", "oak | elm"],
        ["дуб", "вяз", "дуб и вяз"],
        ["橡树", "榆树", "橡树、榆树"],
        ["red, green", "green, blue", "blue, red"],  # no class by itself
    ],
)
def test_lists_are_described(names: list[str]) -> None:
    (note,) = describe_list_labels(names)
    assert note.startswith(f"classes that look like lists of classes: {', '.join(map(repr, sorted(names)[-1:]))}"[:40])
    assert describe_list_labels(names[-1:], names[:-1]) == [note]  # new classes of an update


@pytest.mark.parametrize(
    "names", [["a/b", "b/c"], ["1,5", "1", "5"], ["Iris-setosa", "Iris-virginica"], ["very good", "good"], ["A+", "A"]]
)
def test_other_names_are_not(names: list[str]) -> None:
    assert describe_list_labels(names) == []
