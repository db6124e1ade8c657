"""The search: cross-validation decides which views are used, and with which weights.

Each candidate view is evaluated by the log-loss of its out-of-fold cosines. Among candidates within one standard error
of the best, the simplest is chosen. Untrained raw cosine is always a candidate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from protonet.fit.prior import (
    FEW,
    LEAST_SPREAD,
    SPREAD,
    Prior,
    describe_rows,
    drop_small_influence,
    encode_traits,
    gather_evidence,
    load_published_prior,
)
from protonet.selection.folds import FOLDS, Fold, split_folds
from protonet.selection.scoring import (
    WEIGHTS,
    fit_scale_and_offsets,
    row_blocks,
    simplest_within_one_error,
    worse_by_one_error,
)
from protonet.views import VIEW_FAMILIES
from protonet.views.evaluation import Candidate, CandidateEvaluator, EncoderPlan, ViewFamily
from protonet.views.linear import Linear
from protonet.views.shifts import detect_order
from protonet.views.view import CPU, TrainingRows, ViewSpec, select_evenly

#: The fallback: linear views of the raw features.
RAW = Linear("raw")
#: The smallest factor on the cosines: with it, logits differ by at most 0.1.
MIN_FACTOR = 0.05
#: Fraction of the solve time that the search takes, for progress; the final fit takes the remainder.
SEARCH_SHARE = 0.8
#: Called with the name of the current stage and the completed fraction, from 0 to 1.
Progress = Callable[[str, float], None]


def ignore(stage: str, fraction: float) -> None:
    """Ignore a progress report."""


@dataclass(frozen=True)
class Search:
    """The search space. Change it with ``dataclasses.replace``, and a family in it with `with_kind`."""

    kinds: tuple[ViewFamily, ...] = field(default_factory=lambda: _kinds("default"))
    """Families of views, in the order of `protonet.views.VIEW_FAMILIES`, each with its candidates."""
    folds: int = FOLDS.count  #: Number of cross-validation folds; 0 for none.
    shifts: bool = True  #: Whether rows are shifted if features are ordered.
    partitions: int = 3
    """Fold partitions that the weights, the temperature and the offsets are fitted on, if rows are few, >= 1."""
    prior: Prior | None = None  #: Prior that weights the views; None for the pretrained one.
    row_cost: float = 0.25
    """A view with a small weight is kept if its fraction of the weight is at least this times its fraction of the
    prediction time."""

    def with_kind(self, kind: ViewFamily) -> Search:
        """Copy the search with a family replaced by another instance of its class."""
        return replace(self, kinds=tuple(kind if type(family) is type(kind) else family for family in self.kinds))

    def with_spans(self, spans: Sequence[tuple[int, int]]) -> Search:
        """Copy the search with views of spans of adjacent features: pairs (start, stop)."""
        return replace(self, kinds=tuple(kind.with_spans(spans) for kind in self.kinds)) if spans else self

    def without(self, kind: type[ViewFamily]) -> Search:
        """Copy the search without a family."""
        return replace(self, kinds=tuple(family for family in self.kinds if type(family) is not kind))


def _kinds(effort: str) -> tuple[ViewFamily, ...]:
    """Get all families of views at an effort."""
    return tuple(kind.for_effort(effort) for kind, _ in VIEW_FAMILIES)


#: Search spaces of ``solve(effort=...)``: closed-form views alone, the default, and an extended one.
EFFORTS = {
    "fast": Search(_kinds("fast"), folds=3, partitions=1),
    "default": Search(),
    "best": Search(_kinds("best"), folds=10),
}


@dataclass(frozen=True)
class ThinRules:
    """Limits below which views with a high prediction time are dropped."""

    most_share: float = 0.05  #: A view with a larger fraction of the weight is always kept.
    rise: float = 0.1  #: The held-out log-loss may rise by this many standard errors ...
    least: float = 1e-5  #: ... or by this many nats per row.


THIN = ThinRules()


@dataclass(frozen=True)
class PartitionRules:
    """Limits of repeated cross-validation."""

    max_rows: int = 1024  #: With more rows, the choice of the folds no longer matters, and there is one partition.
    max_cosines: int = 2**18  #: The same for rows times classes.
    step: int = 1009  #: Between the numbers of partitions; `protonet.fit.crossfit` uses the next few.
    shared: frozenset[str] = frozenset({"forest", "convolution", "shifted", "transformer"})
    """Traits of views that take long: like those that are trained, they are evaluated on the first partition alone."""


PARTITIONS = PartitionRules()


class PseudoLabels(NamedTuple):
    """Weights and temperature of unlabelled rows."""

    known: Tensor  #: (m,) in [0, 1]: weight of each row of the pool, where a labelled row has 1.
    temperature: float  #: Temperature of the network that is fitted to them.


class SelectedModel(NamedTuple):
    """The views, weights and scales that cross-validation selected."""

    views: tuple[tuple[ViewSpec, float], ...]  #: The selected views and their weights, > 0.
    temperature: float  #: Divides the cosines.
    shifts: tuple[int, ...] = (0,)  #: Offsets of the copies that shifted views are fitted to.
    offsets: tuple[float, ...] = ()  #: Per class, added to the logits, in nats; empty for zeros.
    losses: dict[str, float] = {}  # noqa: RUF012 - never changed
    """Mean out-of-fold log-loss of each candidate by its name, at its best scale; "mixture" for the mixture's."""
    pooling: PseudoLabels | None = None  #: None if there are no unlabelled rows, or they are not learned from.


