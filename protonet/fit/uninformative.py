"""Class probabilities of uninformative rows, whose cells are all missing or not readable, and of rows with gaps.

The embedding of such a row is an artifact of the encoding of missing cells. Its probabilities are the class
frequencies, updated by the labels of uninformative rows in the training table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Weight of the class frequencies of all rows in the posterior, as a number of uninformative rows.
PRIOR_PSEUDO_COUNT = 10.0
#: Largest fraction of uninformative training rows for which class frequencies replace predictions. If more are
#: uninformative, the network was trained on such rows and predicts them.
MAX_UNINFORMATIVE_FRACTION = 0.5


def compute_uninformative_logits(counts: Tensor, uninformative: Tensor) -> Tensor | None:
    """Compute the logits (num_classes,) float64 of rows without information, from class frequencies.

    Returns None if most training rows are uninformative, since the network was then trained on such rows.

    ``counts`` (num_classes,) are the numbers of training rows, or 1 for each class of a balanced model, and
    ``uninformative`` (num_classes,) the numbers of uninformative training rows. The logits are the logarithm of the
    posterior mean of a Dirichlet prior around the class frequencies.

    Source: Gelman et al., "Bayesian data analysis" (2013), sec. 3.4.
    """
    counts, seen = counts.double(), uninformative.double()
    if float(seen.sum()) > MAX_UNINFORMATIVE_FRACTION * float(counts.sum()):
        return None
    posterior = (seen + PRIOR_PSEUDO_COUNT * counts / counts.sum()) / (seen.sum() + PRIOR_PSEUDO_COUNT)
    return posterior.log().clamp_min(torch.finfo(torch.float32).min)


def pad_class_counts(counts: Sequence[int], num_classes: int) -> Tensor:
    """Convert up to num_classes counts to a tensor (num_classes,) int64; the last classes get 0."""
    return torch.tensor([*counts, *[0] * (num_classes - len(counts))], dtype=torch.int64)


def format_uninformative_note(rows: int) -> str:
    """Format the number of uninformative rows as a note to the user."""
    what = "1 row has" if rows == 1 else f"{rows:,} rows have"
    return f"{what} no information (all cells missing or unreadable): predicted by class frequency"


def mix_draws(logits: Tensor) -> Tensor:
    """Compute the logits (n, classes) whose probabilities are the means of those of logits (draws, n, classes).

    They are as large as the given ones, on average.
    """
    level = logits.logsumexp(dim=2, keepdim=True).mean(dim=0)
    mixed = logits.softmax(dim=2).mean(dim=0).log() + level
    return mixed.clamp_min(torch.finfo(logits.dtype).min)
