"""Linear views against scikit-learn, and stacks of MLPs against loops."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from protonet import solve
from protonet.datasets.synthetic import sample_family
from protonet.errors import InputError, InputTypeError
from protonet.fit.search import ModelSearch, split_training_rows
from protonet.fit.solver import fit_solution
from protonet.losses import class_means
from protonet.selection.folds import Fold
from protonet.views.evaluation import MLP_SIZES, CandidateEvaluator, count_mlp_parameters, plan_encoder
from protonet.views.linear import BIAS, FEATURE_SCALINGS, LinearFamily, LinearSpec, LinearView, shrink_covariance
from protonet.views.mlp import (
    MLPSpec,
    MLPTrainingConfig,
    MLPTrainingData,
    ResidualMLPs,
    build_mlp_training_data,
    train_mlps,
)
from protonet.views.shifts import shift_rows
from protonet.views.view import TrainingRows, renumber_by_first_row
from tests.strategies import accuracy, blobs, seeds


def fit(scaling: str, x: torch.Tensor, y: torch.Tensor, classes: int = 5) -> LinearView:
    return LinearSpec(scaling).fit(TrainingRows(x, y, classes))


def cosine_accuracy(
    view: LinearView, x: torch.Tensor, y: torch.Tensor, test: tuple[torch.Tensor, torch.Tensor]
) -> float:
    prototypes = F.normalize(class_means(F.normalize(view.source(x), dim=1), y, 128)[0], dim=1)
    return accuracy(F.normalize(view.source(test[0]), dim=1) @ prototypes.T, test[1])


def test_standardised_is_scikit_learns_up_to_scale() -> None:
    x, y = blobs(1)
    x[:, 3] = 7.0  # a constant feature is dropped, not divided by zero
    z = fit("standardised", x, y).source(x)
    expected = torch.from_numpy(StandardScaler().fit_transform(x.double().numpy())).float()
    torch.testing.assert_close(z / z.std(), expected / expected.std(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [2, 3, 6, 40])
def test_shrunken_covariance_is_nearer_to_the_truth_than_the_sample(rows: int) -> None:
    """In the loss that the estimator is made for, of inverses; with dim 20 the ratio passes through 1."""
    generator = torch.Generator().manual_seed(rows)
    truth = torch.logspace(0, 2, 20, dtype=torch.float64)
    residuals = torch.randn(5 * rows, 20, generator=generator, dtype=torch.float64) * truth.sqrt()
    basis, variances, remaining = shrink_covariance(residuals, len(residuals))
    outside = torch.eye(20, dtype=torch.float64) - basis @ basis.T
    estimate = basis * variances @ basis.T + remaining * outside
    assert bool((torch.linalg.eigvalsh(estimate) > 0).all())
    torch.testing.assert_close(estimate.trace(), residuals.square().sum() / len(residuals))
    sample = residuals.T @ residuals / len(residuals)
    ridge = sample + 1e-3 * torch.eye(20, dtype=torch.float64)

    def distance(matrix: torch.Tensor) -> float:
        return float((torch.linalg.inv(matrix) - torch.diag(1 / truth)).square().sum())

    assert distance(estimate) < distance(ridge)


@pytest.mark.parametrize("rows", [60, 300])
def test_copies_and_constants_do_not_change_the_shrunken_variances(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    residuals = torch.randn(rows, 20, generator=generator, dtype=torch.float64) * torch.logspace(-1, 0, 20)
    alone = shrink_covariance(residuals, rows).variances
    copies = shrink_covariance(torch.cat([residuals, residuals], dim=1) / 2**0.5, rows).variances
    padded = shrink_covariance(torch.cat([residuals, torch.zeros(rows, 20)], dim=1), rows).variances
    torch.testing.assert_close(copies, alone)
    torch.testing.assert_close(padded, alone)


def test_a_feature_of_another_unit_does_not_hide_the_others() -> None:
    for scaling in ("standardised", "relevant"):
        x, y = blobs(1, rows=20)
        other = x * torch.tensor([1e7] + [1.0] * 7)
        first, second = fit(scaling, x, y).source(x), fit(scaling, other, y).source(other)
        torch.testing.assert_close(first, second, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("family", "minimum"), [("correlated", 0.95), ("nuisance", 0.95)])
def test_whitening_finds_the_classes_that_noise_hides(family: str, minimum: float) -> None:
    split = sample_family(family, seed=11)
    x, y = torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])
    test = split.test_x, split.test_y
    assert cosine_accuracy(fit("raw", x, y, 128), x, y, test) < 0.1
    assert cosine_accuracy(fit("whitened", x, y, 128), x, y, test) > minimum


@given(seed=seeds, scaling=st.sampled_from(FEATURE_SCALINGS))
def test_views_that_do_not_scale_features_commute_with_rotations(seed: int, scaling: str) -> None:
    x, y = blobs(seed)
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=generator))[0]
    z, turned = fit(scaling, x, y).source(x), fit(scaling, x @ rotation, y).source(x @ rotation)
    if scaling in {"raw", "centred", "whitened"}:
        torch.testing.assert_close(z @ z.T, turned @ turned.T, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(turned.square().mean(), torch.tensor(1.0), atol=1e-4, rtol=0)


BLOCKS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 3])


def fit_blocks(scaling: str, blocks: torch.Tensor | None = BLOCKS) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit a view to features of different units, one of them constant; return its gains (8,) and a mask of the rest."""
    x, y = blobs(4, rows=41)
    x = x * torch.tensor([1.0, 20.0, 0.1, 5.0, 1.0, 0.0, 30.0, 0.01])
    view = LinearSpec(scaling).fit(TrainingRows(x, y, 5, column_indices=blocks))
    return view.source.gain.double(), x.amax(dim=0) > x.amin(dim=0)


