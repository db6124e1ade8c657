"""Model selection: cross-validation decides which feature maps (views) are used, and with which weights.

Each candidate view is evaluated by the log-loss of its out-of-fold cosines to the class prototypes. The cosine of the
raw features is always a candidate. The result is a weighted mixture of views, or raw cosine alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from protonet.fit.prior import (
    DEFAULT_LOGIT_STD,
    MIN_VIEW_SPREAD,
    TEMPERATURE_PRIOR_PSEUDO_COUNT,
    WeightingPrior,
    build_prior_input,
    compute_row_statistics,
    drop_small_influences,
    encode_tags,
    load_published_prior,
)
from protonet.selection.folds import DEFAULT_N_FOLDS, MAX_COSINES, Fold, split_folds
from protonet.selection.scoring import (
    MAX_TOLERATED_EXCESS,
    MIXTURE_ADVANTAGE,
    fit_scale_and_offsets,
    is_worse_by_one_error,
    row_slices,
    select_simplest_within_one_error,
)
from protonet.views import VIEW_FAMILIES
from protonet.views.evaluation import MIN_DECISIVE_ROWS, Candidate, CandidateEvaluator, EncoderPlan, ViewFamily
from protonet.views.linear import LinearSpec
from protonet.views.shifts import detect_feature_order
from protonet.views.view import CPU, TrainingRows, ViewSpec, select_evenly

#: The linear view of the raw features, which is used if no other view is better.
RAW_LINEAR = LinearSpec("raw")
#: The smallest inverse temperature: with it, logits differ by at most 0.1.
MIN_INVERSE_TEMPERATURE = 0.05
#: Fraction of the progress bar that is complete at the end of the search; the remainder is for the final fit.
SEARCH_PROGRESS_FRACTION = 0.8
#: Minimum spread of a view in a mixture. With a smaller one, the weight, which is influence divided by spread, would
#: multiply the cosines of a row that differs from the others by more than ten thousand.
MIN_MIXED_SPREAD = 1e-4
#: Function that is called with the name of the current stage and the completed fraction, from 0 to 1.
FitProgress = Callable[[str, float], None]


def ignore_progress(stage: str, fraction: float) -> None:
    """Do nothing: the default of functions that are called with the current stage and the finished fraction."""


@dataclass(frozen=True)
class ModelSearch:
    """The search space of model selection: families of feature maps (views), and how candidates are evaluated.

    Change a copy with ``dataclasses.replace``, and a single family with `with_family`.
    """

    families: tuple[ViewFamily, ...] = field(default_factory=lambda: tuple(kind() for kind, _ in VIEW_FAMILIES))
    """Families of views, such as forests, in the order of `protonet.views.VIEW_FAMILIES`. A family yields candidate
    views with different hyperparameters."""
    n_folds: int = DEFAULT_N_FOLDS
    """Number of folds by which views are selected; 0 for no such folds. The cross-validation that evaluates the result,
    `protonet.fit.cross_validation.cross_validate`, has its own folds."""
    use_shifts: bool = True  #: Whether views are also fitted to shifted rows, if the features are a series or an image.
    prior: WeightingPrior | None = None  #: Network that weights the views; None for the pretrained network.

    def with_family(self, family: ViewFamily) -> ModelSearch:
        """Copy the search space with one family replaced: ``family`` replaces the family of the same class."""
        return replace(self, families=tuple(family if type(old) is type(family) else old for old in self.families))

    def with_spans(self, spans: Sequence[tuple[int, int]]) -> ModelSearch:
        """Copy the search space, and add views that see only a span of adjacent features, given as (start, stop)."""
        return replace(self, families=tuple(kind.with_spans(spans) for kind in self.families)) if spans else self

    def without_family(self, family_type: type[ViewFamily]) -> ModelSearch:
        """Copy the search space without the families of the class ``family_type``."""
        return replace(self, families=tuple(family for family in self.families if type(family) is not family_type))


#: The search space of `protonet.solve`, the estimator and the commands.
DEFAULT_SEARCH = ModelSearch()


class UnlabelledWeights(NamedTuple):
    """The weights of unlabelled rows in a fit, and the temperature of the network fitted to all rows."""

    weights: Tensor  #: (m,) in [0, 1]: weight of each unlabelled row; a labelled row has weight 1, an outlier 0.
    temperature: float  #: The number by which cosines are divided to get logits.


class SelectedModel(NamedTuple):
    """The views that cross-validation selected, their weights, the temperature and the offsets."""

    views: tuple[tuple[ViewSpec, float], ...]  #: Pairs of a selected view and its weight, > 0.
    temperature: float  #: The number by which cosines are divided to get logits.
    shifts: tuple[int, ...] = (0,)
    """Numbers of features by which rows are shifted to augment the data of views with shifts; 0 is the original row."""
    offsets: tuple[float, ...] = ()
    """The number that is added to the logits of each class, in nats. If empty, nothing is added."""
    losses: dict[str, float] = {}  # noqa: RUF012 - never changed
    """Mean held-out log-loss by the name of the candidate view, at its best temperature. The entry "mixture" is the
    log-loss of the weighted mixture of views."""
    unlabelled: UnlabelledWeights | None = None  #: How unlabelled rows are used; None if they are not used.
    influences: dict[str, float] = {}  # noqa: RUF012 - never changed
    """The influence of each view on the predictions by name: its weight times the spread of its cosines over the
    classes. If empty, it is not known: no view was evaluated."""


class SearchResult(NamedTuple):
    """Candidate views with the cosines of held-out rows to the prototypes. `select_model` selects among them."""

    rows: TrainingRows  #: The training rows, on the CPU.
    evaluator: CandidateEvaluator
    """Evaluator of views on the held-out rows. If no row is held out, it evaluates on the training rows."""
    candidates: list[Candidate]
    """The evaluated candidates. The first is the raw cosine. The last one is the best view that is trained by gradient
    descent, if any."""
    losses: dict[str, float]
    """Mean held-out log-loss of each evaluated candidate by name, at its best temperature."""
    has_held_out_rows: bool  #: Whether rows were held out.
    row_statistics: Tensor | None = None
    """The result of `protonet.fit.prior.compute_row_statistics`; None if the raw cosine is the only candidate."""

    def without_rows(self, rows: Tensor) -> SearchResult:
        """Copy the result without the cosines of some held-out rows, given by their indices ``rows`` (m,) int64.

        A selection from the copy is then independent of these rows. If no other held-out row remains, or no row was
        held out, nothing is removed.
        """
        evaluator = self.evaluator
        masks = [~torch.isin(fold.held_out, rows.to(fold.held_out.device)) for fold in evaluator.folds]
        keep = torch.cat(masks).cpu()
        if not self.has_held_out_rows or not bool(keep.any()):
            return self
        folds = [Fold(fold.train, fold.held_out[mask]) for fold, mask in zip(evaluator.folds, masks, strict=True)]
        evaluator = CandidateEvaluator(evaluator.rows, folds, evaluator.mlp_sizes)
        kept = [candidate.cosines[keep] for candidate in self.candidates]
        return self._replace(evaluator=evaluator, candidates=evaluator.with_cosines(self.candidates, kept))


def evaluate_candidates(
    rows: TrainingRows,
    plan: EncoderPlan,
    search: ModelSearch,
    progress: FitProgress = ignore_progress,
    device: torch.device = CPU,
) -> SearchResult | None:
    """Evaluate candidate views by cross-validation, as the basis of `select_model`.

    If most classes cannot be held out, only views that need no validation are fitted. Views are fitted on ``device``;
    held-out rows are evaluated on the CPU. After the deadline of the rows, no further view is evaluated. Returns None
    if the raw cosine is the only choice: with one class, without time, or without held-out rows and parameter budget.
    """
    # No further family is tried if many held-out rows have less than this log-loss, in nats: about 99.7 % right.
    max_loss_to_improve = 0.01
    are_columns = rows.columns is not None or rows.column_indices is not None
    rows = rows.for_views()
    folds = split_training_rows(rows, 0, search.n_folds)
    seen = int((torch.bincount(rows.labels) > 0).sum())
    without_validation = not folds or 2 * _count_classes_of_held_out_rows(rows, folds) < seen
    if seen < 2 or (without_validation and not plan.ensemble_sizes) or time.monotonic() > rows.deadline:
        return None
    progress(search.families[0].progress_name, 0.0)
    # Features of several kinds are in no order, nor are those that `select_columns` took for columns.
    if plan.ensemble_sizes and search.use_shifts and not are_columns:
        rows = replace(rows, **detect_feature_order(rows.features)._asdict())
    if without_validation:
        everything = torch.arange(len(rows.labels))
        some = select_evenly(len(everything), max(1, MAX_COSINES // rows.num_classes))
        evaluator = CandidateEvaluator(rows.to(device), [Fold(everything, some).to(device)], plan)
        kinds = filter(None, (kind.without_validation() for kind in search.families))
        candidates = [candidate for kind in kinds for candidate in kind.candidates(evaluator)]
        statistics = compute_row_statistics(rows)
        return SearchResult(rows, evaluator, candidates, {}, has_held_out_rows=False, row_statistics=statistics)
    evaluator = CandidateEvaluator(
        rows.to(device), [fold.to(device) for fold in folds], plan, torch.Generator().manual_seed(rows.seed)
    )
    if not plan.ensemble_sizes:
        return SearchResult(rows, evaluator, [evaluator.evaluate_and_cache(RAW_LINEAR)], {}, has_held_out_rows=True)
    times = [kind.relative_time for kind in search.families]
    for stage, kind in enumerate(search.families):
        if stage:  # the first stage is reported before shifts are detected
            progress(kind.progress_name, SEARCH_PROGRESS_FRACTION * sum(times[:stage]) / sum(times))
        evaluator.candidates += list(kind.candidates(evaluator))
        best = min(evaluator.candidates, key=lambda candidate: candidate.mean_loss)
        evaluator.best_losses = best.losses
        if evaluator.best_linear_losses is None:
            evaluator.best_linear_losses = best.losses
        if len(best.losses) >= MIN_DECISIVE_ROWS and best.mean_loss < max_loss_to_improve:
            break  # other views could gain next to nothing
    losses = {candidate.spec.name: candidate.mean_loss for candidate in evaluator.candidates}
    candidates = [candidate for candidate in evaluator.candidates if not candidate.spec.is_trained]
    trained = [candidate for candidate in evaluator.candidates if candidate.spec.is_trained]
    if trained:
        candidates.append(trained[select_simplest_within_one_error([candidate.losses for candidate in trained])])
    statistics = compute_row_statistics(rows)
    return SearchResult(rows, evaluator, candidates, losses, has_held_out_rows=True, row_statistics=statistics)


def _count_classes_of_held_out_rows(rows: TrainingRows, folds: Sequence[Fold]) -> int:
    """Count the classes with held-out rows. With a single fold, count the classes that could have a held-out row."""
    if len(folds) > 1:
        return len(rows.labels[torch.cat([fold.held_out for fold in folds])].unique())
    groups = torch.arange(len(rows.labels)) if rows.groups is None else rows.groups
    pairs = groups * rows.num_classes + rows.labels
    if rows.is_class_name is not None:
        pairs = pairs[~rows.is_class_name]
    return int((torch.bincount(pairs.unique() % rows.num_classes) > 1).sum())


def split_training_rows(rows: TrainingRows, partition: int, folds: int = DEFAULT_N_FOLDS) -> list[Fold]:
    """Split training rows into stratified folds that keep groups together; ``partition`` seeds the split."""
    return split_folds(
        rows.labels,
        rows.num_classes,
        partition=partition,
        max_folds=folds,
        groups=rows.groups,
        is_class_name=rows.is_class_name,
    )


def select_model(result: SearchResult | None, plan: EncoderPlan, search: ModelSearch) -> SelectedModel:
    """Select the views with their weights, the temperature and the class offsets.

    ``result`` is the result of `evaluate_candidates`. The selection is a weighted mixture of views, or the raw cosine
    alone if the mixture is worse. If the parameter budget allows, the smallest MLP replaces the raw cosine. Without
    held-out rows, the mixture has only views that need no validation.
    """
    smallest = next(filter(None, (kind.smallest_trained_spec(plan, RAW_LINEAR) for kind in search.families)), None)
    raw_alone = SelectedModel(((smallest or RAW_LINEAR, 1.0),), 0.1)
    if result is None:
        return raw_alone
    raw = result.candidates[0]
    if not plan.ensemble_sizes:
        return _fit_temperature_and_offsets(raw_alone, result, raw.cosines)[0]
    mixture, losses = _fit_mixture(result, search)
    if mixture is None:
        return raw_alone
    if not result.has_held_out_rows:
        first = smallest or RAW_LINEAR
        views = tuple((first if spec == RAW_LINEAR else spec, weight) for spec, weight in mixture.views)
        return mixture._replace(views=views)
    if not is_worse_by_one_error(raw.losses, losses, max_tolerated=MAX_TOLERATED_EXCESS, margin=-MIXTURE_ADVANTAGE):
        mixture = _fit_temperature_and_offsets(raw_alone, result, raw.cosines)[0]
    return mixture._replace(losses=result.losses | {"mixture": float(losses.mean())})


def _fit_mixture(result: SearchResult, search: ModelSearch) -> tuple[SelectedModel | None, Tensor]:
    """Fit a mixture of candidates; return it, or None if no view separates rows, and its losses (held_out,)."""
    influence, spread, multiplier = _predict_influences(result, search)
    if not bool(influence.any()):
        return None, torch.zeros(0, dtype=torch.float64)
    weights = torch.where(influence > 0, influence / spread.clamp_min(MIN_VIEW_SPREAD), 0.0)
    weights /= weights.sum()
    if result.has_held_out_rows:
        weights = _drop_slow_views(result, weights, spread)
    fractions = (weights * spread / (weights * spread).sum()).tolist()
    views, by_name = [], dict[str, float]()
    for candidate, weight, fraction in zip(result.candidates, weights.tolist(), fractions, strict=True):
        if weight > 0:
            spec = candidate.spec
            for kind in search.families:
                spec = kind.final_spec(spec, fraction)
            views.append((spec, weight))
            by_name[spec.name] = fraction
    mixture = SelectedModel(tuple(views), 1.0, result.rows.shifts, influences=by_name)
    if not result.has_held_out_rows:
        factor = multiplier * DEFAULT_LOGIT_STD / float((weights * spread).sum())
        return mixture._replace(temperature=_to_temperature(factor)), torch.zeros(0, dtype=torch.float64)
    exponent = TEMPERATURE_PRIOR_PSEUDO_COUNT / (TEMPERATURE_PRIOR_PSEUDO_COUNT + len(result.evaluator.labels))
    mixed = _weighted_sum_of_cosines(result.candidates, weights)
    return _fit_temperature_and_offsets(mixture, result, mixed, multiplier**exponent)


def _predict_influences(result: SearchResult, search: ModelSearch) -> tuple[Tensor, Tensor, float]:
    """Predict the influence of each candidate by the pretrained prior.

    Returns the influences (views,), which are all 0 if no view separates rows; the standard deviations (views,) of the
    views' cosines over the classes; and the factor that corrects the inverse temperature.
    """
    evaluator, prior = result.evaluator, search.prior or load_published_prior()
    evidence = build_prior_input(
        result.rows,
        encode_tags([candidate.spec for candidate in result.candidates]),
        [candidate.cosines for candidate in result.candidates],
        evaluator.labels if result.has_held_out_rows else None,
        evaluator.weights,
        [candidate.losses for candidate in result.candidates],
        result.row_statistics,
    )
    weights, multiplier = prior.predict_view_weights(evidence)
    spread = evidence.view_spreads
    influence = weights * spread
    influence /= influence.sum().clamp_min(MIN_VIEW_SPREAD**2)
    if bool(influence[spread >= MIN_MIXED_SPREAD].any()):
        influence = torch.where(spread >= MIN_MIXED_SPREAD, influence, 0.0)
    return drop_small_influences(influence), spread, multiplier


def _fit_temperature_and_offsets(
    model: SelectedModel, result: SearchResult, cosines: Tensor, factor: float = 1.0
) -> tuple[SelectedModel, Tensor]:
    """Fit temperature, divided by ``factor``, and offsets to held-out cosines; return model and losses (held_out,)."""
    evaluator = result.evaluator
    fitted, offsets, losses = fit_scale_and_offsets(cosines, evaluator.labels, evaluator.sizes, evaluator.weights)
    listed = () if offsets is None else tuple(offsets.tolist())
    return model._replace(temperature=_to_temperature(factor * fitted), offsets=listed), losses


def _weighted_sum_of_cosines(candidates: Sequence[Candidate], weights: Tensor) -> Tensor:
    """Compute the weighted sum (n, num_classes) of the cosines of candidates, given their weights (candidates,)."""
    used, (n, classes) = weights.nonzero().flatten().tolist(), candidates[0].cosines.shape
    factors = weights[used].to(candidates[0].cosines.dtype)
    total = factors.new_empty(n, classes)
    for rows in row_slices(n, len(used) * classes):
        total[rows] = torch.tensordot(factors, torch.stack([candidates[i].cosines[rows] for i in used]), dims=1)
    return total


#: The least decrease of the held-out log-loss for which a view may cost a microsecond per predicted row, in nats: a
#: view of 200 microseconds must gain 0.01. That is what the tabular transformer had to gain on held-out rows of numbers
#: for its test log-loss to be lower, too, on 81 development fits.
MIN_GAIN_PER_MICROSECOND = 5e-5
#: Number of multiplications that take about a microsecond on one core.
FLOPS_PER_MICROSECOND = 1e4


def _drop_slow_views(result: SearchResult, weights: Tensor, spread: Tensor) -> Tensor:
    """Drop views whose gain does not pay for their time per row, the slowest first; return weights (candidates,)."""
    times = torch.tensor([candidate.flops for candidate in result.candidates]) / FLOPS_PER_MICROSECOND
    # A fast view is not worth the comparison.
    min_time = 1.0
    # A view with more influence stays: the prior knows its gain better than few held-out rows do.
    max_influence = 0.1
    influence = weights * spread / (weights * spread).sum()
    loss = None
    for index in times.argsort(descending=True).tolist():
        fewer = weights.clone()
        fewer[index] = 0.0
        if times[index] < min_time or not 0 < float(influence[index]) < max_influence:
            continue
        if loss is None:
            loss = _compute_mean_loss(result, weights)
        loss_without = _compute_mean_loss(result, fewer)
        if loss_without - loss < MIN_GAIN_PER_MICROSECOND * float(times[index]):
            weights, loss = fewer, loss_without
    return weights / weights.sum()


def _compute_mean_loss(result: SearchResult, weights: Tensor) -> float:
    """Compute the mean held-out log-loss of the mixture with these weights (candidates,), in nats."""
    return float(result.evaluator.compute_losses(_weighted_sum_of_cosines(result.candidates, weights)).mean())


def _to_temperature(factor: float) -> float:
    """Convert an inverse temperature >= 0 to a temperature of at most ``1 / MIN_INVERSE_TEMPERATURE``."""
    return 1 / max(factor, MIN_INVERSE_TEMPERATURE)
