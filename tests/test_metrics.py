from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import balanced_accuracy_score, classification_report, confusion_matrix, roc_auc_score

from protonet.metrics import (
    calibration_error,
    fill_bins,
    find_auroc,
    find_interval,
    measure,
    measure_classes,
    suspect_labels,
)
from tests.strategies import seeds


def predictions(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(n, generator=generator, dtype=torch.float64)
    return confidence, torch.rand(n, generator=generator) < confidence


@pytest.mark.parametrize("n_bins", [1, 4, 15])
def test_bins_are_the_slow_loops(n_bins: int) -> None:
    confidence, right = predictions(200)
    confidence[:3] = torch.tensor([0.0, 1.0, 0.5])
    bins = fill_bins(confidence, right, n_bins)
    assert (bins.shape, bins.dtype) == ((n_bins, 3), torch.float64)
    for position in range(n_bins):
        low, high = position / n_bins, (position + 1) / n_bins
        inside = (confidence > low) & (confidence <= high)
        if position == 0:
            inside |= confidence == 0
        expected = [float(inside.sum()), float(confidence[inside].sum()), float(right[inside].sum())]
        np.testing.assert_allclose(bins[position].numpy(), expected, rtol=1e-12)


@given(seed=seeds, n=st.integers(1, 60), cut=st.integers(0, 60))
def test_bins_of_batches_add_up(seed: int, n: int, cut: int) -> None:
    confidence, right = predictions(n, seed)
    parts = [fill_bins(confidence[part], right[part]) for part in (slice(None, cut), slice(cut, None))]
    torch.testing.assert_close(parts[0] + parts[1], fill_bins(confidence, right))
    square = (confidence[:, None].expand(-1, 2), right[:, None].expand(-1, 2))  # any shape
    torch.testing.assert_close(fill_bins(*square), 2 * fill_bins(confidence, right))


def test_calibration_error() -> None:
    bins = torch.tensor([[0.0, 0.0, 0.0], [10.0, 6.0, 5.0], [30.0, 27.0, 30.0]], dtype=torch.float64)
    assert calibration_error(bins) == pytest.approx(0.25 * abs(0.6 - 0.5) + 0.75 * abs(0.9 - 1.0))


def test_calibration_error_without_predictions() -> None:
    assert math.isnan(calibration_error(torch.zeros(15, 3, dtype=torch.float64)))


@given(seed=seeds)
def test_calibration_error_is_that_of_measure(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (50,), generator=generator)
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    error = calibration_error(fill_bins(confidence, predicted == labels))
    assert error == pytest.approx(measure(logits, labels).calibration_error, abs=1e-9)
    assert 0 <= error <= 1


def test_sure_and_right_is_calibrated_sure_and_wrong_is_not() -> None:
    assert calibration_error(fill_bins(torch.ones(5), torch.ones(5, dtype=torch.bool))) == 0
    assert calibration_error(fill_bins(torch.ones(5), torch.zeros(5, dtype=torch.bool))) == 1


@given(seeds, st.integers(2, 6), st.integers(1, 40))
def test_figures_of_classes_are_those_of_scikit_learn(seed: int, num_classes: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    labels, predicted = rng.integers(num_classes, size=(2, n))
    confusion = torch.from_numpy(confusion_matrix(labels, predicted, labels=range(num_classes)))
    ours = measure_classes(confusion)
    theirs = classification_report(labels, predicted, output_dict=True, zero_division=0)
    for number in range(num_classes):
        figures = theirs.get(str(number), {"recall": 0, "precision": 0, "f1-score": 0, "support": 0})
        own = [float(each[number]) for each in (ours.recall, ours.precision, ours.f1, ours.rows)]
        assert own == pytest.approx([figures[name] for name in ("recall", "precision", "f1-score", "support")])
    means = [theirs["macro avg"][name] for name in ("recall", "precision", "f1-score")]
    assert list(ours.macro.values()) == pytest.approx(means)
    present = labels[:, None] == np.unique(labels)
    recalls = [np.mean(predicted[rows] == labels[rows]) for rows in present.T]
    assert ours.balanced_accuracy == pytest.approx(np.mean(recalls))
    if set(predicted) <= set(labels) and len(set(labels)) > 1:
        assert ours.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, predicted))


@given(seeds, st.integers(1, 30), st.integers(1, 30), st.booleans())
def test_auroc_is_that_of_scikit_learn(seed: int, n: int, m: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(4, size=n + m).astype(float) if ties else rng.normal(size=n + m)
    known = np.arange(n + m) < n
    ours = find_auroc(torch.from_numpy(scores[:n]), torch.from_numpy(scores[n:]))
    assert ours == pytest.approx(roc_auc_score(known, scores))


@given(seed=seeds)
def test_suspicion_is_the_slow_loops(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, labels = 3 * torch.randn(8, 4, generator=generator), torch.randint(4, (8,), generator=generator)
    found = suspect_labels(logits, labels)
    for row, label, score in zip(logits.double(), labels.tolist(), found.tolist(), strict=True):
        p = row.softmax(dim=0).tolist()
        others = [share for number, share in enumerate(p) if number != label]
        assert score == pytest.approx(math.log(max(others) / p[label]))
        assert (score > 0) == (int(row.argmax()) != label)
    order = torch.randperm(4, generator=generator)
    renamed = torch.empty_like(order).index_copy_(0, order, torch.arange(4))
    torch.testing.assert_close(suspect_labels(logits[:, order].double() + 7, renamed[labels]), found)


@pytest.mark.parametrize(("share", "rows"), [(0.0, 7), (0.3, 40), (1.0, 12)])
def test_interval_is_scipys(share: float, rows: int) -> None:
    theirs = binomtest(round(share * rows), rows).proportion_ci(method="wilson")
    assert find_interval(share, rows) == pytest.approx((theirs.low, theirs.high), abs=1e-4)