def test_features_of_a_block_share_one_gain_and_blocks_have_equal_size() -> None:
    for scaling in ("standardised",):
        gain, varies = fit_blocks(scaling)
        size = 1 / fit_blocks(scaling, None)[0]  # the unit of each feature
        assert bool((gain[~varies] == 0).all()), scaling
        total = torch.zeros(4, dtype=torch.float64)
        for block in range(4):
            used = (block == BLOCKS) & varies
            torch.testing.assert_close(gain[used], gain[used][:1].expand(int(used.sum())))
            total[block] = (gain[used] * size[used]).square().sum()
        torch.testing.assert_close(total, total[:1].expand(4), rtol=1e-4, atol=0)


def test_relevance_is_applied_after_the_scaling_of_blocks() -> None:
    varies = fit_blocks("relevant")[1]
    together, alone = (
        (fit_blocks("relevant", blocks)[0] / fit_blocks("standardised", blocks)[0])[varies] for blocks in (BLOCKS, None)
    )
    torch.testing.assert_close(together / together[0], alone / alone[0], rtol=1e-4, atol=0)
    gain = fit_blocks("relevant")[0][varies] / alone
    torch.testing.assert_close(gain[:3], gain[:1].expand(3), rtol=1e-4, atol=0)


def evaluated_scalings(labels: torch.Tensor) -> tuple[str, ...]:
    x = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(0))
    everything = torch.arange(len(labels))
    evaluator = CandidateEvaluator(TrainingRows(x, labels, 3), [Fold(everything, everything)], plan_encoder(4, 3, 0))
    return tuple(candidate.spec.name for candidate in LinearFamily().candidates(evaluator))


def test_whitening_needs_two_degrees_of_freedom() -> None:
    without = ("raw", "centred", "standardised")
    assert evaluated_scalings(torch.tensor([0, 1, 2])) == without
    assert evaluated_scalings(torch.tensor([0, 1, 2, 2])) == without
    assert evaluated_scalings(torch.tensor([0, 1, 1, 2, 2])) == (*without, "relevant", "whitened")


