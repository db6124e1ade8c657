"""The options of the commands of ``python -m protonet.episodes``, checked before torch is imported."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from protonet._validation import check_device
from protonet.commands.options import REPORT_SUFFIXES
from protonet.episodes import names
from protonet.episodes.settings import (
    EvaluationSettings,
    TrainingPlan,
    format_setting,
    parse_integer_range,
    parse_shots,
)
from protonet.errors import InputError, optional_packages, raise_input_error, raise_missing_file
from protonet.ui.command_line import CommandParser, check_known_name, check_output_path, parse_integer
from protonet.ui.options import (
    add_options,
    check_output_paths,
    list_options,
    make_options,
    option,
    parse_options,
    positional,
    same_option,
)

_ANY_SUFFIX = ("",)
_TRACEBACK_HELP = "show where an error of a method comes from"
CLIP_PROMPT_TEMPLATE = "a photo of a {}."  #: CLIP's prompt, with braces for the name of a class.
PICTURE_BATCH_SIZE = 64  #: By default, ``extract`` embeds this many pictures or texts at a time.


def is_main_process() -> bool:
    """Test whether this is the first of the processes that torchrun started, which alone writes files."""
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The options of an evaluation that do not change its results."""

    list_methods: bool = option("list methods and their settings, and do nothing else", False)
    preset: str | None = option("set the options of a paper's evaluation; options on the command line take precedence")
    json: Path | None = option(
        "write all metrics, and how many queries of each episode each method has right", suffixes=_ANY_SUFFIX
    )
    class_lists: bool = option(
        "list the classes of the usual benchmarks by name, with counts and hashes, and do nothing else",
        False,
        group="data",
    )
    list_presets: bool = option("list presets, and do nothing else", False, group="episodes")
    plot: Path | None = option("write a .png, .pdf or .svg file", group="results", suffixes=(".png", ".pdf", ".svg"))
    latex: Path | None = option("write the tables, for a paper", group="results", suffixes=_ANY_SUFFIX)
    markdown: Path | None = option("write the tables", group="results", suffixes=_ANY_SUFFIX)
    report: Path | None = option(
        "write a report for the browser, .html: one file, without network; with it, --json has its figures as well",
        group="results",
        suffixes=REPORT_SUFFIXES,
    )
    state: Path | None = option(
        "keep the scores of finished episodes in this new .npz file, every few seconds and after Ctrl-C",
        group="results",
        suffixes=_ANY_SUFFIX,
    )
    resume: bool = option(
        "continue the run of the --state file, if it is there, with the same arguments", False, group="results"
    )
    traceback: bool = option(_TRACEBACK_HELP, False, group="results")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(OutputOptions, EvaluationSettings):
    """The options of an evaluation, of several data sets and numbers of shots."""


def parse_preset(options: argparse.Namespace, words: Sequence[str]) -> argparse.Namespace:
    """Parse the ``words`` of a command line after those of the preset that it names; ``options`` are without it."""
    preset = names.PRESETS[check_known_name("--preset", options.preset, names.PRESETS)].options.split()
    both = parse_options(make_parser(), EvaluationOptions, [*preset, *words])
    for settings in split_evaluations(both):
        try:
            settings.check_protocol()
        except InputError as error:
            value = getattr(both, error.argument)
            if value == getattr(options, error.argument):  # the user's, not the preset's
                raise
            got = f"{options.preset}, which has `{error.argument}` {format_setting(value)}"
            kind = "`test_dataset`" if settings.test_dataset else f"`protocol` {settings.protocol}"
            raise_input_error("preset", f"have options that go with {kind}", got, "Leave one of the two out.")
    return both


def split_evaluations(options: argparse.Namespace) -> list[EvaluationSettings]:
    """Make the settings of each evaluation, of one data set and one number of shots, from parsed options."""
    datasets = [options.dataset] if isinstance(options.dataset, str) else options.dataset
    columns = [datasets]
    for name in ("test_dataset", "validation_dataset"):
        others = getattr(options, name) or [None] * len(datasets)
        if len(others) != len(datasets):
            got = f"{len(others)} for {len(datasets)}"
            raise_input_error(name, "be one for each `dataset`, in their order", got, "Name as many.")
        columns.append(others)
    if len(set(datasets)) < len(datasets):
        raise_input_error("dataset", "name each data set once", " ".join(datasets), "Leave one out.")
    shots = [None] if options.shot is None else options.shot
    if options.protocol == "meta-dataset":
        shots = shots[:1]
    settings = make_options(EvaluationSettings, options)
    return [
        replace(settings, dataset=dataset, test_dataset=test, validation_dataset=validation, shot=shot)
        for dataset, test, validation in zip(*columns, strict=True)
        for shot in shots
    ]


