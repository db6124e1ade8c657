"""Few rows per class, weights of rows, and rows without information."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, log_loss
from sklearn.utils.class_weight import compute_sample_weight
from torch import Tensor

from protonet.estimator import ProtoNetClassifier
from protonet.fit import solver
from protonet.fit.cross_validation import cross_validate, predict_baselines, predict_held_out, repeat_cross_validation
from protonet.fit.diagnostics import measure_learning_curve
from protonet.fit.networks import fit_labelled_rows, fit_selected_model
from protonet.fit.search import SelectedModel
from protonet.fit.solver import Solution, fit_solution
from protonet.fit.training_set import prepare_training_set
from protonet.fit.uninformative import PRIOR_PSEUDO_COUNT, compute_uninformative_logits, pad_class_counts
from protonet.views.fixed_convolution import FixedConvolutionSpec
from protonet.views.forest import ForestSpec
from protonet.views.kernel_ridge import KERNEL_RIDGE_SPECS
from protonet.views.linear import FEATURE_SCALINGS, LinearSpec
from protonet.views.mlp import MLPSpec
from protonet.views.view import TrainingRows, ViewSpec
from tests.commands.cases import FAST, Run
from tests.strategies import PLAIN, blobs, write_columns

DIM = 9
LINEAR = [LinearSpec(scaling) for scaling in FEATURE_SCALINGS]
#: Small views of every kind.
VIEWS_OF_EVERY_KIND: list[ViewSpec] = [*LINEAR, *KERNEL_RIDGE_SPECS, ForestSpec(3)]
VIEWS_OF_EVERY_KIND += [FixedConvolutionSpec(width, False, 0.1) for width in (DIM, 3)]
VIEWS_OF_EVERY_KIND += [MLPSpec(LinearSpec("whitened"), 2, 3, n_steps=2, embedding_dim=12)]
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
    rows = TrainingRows(x, y, len(sizes), shifts=(0, 1, -1), line_width=DIM, weights=weights)
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
        scores = [predict_held_out(cv), cv.known_score_offset, *predict_baselines(problem).values()]
        assert all(bool(torch.isfinite(score).all()) for score in scores), sizes


@pytest.mark.parametrize("sizes", [(2, 3), (1, 2, 3, 4, 6)])
def test_repeats_and_learning_curves_work_with_any_class_sizes(sizes: tuple[int, ...]) -> None:
    solution = fit_solution(make_rows(sizes), search=PLAIN)
    cv = cross_validate(solution)
    assert bool(torch.isfinite(repeat_cross_validation(solution, cv, 2)).all())
    assert measure_learning_curve(solution, cv).is_correct.shape[1] == len(cv.labels)


def test_commands_work_with_any_class_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(solver, "DEFAULT_SEARCH", PLAIN)
    x, y = make_rows((1, 2, 4), 3)
    columns = {f"x{index}": column.tolist() for index, column in enumerate(x.T)}
    few = {name: cells[:2] for name, cells in columns.items()}
    table = write_columns(tmp_path / "t.csv", {**columns, "kind": np.array(list("abcde"))[y].tolist()})
    more = write_columns(tmp_path / "m.csv", {**few, "kind": ["a", "z"]})
    moved = {name: [cell + 0.1 for cell in cells] for name, cells in columns.items()}
    remaining = write_columns(tmp_path / "r.csv", moved)
    model = tmp_path / "m.safetensors"
    run("fit", table, *FAST, "-o", model, "--report", tmp_path / "m.html")
    run("fit", table, *FAST, "--unlabelled", remaining)
    run("update", model, more, "--in-place")
    run("explain", model, table)
    run("suggest", model, remaining, "-n", "1")


X, Y = (part.numpy() for part in blobs(0, rows=8, noise=0.8))
TEST_X, TEST_Y = (part.numpy() for part in blobs(0, rows=60, noise=0.8))


def test_equal_weights_of_any_size_change_nothing() -> None:
    plain = ProtoNetClassifier().fit(X, Y).predict_proba(TEST_X)
    for weight in (1e-30, 1e30):
        weighted = ProtoNetClassifier().fit(X, Y, np.full(len(X), weight)).predict_proba(TEST_X)
        np.testing.assert_allclose(weighted, plain, atol=1e-5)


def test_integer_weights_are_repeated_rows() -> None:
    weights = np.random.default_rng(0).integers(0, 5, len(X))
    chosen = np.arange(len(X)).repeat(weights)
    x, test_x = 1e6 + X, 1e6 + TEST_X  # columns that vary by little beside what they have in common
    repeated = ProtoNetClassifier().fit(x[chosen], Y[chosen]).predict_proba(test_x)
    weighted = ProtoNetClassifier().fit(x, Y, 0.25 * weights).predict_proba(test_x)
    np.testing.assert_allclose(weighted, repeated, rtol=1e-7, atol=1e-9)
    assert log_loss(TEST_Y, repeated) < log_loss(TEST_Y, np.full_like(repeated, 0.2))


def test_balanced_weights_raise_the_mean_recall() -> None:
    gains = []
    for dim, noise, seed in [(*item, seed) for item in ((3, 1.0), (6, 1.2), (12, 1.5)) for seed in range(2)]:
        rng = np.random.default_rng(seed)
        centres = rng.normal(size=(3, dim))
        y, test_y = np.arange(3).repeat([30, 15, 5]), np.arange(3).repeat(200)
        x, test_x = (centres[part] + noise * rng.normal(size=(len(part), dim)) for part in (y, test_y))
        plain, balanced = (
            ProtoNetClassifier().fit(x, y, weights).predict(test_x)
            for weights in (None, compute_sample_weight("balanced", y))
        )
        gains.append(balanced_accuracy_score(test_y, balanced) - balanced_accuracy_score(test_y, plain))
    assert np.mean(gains) > 2 * np.std(gains, ddof=1) / np.sqrt(len(gains))


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


def test_classes_that_were_added_later_have_no_uninformative_rows() -> None:
    assert pad_class_counts((3, 1), 3).tolist() == [3, 1, 0]
    assert pad_class_counts((), 2).dtype == torch.int64
