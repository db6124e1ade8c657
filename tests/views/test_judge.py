from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from protonet.losses import class_means
from protonet.scoring import fit_temperature, split_folds
from protonet.views import judge as judging
from protonet.views import radial
from protonet.views.budget import plan_encoder
from protonet.views.forest import Forest, ForestKind, ForestView
from protonet.views.judge import PRUNING, Candidate, Judge, Kind, embed_fold
from protonet.views.linear import Linear, LinearKind, LinearView
from protonet.views.mlp import MLP, MLPKind
from protonet.views.radial import BANDWIDTHS, RADIAL, RIDGES, VIEWS, Radial, RadialKind
from protonet.views.view import Rows, Source
from tests.strategies import blobs


def make_judge(seed: int = 0, *, rows: int = 10, noise: float = 1.0, shifts: tuple[int, ...] = (0,)) -> Judge:
    x, y = blobs(seed, rows=rows, noise=noise)
    folds = split_folds(y, 5, torch.Generator().manual_seed(0))
    return Judge(Rows(x, y, 5, shifts=shifts), folds, plan_encoder(8, 5, 1000))


def judge_linear(judge: Judge, scaling: str) -> Candidate:
    (found,) = LinearKind((scaling,)).candidates(judge)
    return found


def test_a_linear_candidate_is_the_slow_loop_over_held_out_rows() -> None:
    judge = make_judge()
    found = judge_linear(judge, "whitened")
    x, y, *_ = judge.rows
    expected = []
    for view, fold in zip(judge.fit(Linear("whitened")), judge.folds, strict=True):
        assert isinstance(view, LinearView)
        embedded = F.pad(view.map(x), (0, 1), value=view.config.bias)
        means = class_means(F.normalize(embedded[fold.fit], dim=1), y[fold.fit], 5)[0]
        expected += [F.cosine_similarity(embedded[row], means, dim=1) for row in fold.judge]
    torch.testing.assert_close(found.cosines, torch.stack(expected))
    torch.testing.assert_close(found.losses, fit_temperature(found.cosines, judge.labels, judge.seen)[1])
    assert found.loss == pytest.approx(float(found.losses.mean()))


def test_what_is_tried_out_is_fitted_to_each_fold_alone() -> None:
    judge = make_judge()
    found = judge.try_out(Forest(3))
    assert found is not None
    parts = []
    for fold in judge.folds:
        view = Forest(3).fit(judge.take(fold))
        votes = F.normalize(view(judge.rows.features), dim=1)
        means = class_means(votes[fold.fit], judge.rows.labels[fold.fit], 5)[0]
        parts.append(votes[fold.judge] @ F.normalize(means, dim=1).T)
    torch.testing.assert_close(found.cosines, torch.cat(parts))
    assert found.specification == Forest(3)


