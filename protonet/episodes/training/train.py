"""The command ``python -m protonet.episodes train``: meta-train an encoder and write it to a file."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protonet._checks import check_int, check_number, fail, optional_packages
from protonet.episodes.draws.sampler import MOST
from protonet.episodes.evaluation.distributed import join_group
from protonet.episodes.networks.augmentation import find_shape
from protonet.episodes.networks.backbones import BACKBONES
from protonet.episodes.networks.checkpoints import (
    INSTALL,
    Plan,
    complete_plan,
    find_head_way,
    load_encoder,
    read_checkpoint,
)
from protonet.episodes.networks.heads import HEADS
from protonet.episodes.training.meta import Outputs, begin_run, train, unpack_run
from protonet.episodes.training.objectives import OBJECTIVES
from protonet.episodes.training.tasks import Side, take_side
from protonet.ui.command_line import Parser, check_name, check_writable_file, check_writable_folder, parse_whole

PROG = "protonet.episodes train"


#: Options that are whole numbers: least value, default, help. The largest value is a million, but for the seed.
NUMBERS = {
    "way": (2, 64, "classes per training episode; all base classes if they are fewer"),
    "shot": (1, 1, "support rows per class"),
    "query": (1, 1, "query rows per class"),
    "episodes-per-step": (1, 2, "episodes per step, shared by the processes"),
    "steps": (1, 2000, "most steps"),
    "eval-every": (1, 100, "steps from one validation to the next"),
    "patience": (1, 8, "stop after this many validations without a new best score"),
    "seed": (0, 0, "of the initial weights, the episodes and the augmentation; up to 2^63 - 1"),
}
#: Defaults of the objectives that learn from episodes such as those of the evaluation, as their papers do.
EPISODIC = {"way": 5, "query": 15, "episodes-per-step": 4}
#: Options of MAML and ANIL alone: their names among the plan's fields, and their defaults.
INNER = {"inner-steps": 5, "inner-rate": 0.01, "first-order": False, "head": "classes"}
RATES = {"prototypes": 3e-3, "feat": 1e-3, "maml": 1e-3, "anil": 1e-3}  #: AdamW's learning rate by objective.


#: Those of ``NUMBERS`` that most people need.
USUAL = ("way", "shot", "steps", "seed")
EXAMPLES = (
    "python -m protonet.episodes train -o encoder.safetensors",
    "python -m protonet.episodes train --dataset cub:CUB_200_2011 --backbone resnet12 -o cub.safetensors",
    "python -m protonet.episodes train --resume -o encoder.safetensors",
)


def make_parser() -> Parser:
    """Return the parser of the training's arguments."""
    what = "Meta-train an encoder on base classes; the weights best on validation classes are kept."
    parser = Parser(PROG, what, EXAMPLES)
    add = parser.add_argument
    data = "glyphs (default), digits, synthetic:FAMILY, FEATURES.npz, TABLE.csv, a folder of images by class, or "
    data += "KIND:ROOT, of mini-imagenet, tiered-imagenet, cub, cifar-fs, fc100 and omniglot"
    add("--dataset", default="glyphs", metavar="DATA", help=data)
    add("--split-seed", metavar="N", help="split the classes at random: 60 %% base, 15 %% validation, 25 %% novel")
    backbone = "conv (default for square grey images), conv4 (default for RGB), resnet12, or mlp, for rows of any kind"
    add("--backbone", metavar="NAME", help=backbone)
    objective = "prototypes of many classes (default); feat, which also adapts them to each other; maml and anil, "
    objective += "gradient steps on each episode's support, of the whole network or of its last layer"
    add("--objective", default="prototypes", metavar="NAME", help=objective)
    output = "a new .safetensors file: the checkpoint during training, and the encoder at the end"
    add("-o", "--output", required=True, metavar="FILE", help=output)
    add("--resume", action="store_true", help="continue the run of that file, if it is there, with the same arguments")
    add("--device", metavar="NAME", help="such as cpu or cuda (default: cuda where there is one)")
    episodes = parser.add_expert_group("episodes and validation").add_argument
    for name, (_, default, text) in NUMBERS.items():
        other = f"; {EPISODIC[name]} for feat, maml, anil" if name in EPISODIC else ""
        own = add if name in USUAL else episodes
        own(f"--{name}", metavar="N", help=f"{text} (default {default}{other})")

    add = parser.add_expert_group("learning").add_argument
    add("--learning-rate", metavar="R", help="AdamW's (default 0.003; 0.001 for feat, maml, anil)")
    add("--inner-steps", metavar="N", help="of maml and anil: gradient steps on the support (default 5)")
    add("--inner-rate", metavar="R", help="of maml and anil: the rate of these steps (default 0.01)")
    text = "of maml and anil: take these steps' gradients for constants, which is faster"
    add("--first-order", action="store_true", help=text)
    text = "of maml and anil: what the last layer begins at, classes (default), learned weights of each class, for "
    text += "episodes of --way classes alone, or zero, for any number of classes"
    add("--head", metavar="NAME", help=text)
    text = "of resnet12: drop this share of its maps by DropBlock, such as 0.1 (default 0)"
    add("--dropblock", default="0", metavar="R", help=text)
    text = "begin at the encoder of another run, of the same backbone, such as one of prototypes (default: new weights)"
    add("--start", metavar="FILE", help=text)

    add = parser.add_expert_group("data and logs").add_argument
    size = "pixels per side of pictures (default: as their authors take them; 28, and grey, for a folder by class)"
    add("--image-size", metavar="N", help=size)
    log = "write one JSON line per validation (--log-file under torchrun, which has a --log of its own)"
    add("--log", "--log-file", metavar="FILE", help=log)
    add("--tensorboard", metavar="FOLDER", help="write the same for TensorBoard")
    return parser


