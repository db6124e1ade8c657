"""Numbers, dates and gaps: what cells say is what a reader of them, ours or another's, takes them for."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protonet.tables.columns.date import Date
from protonet.tables.columns.number import Number
from protonet.tables.columns.parsing import (
    DATE_FORMS,
    NUMBER_FORMS,
    are_durations,
    are_intervals,
    blank_missing,
    find_date_form,
    find_gaps,
    find_number_form,
    is_gap_word,
    map_distinct,
    parse_dates,
    parse_numbers,
    read_date,
    read_duration,
    read_interval,
    read_plain,
    read_written,
    write_cells,
)
from protonet.tables.columns.recognise import recognise
from protonet.tables.delimited import GAPS

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
DAY = timedelta(days=1)
EPOCH = datetime(1970, 1, 1)


def objects(*cells: str) -> np.ndarray:
    return np.array(cells, object)


@pytest.mark.parametrize(
    ("cell", "gap"), [("***", True), ("n.a.", True), ("", True), ("\u200b", False), ("\ufeff-", False)]
)
def test_invisible_characters_are_not_a_gap(cell: str, gap: bool) -> None:
    assert is_gap_word(cell) == gap


class TestGaps:
    def test_any_spelling_is_a_gap_and_nothing_else(self) -> None:
        for gap in GAPS:
            cells = objects(gap, gap.upper(), gap.capitalize(), gap.title())
            assert find_gaps(blank_missing(cells)).all(), gap
        assert blank_missing(objects("NA", "?", "x"), frozenset({"x"})).tolist() == ["NA", "?", ""]
        assert not find_gaps(blank_missing(objects("0", "no", "False", "n", "nanny", "--x", "1/a"))).any()
        assert not find_gaps(np.array([0, -1])).any()
        assert find_gaps(np.array([0.0, np.nan, np.inf])).tolist() == [False, True, False]
        assert find_gaps(np.array(["2020-01-01", "NaT"], "datetime64[us]")).tolist() == [False, True]

    @pytest.mark.parametrize(
        ("cells", "texts"),
        [
            (objects("a", "NA", ""), ["a", "NA", ""]),
            (np.array([1.0, np.nan, -2.0]), ["1", "", "-2"]),
            (np.array([1.5, np.nan], np.float32), ["1.5", ""]),
            (np.array([1.0, np.inf]), ["1", "inf"]),
            (np.array([1.0, 1.5]), ["1", "1.5"]),
            (np.array([2**60]), [str(2**60)]),
            (np.array([0, 255], np.uint8), ["0", "255"]),
            (np.array(["2020-01-02", "NaT"], "datetime64[D]"), ["2020-01-02", ""]),
        ],
    )
    def test_cells_as_text(self, cells: np.ndarray, texts: list[str]) -> None:
        before = cells.copy()
        assert write_cells(cells).tolist() == texts
        assert cells.tolist() == before.tolist() or cells.dtype.kind in "fM"  # what came is left as it was

    @given(st.lists(FLOATS | st.just(math.nan), min_size=1, max_size=5))
    def test_numbers_as_text_are_these_numbers(self, values: list[float]) -> None:
        texts = write_cells(np.array(values)).tolist()
        assert [float(text) if text else math.nan for text in texts] == pytest.approx(values, nan_ok=True, rel=0)


class TestNumbers:
    @given(st.lists(FLOATS, min_size=1, max_size=20))
    def test_numbers_are_read_as_they_were_written(self, values: list[float]) -> None:
        for cells in (map(repr, values), (f"{value:.17g}" for value in values)):
            assert parse_numbers(objects(*cells), "plain").tolist() == values

    @given(st.lists(FLOATS, min_size=1, max_size=9), st.sampled_from(["", "?", "red", "1_000"]))
    def test_what_is_no_number_is_nan_and_changes_no_other(self, values: list[float], odd: str) -> None:
        numbers = parse_numbers(objects(*map(repr, values), odd), "plain")
        assert numbers[:-1].tolist() == values
        assert math.isnan(numbers[-1])

    @given(st.floats(-1e12, 1e12).map(lambda value: round(value, 2)))
    def test_thousands_are_marked_as_python_marks_them(self, value: float) -> None:
        for pattern in ("{}", "${}", "{} %", "{}%", "€ {}", "{} km"):
            cell = pattern.format(f"{value:,.2f}")
            assert read_written(cell, "point") == value
            swapped = cell.translate(str.maketrans(",.", ".,"))
            assert read_written(swapped, "comma") == value
            spaced = cell.replace(",", "\N{NO-BREAK SPACE}")
            assert read_written(spaced, "point") == value

    @pytest.mark.parametrize(
        ("cell", "form", "number"),
        [
            ("2,688.64", "point", 2688.64),
            ("-$5", "point", -5),
            ("$-5", "point", -5),
            ("\N{MINUS SIGN}5", "point", -5),
            ("£1,000", "point", 1000),
            ("5¥", "point", 5),
            ("42 %", "point", 42),
            ("3‰", "point", 3),
            ("12'345", "point", 12345),
            ("1 234", "point", 1234),
            ("12.5 kg", "point", 12.5),
            ("20 °C", "point", 20),
            ("1e3", "point", 1000),
            (".5", "point", 0.5),
            ("5.", "point", 5),
            ("2.688,64", "comma", 2688.64),
            ("0,5", "comma", 0.5),
            ("5 %", "comma", 5),
            *(
                (cell, "point", math.nan)
                for cell in ("", "a", "1,23", "1.2.3", "2.688,64", "5 5 kg kg", "$", "12a", "--1")
            ),
            *((cell, "comma", math.nan) for cell in ("", "1.23", "1,2,3", "2,688.64", "%")),
        ],
    )
    def test_forms(self, cell: str, form: str, number: float) -> None:
        assert read_written(cell, form) == pytest.approx(number, nan_ok=True, rel=0)
        assert parse_numbers(objects(cell, cell), form).tolist() == pytest.approx([number] * 2, nan_ok=True, rel=0)

    @pytest.mark.parametrize(
        ("cell", "number"), [("1", 1), ("-1e3", -1000), ("inf", math.inf), ("1_0", math.nan), ("x", math.nan)]
    )
    def test_plain(self, cell: str, number: float) -> None:
        assert read_plain(cell) == pytest.approx(number, nan_ok=True)

    @pytest.mark.parametrize(
        ("cells", "form"),
        [
            (["1", "2.5", "-3e4"], "plain"),
            (["1,234.5", "7", "1,000"], "point"),
            (["$5", "$6.50"], "point"),
            (["4 %", "5%"], "point"),
            (["1,5", "2,25"], "comma"),
            (["1.234,5", "7"], "comma"),
            (["3 kg", "4 kg"], "point"),
            (["3 kg", "4 lb"], ""),
            (["01", "02", "10"], ""),
            (["007", "0008"], "plain"),
            (["0", "5", "10"], "plain"),
            (["a", "b"], ""),
            (["red", *map(str, range(30))], "plain"),
            (["red", "green", "1", "2"], ""),
            (["1,234", "2,345"], "point"),
        ],
    )
    def test_the_form_of_a_column(self, cells: list[str], form: str) -> None:
        assert find_number_form(cells) == form
        assert find_number_form(reversed(cells)) == form
        assert form in {"", *NUMBER_FORMS}
        assert find_number_form(["01", "02", "10"], codes=True) == "plain"  # where a person says so

    def test_numbers_need_no_parsing_and_dates_are_none(self) -> None:
        assert parse_numbers(np.array([1, 2], np.int8), "comma").tolist() == [1, 2]
        assert parse_numbers(np.array([1.5], np.float32), "plain").dtype == np.float64
        assert np.isnan(parse_numbers(np.array(["2020-01-01"], "datetime64[us]"), "plain")).all()

    def test_each_distinct_cell_is_parsed_once(self) -> None:
        asked: list[str] = []

        def parse(cell: str) -> float:
            asked.append(cell)
            return float(len(cell))

        assert map_distinct(parse, objects("a", "bb", "a", "bb", "")).tolist() == [1, 2, 1, 2, 0]
        assert asked == ["a", "bb", ""]


class TestIntervals:
    @given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(["-", " - ", " to ", "–", "..", " and "]))
    def test_the_middle(self, low: int, width: int, between: str) -> None:
        high = low + width
        assert read_interval(f"{low}{between}{high}") == (low + high) / 2
        assert read_interval(f"{low:,}{between}{high:,}") == (low + high) / 2

    @pytest.mark.parametrize(
        ("cell", "number"),
        [
            ("< 5", 5),
            ("<=5", 5),
            ("≥ 2.5", 2.5),
            ("under 18", 18),
            ("65+", 65),
            ("65 and over", 65),
            ("65 or more", 65),
            ("more than 10", 10),
            ("7", 7),
            ("10 to 20 years", 15),
            *((cell, math.nan) for cell in ("", "to 5", "20 to 10", "a", "< a", "1 to 2 to 3", "-")),
        ],
    )
    def test_forms(self, cell: str, number: float) -> None:
        assert read_interval(cell) == pytest.approx(number, nan_ok=True)
        assert parse_numbers(objects(cell), "interval").tolist() == pytest.approx([number], nan_ok=True)

    def test_a_column(self) -> None:
        assert are_intervals(["0-10", "10-20", "20+"])
        assert are_intervals(["< 5", "5 to 10", "11"])
        assert not are_intervals(["1", "2", "3"])  # plain numbers
        assert not are_intervals(["0-10", "10-20"])  # too few to tell
        assert not are_intervals(["0-10", "10-20", "old"])


class TestDates:
    @pytest.mark.parametrize("form", [form for form in DATE_FORMS if form != "iso"])
    def test_every_form_is_read_as_it_is_written(self, form: str) -> None:
        for number in range(40):
            moment = datetime(1990 + number, 1 + number % 12, 1 + number % 28, number % 24, 59 - number, number)
            cell = moment.strftime(form)
            read = datetime.strptime(cell, form)
            clock = not any(part in form for part in ("%d", "%m", "%b", "%B", "%Y", "%y"))
            since = datetime(1900, 1, 1) if clock else EPOCH
            assert read_date(cell, form) == pytest.approx((read - since) / DAY, abs=1e-9), cell
            assert math.isnan(read_date(cell + "?", form))
        moments = [datetime(1971 + 3 * n, 1 + 5 * n % 12, 1 + 11 * n % 28, 7 * n % 24, 13 * n % 60) for n in range(20)]
        cells = [moment.strftime(form) for moment in moments]
        found = find_date_form(cells)  # a form that reads the same is as good
        assert [read_date(cell, found) for cell in cells] == [read_date(cell, form) for cell in cells]

    @given(
        st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)),
        st.sampled_from(["", "Z", "+00:00", "+05:30", "-08:00", "+0200", "-0330"]),
        st.sampled_from(["T", " "]),
        st.sampled_from(["minutes", "seconds", "milliseconds", "microseconds"]),
    )
    def test_iso_is_as_the_standard_library_has_it(self, moment: datetime, zone: str, between: str, unit: str) -> None:
        cell = moment.isoformat(between, timespec=unit) + zone
        expected = datetime.fromisoformat(cell)
        offset = expected.utcoffset() or timedelta(0)
        days = (expected.replace(tzinfo=None) - offset - EPOCH) / DAY
        assert read_date(cell, "iso") == pytest.approx(days, abs=1e-7, rel=1e-12)

    @given(st.dates())
    def test_iso_days(self, day: object) -> None:
        assert read_date(str(day), "iso") == (datetime.fromisoformat(str(day)) - EPOCH).days

    @pytest.mark.parametrize(
        "cell",
        ["", "2020", "2020-1-2", "2020-13-01", "2020-02-30", "2020-01-01T25:00", "2020-01-01 10", "20200101", "x"],
    )
    def test_what_is_no_date(self, cell: str) -> None:
        assert math.isnan(read_date(cell, "iso"))
        assert math.isnan(read_date(cell, "%d.%m.%Y"))

    def test_arrays(self) -> None:
        cells = objects("2020-01-02", "", "1970-01-01T12:00")
        assert parse_dates(cells, "iso").tolist() == pytest.approx([18263, math.nan, 0.5], nan_ok=True)
        dates = np.array(["2020-01-02", "NaT", "1970-01-01T12:00"], "datetime64[us]")
        assert parse_dates(dates, "iso").tolist() == pytest.approx([18263, math.nan, 0.5], nan_ok=True)
        assert np.isnan(parse_dates(np.array([1.0, 2.0]), "iso")).all()

    @pytest.mark.parametrize(
        ("cells", "form"),
        [
            (["2020-01-02", "2021-12-31"], "iso"),
            (["2020-01-02T10:00Z", "2021-12-31T11:00Z"], "iso"),
            (["3/4/2020", "5/6/2020"], "%m/%d/%Y"),  # of two that fit, the first
            (["3/4/2020", "25/6/2020"], "%d/%m/%Y"),
            (["3/4/2020", "6/25/2020"], "%m/%d/%Y"),
            (["3-4-2020", "25-6-2020"], "%d-%m-%Y"),
            (["3.4.2020", "25.6.2020"], "%d.%m.%Y"),
            (["3.4.20", "25.6.21"], "%d.%m.%y"),
            (["3 Jan 2020", "5 May 2020"], "%d %b %Y"),
            (["January 3, 2020", "June 5, 2020"], "%B %d, %Y"),
            (["10:30", "23:59"], "%H:%M"),
            (["10:30 PM", "1:59 AM"], "%I:%M %p"),
            (["3/4/2020 10:30", "25/6/2020 23:01"], "%d/%m/%Y %H:%M"),
            (["05-Jan-24", "20240106", "07-Feb-24", "20240308"], "%Y%m%d or %d-%b-%y"),
            (["012345", "012399"], ""),  # codes
            (["20241301", "05-Jan-24"], ""),
            (["red", "green"], ""),
            (["1", "2"], ""),
            (["May", "June"], ""),
            ([], ""),
        ],
    )
    def test_the_form_of_a_column(self, cells: list[str], form: str) -> None:
        assert find_date_form(cells) == form


def write_iso(seconds: int) -> str:
    hours, minutes, rest = seconds // 3600, seconds // 60 % 60, seconds % 60
    return f"PT{hours}H{minutes}M{rest}S"


#: How programs write durations in text.
DURATIONS: dict[str, Callable[[int], str]] = {
    "h:mm:ss": lambda seconds: f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}",
    "hh:mm:ss": lambda seconds: f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}",
    "m:ss": lambda seconds: f"{seconds // 60}:{seconds % 60:02}",
    "ISO 8601": write_iso,
    "Python": lambda seconds: str(timedelta(seconds=seconds)),
    "pandas": lambda seconds: f"{seconds // 86400} days {timedelta(seconds=seconds % 86400)!s:0>8}",
}


class TestDurations:
    @given(st.integers(0, 10**7), st.sampled_from([*DURATIONS]))
    def test_every_form_is_seconds(self, seconds: int, form: str) -> None:
        assert read_duration(DURATIONS[form](seconds)) == seconds

    @given(
        st.lists(st.integers(0, 2 * 86400), min_size=3, max_size=20, unique=True),
        st.sampled_from([*DURATIONS]),
        st.sampled_from([*DURATIONS, "seconds", "text of seconds", "Parquet or Excel"]),
    )
    def test_a_column_fitted_to_one_form_reads_all(self, values: list[int], fitted: str, predicted: str) -> None:
        values = [*values, 37 * 3600 + 131]
        column = recognise(objects(*map(DURATIONS[fitted], values))).column
        assert isinstance(column, Number)
        assert column.form == "duration"
        assert column.mean == pytest.approx(np.mean(values))
        others = {"seconds": np.array(values), "Parquet or Excel": np.array(values, float)}
        new = others.get(predicted, objects(*map(DURATIONS.get(predicted, str), values)))
        assert column.fill(new).tolist() == values
        assert not column.find_strange(new).any()
        plain = Number.fit(np.array(values, float))
        assert plain.fill(new).tolist() == values

    @pytest.mark.parametrize("cells", [["9:16:54", "23:59:59"], ["00:00", "24:00"], ["9:16", "10:30"], ["9:16 AM"]])
    def test_times_of_day_are_none(self, cells: list[str]) -> None:
        assert not are_durations(cells)
        assert are_durations(cells, clocks=True) == ("AM" not in cells[0])

    def test_times_of_day_read_durations_below_a_day(self) -> None:
        column = recognise(objects("9:16:54", "10:20:30", "23:00:01")).column
        assert isinstance(column, Date)
        expected = column.encode(objects("9:16:54"))
        for cells in (objects("PT9H16M54S"), objects("556:54"), np.array([33414.0])):
            assert np.array_equal(column.encode(cells), expected)

    @pytest.mark.parametrize("cell", ["", "9", "1:60", "1:2", "1:60:00", "P", "PT", "a:10", "1:00:00:00", "1:00:1"])
    def test_what_is_none(self, cell: str) -> None:
        assert math.isnan(read_duration(cell))

    @pytest.mark.parametrize(
        ("cell", "seconds"),
        [("-0:05", -5), ("-1 days +23:00:00", -3600), ("-1 day, 23:00:00", -3600), ("1:02.5", 62.5), ("P1D", 86400)],
    )
    def test_signs_and_fractions(self, cell: str, seconds: float) -> None:
        assert read_duration(cell) == seconds
