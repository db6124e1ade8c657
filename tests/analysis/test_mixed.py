"""The study of mixed tables: what its splits hold, and what its table says."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from analysis.real_data.mixed import OURS, PIPELINES, fit_ours, read_frames, summarise, tabulate
from analysis.real_data.mixed import Run as MixedRun
from analysis.real_data.mixed_sets import MIXED, MixedSplit, load_mixed, split_mixed


def make_split(seed: int = 0) -> MixedSplit:
    """Return a table whose second column tells the class."""
    rng = np.random.default_rng(seed)
    labels = np.array(["left", "right"])[np.arange(40) % 2]
    cells = [[f"{rng.standard_normal():.3f}", {"left": "red", "right": "blue"}[each], ""] for each in labels]
    return MixedSplit(["size", "colour", "nothing"], cells[:10], labels[:10], cells[10:], labels[10:])


def test_ours_goes_by_the_files() -> None:
    split = make_split()
    assert (fit_ours(split, effort="fast") == split.test_labels).mean() > 0.9


@pytest.mark.parametrize("name", ["logistic", "boosting"])
def test_pipelines_take_what_ours_takes(name: str) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("pandas")
    split = make_split()
    assert (PIPELINES[name](split) == split.test_labels).mean() > 0.9
    train, test, numbers, others = read_frames(split)
    assert (numbers, others) == (["size"], ["colour"])
    assert list(train["size"]) == [float(row[0]) for row in split.train]
    assert len(test) == len(split.test_labels)


def test_the_table_says_who_is_best() -> None:
    runs = {
        MixedRun("a", 5, seed, method): {"accuracy": accuracy, "recall": accuracy, "seconds": 1.0}
        for seed in range(2)
        for method, accuracy in (("ours", 0.7), ("forest", 0.8), ("lda", 0.6))
    }
    text = tabulate(summarise(runs), ["ours", "forest", "lda"])
    assert "forest        | -10.00" in text
    assert "best pipeline, row by row | 80.00" in text
    assert set(OURS) & set(PIPELINES) == set()


@pytest.mark.skipif(find_spec("vega_datasets") is None, reason="the package is not installed")
def test_splits_are_of_rows_that_are_not_tested() -> None:
    columns, rows, labels = load_mixed("cars")
    assert MIXED["cars"].label not in columns
    assert len(rows) == len(labels)
    split = split_mixed("cars", 5, 0)
    assert np.unique(split.train_labels, return_counts=True)[1].tolist() == [5] * len(np.unique(labels))
    again = split_mixed("cars", 5, 0)
    assert split.train == again.train
    assert np.array_equal(split.test_labels, again.test_labels)
    assert split.train != split_mixed("cars", 5, 1).train


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXED, "none", MIXED["cars"]._replace(package="no_such_package"))
    with pytest.raises(ImportError, match="the package no_such_package is not installed"):
        load_mixed("none")
