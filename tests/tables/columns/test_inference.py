"""Inferred types of untidy columns, and types that users set."""

from __future__ import annotations

import re

import numpy as np
import pytest

from protonet.errors import InputError
from protonet.tables.columns import COLUMN_TYPES
from protonet.tables.columns.base import FittedColumn
from protonet.tables.columns.encoding import (
    TYPE_MAX_CATEGORY_LEVELS,
    fit_column_as,
    infer_column_type,
    is_free_text,
    predicts_labels,
)
from protonet.tables.columns.parsing import replace_missing_cells
from protonet.tables.features import fit_columns

RNG = np.random.default_rng(0)
N = 60


def objects(cells: object) -> np.ndarray:
    return replace_missing_cells(np.array(list(map(str, cells)), object))  # type: ignore[call-overload]


def cycle(*cells: str) -> np.ndarray:
    return replace_missing_cells(np.array([cells[index % len(cells)] for index in range(N)], object))


def with_missing(cells: np.ndarray, word: str = "NA") -> np.ndarray:
    return replace_missing_cells(np.where(np.arange(len(cells)) % 7 == 3, word, cells))


def infer(cells: np.ndarray) -> FittedColumn:
    """Infer and fit a column that must not be dropped."""
    column, reason, _ = infer_column_type(cells)
    assert column is not None, reason
    assert reason == ""
    return column


DAYS = np.datetime64("2019-03-01") + RNG.integers(0, 900, N)
PERSON_NAMES = [
    f"Braund, Mr. {first} {last}son" for first in ("Owen", "John", "Anna") for last in "abcdefghijklmnopqrst"
]


def mix_dates(is_iso: np.ndarray, cell_format: str) -> np.ndarray:
    """Write some dates in ISO 8601 and the others in another format."""
    return np.where(is_iso, objects(DAYS), objects(day.item().strftime(cell_format) for day in DAYS))


def test_inferred_types() -> None:
    cases: list[tuple[np.ndarray, str]] = [
        (RNG.normal(size=N), "number"),
        (RNG.integers(0, 99, N), "number"),
        (with_missing(objects(RNG.integers(0, 99, N))), "number, 15 % missing"),
        (cycle("0", "1"), "number"),
        (objects(f"${value:,.2f}" for value in RNG.uniform(500, 5000, N)), "number, as 1,234.5, in $"),
        (objects(f"{value} %" for value in range(N)), "number, as 1,234.5, in %"),
        (objects(f"{value}kg" for value in range(N)), "number, as 1,234.5, in kg"),
        (objects(f"~{value}" for value in range(N)), "number, as 1,234.5"),
        (objects(f"<0.{value}" if value < 9 else f"{value}.5" for value in range(N)), "number, as 1,234.5"),
        (objects(f"{value}.5-" if value % 3 else f"{value}.5*" for value in range(N)), "number, as 1,234.5"),
        (cycle("1-", "2", "2-", "3"), "category: 1-, 2, 2-, 3"),
        *(
            (objects(day.item().strftime(cell_format) for day in DAYS), f"date as {cell_format}, in week, year")
            for cell_format in ("%d. %b %Y", "%Y.%m.%d", "%d.%m.%Y", "%d/%m/%Y", "%b %d, %Y")
        ),
        (objects(day.item().strftime("%Y-%m") for day in DAYS), "date as %Y-%m, in year"),
        (objects(["7 lb", *(f"{value}kg" for value in range(N - 1))]), "number, as 1,234.5, in kg"),
        (objects(f"{value % 9}h {value % 7}m" for value in range(N)), "number, durations in seconds"),
        (objects(f"{value:.1f}".replace(".", ",") for value in RNG.normal(size=N)), "number, as 1.234,5"),
        (cycle("10 to 20", "20 to 30", "over 30"), "number, midpoints of intervals"),
        (cycle("0-9", "10-19", "20+", "NA"), "number, midpoints of intervals, 25 % missing"),
        (cycle("yes", "no"), "category: no, yes"),
        (cycle("no", "y" * 9000), f"category: no, {'y' * 50}"),
        (cycle("True", "False", ""), "category: missing, False, True"),
        (cycle("Adelie", "Gentoo", "Chinstrap", "?"), "category: missing, Adelie, Chinstrap, Gentoo"),
        (cycle("01", "02", "07"), "category: 01, 02, 07"),
        (objects(DAYS), "date, in week, year"),
        (with_missing(objects(DAYS)), "date, in week, year, 15 % missing"),
        (DAYS.astype("datetime64[us]"), "date, in week, year"),
        (mix_dates(np.arange(N) % 3 > 0, "%d.%m.%Y"), "date as iso or %d.%m.%Y, in week, year"),
        (mix_dates(np.arange(N) % 5 < 2, "%b %d, %Y %H:%M"), "date as %b %d, %Y %H:%M or iso, in week, year"),
        (objects(f"{'good ' * (1 + row % 8)}{'bad ' * (1 + row // 8)}end" for row in range(N)), "text: "),
        (objects(PERSON_NAMES), "text: "),
        (objects(f"does {row if row % 3 == 0 else row % 7} support the motion" for row in range(N)), "text: "),
        (cycle(*(f"number {n}" for n in range(6))), "category: number 0, number 1, number 2, number 3, ..."),
        (objects(f"{a} {b}xyz" for a in ("big", "red", "old", "new") for b in "abcdefghijklmno"), "text: "),
    ]
    for cells, summary in cases:
        column = infer(cells)
        assert column.summary().startswith(summary) if summary.endswith(": ") else column.summary() == summary, summary
        mixed = RNG.permutation(len(cells))
        again = infer(cells[mixed])
        assert again.summary() == column.summary(), summary  # independent of the row order
        np.testing.assert_allclose(np.abs(again.encode(cells)).sum(), np.abs(column.encode(cells)).sum(), rtol=1e-3)


