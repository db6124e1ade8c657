"""Statistics of scores: means with intervals and paired tests, over classes and over episodes, as types for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from protonet.episodes.samplers.batch import Records

#: Intervals and p-values over classes apply to other classes of the same kind; those over episodes, to other episodes
#: of the same classes.
INTERVAL_KINDS = ("classes", "episodes")
CONFIDENCE = 0.95  #: The level of all intervals.
MIN_EPISODES_WITHOUT = 5  #: An interval over classes needs this many episodes without each class.
ACCURACY_TOLERANCE = 1e-12  #: Smaller differences of accuracies are rounding errors.
OPEN_SET_MEASURES = ("auroc", "fpr95", "oscr")  #: Fields of `evaluate.Scores`: how well open classes are detected.
SIDE_MEASURES = ("base", "novel", "harmonic")  #: Fields of `evaluate.Scores`: accuracies of base and novel classes.


@dataclass(frozen=True)
class Rate:
    """The mean of a measure over episodes, with 95 % intervals; unknown values are NaN."""

    mean: float  #: The mean over the episodes that have the measure.
    half_width_classes: float = math.nan  #: Half the width of the 95 % interval over classes.
    half_width_episodes: float = math.nan  #: Half the width of the 95 % interval over episodes.
    n_episodes: int = 0  #: The number of episodes that have the measure.

    @classmethod
    def measure(cls, values: Tensor, class_mask: Tensor | None) -> Rate:
        """Compute the mean and intervals of values (episodes,) that are not NaN; masks are as in `standard_error`."""
        over_classes = math.nan if class_mask is None else half_width(values, class_mask)
        return cls(mean_of(values), over_classes, half_width(values), int((~values.isnan()).sum()))

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Rate:
        """Read a rate that `describe` wrote."""
        widths = (written["half_width_classes"], written["half_width_episodes"])
        over_classes, over_episodes = (math.nan if width is None else float(width) for width in widths)
        return cls(float(written["accuracy"]), over_classes, over_episodes)

    def half_width(self, kind: str) -> float:
        """Look up the half-width over one of ``INTERVAL_KINDS``."""
        return self.half_width_classes if kind == "classes" else self.half_width_episodes

    @property
    def half_widths(self) -> list[float]:
        """The known half-widths, over classes first."""
        return [half for half in map(self.half_width, INTERVAL_KINDS) if not math.isnan(half)]

    @property
    def is_known(self) -> bool:
        """Whether any episode has the measure."""
        return not math.isnan(self.mean)

    @property
    def widest(self) -> float:
        """The largest known half-width, or 0."""
        return max(self.half_widths, default=0.0)

    def describe(self) -> dict[str, float | None]:
        """Convert the rate to JSON."""
        values = {"accuracy": self.mean} | {f"half_width_{kind}": self.half_width(kind) for kind in INTERVAL_KINDS}
        return {name: nan_to_none(value) for name, value in values.items()}


@dataclass(frozen=True)
class Comparison:
    """Two methods compared on the same episodes; accuracies are in [0, 1].

    Values over classes are NaN if they are unknown: without class masks, or if a class is in all episodes.
    """

    first: str  #: The first method's name.
    second: str  #: The second method's name.
    difference: float  #: The mean over episodes of the first method's accuracy minus the second's.
    half_width_classes: float  #: Half the width of the difference's 95 % interval over classes.
    p_value_classes: float  #: p-value of a paired t test over classes, 1 if no episode differs.
    p_holm_classes: float  #: The p-value over classes, adjusted for the number of comparisons by Holm's procedure.
    half_width_episodes: float  #: Half the width of the 95 % interval over episodes; NaN for a single episode.
    p_value_episodes: float  #: p-value of a paired t test over episodes; 1 if none differs, or for a single episode.
    p_holm_episodes: float  #: The p-value over episodes, adjusted by Holm's procedure.

    @property
    def rate(self) -> Rate:
        """The difference with its half-widths."""
        return Rate(self.difference, self.half_width_classes, self.half_width_episodes)

    def get_p_value(self, kind: str) -> float | None:
        """Look up the adjusted p-value over one of ``INTERVAL_KINDS``; None if it is unknown."""
        return None if math.isnan(self.rate.half_width(kind)) else float(getattr(self, f"p_holm_{kind}"))

    def describe(self) -> dict[str, object]:
        """Convert the comparison to JSON."""
        unknown = [kind for kind in INTERVAL_KINDS if math.isnan(self.rate.half_width(kind))]
        return {name: None if name.rpartition("_")[2] in unknown else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class MethodSummary:
    """The accuracy of a method, and further measures, in [0, 1]."""

    accuracy: Rate  #: The accuracy on all queries but queries of open classes.
    calibration_error: float | None = None  #: The calibration error, or None if it is unknown.
    #: Rates by name, of ``OPEN_SET_MEASURES`` and ``SIDE_MEASURES``.
    measures: Mapping[str, Rate] = field(default_factory=dict)
    by_shot: Mapping[int, Rate] = field(default_factory=dict)  #: The accuracy on classes by their number of shots.

    def describe(self) -> dict[str, object]:
        """Convert the summary to JSON."""
        measures = {name: rate.describe() for name, rate in self.measures.items()}
        return {
            **self.accuracy.describe(),
            "calibration_error": self.calibration_error,
            **{name: values.pop("accuracy") for name, values in measures.items()},
            **{f"{name}_{half}": value for name, values in measures.items() for half, value in values.items()},
            "by_shot": {
                str(n_shot): {**rate.describe(), "episodes": rate.n_episodes} for n_shot, rate in self.by_shot.items()
            },
        }


@dataclass(frozen=True)
class Summary:
    """The results of an evaluation, or of a comparison of several: accuracies and paired tests."""

    settings: Mapping[str, Any]  #: The settings under the names of the command line.
    n_episodes: int  #: The number of episodes.
    methods: Mapping[str, MethodSummary]  #: The results of each method by name.
    comparisons: Sequence[Comparison]  #: All pairs of methods, or ``against`` with each other method.

    @property
    def order(self) -> list[str]:
        """The names of the methods, the most accurate first."""
        return sorted(self.methods, key=lambda name: -self.methods[name].accuracy.mean)

    @property
    def interval_kinds(self) -> list[str]:
        """The kinds of intervals that the accuracies have."""
        return list_interval_kinds(method.accuracy for method in self.methods.values())

    @property
    def against(self) -> str | None:
        """The method that is compared with each other method, or None if all pairs of methods are compared."""
        against: str | None = self.settings.get("against")
        return against

    def describe(self) -> dict[str, object]:
        """Convert the summary to JSON."""
        return {
            "settings": dict(self.settings),
            "episodes": self.n_episodes,
            "methods": {name: method.describe() for name, method in self.methods.items()},
            "comparisons": [pair.describe() for pair in self.comparisons],
        }


@dataclass(frozen=True)
class Tuning:
    """The accuracy of several settings of a method on validation classes, and the best settings."""

    chosen: str  #: The method with the settings of the highest mean accuracy, the first of equals.
    accuracies: Mapping[str, Rate]  #: Accuracies by the names of the method with settings.
    n_classes: int  #: The number of validation classes.

    @classmethod
    def choose(cls, accuracies: Mapping[str, Tensor], n_classes: int) -> Tuning:
        """Choose the settings with the highest mean of accuracies (episodes,) by name."""
        rates = {name: Rate.measure(values, None) for name, values in accuracies.items()}
        return cls(max(rates, key=lambda name: rates[name].mean), rates, n_classes)

    @property
    def n_episodes(self) -> int:
        """The number of validation episodes."""
        return self.accuracies[self.chosen].n_episodes

    def describe(self) -> dict[str, object]:
        """Convert the accuracies and the choice to JSON."""
        rates = {
            name: {"accuracy": rate.mean, "half_width": nan_to_none(rate.half_width_episodes)}
            for name, rate in self.accuracies.items()
        }
        return {"chosen": self.chosen, "classes": self.n_classes, "episodes": self.n_episodes, "accuracies": rates}

    def __str__(self) -> str:
        """Format the accuracies and the choice as one line."""
        rates = (f"{name} {100 * rate.mean:.2f}" for name, rate in self.accuracies.items())
        where = f"on {self.n_classes} validation classes, {self.n_episodes:,} episodes"
        return f"{self.chosen} is the best of {len(self.accuracies)} settings {where}: {', '.join(rates)} %."


@dataclass(frozen=True)
class ClassAccuracy:
    """The accuracies of methods in the episodes that have a class."""

    name: str  #: The name of the class.
    episodes: int  #: The number of episodes that have the class.
    accuracy: Mapping[str, float]  #: The accuracy of each method by name.


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results of an evaluation, including the counts by episode that a later comparison needs."""

    summary: Summary  #: Accuracies and paired tests.
    tuning: Sequence[Tuning]  #: The choice of settings of each tuned method.
    versions: Mapping[str, str | None]  #: The versions of packages by name.
    plugins: Mapping[str, str]  #: The version of each plug-in, such as a hash of its file, by name.
    data: str  #: A hash of the rows, class by class, before encoder and normalisation.
    queries: Tensor  #: (episodes,) int64, the number of queries, without queries of open classes.
    right: Mapping[
        str, Tensor
    ]  #: For each method (episodes,) int64, the number of queries that it classifies correctly.
    #: (episodes, classes) bool, the classes of each episode, without base classes that all episodes have.
    class_mask: Tensor
    n_classes: int  #: Classes that episodes are drawn from.
    title: str = ""  #: Data, episodes and seed, in one line.
    notes: Sequence[str] = ()  #: Further lines for the report.
    by_class: Sequence[ClassAccuracy] | None = None  #: Accuracies by class; None without an HTML report.
    records: Records | None = None  #: The prediction for each query, if it was kept.

    @property
    def methods(self) -> Mapping[str, MethodSummary]:
        """The accuracy of each method with its intervals, and further measures, by name."""
        return self.summary.methods

    @property
    def accuracies(self) -> dict[str, Tensor]:
        """For each method its accuracies (episodes,) float64 in [0, 1]."""
        return {name: right / self.queries.double() for name, right in self.right.items()}

    def describe(self) -> dict[str, object]:
        """Convert the evaluation to JSON."""
        queries, ways = self.queries.tolist(), self.class_mask.sum(dim=1).tolist()
        by_class = {} if self.by_class is None else {"by_class": [asdict(accuracy) for accuracy in self.by_class]}
        return {
            **self.summary.describe(),
            "tuning": [tuning.describe() for tuning in self.tuning],
            "versions": dict(self.versions),
            "plugins": dict(self.plugins),
            "data": self.data,
            "classes": self.n_classes,
            "queries": queries if len(set(queries)) > 1 else queries[0],
            "right": {name: right.tolist() for name, right in self.right.items()},
            "ways": ways if len(set(ways)) > 1 else ways[0],
            "class_indices": self.class_mask.nonzero()[:, 1].tolist(),  # of all episodes, in order
            **by_class,
            **({} if self.records is None else {"records": self.records.describe()}),
        }


