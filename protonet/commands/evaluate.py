"""``python -m protonet evaluate``: judge a model on a table with classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from protonet._checks import fail
from protonet.commands.labels import check_spellings, find_strange
from protonet.commands.models import (
    PLOTS,
    check_packages,
    check_paths,
    classify_block,
    make_parser,
    map_blocks,
    number_classes,
    open_rows,
    show_notes,
    want,
)
from protonet.commands.plots import draw_plot
from protonet.commands.report import format_report, judge, list_names, write_report
from protonet.files import load_model
from protonet.tables.table import Block

PROG = "protonet evaluate"


def run(arguments: Sequence[str] | None) -> None:
    """Judge as the arguments say, and print a summary.

    Raises:
        MissingPackageError: A package that the table or an option needs is missing.
        InputError: Arguments, a model or a table that do not fit.
    """
    text = "Judge a model on rows that it has not seen; those of classes that it does not know count as unknown rows."
    text += " fit tells how well it does on its own rows, held out."
    parser = make_parser(PROG, text, model=True, label="the same as in fit")
    parser.add_argument("--plot", metavar="FILE", help="a plot, .png, .pdf or .svg: the embedding and the confusion")
    parser.add_argument("--json", metavar="FILE", help="all figures, of all classes, .json")
    options = parser.parse_args(arguments)
    inputs = [options.model, options.table, options.labels]
    outputs = check_paths(PROG, options, {"plot": PLOTS, "json": (".json",)}, inputs)
    check_packages(PROG, ["matplotlib"] * ("plot" in outputs), 'pip install "protonet[analysis]"')
    model = load_model(options.model)
    wanted = want(model, options.label, labelled=True)
    table = open_rows(PROG, options, model, wanted, options.labels and Path(options.labels))

    def judge_block(block: Block) -> tuple[Tensor, Tensor, Counter[str]]:
        """Return the logits, the number of each row's class, -1 for a strange one, and the rows of each such class."""
        strange = find_strange(block.labels, model.classes)
        names = Counter(block.labels[strange].astype(str).tolist())
        check_spellings(PROG, names, model.classes, "Spell them in the table as the model does.")
        numbers = torch.full((len(strange),), -1)
        if not strange.all():
            numbers[torch.from_numpy(~strange)] = number_classes(PROG, block.labels[~strange], model.classes)
        return classify_block(PROG, model, table, block), numbers, names

    judged = map_blocks(judge_block, table.blocks, rows=table.rows, quiet=options.quiet)
    logits, labels, names = zip(*judged, strict=True)
    rows, numbers, strange = torch.cat(logits), torch.cat(labels), dict(sum(names, Counter[str]()).most_common())
    known = numbers >= 0
    if not bool(known.any()):
        got, remedy = f"{list_names(list(map(repr, strange)))} alone", "Name the classes' column: --label."
        fail(PROG, "path", "hold a class that the model knows", got, remedy)
    report = judge(Path(options.table).name, model.classes, rows, numbers, strange)
    print(format_report(report), end="")
    show_notes(table, quiet=options.quiet)
    if "json" in outputs:
        write_report(outputs["json"], report)
    if "plot" in outputs:
        draw_plot(outputs["plot"], rows[known], numbers[known], model.classes, f"rows of {report.name}")
