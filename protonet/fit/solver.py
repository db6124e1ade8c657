"""solve(): loaders in, PrototypeNetwork out."""

from __future__ import annotations

import difflib
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet._checks import check_int, check_number, check_weights, fail, fail_type
from protonet.encoder import Encoder
from protonet.fit.copies import pool_copies
from protonet.fit.loading import Samples, centre_columns, order_rows, read_loaders
from protonet.fit.search import EFFORTS, RAW, SEARCH_SHARE, Choice, Progress, Search, ignore, select
from protonet.network import PrototypeNetwork
from protonet.views.linear import LinearKind
from protonet.views.mlp import plan_encoder
from protonet.views.view import Rows, Specification, View

#: The contest's limit, used where the metadata names none.
PARAM_LIMIT = 500_000
#: Seconds that solve() may take by default: well inside the contest's hour.
TIME_LIMIT = 900.0
#: Of the time limit, what selection may use; the rest is for the final fit.
SELECTION_SHARE = 0.6


#: What the metadata may name.
METADATA = ("num_classes", "input_dim", "param_limit", "device")


class Problem(NamedTuple):
    """Labelled rows, as views are fitted to them."""

    rows: Rows  #: In canonical order, of unit scale, equal ones once; with the seed of all that is drawn.
    scale: float  #: Of the features as they came, less the origin.
    origin: Tensor  #: (dim,) float32; see `protonet.fit.loading.centre_columns`.
    repeated: int  #: How many of the rows that came are equal to another one, or nearly.
    places: Tensor  #: (n,) int64: the number, in ``rows``, of each row that came, in the order of the loaders.

    def features_as_they_came(self, places: Tensor) -> Tensor:
        """Return the features (m, dim) of some rows (m,): float32, or float64 where that would lose digits."""
        x = self.rows.features[places] * self.scale
        return x.double() + self.origin if bool(self.origin.any()) else x


class Solution(NamedTuple):
    """A solved problem."""

    network: PrototypeNetwork
    choice: Choice
    problem: Problem
    groups: Tensor | None = None
    """(groups,) int64: the number, in the problem's rows, of each group that was given, in ascending order; groups that
    share a row, or nearly, are one."""


def solve(
    train_loader: Samples,
    val_loader: Samples | None = None,
    metadata: Mapping[str, Any] | None = None,
    *,
    time_limit: float = TIME_LIMIT,
    effort: str | Search = "default",
    progress: Progress | None = None,
    seed: int = 0,
) -> PrototypeNetwork:
    """Train a prototype network on labelled samples, within a parameter limit.

    The labelled samples of both loaders are pooled and put in a canonical order, so that the same data in any
    order or batch size give the same model. Each loader is read once.

    Args:
        train_loader: Batches ``(inputs, labels)``: inputs (b, ...) real, flattened to (b, input_dim); labels (b,)
            integers. Or a `torch.utils.data.Dataset` of samples ``(inputs, label)``, which has a length; one without is
            an iterable of batches. Or one pair ``(inputs, labels)`` of tensors or arrays.
        val_loader: The same, or None. Its samples count as labelled samples like any other.
        metadata: ``input_dim``, ``num_classes`` and ``param_limit`` are used where present; otherwise the width of
            the inputs, the largest label + 1 (at least 2) and 500,000. ``device`` moves the result. Other names are
            errors; None is legal.
        time_limit: Seconds, >= 0, most of them for the search; what it found by then is fitted and returned.
        effort: "fast", "default" or "best"; or a `protonet.fit.search.Search` that says what is tried.
        progress: Called with the name of the stage that begins and the share of the stages before it, from 0 to 1;
            at last with "done" and 1. What it raises ends the search.
        seed: Of folds, initial weights and episodes. Global random state is neither used nor changed.

    Returns:
        The network in eval mode, float32. Its trainable parameters are the encoder's, at most ``param_limit``.

    Raises:
        InputTypeError: A loader's batch is not ``(inputs, labels)``, a dataset's samples make no batch, labels are not
            integers, an argument has another type.
        InputError: No sample, non-finite features, labels outside [0, num_classes), another width than input_dim,
            num_classes < 2, metadata of another name, a negative or non-finite limit, an unknown effort.
    """
    network = solve_problem(train_loader, val_loader, metadata, time_limit, effort, progress, seed).network
    if progress is not None:
        progress("done", 1.0)
    return network