def nan_to_none(value: float) -> float | None:
    """Convert NaN, which JSON cannot represent, to None."""
    return None if math.isnan(value) else value


def list_interval_kinds(rates: Iterable[Rate]) -> list[str]:
    """List the kinds of intervals that any of the rates has, in the order of ``INTERVAL_KINDS``."""
    rates = list(rates)
    return [kind for kind in INTERVAL_KINDS if any(not math.isnan(rate.half_width(kind)) for rate in rates)]


def read_class_mask(written: Mapping[str, Any]) -> Tensor:
    """Read the classes of each episode, (episodes, classes) bool, from the JSON of `Evaluation.describe`."""
    ways = torch.tensor(written["ways"]).expand(written["episodes"])
    class_mask = torch.zeros(len(ways), int(written["classes"]), dtype=torch.bool)
    classes = torch.tensor(written["class_indices"]).view(int(ways.sum()))
    class_mask[torch.arange(len(ways)).repeat_interleave(ways), classes] = True
    return class_mask


def half_width(values: Tensor, class_mask: Tensor | None = None) -> float:
    """Compute half the width of the 95 % interval of the mean of values (n,), by Student's t distribution.

    NaN are ignored; fewer than two values give NaN. ``class_mask`` is as in `standard_error`.
    """
    return _convert_to_half_width(*standard_error(values, class_mask))


