from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from protonet.estimator import ProtoNetClassifier
from protonet.tables.columns.gaps import GapFiller
from tests.strategies import load_wine_split

N, DIM = 4000, 4
COVARIANCE = np.array([[1.0, 0.8, 0.3, 0.0], [0.8, 1.0, 0.1, 0.2], [0.3, 0.1, 1.0, 0.5], [0.0, 0.2, 0.5, 1.0]])
MEAN, SCALE = np.array([5.0, -3.0, 0.0, 100.0]), np.array([1.0, 2.0, 0.5, 30.0])


def draw_rows(n: int = N, seed: int = 0) -> np.ndarray:
    return MEAN + SCALE * np.random.default_rng(seed).multivariate_normal(np.zeros(DIM), COVARIANCE, n)


def fit_filler() -> GapFiller:
    filler = GapFiller.fit(draw_rows(), np.ones(DIM, bool))
    assert filler is not None
    return filler


def test_gaps_are_filled_by_the_regression_on_the_known_features() -> None:
    rows = draw_rows(50, seed=1)
    x = rows.copy()
    x[:, [1, 3]] = np.nan
    known, gaps = [0, 2], [1, 3]
    z = (rows[:, known] - MEAN[known]) / SCALE[known]
    slopes = np.linalg.solve(COVARIANCE[np.ix_(known, known)], COVARIANCE[np.ix_(known, gaps)])
    expected = MEAN[gaps] + SCALE[gaps] * (z @ slopes)
    filled = fit_filler().fill(x)
    np.testing.assert_array_equal(filled[:, known], rows[:, known])
    assert np.abs((filled[:, gaps] - expected) / SCALE[gaps]).max() < 0.15


def test_draws_have_the_mean_and_the_variance_given_the_known_features() -> None:
    filler, x = fit_filler(), draw_rows(20, seed=2)
    x[:, 0] = np.nan
    drawn = filler.draw(x)
    assert drawn.shape == (filler.N_DRAWS, 20, DIM)
    np.testing.assert_allclose(drawn.mean(axis=0), filler.fill(x), atol=1e-4)
    variance = 1 - COVARIANCE[0, 1:] @ np.linalg.solve(COVARIANCE[1:, 1:], COVARIANCE[1:, 0])
    assert drawn[:, :, 0].var(axis=0) == pytest.approx(np.full(20, variance), rel=0.3)  # of eight quantiles
    assert (drawn[:, :, 1:] == x[:, 1:]).all()


def test_a_row_is_filled_alike_in_any_batch() -> None:
    filler, x = fit_filler(), draw_rows(64, seed=3)
    x[np.random.default_rng(4).random(x.shape) < 0.4] = np.nan
    together = filler.draw(x)
    for row in range(0, 64, 7):
        np.testing.assert_array_equal(filler.draw(x[row : row + 1])[:, 0], together[:, row])


def test_a_row_of_gaps_alone_gets_the_means() -> None:
    filler = fit_filler()
    np.testing.assert_allclose(filler.fill(np.full((1, DIM), np.nan))[0], filler.mean, rtol=1e-6)


def test_few_rows_and_constant_features_give_finite_features() -> None:
    x = np.array([[1.0, 2.0, 7.0], [1.0, 3.0, 7.0]])
    filler = GapFiller.fit(x, np.ones(3, bool))
    assert filler is not None
    assert np.isfinite(filler.draw(np.array([[np.nan, 2.5, np.nan], [1.0, np.nan, 7.0]]))).all()
    assert GapFiller.fit(x[:1], np.ones(3, bool)) is None
    assert GapFiller.fit(x, np.zeros(3, bool)) is None
    assert GapFiller.fit(np.zeros((5, 300)), np.ones(300, bool)) is None


