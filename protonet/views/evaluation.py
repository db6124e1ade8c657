"""Evaluation of candidate views by the log-loss of their out-of-fold cosines, and the interface of view families.

The sizes of trained MLPs are chosen within a parameter budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet._validation import check_int, check_number
from protonet.losses import CHUNK, weigh
from protonet.selection.folds import Fold
from protonet.selection.scoring import fit_scale_and_offsets, row_blocks, worse_by_one_error
from protonet.views.view import Source, TrainingRows, View, ViewSpec

#: Minimum width of a trained view, if there are enough classes: rows of few features are padded with zeros.
MIN_EMBEDDING_DIM = 64
#: Sizes of ensembles of MLPs that may be evaluated, (members, hidden units), smallest first.
MLP_SIZES = ((1, 1), (1, 32), (1, 128), (4, 128))


class EncoderPlan(NamedTuple):
    """The sizes of MLP views within a parameter budget."""

    embedding_dim: int  #: Width of the output of each MLP.
    sizes: tuple[tuple[int, int], ...]  #: Sizes of ensembles of MLPs, (members, hidden units), smallest first.


def count_mlp_parameters(input_dim: int, hidden: int, embedding_dim: int) -> int:
    """Count the parameters of one residual MLP: two matrices and the hidden bias."""
    return hidden * (input_dim + 1 + embedding_dim)


def plan_encoder(input_dim: int, num_classes: int, param_limit: float) -> EncoderPlan:
    """Choose sizes of trained MLPs that do not exceed a parameter limit.

    Args:
        input_dim: Features per sample, >= 1.
        num_classes: Number of classes, >= 2.
        param_limit: Maximum number of trainable parameters, finite and >= 0; fractions are rounded down.

    Returns:
        The sizes of ``MLP_SIZES`` within the limit, and the next one reduced to the limit. There is no size if the
        smallest MLP exceeds the limit: the model is then raw cosine without parameters.

    Raises:
        InputTypeError: A size or the limit is not a number.
        InputError: A size is too small, or the limit is negative or not finite.
    """
    input_dim = check_int("input_dim", input_dim, low=1)
    num_classes = check_int("num_classes", num_classes, low=2)
    limit = math.floor(check_number("param_limit", param_limit, low=0))
    embedding_dim = max(input_dim, min(MIN_EMBEDDING_DIM, 4 * num_classes))
    units = limit // count_mlp_parameters(input_dim, 1, embedding_dim)
    sizes: list[tuple[int, int]] = []
    for members, hidden in MLP_SIZES:
        size = (members, hidden) if members * hidden <= units else (max(units // hidden, 1), min(units, hidden))
        if size[1] and size not in sizes:
            sizes.append(size)
        if size != (members, hidden):
            break
    return EncoderPlan(embedding_dim, tuple(sizes))


@dataclass(frozen=True)
class PruneRules:
    """When the evaluation of a view ends early, which saves time and changes results by less than their noise."""

    decisive_rows: int = 256
    """A fold with this many held-out rows decides alone which settings are best, and which views are clearly worse."""
    excess: float = 0.75
    """A view is pruned if its log-loss exceeds that of the best linear view by this, in nats per row ..."""
    min_rows: int = 32  #: ... and if at least this many held-out rows were evaluated.


PRUNING = PruneRules()


class Candidate(NamedTuple):
    """A view spec and its evaluation on held-out rows."""

    spec: ViewSpec
    cosines: Tensor  #: (n_held_out, num_classes) float32: cosines of held-out rows to class prototypes.
    losses: Tensor  #: (n_held_out,) float64: log-losses at the best temperature and offsets, times the sample weights.
    flops: float = 0.0  #: Prediction time per row, as a number of multiplications.

    @property
    def loss(self) -> float:
        """The mean log-loss, in nats per row."""
        return float(self.losses.mean())


@dataclass
class CandidateEvaluator:
    """Cross-validation of views: out-of-fold cosines and their log-losses.

    Views are fitted on the device of the rows and folds. Held-out rows are evaluated on the CPU, which is faster for
    the many small operations. Nothing is evaluated after the deadline of the rows. The generator draws initial weights
    and training episodes.
    """

    rows: TrainingRows
    folds: Sequence[Fold]
    plan: EncoderPlan
    generator: torch.Generator = field(default_factory=torch.Generator)
    fitted: dict[ViewSpec, list[View]] = field(default_factory=dict)
    """Views whose sources other views read, one per fold."""
    candidates: list[Candidate] = field(default_factory=list)  #: The candidates so far, of all families.
    reference_losses: Tensor | None = None
    """(n_held_out,) losses that decide whether a view is pruned; None if no view is pruned."""

    def __post_init__(self) -> None:
        held_out = self.rows.select(torch.cat([fold.held_out for fold in self.folds]))
        self.labels, weights = held_out.labels.cpu(), held_out.weights  # (n_held_out,)
        self.weights = None if weights is None else (weights / weights.mean()).cpu()  # (n_held_out,)
        self.sizes = torch.bincount(self.rows.labels, self.rows.sample_counts, minlength=self.rows.num_classes).cpu()
        self.seen = self.sizes > 0
        fewest = min((self.rows.labels[fold.train] for fold in self.folds), key=len)  # each has all classes
        self.degrees_of_freedom = len(fewest) - len(fewest.unique())  # within the classes

    def out_of_time(self) -> bool:
        """Test whether the deadline has passed."""
        return time.monotonic() > self.rows.deadline

    def fit(self, spec: ViewSpec) -> list[View]:
        """Fit a view to the training rows of each fold, or return the views that were fitted before."""
        if spec not in self.fitted:
            pairs = zip(self.folds, self.sources(spec), strict=True)
            self.fitted[spec] = [spec.fit(self.rows.select(fold.train), source) for fold, source in pairs]
        return self.fitted[spec]

    def sources(self, spec: ViewSpec) -> Sequence[Source | None]:
        """Fit the source of a spec to each fold, or return None for each fold if the view reads the features."""
        if spec.source is None:
            return [None] * len(self.folds)
        return [view.source for view in self.fit(spec.source)]

    def evaluate(self, spec: ViewSpec) -> Candidate | None:
        """Fit a view to each fold and evaluate it; None after the deadline, or if the first fold prunes the view."""
        cosines: list[Tensor] = []
        for index, (fold, source) in enumerate(zip(self.folds, self.sources(spec), strict=True)):
            view = spec.fit(self.rows.select(fold.train), source)  # one at a time, since some views take much memory
            flops = view.flops()
            cosines.append(self.compute_fold_cosines(partial(embed_features, view), index))
            if self.out_of_time() or (index == 0 and self.should_prune(cosines[0])):
                return None
        return self.score(spec, torch.cat(cosines), flops)

    def evaluate_source(self, spec: ViewSpec) -> Candidate:
        """Fit a view to each fold, evaluate it, and keep the fitted views for other views with the same source."""
        return self.score(spec, self.compute_cosines([partial(embed_features, view) for view in self.fit(spec)]))

    def compute_cosines(self, maps: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Compute out-of-fold cosines (n_held_out, num_classes), given the feature map of each fold."""
        return torch.cat([self.compute_fold_cosines(embed, index) for index, embed in enumerate(maps)])

    def compute_fold_cosines(self, embed: Callable[[Tensor], Tensor], index: int) -> Tensor:
        """Compute the cosines (fold.held_out, num_classes) of the held-out rows of the fold ``index``, on the CPU.

        The map of features (n, input_dim) to embeddings (parts, n, dim) was fitted to the fold. Cosines are averaged
        over the parts.
        """
        fold, features, labels = self.folds[index], self.rows.features, self.rows.labels
        num_classes, weights = self.rows.num_classes, self.rows.weights
        sums: Tensor | float = 0.0
        for rows in fold.train.split(CHUNK):
            unit = F.normalize(embed(features[rows]), dim=2)
            unit = weigh(unit, None if weights is None else weights[rows])
            shape = (len(unit), num_classes, unit.shape[2])
            sums = sums + unit.new_zeros(shape).index_add_(1, labels[rows], unit)
        prototypes = F.normalize(torch.as_tensor(sums), dim=2)
        cosines = torch.empty(len(fold.held_out), num_classes, dtype=torch.float32)
        for rows, part in zip(fold.held_out.split(CHUNK), cosines.split(CHUNK), strict=True):
            unit = F.normalize(embed(features[rows]), dim=2)
            for block in row_blocks(len(rows), len(unit) * num_classes):
                part[block] = (unit[:, block] @ prototypes.transpose(1, 2)).mean(dim=0)
        return cosines

    def score(self, spec: ViewSpec, cosines: Tensor, flops: float = 0.0) -> Candidate:
        """Build a `Candidate` from out-of-fold cosines (n_held_out, num_classes) and the prediction time per row."""
        return Candidate(spec, cosines, self.compute_losses(cosines), flops)

    def compute_losses(self, cosines: Tensor) -> Tensor:
        """Compute the log-losses (n,) of the first n held-out rows, with their best temperature and class offsets."""
        n = len(cosines)
        weights = None if self.weights is None else self.weights[:n]
        return fit_scale_and_offsets(cosines, self.labels[:n], self.sizes, weights)[2]

    def should_prune(self, cosines: Tensor, *, optimism: float = 1.0) -> bool:
        """Test whether a view is so much worse than the reference that its weight would be zero or negligible.

        Cosines (n, num_classes) are of the first n held-out rows. Losses are multiplied by ``optimism``, since other
        hyperparameters may be better.
        """
        n = len(cosines)
        if self.reference_losses is None or n < PRUNING.min_rows:
            return False
        losses, reference = optimism * self.compute_losses(cosines), self.reference_losses[:n]
        clearly_worse = n >= PRUNING.decisive_rows and worse_by_one_error(losses, reference)
        return clearly_worse or float((losses - reference).mean()) > PRUNING.excess


