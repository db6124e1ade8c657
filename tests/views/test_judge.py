from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from protonet import scoring as judging
from protonet.fit import candidates
from protonet.fit.candidates import Search, forest_candidates, linear_candidate, make_task, radial_candidates
from protonet.losses import class_means
from protonet.scoring import Judge, fit_temperature, split_folds
from protonet.views.linear import LinearView, fit_view
from protonet.views.radial import GRID, RADIAL_KINDS, radial_cosines
from protonet.views.shifts import move_rows
from tests.strategies import blobs


def make_judge(seed: int = 0, *, rows: int = 10, noise: float = 1.0, moves: tuple[int, ...] = (0,)) -> Judge:
    x, y = blobs(seed, rows=rows, noise=noise)
    folds = split_folds(y, 5, torch.Generator().manual_seed(0))
    return Judge(x, y, 5, folds, moves=moves)


def fit_views(judge: Judge, *kinds: str) -> dict[str, list[LinearView]]:
    x, y = judge.features, judge.labels
    return {kind: [fit_view(kind, x[fold.fit], y[fold.fit], 5) for fold in judge.folds] for kind in kinds}


def test_a_linear_candidate_is_the_slow_loop_over_held_out_rows() -> None:
    judge = make_judge()
    views = fit_views(judge, "whitened")["whitened"]
    found = linear_candidate(judge, "whitened", views)
    expected = []
    for view, fold in zip(views, judge.folds, strict=True):
        embedded = F.pad(view(judge.features), (0, 1), value=view.lift)
        means = class_means(F.normalize(embedded[fold.fit], dim=1), judge.labels[fold.fit], 5)[0]
        expected += [F.cosine_similarity(embedded[row], means, dim=1) for row in fold.judge]
    torch.testing.assert_close(found.cosines, torch.stack(expected))
    torch.testing.assert_close(found.losses, fit_temperature(found.cosines, judge.rows, judge.seen)[1])


def test_halving_finds_a_setting_that_is_no_worse_than_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = make_judge(noise=2.0, rows=20)
    views = fit_views(judge, "centred")
    kind = RADIAL_KINDS[0]
    every = torch.cat(
        [
            radial_cosines(kind, view, *(judge.features[f.fit], judge.labels[f.fit], judge.features[f.judge]), 5, GRID)
            for view, f in zip(views["centred"], judge.folds, strict=True)
        ],
        dim=1,
    )
    losses = [float(judge.losses(each).mean()) for each in every]
    (exact,) = radial_candidates(judge, views, Search(radial=(kind,)))
    monkeypatch.setattr(candidates, "HALVING_ROWS", 10**6)
    (full,) = radial_candidates(judge, views, Search(radial=(kind,)))
    assert GRID.index(full.setting) == losses.index(min(losses))
    torch.testing.assert_close(full.cosines, every[GRID.index(full.setting)])
    assert float(exact.losses.mean()) < sorted(losses)[len(losses) // 4]


def test_a_hopeless_view_is_not_tried_on_all_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = make_judge(rows=80)  # more than enough rows a fold
    view = fit_views(judge, "raw")["raw"]
    judge.best = linear_candidate(judge, "raw", view).losses
    noise = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    assert judge.hopeless(noise)
    assert not judge.hopeless(judge.fold_cosines(lambda fold, x: view[fold](x)[None], 0))
    judge.features = torch.randn(judge.features.shape, generator=torch.Generator().manual_seed(0))
    assert list(forest_candidates(judge, Search(trees=3))) == []
    monkeypatch.setattr(judging, "HOPELESS", 1e9)
    monkeypatch.setattr(judging, "SETTING_ROWS", 10**6)
    assert [each.name for each in forest_candidates(judge, Search(trees=3))] == ["forest"]


def test_moved_views_are_tried_where_there_are_moves() -> None:
    views = ("centred", "standardised", "robust")
    for moves, count in (((0,), 0), ((0, 1, -1), 4)):
        judge = make_judge(moves=moves)
        tried = [*radial_candidates(judge, fit_views(judge, *views), Search()), *forest_candidates(judge, Search())]
        assert sum(each.name.startswith("moved") for each in tried) == count


def test_nothing_is_tried_when_it_is_late() -> None:
    judge = make_judge()
    views = fit_views(judge, "centred")
    judge.deadline = 0.0
    assert list(radial_candidates(judge, views, Search())) == []
    assert list(forest_candidates(judge, Search())) == []


def test_a_task_has_the_moved_rows_too() -> None:
    x, y = blobs(1)
    view = fit_view("standardised", x, y, 5)
    task = make_task(view, x, y, (0, 1))
    torch.testing.assert_close(task.z, view(move_rows(x, (0, 1))))
    assert task.labels.tolist() == y.tolist() * 2
