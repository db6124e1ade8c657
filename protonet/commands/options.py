"""The options of each command, as dataclasses that declare the command line. Nothing here imports torch."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from protonet._text import normalize_spelling
from protonet.errors import raise_input_error, raise_missing_file
from protonet.files import MODEL_SUFFIXES
from protonet.tables import DEFAULT_LABEL_COLUMN
from protonet.tables.columns import COLUMN_TYPES
from protonet.ui.command_line import parse_integer, parse_number
from protonet.ui.options import (
    get_argument_name,
    get_option_name,
    is_positional,
    option,
    parse_integer_up_to,
    path_exists,
    positional,
)

#: File suffixes of HTML reports.
REPORT_SUFFIXES = (".html", ".htm")
#: A copy of `protonet.fit.solver.TIME_LIMIT`, in seconds.
DEFAULT_TIME_LIMIT_SECONDS = 900.0

#: Declare an option that names columns, which are normalized as the names in files are.
column_option = partial(option, type=normalize_spelling)


def parse_row_numbers(name: str, text: str) -> list[int]:
    """Parse row numbers separated by commas, and drop repeated ones; ``name`` is the option in error messages."""
    return list(dict.fromkeys(parse_integer(name, row, low=0) for row in text.split(",")))


def parse_false_rejection_rate(name: str, text: str) -> float:
    """Parse a false-rejection rate for the option ``name``; its range is checked later, together with the model."""
    try:
        return float(text)
    except ValueError:
        raise_input_error(name, "be a number between 0 and 1", repr(text), "Pass a number such as 0.05.")


def parse_workers(name: str, text: str) -> int | str:
    """Parse the option ``name``: a number of processes, or the address of a Dask scheduler (a text with a colon)."""
    return text if ":" in text else parse_integer(name, text, low=1)


def read_guidelines(name: str, text: str) -> str:
    """Read the text file that the option ``name`` names."""
    max_kilobytes = 100  # some forty printed pages; the file is probably another one if it is larger
    path = Path(text)
    if not path_exists(path):
        raise_missing_file(path, argument=name)
    try:
        with path.open("rb") as file:
            content = file.read(1000 * max_kilobytes + 1)
        if len(content) > 1000 * max_kilobytes:
            raise_input_error(
                name, f"be a text of at most {max_kilobytes} kB", f"{path}, which is larger", "Shorten it."
            )
        return content.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise_input_error(name, "be a text in UTF-8", path, "Save it as plain text.")
    except OSError as error:
        raise_input_error(name, "be a text file", f"{path} ({error.strerror})", "Pass another path.")


_parse_positive_integer, _parse_seconds = (
    partial(parse_integer, low=1),
    partial(parse_number, low=0, strict=True, example=10),
)
N_DEFAULT_SUGGESTIONS = 10  #: The number of rows that ``suggest`` proposes without ``-n``, if the table has as many.
_MODEL_HELP = "a model file, written by fit"
_TABLE_HELP = "CSV or text with a header, JSON, ARFF (also .gz, .zip, or - for stdin), Excel, OpenDocument, SQLite, "
_TABLE_HELP += "Parquet, Feather, NPZ with x and y, NPY; or a folder of pictures"
_GROUP_HELP = "a column: keep rows that share its value in the same fold"
_TYPES_HELP = f"types of columns (default: inferred): {', '.join(COLUMN_TYPES)}"
_READ_GROUP, _RESULT_GROUP, _ROW_GROUP = "text, workbooks, arrays and pictures", "further results", "rows of the table"
_ENCODER_HELP = "the pretrained encoder of texts or pictures: auto, none, a name, a folder or a file"


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options that all commands have."""

    quiet: bool = option("print no progress bar and no notes", False, "-q")


