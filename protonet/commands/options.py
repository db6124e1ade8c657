"""The options of each command, and the parser parts and checks that commands share.

Nothing here imports torch; NumPy is imported only when a table is read.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from protonet.errors import optional_packages, raise_input_error, raise_missing_file
from protonet.tables import DEFAULT_LABEL
from protonet.tables.columns import COLUMN_TYPES
from protonet.ui.command_line import Parser, check_outputs

#: Suffixes of model files.
MODEL_SUFFIXES = (".protonet", ".safetensors")
#: Suffixes of the files of all results, by option.
RESULT_SUFFIXES = {"json": (".json",), "report": (".html", ".htm"), "plot": (".svg",)}

OptionsT = TypeVar("OptionsT")

_SAME_NAMES = (
    *("allowed_hosts", "classes", "column_type", "columns", "decimal_mark", "drop", "drop_unlabelled", "group", "host"),
    *("id", "label", "missing_values", "output", "plot", "port", "representation", "rows", "sheet", "unknown"),
    *("unlabelled", "workers"),
)
#: The name on the command line of each argument that can be at fault. The parsers name options themselves.
ARGUMENTS = {
    **{name: f"--{name.replace('_', '-')}" for name in _SAME_NAMES},
    **{"ignored": "--drop", "labels": "--labels-file", "n": "-n", "rate": "--unknown"},
    **dict.fromkeys(("path", "train_loader", "solution", "features", "x", "y"), "table"),
}


def show_notes(notes: Sequence[str], *, quiet: bool) -> None:
    """Print notes to stderr. Commands do so after the work, since an error is printed alone."""
    for note in name_options(notes) if not quiet else ():
        print(f"note: {note}", file=sys.stderr)


def name_options(notes: Sequence[str]) -> list[str]:
    """Give the arguments that notes name in backquotes the names of their options."""
    return [re.sub(r"`(\w+)`", lambda name: ARGUMENTS.get(name[1], name[0]), note) for note in notes]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a command reads its table, and whether it prints notes."""

    quiet: bool = False  #: Print no progress bar and no notes.
    sheet: str | None = None  #: The sheet of an Excel workbook; None for the first.
    decimal_mark: str | None = None  #: "." or ","; None to detect it.
    skip_broken: bool = False  #: Leave out pictures that cannot be read.
    representation: Sequence[str] | None = None  #: Pretrained encoders: names, folders or files; None for the default.


@dataclass(frozen=True, kw_only=True)
class LabelOptions(ReadOptions):
    """How a command reads a labelled table."""

    label: str | None = None  #: The column of the labels; None for the default.
    labels_file: Path | None = None  #: The labels of an NPY table.


@dataclass(frozen=True, kw_only=True)
class FitOptions(LabelOptions):
    """The options of ``fit``."""

    table: Path
    effort: str = "default"
    time_limit: float | None = None  #: Seconds for training and cross-validation; None for the default of training.
    seed: int = 0
    balanced: bool = False  #: Give all classes equal weight.
    verbose: bool = False
    group: str | None = None  #: The column of groups.
    id: str | None = None  #: The column that identifies the rows.
    columns: Sequence[str] | None = None  #: The features; None for all columns.
    drop: Sequence[str] = ()  #: Columns that are not features.
    column_type: Sequence[str] = ()  #: NAME=TYPE each.
    unlabelled: Path | None = None  #: A table of unlabelled rows.
    classes: Path | None = None  #: A table of class names and descriptions.
    drop_unlabelled: bool = False
    missing_values: str | None = None  #: Texts that mean a missing value, separated by commas.
    allow_many_classes: bool = False
    outputs: Mapping[str, Path] = field(default_factory=dict)  #: By option: output, json, report, plot.


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ReadOptions):
    """The options of ``predict``."""

    model: Path
    table: Path
    output: Path | None = None  #: A file, or a folder if the table is a folder of tables.
    unknown: float | None = None  #: The false-rejection rate of unknown rows.
    proba: bool = False
    row_numbers: bool = False
    keep_columns: bool = False
    workers: str | None = None  #: The number of processes, or the address of a Dask scheduler.


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(LabelOptions):
    """The options of ``evaluate``."""

    model: Path
    table: Path
    drop_unlabelled: bool = False
    outputs: Mapping[str, Path] = field(default_factory=dict)  #: By option: json, report, plot.


@dataclass(frozen=True, kw_only=True)
class UpdateOptions(LabelOptions):
    """The options of ``update``."""

    model: Path
    table: Path
    output: Path | None = None  #: The updated model; None to overwrite the old one.
    new_classes: bool = False  #: Accept new classes that resemble known ones.


