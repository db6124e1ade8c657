"""Every column type: features of known, missing and unknown cells, and round trips through descriptions."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protonet.tables.columns.base import FittedColumn
from protonet.tables.columns.category import CATEGORIES, Category
from protonet.tables.columns.date import CYCLES, Date
from protonet.tables.columns.encoding import COLUMN_CLASSES, Encoding
from protonet.tables.columns.inference import infer_column_type
from protonet.tables.columns.numeric import Numeric
from protonet.tables.columns.parsing import blank_missing
from protonet.tables.columns.text import TEXT_RULES, Text, count_grams
from tests.strategies import spoil

RNG = np.random.default_rng(0)
WORDS = ["red", "green", "blue", "dark", "light", "small", "large", "old", "new", "round"]


def objects(*cells: str) -> np.ndarray:
    return blank_missing(np.array(cells, object))


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
}
EVERY_TYPE = pytest.mark.parametrize(("column_class", "cells"), COLUMNS.values(), ids=COLUMNS)


@EVERY_TYPE
def test_protocol(column_class: type[Any], cells: np.ndarray) -> None:
    column: FittedColumn = column_class.fit(cells)
    assert COLUMN_CLASSES[column.kind] is column_class
    x = column.encode(cells)
    assert x.shape == (60, len(column.feature_suffixes))
    assert x.dtype == np.float32
    assert np.isfinite(x).all()
    assert len(set(column.feature_suffixes)) == len(column.feature_suffixes)
    assert not column.is_invalid(cells).any()
    assert column.summary().startswith(column.kind)
    if column_class is Numeric:
        np.testing.assert_allclose(x.var(axis=0), 1, atol=1e-3)
    assert (
        column_class is Numeric or 0.2 < x[:, : 1 if column_class is Date else None].var(axis=0).sum() < 2.5
    )  # cycles lie on circles
    for rows in (slice(0, 1), slice(7, 20), slice(59, None, -1)):
        np.testing.assert_allclose(column.encode(cells[rows]), x[rows], atol=1e-6)  # rows are encoded independently
    assert column.encode(cells[:0]).shape == (0, len(column.feature_suffixes))


@EVERY_TYPE
def test_values_of_cells(column_class: type[Any], cells: np.ndarray) -> None:
    column: FittedColumn = column_class.fit(cells)
    numeric, filled = column.to_numeric(cells), column.comparable_values(cells)
    assert (numeric is None) == (filled.dtype.kind == "U") == (column_class in {Category, Text})
    if numeric is not None:  # ordered: only missing values are filled in
        np.testing.assert_array_equal(filled[~np.isnan(numeric)], numeric[~np.isnan(numeric)])
        assert not np.isnan(filled).any()
        assert column.format_value(numeric[~np.isnan(numeric)][0])
    assert column.is_rare_or_unknown(cells).mean() == pytest.approx(column.rare_fraction)
    np.testing.assert_array_equal(column.encode(column.preparse(cells)), column.encode(cells))
    assert sum(column.block_sizes) == len(column.feature_suffixes)
    assert column.plain == (column_class is Numeric and len(column.feature_suffixes) == 1)


@EVERY_TYPE
def test_round_trip(column_class: type[Any], cells: np.ndarray) -> None:
    encoding = Encoding((column_class.fit(cells), Numeric.fit(VALUES)))
    described, tensors = encoding.describe()
    assert json.loads(json.dumps(described, allow_nan=False)) == described
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    again = Encoding.restore(json.loads(json.dumps(described)), tensors)
    assert np.array_equal(again.encode([cells, VALUES]), encoding.encode([cells, VALUES]))
    assert [column.summary() for column in again.columns] == [column.summary() for column in encoding.columns]
    assert again.describe()[0] == described


@EVERY_TYPE
def test_missing_and_unknown_cells_are_encoded(column_class: type[Any], cells: np.ndarray) -> None:
    column = column_class.fit(cells)
    for odd in (objects("", "NA", "?"), objects("\N{SNOWMAN}", "never seen", "1e999x"), np.full(3, np.nan)):
        assert np.isfinite(column.encode(odd)).all()


def test_cells_and_their_text_are_encoded_alike() -> None:
    numeric, texts = np.array([1.0, 2.0, 2.0, np.nan, 1.0]), objects("1", "2", "2", "", "1")
    cells = COLUMNS["date with gaps"][1]
    dates64 = np.array(["NaT" if cell == "NA" else cell for cell in cells], "datetime64[us]")
    for column_class, values, written in ((Category, numeric, texts), (Date, dates64, cells)):
        assert np.array_equal(column_class.fit(values).encode(written), column_class.fit(written).encode(values))
    assert Category.fit(texts).summary() == "category: missing, 1, 2"
    column = Date.fit(cells)
    assert column.feature_suffixes[-1] == " missing"
    assert column.summary().endswith("20 % missing")
    assert column.is_invalid(objects("2020-01-01", "red", "")).tolist() == [False, True, False]


class TestNumeric:
    def test_oracle(self) -> None:
        column = Numeric.fit(VALUES)
        missing = np.isnan(VALUES)
        filled = np.where(missing, np.median(VALUES[~missing]), VALUES)
        x = column.encode(VALUES)
        np.testing.assert_allclose(x[:, 0], (filled - filled.mean()) / filled.std(), atol=1e-5)
        np.testing.assert_allclose(x[:, 1], (missing - missing.mean()) / missing.std(), atol=1e-6)
        assert column.feature_suffixes == ("", " missing")
        assert np.array_equal(column.comparable_values(VALUES), filled)
        assert not np.isnan(column.comparable_values(VALUES.astype(np.float32))).any()
        assert column.comparable_values(VALUES.astype(np.float32)).dtype == np.float32

    @given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30), st.floats(-1e9, 1e9))
    def test_offsets_do_not_lose_digits(self, values: list[float], offset: float) -> None:
        cells = np.array(values)
        if cells.std() < 1:
            return
        moved = Numeric.fit(cells + offset).encode(cells + offset)
        np.testing.assert_allclose(moved, Numeric.fit(cells).encode(cells), atol=1e-5)

    def test_format_does_not_change_features(self) -> None:
        values = np.round(RNG.uniform(0, 9999, 30), 2)
        texts = objects(*(f"${value:,.2f}" for value in values))
        column = Numeric.fit(texts, "point")
        np.testing.assert_array_equal(column.encode(texts), Numeric.fit(values).encode(values))
        assert column.is_invalid(objects("$1", "red", "", "NA")).tolist() == [False, True, False, False]
        assert column.summary() == "number, as 1,234.5"
        assert np.isfinite(Numeric.fit(np.full(3, np.nan)).encode(np.array([np.nan, 1.0]))).all()
        assert Numeric.fit(np.full(5, 3.0)).encode(np.array([3.0, 4.0])).tolist() == [[0], [1]]


class TestCategory:
    @given(st.lists(st.sampled_from(["", "a", "b", "c", "d e", "?"]), min_size=2, max_size=60))
    def test_mean_and_unknown_categories(self, cells: list[str]) -> None:
        column = Category.fit(objects(*cells))
        x = column.encode(objects(*cells))
        np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-5)
        assert not column.encode(objects("never seen")).any()  # the mean of all rows
        equal = [cells.index(cell) for cell in cells]
        assert np.array_equal(x, x[equal])

    def test_two_levels_are_one_feature(self) -> None:
        cells = objects("no", "yes", "yes", "no", "yes")
        column = Category.fit(cells)
        assert column.feature_suffixes == ("=yes",)
        x = column.encode(cells)[:, 0]
        assert len(set(x.tolist())) == 2
        assert np.corrcoef(x, cells == "yes")[0, 1] == pytest.approx(1)

    def test_rare_levels_of_many_have_no_feature(self) -> None:
        often = [f"often {n}" for n in range(CATEGORIES.always + 1)] * CATEGORIES.min_rows
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
        cells = objects(*(f"c{n:04}" for n in range(CATEGORIES.max_levels + 50)), *(f"c{n:04}" for n in range(60)))
        cells = np.concatenate([cells] * CATEGORIES.min_rows)
        column = Category.fit(cells)
        assert len(column.levels) == CATEGORIES.max_levels
        assert set(column.levels) >= {f"c{n:04}" for n in range(min(60, CATEGORIES.max_levels))}  # the most frequent


class TestDate:
    def test_oracle(self) -> None:
        cells = COLUMNS["date"][1]
        column = Date.fit(cells)
        seconds = np.array([np.datetime64(cell) for cell in cells], "datetime64[s]").astype(np.int64)
        x = column.encode(cells)
        np.testing.assert_allclose(x[:, 0], (seconds - seconds.mean()) / seconds.std(), atol=1e-5)
        assert column.cycles == tuple(CYCLES)
        circles = x[:, 1:].reshape(60, 3, 2)
        np.testing.assert_allclose(
            (circles**2).sum(axis=2), (circles[0] ** 2).sum(axis=1)[None].repeat(60, 0), rtol=1e-4
        )
        early = (seconds % 86400 < 3600) | (seconds % 86400 > 82800)  # near midnight, with a large cosine of the day
        assert early.any()
        assert circles[early, 0, 0].min() > circles[~early, 0, 0].max() - 1e-3

    def test_days_without_times_have_no_hour_and_months_no_weekday(self) -> None:
        days = objects(*map(str, np.datetime64("2020-01-01") + np.arange(0, 800, 3)))
        assert Date.fit(days).cycles == ("week", "year")
        months = objects(*(f"{2000 + n // 12}-{n % 12 + 1:02}-01" for n in range(60)))
        assert Date.fit(months).cycles == ("year",)
        assert Date.fit(objects("2020-01-01", "2020-01-02")).cycles == ()

    def test_new_year_is_close_to_the_end_of_december(self) -> None:
        days = np.datetime64("2020-01-01") + np.arange(366 * 2)
        x = Date.fit(days).encode(np.array(["2020-12-31", "2021-01-01", "2020-07-01"], "datetime64[D]"))
        year = x[:, -2:]
        assert np.linalg.norm(year[0] - year[1]) < 0.1 * np.linalg.norm(year[0] - year[2])


class TestText:
    def test_texts_with_shared_words_are_close(self) -> None:
        cells = objects(*["the red house stands"] * 5, *["a green apple tree"] * 5, *["old blue ship sails"] * 5)
        cells = objects(*(f"{cell} {row}" for row, cell in enumerate(cells)))
        x = Text.fit(cells).encode(cells)
        distances = np.linalg.norm(x[:, None] - x[None], axis=2)
        same = np.equal.outer(np.arange(15) // 5, np.arange(15) // 5)
        assert distances[same].max() < distances[~same].min()

    def test_unknown_words_are_encoded_as_blank(self) -> None:
        column = Text.fit(sentences(40))
        x = column.encode(objects("", "NA", "zzz qqq", "\N{SNOWMAN}" * 9, "x" * 10_000))
        assert np.isfinite(x).all()
        assert (x[1:] == x[0]).all()  # none has a known n-gram
        assert column.encode(sentences(40)).std() > 0

    def test_components_are_limited(self) -> None:
        column = Text.fit(sentences(60))
        assert 0 < len(column.feature_suffixes) <= TEXT_RULES.max_rank
        assert len(column.grams) <= TEXT_RULES.max_grams
        assert column.encode(sentences(60)).mean(axis=0) == pytest.approx(0, abs=1e-5)
        alone = objects("abc", "xyz", "123")  # with nothing in common
        assert Text.fit(alone).feature_suffixes == ()
        assert Text.fit(alone).encode(alone).shape == (3, 0)

    @given(st.text(max_size=40))
    def test_any_text_can_be_counted(self, text: str) -> None:
        grams = count_grams(text)
        assert all(count > 0 for count in grams.values())
        assert count_grams(text + " ") == grams
        assert count_grams(f"{text}\n{text}") == grams + grams
        assert count_grams("Tea, tea!")[" tea "] == 2
        assert count_grams("teas")["tea"] == 1
        assert count_grams("") == {}


class TestEncoding:
    def test_complete_floats_are_unchanged(self) -> None:
        cells: list[np.ndarray] = [np.array([1, 2], np.float16), np.array([0.5, 7], np.float32)]
        encoding = Encoding(tuple(map(Numeric.fit, cells)))
        assert encoding.plain
        assert encoding.encode(cells).tolist() == [[1, 0.5], [2, 7]]
        assert encoding.encode(cells).dtype == np.float32
        assert encoding.encode([cells[0], np.array([0.5, 7e9])]).dtype == np.float64
        assert encoding.sizes == [1, 1]
        assert encoding.encode([cells[0], np.array([np.nan, 7])])[0, 1] == np.float32(3.75)  # the median

    def test_mixed_columns(self) -> None:
        cells = [cells for _, cells in COLUMNS.values()]
        encoding = Encoding(tuple(column_class.fit(cells) for column_class, cells in COLUMNS.values()))
        assert not encoding.plain
        x = encoding.encode(cells)
        assert x.shape == (60, sum(encoding.sizes))
        names = [
            name + part
            for name, column in zip(COLUMNS, encoding.columns, strict=True)
            for part in column.feature_suffixes
        ]
        assert len(set(names)) == len(names) == x.shape[1]
        assert "two categories=yes" in names
        assert "number with gaps missing" in names
        with pytest.raises(ValueError, match="shorter"):
            encoding.encode(cells[:-1])


ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2**60, 0.0, -0.5, 1.5, 1e308, math.nan, math.inf]),
    st.sampled_from(["", "iso", "plain", "category"]),
    st.sampled_from([[], {}, [1], ["a", "a"]]),
)


@given(data=st.data())
def test_corrupt_descriptions_are_refused_or_work(data: st.DataObject) -> None:
    described, tensors = Encoding(tuple(column_class.fit(cells) for column_class, cells in COLUMNS.values())).describe()
    described = copy.deepcopy(described)
    spoil(data, described, ODD)
    try:
        encoding = Encoding.restore(described, tensors)
    except ValueError:
        return
    rows = [objects("a", "", "2020-01-01"), np.array([1.0, math.nan, 3.0])]
    for column in encoding.columns:
        for cells in rows:
            assert column.encode(cells).shape == (3, len(column.feature_suffixes))
        assert column.summary()
    assert len(encoding.sizes) == len(encoding.columns)


def test_invalid_encodings_are_refused() -> None:
    cases: list[Any] = [None, [], {}, 3, [None], [{}], [{"kind": "colour"}], [{"kind": 3}]]
    for described in cases:
        with pytest.raises(ValueError, match=r"."):
            Encoding.restore(described, {})


def test_other_columns_tensors_are_an_error() -> None:
    cases: list[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = [
        lambda tensors: tensors | {"9.basis": torch.zeros(1)},
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "0.mean"},
        lambda tensors: tensors | {"0.mean": tensors["0.mean"][1:]},
        lambda tensors: tensors | {"0.scales": tensors["0.scales"] / 0},
        lambda tensors: tensors | {"0.basis": tensors["0.basis"].double()},
    ]
    for change in cases:
        described, tensors = Encoding((Text.fit(sentences(20)),)).describe()
        with pytest.raises(ValueError, match="tensor"):
            Encoding.restore(described, change(tensors))


class TestSpellings:
    def test_yes_and_no_in_other_spellings(self) -> None:
        fitted_cases: list[tuple[str, str]] = [("TRUE", "FALSE"), ("yes", "no"), ("Y", "N"), ("1", "0"), ("t", "f")]
        new_cases: list[tuple[str, str]] = [("TRUE", "FALSE"), ("true", "false"), ("yes", "no"), ("Y", "N"), ("1", "0")]
        for fitted in fitted_cases:
            for new in new_cases:
                pattern = [0, 1, 1, 0, 1]
                column = infer_column_type(objects(*(fitted[at] for at in pattern))).column
                assert column is not None, new
                other = objects(*(new[at] for at in pattern))
                assert np.array_equal(column.encode(other), column.encode(objects(*(fitted[at] for at in pattern)))), (
                    new
                )
                assert not column.is_invalid(other).any(), new
                same = {word.casefold() for word in fitted} == {word.casefold() for word in new}
                assert bool(column.describe_other_spelling(other)) != same, new

    def test_codes_without_their_zeros(self) -> None:
        column = Category.fit(objects("01067", "01067", "10115", "00204", "00204"))
        expected = column.encode(objects("01067", "00204", "10115"))
        for cells in (objects("1067", "204", "10115"), np.array([1067, 204, 10115]), np.array([1067.0, 204, 10115])):
            assert np.array_equal(column.encode(cells), expected)
            assert column.describe_other_spelling(cells) == "'1067' is '01067'"
        assert column.is_invalid(objects("067", "1067")).tolist() == [True, False]

    def test_ambiguous_spellings_are_unknown(self) -> None:
        cases: list[tuple[tuple[str, ...], str]] = [
            (("01", "1"), "001"),
            (("yes", "no", "maybe"), "1"),
            (("a", "b"), "1"),
        ]
        for levels, cell in cases:
            column = Category.fit(objects(*levels, *levels))
            assert column.is_invalid(objects(cell)).all(), levels
            assert not column.describe_other_spelling(objects(cell)), levels

    def test_yes_is_invalid_in_a_numeric_column(self) -> None:
        assert Numeric.fit(np.array([0.0, 1, 0.5])).is_invalid(objects("yes")).all()
