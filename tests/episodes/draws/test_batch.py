from __future__ import annotations

import pytest
import torch
from hypothesis import given

from protonet.episodes.draws.batch import gather_episodes, split_draw, summarize_base, take_from
from protonet.episodes.draws.numbered import Setting
from protonet.episodes.draws.sampler import NO_ROW
from protonet.sampling import index_classes
from tests.strategies import seeds

LABELS = torch.arange(50) % 5
INDEX = index_classes(LABELS)


@given(seed=seeds)
@pytest.mark.parametrize(
    "setting",
    [
        Setting(way=(2, 4), shot=(1, 3), n_query=3, unequal=True, n_open=1),
        Setting(way=(3, 3), shot=(2, 2), n_query=2),
        Setting(way=(3, 3), shot=(1, 2), n_query=2, imbalance=1.0),
        Setting(way=(2, 3), shot=(5, 5), n_query=9, n_open=2, allow_small=True),
        Setting(way=(2, 3), shot=(1, 2), n_query=2, n_unlabelled=2, n_distractors=2),
    ],
)
def test_parts_hold_each_episode_once_and_whole(setting: Setting, seed: int) -> None:
    draw = setting.draw(INDEX, seed=seed, first=3, n_episodes=12)
    numbers = []
    for part in split_draw(draw):
        numbers += part.numbers.tolist()
        for position, number in enumerate(part.numbers.tolist()):
            for rows, labels, drawn in (
                (part.support, part.support_labels, draw.support),
                (part.query, part.query_labels, draw.query),
            ):
                pairs = [
                    (row, label) for label, own in enumerate(drawn[number].tolist()) for row in own if row != NO_ROW
                ]
                known = labels[position] >= 0
                found = zip(rows[position][known].tolist(), labels[position][known].tolist(), strict=True)
                assert list(found) == pairs
            outside = part.query[position][part.query_labels[position] < 0].tolist()
            assert outside == [row for row in draw.open_query[number].flatten().tolist() if row != NO_ROW]
            more = draw.unlabelled[number].flatten()
            assert part.unlabelled[position].tolist() == more[more != NO_ROW].tolist()
            shots = torch.bincount(part.support_labels[position], minlength=part.n_way).tolist()
            labels_of = part.query_labels[position].tolist()
            assert part.query_shots[position].tolist() == [shots[c] if c >= 0 else 0 for c in labels_of]
            assert len(shots) == part.n_way
            assert min(shots) > 0
    assert sorted(numbers) == list(range(12))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_gather(dtype: torch.dtype) -> None:
    x = torch.arange(100).reshape(50, 2).to(dtype)
    take, wide = take_from(x), torch.float64 if dtype == torch.float64 else torch.float32
    for n_episodes, setting in (
        (4, Setting(way=(3, 3), n_query=2)),
        (2, Setting(way=(3, 3), n_query=2)),
        (6, Setting(way=(3, 3), n_query=2, n_unlabelled=3, n_distractors=1)),
    ):
        (part,) = split_draw(setting.draw(INDEX, seed=0, first=0, n_episodes=n_episodes))
        episodes = gather_episodes(take, part)
        for rows, numbers in ((episodes.support, part.support), (episodes.query, part.query)):
            assert torch.equal(rows, x[numbers].to(wide))
        if setting.n_unlabelled:
            assert episodes.unlabelled is not None
            assert episodes.unlabelled.shape == (6, 12, 2)
            assert torch.equal(episodes.unlabelled, x[part.unlabelled].to(wide))
        else:
            assert episodes.unlabelled is None


def test_base() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    base = summarize_base(take_from(x), INDEX.take(torch.tensor([3, 1])))
    assert torch.allclose(base.class_means, torch.stack([x[LABELS == 3].mean(dim=0), x[LABELS == 1].mean(dim=0)]))
    assert torch.allclose(base.mean, x[(LABELS == 1) | (LABELS == 3)].mean(dim=0))
