"""What the commands share: models, tables for them, and progress."""

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
from protonet.commands.figures import count_own
from protonet.commands.options import DEFAULT_LABEL, check_model_path, parse_missing
from protonet.embeddings.opening import AUTO, NONE, find_takes, reopen
from protonet.embeddings.pictures.reading import are_pictures
from protonet.embeddings.representation import Record, Representation
from protonet.errors import raise_input_error, renamed_arguments
from protonet.files import Model, save_model
from protonet.fit.active import Suggestion, suggest_rows
from protonet.fit.crossfit import Crossfit, list_tensors, measure_held, score_frequent, score_held
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

#: The tensor of a model file that says which rows the model was given, so that `update` notices equal ones.
GIVEN = "given"
#: The largest feature, in units of the rows of fit, of which a square is still a float32.
MOST_FAR = 2.0**60
#: Rows of a batch, at most, and what their number is a multiple of: a full vector of float32 (AVX-512) in each column.
BATCH, ALIGNMENT = 256, 16
#: Most blocks that are classified at a time.
MOST_THREADS = 8

Result = TypeVar("Result")


def read_model(path: str | Path, *, held: bool = False, argument: str = "model") -> Model:
    """Do what `load_model` does, in the name of a command and of its argument."""
    check_model_path(path, argument)
    with renamed_arguments(path=argument):
        return files.read_model(path, held=held, writer="fit")


def write_model(path: str | Path, model: Model, argument: str = "--output") -> None:
    """Do what `save_model` does, in the name of a command and of its argument."""
    with renamed_arguments(path=argument, model=argument):
        save_model(path, model)


def open_model(options: argparse.Namespace, *, held: bool = False, argument: str = "model") -> Model:
    """Read the model that the options name by an argument, with what reads its texts and pictures, if it has any.

    Raises:
        MissingPackageError: A package of that is missing.
        InputError: As `load_model`; another representation than in fit, or none; pictures for a model of tables, or the
            other way round.
    """
    model = read_model(options.model, held=held, argument=argument)
    table = None if options.table is None else Path(options.table)
    if table is None:
        return model
    if not has_pictures(model):
        if are_pictures(table):
            got = f"the pictures {table}"
            raise_input_error(
                "table", "be a table, as the model was fitted to", got, "Pass a table, or fit to pictures."
            )
    elif table.suffix.lower() in {".npy", ".npz"}:
        remedy = "Pass a folder of them, or a table with their paths in that column."
        raise_input_error("table", "hold pictures, as the model was fitted to", table, remedy)
    return attach(model, options.representation, shown=not options.quiet)


def attach(model: Model, names: Sequence[str] | None, *, shown: bool, kept: bool = True) -> Model:
    """Return a model with what reads its texts and pictures.

    Args:
        model: As a file has it.
        names: As a person types them, or None.
        shown: Whether progress is shown.
        kept: Whether the cache keeps their embeddings.

    Raises:
        MissingPackageError: A package of that is missing.
        InputError: Another representation than in fit, or none.
    """
    columns = () if model.encoding is None else model.encoding.columns

    def find(record: Record) -> Representation:
        return replace(reopen(record, names), kept=kept)

    attached = tuple(column.attach(find, show_progress=shown) for column in columns)
    read = {column.modality for column in columns if column.record is not None}
    for name in names or ():
        if name not in {AUTO, NONE} and find_takes(name) not in read:
            must = f"come with a model whose {find_takes(name)}s a network read in fit"
            raise_input_error("representation", must, f"{name}, and another model", "Leave it out.")
    return model if model.encoding is None else model._replace(encoding=Encoding(attached))


def is_read(model: Model) -> bool:
    """Return whether a network reads a column of a model."""
    columns = () if model.encoding is None else model.encoding.columns
    return any(column.record is not None for column in columns)


def has_pictures(model: Model) -> bool:
    """Return whether a model was fitted to pictures, or to a table with some."""
    return model.encoding is not None and any(column.modality == "picture" for column in model.encoding.columns)


def name_label(option: str | None, model: Model | None) -> str:
    """Return what the column of the classes is called: as an option says, or else as in fit."""
    return option or (DEFAULT_LABEL if model is None else str(model.metadata.get("label", DEFAULT_LABEL)))


