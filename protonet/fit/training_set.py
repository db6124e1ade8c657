"""Training sets: labelled and unlabelled rows that are read from loaders, sorted, scaled and without duplicates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from protonet._validation import check_labels, check_weights
from protonet.errors import InputTypeError, raise_input_error
from protonet.fit.duplicates import merge_duplicates
from protonet.losses import MAX_CHUNK_ROWS
from protonet.network import HIGH_PRECISION_DTYPES
from protonet.views.columns import select_columns
from protonet.views.view import CPU, TrainingRows


class ClassNameRows(NamedTuple):
    """Embedded class names, used as additional training rows that are never held out."""

    features: Tensor  #: (m, dim) features of the names, from `protonet.fit.names.embed_class_names`.
    labels: Tensor  #: (m,) int64: the class index of each name.
    sample_count: float  #: Number of samples that each name counts as.
    descriptions: tuple[str, ...] = ()
    """The description of each class, "" for a class without one. Empty if no class has a description."""

    def count_class_samples(self, num_classes: int) -> Tensor:
        """Compute for each class the number (num_classes,) int64 of samples that its name counts as, 0 without one."""
        return torch.bincount(self.labels, minlength=num_classes) * round(self.sample_count)


class UnlabelledSample(NamedTuple):
    """A sample of the unlabelled rows, to which views may be fitted."""

    features: Tensor  #: (m, dim) float32, in the units of the training set.
    indices: Tensor  #: (m,) int64: index of each row of the sample among all unlabelled rows.
    n_unlabelled: int  #: Number of all unlabelled rows.


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingSet:
    """Labelled rows as models are fitted to them: sorted, scaled and without duplicates. Many rows are sampled."""

    rows: TrainingRows  #: The rows, in an order that does not depend on the input; equal rows are merged.
    scale: float  #: The number by which input features were divided, after the origin was subtracted.
    origin: Tensor  #: (dim,) float32, subtracted from the input features; see `centre_columns`.
    n_duplicates: int  #: Number of input rows that are duplicates or near-duplicates of another one.
    row_indices: Tensor
    """(n,) int64: index in ``rows`` of each input row, in the order of the loaders; -1 for a row outside the sample."""
    rows_per_sample: float = 1.0
    """Number of distinct input rows divided by the number of rows in the sample; 1 if all rows are used."""
    unlabelled: UnlabelledSample | None = None  #: The unlabelled rows; None if there are none.
    device: torch.device = CPU  #: Device on which views are fitted; the tensors here are on the CPU.

    def add_unlabelled_rows(self, features: Tensor, indices: Tensor, total: int) -> TrainingSet:
        """Copy the training set with unlabelled rows added, which are scaled like the labelled rows.

        ``features`` (m, dim) are in input units, and may be a sample. ``indices`` (m,) are the indices of these
        rows among all ``total`` unlabelled rows.
        """
        scaled = ((features - self.origin) / self.scale).to(torch.float32)
        return replace(self, unlabelled=UnlabelledSample(scaled, indices, total))

    def pool_with_unlabelled_rows(self, max_labelled_rows: int) -> tuple[TrainingRows, Tensor]:
        """Return up to ``max_labelled_rows`` labelled rows, and their features stacked on those of unlabelled rows."""
        assert self.unlabelled is not None
        n = len(self.rows.labels)
        some = self.rows.select(torch.arange(0, n, -(-n // max_labelled_rows)))  # rows are sorted by label
        return some, torch.cat([some.features, self.unlabelled.features])

    def original_features(self, indices: Tensor) -> Tensor:
        """Compute the input features (m, dim) of the rows with these indices (m,), in their original units."""
        return to_input_units(self.rows.features[indices], self.origin, self.scale)


def to_input_units(rows: Tensor, origin: Tensor, scale: Tensor | float) -> Tensor:
    """Convert scaled rows (n, dim) back to input units: rows * scale + origin; float64 if float32 would lose digits."""
    x = rows * scale
    return x.double() + origin if bool(origin.any()) else x


def prepare_training_set(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    seed: int = 0,
    weights: Tensor | None = None,
    groups: Tensor | None = None,
    column_indices: Tensor | None = None,
    names: ClassNameRows | None = None,
) -> tuple[TrainingSet, Tensor | None]:
    """Build a training set from labelled samples: centre, sort, scale and merge rows, and sample many rows.

    Features (n, dim) must be finite; the other arguments are those of `protonet.fit.solver.fit_solution`. Returns the
    training set, and the group id (groups,) in it of each input group, in ascending order; None without groups.
    """
    n, is_class_name = len(labels), None
    if names is not None:
        n_groups = None if groups is None else len(groups.unique())
        features, labels, weights, groups, is_class_name = append_class_names(names, features, labels, weights, groups)
    if weights is not None:
        weights = check_weights("weights", weights, n=len(labels))
        weights = weights / weights.max()
    features, origin = centre_columns(features, weights)
    columns = select_columns(features, labels, weights, column_indices)
    order = canonical_row_order(features if columns is None else columns.apply(features), labels, weights)
    if groups is not None:
        groups = groups.unique(return_inverse=True)[1]
    rows = TrainingRows(
        features,
        labels,
        num_classes,
        seed=seed,
        weights=weights,
        groups=groups,
        column_indices=column_indices,
        columns=columns,
        is_class_name=is_class_name,
    ).select(order)
    scale = _compute_scale(rows.for_views().features, rows.weights) or 1.0
    rows.features.div_(scale)  # in place: these rows are a copy
    rows, repeated, joined, pooled = merge_duplicates(rows)
    distinct = len(rows.labels)
    rows, sampled = sample_training_rows(rows)
    pooled = sampled[pooled]
    rows = _scale_sample_weights(rows, n if names is None or n else names.sample_count * len(names.labels))
    indices = torch.empty_like(order).index_copy_(0, order, pooled)
    if names is not None and joined is not None:
        joined = joined[:n_groups]
    training_set = TrainingSet(
        rows=rows,
        scale=scale,
        origin=origin,
        n_duplicates=repeated,
        row_indices=indices[:n],
        rows_per_sample=distinct / len(rows.labels),
    )
    return training_set, joined


#: Maximum number of distinct rows in the sample. More rows change little, since feature maps (views) have at most 1,024
#: units and trees of 4,096 rows.
MAX_SAMPLED_ROWS = 32768
#: All rows of a class with at most this many rows are in the sample, unless there are many classes.
MAX_FULL_CLASS_ROWS = 512


def sample_training_rows(rows: TrainingRows) -> tuple[TrainingRows, Tensor]:
    """Sample about ``MAX_SAMPLED_ROWS`` rows, and weight them so that each class keeps its summed weight.

    The rows must be sorted by class. The sample is evenly spaced in each class, and has all rows of class names.
    Returns the sample, and for each row its index (n,) in the sample, -1 for rows that are not in it.

    Source: stratified systematic sampling, Cochran, "Sampling techniques" (1977), sec. 8.
    """
    labels, n = rows.labels, len(rows.labels)
    if n <= MAX_SAMPLED_ROWS:
        return rows, torch.arange(n)
    counts = torch.bincount(labels)
    equal_share = MAX_SAMPLED_ROWS // (2 * int((counts > 0).sum()))
    minimum = counts.clamp(max=min(MAX_FULL_CLASS_ROWS, equal_share))
    others = (counts - minimum) * ((MAX_SAMPLED_ROWS - int(minimum.sum())) / max(1, n - int(minimum.sum())))
    size, count = (minimum + others.long())[labels], counts[labels]  # (n,): rows of the class in the sample, and in all
    rank = torch.arange(n) - (counts.cumsum(dim=0) - counts)[labels]
    chosen = (rank + 1) * size // count > rank * size // count
    if rows.is_class_name is not None:
        chosen |= rows.is_class_name
    weights = torch.ones(n, dtype=torch.float64) if rows.weights is None else rows.weights
    factors = torch.bincount(labels, weights) / torch.bincount(labels[chosen], weights[chosen], minlength=len(counts))
    sample = replace(rows.select(chosen), weights=(weights * factors[labels])[chosen], row_fraction=rows.row_fraction)
    return sample, torch.where(chosen, chosen.cumsum(dim=0) - 1, -1)


def append_class_names(
    names: ClassNameRows, features: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Append embedded class names to training rows.

    Returns five parts: features, labels, weights, group ids or None, and a mask of the rows that are class names. Each
    name is a group of its own.
    """
    n, m = len(labels), len(names.labels)
    features, labels = torch.cat([features, names.features.to(features)]), torch.cat([labels, names.labels])
    weights = torch.ones(n, dtype=torch.float64) if weights is None else weights.double()
    mean = float(weights.mean()) if n else 1.0
    weights = torch.cat([weights, torch.full((m,), names.sample_count * mean, dtype=torch.float64)])
    if groups is not None:
        groups = torch.cat([groups, int(groups.max()) + 1 + torch.arange(m)])
    return features, labels, weights, groups, torch.arange(n + m) >= n


