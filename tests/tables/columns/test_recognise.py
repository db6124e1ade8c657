"""What the columns of tables as people have them are taken for, and what a person may say instead."""

from __future__ import annotations

import re

import numpy as np
import pytest

from protonet.errors import InputError
from protonet.tables.columns import NAMES
from protonet.tables.columns.kind import Column
from protonet.tables.columns.number import Number
from protonet.tables.columns.parsing import blank_missing
from protonet.tables.columns.recognise import RULES, fit_named, recognise
from protonet.tables.features import take_columns

RNG = np.random.default_rng(0)
N = 60


def objects(cells: object) -> np.ndarray:
    return blank_missing(np.array(list(map(str, cells)), object))  # type: ignore[call-overload]


def repeat(*cells: str) -> np.ndarray:
    return blank_missing(np.array([cells[number % len(cells)] for number in range(N)], object))


def gap(cells: np.ndarray, word: str = "NA") -> np.ndarray:
    return blank_missing(np.where(np.arange(len(cells)) % 7 == 3, word, cells))


def take(cells: np.ndarray) -> Column:
    """Return what a column is taken for, which must be something."""
    column, reason, _ = recognise(cells)
    assert column is not None, reason
    assert reason == ""
    return column


DAYS = np.datetime64("2019-03-01") + RNG.integers(0, 900, N)
NAMES_OF_PEOPLE = [
    f"Braund, Mr. {first} {last}"
    for first in ("Owen", "John", "Anna")
    for last in map("son".join, zip("abcdefghijklmnopqrst", "uvwxyzabcdefghijklmn", strict=True))
]


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (objects(RNG.normal(size=N)), "number"),
        (RNG.normal(size=N), "number"),
        (RNG.integers(0, 99, N), "number"),
        (gap(objects(RNG.integers(0, 99, N))), "number, 15 % missing"),
        (repeat("0", "1"), "number"),
        (objects(f"${value:,.2f}" for value in RNG.uniform(500, 5000, N)), "number, as 1,234.5"),
        (objects(f"{value} %" for value in range(N)), "number, as 1,234.5"),
        (objects(f"{value:.1f}".replace(".", ",") for value in RNG.normal(size=N)), "number, as 1.234,5"),
        (objects(f"{value} mpg" for value in range(N)), "number, as 1,234.5"),
        (repeat("10 to 20", "20 to 30", "over 30"), "number, the middle of intervals"),
        (repeat("0-9", "10-19", "20+", "NA"), "number, the middle of intervals, 25 % missing"),
        (repeat("yes", "no"), "category: no, yes"),
        (repeat("True", "False", ""), "category: missing, False, True"),
        (repeat("S", "C", "Q"), "category: C, Q, S"),
        (repeat("Adelie", "Gentoo", "Chinstrap", "?"), "category: missing, Adelie, Chinstrap, Gentoo"),
        (repeat("01", "02", "07"), "category: 01, 02, 07"),
        (repeat("x", ""), "category: missing, x"),
        (objects(DAYS), "date, in week, year"),
        (gap(objects(DAYS)), "date, in week, year, 15 % missing"),
        (DAYS.astype("datetime64[us]"), "date, in week, year"),
        (objects(day.item().strftime("%d.%m.%Y") for day in DAYS), "date as %d.%m.%Y, in week, year"),
        (objects(day.item().strftime("%d/%m/%Y") for day in DAYS), "date as %d/%m/%Y, in week, year"),
        (objects(day.item().strftime("%m/%d/%Y") for day in DAYS), "date as %m/%d/%Y, in week, year"),
        (objects(day.item().strftime("%b %d, %Y") for day in DAYS), "date as %b %d, %Y, in week, year"),
        (
            np.where(np.arange(N) % 3, objects(DAYS), objects(day.item().strftime("%d.%m.%Y") for day in DAYS)),
            "date as iso or %d.%m.%Y, in week, year",
        ),
        (
            np.where(
                np.arange(N) % 5 < 2, objects(DAYS), objects(day.item().strftime("%b %d, %Y %H:%M") for day in DAYS)
            ),
            "date as %b %d, %Y %H:%M or iso, in week, year",
        ),
        (objects(f"{'good ' * (1 + row % 8)}{'bad ' * (1 + row // 8)}end" for row in range(N)), "text: "),
        (objects(NAMES_OF_PEOPLE), "text: "),
        (
            objects(
                f"{a} {b}"
                for a in ("big", "red", "old", "new")
                for b in map("".join, zip("abcdefghijklmno", "xyzxyzxyzxyzxyz", strict=True))
            ),
            "text: ",
        ),
    ],
)
def test_what_columns_are_taken_for(cells: np.ndarray, told: str) -> None:
    column = take(cells)
    assert column.tell().startswith(told) if told.endswith(": ") else column.tell() == told
    mixed = RNG.permutation(len(cells))
    again = take(cells[mixed])
    assert again.tell() == column.tell()  # the order of the rows says nothing
    np.testing.assert_allclose(np.abs(again.encode(cells)).sum(), np.abs(column.encode(cells)).sum(), rtol=1e-3)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (objects(["", "NA", "?"] * 9), "empty"),
        (np.full(9, np.nan), "empty"),
        (np.full(3, np.datetime64("NaT", "us")), "empty"),
        (objects(["x"] * 9), "constant"),
        (objects(["7"] * 9), "constant"),
        (np.full(9, 7), "constant"),
        (objects(f"A{number:05}" for number in RNG.permutation(N)), "a name for each row"),
        (objects("".join(RNG.choice(list("0123456789abcdef"), 8)) + "7a" for _ in range(N)), "a name for each row"),
        (objects(chr(0x4E00 + number) * 2 for number in range(N)), "text of which no two rows share a word"),
        (objects("the same words" + "!" * number for number in range(N)), "text of the same words in every row"),
    ],
)
def test_what_is_of_no_use(cells: np.ndarray, reason: str) -> None:
    assert recognise(cells)[:2] == (None, reason)


