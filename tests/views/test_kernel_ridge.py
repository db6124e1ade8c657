from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from scipy.spatial.distance import cdist
from sklearn.kernel_ridge import KernelRidge as SklearnKernelRidge
from torch import Tensor

from protonet.views import kernel_ridge
from protonet.views.distances import batch_invariant_distances, quantized_l1_distances
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
from protonet.views.view import TrainingRows
from tests.strategies import accuracy, blobs, make_noise_evaluator

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


@pytest.mark.parametrize("view", KERNEL_RIDGE_SPECS, ids=lambda view: view.name)
@pytest.mark.parametrize("units", [1024, 20])
def test_the_cosines_of_the_search_are_those_of_the_fitted_view(
    view: KernelRidgeSpec, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_ridge, "MAX_KERNEL_UNITS", units)  # fewer than samples: subset of regressors
    x, y = blobs(4, rows=8)
    queries = blobs(5)[0]
    rows = TrainingRows(x, y, 5, shifts=(0, 1, -1))
    source = view.source.fit(rows).source
    ridges = (0.1, 1e-2)
    cosines = kernel_ridge._KernelRegression(view, source, rows, queries).cosines(4.0, ridges)
    for ridge, result in zip(ridges, cosines, strict=True):
        fitted = replace(view, bandwidth=4.0, ridge=ridge).fit(rows, source)
        assert fitted.landmarks.shape == (min(units, 120 if view.use_shifts else 40), 8)
        scores = F.normalize(score(fitted, x), dim=1)
        prototypes = torch.stack([scores[y == c].mean(dim=0) for c in range(5)])
        expected = F.normalize(score(fitted, queries), dim=1) @ F.normalize(prototypes, dim=1).T
        torch.testing.assert_close(result, expected, atol=2e-3, rtol=2e-3)


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


def choose_setting(held_out: int, reference: float, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], int]:
    """Evaluate a view on noise against a reference loss; return the bandwidths and the number of candidates."""
    evaluator = make_noise_evaluator(held_out, reference)
    solved: list[float] = []
    solve = kernel_ridge._KernelRegression.solve

    def record(
        regression: kernel_ridge._KernelRegression, bandwidth: float, ridges: Sequence[float]
    ) -> tuple[Tensor, Tensor]:
        solved.append(bandwidth)
        return solve(regression, bandwidth, ridges)

    monkeypatch.setattr(kernel_ridge._KernelRegression, "solve", record)
    candidates = list(KernelRidgeFamily((GAUSSIAN,), (0.5, 1.0, 2.0, 4.0, 8.0), (1e-2, 1e-1)).candidates(evaluator))
    return solved, len(candidates)


@pytest.mark.parametrize(
    ("held_out", "reference", "solved", "candidates"),
    [
        (256, 0.1, [2.0], 0),  # of two classes, noise loses 0.69 nats per row: on few units that is plain
        (255, 0.1, [0.5, 1.0, 2.0, 4.0, 8.0], 1),  # too few rows to settle that
        (256, 0.67, [2.0, 1.0, 0.5, 0.5], 0),  # with all units it might have been good, and is not
        (256, 0.8, [2.0, 1.0, 0.5, 0.5], 1),
    ],
)
def test_few_units_select_the_bandwidth_and_prune_a_clearly_worse_view(
    held_out: int, reference: float, solved: list[float], candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_setting(held_out, reference, monkeypatch) == (solved, candidates)


def test_rows_that_differ_by_rounding_do_not_set_the_bandwidth() -> None:
    noise = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    x, y = 1e-5 * noise + 3.0 * (torch.arange(30) >= 24)[:, None], torch.arange(30) % 3
    for norm in (1, 2):
        fitted = fit(KernelRidgeSpec(CENTRED, norm, bandwidth=1.0), x, y, 3)
        assert float(fitted.bandwidth) > 1.0
        twice = copy.deepcopy(fitted).double()
        torch.testing.assert_close(score(twice, x.double()).float(), score(fitted, x), atol=1e-3, rtol=0)