def solve_problem(
    train_loader: Samples,
    val_loader: Samples | None = None,
    metadata: Mapping[str, Any] | None = None,
    time_limit: float = TIME_LIMIT,
    effort: str | Search = "default",
    progress: Progress | None = None,
    seed: int = 0,
    weights: Tensor | None = None,
    groups: Tensor | None = None,
    blocks: Tensor | None = None,
    spans: Sequence[tuple[int, int]] = (),
) -> Solution:
    """Do what `solve` does, and also return what was chosen and the rows, for `fit_choice` to fit to some of them.

    Args:
        train_loader: As in `solve`, and so are all but the last four.
        val_loader: The same.
        metadata: The same.
        time_limit: The same.
        effort: The same.
        progress: The same.
        seed: The same.
        weights: (n,) > 0 of the rows in the order of the loaders; only how they differ matters. None for equal ones.
        groups: (n,) int64 in the same order: rows of one group are held out together. None for each alone.
        blocks: (dim,) as in `protonet.views.view.Rows`.
        spans: As in `protonet.fit.search.Search.with_spans`.
    """
    started = time.monotonic()
    metadata = _check_metadata(metadata)
    time_limit = check_number("solve", "time_limit", time_limit, low=0)
    seed = check_int("solve", "seed", seed, low=0, high=2**63 - 1)
    search = _check_effort(effort).with_spans(spans)
    if progress is not None and not callable(progress):
        fail_type("solve", "progress", "be a function of a stage and a share", type(progress).__name__, "Pass None.")
    progress = progress or ignore
    with untouched_globals():
        features, labels, num_classes = read_loaders(train_loader, val_loader, metadata)
        problem, joined = pose_problem(features, labels, num_classes, seed, weights, groups, blocks)
        plan = plan_encoder(features.shape[1], num_classes, metadata.get("param_limit", PARAM_LIMIT))
        searched = problem.rows._replace(deadline=started + SELECTION_SHARE * time_limit)
        with comparable("solve", "train_loader"):
            choice = select(searched, plan, search=search, progress=progress)
            progress("final fit", SEARCH_SHARE)
            network = fit_choice(problem, choice, started + time_limit)
        return Solution(network.to(metadata.get("device", "cpu")), choice, problem, joined)


def pose_problem(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    seed: int = 0,
    weights: Tensor | None = None,
    groups: Tensor | None = None,
    blocks: Tensor | None = None,
) -> tuple[Problem, Tensor | None]:
    """Return a problem of samples as they came, and the number (groups,) of each group that was given.

    Args:
        features: (n, dim) float32 or float64, finite.
        labels: (n,) int64 in [0, num_classes).
        num_classes: Number of classes.
        seed: As in `solve_problem`, and so are the others.
        weights: The same.
        groups: The same.
        blocks: The same.
    """
    features, origin = centre_columns(features)
    order = order_rows(features, labels)
    features, labels = features[order], labels[order]
    if weights is not None:
        weights = check_weights("solve", "weights", weights, n=len(labels))[order]
        weights = weights / weights.max()
        weights = None if bool((weights == 1).all()) else weights / weights.mean()
    if groups is not None:
        groups = groups[order].unique(return_inverse=True)[1]
    scale = float(torch.linalg.vector_norm(features, dtype=torch.float64)) / math.sqrt(features.numel()) or 1.0
    features.div_(scale)  # in place: these rows are a copy
    rows = Rows(features, labels, num_classes, seed=seed, weights=weights, groups=groups, blocks=blocks)
    rows, repeated, joined, pooled = pool_copies(rows)
    return Problem(rows, scale, origin, repeated, torch.empty_like(order).index_copy_(0, order, pooled)), joined