def embed_features(view: View, x: Tensor) -> Tensor:
    """Embed features (n, input_dim) by a view as a single part: (1, n, dim)."""
    part: Tensor = view(x if view.source is None else view.source(x))
    return part[None]


class ViewFamily(Protocol):
    """The views of one kind that model selection evaluates: a frozen dataclass of their hyperparameters."""

    stage: ClassVar[str]  #: Name of the evaluation of this family in progress messages.
    relative_time: ClassVar[float] = 1.0  #: Time of the evaluation relative to other families, for progress bars.

    @classmethod
    def for_effort(cls, effort: str) -> ViewFamily:
        """Choose the hyperparameters that are evaluated at an effort: "fast", "default" or "best"."""
        return cls()

    def candidates(self, evaluator: CandidateEvaluator) -> Iterator[Candidate]:
        """Evaluate views on held-out rows, and yield those that may get a weight."""

    def finalize(self, spec: ViewSpec, weight: float) -> ViewSpec:
        """Adapt a spec of this family to its weight in the mixture, in (0, 1], before the final fit."""
        return spec

    def without_validation(self) -> ViewFamily | None:
        """Reduce the family to the views that are fitted if no row can be held out; None for no view."""
        return self

    def with_spans(self, spans: Sequence[tuple[int, int]]) -> ViewFamily:
        """Copy the family, and add views that read a span of adjacent features alone, for each (start, stop)."""
        return self

    def smallest_trained(self, plan: EncoderPlan, source: ViewSpec) -> ViewSpec | None:
        """Specify the smallest trained view that reads the source of a view; None if none is within the budget."""
        return None
