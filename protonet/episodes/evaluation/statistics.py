"""Statistics of scores: means with intervals, and paired tests, both over classes and over episodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

#: What intervals and p-values apply to. Over classes: to other classes from the same distribution. Over episodes: to
#: other episodes of the same classes.
INTERVAL_KINDS = ("classes", "episodes")
#: An interval over classes needs, for each class, at least this many episodes without the class.
MIN_EPISODES_WITHOUT_CLASS = 5
#: Fields of `EpisodeScores` that say how well queries of open classes (outside the episode) are detected.
OPEN_SET_MEASURES = ("auroc", "fpr95", "oscr")
#: For the names in reports of the measures on base and novel classes, the fields of `EpisodeScores`.
GENERALIZED_MEASURES = {"base": "base_accuracy", "novel": "novel_accuracy", "harmonic": "harmonic_mean"}


@dataclass(frozen=True)
class MeasureMean:
    """The mean of a measure, such as the accuracy, over episodes, with 95 % intervals; unknown values are NaN."""

    mean: float  #: The mean over the episodes in which the measure is not NaN.
    half_width_classes: float = math.nan  #: Half the width of the 95 % interval over classes.
    half_width_episodes: float = math.nan  #: Half the width of the 95 % interval over episodes.
    n_episodes: int = 0  #: The number of episodes in which the measure is not NaN.

    @classmethod
    def from_values(cls, values: Tensor, class_mask: Tensor | None) -> MeasureMean:
        """Compute the mean and the intervals of a measure from its values (episodes,); NaN are ignored.

        ``class_mask`` (episodes, classes) bool marks the classes of each episode; None for no interval over classes.
        """
        over_classes = math.nan if class_mask is None else interval_half_width(values, class_mask)
        return cls(nan_mean(values), over_classes, interval_half_width(values), int((~values.isnan()).sum()))

    def get_half_width(self, kind: str) -> float:
        """Return the half-width of the interval over "classes" or "episodes" (``kind``); NaN if it is unknown."""
        return self.half_width_classes if kind == "classes" else self.half_width_episodes

    @property
    def known_half_widths(self) -> list[float]:
        """The half-widths of the intervals that are known: over classes, then over episodes."""
        return [half for half in map(self.get_half_width, INTERVAL_KINDS) if not math.isnan(half)]

    @property
    def is_known(self) -> bool:
        """Whether the mean is known, that is, not NaN."""
        return not math.isnan(self.mean)

    @property
    def widest_half_width(self) -> float:
        """The half-width of the widest interval; 0 if no interval is known."""
        return max(self.known_half_widths, default=0.0)

    def to_dict(self) -> dict[str, float | None]:
        """Convert the mean and the half-widths to a dictionary for JSON, with None for NaN."""
        values = {"accuracy": self.mean} | {f"half_width_{kind}": self.get_half_width(kind) for kind in INTERVAL_KINDS}
        return {name: nan_to_none(value) for name, value in values.items()}


@dataclass(frozen=True)
class MethodComparison:
    """The difference in accuracy between two methods on the same episodes, with intervals and paired t tests.

    Accuracies are in [0, 1]. If values over classes are unknown, they are NaN (see `mean_standard_error`).
    """

    first: str  #: The first method's name.
    second: str  #: The second method's name.
    difference: float  #: The accuracy of the first method minus that of the second, averaged over episodes.
    half_width_classes: float  #: Half the width of the difference's 95 % interval over classes.
    p_value_classes: float  #: p-value of a paired t test over classes; 1 if accuracies are equal in all episodes.
    p_holm_classes: float  #: The p-value over classes, adjusted for the number of comparisons by Holm's procedure.
    half_width_episodes: float  #: Half the width of the 95 % interval over episodes; NaN for a single episode.
    p_value_episodes: float
    """p-value of a paired t test over episodes; 1 if accuracies are equal in all episodes, or for a single episode."""
    p_holm_episodes: float  #: The p-value over episodes, adjusted likewise.

    @property
    def mean_difference(self) -> MeasureMean:
        """The difference in accuracy, with the half-widths of its confidence intervals."""
        return MeasureMean(self.difference, self.half_width_classes, self.half_width_episodes)

    def get_p_value(self, kind: str) -> float | None:
        """Return the adjusted p-value of the test over "classes" or "episodes" (``kind``); None if it is unknown."""
        return None if math.isnan(self.mean_difference.get_half_width(kind)) else float(getattr(self, f"p_holm_{kind}"))

    def to_dict(self) -> dict[str, object]:
        """Convert the comparison to a dictionary for JSON, with None for unknown values."""
        unknown = [kind for kind in INTERVAL_KINDS if math.isnan(self.mean_difference.get_half_width(kind))]
        return {name: None if name.rpartition("_")[2] in unknown else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class MethodSummary:
    """The accuracy of a method over all episodes, and its further measures, in [0, 1]."""

    accuracy: MeasureMean  #: The accuracy on queries of the episode's classes, so without queries of open classes.
    calibration_error: float | None = None  #: The calibration error, or None if it is unknown.
    further_measures: Mapping[str, MeasureMean] = field(default_factory=dict)
    """Further measures by name, of ``OPEN_SET_MEASURES`` and ``GENERALIZED_MEASURES``."""
    accuracy_by_shot: Mapping[int, MeasureMean] = field(default_factory=dict)
    """For each number of shots, the accuracy on classes with this number."""
    setting: str | None = None
    """How the method takes queries: "inductive", "transductive" or "transductive, balanced", which assumes equally many
    queries of each class; None if it is unknown, as of a plug-in."""

    @property
    def is_transductive(self) -> bool:
        """Whether the method is known to classify all queries of an episode together."""
        return self.setting not in (None, "inductive")

    def mark_name(self, name: str) -> str:
        """Return the name of the method for a table; that of a transductive method with its setting."""
        return f"{name} ({self.setting})" if self.is_transductive else name

    def to_dict(self) -> dict[str, object]:
        """Convert the accuracy and the further measures to a dictionary for JSON."""
        measures = {name: rate.to_dict() for name, rate in self.further_measures.items()}
        return {
            **self.accuracy.to_dict(),
            "setting": self.setting,
            "calibration_error": self.calibration_error,
            **{name: values.pop("accuracy") for name, values in measures.items()},
            **{f"{name}_{half}": value for name, values in measures.items() for half, value in values.items()},
            "by_shot": {
                str(n_shot): {**rate.to_dict(), "episodes": rate.n_episodes}
                for n_shot, rate in self.accuracy_by_shot.items()
            },
        }


@dataclass(frozen=True)
class EvaluationSummary:
    """The accuracies and paired tests of methods, from one evaluation or from a comparison of several runs."""

    settings: Mapping[str, Any]  #: The settings of the evaluation, under the names of the command line.
    n_episodes: int  #: The number of episodes.
    methods: Mapping[str, MethodSummary]  #: The results of each method by name.
    comparisons: Sequence[MethodComparison]
    """The paired tests of all pairs of methods; if the settings name ``reference_method``, of this method with each
    other one."""

    @property
    def methods_by_accuracy(self) -> list[str]:
        """The names of the methods, the most accurate first."""
        return sorted(self.methods, key=lambda name: -self.methods[name].accuracy.mean)

    @property
    def interval_kinds(self) -> list[str]:
        """The kinds of intervals that are known for any accuracy: "classes", "episodes" or both."""
        return list_interval_kinds(method.accuracy for method in self.methods.values())

    @property
    def reference_method(self) -> str | None:
        """The method that is compared with each other method, or None if all pairs of methods are compared."""
        against: str | None = self.settings.get("against")
        return against

    def to_dict(self) -> dict[str, object]:
        """Convert settings, accuracies and paired tests to a dictionary for JSON."""
        return {
            "settings": dict(self.settings),
            "episodes": self.n_episodes,
            "methods": {name: method.to_dict() for name, method in self.methods.items()},
            "comparisons": [pair.to_dict() for pair in self.comparisons],
        }


@dataclass(frozen=True)
class TuningResult:
    """The accuracies of one method with several settings on validation classes, and the choice of the best settings."""

    accuracies: Mapping[str, MeasureMean]
    """For each candidate, by the name of the method with its settings, such as "ridge:penalty=0.1", the accuracy."""
    n_classes: int  #: The number of validation classes.

    @property
    def best_method(self) -> str:
        """The name of the method with the settings of the highest mean accuracy; the first one if several are equal."""
        return max(self.accuracies, key=lambda name: self.accuracies[name].mean)

    @property
    def n_episodes(self) -> int:
        """The number of validation episodes."""
        return self.accuracies[self.best_method].n_episodes

    def to_dict(self) -> dict[str, object]:
        """Convert the accuracies of all settings, and the best settings, to a dictionary for JSON."""
        rates = {
            name: {"accuracy": rate.mean, "half_width": nan_to_none(rate.half_width_episodes)}
            for name, rate in self.accuracies.items()
        }
        return {"chosen": self.best_method, "classes": self.n_classes, "episodes": self.n_episodes, "accuracies": rates}

    def __str__(self) -> str:
        """Format the accuracies of all settings, and the best settings, as one line."""
        rates = (f"{name} {100 * rate.mean:.2f}" for name, rate in self.accuracies.items())
        where = f"on {self.n_classes} validation classes, {self.n_episodes:,} episodes"
        return f"{self.best_method} is the best of {len(self.accuracies)} settings {where}: {', '.join(rates)} %."


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results of an evaluation, including the counts of each episode that a later comparison of runs needs."""

    summary: EvaluationSummary  #: Settings, accuracies and paired tests.
    tuning: Sequence[TuningResult]  #: For each tuned method, the accuracies of its candidate settings and the choice.
    versions: Mapping[str, str | None]  #: The versions of packages by name.
    plugin_versions: Mapping[str, str]  #: The version of each plug-in, such as a hash of its file, by name.
    data_hash: str  #: A hash of the rows, class by class, before encoder and normalisation.
    query_counts: Tensor  #: (episodes,) int64, the number of queries, without queries of open classes.
    correct_counts: Mapping[str, Tensor]
    """For each method (episodes,) int64, the number of queries that it classifies correctly."""
    class_mask: Tensor
    """(episodes, classes) bool, the classes of each episode, without base classes that all episodes have."""
    n_classes: int  #: The number of classes that episodes are drawn from.
    title: str = ""  #: One line of text for the report that names data, protocol and seed.
    notes: Sequence[str] = ()  #: Further lines of text for the report.
    class_accuracies: Sequence[Mapping[str, Any]] = ()
    """Name, number of episodes and accuracies of each class, from `compute_class_accuracies`."""
    episode_records: Mapping[str, object] | None = None
    """The rows, labels and predictions of all episodes, from `record_episodes`; None if predictions were not kept."""

    @property
    def methods(self) -> Mapping[str, MethodSummary]:
        """The accuracy of each method with its intervals, and further measures, by name."""
        return self.summary.methods

    @property
    def accuracies(self) -> dict[str, Tensor]:
        """The accuracy of each method in each episode, (episodes,) float64 in [0, 1], by the method's name."""
        return {name: right / self.query_counts.double() for name, right in self.correct_counts.items()}

    def to_dict(self, *, by_class: bool = False) -> dict[str, object]:
        """Convert all results, if ``by_class`` with accuracies of classes, to a dictionary for JSON and `compare`."""
        queries, ways = self.query_counts.tolist(), self.class_mask.sum(dim=1).tolist()
        return {
            **self.summary.to_dict(),
            "tuning": [tuning.to_dict() for tuning in self.tuning],
            "versions": dict(self.versions),
            "plugins": dict(self.plugin_versions),
            "data": self.data_hash,
            "classes": self.n_classes,
            "queries": queries if len(set(queries)) > 1 else queries[0],
            "right": {name: right.tolist() for name, right in self.correct_counts.items()},
            "ways": ways if len(set(ways)) > 1 else ways[0],
            "class_indices": self.class_mask.nonzero()[:, 1].tolist(),  # of all episodes, in order
            **({"by_class": list(self.class_accuracies)} if by_class else {}),
            **({} if self.episode_records is None else {"records": self.episode_records}),
        }


