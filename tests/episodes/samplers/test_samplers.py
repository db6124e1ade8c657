"""Properties of the episodes of every protocol, and of the batches and rows that are gathered for episodes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protonet.episodes.samplers import sampler as sampler_module
from protonet.episodes.samplers.batch import gather_episodes, make_row_reader, split_by_size, summarize_base_classes
from protonet.episodes.samplers.config import EpisodeConfig, GeneralizedSampler
from protonet.episodes.samplers.fixed_split import FixedSplit
from protonet.episodes.samplers.meta_dataset import MetaDataset
from protonet.episodes.samplers.sampler import EMPTY_SLOT, Sampler
from protonet.sampling import index_classes
from tests.strategies import seeds

GENERATOR = torch.Generator().manual_seed(3)
SIZE = torch.randint(9, 14, (12,), generator=GENERATOR)
LABELS = torch.arange(12).repeat_interleave(SIZE)[torch.randperm(int(SIZE.sum()), generator=GENERATOR)]
INDEX = index_classes(LABELS)
PROTOCOLS: dict[str, Sampler] = {
    "balanced": EpisodeConfig(way=(3, 3), shot=(2, 2), n_query=3),
    "spans": EpisodeConfig(way=(2, 4), shot=(1, 3), n_query=2, unequal=True, n_open_classes=2),
    "dirichlet": EpisodeConfig(way=(3, 3), shot=(1, 2), n_query=2, imbalance=2.0),
    "small": EpisodeConfig(way=(2, 3), shot=(2, 2), n_query=12, imbalance=0.5, allow_small=True),
    "unlabelled": EpisodeConfig(way=(2, 3), shot=(1, 2), n_query=2, n_unlabelled=4),
    "distractors": EpisodeConfig(
        way=(2, 3), n_query=9, n_open_classes=1, allow_small=True, n_unlabelled=4, n_distractors=1
    ),
    "fixed split": FixedSplit(2, tuple((SIZE - 3).tolist())),
    "Meta-Dataset": MetaDataset(),
    "groups": MetaDataset((tuple(range(6)), tuple(range(4, 12)))),
    "generalized": GeneralizedSampler(EpisodeConfig(way=(3, 3), shot=(1, 2), n_query=3), n_base=4),
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
        class_mask, counts = sampler.count(index, seed=seed, n_episodes=6)
    draw = sampler.sample(index, seed=seed, first=0, n_episodes=6)
    assert counts.tolist() == (draw.query >= 0).sum(dim=(1, 2)).tolist()
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
                (part.support, part.support_labels, draw.support),
                (part.query, part.query_labels, draw.query),
            ):
                expected = [(row, c) for c, rows_of in enumerate(drawn[index].tolist()) for row in rows_of]
                known = labels[position] >= 0
                result = zip(rows[position][known].tolist(), labels[position][known].tolist(), strict=True)
                assert list(result) == [pair for pair in expected if pair[0] != EMPTY_SLOT]
            outside = part.query[position][part.query_labels[position] < 0].tolist()
            assert outside == [row for row in draw.open_query[index].flatten().tolist() if row != EMPTY_SLOT]
            more = draw.unlabelled[index].flatten()
            assert part.unlabelled[position].tolist() == more[more != EMPTY_SLOT].tolist()
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
        config = EpisodeConfig(way=(3, 3), n_query=2, n_unlabelled=n_unlabelled)
        (part,) = split_by_size(config.sample(INDEX, seed=0, first=0, n_episodes=n_episodes))
        episodes = gather_episodes(take, part)
        assert torch.equal(episodes.support, x[part.support].to(wide))
        assert torch.equal(episodes.query, x[part.query].to(wide))
        if episodes.unlabelled is None:
            assert not n_unlabelled
        else:
            assert torch.equal(episodes.unlabelled, x[part.unlabelled].to(wide))


def test_statistics_of_base_classes() -> None:
    x = torch.randn(len(LABELS), 3, generator=torch.Generator().manual_seed(0))
    base = summarize_base_classes(make_row_reader(x), INDEX.select_classes(torch.tensor([3, 1])))
    assert torch.allclose(base.class_means, torch.stack([x[LABELS == 3].mean(dim=0), x[LABELS == 1].mean(dim=0)]))
    assert torch.allclose(base.mean, x[(LABELS == 1) | (LABELS == 3)].mean(dim=0))
    rows = base.take(base.by_class.rows)  # methods can read base rows alone
    assert torch.equal(rows, torch.cat([x[LABELS == 3], x[LABELS == 1]]))
    with pytest.raises(IndexError, match="out of bounds"):
        base.take(torch.tensor([len(rows)]))
