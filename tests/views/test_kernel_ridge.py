from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from scipy.spatial.distance import cdist
from sklearn.kernel_ridge import KernelRidge as SklearnKernelRidge
from torch import Tensor

from protonet.selection.folds import split_folds
from protonet.views import kernel_ridge
from protonet.views.distances import batch_invariant_distances, quantized_l1_distances
from protonet.views.evaluation import CandidateEvaluator, plan_encoder
from protonet.views.kernel_ridge import (
    KERNEL_RIDGE_SPECS,
    MAX_DISTANCE_WORK,
    MAX_KERNEL_UNITS,
    MAX_PRODUCT_WORK,
    MAX_QUANTIZATION_ERROR,
    QUANTIZED_TERM_COUNTS,
    KernelRidgeFamily,
    KernelRidgeSpec,
    KernelRidgeView,
)
from protonet.views.linear import LinearSpec
from protonet.views.view import TrainingRows, require_linear_map
from tests.strategies import accuracy, blobs

CENTRED = LinearSpec("centred")
GAUSSIAN = KernelRidgeSpec(CENTRED, 2)


def fit(
    view: KernelRidgeSpec, x: Tensor, y: Tensor, classes: int = 5, shifts: tuple[int, ...] = (0,)
) -> KernelRidgeView:
    """Fit a kernel ridge view, and first the linear view that it reads."""
    rows = TrainingRows(x, y, classes, shifts=shifts)
    return view.fit(rows, view.source.fit(rows).source)


def score(view: KernelRidgeView, x: Tensor) -> Tensor:
    """Compute class scores (n, num_classes) of features (n, input_dim)."""
    assert view.source is not None
    scores: Tensor = view(view.source(x))
    return scores


@pytest.mark.parametrize(("norm", "metric"), [(1, "cityblock"), (2, "sqeuclidean")])
def test_distances_are_scipys(norm: int, metric: str) -> None:
    x, other = blobs(0)[0].double(), blobs(1)[0].double()
    expected = torch.from_numpy(cdist(x.numpy(), other.numpy(), metric))
    torch.testing.assert_close(batch_invariant_distances(x, other, norm), expected)


@pytest.mark.parametrize("terms", QUANTIZED_TERM_COUNTS)
def test_quantized_distances_equal_scipy_within_half_a_step(terms: int) -> None:
    x, landmarks = 3 * blobs(0)[0], blobs(1)[0]
    step = float((landmarks.amax(dim=0) - landmarks.amin(dim=0)).max()) / (32767 // terms)
    x[0], x[1] = 50.0, -1e6  # far beyond all landmarks
    expected = torch.from_numpy(cdist(x.double().numpy(), landmarks.double().numpy(), "cityblock"))
    result = quantized_l1_distances(x, landmarks, terms).double()
    assert float((result - expected)[2:].abs().max()) <= step * x.shape[1] * 1.001
    torch.testing.assert_close(result[:2], expected[:2], rtol=1e-5, atol=step * x.shape[1])


def test_quantized_distances_of_multiples_of_the_step_are_exact() -> None:
    """Landmarks from 0 to 2047 have steps of 1; every tile and every group of terms is cut in the middle once."""
    generator = torch.Generator().manual_seed(0)
    complete = torch.randint(0, 2048, (60, 37), generator=generator).float()
    x, landmarks = complete[:43], torch.cat([complete[43:], torch.zeros(1, 37), torch.full((1, 37), 2047.0)])
    expected = (x[:, None] - landmarks).abs().sum(dim=2)
    assert torch.equal(quantized_l1_distances(x, landmarks, 16), expected)
    parts = torch.cat([quantized_l1_distances(part, landmarks, 16) for part in x.split(5)])
    assert torch.equal(parts, expected)


def test_quantized_distances_of_no_rows_one_landmark_and_nan() -> None:
    x = torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [torch.inf, 0.0]])
    assert quantized_l1_distances(x[:0], x[:1], 16).shape == (0, 1)
    result = quantized_l1_distances(x, x[:1], 16)
    assert result[0] == 0
    assert result[1].isnan()
    assert result[2].isinf()


