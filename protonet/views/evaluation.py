"""Evaluation of candidate views (feature maps) by the cross-validated log-loss of their cosines to prototypes.

The file also has the interface of families of candidates, and the sizes of MLPs within a parameter budget.
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
from protonet.losses import MAX_CHUNK_ROWS, multiply_by_weights
from protonet.selection.folds import Fold
from protonet.selection.scoring import compute_fitted_losses, is_worse_by_one_error, row_slices
from protonet.views.view import InputMap, TrainingRows, View, ViewSpec

#: Minimum width of the output of an MLP, if there are at least 16 classes. Rows of fewer features are zero-padded.
MIN_EMBEDDING_DIM = 64
#: Sizes of ensembles of MLPs that may be evaluated, as (number of MLPs, hidden units of each), smallest first.
MLP_SIZES = ((1, 1), (1, 32), (1, 128), (4, 128))


class EncoderPlan(NamedTuple):
    """The sizes of MLP views within a parameter budget."""

    embedding_dim: int  #: Width of the output of each MLP.
    ensemble_sizes: tuple[tuple[int, int], ...]  #: (number of MLPs, hidden units of each) of ensembles, smallest first.


def count_mlp_parameters(input_dim: int, hidden: int, embedding_dim: int) -> int:
    """Count the parameters of one residual MLP: two matrices and the hidden bias."""
    return hidden * (input_dim + 1 + embedding_dim)


def plan_encoder(input_dim: int, num_classes: int, param_limit: float) -> EncoderPlan:
    """Choose the sizes of MLP ensembles that model selection evaluates, within a limit of trainable parameters.

    Args:
        input_dim: Features per sample, >= 1.
        num_classes: Number of classes, >= 2.
        param_limit: Maximum number of trainable parameters, finite and >= 0; fractions are rounded down.

    Returns:
        The sizes of ``MLP_SIZES`` within the limit, and the next size, reduced to the limit. The plan has no sizes if
        the smallest MLP exceeds the limit: the model then has no trainable parameters.

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


class Candidate(NamedTuple):
    """The spec (hyperparameters) of a view and its evaluation on held-out rows."""

    spec: ViewSpec  #: The hyperparameters of the view.
    cosines: Tensor  #: (n_held_out, num_classes) float32: cosines of held-out rows to class prototypes.
    losses: Tensor  #: (n_held_out,) float64: log-losses at the best temperature and offsets, times the sample weights.
    flops: float = 0.0  #: Prediction time per row, as a number of multiplications.

    @property
    def mean_loss(self) -> float:
        """The mean log-loss, in nats per row."""
        return float(self.losses.mean())


#: With this many held-out rows, the first fold alone decides which hyperparameters are best, and which views are
#: clearly worse.
MIN_DECISIVE_ROWS = 256
#: A view is pruned if its log-loss exceeds that of the best view before it by this, in nats per row. In 180 development
#: fits 78 views were behind by more than 0.8, of which none had influence, and 137 by 0.5 to 0.8, of which 6 had.
MAX_EXCESS_LOSS = 0.75
#: Minimum number of evaluated held-out rows before a view is pruned.
MIN_EVALUATED_ROWS = 32


