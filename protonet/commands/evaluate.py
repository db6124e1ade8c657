"""``protonet evaluate``: judge a model on a table with classes."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protonet.commands.content import JudgedRows, list_importance, list_sections, list_table
from protonet.commands.explain import judge_by_all
from protonet.commands.figures import list_names
from protonet.commands.labels import check_spellings, find_strange
from protonet.commands.models import (
    classify,
    count_samples,
    find_sizes,
    is_read,
    map_blocks,
    name_columns,
    number_classes,
    open_model,
    open_rows,
    show_notes,
    show_progress,
    want,
)
from protonet.commands.report import format_report, judge, list_report
from protonet.embeddings.pictures.images import path_to_text
from protonet.errors import raise_input_error
from protonet.files import Model
from protonet.fit.search import Progress
from protonet.tables.columns.parsing import count_missing_cells
from protonet.tables.features import encode_block
from protonet.tables.table import RowBlock, Table
from protonet.ui.page.document import write_outputs
from protonet.ui.plots import draw_plot


class Judged(NamedTuple):
    """Some rows of the table."""

    logits: Tensor  #: (b, num_classes).
    labels: Tensor  #: (b,) int64: the number of each row's class, -1 for one that the model does not know.
    strange: Counter[str]  #: The rows of each such class.
    kept: tuple[Tensor, RowBlock] | None  #: The features (b, dim), and the rows; None if there is no report.


def run(options: argparse.Namespace) -> None:
    """Judge as the arguments say, and print a summary.

    Raises:
        MissingPackageError: A package that the table or an option needs is missing.
        InputError: Arguments, a model or a table that do not fit.
    """
    outputs = options.outputs
    model = open_model(options)
    wanted = want(model, options.label, labelled=True)._replace(drop_unlabelled=options.drop_unlabelled)
    table = open_rows(options, model, wanted, options.labels_file and Path(options.labels_file))

    def judge_block(block: RowBlock) -> Judged:
        """Judge some rows, and keep them for the report."""
        strange = find_strange(block.labels, model.classes)
        names = Counter(block.labels[strange].astype(str).tolist())
        check_spellings(names, model.classes, "Spell them in the table as the model does.")
        numbers = torch.full((len(strange),), -1)
        if not strange.all():
            numbers[torch.from_numpy(~strange)] = number_classes(block.labels[~strange], model.classes)
        x = encode_block(table, block, model.encoding)
        kept = (torch.from_numpy(x), block) if "report" in outputs else None
        return Judged(classify(model, x, block.uninformative), numbers, names, kept)

    judged = list(map_blocks(judge_block, table.blocks, rows=table.n_rows, quiet=options.quiet, alone=is_read(model)))
    rows, numbers = torch.cat([each.logits for each in judged]), torch.cat([each.labels for each in judged])
    strange = dict(sum((each.strange for each in judged), Counter[str]()).most_common())
    known = numbers >= 0
    if not bool(known.any()):
        got, remedy = f"{list_names(list(map(repr, strange)))} alone", "Name the classes' column: --label."
        raise_input_error("table", "hold a class that the model knows", got, remedy)
    name, balanced = path_to_text(Path(options.table).name), bool(model.metadata.get("balanced"))
    report = judge(name, model.classes, torch.tensor(count_samples(model)), rows, numbers, strange, balanced=balanced)
    print(format_report(report), end="")
    show_notes(table, quiet=options.quiet)
    figures = {"command": "evaluate", **list_report(report)}
    if "report" in outputs:
        with show_progress(quiet=options.quiet) as progress:
            figures |= list_more(model, table, rows, numbers, [each.kept for each in judged if each.kept], progress)
    write_outputs(outputs, figures)
    if "plot" in outputs:
        of = f"rows of {report.name}"
        draw_plot(outputs["plot"], rows[known], numbers[known], model.classes, of, quiet=options.quiet)


def list_more(
    model: Model,
    table: Table,
    logits: Tensor,
    labels: Tensor,
    kept: Sequence[tuple[Tensor, RowBlock]],
    progress: Progress,
) -> dict[str, Any]:
    """Return what only the report tells: of the table, of each row of a known class, and of the columns.

    Args:
        model: What judged the rows.
        table: What they are of.
        logits: (n, num_classes).
        labels: (n,) int64, -1 for a class that the model does not know.
        kept: The features (b, dim) of each block, and the block.
        progress: Told which column begins, and the share of them that is over.
    """
    names = name_columns(model)
    cells = [np.concatenate(parts) for parts in zip(*(block.columns for _, block in kept), strict=True)]
    places = [table.position_format.format(row) for _, block in kept for row in block.positions]
    known = labels >= 0
    data = list_table(model, labels[known], len(labels), list(map(count_missing_cells, cells)), table.notes)
    features = torch.cat([x for x, _ in kept])
    judged = judge_by_all(model, features[known], labels[known])
    importance = list_importance(judged, names, find_sizes(model), 0, math.inf, progress)
    every = JudgedRows(logits, labels, range(len(labels)), places, None, names, cells)
    return {"data": data, **list_sections(every.take(known.nonzero().flatten().tolist()), logits[known], importance)}