def test_rounding_keeps_the_class_of_held_out_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = blobs(5, rows=80, dim=64, noise=3.0)
    queries = blobs(6, rows=400, dim=64, noise=3.0)[0]
    views = [view for view in KERNEL_RIDGE_SPECS if view.norm == 1 and not view.use_shifts]
    for bandwidth in (0.5, 8.0):
        fitted = [fit(replace(view, bandwidth=bandwidth, ridge=0.01), x, y) for view in views]
        rounded = [score(view, queries) for view in fitted]
        with monkeypatch.context() as patched:
            patched.setattr(kernel_ridge, "MAX_QUANTIZATION_ERROR", 0.0)
            for view in fitted:
                view.derive_constants()
            exact = [score(view, queries) for view in fitted]
        for ours, theirs in zip(rounded, exact, strict=True):
            assert not torch.equal(ours, theirs)
            assert float((ours - theirs).abs().mean()) < MAX_QUANTIZATION_ERROR
            assert accuracy(ours, theirs.argmax(dim=1)) >= 0.995


def test_large_read_outs_are_rounded_finer_or_not_at_all() -> None:
    x, y = blobs(7, rows=80, dim=64)
    view = fit(KernelRidgeSpec(LinearSpec("standardised"), 1, bandwidth=2.0, ridge=0.1), x, y)
    result = []
    for factor in (0.01, 1.0, 10.0, 1e6):
        view.readout.mul_(factor)
        result.append(view._choose_quantization())
        view.readout.div_(factor)
    assert result[0] == max(QUANTIZED_TERM_COUNTS)
    assert result[-1] is None
    assert [item or 0 for item in result] == sorted([item or 0 for item in result], reverse=True)


def test_gradients_flow_through_exact_distances() -> None:
    x, y = blobs(8)
    view = fit(KernelRidgeSpec(LinearSpec("standardised"), 1), x, y)
    assert view.source is not None
    z = view.source(x[:3]).double().requires_grad_(True)
    assert torch.autograd.gradcheck(view, z, eps=1e-4, atol=1e-3)


def test_scores_are_scikit_learns_kernel_ridge() -> None:
    x, y = blobs(2)
    fitted = fit(replace(GAUSSIAN, bandwidth=2.0, ridge=0.1), x, y)
    assert fitted.source is not None
    z = fitted.source(x).double().numpy()
    indicators = F.one_hot(y, 5).double()
    oracle = SklearnKernelRidge(alpha=0.1, kernel="rbf", gamma=1 / float(fitted.bandwidth))
    oracle.fit(z, (indicators - indicators.mean(dim=0)).numpy())
    queries = blobs(3)[0]
    expected = torch.from_numpy(oracle.predict(fitted.source(queries).double().numpy())).float()
    torch.testing.assert_close(score(fitted, queries), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("view", KERNEL_RIDGE_SPECS, ids=lambda view: view.name)
def test_scores_of_rows_that_are_left_out_are_those_of_fits_without_them(view: KernelRidgeSpec, weighted: bool) -> None:
    x, y = blobs(4, rows=4)
    weights = torch.linspace(0.5, 2.0, len(y), dtype=torch.float64) if weighted else None
    rows = TrainingRows(x, y, 5, weights=weights)
    source = require_linear_map(view.source.fit(rows).source)
    regression = kernel_ridge._KernelRegression(replace(view, use_shifts=False), source, rows)
    bandwidths, ridges = (0.5, 4.0), (0.1, 1.0)
    result = regression.leave_one_out_cosines(bandwidths, ridges)
    targets = F.one_hot(y, 5).double() - regression.target_means
    ideal = F.normalize(torch.eye(5, dtype=torch.float64) - regression.target_means, dim=1)
    for setting, (bandwidth, ridge) in enumerate(itertools.product(bandwidths, ridges)):
        kernel = torch.exp(-regression.distances / (bandwidth * regression.median))
        for row in range(0, len(y), 3):
            others = torch.arange(len(y)) != row
            penalty = torch.diag(ridge / regression.weights[others, 0])
            coefficients = torch.linalg.solve(kernel[others][:, others] + penalty, targets[others])
            expected = F.normalize(kernel[row, others] @ coefficients, dim=0) @ ideal.T
            torch.testing.assert_close(result[setting, row].double(), expected, atol=1e-5, rtol=1e-4)


def test_the_setting_of_least_loss_of_rows_left_out_is_chosen() -> None:
    """Rings need a narrow kernel; a line between blobs needs a wide one."""
    generator = torch.Generator().manual_seed(0)
    ring = torch.randn(150, 2, generator=generator)
    angles = 6 * torch.atan2(ring[:, 0], ring[:, 1])
    y = (angles.sin() > 0).long()
    chosen = []
    for labels in (y, (ring[:, 0] > 0).long()):
        rows = TrainingRows(ring, labels, 2)
        evaluator = CandidateEvaluator(rows, split_folds(labels, 2), plan_encoder(2, 2, 0))
        (candidate,) = KernelRidgeFamily((GAUSSIAN,)).candidates(evaluator)
        assert isinstance(candidate.spec, KernelRidgeSpec)
        chosen.append(candidate.spec.bandwidth)
    assert chosen[0] <= 0.5 < chosen[1]


def test_settings_are_chosen_on_fewer_rows_if_features_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_ridge, "MAX_DISTANCE_WORK", 8 * 30**2)
    x, y = blobs(0, rows=20)
    evaluator = CandidateEvaluator(TrainingRows(x, y, 5), split_folds(y, 5, max_folds=2), plan_encoder(8, 5, 0))
    laplacian = KernelRidgeSpec(LinearSpec("standardised"), 1)
    (candidate,) = KernelRidgeFamily((laplacian,)).candidates(evaluator)
    assert accuracy(candidate.cosines, evaluator.labels) > 0.9


