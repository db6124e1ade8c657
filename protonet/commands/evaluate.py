"""``protonet evaluate``: evaluate a model on labelled rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

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
from protonet.tables.spellings import describe_list_labels
from protonet.tables.table import RowBlock
from protonet.tables.training import TrainingTable
from protonet.ui.html import write_results


def run(options: EvaluateOptions) -> None:
    """Run ``evaluate``: evaluate a model on a labelled table, and print and write the results."""
    model = load_pipeline(options, options.model, options.table)
    spec = make_read_spec(options, model.new_row_spec, options.label, require_labels=True)
    spec = replace(spec, drop_unlabelled=options.drop_unlabelled)
    table = model.open_table(options.table, spec, options.labels_file)

    def evaluate_block(block: RowBlock) -> tuple[Tensor, Tensor | None, RowBlock]:
        """Compute logits (b, num_classes); return features (b, dim) and cells only if they are needed for a report."""
        names = np.unique(block.labels.astype(str)).tolist()
        check_class_spellings(names, model.classes, "Spell them in the table as the model does.")
        x = model.encode(block, keep_gaps=True)
        logits = model.predict_logits(x, block.uninformative_mask)
        if options.report is None:
            return logits, None, block._replace(columns=[], extra_columns=())
        return logits, torch.from_numpy(model.fill_gaps(x)), block

    sequential = model.has_pretrained_encoder
    blocks = map_blocks(evaluate_block, table.blocks, n_rows=table.n_rows, quiet=options.quiet, sequential=sequential)
    parts, features, evaluated = zip(*blocks, strict=True)
    logits, block = torch.cat(parts), RowBlock.concatenate(evaluated)
    labels = model.find_classes(block.labels)
    unknown = dict(Counter(block.labels[(labels < 0).numpy()].astype(str).tolist()).most_common())
    known = labels >= 0
    if not bool(known.any()):
        got, remedy = f"only {shorten_list(map(repr, unknown))}", "Name the column of the labels: --label."
        must = f"have a class that the model knows, such as {to_printable(model.classes[0])}"
        raise_input_error("table", must, got, remedy)
    name = path_to_text(options.table.name)
    results = {"command": "evaluate", **report.evaluate_to_dict(name, model, logits, labels, unknown)}
    print(report.format_evaluate_results(results, model.classes[int(np.argmax(model.sample_counts))]), end="")
    lists = [f"warning: {note}" for note in describe_list_labels(unknown, model.classes)]
    show_notes([*table.all_notes, *lists], quiet=options.quiet)
    if options.report is not None:
        rows = TrainingTable(
            rows=block,
            x=torch.cat(features),
            y=labels,
            classes=model.classes,
            encoding=model.encoding,
            uninformative_mask=torch.from_numpy(block.uninformative_mask),
            notes=table.notes,
        )
        with show_progress(quiet=options.quiet) as progress:
            results |= compute_evaluate_report_details(model, rows, logits, progress)
    write_results(results, json_path=options.json, report_path=options.report)


def compute_evaluate_report_details(
    model: TablePipeline, table: TrainingTable, logits: Tensor, progress: FitProgress
) -> JsonDict:
    """Compute the sections that only the HTML report of ``evaluate`` needs, as a dict for JSON.

    ``logits`` (n, num_classes) are those of all rows of the table, some of which may have an unknown class.
    """
    known = table.select_rows((table.y >= 0).nonzero().flatten().numpy())
    evaluated, sizes = model.as_single_fold(known.x, known.y), model.n_features_per_column
    importance = report.compute_importance(evaluated, model.column_names, sizes, 0, math.inf, progress)
    logits = logits[table.y >= 0]
    data = report.table_to_dict(model, table, replace_argument_names(table.notes))
    return {"data": data, **report.compute_report_sections(known, logits, logits, importance)}
