"""Each kind of column: what its cells become, gaps and new cells among them, and that a file can hold it."""

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

from protonet.tables.columns.category import CATEGORIES, Category
from protonet.tables.columns.date import CYCLES, Date
from protonet.tables.columns.encoding import KINDS, Encoding
from protonet.tables.columns.kind import Column
from protonet.tables.columns.number import Number
from protonet.tables.columns.parsing import blank_missing
from protonet.tables.columns.recognise import recognise
from protonet.tables.columns.text import TEXTS, Text, count_grams
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


NUMBERS = np.where(RNG.random(60) < 0.2, np.nan, 1e6 + 7 * RNG.standard_normal(60))
COLUMNS: dict[str, tuple[type[Any], np.ndarray]] = {
    "number": (Number, RNG.standard_normal(60) * 9),
    "number with gaps": (Number, NUMBERS),
    "category": (Category, RNG.choice(objects("a", "b", "", "d"), 60)),
    "two categories": (Category, RNG.choice(objects("yes", "no"), 60)),
    "many categories": (Category, RNG.choice(objects(*map(str, range(30))), 60)),
    "date": (Date, dates(60)),
    "date with gaps": (Date, np.where(np.arange(60) % 5 == 0, "NA", dates(60))),
    "text": (Text, sentences(60)),
}
EACH = pytest.mark.parametrize(("kind", "cells"), COLUMNS.values(), ids=COLUMNS)


@EACH
def test_every_kind_keeps_the_protocol(kind: type[Any], cells: np.ndarray) -> None:
    column: Column = kind.fit(cells)
    assert KINDS[column.kind] is kind
    x = column.encode(cells)
    assert x.shape == (60, len(column.parts))
    assert x.dtype == np.float32
    assert np.isfinite(x).all()
    assert len(set(column.parts)) == len(column.parts)
    assert not column.find_strange(cells).any()
    assert column.tell().startswith(column.kind)
    if kind is Number:
        np.testing.assert_allclose(x.var(axis=0), 1, atol=1e-3)
    assert kind is Number or 0.2 < x[:, : 1 if kind is Date else None].var(axis=0).sum() < 2.5  # cycles lie on circles
    for rows in (slice(0, 1), slice(7, 20), slice(59, None, -1)):
        np.testing.assert_allclose(column.encode(cells[rows]), x[rows], atol=1e-6)  # each row for itself
    assert column.encode(cells[:0]).shape == (0, len(column.parts))


@EACH
def test_every_kind_says_what_its_cells_are(kind: type[Any], cells: np.ndarray) -> None:
    column: Column = kind.fit(cells)
    numbers, filled = column.read_numbers(cells), column.fill(cells)
    assert (numbers is None) == (filled.dtype.kind == "U") == (kind in {Category, Text})
    if numbers is not None:  # they are in an order, and only gaps are filled
        np.testing.assert_array_equal(filled[~np.isnan(numbers)], numbers[~np.isnan(numbers)])
        assert not np.isnan(filled).any()
        assert column.write(numbers[~np.isnan(numbers)][0])
    assert column.find_others(cells).mean() == pytest.approx(column.rare)
    np.testing.assert_array_equal(column.encode(column.read_once(cells)), column.encode(cells))
    assert sum(column.blocks) == len(column.parts)
    assert column.plain == (kind is Number and len(column.parts) == 1)


@EACH
def test_every_kind_comes_back_from_what_it_describes(kind: type[Any], cells: np.ndarray) -> None:
    encoding = Encoding((kind.fit(cells), Number.fit(NUMBERS)))
    described, tensors = encoding.describe()
    assert json.loads(json.dumps(described, allow_nan=False)) == described
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    again = Encoding.restore(json.loads(json.dumps(described)), tensors)
    assert np.array_equal(again.encode([cells, NUMBERS]), encoding.encode([cells, NUMBERS]))
    assert [column.tell() for column in again.columns] == [column.tell() for column in encoding.columns]
    assert again.describe()[0] == described


@EACH
def test_all_gaps_and_new_cells_are_no_error(kind: type[Any], cells: np.ndarray) -> None:
    column = kind.fit(cells)
    for odd in (objects("", "NA", "?"), objects("\N{SNOWMAN}", "never seen", "1e999x"), np.full(3, np.nan)):
        assert np.isfinite(column.encode(odd)).all()