def test_a_clipped_view_is_tried_and_used_where_outliers_hide_the_classes() -> None:
    split = sample_family("heavy_tails", seed=11)
    x, y = torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])
    test = split.test_x, split.test_y
    assert (
        cosine_accuracy(fit("clipped", x, y, 128), x, y, test)
        > cosine_accuracy(fit("raw", x, y, 128), x, y, test) + 0.3
    )
    used = []
    for values in (x, torch.randn(x.shape, generator=torch.Generator().manual_seed(0))):
        rows = TrainingRows(values, y, 128)
        evaluator = CandidateEvaluator(rows, split_training_rows(rows, 0), plan_encoder(x.shape[1], 128, 0))
        used.append("clipped" in [candidate.spec.name for candidate in LinearFamily().candidates(evaluator)])
    assert used == [True, False]


def test_clipped_features_are_robust_deviations_from_the_median() -> None:
    x, y = blobs(2, rows=40)
    x[:, 2] = (x[:, 2] > 1.5 * x[:, 2].std()) * 5.0  # no interquartile range: the standard deviation counts
    x[:, 3] = 7.0
    low, median, high = np.quantile(x.double().numpy(), [0.25, 0.5, 0.75], axis=0, method="inverted_cdf")
    deviation = (high - low) / 1.349
    deviation[2] = x[:, 2].double().std(correction=0)
    expected = torch.from_numpy((x.double().numpy() - median) / np.where(deviation > 0, deviation, np.inf)).clamp(-1, 1)
    expected /= expected.square().mean().sqrt()
    z = fit("clipped", x, y).source(x)
    torch.testing.assert_close(z.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_bias_coordinate_joins_scaled_views_alone() -> None:
    x, y = blobs(0)
    for scaling in FEATURE_SCALINGS:
        view = fit(scaling, x, y)
        bias = 0.0 if scaling in {"raw", "centred"} else BIAS
        assert view.config.bias == bias
        z = view.source(x)
        expected = torch.cat([z, torch.full((len(x), 1), bias)], dim=1) if bias else z
        assert torch.equal(view(z), expected)
        assert view.part_sizes == (expected.shape[1],)


def test_relevant_features_are_those_whose_means_differ() -> None:
    x, y = blobs(3, rows=50)
    x[:, 5] = torch.randn(len(x), generator=torch.Generator().manual_seed(0))
    view = fit("relevant", x, y)
    weight = view.source.gain * x.std(dim=0)
    assert int(weight.argmin()) == 5
    assert float(weight[5]) < 0.3 * float(weight.max())


def test_features_of_extreme_magnitudes_give_finite_logits() -> None:
    for size in (1e-45, 3e38):
        x, y = blobs(0)
        x[:, 0].copy_(size * x[:, 0].clamp(-1, 1))
        x[::3, 1] = 1e-45
        network = solve([(x, y)])
        assert torch.isfinite(network(x)).all(), size


SPAN = (3, 8)


def draw_rows() -> TrainingRows:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(24) % 3
    x = torch.randn(24, 10, generator=generator)
    x[:, 3:8] += 2 * torch.randn(3, 5, generator=generator)[labels]
    return TrainingRows(x, labels, 3, column_indices=torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3, 4]))


def cut(rows: TrainingRows) -> TrainingRows:
    blocks = None if rows.column_indices is None else rows.column_indices[slice(*SPAN)] - 1
    return replace(rows, features=rows.features[:, slice(*SPAN)], column_indices=blocks)


def test_a_linear_view_of_a_span_is_that_of_its_columns() -> None:
    for scaling in FEATURE_SCALINGS:
        rows = draw_rows()
        some, alone = LinearSpec(scaling, SPAN).fit(rows), LinearSpec(scaling).fit(cut(rows))
        torch.testing.assert_close(some.source(rows.features), alone.source(cut(rows).features))
        torch.testing.assert_close(some(some.source(rows.features)), alone(alone.source(cut(rows).features)))
        assert LinearSpec(scaling, SPAN).name == f"{scaling} 3-7", scaling


