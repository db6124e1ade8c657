"""Arguments of the commands ``train``, ``compare``, ``paper`` and ``extract``, checked before torch is imported."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from protonet._validation import check_device, check_int
from protonet.episodes import names
from protonet.errors import optional_packages, raise_input_error, raise_missing_file
from protonet.ui.command_line import (
    CommandParser,
    check_known_name,
    check_output_options,
    check_output_path,
    parse_integer,
)

#: For each option of ``train`` that is a whole number: its smallest value, its default and its help text.
TRAIN_INTEGER_OPTIONS = {
    "way": (2, 64, "classes per training episode; all base classes if they are fewer"),
    "shot": (1, 1, "support rows per class"),
    "query": (1, 1, "query rows per class"),
    "episodes-per-step": (1, 2, "episodes per step, shared by the processes"),
    "steps": (1, 2000, "most steps"),
    "eval-every": (1, 100, "steps from one validation to the next"),
    "patience": (1, 8, "stop after this many validations without a new best score"),
    "seed": (0, 0, "of the initial weights, the episodes and the augmentation; up to 2^63 - 1"),
}
#: Defaults for the objectives feat, maml and anil, whose papers train on episodes like those of the evaluation.
EPISODIC_DEFAULTS = {"way": 5, "query": 15, "episodes-per-step": 4}
#: For each objective, the defaults that differ from ``TRAIN_INTEGER_OPTIONS``. Snell et al. train on 30 classes for
#: 1-shot mini-ImageNet.
OBJECTIVE_DEFAULTS = {"protonet": {"way": 30, "query": 15, "episodes-per-step": 1}} | dict.fromkeys(
    ("feat", "maml", "anil"), EPISODIC_DEFAULTS
)
INNER_LOOP_OPTIONS = ("inner_steps", "inner_rate", "first_order", "head")  #: Only MAML and ANIL have these options.
#: The ``TRAIN_INTEGER_OPTIONS`` that ``--help`` shows; ``--help-all`` all.
TRAIN_OPTIONS_IN_HELP = ("way", "shot", "steps", "seed")
TRAIN_EXAMPLES = (
    "python -m protonet.episodes train -o encoder.safetensors",
    "python -m protonet.episodes train --dataset cub:CUB_200_2011 --backbone resnet12 -o cub.safetensors",
    "python -m protonet.episodes train --resume -o encoder.safetensors",
)
CLIP_PROMPT_TEMPLATE = "a photo of a {}."  #: CLIP's prompt, with braces for the name of a class.
PICTURE_BATCH_SIZE = 64  #: By default, ``extract`` embeds this many pictures or texts at a time.
EXTRACT_EXAMPLES = (
    "python -m protonet.episodes extract pictures/ --backbone net.onnx -o features.npz",
    "python -m protonet.episodes extract cub:ROOT --backbone timm:resnet18.a1_in1k -o cub.npz",
    "python -m protonet.episodes extract cub:ROOT --backbone open_clip:RN50:openai --texts -o texts.npz",
)
#: By default, ``paper`` compares the user's method with these: three inductive methods, then two transductive ones.
PAPER_BASELINES = ("protonet", "simpleshot", "logistic", "laplacian-shot", "tim-adm")
PAPER_EXAMPLES = (
    "python -m protonet.episodes paper mine.py:power_means --dataset features.npz -o paper",
    "python -m protonet.episodes paper mine.py:power_means:power=0.5,1,2 --dataset x.npz --split-seed 0 -o paper",
    "python -m protonet.episodes paper mine.py:own --method protonet mine.py:without_the_trick -o ablation",
)
SPLIT_SEED_HELP = "split the classes at random: 60 %% base, 15 %% validation, 25 %% novel"
IMAGE_SIZE_HELP = "pixels per side of pictures (default: as their authors take them; a folder by class: 28, grey)"
TRACEBACK_HELP = "show where an error of a method comes from"
#: The remedy in messages about files that ``compare`` cannot compare.
COMPARE_FILE_REMEDY = "Write them with --json, of the same data, kind of episodes and seed."


class IntegerOption(argparse.Action):
    """An argparse action for options whose value is a whole number in [low, high]; without ``high``, >= low."""

    def __init__(self, *args: Any, low: int, high: int | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.low, self.high, self.metavar = low, high, "N"

    def __call__(self, _: object, namespace: argparse.Namespace, text: Any, option: str | None = None) -> None:
        """Parse and check the text after the option, and set the option's value."""
        value = check_int(str(option), parse_integer(str(option), text, low=self.low), low=self.low, high=self.high)
        setattr(namespace, self.dest, value)