@dataclass(frozen=True, kw_only=True)
class SuggestOptions(ReadOptions):
    """The options of ``suggest``."""

    model: Path | None = None
    table: Path
    label: str | None = None
    n: int = 10
    output: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(LabelOptions):
    """The options of ``explain``."""

    model: Path
    table: Path | None = None
    rows: Sequence[int] | None = None  #: The positions of rows in the table; None to explain the model.
    seed: int = 0
    json: Path | None = None


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """The options of ``info``."""

    model: Path
    json: bool = False  #: Print JSON.


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of ``export``."""

    model: Path
    outputs: Mapping[str, Path]  #: By option: onnx, pt2.


@dataclass(frozen=True, kw_only=True)
class PageOptions(ReadOptions):
    """The options of ``page``."""

    table: Path
    outputs: Mapping[str, Path]  #: The labelled rows, output, and the flagged ones, flags.
    classes: str | None = None  #: Names, separated by commas.
    model: Path | None = None
    label: str | None = None
    group: str | None = None
    drop: Sequence[str] = ()
    column_type: Sequence[str] = ()
    host: str
    port: int
    allowed_hosts: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of ``serve``."""

    models: Sequence[Path]
    host: str
    port: int
    allowed_hosts: Sequence[str] = ()
    max_megabytes: int
    max_requests: int
    timeout: float  #: Seconds.
    representation: Sequence[str] | None = None
    cors_origins: Sequence[str] = ()
    access_log: str | None = None  #: A file, or "-" for standard error.


def make_options(kind: type[OptionsT], parsed: argparse.Namespace | ReadOptions) -> OptionsT:
    """Create the options of a command from parsed arguments, or other options, of the same names."""
    return kind(**{option.name: getattr(parsed, option.name) for option in fields(kind)})  # type: ignore[arg-type]


def to_arguments(options: object) -> list[str]:
    """Convert the options of a command to its arguments, the name of the command first; defaults are left out."""
    arguments, last = [type(options).__name__.removesuffix("Options").lower()], list[str]()
    for option in fields(options):  # type: ignore[arg-type]
        value = getattr(options, option.name)
        if option.name in {"model", "table"}:
            arguments += [] if value is None else [str(value)]
        elif option.name == "outputs":
            last += [text for name, path in value.items() for text in (f"--{name}", str(path))]
        elif value and value != option.default:
            values = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
            name = f"--{option.name.replace('_', '-')}"
            one = len(values) == 1 and str(values[0]).startswith("-")  # argparse would take it for an option
            last += [f"{name}={values[0]}"] if one else [name, *map(str, values)]
    return arguments + last


def format_command(options: object) -> str:
    """Format the options of a command as a command line."""
    return shlex.join(["protonet", *to_arguments(options)])


def make_parser(
    prog: str,
    description: str,
    examples: Sequence[str],
    *,
    model: bool = False,
    table: bool = True,
    label: str | None = None,
    optional_table: bool = False,
) -> Parser:
    """Create a parser with the options that most commands have; ``label`` is the default column of the labels."""
    parser = Parser(prog, description, [f"{prog} {example}" for example in examples])
    if model:
        parser.add_argument("model", type=Path, help="a model file, written by fit")
    parser.add_argument("-q", "--quiet", action="store_true", help="print no progress bar and no notes")
    if not table:
        return parser
    formats = "CSV, TSV or text with a header (also .gz, or - for stdin), Excel, Parquet, NPZ with x and y, NPY"
    parser.add_argument(
        "table", type=Path, nargs="?" if optional_table else None, help=f"{formats}; or a folder of pictures"
    )
    add = parser.add_expert_group("workbooks, arrays and pictures").add_argument
    if label is not None:
        parser.add_argument("--label", metavar="NAME", help=f"the column of the labels (default: {label})")
    add("--sheet", metavar="NAME", help="the sheet of an Excel workbook (default: the first)")
    if label is not None:
        add("--labels-file", type=Path, metavar="FILE", help="the labels of an NPY table, also NPY")
    add("--decimal-mark", choices=[".", ","], help="the decimal mark of numbers (default: detected)")
    add("--skip-broken", action="store_true", help="leave out pictures that cannot be read")
    add("--split", metavar="NAME", help="the split of a folder of pictures: train, valid, test or the subfolder's name")
    moved = "the pretrained encoder of texts or pictures, if its folder or file has moved since fit"
    encoder = "the pretrained encoder of texts or pictures: auto, none, a name, a folder or a file (default: auto)"
    add("--representation", nargs="+", metavar="NAME", help=moved if model else encoder)
    return parser


def add_result_options(parser: Parser) -> Callable[..., object]:
    """Add the options for files of all results; return the function that adds to their group."""
    parser.add_argument("--report", metavar="FILE", help="a self-contained HTML report, .html")
    add = parser.add_expert_group("further results").add_argument
    add("--plot", metavar="FILE", help="a plot of the embedding and of the confusion matrix, .svg")
    add("--json", metavar="FILE", help="all results, .json; with --report, including those of the report")
    return add