def test_useless_columns_are_dropped() -> None:
    mixed = [f"{one:02}/{two:02}/2020" for one in range(1, 28) for two in range(1, 28) if min(one, two) <= 12]
    cases: list[tuple[np.ndarray, str]] = [
        (objects(["", "NA", "?"] * 9), "empty"),
        (np.full(9, np.nan), "empty"),
        (np.full(3, np.datetime64("NaT", "us")), "empty"),
        (objects(["x"] * 9), "constant"),
        (objects(["7"] * 9), "constant"),
        (np.full(9, 7), "constant"),
        (objects(f"A{index:05}" for index in RNG.permutation(N)), "a different code in each row"),
        (objects(f"{n:08x}7a" for n in RNG.integers(2**32, size=N)), "a different code in each row"),
        (objects(chr(0x4E00 + index) * 2 for index in range(N)), "text in which no two rows share a word"),
        (objects("the same words" + "!" * index for index in range(N)), "text with the same words in every row"),
        (objects(dict.fromkeys(mixed)), "dates in more than one order of day and month"),
    ]
    for cells, reason in cases:
        assert infer_column_type(cells)[:2] == (None, reason), reason


def test_few_rows() -> None:
    for cells, kind in (
        (["1", "2"], "number"),
        (["a", "b"], "category"),
        (["2020-01-01", "2020-01-03"], "date"),
        (["a 1", "b 2", "c 3"], "category"),
    ):
        column = infer(objects(cells))
        assert column.column_type == kind
        assert np.isfinite(column.encode(objects(cells))).all()
    assert infer_column_type(objects(["a"])).drop_reason == "constant"
    levels = [f"v{index}" for index in range(TYPE_MAX_CATEGORY_LEVELS + 1)]
    assert infer(objects(levels[:-1])).column_type == "category"
    assert infer_column_type(objects(levels)).column is None  # a name for each row


def test_few_rows_of_short_repeated_values_are_categories() -> None:
    cities = ["Paris", "Rome", "Oslo", "Bern", "Kyiv", "Riga", "Bonn", "Lima"]
    for distinct, n, kind in (
        (6, 10, "category"),
        (8, 10, "category"),
        (9, 10, "text"),
        (6, 7, "text"),
        (7, 9, "category"),
    ):
        cells = [cities[row] if row < len(cities) else "New York" for row in range(distinct)]
        assert infer(objects([*cells, *cells][:n])).column_type == kind, (distinct, n)
    notes = [f"a {word} note" for word in ("good", "bad", "long", "late", "new", "odd")]
    assert infer(objects([*notes, *notes[:4]])).column_type == "text"  # sentences


def test_free_text_of_few_rows() -> None:
    cases = [
        (["great film", "awful plot", "lovely acting"], False, True),
        (["great film", ""], False, True),
        (["great film", "", "", ""], False, False),  # it tells where there is a note
        (["great film", "awful plot", "great film"], False, False),
        (["great", "awful", "lovely"], True, True),
        (["great", "awful", "lovely"], False, False),
        (["yes", "no"], True, False),
        (["room 1", "room 2", "hall 3"], True, False),
    ]
    for cells, is_only_column, expected in cases:
        assert is_free_text(objects(cells), is_only_column=is_only_column) == expected, cells


