"""Compare the solver, baselines and the Bayes rule on new samples of the contest's distribution.

The seeds are those of the synthetic families, never the contest's. The Bayes-optimal accuracy is that of inductive
classifiers that know the distribution except for its prototypes. Its arithmetic is in float64. Classes have equal prior
probabilities; the prototype of a class without a sample has its prior distribution.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from numpy.polynomial import Polynomial
from scipy.special import hyp0f1, ive
from torch import Tensor

from analysis.shared.baselines import BASELINES, concat_train_and_val
from analysis.shared.runner import (
    JournalOptions,
    StudyReport,
    hash_sources,
    int_option,
    list_option,
    names_option,
    parse_integers,
    run_all,
)
from analysis.shared.tables import format_mean, mean_and_error, paired_differences
from protonet import solve
from protonet._text import plural
from protonet.datasets import FAMILIES, Split, sample_family
from protonet.errors import install_command, raise_input_error
from protonet.losses import class_means
from protonet.ui.text import format_table
from solution.pack import library_files

MIN_DEBYE_ORDER, N_DEBYE_TERMS = 30.0, 7  #: From this order on, the expansion is exact to 1e-11.
ROWS_PER_CHUNK = 1024  #: Query rows whose scores are computed at once.
SOLVER_METHOD, BAYES_METHOD = "ours", "bayes"
#: The baseline of each method but the solver, in the order of the table; None for the Bayes rule.
METHODS = {
    "nearest_mean": "nearest-mean",
    "cosine": "cosine",
    "mlp": "statement-mlp",
    "lda": "lda-closed-form",
    "logistic": "logistic-by-accuracy",
    "knn": "knn",
    "svm": "svm-untuned",
    "kernel-ridge": "kernel-ridge",
    BAYES_METHOD: None,
}
#: Methods that are fitted with scikit-learn.
SKLEARN_METHODS = {"lda", "logistic", "knn", "svm"}
#: The regret is the accuracy of the best of these methods minus that of the solver.
REGRET_METHODS = ("cosine", "lda", "logistic", "knn", "svm", "kernel-ridge")
TABLE_NOTE = """
Test accuracy in percent, mean over {draws} ± one standard error. In brackets: ours minus it, paired by
draw. The gap is the Bayes rule minus ours, the regret the best baseline but the nearest mean and the MLP minus
ours.
"""


def log_vmf_integral(kappa: Tensor, dim: int) -> Tensor:
    """Compute the log of Z(k) = k^(1 - d/2) I_{d/2 - 1}(k), the von Mises-Fisher integral.

    Up to a factor of d alone, Z(|v|) is the integral of exp(v . u) over the unit sphere in d dimensions. Orders d/2 - 1
    below 30 use SciPy's functions, the others Debye's expansion without the power of k: nothing underflows. The
    absolute error is below 1e-10 and the relative error below 1e-13, tested for concentrations up to 1e6.

    Source: Mardia and Jupp, Directional Statistics, 9.3.4; NIST DLMF 10.39.9, 10.41.3 and 10.41.9.
    """
    k, order = kappa.double(), dim / 2 - 1
    return _log_integral_debye(k, order) if order >= MIN_DEBYE_ORDER else _log_integral_scipy(k, order)


def predict_bayes_sphere(
    support_x: Tensor, support_y: Tensor, query_x: Tensor, *, num_classes: int, radius: float = 2.5, noise: float = 0.4
) -> Tensor:
    """Predict by Bayes' rule: prototypes uniform on a sphere, isotropic Gaussian noise.

    The class (n_queries,) is the argmax of log Z(|n m_c + x| r/s^2) - log Z(|n m_c| r/s^2), with n samples of mean m_c,
    the prototypes' norm r and the standard deviation s of a feature's noise.

    Source: The posterior of a Gaussian mean on a sphere is von Mises-Fisher: Mardia and Jupp, 9.3.4.
    """
    dim, gain = support_x.shape[1], radius / noise**2
    means, counts = class_means(support_x.double(), support_y, num_classes)
    sums = counts[:, None] * means  # (num_classes, dim)
    base = log_vmf_integral(gain * sums.norm(dim=1), dim)  # (num_classes,)
    squares = sums.square().sum(dim=1)  # (num_classes,)

    def score(x: Tensor) -> Tensor:
        squared = x.square().sum(dim=1, keepdim=True) + 2 * x @ sums.T + squares  # (rows, num_classes)
        return log_vmf_integral(gain * squared.clamp_min(0).sqrt(), dim) - base

    return _predict_in_chunks(score, query_x)


def predict_bayes_gaussian(
    support_x: Tensor, support_y: Tensor, query_x: Tensor, *, num_classes: int, covariance: Tensor, radius: float = 2.5
) -> Tensor:
    """Predict by Bayes' rule: Gaussian prototypes, Gaussian noise of a known covariance.

    The prior is N(0, radius^2/dim I). It approximates the uniform prior on the sphere of this radius, with the same
    second moment but no closed form; in high dimension both nearly agree. Arguments and result are as in
    `predict_bayes_sphere`; ``covariance`` (dim, dim) must be symmetric and positive definite.

    Source: Murphy, Conjugate Bayesian analysis of the Gaussian distribution (2007), section 2, on every axis.
    """
    spectrum, basis = torch.linalg.eigh(covariance.double())  # (dim,), (dim, dim) in columns
    prior = radius**2 / len(spectrum)
    means, counts = class_means(support_x.double() @ basis, support_y, num_classes)
    shrunk = prior / (counts[:, None] * prior + spectrum)  # (num_classes, dim)
    means = shrunk * (counts[:, None] * means)
    variances = spectrum * (1 + shrunk)  # the noise's plus the posterior's
    constant = (means.square() / variances + variances.log()).sum(dim=1)  # (num_classes,)

    def score(x: Tensor) -> Tensor:
        x = x @ basis
        scores: Tensor = 2 * x @ (means / variances).T - x.square() @ variances.reciprocal().T - constant
        return scores

    return _predict_in_chunks(score, query_x)


def predict_bayes(split: Split) -> Tensor:
    """Predict the test rows of a split by `predict_bayes_sphere`; for anisotropic noise, `predict_bayes_gaussian`."""
    covariance, radius, k = split.noise_covariance, split.radius, split.num_classes
    if covariance is None:
        raise_input_error("split", "know its noise_covariance", "None", "Use a draw of shared noise.")
    (x, y), query = concat_train_and_val(split), split.test_x
    variance = float(covariance[0, 0])
    if torch.equal(covariance, variance * torch.eye(len(covariance), dtype=torch.float64)):
        return predict_bayes_sphere(x, y, query, num_classes=k, radius=radius, noise=math.sqrt(variance))
    return predict_bayes_gaussian(x, y, query, num_classes=k, covariance=covariance, radius=radius)


def _log_integral_scipy(k: Tensor, order: float) -> Tensor:
    """Compute log Z(k) by SciPy's hypergeometric limit function for k < 1, otherwise by its scaled Bessel function."""
    low, high = k.clamp(max=1), k.clamp(min=1)
    small = torch.as_tensor(hyp0f1(order + 1, (low**2 / 4).numpy())).log()
    large = torch.as_tensor(ive(order, high.numpy())).log() + high - order * high.log()
    return torch.where(k < 1, small - order * math.log(2) - math.lgamma(order + 1), large)