def test_halving_finds_a_setting_that_is_no_worse_than_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = make_judge(noise=2.0, rows=20)
    settings = [replace(VIEWS[0], bandwidth=bandwidth, ridge=ridge) for bandwidth in BANDWIDTHS for ridge in RIDGES]
    every = torch.cat(
        [
            radial._Problem(VIEWS[0], source, judge.take(fold), judge.rows.features[fold.judge]).cosines(settings)  # type: ignore[arg-type]
            for source, fold in zip(judge.sources(VIEWS[0]), judge.folds, strict=True)
        ],
        dim=1,
    )
    losses = [float(judge.losses(each).mean()) for each in every]
    (halved,) = RadialKind(VIEWS[:1]).candidates(judge)
    monkeypatch.setattr(radial, "RADIAL", replace(RADIAL, halving_rows=10**6))
    (full,) = RadialKind(VIEWS[:1]).candidates(judge)
    assert isinstance(full.specification, Radial)
    place = settings.index(full.specification)
    assert place == losses.index(min(losses))
    torch.testing.assert_close(full.cosines, every[place])
    assert halved.loss < sorted(losses)[len(losses) // 4]


def test_a_view_that_is_clearly_worse_is_not_tried_on_all_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = make_judge(rows=80)  # more than enough rows per fold
    judge.reference = judge_linear(judge, "raw").losses
    views = judge.fit(Linear("raw"))
    noise = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    assert judge.prunes(noise)
    assert not judge.prunes(noise[: PRUNING.least_rows - 1])
    assert not judge.prunes(noise, hope=0.1)
    assert not judge.prunes(judge.fold_cosines(lambda fold, x: embed_fold(views, fold, x), 0))
    features = torch.randn(judge.rows.features.shape, generator=torch.Generator().manual_seed(0))
    judge.rows = judge.rows._replace(features=features)
    fits: list[Rows] = []
    fit = Forest.fit

    def record(specification: Forest, rows: Rows, source: Source | None) -> ForestView:
        fits.append(rows)
        return fit(specification, rows, source)

    monkeypatch.setattr(Forest, "fit", record)
    assert list(ForestKind(3).candidates(judge)) == []
    assert len(fits) == 1
    monkeypatch.setattr(judging, "PRUNING", replace(PRUNING, excess=math.inf, settled=10**6))
    assert [each.specification.name for each in ForestKind(3).candidates(judge)] == ["forest"]
    assert len(fits) == 1 + len(judge.folds)


def test_nothing_is_pruned_before_there_is_something_to_compare_with() -> None:
    assert not make_judge(rows=80).prunes(torch.randn(400, 5, generator=torch.Generator().manual_seed(0)))


def test_shifted_views_are_tried_where_there_are_shifts() -> None:
    for shifts, number in (((0,), 0), ((0, 1, -1), 2)):
        judge = make_judge(shifts=shifts)
        tried = [*RadialKind().candidates(judge), *ForestKind().candidates(judge)]
        assert sum(each.specification.shifted for each in tried) == number
        assert all(each.specification.shifted == each.specification.name.startswith("shifted") for each in tried)


@pytest.mark.parametrize("kind", [RadialKind(), ForestKind()])
def test_nothing_is_tried_when_it_is_late(kind: Kind) -> None:
    judge = make_judge()
    judge.rows = judge.rows._replace(deadline=0.0)
    assert list(kind.candidates(judge)) == []


def test_when_it_is_late_the_simplest_views_are_judged_all_the_same() -> None:
    judge = make_judge()
    judge.rows = judge.rows._replace(deadline=0.0)
    judge.candidates = list(LinearKind().candidates(judge))
    assert [each.specification for each in judge.candidates] == [Linear("raw")]
    (untrained,) = MLPKind().candidates(judge)
    assert untrained.specification == MLP(Linear("raw"), 1, 1, 3, 20)
    torch.testing.assert_close(untrained.cosines, judge.candidates[0].cosines)


def test_learned_views_read_the_simplest_good_view_and_are_judged_after_each_number_of_steps() -> None:
    judge = make_judge(noise=2.0, shifts=(0, 1))
    judge.candidates = list(LinearKind(("raw", "standardised")).candidates(judge))
    tried = list(MLPKind(sizes=2, steps=(1, 4)).candidates(judge))
    specifications = [each.specification for each in tried]
    assert {each.source for each in specifications} == {Linear("raw")}
    sizes = [(each.members, each.hidden, each.steps) for each in specifications]  # type: ignore[attr-defined]
    assert sizes == [(1, 1, 1), (1, 32, 1), (1, 32, 4)][: len(sizes)]  # the least one is trained as short as any
    assert len(sizes) > 1
    assert not any(each.shifted for each in specifications)
    shifted = Candidate(Forest(3, shifted=True), judge.candidates[0].cosines, judge.candidates[0].losses * 0)
    judge.candidates.append(shifted)  # the best view so far
    assert all(each.specification.shifted for each in MLPKind(sizes=1, steps=(1,)).candidates(judge))


@pytest.mark.parametrize("change", [lambda x: 7 * x, lambda x: x[:, [3, 1, 0, 2, 7, 6, 5, 4]]])
@pytest.mark.parametrize("kind", [LinearKind(), RadialKind(VIEWS[:8], (1.0, 4.0), (0.1,))])
def test_unit_and_order_of_the_features_do_not_matter(
    kind: Kind, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    judge, other = make_judge(), make_judge()
    other.rows = other.rows._replace(features=change(other.rows.features))
    for first, second in zip(kind.candidates(judge), kind.candidates(other), strict=True):
        assert first.specification == second.specification
        torch.testing.assert_close(first.cosines, second.cosines, atol=1e-3, rtol=1e-3)