class SearchResult(NamedTuple):
    """Candidate views with their out-of-fold cosines, from which a mixture is chosen."""

    rows: TrainingRows  #: With their shifts, on the CPU.
    evaluator: CandidateEvaluator
    """Evaluator on the held-out rows; if no row is held out, on all rows that views were fitted to."""
    partitions: tuple[list[Candidate], ...]
    """The candidates on each fold partition, with the rows in the order of the first one. Raw cosine comes first.
    Of the trained candidates, only the selected one is there, last."""
    losses: dict[str, float]  #: Mean log-loss of all evaluated candidates by name, at their best scale.
    judged: bool  #: Whether rows were held out.
    statistics: Tensor | None = None  #: `protonet.fit.prior.describe_rows` of the rows; None if raw cosine is alone.

    @property
    def candidates(self) -> list[Candidate]:
        """The candidates on the first fold partition."""
        return self.partitions[0]

    def without_rows(self, rows: Tensor) -> SearchResult:
        """Copy the result without the evidence of rows (m,) int64; unchanged if no evidence would be left."""
        evaluator = self.evaluator
        masks = [~torch.isin(fold.held_out, rows.to(fold.held_out.device)) for fold in evaluator.folds]
        keep = torch.cat(masks).cpu()
        if not self.judged or not bool(keep.any()):
            return self
        folds = [Fold(fold.train, fold.held_out[mask]) for fold, mask in zip(evaluator.folds, masks, strict=True)]
        evaluator = CandidateEvaluator(evaluator.rows, folds, evaluator.plan)
        partitions = tuple(
            [evaluator.score(candidate.spec, candidate.cosines[keep], candidate.flops) for candidate in partition]
            for partition in self.partitions
        )
        return self._replace(evaluator=evaluator, partitions=partitions)


