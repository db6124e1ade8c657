from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import multivariate_normal
from torch import Tensor

from protonet import solve
from protonet.fit.solver import fit_solution
from protonet.selection.folds import split_folds
from protonet.views import density
from protonet.views.density import DensityConfig, DensityFamily, DensitySpec, DensityView
from protonet.views.evaluation import CandidateEvaluator, plan_encoder
from protonet.views.linear import LinearFamily, LinearSpec
from protonet.views.view import TrainingRows, require_linear_map
from tests.strategies import accuracy, blobs

ROWS, VARIANCES = (DensitySpec(LinearSpec("standardised"), per_row=per_row) for per_row in (True, False))


def fit(spec: DensitySpec, rows: TrainingRows) -> DensityView:
    return spec.fit(rows, spec.source.fit(rows).source)


def predict(view: DensityView, x: Tensor) -> Tensor:
    probabilities: Tensor = view(view.source(x))
    return probabilities


def draw_two_modes(labels: Tensor, generator: torch.Generator, dim: int = 128) -> Tensor:
    """Draw rows of classes with two opposite modes: no class has a mean."""
    directions = torch.randn(int(labels.max()) + 1, dim, generator=torch.Generator().manual_seed(0))
    signs = 2 * torch.randint(2, (len(labels), 1), generator=generator) - 1
    return signs * directions[labels] + 2 * torch.randn(len(labels), dim, generator=generator)


def draw_two_sizes(labels: Tensor, generator: torch.Generator, dim: int = 24) -> Tensor:
    """Draw rows of classes that differ in their variance alone."""
    return (1 + labels[:, None]) * torch.randn(len(labels), dim, generator=generator)


def test_probabilities_are_those_of_kernel_densities() -> None:
    x, y = blobs(0)
    view = fit(ROWS, TrainingRows(x, y, 6))  # class 5 has no row
    z, queries = (F.normalize(view.source(rows), dim=1).double() for rows in (x, blobs(1)[0]))
    density = torch.stack([torch.exp(queries @ z[y == c].T * view.slope[0]).mean(dim=1) for c in range(5)], dim=1)
    powers = density ** float(view.exponent)
    expected = F.pad(powers / powers.sum(dim=1, keepdim=True), (0, 1))
    torch.testing.assert_close(predict(view, blobs(1)[0]).double(), expected, atol=1e-5, rtol=1e-4)


