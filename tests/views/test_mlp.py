from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from protonet.errors import InputError, InputTypeError
from protonet.losses import class_means
from protonet.views.evaluation import MLP_SIZES, count_mlp_parameters, plan_encoder
from protonet.views.linear import LinearSpec
from protonet.views.mlp import (
    MLPSpec,
    MLPTrainingConfig,
    MLPTrainingData,
    ResidualMLPs,
    build_mlp_training_data,
    train_mlps,
)
from protonet.views.shifts import shift_rows
from protonet.views.view import TrainingRows, number_by_first_row
from tests.strategies import accuracy, blobs


@given(
    input_dim=st.integers(1, 5000),
    num_classes=st.integers(2, 5000),
    limit=st.one_of(st.integers(0, 10**7), st.floats(0, 1e7)),
)
def test_planned_sizes_use_the_parameter_limit(input_dim: int, num_classes: int, limit: float) -> None:
    plan = plan_encoder(input_dim, num_classes, limit)
    smallest = count_mlp_parameters(input_dim, 1, plan.embedding_dim)
    parameters = [
        members * count_mlp_parameters(input_dim, hidden, plan.embedding_dim) for members, hidden in plan.ensemble_sizes
    ]
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
    for steps, recipe in (
        (200, replace(both, episodic_loss_weight=0.0)),
        (400, replace(both, cross_entropy_weight=0.0)),
    ):
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
    task = build_mlp_training_data(source, rows, shifted=True)
    torch.testing.assert_close(task.inputs, source(shift_rows(x, (0, 1))))
    numbers, classes = number_by_first_row(y)
    assert torch.equal(classes[task.labels], y.repeat(2))
    plain = build_mlp_training_data(source, rows, shifted=False)
    torch.testing.assert_close(plain.inputs, source(x))
    assert torch.equal(plain.labels, numbers)


def test_a_fitted_view_is_the_training_run_of_its_seed() -> None:
    x, y = blobs(2)
    source = LinearSpec("standardised").fit(TrainingRows(x, y, 5)).source
    spec = MLPSpec(LinearSpec("standardised"), members=2, hidden=3, steps=4, embedding_dim=12)
    view = spec.fit(TrainingRows(x, y, 5, seed=7), source)
    generator = torch.Generator().manual_seed(7)
    stack = ResidualMLPs(2, 8, 3, 12, generator)
    task = build_mlp_training_data(source, TrainingRows(x, y, 5), shifted=False)
    ((_, expected),) = train_mlps(stack, [task] * 2, 5, steps=[4], generator=generator)
    assert torch.equal(view(source(x)), torch.cat(list(expected(source(x))), dim=1))
    assert view.source is source
    assert view.sizes == (12, 12)
    assert all(parameter.requires_grad for parameter in view.mlps.parameters())
    assert not torch.equal(spec.fit(TrainingRows(x, y, 5, seed=8), source).mlps.first, view.mlps.first)
    assert spec.name == "learned: 2x3 MLP on standardised, 4 steps"
