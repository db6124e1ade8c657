"""Parsed numbers, dates, durations and missing values, compared with Python and the standard library."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protonet.tables.columns.dates import DATE_FORMATS, infer_date_format, parse_date, parse_dates
from protonet.tables.columns.encoding import infer_column_type
from protonet.tables.columns.ordered import Date, Numeric
from protonet.tables.columns.parsing import format_cells, is_missing, parse_numeric_column, replace_missing_cells
from protonet.tables.columns.quantities import (
    FORMATS_DECIMAL_POINT_FIRST,
    SEMICOLON_FILE_FORMATS,
    are_durations,
    infer_interval_format,
    infer_numeric_format,
    is_missing_word,
    parse_duration,
    parse_formatted_number,
    parse_interval,
)
from protonet.tables.columns.units import CURRENCIES, detect_unit, split_unit
from protonet.tables.delimited import MISSING_TEXTS

#: How people write a number with a unit, a currency or a sign of approximation, and the unit.
UNIT_PATTERNS = {
    **{
        f"{{}}{unit}": unit.lower().replace("²", "2")
        for unit in ("kg", "cm", "km/h", "m2", "m²", "KW", "mmHg", "g", "l/100km", "°C")
    },
    **{f"{{}} {unit}": unit.lower() for unit in ("kg", "mg/dL", "kWh/m2", "Stk", "zł")},
    **{"{} lbs": "lb", "{} years": "year", "{} year": "year", "{} kg.": "kg", "{}%": "%", "{} $": "$", "US${}": "us$"},
    **{"CHF {}": "chf", "{}EUR": "eur", "eur {}": "eur", "Rs. {}": "rs", "Rs.{}": "rs", "₹ {}": "₹", "CHF {}.-": "chf"},
    **{"{}y": "y", "{}d": "d", "< {}": "", "≥{}%": "%", "{}*": "", "{}[3]": "", "{} kg†": "kg"},
    **{"{}/-": "", "~{}": "", "≈ {}": "", "ca. {}": "", "approx. {} kg": "kg"},
}
#: Texts that have digits, and are no numbers: codes, ordinals, house numbers, versions, post codes.
CODES = st.one_of(
    st.from_regex(r"[A-Z]{1,2}\d{1,4}[A-Z]?", fullmatch=True),
    st.from_regex(r"[1-9]\d{0,2}[A-KM-Zabcefijknopqruvwxz]", fullmatch=True),
    st.integers(1, 99).map(lambda number: f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number % 10, 'th')}"),
    st.from_regex(r"v?\d{1,2}\.\d{1,2}(\.\d{1,2}|rc\d|b\d?)", fullmatch=True),
    st.from_regex(r"[A-Z]{1,3}[ -]\d{1,4}( ?[a-z]{1,2})?", fullmatch=True).filter(
        lambda text: not CURRENCIES.match(text)
    ),
    st.sampled_from(["T1 2m", "5e", "12 34 kg", "2x4", "3 of 5", "47° 12", "5'11", "St 5", "SW1 2PA", "1:2", "3~4"]),
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
DAY = timedelta(days=1)
EPOCH = datetime(1970, 1, 1)


def objects(*cells: str) -> np.ndarray:
    return np.array(cells, object)


class TestMissing:
    def test_numbers_and_dates_that_mean_missing_are_compared_by_value(self) -> None:
        missing = frozenset({"", "na", "-999", "0.1", "1900-01-01", "1900-01-02t03:00"})
        numbers = [-999, 3, 0]
        for dtype in (np.int16, np.int64, np.float32, np.float64):
            cells = np.array(numbers, dtype)
            assert is_missing(replace_missing_cells(cells, missing)).tolist() == [True, False, False], dtype
            assert cells.tolist() == numbers, dtype
        assert is_missing(replace_missing_cells(np.array([0.1, 0.2], np.float32), missing)).tolist() == [True, False]
        days = np.array(["1900-01-01", "1900-01-02T03:00", "1900-01-02", "NaT"], "datetime64[us]")
        assert is_missing(replace_missing_cells(days, missing)).tolist() == [True, True, False, True]
        for unchanged in (np.array([1, 2]), np.array([1.0, np.nan]), np.array(["2020-01-01"], "datetime64[us]")):
            assert replace_missing_cells(unchanged, missing) is unchanged

    def test_missing_values_in_any_letter_case(self) -> None:
        for text in MISSING_TEXTS:
            cells = objects(text, text.upper(), text.capitalize(), text.title())
            assert is_missing(replace_missing_cells(cells)).all(), text
        assert replace_missing_cells(objects("NA", "?", "x"), frozenset({"x"})).tolist() == ["NA", "?", ""]
        assert not is_missing(replace_missing_cells(objects("0", "no", "False", "n", "nanny", "--x", "1/a"))).any()
        for cell, missing in {"***": True, "n.a.": True, "": True, "\u200b": False, "\ufeff-": False}.items():
            assert is_missing_word(cell) == missing, cell  # invisible characters are not missing
        assert not is_missing(np.array([0, -1])).any()
        assert is_missing(np.array([0.0, np.nan, np.inf])).tolist() == [False, True, False]
        assert is_missing(np.array(["2020-01-01", "NaT"], "datetime64[us]")).tolist() == [False, True]

    def test_cells_as_text(self) -> None:
        cases: list[tuple[np.ndarray, list[str]]] = [
            (objects("a", "NA", ""), ["a", "NA", ""]),
            (np.array([1.0, np.nan, -2.0]), ["1", "", "-2"]),
            (np.array([1.5, np.nan], np.float32), ["1.5", ""]),
            (np.array([1.0, np.inf]), ["1", "inf"]),
            (np.array([1.0, 1.5]), ["1", "1.5"]),
            (np.array([2**60]), [str(2**60)]),
            (np.array([0, 255], np.uint8), ["0", "255"]),
            (np.array(["2020-01-02", "NaT"], "datetime64[D]"), ["2020-01-02", ""]),
        ]
        for cells, texts in cases:
            before = cells.copy()
            assert format_cells(cells).tolist() == texts, cells
            assert cells.tolist() == before.tolist() or cells.dtype.kind in "fM", cells  # the input is unchanged


class TestNumeric:
    @given(st.lists(FLOATS, min_size=1, max_size=20))
    def test_floats_round_trip(self, values: list[float]) -> None:
        for cells in (map(repr, values), (f"{value:.17g}" for value in values)):
            assert parse_numeric_column(objects(*cells), "plain").tolist() == values

    @given(st.integers(0, 10**6), st.integers(0, 99), st.sampled_from([*UNIT_PATTERNS]))
    def test_units_and_currencies(self, whole: int, cents: int, pattern: str) -> None:
        value = whole if "-" in pattern else whole + cents / 100
        for decimal, mark in (("point", "."), ("comma", ",")):
            cell = pattern.format(whole if "-" in pattern else f"{value:.2f}".replace(".", mark))
            assert parse_formatted_number(cell, decimal) == pytest.approx(value), cell
            assert split_unit(cell)[1] == UNIT_PATTERNS[pattern], cell

    @given(CODES)
    def test_codes_are_no_numbers(self, cell: str) -> None:
        for decimal in ("point", "comma"):
            assert math.isnan(parse_formatted_number(cell, decimal)), cell

    def test_formats(self) -> None:
        points: dict[str, float] = {"-$5": -5, "$-5": -5, "\N{MINUS SIGN}5": -5, "(5)": -5, "5¥": 5, "3‰": 3}
        points |= {"12'345": 12345, "20 °C": 20, "1e3": 1000, ".5": 0.5, "5.": 5, "1,23,456": 123456}
        points |= {"$ (1,234.5)": -1234.5, "($ 5.5)": -5.5, "(1,234.5) €": -1234.5, "$ 7 ": 7}
        points |= {"1.50-": -1.5, "1,234.5-": -1234.5}
        points |= {"$1.12M": 1.12e6, "€408K": 408e3, "($1.2M)": -1.2e6, "USD 45k": 45e3, "£2bn": 2e9, "1.5k": 1500}
        points |= {"1.2 million": 1.2e6, "300 thousand": 3e5, "$3.4 billion": 3.4e9, "12 Mio. €": 12e6, "3 lakh": 3e5}
        points |= {"6'2\"": 74, "5 ft 11 in": 71, "8/10": 8, "7.5 / 10": 7.5, "8/5": math.nan, "120/80": math.nan}
        texts = ["3-", "2+", "", "a", "1,23", "1.2.3", "2.688,64", "5 5 kg kg", "$", "12a", "--1"]
        points |= dict.fromkeys(texts, math.nan)
        commas: dict[str, float] = {"2.688,64-": -2688.64, "0,5": 0.5, "5 %": 5, "1,2 M€": 1.2e6}
        commas |= dict.fromkeys(["", "1.23", "1,2,3", "2,688.64", "%"], math.nan)
        for fmt, cells in (("point", points), ("comma", commas)):
            parsed = parse_numeric_column(objects(*cells), fmt)
            assert parsed.tolist() == pytest.approx(list(cells.values()), nan_ok=True, rel=0)

    def test_inferred_format(self) -> None:
        cases: list[tuple[str, str]] = [
            ("1 2.5 -3e4", "plain"),
            ("1,234.5 7 1,000", "point"),
            ("1,234 2,345", "point"),
            ("1.234,5 7", "comma"),
            ("01 02 10", ""),  # codes
            ("007 0008", "plain"),
            ("red green 1 2", ""),
        ]
        for text, fmt in cases:
            cells = text.split()
            assert infer_numeric_format(cells) == infer_numeric_format(cells[::-1]) == fmt, cells
        assert infer_numeric_format(["3 kg", "4 kg"]) == "point"
        assert infer_numeric_format(["3 kg", "4 lb"]) == "point"
        assert infer_numeric_format(["3 kg", "4 m"]) == ""
        assert infer_numeric_format(["8/10", "7/10"]) == "point"
        assert infer_numeric_format(["1/2", "1/3", "2/4"]) == ""
        assert detect_unit(["5", "6", "7 sq. miles", "8 square miles"]) == ""
        assert detect_unit(["$0 to $9", "$10 and up", "no answer"]) == "$"
        assert infer_numeric_format(["red", *map(str, range(30))]) == "plain"
        assert infer_numeric_format(["01", "02", "10"], allow_codes=True) == "plain"  # if the user names the type


class TestUnits:
    def test_conversion(self) -> None:
        cases = [("5 kg", "g", 5000), ("2 lbs", "oz", 32), ("1 mile", "m", 1609.344), ("98.6 °F", "°c", 37)]
        cases += [("3 GB", "mb", 3000), ("$1,200/yr", "$/month", 100), ("2 €/Tag", "€/d", 2), ("5 USD", "$", 5)]
        cases += [("5 kg", "m", math.nan), ("$5", "€", math.nan), ("$5/yr", "$", math.nan)]
        for cell, unit, value in cases:
            assert parse_formatted_number(cell, "point", unit) == pytest.approx(value, nan_ok=True), cell

    def test_terms(self) -> None:
        cases = [("5 lbs 2 oz", "oz", 82), ("10'20\"", "s", 620), ("5'11\"", "in", 71), ("12°30'36\"S", "°", -12.51)]
        cases += [("10'20\"", "in", math.nan), ("5 lbs 20 oz", "oz", math.nan), ("5 lbs 2 cm", "oz", math.nan)]
        for cell, unit, value in cases:
            assert parse_formatted_number(cell, "point", unit) == pytest.approx(value, nan_ok=True), cell
        minutes, feet = [f"{row}'{row + 5}\"" for row in range(5, 15)], [f"{row}'{row}\"" for row in range(4, 11)]
        assert (detect_unit(minutes), detect_unit(feet), detect_unit([*feet, "7'05\""])) == ("s", "in", "s")


class TestWordsAmongNumbers:
    def test_values_beyond_the_range_are_the_extremes_of_training(self) -> None:
        numbers = [*map(str, range(10, 20)), "TNTC", "< LOD", "n.d.", "lost"]
        column = infer_column_type(objects(*numbers)).column
        assert isinstance(column, Numeric)
        values = column.to_numeric(objects("too many to count", "BDL", "12", "lost", "nicht nachweisbar", "> max"))
        assert values.tolist() == pytest.approx([19, 10, 12, math.nan, 10, 19], nan_ok=True)
        assert column.missing_fraction == pytest.approx(2 / len(numbers))

    def test_flags_that_training_lacks(self) -> None:
        column = Numeric.fit(objects("1.5", "2.5", "4"))
        assert column.to_numeric(objects("2.5 H", "more than 3", "7ab", "A12", "1/2/3", "1e999x")).tolist() == (
            pytest.approx([2.5, 3, 7, math.nan, math.nan, math.nan], nan_ok=True)
        )
        metres = Numeric.fit(objects("1.5 m", "2.5 m", "4 m"), "point")
        assert np.isnan(metres.to_numeric(objects("3 kg", "5 widgets"))).all()

    def test_few_numbers_with_a_word_are_categories(self) -> None:
        for cells in (["2", "4", "6", "8", "other"], [*"12345", "a", "b", "c"]):
            column = infer_column_type(objects(*cells * 5)).column
            assert column is not None
            assert column.column_type == "category"


class TestIntervals:
    @given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(["-", " - ", " to ", "–", "..", " and "]))
    def test_midpoints(self, low: int, width: int, separator: str) -> None:
        high = low + width
        assert parse_interval(f"{low}{separator}{high}") == (low + high) / 2
        assert parse_interval(f"{low:,}{separator}{high:,}") == (low + high) / 2

    def test_formats_and_columns(self) -> None:
        cases = {"< 5": 5, "<=5": 5, "≥ 2.5": 2.5, "under 18": 18, "more than 10": 10}
        cases |= dict.fromkeys(
            ["65+", "65 and over", "65 or older", "65 plus", "$65 and up", "65 years and older", "65 und älter"], 65
        )
        cases |= {"über 64 Jahre": 64, "18 bis 29 Jahre": 23.5}
        cases |= {"$10K - $50K": 3e4, "$5-10K": 7500, "500-1K €": 750, "1-2 million": 1.5e6, "$1,000-2,000K": 1.5e6}
        cases |= {"10 to 20 years": 15} | dict.fromkeys(["", "to 5", "20 to 10", "a", "< a", "1 to 2 to 3"], math.nan)
        parsed = parse_numeric_column(objects(*cases), "interval")
        assert parsed.tolist() == pytest.approx(list(cases.values()), nan_ok=True)
        assert infer_interval_format(["0-10", "10-20", "20+"]) == "interval"
        assert not infer_interval_format(["1", "2", "3"])  # plain numbers
        assert not infer_interval_format(["0-10", "10-20"])  # too few
        assert not infer_interval_format(["0-10", "10-20", "old"])
        incomes = ["$0 to $9,999", "$10,000 to $24,999", "$25,000 to $49,999", "$50,000 and up", "Prefer not to answer"]
        assert infer_interval_format(incomes) == "interval"
        assert not infer_interval_format([*incomes, "Unsure"])
        assert not infer_interval_format([*incomes[:4], "$50,000 lb"])
        assert not infer_interval_format(["0-10 kg", "10-20 kg", "20-30 lb"])  # two units

    def test_decimal_marks(self) -> None:
        commas = {"0,5-1,5": 1.0, "1,500-2,500": 2.0, "1.000,5 - 2.000,5": 1500.5, "< 0,5": 0.5}
        for cells, order, midpoints in (
            (commas, FORMATS_DECIMAL_POINT_FIRST, commas.values()),
            (["1,000-1,500", "1,500-2,000", "2,000+"], FORMATS_DECIMAL_POINT_FIRST, [1250.0, 1750.0, 2000.0]),
            (["1,000-1,500", "1,500-2,000", "2,000+"], SEMICOLON_FILE_FORMATS, [1.25, 1.75, 2.0]),
            (["$1.5-2.5", "$2.5-3.5", "over $3.5"], SEMICOLON_FILE_FORMATS, [2.0, 3.0, 3.5]),
        ):
            column = infer_column_type(objects(*cells), format_order=order).column
            assert isinstance(column, Numeric)
            assert column.comparable_values(objects(*cells)).tolist() == pytest.approx([*midpoints])


class TestDates:
    def test_dates_round_trip_in_every_format(self) -> None:
        for cell_format in [cell_format for cell_format in DATE_FORMATS if cell_format != "iso"]:
            for index in range(12):
                moment = datetime(1990 + index, 1 + index % 12, 1 + index % 28, index % 24, 59 - index, index)
                cell = moment.strftime(cell_format)
                read = datetime.strptime(cell, cell_format)
                is_time = not any(part in cell_format for part in ("%d", "%m", "%b", "%B", "%Y", "%y"))
                epoch = datetime(1900, 1, 1) if is_time else EPOCH
                assert parse_date(cell, cell_format) == pytest.approx((read - epoch) / DAY, abs=1e-9), cell
                assert math.isnan(parse_date(cell + "?", cell_format)), cell_format
            dates = ((1971 + 3 * n, 1 + 5 * n % 12, 1 + 11 * n % 28, 7 * n % 24, 13 * n % 60) for n in range(10))
            cells = [datetime(*date).strftime(cell_format) for date in dates]
            inferred = infer_date_format(cells)  # another format with the same result is fine
            for cell in cells:
                assert parse_date(cell, inferred) == parse_date(cell, cell_format), cell_format

    @given(
        st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)),
        st.sampled_from(["", "Z", "+00:00", "+05:30", "-08:00", "+0200", "-0330"]),
        st.sampled_from(["T", " "]),
        st.sampled_from(["minutes", "seconds", "milliseconds", "microseconds"]),
    )
    def test_iso_agrees_with_the_standard_library(self, moment: datetime, zone: str, separator: str, unit: str) -> None:
        cell = moment.isoformat(separator, timespec=unit) + zone
        expected = datetime.fromisoformat(cell)
        offset = expected.utcoffset() or timedelta(0)
        days = (expected.replace(tzinfo=None) - offset - EPOCH) / DAY
        assert parse_date(cell, "iso") == pytest.approx(days, abs=1e-7, rel=1e-12)

    def test_names_of_months(self) -> None:
        cells = ["1. März 2020", "1er mars 2020", "March 1st, 2020", "Mar. 1, 2020", "1 MÄR 2020"]
        assert parse_dates(objects(*cells), "iso").tolist() == [(datetime(2020, 3, 1) - EPOCH) / DAY] * len(cells)
        assert infer_date_format(["20. Februar 2020", "3. Dezember 2021", "7. Okt. 2019"]) == "%d. %b %Y"
        assert infer_date_format(["décembre 2020", "août 2021", "May 2020"]) == "%b %Y"
        assert not infer_date_format(["Marker 3 2020", "Mayor 4 2020"])

    def test_arrays_and_other_text(self) -> None:
        for cell in ["2020", "2020-1-2", "2020-13-01", "2020-02-30", "2020-01-01T25:00", "20200101", "x"]:
            assert math.isnan(parse_date(cell, "iso")), cell
            assert math.isnan(parse_date(cell, "%d.%m.%Y")), cell
        assert np.isnan(parse_dates(objects("2020-01-02"), "%H:%M")).all()
        cells = objects("1970-01-03", "02.01.1970", "1970-01-01T12:00", "Jan 4, 1970", "01/02/1970")
        for date_format in ("iso", "%d.%m.%Y", "%Y/%m/%d"):  # the last date is ambiguous
            assert parse_dates(cells, date_format).tolist() == pytest.approx([2, 1, 0.5, 3, math.nan], nan_ok=True)
        cells = objects("2020-01-02", "", "1970-01-01T12:00")
        assert parse_dates(cells, "iso").tolist() == pytest.approx([18263, math.nan, 0.5], nan_ok=True)
        dates = np.array(["2020-01-02", "NaT", "1970-01-01T12:00"], "datetime64[us]")
        assert parse_dates(dates, "iso").tolist() == pytest.approx([18263, math.nan, 0.5], nan_ok=True)
        assert np.isnan(parse_dates(np.array([1.0, 2.0]), "iso")).all()

    def test_inferred_format(self) -> None:
        cases: list[tuple[list[str], str]] = [
            (["2020-01-02T10:00Z", "2021-12-31T11:00Z"], "iso"),
            (["3/4/2020", "5/6/2020"], "%m/%d/%Y"),  # the first of two that match
            (["3/4/2020", "25/6/2020"], "%d/%m/%Y"),
            (["Monday, January 5, 2015", "Tue, January 6, 2015"], "%b %d, %Y"),
            (["Thu 5/3/2020", "Sun 25/6/2020"], "%d/%m/%Y"),
            (["Di, 5.3.2020", "Donnerstag, 25.6.2020"], "%d.%m.%Y"),
            (["3/14/2020, 2:30 PM", "3/4/2020, 11:01am"], "%m/%d/%Y %I:%M %p"),
            (["14:30 Uhr", "00:10 Uhr"], "%H:%M"),
            (["08:15:52 12 Feb 2020", "23:01:02 1 Mar 2020"], "%d %b %Y %H:%M:%S"),
            (["Wed, 31 Jan 2024 12:23:00 GMT", "Thu, 1 Feb 2024 12:23:01 GMT"], "%d %b %Y %H:%M:%S"),
            (["Mon", "Friday"], ""),
            (["Moscow 2020-03", "Dortmund 2020-04", "Monitor 2020-05"], ""),  # no weekdays
            (["10:30 PM", "1:59 AM"], "%I:%M %p"),
            (["3/4/2020 10:30", "25/6/2020 23:01"], "%d/%m/%Y %H:%M"),
            (["05-Jan-24", "20240106", "07-Feb-24", "20240308"], "%Y%m%d or %d-%b-%y"),
            (["012345", "012399"], ""),  # codes
            (["20241301", "05-Jan-24"], ""),
            (["1", "2"], ""),
            (["May", "June"], ""),
            ([], ""),
        ]
        for cells, cell_format in cases:
            assert infer_date_format(cells) == cell_format, cells


def write_iso(seconds: int) -> str:
    hours, minutes, second = seconds // 3600, seconds // 60 % 60, seconds % 60
    return f"PT{hours}H{minutes}M{second}S"


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
    @given(
        st.lists(st.integers(0, 2 * 86400), min_size=3, max_size=20, unique=True),
        st.sampled_from([*DURATIONS]),
        st.sampled_from([*DURATIONS, "seconds", "text of seconds", "Parquet or Excel"]),
    )
    def test_fitted_columns_read_every_format(self, values: list[int], fitted: str, predicted: str) -> None:
        values = [*values, 37 * 3600 + 131]
        column = infer_column_type(objects(*map(DURATIONS[fitted], values))).column
        assert isinstance(column, Numeric)
        assert column.format == "duration"
        assert column.mean == pytest.approx(np.mean(values))
        others = {"seconds": np.array(values), "Parquet or Excel": np.array(values, float)}
        new = others.get(predicted, objects(*map(DURATIONS.get(predicted, str), values)))
        assert column.comparable_values(new).tolist() == values
        assert not column.is_invalid(new).any()
        plain = Numeric.fit(np.array(values, float))
        assert plain.comparable_values(new).tolist() == values

    def test_signs_fractions_and_other_text(self) -> None:
        cases = {"-0:05": -5, "-1 days +23:00:00": -3600, "-1 day, 23:00:00": -3600, "1:02.5": 62.5, "P1D": 86400}
        cases |= {"-P1DT2H": -93600, "3h54m": 14040, "3h05": 11100, "1h 05m 20s": 3920, "2 hours 5 minutes": 7500}
        cases |= {"45 min": 2700, "1d 2h": 93600, "12 s": 12, "1.5s": 1.5}
        for cell, seconds in cases.items():
            assert parse_duration(cell) == seconds, cell
        for cell in ("", "9", "1:60", "1:2", "1:60:00", "P", "PT", "a:10", "1:00:00:00", "1:00:1", "5m 3h", "h", "5e"):
            assert math.isnan(parse_duration(cell)), cell

    def test_durations_in_words(self) -> None:
        column = infer_column_type(objects("1h 05m", "45m", "2h", "3h54m")).column
        assert isinstance(column, Numeric)
        assert column.comparable_values(objects("45m", "1h 05m", "0:45:00")).tolist() == [2700, 3900, 2700]
        column = infer_column_type(objects("2 years", "1 year 2 months", "3 weeks", "4 days", "11 months")).column
        assert isinstance(column, Numeric)
        days = column.comparable_values(objects("3 weeks", "1 year", "12 months", "0.5 yr", "6 mos")) / 86_400
        assert days.tolist() == pytest.approx([21, 365.2425, 365.2425, 365.2425 / 2, 365.2425 / 2])
        plain = Numeric.fit(np.array([1.5, 2.5, 9.0]))  # perhaps hours
        assert plain.is_invalid(objects("1h 30m", "2d 1h")).all()

    def test_times_of_day_are_not_durations(self) -> None:
        cases: list[list[str]] = [["9:16:54", "23:59:59"], ["00:00", "24:00"], ["9:16", "10:30"], ["9:16 AM"]]
        for cells in cases:
            assert not are_durations(cells), cells
            assert are_durations(cells, allow_times_of_day=True) == ("AM" not in cells[0]), cells

    def test_times_of_day_read_durations_below_a_day(self) -> None:
        column = infer_column_type(objects("9:16:54", "10:20:30", "23:00:01")).column
        assert isinstance(column, Date)
        expected = column.encode(objects("9:16:54"))
        for cells in (objects("PT9H16M54S"), objects("556:54"), np.array([33414.0])):
            assert np.array_equal(column.encode(cells), expected)
