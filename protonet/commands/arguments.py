"""Parse the arguments of each command, and check them before torch is imported.

A new option is added here. Checks that need torch are made by the command itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protonet._validation import check_int
from protonet.commands.options import (
    MODEL_SUFFIXES,
    RESULT_SUFFIXES,
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
    add_result_options,
    add_table_options,
    check_inputs,
    check_model_path,
    check_output_paths,
    check_packages,
    check_rereadable,
    check_table_path,
    make_options,
    make_parser,
    select_split,
)
from protonet.errors import raise_input_error
from protonet.tables import DEFAULT_LABEL
from protonet.ui.command_line import Parser, check_name, parse_number, parse_whole

#: The names of `protonet.fit.search.EFFORTS`, and `protonet.fit.solver.TIME_LIMIT`; a test compares them.
EFFORT_NAMES, DEFAULT_TIME_LIMIT = ("fast", "default", "best"), 900.0
#: Examples at the end of each command's help.
EXAMPLES = {
    "fit": (
        "train.csv --label species -o model.protonet",
        "train.csv --label species --group patient --report fit.html",
        "texts.csv --classes classes.csv -o model.protonet  # no row has a label",
    ),
    "predict": (
        "model.protonet new.csv -o predicted.csv",
        "model.protonet new.csv --unknown 0.05 --proba -o predicted.csv",
        "model.protonet tables/ --workers 4 -o predicted/  # Parquet files",
    ),
    "evaluate": (
        "model.protonet test.csv",
        "model.protonet test.csv --label species --report test.html",
        "model.protonet test/ --json test.json  # one folder of pictures per class",
    ),
    "update": (
        "model.protonet more.csv -o updated.protonet",
        "model.protonet more.csv --in-place",
        "model.protonet more/ --in-place  # one folder of pictures per class",
    ),
    "suggest": (
        "model.protonet unlabelled.csv",
        "model.protonet unlabelled.csv -n 20 -o to_label.csv",
        "unlabelled.csv -n 10  # without a model",
    ),
    "explain": ("model.protonet", "model.protonet test.csv --json columns.json", "model.protonet new.csv --rows 2,7"),
    "info": ("model.protonet", "model.protonet --json", "wine.protonet -q"),
    "export": (
        "model.protonet --onnx model.onnx",
        "wine.protonet --pt2 wine.pt2",
        "model.protonet --onnx model.onnx -q",
    ),
    "page": ("unlabelled.csv", "pictures/ --classes cat,dog -o labelled.csv", "unlabelled.csv -m model.protonet"),
    "serve": (
        "wine.protonet",
        "wine.protonet iris.protonet --port 8000",
        "wine.protonet --host 0.0.0.0 --allowed-hosts models.example.org",
    ),
}


def parse_fit(arguments: Sequence[str] | None) -> FitOptions:
    """Parse the arguments of ``fit``."""
    text = "Train a classifier on a table, and evaluate it by cross-validation."
    parser = make_parser("protonet fit", text, EXAMPLES["fit"], label=DEFAULT_LABEL)
    output = "the model file to write, .protonet (default: print the results only)"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=output)
    effort = "how many models to compare: fast, default or best"
    parser.add_argument("--effort", default="default", help=effort)
    limit = f"for training and cross-validation together (default: {DEFAULT_TIME_LIMIT:.0f} for training alone)"
    parser.add_argument("--time-limit", metavar="SECONDS", help=limit)
    add = add_result_options(parser)
    add("--verbose", action="store_true", help="also print the views with their weights, and all baselines")
    add_table_options(parser)
    add = parser.add_expert_group("training").add_argument
    add("--balanced", action="store_true", help="give all classes equal weight, which favours balanced accuracy")
    add("--seed", default="0", metavar="N", help="random seed of MLPs and of column importance (default: 0)")
    options = parser.parse_args(arguments)
    select_split(options)
    check_name("--effort", options.effort, EFFORT_NAMES)
    options.seed = parse_whole("--seed", options.seed, low=0)
    if options.time_limit is not None:
        options.time_limit = parse_number("--time-limit", options.time_limit, low=0)
    suffixes = {"output": MODEL_SUFFIXES, **RESULT_SUFFIXES}
    inputs = [options.table, options.labels_file, options.unlabelled, options.classes]
    options.outputs = check_output_paths(options, suffixes, inputs)
    check_packages(["safetensors"] * ("output" in options.outputs))
    check_table_path(options.unlabelled)
    return make_options(FitOptions, options)


def run_fit(options: FitOptions) -> None:
    """Read the table of ``fit``, import torch, and train: most errors are in the table, and are reported at once."""
    from protonet.commands.rows import read_rows  # noqa: PLC0415 - imports NumPy

    rows = [read_rows(options)]
    from protonet.commands.fit import train  # noqa: PLC0415 - imports torch

    train(options, rows.pop())  # which releases the table once it is encoded


def parse_predict(arguments: Sequence[str] | None) -> PredictOptions:
    """Parse the arguments of ``predict``."""
    text = "Classify the rows of a table, or of all Parquet files in a folder. The order of the rows is kept."
    parser = make_parser("protonet predict", text, EXAMPLES["predict"], model=True)
    output = "the predictions, .csv (default: standard output); a folder if TABLE is a folder of Parquet files"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=output)
    rate = "reject rows that are unlike all classes as 'unknown', at this false-rejection rate, such as 0.05"
    parser.add_argument("--unknown", metavar="RATE", help=rate)
    proba = "add a column with the probability of each class"
    parser.add_argument("--proba", "--probabilities", dest="proba", action="store_true", help=proba)
    numbers = "put first where each row is: its line in a text file, or its row in a spreadsheet"
    parser.add_argument("--row-numbers", action="store_true", help=numbers)
    parser.add_argument("--keep-columns", action="store_true", help="copy all columns of the table to the output")
    workers = "for a folder: the number of single-threaded processes (default: one per core), or a Dask scheduler"
    parser.add_argument("--workers", metavar="N|ADDRESS", help=workers)
    options = parser.parse_args(arguments)
    select_split(options)
    if options.unknown is not None:
        try:
            options.unknown = float(options.unknown)
        except ValueError:
            got, remedy = repr(options.unknown), "Pass a number such as 0.05."
            raise_input_error("--unknown", "be a number between 0 and 1", got, remedy)
    if options.table.is_dir():  # the model decides whether it holds tables or pictures
        check_model_path(options.model)
        return make_options(PredictOptions, options)
    check_single_table(options)
    check_inputs(options)
    return make_options(PredictOptions, options)


def check_single_table(options: argparse.Namespace | PredictOptions) -> None:
    """Check the options of ``predict`` for one table."""
    if options.workers is not None:
        raise_input_error("--workers", "come with a folder of tables", options.table, "Leave it out, or pass one.")
    check_output_paths(options, {"output": (".csv",)}, [options.model, options.table])


def parse_evaluate(arguments: Sequence[str] | None) -> EvaluateOptions:
    """Parse the arguments of ``evaluate``."""
    text = "Evaluate a model on labelled rows that are not in its training data. Rows of classes that the model does"
    text += " not know are reported as unknown. fit reports cross-validation on the training data."
    parser = make_parser("protonet evaluate", text, EXAMPLES["evaluate"], model=True, label="as in fit")
    add = add_result_options(parser)
    add("--drop-unlabelled", action="store_true", help="leave out rows without a label")
    options = parser.parse_args(arguments)
    select_split(options)
    inputs = [options.model, options.table, options.labels_file]
    options.outputs = check_output_paths(options, RESULT_SUFFIXES, inputs)
    check_inputs(options, labelled=True)
    return make_options(EvaluateOptions, options)


def parse_update(arguments: Sequence[str] | None) -> UpdateOptions:
    """Parse the arguments of ``update``."""
    text = "Add samples and new classes to a model without training. Samples that are added twice count twice."
    parser = make_parser("protonet update", text, EXAMPLES["update"], model=True, label="as in fit")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("-o", "--output", type=Path, metavar="FILE", help="the updated model, .protonet")
    target.add_argument("--in-place", action="store_true", help="overwrite the model file")
    spellings = "accept new classes that resemble another spelling of a known one (0.0 and 0, cat and CAT)"
    parser.add_argument("--new-classes", action="store_true", help=spellings)
    options = parser.parse_args(arguments)
    select_split(options)
    if options.output is None and not options.in_place:
        remedy = "Pass -o FILE for a new file, or --in-place to overwrite the old one."
        raise_input_error("-o or --in-place", "name the file to write", "neither -o nor --in-place", remedy)
    check_output_paths(options, {"output": MODEL_SUFFIXES}, [options.table, options.labels_file])
    check_inputs(options, labelled=True)
    return make_options(UpdateOptions, options)


def parse_suggest(arguments: Sequence[str] | None) -> SuggestOptions:
    """Parse the arguments of ``suggest``; ``model`` is None if only a table is given."""
    text = "List the rows that are most useful to label next (active learning), with reasons. Without a model, list"
    text += " typical rows to begin with."
    parser = make_parser("protonet suggest", text, EXAMPLES["suggest"], model=True, optional_table=True)
    parser.add_argument("-n", default="10", metavar="N", help="the number of rows (default: 10)")
    output = "write these rows, with an empty column for the label, .csv"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=output)
    label = f"the column of the labels (default: the model's, or {DEFAULT_LABEL})"
    parser.add_argument("--label", metavar="NAME", help=label)
    options = parser.parse_args(arguments)
    if options.table is None:
        options.model, options.table = None, options.model
    select_split(options)
    options.n = parse_whole("-n", options.n, low=1)
    check_rereadable(options)
    check_output_paths(options, {"output": (".csv",)}, [options.model, options.table])
    check_inputs(options)
    return make_options(SuggestOptions, options)


def parse_explain(arguments: Sequence[str] | None) -> ExplainOptions:
    """Parse the arguments of ``explain``."""
    text = "Show which columns matter: how much worse the model gets if the values of one column are shuffled"
    text += " (permutation importance), on a labelled table or, without one, on the held-out rows of fit. With --rows,"
    text += " explain single predictions: the nearest rows of fit, and the contribution of each column."
    name = "protonet explain"
    parser = make_parser(name, text, EXAMPLES["explain"], model=True, label="as in fit", optional_table=True)
    rows = "explain these rows: line numbers of a text file, row numbers of a spreadsheet"
    parser.add_argument("--rows", metavar="N,N", help=rows)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results, for all columns, .json")
    parser.add_argument("--seed", default="0", metavar="N", help="random seed (default: 0)")
    options = parser.parse_args(arguments)
    select_split(options)
    seed = parse_whole("--seed", options.seed, low=0)
    options.seed = check_int("--seed", seed, low=0, high=2**63 - 1)
    options.rows = None if options.rows is None else parse_rows(options.rows)
    if options.table is None and (options.rows is not None or options.label or options.labels_file):
        must = "name a table for --rows, --label and --labels-file"
        raise_input_error("arguments", must, "none", "Pass it after the model.")
    inputs = [options.model, options.table, options.labels_file]
    check_output_paths(options, {"json": (".json",)}, inputs)
    check_inputs(options, labelled=options.rows is None)
    return make_options(ExplainOptions, options)


def parse_rows(text: str) -> list[int]:
    """Parse row numbers separated by commas, without repetitions."""
    return list(dict.fromkeys(parse_whole("--rows", row, low=0) for row in text.split(",")))


def parse_info(arguments: Sequence[str] | None) -> InfoOptions:
    """Parse the arguments of ``info``."""
    text = "Show the contents of a model file: training data, views, and cross-validation results."
    parser = make_parser("protonet info", text, EXAMPLES["info"], model=True, table=False)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(arguments)
    check_model_path(options.model)
    return make_options(InfoOptions, options)


def parse_export(arguments: Sequence[str] | None) -> ExportOptions:
    """Parse the arguments of ``export``."""
    text = "Export a model as an ONNX graph that maps features (n, dim) float32 to logits and probabilities, or as a"
    text += " torch.export program that maps features to logits."
    parser = make_parser("protonet export", text, EXAMPLES["export"], model=True, table=False)
    parser.add_argument("--onnx", metavar="FILE", help="the ONNX file to write, .onnx")
    parser.add_argument("--pt2", metavar="FILE", help="the program to write for torch.export.load, .pt2")
    options = parser.parse_args(arguments)
    options.outputs = check_output_paths(options, {"onnx": (".onnx",), "pt2": (".pt2",)}, [options.model])
    if not options.outputs:
        raise_input_error("--onnx or --pt2", "be given", "neither", "Name a file to write.")
    if "onnx" in options.outputs:
        check_packages(["onnx"], "onnx")
    check_model_path(options.model)
    return make_options(ExportOptions, options)


#: Packages that the servers import.
SERVER_PACKAGES = ("uvicorn", "httptools", "msgspec", "starlette", "prometheus_client", "python_multipart")


def parse_serve(arguments: Sequence[str] | None) -> ServeOptions:
    """Parse the arguments of ``serve``."""
    text = "Serve predictions over HTTP: POST rows as JSON, CSV, NPY or a picture to /models/NAME/predict. A model is"
    text += " reloaded when its file is replaced. The printed address contains an access token, unless the environment"
    text += " variable PROTONET_TOKEN sets one."
    parser = make_parser("protonet serve", text, EXAMPLES["serve"], table=False)
    parser.add_argument(
        "models", type=Path, nargs="+", metavar="model", help="model files; the file name is the model's name"
    )
    add_address(parser, "8765")
    add = parser.add_expert_group("limits").add_argument
    add("--max-megabytes", default="8", metavar="N", help="size of a request body, MiB (default: 8)")
    add("--max-requests", default="128", metavar="N", help="concurrent requests (default: 128)")
    add("--timeout", default="30", metavar="SECONDS", help="time for a response (default: 30)")
    moved = "the pretrained encoder of texts or pictures, if its folder or file has moved since fit"
    add("--representation", nargs="+", metavar="NAME", help=moved)
    add = parser.add_expert_group("clients").add_argument
    origins = "web pages that may send requests, such as https://app.example.org"
    add("--cors-origins", nargs="+", default=[], metavar="ORIGIN", help=origins)
    add("--access-log", metavar="FILE", help="append a line of JSON per request; - for standard error")
    options = parser.parse_args(arguments)
    options.port = parse_port(options.port)
    for name in ("max_megabytes", "max_requests"):
        setattr(options, name, parse_whole(f"--{name.replace('_', '-')}", getattr(options, name), low=1))
    options.timeout = parse_number("--timeout", options.timeout, low=0)
    for model in options.models:
        check_model_path(model)
    check_packages(SERVER_PACKAGES, "page")
    return make_options(ServeOptions, options)


def parse_page(arguments: Sequence[str] | None) -> PageOptions:
    """Parse the arguments of ``page``."""
    text = "Label rows in the browser, the most informative ones first; inspect, try and download the model. Each"
    text += " label is saved at once; the same command continues where it stopped."
    parser = make_parser("protonet page", text, EXAMPLES["page"])
    classes = "the initial classes (default: the model's, or none)"
    parser.add_argument("--classes", metavar="NAME,NAME", help=classes)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="labelled rows, .csv (default: TABLE-labelled.csv)"
    )
    parser.add_argument("-m", "--model", type=Path, metavar="FILE", help="a model file to begin with")
    label = f"the column of the labels (default: the model's, or {DEFAULT_LABEL})"
    parser.add_argument("--label", metavar="NAME", help=label)
    add_address(parser, "0")
    add = parser.add_expert_group("columns, initially").add_argument
    add("--group", metavar="NAME", help="a column: keep rows that share its value in the same fold")
    add("--drop", nargs="+", metavar="NAME", default=[], help="columns that are not features")
    add("--column-type", nargs="+", metavar="NAME=TYPE", default=[], help="types of columns, as in fit")
    options = parser.parse_args(arguments)
    select_split(options)
    options.port = parse_port(options.port)
    check_rereadable(options)
    if options.model is not None and (options.group or options.drop or options.column_type):
        must, remedy = "come without --group, --drop, --column-type", "The model fixes the columns."
        raise_input_error("--model", must, "both", remedy)
    options.output = default_output(options.table) if options.output is None else options.output
    options.flags = options.output.with_suffix(".flagged.csv")
    suffixes = dict.fromkeys(("output", "flags"), (".csv",))
    options.outputs = check_output_paths(options, suffixes, [options.model, options.table])
    check_inputs(options, model="--model")
    check_packages(SERVER_PACKAGES, "page")
    return make_options(PageOptions, options)


def default_output(table: Path) -> Path:
    """Return the path of the labelled rows of a table, in the same folder."""
    return table.with_name(f"{table.name.split('.')[0]}-labelled.csv")


def add_address(parser: Parser, port: str) -> None:
    """Add the options of a server's address."""
    host = "the address to listen on (default: 127.0.0.1, reachable from this machine only)"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=host)
    parser.add_argument("--port", default=port, metavar="N", help=f"the port; 0 for a free one (default: {port})")
    hosts = "further host names of this server"
    parser.add_argument("--allowed-hosts", nargs="+", default=[], metavar="NAME", help=hosts)


def parse_port(text: str) -> int:
    """Parse the number of a port."""
    return check_int("--port", parse_whole("--port", text, low=0), low=0, high=65535)


#: The function that parses the arguments of each command; it raises an InputError for invalid ones.
PARSERS: dict[str, Callable[[Sequence[str] | None], Any]] = {
    "fit": parse_fit,
    "predict": parse_predict,
    "evaluate": parse_evaluate,
    "update": parse_update,
    "suggest": parse_suggest,
    "explain": parse_explain,
    "info": parse_info,
    "export": parse_export,
    "page": parse_page,
    "serve": parse_serve,
}
