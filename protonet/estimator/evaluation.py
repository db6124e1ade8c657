"""Cross-validation of a fitted estimator: metrics, importance of columns, and the HTML report."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from protonet import report
from protonet._io import write_text
from protonet.errors import raise_input_error
from protonet.fit.cross_validation import CrossValidation, cross_validate, measure_cross_validation
from protonet.fit.diagnostics import rank_columns_by_importance
from protonet.fit.search import FitProgress, ignore_progress
from protonet.fit.solver import Solution
from protonet.metrics import Metrics
from protonet.pipeline import TablePipeline
from protonet.tables.training import TrainingTable
from protonet.ui.html import format_report


class CrossValidatedEstimator(BaseEstimator):  # type: ignore[misc]
    """The methods of `ProtoNetClassifier` that evaluate the last fit on its training rows."""

    time_limit: float
    verbose: bool
    n_features_in_: int
    _pipeline: TablePipeline
    _training: tuple[Solution, TrainingTable] | None = None
    """Model selection and labelled rows of the last fit, for cross-validation; None in copies and loaded estimators."""
    _cross_validation: CrossValidation | None = None  #: The cross-validation of the last fit, once it is computed.

    def cross_validate(self) -> Metrics:
        """Cross-validate the last fit: repeat it without each fold, and evaluate it on the rows of this fold.

        The first call takes about as long as ``fit``, and up to ``time_limit``. Later calls return the same result.

        Returns:
            The metrics of the held-out rows, such as ``accuracy`` with its 95 % ``interval``, ``log_loss``,
            ``calibration_error`` and ``confusion``.

        Raises:
            InputError: No class has two rows, so that none can be held out; or the estimator is a copy, or comes from a
                pickle or a file: these have no training rows.
        """
        return measure_cross_validation(self._get_cross_validation())

    def feature_importances(self) -> np.ndarray:
        """Compute the permutation importance (``n_features_in_``,) float64: the rise of the held-out log-loss in nats.

        Dropped columns have importance 0. For scikit-learn's feature selection, pass this method as
        ``importance_getter=ProtoNetClassifier.feature_importances``.

        Raises:
            InputError: As in `cross_validate`.
        """
        cv, sizes = self._get_cross_validation(), self._pipeline.n_features_per_column
        rows = self._get_training()[1]
        dropped = {*rows.dropped_columns}
        used = [index for index, name in enumerate(rows.column_descriptions) if name not in dropped]
        importances, generator = np.zeros(self.n_features_in_), torch.Generator().manual_seed(0)
        for column in rank_columns_by_importance(cv, [""] * len(sizes), sizes, generator)["columns"]:
            importances[used[column["index"]] if used else column["index"]] = column["log_loss_rise"]
        return importances

    def report(self, path: str | Path) -> None:
        """Write a self-contained HTML report about the last fit, as ``protonet fit --report`` does.

        It has the cross-validated metrics beside baselines, possible label errors, the importance of the columns and a
        learning curve. Rows are numbered as in X. It takes several times as long as ``fit``.

        Args:
            path: The file, in a folder that exists.

        Raises:
            OSError: The file cannot be written.
            InputError: As in `cross_validate`.
        """
        cv, (solution, rows) = self._get_cross_validation(), self._get_training()
        model = replace(self._pipeline, network=solution.network, classes=rows.classes)  # partial_fit may add classes
        table = report.table_to_dict(model, rows, [])
        compared = report.compare_with_baselines(cv, solution, model)
        results = report.fit_results_to_dict(type(self).__name__, table, model, cv, compared)
        deadline = time.monotonic() + self.time_limit
        results |= report.compute_fit_report_details(rows, model, solution, cv, 0, deadline)
        write_text(path, format_report(results))

    def _get_training(self) -> tuple[Solution, TrainingTable]:
        """Get the model selection and the rows of the last fit; raise an InputError if this is a copy, without rows."""
        check_is_fitted(self)
        if self._training is None:
            got = "a copy, or one of a pickle or a file, which have no training rows"
            raise_input_error("estimator", "be the one that was fitted", got, "Call it on that one.")
        return self._training

    def _get_cross_validation(self) -> CrossValidation:
        """Cross-validate the last fit, unless this is done; raise an InputError if no row can be held out."""
        solution, _ = self._get_training()
        if self._cross_validation is None:
            deadline = time.monotonic() + self.time_limit
            progress = print_stages(self) if self.verbose else ignore_progress
            self._cross_validation = cross_validate(solution, deadline=deadline, progress=progress)
        if not len(self._cross_validation.labels):
            raise_input_error("y", "have two different rows of a class", "none", "Add rows: one is held out.")
        return self._cross_validation


def print_stages(estimator: object) -> FitProgress:
    """Make a progress function that prints a line for each stage: class, seconds, finished fraction and stage."""
    name = type(estimator).__name__
    started, last = time.monotonic(), [""]

    def print_stage(stage: str, fraction: float) -> None:
        if stage != last[0]:
            print(f"[{name}] {time.monotonic() - started:6.1f} s {100 * fraction:3.0f} % {stage}", flush=True)
        last[0] = stage

    return print_stage