def run_train(arguments: Sequence[str] | None) -> None:
    """Train as the arguments say, write the encoder and print one line.

    Args:
        arguments: Those after ``train``; None for the command line's.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once the checkpoint is written.
        MissingPackageError: A package that an option needs is missing.
        InputError: Arguments, data or a checkpoint do not fit together.
    """
    options = make_parser().parse_args(arguments)
    if options.backbone is not None:
        check_name("--backbone", options.backbone, BACKBONES)
    objective = check_name("--objective", options.objective, OBJECTIVES)
    numbers: dict[str, Any] = {}
    for name, (low, default, _) in NUMBERS.items():
        key, high = name.replace("-", "_"), 2**63 - 1 if name == "seed" else MOST
        usual = default if objective == "prototypes" else EPISODIC.get(name, default)
        text = getattr(options, key)
        number = usual if text is None else parse_whole(f"--{name}", text, low=low)
        numbers[key] = check_int(PROG, f"--{name}", number, low=low, high=high)
    more = _parse_objective(options, objective)
    split_seed = None if options.split_seed is None else parse_whole("--split-seed", options.split_seed, low=0)
    size = None if options.image_size is None else parse_whole("--image-size", options.image_size, low=1)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(device)
    with join_group(device) as group:
        if numbers["episodes_per_step"] % group.world_size:
            bound = f"be a multiple of the number of processes ({group.world_size})"
            fail(PROG, "--episodes-per-step", bound, numbers["episodes_per_step"], "Pass another number.")
        outputs = _check_outputs(options) if group.rank == 0 else Outputs()
        begun = options.resume and Path(options.output).exists()  # a run may be killed before its first checkpoint
        stored = read_checkpoint(PROG, "--output", options.output) if begun else None
        if options.start is not None and stored is None:
            read_checkpoint(PROG, "--start", options.start)  # before the work, if it is missing
        from protonet.episodes.features.sources import load_source  # noqa: PLC0415 - needed once the arguments are right

        data = load_source(options.dataset, split_seed=split_seed, image_size=size)
        base, validation = (take_side(PROG, "--dataset", data, side) for side in ("base", "validation"))
        numbers["way"] = min(numbers["way"], len(base.names))
        dim = data.x.shape[1]
        backbone = options.backbone or choose_backbone(options.dataset, dim)
        if more["dropblock"] and backbone != "resnet12":
            fail(PROG, "--dropblock", "be of the backbone resnet12", f"that of {backbone}", "Leave it out.")
        plan = Plan(options.dataset, split_seed, dim, len(base.names), backbone, **numbers, **more)
        _check_rows(base, validation, plan)
        if stored is not None:
            _check_same_plan(plan, complete_plan(stored[1]["plan"]))
        run = begin_run(plan, device, None if stored is not None else _load_start(plan))
        if stored is not None:
            unpack_run(run, *stored)
        train(run, base, validation, group, outputs)
    if outputs.checkpoint is not None:
        step, accuracy, half_width = run.best
        score = f"{100 * accuracy:.2f} ±{100 * half_width:.2f} % on validation classes"
        before = "untrained network" if plan.start is None else "encoder that it began at"
        score = f"{score} after step {step:,}" if step else f"no validation beat the {before}: {score}"
        name = plan.backbone if objective == "prototypes" else f"{plan.backbone} by {objective}"
        print(f"{outputs.checkpoint}: {name}, {run.step:,} steps, {score}")