def fit_choice(problem: Problem, choice: Choice, deadline: float = math.inf) -> PrototypeNetwork:
    """Fit the chosen views and train the chosen MLPs on all rows of a problem; call it within `untouched_globals`.

    Args:
        problem: The rows. Those that were chosen on, or some of them with every class among them.
        choice: What `protonet.fit.search.select` decided.
        deadline: ``time.monotonic()`` after which training ends, and no view is fitted but the one of most weight.

    Returns:
        The network in eval mode, on the CPU, for features as they came.
    """
    rows = problem.rows._replace(shifts=choice.shifts, deadline=deadline)
    fitted: dict[Specification, View] = {}
    for specification, _ in sorted(choice.views, key=lambda each: -each[1]):
        if not fitted or time.monotonic() < deadline:
            fit_view(specification, rows, fitted)
    found = [(fitted[each], weight) for each, weight in choice.views if each in fitted]
    weights = torch.tensor([weight for _, weight in found])
    encoder = Encoder([view for view, _ in found], weights, input_dim=rows.features.shape[1])
    network = PrototypeNetwork(
        encoder, embedding_dim=encoder.embedding_dim, num_classes=rows.num_classes, temperature=choice.temperature
    )
    network.set_prototypes(rows.features, rows.labels, rows.weights)
    encoder.scale.fill_(problem.scale)
    encoder.origin.copy_(problem.origin)
    return network.eval()


def fit_view(specification: Specification, rows: Rows, fitted: dict[Specification, View]) -> View:
    """Return a view fitted to rows, and what it reads before it, each once."""
    if specification not in fitted:
        source = None if specification.source is None else fit_view(specification.source, rows, fitted)
        fitted[specification] = specification.fit(rows, source)
    return fitted[specification]


def _check_effort(effort: object) -> Search:
    """Return the search that an effort stands for, one that can be made."""
    remedy = "Pass 'default', or a changed protonet.fit.search.EFFORTS['default']."
    if isinstance(effort, str):
        if effort not in EFFORTS:
            fail("solve", "effort", f"be one of {', '.join(EFFORTS)}", repr(effort), remedy)
        return EFFORTS[effort]
    if not isinstance(effort, Search):
        fail_type("solve", "effort", "be a name or a Search", type(effort).__name__, remedy)
    check_int("solve", "effort.folds", effort.folds, low=0)
    if not all(hasattr(kind, "candidates") for kind in effort.kinds):
        fail_type("solve", "effort", "have kinds of views", repr(effort.kinds), remedy)
    first = next(iter(effort.kinds), None)
    raw_first = isinstance(first, LinearKind) and first.scalings[:1] == (RAW.scaling,)
    empty = [
        f"{type(kind).__name__}.{name}" for kind in effort.kinds for name, value in vars(kind).items() if value == ()
    ]
    if effort.folds == 1 or not raw_first or empty:
        kinds = ", ".join(type(kind).__name__ for kind in effort.kinds)
        got = f"folds={effort.folds}, kinds {kinds}" + (f", nothing in {', '.join(empty)}" if empty else "")
        fail("solve", "effort", "have no folds or two, something to try, and raw linear views first", got, remedy)
    return effort


def _check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entries that solve() uses, checked; absent and None entries are left out."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        fail_type("solve", "metadata", "be a mapping or None", type(metadata).__name__, "Pass a dict.")
    for key in metadata:
        if key not in METADATA:
            near = difflib.get_close_matches(str(key), METADATA, n=1)
            remedy = f"Did you mean {near[0]!r}?" if near else "Leave it out."
            fail("solve", "metadata", f"have no keys but {', '.join(METADATA)}", repr(key), remedy)
    known = {key: value for key, value in metadata.items() if value is not None}
    for key, low in (("num_classes", 2), ("input_dim", 1)):
        if key in known:
            known[key] = check_int("solve", f"metadata[{key!r}]", known[key], low=low)
    if "param_limit" in known:
        known["param_limit"] = check_number("solve", "metadata['param_limit']", known["param_limit"], low=0)
    try:
        torch.empty(1, device=known.get("device", "cpu"))
    except (AssertionError, RuntimeError, TypeError) as error:
        got = f"{known['device']!r} ({str(error).splitlines()[0]})"
        fail("solve", "metadata['device']", "be a device of this machine", got, "Pass 'cpu'.")
    return known


@contextmanager
def comparable(function: str, argument: str) -> Iterator[None]:
    """Raise an InputError that blames an argument where its numbers are too far apart for arithmetic."""
    try:
        yield
    except FloatingPointError as error:
        remedy = "Mend the largest, or rescale their column."
        fail(function, argument, "hold numbers that can be compared", str(error), remedy)


@contextmanager
def untouched_globals() -> Iterator[None]:
    """Work on one thread, with gradients, and put thread count and global random states back afterwards.

    The matrices are small: a second thread gains little, costs a factor of ten where another process wants the
    core, and would make the result depend on the machine's count. A shuffling loader draws its seed from the
    global states.
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
