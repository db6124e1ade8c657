from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from protonet.episodes.evaluation.distributed import ProcessGroup
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.training.tasks import VALIDATION, draw_batch, score_encoder, select_side
from protonet.sampling import index_classes
from tests.episodes.meta_cases import SIDES, make_data, make_plan


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
        selected, class_ids = (
            select_side("data", data, side),
            [c for c, element in enumerate(SIDES) if element == side],
        )
        assert selected.names == tuple(data.class_names[c] for c in class_ids)
        assert selected.by_class.size.tolist() == [8] * len(class_ids)
        for row, label in enumerate(data.y.tolist()):
            assert selected.classes[row] == (class_ids.index(label) if label in class_ids else -1)
        element = torch.stack([x for x, label in zip(data.x, data.y, strict=True) if label in class_ids])
        torch.testing.assert_close(selected.spread, element.std(dim=0, correction=0))
        assert torch.equal(selected.take(torch.tensor([71, 0, 5])), data.x[[71, 0, 5]])


@pytest.mark.parametrize("backbone", ["mlp", "conv"])
def test_processes_divide_one_batch(backbone: str) -> None:
    base, plan = select_side("data", make_data(), "base"), make_plan(backbone)
    x, targets = draw_batch(base, plan, 3, ProcessGroup())
    assert x.shape == (4, 4, 5, 64)
    parts = [draw_batch(base, plan, 3, ProcessGroup(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), x)
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)
    again, other = draw_batch(base, plan, 3, ProcessGroup()), draw_batch(base, plan, 4, ProcessGroup())
    assert torch.equal(again[0], x)
    assert not torch.equal(other[0], x)


def test_a_batch_has_base_rows_of_its_classes() -> None:
    data = make_data()
    base = select_side("data", data, "base")
    names = torch.tensor([data.class_names.index(name) for name in base.names])
    x, targets = draw_batch(base._replace(spread=torch.zeros(64)), make_plan(), 0, ProcessGroup())
    for rows, labels in zip(x.flatten(0, 2), names[targets.flatten()], strict=True):
        (result,) = (data.x == rows).all(dim=1).nonzero().flatten().tolist()
        assert data.y[result] == labels
    assert (targets == targets[..., :1]).all()
    assert all(len(episode[:, 0].unique()) == 4 for episode in targets)


def test_the_score_is_the_slow_loops() -> None:
    data, encoder = make_data(dim=3), Scale(3)
    side = select_side("data", data, "validation")
    score = score_encoder(encoder, nn.Identity(), side, make_plan(), 7, ProcessGroup())
    chosen = data.select_classes([3, 5])
    setting = EpisodeConfig((2, 2), (1, 1), 15, allow_small=True)
    draw = setting.sample(index_classes(chosen.y), seed=0, first=0, n_episodes=VALIDATION.n_episodes)
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


def test_data_without_sides_to_draw_from() -> None:
    data = make_data()
    with pytest.raises(ValueError, match=r"^`data` must have a split by class; got none\. Pass `split_seed` 0\.$"):
        select_side("data", data._replace(sides=None), "base")
    lone = torch.cat([(data.y == c).nonzero()[:1] for c in range(9)]).flatten()  # a row a class
    rows = torch.cat([lone, (data.y == 0).nonzero().flatten()])
    for few, got in (
        (data._replace(sides=("base", *["novel"] * 8)), 0),
        (data._replace(sides=("validation", *["base"] * 8)), 1),
        (data._replace(x=data.x[rows], y=data.y[rows], sides=("validation",) * 9), 1),
    ):
        message = rf"^`data` must have at least 2 validation classes with 2 rows; got {got}\. Add classes"
        with pytest.raises(ValueError, match=message):
            select_side("data", few, "validation")