def _log_integral_debye(k: Tensor, order: float) -> Tensor:
    """Compute log Z by Debye's expansion of the Bessel function I_order(order * z), without the power of z."""
    root = torch.sqrt(1 + (k / order) ** 2)
    exponent = order * (root - torch.log1p(root) - math.log(order))
    p = Polynomial([0.0, 1.0])
    term = series = Polynomial([1.0])  # in p = 1 / root
    for i in range(1, N_DEBYE_TERMS):
        term = 0.5 * p**2 * (1 - p**2) * term.deriv() + ((1 - 5 * p**2) * term).integ() / 8
        series = series + term / order**i
    total = torch.as_tensor(series(root.reciprocal().numpy()))
    return exponent + torch.log(total / torch.sqrt(2 * math.pi * order * root))


def _predict_in_chunks(score: Callable[[Tensor], Tensor], query: Tensor) -> Tensor:
    """Predict the class of each ``query`` row, the argmax of ``score(rows)`` (rows, num_classes), in chunks."""
    return torch.cat([score(rows).argmax(dim=1) for rows in torch.split(query.double(), ROWS_PER_CHUNK)])


class MethodRun(NamedTuple):
    """One run: a method on a sampled data set of a synthetic family."""

    family: str
    n_train: int  #: Training samples per class.
    n_val: int  #: Validation samples per class.
    seed: int
    num_classes: int
    dim: int
    method: str
    param_limit: int | None  #: Maximum number of parameters; None for methods other than the solver.


