"""Rows at the end of a table that sum up the others, and rows that only seem to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protonet.tables.summary_rows import count_summary_rows
from protonet.tables.table import ReadSpec, read_table

ROWS = [
    (10.35, 564, "clay", "oak"),
    (12.82, 417, "clay", "elm"),
    (14.33, 389, "sand", "ash"),
    (9.5, 500, "sand", "oak"),
]
ROWS += [(13.1, 402, "peat", "elm"), (14.25, 375, "peat", "ash")]
A, B = np.array([row[0] for row in ROWS]), np.array([row[1] for row in ROWS])


def count(*last: Sequence[object]) -> int:
    """Count the summary rows of a table as text and as numbers; the numbers of both must be equal."""
    columns = list(zip(*ROWS, *last, strict=True))
    texts = [np.array([f"{cell}" for cell in column], object) for column in columns]
    typed = [
        np.array([np.nan if cell == "" else cell for cell in column], float) if index < 2 else texts[index]
        for index, column in enumerate(columns)
    ]
    assert count_summary_rows(texts) == count_summary_rows(typed)
    return count_summary_rows(texts)


@pytest.mark.parametrize("word", ["Total", "итого", "合計", "Gesamtsumme", "xyz", ""])
def test_sums_are_found_in_any_language(word: str) -> None:
    assert count((round(A.sum(), 2), B.sum(), "", word)) == 1
    assert count((round(A.sum(), 2), "", "", word)) == 1
    assert count((round(A.sum(), 2), B.sum(), "", word), (round(A.mean(), 2), round(B.mean(), 1), "", "?")) == 2
    assert count(("", "", "", ""), (round(A.sum(), 2), B.sum(), "", word)) == 1


@pytest.mark.parametrize("word", ["Average", "Mittelwert", "среднее", "xyz"])
def test_means_are_found_in_any_language(word: str) -> None:
    assert count((round(A.mean(), 3), round(B.mean(), 1), "", word)) == 1
    assert count((400, 9999, "", "Total")) == 1  # of more rows than the table has


def test_rows_are_no_summaries() -> None:
    assert count() == 0
    assert count((11, 440, "rock", "fir")) == 0
    assert count((11, "", "rock", "fir")) == 0
    assert count((99, 9999, "clay", "oak")) == 0
    assert count((11, 440, "clay", "mean")) == 0  # a class of this name
    assert count((round(A.sum(), 2), 440, "", "fir")) == 0


@pytest.mark.parametrize("names", [("faible", "forte", "moyenne"), ("alta", "baja", "media"), ("i", "k", "n"), "abmax"])
def test_classes_that_are_called_means_or_counts_are_no_summaries(names: Sequence[str]) -> None:
    """Four rows per class, sorted by class; an ascending identifier is beyond those above."""
    names = [*names[:2], "max"] if names == "abmax" else names
    for rows_per_class in (1, 2, 4):
        labels = np.repeat(np.array(names, object), rows_per_class)
        n = len(labels)
        numbers = np.random.default_rng(n).integers(1, 9, n)
        for x in (numbers, numbers / 2):
            assert count_summary_rows([np.arange(n).astype(str).astype(object), x.astype(float), labels]) == 0
            assert count_summary_rows([x.astype(float), labels]) == 0


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=12))
def test_rows_of_small_numbers_are_seldom_sums(rows: list[list[int]]) -> None:
    """Property: what is left out are rows that are sums of all columns."""
    table = np.array(rows, float)
    n = count_summary_rows(list(table.T))
    for row in range(len(rows) - n, len(rows)):
        np.testing.assert_array_equal(table[row], table[: len(rows) - n].sum(axis=0))


def test_new_rows_are_reported_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    lines = [",".join(map(str, row)) for row in [*ROWS, (round(A.sum(), 2), B.sum(), "", "Total")]]
    path.write_text("\n".join(["a,b,soil,kind", *lines, ""]))
    table, rows = read_table(path, ReadSpec(label_column="kind"))
    assert (len(rows.positions), rows.labels.tolist()) == (6, [row[3] for row in ROWS])
    (note,) = table.notes
    assert note.startswith("1 row at the end sums up the rows above, line 8 (74.35, 2647, Total): left out")
    table, rows = read_table(path, ReadSpec(label_column="kind", require_labels=False))
    assert len(rows.positions) == 7
    assert table.notes[0].startswith("warning: 1 row at the end sums up")