def _compute_scale(features: Tensor, weights: Tensor | None) -> float:
    """Compute the root mean square of features (n, dim), rounded to a power of two, which keeps all digits."""
    if weights is None:
        size = float(torch.linalg.vector_norm(features, dtype=torch.float64)) / math.sqrt(features.numel())
    else:
        energies = torch.linalg.vector_norm(features, dim=1, dtype=torch.float64).square()  # (n,)
        size = math.sqrt(float(weights @ energies / weights.sum()) / features.shape[1])
    return math.ldexp(1.0, round(math.log2(size))) if size else 0.0


def _scale_sample_weights(rows: TrainingRows, n: float) -> TrainingRows:
    """Scale sample weights to a maximum of 1, or remove equal ones, so that a row of weight 2 equals a repeated row."""
    if rows.weights is None:
        return rows
    weights = rows.weights / rows.weights.max()
    alike, samples = bool((weights == 1).all()), weights
    if rows.is_class_name is not None and not bool(rows.is_class_name.all()):
        samples = weights[~rows.is_class_name]
    return replace(rows, weights=None if alike else weights, sample_scale=n / float(samples.sum()))


MAX_VALUES = 2**30  #: Maximum number of features of all rows of an argument: 4 GB in float32. A loader may have no end.
LOADER_REMEDY = "Pass a DataLoader, a Dataset, a pair (x, y), or a list of such pairs."
UNLABELLED_REMEDY = "Pass a tensor (m, ...), or batches of inputs."
#: Labelled samples: batches ``(inputs, labels)``, a dataset of samples, or one pair of all inputs and all labels.
LabelledSamples = Iterable[Any] | Dataset[Any]
#: Unlabelled samples: a tensor or array (m, ...), or batches of inputs with or without labels.
UnlabelledSamples = Tensor | np.ndarray | Iterable[Any] | Dataset[Any]


