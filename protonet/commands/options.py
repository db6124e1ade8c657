"""What the commands' options share, and what is checked of them before torch is imported.

Nothing here imports torch, nor a room that does; NumPy waits until a table is looked at.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from protonet.embeddings.pictures import SETTINGS
from protonet.errors import optional_packages, raise_input_error, raise_missing_file
from protonet.tables.columns import COLUMN_TYPES
from protonet.ui.command_line import Parser, check_outputs

#: What the name of a model, of a plot and of a table may end in.
MODELS, PLOTS = (".safetensors",), (".png", ".pdf", ".svg")
#: What the names of all figures, by option, may end in.
FIGURES = {"json": (".json",), "report": (".html", ".htm")}
#: What the column of the classes is called where nothing else is said.
LABEL = "label"


def make_parser(
    prog: str,
    description: str,
    examples: Sequence[str],
    *,
    model: bool = False,
    table: bool = True,
    label: str | None = None,
    may_lack_table: bool = False,
) -> Parser:
    """Return a parser with what most commands take.

    Args:
        prog: The command's name.
        description: One sentence.
        examples: Command lines, without what they all begin with.
        model: Whether a model comes before the table.
        table: Whether there is one.
        label: Which column holds the classes by default; None if none are to be read.
        may_lack_table: Whether there may be no table.
    """
    parser = Parser(prog, description, [f"python -m {prog} {example}" for example in examples])
    if model:
        parser.add_argument("model", help="a file that fit wrote")
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress and no notes on standard error")
    if not table:
        return parser
    some = "?" if may_lack_table else None
    kinds = "CSV, TSV or text with a header (also .gz, or - for standard input), Excel, Parquet, NPZ with x and y, NPY"
    parser.add_argument("table", nargs=some, help=f"{kinds}; a folder of pictures")
    add = parser.add_expert_group("workbooks, arrays and pictures").add_argument
    if label is not None:
        parser.add_argument("--label", metavar="NAME", help=f"the column of the classes (default: {label})")
    add("--sheet", metavar="NAME", help="the sheet of an Excel workbook (default: the first)")
    if label is not None:
        add("--labels", metavar="FILE", help="the classes of an NPY table, an NPY file as well")
    add("--decimal-mark", choices=[".", ","], help="the decimal mark of numbers (default: what the cells say)")
    add("--skip-broken", action="store_true", help="leave out pictures that cannot be read")
    add("--split", metavar="NAME", help="the part of a folder of pictures to read: train, valid, test or its own name")
    where = "where what read texts or pictures in fit is now, if it was a folder or a file"
    what = "what reads texts and pictures: auto, none, a name, a folder or a file (default: auto)"
    add("--representation", nargs="+", metavar="NAME", help=where if model else what)
    parser.add_removed("--backbone", "Pass --representation FILE.")
    parser.add_removed("--cache", "The environment variable PROTONET_CACHE names the folder.")
    return parser


def add_figures(parser: Parser) -> Callable[..., object]:
    """Add where all figures are written; return what adds to them."""
    parser.add_argument("--report", metavar="FILE", help="a report for the browser, .html: one file, without network")
    add = parser.add_expert_group("further results").add_argument
    add("--plot", metavar="FILE", help="a plot, .png, .pdf or .svg: the embedding and the confusion")
    add("--json", metavar="FILE", help="all figures, of all classes, .json; with --report, all of it")
    return add


def add_options(parser: Parser) -> None:
    """Add what says how the table is to be taken."""
    parser.add_argument("--group", metavar="NAME", help="a column: rows that share its value are held out together")
    some = parser.add_mutually_exclusive_group()
    some.add_argument(
        "--columns", nargs="+", metavar="NAME", help="the features (default: all columns but the classes')"
    )
    some.add_argument("--drop", nargs="+", metavar="NAME", default=[], help="columns that are no features")
    kinds = f"what columns hold, where it was not seen: {', '.join(COLUMN_TYPES)}"
    parser.add_argument("--column", nargs="+", metavar="NAME=KIND", default=[], help=kinds)
    parser.add_argument("--unlabelled", metavar="FILE", help="more rows, without a class, to be learned from")
    text = "the classes: a table with a column class, and perhaps description; then rows need no label at all"
    parser.add_argument("--classes", "--describe", metavar="FILE", help=text)
    add = parser.add_expert_group("rows of the table").add_argument
    add("--id", metavar="NAME", help="a column that names the rows; predict carries it to its output")
    add("--drop-unlabelled", action="store_true", help="leave out the table's rows without a class")
    values = "what stands for a missing label or cell, with commas (default: NA, N/A, ?, - and the like)"
    add("--missing-values", metavar="A,B", help=values)
    add("--one-shot", action="store_true", help="the many classes of a few rows each are meant")
    for name in SETTINGS:
        parser.add_removed(f"--{name}", f"Metadata of the network's file say it, or --representation FILE:{name}=...")


def parse_missing(values: Iterable[str]) -> frozenset[str]:
    """Return the missing values, in lower case; empty cells and a spreadsheet's errors are always missing."""
    from protonet.tables.delimited import SPREADSHEET_ERRORS  # noqa: PLC0415 - NumPy, as above

    return SPREADSHEET_ERRORS | {"", *(value.strip().lower() for value in values)}