def add_table_options(parser: Parser) -> None:
    """Add the options that say how ``fit`` reads its table."""
    group = "a column: keep rows that share its value in the same fold"
    parser.add_argument("--group", metavar="NAME", help=group)
    features = parser.add_mutually_exclusive_group()
    columns = "the columns to use as features (default: all but the label)"
    features.add_argument("--columns", nargs="+", metavar="NAME", help=columns)
    features.add_argument("--drop", nargs="+", metavar="NAME", default=[], help="columns that are not features")
    types = f"types of columns (default: inferred): {', '.join(COLUMN_TYPES)}"
    parser.add_argument("--column-type", nargs="+", metavar="NAME=TYPE", default=[], help=types)
    unlabelled = "more rows, without labels, for semi-supervised learning"
    parser.add_argument("--unlabelled", type=Path, metavar="FILE", help=unlabelled)
    classes = "class names and descriptions: a table with columns class and (optional) description"
    parser.add_argument("--classes", "--describe", type=Path, metavar="FILE", help=classes)
    add = parser.add_expert_group("rows of the table").add_argument
    add("--id", metavar="NAME", help="a column that identifies the rows; predict copies it to its output")
    add("--drop-unlabelled", action="store_true", help="leave out rows without a label")
    values = "texts that mean a missing label or value, separated by commas (default: NA, N/A, ?, - and similar)"
    add("--missing-values", metavar="A,B", help=values)
    many = "accept more than 20 classes with few rows each, which otherwise look like numbers or identifiers"
    add("--allow-many-classes", action="store_true", help=many)


def check_output_paths(
    options: object, suffixes: Mapping[str, Sequence[str]], inputs: Sequence[Path | None]
) -> dict[str, Path]:
    """Check that output paths can be written and are no ``inputs``, and return them by option."""
    for name, allowed in suffixes.items():
        path = getattr(options, name)
        if path is not None and Path(path).suffix.lower() not in allowed:
            raise_input_error(f"--{name}", f"end in {', '.join(allowed)}", path, "Rename it.")
        if path is not None and allowed == MODEL_SUFFIXES and not is_utf8(str(path)):  # safetensors needs UTF-8
            raise_input_error(f"--{name}", "be a path in UTF-8", ascii(str(path)), "Rename it, or its folder.")
    outputs = check_outputs(options, list(suffixes))
    for name, path in outputs.items():
        if path.exists() and any(file.exists() and path.samefile(file) for file in inputs if file is not None):
            raise_input_error(f"--{name}", "be another file than the inputs", path, "Pass another path.")
    return outputs


def is_utf8(text: str) -> bool:
    """Check whether a command-line argument is valid UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def check_packages(packages: Sequence[str], extra: str = "files") -> None:
    """Raise a MissingPackageError if a package is not installed."""
    with optional_packages(extra):
        for package in packages:
            importlib.import_module(package)


def check_rereadable(options: argparse.Namespace) -> None:
    """Raise an InputError if the table is standard input, which cannot be read twice, or a model file."""
    if str(options.table) == "-":
        raise_input_error("table", "be a file, since it is read twice", "standard input", "Save it to a file.")
    if options.table.suffix.lower() in MODEL_SUFFIXES:
        raise_input_error("arguments", "end with a table", f"the model {options.table}", "Pass the table last.")


def check_model_path(path: str | Path, argument: str = "model") -> None:
    """Raise an InputError if a model file does not exist, or is a table."""
    try:
        Path(path).stat()
    except FileNotFoundError:
        raise_missing_file(path, argument=argument)
    except OSError:  # reported when it is read
        return
    from protonet.tables.formats import TABLE_SUFFIXES  # noqa: PLC0415 - imports NumPy

    if Path(path).is_file() and Path(path).name.lower().endswith(TABLE_SUFFIXES):
        must = "be a model file, which comes before the table"
        raise_input_error(argument, must, f"the table {path}", "Pass a file that fit wrote.")


def select_split(options: argparse.Namespace) -> None:
    """Replace a folder of pictures by its subfolder for ``--split``, if given."""
    if options.split is None:
        return
    from protonet.embeddings.pictures.reading import find_split  # noqa: PLC0415 - imports NumPy

    if options.table is None or not options.table.is_dir():
        raise_input_error("--split", "come with a folder of pictures", options.table, "Leave it out.")
    options.table = find_split(options.table, options.split)


def check_inputs(options: argparse.Namespace, *, model: str = "model", labelled: bool = False) -> None:
    """Raise an InputError if the model or the table of a command does not exist, or is something else."""
    if options.model is not None:
        check_model_path(options.model, model)
    labels = getattr(options, "labels_file", None)
    check_table_path(options.table, sheet=options.sheet, labels=labels, labelled=labelled)


def check_table_path(
    path: Path | None, *, sheet: str | None = None, labels: Path | None = None, labelled: bool = False
) -> None:
    """Raise an InputError if a table does not exist, or has an unknown suffix."""
    if path is None or str(path) == "-":
        return
    from protonet.embeddings.pictures.reading import are_pictures  # noqa: PLC0415
    from protonet.tables.formats import TABLE_SUFFIXES  # noqa: PLC0415 - imports NumPy
    from protonet.tables.table import ReadSpec, open_table  # noqa: PLC0415

    if not are_pictures(path) and not (path.exists() and path.name.lower().endswith(TABLE_SUFFIXES)):
        open_table(path, ReadSpec(label=DEFAULT_LABEL, labelled=labelled, sheet=sheet), labels)