def test_cells_and_text_of_them_are_the_same() -> None:
    numbers, texts = np.array([1.0, 2.0, 2.0, np.nan, 1.0]), objects("1", "2", "2", "", "1")
    cells = COLUMNS["date with gaps"][1]
    dates64 = np.array(["NaT" if cell == "NA" else cell for cell in cells], "datetime64[us]")
    for kind, values, written in ((Category, numbers, texts), (Date, dates64, cells)):
        assert np.array_equal(kind.fit(values).encode(written), kind.fit(written).encode(values))
    assert Category.fit(texts).tell() == "category: missing, 1, 2"
    column = Date.fit(cells)
    assert column.parts[-1] == " missing"
    assert column.tell().endswith("20 % missing")
    assert column.find_strange(objects("2020-01-01", "red", "")).tolist() == [False, True, False]


class TestNumber:
    def test_oracle(self) -> None:
        column = Number.fit(NUMBERS)
        gaps = np.isnan(NUMBERS)
        filled = np.where(gaps, np.median(NUMBERS[~gaps]), NUMBERS)
        x = column.encode(NUMBERS)
        np.testing.assert_allclose(x[:, 0], (filled - filled.mean()) / filled.std(), atol=1e-5)
        np.testing.assert_allclose(x[:, 1], (gaps - gaps.mean()) / gaps.std(), atol=1e-6)
        assert column.parts == ("", " missing")
        assert np.array_equal(column.fill(NUMBERS), filled)
        assert not np.isnan(column.fill(NUMBERS.astype(np.float32))).any()
        assert column.fill(NUMBERS.astype(np.float32)).dtype == np.float32

    @given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30), st.floats(-1e9, 1e9))
    def test_offsets_cost_no_digits(self, values: list[float], offset: float) -> None:
        cells = np.array(values)
        if cells.std() < 1:
            return
        moved = Number.fit(cells + offset).encode(cells + offset)
        np.testing.assert_allclose(moved, Number.fit(cells).encode(cells), atol=1e-5)

    def test_how_it_is_written_makes_no_difference(self) -> None:
        values = np.round(RNG.uniform(0, 9999, 30), 2)
        texts = objects(*(f"${value:,.2f}" for value in values))
        column = Number.fit(texts, "point")
        np.testing.assert_array_equal(column.encode(texts), Number.fit(values).encode(values))
        assert column.find_strange(objects("$1", "red", "", "NA")).tolist() == [False, True, False, False]
        assert column.tell() == "number, as 1,234.5"
        assert np.isfinite(Number.fit(np.full(3, np.nan)).encode(np.array([np.nan, 1.0]))).all()
        assert Number.fit(np.full(5, 3.0)).encode(np.array([3.0, 4.0])).tolist() == [[0], [1]]


class TestCategory:
    @given(st.lists(st.sampled_from(["", "a", "b", "c", "d e", "?"]), min_size=2, max_size=60))
    def test_mean_and_what_was_never_seen(self, cells: list[str]) -> None:
        column = Category.fit(objects(*cells))
        x = column.encode(objects(*cells))
        np.testing.assert_allclose(x.mean(axis=0), 0, atol=1e-5)
        assert not column.encode(objects("never seen")).any()  # the mean of all rows
        equal = [cells.index(cell) for cell in cells]
        assert np.array_equal(x, x[equal])

    def test_two_levels_are_one_number(self) -> None:
        cells = objects("no", "yes", "yes", "no", "yes")
        column = Category.fit(cells)
        assert column.parts == ("=yes",)
        x = column.encode(cells)[:, 0]
        assert len(set(x.tolist())) == 2
        assert np.corrcoef(x, cells == "yes")[0, 1] == pytest.approx(1)

    def test_levels_of_one_row_have_no_number_where_there_are_many(self) -> None:
        often = [f"often {n}" for n in range(CATEGORIES.few + 1)] * CATEGORIES.least
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

    def test_there_are_no_more_than_the_rules_allow(self) -> None:
        cells = objects(*(f"c{n:04}" for n in range(CATEGORIES.most + 50)), *(f"c{n:04}" for n in range(60)))
        cells = np.concatenate([cells] * CATEGORIES.least)
        column = Category.fit(cells)
        assert len(column.levels) == CATEGORIES.most
        assert set(column.levels) >= {f"c{n:04}" for n in range(min(60, CATEGORIES.most))}  # the most frequent


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
        early = (seconds % 86400 < 3600) | (seconds % 86400 > 82800)  # near midnight: the cosine of the day is large
        assert early.any()
        assert circles[early, 0, 0].min() > circles[~early, 0, 0].max() - 1e-3

    def test_days_without_times_have_no_hour_and_months_no_weekday(self) -> None:
        days = objects(*map(str, np.datetime64("2020-01-01") + np.arange(0, 800, 3)))
        assert Date.fit(days).cycles == ("week", "year")
        months = objects(*(f"{2000 + n // 12}-{n % 12 + 1:02}-01" for n in range(60)))
        assert Date.fit(months).cycles == ("year",)
        assert Date.fit(objects("2020-01-01", "2020-01-02")).cycles == ()

    def test_the_first_of_january_lies_beside_the_last_of_december(self) -> None:
        days = np.datetime64("2020-01-01") + np.arange(366 * 2)
        x = Date.fit(days).encode(np.array(["2020-12-31", "2021-01-01", "2020-07-01"], "datetime64[D]"))
        year = x[:, -2:]
        assert np.linalg.norm(year[0] - year[1]) < 0.1 * np.linalg.norm(year[0] - year[2])