def read_labelled_samples(
    train_loader: LabelledSamples, val_loader: LabelledSamples | None, metadata: Mapping[str, Any]
) -> tuple[Tensor, Tensor, int]:
    """Read all samples of two loaders in one pass; return their features, their labels and the number of classes.

    Features (n, dim) are float64 if a batch has more precision than float32, else float32. Labels (n,) are int64 in
    [0, num_classes). ``metadata`` may set ``input_dim`` and ``num_classes``. Raises the errors of `protonet.solve`.
    """
    if train_loader is None:
        raise_input_error("train_loader", "be a loader", "None", LOADER_REMEDY, kind=InputTypeError)
    features: list[Tensor] = []
    labels: list[Tensor] = []
    dim = metadata.get("input_dim")
    for name, loader in (("train_loader", train_loader), ("val_loader", val_loader)):
        rows = non_finite = out_of_range = 0
        first = len(labels)
        batches = (
            [loader]
            if _is_features_labels_pair(loader)
            else ()
            if loader is None
            else _iterate_batches(name, loader, LOADER_REMEDY)
        )
        n_values = 0
        for batch_index, batch in enumerate(batches):
            inputs, targets = _validate_labelled_batch(name, batch_index, batch)
            n_values = _count_values(name, n_values, inputs)
            if not len(inputs):
                continue
            dim = dim or inputs.shape[1]
            if not dim:
                raise_input_error(name, "have at least one feature", f"none in batch {batch_index}", "Pass features.")
            if inputs.shape[1] != dim:
                got = f"{inputs.shape[1]} in batch {batch_index}"
                remedy = "Check metadata['input_dim'] and that every batch has the same features."
                raise_input_error(name, f"have {dim} features per sample", got, remedy)
            rows += len(inputs)
            inputs = _to_float(inputs)
            single = inputs.to(torch.float32)
            underflows = bool(inputs.any()) and not bool(single.any())
            non_finite += int((~torch.isfinite(inputs)).any(dim=1).sum())
            out_of_range += int((~torch.isfinite(single)).any(dim=1).sum()) + underflows
            features.append(inputs)
            labels.append(targets)
        if name == "train_loader" and not rows:
            raise_input_error(name, "have at least one sample", "none", "Pass labelled samples.")
        if non_finite:
            got = f"NaN or infinity in {non_finite} of {rows} rows"
            raise_input_error(name, "be finite", got, "Drop or impute those rows.")
        if out_of_range:
            got = f"{out_of_range} values beyond it"
            raise_input_error(name, "lie within the range of float32", got, "Rescale them.")
        if rows:
            targets = torch.cat(labels[first:])
            check_labels(f"{name} labels", targets, n=rows, num_classes=metadata.get("num_classes"))
    y = torch.cat(labels).to(torch.int64)
    num_classes = metadata.get("num_classes") or max(2, int(y.max()) + 1)
    if "num_classes" not in metadata and num_classes > 1000 + 10 * len(y.unique()):
        got = f"{num_classes - 1} as the largest"
        remedy = "pass metadata['num_classes'] if classes without samples are intended."
        remedy = f"Encode the classes as 0, 1, ..., or {remedy}"
        raise_input_error("train_loader labels", "be class indices", got, remedy)
    return torch.cat(features), y, num_classes


