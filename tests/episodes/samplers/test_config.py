from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.samplers.sampler import SampledEpisodes
from protonet.errors import InputError
from protonet.sampling import index_classes
from tests.strategies import seeds


def labels_of(counts: list[int]) -> torch.Tensor:
    labels = torch.cat([torch.full((count,), 10 * c) for c, count in enumerate(counts)])
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))]


def numbered(
    labels: torch.Tensor, setting: EpisodeConfig, seed: int = 0, first: int = 0, n_episodes: int = 30
) -> SampledEpisodes:
    index = index_classes(labels)
    index = setting.validate(index, tuple(map(str, range(len(index.size)))))
    return setting.sample(index, seed=seed, first=first, n_episodes=n_episodes)


KNOWN_SUPPORT, KNOWN_QUERY = [11, 17, 2, 18, 11, 12], [3, 19, 9, 1, 6, 18, 2, 6, 19, 15, 16, 8]
UNLABELLED = [
    EpisodeConfig(way=(2, 4), shot=(1, 3), n_query=2, n_unlabelled=3),
    EpisodeConfig(way=(3, 3), shot=(1, 2), n_query=2, unequal=True, n_unlabelled=2, n_distractors=2),
    EpisodeConfig(
        way=(2, 3), shot=(2, 2), n_query=9, n_open_classes=1, allow_small=True, n_unlabelled=4, n_distractors=1
    ),
    EpisodeConfig(way=(2, 2), shot=(1, 2), n_query=1, imbalance=1.0, n_unlabelled=4, n_distractors=2),
]
SETTINGS = [
    *UNLABELLED,
    EpisodeConfig(way=(3, 3), shot=(2, 2), n_query=3),
    EpisodeConfig(way=(2, 4), shot=(1, 3), n_query=2),
    EpisodeConfig(way=(2, 4), shot=(1, 3), n_query=2, unequal=True, n_open_classes=1),
    EpisodeConfig(way=(3, 3), shot=(1, 2), n_query=2, imbalance=2.0),
    EpisodeConfig(way=(2, 3), shot=(2, 2), n_query=9, n_open_classes=2, allow_small=True),
    EpisodeConfig(way=(3, 3), shot=(1, 1), n_query=6, imbalance=0.5, allow_small=True),
]


def test_ways_shots_and_queries_are_within_their_settings() -> None:
    """That rows are distinct, and of distinct classes, test_samplers.py says."""
    for setting in SETTINGS:
        drawn = numbered(labels_of([8, 9, 10, 8, 11]), setting)
        for support, query, more in zip(drawn.support, drawn.query, drawn.unlabelled, strict=True):
            shots, queries = (support >= 0).sum(dim=1), (query >= 0).sum(dim=1)
            way = int((shots > 0).sum())
            assert setting.way[0] <= way <= setting.way[1]
            assert setting.shot[0] <= int(shots[:way].min()) <= int(shots[:way].max()) <= setting.shot[1]
            assert not bool(shots[way:].any() | queries[way:].any())
            assert setting.unequal or len(shots[:way].unique()) == 1
            if setting.imbalance is None and not setting.allow_small:
                assert (queries[:way] == setting.n_query).all()
            elif not setting.allow_small:
                assert int(queries.sum()) == way * setting.n_query
            else:
                assert (queries[:way] <= 11 - shots[:way]).all()
            if setting.n_unlabelled:
                counts = (more >= 0).sum(dim=1).tolist()
                n_unused = setting.way[1] - way
                part, others = [setting.n_unlabelled] * way, [setting.n_unlabelled] * setting.n_distractors
                assert counts == part + [0] * n_unused + others


def test_known_values() -> None:
    """The same on every machine: Philox is specified bit by bit."""
    drawn = numbered(torch.arange(20) % 4, EpisodeConfig(way=(3, 3), shot=(1, 1), n_query=2), seed=7, n_episodes=2)
    assert drawn.support.flatten().tolist() == KNOWN_SUPPORT
    assert drawn.query.flatten().tolist() == KNOWN_QUERY