def test_work_is_bounded() -> None:
    for n in (10, 1000, 100_000, 10_000_000):
        for view in KERNEL_RIDGE_SPECS:
            units = view.count_units(n, 384)
            assert 1 <= units <= min(n, MAX_KERNEL_UNITS), n
            assert units == 1 or n * units**2 <= MAX_PRODUCT_WORK, n
            assert units == 1 or view.norm == 2 or n * units * 384 <= MAX_DISTANCE_WORK, n


def test_a_shifted_view_is_the_view_of_the_shifted_rows() -> None:
    x, y = blobs(7)
    plain = replace(GAUSSIAN, bandwidth=1.0, ridge=0.1)
    source = CENTRED.fit(TrainingRows(x, y, 5)).source
    use_shifts = replace(plain, use_shifts=True).fit(TrainingRows(x, y, 5, shifts=(0, 2)), source)
    copies = torch.cat([x, torch.cat([x[:, 2:], x[:, 7:], x[:, 7:]], dim=1)])
    expected = plain.fit(TrainingRows(copies, y.repeat(2), 5), source)
    torch.testing.assert_close(score(use_shifts, x), score(expected, x))
    unshifted = plain.fit(TrainingRows(x, y, 5, shifts=(0, 2)), source)  # shifts are for those that ask for them
    torch.testing.assert_close(score(unshifted, x), score(plain.fit(TrainingRows(x, y, 5), source), x))


def test_a_row_depends_on_itself_alone_even_where_read_outs_cancel() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator) * 2
    y = (x.norm(dim=1) > 2.3).long()
    fitted = fit(replace(GAUSSIAN, bandwidth=8.0, ridge=1e-3), x, y, 2)
    alone = torch.cat([score(fitted, x[i : i + 1]) for i in range(60)])
    torch.testing.assert_close(F.normalize(alone, dim=1), F.normalize(score(fitted, x)[:60], dim=1), atol=1e-4, rtol=0)


def test_equal_rows_stay_finite() -> None:
    x, y = torch.ones(6, 3), torch.arange(6) % 3
    for view in KERNEL_RIDGE_SPECS:
        fitted = fit(replace(view, bandwidth=1.0), x, y, 3)
        assert bool(torch.isfinite(score(fitted, x)).all())


def test_rows_that_differ_by_rounding_do_not_set_the_bandwidth() -> None:
    noise = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    x, y = 1e-5 * noise + 3.0 * (torch.arange(30) >= 24)[:, None], torch.arange(30) % 3
    for norm in (1, 2):
        fitted = fit(KernelRidgeSpec(CENTRED, norm, bandwidth=1.0), x, y, 3)
        assert float(fitted.bandwidth) > 1.0
        twice = copy.deepcopy(fitted).double()
        torch.testing.assert_close(score(twice, x.double()).float(), score(fitted, x), atol=1e-3, rtol=0)