def test_gaps_in_many_spellings() -> None:
    words = ["n.a.", "N/A", "unknown", "(none)", "not measured", "--", "***", "#DIV/0!", "Missing", "n.d.", "", "TBD"]
    gaps = np.arange(N) % 3 == 0
    for cells, told in (
        (objects(RNG.normal(size=N).round(2)), "number, 33 % missing"),
        (objects(DAYS), "date, in week, year, 33 % missing"),
        (repeat("0-9", "10-19", "20-29", "30+"), "number, the middle of intervals, 33 % missing"),
    ):
        column = take(np.where(gaps, repeat(*words, "--"), cells))
        assert column.tell() == told
        assert not column.find_strange(np.array(words, object)).any()
    column = take(repeat("yes", "no", "unknown", "n.a."))
    assert column.tell() == "category: missing, no, unknown, yes"  # which may tell something


def test_days_and_months_in_both_orders_are_no_dates() -> None:
    mixed = [f"{day:02}/{month:02}/2020" for month in range(1, 13) for day in range(1, 28)]
    mixed += [f"{month:02}/{day:02}/2020" for month in range(1, 13) for day in range(1, 28)]
    assert recognise(objects(dict.fromkeys(mixed))).reason == "dates in more than one order of day and month"


def test_few_rows() -> None:
    for cells, kind in (
        (["1", "2"], "number"),
        (["a", "b"], "category"),
        (["2020-01-01", "2020-01-03"], "date"),
        (["a 1", "b 2", "c 3"], "category"),
    ):
        column = take(objects(cells))
        assert column.kind == kind
        assert np.isfinite(column.encode(objects(cells))).all()
    assert recognise(objects(["a"])).reason == "constant"


def test_a_level_more_than_half_of_the_rows_is_text_or_an_identifier() -> None:
    few = objects(f"v{number}" for number in range(RULES.few))
    column = take(few)
    assert column.kind == "category"
    assert recognise(objects(f"v{number}" for number in range(RULES.few + 1))).column is None


def test_a_few_odd_cells_among_numbers_are_gaps_and_many_make_a_category() -> None:
    cells = objects(range(N))
    cells[5] = "broken"
    column = take(cells)
    assert column.kind == "number"
    assert column.find_strange(cells).nonzero()[0].tolist() == [5]
    column = take(repeat("1", "2", "red", "green"))
    assert column.kind == "category"


class TestNamed:
    @pytest.mark.parametrize(
        ("kind", "cells"),
        [
            ("number", repeat("1", "2")),
            ("number", repeat("01", "02")),
            ("number", repeat("$1,000.50", "$2")),
            ("number", repeat("0-9", "10-19", "20+")),
            ("number", np.array([1.0, np.nan, 3.0])),
            ("category", repeat("1", "2")),
            ("category", np.array([1.0, np.nan, 3.0])),
            ("category", DAYS.astype("datetime64[us]")),
            ("date", objects(DAYS)),
            ("date", repeat("1.2.2020", "3.4.2021")),
            ("date", DAYS.astype("datetime64[us]")),
            ("text", repeat("red house", "red tree")),
            ("text", np.array([11.5, 11.5, 3.25, np.nan])),
        ],
    )
    def test_a_person_may_say_what_it_is(self, kind: str, cells: np.ndarray) -> None:
        column = fit_named("a", kind, cells).column
        assert column is not None
        assert column.kind == kind
        assert np.isfinite(column.encode(cells)).all()

    @pytest.mark.parametrize("kind", NAMES)
    def test_an_empty_column_is_nothing(self, kind: str) -> None:
        with pytest.raises(InputError, match=rf"^`--column` must name a column that holds a {kind}; got a, which is"):
            fit_named("a", kind, objects(["", "NA"]))

    @pytest.mark.parametrize(
        ("kind", "cells"),
        [
            ("number", repeat("red", "green")),
            ("number", DAYS.astype("datetime64[us]")),
            ("date", repeat("red", "green")),
            ("date", np.array([1.0, 2.0])),
            ("text", objects(chr(0x4E00 + number) * 2 for number in range(9))),
        ],
    )
    def test_what_it_is_not(self, kind: str, cells: np.ndarray) -> None:
        shown = re.escape(repr(str(cells.tolist()[0])[:50]))
        message = rf"^`--column` must name a column that holds a {kind}; got price with cells such as {shown}\."
        with pytest.raises(InputError, match=message):
            fit_named("price", kind, cells)


def test_the_form_that_fits_most_cells_is_meant() -> None:
    german = np.array(["1,234", "1,76", "12,5", *(f"{number},125" for number in range(20))], object)
    found = take(german)
    assert isinstance(found, Number)
    assert found.form == "comma"
    assert found.fill(german[:2]).tolist() == [1.234, 1.76]
    days = np.array([*(f"{day:02}/03/2024" for day in range(1, 13)), "13/03/2024"], object)
    assert take(days).tell().startswith("date as %d/%m/%Y")


def test_a_decimal_comma_speaks_for_its_table() -> None:
    dotted, comma = np.array(["1.200", "950", "12.300"], object), np.array(["1,5", "2,25", "3,75"], object)
    for columns, firsts in (({"a": dotted, "b": comma}, (1200.0, 1.5)), ({"a": dotted}, (1.2,))):
        verdicts = take_columns(columns, {}, keep=None)
        for (name, cells), first in zip(columns.items(), firsts, strict=True):
            column = verdicts[name].column
            assert isinstance(column, Number)
            assert column.fill(cells)[0] == first
