"""The solver, which fits a `PrototypeNetwork` to the samples of data loaders."""

from __future__ import annotations

import difflib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import starmap
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from protonet._validation import check_device, check_int, check_number
from protonet.errors import InputTypeError, raise_input_error
from protonet.fit import networks
from protonet.fit.search import (
    DEFAULT_SEARCH,
    SEARCH_PROGRESS_FRACTION,
    FitProgress,
    ModelSearch,
    SelectedModel,
    evaluate_candidates,
    ignore_progress,
    select_model,
)
from protonet.fit.training_set import (
    ClassNameRows,
    LabelledSamples,
    TrainingSet,
    UnlabelledSamples,
    prepare_training_set,
    read_labelled_samples,
    read_unlabelled_samples,
)
from protonet.network import PrototypeNetwork
from protonet.views.evaluation import plan_encoder
from protonet.views.mlp import MLPFamily
from protonet.views.view import CPU

#: Default limit of the number of trainable parameters, which is that of the contest.
PARAM_LIMIT = 500_000
#: Default time limit of `solve` in seconds: well below the hour of the contest.
TIME_LIMIT = 900.0
#: Without ``param_limit``, `fit_solution` trains MLPs only with this mean number of rows a class.
MIN_MLP_ROWS_PER_CLASS = 100
#: Fraction of the time limit that the selection may take; the remainder is for the final fit.
SELECTION_TIME_FRACTION = 0.6
#: Fraction of the progress bar that is complete at the start of the final fit, if there are unlabelled rows.
FINAL_FIT_PROGRESS_FRACTION = 0.9
#: Keys that the argument ``metadata`` of `solve` may have.
METADATA_KEYS = ("num_classes", "input_dim", "param_limit", "device")


class Solution(NamedTuple):
    """Result of `fit_solution`: the fitted network, the selected model and the training set."""

    network: PrototypeNetwork
    selected: SelectedModel
    training_set: TrainingSet
    merged_groups: Tensor | None = None
    """(groups,) int64: the group id in the training set of each input group; input groups are in ascending order.
    Groups that share duplicates or near-duplicates have the same id. None if the input has no groups."""
    semi_supervised: networks.SemiSupervisedResult | None = None
    """The decision whether unlabelled rows are used, with its evidence; None if there are no unlabelled rows."""
    reselect: Callable[[Tensor], SelectedModel] | None = None
    """Function that repeats the selection of views without the held-out predictions of some rows. It takes their
    indices (m,) int64. None if no view was evaluated."""
    class_names: ClassNameRows | None = (
        None  #: The embedded class names that are training rows; None if there are none.
    )

    @property
    def view_influences(self) -> dict[str, float]:
        """The influence of each view on the predictions by name, in descending order; they sum to 1.

        A view whose cosines hardly differ between classes has little influence, however large its weight is.
        """
        views = (
            self.selected.views
            if self.selected.unlabelled is None
            else networks.select_semi_supervised_views(self.selected.views)
        )
        influences = {spec.name: self.selected.influences.get(spec.name, weight) for spec, weight in views}
        total = sum(influences.values())
        return {name: influences[name] / total for name in sorted(influences, key=lambda name: -influences[name])}

    @property
    def candidate_losses(self) -> dict[str, float]:
        """The mean held-out log-loss of each candidate view by name, in ascending order; empty if none is evaluated."""
        losses = {name: loss for name, loss in self.selected.losses.items() if name != "mixture"}
        return dict(sorted(losses.items(), key=lambda item: item[1]))

    def select_without_rows(self, rows: Tensor) -> SelectedModel:
        """Repeat the selection of views without the held-out predictions of some rows, to evaluate it on these rows.

        ``rows`` (m,) int64 are their indices in the training set. The separation is necessary: with few rows, even the
        temperature overfits to the rows that select it.
        """
        if self.reselect is None:
            return self.selected
        selected, unlabelled = self.reselect(rows), self.selected.unlabelled
        if unlabelled is not None:
            ratio = selected.temperature / self.selected.temperature
            unlabelled = unlabelled._replace(temperature=ratio * unlabelled.temperature)
        return selected._replace(unlabelled=unlabelled)