def _parse_shots(option: str, text: str) -> list[tuple[int, int]]:
    """Parse pairs of training and validation samples per class from a text such as 16+4,1+1, without repetition."""
    pairs = []
    for shots in text.split(","):
        parts = shots.split("+")
        if len(parts) != 2 or not all(part.isdecimal() for part in parts) or int(parts[0]) < 1:
            raise_input_error(option, "be train+val samples per class", repr(shots), "Pass for instance 16+4,1+1.")
        pairs.append((int(parts[0]), int(parts[1])))
    return list(dict.fromkeys(pairs))


@dataclass(frozen=True, kw_only=True)
class Options(JournalOptions):
    """The options of the study."""

    draws: int = int_option("number of draws", 5)
    family: Sequence[str] = names_option(FAMILIES, "isotropic")
    shots: Sequence[tuple[int, int]] = list_option("train+val samples per class", "16+4", _parse_shots)
    limits: Sequence[int] = list_option("parameter limits", "500000", functools.partial(parse_integers, low=0))
    methods: Sequence[str] | None = names_option(METHODS)
    first_seed: int = int_option("the first draw's seed", 0, low=0)
    classes: int = int_option("number of classes", 128, low=2)
    dim: int = int_option("features", 384, low=2)


def run(options: Options) -> StudyReport:
    """Evaluate all methods on all sampled data sets; on isotropic data, slow baselines only if they are selected."""
    if SKLEARN_METHODS & {*(options.methods or METHODS)} and find_spec("sklearn") is None:
        needed = ", ".join(sorted(SKLEARN_METHODS))
        remedy = f"Run {install_command('analysis')}, or leave out {needed}."
        raise_input_error("--methods", f"have scikit-learn for {needed}", "none installed", remedy)
    slow = {"logistic", "knn", "svm", "kernel-ridge"}  # as accurate as the Bayes rule at the best
    runs = []
    seeds = range(options.first_seed, options.first_seed + options.draws)
    for family in options.family:
        methods = options.methods or [name for name in METHODS if name not in slow or family != "isotropic"]
        pairs: list[tuple[str, int | None]] = [(name, None) for name in methods]
        pairs += [(SOLVER_METHOD, limit) for limit in options.limits]
        for n_train, n_val in options.shots:
            for seed in seeds:
                draw = (family, n_train, n_val, seed, options.classes, options.dim)
                runs += [MethodRun(*draw, *pair) for pair in pairs]
    data, others = "protonet/datasets/synthetic.py", ("analysis/shared/baselines.py", "analysis/contest/draws.py")
    codes = hash_sources(data, *others, "protonet/losses.py"), hash_sources(data, *library_files())
    finished = run_all(runs, run_method, options.state, lambda run: codes[run.method == SOLVER_METHOD], unit="result")
    rows = summarise(finished)
    return StudyReport(rows, tabulate(rows))


@functools.lru_cache(maxsize=1)  # the runs of a draw follow each other
def sample_dataset(family: str, n_train: int, n_val: int, seed: int, num_classes: int, dim: int) -> Split:
    """Sample a data set of a synthetic family, with ``n_train`` and ``n_val`` rows per class."""
    return sample_family(family, seed=seed, n_train=n_train, n_val=n_val, num_classes=num_classes, dim=dim)


