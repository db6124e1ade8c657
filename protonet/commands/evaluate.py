"""``protonet evaluate``: evaluate a model on labelled rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet import report
from protonet._io import JsonDict, show_progress
from protonet._text import shorten_list, to_printable
from protonet.commands.data import load_pipeline, make_read_spec, map_blocks
from protonet.commands.options import EvaluateOptions, replace_argument_names, show_notes
from protonet.commands.rows import check_class_spellings
from protonet.embeddings.pictures.reading import path_to_text
from protonet.errors import raise_input_error
from protonet.fit.search import FitProgress
from protonet.pipeline import TablePipeline
from protonet.tables.columns.parsing import is_missing
from protonet.tables.table import RowBlock, Table
from protonet.ui.html import write_results


class EvaluatedBlock(NamedTuple):
    """The predictions and labels of one block (several consecutive rows) of the evaluated table."""

    logits: Tensor  #: (b, num_classes) logits.
    labels: Tensor  #: (b,) int64, class indices; -1 for a class that the model does not know.
    unknown_labels: Counter[str]  #: The number of rows of each class that the model does not know, by class name.
    report_rows: tuple[Tensor, RowBlock] | None
    """The features (b, dim) and the block itself; None if no report is written."""


def run(options: EvaluateOptions) -> None:
    """Run ``evaluate``: evaluate a model on a labelled table, and print and write the results."""
    model = load_pipeline(options, options.model, options.table)
    spec = make_read_spec(options, model.new_row_spec, options.label, require_labels=True)
    spec = replace(spec, drop_unlabelled=options.drop_unlabelled)
    table = model.open_table(options.table, spec, options.labels_file)

    def evaluate_block(block: RowBlock) -> EvaluatedBlock:
        unknown = ~np.isin(block.labels.astype(str), list(map(str, model.classes)))
        names = Counter(block.labels[unknown].astype(str).tolist())
        check_class_spellings(names, model.classes, "Spell them in the table as the model does.")
        labels = torch.full((len(unknown),), -1)
        if not unknown.all():
            labels[torch.from_numpy(~unknown)] = model.class_indices(block.labels[~unknown])
        x = model.encode(table, block)
        rows = (torch.from_numpy(x), block) if options.report is not None else None
        return EvaluatedBlock(model.predict_logits(x, block.uninformative_mask), labels, names, rows)

    sequential = model.has_pretrained_encoder
    blocks = map_blocks(evaluate_block, table.blocks, n_rows=table.n_rows, quiet=options.quiet, sequential=sequential)
    evaluated = list(blocks)
    logits = torch.cat([block.logits for block in evaluated])
    labels = torch.cat([block.labels for block in evaluated])
    unknown = dict(sum((block.unknown_labels for block in evaluated), Counter[str]()).most_common())
    known = labels >= 0
    if not bool(known.any()):
        got, remedy = f"only {shorten_list(map(repr, unknown))}", "Name the column of the labels: --label."
        must = f"have a class that the model knows, such as {to_printable(model.classes[0])}"
        raise_input_error("table", must, got, remedy)
    name = path_to_text(options.table.name)
    results = {"command": "evaluate", **report.evaluate_to_dict(name, model, logits, labels, unknown)}
    print(report.format_evaluate_results(results, model.classes[int(np.argmax(model.sample_counts))]), end="")
    show_notes(table.all_notes, quiet=options.quiet)
    if options.report is not None:
        with show_progress(quiet=options.quiet) as progress:
            rows = [block.report_rows for block in evaluated if block.report_rows]
            results |= compute_evaluate_report_details(model, table, logits, labels, rows, progress)
    write_results(results, json_path=options.json, report_path=options.report)


def compute_evaluate_report_details(
    model: TablePipeline,
    table: Table,
    logits: Tensor,
    labels: Tensor,
    rows: Sequence[tuple[Tensor, RowBlock]],
    progress: FitProgress,
) -> JsonDict:
    """Compute the sections that only the HTML report of ``evaluate`` needs, as a dict for JSON.

    Args:
        model: The evaluated model.
        table: The evaluated table, with its notes.
        logits: (n, num_classes) logits of all rows.
        labels: (n,) int64, class indices; -1 for classes that the model does not know.
        rows: For each block of the table, its features (b, dim) and the block itself.
        progress: Is called with the name of the stage and its finished fraction.
    """
    names = model.column_names
    cells = [np.concatenate(parts) for parts in zip(*(block.columns for _, block in rows), strict=True)]
    locations = [table.position_format.format(row) for _, block in rows for row in block.positions]
    known = labels >= 0
    missing_counts = [int(is_missing(column).sum()) for column in cells]
    data = report.table_to_dict(model, labels[known], len(labels), missing_counts, replace_argument_names(table.notes))
    features = torch.cat([x for x, _ in rows])
    evaluated = model.as_single_fold(features[known], labels[known])
    importance = report.compute_importance(evaluated, names, model.n_features_per_column, 0, math.inf, progress)
    predictions = report.EvaluatedRows(
        logits=logits, labels=labels, indices=range(len(labels)), locations=locations, column_names=names, cells=cells
    )
    predictions = predictions.select_rows(known.nonzero().flatten().tolist())
    return {"data": data, **report.compute_report_sections(predictions, logits[known], importance)}