def want(model: Model, label: str | None, *, labelled: bool, beside: str | None = None) -> ReadSpec:
    """Return what a model reads a table for.

    Args:
        model: The table may have any other columns.
        label: The column of the classes; None for the one in fit.
        labelled: Whether the classes are wanted.
        beside: A column that is wanted beside.
    """
    left_out = model.metadata.get("left_out")
    ignored = tuple(map(str, left_out)) if isinstance(left_out, list) else ()
    named = () if beside is None else (beside,)
    wanted = ReadSpec(name_label(label, model), labelled, model.columns, len(find_sizes(model)), named, ignored)
    return wanted._replace(missing_texts=get_missing(model))


def get_missing(model: Model) -> frozenset[str]:
    """Return the missing values, in lower case, that a model was fitted with; a file may say anything."""
    values = model.metadata.get("missing_values")
    return (
        parse_missing(values)
        if isinstance(values, list) and all(type(each) is str for each in values)
        else MISSING_TEXTS
    )


def open_rows(options: argparse.Namespace, model: Model, wanted: ReadSpec, labels: Path | None = None) -> Table:
    """Open the table that the options name for a model.

    Its notes tell of cells that are not of their column's kind and, once all rows are read, of columns that are far
    from what was fitted, and of rows without information.

    Raises:
        MissingPackageError: As `open_table`.
        InputError: As `open_table`; or a column holds something else than in fit, as far as the first rows tell.
    """
    wanted = wanted._replace(skip_broken=options.skip_broken, sheet=options.sheet)
    table = open_table(Path(options.table), wanted, labels)
    table = convert_numeric(table, model.encoding, decimal=vars(options).get("decimal_mark"))
    first = next(table.blocks)
    table.notes.extend(check_column_types(table, first, model.encoding))
    blocks = monitor_drift(chain([first], table.blocks), watch_columns(model), table)
    return table._replace(blocks=mark_uninformative(blocks, model, table))


def mark_uninformative(blocks: Iterable[RowBlock], model: Model, table: Table) -> Iterator[RowBlock]:
    """Yield blocks with their rows without information marked; add a note that counts these behind the last."""
    rows = 0
    for block in blocks:
        uninformative = find_uninformative(model, block)
        rows += int(uninformative.sum())
        yield block._replace(uninformative=uninformative)
    if rows and predict_uninformative(model) is not None:
        table.notes.append(describe_uninformative(rows))


def find_uninformative(model: Model, block: RowBlock) -> np.ndarray:
    """Return which rows (b,) bool of a block have no cell that says anything to a model."""
    encoding = model.encoding
    return np.zeros(len(block.positions), bool) if encoding is None else encoding.is_uninformative(block.columns)


def predict_uninformative(model: Model) -> Tensor | None:
    """Return the logits (num_classes,) of a row without information; None if the network is to judge it."""
    counts, classes = torch.tensor(count_samples(model)), len(model.classes)
    if model.metadata.get("balanced") or not bool(counts.any()):
        return compute_uninformative_logits(model.network.seen, torch.zeros(classes))
    return compute_uninformative_logits(counts, parse_counts(model.metadata.get("uninformative"), classes))


def read_labelled(options: argparse.Namespace, model: Model, beside: str | None = None) -> tuple[Table, RowBlock]:
    """Read the whole table with classes that the options name for a model; its notes are those that `open_rows` adds.

    Raises:
        MissingPackageError: As `read_table`.
        InputError: As `read_table`; or a column holds something else than in fit.
    """
    wanted = want(model, options.label, labelled=True, beside=beside)
    wanted = wanted._replace(skip_broken=options.skip_broken, sheet=options.sheet)
    table, block = read_table(Path(options.table), wanted, options.labels_file and Path(options.labels_file))
    spelling = detect_numeric_conversion(table, block, model.encoding, decimal=options.decimal_mark)
    block = spelling.apply(block, model.encoding)
    watch = watch_columns(model)
    watch.update(block)
    table.notes.extend([*spelling.notes, *check_column_types(table, block, model.encoding), *watch.summary(table)])
    return table, block


