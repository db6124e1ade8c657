"""Properties of the episodes of every protocol, of the batches and rows gathered for them, and configurations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from protonet.episodes.samplers import config as config_module
from protonet.episodes.samplers import sampler as sampler_module
from protonet.episodes.samplers.batch import gather_episodes, make_row_reader, split_by_size, summarize_base_classes
from protonet.episodes.samplers.config import EpisodeConfig, GeneralizedSampler
from protonet.episodes.samplers.fixed_split import FixedSplit
from protonet.episodes.samplers.meta_dataset import MetaDataset
from protonet.episodes.samplers.sampler import EMPTY_SLOT, SampledEpisodes, Sampler
from protonet.errors import InputError
from protonet.sampling import draw_without_replacement, index_classes
from tests.strategies import seeds

GENERATOR = torch.Generator().manual_seed(3)
SIZE = torch.randint(9, 14, (12,), generator=GENERATOR)
LABELS = torch.arange(12).repeat_interleave(SIZE)[torch.randperm(int(SIZE.sum()), generator=GENERATOR)]
INDEX = index_classes(LABELS)
PROTOCOLS: dict[str, Sampler] = {
    "balanced": EpisodeConfig(way=(3, 3), shot=(2, 2), query=3),
    "spans": EpisodeConfig(way=(2, 4), shot=(1, 3), query=2, unequal=True, n_open_classes=2),
    "dirichlet": EpisodeConfig(way=(3, 3), shot=(1, 2), query=2, imbalance=2.0),
    "small": EpisodeConfig(way=(2, 3), shot=(2, 2), query=12, imbalance=0.5, allow_small=True),
    "unlabelled": EpisodeConfig(way=(2, 3), shot=(1, 2), query=2, unlabelled=4),
    "distractors": EpisodeConfig(way=(2, 3), query=9, n_open_classes=1, allow_small=True, unlabelled=4, distractors=1),
    "effective": EpisodeConfig(way=(3, 5), query=3, n_effective_classes=2),
    "multinomial": EpisodeConfig(way=None, query=1, n_effective_classes=4, multinomial=True, n_open_classes=1),
    "two files": EpisodeConfig(
        way=(3, 4), shot=(1, 3), query=2, unequal=True, n_open_classes=1, n_training_rows=tuple((SIZE - 3).tolist())
    ),
    "fixed split": FixedSplit((2, 2), tuple((SIZE - 3).tolist())),
    "Meta-Dataset": MetaDataset(),
    "groups": MetaDataset((tuple(range(6)), tuple(range(4, 12)))),
    "generalized": GeneralizedSampler(EpisodeConfig(way=(3, 3), shot=(1, 2), query=3), n_base_classes=4),
}
every = pytest.mark.parametrize("name", PROTOCOLS)


@every
@settings(max_examples=5)
@given(seed=seeds, first=st.integers(0, 10**9), n=st.integers(0, 4))
def test_an_episode_depends_only_on_its_index(name: str, seed: int, first: int, n: int) -> None:
    full = PROTOCOLS[name].sample(INDEX, seed=seed, first=first, n_episodes=6)
    part = PROTOCOLS[name].sample(INDEX, seed=seed, first=first + 2, n_episodes=n)
    for more, less in zip(full, part, strict=True):
        width = less.shape[2]
        assert torch.equal(more[2 : 2 + n, :, :width], less)
        assert bool((more[2 : 2 + n, :, width:] == EMPTY_SLOT).all())


@every
@settings(max_examples=5)
@given(seed=seeds)
def test_rows_are_distinct_of_their_classes_and_counted(name: str, seed: int) -> None:
    sampler = PROTOCOLS[name]
    index = sampler.validate(INDEX, tuple(map(str, range(12))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "EPISODES_PER_COUNT_BATCH", 4)
        class_mask, counts = sampler.count_classes_and_queries(index, seed=seed, n_episodes=6)
    draw = sampler.sample(index, seed=seed, first=0, n_episodes=6)
    assert counts.tolist() == (draw.query_ids >= 0).sum(dim=(1, 2)).tolist()
    for position in range(6):
        support, query, outside, unlabelled = (rows[position] for rows in draw)
        slots = torch.cat([support, query, unlabelled[: len(support)]], dim=1)  # of the episode's classes
        classes = [rows[rows >= 0] for rows in (*slots, *outside, *unlabelled[len(support) :])]
        drawn = torch.cat(classes)
        assert len(drawn.unique()) == len(drawn)
        assert all(len(LABELS[rows].unique()) == 1 for rows in classes if len(rows))
        labels = [int(LABELS[rows[0]]) for rows in classes if len(rows)]
        assert len(set(labels)) == len(labels)
        assert sorted(labels) == class_mask[position].nonzero().flatten().tolist()


@every
@settings(max_examples=5)
@given(seed=seeds)
def test_batches_hold_every_episode_exactly_once(name: str, seed: int) -> None:
    draw = PROTOCOLS[name].sample(INDEX, seed=seed, first=3, n_episodes=12)
    indices = []
    for part in split_by_size(draw):
        indices += part.episode_positions.tolist()
        for position, index in enumerate(part.episode_positions.tolist()):
            for rows, labels, drawn in (
                (part.support_ids, part.support_labels, draw.support_ids),
                (part.query_ids, part.query_labels, draw.query_ids),
            ):
                expected = [(row, c) for c, rows_of in enumerate(drawn[index].tolist()) for row in rows_of]
                known = labels[position] >= 0
                result = zip(rows[position][known].tolist(), labels[position][known].tolist(), strict=True)
                assert list(result) == [pair for pair in expected if pair[0] != EMPTY_SLOT]
            outside = part.query_ids[position][part.query_labels[position] < 0].tolist()
            assert outside == [row for row in draw.open_query_ids[index].flatten().tolist() if row != EMPTY_SLOT]
            more = draw.unlabelled_ids[index].flatten()
            assert part.unlabelled_ids[position].tolist() == more[more != EMPTY_SLOT].tolist()
            shots = torch.bincount(part.support_labels[position], minlength=part.n_way).tolist()
            labels_of = part.query_labels[position].tolist()
            assert part.query_shots[position].tolist() == [shots[c] if c >= 0 else 0 for c in labels_of]
            assert len(shots) == part.n_way
            assert min(shots) > 0
    assert sorted(indices) == list(range(12))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_gathered_rows(dtype: torch.dtype) -> None:
    x = torch.arange(2 * len(LABELS)).reshape(-1, 2).to(dtype)
    take, wide = make_row_reader(x), torch.float64 if dtype == torch.float64 else torch.float32
    for n_episodes, n_unlabelled in ((4, 0), (2, 0), (6, 3)):  # its memory is used again
        config = EpisodeConfig(way=(3, 3), query=2, unlabelled=n_unlabelled)
        (part,) = split_by_size(config.sample(INDEX, seed=0, first=0, n_episodes=n_episodes))
        episodes = gather_episodes(take, part)
        assert torch.equal(episodes.support, x[part.support_ids].to(wide))
        assert torch.equal(episodes.query, x[part.query_ids].to(wide))
        if episodes.unlabelled is None:
            assert not n_unlabelled
        else:
            assert torch.equal(episodes.unlabelled, x[part.unlabelled_ids].to(wide))


def test_statistics_of_base_classes() -> None:
    x = torch.randn(len(LABELS), 3, generator=torch.Generator().manual_seed(0))
    base = summarize_base_classes(make_row_reader(x), INDEX.select_classes(torch.tensor([3, 1])))
    assert torch.allclose(base.class_means, torch.stack([x[LABELS == 3].mean(dim=0), x[LABELS == 1].mean(dim=0)]))
    assert torch.allclose(base.mean, x[(LABELS == 1) | (LABELS == 3)].mean(dim=0))
    rows = base.take(base.rows_by_class.row_indices)  # methods can read base rows alone
    assert torch.equal(rows, torch.cat([x[LABELS == 3], x[LABELS == 1]]))
    with pytest.raises(IndexError, match="out of bounds"):
        base.take(torch.tensor([len(rows)]))


VARIED = ("effective", "multinomial", "two files")  # which have tests of their own
CONFIGS = {
    name: protocol for name, protocol in PROTOCOLS.items() if isinstance(protocol, EpisodeConfig) and name not in VARIED
}


def labels_of(counts: list[int]) -> torch.Tensor:
    labels = torch.cat([torch.full((count,), 10 * c) for c, count in enumerate(counts)])
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))]


def sample(
    labels: torch.Tensor, config: EpisodeConfig, seed: int = 0, first: int = 0, n_episodes: int = 30
) -> SampledEpisodes:
    index = index_classes(labels)
    index = config.validate(index, tuple(map(str, range(len(index.class_counts)))))
    return config.sample(index, seed=seed, first=first, n_episodes=n_episodes)


@pytest.mark.parametrize("name", CONFIGS)
def test_ways_shots_and_queries_are_within_their_settings(name: str) -> None:
    """test_samplers.py tests that rows are distinct and of distinct classes."""
    config = CONFIGS[name]
    drawn = sample(labels_of([18, 19, 20, 18, 21, 20]), config)
    for support, query, more in zip(drawn.support_ids, drawn.query_ids, drawn.unlabelled_ids, strict=True):
        shots, queries = (support >= 0).sum(dim=1), (query >= 0).sum(dim=1)
        way = int((shots > 0).sum())
        assert config.way is not None
        assert config.way[0] <= way <= config.way[1]
        assert config.shot[0] <= int(shots[:way].min()) <= int(shots[:way].max()) <= config.shot[1]
        assert not bool(shots[way:].any() | queries[way:].any())
        assert config.unequal or len(shots[:way].unique()) == 1
        if config.allow_small:
            assert (queries[:way] <= 21 - shots[:way]).all()
        elif config.imbalance is None:
            assert (queries[:way] == config.query).all()
        else:
            assert int(queries.sum()) == way * config.query
        unused = [0] * (config.way[1] - way)
        expected = [config.unlabelled] * way + unused + [config.unlabelled] * config.distractors
        assert (more >= 0).sum(dim=1).tolist() == expected


def test_episodes_are_the_same_on_every_machine() -> None:
    """Philox, which draws the episodes, is specified bit by bit."""
    drawn = sample(torch.arange(20) % 4, EpisodeConfig(way=(3, 3), shot=(1, 1), query=2), seed=7, n_episodes=2)
    assert drawn.support_ids.flatten().tolist() == [11, 17, 2, 18, 11, 12]
    assert drawn.query_ids.flatten().tolist() == [3, 19, 9, 1, 6, 18, 2, 6, 19, 15, 16, 8]


def test_classes_rows_ways_and_shots_are_equally_likely() -> None:
    def are_equal(values: torch.Tensor, low: int = 0) -> bool:
        return float(chisquare(torch.bincount(values.flatten())[low:].numpy()).pvalue) > 1e-3

    labels = labels_of([5, 6, 7, 8])
    drawn = sample(labels, EpisodeConfig(way=(2, 2), shot=(1, 1), query=2), n_episodes=8000)
    rows = torch.cat([drawn.support_ids, drawn.query_ids], dim=2)
    assert are_equal(labels[rows[..., 0]] // 10)
    for label in labels.unique():
        counts = torch.bincount(rows.flatten(), minlength=len(labels))[labels == label]
        assert chisquare(counts.numpy()).pvalue > 1e-3
    config = EpisodeConfig(way=(2, 2), query=2, unlabelled=2, distractors=1)
    assert are_equal(sample(torch.arange(3).repeat_interleave(6), config, n_episodes=3000).unlabelled_ids)
    config = EpisodeConfig(way=(2, 5), shot=(1, 3), query=1, unequal=True)
    shots = (sample(labels_of([9] * 6), config, n_episodes=4000).support_ids >= 0).sum(dim=2)
    assert are_equal((shots > 0).sum(dim=1), low=2)
    assert are_equal(shots, low=1)


@pytest.mark.parametrize("concentration", [0.5, 2.0, 50.0])
def test_fractions_of_queries_are_dirichlet(concentration: float) -> None:
    config = EpisodeConfig(way=(4, 4), query=15, imbalance=concentration)
    counts = (sample(labels_of([80] * 5), config, n_episodes=2000).query_ids >= 0).sum(dim=2).double()
    assert (counts.sum(dim=1) == 60).all()
    fractions = counts / 60
    assert torch.allclose(fractions.mean(dim=0), torch.tensor(0.25).double(), atol=0.02)
    variance = 0.25 * 0.75 / (4 * concentration + 1) + 1 / (12 * 60**2)  # and of rounding
    assert abs(float(fractions.var()) / variance - 1) < 0.06  # some 3 standard errors


def test_errors() -> None:
    for config, message in [
        (EpisodeConfig(way=(4, 4)), r"`way` must be at most the number of classes \(3\); got 4\."),
        (EpisodeConfig((2, 2), query=2, n_open_classes=2), r"of classes \(3 beside 2 open ones\); got 2\."),
        (EpisodeConfig(way=(1, 1)), "`way` must be a whole number in .2, 1000000.; got 1"),
        (EpisodeConfig(way=(3, 2)), r"`way` must have the smaller number first, .*; got \(3, 2\)\. Pass \(2, 3\)"),
        (EpisodeConfig(shot=(0, 1)), "`shot` must be a whole number in .1, 1000000.; got 0"),
        (EpisodeConfig(query=0), "`query` must be a whole number in .1, 1000000.; got 0"),
        (EpisodeConfig(n_open_classes=-1), "`n_open_classes` must be a whole number in .0, 1000000.; got -1"),
        (EpisodeConfig(imbalance=0.0), "`imbalance` must be a finite number > 0; got 0.0"),
        (EpisodeConfig(way=(2, 2), query=5), r"`classes` must have 6 rows \(shot \+ query\); got class '1' with 4\."),
        (EpisodeConfig(way=(2, 2), query=3, imbalance=1.0), "must have 7 rows .*were all of one class"),
        (EpisodeConfig(way=(3, 3), query=5, shot=(4, 4), allow_small=True), r"number of classes \(2\)"),
        (EpisodeConfig((2, 2), query=3, distractors=1), "`distractors` must be 0 where there are no unlabelled"),
        (EpisodeConfig((2, 2), query=3, unlabelled=9), r"must have 13 rows \(shot \+ query \+ unlabelled\); got"),
        (EpisodeConfig((2, 2), query=1, unlabelled=1, distractors=2), r"\(3 beside 2 distractors\); got 2"),
    ]:
        with pytest.raises(InputError, match=message):
            sample(labels_of([5, 4, 6]), config)


@pytest.mark.parametrize("name", ["unlabelled", "distractors"])
@settings(max_examples=10)
@given(seed=seeds, first=st.integers(0, 10**12))
def test_unlabelled_rows_and_more_queries_change_nothing_else(name: str, seed: int, first: int) -> None:
    labels, config = labels_of([30, 31, 32, 30, 33, 30]), CONFIGS[name]
    full = sample(labels, config, seed, first, 6)
    without = sample(labels, replace(config, unlabelled=0, distractors=0), seed, first, 6)
    assert all(torch.equal(rows, others) for rows, others in zip(full[:3], without[:3], strict=True))
    more = sample(labels, replace(config, query=config.query + 1), seed, first, 6)
    assert torch.equal(labels[more.support_ids[:, :, 0]], labels[full.support_ids[:, :, 0]])


def test_small_classes_are_drawn_with_fewer_queries() -> None:
    labels = labels_of([2, 3, 9, 9])
    drawn = sample(labels, EpisodeConfig(way=(2, 2), shot=(2, 2), query=5, allow_small=True), n_episodes=200)
    assert 0 not in labels[drawn.support_ids]  # no row is left for a query
    small = (labels[drawn.support_ids[..., 0]] == 10).nonzero()
    assert len(small)
    assert all(int((drawn.query_ids[e, c] >= 0).sum()) == 1 for e, c in small)


@every
def test_sampling_checks_what_an_evaluation_checks(name: str) -> None:
    sampler = PROTOCOLS[name]
    for arguments, message in (
        ({"seed": -1}, r"`seed` must be a whole number in \[0, "),
        ({"first": -1}, "`first` must be a whole number >= 0; got -1"),
        ({"n_episodes": 1.5}, "`n_episodes` must be a whole number"),
        ({"index": LABELS}, "`index` must be a ClassIndex, from index_classes"),
        ({"index": index_classes(torch.arange(3))}, r"must .*; got "),
    ):
        given: dict[str, Any] = {"index": INDEX, "seed": 0, "first": 0, "n_episodes": 1} | arguments
        with pytest.raises((ValueError, TypeError), match=message):
            sampler.sample(given.pop("index"), **given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"way": 3}, r"`way` must be a pair .*; got 3\. Pass \(3, 3\)"),
        ({"way": (13, 13)}, r"`way` must be at most the number of classes \(12\); got 13"),
        ({"query": 20}, r"`classes` must have 21 rows \(shot \+ query\); got class "),
        ({"imbalance": 0.0}, "`imbalance` must be"),
        ({"distractors": 1}, "`distractors` must be 0 where there are no unlabelled rows; got 1"),
    ],
)
def test_sampling_checks_the_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        EpisodeConfig(**settings).sample(INDEX, seed=0, first=0, n_episodes=1)


@pytest.mark.parametrize(("n_classes", "n_draws"), [(1000, 1000), (300, 250), (5, 5)])
def test_many_classes_are_drawn_as_few_are(n_classes: int, n_draws: int) -> None:
    uniform = torch.rand(3, n_draws, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = draw_without_replacement(uniform, torch.tensor(n_classes).expand(3))
    assert torch.equal(config_module._draw_classes(uniform, n_classes), expected)


def test_support_and_queries_are_of_their_files() -> None:
    counts = SIZE - 3
    config = EpisodeConfig(way=(4, 4), shot=(2, 2), query=3, n_open_classes=2, n_training_rows=tuple(counts.tolist()))
    training = torch.cat(
        [INDEX.row_indices[start : start + n] for start, n in zip(INDEX.class_starts, counts, strict=True)]
    )
    draw = config.sample(INDEX, seed=0, first=0, n_episodes=200)
    assert bool(torch.isin(draw.support_ids, training).all())
    assert not bool(torch.isin(torch.cat([draw.query_ids, draw.open_query_ids], dim=1), training).any())
    drawn = torch.bincount(draw.support_ids.flatten(), minlength=len(LABELS))[training]
    assert int((drawn == 0).sum()) == 0


def test_effective_classes_are_random_classes_of_the_episode() -> None:
    """Positions do not reveal them: each class of an episode is as likely to have queries."""
    config = EpisodeConfig(way=(5, 5), query=2, n_effective_classes=2)
    draw = config.sample(INDEX, seed=0, first=0, n_episodes=2000)
    has_queries = (draw.query_ids >= 0).any(dim=2)
    assert bool((has_queries.sum(dim=1) == 2).all())
    assert bool((draw.support_ids >= 0).all())
    assert chisquare(has_queries.sum(dim=0).numpy()).pvalue > 1e-3


def test_multinomial_queries_have_the_moments_of_the_distribution() -> None:
    labels = torch.arange(6).repeat_interleave(torch.tensor([20, 40, 40, 60, 40, 40]))
    config = EpisodeConfig(way=(6, 6), query=3, multinomial=True, allow_small=True)
    index = index_classes(labels)
    draw = config.sample(index, seed=0, first=0, n_episodes=4000)
    classes = labels[draw.support_ids[..., 0]]
    counts = torch.zeros(4000, 6).scatter_(1, classes, (draw.query_ids >= 0).sum(dim=2).float())
    assert bool((counts.sum(dim=1) == 18).all())
    weights = (index.class_counts - 1).double()
    p = weights / weights.sum()
    margin = 5 * (18 * p * (1 - p) / 4000).sqrt()
    assert bool(((counts.double().mean(dim=0) - 18 * p).abs() < margin).all())
    torch.testing.assert_close(counts.double().var(dim=0), 18 * p * (1 - p), rtol=0.15, atol=0)


def test_settings_of_effective_and_multinomial_classes_are_checked() -> None:
    for config, message in (
        (EpisodeConfig(way=(3, 5), n_effective_classes=4), r"`n_effective_classes` must be .* in \[1, 3\]; got 4"),
        (EpisodeConfig(multinomial=True, imbalance=2.0), "`multinomial` must be left out with `imbalance`"),
        (EpisodeConfig(n_training_rows=(3, 4)), "`n_training_rows` must be one count for each class; got 2 for 12"),
        (EpisodeConfig(unlabelled=1, n_training_rows=(3,) * 12), "`unlabelled` must be 0 where queries are of another"),
        (EpisodeConfig(way=None, n_open_classes=11), "`way` must be at most the number of classes .*; got all"),
    ):
        with pytest.raises(InputError, match=message):
            config.sample(INDEX, seed=0, first=0, n_episodes=1)
    assert EpisodeConfig().to_dict().keys() == {
        *("protocol", "way", "shot", "query", "unequal", "imbalance", "n_open_classes", "allow_small", "unlabelled"),
        "distractors",
    }
