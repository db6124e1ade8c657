"""Functions that the commands share: read and write models, read tables for them, predict, show progress."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from protonet import files
from protonet._progress import progress_bar
from protonet.commands.figures import subtract_name_samples
from protonet.commands.options import DEFAULT_LABEL, check_model_path, parse_missing
from protonet.embeddings.opening import AUTO, NONE, get_modality, reopen
from protonet.embeddings.pictures.reading import are_pictures
from protonet.embeddings.representation import Record, Representation
from protonet.errors import raise_input_error, renamed_arguments
from protonet.files import Model, save_model
from protonet.fit.active import Suggestion, suggest_rows
from protonet.fit.crossfit import Crossfit, list_tensors, measure_held_out, score_frequent, score_held_out
from protonet.fit.search import Progress
from protonet.fit.uninformative import (
    compute_uninformative_logits,
    describe_uninformative,
    parse_counts,
    replace_uninformative,
)
from protonet.metrics import calibrate, measure, measure_classes
from protonet.network import PrototypeNetwork
from protonet.tables.columns.encoding import Encoding
from protonet.tables.delimited import MISSING_TEXTS
from protonet.tables.drift import DriftMonitor, monitor_drift
from protonet.tables.features import check_column_types, encode_block
from protonet.tables.numeric_formats import convert_numeric, detect_numeric_conversion
from protonet.tables.table import ReadSpec, RowBlock, Table, format_names, open_table, read_table
from protonet.ui.text import count

#: The tensor of a model file with the hashes of all training rows, by which `update` detects repeated ones.
TRAINING_HASHES = "given"
#: The largest feature, relative to the scale of the training rows, whose square fits into float32.
MAX_SCALE = 2.0**60
#: The maximal rows of a batch, and the multiple to which they are padded: a vector of float32 (AVX-512).
BATCH, ALIGNMENT = 256, 16
#: The maximal number of blocks classified at a time.
MAX_THREADS = 8

Result = TypeVar("Result")


def read_model(path: str | Path, *, for_update: bool = False, argument: str = "model") -> Model:
    """Read a model file as `load_model`; errors name a command's argument."""
    check_model_path(path, argument)
    with renamed_arguments(path=argument):
        return files.read_model(path, for_update=for_update, writer="fit")


def write_model(path: str | Path, model: Model, argument: str = "--output") -> None:
    """Write a model file as `save_model`; errors name a command's argument."""
    with renamed_arguments(path=argument, model=argument):
        save_model(path, model)


def open_model(options: argparse.Namespace, *, for_update: bool = False, argument: str = "model") -> Model:
    """Read a command's model with the pretrained encoders of its texts and pictures.

    Raises:
        MissingPackageError: A package of an encoder is missing.
        InputError: As `load_model`; the encoder differs from that of fit or is missing; the table has pictures and the
            model has none, or the reverse.
    """
    model = read_model(options.model, for_update=for_update, argument=argument)
    table = None if options.table is None else Path(options.table)
    if table is None:
        return model
    if not has_pictures(model):
        if are_pictures(table):
            got, remedy = f"the pictures {table}", "Pass a table, or train on pictures."
            raise_input_error("table", "be a table, as in fit", got, remedy)
    elif table.suffix.lower() in {".npy", ".npz"}:
        remedy = "Pass a folder of them, or a table with their paths in that column."
        raise_input_error("table", "have pictures, as in fit", table, remedy)
    return attach_encoders(model, options.representation, shown=not options.quiet)


def attach_encoders(model: Model, names: Sequence[str] | None, *, shown: bool, kept: bool = True) -> Model:
    """Return a model with the pretrained encoders of its texts and pictures.

    Args:
        model: The model as read from a file.
        names: The names, folders or files of encoders, from the command line, or None.
        shown: Whether to show progress.
        kept: Whether to cache embeddings.

    Raises:
        MissingPackageError: A package of an encoder is missing.
        InputError: An encoder differs from that of fit, or is missing.
    """
    columns = () if model.encoding is None else model.encoding.columns

    def find(record: Record) -> Representation:
        return replace(reopen(record, names), use_cache=kept)

    attached = tuple(column.attach(find, show_progress=shown) for column in columns)
    modalities = {column.modality for column in columns if column.record is not None}
    for name in names or ():
        if name not in {AUTO, NONE} and get_modality(name) not in modalities:
            must = f"come with a model whose {get_modality(name)}s a pretrained encoder read in fit"
            raise_input_error("representation", must, f"{name} and another model", "Leave it out.")
    return model if model.encoding is None else model._replace(encoding=Encoding(attached))


