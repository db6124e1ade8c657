"""Means, standard errors and Markdown."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.shared.tables import format_columns, format_mean, mean_and_error, subtract
from protonet.ui.text import count, format_table


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20))
def test_mean_and_error_are_numpys(values: list[float]) -> None:
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(np.mean(values), abs=1e-9)
    assert error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-9)


def test_error_of_one_value_is_unknown() -> None:
    assert mean_and_error([2.0])[0] == 2.0
    assert math.isnan(mean_and_error([2.0])[1])


def test_texts() -> None:
    assert format_mean([]) == ""
    assert format_mean([1.0]) == "1.00"
    assert format_mean([1.0, 2.0]) == "1.50 ±0.50"
    assert format_mean([1.0, 2.0], digits=1, sign=True) == "+1.5 ±0.5"
    assert format_mean([-0.001]) == "0.00"
    assert [count(n, "draw") for n in (0, 1, 2000)] == ["0 draws", "1 draw", "2,000 draws"]


def test_table_lines_up() -> None:
    assert format_table(["a", "bcdef"], [["1234", "x"], ["", "±"]]) == (
        "| a    | bcdef |\n|------|-------|\n| 1234 | x     |\n|      | ±     |\n"
    )


def test_columns() -> None:
    rows = [{"n": 1000, "share": 0.125}, {"n": 5, "share": 2.0}]
    text = format_columns({"count": "{n:,}", "share, %": "{share:.1%}"}, rows)
    assert text == format_table(["count", "share, %"], [["1,000", "12.5%"], ["5", "200.0%"]])


def test_differences_are_paired() -> None:
    assert subtract([1.0, 2.0], [0.5, 3.0]) == [0.5, -1.0]
    assert subtract([], [1.0]) == subtract([1.0], []) == []