def read_unlabelled_samples(source: object, dim: int, max_rows: int) -> tuple[Tensor, Tensor, int]:
    """Read unlabelled rows once, and sample up to ``max_rows`` of them by a hash of their values.

    The sample does not depend on the order of the rows. Returns three parts: the features (m, dim) of the sampled rows,
    their indices (m,) int64 in the source, and the number of all rows in the source. Raises an InputTypeError or
    InputError if the source does not hold rows of ``dim`` finite real numbers.
    """
    sampled, keys, indices = torch.empty(0, dim, dtype=torch.float32), np.empty(0, np.int64), np.empty(0, np.int64)
    total = n_values = 0
    for batch_index, batch in enumerate(_iterate_batches("unlabelled", source, UNLABELLED_REMEDY)):
        rows = _validate_unlabelled_batch(batch, batch_index, dim)
        n_values = _count_values("unlabelled", n_values, rows)
        if not len(rows):
            continue
        hashes = _hash_rows(rows)
        new = np.argsort(hashes, kind="stable")[:max_rows]
        sampled = torch.cat([sampled, rows[new]])
        keys, indices = np.concatenate([keys, hashes[new]]), np.concatenate([indices, total + new])
        chosen = np.lexsort((indices, keys))[:max_rows]
        sampled, keys, indices = sampled[chosen], keys[chosen], indices[chosen]
        total += len(rows)
    return sampled, torch.from_numpy(indices), total


def _count_values(name: str, n_values: int, batch: Tensor) -> int:
    """Add the size of a batch to a number of values; raise an InputError above ``MAX_VALUES``.

    An empty batch counts as 1,024 values, so that a loader that yields empty batches for ever is noticed as well.
    """
    n_values += batch.numel() or 1024
    if n_values > MAX_VALUES:
        got = f"more than {MAX_VALUES:,} values"
        remedy = "Pass fewer rows, and check that the loader ends."
        raise_input_error(name, f"have at most {MAX_VALUES:,} values, rows times features", got, remedy)
    return n_values


def _is_features_labels_pair(samples: object) -> bool:
    """Test whether samples are a pair of all inputs and all labels, not a sequence of batches."""
    return isinstance(samples, (tuple, list)) and len(samples) == 2 and isinstance(samples[0], (Tensor, np.ndarray))


def _iterate_batches(name: str, source: object, remedy: str) -> Iterable[Any]:
    """Iterate over the batches of a tensor, array, dataset or iterable; errors contain its ``name`` and ``remedy``."""
    if isinstance(source, (Tensor, np.ndarray)):
        return (source[first : first + MAX_CHUNK_ROWS] for first in range(0, len(source), MAX_CHUNK_ROWS))
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        if not hasattr(source, "__len__"):
            got = type(source).__name__
            raise_input_error(name, "be a dataset that has a length", got, remedy, kind=InputTypeError)

        def collate(samples: list[Any]) -> Any:
            try:
                return default_collate(samples)
            except (RuntimeError, TypeError) as error:
                got = str(error).partition("\n")[0][:100]
                constraint = "hold samples (inputs, label) of numbers, of one shape"
                raise_input_error(name, constraint, got, "Convert them.", kind=InputTypeError)

        return DataLoader(source, batch_size=MAX_CHUNK_ROWS, collate_fn=collate)
    if not isinstance(source, Iterable) or isinstance(source, (str, bytes)):
        raise_input_error(name, "be iterable", type(source).__name__, remedy, kind=InputTypeError)
    return source


