"""Probabilities of rows without information: all cells are missing, or a text is not readable.

The embedding of such a row is an artifact of the encoding of missing cells. Its probabilities are the class
frequencies, updated by the labels of such rows in the training table.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Rows that the class frequencies count as, relative to the uninformative rows of the training table.
PRIOR_ROWS = 10.0
#: Above this fraction of uninformative training rows, the network predicts them: it was trained on them.
MAX_FRACTION = 0.5


def compute_uninformative_logits(counts: Tensor, uninformative: Tensor) -> Tensor | None:
    """Compute the logits (num_classes,) float64 of a row without information.

    They are the logarithm of the posterior mean of a Dirichlet prior around the class frequencies: ``counts`` are
    training rows per class, 1 for each class of a balanced model, and ``uninformative`` those without information. None
    if more than half of the training rows had no information.

    Source: Gelman et al., "Bayesian data analysis" (2013), sec. 3.4.
    """
    counts, seen = counts.double(), uninformative.double()
    if float(seen.sum()) > MAX_FRACTION * float(counts.sum()):
        return None
    posterior = (seen + PRIOR_ROWS * counts / counts.sum()) / (seen.sum() + PRIOR_ROWS)
    return posterior.log().clamp_min(torch.finfo(torch.float32).min)


def replace_uninformative(logits: Tensor, rows: Tensor, constant: Tensor | None) -> int:
    """Replace the logits (n, num_classes) of rows (n,) bool without information, in place; return their number.

    Nothing is replaced if ``constant``, of `compute_uninformative_logits`, is None.
    """
    if constant is None or not bool(rows.any()):
        return 0
    logits[rows] = constant.to(logits)
    return int(rows.sum())


def parse_counts(counts: object, num_classes: int) -> Tensor:
    """Parse counts (num_classes,) int64 of the first classes from untrusted metadata; zeros if it is unusable."""
    parsed = torch.zeros(num_classes, dtype=torch.int64)
    listed = counts if isinstance(counts, list) and len(counts) <= num_classes else []
    if all(type(count) is int and 0 <= count < 2**53 for count in listed):
        parsed[: len(listed)] = torch.tensor(listed, dtype=torch.int64)
    return parsed


def describe_uninformative(rows: int) -> str:
    """Format the number of rows without information as a note."""
    what = "1 row has" if rows == 1 else f"{rows:,} rows have"
    return f"{what} no information (all cells missing or unreadable): predicted by class frequency"