def test_noise_columns_do_not_hide_an_informative_span() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(120) % 3
    x = torch.randn(120, 200, generator=generator)
    x[:, 50:56] += 1.5 * torch.randn(3, 6, generator=generator)[labels]
    right = []
    for spans in ([], [(0, 50), (50, 56), (56, 200)]):
        search = replace(ModelSearch(), use_shifts=False)
        solution = fit_solution((x[:30], labels[:30]), search=search, column_spans=spans)
        with torch.no_grad():
            right.append(accuracy(solution.network(x[30:]), labels[30:]))
    assert right[1] > right[0] + 0.05


@given(
    input_dim=st.integers(1, 5000),
    num_classes=st.integers(2, 5000),
    limit=st.one_of(st.integers(0, 10**7), st.floats(0, 1e7)),
)
def test_planned_sizes_use_the_parameter_limit(input_dim: int, num_classes: int, limit: float) -> None:
    plan = plan_encoder(input_dim, num_classes, limit)
    smallest = count_mlp_parameters(input_dim, 1, plan.embedding_dim)
    dim, sizes = plan.embedding_dim, plan.ensemble_sizes
    parameters = [members * count_mlp_parameters(input_dim, hidden, dim) for members, hidden in sizes]
    assert all(count <= limit for count in parameters)
    assert parameters == sorted(set(parameters))
    assert bool(parameters) == (limit >= smallest)
    assert plan.embedding_dim >= input_dim
    cut_by_budget = parameters and plan.ensemble_sizes[-1] != MLP_SIZES[-1]
    if cut_by_budget:  # no further member, or hidden unit, fits
        members, hidden = plan.ensemble_sizes[-1]
        step = smallest * (hidden if members > 1 or (members, hidden) in MLP_SIZES else 1)
        assert parameters[-1] + step > limit


