"""``python -m protonet evaluate``: judge a model on a table with classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from protonet.commands.common import count
from protonet.commands.models import (
    PLOTS,
    check_packages,
    check_paths,
    classify,
    make_parser,
    map_blocks,
    number_classes,
    want,
)
from protonet.commands.plots import draw_plot
from protonet.commands.summary import format_accuracy, format_losses, format_pairs
from protonet.files import load_model
from protonet.metrics import measure
from protonet.tables.table import Block, open_table

PROG = "protonet evaluate"


def run(arguments: Sequence[str] | None) -> None:
    """Judge as the arguments say, and print a summary.

    Raises:
        MissingPackageError: A package that the table or an option needs is missing.
        InputError: Arguments, a model or a table that do not fit.
    """
    text = "Judge a model on rows that it has not seen. fit tells how well it does on its own rows, held out."
    parser = make_parser(PROG, text, model=True, label="the same as in fit")
    parser.add_argument("--plot", metavar="FILE", help="a plot, .png, .pdf or .svg: the embedding and the confusion")
    options = parser.parse_args(arguments)
    outputs = check_paths(PROG, options, {"plot": PLOTS}, [options.model, options.table, options.labels])
    check_packages(PROG, ["matplotlib"] * ("plot" in outputs), 'pip install "protonet[analysis]"')
    model = load_model(options.model)
    wanted = want(model, options.label, labelled=True)
    table = open_table(PROG, Path(options.table), wanted, options.labels and Path(options.labels))

    def judge(block: Block) -> tuple[Tensor, Tensor]:
        return classify(PROG, model, block.x), number_classes(PROG, block.labels, model.classes)

    logits, labels = zip(*map_blocks(judge, table.blocks), strict=True)
    rows, numbers = torch.cat(logits), torch.cat(labels)
    metrics = measure(rows, numbers)
    right, interval = format_accuracy(metrics)
    print(f"{Path(options.table).name}: {right} % of {count(len(rows), 'row')} right, 95 % interval {interval}")
    print(format_losses(metrics) + format_pairs(metrics.confusion, model.classes), end="")
    if "plot" in outputs:
        draw_plot(outputs["plot"], rows, numbers, model.classes, f"rows of {Path(options.table).name}")
