"""Episodes, encoders and data for tests of few-shot methods, and their command in the process of a test."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet.datasets import Dataset
from protonet.episodes.__main__ import main
from protonet.episodes.methods import METHODS, MethodInput
from protonet.episodes.networks.backbones import make_backbone, make_head
from protonet.episodes.samplers.batch import (
    BaseClasses,
    Episodes,
    TrainedEncoder,
    make_row_reader,
    summarize_base_classes,
)
from protonet.episodes.settings import TrainingPlan
from protonet.sampling import index_classes

TRAINED = {name: spec.objective for name, spec in METHODS.items() if "encoder" in spec.needs}


def needing(need: MethodInput) -> set[str]:
    """List the methods that have ``need`` among their needs."""
    return {name for name, spec in METHODS.items() if need in spec.needs}


def means_of(rows: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean of each class's rows."""
    return torch.stack([rows[labels == c].mean(dim=0) for c in range(int(labels.max()) + 1)])


def unit(rows: Tensor, centre: Tensor | float = 0.0) -> Tensor:
    """Subtract a centre from rows, then scale them to unit norm."""
    return F.normalize(rows - centre, dim=1)


def cosines(rows: Tensor, others: Tensor) -> Tensor:
    """Compute the cosine of each row with each of ``others``."""
    return F.cosine_similarity(rows[:, None], others[None], dim=2)


def core_rows(episodes: Episodes) -> tuple[Tensor, Tensor, Tensor]:
    """Return the support, its labels and the queries."""
    return episodes.support, episodes.support_labels, episodes.query


def agree(
    logits: Tensor, episodes: Episodes, slow: Callable[..., object], *, rtol: float = 1e-5, atol: float = 1e-8
) -> bool:
    """Return whether logits equal the tensors or arrays that ``slow`` computes, episode by episode.

    ``slow`` takes an episode's support, labels and queries.
    """
    expected = [slow(*rows) for rows in zip(*core_rows(episodes), strict=True)]
    return torch.allclose(logits, torch.stack([torch.as_tensor(rows) for rows in expected]), rtol=rtol, atol=atol)


def make_base(*, dim: int = 12, seed: int = 0, dtype: torch.dtype = torch.float64) -> BaseClasses:
    """Make 6 base classes of 7 to 12 rows."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(6).repeat_interleave(torch.arange(7, 13).repeat(1))
    centres = torch.randn(6, dim, generator=generator, dtype=dtype)
    x = centres[labels] + 0.5 * torch.randn(len(labels), dim, generator=generator, dtype=dtype)
    return summarize_base_classes(make_row_reader(x.abs() + 0.1), index_classes(labels))


def make_episodes(
    *,
    n_episodes: int = 3,
    n_way: int = 4,
    shots: tuple[int, ...] | None = None,
    n_queries: int = 10,
    dim: int = 12,
    noise: float = 0.6,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    base: BaseClasses | None = None,
) -> tuple[Episodes, torch.Tensor]:
    """Make episodes of non-negative features, like those of a ReLU; return them and the labels of the queries.

    Args:
        n_episodes: The number of episodes.
        n_way: The number of classes of an episode.
        shots: The number of support rows of each class; 3, 1, 2, 4 by default. Rows are in random order.
        n_queries: The number of queries of an episode, whose classes are random.
        dim: The number of features.
        noise: Standard deviation about the classes' centres, which are standard normal.
        seed: The seed of all random numbers.
        dtype: The dtype of the features.
        base: The base classes of the episodes.
    """
    shots = shots or (3, 1, 2, 4)[:n_way]
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(n_episodes, n_way, dim, generator=generator, dtype=dtype)
    order = torch.rand(n_episodes, sum(shots), generator=generator).argsort(dim=1)
    support_labels = torch.arange(n_way).repeat_interleave(torch.tensor(shots))[order]
    query_labels = torch.randint(n_way, (n_episodes, n_queries), generator=generator)

    def sample(labels: torch.Tensor) -> torch.Tensor:
        means = centres.gather(1, labels[..., None].expand(-1, -1, dim))
        return (means + noise * torch.randn(means.shape, generator=generator, dtype=dtype)).abs() + 0.1

    episodes = Episodes(
        support=sample(support_labels),
        support_labels=support_labels,
        query=sample(query_labels),
        n_way=n_way,
        base=base,
        unlabelled=sample(query_labels),
        shape=(dim // 4, 2, 2) if dim % 4 == 0 else None,
    )
    return replace(episodes, texts=make_texts(episodes)), query_labels


def make_texts(episodes: Episodes) -> torch.Tensor:
    """Make a text of each class, (episodes, n_way, dim), near the mean of its support rows."""
    hot = torch.nn.functional.one_hot(episodes.support_labels, episodes.n_way).to(episodes.support.dtype)
    means = (hot / hot.sum(dim=1, keepdim=True)).transpose(1, 2) @ episodes.support
    return means + 0.1 * means.roll(1, dims=2)


def texts_of(episodes: Episodes) -> torch.Tensor:
    """Return the texts of episodes, which must have texts."""
    assert episodes.texts is not None
    return episodes.texts


def make_centred_episodes(shots: tuple[int, ...], *, with_base: bool) -> tuple[Episodes, torch.Tensor]:
    """Make hard episodes; return them and the centres (episodes, dim) that methods subtract from the rows."""
    base = make_base()
    episodes, _ = make_episodes(noise=1.5, shots=shots, n_queries=20, base=base if with_base else None)
    return episodes, base.mean.double().expand(3, -1) if with_base else episodes.support.mean(dim=1)


class Command:
    """Runs ``python -m protonet.episodes`` in this process. Arguments are texts with spaces between words."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capsys, self.folder, self.error = capsys, folder, ""

    def __call__(self, *arguments: object, code: int = 0) -> str:
        """Run the command, check its exit code, keep its stderr in ``error``, and return what it printed."""
        self.capsys.readouterr()
        ended = main([word for argument in arguments for word in str(argument).split()])
        out, self.error = self.capsys.readouterr()
        assert ended == code, self.error
        return out

    def read(self, *arguments: object) -> dict[str, Any]:
        """Run the command with ``--json``, and return the content of the file."""
        self.printed = self(*arguments, "--json", self.folder / "read.json")
        results: dict[str, Any] = json.loads((self.folder / "read.json").read_text(encoding="utf-8"))
        return results

    def accuracies(self, *arguments: object) -> dict[str, float]:
        """Run the command, and return the accuracy of each method."""
        return {name: method["accuracy"] for name, method in self.read(*arguments)["methods"].items()}

    def refuses(self, message: str, *arguments: object) -> None:
        """Check that the command fails, prints nothing, and writes one line to stderr that matches ``message``."""
        assert self(*arguments, code=2) == ""
        assert self.error.count("\n") == 1, self.error
        assert re.search(message, self.error), self.error


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
    """Make an encoder with the head of an objective, and rows; row i has the class i modulo 4.

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
    layer = make_head(objective, encoder(torch.zeros(1, dim)).shape[1], generator, n_way=plan.head_n_way)
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
    trained = trained._replace(support_ids=support, query_ids=query)
    rows = [trained.encoder(item.flatten(0, 1)).unflatten(0, item.shape[:2]) for item in trained.gather_inputs()]
    return Episodes(support=rows[0], support_labels=support % 4, query=rows[1], n_way=4, trained=trained), query % 4


def trained_of(episodes: Episodes) -> TrainedEncoder:
    """Return the encoder of episodes, which must have an encoder."""
    assert episodes.trained is not None
    return episodes.trained
