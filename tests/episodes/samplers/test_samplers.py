"""Properties of the episodes of every protocol."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protonet.episodes.samplers import sampler as sampler_module
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.samplers.fixed_split import FixedSplit
from protonet.episodes.samplers.generalized import Generalized
from protonet.episodes.samplers.meta_dataset import MetaDataset
from protonet.episodes.samplers.sampler import NO_ROW, Sampler
from protonet.sampling import index_classes
from tests.strategies import seeds

GENERATOR = torch.Generator().manual_seed(3)
SIZE = torch.randint(9, 14, (12,), generator=GENERATOR)
LABELS = torch.arange(12).repeat_interleave(SIZE)[torch.randperm(int(SIZE.sum()), generator=GENERATOR)]
INDEX = index_classes(LABELS)
GROUPED = MetaDataset((tuple(range(6)), tuple(range(4, 12))))
PROTOCOLS: dict[str, Sampler] = {
    "balanced": EpisodeConfig(way=(3, 3), shot=(2, 2), n_query=3),
    "spans": EpisodeConfig(way=(2, 4), shot=(1, 3), n_query=2, unequal=True),
    "open": EpisodeConfig(way=(2, 4), n_query=2, n_open_classes=2),
    "dirichlet": EpisodeConfig(way=(3, 3), shot=(1, 2), n_query=2, imbalance=2.0),
    "small": EpisodeConfig(way=(2, 3), shot=(2, 2), n_query=12, imbalance=0.5, allow_small=True),
    "unlabelled": EpisodeConfig(way=(2, 3), n_query=2, n_unlabelled=4),
    "distractors": EpisodeConfig(
        way=(2, 3), n_query=9, n_open_classes=1, allow_small=True, n_unlabelled=4, n_distractors=1
    ),
    "fixed split": FixedSplit(2, tuple((SIZE - 3).tolist())),
    "Meta-Dataset": MetaDataset(),
    "groups": GROUPED,
    "generalized": Generalized(EpisodeConfig(way=(3, 3), shot=(1, 2), n_query=3), n_base=4),
}
every = pytest.mark.parametrize("name", PROTOCOLS)


@every
@settings(max_examples=20)
@given(seed=seeds, first=st.integers(0, 10**9), n=st.integers(0, 4))
def test_an_episode_depends_only_on_its_index(name: str, seed: int, first: int, n: int) -> None:
    full = PROTOCOLS[name].sample(INDEX, seed=seed, first=first, n_episodes=6)
    part = PROTOCOLS[name].sample(INDEX, seed=seed, first=first + 2, n_episodes=n)
    for more, less in zip(full, part, strict=True):
        width = less.shape[2]
        assert torch.equal(more[2 : 2 + n, :, :width], less)
        assert bool((more[2 : 2 + n, :, width:] == NO_ROW).all())


@every
@settings(max_examples=20)
@given(seed=seeds)
def test_rows_are_distinct_of_their_classes_and_counted(name: str, seed: int) -> None:
    sampler = PROTOCOLS[name]
    index = sampler.validate(INDEX, tuple(map(str, range(12))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "EPISODES_PER_COUNT", 4)
        members, counts = sampler.count(index, seed=seed, n_episodes=6)
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
        assert sorted(labels) == members[position].nonzero().flatten().tolist()