def run_method(run: MethodRun) -> dict[str, Any]:
    """Measure accuracy in [0, 1] (None if the method does not apply), parameters and seconds of a run."""
    split = sample_dataset(*run[:6])
    started, parameters = time.perf_counter(), None
    if run.method == SOLVER_METHOD:
        metadata = {"num_classes": run.num_classes, "input_dim": run.dim, "param_limit": run.param_limit}
        network = solve([(split.train_x, split.train_y)], [(split.val_x, split.val_y)], metadata)
        parameters = network.count_parameters()
        with torch.no_grad():
            predicted: Tensor | None = network(split.test_x).argmax(dim=1)
    else:
        predicted = predict_test_rows(split, run.method)
    accuracy = None if predicted is None else float((predicted == split.test_y).double().mean())
    return {"accuracy": accuracy, "parameters": parameters, "seconds": round(time.perf_counter() - started, 3)}


def predict_test_rows(split: Split, method: str) -> Tensor | None:
    """Predict the classes (n_test_rows,) int64 of the test samples; None if the method does not apply.

    Methods are fitted to training and validation samples, the MLP of the contest's statement to training samples only.
    """
    name = METHODS[method]
    if name is None:
        return None if split.noise_covariance is None else predict_bayes(split)
    x, y = (split.train_x, split.train_y) if method == "mlp" else concat_train_and_val(split)
    return torch.from_numpy(BASELINES[name].fit(x.numpy(), y.numpy())(split.test_x.numpy()).predicted)


def summarise(results: Mapping[MethodRun, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Collect accuracies in percent, and the solver's parameters and seconds, by family, shots and parameter limit."""
    rows = []
    for key, limit in dict.fromkeys((run[:3], run.param_limit) for run in results if run.method == SOLVER_METHOD):
        selected = [run for run in results if run[:3] == key and run.param_limit in {None, limit}]
        percent: dict[str, list[float]] = {SOLVER_METHOD: []}
        for run in selected:
            if results[run]["accuracy"] is not None:
                percent.setdefault(run.method, []).append(100 * results[run]["accuracy"])
        ours = [results[run] for run in selected if run.method == SOLVER_METHOD]
        row = {"family": key[0], "shots": f"{key[1]}+{key[2]}", "limit": limit, "percent": percent}
        rows.append(row | {name: [result[name] for result in ours] for name in ("parameters", "seconds")})
    return rows


def tabulate(rows: Sequence[dict[str, Any]]) -> str:
    """Format the results of `summarise` as a Markdown table with a note."""
    used = {method for row in rows for method in row["percent"]}
    shown = {method: BASELINES[name].title for method, name in METHODS.items() if name and method in used}
    header = ["family", "train+val", "limit", "ours", "Bayes", "gap to Bayes"]
    header += [*shown.values(), "regret", "parameters", "seconds"]
    lines = []
    for row in rows:
        percent = row["percent"]
        ours, bayes = percent[SOLVER_METHOD], percent.get(BAYES_METHOD, [])
        line = [row["family"], row["shots"], f"{row['limit']:,}", format_mean(ours), format_mean(bayes)]
        line.append(format_mean(paired_differences(bayes, ours), sign=True))
        for method in shown:
            other = percent.get(method, [])
            difference = format_mean(paired_differences(ours, other), sign=True)
            line.append(f"{mean_and_error(other)[0]:.2f} ({difference})" if other else "")
        compared = [percent[method] for method in REGRET_METHODS if method in percent]
        best: list[float] = max(compared, key=lambda values: mean_and_error(values)[0], default=[])
        line.append(format_mean(paired_differences(best, ours), sign=True))
        line += [f"{mean_and_error(row[name])[0]:,.{digits}f}" for name, digits in (("parameters", 0), ("seconds", 1))]
        lines.append(line)
    return format_table(header, lines) + TABLE_NOTE.format(draws=plural(len(rows[0]["seconds"]), "draw"))