@dataclass(frozen=True, kw_only=True)
class ReadOptions(CommandOptions):
    """Options of commands that read a table."""

    sheet: str | None = option(
        "the sheet of a workbook (default: the first), or the table of a database", group=_READ_GROUP
    )
    encoding: str | None = option(
        "the encoding of text, such as cp1251, shift_jis or gb18030 (default: detected)",
        metavar="NAME",
        group=_READ_GROUP,
    )
    decimal_mark: str | None = option(
        'the decimal mark of numbers, "." or "," (default: detected)',
        choices=[".", ","],
        metavar="MARK",
        group=_READ_GROUP,
    )
    no_header: bool = option(
        "the first row of delimited text is a row, and the columns are called 1, 2, ...", False, group=_READ_GROUP
    )
    skip_broken: bool = option("leave out pictures that cannot be read", False, group=_READ_GROUP)
    split: str | None = option(
        "the split of a folder of pictures: train, valid, test or the subfolder's name", group=_READ_GROUP
    )
    representation: Sequence[str] | None = option(f"{_ENCODER_HELP} (default: auto, or as in fit)", group=_READ_GROUP)


@dataclass(frozen=True, kw_only=True)
class LabelOptions(ReadOptions):
    """Options of commands that read a table with labels."""

    label: str | None = column_option("the column of the labels (default: as in fit)")
    labels_file: Path | None = option("the labels of an NPY table, also NPY", group=_READ_GROUP)


@dataclass(frozen=True, kw_only=True)
class ResultOptions(LabelOptions):
    """Options of commands that write a report or JSON results."""

    report: Path | None = option("a self-contained HTML report, .html", suffixes=REPORT_SUFFIXES)
    json: Path | None = option(
        "all results, .json; with --report, including those of the report", group=_RESULT_GROUP, suffixes=(".json",)
    )
    drop_unlabelled: bool = option("leave out rows without a label", False, group=_ROW_GROUP)


@dataclass(frozen=True, kw_only=True)
class FitOptions(ResultOptions):
    """The options of ``fit``."""

    table: Path = positional(_TABLE_HELP)
    label: str | None = column_option(f"the column of the labels (default: {DEFAULT_LABEL_COLUMN})")
    output: Path | None = option(
        "the model file to write, .protonet (default: print the results only)", None, "-o", suffixes=MODEL_SUFFIXES
    )
    time_limit: float | None = option(
        f"for training and cross-validation together (default: {DEFAULT_TIME_LIMIT_SECONDS:.0f} for training alone)",
        metavar="SECONDS",
        parse=_parse_seconds,
    )
    verbose: bool = option("also print all candidate views and all baselines", False, group=_RESULT_GROUP)
    group: str | None = column_option(_GROUP_HELP)
    columns: Sequence[str] | None = column_option(
        "the columns to use as features (default: all but the label)", group="|features"
    )
    drop: Sequence[str] = column_option("columns that are not features", (), group="|features")
    column_type: Sequence[str] = option(_TYPES_HELP, (), metavar="NAME=TYPE")
    unlabelled: Path | None = option("more rows, without labels, for semi-supervised learning")
    classes: Path | None = option(
        "class names, with commas between them; or a table with columns class and (optional) description",
        None,
        "--describe",
        metavar="A,B|FILE",
    )
    id: str | None = column_option(
        "a column that identifies the rows; predict copies it to its output", group=_ROW_GROUP
    )
    missing_values: str | None = option(
        "texts that mean a missing label or value, separated by commas (default: NA, N/A, ?, - and similar)",
        metavar="A,B",
        group=_ROW_GROUP,
    )
    allow_many_classes: bool = option(
        "accept more than 20 classes with few rows each, which otherwise look like numbers or identifiers",
        False,
        group=_ROW_GROUP,
    )
    store_rows: bool = option(
        "store the encoded rows in the model file, 4 or 8 bytes per row and feature; update then fits again",
        False,
        group="training",
    )
    balanced: bool = option("give all classes equal weight, which favours balanced accuracy", False, group="training")
    seed: int = option(
        "random seed of MLPs and of column importance (default: 0)",
        0,
        group="training",
        parse=partial(parse_integer, low=0),
    )


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ReadOptions):
    """The options of ``predict``."""

    model: Path = positional(_MODEL_HELP)
    table: Path = positional(_TABLE_HELP)
    output: Path | None = option(
        "the predictions, .csv (default: standard output); a folder if TABLE is a folder of Parquet files",
        None,
        "-o",
        suffixes=(".csv",),
    )
    unknown: float | None = option(
        "reject rows that are unlike all classes as 'unknown', at this false-rejection rate, such as 0.05",
        metavar="RATE",
        parse=parse_false_rejection_rate,
    )
    proba: bool = option("add a column with the probability of each class", False, "--probabilities")
    row_numbers: bool = option(
        "put first where each row is: its line in a text file, or its row in a spreadsheet", False
    )
    keep_columns: bool = option("copy all columns of the table to the output", False)
    workers: int | str | None = option(
        "for a folder: the number of single-threaded processes (default: one per core), or a Dask scheduler",
        metavar="N|ADDRESS",
        parse=parse_workers,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ResultOptions):
    """The options of ``evaluate``."""

    model: Path = positional(_MODEL_HELP)
    table: Path = positional(_TABLE_HELP)


