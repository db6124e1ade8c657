"""The sample that replaces many rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from protonet.fit import training_set
from protonet.fit.cross_validation import cross_validate, held_out_indices, measure_cross_validation
from protonet.fit.solver import fit_solution
from protonet.fit.training_set import ROW_SAMPLE, sample_training_rows
from protonet.views.view import TrainingRows
from tests.strategies import PLAIN

N = ROW_SAMPLE.max_rows + 9000
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
#: Two large classes, and a rare one whose rows all stay.
Y = (X[:, 0] > 0).long()
Y[X[:, 1] > X[:, 1].sort().values[-301]] = 2


def test_a_sample_keeps_rare_rows_and_the_weight_of_each_class() -> None:
    order = Y.argsort(stable=True)
    weights = torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    rows = TrainingRows(X[order], Y[order], 3, weights=weights)
    sample, indices = sample_training_rows(rows)
    assert ROW_SAMPLE.max_rows - 3 <= len(sample.labels) <= ROW_SAMPLE.max_rows
    assert sample.weights is not None
    assert sample.row_fraction == 1.0
    torch.testing.assert_close(torch.bincount(sample.labels, sample.weights), torch.bincount(Y[order], weights))
    assert int((sample.labels == 2).sum()) == 300
    kept = indices >= 0
    assert torch.equal(sample.features[indices[kept]], rows.features[kept])
    gaps = kept.nonzero().flatten().diff()
    assert int(gaps.max()) <= 2  # evenly spaced


def test_many_classes_share_the_sample() -> None:
    labels = (torch.arange(N) % 2000).sort().values
    sample, _ = sample_training_rows(TrainingRows(X, labels, 2000))
    counts = torch.bincount(sample.labels)
    assert len(sample.labels) <= ROW_SAMPLE.max_rows
    assert int(counts.max() - counts.min()) <= 1


def test_a_network_of_a_sample_counts_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_set, "ROW_SAMPLE", replace(ROW_SAMPLE, max_rows=400, max_per_class=50))
    x, y = X[:1500], Y[:1500]
    solution = fit_solution([(x, y)], effort=PLAIN)
    assert len(solution.training_set.rows.labels) <= 400
    torch.testing.assert_close(solution.network.counts.float(), torch.bincount(y).float(), rtol=0, atol=1)
    indices, cv = held_out_indices(solution.training_set), cross_validate(solution)
    assert torch.equal(indices[indices >= 0].sort().values, torch.arange(len(cv.labels)))
    held_out = (indices >= 0).nonzero().flatten()
    torch.testing.assert_close(cv.features[indices[held_out]], x[held_out])
    metrics = measure_cross_validation(cv)
    assert abs(int(metrics.confusion.sum()) / len(cv.labels) - 1) < 0.05
    with torch.no_grad():
        accuracy = float((solution.network(X).argmax(dim=1) == Y).float().mean())
    assert metrics.interval[0] <= accuracy <= metrics.interval[1]
