"""solve(): loaders in, PrototypeNetwork out."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protonet._checks import check_int, check_labels, check_number, fail, fail_type
from protonet.encoder import Encoder, ResidualMLPs, plan_encoder
from protonet.network import PrototypeNetwork
from protonet.radial import RADIAL_KINDS, RadialView, fit_radial
from protonet.selection import Choice, select
from protonet.training import Task, train
from protonet.views import CHUNK, LinearView, fit_view

#: The contest's limit, used where the metadata names none.
PARAM_LIMIT = 500_000
#: Seconds that solve() may take by default: well inside the contest's hour.
TIME_LIMIT = 900.0
#: Of the time limit, what selection may use; the rest is for the final fit.
SELECTION_SHARE = 0.6


def solve(
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    *,
    time_limit: float = TIME_LIMIT,
    seed: int = 0,
) -> PrototypeNetwork:
    """Train a prototype network on two loaders, within a parameter limit.

    The labelled samples of both loaders are pooled and put in a canonical order, so that the same data in any
    order or batch size give the same model. Each loader is read once.

    Args:
        train_loader: Batches ``(inputs, labels)``: inputs (b, ...) real, flattened to (b, input_dim); labels (b,)
            integers.
        val_loader: The same, or None. Its samples count as labelled samples like any other.
        metadata: ``input_dim``, ``num_classes`` and ``param_limit`` are used where present; otherwise the width of
            the inputs, the largest label + 1 (at least 2) and 500,000. ``device`` moves the result. None is legal.
        time_limit: Seconds, >= 0, most of them for the search; what it found by then is fitted and returned.
        seed: Of folds, initial weights and episodes. Global random state is neither used nor changed.

    Returns:
        The network in eval mode, float32. Its trainable parameters are the encoder's, at most ``param_limit``.

    Raises:
        TypeError: A loader's batch is not ``(inputs, labels)``, labels are not integers, an argument has another type.
        ValueError: No sample, non-finite features, labels outside [0, num_classes), another width than input_dim,
            num_classes < 2, a negative or non-finite limit.
    """
    started = time.monotonic()
    metadata = _check_metadata(metadata)
    time_limit = check_number("solve", "time_limit", time_limit, low=0)
    seed = check_int("solve", "seed", seed, low=0, high=2**63 - 1)
    with _untouched_globals(), torch.inference_mode(False), torch.enable_grad():
        features, labels, num_classes = _read(train_loader, val_loader, metadata)
        features, labels = _canonical(features, labels)
        plan = plan_encoder(features.shape[1], num_classes, metadata.get("param_limit", PARAM_LIMIT))
        scale = float(torch.linalg.vector_norm(features, dtype=torch.float64)) / math.sqrt(features.numel()) or 1.0
        unit = features.div_(scale)  # in place: these rows are a copy
        choice = select(unit, labels, num_classes, plan, seed=seed, deadline=started + SELECTION_SHARE * time_limit)
        encoder = _fit_encoder(unit, labels, num_classes, plan.embedding_dim, choice, seed, started + time_limit)
        network = PrototypeNetwork(
            encoder,
            embedding_dim=encoder.embedding_dim,
            num_classes=num_classes,
            temperature=choice.temperature,
        )
        network.set_prototypes(unit, labels)
        encoder.scale.fill_(scale)
        return network.to(metadata.get("device", "cpu")).eval()


def _fit_encoder(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    embedding_dim: int,
    choice: Choice,
    seed: int,
    deadline: float,
) -> Encoder:
    """Fit the chosen views and train the chosen MLPs on all labelled samples."""
    kinds = {kind.name: kind for kind in RADIAL_KINDS}
    fitted: dict[str, LinearView] = {}
    views: list[LinearView | RadialView] = []
    names = [choice.reads, *(name for name in choice.weights if name != choice.reads)]
    for name in names:
        source = kinds[name].reads if name in kinds else name
        if source not in fitted:
            fitted[source] = fit_view(source, features, labels, num_classes)
        view: LinearView | RadialView = fitted[source]
        if name in kinds:
            view = fit_radial(kinds[name], choice.settings[name], fitted[source], features, labels, num_classes)
        views.append(view)
    weights = [choice.weights.get(name, 0.0) for name in names]
    members, width = choice.rung
    if not members:
        return Encoder(views, torch.tensor(weights))
    generator = torch.Generator().manual_seed(seed)
    learned = ResidualMLPs(members, features.shape[1], width, embedding_dim, generator)
    task = Task(torch.cat([views[0](rows) for rows in features.split(CHUNK)]), labels)
    for _, average in train(
        learned, [task] * members, num_classes, steps=[choice.steps], generator=generator, deadline=deadline
    ):
        learned = average.requires_grad_(True)
    weights += [choice.learned / members] * members
    return Encoder(views, torch.tensor(weights), learned=learned)


def _check_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entries that solve() uses, checked; absent and None entries are left out."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        fail_type("solve", "metadata", "be a mapping or None", type(metadata).__name__, "Pass a dict.")
    known = {key: metadata[key] for key in ("num_classes", "input_dim", "param_limit", "device") if key in metadata}
    known = {key: value for key, value in known.items() if value is not None}
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


def _read(
    train_loader: Iterable[Any], val_loader: Iterable[Any] | None, metadata: Mapping[str, Any]
) -> tuple[Tensor, Tensor, int]:
    """Return features (n, dim) float32 and labels (n,) of both loaders, and the number of classes."""
    if train_loader is None:
        fail_type("solve", "train_loader", "be a loader", "None", "Pass a DataLoader or a list of batches.")
    features: list[Tensor] = []
    labels: list[Tensor] = []
    dim = metadata.get("input_dim")
    for name, loader in (("train_loader", train_loader), ("val_loader", val_loader)):
        if loader is not None and not isinstance(loader, Iterable):
            fail_type("solve", name, "be iterable", type(loader).__name__, "Pass a DataLoader or a list of batches.")
        rows = bad = wide = 0
        first = len(labels)
        for number, batch in enumerate(() if loader is None else loader):
            inputs, targets = _check_batch(name, number, batch)
            if not len(inputs):
                continue
            dim = dim or inputs.shape[1]
            if inputs.shape[1] != dim:
                remedy = "Check metadata['input_dim'] and that every batch has the same features."
                fail("solve", name, f"have {dim} features a sample", f"{inputs.shape[1]} in batch {number}", remedy)
            rows += len(inputs)
            single = inputs.to(torch.float32)
            bad += int((~torch.isfinite(inputs)).any(dim=1).sum())
            wide += int((~torch.isfinite(single)).any(dim=1).sum()) + int(bool(inputs.any()) and not bool(single.any()))
            features.append(single)
            labels.append(targets)
        if name == "train_loader" and not rows:
            fail("solve", name, "have at least one sample", "none", "Pass labelled samples.")
        if bad:
            fail("solve", name, "be finite", f"NaN or infinity in {bad} of {rows} rows", "Drop or impute those rows.")
        if wide:
            fail(
                "solve", name, "lie within the range of float32", f"values beyond it in {wide} places", "Rescale them."
            )
        if rows:
            targets = torch.cat(labels[first:])
            check_labels("solve", f"{name} labels", targets, n=rows, num_classes=metadata.get("num_classes"))
    y = torch.cat(labels).to(torch.int64)
    num_classes = metadata.get("num_classes") or max(2, int(y.max()) + 1)
    if "num_classes" not in metadata and num_classes > 1000 + 10 * len(y.unique()):
        remedy = "Number the classes 0, 1, ..., or pass metadata['num_classes'] if the gaps are meant."
        fail("solve", "train_loader labels", "be class numbers", f"{num_classes - 1} as the largest", remedy)
    return torch.cat(features), y, num_classes


def _check_batch(name: str, number: int, batch: object) -> tuple[Tensor, Tensor]:
    """Return the inputs (b, dim) and labels (b,) of one batch, on the CPU."""
    constraint, remedy = "give (inputs, labels) batches", "Wrap the data in a TensorDataset(inputs, labels)."
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        got = f"{type(batch).__name__} in batch {number}"
        got += f" of {len(batch)} items" if isinstance(batch, (tuple, list)) else ""
        fail_type("solve", name, constraint, got, remedy)
    inputs, labels = (_from_numpy(part) if isinstance(part, np.ndarray) else part for part in batch)
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor) or inputs.is_complex():
        got = f"({type(batch[0]).__name__}, {type(batch[1]).__name__}) in batch {number}"
        fail_type("solve", name, constraint + " of real tensors", got, remedy)
    if inputs.ndim < 2 or labels.numel() != len(inputs):
        got = f"shapes {tuple(inputs.shape)} and {tuple(labels.shape)} in batch {number}"
        fail("solve", name, constraint + " of shapes (b, ...) and (b,)", got, remedy)
    flat = inputs.detach().reshape(len(inputs), -1) if len(inputs) else inputs.detach()  # (b, dim)
    return flat.cpu(), labels.detach().cpu().reshape(-1)


def _from_numpy(part: np.ndarray[Any, Any]) -> Tensor | None:
    """Return a copy as a tensor, also of read-only and reversed arrays; None if it does not hold numbers."""
    return torch.from_numpy(np.array(part)) if part.dtype.kind in "biuf" else None


def _canonical(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sort rows by label, then by their bytes: the order that the loaders gave them in leaves no trace."""
    rows = features.add_(0.0).numpy()  # -0.0 becomes 0.0
    keys = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize)))[:, 0]
    order = np.argsort(keys, kind="stable")
    order = order[np.argsort(labels.numpy()[order], kind="stable")]
    chosen = torch.from_numpy(order)
    return features[chosen], labels[chosen]


@contextmanager
def _untouched_globals() -> Iterator[None]:
    """Work on one thread, and put thread count and global random states back afterwards.

    The matrices are small: a second thread gains little, costs a factor of ten where another process wants the
    core, and would make the result depend on the machine's count. A shuffling loader draws its seed from the
    global states.
    """
    threads = torch.get_num_threads()
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 - the global state itself
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])