def solve(
    train_loader: LabelledSamples,
    val_loader: LabelledSamples | None = None,
    metadata: Mapping[str, Any] | None = None,
    *,
    unlabelled: UnlabelledSamples | None = None,
    time_limit: float = TIME_LIMIT,
    progress: FitProgress | None = None,
    seed: int = 0,
) -> PrototypeNetwork:
    """Train a prototype network on labelled samples, within a parameter limit.

    The samples of both loaders are pooled and sorted into a canonical order, so that order and batch size do not change
    the model. Each loader is read once.

    Args:
        train_loader: Batches ``(inputs, labels)``: inputs (b, ...) real, flattened to (b, input_dim); labels (b,)
            integers. Or a `torch.utils.data.Dataset` of samples ``(inputs, label)`` with a length; without a length, it
            is an iterable of batches. Or one pair ``(inputs, labels)`` of tensors or arrays. At most 2**30 features in
            all, since a loader may have no end.
        val_loader: Like ``train_loader``, or None. Its samples are training samples, too.
        metadata: Optional keys: ``input_dim``, by default the width of the inputs; ``num_classes``, by default the
            largest label + 1 (at least 2); ``param_limit``, by default 500,000; and ``device``, by default the CPU, on
            which views are fitted and the result is returned. Rows are copied there once. Folds, the evaluation of
            held-out rows, random numbers and the growth of trees stay on the CPU. Unknown keys are errors; values may
            be None.
        unlabelled: Unlabelled rows, which are used if they lower the log-loss of held-out labelled rows: a tensor or
            array (m, ...), or batches of inputs (b, ...), alone or with labels, which are ignored. They are read once;
            more than a few thousand are subsampled.
        time_limit: Seconds, >= 0, most of them for the search; the best result so far is fitted and returned.
        progress: Called with the name of the stage that begins and the finished fraction, from 0 to 1; at the end with
            "done" and 1. An exception that it raises ends the search.
        seed: Seed of the initial weights and episodes of MLPs, the only random choices: folds follow from the rows.
            Global random state is neither used nor changed.

    Returns:
        The network in eval mode, float32. Its trainable parameters are the encoder's, at most ``param_limit``.

    Raises:
        InputTypeError: A batch is not ``(inputs, labels)``, the samples of a dataset cannot be batched, labels are not
            integers, or an argument has another type.
        InputError: No sample, too many, non-finite features, float64 features that hardly vary around a large mean,
            labels outside [0, num_classes), another width than input_dim, num_classes < 2, unknown metadata, or a
            negative or non-finite limit.
    """
    metadata = _parse_metadata(metadata)
    metadata.setdefault("param_limit", PARAM_LIMIT)
    network = fit_solution(
        train_loader, val_loader, metadata, time_limit, progress, seed, unlabelled=unlabelled
    ).network
    if progress is not None:
        progress("done", 1.0)
    return network