def watch_columns(model: Model) -> DriftMonitor:
    """Return what compares the columns of new rows with those that a model was fitted to."""
    return DriftMonitor(model.metadata.get("seen"), model.encoding, len(find_sizes(model)))


def find_sizes(model: Model) -> list[int]:
    """Return how many features each column is."""
    return [1] * int(model.network.encoder.input_dim) if model.encoding is None else model.encoding.sizes  # type: ignore[arg-type]


def name_columns(model: Model) -> Sequence[str]:
    """Return a name for each column, "column 3" for the fourth one of a table without names."""
    return model.columns or [f"column {number}" for number in range(len(find_sizes(model)))]


def list_cancelled(network: PrototypeNetwork, classes: Sequence[str | int]) -> list[str]:
    """Return a line, or none, about classes without a prototype, since the embeddings of their rows cancel."""
    names = [str(classes[number]) for number in network.cancelled.nonzero().flatten().tolist()]
    return [f"warning: the rows of {format_names(names)} cancel: no prototype, never predicted"] if names else []


def list_notes(table: Table) -> list[str]:
    """Return what is to be known of a table, a line each."""
    names = list(table.unused)
    more = [f"{count(len(names), 'column')} of the table not used: {format_names(names)}"] if names else []
    return [*table.notes, *more]


def show_notes(table: Table, *, quiet: bool) -> None:
    """Say on stderr what is to be known of a table, after the work: an error is one line, and comes alone."""
    for note in list_notes(table) * (not quiet):
        print(f"note: {note}", file=sys.stderr)


def number_classes(labels: np.ndarray, known: Sequence[str | int]) -> Tensor:
    """Return the number (n,) of each row's class among the known ones; 7 and "7" are the same.

    Raises:
        InputError: A class is not known.
    """
    numbers = {str(name): number for number, name in enumerate(known)}
    names, places = np.unique(labels.astype(str), return_inverse=True)
    strange = [name for name in names.tolist() if name not in numbers]
    if strange:
        got = f"{strange[0]!r}" + (f" and {len(strange) - 1} more" if len(strange) > 1 else "")
        raise_input_error("table", "hold classes that the model knows", got, "Add them to it with protonet update.")
    return torch.tensor([numbers[name] for name in names.tolist()])[torch.from_numpy(places)]


def classify_block(model: Model, table: Table, block: RowBlock) -> Tensor:
    """Return the logits (b, num_classes) of rows of a table.

    Raises:
        InputError: As `protonet.tables.features.encode_block` and `classify`.
    """
    return classify(model, encode_block(table, block, model.encoding), block.uninformative)


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
    """Return `protonet.fit.active.suggest_rows` of some ``rows`` (m,) int64 of a table, with its numbers of rows.

    Raises:
        InputError: As there, in the name of a command.
    """
    with renamed_arguments(n="-n", x="table"):
        by_name = None if by_name is None else by_name[rows]
        chosen = suggest_rows(network, x if len(rows) == len(x) else x[rows], n, names, known=known, by_name=by_name)
    return [each._replace(row=int(rows[each.row])) for each in chosen]