def has_pretrained_encoder(model: Model) -> bool:
    """Check whether a pretrained encoder reads a column of a model."""
    columns = () if model.encoding is None else model.encoding.columns
    return any(column.record is not None for column in columns)


def has_pictures(model: Model) -> bool:
    """Check whether a model reads pictures, from a folder or a column."""
    return model.encoding is not None and any(column.modality == "picture" for column in model.encoding.columns)


def get_label_column(option: str | None, model: Model | None) -> str:
    """Return the column of the labels: the option's, or that of fit."""
    return option or (DEFAULT_LABEL if model is None else str(model.metadata.get("label", DEFAULT_LABEL)))


def make_read_spec(model: Model, label: str | None, *, labelled: bool, extra: str | None = None) -> ReadSpec:
    """Specify how to read a table for a model.

    Args:
        model: The model; the table may have further columns.
        label: The column of the labels; None for that of fit.
        labelled: Whether labels are required.
        extra: A further column to read, or None.
    """
    dropped = model.metadata.get("left_out")
    ignored = tuple(map(str, dropped)) if isinstance(dropped, list) else ()
    columns, width, extras = model.columns, len(get_column_sizes(model)), () if extra is None else (extra,)
    spec = ReadSpec(get_label_column(label, model), labelled, columns, width, extras, ignored)
    return spec._replace(missing_texts=get_missing(model))


def get_missing(model: Model) -> frozenset[str]:
    """Return the missing values of fit, in lower case; an invalid entry of the file gives the default."""
    values = model.metadata.get("missing_values")
    if isinstance(values, list) and all(type(value) is str for value in values):
        return parse_missing(values)
    return MISSING_TEXTS


def open_rows(options: argparse.Namespace, model: Model, spec: ReadSpec, labels: Path | None = None) -> Table:
    """Open a command's table for a model.

    Its notes report cells that do not match the type of their column and, after all rows are read, columns that drifted
    and rows without information.

    Raises:
        MissingPackageError: As `open_table`.
        InputError: As `open_table`; or the type of a column differs from fit in the first rows.
    """
    spec = spec._replace(skip_broken=options.skip_broken, sheet=options.sheet)
    table = open_table(Path(options.table), spec, labels)
    table = convert_numeric(table, model.encoding, decimal=vars(options).get("decimal_mark"))
    first = next(table.blocks)
    table.notes.extend(check_column_types(table, first, model.encoding))
    blocks = monitor_drift(chain([first], table.blocks), make_drift_monitor(model), table)
    return table._replace(blocks=mark_uninformative(blocks, model, table))


def mark_uninformative(blocks: Iterable[RowBlock], model: Model, table: Table) -> Iterator[RowBlock]:
    """Mark the rows without information of each block; note their number after the last."""
    rows = 0
    for block in blocks:
        uninformative = detect_uninformative(model, block)
        rows += int(uninformative.sum())
        yield block._replace(uninformative=uninformative)
    if rows and predict_uninformative(model) is not None:
        table.notes.append(describe_uninformative(rows))


def detect_uninformative(model: Model, block: RowBlock) -> np.ndarray:
    """Detect the rows (b,) bool of a block that have no informative cell."""
    encoding = model.encoding
    return np.zeros(len(block.positions), bool) if encoding is None else encoding.is_uninformative(block.columns)


def predict_uninformative(model: Model) -> Tensor | None:
    """Compute the logits (num_classes,) of a row without information; None if the network predicts it."""
    counts, classes = torch.tensor(count_samples(model)), len(model.classes)
    if model.metadata.get("balanced") or not bool(counts.any()):
        return compute_uninformative_logits(model.network.seen, torch.zeros(classes))
    return compute_uninformative_logits(counts, parse_counts(model.metadata.get("uninformative"), classes))


def read_labelled(options: argparse.Namespace, model: Model, extra: str | None = None) -> tuple[Table, RowBlock]:
    """Read all rows of a command's labelled table for a model, with the notes of `open_rows`.

    Raises:
        MissingPackageError: As `read_table`.
        InputError: As `read_table`; or the type of a column differs from fit.
    """
    spec = make_read_spec(model, options.label, labelled=True, extra=extra)
    spec = spec._replace(skip_broken=options.skip_broken, sheet=options.sheet)
    table, block = read_table(Path(options.table), spec, options.labels_file and Path(options.labels_file))
    conversion = detect_numeric_conversion(table, block, model.encoding, decimal=options.decimal_mark)
    block = conversion.apply(block, model.encoding)
    monitor = make_drift_monitor(model)
    monitor.update(block)
    types = check_column_types(table, block, model.encoding)
    table.notes.extend([*conversion.notes, *types, *monitor.summary(table)])
    return table, block