def check_paths(
    options: argparse.Namespace, suffixes: Mapping[str, Sequence[str]], inputs: Sequence[str | None]
) -> dict[str, Path]:
    """Return the paths to be written, by option, once it is known that they can be.

    Args:
        options: The arguments.
        suffixes: By option, what its path may end in.
        inputs: The paths that are read.

    Raises:
        InputError: A path cannot be written, ends in something else, or is that of another output or of an input.
    """
    for name, allowed in suffixes.items():
        path = getattr(options, name)
        if path is not None and Path(path).suffix.lower() not in allowed:
            raise_input_error(f"--{name}", f"end in {', '.join(allowed)}", path, "Rename it.")
        if path is not None and allowed == MODELS and not is_utf8(path):  # safetensors writes no other path
            raise_input_error(f"--{name}", "be a path in UTF-8", ascii(path), "Rename it, or its folder.")
    outputs = check_outputs(options, list(suffixes))
    for name, path in outputs.items():
        if path.exists() and any(Path(each).exists() and path.samefile(each) for each in inputs if each is not None):
            raise_input_error(f"--{name}", "be another file than what is read", path, "Pass another path.")
    return outputs


def is_utf8(text: str) -> bool:
    """Return whether a text of the command line has no byte that is not UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def check_packages(packages: Sequence[str], extra: str = "files") -> None:
    """Raise an ImportError of one line, before the work, if a package that it needs is missing."""
    with optional_packages(extra):
        for package in packages:
            importlib.import_module(package)


def check_table(options: argparse.Namespace) -> None:
    """Raise an InputError for a table that cannot be read twice, or for a model in its place."""
    if options.table == "-":
        raise_input_error("table", "be a file: it is read twice", "the standard input", "Save it, and name that file.")
    if options.table.lower().endswith(".safetensors"):
        raise_input_error("arguments", "end in a table", f"the model {options.table}", "Name the table there.")


def look_for_model(path: str | Path, argument: str = "model") -> None:
    """Raise an InputError where a model is not there, or a table stands in its place."""
    try:
        Path(path).stat()
    except FileNotFoundError:
        raise_missing_file(path, argument=argument)
    except OSError:  # whoever reads it tells why
        return
    from protonet.tables.formats import TABLE_SUFFIXES  # noqa: PLC0415 - NumPy, as above

    if Path(path).is_file() and Path(path).name.lower().endswith(TABLE_SUFFIXES):
        raise_input_error(
            argument, "be a model, which comes before a table", f"the table {path}", "Pass a file that fit wrote."
        )


def select_split(options: argparse.Namespace) -> None:
    """Replace the folder that the options name by that of its ``--split``, if one is asked for.

    Raises:
        InputError: The table is no folder, or there is no such part.
    """
    if options.split is None:
        return
    from protonet.embeddings.pictures.reading import find_split  # noqa: PLC0415 - NumPy, as above

    if options.table is None or not Path(options.table).is_dir():
        raise_input_error("--split", "come with a folder of pictures", options.table, "Leave it out.")
    options.table = str(find_split(Path(options.table), options.split))


def look_for_table(options: argparse.Namespace, path: str | None, *, labelled: bool = False) -> None:
    """Raise an InputError where a table is not there, or no table by its name.

    Args:
        options: The arguments.
        path: Of the table; None for none.
        labelled: Whether its classes are wanted.
    """
    if path is None or path == "-":
        return
    from protonet.embeddings.pictures.reading import are_pictures  # noqa: PLC0415
    from protonet.tables.formats import TABLE_SUFFIXES  # noqa: PLC0415 - NumPy, as above
    from protonet.tables.table import ReadSpec, open_table  # noqa: PLC0415

    table = Path(path)
    if not are_pictures(table) and not (table.exists() and table.name.lower().endswith(TABLE_SUFFIXES)):
        labels = getattr(options, "labels", None)
        open_table(table, ReadSpec(LABEL, labelled=labelled, sheet=options.sheet), labels and Path(labels))