def check_evaluate_options(options: argparse.Namespace, evaluations: Sequence[EvaluationSettings]) -> dict[str, Path]:
    """Check the options of evaluations; return the paths of the files to write by option, {} in further processes."""
    if options.resume and options.state is None:
        raise_input_error("resume", "come with the file to continue", "no `state`", "Pass `state` FILE.")
    if options.validation_dataset and not (options.test_dataset and options.tune):
        remedy = "Leave it out."
        raise_input_error("validation_dataset", "come with `test_dataset` and `tune`", "it without", remedy)
    read = [Path(str(settings.dataset)) for settings in evaluations]
    if options.base is not None and Path(options.base).resolve() in [path.resolve() for path in read]:
        remedy = "Leave it out: the base classes of a split are taken anyway."
        raise_input_error("base", "be another data set than `dataset`", options.base, remedy)
    for settings in evaluations:
        settings.check_protocol()
    others = (*(options.test_dataset or ()), *(options.validation_dataset or ()), options.encoder, options.base)
    read += [Path(path) for path in (*others, options.texts) if path]
    outputs = check_output_paths(options, OutputOptions, read) if is_main_process() else {}
    check_device("device", options.device)
    return outputs


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainingPlan):
    """The options of ``train``."""

    output: Path = option(
        "a new .safetensors file: the checkpoint during training, and the encoder at the end",
        None,
        "-o",
        required=True,
        suffixes=(".safetensors",),
    )
    resume: bool = option(
        "continue the run in the output file, if it exists, with the same arguments or other --steps and --patience",
        False,
    )
    device: str | None = option("such as cpu or cuda (default: cuda where there is one)")
    image_size: int | None = same_option(EvaluationSettings, "image_size", group="data and logs")
    log: Path | None = option(
        "write one JSON line per validation (--log-file under torchrun, which has a --log of its own)",
        None,
        "--log-file",
        group="data and logs",
        suffixes=_ANY_SUFFIX,
    )