def _validate_labelled_batch(name: str, batch_index: int, batch: object) -> tuple[Tensor, Tensor]:
    """Validate batch ``batch_index`` of the loader ``name``; return inputs (b, dim) and labels (b,) on the CPU."""
    constraint, remedy = "give (inputs, labels) batches", "Wrap the data in a TensorDataset(inputs, labels)."
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        got = f"{type(batch).__name__} in batch {batch_index}"
        got += f" of {len(batch)} items" if isinstance(batch, (tuple, list)) else ""
        raise_input_error(name, constraint, got, remedy, kind=InputTypeError)
    inputs, labels = map(_to_tensor, batch)
    if inputs is None or labels is None:
        got = f"({type(batch[0]).__name__}, {type(batch[1]).__name__}) in batch {batch_index}"
        raise_input_error(name, constraint + " of real tensors", got, remedy, kind=InputTypeError)
    if inputs.ndim < 2 or labels.numel() != len(inputs):
        got = f"shapes {tuple(inputs.shape)} and {tuple(labels.shape)} in batch {batch_index}"
        raise_input_error(name, constraint + " of shapes (b, ...) and (b,)", got, remedy)
    return inputs.flatten(1), labels.reshape(-1)


def _validate_unlabelled_batch(batch: object, batch_index: int, dim: int) -> Tensor:
    """Validate batch ``batch_index`` of inputs, perhaps with labels; return the inputs (b, dim) on the CPU."""
    first = batch[0] if isinstance(batch, (tuple, list)) and 1 <= len(batch) <= 2 else batch
    inputs = _to_tensor(first)
    if inputs is None:
        got = f"{type(first).__name__} in batch {batch_index}"
        raise_input_error("unlabelled", "hold rows of real numbers", got, UNLABELLED_REMEDY, kind=InputTypeError)
    if inputs.ndim < 2 or (len(inputs) and math.prod(inputs.shape[1:]) != dim):
        got = f"shape {tuple(inputs.shape)} in batch {batch_index}"
        constraint = f"have {dim} features per row, as the labelled rows have"
        raise_input_error("unlabelled", constraint, got, "Pass the features of the labelled rows.")
    rows = inputs.flatten(1)
    bad = int((~torch.isfinite(rows.to(torch.float32))).any(dim=1).sum())
    if bad:
        got = f"NaN, infinity or more than float32 holds in {bad} of {len(rows)} rows of batch {batch_index}"
        raise_input_error("unlabelled", "be finite", got, "Drop or impute those rows.")
    return _to_float(rows)


def _to_float(rows: Tensor) -> Tensor:
    """Convert rows to float32, or to float64 if their type has more digits than float32, which centring needs."""
    return rows.to(torch.float64 if rows.dtype in HIGH_PRECISION_DTYPES else torch.float32)


def _to_tensor(part: object) -> Tensor | None:
    """Convert an array or tensor of real numbers to a tensor on the CPU; None for any other object."""
    if isinstance(part, np.ndarray):  # it may be read-only or reversed
        return torch.from_numpy(np.array(part)) if part.dtype.kind in "biuf" else None
    return part.detach().cpu() if isinstance(part, Tensor) and not part.is_complex() else None


def _hash_rows(rows: Tensor) -> np.ndarray:
    """Compute an int64 hash (n,) of the values of each row (n, dim), by which rows are sampled."""
    bits = rows.to(torch.float32).add(0.0).numpy().view(np.int32).astype(np.int64)  # -0.0 becomes 0.0
    odd = np.random.default_rng(0).integers(0, 2**62, rows.shape[1]) * 2 + 1
    mixed = (bits * odd).sum(axis=1)
    spread: np.ndarray = (mixed ^ (mixed >> 29)) * np.int64(0x1B873593CC9E2D51)
    return spread


