"""What each command is asked: its options, and what is wrong with them, told before torch is imported.

A new option stands here. What takes torch to be checked is checked by the command itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from protonet._validation import check_int
from protonet.commands.options import (
    FIGURES,
    LABEL,
    MODELS,
    PLOTS,
    add_figures,
    add_options,
    check_packages,
    check_paths,
    check_table,
    look_for_model,
    look_for_table,
    make_parser,
    select_split,
)
from protonet.errors import raise_input_error, renamed_arguments
from protonet.ui.command_line import Parser, check_name, parse_number, parse_whole

#: The names of `protonet.fit.search.EFFORTS`, and `protonet.fit.solver.TIME_LIMIT`; a test compares them.
EFFORTS, TIME_LIMIT = ("fast", "default", "best"), 900.0
#: Of each command, what its help ends with.
EXAMPLES = {
    "fit": (
        "train.csv --label species -o model.safetensors",
        "train.csv --label species --group patient --report fit.html",
        "texts.csv --classes classes.csv -o model.safetensors  # no row has a label",
    ),
    "predict": (
        "model.safetensors new.csv -o predicted.csv",
        "model.safetensors new.csv --unknown 0.05 --proba -o predicted.csv",
        "model.safetensors tables/ --workers 4 -o predicted/  # Parquet files",
    ),
    "evaluate": (
        "model.safetensors test.csv",
        "model.safetensors test.csv --label species --report judged.html",
        "model.safetensors test/ --json judged.json  # pictures by class",
    ),
    "update": (
        "model.safetensors more.csv -o newer.safetensors",
        "model.safetensors more.csv --in-place",
        "model.safetensors more/ --in-place  # a folder of pictures by class",
    ),
    "suggest": (
        "model.safetensors rest.csv",
        "model.safetensors rest.csv -n 20 -o ask.csv",
        "rest.csv -n 10  # before there is a model",
    ),
    "label": (
        "rest.csv --classes cat,dog",
        "rest.csv --model model.safetensors -o labelled.csv",
        "pictures/ --classes cat,dog -o labelled.csv",
    ),
    "explain": (
        "model.safetensors",
        "model.safetensors test.csv --json columns.json",
        "model.safetensors new.csv --rows 2,7",
    ),
    "info": ("model.safetensors", "model.safetensors --json", "wine.safetensors -q"),
    "export": (
        "model.safetensors --onnx model.onnx",
        "wine.safetensors --pt2 wine.pt2",
        "model.safetensors --onnx model.onnx -q",
    ),
    "page": ("rest.csv", "pictures/ --classes cat,dog -o labelled.csv", "rest.csv -m model.safetensors"),
    "serve": (
        "wine.safetensors",
        "wine.safetensors iris.safetensors --port 8000",
        "wine.safetensors --host 0.0.0.0 --allowed-hosts models.example.org",
    ),
}


def read_fit(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what ``fit`` is asked, with its table, ``rows``: what is wrong there is most of what goes wrong."""
    text = "Learn the classes of a table, and tell how well."
    parser = make_parser("protonet fit", text, EXAMPLES["fit"], label=LABEL)
    parser.add_argument("-o", "--output", metavar="FILE", help="the model, .safetensors; without it, only the summary")
    parser.add_argument("--effort", default="default", help="fast, default or best")
    time_help = f"of the fit and its folds (default: {TIME_LIMIT:.0f} for the fit, and what its folds take)"
    parser.add_argument("--time-limit", metavar="SECONDS", help=time_help)
    add = add_figures(parser)
    add("--details", action="store_true", help="tell the views and their weights, and all baselines")
    add_options(parser)
    add = parser.add_expert_group("learning").add_argument
    alike = "let each class count alike in learning, however many rows it has: for balanced accuracy"
    add("--balanced", action="store_true", help=alike)
    add("--seed", default="0", metavar="N", help="of folds, first weights and episodes (default 0)")
    options = parser.parse_args(arguments)
    select_split(options)
    check_name("--effort", options.effort, EFFORTS)
    options.seed = parse_whole("--seed", options.seed, low=0)
    if options.time_limit is not None:
        options.time_limit = parse_number("--time-limit", options.time_limit, low=0)
    suffixes = {"output": MODELS, "plot": PLOTS, **FIGURES}
    options.outputs = check_paths(
        options, suffixes, [options.table, options.labels, options.unlabelled, options.classes]
    )
    check_packages(["safetensors"] * ("output" in options.outputs))
    check_packages(["matplotlib"] * ("plot" in options.outputs), "analysis")
    from protonet.commands.rows import read_rows  # noqa: PLC0415 - NumPy, as above

    options.rows = read_rows(options)
    with renamed_arguments(path="--unlabelled"):
        look_for_table(argparse.Namespace(sheet=None), options.unlabelled)
    return options


