"""Parse the arguments of each command, and check them before torch is imported.

Options are declared in `protonet.commands.options`. A check that needs torch is in the file of its command.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from protonet.commands.options import (
    EvaluateOptions,
    ExplainOptions,
    ExportOptions,
    FitOptions,
    InfoOptions,
    PageOptions,
    PredictOptions,
    ServeOptions,
    SuggestOptions,
    UpdateOptions,
    get_added_folder,
)
from protonet.errors import optional_packages, raise_input_error, raise_missing_file, renamed_arguments
from protonet.files import MODEL_SUFFIXES
from protonet.tables import DEFAULT_LABEL_COLUMN
from protonet.ui.command_line import CommandParser
from protonet.ui.options import add_options, check_output_paths, make_options, parse_options

#: Optional packages that ``page`` and ``serve`` import.
SERVER_PACKAGES = ("uvicorn", "httptools", "msgspec", "starlette", "prometheus_client", "python_multipart")


class Command(NamedTuple):
    """A command of the command line, such as ``fit``: its options, and the texts of its help."""

    options_type: type  #: The dataclass of its options, such as `FitOptions`.
    description: str  #: The text at the beginning of the help.
    examples: Sequence[str]  #: Example arguments, without ``protonet`` and the name, at the end of the help.
    check_options: Callable[[argparse.Namespace], None] | None = None
    """Raises an InputError if the parsed arguments are invalid, and may fill in defaults; None for no such check."""
    arguments: Mapping[str, str] = {
        **{"path": "table", "labels": "labels_file", "ignored": "drop", "rate": "unknown"},
        **dict.fromkeys(("train_loader", "features", "x", "y"), "table"),
    }
    """For arguments of the functions that read, encode and evaluate the table, the field of the options behind them."""

    @property
    def summary(self) -> str:
        """The first clause of the description, in lower case, for the list of commands in ``protonet --help``."""
        text = re.split(r"[:.;]", self.description)[0]
        return text[0].lower() + text[1:]


def parse_command_line(name: str, arguments: Sequence[str] | None) -> Any:
    """Parse and check the arguments of the command ``name``, such as "fit"; None takes them from ``sys.argv``.

    Returns:
        The options, an instance of the command's dataclass, such as `FitOptions`.
    """
    command = COMMANDS[name]
    options = parse_options(make_parser(name), command.options_type, arguments)
    if getattr(options, "split", None) is not None:
        apply_split_option(options)
    if command.check_options is not None:
        command.check_options(options)
    if name != "predict":
        check_outputs(options, command.options_type)
    for path in [getattr(options, "model", None), *getattr(options, "models", ())]:
        if path is not None:
            check_model_path(path, "--model" if name == "page" else "model")
    for argument in ("table", "unlabelled"):
        path = getattr(options, argument, None)
        if name == "page" and path == get_added_folder(options.output):
            continue  # there is no table, and perhaps no folder yet
        if path is not None and str(path) != "-" and not (name == "predict" and path.is_dir()):
            with renamed_arguments(path=argument):
                check_table_path(path)
    return make_options(command.options_type, options)


def make_parser(name: str) -> CommandParser:
    """Create the argparse parser of the command ``name`` from the dataclass of its options."""
    command, prog = COMMANDS[name], f"protonet {name}"
    parser = CommandParser(prog, command.description, [f"{prog} {example}" for example in command.examples])
    add_options(parser, command.options_type)
    return parser


def check_outputs(options: object, options_type: type) -> None:
    """Raise an InputError if an output option has a wrong suffix, cannot be written, or is also an input."""
    inputs = ["table", "labels_file", "unlabelled", "classes"]
    inputs += ["model"] * (options_type is not UpdateOptions)  # which may write over its model
    files = [path for name in inputs if isinstance(path := getattr(options, name, None), Path)]
    check_output_paths(options, options_type, files)


def require_packages(packages: Sequence[str], extra: str = "files") -> None:
    """Raise a MissingPackageError if a package cannot be imported; its message names the extra to install."""
    with optional_packages(extra):
        for package in packages:
            importlib.import_module(package)


def check_table_is_rereadable(options: argparse.Namespace) -> None:
    """Raise an InputError if the table is a model file or standard input, which cannot be read a second time."""
    if str(options.table) == "-":
        raise_input_error("table", "be a file, since it is read twice", "standard input", "Save it to a file.")
    if options.table.suffix.lower() in MODEL_SUFFIXES:
        raise_input_error("arguments", "end with a table", f"the model {options.table}", "Pass the table last.")


def check_model_path(path: Path, argument: str = "model") -> None:
    """Raise an InputError, which names ``argument``, if the path of a model file does not exist or is a table."""
    try:
        path.stat()
    except FileNotFoundError:
        raise_missing_file(path, argument=argument)
    except OSError:  # reported when it is read
        return
    from protonet.tables.formats import TABLE_SUFFIXES  # noqa: PLC0415 - imports NumPy

    if path.is_file() and path.name.lower().endswith(TABLE_SUFFIXES):
        must = "be a model file, which comes before the table"
        raise_input_error(argument, must, f"the table {path}", "Pass a file that fit wrote.")


def apply_split_option(options: argparse.Namespace) -> None:
    """Replace the folder of pictures in the parsed options by its subfolder that ``--split`` names, such as "train"."""
    from protonet.embeddings.pictures.reading import locate_split_folder  # noqa: PLC0415 - imports NumPy

    if options.table is None or not options.table.is_dir():
        raise_input_error("--split", "come with a folder of pictures", options.table, "Leave it out.")
    options.table, options.split = locate_split_folder(options.table, options.split), None


def check_table_path(path: Path) -> None:
    """Raise an InputError if the path of a table does not exist, or has an unknown suffix."""
    from protonet.embeddings.pictures.reading import is_picture_path  # noqa: PLC0415
    from protonet.tables.formats import TABLE_SUFFIXES  # noqa: PLC0415 - imports NumPy
    from protonet.tables.table import ReadSpec, open_table  # noqa: PLC0415

    if not is_picture_path(path) and not (path.exists() and path.name.lower().endswith(TABLE_SUFFIXES)):
        open_table(path, ReadSpec(label_column=DEFAULT_LABEL_COLUMN, require_labels=False))


def check_fit_options(options: argparse.Namespace) -> None:
    """Raise a MissingPackageError if ``fit`` is to write a model and safetensors is not installed."""
    require_packages(["safetensors"] * (options.output is not None))


def check_predict_options(options: argparse.Namespace) -> None:
    """Raise an InputError if the options of ``predict`` are invalid and name a single table, not a folder.

    Whether a folder is read as pictures or as Parquet files depends on the model, which is loaded later.
    """
    if not options.table.is_dir():
        check_single_table_options(options)


def check_single_table_options(options: argparse.Namespace | PredictOptions) -> None:
    """Raise an InputError if ``predict`` of a single table has ``--workers``, or an output path that is invalid."""
    if options.workers is not None:
        raise_input_error("--workers", "come with a folder of tables", options.table, "Leave it out, or pass one.")
    check_outputs(options, PredictOptions)


def check_update_options(options: argparse.Namespace) -> None:
    """Raise an InputError unless the options of ``update`` name the file to write."""
    if options.output is None and not options.in_place:
        remedy = "Pass -o FILE for a new file, or --in-place to overwrite the old one."
        raise_input_error("-o or --in-place", "name the file to write", "neither -o nor --in-place", remedy)


def check_suggest_options(options: argparse.Namespace) -> None:
    """Take a single argument of ``suggest`` as the table; raise an InputError if the table cannot be read twice."""
    if options.table is None:
        options.model, options.table = None, options.model
    check_table_is_rereadable(options)


def check_explain_options(options: argparse.Namespace) -> None:
    """Raise an InputError if an option of ``explain`` needs a table and none is given."""
    if options.table is None and (options.rows is not None or options.label or options.labels_file):
        must = "name a table for --rows, --label and --labels-file"
        raise_input_error("arguments", must, "none", "Pass it after the model.")


def check_export_options(options: argparse.Namespace) -> None:
    """Raise an error if the options of ``export`` name no file to write, or if onnx is needed and not installed."""
    if options.onnx is None and options.pt2 is None:
        raise_input_error("--onnx or --pt2", "be given", "neither", "Name a file to write.")
    require_packages(["onnx"] * (options.onnx is not None), "onnx")


def check_page_options(options: argparse.Namespace) -> None:
    """Raise an InputError if options of ``page`` are invalid; set the default path of the file of labelled rows."""
    if options.table is None:
        if options.model is not None or options.group or options.drop or options.column_type:
            must = "come with a table if --model, --group, --drop or --column-type is set"
            raise_input_error("arguments", must, "none", "Pass the table.")
        options.output = options.output or Path("labelled.csv")
        options.table = get_added_folder(options.output)
    check_table_is_rereadable(options)
    if options.model is not None and (options.group or options.drop or options.column_type):
        must, remedy = "come without --group, --drop, --column-type", "The model fixes the columns."
        raise_input_error("--model", must, "both", remedy)
    if options.output is None:
        options.output = options.table.with_name(f"{options.table.name.split('.')[0]}-labelled.csv")
    check_server_packages(options)


def check_server_packages(options: argparse.Namespace) -> None:
    """Raise a MissingPackageError if a package of the HTTP servers is not installed, whatever the options are."""
    require_packages(SERVER_PACKAGES, "page")


COMMANDS = {
    "fit": Command(
        FitOptions,
        "Train a classifier on a table, and evaluate it by cross-validation.",
        (
            "train.csv --label species -o model.protonet",
            "train.csv --label species --group patient --report fit.html",
            "texts.csv --classes classes.csv -o model.protonet  # no row has a label",
        ),
        check_fit_options,
    ),
    "predict": Command(
        PredictOptions,
        "Classify the rows of a table, or of all Parquet files in a folder. The order of the rows is kept.",
        (
            "model.protonet new.csv -o predicted.csv",
            "model.protonet new.csv --unknown 0.05 --proba -o predicted.csv",
            "model.protonet tables/ --workers 4 -o predicted/  # Parquet files",
        ),
        check_predict_options,
    ),
    "evaluate": Command(
        EvaluateOptions,
        "Evaluate a model on labelled rows that are not in its training data. Rows of classes that the model does not"
        " know are reported as unknown. fit reports cross-validation on the training data.",
        (
            "model.protonet test.csv",
            "model.protonet test.csv --label species --report test.html",
            "model.protonet test/ --json test.json  # one folder of pictures per class",
        ),
    ),
    "update": Command(
        UpdateOptions,
        "Add samples and new classes to a model without training, or fit it again if fit --store-rows wrote it."
        " Samples that are added twice count twice.",
        (
            "model.protonet more.csv -o updated.protonet",
            "model.protonet more.csv --in-place",
            "model.protonet more/ --in-place  # one folder of pictures per class",
        ),
        check_update_options,
    ),
    "suggest": Command(
        SuggestOptions,
        "List the rows that are most useful to label next (active learning), with reasons. Without a model, list"
        " typical rows to begin with.",
        (
            "model.protonet unlabelled.csv",
            "model.protonet unlabelled.csv -n 20 -o to_label.csv",
            "unlabelled.csv -n 10  # without a model",
        ),
        check_suggest_options,
    ),
    "explain": Command(
        ExplainOptions,
        "Show which columns matter: how much worse the model gets if the values of one column are shuffled"
        " (permutation importance), on a labelled table or, without one, on the held-out rows of fit. With --rows,"
        " explain single predictions: the nearest rows of fit, and the contribution of each column.",
        ("model.protonet", "model.protonet test.csv --json columns.json", "model.protonet new.csv --rows 2,7"),
        check_explain_options,
    ),
    "info": Command(
        InfoOptions,
        "Show the contents of a model file: training data, views, and cross-validation results.",
        ("model.protonet", "model.protonet --json", "wine.protonet -q"),
    ),
    "export": Command(
        ExportOptions,
        "Export a model: as an ONNX graph that maps features (n, dim) float32 to logits and probabilities, or as a"
        " torch.export program that maps features to logits.",
        ("model.protonet --onnx model.onnx", "wine.protonet --pt2 wine.pt2", "model.protonet --onnx model.onnx -q"),
        check_export_options,
    ),
    "page": Command(
        PageOptions,
        "Label rows in the browser, the most informative ones first; inspect, try and download the model. Each label is"
        " saved at once; the same command continues where it stopped.",
        (
            "unlabelled.csv -m model.protonet",
            "pictures/ --classes cat,dog -o labelled.csv",
            "--classes cat,dog  # without a table: add pictures on the page",
        ),
        check_page_options,
    ),
    "serve": Command(
        ServeOptions,
        "Serve predictions over HTTP: POST rows as JSON, CSV, NPY or a picture to /models/NAME/predict. A model is"
        " reloaded when its file is replaced. The printed address contains an access token, unless the environment"
        " variable PROTONET_TOKEN sets one.",
        (
            "wine.protonet",
            "wine.protonet iris.protonet --port 8000",
            "wine.protonet --host 0.0.0.0 --allowed-hosts models.example.org",
        ),
        check_server_packages,
    ),
}