def choose_backbone(dataset: str, dim: int) -> str:
    """Return the default backbone for a data set of ``dim`` features: "conv" or "conv4" for images, grey or RGB.

    The number of features alone does not tell: it may be a square without the rows being images.
    """
    kind, colon, _ = dataset.partition(":")
    is_image = dataset == "glyphs" or Path(dataset).is_dir() or (bool(colon) and kind != "synthetic")
    shape = find_shape(dim)
    if not is_image or shape is None:
        return "mlp"
    return "conv" if shape[0] == 1 else "conv4"


def _parse_objective(options: argparse.Namespace, objective: str) -> dict[str, Any]:
    """Return those fields of the plan that depend on the objective, from the options."""
    given = {name: getattr(options, name.replace("-", "_")) for name in INNER}
    chosen: dict[str, Any] = {"objective": objective, "start": options.start}
    if objective in ("maml", "anil"):
        texts = {name: INNER[name] if given[name] is None else given[name] for name in INNER}
        chosen["inner_steps"] = parse_whole("--inner-steps", str(texts["inner-steps"]), low=1)
        chosen["inner_rate"] = _parse_rate("--inner-rate", texts["inner-rate"], strict=True)
        chosen["first_order"] = bool(texts["first-order"])
        chosen["head"] = check_name("--head", str(texts["head"]), HEADS)
    for name, value in given.items():
        if value and objective not in ("maml", "anil"):
            fail(PROG, f"--{name}", "be of the objectives maml and anil", f"that of {objective}", "Leave it out.")
    rate = RATES[objective] if options.learning_rate is None else options.learning_rate
    chosen["learning_rate"] = _parse_rate("--learning-rate", rate, strict=True)
    chosen["dropblock"] = _parse_rate("--dropblock", options.dropblock, strict=False)
    if chosen["dropblock"] >= 1:
        fail(PROG, "--dropblock", "be a share below 1", options.dropblock, "Pass a number such as 0.1.")
    return chosen


def _parse_rate(argument: str, text: object, *, strict: bool) -> float:
    """Return a text or a number as a finite float >= 0, or > 0 if ``strict``."""
    try:
        value: object = float(str(text))
    except ValueError:
        value = math.nan
    return check_number(PROG, argument, value, low=0, strict=strict, remedy="Pass a number such as 0.01.")


