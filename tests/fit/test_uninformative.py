from __future__ import annotations

import pytest
import torch

from protonet.fit.uninformative import PRIOR_PSEUDO_COUNT, compute_uninformative_logits, parse_class_counts


def compute_probabilities(counts: list[int], uninformative: list[int] | None = None) -> list[float]:
    seen = torch.tensor(uninformative or [0] * len(counts))
    logits = compute_uninformative_logits(torch.tensor(counts), seen)
    assert logits is not None
    assert bool(logits.isfinite().all())
    return logits.softmax(dim=0).tolist()


def test_probabilities_are_class_frequencies_updated_by_uninformative_training_rows() -> None:
    assert compute_probabilities([30, 10, 0]) == pytest.approx([0.75, 0.25, 0.0])
    for first, second in ((5, 0), (0, 20), (3, 7)):
        total = first + second + PRIOR_PSEUDO_COUNT
        expected = [(first + 0.6 * PRIOR_PSEUDO_COUNT) / total, (second + 0.4 * PRIOR_PSEUDO_COUNT) / total]
        assert compute_probabilities([60, 40], [first, second]) == pytest.approx(expected)


def test_the_network_classifies_uninformative_rows_if_most_training_rows_are() -> None:
    assert compute_uninformative_logits(torch.tensor([10, 10]), torch.tensor([6, 5])) is None


def test_counts_of_a_file_are_not_trusted() -> None:
    assert parse_class_counts([3, 1], 3).tolist() == [3, 1, 0]  # a class that was added later has no such rows
    for counts in (None, "12", [1, 2, 3], [1, -1], [1.0, 2.0], [True, 1], [2**60, 0]):
        assert parse_class_counts(counts, 2).tolist() == [0, 0], counts