def _convert_to_half_width(error: float, freedom: int) -> float:
    """Convert a standard error and its degrees of freedom to half the width of the 95 % interval."""
    if math.isnan(error):
        return math.nan
    from scipy.special import stdtrit  # noqa: PLC0415 - slow to import

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * error


def standard_error(values: Tensor, class_mask: Tensor | None = None) -> tuple[float, int]:
    """Estimate the standard error of the mean of episodes' values, over episodes or, with a class mask, over classes.

    Over episodes, the classes are fixed: the error applies to other episodes of the same classes. Over classes, it
    applies to other classes of the same kind. The mean is then a U-statistic of the classes, and the jackknife leaves
    out one class at a time, with all of its episodes. The variance of these means that comes from the number of
    episodes is subtracted, and its part of the overall mean added. A bootstrap of classes would need episodes with a
    class twice, and episodes without common classes would be too few.

    Args:
        values: (n,), of each episode; NaN are ignored.
        class_mask: (n, classes) bool, the classes of each episode; None for the error over episodes.

    Returns:
        The error, and the degrees of freedom of Student's t distribution: the number of episodes or classes less one.
        The error is NaN for fewer than two values. Over classes it is also NaN if fewer than ``MIN_EPISODES_WITHOUT``
        episodes leave a class out, or if episodes have unequal numbers of classes.

    Source: Arvesen, "Jackknifing U-statistics" (1969); that the estimate is not too low on average, Efron and Stein,
        "The jackknife estimate of variance" (1981). That intervals over episodes are too narrow for other data,
        Lafargue et al., "Oops, I sampled it again: reinterpreting confidence intervals in few-shot learning" (2024).
        https://arxiv.org/abs/2409.02850
    """
    if class_mask is not None:
        return _jackknife(values[:, None], class_mask)[0]
    values = values[~values.isnan()].double()
    n = len(values)
    return (math.nan, 0) if n < 2 else (math.sqrt(float(values.var()) / n), n - 1)