def check_train_options(options: TrainOptions) -> None:
    """Raise an error if the options of ``train`` are invalid, or if safetensors is not installed."""
    if options.objective not in names.INNER_LOOP_OBJECTIVES:
        unused = {"inner_steps": 0, "inner_rate": 0.0, "first_order": False, "head": "zero"}
        for name in (name for name, value in unused.items() if getattr(options, name) != value):
            got = f"that of {options.objective}"
            raise_input_error(name, "be of the objectives maml and anil", got, "Leave it out.")
    with optional_packages("train"):
        importlib.import_module("safetensors")  # raises before the work if the package is missing
    if is_main_process():
        check_output_paths(options, TrainOptions, ())
        if options.output.exists() and not options.resume:
            remedy = "Continue its run with `resume`, or pass another path."
            raise_input_error("output", "be a new file", f"{options.output}, which exists", remedy)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The options of ``compare``."""

    files: Sequence[Path] = positional("files that --json wrote", nargs="+", metavar="FILE.json")
    against: str | None = option("compare this method alone with each other one, not all pairs")
    latex: Path | None = option("write the table, for a paper", suffixes=_ANY_SUFFIX)
    markdown: Path | None = option("write the table", suffixes=_ANY_SUFFIX)


def check_compare_options(options: CompareOptions) -> None:
    """Raise an InputError if the options of ``compare`` are invalid."""
    paths = [file.resolve() for file in options.files]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise_input_error("files", "be named once", f"{options.files[index]} again", "Leave one out.")
    check_output_paths(options, CompareOptions, options.files)
    for path in options.files:
        try:
            path.open("rb").close()
        except OSError as error:
            raise_unreadable_run(path, error)


#: The remedy in messages about files that ``compare`` cannot compare.
COMPARE_FILE_REMEDY = "Write them with --json, of the same data, kind of episodes and seed."


def raise_unreadable_run(path: Path, error: Exception) -> NoReturn:
    """Raise an InputError about a file for ``compare`` that is missing, or that an evaluation did not write."""
    if isinstance(error, FileNotFoundError):
        raise_missing_file(path, argument="files")
    got = f"{path} ({type(error).__name__}: {error})"
    raise_input_error("files", "be a file that --json wrote", got, COMPARE_FILE_REMEDY)


#: By default, ``paper`` compares the user's method with these: three inductive methods, then two transductive ones.
_PAPER_BASELINES = ("protonet", "simpleshot", "logistic", "laplacian-shot", "tim-adm")
_AS_OF_EVALUATION = {"help": "as of an evaluation", "group": "more"}


@dataclass(frozen=True, kw_only=True)
class PaperOptions:
    """The options of ``paper``: of evaluations that differ in the number of shots."""

    own: str = positional(
        "FILE.py:FUNCTION, or the name of a method; values to choose from on validation classes may follow, as in"
        " mine.py:power_means:power=0.5,1,2",
        metavar="METHOD",
    )
    dataset: str = same_option(
        EvaluationSettings, "dataset", help="as of an evaluation, with validation classes", nargs=None
    )
    output: Path = option("write into this folder", None, "-o", required=True, metavar="FOLDER")
    method: Sequence[str] = option(
        f"compare with these, values to choose from behind them, too (default: {' '.join(_PAPER_BASELINES)})",
        _PAPER_BASELINES,
    )
    way: tuple[int, int] = option(
        "classes per episode (default 5)", (5, 5), metavar="N", parse=partial(parse_integer_range, low=2)
    )
    shot: Sequence[tuple[int, int]] = option(
        "support rows per class (default 1,5)", ((1, 1), (5, 5)), metavar="N,M", parse=parse_shots
    )
    query: int = same_option(EvaluationSettings, "query", default=15)
    episodes: int = same_option(
        EvaluationSettings, "episodes", default=1000, help="episodes of each number of shots (default 1000)"
    )
    split_seed: int | None = same_option(EvaluationSettings, "split_seed", group="")
    imbalance: float | None = same_option(EvaluationSettings, "imbalance", **_AS_OF_EVALUATION)
    encoder: str | None = same_option(EvaluationSettings, "encoder", **_AS_OF_EVALUATION)
    base: str | None = same_option(EvaluationSettings, "base", **_AS_OF_EVALUATION)
    image_size: int | None = same_option(EvaluationSettings, "image_size", **_AS_OF_EVALUATION)
    normalize: str = same_option(
        EvaluationSettings, "normalize", help="as of an evaluation (default none)", group="more", metavar="VALUE"
    )
    seed: int = same_option(EvaluationSettings, "seed", help="as of an evaluation (default 0)", group="more")
    device: str = same_option(EvaluationSettings, "device", help="as of an evaluation (default cpu)", group="more")
    traceback: bool = option(_TRACEBACK_HELP, False, group="more")
    words: Sequence[str] = ()  #: The words of the command line, for the appendix.

    def list_evaluations(self) -> list[EvaluationSettings]:
        """List the settings of the evaluations, one for each number of shots."""
        shared = {declared.name for declared in list_options(PaperOptions)}
        shared &= {declared.name for declared in list_options(EvaluationSettings)} - {"shot", "method"}
        values = {name: getattr(self, name) for name in shared}
        return [EvaluationSettings(**values, shot=shot, records=True) for shot in self.shot]


def check_paper_options(options: PaperOptions) -> None:
    """Raise an error if the options of ``paper`` are invalid, or if matplotlib is missing; create its folder."""
    for name, spans in (("way", [options.way]), ("shot", options.shot)):
        for low, high in spans:
            if low < high:  # the records of queries need episodes of one size
                raise_input_error(name, "be one number", f"{low}-{high}", f"Pass a number such as {low}.")
    check_device("device", options.device)
    with optional_packages():
        importlib.import_module("matplotlib")
    check_output_path("--output", options.output, folder=True)


@dataclass(frozen=True, kw_only=True)
class ExtractOptions:
    """The options of ``extract``."""

    data: str = positional(
        "a folder of pictures by class, perhaps in train, val and test, or KIND:ROOT as --dataset takes it; with"
        " --texts, or a checkpoint of ours, any data set",
        metavar="DATA",
    )
    backbone: str = option(
        "FILE.onnx, FILE.pt2 (with what its metadata lack: FILE:size=224,mean=0.5/0.4/0.4,std=0.2), FILE.safetensors"
        " of 'train', FILE.py:FUNCTION (from pictures (n, 3, side, side) in [0, 1] to embeddings (n, dim)),"
        " efficientnet (of the extra pictures), timm:NAME, torchvision:NAME or open_clip:NAME:TAG; weights are"
        " taken from the cache of the library, and never downloaded",
        required=True,
        metavar="NET",
    )
    weights: str | None = option("of a named network, instead of those in the cache", metavar="FILE")
    output: Path = option("a new file", None, "-o", required=True, metavar="FILE.npz", suffixes=(".npz",))
    resume: bool = option(
        "go on with the file, if the command was stopped, with the same arguments; a finished one is left as it is",
        False,
    )
    maps: bool = option(
        "write the last maps of convolutions, for methods that look at places, by efficientnet or FILE.safetensors",
        False,
    )
    texts: bool = option("embed the classes' names instead, by open_clip:NAME:TAG", False)
    batch: int = option(
        f"pictures at a time (default {PICTURE_BATCH_SIZE})",
        PICTURE_BATCH_SIZE,
        group="how it computes",
        parse=partial(parse_integer, low=1),
    )
    device: str | None = option(
        "such as cpu or cuda, of a named network (default: cuda where there is one)", group="how it computes"
    )
    image_size: int | None = same_option(
        EvaluationSettings,
        "image_size",
        help="pixels per side of the pictures that FILE.safetensors or FILE.py:FUNCTION takes, if it is not the default"
        " of --dataset",
        group="how it computes",
    )
    template: Sequence[str] = option(
        "texts of a class, with {} for its name; several are averaged where they are used"
        f" (default: {CLIP_PROMPT_TEMPLATE})",
        (),
        metavar="TEXT",
        group="texts",
    )
    names: str | None = option(
        "a line for each class: its name, a comma, tab or space, and its words; only the first of several is taken",
        metavar="FILE",
        group="texts",
    )


def check_extract_options(options: ExtractOptions) -> None:
    """Raise an InputError if the options of ``extract`` are invalid."""
    check_output_paths(options, ExtractOptions, ())
    if options.output.exists() and not options.resume:
        remedy = "Pass another path, or `resume`."
        raise_input_error("output", "be a new file", f"{options.output}, which exists", remedy)
    if not options.texts and (options.names or options.template):
        raise_input_error("names" if options.names else "template", "come with `texts`", "none", "Leave it out.")
    if options.texts and options.maps:
        raise_input_error("maps", "come without `texts`", "both", "Leave one of the two out.")
    if bad := [template for template in options.template if template.count("{}") != 1]:
        remedy = f"Pass one such as {CLIP_PROMPT_TEMPLATE!r}."
        raise_input_error("template", "have one {} for the name", repr(bad[0]), remedy)


class EpisodeCommand(NamedTuple):
    """A command: its options, the texts of its help, and the function that raises an error for invalid options."""

    options_type: type
    description: str
    examples: Sequence[str]  #: Arguments, without the program and the name of the command.
    check: Callable[[Any], object] = bool


#: By name; the evaluation has no name, and is checked by `check_evaluate_options`.
EPISODE_COMMANDS = {
    "": EpisodeCommand(
        EvaluationOptions,
        "Evaluate few-shot methods on the same N-way K-shot episodes, with 95 % intervals.",
        (
            "--dataset glyphs --shot 1,5 --method protonet simpleshot bd-cspn",
            "--dataset features.npz --method mine.py:classify protonet",
            "train -o encoder.safetensors; then --encoder encoder.safetensors",
        ),
    ),
    "train": EpisodeCommand(
        TrainOptions,
        "Meta-train an encoder on base classes; the weights best on validation classes are kept.",
        (
            "-o encoder.safetensors",
            "--dataset cub:CUB_200_2011 --backbone resnet12 -o cub.safetensors",
            "--resume -o encoder.safetensors",
        ),
        check_train_options,
    ),
    "compare": EpisodeCommand(
        CompareOptions,
        "Compare the methods of several runs in pairs, on the episodes that all runs have.",
        (),
        check_compare_options,
    ),
    "extract": EpisodeCommand(
        ExtractOptions,
        "Embed pictures by a network, and write the features to a file that --dataset reads.",
        (
            "pictures/ --backbone net.onnx -o features.npz",
            "cub:ROOT --backbone timm:resnet18.a1_in1k -o cub.npz",
            "cub:ROOT --backbone open_clip:RN50:openai --texts -o texts.npz",
        ),
        check_extract_options,
    ),
    "paper": EpisodeCommand(
        PaperOptions,
        "Compare a method of your own with five usual ones, as a paper does: tables, LaTeX, a figure, predictions\n"
        "of each query, and a text for the appendix. An interrupted run continues where it stopped.",
        (
            "mine.py:power_means --dataset features.npz -o paper",
            "mine.py:power_means:power=0.5,1,2 --dataset x.npz --split-seed 0 -o paper",
            "mine.py:own --method protonet mine.py:without_the_trick -o ablation",
        ),
        check_paper_options,
    ),
}


def make_parser(name: str = "") -> CommandParser:
    """Make the parser of a command of ``EPISODE_COMMANDS``."""
    command, program = EPISODE_COMMANDS[name], f"{names.EVALUATE_PROG} {name}".rstrip()
    examples = [f"python -m {program} {example}" for example in command.examples]
    parser = CommandParser(program, command.description, examples)
    add_options(parser, command.options_type)
    return parser


def parse_command(name: str, words: Sequence[str]) -> Any:
    """Parse and check the options of a command of ``EPISODE_COMMANDS``, as an instance of its dataclass."""
    command = EPISODE_COMMANDS[name]
    options: Any = make_options(command.options_type, parse_options(make_parser(name), command.options_type, words))
    command.check(options)
    return options