@pytest.mark.parametrize(("offset", "deviation"), [(1.76e9, 170.0), (1.76e9, 0.0), (1.7e12, 5e5), (1e7, 1.0)])
def test_a_small_deviation_beside_the_mean_is_no_obstacle(offset: float, deviation: float) -> None:
    """Times in seconds, serial numbers: their deviation may be a ten-millionth of their mean."""
    x = np.random.default_rng(0).normal(size=(200, 3))
    x[:, 2] = offset + deviation * (0.8 * x[:, 0] + 0.6 * x[:, 2])
    filler = GapFiller.fit(x, np.ones(3, bool))
    assert filler is not None
    new = np.array([[2.0, 0.0, np.nan], [-2.0, 0.0, np.nan]])
    expected = offset + deviation * 0.8 * new[:, 0]
    np.testing.assert_allclose(filler.fill(new)[:, 2], expected, atol=0.2 * deviation + 1e-9 * offset)
    frame = pd.DataFrame(x, columns=["a", "b", "time"])
    model = ProtoNetClassifier().fit(frame, np.where(x[:, 0] + x[:, 1] > 0, "up", "down"))
    again = pickle.loads(pickle.dumps(model))
    gaps = frame.assign(time=np.nan)
    np.testing.assert_array_equal(again.predict_proba(gaps), model.predict_proba(gaps))


def wine() -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    x, y, _ = load_wine_split()
    frame = pd.DataFrame(x, columns=[f"c{index}" for index in range(x.shape[1])])
    return frame.assign(strength=np.where(frame["c0"] > 13, "strong", "light")), y, np.arange(len(y)) % 4 == 0


def test_predictions_of_rows_with_new_gaps_are_about_those_of_a_model_without_the_columns() -> None:
    x, y, train = wine()
    missing = ["c0", "c2", "c6", "c9", "c12", "strength"]
    model = ProtoNetClassifier().fit(x[train], y[train])
    expected = ProtoNetClassifier().fit(x[train].drop(columns=missing), y[train])
    gaps = x[~train].copy()
    gaps[missing] = None

    def measure(fitted: ProtoNetClassifier, rows: pd.DataFrame) -> tuple[float, float, float]:
        p = fitted.predict_proba(rows)
        correct = p[np.arange(len(p)), np.searchsorted(fitted.classes_, y[~train])]
        return (p.argmax(axis=1) == y[~train]).mean(), -np.log(correct).mean(), p.max(axis=1).mean()

    accuracy, loss, confidence = measure(model, gaps)
    without_accuracy, without_loss, _ = measure(expected, x[~train].drop(columns=missing))
    assert accuracy > without_accuracy - 0.1
    assert loss < without_loss + 0.2
    assert confidence < accuracy + 0.05
    by_median = copy.deepcopy(model)
    assert by_median.encoding_ is not None
    by_median._pipeline = replace(by_median._pipeline, encoding=replace(by_median.encoding_, gap_filler=None))
    assert measure(by_median, gaps)[1] > loss + 0.1


def test_models_with_a_gap_filler_predict_alike_after_they_are_saved(tmp_path: Path) -> None:
    x, y, train = wine()
    model = ProtoNetClassifier().fit(x[train], y[train])
    rows = x[~train].copy()
    rows.loc[rows.index[::3], "c4"] = np.nan
    expected = model.decision_function(rows)
    one = np.concatenate([model.decision_function(rows[at : at + 1]) for at in range(12)])
    np.testing.assert_allclose(one, expected[:12], rtol=1e-12)
    model.save(tmp_path / "m.protonet")
    np.testing.assert_array_equal(ProtoNetClassifier.load(tmp_path / "m.protonet").decision_function(rows), expected)
    encoding = model.encoding_
    assert encoding is not None
    described, tensors = encoding.describe_columns()
    for name, value, reason in (
        ("gaps.mean", torch.zeros(3), r"gaps\.mean of another shape"),
        ("gaps.deviation", -tensors["gaps.deviation"], "no usable filler of gaps"),
        ("gaps.correlation", -tensors["gaps.correlation"], "no usable filler of gaps"),
        ("gaps.correlation", tensors["gaps.correlation"] * torch.nan, r"gaps\.correlation that is not finite"),
        ("gaps.other", torch.zeros(3), "tensors that belong to no column"),
    ):
        with pytest.raises(ValueError, match=reason):
            type(encoding).restore(described, tensors | {name: value})


def test_columns_with_gaps_in_training_keep_their_missing_indicator() -> None:
    x, y, train = wine()
    x.loc[::6, "c3"] = np.nan
    filler = ProtoNetClassifier().fit(x[train], y[train]).encoding_.gap_filler  # type: ignore[union-attr]
    assert filler is not None
    assert filler.was_complete.tolist() == [float(name != "c3") for name in x.columns]