def _load_start(plan: Plan) -> nn.Module | None:
    """Return the encoder that a plan begins at, once it is of the same backbone."""
    if plan.start is None:
        return None
    metadata = read_checkpoint(PROG, "--start", plan.start)[1]
    backbone, before = metadata["backbone"], complete_plan(metadata["plan"])
    from protonet.episodes.features.sources import same_source  # noqa: PLC0415 - as in run_train

    if same_source(before["dataset"], plan.dataset) and before["split_seed"] != plan.split_seed:
        constraint = f"be that of --start, {before['split_seed']}, which learned its base classes"
        fail(PROG, "--split-seed", constraint, plan.split_seed, "Pass the same, or begin without --start.")
    if backbone != {"name": plan.backbone, "dim": plan.dim}:
        wanted = f"hold an encoder of {plan.backbone} and {plan.dim} features per row"
        fail(PROG, "--start", wanted, f"{backbone['name']} and {backbone['dim']}", "Pass another file or --backbone.")
    return load_encoder(plan.start)


def _check_outputs(options: argparse.Namespace) -> Outputs:
    """Return where results are written, after checking that they can be."""
    if Path(options.output).suffix != ".safetensors":
        fail(PROG, "--output", "end in .safetensors", options.output, "Rename it.")
    with optional_packages(PROG, INSTALL):
        importlib.import_module("safetensors")  # if it is missing, before the work
    checkpoint = check_writable_file("--output", options.output)
    if checkpoint.exists() and not options.resume:
        remedy = "Continue its run with --resume, or pass another path."
        fail(PROG, "--output", "be a new file", f"{checkpoint}, which exists", remedy)
    log = None if options.log is None else check_writable_file("--log", options.log)
    if log is not None and log.resolve() == checkpoint.resolve():
        fail(PROG, "--log", "be another file than --output", log, "Pass another path.")
    if options.tensorboard is None:
        return Outputs(checkpoint, log)
    with optional_packages(PROG, 'pip install "protonet[tensorboard]"'):
        importlib.import_module("torch.utils.tensorboard")
    return Outputs(checkpoint, log, check_writable_folder("--tensorboard", options.tensorboard))


def _check_device(device: str) -> None:
    """Raise an InputError if torch has no such device, or one that stores no numbers, such as meta."""
    try:
        torch.zeros(1, device=device).cpu()
    except (AssertionError, RuntimeError) as error:
        got = f"{device} ({str(error).splitlines()[0]})"
        fail(PROG, "--device", "be one that torch has here", got, "Leave it out.")


def _check_rows(base: Side, validation: Side, plan: Plan) -> None:
    """Raise an InputError if a base class or too many validation classes have too few rows for an episode."""
    needed, worst = plan.shot + plan.query, int(base.by_class.size.argmin())
    if (size := int(base.by_class.size[worst])) < needed:
        limit = f"have {needed} rows per base class (--shot + --query)"
        fail(PROG, "--dataset", limit, f"class {base.names[worst]!r} with {size}", "Ask for fewer rows.")
    usable = int((validation.by_class.size > plan.shot).sum())
    least = find_head_way(plan._asdict()) or 2
    if plan.objective != "prototypes" and usable < least:  # which is validated with as many rows as it trains with
        limit = f"have at least {least} validation classes with {plan.shot + 1} rows (--shot + 1)"
        other = ", for fewer classes (--way), or for --head zero" if least > 2 else ""
        fail(PROG, "--dataset", limit, usable, f"Ask for fewer rows{other}.")


def _check_same_plan(plan: Plan, stored: dict[str, Any]) -> None:
    """Raise an InputError that names what differs between the plan of the arguments and that of a checkpoint."""
    words = {"dim": "features per row:", "classes": "base classes:"}
    differences = [
        f"{words.get(name, '--' + name.replace('_', '-'))} {stored.get(name)} there and {asked} here"
        for name, asked in plan._asdict().items()
        if stored.get(name) != asked
    ]
    if differences:
        remedy = "Pass the same, or another --output without --resume."
        fail(PROG, "--resume", "continue a run of the same settings", "; ".join(differences), remedy)