class TestText:
    def test_rows_that_share_words_are_near(self) -> None:
        cells = objects(*["the red house stands"] * 5, *["a green apple tree"] * 5, *["old blue ship sails"] * 5)
        cells = objects(*(f"{cell} {number}" for number, cell in enumerate(cells)))
        x = Text.fit(cells).encode(cells)
        apart = np.linalg.norm(x[:, None] - x[None], axis=2)
        same = np.equal.outer(np.arange(15) // 5, np.arange(15) // 5)
        assert apart[same].max() < apart[~same].min()

    def test_new_words_and_none_are_finite_and_alike(self) -> None:
        column = Text.fit(sentences(40))
        x = column.encode(objects("", "NA", "zzz qqq", "\N{SNOWMAN}" * 9, "x" * 10_000))
        assert np.isfinite(x).all()
        assert (x[1:] == x[0]).all()  # no known part in any of them
        assert column.encode(sentences(40)).std() > 0

    def test_directions_are_no_more_than_the_rules_allow(self) -> None:
        column = Text.fit(sentences(60))
        assert 0 < len(column.parts) <= TEXTS.rank
        assert len(column.grams) <= TEXTS.most
        assert column.encode(sentences(60)).mean(axis=0) == pytest.approx(0, abs=1e-5)
        alone = objects("abc", "xyz", "123")  # with nothing in common
        assert Text.fit(alone).parts == ()
        assert Text.fit(alone).encode(alone).shape == (3, 0)

    @given(st.text(max_size=40))
    def test_any_text_can_be_counted(self, text: str) -> None:
        grams = count_grams(text)
        assert all(number > 0 for number in grams.values())
        assert count_grams(text + " ") == grams
        assert count_grams(f"{text}\n{text}") == grams + grams
        assert count_grams("Tea, tea!")[" tea "] == 2
        assert count_grams("teas")["tea"] == 1
        assert count_grams("") == {}


class TestEncoding:
    def test_numbers_without_gaps_stay_as_they_are(self) -> None:
        cells: list[np.ndarray] = [np.array([1, 2], np.float16), np.array([0.5, 7], np.float32)]
        encoding = Encoding(tuple(map(Number.fit, cells)))
        assert encoding.plain
        assert encoding.encode(cells).tolist() == [[1, 0.5], [2, 7]]
        assert encoding.encode(cells).dtype == np.float32
        assert encoding.encode([cells[0], np.array([0.5, 7e9])]).dtype == np.float64
        assert encoding.sizes == [1, 1]
        assert encoding.encode([cells[0], np.array([np.nan, 7])])[0, 1] == np.float32(3.75)  # the median

    def test_mixed_columns(self) -> None:
        cells = [cells for _, cells in COLUMNS.values()]
        encoding = Encoding(tuple(kind.fit(cells) for kind, cells in COLUMNS.values()))
        assert not encoding.plain
        x = encoding.encode(cells)
        assert x.shape == (60, sum(encoding.sizes))
        names = [name + part for name, column in zip(COLUMNS, encoding.columns, strict=True) for part in column.parts]
        assert len(set(names)) == len(names) == x.shape[1]
        assert "two categories=yes" in names
        assert "number with gaps missing" in names
        with pytest.raises(ValueError, match="shorter"):
            encoding.encode(cells[:-1])

    @given(data=st.data())
    def test_whatever_is_described_comes_back(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(2, 12))
        number = st.floats(-1e30, 1e30) | st.just(math.nan)
        cells = [
            np.array(data.draw(st.lists(number, min_size=n, max_size=n))),
            objects(*data.draw(st.lists(st.text(max_size=4), min_size=n, max_size=n))),
        ]
        text = Text.fit(cells[1])
        encoding = Encoding((Number.fit(cells[0]), Category.fit(cells[1]), text))
        described, tensors = encoding.describe()
        again = Encoding.restore(json.loads(json.dumps(described)), tensors)
        rows = [cells[0], cells[1], cells[1]]
        np.testing.assert_array_equal(again.encode(rows), encoding.encode(rows))


ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2**60, 0.0, -0.5, 1.5, 1e308, math.nan, math.inf]),
    st.sampled_from(["", "iso", "plain", "category"]),
    st.sampled_from([[], {}, [1], ["a", "a"]]),
)


