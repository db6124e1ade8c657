from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from protonet.episodes.distributed import Group
from protonet.episodes.sampling import Setting, draw_episodes, index_classes
from protonet.episodes.tasks import VALIDATION_EPISODES, draw_batch, score_encoder, take_side
from tests.meta_cases import SIDES, make_data, make_plan


class Scale(nn.Module):
    """Scales each feature."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_a_side_has_its_classes_alone() -> None:
    data = make_data()
    for side in ("base", "validation", "novel"):
        taken, class_ids = take_side(data, side), [c for c, own in enumerate(SIDES) if own == side]
        assert taken.names == tuple(data.class_names[c] for c in class_ids)
        assert taken.by_class.size.tolist() == [8] * len(class_ids)
        for row, label in enumerate(data.y.tolist()):
            assert taken.classes[row] == (class_ids.index(label) if label in class_ids else -1)
        own = torch.stack([x for x, label in zip(data.x, data.y, strict=True) if label in class_ids])
        torch.testing.assert_close(taken.spread, own.std(dim=0, correction=0))
        assert taken.x is data.x
    with pytest.raises(
        ValueError, match=r"^take_side: `data` must have base classes; got no split\. Split the classes"
    ):
        take_side(data._replace(sides=None), "base")


@pytest.mark.parametrize("backbone", ["mlp", "conv"])
def test_processes_share_the_same_batch(backbone: str) -> None:
    base, plan = take_side(make_data(), "base"), make_plan(backbone)
    x, targets = draw_batch(base, plan, 3, Group())
    assert x.shape == (4, 4, 5, 64)
    parts = [draw_batch(base, plan, 3, Group(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), x)
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)
    again, other = draw_batch(base, plan, 3, Group()), draw_batch(base, plan, 4, Group())
    assert torch.equal(again[0], x)
    assert not torch.equal(other[0], x)


def test_a_batch_is_of_base_rows_of_the_classes_it_says() -> None:
    data = make_data()
    base = take_side(data, "base")
    names = torch.tensor([data.class_names.index(name) for name in base.names])
    x, targets = draw_batch(base._replace(spread=torch.zeros(64)), make_plan(), 0, Group())
    for rows, labels in zip(x.flatten(0, 2), names[targets.flatten()], strict=True):
        (found,) = (data.x == rows).all(dim=1).nonzero().flatten().tolist()
        assert data.y[found] == labels
    assert (targets == targets[..., :1]).all()
    assert all(len(episode[:, 0].unique()) == 4 for episode in targets)


def test_the_score_is_the_slow_loops() -> None:
    data, encoder = make_data(dim=3), Scale(3)
    score = score_encoder(encoder, take_side(data, "validation"), 7, Group())
    chosen = data.take_classes([3, 5])
    setting = Setting((2, 2), (1, 1), 15, allow_small=True)
    draw = draw_episodes(index_classes(chosen.y), setting, seed=0, first=0, n_episodes=VALIDATION_EPISODES)
    accuracies = []
    for support, query in zip(draw.support, draw.query, strict=True):
        right = []
        for label, rows in enumerate(query):
            for row in rows:
                cosines = [F.cosine_similarity(encoder(chosen.x[row]), encoder(chosen.x[s[0]]), dim=0) for s in support]
                right.append(float(cosines[label] > cosines[1 - label]))
        accuracies.append(sum(right) / len(right))
    assert score.step == 7
    assert abs(score.accuracy - sum(accuracies) / len(accuracies)) < 1e-9
    assert 0 < score.half_width < 0.05


def test_one_validation_class() -> None:
    data = make_data()
    alone = take_side(data._replace(sides=("validation", *["base"] * 8)), "validation")
    with pytest.raises(ValueError, match=r"^validation: `way` must be at most the number of classes \(1\); got 2\."):
        score_encoder(Scale(64), alone, 0, Group())
