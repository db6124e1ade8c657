"""Episodes for the tests of methods, and slow parts of their oracles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet.episodes.methods import METHODS, MethodInput
from protonet.episodes.samplers.batch import BaseClasses, Episodes, make_row_reader, summarize_base_classes
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