@given(data=st.data())
def test_nonsense_is_a_value_error_or_a_column_that_works(data: st.DataObject) -> None:
    described, tensors = Encoding(tuple(kind.fit(cells) for kind, cells in COLUMNS.values())).describe()
    described = copy.deepcopy(described)
    spoil(data, described, ODD)
    try:
        encoding = Encoding.restore(described, tensors)
    except ValueError:
        return
    rows = [objects("a", "", "2020-01-01"), np.array([1.0, math.nan, 3.0])]
    for column in encoding.columns:
        for each in rows:
            assert column.encode(each).shape == (3, len(column.parts))
        assert column.tell()
    assert len(encoding.sizes) == len(encoding.columns)


@pytest.mark.parametrize("described", [None, [], {}, 3, [None], [{}], [{"kind": "colour"}], [{"kind": 3}]])
def test_no_encoding_at_all(described: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        Encoding.restore(described, {})


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors | {"9.basis": torch.zeros(1)},
        lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "0.mean"},
        lambda tensors: tensors | {"0.mean": tensors["0.mean"][1:]},
        lambda tensors: tensors | {"0.scales": tensors["0.scales"] / 0},
        lambda tensors: tensors | {"0.basis": tensors["0.basis"].double()},
    ],
)
def test_other_columns_tensors_are_an_error(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> None:
    described, tensors = Encoding((Text.fit(sentences(20)),)).describe()
    with pytest.raises(ValueError, match="tensor"):
        Encoding.restore(described, change(tensors))


class TestSpellings:
    @pytest.mark.parametrize("fitted", [("TRUE", "FALSE"), ("yes", "no"), ("Y", "N"), ("1", "0"), ("t", "f")])
    @pytest.mark.parametrize("new", [("TRUE", "FALSE"), ("true", "false"), ("yes", "no"), ("Y", "N"), ("1", "0")])
    def test_yes_and_no_in_other_words(self, fitted: tuple[str, str], new: tuple[str, str]) -> None:
        pattern = [0, 1, 1, 0, 1]
        column = recognise(objects(*(fitted[at] for at in pattern))).column
        assert column is not None
        other = objects(*(new[at] for at in pattern))
        assert np.array_equal(column.encode(other), column.encode(objects(*(fitted[at] for at in pattern))))
        assert not column.find_strange(other).any()
        same = {each.casefold() for each in fitted} == {each.casefold() for each in new}
        assert bool(column.describe_respelled(other)) != same

    def test_codes_without_their_zeros(self) -> None:
        column = Category.fit(objects("01067", "01067", "10115", "00204", "00204"))
        expected = column.encode(objects("01067", "00204", "10115"))
        for cells in (objects("1067", "204", "10115"), np.array([1067, 204, 10115]), np.array([1067.0, 204, 10115])):
            assert np.array_equal(column.encode(cells), expected)
            assert column.describe_respelled(cells) == "'1067' is '01067'"
        assert column.find_strange(objects("067", "1067")).tolist() == [True, False]

    @pytest.mark.parametrize(
        ("levels", "cell"), [(("01", "1"), "001"), (("yes", "no", "maybe"), "1"), (("a", "b"), "1")]
    )
    def test_what_could_be_several_levels_is_none(self, levels: tuple[str, ...], cell: str) -> None:
        column = Category.fit(objects(*levels, *levels))
        assert column.find_strange(objects(cell)).all()
        assert not column.describe_respelled(objects(cell))

    def test_numbers_that_are_no_yes_or_no(self) -> None:
        assert Number.fit(np.array([0.0, 1, 0.5])).find_strange(objects("yes")).all()