def test_probabilities_are_those_of_gaussians() -> None:
    x, y = blobs(0, classes=3)
    view = fit(VARIANCES, TrainingRows(x, y, 3))
    queries = view.source(blobs(1)[0]).double()
    means, variances = view.centres.double(), 1 / view.slope.double()
    logs = [
        multivariate_normal(m.numpy(), float(v)).logpdf(queries.numpy()) for m, v in zip(means, variances, strict=True)
    ]
    scores = torch.stack([torch.from_numpy(log) for log in logs], dim=1) * float(view.exponent)
    torch.testing.assert_close(predict(view, blobs(1)[0]).double(), scores.softmax(dim=1), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("spec", [ROWS, VARIANCES], ids=lambda spec: spec.name)
def test_log_densities_of_rows_left_out_are_those_of_fits_without_them(
    spec: DensitySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = blobs(2, classes=3, rows=5, noise=1.0)
    rows = TrainingRows(x, y, 3)
    source = require_linear_map(spec.source.fit(rows).source)
    seen: list[Tensor] = []
    choose = density._choose

    def record(settings: object, labels: Tensor, counts: Tensor) -> tuple[int, Tensor, float]:
        every = list(settings)  # type: ignore[call-overload]
        seen.extend(every)
        return choose(iter(every), labels, counts)

    monkeypatch.setattr(density, "_choose", record)
    tensors = spec.fit_densities(rows, source).tensors
    order = tensors["classes"] if spec.per_row else y
    z = source(x).double()
    for row in range(len(y)):
        others = torch.arange(len(y)) != row
        c = int(order[row])
        if spec.per_row:
            centres = tensors["centres"].double()
            similar = torch.exp((centres[others] @ centres[row] - 1) / 0.1)
            expected = torch.stack([similar[order[others] == k].mean().log() for k in range(3)])
            torch.testing.assert_close(seen[2][row], expected, atol=1e-4, rtol=1e-4)
        else:  # with much weight on the pooled variance, and without it, at class means that are not shrunk
            own = z[others & (y == c)]
            pooled = sum(float((z[y == k] - z[y == k].mean(dim=0)).square().sum()) for k in range(3)) / (12 * 8)
            variance = (float((own - own.mean(dim=0)).square().sum()) + 4.0 * pooled) / (3 * 8 + 4.0) * (1 + 1 / 4)
            expected = -(z[row] - own.mean(dim=0)).square().sum() / (2 * variance) - 4 * torch.tensor(variance).log()
            torch.testing.assert_close(seen[0][row, c], expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("draw", "view", "classes"), [(draw_two_modes, "nearest rows", 30), (draw_two_sizes, "class variances", 3)]
)
def test_classes_of_several_modes_and_of_several_variances_are_told_apart(
    draw: Callable[[Tensor, torch.Generator], Tensor], view: str, classes: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(20 * classes) % classes
    x, test = (draw(labels, generator) for _ in range(2))
    solution = fit_solution([(x, labels)])
    assert solution.view_influences[f"{view} standardised"] > 0.3
    assert accuracy(solution.network(test), labels) > 0.8


def test_views_that_are_not_better_are_no_candidates() -> None:
    x, y = blobs(3, rows=12, noise=1.5)
    evaluator = CandidateEvaluator(TrainingRows(x, y, 5), split_folds(y, 5), plan_encoder(8, 5, 0))
    evaluator.candidates += list(LinearFamily().candidates(evaluator))
    assert list(DensityFamily().candidates(evaluator)) == []


def test_a_single_row_of_a_class_and_equal_rows_stay_finite() -> None:
    x, y = blobs(4, classes=3, rows=3)
    for rows in (TrainingRows(x[:-2], y[:-2], 3), TrainingRows(torch.ones(6, 3), torch.arange(6) % 3, 3)):
        for spec in (ROWS, VARIANCES):
            probabilities = predict(fit(spec, rows), rows.features)
            torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(len(rows.labels)))


@pytest.mark.parametrize("spec", [ROWS, VARIANCES], ids=lambda spec: spec.name)
def test_invalid_tensors_are_refused(spec: DensitySpec) -> None:
    x, y = blobs(5)
    view = fit(spec, TrainingRows(x, y, 5))
    tensors = dict(view.state_dict())
    restored = DensityView(DensityConfig.from_json(view.config.to_json()), view.source)
    restored.check(tensors)
    restored.load_state_dict(tensors)
    assert torch.equal(predict(restored, x), predict(view, x))
    for name, value in (("classes", tensors["classes"] + 1), ("exponent", -tensors["exponent"] - 1)):
        with pytest.raises(ValueError, match=r"^(components of no class|a negative exponent)"):
            restored.check(tensors | {name: value})


def test_weights_count_as_repeated_rows() -> None:
    x, y = blobs(6, classes=3)
    weights = torch.ones(len(y), dtype=torch.float64)
    weighted = fit(VARIANCES, TrainingRows(x, y, 3, weights=weights))
    plain = fit(VARIANCES, TrainingRows(x, y, 3))
    torch.testing.assert_close(weighted.centres, plain.centres)
    heavy = replace(TrainingRows(x, y, 3), weights=torch.where(torch.arange(len(y)) == 0, 5.0, 1.0).double())
    moved = fit(VARIANCES, heavy).centres[int(y[0])] - plain.centres[int(y[0])]
    towards = plain.source(x[:1])[0] - plain.centres[int(y[0])]
    assert float(moved @ towards) > 0


def test_the_contest_draw_keeps_its_network() -> None:
    """Isotropic classes have neither several modes nor several variances: raw cosine is the Bayes rule."""
    x, y = blobs(7, classes=8, rows=10, dim=32)
    with torch.no_grad():
        assert accuracy(solve([(x, y)], None, {"param_limit": 5000})(x), y) > 0.95
