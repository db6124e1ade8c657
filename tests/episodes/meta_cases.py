"""A tiny data set for the tests of meta-training, and plans of runs on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from protonet.datasets import Dataset
from protonet.episodes.tasks import Plan

SIDES = ("base", "novel", "base", "validation", "base", "validation", "base", "base", "novel")


def make_data(*, dim: int = 64) -> Dataset:
    """Make 9 classes of 8 rows, in random order."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(9).repeat(8)[torch.randperm(72, generator=generator)]
    centres = torch.rand(9, dim, generator=generator)
    x = centres[y] + 0.3 * torch.rand(72, dim, generator=generator)
    return Dataset(x, y, tuple("abcdefghi"), SIDES)


def save_data(path: Path) -> Path:
    """Write the data as an NPZ file."""
    data = make_data()
    np.savez(path, x=data.x.numpy(), y=data.y.numpy(), split=np.array(SIDES)[data.y.numpy()])
    return path


def make_plan(backbone: str = "mlp", *, dim: int = 64) -> Plan:
    """Make a plan of small episodes."""
    sizes = {"way": 4, "shot": 2, "query": 3, "episodes_per_step": 4, "steps": 10, "eval_every": 5, "patience": 3}
    return Plan("tiny", None, dim, 5, backbone, **sizes, seed=1)