def _jackknife(values: Tensor, class_mask: Tensor) -> list[tuple[float, int]]:
    """Estimate the standard error over classes of each column of values (n, k), with its degrees of freedom."""
    present, inside = (~values.isnan()).double(), class_mask.double()
    values = values.double().nan_to_num()
    n, total = present.sum(dim=0), values.sum(dim=0)  # (k,)
    mean = total / n
    variance = ((values - mean) * present).square().sum(dim=0) / (n - 1)
    having = inside.T @ present  # (classes, k), episodes that have each class
    drawn, without = having > 0, n - having
    left_out = (total - inside.T @ values) / without  # (classes, k)
    spread = ((left_out - mean).square() - variance * (1 / without - 1 / n)).where(drawn, 0.0).sum(dim=0)
    n_classes = drawn.sum(dim=0)
    errors = (spread.clamp_min(0.0) * (n_classes - 1) / n_classes + variance / n).sqrt()
    # With unequal ways, episodes without a class have fewer ways, which moves their mean more than the class does.
    n_ways = class_mask.sum(dim=1).unique().numel()
    unknown = (n < 2) | (drawn & (without < MIN_EPISODES_WITHOUT)).any(dim=0) | (n_ways > 1)
    freedom = (n_classes - 1).clamp_min(0).tolist()
    return list(zip(errors.masked_fill(unknown, math.nan).tolist(), freedom, strict=True))


def mean_of(values: Tensor) -> float:
    """Compute the mean of the values (n,) that are not NaN; NaN if there are none."""
    return float(values.double().nanmean())


def compare_pairs(
    accuracies: Mapping[str, Tensor], class_mask: Tensor | None = None, against: str | None = None
) -> list[Comparison]:
    """Compare all pairs of methods, or ``against`` with each other method, by paired t tests.

    Accuracies (episodes,) are of the same episodes. ``class_mask`` is as in `standard_error`.

    Source: Student's paired t test; Holm, "A simple sequentially rejective multiple test procedure" (1979).
    """
    pairs = list(combinations(accuracies, 2))
    if against is not None:
        pairs = [(against, name) for name in accuracies if name != against]
    if not pairs:
        return []
    differences = torch.stack([accuracies[first] - accuracies[second] for first, second in pairs], dim=1)
    unknown = [(math.nan,) * 3] * len(pairs)
    over_classes = unknown if class_mask is None else _run_t_tests(differences, _jackknife(differences, class_mask))
    over_episodes = _run_t_tests(differences, list(map(standard_error, differences.unbind(1))))
    means = map(mean_of, differences.unbind(1))
    rows = zip(pairs, means, over_classes, over_episodes, strict=True)
    return [Comparison(*pair, mean, *classes, *episodes) for pair, mean, classes, episodes in rows]


def _run_t_tests(differences: Tensor, errors: Sequence[tuple[float, int]]) -> list[tuple[float, float, float]]:
    """Compute the half-width, p-value and adjusted p-value of each column of differences (n, pairs)."""
    from scipy.special import stdtr  # noqa: PLC0415 - slow to import

    p_values = []
    for column, (error, freedom) in zip(differences.unbind(1), errors, strict=True):
        if error > ACCURACY_TOLERANCE:
            p_values.append(2 * float(stdtr(freedom, -abs(mean_of(column)) / error)))
        else:  # the test would divide by zero, or by NaN
            p_values.append(float(math.isnan(error) or float(column.abs().max()) <= ACCURACY_TOLERANCE))
    half_widths = [_convert_to_half_width(*error) for error in errors]
    return list(zip(half_widths, p_values, adjust_holm(p_values), strict=True))


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple comparisons by Holm's step-down procedure."""
    adjusted, highest, n = [0.0] * len(p_values), 0.0, len(p_values)
    for rank, position in enumerate(sorted(range(n), key=lambda position: p_values[position])):
        highest = max(highest, min(1.0, (n - rank) * p_values[position]))
        adjusted[position] = highest
    return adjusted
