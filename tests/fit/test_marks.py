"""Which rows have no label, as arrays of labels say it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from protonet.fit.marks import find_unlabelled

NAN = float("nan")


@pytest.mark.parametrize(
    ("y", "places"),
    [
        (np.array([0, 1, -1, -1, -1]), [2, 3, 4]),
        (np.array([0.0, 1.0, -1.0, NAN, -1.0]), [2, 3, 4]),
        (np.array([0, 1, None, -1, -1], object), [2, 3, 4]),
        (["a", None, "b", NAN], [1, 3]),
        (np.array([["a"], [None], ["b"]], object), [1]),
        (pd.Series(["a", pd.NA, "b"], dtype="string"), [1]),
        (pd.Series([1, pd.NA, 2], dtype="Int64"), [1]),
        (pd.Series([pd.Timestamp("2020-01-01"), pd.NaT], dtype=object), [1]),
        (np.array([-1, 1, -1, 1]), []),
        (np.array([-1, 0, -1]), []),
        (np.array([-2, -1, 0, 1]), []),
        (np.array([0.5, -1.0, 1.0]), []),
        (np.array([True, False]), []),
        (["-1", "0", "1"], []),
        (np.array([-1, -1]), [0, 1]),
        (np.array([], int), []),
        (np.zeros((3, 2)), []),
    ],
    ids=str,
)
def test_marks(y: Any, places: list[int]) -> None:
    assert find_unlabelled(y)[0].tolist() == places


def test_a_class_of_minus_one_may_be_meant() -> None:
    with pytest.warns(UserWarning, match=r"2 of 6 rows have the label -1, which is taken for none. If it is a class"):
        assert find_unlabelled([-1, 0, 1, -1, 0, 1])[0].tolist() == [0, 3]