def nan_to_none(value: float) -> float | None:
    """Convert NaN, which JSON cannot represent, to None."""
    return None if math.isnan(value) else value


def list_interval_kinds(rates: Iterable[MeasureMean]) -> list[str]:
    """List the kinds of intervals ("classes", "episodes") that are known for at least one of the means."""
    rates = list(rates)
    return [kind for kind in INTERVAL_KINDS if any(not math.isnan(rate.get_half_width(kind)) for rate in rates)]


def interval_half_width(values: Tensor, class_mask: Tensor | None = None) -> float:
    """Compute half the width of the 95 % interval of the mean of values (n,), by Student's t distribution.

    NaN are ignored; fewer than two values give NaN. ``class_mask`` is as in `mean_standard_error`.
    """
    return _convert_to_half_width(*mean_standard_error(values, class_mask))


def _convert_to_half_width(error: float, freedom: int) -> float:
    """Convert a standard error with ``freedom`` degrees of freedom to half the width of Student's 95 % interval."""
    if math.isnan(error):
        return math.nan
    from scipy.special import stdtrit  # noqa: PLC0415 - slow to import

    confidence_level = 0.95  # the level of all intervals
    return float(stdtrit(freedom, (1 + confidence_level) / 2)) * error


def mean_standard_error(values: Tensor, class_mask: Tensor | None = None) -> tuple[float, int]:
    """Estimate the standard error of a mean over episodes.

    Without a class mask, the error is over episodes: it applies to other episodes of the same classes. With a mask, it
    is over classes: it applies to other classes from the same distribution. The mean is then a U-statistic of the
    classes, and the jackknife leaves out one class at a time, with all of its episodes. These means also vary because
    episodes are few: this variance is subtracted, and the variance of the overall mean for the same reason is added. A
    bootstrap of classes would need episodes with a class twice, and episodes without common classes would be too few.

    Args:
        values: (n,), the value of each episode, such as the accuracy; NaN are ignored.
        class_mask: (n, classes) bool, whether each episode has each class; None for the error over episodes.

    Returns:
        The error, and the degrees of freedom of Student's t distribution: the number of episodes or classes minus one.
        The error is NaN for fewer than two values. Over classes it is also NaN if a class is missing in fewer than
        ``MIN_EPISODES_WITHOUT_CLASS`` episodes, or if episodes have unequal numbers of classes.

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
    """Estimate standard error and degrees of freedom, over classes, of the mean of each column of values (n, k)."""
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
    unknown = (n < 2) | (drawn & (without < MIN_EPISODES_WITHOUT_CLASS)).any(dim=0) | (n_ways > 1)
    freedom = (n_classes - 1).clamp_min(0).tolist()
    return list(zip(errors.masked_fill(unknown, math.nan).tolist(), freedom, strict=True))


def nan_mean(values: Tensor) -> float:
    """Compute the mean of the values (n,) that are not NaN; NaN if there are none."""
    return float(values.double().nanmean())


def compare_method_pairs(
    accuracies: Mapping[str, Tensor], class_mask: Tensor | None = None, against: str | None = None
) -> list[MethodComparison]:
    """Compare the accuracies of pairs of methods by paired t tests, over episodes and over classes.

    Args:
        accuracies: The accuracies (episodes,) of each method by name, on the same episodes.
        class_mask: (episodes, classes) bool, whether each episode has each class; None for no test over classes.
        against: The method to compare with each other method; None to compare all pairs of methods.

    Returns:
        One comparison for each pair. Its p-values are also adjusted for the number of pairs.

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
    over_episodes = _run_t_tests(differences, list(map(mean_standard_error, differences.unbind(1))))
    means = map(nan_mean, differences.unbind(1))
    rows = zip(pairs, means, over_classes, over_episodes, strict=True)
    return [MethodComparison(*pair, mean, *classes, *episodes) for pair, mean, classes, episodes in rows]


