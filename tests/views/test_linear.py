from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import RobustScaler, StandardScaler

from protonet import solve
from protonet.datasets.synthetic import sample_family
from protonet.fit.search import EFFORTS
from protonet.fit.solver import fit_solution
from protonet.losses import class_means
from protonet.selection.folds import Fold
from protonet.views.evaluation import CandidateEvaluator, plan_encoder
from protonet.views.linear import FEATURE_SCALINGS, LINEAR_VIEW, LinearFamily, LinearSpec, LinearView, shrink_covariance
from protonet.views.view import TrainingRows
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
    for scaling in ("standardised", "relevant", "robust"):
        x, y = blobs(1, rows=20)
        other = x * torch.tensor([1e7] + [1.0] * 7)
        torch.testing.assert_close(
            fit(scaling, x, y).source(x), fit(scaling, other, y).source(other), atol=1e-3, rtol=1e-3
        )


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
    return LinearSpec(scaling).fit(TrainingRows(x, y, 5, column_indices=blocks)).source.gain.double(), x.amax(
        dim=0
    ) > x.amin(dim=0)


def test_features_of_a_block_share_one_gain_and_blocks_have_equal_size() -> None:
    for scaling in ("standardised", "robust"):
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
    without = ("raw", "centred", "standardised", "robust")
    assert evaluated_scalings(torch.tensor([0, 1, 2])) == without
    assert evaluated_scalings(torch.tensor([0, 1, 2, 2])) == without
    assert evaluated_scalings(torch.tensor([0, 1, 1, 2, 2])) == FEATURE_SCALINGS


def test_the_bias_coordinate_joins_scaled_views_alone() -> None:
    x, y = blobs(0)
    for scaling in FEATURE_SCALINGS:
        view = fit(scaling, x, y)
        bias = 0.0 if scaling in {"raw", "centred"} else LINEAR_VIEW.bias
        assert view.config.bias == bias
        z = view.source(x)
        expected = torch.cat([z, torch.full((len(x), 1), bias)], dim=1) if bias else z
        assert torch.equal(view(z), expected)
        assert view.sizes == (expected.shape[1],)


def test_robust_is_scikit_learns_up_to_scale() -> None:
    x, y = blobs(2, rows=101)
    z = fit("robust", x, y).source(x)
    expected = torch.from_numpy(RobustScaler().fit_transform(x.double().numpy())).float()
    torch.testing.assert_close(z / z.std(), expected / expected.std(), atol=1e-3, rtol=1e-3)


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
        network = solve([(x, y)], effort="fast")
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
        search = replace(EFFORTS["fast"], shifts=False)
        solution = fit_solution((x[:30], labels[:30]), effort=search, column_spans=spans)
        with torch.no_grad():
            right.append(accuracy(solution.network(x[30:]), labels[30:]))
    assert right[1] > right[0] + 0.05
