"""The solver of this package as a few-shot method: `protonet.solve` fits a network to the support of each episode."""

from __future__ import annotations

import torch
from torch import Tensor

from protonet.episodes.samplers.batch import Episodes
from protonet.fit.solver import solve


def solver(episodes: Episodes, *, effort: str = "fast", seed: int = 0) -> Tensor:
    """Classify by the network that `protonet.solve` fits to the support rows.

    Each episode is fitted separately, thousands of times slower than other methods. `adaptive` is a faster
    mixture of closed-form classifiers for whole batches.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        effort: The search effort of `protonet.solve`: fast, default or best.
        seed: The seed of folds and initial weights, the same in every episode.

    Returns:
        Logits (episodes, n_queries, n_way), the dtype of the query rows: cosines to the prototypes over the
        temperature that was fitted to held-out rows.

    Raises:
        InputError: The effort is unknown.

    Source: this package, docs/explanation/how-it-works.md.
    """
    metadata = {"num_classes": episodes.n_way, "device": episodes.support.device}
    logits = []
    for support, labels, query in zip(episodes.support, episodes.support_labels, episodes.query, strict=True):
        network = solve((support.clone(), labels), None, metadata, effort=effort, seed=seed)
        logits.append(network(query).to(query.dtype))
    return torch.stack(logits)
