"""Probabilities of rows without information: those in which every cell is missing, or a text that is not read.

The embedding of such a row is an accident of how missing cells are encoded. Its probabilities are the class
frequencies, and what became of such rows in the training table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protonet.ui.text import count

#: Rows that the class frequencies count as, next to the uninformative rows of the training table.
PRIOR_ROWS = 10.0
#: Share of uninformative training rows above which the network is trusted with them: they are what it learned from.
MAX_SHARE = 0.5


def compute_uninformative_logits(counts: Tensor, uninformative: Tensor | None = None) -> Tensor | None:
    """Compute the logits of a row without information.

    Args:
        counts: (num_classes,) training rows per class, at least one in all; 1 for each class of a balanced model.
        uninformative: (m,) how many of these had no information, for the first m <= num_classes; None for none.

    Returns:
        (num_classes,) float64, the logarithm of the posterior mean of a Dirichlet prior around the class frequencies;
        finite. None if more than half of the training rows had no information.

    Source: Gelman et al., "Bayesian data analysis" (2013), sec. 3.4.
    """
    counts = counts.double()
    seen = torch.zeros_like(counts)
    if uninformative is not None:
        seen[: len(uninformative)] = uninformative
    if float(seen.sum()) > MAX_SHARE * float(counts.sum()):
        return None
    posterior = (seen + PRIOR_ROWS * counts / counts.sum()) / (seen.sum() + PRIOR_ROWS)
    return posterior.log().clamp_min(torch.finfo(torch.float32).min)


def parse_counts(counts: object, num_classes: int) -> Tensor | None:
    """Return counts of the first classes, (m,) with m <= num_classes, from untrusted metadata; None if unusable."""
    if not isinstance(counts, list) or len(counts) > num_classes:
        return None
    sound = all(type(number) is int and 0 <= number < 2**53 for number in counts)
    return torch.tensor(counts, dtype=torch.int64) if sound else None


def describe_uninformative(rows: int) -> str:
    """Return a note that counts rows without information."""
    verb = "has" if rows == 1 else "have"
    return f"{count(rows, 'row')} {verb} no information (all cells missing or unreadable): predicted by class frequency"