class NumberOption(argparse.Action):
    """An argparse action for an option whose value is a finite number, > 0 if ``strict``, otherwise >= 0."""

    def __init__(self, *args: Any, strict: bool = True, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.strict = strict

    def __call__(self, _: object, namespace: argparse.Namespace, text: Any, option: str | None = None) -> None:
        """Parse and check the text after the option, and set the option's value."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 < value < math.inf or (value == 0 and not self.strict)):
            constraint = f"be a finite number {'>' if self.strict else '>='} 0"
            raise_input_error(str(option), constraint, repr(text), "Pass a number such as 0.01.")
        setattr(namespace, self.dest, value)


def make_train_parser() -> CommandParser:
    """Build the command-line parser of ``train``."""
    what = "Meta-train an encoder on base classes; the weights best on validation classes are kept."
    parser = CommandParser(f"{names.EVALUATE_PROG} train", what, TRAIN_EXAMPLES)
    add = parser.add_argument
    data = "glyphs (default), digits, synthetic:FAMILY, FEATURES.npz, TABLE.csv, a folder of images by class, or "
    data += "KIND:ROOT, of mini-imagenet, tiered-imagenet, cub, cifar-fs, fc100, omniglot and omniglot-rotations"
    add("--dataset", default="glyphs", metavar="DATA", help=data)
    add("--split-seed", action=IntegerOption, low=0, help=SPLIT_SEED_HELP)
    backbone = "conv (default for square grey images), conv4 (default for RGB), resnet12, or mlp, for rows of any kind"
    add("--backbone", metavar="NAME", help=backbone)
    objective = "prototypes (default): cosine prototypes, with one proxy per base class; protonet: that of Snell et "
    objective += "al., squared Euclidean distances to class means alone; feat: prototypes adapted to each other by a "
    objective += "transformer; maml, anil: gradient steps on the support, of the whole network or its last layer"
    add("--objective", default="prototypes", metavar="NAME", help=objective)
    output = "a new .safetensors file: the checkpoint during training, and the encoder at the end"
    add("-o", "--output", required=True, metavar="FILE", help=output)
    text = "continue the run in the output file, if it exists, with the same arguments or other --steps and --patience"
    add("--resume", action="store_true", help=text)
    add("--device", metavar="NAME", help="such as cpu or cuda (default: cuda where there is one)")
    episodes = parser.add_expert_group("episodes and validation").add_argument
    for name, (low, default, text) in TRAIN_INTEGER_OPTIONS.items():
        high = 2**63 - 1 if name == "seed" else names.MAX_CLASSES_OR_ROWS
        other = f"; {OBJECTIVE_DEFAULTS['protonet'][name]} for protonet" if name in EPISODIC_DEFAULTS else ""
        other += f"; {EPISODIC_DEFAULTS[name]} for feat, maml, anil" if name in EPISODIC_DEFAULTS else ""
        add_option = add if name in TRAIN_OPTIONS_IN_HELP else episodes
        help_text = f"{text} (default {default}{other})"
        add_option(f"--{name}", action=IntegerOption, low=low, high=high, help=help_text)

    add = parser.add_expert_group("learning").add_argument
    text = "AdamW's (default 0.003; 0.001 for protonet, feat, maml, anil)"
    add("--learning-rate", action=NumberOption, metavar="R", help=text)
    text = "of maml and anil: gradient steps on the support (default 5)"
    add("--inner-steps", action=IntegerOption, low=1, help=text)
    text = "of maml and anil: the rate of these steps (default 0.01)"
    add("--inner-rate", action=NumberOption, metavar="R", help=text)
    text = "of maml and anil: take these steps' gradients for constants, which is faster"
    add("--first-order", action="store_true", help=text)
    text = "of maml and anil: initial weights of the last layer: classes (default), learned weights of each class, for "
    text += "episodes of --way classes alone, or zero, for any number of classes"
    add("--head", metavar="NAME", help=text)
    text = "of resnet12: drop this share of its maps by DropBlock, such as 0.1 (default 0)"
    add("--dropblock", action=NumberOption, strict=False, default=0.0, metavar="R", help=text)
    text = "begin at the encoder of another run, of the same backbone, such as one of prototypes (default: new weights)"
    add("--start", metavar="FILE", help=text)
    text = (
        "of training rows: affine (default) rotates, stretches, shears and shifts pictures, mirrors those in colour, "
    )
    text += "and adds noise to rows of other kinds; none (default of protonet, as Snell et al.) leaves them as they are"
    add("--augment", metavar="NAME", help=text)

    add = parser.add_expert_group("data and logs").add_argument
    add("--image-size", action=IntegerOption, low=1, help=IMAGE_SIZE_HELP)
    log = "write one JSON line per validation (--log-file under torchrun, which has a --log of its own)"
    add("--log", "--log-file", metavar="FILE", help=log)
    return parser


def parse_train_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line of ``train``; None means ``sys.argv``.

    Returns the options, with two more attributes. ``plan`` is a `TrainingPlan`, whose backbone is "" if the data
    determine it. ``paths`` maps "output" and "log", if given, to the paths of the files to write.
    """
    options = make_train_parser().parse_args(arguments)
    if options.backbone is not None:
        check_known_name("--backbone", options.backbone, names.BACKBONES)
    objective = check_known_name("--objective", options.objective, names.OBJECTIVES)
    integers: dict[str, Any] = {}
    for name, (_, default, _) in TRAIN_INTEGER_OPTIONS.items():
        field = name.replace("-", "_")
        given = getattr(options, field)
        integers[field] = OBJECTIVE_DEFAULTS.get(objective, {}).get(name, default) if given is None else given
    if options.dropblock >= 1:
        raise_input_error("--dropblock", "be a share below 1", options.dropblock, "Pass a number such as 0.1.")
    default_augment = "none" if objective == "protonet" else "affine"
    plan = names.TrainingPlan(
        dataset=options.dataset,
        split_seed=options.split_seed,
        **integers,
        backbone=options.backbone or "",
        objective=objective,
        learning_rate=options.learning_rate or (0.003 if objective == "prototypes" else 0.001),
        dropblock=options.dropblock,
        augment=check_known_name("--augment", options.augment or default_augment, names.AUGMENTATIONS),
        start=options.start,
    )
    if objective in names.INNER_LOOP_OBJECTIVES:
        plan = replace(
            plan,
            inner_steps=options.inner_steps or 5,
            inner_rate=options.inner_rate or 0.01,
            first_order=options.first_order,
            head=check_known_name("--head", options.head or "classes", names.HEAD_INITS),
        )
    elif given := [name for name in INNER_LOOP_OPTIONS if getattr(options, name)]:
        option = f"--{given[0].replace('_', '-')}"
        raise_input_error(option, "be of the objectives maml and anil", f"that of {objective}", "Leave it out.")
    options.plan = plan
    is_main = os.environ.get("RANK", "0") == "0"  # torchrun starts several processes; only the first one writes
    options.paths = _get_train_output_paths(options) if is_main else {}
    return options


def _get_train_output_paths(options: argparse.Namespace) -> dict[str, Path]:
    """Return the paths of the files to write, by "output" and "log"; raise an InputError if they cannot be written."""
    if Path(options.output).suffix != ".safetensors":
        raise_input_error("--output", "end in .safetensors", options.output, "Rename it.")
    with optional_packages("train"):
        importlib.import_module("safetensors")  # raises before the work if the package is missing
    paths = {"output": check_output_path("--output", options.output)}
    if paths["output"].exists() and not options.resume:
        remedy = "Continue its run with --resume, or pass another path."
        raise_input_error("--output", "be a new file", f"{paths['output']}, which exists", remedy)
    if options.log is not None:
        paths["log"] = check_output_path("--log", options.log)
        if paths["log"].resolve() == paths["output"].resolve():
            raise_input_error("--log", "be another file than --output", paths["log"], "Pass another path.")
    return paths


def make_compare_parser() -> CommandParser:
    """Build the command-line parser of ``compare``."""
    parser = CommandParser(
        f"{names.EVALUATE_PROG} compare",
        "Compare the methods of several runs in pairs, on the episodes that all runs have.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="files that --json wrote")
    text = "compare this method alone with each other one, not all pairs"
    parser.add_argument("--against", metavar="NAME", help=text)
    parser.add_argument("--latex", metavar="FILE", help="write the table, for a paper")
    parser.add_argument("--markdown", metavar="FILE", help="write the table")
    return parser


def parse_compare_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line of ``compare``; None means ``sys.argv``.

    Returns the options. Their attribute ``outputs`` maps "latex" and "markdown", if given, to the files to write.
    """
    options = make_compare_parser().parse_args(arguments)
    paths = [Path(file).resolve() for file in options.files]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise_input_error("FILE.json", "be named once", f"{options.files[index]} again", "Leave one out.")
    options.outputs = check_output_options(options, ("latex", "markdown"))
    for name, path in options.outputs.items():
        if path.resolve() in paths:
            raise_input_error(f"--{name}", "be another file than what is read", path, "Pass another path.")
    for path in map(Path, options.files):
        try:
            path.open("rb").close()
        except OSError as error:
            raise_unreadable_run(path, error)
    return options


def raise_unreadable_run(path: Path, error: Exception) -> NoReturn:
    """Raise an InputError about a file for ``compare`` that is missing, or that an evaluation did not write."""
    if isinstance(error, FileNotFoundError):
        raise_missing_file(path, argument="FILE.json")
    got = f"{path} ({type(error).__name__}: {error})"
    raise_input_error("FILE.json", "be a file that --json wrote", got, COMPARE_FILE_REMEDY)


def make_paper_parser() -> CommandParser:
    """Build the command-line parser of ``paper``."""
    text = "Compare a method of your own with five usual ones, as a paper does: tables, LaTeX, a figure, predictions\n"
    text += "of each query, and a text for the appendix. An interrupted run continues where it stopped."
    parser = CommandParser(f"{names.EVALUATE_PROG} paper", text, PAPER_EXAMPLES)
    add = parser.add_argument
    text = "FILE.py:FUNCTION, or the name of a method; values to choose from on validation classes may follow, as in "
    add("own", metavar="METHOD", help=f"{text}mine.py:power_means:power=0.5,1,2")
    add("--dataset", default="glyphs", metavar="DATA", help="as of an evaluation, with validation classes")
    add("-o", "--output", required=True, metavar="FOLDER", help="write into this folder")
    text = f"compare with these, values to choose from behind them, too (default: {' '.join(PAPER_BASELINES)})"
    add("--method", nargs="+", default=PAPER_BASELINES, metavar="NAME", help=text)
    add("--way", default="5", metavar="N", help="classes per episode (default 5)")
    add("--shot", default="1,5", metavar="N,M", help="support rows per class (default 1,5)")
    add("--query", action=IntegerOption, low=1, default=15, help="query rows per class (default 15)")
    text = "episodes of each number of shots (default 1000)"
    add("--episodes", action=IntegerOption, low=1, default=1000, help=text)
    add("--split-seed", action=IntegerOption, low=0, help=SPLIT_SEED_HELP)
    add = parser.add_expert_group("more").add_argument
    text = "as of an evaluation"
    add("--imbalance", action=NumberOption, metavar="A", help=text)
    add("--encoder", metavar="FILE", help=text)
    add("--base", metavar="FILE", help=text)
    add("--image-size", action=IntegerOption, low=1, help=text)
    add("--normalize", default="none", metavar="VALUE", help=f"{text} (default none)")
    add("--seed", action=IntegerOption, low=0, default=0, help=f"{text} (default 0)")
    add("--device", default="cpu", metavar="NAME", help=f"{text} (default cpu)")
    add("--traceback", action="store_true", help=TRACEBACK_HELP)
    parser.set_defaults(unequal=False, allow_small=False, n_open_classes=0, unlabelled=0, distractors=0)
    parser.set_defaults(n_effective_classes=None, multinomial=False)
    return parser


def parse_paper_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line of ``paper``, and create the output folder; None means ``sys.argv``.

    Returns the options, with two more attributes: ``shots`` has the values of ``--shot`` as texts, and ``command`` is
    the command line as text, for the paper's appendix.
    """
    options = make_paper_parser().parse_args(arguments)
    parse_integer("--way", options.way, low=2)
    options.shots = [str(parse_integer("--shot", shot, low=1)) for shot in options.shot.split(",")]
    if len(set(options.shots)) < len(options.shots):
        raise_input_error("--shot", "have each value once", repr(options.shot), "Leave one out.")
    check_known_name("--normalize", options.normalize, names.ROW_NORMALIZATIONS)
    check_device("--device", options.device)
    with optional_packages():
        importlib.import_module("matplotlib")
    options.output = check_output_path("--output", options.output, folder=True)
    options.command = shlex.join(["python", "-m", names.EVALUATE_PROG, "paper", *(arguments or sys.argv[1:])])
    return options


def make_extract_parser() -> CommandParser:
    """Build the command-line parser of ``extract``."""
    text = "Embed pictures by a network, and write the features to a file that --dataset reads."
    parser = CommandParser(f"{names.EVALUATE_PROG} extract", text, EXTRACT_EXAMPLES)
    text = "a folder of pictures by class, perhaps in train, val and test, or KIND:ROOT as --dataset takes it; with "
    text += "--texts, or a checkpoint of ours, any data set"
    parser.add_argument("data", metavar="DATA", help=text)
    text = "FILE.onnx, FILE.pt2 (with what its metadata lack: FILE:size=224,mean=0.5/0.4/0.4,std=0.2), FILE.safetensors"
    text += " of 'train', FILE.py:FUNCTION (from pictures (n, 3, side, side) in [0, 1] to embeddings (n, dim)), "
    text += "efficientnet (of the extra pictures), timm:NAME, torchvision:NAME or open_clip:NAME:TAG; weights are "
    text += "taken from the cache of the library, and never downloaded"
    parser.add_argument("--backbone", required=True, metavar="NET", help=text)
    parser.add_argument("--weights", metavar="FILE", help="of a named network, instead of those in the cache")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.npz", help="a new file")
    text = "go on with the file, if the command was stopped, with the same arguments; a finished one is left as it is"
    parser.add_argument("--resume", action="store_true", help=text)
    text = "write the last maps of convolutions, for methods that look at places, by efficientnet or FILE.safetensors"
    parser.add_argument("--maps", action="store_true", help=text)
    parser.add_argument("--texts", action="store_true", help="embed the classes' names instead, by open_clip:NAME:TAG")
    add = parser.add_expert_group("how it computes").add_argument
    text = f"pictures at a time (default {PICTURE_BATCH_SIZE})"
    add("--batch", action=IntegerOption, low=1, default=PICTURE_BATCH_SIZE, help=text)
    add("--device", help="such as cpu or cuda, of a named network (default: cuda where there is one)")
    text = "pixels per side of the pictures that FILE.safetensors or FILE.py:FUNCTION takes, if it is not the default "
    text += "of --dataset"
    add("--image-size", action=IntegerOption, low=1, help=text)
    add = parser.add_expert_group("texts").add_argument
    text = "texts of a class, with {} for its name; several are averaged where they are used "
    text += f"(default: {CLIP_PROMPT_TEMPLATE})"
    add("--template", nargs="+", metavar="TEXT", help=text)
    text = "a line for each class: its name, a comma, tab or space, and its words; only the first of several is taken"
    add("--names", metavar="FILE", help=text)
    return parser


def parse_extract_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line of ``extract``; None means ``sys.argv``.

    Returns the options. Their ``output`` is a Path, and ``template`` is a list of at least one template.
    """
    options = make_extract_parser().parse_args(arguments)
    options.output = output = Path(options.output)
    if output.suffix.lower() != ".npz":
        raise_input_error("--output", "end in .npz", output, "Rename it.")
    check_output_path("--output", output)
    if output.exists() and not options.resume:
        raise_input_error("--output", "be a new file", f"{output}, which exists", "Pass another path, or --resume.")
    if not options.texts and (options.names or options.template):
        raise_input_error("--names" if options.names else "--template", "come with --texts", "none", "Leave it out.")
    if options.texts and options.maps:
        raise_input_error("--maps", "come without --texts", "both", "Leave one of the two out.")
    options.template = options.template or [CLIP_PROMPT_TEMPLATE]
    if bad := [template for template in options.template if template.count("{}") != 1]:
        remedy = f"Pass one such as {CLIP_PROMPT_TEMPLATE!r}."
        raise_input_error("--template", "have one {} for the name", repr(bad[0]), remedy)
    return options