@torch.inference_mode()
def classify(model: Model, x: np.ndarray, uninformative: np.ndarray | None = None) -> Tensor:
    """Compute the logits (n, num_classes) of rows (n, dim) float32 or float64.

    The logits of a row have the same digits whatever the other rows are. Products of few rows, and the remainder of a
    vector, are computed by other instructions; therefore each batch is filled with repeated rows.

    Args:
        model: The model.
        x: The features.
        uninformative: (n,) bool: rows without information, which get `predict_uninformative`; None for none.

    Raises:
        InputError: A row is so far out that its embedding overflows.
    """
    padded = torch.from_numpy(np.resize(x, (-(-len(x) // ALIGNMENT) * ALIGNMENT, x.shape[1])))
    logits = torch.cat([model.network(rows) for rows in padded.split(BATCH)])[: len(x)]
    far = float(model.network.encoder.scale) * MOST_FAR  # type: ignore[arg-type]
    lost = ~logits.isfinite().all(dim=1) | torch.from_numpy(np.abs(x).max(axis=1) > far)
    if bool(lost.any()):
        got = f"{np.abs(x[lost.numpy()][0]).max():g} as the largest of a row"
        raise_input_error(
            "table", "hold numbers of the size that the model was fitted to", got, "Mend or drop the row."
        )
    if uninformative is not None and uninformative.any():
        replace_uninformative(logits, torch.from_numpy(uninformative), predict_uninformative(model))
    return logits


@contextmanager
def show_progress(*, quiet: bool = False) -> Iterator[Progress]:
    """Show a bar on stderr if it takes long: yield what is told which stage begins, and the share that is over.

    The bar says how long it took, and how long it will take yet if the rest goes on as fast as all did until now.
    """
    form = "{desc}: {percentage:.0f} %|{bar}| {elapsed}, {remaining} left"
    # The mean speed, and every step is shown.
    with progress_bar(total=1.0, bar_format=form, smoothing=0, miniters=0, leave=False, shown=not quiet) as bar:

        def show(stage: str, share: float) -> None:
            bar.set_description_str(stage, refresh=False)
            bar.update(share - bar.n)

        yield show


def map_blocks(
    work: Callable[[RowBlock], Result],
    blocks: Iterable[RowBlock],
    *,
    rows: int | None = None,
    quiet: bool = False,
    alone: bool = False,
) -> Iterator[Result]:
    """Yield what ``work`` gives for each block, in order, and show on stderr how many rows are done if it takes long.

    Where it is known how many ``rows`` there are, the bar says how long it will take yet.

    Every block has a thread of its own: threads that share one wait for each other at each of its small matrices, and
    that costs a factor of five where another process wants the core. ``alone`` is for what uses all cores by itself,
    and shows its own progress, as networks do that read texts and pictures: one block after the other.
    """
    if alone:
        yield from map(work, blocks)
        return
    threads = torch.get_num_threads()
    ahead = min(threads, MOST_THREADS)
    torch.set_num_threads(1)
    try:
        bar = progress_bar(total=rows, unit="row", unit_scale=True, leave=False, shown=not quiet)
        with bar, ThreadPoolExecutor(ahead) as pool:
            waiting: deque[Future[Result]] = deque()
            for block in blocks:
                waiting.append(pool.submit(work, block))
                bar.update(len(block.positions))
                if len(waiting) > 2 * ahead:  # no more than that of a long table is in memory
                    yield waiting.popleft().result()
            for result in waiting:
                yield result.result()
    finally:
        torch.set_num_threads(threads)


def count_samples(model: Model) -> list[int]:
    """Return of how many samples each class is, without what its name counts as, of a file that may say anything."""
    return count_own(model.network.counts.tolist(), model.classes, model.metadata.get("named"))


def keep_crossfit(model: Model, crossed: Crossfit, groups: dict[str, int], given: Tensor) -> Model:
    """Return a model with what its held-out rows say of it, and with what it takes to add samples to it.

    Args:
        model: Without these.
        crossed: The rows that were held out.
        groups: By name, the number that each group has there.
        given: (n,) of all rows that the model was given, by `protonet.fit.copies.hash_rows`.
    """
    samples = count_samples(model._replace(network=crossed.whole))
    metadata = model.metadata | {"samples": samples, "groups": groups}
    if len(crossed.labels):
        metrics = measure_held(crossed)
        rows = round(float(crossed.weights.sum()))
        metadata["held_out"] = {"rows": rows, **metrics._asdict(), "confusion": metrics.confusion.tolist()}
        frequent = measure(
            score_frequent(torch.tensor(samples), len(crossed.labels)), crossed.labels, crossed.sample
        ).accuracy
        balanced = measure_classes(metrics.confusion).balanced_accuracy
        metadata["held_out"] |= {"balanced_accuracy": balanced, "most_frequent_class": frequent}
        metadata["scores"] = calibrate(score_held(crossed), float(crossed.offset)).tolist()
    held = {**list_tensors(crossed), GIVEN: given}
    return model._replace(network=crossed.whole, metadata=metadata, held=held, folds=crossed.folds)