def read_predict(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what ``predict`` is asked."""
    text = "Classify the rows of a table, or of a folder of Parquet files, in order."
    parser = make_parser("protonet predict", text, EXAMPLES["predict"], model=True)
    output = "the predictions, .csv (default: standard output); of a folder, a folder"
    parser.add_argument("-o", "--output", metavar="FILE", help=output)
    rate = "call rows unlike every class unknown, so many that this share of those of known classes would be"
    parser.add_argument("--unknown", metavar="RATE", help=f"{rate}, such as 0.05")
    parser.add_argument(
        "--proba", "--probabilities", dest="proba", action="store_true", help="write the probabilities of all classes"
    )
    numbers = "write the number of each row in its file, from 0, first"
    parser.add_argument("--row-numbers", action="store_true", help=numbers)
    parser.add_argument("--with-inputs", action="store_true", help="repeat the table's own columns, before the class")
    workers = "of a folder: processes, of one thread each (default: one a core), or the address of a Dask scheduler"
    parser.add_argument("--workers", metavar="N|ADDRESS", help=workers)
    parser.add_removed("--jobs", "Pass --workers N.")
    parser.add_removed("--dask", "Pass --workers ADDRESS.")
    options = parser.parse_args(arguments)
    select_split(options)
    if options.unknown is not None:
        try:
            options.unknown = float(options.unknown)
        except ValueError:
            got, remedy = repr(options.unknown), "Pass a number such as 0.05."
            raise_input_error("--unknown", "be a number between 0 and 1", got, remedy)
    if Path(options.table).is_dir():  # of tables, or of pictures: the model tells
        look_for_model(options.model)
        return options
    check_predictions(options)
    look_for_model(options.model)
    look_for_table(options, options.table)
    return options


def check_predictions(options: argparse.Namespace) -> None:
    """Check what ``predict`` is asked of one table; its ``outputs`` are the paths to be written."""
    if options.workers is not None:
        raise_input_error("--workers", "come with a folder of tables", options.table, "Leave it out, or pass one.")
    options.outputs = check_paths(options, {"output": (".csv",)}, [options.model, options.table])


def read_evaluate(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what ``evaluate`` is asked."""
    text = "Judge a model on rows that it has not seen; those of classes that it does not know count as unknown rows."
    text += " fit tells how well it does on its own rows, held out."
    parser = make_parser("protonet evaluate", text, EXAMPLES["evaluate"], model=True, label="the same as in fit")
    add = add_figures(parser)
    add("--drop-unlabelled", action="store_true", help="leave out the table's rows without a class")
    options = parser.parse_args(arguments)
    select_split(options)
    inputs = [options.model, options.table, options.labels]
    options.outputs = check_paths(options, {"plot": PLOTS, **FIGURES}, inputs)
    check_packages(["matplotlib"] * ("plot" in options.outputs), "analysis")
    look_for_model(options.model)
    look_for_table(options, options.table, labelled=True)
    return options


def read_update(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what ``update`` is asked."""
    text = "Add samples and new classes to a model, without training. The same samples twice count twice."
    parser = make_parser("protonet update", text, EXAMPLES["update"], model=True, label="the same as in fit")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("-o", "--output", metavar="FILE", help="the new model, .safetensors")
    place.add_argument("--in-place", action="store_true", help="write the new model over the old one")
    meant = "labels that look like another spelling of known classes (0.0 and 0, cat and CAT) are classes of their own"
    parser.add_argument("--new-classes", action="store_true", help=meant)
    options = parser.parse_args(arguments)
    select_split(options)
    if options.output is None and not options.in_place:
        remedy = "Pass -o FILE for a new file, or --in-place to write over the old one."
        raise_input_error("arguments", "say where the new model goes", "neither -o nor --in-place", remedy)
    options.outputs = check_paths(options, {"output": MODELS}, [options.table, options.labels])
    look_for_model(options.model)
    look_for_table(options, options.table, labelled=True)
    return options


def read_suggest(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what ``suggest`` is asked; its ``model`` is None where there is a table alone."""
    text = "Say which rows to label next, the first one first, and why; without a model, which rows to label first."
    parser = make_parser("protonet suggest", text, EXAMPLES["suggest"], model=True, may_lack_table=True)
    parser.add_argument("-n", default="10", metavar="N", help="how many rows (default 10)")
    parser.add_argument("-o", "--output", metavar="FILE", help="these rows with an empty column of classes, .csv")
    parser.add_argument("--label", metavar="NAME", help=f"the column of the classes (default: the model's, or {LABEL})")
    options = parser.parse_args(arguments)
    if options.table is None:  # a table alone
        options.model, options.table = None, options.model
    select_split(options)
    options.n = parse_whole("-n", options.n, low=1)
    check_table(options)
    options.outputs = check_paths(options, {"output": (".csv",)}, [options.model, options.table])
    if options.model is not None:
        look_for_model(options.model)
    look_for_table(options, options.table)
    return options


def read_label(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what ``label`` is asked."""
    text = "Label rows in the terminal, the most telling ones first. Every answer is on the disk at once; the same"
    text += " command goes on where it was left. fit and update take the file of the answers as it is."
    parser = make_parser("protonet label", text, EXAMPLES["label"])
    add_answers(parser, "--model", classes="the classes, with commas (default: the model's)")
    options = parser.parse_args(arguments)
    select_split(options)
    check_table(options)
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or sys.platform == "win32":
        remedy = "Run it in one, without pipes; python -m protonet suggest writes the rows to a file."
        raise_input_error("arguments", "come from a terminal", "a pipe, a file or Windows", remedy)
    options.output = name_answers(options.table) if options.output is None else options.output
    check_answers(options, "output")
    return options


def read_explain(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what ``explain`` is asked."""
    text = "Tell which columns matter: what is lost where a column's cells are shuffled among the rows of a table with"
    text += " classes; without a table, among the rows that fit held out, each judged by a fit without its fold. With"
    text += " --rows, tell what is near these rows of a table, and which columns spoke for their class."
    like_fit = "the same as in fit"
    parser = make_parser("protonet explain", text, EXAMPLES["explain"], model=True, label=like_fit, may_lack_table=True)
    parser.add_argument("--rows", metavar="N,N", help="explain these rows: lines of a text file, rows of a spreadsheet")
    parser.add_argument("--json", metavar="FILE", help="all figures, of all columns, .json")
    parser.add_argument("--seed", default="0", metavar="N", help="of what is drawn at random (default 0)")
    options = parser.parse_args(arguments)
    select_split(options)
    seed = parse_whole("--seed", options.seed, low=0)
    options.seed = check_int("--seed", seed, low=0, high=2**63 - 1)
    options.rows = None if options.rows is None else parse_rows(options.rows)
    if options.table is None and (options.rows is not None or options.label or options.labels):
        raise_input_error(
            "arguments", "name a table for --rows, --label and --labels", "none", "Pass it after the model."
        )
    inputs = [options.model, options.table, options.labels]
    options.outputs = check_paths(options, {"json": (".json",)}, inputs)
    look_for_model(options.model)
    look_for_table(options, options.table, labelled=options.rows is None)
    return options


def parse_rows(text: str) -> list[int]:
    """Return the different numbers of rows that a list names, in its order."""
    return list(dict.fromkeys(parse_whole("--rows", number, low=0) for number in text.split(",")))


def read_info(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what ``info`` is asked."""
    text = "Say what is in a model: what it was fitted to, its views, and its figures on held-out rows."
    parser = make_parser("protonet info", text, EXAMPLES["info"], model=True, table=False)
    parser.add_argument("--json", action="store_true", help="print all of it as JSON, and nothing else")
    options = parser.parse_args(arguments)
    look_for_model(options.model)
    return options


def read_export(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what ``export`` is asked."""
    text = "Write a model as ONNX: features (n, dim) float32 in, logits and probabilities out; or as a program of"
    text += " torch.export: features in, logits out."
    parser = make_parser("protonet export", text, EXAMPLES["export"], model=True, table=False)
    parser.add_argument("--onnx", metavar="FILE", help="what to write, .onnx")
    parser.add_argument("--pt2", metavar="FILE", help="what to write, .pt2, for torch.export.load")
    options = parser.parse_args(arguments)
    options.outputs = check_paths(options, {"onnx": (".onnx",), "pt2": (".pt2",)}, [options.model])
    if not options.outputs:
        raise_input_error("--onnx or --pt2", "be given", "neither", "Name a file to write.")
    if "onnx" in options.outputs:
        check_packages(["onnx"], "onnx")
    look_for_model(options.model)
    return options


#: Packages that the servers import.
SERVER_PACKAGES = ("uvicorn", "httptools", "msgspec", "starlette", "prometheus_client", "python_multipart")


def read_serve(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what ``serve`` is asked."""
    text = "Answer programs over HTTP: POST rows as JSON, CSV, NPY or a picture to /models/NAME/predict. A model whose"
    text += " file is replaced is read again. The address that is printed holds a token, unless the environment"
    text += " variable PROTONET_TOKEN sets it."
    parser = make_parser("protonet serve", text, EXAMPLES["serve"], table=False)
    parser.add_argument("models", nargs="+", metavar="model", help="files that fit wrote; each is called as its file")
    add_address(parser, "8765")
    add = parser.add_expert_group("limits").add_argument
    add("--most-megabytes", default="8", metavar="N", help="of a request's body, MiB (default 8)")
    add("--most-requests", default="128", metavar="N", help="that are answered at a time (default 128)")
    add("--seconds", default="30", metavar="S", help="that an answer may take (default 30)")
    where = "where what read texts or pictures in fit is now, if it was a folder or a file"
    add("--representation", nargs="+", metavar="NAME", help=where)
    add = parser.add_expert_group("clients").add_argument
    add("--cors-origins", nargs="+", default=[], metavar="ORIGIN", help="pages that may ask: https://app.example.org")
    add("--access-log", metavar="FILE", help="a line of JSON per request is appended; - for standard error")
    options = parser.parse_args(arguments)
    options.port = check_port(options.port)
    for name in ("most_megabytes", "most_requests"):
        setattr(options, name, parse_whole(f"--{name.replace('_', '-')}", getattr(options, name), low=1))
    options.seconds = parse_number("--seconds", options.seconds, low=0)
    for model in options.models:
        look_for_model(model)
    check_packages(SERVER_PACKAGES, "page")
    return options


def read_page(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what ``page`` is asked."""
    text = "Label rows in a browser, the most telling ones first; look at what is learned, try it and take it. Every"
    text += " answer is on the disk before the next question; label goes on with the same file in the terminal."
    parser = make_parser("protonet page", text, EXAMPLES["page"])
    add_answers(parser, "-m", "--model", classes="the first classes (default: the model's, or none)")
    add_address(parser, "0")
    add = parser.add_expert_group("columns, to begin with").add_argument
    add("--group", metavar="NAME", help="a column: rows that share its value are held out together")
    add("--drop", nargs="+", metavar="NAME", default=[], help="columns that are no features")
    add("--column", nargs="+", metavar="NAME=KIND", default=[], help="what columns hold, as fit takes it")
    options = parser.parse_args(arguments)
    select_split(options)
    options.port = check_port(options.port)
    check_table(options)
    if options.model is not None and (options.group or options.drop or options.column):
        raise_input_error(
            "--model", "come without --group, --drop, --column", "both", "The model says what columns are."
        )
    options.output = name_answers(options.table) if options.output is None else options.output
    options.flags = str(Path(options.output).with_suffix(".flagged.csv"))
    check_answers(options, "output", "flags")
    check_packages(SERVER_PACKAGES, "page")
    return options


def add_answers(parser: Parser, *model: str, classes: str) -> None:
    """Add where rows are labelled to, by what model, and what ``classes`` says."""
    parser.add_argument("--classes", metavar="NAME,NAME", help=classes)
    parser.add_argument("-o", "--output", metavar="FILE", help="the answers, .csv (default: TABLE-labelled.csv)")
    parser.add_argument(*model, metavar="FILE", help="a file that fit wrote, to begin with")
    parser.add_argument("--label", metavar="NAME", help=f"the column of the answers (default: the model's, or {LABEL})")


def name_answers(table: str) -> str:
    """Return the file of the answers about a table, beside it."""
    path = Path(table)
    return str(path.with_name(f"{path.name.split('.')[0]}-labelled.csv"))


def check_answers(options: argparse.Namespace, *outputs: str) -> None:
    """Look for what is read as rows are labelled, and at the files that are written."""
    options.outputs = check_paths(options, dict.fromkeys(outputs, (".csv",)), [options.model, options.table])
    if options.model is not None:
        look_for_model(options.model, "--model")
    look_for_table(options, options.table)


def add_address(parser: Parser, port: str) -> None:
    """Add where a server listens."""
    here = "the address to listen on (default 127.0.0.1: this machine alone)"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=here)
    parser.add_argument("--port", default=port, metavar="N", help=f"0 for a free one (default {port})")
    parser.add_argument(
        "--allowed-hosts", nargs="+", default=[], metavar="NAME", help="further host names of this server"
    )


def check_port(text: str) -> int:
    """Return the number of a port."""
    return check_int("--port", parse_whole("--port", text, low=0), low=0, high=65535)


#: Of each command, what reads its arguments, and raises an InputError for those that do not fit.
READERS: dict[str, Callable[[Sequence[str] | None], argparse.Namespace]] = {
    "fit": read_fit,
    "predict": read_predict,
    "evaluate": read_evaluate,
    "update": read_update,
    "suggest": read_suggest,
    "label": read_label,
    "explain": read_explain,
    "info": read_info,
    "export": read_export,
    "page": read_page,
    "serve": read_serve,
}