def make_drift_monitor(model: Model) -> DriftMonitor:
    """Create the comparison of new rows with the columns of fit."""
    return DriftMonitor(model.metadata.get("seen"), model.encoding, len(get_column_sizes(model)))


def get_column_sizes(model: Model) -> list[int]:
    """Return the number of features of each column."""
    return [1] * int(model.network.encoder.input_dim) if model.encoding is None else model.encoding.sizes  # type: ignore[arg-type]


def get_column_names(model: Model) -> Sequence[str]:
    """Return the name of each column; "column 3" for the fourth one of a table without names."""
    return model.columns or [f"column {index}" for index in range(len(get_column_sizes(model)))]


def warn_cancelled_classes(network: PrototypeNetwork, classes: Sequence[str | int]) -> list[str]:
    """Warn of classes that have no prototype because the embeddings of their rows cancel."""
    names = [str(classes[label]) for label in network.cancelled.nonzero().flatten().tolist()]
    return [f"warning: the rows of {format_names(names)} cancel: no prototype, never predicted"] if names else []


def collect_notes(table: Table) -> list[str]:
    """Collect the notes of a table and its unused columns, one line each."""
    names = list(table.unused)
    more = [f"{count(len(names), 'column')} of the table not used: {format_names(names)}"] if names else []
    return [*table.notes, *more]


def show_notes(table: Table, *, quiet: bool) -> None:
    """Print the notes of a table to stderr. Commands do so after the work, since an error is printed alone."""
    for note in collect_notes(table) * (not quiet):
        print(f"note: {note}", file=sys.stderr)


def get_class_indices(labels: np.ndarray, known: Sequence[str | int]) -> Tensor:
    """Convert labels (n,) to class indices (n,) int64; the labels 7 and "7" are equal.

    Raises:
        InputError: A class is not known.
    """
    indices = {str(name): index for index, name in enumerate(known)}
    names, inverse = np.unique(labels.astype(str), return_inverse=True)
    unknown = [name for name in names.tolist() if name not in indices]
    if unknown:
        got = f"{unknown[0]!r}" + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else "")
        raise_input_error("table", "have classes that the model knows", got, "Add them with protonet update.")
    return torch.tensor([indices[name] for name in names.tolist()])[torch.from_numpy(inverse)]


def classify_block(model: Model, table: Table, block: RowBlock) -> Tensor:
    """Compute the logits (b, num_classes) of a block of a table.

    Raises:
        InputError: As `protonet.tables.features.encode_block` and `predict_logits`.
    """
    return predict_logits(model, encode_block(table, block, model.encoding), block.uninformative)


def suggest(
    network: PrototypeNetwork | None,
    x: Tensor,
    n: int,
    names: Sequence[str],
    *,
    rows: Tensor,
    known: Tensor | None = None,
    by_name: Tensor | None = None,
) -> list[Suggestion]:
    """Suggest some of the ``rows`` (m,) int64 of a table, as `protonet.fit.active.suggest_rows`.

    Raises:
        InputError: As `suggest_rows`; errors name a command's argument.
    """
    with renamed_arguments(n="-n", x="table"):
        by_name = None if by_name is None else by_name[rows]
        chosen = suggest_rows(network, x if len(rows) == len(x) else x[rows], n, names, known=known, by_name=by_name)
    return [suggestion._replace(row=int(rows[suggestion.row])) for suggestion in chosen]


