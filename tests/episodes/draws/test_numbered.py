from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from protonet._checks import InputError
from protonet.episodes.draws.numbered import Setting
from protonet.episodes.draws.sampler import NO_ROW, Draw
from protonet.sampling import index_classes
from tests.strategies import seeds


def labels_of(counts: list[int]) -> torch.Tensor:
    labels = torch.cat([torch.full((count,), 10 * c) for c, count in enumerate(counts)])
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))]


def numbered(labels: torch.Tensor, setting: Setting, seed: int = 0, first: int = 0, n_episodes: int = 30) -> Draw:
    index = index_classes(labels)
    index = setting.check(index, tuple(map(str, range(len(index.size)))))
    return setting.draw(index, seed=seed, first=first, n_episodes=n_episodes)


KNOWN_SUPPORT, KNOWN_QUERY = [11, 17, 2, 18, 11, 12], [3, 19, 9, 1, 6, 18, 2, 6, 19, 15, 16, 8]
SETTINGS = [
    Setting(way=(3, 3), shot=(2, 2), n_query=3),
    Setting(way=(2, 4), shot=(1, 3), n_query=2),
    Setting(way=(2, 4), shot=(1, 3), n_query=2, unequal=True, n_open=1),
    Setting(way=(3, 3), shot=(1, 2), n_query=2, imbalance=2.0),
    Setting(way=(2, 3), shot=(2, 2), n_query=9, n_open=2, allow_small=True),
    Setting(way=(3, 3), shot=(1, 1), n_query=6, imbalance=0.5, allow_small=True),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_rows_are_distinct_and_of_the_right_classes(setting: Setting) -> None:
    labels = labels_of([8, 9, 10, 8, 11])
    drawn = numbered(labels, setting)
    for support, query, outside in zip(*drawn[:3], strict=True):
        rows = torch.cat([support.flatten(), query.flatten(), outside.flatten()])
        rows = rows[rows >= 0]
        assert len(rows.unique()) == len(rows)
        classes = [labels[both[both >= 0]].unique() for both in torch.cat([support, query], dim=1)]
        classes += [labels[each[each >= 0]].unique() for each in outside]
        present = [each for each in classes if len(each)]
        assert all(len(each) == 1 for each in present)
        assert len(torch.cat(present).unique()) == len(present)
        shots = (support >= 0).sum(dim=1)
        way = int((shots > 0).sum())
        assert setting.way[0] <= way <= setting.way[1]
        assert (shots[:way] >= setting.shot[0]).all()
        assert (shots[:way] <= setting.shot[1]).all()
        assert (shots[way:] == 0).all()
        assert setting.unequal or len(shots[:way].unique()) == 1
        queries = (query >= 0).sum(dim=1)
        assert (queries[way:] == 0).all()
        if setting.imbalance is None and not setting.allow_small:
            assert (queries[:way] == setting.n_query).all()
        elif not setting.allow_small:
            assert int(queries.sum()) == way * setting.n_query
        else:
            assert (queries[:way] <= 11 - shots[:way]).all()


def test_more_queries_do_not_change_the_support() -> None:
    labels = labels_of([9, 9, 9])
    few, many = (numbered(labels, Setting(way=(2, 2), shot=(2, 2), n_query=n)) for n in (1, 1))
    assert torch.equal(few.support, many.support)
    classes = [labels[numbered(labels, Setting(way=(2, 2), n_query=n)).support] for n in (1, 5)]
    assert torch.equal(*classes)


def test_known_numbers() -> None:
    """The same on every machine: Philox is specified bit by bit."""
    drawn = numbered(torch.arange(20) % 4, Setting(way=(3, 3), shot=(1, 1), n_query=2), seed=7, n_episodes=2)
    assert drawn.support.flatten().tolist() == KNOWN_SUPPORT
    assert drawn.query.flatten().tolist() == KNOWN_QUERY


def test_every_class_and_row_is_equally_likely() -> None:
    labels = labels_of([5, 6, 7, 8])
    drawn = numbered(labels, Setting(way=(2, 2), shot=(1, 1), n_query=2), n_episodes=8000)
    rows = torch.cat([drawn.support, drawn.query], dim=2)
    assert chisquare(torch.bincount(labels[rows[..., 0]].flatten() // 10).numpy()).pvalue > 1e-3
    for label in labels.unique():
        counts = torch.bincount(rows.flatten(), minlength=len(labels))[labels == label]
        assert chisquare(counts.numpy()).pvalue > 1e-3


def test_ways_and_shots_are_equally_likely() -> None:
    drawn = numbered(labels_of([9] * 6), Setting(way=(2, 5), shot=(1, 3), n_query=1, unequal=True), n_episodes=4000)
    shots = (drawn.support >= 0).sum(dim=2)
    ways = (shots > 0).sum(dim=1)
    assert chisquare(torch.bincount(ways)[2:].numpy()).pvalue > 1e-3
    assert chisquare(torch.bincount(shots.flatten())[1:].numpy()).pvalue > 1e-3


@pytest.mark.parametrize("concentration", [0.5, 2.0, 50.0])
def test_shares_are_dirichlet(concentration: float) -> None:
    drawn = numbered(labels_of([80] * 5), Setting(way=(4, 4), n_query=15, imbalance=concentration), n_episodes=2000)
    counts = (drawn.query >= 0).sum(dim=2).double()
    assert (counts.sum(dim=1) == 60).all()
    shares = counts / 60
    assert torch.allclose(shares.mean(dim=0), torch.tensor(0.25).double(), atol=0.02)
    variance = 0.25 * 0.75 / (4 * concentration + 1) + 1 / (12 * 60**2)  # and of rounding
    assert abs(float(shares.var()) / variance - 1) < 0.06  # some 3 standard errors


def test_open_classes_are_outside() -> None:
    labels = labels_of([6, 6, 6, 6])
    drawn = numbered(labels, Setting(way=(2, 2), n_query=4, n_open=2))
    assert (drawn.open_query >= 0).all()
    for support, outside in zip(drawn.support, drawn.open_query, strict=True):
        assert not set(labels[support].flatten().tolist()) & set(labels[outside].flatten().tolist())


def test_small_classes() -> None:
    labels = labels_of([2, 3, 9, 9])
    drawn = numbered(labels, Setting(way=(2, 2), shot=(2, 2), n_query=5, allow_small=True), n_episodes=200)
    assert 0 not in labels[drawn.support]  # no row is left for a query
    small = (labels[drawn.support[..., 0]] == 10).nonzero()
    assert len(small)
    assert all(int((drawn.query[e, c] >= 0).sum()) == 1 for e, c in small)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (Setting(way=(4, 4)), r"Setting: `way` must be at most the number of classes \(3\); got 4\."),
        (Setting(way=(2, 2), n_query=2, n_open=2), r"number of classes \(3 beside 2 open ones\); got 2\."),
        (Setting(way=(1, 1)), "`way` must be a whole number in .2, 1000000.; got 1"),
        (Setting(way=(3, 2)), "`way` must be a whole number in .3, 1000000.; got 2"),
        (Setting(shot=(0, 1)), "`shot` must be a whole number in .1, 1000000.; got 0"),
        (Setting(n_query=0), "`n_query` must be a whole number in .1, 1000000.; got 0"),
        (Setting(n_open=-1), "`n_open` must be a whole number in .0, 1000000.; got -1"),
        (Setting(imbalance=0.0), "`imbalance` must be a finite number > 0; got 0.0"),
        (Setting(way=(2, 2), n_query=5), r"`classes` must have 6 rows \(shot \+ query\); got class '1' with 4\."),
        (Setting(way=(2, 2), n_query=3, imbalance=1.0), "must have 7 rows .*were all of one class"),
        (Setting(way=(3, 3), n_query=5, shot=(4, 4), allow_small=True), r"number of classes \(2\)"),
    ],
)
def test_errors(setting: Setting, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        numbered(labels_of([5, 4, 6]), setting)


UNLABELLED = [
    Setting(way=(2, 4), shot=(1, 3), n_query=2, n_unlabelled=3),
    Setting(way=(3, 3), shot=(1, 2), n_query=2, unequal=True, n_unlabelled=2, n_distractors=2),
    Setting(way=(2, 3), shot=(2, 2), n_query=9, n_open=1, allow_small=True, n_unlabelled=4, n_distractors=1),
    Setting(way=(2, 2), shot=(1, 2), n_query=1, imbalance=1.0, n_unlabelled=4, n_distractors=2),
]


@pytest.mark.parametrize("setting", UNLABELLED)
@given(seed=seeds)
def test_unlabelled_rows_are_others_of_the_same_classes_and_of_distractors(setting: Setting, seed: int) -> None:
    labels = labels_of([8, 9, 10, 8, 11])
    drawn = numbered(labels, setting, seed)
    members = setting.find_members(index_classes(labels), seed=seed, n_episodes=30)
    assert drawn.unlabelled.shape == (30, setting.way[1] + setting.n_distractors, setting.n_unlabelled)
    for number, (support, query, outside, more) in enumerate(zip(*drawn, strict=True)):
        rows = torch.cat([each.flatten() for each in (support, query, outside, more)])
        rows = rows[rows >= 0]
        assert len(rows.unique()) == len(rows)
        way = int((support[:, 0] >= 0).sum())
        assert bool((more[way : setting.way[1]] == NO_ROW).all())
        classes = labels[support[:way, 0]]
        assert torch.equal(labels[more[:way]], classes[:, None].expand(-1, setting.n_unlabelled))
        distractors = labels[more[setting.way[1] :]]
        assert bool((distractors == distractors[:, :1]).all())
        others = [*classes.tolist(), *labels[outside[:, 0]].tolist(), *distractors[:, 0].tolist()]
        assert len(set(others)) == len(others)
        assert sorted(others) == (10 * members[number].nonzero().flatten()).tolist()


@pytest.mark.parametrize("setting", UNLABELLED)
@given(seed=seeds, first=st.integers(0, 10**12))
def test_unlabelled_rows_change_nothing_else_and_depend_only_on_the_number(
    setting: Setting, seed: int, first: int
) -> None:
    labels = labels_of([20, 21, 22, 20, 23])
    whole = numbered(labels, setting, seed, first, 6)
    without = numbered(labels, replace(setting, n_unlabelled=0, n_distractors=0), seed, first, 6)
    assert all(torch.equal(own, other) for own, other in zip(whole[:3], without[:3], strict=True))
    assert torch.equal(numbered(labels, setting, seed, first + 2, 3).unlabelled, whole.unlabelled[2:5])


def test_every_row_is_as_likely_to_be_unlabelled() -> None:
    labels = torch.arange(3).repeat_interleave(6)
    setting = Setting(way=(2, 2), n_query=2, n_unlabelled=2, n_distractors=1)
    found = numbered(labels, setting, n_episodes=3000).unlabelled
    counts = torch.bincount(found.flatten(), minlength=18).tolist()
    assert chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            Setting((2, 2), n_query=3, n_distractors=1),
            "`n_distractors` must be 0 where there are no unlabelled rows; got",
        ),
        (
            Setting((2, 2), n_query=3, n_unlabelled=9),
            r"`classes` must have 13 rows \(shot \+ query \+ unlabelled\); got",
        ),
        (Setting((4, 4), n_query=3, n_unlabelled=1, n_distractors=2), r"classes \(5 beside 2 distractors\); got 4"),
    ],
)
def test_unlabelled_rows_that_there_are_not(setting: Setting, message: str) -> None:
    with pytest.raises(InputError, match=message):
        numbered(labels_of([8, 9, 10, 8, 11]), setting)
