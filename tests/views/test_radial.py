from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from scipy.spatial.distance import cdist
from sklearn.kernel_ridge import KernelRidge

from protonet.views import radial
from protonet.views.linear import fit_view
from protonet.views.radial import RADIAL_KINDS, RadialKind, count_units, distances, fit_radial, radial_cosines
from tests.strategies import blobs

GAUSSIAN = RadialKind("gaussian centred", "centred", 2)


@pytest.mark.parametrize(("norm", "metric"), [(1, "cityblock"), (2, "sqeuclidean")])
def test_distances_are_scipys(norm: int, metric: str) -> None:
    x, other = blobs(0)[0].double(), blobs(1)[0].double()
    torch.testing.assert_close(distances(x, other, norm), torch.from_numpy(cdist(x.numpy(), other.numpy(), metric)))


def test_scores_are_scikit_learns_kernel_ridge() -> None:
    x, y = blobs(2)
    view = fit_view("centred", x, y, 5)
    fitted = fit_radial(GAUSSIAN, (2.0, 0.1), view, x, y, 5)
    z = view(x).double().numpy()
    indicators = F.one_hot(y, 5).double()
    oracle = KernelRidge(alpha=0.1, kernel="rbf", gamma=1 / float(fitted.width))
    oracle.fit(z, (indicators - indicators.mean(dim=0)).numpy())
    queries = blobs(3)[0]
    expected = torch.from_numpy(oracle.predict(view(queries).double().numpy())).float()
    torch.testing.assert_close(fitted(queries), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", RADIAL_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("units", [1024, 20])
def test_the_cosines_of_selection_are_those_of_the_fitted_view(
    kind: RadialKind, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(radial, "MAX_UNITS", units)  # fewer units than samples: the subset of regressors
    x, y = blobs(4, rows=8)
    queries = blobs(5)[0]
    view = fit_view(kind.reads, x, y, 5)
    settings, moves = ((4.0, 0.1), (0.5, 0.1), (4.0, 1e-2)), (0, 1, -1)
    cosines = radial_cosines(kind, view, x, y, queries, 5, settings, moves)
    for setting, found in zip(settings, cosines, strict=True):
        fitted = fit_radial(kind, setting, view, x, y, 5, moves)
        assert fitted.landmarks.shape == (min(units, 120 if kind.moved else 40), 8)
        scores = F.normalize(fitted(x), dim=1)
        prototypes = torch.stack([scores[y == c].mean(dim=0) for c in range(5)])
        expected = F.normalize(fitted(queries), dim=1) @ F.normalize(prototypes, dim=1).T
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def test_a_radial_view_separates_what_cosine_cannot() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 2
    x = F.normalize(torch.randn(200, 2, generator=generator), dim=1) * (1 + 2 * y[:, None])
    fitted = fit_radial(GAUSSIAN, (1.0, 0.01), fit_view("centred", x, y, 2), x[:100], y[:100], 2)
    assert bool((fitted(x[100:]).argmax(dim=1) == y[100:]).all())


@pytest.mark.parametrize("n", [10, 1000, 100_000, 10_000_000])
def test_work_is_bounded(n: int) -> None:
    for kind in RADIAL_KINDS:
        units = count_units(kind, n, 384)
        assert 1 <= units <= min(n, radial.MAX_UNITS)
        assert units == 1 or n * units**2 <= radial.PRODUCT_WORK
        assert units == 1 or kind.norm == 2 or n * units * 384 <= radial.DISTANCE_WORK


def test_a_moved_view_is_the_view_of_the_moved_rows() -> None:
    x, y = blobs(7)
    view = fit_view("centred", x, y, 5)
    moved = fit_radial(GAUSSIAN._replace(moved=True), (1.0, 0.1), view, x, y, 5, (0, 2))
    copies = torch.cat([x, torch.cat([x[:, 2:], x[:, 7:], x[:, 7:]], dim=1)])
    expected = fit_radial(GAUSSIAN, (1.0, 0.1), view, copies, y.repeat(2), 5)
    torch.testing.assert_close(moved(x), expected(x))


def test_small_read_outs_are_worked_with_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = blobs(8)
    fitted = fit_radial(GAUSSIAN, (1.0, 0.1), fit_view("centred", x, y, 5), x, y, 5)
    single = fitted(x)
    monkeypatch.setattr(radial, "SINGLE", 0.0)
    assert not torch.equal(fitted(x), single)
    torch.testing.assert_close(fitted(x), single, atol=1e-5, rtol=0)


def test_two_samples_of_two_classes_are_told_apart() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    fitted = fit_radial(GAUSSIAN, (1.0, 0.1), fit_view("centred", x, torch.arange(2), 2), x, torch.arange(2), 2)
    assert fitted(x + 0.1).argmax(dim=1).tolist() == [0, 1]


def test_a_row_depends_on_itself_alone_even_where_read_outs_cancel() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 2, generator=generator) * 2
    y = (x.norm(dim=1) > 2.3).long()
    fitted = fit_radial(GAUSSIAN, (8.0, 1e-3), fit_view("centred", x, y, 2), x, y, 2)
    alone = torch.cat([fitted(x[i : i + 1]) for i in range(60)])
    torch.testing.assert_close(F.normalize(alone, dim=1), F.normalize(fitted(x)[:60], dim=1), atol=1e-4, rtol=0)


def test_everything_is_a_buffer() -> None:
    x, y = blobs(6)
    fitted = fit_radial(GAUSSIAN, (1.0, 0.1), fit_view("centred", x, y, 5), x, y, 5)
    assert list(fitted.parameters()) == []


def test_equal_rows_stay_finite() -> None:
    x, y = torch.ones(6, 3), torch.arange(6) % 3
    for kind in RADIAL_KINDS:
        fitted = fit_radial(kind, (1.0, 0.1), fit_view(kind.reads, x, y, 3), x, y, 3)
        assert bool(torch.isfinite(fitted(x)).all())
