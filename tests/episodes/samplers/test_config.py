from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.samplers.sampler import SampledEpisodes
from protonet.errors import InputError
from protonet.sampling import index_classes
from tests.episodes.samplers.test_samplers import PROTOCOLS
from tests.strategies import seeds

CONFIGS = {name: protocol for name, protocol in PROTOCOLS.items() if isinstance(protocol, EpisodeConfig)}


def labels_of(counts: list[int]) -> torch.Tensor:
    labels = torch.cat([torch.full((count,), 10 * c) for c, count in enumerate(counts)])
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))]


def sample(
    labels: torch.Tensor, config: EpisodeConfig, seed: int = 0, first: int = 0, n_episodes: int = 30
) -> SampledEpisodes:
    index = index_classes(labels)
    index = config.validate(index, tuple(map(str, range(len(index.size)))))
    return config.sample(index, seed=seed, first=first, n_episodes=n_episodes)


@pytest.mark.parametrize("name", CONFIGS)
def test_ways_shots_and_queries_are_within_their_settings(name: str) -> None:
    """test_samplers.py tests that rows are distinct and of distinct classes."""
    config = CONFIGS[name]
    drawn = sample(labels_of([18, 19, 20, 18, 21, 20]), config)
    for support, query, more in zip(drawn.support, drawn.query, drawn.unlabelled, strict=True):
        shots, queries = (support >= 0).sum(dim=1), (query >= 0).sum(dim=1)
        way = int((shots > 0).sum())
        assert config.way[0] <= way <= config.way[1]
        assert config.shot[0] <= int(shots[:way].min()) <= int(shots[:way].max()) <= config.shot[1]
        assert not bool(shots[way:].any() | queries[way:].any())
        assert config.unequal or len(shots[:way].unique()) == 1
        if config.allow_small:
            assert (queries[:way] <= 21 - shots[:way]).all()
        elif config.imbalance is None:
            assert (queries[:way] == config.n_query).all()
        else:
            assert int(queries.sum()) == way * config.n_query
        unused = [0] * (config.way[1] - way)
        expected = [config.n_unlabelled] * way + unused + [config.n_unlabelled] * config.n_distractors
        assert (more >= 0).sum(dim=1).tolist() == expected


def test_episodes_are_the_same_on_every_machine() -> None:
    """Philox, which draws the episodes, is specified bit by bit."""
    drawn = sample(torch.arange(20) % 4, EpisodeConfig(way=(3, 3), shot=(1, 1), n_query=2), seed=7, n_episodes=2)
    assert drawn.support.flatten().tolist() == [11, 17, 2, 18, 11, 12]
    assert drawn.query.flatten().tolist() == [3, 19, 9, 1, 6, 18, 2, 6, 19, 15, 16, 8]