def _run_t_tests(differences: Tensor, errors: Sequence[tuple[float, int]]) -> list[tuple[float, float, float]]:
    """Compute interval half-width, p-value and Holm-adjusted p-value of each column of differences (n, pairs)."""
    from scipy.special import stdtr  # noqa: PLC0415 - slow to import

    p_values = []
    # Smaller differences between accuracies count as rounding errors.
    accuracy_tolerance = 1e-12
    for column, (error, freedom) in zip(differences.unbind(1), errors, strict=True):
        if error > accuracy_tolerance:
            p_values.append(2 * float(stdtr(freedom, -abs(nan_mean(column)) / error)))
        else:  # the test would divide by zero, or by NaN
            p_values.append(float(math.isnan(error) or float(column.abs().max()) <= accuracy_tolerance))
    half_widths = [_convert_to_half_width(*error) for error in errors]
    return list(zip(half_widths, p_values, adjust_p_values(p_values), strict=True))


def adjust_p_values(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple comparisons by Holm's step-down procedure; return them in the same order."""
    adjusted, highest, n = [0.0] * len(p_values), 0.0, len(p_values)
    for rank, position in enumerate(sorted(range(n), key=lambda position: p_values[position])):
        highest = max(highest, min(1.0, (n - rank) * p_values[position]))
        adjusted[position] = highest
    return adjusted