@dataclass(frozen=True, kw_only=True)
class UpdateOptions(LabelOptions):
    """The options of ``update``."""

    model: Path = positional(_MODEL_HELP)
    table: Path = positional(_TABLE_HELP)
    output: Path | None = option("the updated model, .protonet", None, "-o", group="|output", suffixes=MODEL_SUFFIXES)
    in_place: bool = option("overwrite the model file", False, group="|output")
    new_classes: bool = option(
        "accept new classes that resemble another spelling of a known one (0.0 and 0, cat and CAT)", False
    )


@dataclass(frozen=True, kw_only=True)
class SuggestOptions(ReadOptions):
    """The options of ``suggest``, which needs no model."""

    model: Path | None = positional(_MODEL_HELP)
    table: Path = positional(_TABLE_HELP, nargs="?")
    n: int | None = option(
        f"the number of rows (default: {N_DEFAULT_SUGGESTIONS}, or all if there are fewer)",
        parse=_parse_positive_integer,
    )
    output: Path | None = option(
        "write these rows, with an empty column for the label, .csv", None, "-o", suffixes=(".csv",)
    )
    label: str | None = column_option(f"the column of the labels (default: the model's, or {DEFAULT_LABEL_COLUMN})")


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(LabelOptions):
    """The options of ``explain``."""

    model: Path = positional(_MODEL_HELP)
    table: Path | None = positional(_TABLE_HELP, nargs="?")
    rows: Sequence[int] | None = option(
        "explain these rows: line numbers of a text file, rows of a spreadsheet, or rows of other files from 0",
        metavar="N,N",
        parse=parse_row_numbers,
    )
    json: Path | None = option("write all results, for all columns, .json", suffixes=(".json",))
    seed: int = option("random seed (default: 0)", 0, parse=partial(parse_integer_up_to, 2**63 - 1))


@dataclass(frozen=True, kw_only=True)
class InfoOptions(CommandOptions):
    """The options of ``info``."""

    model: Path = positional(_MODEL_HELP)
    json: bool = option("print everything as JSON", False)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommandOptions):
    """The options of ``export``."""

    model: Path = positional(_MODEL_HELP)
    onnx: Path | None = option("the ONNX file to write, .onnx", suffixes=(".onnx",))
    pt2: Path | None = option("the program to write for torch.export.load, .pt2", suffixes=(".pt2",))


@dataclass(frozen=True, kw_only=True)
class AddressOptions(CommandOptions):
    """Options of commands that start a server."""

    host: str = option(
        "the address to listen on (default: 127.0.0.1, reachable from this machine only)",
        "127.0.0.1",
        metavar="ADDRESS",
    )
    port: int = option("the port; 0 for a free one (default: 8765)", 8765, parse=partial(parse_integer_up_to, 65535))
    allowed_hosts: Sequence[str] = option("further host names of this server", ())


def get_added_folder(output: Path) -> Path:
    """Return the folder of the pictures that are added on the labelling page, beside the file of labelled rows."""
    return output.with_suffix(".added")