@torch.inference_mode()
def predict_logits(model: Model, x: np.ndarray, uninformative: np.ndarray | None = None) -> Tensor:
    """Compute the logits (n, num_classes) of rows (n, dim) float32 or float64.

    The logits of a row do not depend on the other rows, to the last digit. Products of few rows, and remainders of
    vectors, use other instructions; therefore each batch is padded with repeated rows.

    Args:
        model: The model.
        x: The features.
        uninformative: (n,) bool: rows without information, which get `predict_uninformative`; None for none.

    Raises:
        InputError: The embedding of a row overflows.
    """
    padded = torch.from_numpy(np.resize(x, (-(-len(x) // ALIGNMENT) * ALIGNMENT, x.shape[1])))
    logits = torch.cat([model.network(rows) for rows in padded.split(BATCH)])[: len(x)]
    far = float(model.network.encoder.scale) * MAX_SCALE  # type: ignore[arg-type]
    lost = ~logits.isfinite().all(dim=1) | torch.from_numpy(np.abs(x).max(axis=1) > far)
    if bool(lost.any()):
        got = f"{np.abs(x[lost.numpy()][0]).max():g} as the largest value of a row"
        raise_input_error("table", "have numbers of the scale of the training data", got, "Correct or drop the row.")
    if uninformative is not None and uninformative.any():
        replace_uninformative(logits, torch.from_numpy(uninformative), predict_uninformative(model))
    return logits


@contextmanager
def show_progress(*, quiet: bool = False) -> Iterator[Progress]:
    """Show a progress bar on stderr if the work takes long.

    Yields:
        A function that takes the current stage and the completed fraction.
    """
    form = "{desc}: {percentage:.0f} %|{bar}| {elapsed}, {remaining} left"
    # smoothing=0: the remaining time follows from the mean speed; miniters=0: every step is shown.
    with progress_bar(total=1.0, bar_format=form, smoothing=0, miniters=0, leave=False, shown=not quiet) as bar:

        def show(stage: str, fraction: float) -> None:
            bar.set_description_str(stage, refresh=False)
            bar.update(fraction - bar.n)

        yield show


def map_blocks(
    function: Callable[[RowBlock], Result],
    blocks: Iterable[RowBlock],
    *,
    rows: int | None = None,
    quiet: bool = False,
    sequential: bool = False,
) -> Iterator[Result]:
    """Apply a function to each block, in order, and show the progress in rows on stderr if it takes long.

    Each block is processed by one thread. Threads that share a block would wait for each other at each of its small
    matrices, which takes five times as long if another process uses a core.

    Args:
        function: The function of a block.
        blocks: The blocks.
        rows: The number of all rows, for the remaining time; None if unknown.
        quiet: Whether to hide the progress.
        sequential: Process one block after the other, for functions that use all cores, such as pretrained encoders.
    """
    if sequential:
        yield from map(function, blocks)
        return
    threads = torch.get_num_threads()
    ahead = min(threads, MAX_THREADS)
    torch.set_num_threads(1)
    try:
        bar = progress_bar(total=rows, unit="row", unit_scale=True, leave=False, shown=not quiet)
        with bar, ThreadPoolExecutor(ahead) as pool:
            waiting: deque[Future[Result]] = deque()
            for block in blocks:
                waiting.append(pool.submit(function, block))
                bar.update(len(block.positions))
                if len(waiting) > 2 * ahead:  # bounds the memory of a long table
                    yield waiting.popleft().result()
            for result in waiting:
                yield result.result()
    finally:
        torch.set_num_threads(threads)


def count_samples(model: Model) -> list[int]:
    """Count the samples of each class, without those that class names count as."""
    return subtract_name_samples(model.network.counts.tolist(), model.classes, model.metadata.get("named"))


def attach_cv_results(model: Model, crossed: Crossfit, groups: dict[str, int], hashes: Tensor) -> Model:
    """Return a model with its cross-validation results and the data that updates need.

    Args:
        model: The model.
        crossed: The held-out rows and cross-validation networks.
        groups: The index of each group, by name.
        hashes: (n,) of all training rows, by `protonet.fit.duplicates.hash_rows`.
    """
    samples = count_samples(model._replace(network=crossed.whole))
    metadata = model.metadata | {"samples": samples, "groups": groups}
    if len(crossed.labels):
        metrics = measure_held_out(crossed)
        rows = round(float(crossed.weights.sum()))
        scores = score_frequent(torch.tensor(samples), len(crossed.labels))
        metadata["held_out"] = {
            "rows": rows,
            **metrics._asdict(),
            "confusion": metrics.confusion.tolist(),
            "balanced_accuracy": measure_classes(metrics.confusion).balanced_accuracy,
            "most_frequent_class": measure(scores, crossed.labels, crossed.sample).accuracy,
        }
        metadata["scores"] = calibrate(score_held_out(crossed), float(crossed.offset)).tolist()
    update_state = {**list_tensors(crossed), TRAINING_HASHES: hashes}
    return model._replace(network=crossed.whole, metadata=metadata, update_state=update_state, folds=crossed.folds)
