"""The synthetic families agree with their descriptions, and the official data with the contest's account."""

import doctest

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from analysis.contest.trial import sample_official
from protonet.datasets import FAMILIES, Split, sample_family, synthetic

TENSORS = ("train_x", "train_y", "val_x", "val_y", "test_x", "test_y")


def sample_small(name: str, seed: int = 0) -> Split:
    return sample_family(name, seed=seed, n_train=3, n_val=2, n_test=4, num_classes=5, dim=12)


def subtract_means(split: Split) -> Tensor:
    means = torch.stack([split.train_x[split.train_y == c].mean(0) for c in range(split.num_classes)])
    return (split.train_x - means[split.train_y]).double()


def score_cosine(support: Tensor, labels: Tensor, query: Tensor, truth: Tensor) -> float:
    means = torch.stack([support[labels == c].mean(0) for c in range(int(labels.max()) + 1)])
    prototypes = torch.nn.functional.normalize(means, dim=1)
    return float(((query @ prototypes.T).argmax(1) == truth).double().mean())


@pytest.mark.parametrize("name", FAMILIES)
class TestEveryFamily:
    def test_the_seed_and_the_sizes_of_a_split_determine_it(self, name: str) -> None:
        before = torch.get_rng_state()
        first, again, other = sample_small(name, 3), sample_small(name, 3), sample_small(name, 4)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(torch.equal(getattr(first, t), getattr(again, t)) for t in TENSORS)
        assert not any(torch.equal(getattr(first, t), getattr(other, t)) for t in TENSORS)
        large = sample_family(name, seed=3, n_train=9, n_val=0, n_test=4, num_classes=5, dim=12)
        assert torch.equal(first.test_x, large.test_x)
        assert tuple(large.val_x.shape) == (0, 12)

    def test_shapes_dtypes_counts(self, name: str) -> None:
        split = sample_small(name)
        for part, n in (("train", 3), ("val", 2), ("test", 4)):
            x, y = getattr(split, f"{part}_x"), getattr(split, f"{part}_y")
            assert (tuple(x.shape), x.dtype) == ((5 * n, 12), torch.float32)
            assert (tuple(y.shape), y.dtype) == ((5 * n,), torch.int64)
            assert torch.isfinite(x).all()
            assert int(y.min()) >= 0
            assert int(y.max()) < 5
            if name != "wrong_labels":
                assert torch.bincount(y).tolist() == [n] * 5
            assert not torch.equal(y, y.sort().values)


def test_isotropic_radius_and_noise() -> None:
    split = sample_family("isotropic", seed=0, n_train=4000, num_classes=3, dim=20)
    norms = torch.stack([split.train_x[split.train_y == c].mean(0).norm() for c in range(3)])
    torch.testing.assert_close(norms, torch.full((3,), 2.5), rtol=0, atol=5 * 0.4 / 4000**0.5)
    torch.testing.assert_close(split.noise_covariance, 0.16 * torch.eye(20, dtype=torch.float64))


def test_correlated_spectrum() -> None:
    covariance = sample_family("correlated", seed=0, n_train=1).noise_covariance
    assert covariance is not None
    spectrum = torch.linalg.eigvalsh(covariance).flip(0)
    ranks = torch.arange(1, 385, dtype=torch.float64)
    torch.testing.assert_close(spectrum / spectrum[0], ranks**-1.5, rtol=1e-8, atol=0)
    assert float(spectrum.mean()) == pytest.approx(20 * 0.16)
    off_diagonal = covariance - covariance.diagonal().diag()
    assert float(off_diagonal.abs().max()) > 1  # the basis is not the features' own


def test_nuisance_spectrum() -> None:
    for dim, n_nuisance in ((384, 32), (10, 5)):
        covariance = sample_family("nuisance", seed=0, n_train=1, num_classes=2, dim=dim).noise_covariance
        assert covariance is not None
        expected = torch.full((dim,), 0.16, dtype=torch.float64)
        expected[dim - n_nuisance :] = 16.0
        torch.testing.assert_close(torch.linalg.eigvalsh(covariance), expected)


def test_noise_has_the_stated_covariance() -> None:
    for name in ("isotropic", "correlated", "nuisance"):
        split = sample_family(name, seed=1, n_train=8000, num_classes=2, dim=10)
        assert split.noise_covariance is not None, name
        noise = subtract_means(split)
        whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(split.noise_covariance), noise.T, upper=False)
        identity = torch.eye(10, dtype=torch.float64)
        torch.testing.assert_close(torch.cov(whitened), identity, rtol=0, atol=5 * (2 / 16000) ** 0.5)


