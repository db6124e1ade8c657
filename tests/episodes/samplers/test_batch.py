from __future__ import annotations

import pytest
import torch
from hypothesis import given

from protonet.episodes.samplers.batch import gather_episodes, make_row_reader, split_by_size, summarize_base
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.samplers.sampler import NO_ROW
from protonet.sampling import index_classes
from tests.strategies import seeds

LABELS = torch.arange(50) % 5
INDEX = index_classes(LABELS)


@given(seed=seeds)
@pytest.mark.parametrize(
    "setting",
    [
        EpisodeConfig(way=(2, 4), shot=(1, 3), n_query=3, unequal=True, n_open_classes=1),
        EpisodeConfig(way=(3, 3), shot=(2, 2), n_query=2),
        EpisodeConfig(way=(3, 3), shot=(1, 2), n_query=2, imbalance=1.0),
        EpisodeConfig(way=(2, 3), shot=(5, 5), n_query=9, n_open_classes=2, allow_small=True),
        EpisodeConfig(way=(2, 3), shot=(1, 2), n_query=2, n_unlabelled=2, n_distractors=2),
    ],
)
def test_parts_hold_every_episode_exactly_once(setting: EpisodeConfig, seed: int) -> None:
    draw = setting.sample(INDEX, seed=seed, first=3, n_episodes=12)
    indices = []
    for part in split_by_size(draw):
        indices += part.positions.tolist()
        for position, index in enumerate(part.positions.tolist()):
            for rows, labels, drawn in (
                (part.support, part.support_labels, draw.support),
                (part.query, part.query_labels, draw.query),
            ):
                pairs = [
                    (row, label)
                    for label, element in enumerate(drawn[index].tolist())
                    for row in element
                    if row != NO_ROW
                ]
                known = labels[position] >= 0
                result = zip(rows[position][known].tolist(), labels[position][known].tolist(), strict=True)
                assert list(result) == pairs
            outside = part.query[position][part.query_labels[position] < 0].tolist()
            assert outside == [row for row in draw.open_query[index].flatten().tolist() if row != NO_ROW]
            more = draw.unlabelled[index].flatten()
            assert part.unlabelled[position].tolist() == more[more != NO_ROW].tolist()
            shots = torch.bincount(part.support_labels[position], minlength=part.n_way).tolist()
            labels_of = part.query_labels[position].tolist()
            assert part.query_shots[position].tolist() == [shots[c] if c >= 0 else 0 for c in labels_of]
            assert len(shots) == part.n_way
            assert min(shots) > 0
    assert sorted(indices) == list(range(12))


def test_gather() -> None:
    for dtype in [torch.float16, torch.float32, torch.float64]:
        x = torch.arange(100).reshape(50, 2).to(dtype)
        take, wide = make_row_reader(x), torch.float64 if dtype == torch.float64 else torch.float32
        for n_episodes, setting in (
            (4, EpisodeConfig(way=(3, 3), n_query=2)),
            (2, EpisodeConfig(way=(3, 3), n_query=2)),
            (6, EpisodeConfig(way=(3, 3), n_query=2, n_unlabelled=3, n_distractors=1)),
        ):
            (part,) = split_by_size(setting.sample(INDEX, seed=0, first=0, n_episodes=n_episodes))
            episodes = gather_episodes(take, part)
            for rows, indices in ((episodes.support, part.support), (episodes.query, part.query)):
                assert torch.equal(rows, x[indices].to(wide))
            if setting.n_unlabelled:
                assert episodes.unlabelled is not None
                assert episodes.unlabelled.shape == (6, 12, 2)
                assert torch.equal(episodes.unlabelled, x[part.unlabelled].to(wide))
            else:
                assert episodes.unlabelled is None


def test_base() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    base = summarize_base(make_row_reader(x), INDEX.take(torch.tensor([3, 1])))
    assert torch.allclose(base.class_means, torch.stack([x[LABELS == 3].mean(dim=0), x[LABELS == 1].mean(dim=0)]))
    assert torch.allclose(base.mean, x[(LABELS == 1) | (LABELS == 3)].mean(dim=0))