@dataclass(frozen=True, kw_only=True)
class PageOptions(ReadOptions, AddressOptions):
    """The options of ``page``."""

    table: Path = positional(f"{_TABLE_HELP} (default: none; pictures are added on the page)", nargs="?")
    classes: str | None = option("the initial classes (default: the model's, or none)", metavar="NAME,NAME")
    output: Path = option("labelled rows, .csv (default: TABLE-labelled.csv)", None, "-o", suffixes=(".csv",))
    model: Path | None = option("a model file to begin with", None, "-m")
    label: str | None = column_option(f"the column of the labels (default: the model's, or {DEFAULT_LABEL_COLUMN})")
    port: int = option("the port; 0 for a free one (default: 0)", 0, parse=partial(parse_integer_up_to, 65535))
    guidelines: str | None = option(
        "a text file that tells people how to label; the page shows it", metavar="FILE", parse=read_guidelines
    )
    group: str | None = column_option(_GROUP_HELP, group="columns, initially")
    drop: Sequence[str] = column_option("columns that are not features", (), group="columns, initially")
    column_type: Sequence[str] = option(
        "types of columns, as in fit", (), metavar="NAME=TYPE", group="columns, initially"
    )

    @property
    def starts_empty(self) -> bool:
        """Whether there is no table, but only pictures that are added on the page."""
        return self.table == get_added_folder(self.output)

    @property
    def title_path(self) -> Path:
        """The path whose name is the title of the page: the table or, without one, the file of labelled rows."""
        return self.output if self.starts_empty else self.table


@dataclass(frozen=True, kw_only=True)
class ServeOptions(AddressOptions):
    """The options of ``serve``."""

    models: Sequence[Path] = positional("model files; the file name is the model's name", nargs="+", metavar="model")
    max_megabytes: int = option(
        "size of a request body, MiB (default: 8)", 8, group="limits", parse=_parse_positive_integer
    )
    max_requests: int = option("concurrent requests (default: 128)", 128, group="limits", parse=_parse_positive_integer)
    timeout: float = option(
        "time for a response (default: 30)", 30.0, metavar="SECONDS", group="limits", parse=_parse_seconds
    )
    representation: Sequence[str] | None = option(
        "the pretrained encoder of texts or pictures, if its folder or file has moved since fit", group="limits"
    )
    cors_origins: Sequence[str] = option(
        "web pages that may send requests, such as https://app.example.org", (), metavar="ORIGIN", group="clients"
    )
    access_log: str | None = option(
        "append a line of JSON per request; - for standard error", metavar="FILE", group="clients"
    )


_OPTION_SETS = (FitOptions, PredictOptions, EvaluateOptions, UpdateOptions, SuggestOptions, ExplainOptions, PageOptions)
#: The name on the command line, such as "--drop", of each option that a note has in backquotes.
OPTION_NAMES_IN_NOTES = {
    declared.name: get_argument_name(declared) for kind in (*_OPTION_SETS, ServeOptions) for declared in fields(kind)
}


def show_notes(notes: Sequence[str], *, quiet: bool) -> None:
    """Print notes to stderr, one line each, unless ``quiet``.

    Commands call this function after their work, so that a failed command prints its error alone.
    """
    for note in replace_argument_names(notes) if not quiet else ():
        prefix = "" if note.startswith("warning: ") else "note: "
        print(f"{prefix}{note}", file=sys.stderr)


def replace_argument_names(notes: Sequence[str]) -> list[str]:
    """Replace argument names in backquotes by the names of command-line options, such as ``--drop``, in each note."""
    return [re.sub(r"`(\w+)`", lambda name: OPTION_NAMES_IN_NOTES.get(name[1], name[0]), note) for note in notes]


def to_command_line(options: object) -> list[str]:
    """Convert options to the words of a command line, such as ``["fit", "train.csv"]``; defaults are omitted."""
    arguments, last = [type(options).__name__.removesuffix("Options").lower()], list[str]()
    for declared in fields(options):  # type: ignore[arg-type]
        value = getattr(options, declared.name)
        if is_positional(declared):
            arguments += [] if value is None else [str(value)]
        elif value and value != declared.default:
            values = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
            one = len(values) == 1 and str(values[0]).startswith("-")  # argparse would take it for an option
            name = get_option_name(declared)
            last += [f"{name}={values[0]}"] if one else [name, *map(str, values)]
    return arguments + last


def format_command(options: object) -> str:
    """Format an options dataclass as a line for the shell, such as ``protonet fit train.csv``."""
    return shlex.join(["protonet", *to_command_line(options)])