def centre_columns(features: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Centre the columns whose mean is so large that float32 would lose the differences between rows.

    Features are (n, dim); weights (n,) > 0 weight the rows in the mean. Returns the features (n, dim) float32, and the
    subtracted numbers (dim,) float32. A column that is not centred has the subtracted number 0. Raises an InputError if
    a column of float64 features varies too little around its mean.
    """
    # Columns with a lower ratio are centred: float32 would keep less than four digits of differences between rows.
    max_ratio_centred = 1e-3
    # Float32 columns with a lower ratio count as constant: the differences between rows are rounding errors.
    max_ratio_constant_float32 = 1e-6
    # Float64 columns with a lower ratio count as constant: the differences between rows are rounding errors.
    max_ratio_constant_float64 = 1e-15
    # Float64 columns with a ratio from ``max_ratio_constant_float64`` to this are an error. The subtracted mean is
    # stored in float32, so that what is left of it would cost more than two digits of the differences.
    min_ratio_float64 = 1e-12
    parts = features.split(MAX_CHUNK_ROWS)
    weight_parts = [None] * len(parts) if weights is None else (weights / weights.mean()).split(MAX_CHUNK_ROWS)

    def average(values: Iterable[Tensor]) -> Tensor:
        """Compute the weighted mean (dim,) float64 of rows, which are given as consecutive chunks (m, dim)."""
        sums = (
            part.sum(dim=0, dtype=torch.float64) if weight_part is None else weight_part @ part.double()
            for part, weight_part in zip(values, weight_parts, strict=True)
        )
        return cast(Tensor, sum(sums)) / len(features)

    mean = average(parts)
    square = average((part - mean).square() for part in parts)
    ratio = square.sqrt() / mean.abs().clamp_min(torch.finfo(torch.float64).tiny)
    precision_limit = max_ratio_constant_float32 if features.dtype == torch.float32 else max_ratio_constant_float64
    lost = (ratio > precision_limit) & (ratio < min_ratio_float64)
    if bool(lost.any()):
        column = int(lost.nonzero()[0])
        spread, centre = float(square[column].sqrt()), float(mean[column])
        got = f"a standard deviation of {spread:.3g} around {centre:.3g} in column {column}"
        constraint = "vary by more than 1e-12 of their mean"
        raise_input_error("features", constraint, got, "Subtract the mean of the column first.")
    far = (ratio > precision_limit) & (ratio < max_ratio_centred)
    origin = torch.where(far, mean, 0.0).to(torch.float32)
    if not bool(far.any()):
        return features.to(torch.float32), origin
    return torch.cat([(part - origin).to(torch.float32) for part in parts]), origin


def canonical_row_order(features: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute a canonical order of rows, which does not depend on the given order, the units and the class indices.

    Returns indices (n,) that sort the features (n, dim) float32. Rows of one class are adjacent; classes are sorted by
    their total weight, then by moments of the standardised values. The rows of a class are sorted by such moments, too,
    and equal rows are adjacent. Features of -0.0 become 0.0 in place.
    """
    rows = features.add_(0.0).numpy()
    keys = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize)))[:, 0]
    order = torch.from_numpy(np.argsort(keys, kind="stable"))
    weights = torch.ones_like(labels, dtype=torch.float64) if weights is None else weights.double()
    weights = weights / weights.sum()
    parts, weight_parts = features.split(MAX_CHUNK_ROWS), weights.split(MAX_CHUNK_ROWS)
    mean = sum(weight_part @ part.double() for part, weight_part in zip(parts, weight_parts, strict=True))
    square = sum(weight_part @ (part - mean).square() for part, weight_part in zip(parts, weight_parts, strict=True))
    gain = torch.where(square > 0, torch.as_tensor(square).rsqrt(), 0.0)
    values = [(part - mean) * gain for part in parts]
    powers = [torch.cat([value.pow(power).mean(dim=1) for value in values]) for power in (2, 3)]  # two tensors (n,)
    class_index = labels.unique(return_inverse=True)[1]
    totals = [torch.bincount(class_index, weights * values) for values in (torch.ones_like(weights), *powers)]
    ranks = np.lexsort([_round_statistics(values) for values in reversed(totals)]).argsort()  # (classes with samples,)
    by_statistics = [_round_statistics(values[order]) for values in reversed(powers)]
    return order[torch.from_numpy(np.lexsort([*by_statistics, ranks[class_index[order].numpy()]]))]


#: Rows are sorted by statistics that are rounded to multiples of this. Rounding errors after a change of units then do
#: not change the order.
ROUNDING_STEP = 1e-5


def _round_statistics(values: Tensor) -> np.ndarray[Any, Any]:
    """Divide statistics (n,) by ``ROUNDING_STEP``, and round the quotients (n,) to integers."""
    rounded: np.ndarray[Any, Any] = np.round(values.numpy() / ROUNDING_STEP)
    return rounded