def test_plan_errors() -> None:
    cases: list[tuple[tuple[int, int, Any], type[Exception], str]] = [
        ((0, 2, 1), InputError, "`input_dim` must be a whole number >= 1; got 0"),
        ((1, 1, 1), InputError, "`num_classes` must be a whole number >= 2; got 1"),
        ((1, 2, -1), InputError, "`param_limit` must be a finite number >= 0; got -1"),
        ((1, 2, math.inf), InputError, "`param_limit` must be a finite number >= 0; got inf"),
        ((1, 2, "5"), InputTypeError, "`param_limit` must be a finite number >= 0; got '5'"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            plan_encoder(*arguments)


def test_an_untrained_mlp_is_the_padded_identity() -> None:
    stack = ResidualMLPs(3, 4, 2, 6, torch.Generator().manual_seed(0))
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(stack(z), F.pad(z, (0, 2)).expand(3, 5, 6))


def test_a_stack_equals_a_loop_over_its_members() -> None:
    generator = torch.Generator().manual_seed(0)
    learned = ResidualMLPs(2, 8, 3, 12, generator)
    torch.nn.init.normal_(learned.last, generator=generator)
    z = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    for m in range(2):
        hidden = F.gelu(z[m] @ learned.first[m] + learned.bias[m])
        expected = F.pad(z[m], (0, 4)) + hidden @ learned.last[m]
        torch.testing.assert_close(learned(z)[m], expected)
        torch.testing.assert_close(learned(z[m], slice(m, m + 1))[0], expected)


def rings(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw two classes that no cosine separates: points inside and outside of a circle."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(200) % 2
    direction = F.normalize(torch.randn(200, 2, generator=generator), dim=1)
    return direction * (1 + 2 * labels[:, None]) + 0.2 * torch.randn(200, 2, generator=generator), labels


def run(
    task: MLPTrainingData,
    steps: int,
    *,
    seed: int = 0,
    deadline: float = float("inf"),
    recipe: MLPTrainingConfig | None = None,
) -> list[ResidualMLPs]:
    generator = torch.Generator().manual_seed(seed)
    stack = ResidualMLPs(1, task.inputs.shape[1], 32, 16, generator)
    recipe = recipe or MLPTrainingConfig(input_noise=0.1)
    runs = train_mlps(stack, [task], 2, steps=[steps], generator=generator, deadline=deadline, config=recipe)
    return [average for _, average in runs]


def compute_accuracy(stack: ResidualMLPs, train_set: MLPTrainingData, test_set: MLPTrainingData) -> float:
    embedded = F.normalize(stack(train_set.inputs)[0], dim=1)
    prototypes = F.normalize(class_means(embedded, train_set.labels, 2)[0], dim=1)
    logits = F.normalize(stack(test_set.inputs)[0], dim=1) @ prototypes.T
    return accuracy(logits, test_set.labels)


def test_training_learns_what_cosine_cannot() -> None:
    train_set, test_set = MLPTrainingData(*rings(0)), MLPTrainingData(*rings(1))
    untrained = ResidualMLPs(1, 2, 32, 16, torch.Generator().manual_seed(0))
    assert compute_accuracy(untrained, train_set, test_set) < 0.65
    both = MLPTrainingConfig(input_noise=0.1)
    episodic, proxies = replace(both, cross_entropy_weight=0.0), replace(both, episodic_loss_weight=0.0)
    for steps, recipe in ((200, proxies), (400, episodic)):
        assert compute_accuracy(run(train_set, steps, recipe=recipe)[-1], train_set, test_set) > 0.95


def test_members_of_a_stack_are_independent() -> None:
    """A member learns the same from its task whatever the tasks of the other members are."""
    task, other = MLPTrainingData(*rings(0)), MLPTrainingData(*rings(5))
    results = []
    for tasks in ([task, task], [task, other]):
        generator = torch.Generator().manual_seed(0)
        stack = ResidualMLPs(2, 2, 8, 16, generator)
        for _, average in train_mlps(stack, tasks, 2, steps=[10], generator=torch.Generator().manual_seed(1)):
            results.append(average)
    torch.testing.assert_close(results[0].first[0], results[1].first[0])
    assert not torch.allclose(results[0].first[1], results[1].first[1])


def test_a_deadline_in_the_past_still_takes_one_step() -> None:
    (average,) = run(MLPTrainingData(*rings(0)), 5, deadline=time.monotonic() - 1)
    assert bool((average.last != 0).any())


def test_the_data_of_a_member_include_shifted_rows() -> None:
    x, y = blobs(1)
    rows = TrainingRows(x, y, 5, shifts=(0, 1))
    source = LinearSpec("standardised").fit(rows).source
    task = build_mlp_training_data(source, rows, use_shifts=True)
    torch.testing.assert_close(task.inputs, source(shift_rows(x, (0, 1))))
    numbers, classes = renumber_by_first_row(y)
    assert torch.equal(classes[task.labels], y.repeat(2))
    plain = build_mlp_training_data(source, rows, use_shifts=False)
    torch.testing.assert_close(plain.inputs, source(x))
    assert torch.equal(plain.labels, numbers)


def test_a_fitted_view_is_the_training_run_of_its_seed() -> None:
    x, y = blobs(2)
    source = LinearSpec("standardised").fit(TrainingRows(x, y, 5)).source
    spec = MLPSpec(LinearSpec("standardised"), n_mlps=2, n_hidden=3, n_steps=4, embedding_dim=12)
    view = spec.fit(TrainingRows(x, y, 5, seed=7), source)
    generator = torch.Generator().manual_seed(7)
    stack = ResidualMLPs(2, 8, 3, 12, generator)
    task = build_mlp_training_data(source, TrainingRows(x, y, 5), use_shifts=False)
    ((_, expected),) = train_mlps(stack, [task] * 2, 5, steps=[4], generator=generator)
    assert torch.equal(view(source(x)), torch.cat(list(expected(source(x))), dim=1))
    assert view.source is source
    assert view.part_sizes == (12, 12)
    assert all(parameter.requires_grad for parameter in view.mlps.parameters())
    assert not torch.equal(spec.fit(TrainingRows(x, y, 5, seed=8), source).mlps.first, view.mlps.first)
    assert spec.name == "learned: 2x3 MLP on standardised, 4 steps"