def fit_solution(
    train_loader: LabelledSamples | None,
    val_loader: LabelledSamples | None = None,
    metadata: Mapping[str, Any] | None = None,
    time_limit: float = TIME_LIMIT,
    progress: FitProgress | None = None,
    seed: int = 0,
    weights: Tensor | None = None,
    groups: Tensor | None = None,
    column_indices: Tensor | None = None,
    column_spans: Sequence[tuple[int, int]] = (),
    unlabelled: UnlabelledSamples | None = None,
    names: ClassNameRows | None = None,
    search: ModelSearch | None = None,
) -> Solution:
    """Fit a network as `solve` does; also return the selected views and the training set, for further fits.

    The differences and the arguments that `solve` does not have are:

    - Without ``metadata["param_limit"]``, MLPs are trained only if there are 100 rows per class.
    - ``weights`` (n,) > 0: sample weights, in the order of the loaders.
    - ``groups`` (n,) int64: group ids, in the order of the loaders. Rows of one group are held out together.
    - ``column_indices`` (dim,): the table column of each feature; see `protonet.views.view.TrainingRows`.
    - ``column_spans``: pairs (start, stop) of adjacent features that get views of their own.
    - ``names``: embedded class names, as additional training rows. If ``train_loader`` is None, the network is fitted
      to the names alone.
    - ``search``: the search space; None for the default.
    """
    started = time.monotonic()
    metadata = _parse_metadata(metadata)
    time_limit = check_number("time_limit", time_limit, low=0)
    seed = check_int("seed", seed, low=0, high=2**63 - 1)
    is_default, search = search is None, search or DEFAULT_SEARCH
    if progress is not None and not callable(progress):
        got, constraint = type(progress).__name__, "be a function of a stage and a share"
        raise_input_error("progress", constraint, got, "Pass None.", kind=InputTypeError)
    progress = progress or ignore_progress
    with preserve_torch_state():
        if train_loader is None and names is not None:
            features, labels, num_classes = names.features[:0], names.labels[:0], metadata["num_classes"]
        else:
            loader = cast(LabelledSamples, train_loader)
            features, labels, num_classes = read_labelled_samples(loader, val_loader, metadata)
        max_pool_rows = min(
            networks.MAX_ROWS_ANY_CLASSES, max(networks.LABEL_MAX_ROWS, networks.MAX_ROWS_PER_CLASS * num_classes)
        )
        pool = None if unlabelled is None else read_unlabelled_samples(unlabelled, features.shape[1], max_pool_rows)
        training_set, joined = prepare_training_set(
            features, labels, num_classes, seed, weights, groups, column_indices, names
        )
        columns, dim = training_set.rows.columns, features.shape[1]
        if columns is not None:
            dim = len(columns.indices)
            column_spans = [span for span in starmap(columns.select_span, column_spans) if span[0] < span[1]]
        search = search.with_spans(column_spans)
        rows_per_class = len(training_set.rows.labels) / len(training_set.rows.labels.unique())
        if is_default and "param_limit" not in metadata and rows_per_class < MIN_MLP_ROWS_PER_CLASS:
            search = search.without_family(MLPFamily)
        plan = plan_encoder(dim, num_classes, metadata.get("param_limit", PARAM_LIMIT))
        searched = replace(training_set.rows, deadline=started + SELECTION_TIME_FRACTION * time_limit)
        device = metadata["device"]
        explored = evaluate_candidates(searched, plan, search, progress, device)
        selected = select_model(explored, plan, search)
        training_set, pooled = replace(training_set, device=device), None
        if pool is not None and pool[2] and plan.ensemble_sizes:
            training_set = training_set.add_unlabelled_rows(*pool)
            selected, pooled = networks.decide_use_of_unlabelled_rows(
                training_set,
                selected,
                searched.deadline,
                lambda stage, fraction: progress(
                    stage,
                    SEARCH_PROGRESS_FRACTION + (FINAL_FIT_PROGRESS_FRACTION - SEARCH_PROGRESS_FRACTION) * fraction,
                ),
            )
        progress("final fit", SEARCH_PROGRESS_FRACTION if pooled is None else FINAL_FIT_PROGRESS_FRACTION)
        network = networks.fit_selected_model(training_set, selected, started + time_limit)
        training_set = replace(training_set, device=CPU)  # later fits run on the CPU by default
        rechoose = None if explored is None else lambda rows: select_model(explored.without_rows(rows), plan, search)
        return Solution(network, selected, training_set, joined, pooled, rechoose, names)


def _parse_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Validate the metadata of `solve`; return a dict of the entries that are not None, always with a device."""
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, Mapping):
        got = type(metadata).__name__
        raise_input_error("metadata", "be a mapping or None", got, "Pass a dict.", kind=InputTypeError)
    for key in metadata:
        if key not in METADATA_KEYS:
            near = difflib.get_close_matches(str(key), METADATA_KEYS, n=1)
            remedy = f"Did you mean {near[0]!r}?" if near else "Leave it out."
            raise_input_error("metadata", f"only have keys of {', '.join(METADATA_KEYS)}", repr(key), remedy)
    known = {key: value for key, value in metadata.items() if value is not None}
    for key, low in (("num_classes", 2), ("input_dim", 1)):
        if key in known:
            known[key] = check_int(f"metadata[{key!r}]", known[key], low=low)
    if "param_limit" in known:
        known["param_limit"] = check_number("metadata['param_limit']", known["param_limit"], low=0)
    known["device"] = check_device("metadata['device']", known.get("device", CPU))
    return known


@contextmanager
def preserve_torch_state() -> Iterator[None]:
    """Use one thread with gradients enabled inside the context, and leave global state as it was.

    The thread count of torch and the random states of torch, NumPy and Python are restored at the end. The matrices are
    small: a second thread gains little, is ten times slower if another process uses the core, and would make the result
    depend on the number of cores. Random states change if a loader shuffles.
    """
    threads = torch.get_num_threads()
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 - the global state itself
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