def test_classes_rows_ways_and_shots_are_equally_likely() -> None:
    def are_equal(values: torch.Tensor, low: int = 0) -> bool:
        return float(chisquare(torch.bincount(values.flatten())[low:].numpy()).pvalue) > 1e-3

    labels = labels_of([5, 6, 7, 8])
    drawn = sample(labels, EpisodeConfig(way=(2, 2), shot=(1, 1), n_query=2), n_episodes=8000)
    rows = torch.cat([drawn.support, drawn.query], dim=2)
    assert are_equal(labels[rows[..., 0]] // 10)
    for label in labels.unique():
        counts = torch.bincount(rows.flatten(), minlength=len(labels))[labels == label]
        assert chisquare(counts.numpy()).pvalue > 1e-3
    config = EpisodeConfig(way=(2, 2), n_query=2, n_unlabelled=2, n_distractors=1)
    assert are_equal(sample(torch.arange(3).repeat_interleave(6), config, n_episodes=3000).unlabelled)
    config = EpisodeConfig(way=(2, 5), shot=(1, 3), n_query=1, unequal=True)
    shots = (sample(labels_of([9] * 6), config, n_episodes=4000).support >= 0).sum(dim=2)
    assert are_equal((shots > 0).sum(dim=1), low=2)
    assert are_equal(shots, low=1)


@pytest.mark.parametrize("concentration", [0.5, 2.0, 50.0])
def test_fractions_of_queries_are_dirichlet(concentration: float) -> None:
    config = EpisodeConfig(way=(4, 4), n_query=15, imbalance=concentration)
    counts = (sample(labels_of([80] * 5), config, n_episodes=2000).query >= 0).sum(dim=2).double()
    assert (counts.sum(dim=1) == 60).all()
    fractions = counts / 60
    assert torch.allclose(fractions.mean(dim=0), torch.tensor(0.25).double(), atol=0.02)
    variance = 0.25 * 0.75 / (4 * concentration + 1) + 1 / (12 * 60**2)  # and of rounding
    assert abs(float(fractions.var()) / variance - 1) < 0.06  # some 3 standard errors


def test_errors() -> None:
    for config, message in [
        (EpisodeConfig(way=(4, 4)), r"`way` must be at most the number of classes \(3\); got 4\."),
        (EpisodeConfig((2, 2), n_query=2, n_open_classes=2), r"of classes \(3 beside 2 open ones\); got 2\."),
        (EpisodeConfig(way=(1, 1)), "`way` must be a whole number in .2, 1000000.; got 1"),
        (EpisodeConfig(way=(3, 2)), r"`way` must have the smaller number first, .*; got \(3, 2\)\. Pass \(2, 3\)"),
        (EpisodeConfig(shot=(0, 1)), "`shot` must be a whole number in .1, 1000000.; got 0"),
        (EpisodeConfig(n_query=0), "`n_query` must be a whole number in .1, 1000000.; got 0"),
        (EpisodeConfig(n_open_classes=-1), "`n_open_classes` must be a whole number in .0, 1000000.; got -1"),
        (EpisodeConfig(imbalance=0.0), "`imbalance` must be a finite number > 0; got 0.0"),
        (EpisodeConfig(way=(2, 2), n_query=5), r"`classes` must have 6 rows \(shot \+ query\); got class '1' with 4\."),
        (EpisodeConfig(way=(2, 2), n_query=3, imbalance=1.0), "must have 7 rows .*were all of one class"),
        (EpisodeConfig(way=(3, 3), n_query=5, shot=(4, 4), allow_small=True), r"number of classes \(2\)"),
        (EpisodeConfig((2, 2), n_query=3, n_distractors=1), "`n_distractors` must be 0 where there are no unlabelled"),
        (EpisodeConfig((2, 2), n_query=3, n_unlabelled=9), r"must have 13 rows \(shot \+ query \+ unlabelled\); got"),
        (EpisodeConfig((2, 2), n_query=1, n_unlabelled=1, n_distractors=2), r"\(3 beside 2 distractors\); got 2"),
    ]:
        with pytest.raises(InputError, match=message):
            sample(labels_of([5, 4, 6]), config)


@pytest.mark.parametrize("name", ["unlabelled", "distractors"])
@settings(max_examples=10)
@given(seed=seeds, first=st.integers(0, 10**12))
def test_unlabelled_rows_and_more_queries_change_nothing_else(name: str, seed: int, first: int) -> None:
    labels, config = labels_of([30, 31, 32, 30, 33, 30]), CONFIGS[name]
    full = sample(labels, config, seed, first, 6)
    without = sample(labels, replace(config, n_unlabelled=0, n_distractors=0), seed, first, 6)
    assert all(torch.equal(rows, others) for rows, others in zip(full[:3], without[:3], strict=True))
    more = sample(labels, replace(config, n_query=config.n_query + 1), seed, first, 6)
    assert torch.equal(labels[more.support[:, :, 0]], labels[full.support[:, :, 0]])


def test_small_classes_are_drawn_with_fewer_queries() -> None:
    labels = labels_of([2, 3, 9, 9])
    drawn = sample(labels, EpisodeConfig(way=(2, 2), shot=(2, 2), n_query=5, allow_small=True), n_episodes=200)
    assert 0 not in labels[drawn.support]  # no row is left for a query
    small = (labels[drawn.support[..., 0]] == 10).nonzero()
    assert len(small)
    assert all(int((drawn.query[e, c] >= 0).sum()) == 1 for e, c in small)
