from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from protonet.episodes.methods import calibration
from protonet.episodes.methods.calibration import distribution_calibration
from protonet.episodes.samplers.batch import BaseClasses, Episodes
from protonet.sampling import list_class_rows
from tests.episodes.cases import core_rows, make_base, make_episodes


def base_classes(base: BaseClasses) -> list[torch.Tensor]:
    return [base.take(rows).clone() for rows in list_class_rows(base.by_class)]


def nearest_two(classes: list[torch.Tensor], row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean and covariance that the paper calibrates from the two base classes nearest to a row."""
    distances = torch.stack([torch.dist(rows.mean(dim=0), row) for rows in classes])
    near = [classes[index] for index in distances.argsort()[:2].tolist()]
    mean = torch.stack([near[0].mean(dim=0), near[1].mean(dim=0), row]).mean(dim=0)
    return mean, (torch.cov(near[0].T) + torch.cov(near[1].T)) / 2 + 0.21


def sampled_rows(episodes: Episodes, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> torch.Tensor:
    """Return the rows (episodes, n_way, n_samples, dim) that distribution calibration samples."""
    seen: list[torch.Tensor] = []

    def spy(rows: torch.Tensor, target: torch.Tensor, **_: float) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(rows[:, episodes.support.shape[1] :].unflatten(1, (episodes.n_way, -1)))
        return rows.new_zeros(len(rows), rows.shape[2], target.shape[2]), rows.new_zeros(len(rows), 1, target.shape[2])

    monkeypatch.setattr(calibration, "fit_logistic", spy)
    distribution_calibration(episodes, **settings)
    return seen[0]


def test_samples_have_the_calibrated_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_base(dim=5)
    episodes, _ = make_episodes(n_episodes=2, shots=(1, 1, 1), n_way=3, dim=5, base=base)
    n_samples = 20_000
    samples = sampled_rows(episodes, monkeypatch, n_samples=n_samples)
    classes = base_classes(base)
    for index, (support, labels) in enumerate(zip(episodes.support.sqrt(), episodes.support_labels, strict=True)):
        for row, label in zip(support, labels.tolist(), strict=True):
            mean, covariance = nearest_two(classes, row)
            drawn = samples[index, label]
            deviation = covariance.diagonal().sqrt()
            # Five standard errors: sqrt(1 / n) of a mean, at most sqrt(2 / n) of a covariance, in standard deviations.
            assert float(((drawn.mean(dim=0) - mean) / deviation).abs().max()) < 5 / n_samples**0.5
            error = (torch.cov(drawn.T) - covariance) / torch.outer(deviation, deviation)
            assert float(error.abs().max()) < 5 * (2 / n_samples) ** 0.5


def test_equal_to_a_slow_loop() -> None:
    """The authors' program gives the same probabilities, but for the random samples."""
    base = make_base()
    episodes, _ = make_episodes(n_episodes=2, n_way=3, shots=(2, 2, 2), base=base)
    ours = distribution_calibration(episodes, n_samples=3000).softmax(dim=2)
    random = np.random.default_rng(0)
    classes = base_classes(base)
    for index, (support, labels, query) in enumerate(zip(*core_rows(episodes), strict=True)):
        rows, targets = [support.sqrt().numpy()], [labels.numpy()]
        for row, label in zip(support.sqrt(), labels.tolist(), strict=True):
            mean, covariance = nearest_two(classes, row)
            rows.append(random.multivariate_normal(mean.numpy(), covariance.numpy(), 1500))
            targets.append(np.full(1500, label))
        oracle = LogisticRegression(max_iter=1000).fit(np.concatenate(rows), np.concatenate(targets))
        theirs = torch.from_numpy(oracle.predict_proba(query.sqrt().numpy()))
        assert float((ours[index] - theirs).abs().mean()) < 0.03


def test_no_more_neighbours_than_base_classes() -> None:
    episodes, _ = make_episodes(base=make_base())
    with pytest.raises(ValueError, match="`n_nearest` must be at most the number of base classes"):
        distribution_calibration(episodes, n_nearest=7)
