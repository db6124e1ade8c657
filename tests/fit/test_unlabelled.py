"""Unlabelled rows: label propagation, sampling, when they are used for a fit, and novel clusters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from protonet.datasets import load_digits
from protonet.errors import InputError, InputTypeError
from protonet.estimator.labels import detect_unlabelled
from protonet.fit.active import cluster_unknown
from protonet.fit.cross_validation import cross_validate, predict_held_out
from protonet.fit.networks import (
    N_NEIGHBOURS,
    OUTLIER_RATE,
    PROPAGATION_ALPHA,
    balance_class_frequencies,
    fit_labelled_rows,
    fit_with_unlabelled_rows,
    neighbour_graph,
    predict_pseudo_labels,
    propagate_labels,
)
from protonet.fit.search import RAW_LINEAR, UnlabelledWeights
from protonet.fit.solver import Solution, fit_solution
from protonet.fit.training_set import UnlabelledSamples, read_unlabelled_samples
from protonet.metrics import compute_metrics
from protonet.views.evaluation import plan_encoder
from protonet.views.fixed_convolution import FixedConvolutionFamily
from protonet.views.mlp import MLPFamily
from tests.strategies import LITTLE, PLAIN, accuracy, load_wine_split, solve_with, unit_rows


def to_dense(n: int, rows: Tensor, others: Tensor, weights: Tensor) -> Tensor:
    return torch.zeros(n, n, dtype=torch.float64).index_put_((rows, others), weights)


def test_neighbour_graph_equals_a_slow_loop() -> None:
    x, k = unit_rows(40), 5
    distance = 1 - (x @ x.T).double()
    expected = torch.zeros(40, 40, dtype=torch.float64)
    nearest = [sorted((float(distance[i, j]), j) for j in range(40) if j != i)[:k] for i in range(40)]
    for i in range(40):
        for d, j in nearest[i]:
            expected[i, j] = expected[j, i] = np.exp(-4 * d / np.sqrt(nearest[i][-1][0] * nearest[j][-1][0]))
    degrees = expected.sum(dim=1).sqrt()
    expected /= degrees[:, None] * degrees
    torch.testing.assert_close(to_dense(40, *neighbour_graph(x, k)), expected, rtol=1e-4, atol=1e-6)


def test_propagated_labels_solve_the_linear_system() -> None:
    x, labels = unit_rows(60), torch.tensor([0, 1, 2, 0, 1, 2])
    initial = torch.rand(54, 3, generator=torch.Generator().manual_seed(1)).softmax(dim=1)
    graph = to_dense(60, *neighbour_graph(x, N_NEIGHBOURS))
    start = torch.cat([torch.nn.functional.one_hot(labels, 3), initial]).double()
    solved = torch.linalg.solve(torch.eye(60, dtype=torch.float64) - PROPAGATION_ALPHA * graph, start)[6:]
    expected = balance_class_frequencies(solved / solved.sum(dim=1, keepdim=True))
    torch.testing.assert_close(propagate_labels(x, labels, initial).double(), expected, rtol=0, atol=2e-3)


def test_similar_class_frequencies_become_equal_and_others_less_so() -> None:
    similar = torch.tensor([[0.8, 0.2], [0.7, 0.3], [0.3, 0.7], [0.6, 0.4]], dtype=torch.float64)
    balanced = balance_class_frequencies(similar)
    torch.testing.assert_close(balanced.mean(dim=0), torch.full((2,), 0.5, dtype=torch.float64), rtol=0, atol=1e-3)
    torch.testing.assert_close(balanced.sum(dim=1), torch.ones(4, dtype=torch.float64))
    different = torch.tensor([[0.95, 0.05]] * 9 + [[0.1, 0.9]], dtype=torch.float64)
    mean = different.mean(dim=0)[0]
    assert mean - 0.1 < balance_class_frequencies(different).mean(dim=0)[0] < mean
    absent = torch.tensor([[0.8, 0.2, 0.0], [0.4, 0.6, 0.0], [0.3, 0.7, 0.0]], dtype=torch.float64)
    assert balance_class_frequencies(absent)[:, 2].tolist() == [0, 0, 0]


def test_sampled_rows_depend_on_the_rows_alone_and_keep_their_digits() -> None:
    x = torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    sampled, indices, total = read_unlabelled_samples(x, 3, 100)
    assert (len(sampled), total) == (100, 5000)
    torch.testing.assert_close(x[indices], sampled, rtol=0, atol=0)
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x[order], torch.zeros(5000)), batch_size=37)
    for source in (x[order].numpy(), loader, TensorDataset(x[order]), (part for part in x[order].split(1700))):
        again, indices_again, _ = read_unlabelled_samples(source, 3, 100)
        torch.testing.assert_close(again, sampled, rtol=0, atol=0)
        torch.testing.assert_close(order[indices_again], indices)
    x = torch.tensor([[1e9 + 1, 2.0], [1e9 + 2, 3.0]], dtype=torch.float64)  # all of few rows are sampled
    sampled, indices, _ = read_unlabelled_samples(x, 2, 10)
    torch.testing.assert_close(sampled, x[indices], rtol=0, atol=0)
    assert read_unlabelled_samples([], 2, 10)[2] == 0


def test_invalid_unlabelled_rows_are_errors() -> None:
    cases: list[tuple[object, type[Exception], str]] = [
        (torch.ones(4, 3), InputError, "must have 2 features per row, as the labelled rows have"),
        (torch.ones(4), InputError, r"got shape \(4,\) in batch 0"),
        (torch.tensor([[1.0, torch.nan]]), InputError, "must be finite; got NaN, infinity or more .* in 1 of 1 rows"),
        ([["a"]], InputTypeError, "must hold rows of real numbers; got str in batch 0"),
        (3, InputTypeError, "must be iterable; got int"),
    ]
    for source, error, message in cases:
        with pytest.raises(error, match=message):
            read_unlabelled_samples(source, 2, 10)


def moons(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    angle, y = torch.rand(n, generator=generator) * torch.pi, torch.arange(n) % 2
    x = torch.stack([angle.cos() + y, angle.sin() * (1 - 2 * y) + 0.4 * y], dim=1)
    return x + 0.05 * torch.randn(n, 2, generator=generator), y


#: A search of linear views and forests alone, with which unlabelled rows help on digits.
SEARCH = LITTLE.without_family(FixedConvolutionFamily).with_family(MLPFamily(max_n_sizes=0))


def split_digits() -> tuple[Tensor, Tensor, Tensor]:
    """Return three labelled rows of each of six classes, their labels, and 37 unlabelled rows of each class."""
    digits = load_digits()
    rows = torch.cat([(digits.y == label).nonzero()[:40, 0] for label in range(6)]).view(6, 40)
    few, hidden = rows[:, :3].flatten(), rows[:, 3:].flatten()
    return digits.x[few], digits.y[few], digits.x[hidden]


@pytest.fixture(scope="module")
def solved() -> Solution:
    x, y, hidden = split_digits()
    return fit_solution([(x, y)], search=SEARCH, unlabelled=hidden)


def test_unlabelled_rows_raise_the_accuracy(solved: Solution) -> None:
    x, y, hidden = split_digits()
    truth = torch.arange(6).repeat_interleave(37)
    assert solved.semi_supervised is not None
    assert solved.semi_supervised.uses_unlabelled
    assert solved.semi_supervised.held_out_losses is not None
    assert solved.semi_supervised.held_out_losses[1] < solved.semi_supervised.held_out_losses[0]
    assert solved.network.counts.tolist() == [3] * 6  # samples that are added later move prototypes as before
    labelled_only = solve_with([(x, y)], search=SEARCH)
    assert accuracy(solved.network(hidden), truth) > accuracy(labelled_only(hidden), truth) + 0.02


def test_an_unlabelled_row_gets_its_most_probable_class_unless_its_weight_is_zero(solved: Solution) -> None:
    training_set, n = solved.training_set, 222
    probabilities = torch.rand(n, 6, generator=torch.Generator().manual_seed(0)).softmax(dim=1)
    weights = (torch.arange(n) % 3 > 0).double()
    unlabelled, selected = UnlabelledWeights(weights, 0.1), solved.selected._replace(views=((RAW_LINEAR, 1.0),))
    network = fit_with_unlabelled_rows(training_set, selected, unlabelled, probabilities)
    assert training_set.unlabelled is not None
    x = torch.nn.functional.normalize(torch.cat([training_set.rows.features, training_set.unlabelled.features]), dim=1)
    labels = torch.cat([training_set.rows.labels, probabilities.argmax(dim=1)])
    counts = torch.cat([torch.ones(18), weights * probabilities.amax(dim=1)])
    for label, prototype in enumerate(network.prototypes):
        mean = (counts[:, None] * x)[labels == label].sum(dim=0)
        torch.testing.assert_close(prototype, (mean / mean.norm()).float(), rtol=0, atol=1e-5)


def test_each_row_is_classified_alone_and_order_has_no_effect(solved: Solution) -> None:
    x, y, hidden = split_digits()
    network = solved.network
    with torch.no_grad():
        torch.testing.assert_close(network(hidden[7:8]), network(hidden)[7:8], rtol=1e-4, atol=1e-4)
        again = solve_with([(x.flip(0), y.flip(0))], search=SEARCH, unlabelled=[hidden[90:], hidden[:90]])
        torch.testing.assert_close(again(hidden), network(hidden))


def test_fold_models_are_also_fitted_to_unlabelled_rows(solved: Solution) -> None:
    cv = cross_validate(solved)
    alone = cross_validate(solved._replace(selected=solved.selected._replace(unlabelled=None)))
    for one, other in zip(cv.fold_models, alone.fold_models, strict=True):
        assert one.counts.tolist() == other.counts.tolist()
        assert not torch.equal(one.prototypes, other.prototypes)
    assert compute_metrics(predict_held_out(cv), cv.labels).accuracy > 0.9


def test_an_empty_set_of_unlabelled_rows_changes_nothing() -> None:
    x, y = moons(20, 0)
    given: list[UnlabelledSamples | None] = [None, [], torch.empty(0, 2)]
    networks = [solve_with([(x, y)], search=PLAIN, unlabelled=rows) for rows in given]
    for network in networks[1:]:
        torch.testing.assert_close(network(x), networks[0](x), rtol=0, atol=0)


def test_a_class_without_a_label_is_detected_as_a_novel_cluster() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 4 * torch.eye(6)[:4]
    x = [centre + 0.5 * torch.randn(60, 6, generator=generator) for centre in centres]
    train = [(torch.cat([part[:10] for part in x[:3]]), torch.arange(3).repeat_interleave(10))]
    hidden = torch.cat([part[10:] for part in x])  # the last 50 of them are of the fourth class
    solution = fit_solution(train, search=PLAIN, unlabelled=hidden)
    (group,) = cluster_unknown(solution)
    assert solution.semi_supervised is not None
    assert solution.selected.unlabelled is not None
    outliers = solution.semi_supervised.known_score_ranks < OUTLIER_RATE
    assert 0 < int(outliers.sum()) < 100
    assert torch.equal(solution.selected.unlabelled.weights == 0, outliers)
    assert len(set(group) & set(range(150, 200))) >= 45
    assert len(group) <= 52
    few = (torch.cat([part[:6] for part in x[:3]]), torch.arange(3).repeat_interleave(6))
    unsure = fit_solution(few, search=PLAIN, unlabelled=hidden)  # 18 held-out rows are too few to detect outliers
    assert unsure.semi_supervised is not None
    assert unsure.selected.unlabelled is not None
    assert bool((unsure.semi_supervised.known_score_ranks < OUTLIER_RATE).any())
    assert bool(unsure.selected.unlabelled.weights.all())
    known = fit_solution(train, search=PLAIN, unlabelled=hidden[:150])
    assert cluster_unknown(known) == []
    learned = MLPFamily().smallest_trained_spec(plan_encoder(6, 3, 1000), RAW_LINEAR)
    assert learned is not None
    trained = solution._replace(selected=solution.selected._replace(views=((learned, 1.0),)))
    with torch.no_grad():
        assert [set(item) & set(range(150, 200)) for item in cluster_unknown(trained)] != []
    assert cluster_unknown(fit_solution(train, search=PLAIN)) == []


def test_unlabelled_rows_are_not_used_without_time_and_not_validated_with_one_row_per_class() -> None:
    x, y, few = map(torch.from_numpy, load_wine_split())
    for rows, limit in ((few, 0.0), (few[::5], 900.0)):
        solution = fit_solution([(x[rows].float(), y[rows])], search=PLAIN, unlabelled=x.float(), time_limit=limit)
        assert solution.semi_supervised is not None
        assert solution.semi_supervised.uses_unlabelled == (limit > 0)
        assert solution.semi_supervised.held_out_losses is None
        assert (solution.selected.unlabelled is None) == (limit == 0)
        assert cluster_unknown(solution) == []


def test_labels_propagate_from_a_part_of_many_rows(solved: Solution, monkeypatch: pytest.MonkeyPatch) -> None:
    network = fit_labelled_rows(solved.training_set.rows, solved.selected)
    expected, logits = predict_pseudo_labels(solved.training_set, network)
    monkeypatch.setattr("protonet.fit.networks.MAX_POOLED_LABELLED_ROWS", 5)
    probabilities, same = predict_pseudo_labels(solved.training_set, network)
    torch.testing.assert_close(same, logits, rtol=1e-4, atol=1e-4)
    assert accuracy(probabilities, expected.argmax(dim=1)) > 0.8


def test_unlabelled_rows_are_detected() -> None:
    cases: list[tuple[Any, list[int]]] = [
        (np.array([0, 1, -1, -1, -1]), [2, 3, 4]),
        (np.array([0.0, 1.0, -1.0, math.nan, -1.0]), [2, 3, 4]),
        (np.array([0, 1, None, -1, -1], object), [2, 3, 4]),
        (["a", None, "b", math.nan], [1, 3]),
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
    ]
    for y, indices in cases:
        assert detect_unlabelled(y)[0].tolist() == indices, y


def test_few_labels_of_minus_one_give_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"2 of 6 rows have the label -1, which means unlabelled. If it is a class"):
        assert detect_unlabelled([-1, 0, 1, -1, 0, 1])[0].tolist() == [0, 3]


def test_unlabelled_rows_are_used_only_if_the_held_out_log_loss_falls() -> None:
    differences = []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        y = torch.arange(24) % 2
        x = torch.randn(24, 2, generator=generator) + 2.0 * y[:, None]
        others = torch.randn(40, 2, generator=generator) * 2 + 1
        pooled = fit_solution([(x, y)], search=PLAIN, unlabelled=others).semi_supervised
        assert pooled is not None
        assert pooled.held_out_losses is not None
        assert pooled.uses_unlabelled == (pooled.held_out_losses[1] < pooled.held_out_losses[0])
        differences.append((abs(pooled.held_out_losses[1] - pooled.held_out_losses[0]), pooled.is_significant))
    assert not min(differences)[1]  # the smallest difference is below its error


def test_misleading_unlabelled_rows_are_not_used() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 2
    x = torch.randn(40, 2, generator=generator) * torch.tensor([0.2, 1.0])
    x[:, 0] += y - 0.5  # the classes differ along one axis, and the other rows lie in clusters along the other one
    others = torch.randn(400, 2, generator=generator) * torch.tensor([1.0, 0.05])
    others[:, 1] += 3 * torch.where(torch.arange(400) % 2 == 0, 1.0, -1.0)
    fresh = torch.randn(400, 2, generator=generator) * torch.tensor([0.2, 1.0])
    fresh[:, 0] += torch.arange(400) % 2 - 0.5
    alone, pooled = (solve_with([(x, y)], search=PLAIN, unlabelled=rows)(fresh) for rows in (None, others))
    truth = torch.arange(400) % 2
    assert accuracy(pooled, truth) >= accuracy(alone, truth) - 0.01
