"""Column importance: the loss from shuffled cells, and the contribution of each column to the class of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet.fit.crossfit import Crossfit, measure_held_out, predict_held_out
from protonet.fit.search import Progress, ignore
from protonet.network import PrototypeNetwork

#: Most shuffles of a column, and most predictions of all: with many columns and rows, shuffles are fewer, then rows.
SHUFFLES, PREDICTIONS = 10, 500_000
#: Rows that are never left out, however many columns there are.
LEAST_ROWS = 100


class Importance(NamedTuple):
    """What shuffling one column costs, the mean over rows."""

    log_loss_rise: float  #: In nats.
    log_loss_interval: tuple[float, float]  #: 95 % interval of the rise.
    accuracy_fall: float  #: A share of 1.
    accuracy_interval: tuple[float, float]  #: 95 % interval of the fall.


def rank_columns(
    judged: Crossfit,
    names: Sequence[str],
    sizes: Sequence[int],
    generator: torch.Generator,
    progress: Progress = ignore,
    predictions: int | None = None,
) -> dict[str, Any]:
    """Return what shuffling each column costs, the costliest first, as JSON can hold it.

    Args:
        judged: The rows, each judged by the network of its fold.
        names: Of the columns.
        sizes: How many features each column is.
        generator: Draws rows and shuffles.
        progress: As in `measure_columns`.
        predictions: About how many there may be at the most; None for `PREDICTIONS`.

    Raises:
        FloatingPointError: The embedding of a row, as it is or shuffled, overflows.
    """
    total_rows = count_rows(judged)
    judged, shuffles = plan_shuffles(judged, len(sizes), generator, predictions)
    orders = torch.stack([torch.randperm(len(judged.labels), generator=generator) for _ in range(shuffles)])
    importances = measure_columns(judged, sizes, orders, progress)
    if not all(math.isfinite(importance.log_loss_rise) for importance in importances):
        raise FloatingPointError("a row, as it is or shuffled, whose embedding overflows")
    metrics = measure_held_out(judged)
    columns: list[dict[str, Any]] = [
        {"name": name, "index": index, **importance._asdict()}
        for index, (name, importance) in enumerate(zip(names, importances, strict=True))
    ]
    return {
        "rows": count_rows(judged),
        "total_rows": total_rows,
        "accuracy": metrics.accuracy,
        "log_loss": metrics.log_loss,
        "shuffles": shuffles,
        "columns": sorted(columns, key=lambda column: -column["log_loss_rise"]),
    }


def compute_importances(judged: Crossfit, sizes: Sequence[int], places: Sequence[int], width: int) -> np.ndarray:
    """Return by how much the log-loss rises where a column is shuffled: (width,) float64, 0 for those left out.

    Args:
        judged: The rows, each judged by the network of its fold.
        sizes: How many features each column is that is used.
        places: Where each of these is among all columns.
        width: The number of all columns.
    """
    ranking = rank_columns(judged, [""] * len(sizes), sizes, torch.Generator().manual_seed(0))
    importances = np.zeros(width)
    for column in ranking["columns"]:
        importances[places[column["index"]]] = column["log_loss_rise"]
    return importances


def count_rows(judged: Crossfit) -> int:
    """Return how many rows there are, copies among them."""
    return round(float(judged.weights.sum()))


def plan_shuffles(
    judged: Crossfit, columns: int, generator: torch.Generator, predictions: int | None = None
) -> tuple[Crossfit, int]:
    """Return the rows, or as many drawn at random as are affordable, and how often to shuffle each column."""
    predictions = PREDICTIONS if predictions is None else predictions
    rows = min(len(judged.labels), max(LEAST_ROWS, predictions // columns))
    drawn = torch.randperm(len(judged.labels), generator=generator)[:rows].sort().values
    sampled = {name: getattr(judged, name)[drawn] for name in ("features", "labels", "weights", "fold", "groups")}
    return judged._replace(**sampled), min(SHUFFLES, max(1, predictions // (columns * rows)))


def score_rows(judged: Crossfit) -> Tensor:
    """Return the log-loss of each row, in nats, and whether it is wrong: (2, judged) float64."""
    logits = predict_held_out(judged).double()
    losses = -logits.log_softmax(dim=1).gather(1, judged.labels[:, None])[:, 0]
    return torch.stack([losses, (logits.argmax(dim=1) != judged.labels).double()])


def measure_columns(
    judged: Crossfit, sizes: Sequence[int], orders: Tensor, progress: Progress = ignore
) -> list[Importance]:
    """Measure what is lost where the cells of one column are shuffled among the rows.

    Args:
        judged: The rows, each judged by the network of its fold. Weights count in the means, not in the shuffles.
        sizes: How many features each column is; they are moved together.
        orders: (shuffles, judged) int64: in each shuffle, the row whose cell each row gets.
        progress: Called with the column that begins and the fraction of finished columns.

    Returns:
        For each column, the mean over the shuffles. Its interval is that over groups, each compared with itself: a row
        counts by what another's cell costs it, and by what its own cell costs others, since these are a sample too.
        (With the first part alone, 95 % intervals of 10 shuffles held the truth in 85 to 87 % of simulated tables.)

    Source: Breiman, "Random forests" (2001), sec. 10; Fisher, Rudin and Dominici, "All models are wrong, but many are
        useful" (2019), sec. 3.
    """
    before, times, sample = score_rows(judged), len(orders), judged.sample
    relative_weights = judged.weights / judged.weights.mean()
    repeated = judged._replace(labels=judged.labels.repeat(times), fold=judged.fold.repeat(times))
    importances = []
    for column, features in enumerate(torch.arange(sum(sizes)).split(list(sizes))):
        progress(f"column {column + 1} of {len(sizes)}", column / len(sizes))
        x = judged.features.repeat(times, 1)
        x[:, features] = judged.features[:, features][orders.flatten()]
        after = score_rows(repeated._replace(features=x)).unflatten(1, orders.shape)
        costs = relative_weights * (after - before[:, None])  # (2, shuffles, judged)
        mean = costs.mean(dim=(1, 2))
        given = torch.zeros_like(before).index_add_(1, orders.flatten(), costs.flatten(1)) / times
        influence = costs.mean(dim=1) - relative_weights * mean[:, None] + given - mean[:, None]
        half = torch.tensor([sample.half_width(values / relative_weights) for values in influence], dtype=torch.float64)
        (rise, fall), ends = mean.tolist(), torch.stack([mean - half, mean + half], dim=1).tolist()
        importances.append(Importance(rise, (ends[0][0], ends[0][1]), fall, (ends[1][0], ends[1][1])))
    return importances


@torch.no_grad()
def measure_support(
    network: PrototypeNetwork, row: Tensor, label: int, others: Tensor, weights: Tensor, sizes: Sequence[int]
) -> Tensor:
    """Return by how much each column raises the log-probability of a row's class: (columns,) float64, nats.

    That is the log-probability less its mean where the cell is that of one of some other rows.

    Args:
        network: What classifies.
        row: (dim,).
        label: The number of the class.
        others: (m, dim), m >= 1.
        weights: (m,) > 0, of these rows.
        sizes: How many features each column is.

    Source: Robnik-Sikonja and Kononenko, "Explaining classifications for individual instances" (2008), sec. 3.
    """

    def score(x: Tensor) -> Tensor:
        logits: Tensor = network(x)
        return logits.double().log_softmax(dim=1)[:, label]

    relative_weights, known = weights / weights.sum(), score(row[None])[0]
    support = []
    for features in torch.arange(sum(sizes)).split(list(sizes)):
        x = row.repeat(len(others), 1)
        x[:, features] = others[:, features].to(x)
        support.append(known - (relative_weights * score(x)).sum())
    return torch.stack(support)
