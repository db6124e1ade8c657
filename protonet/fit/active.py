"""Active learning: which rows to label next, and clusters of unlabelled rows that look like novel classes.

A suggested row is similar to many uncertain rows, and far from the other suggestions and from the labelled rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protonet._validation import check_features, check_int
from protonet.errors import raise_input_error
from protonet.fit.networks import fit_labelled_rows, select_semi_supervised_views
from protonet.fit.solver import Solution, preserve_torch_state
from protonet.losses import MAX_CHUNK_ROWS
from protonet.network import PrototypeNetwork


class Suggestion(NamedTuple):
    """A row that should be labelled next."""

    row: int  #: Index of the row in the features given to `suggest_rows`, from 0.
    reason: str  #: Why the row was chosen, as a phrase such as "representative of 12 unlabelled rows".


class TopTwoClasses(NamedTuple):
    """The two most probable classes of each of n rows, and how near the row is to its most probable class."""

    classes: Tensor
    """(n, 2) int64: the most probable class and the second one. With only one class, both are this class."""
    probabilities: Tensor  #: (n, 2) float32: the probabilities of ``classes``.
    max_logits: Tensor  #: (n,): the largest logit of the row. It is low for rows that are far from all classes.
    nearest_name: Tensor | None = None
    """(n,) int64: the class whose embedded name is nearest to the row; None if class names are uninformative."""

    @property
    def uncertainty(self) -> Tensor:
        """Uncertainty (n,) in [0, 1]: 1 minus the margin between the two largest probabilities."""
        return 1 - (self.probabilities[:, 0] - self.probabilities[:, 1])


#: Maximum number of unlabelled rows, since all pairs are compared. If there are more, this many are sampled without
#: replacement, with probabilities in proportion to their uncertainty.
MAX_COMPARED_ROWS = 4096


def suggest_rows(
    network: PrototypeNetwork | None,
    x: Tensor,
    n: int,
    class_names: Sequence[object] = (),
    *,
    unlabelled_rows: Tensor | None = None,
    labelled_features: Tensor | None = None,
    nearest_name: Tensor | None = None,
    seed: int = 0,
) -> list[Suggestion]:
    """Suggest a batch of n rows to label next, each with a reason, in order of priority.

    The uncertainty of a row is 1 minus the margin between its two most probable classes. The similarity of two rows is
    exp((cosine - 1) / bandwidth) of their embeddings. The batch maximizes coverage: the sum over all rows of the
    uncertainty times the largest similarity to a suggested row, a labelled row or a prototype. Without a network all
    rows have the same uncertainty, so the batch represents the data.

    Args:
        network: The fitted network; None before the first fit.
        x: (n_rows, dim) features.
        n: Number of rows to suggest.
        class_names: The name of each class, for the reasons.
        unlabelled_rows: (m,) indices of the unlabelled rows of x; None if all rows are unlabelled. If there are more
            than ``MAX_COMPARED_ROWS``, a sample of them is used.
        labelled_features: (k, dim) features of labelled rows that the network was not fitted to; None if there are no
            such rows. Rows that are similar to them have a low priority.
        nearest_name: (n_rows,) class whose name is nearest to each row; None if class names are uninformative. A row
            has uncertainty 1 if the network predicts another class.
        seed: Seed of the sample of rows.

    Returns:
        The n suggestions, the most important first.

    Raises:
        InputError: n exceeds the number of rows, or features are not finite or too large.

    Source: generalised coverage, Bae et al., "Generalized coverage for more robust low-budget active learning" (2024),
        with each row weighted by its uncertainty, as in Bae et al., "Uncertainty herding" (2025), eq. 3. Weighted
        sampling without replacement: Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006).
    """
    # Minimum bandwidth of the similarity of two rows. At the minimum, rows of cosine 0.9 have a similarity of exp(-1).
    min_bandwidth = 0.1
    # Number of neighbours of the median row. A larger bandwidth than the minimum is used if it is necessary for this
    # many neighbours to have a similarity of exp(-1) or more.
    n_neighbours = 10
    width = None if network is None else getattr(network.encoder, "input_dim", None)
    indices = torch.arange(len(x)) if unlabelled_rows is None else unlabelled_rows
    x = check_features("x", x if len(indices) == len(x) else x[indices], dim=width)
    labelled = x[:0] if labelled_features is None else check_features("known", labelled_features, dim=x.shape[1])
    if not len(x):
        raise_input_error("x", "have at least one row", "none", "Pass rows without a label.")
    max_rows = min(len(x), MAX_COMPARED_ROWS)
    n = check_int("n", n, low=1, high=max_rows, remedy=f"Ask for at most {max_rows} of {len(x)} rows at once.")
    with torch.no_grad():
        space: Standardiser | PrototypeNetwork = network or Standardiser(torch.cat([x, labelled]))
        predictions, uncertainty = None, torch.ones(len(x))
        if network is not None:
            predictions = predict_top_two_classes(network, x)._replace(
                nearest_name=None if nearest_name is None else nearest_name[indices]
            )
            uncertainty = predictions.uncertainty.clamp_min(torch.finfo(torch.float32).tiny)
            if predictions.nearest_name is not None:
                uncertainty = torch.where(predictions.nearest_name == predictions.classes[:, 0], uncertainty, 1.0)
        sample = sample_weighted_rows(uncertainty, MAX_COMPARED_ROWS, seed)
        embedded, drawn = space.embed(x[sample]).float(), len(sample) < len(x)
        weights = torch.ones(len(sample)) if drawn else uncertainty.float()  # the sampling has weighted sampled rows
        parts = [] if network is None else [network.prototypes[network.has_samples].float()]
        parts += [space.embed(block).float() for block in labelled.split(MAX_CHUNK_ROWS) if len(block)]
        if network is None:  # each represents its fraction of the rows
            bandwidth = median_bandwidth(embedded, math.ceil(len(sample) / n))
        else:
            bandwidth = max(min_bandwidth, median_bandwidth(embedded, n_neighbours))
        covered = torch.cat([embedded[:0], *parts])
        chosen = sample[maximize_coverage(embedded, weights, covered, n, bandwidth)]
        reasons = _explain_suggestions(space, x, chosen, predictions, class_names, bandwidth)
        return list(map(Suggestion, indices[chosen].tolist(), reasons))


def predict_top_two_classes(network: PrototypeNetwork, x: Tensor) -> TopTwoClasses:
    """Predict the two most probable classes of each row of x (n, dim), with their probabilities.

    Raises an InputError if the embedding of a row overflows.
    """
    parts: list[tuple[Tensor, ...]] = []
    for block in x.split(MAX_CHUNK_ROWS):
        logits = network(block)
        if not bool(logits.isfinite().all()):
            remedy = "Correct or drop the row."
            raise_input_error("x", "hold numbers of the size that the network was fitted to", "larger ones", remedy)
        probabilities, classes = logits.softmax(dim=1).topk(min(2, logits.shape[1]), dim=1)
        if probabilities.shape[1] == 1:  # with one known class, no prediction is certain
            probabilities, classes = probabilities.expand(-1, 2), classes.expand(-1, 2)
        parts.append((classes, probabilities.float(), logits.amax(dim=1)))
    return TopTwoClasses(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def sample_weighted_rows(weights: Tensor, size: int, seed: int) -> Tensor:
    """Sample up to ``size`` of n rows without replacement, with probabilities in proportion to weights (n,) > 0.

    Returns the ascending indices (min(n, size),) of the sampled rows.
    """
    if len(weights) <= size:
        return torch.arange(len(weights))
    noise = torch.empty(len(weights), dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(seed))
    return (weights.double().log() - noise.log()).topk(size).indices.sort().values


def kernel_similarity(rows: Tensor, others: Tensor, bandwidth: float) -> Tensor:
    """Compute the Gaussian similarity (n, m) of each of the rows (n, dim) to each of the other rows (m, dim).

    The similarity is exp(-d^2 / (2 bandwidth)), where d is the Euclidean distance.
    """
    squares = rows.square().sum(dim=1)[:, None] + others.square().sum(dim=1)
    return torch.addmm(squares, rows, others.T, alpha=-2).clamp_(min=0).div_(-2 * bandwidth).exp_()


def maximize_coverage(rows: Tensor, weights: Tensor, references: Tensor, n: int, bandwidth: float) -> Tensor:
    """Choose n of the rows (m, dim) greedily so that each row is similar to a chosen row, by `kernel_similarity`.

    The objective is a sum over all rows: the weight (m,) of a row times its largest similarity to a chosen row or to a
    row of ``references`` (k, dim). The result is at least 1 - 1/e of the maximum. Returns the indices (n,) of the
    chosen rows, in the order of choice.

    Source: Nemhauser, Wolsey and Fisher, "An analysis of approximations for maximizing submodular set functions"
        (1978), sec. 4.
    """
    similarity = kernel_similarity(rows, rows, bandwidth)
    covered = torch.zeros(len(rows))
    for block in references.split(MAX_CHUNK_ROWS // 16) if len(references) else ():
        covered = torch.maximum(covered, kernel_similarity(rows, block, bandwidth).amax(dim=1))
    chosen: list[int] = []
    available = torch.ones(len(rows), dtype=torch.bool)
    for _ in range(n):
        blocks = similarity.split(MAX_CHUNK_ROWS // 16)
        gains = torch.cat([(block - covered).clamp_(min=0) @ weights for block in blocks])
        best = int(gains.masked_fill(~available, -1.0).argmax())
        chosen.append(best)
        available[best] = False
        covered = torch.maximum(covered, similarity[best])
    return torch.tensor(chosen)


def median_bandwidth(rows: Tensor, n_neighbours: int) -> float:
    """Compute the bandwidth of `kernel_similarity` that gives the median row the requested number of neighbours.

    A neighbour has a similarity of exp(-1) or more. The median is over at most 1,024 of the rows (m, dim). If there are
    fewer other rows than requested neighbours, all rows are neighbours.
    """
    sample = rows[:: math.ceil(len(rows) / 1024)]
    count = min(len(rows), n_neighbours + 1)  # with the row itself
    nearest = torch.cdist(sample, rows).kthvalue(count, dim=1).values
    return max(float(nearest.square().median()) / 2, torch.finfo(torch.float32).eps)


class Standardiser:
    """Standardisation of rows, used as an embedding if there are no labels.

    Each column has mean 0, and all columns have the same variance. The mean squared norm of the rows (n, dim) is 1.
    """

    def __init__(self, x: Tensor) -> None:
        self.mean = x.mean(dim=0, dtype=torch.float64)
        squares = sum((block - self.mean).square().sum(dim=0) for block in x.split(MAX_CHUNK_ROWS))
        deviation = torch.as_tensor(squares / len(x)).sqrt()
        varies = deviation > 1e-12 * self.mean.abs()
        self.scale = torch.where(varies, deviation * math.sqrt(max(1, int(varies.sum()))), math.inf)

    def embed(self, x: Tensor) -> Tensor:
        """Standardise the columns of x (n, dim); return the rows (n, dim) as float32."""
        return ((x - self.mean) / self.scale).float()


def _explain_suggestions(
    space: Standardiser | PrototypeNetwork,
    x: Tensor,
    chosen: Tensor,
    predictions: TopTwoClasses | None,
    names: Sequence[object],
    bandwidth: float,
) -> Iterator[str]:
    """Yield for each chosen row of x the reason to label it, such as "between a and b" of the class ``names``."""
    # A row is called between two classes if the difference of their probabilities is less than this.
    max_margin = 0.5
    # A row is called an outlier if at most this fraction of the unlabelled rows is farther from all classes.
    outlier_fraction = 0.05
    picked, counts = space.embed(x[chosen]).float(), torch.zeros(len(chosen), dtype=torch.int64)
    for block in x.split(
        MAX_CHUNK_ROWS
    ):  # count the rows (n, dim) that are nearest to each chosen one, and similar to it
        similarity, nearest = kernel_similarity(space.embed(block).float(), picked, bandwidth).max(dim=1)
        counts += torch.bincount(nearest[similarity >= math.exp(-1)], minlength=len(chosen))
    farther = None if predictions is None else predictions.max_logits.sort().values
    for row, count in zip(chosen.tolist(), counts.tolist(), strict=True):
        reason = f"representative of {count:,} unlabelled rows" if count > 1 else "unlike the other unlabelled rows"
        if predictions is None or farther is None:
            yield reason
            continue
        (first, second), (largest, next_largest) = (
            values[row].tolist() for values in (predictions.classes, predictions.probabilities)
        )
        nearer = 1 - float(torch.searchsorted(farther, predictions.max_logits[row], right=True)) / len(x)
        if predictions.nearest_name is not None and int(predictions.nearest_name[row]) != first:
            yield f"{names[first]} by its rows, {names[int(predictions.nearest_name[row])]} by its name"
        elif nearer > 1 - outlier_fraction:
            yield f"outlier: {100 * nearer:.0f} % of the rows are closer to a class"
        elif first != second and largest - next_largest < max_margin:
            yield f"between {names[first]} and {names[second]}: {100 * largest:.0f} % and {100 * next_largest:.0f} %"
        else:
            yield reason


def cluster_unknown(solution: Solution) -> list[list[int]]:
    """Cluster labelled and unlabelled rows, and list the clusters that look like novel classes.

    Rows are clustered by the embedding of a network and the standardised features, concatenated, since the labels do
    not show which features separate other classes. A cluster is novel if it has no labelled row, and if its rows score
    lower than most held-out rows of known classes. Returns a list for each novel cluster, the largest first: the
    indices of its rows among all unlabelled rows.

    Source: average linkage, Sokal and Michener, "A statistical method for evaluating systematic relationships" (1958).
    """
    # Maximum number of labelled rows, since all pairs of rows are compared.
    max_labelled_rows = 2048
    training_set, pooled = solution.training_set, solution.semi_supervised
    if pooled is None or training_set.unlabelled is None or pooled.held_out_losses is None:
        return []
    some, rows = training_set.pool_with_unlabelled_rows(max_labelled_rows)
    untrained = solution.selected._replace(views=select_semi_supervised_views(solution.selected.views, 1.0))
    with preserve_torch_state():
        network = fit_labelled_rows(training_set.rows, untrained)
    with torch.no_grad():
        embedding = torch.cat([network.embed(part) for part in rows.split(MAX_CHUNK_ROWS)])
        plain = Standardiser(rows).embed(rows)
        joint = torch.cat([embedding, F.normalize(plain - plain.mean(dim=0), dim=1)], dim=1)
    groups = list_novel_clusters(joint, some.labels, pooled.known_score_ranks)
    return [sorted(training_set.unlabelled.indices[group].tolist()) for group in groups]


def list_novel_clusters(embedding: Tensor, labels: Tensor, ranks: Tensor) -> list[list[int]]:
    """Cluster labelled and unlabelled rows; list the novel clusters by indices of unlabelled rows, the largest first.

    The embedding (n + m, dim) has n rows with labels (n,), then m unlabelled rows with ``ranks`` (m,) of
    `protonet.fit.networks.SemiSupervisedResult`.
    """
    # Minimum number of rows in a cluster.
    min_rows = 8
    # Quantile of the distances between labelled rows of one class at which the dendrogram is cut.
    distance_quantile = 0.8
    # A cluster is novel if the median rank of its rows is lower than this. The rank of a row is the fraction of
    # held-out rows of known classes with a lower score; see `protonet.fit.networks.SemiSupervisedResult`.
    max_median_rank = 0.1
    from scipy.cluster.hierarchy import fcluster, linkage  # noqa: PLC0415 - slow to import, seldom used

    n = len(labels)
    same = (labels[:, None] == labels).triu(diagonal=1)
    if not bool(same.any()):
        return []
    cut_distance = float(torch.cdist(embedding[:n], embedding[:n])[same].quantile(distance_quantile))
    clusters = fcluster(linkage(embedding.double().numpy(), "average"), cut_distance, "distance")
    labelled_clusters = set(clusters[:n].tolist())
    groups = []
    for cluster in np.unique(clusters[n:]).tolist():
        rows = np.flatnonzero(clusters[n:] == cluster)
        is_novel = cluster not in labelled_clusters and float(ranks[torch.from_numpy(rows)].median()) < max_median_rank
        if is_novel and len(rows) >= min_rows:
            groups.append(rows.tolist())
    return sorted(groups, key=lambda group: (-len(group), group))
