"""All column types: features of known, missing and unknown cells, and round trips through model files."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protonet.tables.columns.base import FittedColumn
from protonet.tables.columns.category import (
    CATEGORY_MAX_LEVELS,
    MAX_LEVELS_ALWAYS_ENCODED,
    MIN_ROWS_PER_LEVEL,
    Category,
)
from protonet.tables.columns.encoding import Encoding, infer_column_type, make_encoding
from protonet.tables.columns.ordered import CYCLE_DAYS, Date, Numeric
from protonet.tables.columns.parsing import replace_missing_cells
from protonet.tables.columns.text import TEXT_FEATURES, Text
from tests.strategies import spoil

RNG = np.random.default_rng(0)
WORDS = ["red", "green", "blue", "dark", "light", "small", "large", "old", "new", "round"]


def objects(*cells: str) -> np.ndarray:
    return replace_missing_cells(np.array(cells, object))


def sentences(n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return objects(*(" ".join(rng.choice(WORDS, 4)) for _ in range(n)))


def dates(n: int) -> np.ndarray:
    return objects(*map(str, np.datetime64("2019-03-01T04:00:00") + RNG.integers(0, 10**8, n)))


VALUES = np.where(RNG.random(60) < 0.2, np.nan, 1e6 + 7 * RNG.standard_normal(60))
COLUMNS: dict[str, tuple[type[Any], np.ndarray]] = {
    "number": (Numeric, RNG.standard_normal(60) * 9),
    "number with gaps": (Numeric, VALUES),
    "category": (Category, RNG.choice(objects("a", "b", "", "d"), 60)),
    "two categories": (Category, RNG.choice(objects("yes", "no"), 60)),
    "many categories": (Category, RNG.choice(objects(*map(str, range(30))), 60)),
    "date": (Date, dates(60)),
    "date with gaps": (Date, np.where(np.arange(60) % 5 == 0, "NA", dates(60))),
    "text": (Text, sentences(60)),
    "heavy-tailed number": (Numeric, np.exp(3 * RNG.standard_normal(60)) * RNG.choice([-1, 1], 60)),
}
EVERY_TYPE = pytest.mark.parametrize(("column_class", "cells"), COLUMNS.values(), ids=COLUMNS)


@EVERY_TYPE
def test_features_and_values(column_class: type[Any], cells: np.ndarray) -> None:
    column: FittedColumn = column_class.fit(cells)
    x = column.encode(cells)
    assert x.dtype == np.float32
    assert x.shape == (60, len(set(column.feature_name_suffixes)))
    assert sum(column.feature_block_sizes) == len(column.feature_name_suffixes)
    assert not column.is_invalid(cells).any()
    assert column.is_rare_or_unknown(cells).mean() == pytest.approx(column.rare_fraction)
    assert column.summary().startswith(column.column_type)
    assert column.is_fully_numeric == (column_class is Numeric and len(column.feature_name_suffixes) == 1)
    # The linear time of dates, without their cycles on circles.
    variance = x[:, : 1 if column_class is Date else None].var(axis=0).sum()
    assert 0.2 < variance < 2.5
    rows = slice(59, None, -2)
    np.testing.assert_allclose(column.encode(cells[rows]), x[rows], atol=1e-6)  # rows are encoded independently
    np.testing.assert_array_equal(column.encode(column.preparse(cells)), x)
    for odd in (objects("", "NA", "?"), objects("\N{SNOWMAN}", "never seen", "1e999x"), np.full(3, np.nan), cells[:0]):
        assert np.isfinite(column.encode(odd)).all()
    numeric, filled = column.to_numeric(cells), column.comparable_values(cells)
    assert (numeric is None) == (filled.dtype.kind == "U") == (column_class in {Category, Text})
    if numeric is not None:  # ordered: only missing values are filled in
        present = ~np.isnan(numeric)
        np.testing.assert_array_equal(column.is_uninformative(cells), ~present)
        np.testing.assert_array_equal(filled[present], numeric[present])
        assert not np.isnan(filled).any()
        assert column.format_value(numeric[present][0])


@EVERY_TYPE
def test_round_trip(column_class: type[Any], cells: np.ndarray) -> None:
    encoding = Encoding((column_class.fit(cells), Numeric.fit(VALUES)))
    described, tensors = encoding.describe_columns()
    assert json.loads(json.dumps(described, allow_nan=False)) == described
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    again = Encoding.restore(json.loads(json.dumps(described)), tensors)
    assert np.array_equal(again.encode([cells, VALUES]), encoding.encode([cells, VALUES]))
    assert [column.summary() for column in again.columns] == [column.summary() for column in encoding.columns]
    assert again.describe_columns()[0] == described


def test_cells_and_their_text_are_encoded_alike() -> None:
    numeric, texts = np.array([1.0, 2.0, 2.0, np.nan, 1.0]), objects("1", "2", "2", "", "1")
    cells = COLUMNS["date with gaps"][1]
    dates64 = np.array(["NaT" if cell == "NA" else cell for cell in cells], "datetime64[us]")
    for column_class, values, written in ((Category, numeric, texts), (Date, dates64, cells)):
        assert np.array_equal(column_class.fit(values).encode(written), column_class.fit(written).encode(values))
    assert Category.fit(texts).summary() == "category: missing, 1, 2"
    assert Category.fit(objects("no", "yes", "yes")).feature_name_suffixes == ("=yes",)
    column = Date.fit(cells)
    assert column.feature_name_suffixes[-1] == " missing"
    assert column.summary().endswith("20 % missing")
    assert column.is_invalid(objects("2020-01-01", "red", "")).tolist() == [False, True, False]


class TestNumeric:
    def test_numbers_over_many_orders_of_magnitude_have_a_logarithmic_scale(self) -> None:
        cells = np.where(RNG.random(60) < 0.2, 0, np.exp(3 * RNG.standard_normal(60)) * RNG.choice([-1, 1], 60))
        column = Numeric.fit(cells)
        sizes = np.abs(cells)
        logs = np.sign(cells) * np.log(1 + sizes / np.quantile(sizes[sizes > 0], 0.1))
        np.testing.assert_allclose(column.encode(cells)[:, 0], (logs - logs.mean()) / logs.std(), atol=1e-5)
        np.testing.assert_allclose(Numeric.fit(cells * 1e6).encode(cells * 1e6), column.encode(cells), atol=1e-5)
        assert np.isinf(column.encode(np.array([1e39]))).all()  # callers refuse numbers beyond float32
        assert not Numeric.fit(np.arange(60.0) ** 2).log_unit
        assert not Numeric.fit(np.eye(60)[0]).log_unit  # a single value other than 0
        tiny = np.where(np.arange(60) < 20, 1e-310, cells)
        assert np.isfinite(Numeric.fit(tiny).encode(tiny)).all()
        assert make_encoding([column]).summary is None  # numbers without gaps keep their scale

    def test_oracle(self) -> None:
        column = Numeric.fit(VALUES)
        missing = np.isnan(VALUES)
        filled = np.where(missing, np.median(VALUES[~missing]), VALUES)
        x = column.encode(VALUES)
        np.testing.assert_allclose(x[:, 0], (filled - filled.mean()) / filled.std(), atol=1e-5)
        np.testing.assert_allclose(x[:, 1], (missing - missing.mean()) / missing.std(), atol=1e-6)
        assert column.feature_name_suffixes == ("", " missing")
        assert np.array_equal(column.comparable_values(VALUES), filled)
        assert not np.isnan(column.comparable_values(VALUES.astype(np.float32))).any()
        assert column.comparable_values(VALUES.astype(np.float32)).dtype == np.float32


class TestCategory:
    @given(st.lists(st.sampled_from(["", "a", "b", "c", "d e", "?"]), min_size=2, max_size=60))
    def test_mean_and_unknown_categories(self, cells: list[str]) -> None:
        column = Category.fit(objects(*cells))
        x = column.encode(objects(*cells))
        np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-5)
        assert not column.encode(objects("never seen")).any()  # the mean of all rows
        equal = [cells.index(cell) for cell in cells]
        assert np.array_equal(x, x[equal])

    def test_rare_levels_of_many_have_no_feature(self) -> None:
        n_levels, n_rows = MAX_LEVELS_ALWAYS_ENCODED + 1, MIN_ROWS_PER_LEVEL
        often = [f"often {n}" for n in range(n_levels)] * n_rows
        cells = objects(*often, "once")
        column = Category.fit(cells)
        assert "once" not in column.levels
        assert set(column.levels) == set(often)
        rare, new = column.encode(objects("once", "never seen"))
        assert np.array_equal(rare, new)
        np.testing.assert_allclose(column.encode(cells).mean(axis=0), 0, atol=1e-6)  # rare ones among them

    def test_another_spelling_is_the_same_level(self) -> None:
        column = Category.fit(objects(*["Male", "female", "1"] * 4))
        expected = column.encode(objects("Male", "female", "1"))
        assert np.array_equal(column.encode(objects("MALE", "Female", "1.0")), expected)
        both = Category.fit(objects(*["cat", "CAT", "Cat"] * 4))
        assert len({*map(tuple, both.encode(objects("cat", "CAT", "Cat")).tolist())}) == 3

    def test_levels_are_limited(self) -> None:
        names = [f"c{n:04}" for n in range(CATEGORY_MAX_LEVELS + 50)]
        column = Category.fit(objects(*[*names, *names[:60]] * MIN_ROWS_PER_LEVEL))
        assert len(column.levels) == CATEGORY_MAX_LEVELS
        assert set(column.levels) >= set(names[:60])  # the most frequent


class TestDate:
    def test_oracle(self) -> None:
        cells = COLUMNS["date"][1]
        column = Date.fit(cells)
        seconds = np.array([np.datetime64(cell) for cell in cells], "datetime64[s]").astype(np.int64)
        x = column.encode(cells)
        np.testing.assert_allclose(x[:, 0], (seconds - seconds.mean()) / seconds.std(), atol=1e-5)
        assert column.cycles == tuple(CYCLE_DAYS)
        circles = x[:, 1:].reshape(60, 3, 2)
        radii = (circles**2).sum(axis=2)
        np.testing.assert_allclose(radii, radii[:1].repeat(60, 0), rtol=1e-4)
        early = (seconds % 86400 < 3600) | (seconds % 86400 > 82800)  # near midnight, with a large cosine of the day
        assert early.any()
        assert circles[early, 0, 0].min() > circles[~early, 0, 0].max() - 1e-3

    def test_days_without_times_have_no_hour_and_months_no_weekday(self) -> None:
        days = objects(*map(str, np.datetime64("2020-01-01") + np.arange(0, 800, 3)))
        assert Date.fit(days).cycles == ("week", "year")
        months = objects(*(f"{2000 + n // 12}-{n % 12 + 1:02}-01" for n in range(60)))
        assert Date.fit(months).cycles == ("year",)
        assert Date.fit(objects("2020-01-01", "2020-01-02")).cycles == ()


class TestText:
    def test_unknown_words_are_encoded_as_blank(self) -> None:
        column = Text.fit(sentences(40))
        x = column.encode(objects("", "NA", "zzz qqq", "\N{SNOWMAN}" * 9, "x" * 10_000))
        assert np.isfinite(x).all()
        assert (x[1:] == x[0]).all()  # none has a known n-gram
        known = column.encode(sentences(40))
        assert 0 < known.shape[1] <= TEXT_FEATURES.max_components
        assert known.mean(axis=0) == pytest.approx(0, abs=1e-5)
        alone = objects("abc", "xyz", "123")  # with nothing in common
        assert Text.fit(alone).encode(alone).shape == (3, 0)


class TestEncoding:
    def test_complete_floats_are_unchanged(self) -> None:
        cells: list[np.ndarray] = [np.array([1, 2], np.float16), np.array([0.5, 7], np.float32)]
        encoding = Encoding(tuple(map(Numeric.fit, cells)))
        assert encoding.is_fully_numeric
        assert encoding.encode(cells).tolist() == [[1, 0.5], [2, 7]]
        assert encoding.encode(cells).dtype == np.float32
        assert encoding.encode([cells[0], np.array([0.5, 7e9])]).dtype == np.float64
        assert encoding.n_features_per_column == [1, 1]
        assert encoding.encode([cells[0], np.array([np.nan, 7])])[0, 1] == np.float32(3.75)  # the median


ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, -1, 0, 1, 2**60, 0.0, -0.5, 1.5, 1e308, math.nan, math.inf]),
    st.sampled_from(["", "iso", "plain", "category", [], {}, [1], ["a", "a"]]),
)


@cache
def describe_all() -> tuple[list[dict[str, object]], dict[str, torch.Tensor]]:
    return Encoding(tuple(column_class.fit(cells) for column_class, cells in COLUMNS.values())).describe_columns()


@given(data=st.data())
def test_corrupt_descriptions_are_refused_or_work(data: st.DataObject) -> None:
    described, tensors = copy.deepcopy(describe_all()[0]), describe_all()[1]
    spoil(data, described, ODD)
    try:
        encoding = Encoding.restore(described, tensors)
    except ValueError:
        return
    rows = [objects("a", "", "2020-01-01"), np.array([1.0, math.nan, 3.0])]
    for column in encoding.columns:
        for cells in rows:
            assert column.encode(cells).shape == (3, len(column.feature_name_suffixes))
        assert column.summary()
    assert len(encoding.n_features_per_column) == len(encoding.columns)


def test_invalid_descriptions_and_tensors_are_refused() -> None:
    nothing: list[Any] = [None, [], {}, 3, [None], [{}], [{"kind": "colour"}], [{"kind": 3}]]
    for described in nothing:
        with pytest.raises(ValueError, match=r"."):
            Encoding.restore(described, {})
    cases: list[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = [
        lambda tensors: tensors | {"9.basis": torch.zeros(1)},
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "0.mean"},
        lambda tensors: tensors | {"0.mean": tensors["0.mean"][1:]},
        lambda tensors: tensors | {"0.scales": tensors["0.scales"] / 0},
        lambda tensors: tensors | {"0.basis": tensors["0.basis"].double()},
    ]
    for change in cases:
        described, tensors = Encoding((Text.fit(sentences(20)),)).describe_columns()
        with pytest.raises(ValueError, match="tensor"):
            Encoding.restore(described, change(tensors))


class TestShortTimes:
    def test_times_below_an_hour_are_read_in_all_forms(self) -> None:
        seconds = np.arange(12) * 290 + 27
        full = objects(*(f"0:{value // 60:02}:{value % 60:02}" for value in seconds.tolist()))
        column = infer_column_type(full).column
        assert isinstance(column, Date)
        expected = column.encode(full)
        short = objects(*(f"{value // 60}:{value % 60:02}" for value in seconds.tolist()))
        for cells in (short, objects(*map(str, seconds)), seconds, seconds.astype(float)):
            np.testing.assert_allclose(column.encode(cells), expected, atol=1e-6)
            assert not column.is_invalid(cells).any()
            for row in range(len(cells)):  # alone as among others
                np.testing.assert_allclose(column.encode(cells[row : row + 1]), expected[row : row + 1], atol=1e-6)

    def test_other_times_of_a_day_may_be_in_any_form(self) -> None:
        day = objects(*(f"{hour}:10:{hour + 10}" for hour in range(24)))
        dates = objects(*(f"{hour + 1}/28/2020 {hour}:10" for hour in range(12)))
        for fitted, equal, invalid in (
            (day, ("2:27", "2:27:00", "02:27 am"), ["noon", "3/28/2020"]),
            (
                np.datetime64(0, "us") + np.arange(24) * np.timedelta64(3599, "s"),
                ("2:27", "02:27:00"),
                ["noon", "3/28/2020"],
            ),
            (dates, ("3/28/2020 14:10", "3/28/2020, 2:10 PM", "2020-03-28 14:10:00", "28 Mar 2020 14:10"), ["14:10"]),
            (dates, ("3/28/2020", "28.3.2020 0:00", "3/28/2020 00:00:00"), ["28/3/2020 14:10", "3/28/2020 28:10"]),
        ):
            column = infer_column_type(fitted).column
            assert isinstance(column, Date)
            days = column.to_numeric(objects(*equal))
            np.testing.assert_allclose(days, [days[0]] * len(equal), atol=1e-9)
            assert not column.is_invalid(objects(*equal)).any()
            assert column.is_invalid(objects(*invalid)).all()


class TestSpellings:
    @pytest.mark.parametrize("fitted", [("TRUE", "FALSE"), ("yes", "no"), ("1", "0")])
    def test_yes_and_no_in_other_spellings(self, fitted: tuple[str, str]) -> None:
        for new in (("TRUE", "FALSE"), ("yes", "no"), ("Y", "N"), ("1", "0"), ("t", "f"), ("WAHR", "FALSCH")):
            cells, other = (objects(*(words[at] for at in (0, 1, 1, 0, 1))) for words in (fitted, new))
            column = infer_column_type(cells).column
            assert column is not None
            assert np.array_equal(column.encode(other), column.encode(cells)), new
            assert not column.is_invalid(other).any(), new
            assert bool(column.describe_other_spelling(other)) == (fitted != new), new
        for n_ones, n_zeros, n_missing in ((2, 2, 1), (3, 1, 3), (1, 4, 9)):  # the median of the first is 0.5
            present = objects(*["1"] * n_ones, *["0"] * n_zeros, *[""] * n_missing)
            column = Numeric.fit(present)
            spelled = np.where(present == "1", "yes", np.where(present == "0", "no", "")).astype(object)
            assert np.array_equal(column.encode(spelled), column.encode(present)), n_ones
        for values in ([0.0, 1, 0.5, math.nan], [0.0, 0.25, 1, math.nan]):
            assert Numeric.fit(np.array(values)).is_invalid(objects("yes")).all(), values
        assert Numeric.fit(np.array([0.0, 1, 0.5])).is_invalid(objects("yes")).all()

    def test_codes_without_their_zeros(self) -> None:
        column = Category.fit(objects("01067", "01067", "10115", "00204", "00204"))
        expected = column.encode(objects("01067", "00204", "10115"))
        for cells in (objects("1067", "204", "10115"), np.array([1067, 204, 10115]), np.array([1067.0, 204, 10115])):
            assert np.array_equal(column.encode(cells), expected)
            assert column.describe_other_spelling(cells) == "'1067' is '01067'"
        assert column.is_invalid(objects("067", "1067")).tolist() == [True, False]
        column = Category.fit(objects("1067", "1067", "10115", "204", "204"))  # in training they were lost
        cells = objects("01067", "00204", "10115")
        assert np.array_equal(column.encode(cells), column.encode(objects("1067", "204", "10115")))
        assert column.describe_other_spelling(cells) == "'01067' is '1067'"
        assert column.is_invalid(objects("010670")).all()

    def test_ambiguous_spellings_are_unknown(self) -> None:
        cases = [(("01", "1"), "001"), (("yes", "no", "maybe"), "1"), (("a", "b"), "1")]
        for levels, cell in cases:
            column = Category.fit(objects(*levels, *levels))
            assert column.is_invalid(objects(cell)).all(), levels
            assert not column.describe_other_spelling(objects(cell)), levels
