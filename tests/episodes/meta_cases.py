"""A tiny data set for the tests of meta-training, and plans of runs on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from protonet.datasets import Dataset
from protonet.episodes.names import TrainingPlan
from protonet.episodes.networks.backbones import make_backbone, make_head
from protonet.episodes.samplers.batch import Episodes, TrainedEncoder, make_row_reader

SIDES = ("base", "novel", "base", "validation", "base", "validation", "base", "base", "novel")


def make_data(*, dim: int = 64) -> Dataset:
    """Make 9 classes of 8 rows, in random order."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(9).repeat(8)[torch.randperm(72, generator=generator)]
    centres = torch.rand(9, dim, generator=generator)
    x = centres[y] + 0.3 * torch.rand(72, dim, generator=generator)
    return Dataset(x, y, tuple("abcdefghi"), SIDES)


def save_data(path: Path, *, dim: int = 64) -> Path:
    """Write the data of `make_data` to an NPZ file."""
    data = make_data(dim=dim)
    np.savez(path, x=data.x.numpy(), y=data.y.numpy(), split=np.array(SIDES)[data.y.numpy()])
    return path


def make_plan(backbone: str = "mlp", *, dim: int = 64) -> TrainingPlan:
    """Make the plan of a training run on small episodes of `make_data`."""
    return TrainingPlan(
        dataset="tiny", split_seed=None, dim=dim, classes=5, backbone=backbone, way=4, shot=2, query=3, seed=1,
        episodes_per_step=4, steps=10, eval_every=5, patience=3,
    )  # fmt: skip


def make_trained(
    objective: str, *, dim: int = 6, n_rows: int = 40, backbone: str = "mlp", head: str = "classes"
) -> TrainedEncoder:
    """Make an encoder with the head of an objective, and rows, of which row i is of class i modulo 4.

    The encoder is a ``backbone``, or for "mlp" a smaller network; ``head`` is the kind of head of MAML and ANIL.
    """
    generator = torch.Generator().manual_seed(0)
    if backbone == "mlp":
        encoder = nn.Sequential(nn.utils.skip_init(nn.Linear, dim, 8), nn.Tanh())
        encoder.load_state_dict({"0.weight": torch.randn(8, dim, generator=generator), "0.bias": torch.zeros(8)})
    else:
        encoder = make_backbone(backbone, dim, generator)
    encoder.eval().requires_grad_(False)
    plan = replace(make_plan(backbone, dim=dim), objective=objective, inner_steps=3, inner_rate=0.5, head=head)
    layer = make_head(objective, encoder(torch.zeros(1, dim)).shape[1], generator, n_way=plan.head_way)
    centres = torch.rand(4, dim, generator=generator)
    x = centres.repeat(n_rows // 4, 1) + 0.3 * torch.rand(n_rows, dim, generator=generator)
    return TrainedEncoder(encoder, layer.eval().requires_grad_(False), plan, make_row_reader(x))


def make_trained_episodes(
    trained: TrainedEncoder, *, n_episodes: int = 3, n_shot: int = 2
) -> tuple[Episodes, torch.Tensor]:
    """Make 4-way episodes of the rows of `make_trained`; return them and the labels of the queries."""
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randperm(10, generator=generator)[:, None] * 4 + torch.arange(4) for _ in range(n_episodes)]
    indices = torch.stack(draws)  # (episodes, rows of a class, 4)
    order = torch.rand(n_episodes, 4 * n_shot, generator=generator).argsort(dim=1)
    support, query = indices[:, :n_shot].flatten(1).gather(1, order), indices[:, n_shot : n_shot + 3].flatten(1)
    trained = trained._replace(support=support, query=query)
    rows = [trained.encoder(item.flatten(0, 1)).unflatten(0, item.shape[:2]) for item in trained.gather()]
    return Episodes(support=rows[0], support_labels=support % 4, query=rows[1], n_way=4, trained=trained), query % 4


def trained_of(episodes: Episodes) -> TrainedEncoder:
    """Return the encoder of episodes, which must have an encoder."""
    assert episodes.trained is not None
    return episodes.trained