def evaluate_candidates(
    rows: TrainingRows, plan: EncoderPlan, search: Search, progress: Progress = ignore, device: torch.device = CPU
) -> SearchResult | None:
    """Evaluate candidate views on held-out folds; if these cover too few classes, only views without validation.

    Views are fitted on the device. Folds are sampled, and held-out rows evaluated, on the CPU. Nothing more is tried
    after the deadline of the rows. The result is None if only raw cosine remains: with one class, without a parameter
    budget, or without time.
    """
    folds = split_rows(rows, 0, search.folds)
    seen = int((torch.bincount(rows.labels) > 0).sum())
    unjudged = not folds or 2 * _count_judged_classes(rows, folds) < seen  # most classes could not be judged
    if seen < 2 or (unjudged and not plan.sizes) or time.monotonic() > rows.deadline:
        return None
    progress(search.kinds[0].stage, 0.0)
    if plan.sizes and search.shifts and rows.blocks is None:  # features of several kinds are in no order
        rows = replace(rows, **detect_order(rows.features)._asdict())
    if unjudged:
        everything = torch.arange(len(rows.labels))
        some = select_evenly(len(everything), max(1, FOLDS.max_cosines // rows.num_classes))
        evaluator = CandidateEvaluator(rows.to(device), [Fold(everything, some).to(device)], plan)
        kinds = filter(None, (kind.without_validation() for kind in search.kinds))
        candidates = [candidate for kind in kinds for candidate in kind.candidates(evaluator)]
        return SearchResult(rows, evaluator, (candidates,), {}, judged=False, statistics=describe_rows(rows))
    evaluator = CandidateEvaluator(
        rows.to(device), [fold.to(device) for fold in folds], plan, torch.Generator().manual_seed(rows.seed)
    )
    if not plan.sizes:
        return SearchResult(rows, evaluator, ([evaluator.evaluate_source(RAW)],), {}, judged=True)
    times = [kind.relative_time for kind in search.kinds]
    for stage, kind in enumerate(search.kinds):
        if stage:  # the first stage is reported before shifts are detected
            progress(kind.stage, SEARCH_SHARE * sum(times[:stage]) / sum(times))
        for candidate in kind.candidates(evaluator):
            evaluator.candidates.append(candidate)
        if evaluator.reference_losses is None:
            evaluator.reference_losses = min(evaluator.candidates, key=lambda tried: tried.loss).losses
    losses = {tried.spec.name: tried.loss for tried in evaluator.candidates}
    closed = [tried for tried in evaluator.candidates if not tried.spec.trained]
    learned = [tried for tried in evaluator.candidates if tried.spec.trained]
    chosen = [learned[simplest_within_one_error([tried.losses for tried in learned])]] if learned else []
    candidates = [*closed, *chosen]
    partitions = (candidates, *_repeat(rows, folds, evaluator, candidates, search))
    return SearchResult(rows, evaluator, partitions, losses, judged=True, statistics=describe_rows(rows))


def _count_judged_classes(rows: TrainingRows, folds: Sequence[Fold]) -> int:
    """Count the classes that are held out, or that could be: if classes are many, one held-out part has only some."""
    if len(folds) > 1:
        return len(rows.labels[torch.cat([fold.held_out for fold in folds])].unique())
    groups = torch.arange(len(rows.labels)) if rows.groups is None else rows.groups
    pairs = groups * rows.num_classes + rows.labels
    if rows.is_class_name is not None:
        pairs = pairs[~rows.is_class_name]
    return int((torch.bincount(pairs.unique() % rows.num_classes) > 1).sum())


def _repeat(
    rows: TrainingRows,
    first: Sequence[Fold],
    evaluator: CandidateEvaluator,
    candidates: Sequence[Candidate],
    search: Search,
) -> list[list[Candidate]]:
    """Evaluate candidates on other fold partitions; return them for each, with rows in the order of the evaluator's.

    Settings stay as the first partition chose them. Out-of-fold cosines of expensive views are shared: they are out of
    fold whichever partition they come from. Returns nothing if the rows are many, or time is over. Folds are drawn on
    the CPU.

    Source: repeated cross-validation, Burman, "A comparative study of ordinary cross-validation, v-fold
        cross-validation and the repeated learning-testing methods" (1989).
    """
    n, held_out = len(rows.labels), torch.cat([fold.held_out for fold in first])
    device = evaluator.rows.features.device
    few = len(first) > 1 and n <= PARTITIONS.max_rows and n * rows.num_classes <= PARTITIONS.max_cosines
    repeats: list[list[Candidate]] = []
    for partition_index in range(1, search.partitions if few else 1):
        folds = split_rows(rows, PARTITIONS.step * partition_index, search.folds)
        positions = torch.cat([fold.held_out for fold in folds])
        if not torch.equal(positions.sort().values, held_out.sort().values):
            continue  # of few groups, some partitions hold out other rows
        partition = CandidateEvaluator(evaluator.rows, [fold.to(device) for fold in folds], evaluator.plan)
        order = positions.argsort()[held_out.argsort().argsort()]
        evaluated = []
        for candidate in candidates:
            spec = candidate.spec
            if spec.trained or spec.traits & PARTITIONS.shared:
                evaluated.append(candidate)
                continue
            again = partition.evaluate_source(spec) if spec.source is None else partition.evaluate(spec)
            if again is None:
                break
            evaluated.append(candidate._replace(cosines=again.cosines[order], losses=again.losses[order]))
        if len(evaluated) < len(candidates):
            break  # the time is over
        repeats.append(evaluated)
    return repeats


def split_rows(rows: TrainingRows, partition: int, folds: int = FOLDS.count) -> list[Fold]:
    """Split training rows, on the CPU, into folds by `protonet.selection.folds.split_folds`."""
    return split_folds(
        rows.labels,
        rows.num_classes,
        partition=partition,
        max_folds=folds,
        groups=rows.groups,
        is_class_name=rows.is_class_name,
    )


def choose_mixture(explored: SearchResult | None, plan: EncoderPlan, search: Search) -> SelectedModel:
    """Select views with their weights, temperature and offsets from the result of `evaluate_candidates`.

    It is raw cosine, with the smallest MLP on it, or a mixture; without held-out rows, a mixture of the views that need
    no validation.
    """
    smallest = next(filter(None, (kind.smallest_trained(plan, RAW) for kind in search.kinds)), None)
    raw_alone = SelectedModel(((smallest or RAW, 1.0),), 0.1)
    if explored is None:
        return raw_alone
    raw_cosines = [partition[0].cosines for partition in explored.partitions]
    if not plan.sizes:
        return _scale(raw_alone, explored, raw_cosines)[0]
    mixture, losses = _fit_mixture(explored, search)
    if mixture is None:
        return raw_alone
    if not explored.judged:
        views = tuple((smallest or RAW if spec == RAW else spec, weight) for spec, weight in mixture.views)
        return mixture._replace(views=views)
    raw_losses = torch.stack([partition[0].losses for partition in explored.partitions]).mean(dim=0)
    if not worse_by_one_error(raw_losses, losses, max_tolerated=WEIGHTS.max_tolerated, margin=-WEIGHTS.mixture_prior):
        mixture = _scale(raw_alone, explored, raw_cosines)[0]
    return mixture._replace(losses=explored.losses | {"mixture": float(losses.mean())})


def _fit_mixture(explored: SearchResult, search: Search) -> tuple[SelectedModel | None, Tensor]:
    """Compute the mixture of the candidates, None if no view separates rows, and its log-losses on held-out rows.

    The weights are the mean over the fold partitions. The temperature and the offsets are fitted to the held-out rows
    of all partitions at once.
    """
    evaluator, candidates = explored.evaluator, explored.candidates
    partitions = [[candidate.cosines for candidate in partition] for partition in explored.partitions]
    traits = encode_traits([candidate.spec for candidate in candidates])
    prior, labels = search.prior or load_published_prior(), evaluator.labels if explored.judged else None
    evidence_list = [
        gather_evidence(
            explored.rows,
            traits,
            cosines,
            labels,
            evaluator.weights,
            [candidate.losses for candidate in partition],
            explored.statistics,
        )
        for cosines, partition in zip(partitions, explored.partitions, strict=True)
    ]
    weighed = [prior.weigh(evidence) for evidence in evidence_list]
    if not any(bool(view_weights.any()) for view_weights, _ in weighed):
        return None, torch.zeros(0, dtype=torch.float64)
    influences = torch.stack(
        [view_weights * evidence.spread for (view_weights, _), evidence in zip(weighed, evidence_list, strict=True)]
    )
    influence = (influences / influences.sum(dim=1, keepdim=True).clamp_min(LEAST_SPREAD**2)).mean(dim=0)
    influence = drop_small_influence(influence)
    spread = torch.stack([evidence.spread for evidence in evidence_list]).mean(dim=0)
    weights = torch.where(influence > 0, influence / spread.clamp_min(LEAST_SPREAD), 0.0)
    weights /= weights.sum()
    size = math.exp(sum(math.log(multiplier) for _, multiplier in weighed) / len(weighed))
    if explored.judged:
        weights = _thin(explored, partitions[0], weights, spread, search.row_cost)
    influence_fractions = (weights * spread / (weights * spread).sum()).tolist()
    views = []
    for candidate, weight, fraction in zip(candidates, weights.tolist(), influence_fractions, strict=True):
        spec = candidate.spec
        for kind in search.kinds:
            spec = kind.finalize(spec, fraction)
        views += [(spec, weight)] * (weight > 0)
    mixture = SelectedModel(tuple(views), 1.0, explored.rows.shifts)
    if not explored.judged:
        factor = size * SPREAD / float((weights * spread).sum())
        return mixture._replace(temperature=_temperature(factor)), torch.zeros(0, dtype=torch.float64)
    factor = size ** (FEW / (FEW + len(evaluator.labels)))
    return _scale(mixture, explored, [_blend(cosines, weights) for cosines in partitions], factor)


def _scale(
    model: SelectedModel, explored: SearchResult, cosines: Sequence[Tensor], factor: float = 1.0
) -> tuple[SelectedModel, Tensor]:
    """Fit the temperature and the class offsets of a model to its out-of-fold cosines of each fold partition.

    The fitted factor on the cosines (held_out, num_classes) is multiplied by ``factor``. Also returns the log-losses
    (held_out,), the mean over the partitions.
    """
    evaluator, repeats = explored.evaluator, len(cosines)
    weights = None if evaluator.weights is None else evaluator.weights.repeat(repeats)
    fitted, offsets, losses = fit_scale_and_offsets(
        cosines[0] if repeats == 1 else torch.cat(list(cosines)),
        evaluator.labels.repeat(repeats),
        evaluator.sizes,
        weights,
        repeats,
    )
    listed = () if offsets is None else tuple(offsets.tolist())
    model = model._replace(temperature=_temperature(factor * fitted), offsets=listed)
    return model, losses.view(repeats, -1).mean(dim=0)


def _blend(cosines: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Compute the weighted sum (n, num_classes) of the cosines (n, num_classes) of each candidate."""
    used, (n, classes) = weights.nonzero().flatten().tolist(), cosines[0].shape
    factors = weights[used].to(cosines[0].dtype)
    blended = factors.new_empty(n, classes)
    for rows in row_blocks(n, len(used) * classes):
        blended[rows] = torch.tensordot(factors, torch.stack([cosines[index][rows] for index in used]), dims=1)
    return blended


def _thin(
    explored: SearchResult, cosines: Sequence[Tensor], weights: Tensor, spread: Tensor, row_cost: float
) -> Tensor:
    """Set the weights (candidates,) of views to 0 whose contribution is small for their prediction time.

    Linear and trained views have no cost here: other views share their maps, or they are fast. The contribution of a
    view is its weight times the spread (candidates,) of its cosines (held_out, num_classes).
    """
    costs = torch.tensor([candidate.flops for candidate in explored.candidates], dtype=torch.float64)
    fractions = weights * spread / (weights * spread).sum()
    full_weights, full_losses = weights, None  # the losses are seldom needed
    for index in (fractions / costs.clamp_min(1.0)).argsort().tolist():
        needed = min(THIN.most_share, row_cost * float(costs[index] / costs[weights > 0].sum().clamp_min(1.0)))
        if not 0 < float(fractions[index]) < needed:
            continue
        if full_losses is None:
            full_losses = explored.evaluator.compute_losses(_blend(cosines, full_weights))
        fewer = weights.clone()
        fewer[index] = 0.0
        rise = explored.evaluator.compute_losses(_blend(cosines, fewer)) - full_losses
        error = float(rise.std(correction=0)) / math.sqrt(len(rise))
        if float(rise.mean()) <= max(THIN.least, THIN.rise * error):
            weights = fewer
    return weights / weights.sum()


def _temperature(factor: float) -> float:
    """Convert a factor on the cosines to a temperature, which is finite if no view separates the classes."""
    return 1 / max(factor, MIN_FACTOR)