@dataclass
class CandidateEvaluator:
    """Cross-validation of views (feature maps): cosines of held-out rows to class prototypes, and their log-losses.

    Views are fitted on the device of the rows and folds. Held-out rows are evaluated on the CPU, which is faster for
    the many small operations.
    """

    rows: TrainingRows  #: The training rows, with a deadline after which nothing more is evaluated.
    folds: Sequence[Fold]  #: The folds, at least one.
    mlp_sizes: EncoderPlan  #: The sizes of MLPs that may be evaluated.
    generator: torch.Generator = field(default_factory=torch.Generator)  #: Draws initial weights and episodes.
    cached_views: dict[ViewSpec, list[View]] = field(default_factory=dict)
    """Fitted views whose input map other views share: for each spec, one view per fold."""
    candidates: list[Candidate] = field(default_factory=list)  #: The candidates evaluated so far, of all families.
    best_linear_losses: Tensor | None = None
    """(n_held_out,) log-losses of the best linear view, to which those of a view are compared when it may be pruned. If
    None, no view is pruned."""
    best_losses: Tensor | None = None  #: (n_held_out,) log-losses of the best view of all evaluated families.

    def __post_init__(self) -> None:
        held_out = self.rows.select(torch.cat([fold.held_out for fold in self.folds]))
        self.labels, weights = held_out.labels.cpu(), held_out.weights  # (n_held_out,)
        self.weights = None if weights is None else (weights / weights.mean()).cpu()  # (n_held_out,)
        self.sizes = torch.bincount(self.rows.labels, self.rows.sample_counts, minlength=self.rows.num_classes).cpu()
        self.seen = self.sizes > 0
        fewest = min((self.rows.labels[fold.train] for fold in self.folds), key=len)  # each has all classes
        self.degrees_of_freedom = len(fewest) - len(fewest.unique())  # within the classes

    def is_past_deadline(self) -> bool:
        """Test whether the deadline of the training rows has passed."""
        return time.monotonic() > self.rows.deadline

    def fit(self, spec: ViewSpec) -> list[View]:
        """Fit a view to the training rows of each fold; return one view per fold. Results are cached by spec."""
        if spec not in self.cached_views:
            pairs = zip(self.folds, self.fit_input_maps(spec), strict=True)
            self.cached_views[spec] = [spec.fit(self.rows.select(fold.train), source) for fold, source in pairs]
        return self.cached_views[spec]

    def fit_input_maps(self, spec: ViewSpec) -> Sequence[InputMap | None]:
        """Fit the input map of a view on each fold; None for each fold if the view takes the features unchanged."""
        if spec.source is None:
            return [None] * len(self.folds)
        return [view.source for view in self.fit(spec.source)]

    def evaluate(self, spec: ViewSpec) -> Candidate | None:
        """Fit a view to each fold, and evaluate it on the held-out rows; None as for `compute_view_cosines`."""
        result = self.compute_view_cosines(spec)
        return None if result is None else self.make_candidate(spec, *result)

    def evaluate_and_cache(self, spec: ViewSpec) -> Candidate:
        """Evaluate a view in cross-validation, and cache the fitted views, since other views may use their output."""
        return self.make_candidate(spec, self.compute_cached_cosines(spec))

    def with_cosines(self, candidates: Sequence[Candidate], cosines: Sequence[Tensor]) -> list[Candidate]:
        """Copy candidates with other cosines (n_held_out, num_classes), and compute the losses of all at once."""
        losses = compute_fitted_losses(cosines, self.labels, self.sizes, self.weights)
        parts = zip(candidates, cosines, losses, strict=True)
        return [candidate._replace(cosines=part, losses=loss) for candidate, part, loss in parts]

    def compute_view_cosines(self, spec: ViewSpec) -> tuple[Tensor, float] | None:
        """Fit a view to each fold; return the cosines (n_held_out, num_classes), and the prediction time in flops.

        Returns None after the deadline, or if the view is clearly too bad on the first fold (`should_prune`).
        """
        cosines: list[Tensor] = []
        for index, (fold, source) in enumerate(zip(self.folds, self.fit_input_maps(spec), strict=True)):
            view = spec.fit(self.rows.select(fold.train), source)  # one at a time, since some views take much memory
            flops = view.flops()
            cosines.append(self.compute_fold_cosines(partial(map_features, view), index))
            if self.is_past_deadline() or (index == 0 and self.should_prune(cosines[0])):
                return None
        return torch.cat(cosines), flops

    def compute_cached_cosines(self, spec: ViewSpec) -> Tensor:
        """Compute the cosines (n_held_out, num_classes) of a view whose fitted views are cached, as `fit` does."""
        return self.compute_cosines([partial(map_features, view) for view in self.fit(spec)])

    def compute_cosines(self, fold_maps: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Compute the cosines (n_held_out, num_classes) of the held-out rows, by one feature map for each fold."""
        return torch.cat([self.compute_fold_cosines(embed, index) for index, embed in enumerate(fold_maps)])

    def compute_fold_cosines(self, embed: Callable[[Tensor], Tensor], index: int) -> Tensor:
        """Compute the mean cosines (rows that the fold holds out, num_classes) float32 to class prototypes, on the CPU.

        ``embed`` maps features (n, input_dim) to embeddings (parts, n, dim), and is fitted to the training rows of the
        fold.
        """
        fold, features, labels = self.folds[index], self.rows.features, self.rows.labels
        num_classes, weights = self.rows.num_classes, self.rows.weights
        sums: Tensor | float = 0.0
        for rows in fold.train.split(MAX_CHUNK_ROWS):
            unit = F.normalize(embed(features[rows]), dim=2)
            unit = multiply_by_weights(unit, None if weights is None else weights[rows])
            shape = (len(unit), num_classes, unit.shape[2])
            sums = sums + unit.new_zeros(shape).index_add_(1, labels[rows], unit)
        prototypes = F.normalize(torch.as_tensor(sums), dim=2)
        cosines = torch.empty(len(fold.held_out), num_classes, dtype=torch.float32)
        for rows, part in zip(fold.held_out.split(MAX_CHUNK_ROWS), cosines.split(MAX_CHUNK_ROWS), strict=True):
            unit = F.normalize(embed(features[rows]), dim=2)
            for block in row_slices(len(rows), len(unit) * num_classes):
                part[block] = (unit[:, block] @ prototypes.transpose(1, 2)).mean(dim=0)
        return cosines

    def make_candidate(self, spec: ViewSpec, cosines: Tensor, flops: float = 0.0) -> Candidate:
        """Build a `Candidate`, with the log-losses of held-out cosines (n_held_out, num_classes).

        ``flops`` is the prediction time per row, as a number of multiplications.
        """
        return Candidate(spec, cosines, self.compute_losses(cosines), flops)

    def compute_losses(self, cosines: Tensor) -> Tensor:
        """Compute the log-losses (..., n) of cosines (..., n, num_classes) of the first n held-out rows.

        The temperature and the class offsets are fitted to the same rows, for each leading index separately.
        """
        *shape, n, num_classes = cosines.shape
        weights = None if self.weights is None else self.weights[:n]
        views = cosines.reshape(-1, n, num_classes)
        return compute_fitted_losses(views, self.labels[:n], self.sizes, weights).view(*shape, n)

    def should_prune(self, cosines: Tensor, *, expected_loss_ratio: float = 1.0) -> bool:
        """Test whether cosines (n, num_classes) of the first n held-out rows are so bad that the evaluation should end.

        The losses are multiplied by ``expected_loss_ratio``, below 1 if other hyperparameters may be better.
        """
        n = len(cosines)
        if self.best_linear_losses is None or self.best_losses is None or n < MIN_EVALUATED_ROWS:
            return False
        losses = expected_loss_ratio * self.compute_losses(cosines)
        if n >= MIN_DECISIVE_ROWS and is_worse_by_one_error(losses, self.best_linear_losses[:n]):
            return True
        return float((losses - self.best_losses[:n]).mean()) > MAX_EXCESS_LOSS


def map_features(view: View, x: Tensor) -> Tensor:
    """Compute the output (1, n, dim) of a view for features (n, input_dim); the view's input map is applied first."""
    part: Tensor = view(x if view.source is None else view.source(x))
    return part[None]


class ViewFamily(Protocol):
    """The candidate views of one type, such as forests; implementations are frozen dataclasses.

    The fields of an implementation are the hyperparameters that model selection evaluates.
    """

    progress_name: ClassVar[str]  #: Name of the evaluation of this family in progress messages.
    relative_time: ClassVar[float] = 1.0  #: Time of the evaluation relative to other families, for progress bars.

    def candidates(self, evaluator: CandidateEvaluator) -> Iterator[Candidate]:
        """Evaluate views on held-out rows; yield the candidates among which weights are distributed.

        Every candidate gets a weight, so that a family yields only the best of several hyperparameters. The candidates
        of earlier families are in ``evaluator.candidates``.
        """

    def final_spec(self, spec: ViewSpec, weight: float) -> ViewSpec:
        """Return the spec for the final fit of a view, given its weight in the mixture of views, in (0, 1]."""
        return spec

    def without_validation(self) -> ViewFamily | None:
        """Return the family of the views that are fitted if no row can be held out; None if there is no such view.

        Its candidates are compared on the training rows, so that it must have a single choice of hyperparameters.
        """
        return self

    def with_spans(self, spans: Sequence[tuple[int, int]]) -> ViewFamily:
        """Return the family with additional views that read only the features in [start, stop), for each span."""
        return self

    def smallest_trained_spec(self, mlp_sizes: EncoderPlan, source: ViewSpec) -> ViewSpec | None:
        """Return the spec of the smallest trained view of this family; None if no trained view is within the budget.

        Its input is the source of a view with the spec ``source``.
        """
        return None
