"""``python -m protonet suggest``: which rows of a table to label next, and why."""

from __future__ import annotations

from collections.abc import Sequence

from protonet._checks import show
from protonet._writing import write_whole
from protonet.commands.data import check_table, read_cells, read_unlabelled
from protonet.commands.models import LABEL, check_paths, make_parser, name_label, open_model, show_notes, suggest
from protonet.ui.command_line import parse_whole
from protonet.ui.text import format_csv, format_table

PROG = "protonet suggest"
EXAMPLES = (
    "model.safetensors rest.csv",
    "model.safetensors rest.csv -n 20 -o ask.csv",
    "rest.csv -n 10  # before there is a model",
)


def run(arguments: Sequence[str] | None) -> None:
    """Suggest as the arguments say: print rows and reasons, and write the rows to be labelled.

    Raises:
        MissingPackageError: A package that the table needs is missing.
        OSError: The rows cannot be written.
        InputError: Arguments, a model or a table that do not fit.
    """
    text = "Say which rows to label next, the first one first, and why; without a model, which rows to label first."
    parser = make_parser(PROG, text, EXAMPLES, model=True, may_lack_table=True)
    parser.add_argument("-n", default="10", metavar="N", help="how many rows (default 10)")
    parser.add_argument("-o", "--output", metavar="FILE", help="these rows with an empty column of classes, .csv")
    parser.add_argument("--label", metavar="NAME", help=f"the column of the classes (default: the model's, or {LABEL})")
    options = parser.parse_args(arguments)
    if options.table is None:  # a table alone
        options.model, options.table = None, options.model
    n = parse_whole("-n", options.n, low=1)
    check_table(options)
    outputs = check_paths(options, {"output": (".csv",)}, [options.model, options.table])
    model = None if options.model is None else open_model(options)
    label = name_label(options.label, model)
    rows = read_unlabelled(options, model, label)
    names = [] if model is None else [show(name) for name in model.classes]
    network, known = (None, rows.x[rows.known]) if model is None else (model.network, None)
    chosen = suggest(network, rows.x, n, names, rows=rows.left, known=known)
    if "output" in outputs:
        header, cells = read_cells(options, model, label, [each.row for each in chosen])
        lines = [[*header, label], *([*own, ""] for own in cells)]
        write_whole(outputs["output"], lambda file: file.write(format_csv(lines).encode()))
    show_notes(rows.table, quiet=options.quiet)
    print(format_table(["row", "reason"], [[str(row), reason] for row, reason in chosen]), end="")
