"""Tables with few rows per class: every view, cross-validation and command works with any class sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from protonet.fit.cross_validation import cross_validate, predict_baselines, predict_held_out, repeat_cross_validation
from protonet.fit.diagnostics import measure_learning_curve
from protonet.fit.networks import fit_labelled_rows, fit_selected_model
from protonet.fit.search import SelectedModel
from protonet.fit.solver import Solution, fit_solution
from protonet.fit.training_set import prepare_training_set
from protonet.views.fixed_convolution import FixedConvolutionSpec
from protonet.views.forest import ForestSpec
from protonet.views.kernel_ridge import KERNEL_RIDGE_SPECS
from protonet.views.linear import FEATURE_SCALINGS, LinearSpec
from protonet.views.mlp import MLPSpec
from protonet.views.view import TrainingRows, ViewSpec
from tests.commands.cases import FAST, Run
from tests.strategies import PLAIN, write_columns

DIM = 9
LINEAR = [LinearSpec(scaling) for scaling in FEATURE_SCALINGS]
#: Small views of every kind.
VIEWS_OF_EVERY_KIND: list[ViewSpec] = [
    *LINEAR,
    *KERNEL_RIDGE_SPECS,
    ForestSpec(3),
    FixedConvolutionSpec(DIM, False, 0.1),
    FixedConvolutionSpec(3, False, 0.1),
]
VIEWS_OF_EVERY_KIND += [MLPSpec(LinearSpec("whitened"), 2, 3, steps=2, embedding_dim=12)]
#: Numbers of rows of two to five classes, from one to six: all equal numbers, and one in 60 of the others.
SIZES = [sizes for classes in range(2, 6) for sizes in itertools.combinations_with_replacement(range(1, 7), classes)]
SIZES = [sizes for index, sizes in enumerate(SIZES) if len(set(sizes)) == 1 or index % 60 == 0]


def make_rows(sizes: Sequence[int], dim: int = DIM) -> tuple[Tensor, Tensor]:
    """Draw rows (n, dim) around a centre for each class, and labels (n,), with these numbers of rows per class."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    centres, noise = (torch.randn(rows, dim, generator=generator) for rows in (len(sizes), len(y)))
    return centres[y] + 0.5 * noise, y


@pytest.mark.parametrize("sizes", [(0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 1, 1), (0, 1, 2), (1, 1, 2), (0, 2, 2)])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_view_fits_to_single_rows_and_to_fewer_classes(sizes: tuple[int, ...], weighted: bool) -> None:
    x, y = make_rows(sizes)
    weights = torch.linspace(0.2, 1, len(y), dtype=torch.float64) if weighted else None
    rows = TrainingRows(x, y, len(sizes), shifts=(0, 1, -1), width=DIM, weights=weights)
    for view in VIEWS_OF_EVERY_KIND:
        network = fit_labelled_rows(rows, SelectedModel(((view, 1.0),), 0.1, rows.shifts))
        embedding = network.embed(torch.cat([x, 3 * torch.eye(DIM)]))
        assert bool(torch.isfinite(embedding).all()), view.name


def test_cross_validation_works_with_any_class_sizes() -> None:
    choice = SelectedModel(((LinearSpec("whitened"), 1.0), (KERNEL_RIDGE_SPECS[3], 1.0)), 0.1)
    for sizes in SIZES:
        x, y = make_rows(sizes, 3)
        problem, _ = prepare_training_set(x, y, len(sizes))
        cv = cross_validate(Solution(fit_selected_model(problem, choice), choice, problem))
        assert len(cv.labels) == sum(size for size in sizes if size > 1), sizes
        scores = [predict_held_out(cv), cv.offset, *predict_baselines(problem).values()]
        assert all(bool(torch.isfinite(score).all()) for score in scores), sizes


@pytest.mark.parametrize("sizes", [(2, 3), (1, 2, 3, 4, 6)])
def test_repeats_and_learning_curves_work_with_any_class_sizes(sizes: tuple[int, ...]) -> None:
    solution = fit_solution(make_rows(sizes), effort=PLAIN)
    cv = cross_validate(solution)
    assert bool(torch.isfinite(repeat_cross_validation(solution, cv, 2)).all())
    assert measure_learning_curve(solution, cv).correct.shape[1] == len(cv.labels)


def test_commands_work_with_any_class_sizes(tmp_path: Path, run: Run) -> None:
    x, y = make_rows((1, 2, 4), 3)
    columns = {f"x{index}": column.tolist() for index, column in enumerate(x.T)}
    few = {name: cells[:2] for name, cells in columns.items()}
    table = write_columns(tmp_path / "t.csv", {**columns, "kind": np.array(list("abcde"))[y].tolist()})
    more = write_columns(tmp_path / "m.csv", {**few, "kind": ["a", "z"]})
    remaining = write_columns(
        tmp_path / "r.csv", {name: [cell + 0.1 for cell in cells] for name, cells in columns.items()}
    )
    model = tmp_path / "m.safetensors"
    run("fit", table, *FAST, "-o", model, "--report", tmp_path / "m.html")
    run("fit", table, *FAST, "--unlabelled", remaining)
    run("update", model, more, "--in-place")
    run("explain", model, table)
    run("suggest", model, remaining, "-n", "1")