def test_every_class_and_row_is_equally_likely() -> None:
    labels = labels_of([5, 6, 7, 8])
    drawn = numbered(labels, EpisodeConfig(way=(2, 2), shot=(1, 1), n_query=2), n_episodes=8000)
    rows = torch.cat([drawn.support, drawn.query], dim=2)
    assert chisquare(torch.bincount(labels[rows[..., 0]].flatten() // 10).numpy()).pvalue > 1e-3
    for label in labels.unique():
        counts = torch.bincount(rows.flatten(), minlength=len(labels))[labels == label]
        assert chisquare(counts.numpy()).pvalue > 1e-3
    setting = EpisodeConfig(way=(2, 2), n_query=2, n_unlabelled=2, n_distractors=1)
    unlabelled = numbered(torch.arange(3).repeat_interleave(6), setting, n_episodes=3000).unlabelled
    assert chisquare(torch.bincount(unlabelled.flatten(), minlength=18).tolist()).pvalue > 1e-3


def test_ways_and_shots_are_equally_likely() -> None:
    drawn = numbered(
        labels_of([9] * 6), EpisodeConfig(way=(2, 5), shot=(1, 3), n_query=1, unequal=True), n_episodes=4000
    )
    shots = (drawn.support >= 0).sum(dim=2)
    ways = (shots > 0).sum(dim=1)
    assert chisquare(torch.bincount(ways)[2:].numpy()).pvalue > 1e-3
    assert chisquare(torch.bincount(shots.flatten())[1:].numpy()).pvalue > 1e-3


def test_fractions_are_dirichlet() -> None:
    for concentration in [0.5, 2.0, 50.0]:
        drawn = numbered(
            labels_of([80] * 5), EpisodeConfig(way=(4, 4), n_query=15, imbalance=concentration), n_episodes=2000
        )
        counts = (drawn.query >= 0).sum(dim=2).double()
        assert (counts.sum(dim=1) == 60).all()
        fractions = counts / 60
        assert torch.allclose(fractions.mean(dim=0), torch.tensor(0.25).double(), atol=0.02)
        variance = 0.25 * 0.75 / (4 * concentration + 1) + 1 / (12 * 60**2)  # and of rounding
        assert abs(float(fractions.var()) / variance - 1) < 0.06  # some 3 standard errors


def test_errors() -> None:
    for setting, message in [
        (EpisodeConfig(way=(4, 4)), r"`way` must be at most the number of classes \(3\); got 4\."),
        (
            EpisodeConfig(way=(2, 2), n_query=2, n_open_classes=2),
            r"number of classes \(3 beside 2 open ones\); got 2\.",
        ),
        (EpisodeConfig(way=(1, 1)), "`way` must be a whole number in .2, 1000000.; got 1"),
        (EpisodeConfig(way=(3, 2)), "`way` must be a whole number in .3, 1000000.; got 2"),
        (EpisodeConfig(shot=(0, 1)), "`shot` must be a whole number in .1, 1000000.; got 0"),
        (EpisodeConfig(n_query=0), "`n_query` must be a whole number in .1, 1000000.; got 0"),
        (EpisodeConfig(n_open_classes=-1), "`n_open_classes` must be a whole number in .0, 1000000.; got -1"),
        (EpisodeConfig(imbalance=0.0), "`imbalance` must be a finite number > 0; got 0.0"),
        (EpisodeConfig(way=(2, 2), n_query=5), r"`classes` must have 6 rows \(shot \+ query\); got class '1' with 4\."),
        (EpisodeConfig(way=(2, 2), n_query=3, imbalance=1.0), "must have 7 rows .*were all of one class"),
        (EpisodeConfig(way=(3, 3), n_query=5, shot=(4, 4), allow_small=True), r"number of classes \(2\)"),
        (
            EpisodeConfig((2, 2), n_query=3, n_distractors=1),
            "`n_distractors` must be 0 where there are no unlabelled rows; got",
        ),
        (EpisodeConfig((2, 2), n_query=3, n_unlabelled=9), r"must have 13 rows \(shot \+ query \+ unlabelled\); got"),
        (
            EpisodeConfig((2, 2), n_query=1, n_unlabelled=1, n_distractors=2),
            r"classes \(3 beside 2 distractors\); got 2",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            numbered(labels_of([5, 4, 6]), setting)


@pytest.mark.parametrize("setting", UNLABELLED)
@given(seed=seeds, first=st.integers(0, 10**12))
def test_unlabelled_rows_change_nothing_else(setting: EpisodeConfig, seed: int, first: int) -> None:
    labels = labels_of([20, 21, 22, 20, 23])
    full = numbered(labels, setting, seed, first, 6)
    without = numbered(labels, replace(setting, n_unlabelled=0, n_distractors=0), seed, first, 6)
    assert all(torch.equal(rows, others) for rows, others in zip(full[:3], without[:3], strict=True))


def test_more_queries_do_not_change_the_classes() -> None:
    labels = labels_of([9, 9, 9])
    classes = [labels[numbered(labels, EpisodeConfig(way=(2, 2), n_query=n)).support] for n in (1, 5)]
    assert torch.equal(*classes)


def test_small_classes() -> None:
    labels = labels_of([2, 3, 9, 9])
    drawn = numbered(labels, EpisodeConfig(way=(2, 2), shot=(2, 2), n_query=5, allow_small=True), n_episodes=200)
    assert 0 not in labels[drawn.support]  # no row is left for a query
    small = (labels[drawn.support[..., 0]] == 10).nonzero()
    assert len(small)
    assert all(int((drawn.query[e, c] >= 0).sum()) == 1 for e, c in small)