class TestNamedTypes:
    def test_users_may_name_the_type(self) -> None:
        cases: list[tuple[str, np.ndarray]] = [
            ("number", cycle("01", "02")),
            ("number", cycle("$1,000.50", "$2")),
            ("number", cycle("0-9", "10-19", "20+")),
            ("number", np.array([1.0, np.nan, 3.0])),
            ("category", cycle("1", "2")),
            ("category", np.array([1.0, np.nan, 3.0])),
            ("category", DAYS.astype("datetime64[us]")),
            ("date", objects(DAYS)),
            ("date", DAYS.astype("datetime64[us]")),
            ("text", cycle("red house", "red tree")),
            ("text", np.array([11.5, 11.5, 3.25, np.nan])),
        ]
        for kind, cells in cases:
            column = fit_column_as("a", kind, cells).column
            assert column is not None, kind
            assert column.column_type == kind, kind
            assert np.isfinite(column.encode(cells)).all(), kind

    def test_wrong_types_are_refused(self) -> None:
        for kind in COLUMN_TYPES:
            with pytest.raises(InputError, match=rf"^`column_type` must name a column that holds a {kind}; got a,"):
                fit_column_as("a", kind, objects(["", "NA"]))
        cases: list[tuple[str, np.ndarray]] = [
            ("number", cycle("red", "green")),
            ("number", DAYS.astype("datetime64[us]")),
            ("date", cycle("red", "green")),
            ("date", np.array([1.0, 2.0])),
            ("text", objects(chr(0x4E00 + index) * 2 for index in range(9))),
        ]
        for kind, cells in cases:
            shown = re.escape(repr(str(cells.tolist()[0])[:50]))
            message = rf"^`column_type` must name a column that holds a {kind}; got price with cells such as {shown}\."
            with pytest.raises(InputError, match=message):
                fit_column_as("price", kind, cells)


def test_decimals_and_codes_with_shared_prefixes_are_no_identifiers() -> None:
    for cells in ([f"{n}.5#q{n}" for n in range(N)], [f"{'ABC'[n % 3]}-{n:03}" for n in range(N)]):
        assert infer(objects(cells)).column_type == "text"
    for cells in ([f"192.168.0.{n}" for n in range(N)], [f"P-{n:03}" for n in range(N)]):
        assert infer_column_type(objects(cells)).drop_reason == "a different code in each row"


def test_names_are_dropped_beside_other_columns() -> None:
    syllables = [a + b for a in "bdfklmnprst" for b in "aeiou"]
    names = [" ".join("".join(RNG.choice(syllables, 3)).capitalize() for _ in range(2)) for _ in range(N)]
    makes = [f"{('Audi', 'Fiat', 'Volvo')[row % 3]} {name}" for row, name in enumerate(names)]
    for cells, is_dropped in ((names, True), (makes, False), ([name.lower() for name in names], False)):
        alone = fit_columns({"a": objects(cells)}, {}, keep_hint=None)
        assert alone["a"].column is not None
        columns = {"a": objects(cells), "x": np.arange(float(N))}
        inferred = fit_columns(columns, {}, keep_hint=None)["a"]
        assert (inferred.column is None) == is_dropped
        assert is_dropped == inferred.drop_reason.startswith("names, which differ in nearly every row")
        assert fit_columns(columns, {"a": "text"}, keep_hint=None)["a"].column is not None


def test_names_that_tell_the_labels_are_kept() -> None:
    syllables = {"north": ["ska", "vik", "bjo", "sten"], "south": ["rio", "llo", "ena", "cha"]}
    labels = np.array([*syllables] * (N // 2))
    cells = [" ".join("".join(RNG.choice(syllables[label], 3)).capitalize() for _ in "ab") for label in labels]
    columns = {"a": objects(cells), "x": np.arange(float(N))}
    for order, is_dropped in ((labels, False), (RNG.permutation(labels), True), (np.full(N, "one"), True)):
        inferred = fit_columns(columns, {}, keep_hint=None, labels=order)["a"]
        assert (inferred.column is None) == is_dropped


def test_left_out_predictions_agree_with_a_loop() -> None:
    sizes = []
    for signal in np.linspace(0, 1.5, 30):
        labels = np.arange(N) % 3
        x = RNG.normal(size=(N, 5)) + signal * np.eye(3, 5)[labels]
        correct = 0
        for row in range(N):  # ridge regression of centred labels, without the row
            rest = np.arange(N) != row
            centred, targets = x[rest] - x[rest].mean(axis=0), np.eye(3)[labels[rest]]
            penalty = np.square(x - x.mean(axis=0)).sum() / N
            weights = np.linalg.solve(
                centred.T @ centred + penalty * np.eye(5), centred.T @ (targets - targets.mean(axis=0))
            )
            scores = (x[row] - x[rest].mean(axis=0)) @ weights + targets.mean(axis=0)
            correct += scores.argmax() == labels[row]
        deviations = (correct / N - 1 / 3) / np.sqrt(2 / 9 / N)
        if abs(deviations - 1) > 0.6:  # the loop scales and penalizes nearly alike
            sizes.append(predicts_labels(x, labels) == (deviations > 1))
    assert len(sizes) > 15
    assert all(sizes)