def test_subclusters_are_three() -> None:
    split = sample_family("subclusters", seed=0, n_train=3000, num_classes=2, dim=16)
    noise = subtract_means(split)
    for c in range(2):
        spectrum = torch.linalg.eigvalsh(torch.cov(noise[split.train_y == c].T)).flip(0)
        assert float(spectrum[1]) > 5 * 0.16  # three centres span a plane
        assert abs(float(spectrum[2:].mean()) - 0.16) < 5 * 0.16 * (2 / (3000 * 14)) ** 0.5


def test_warped_is_a_nonlinear_map_of_isotropic() -> None:
    plain, warped = (sample_family(name, seed=0) for name in ("isotropic", "warped"))
    assert torch.equal(plain.train_y, warped.train_y)
    design = torch.cat([plain.train_x, torch.ones(len(plain.train_x), 1)], dim=1).double()
    target = warped.train_x.double()
    residual = target - design @ torch.linalg.lstsq(design, target).solution
    assert 0.06 < float(residual.var() / target.var()) < 0.2  # a tenth, less what the fit has memorised

    covariance = torch.cov(subtract_means(warped).T)
    ridge = 0.05 * covariance.diagonal().mean() * torch.eye(384, dtype=torch.float64)
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance + ridge)).T.float()
    raw = score_cosine(warped.train_x, warped.train_y, warped.test_x, warped.test_y)
    white = score_cosine(warped.train_x @ whiten, warped.train_y, warped.test_x @ whiten, warped.test_y)
    assert 0.4 < raw < 0.65
    assert white > raw + 0.15


def test_heavy_tails_are_student_t() -> None:
    noise = subtract_means(sample_family("heavy_tails", seed=0, n_train=8000, num_classes=2, dim=8))
    features = noise.flatten().numpy()
    assert stats.kstest(features, stats.t(df=3, scale=0.4).cdf).statistic < 0.015
    assert stats.kstest(features, stats.norm(scale=0.4 * 3**0.5).cdf).statistic > 0.05
    sizes = noise.abs().clamp(max=2)  # features of one row are independent: no common factor
    assert abs(float(torch.corrcoef(sizes.T)[0, 1])) < 5 / 16000**0.5


def test_class_noise_is_log_uniform() -> None:
    split = sample_family("class_noise", seed=0, n_train=60, num_classes=300, dim=16)
    noise = subtract_means(split)
    levels = torch.stack([noise[split.train_y == c].std() for c in range(300)]) * (60 / 59) ** 0.5
    assert 0.18 < float(levels.min()) < 0.22
    assert 0.74 < float(levels.max()) < 0.85
    assert stats.kstest(np.log2(levels.numpy() / 0.2) / 2, "uniform").pvalue > 0.01


def test_wrong_labels_have_the_stated_fraction() -> None:
    clean, wrong = (sample_family(name, seed=5, num_classes=50, dim=8) for name in ("isotropic", "wrong_labels"))
    assert all(torch.equal(getattr(clean, t), getattr(wrong, t)) for t in ("train_x", "val_x", "test_x", "test_y"))
    assert int((clean.train_y != wrong.train_y).sum()) == 80
    assert int((clean.val_y != wrong.val_y).sum()) == 20


def test_errors() -> None:
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"name": "easy"}, ValueError, "`name` must be one of isotropic, .*; got 'easy'"),
        ({"seed": -1}, ValueError, "`seed` must be a whole number >= 0; got -1"),
        ({"seed": "0"}, TypeError, "`seed` must be a whole number >= 0; got '0'"),
        ({"n_train": 0}, ValueError, "`n_train` must be a whole number >= 1; got 0"),
        ({"n_val": -1}, ValueError, "`n_val` must be a whole number >= 0; got -1"),
        ({"n_test": 0.5}, ValueError, "`n_test` must be a whole number >= 1; got 0.5"),
        ({"num_classes": 1}, ValueError, "`num_classes` must be a whole number >= 2; got 1"),
        ({"dim": 1}, ValueError, "`dim` must be a whole number >= 2; got 1"),
    ]
    for change, error, message in cases:
        with pytest.raises(error, match=f"^{message}"):
            sample_family(**({"name": "isotropic", "seed": 0} | change))  # type: ignore[arg-type]


def test_example_runs() -> None:
    assert doctest.testmod(synthetic) == doctest.TestResults(failed=0, attempted=2)


def test_official_cosine_is_the_published_figure() -> None:
    split = sample_official()
    x, y = torch.cat([split.train_x, split.val_x]), torch.cat([split.train_y, split.val_y])
    assert round(score_cosine(x, y, split.test_x, split.test_y), 4) == 0.9883
