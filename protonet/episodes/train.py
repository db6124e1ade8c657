"""The command ``python -m protonet.episodes train``: meta-train an encoder and write it to a file."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from protonet._checks import check_int, fail, optional_packages
from protonet.commands.common import Parser, check_name, check_writable_file, check_writable_folder, parse_whole
from protonet.episodes.backbones import BACKBONES
from protonet.episodes.checkpoints import INSTALL, read_checkpoint
from protonet.episodes.distributed import join_group
from protonet.episodes.draws import MOST
from protonet.episodes.meta import Outputs, begin_run, train, unpack_run
from protonet.episodes.tasks import Plan, Side, take_side

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


def make_parser() -> Parser:
    """Return the parser of the training's arguments."""
    parser = Parser(PROG, "Meta-train an encoder on base classes; the weights best on validation classes are kept.")
    data = "glyphs (default), digits, synthetic:FAMILY, FEATURES.npz, TABLE.csv, a folder of images by class, or "
    data += "KIND:ROOT, of mini-imagenet, tiered-imagenet, cub, cifar-fs, fc100 and omniglot"
    parser.add_argument("--dataset", default="glyphs", help=data)
    size = "pixels per side of pictures (default: as their authors take them; 28, and grey, for a folder by class)"
    parser.add_argument("--image-size", metavar="N", help=size)
    split = "split the classes at random: 60 %% base, 15 %% validation, 25 %% novel"
    parser.add_argument("--split-seed", metavar="N", help=split)
    backbone = "conv for square grey images (default of glyphs, omniglot:ROOT and a folder of images), "
    backbone += "mlp for rows of any kind (default of all others)"
    parser.add_argument("--backbone", metavar="NAME", help=backbone)
    for name, (_, default, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", default=str(default), metavar="N", help=f"{text} (default {default})")
    parser.add_argument("--device", help="such as cpu or cuda (default: cuda where there is one)")
    output = "a new .safetensors file: the checkpoint during training, and the encoder at the end"
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help=output)
    parser.add_argument("--resume", action="store_true", help="continue the run of that file, with the same arguments")
    log = "write one JSON line per validation (--log-file under torchrun, which has a --log of its own)"
    parser.add_argument("--log", "--log-file", metavar="FILE", help=log)
    parser.add_argument("--tensorboard", metavar="FOLDER", help="write the same for TensorBoard")
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
    backbone = check_name(PROG, "--backbone", options.backbone or choose_backbone(options.dataset), BACKBONES)
    numbers = {}
    for name, (low, _, _) in NUMBERS.items():
        key, high = name.replace("-", "_"), 2**63 - 1 if name == "seed" else MOST
        number = parse_whole(PROG, f"--{name}", getattr(options, key), low=low)
        numbers[key] = check_int(PROG, f"--{name}", number, low=low, high=high)
    split_seed = None if options.split_seed is None else parse_whole(PROG, "--split-seed", options.split_seed, low=0)
    size = None if options.image_size is None else parse_whole(PROG, "--image-size", options.image_size, low=1)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_device(device)
    with join_group(device) as group:
        if numbers["episodes_per_step"] % group.world_size:
            bound = f"be a multiple of the number of processes ({group.world_size})"
            fail(PROG, "--episodes-per-step", bound, numbers["episodes_per_step"], "Pass another number.")
        outputs = _check_outputs(options) if group.rank == 0 else Outputs()
        stored = read_checkpoint(PROG, "--output", options.output) if options.resume else None
        from protonet.episodes.sources import load_source  # noqa: PLC0415 - needed once the arguments are right

        data = load_source(options.dataset, split_seed=split_seed, image_size=size)
        base, validation = (take_side(PROG, "--dataset", data, side) for side in ("base", "validation"))
        numbers["way"] = min(numbers["way"], len(base.names))
        sizes = {"dim": data.x.shape[1], "classes": len(base.names)}
        plan = Plan(dataset=options.dataset, split_seed=split_seed, backbone=backbone, **sizes, **numbers)
        _check_rows(base, plan)
        if stored is not None:
            _check_same_plan(plan, stored[1]["plan"])
        run = begin_run(plan, device)
        if stored is not None:
            unpack_run(run, *stored)
        train(run, base, validation, group, outputs)
    if outputs.checkpoint is not None:
        step, accuracy, half_width = run.best
        score = f"{100 * accuracy:.2f} ±{100 * half_width:.2f} % on validation classes"
        score = f"{score} after step {step:,}" if step else f"no validation beat the untrained network: {score}"
        print(f"{outputs.checkpoint}: {plan.backbone}, {run.step:,} steps, {score}")


def choose_backbone(dataset: str) -> str:
    """Return the default backbone for a data set: "conv" for images alone.

    The number of features does not tell: it may be a square without the rows being images.
    """
    is_image = dataset == "glyphs" or dataset.startswith("omniglot:") or Path(dataset).is_dir()
    return "conv" if is_image else "mlp"


def _check_outputs(options: argparse.Namespace) -> Outputs:
    """Return where results are written, after checking that they can be."""
    if Path(options.output).suffix != ".safetensors":
        fail(PROG, "--output", "end in .safetensors", options.output, "Rename it.")
    with optional_packages(PROG, INSTALL):
        importlib.import_module("safetensors")  # if it is missing, before the work
    checkpoint = check_writable_file(PROG, "--output", options.output)
    if checkpoint.exists() and not options.resume:
        remedy = "Continue its run with --resume, or pass another path."
        fail(PROG, "--output", "be a new file", f"{checkpoint}, which exists", remedy)
    log = None if options.log is None else check_writable_file(PROG, "--log", options.log)
    if log is not None and log.resolve() == checkpoint.resolve():
        fail(PROG, "--log", "be another file than --output", log, "Pass another path.")
    if options.tensorboard is None:
        return Outputs(checkpoint, log)
    with optional_packages(PROG, 'pip install "protonet[tensorboard]"'):
        importlib.import_module("torch.utils.tensorboard")
    return Outputs(checkpoint, log, check_writable_folder(PROG, "--tensorboard", options.tensorboard))


def _check_device(device: str) -> None:
    """Raise an InputError if torch has no such device, or one that stores no numbers, such as meta."""
    try:
        torch.zeros(1, device=device).cpu()
    except (AssertionError, RuntimeError) as error:
        got = f"{device} ({str(error).splitlines()[0]})"
        fail(PROG, "--device", "be one that torch has here", got, "Leave it out.")


def _check_rows(base: Side, plan: Plan) -> None:
    """Raise an InputError that names the smallest base class if it has too few rows for an episode."""
    needed, worst = plan.shot + plan.query, int(base.by_class.size.argmin())
    if (size := int(base.by_class.size[worst])) < needed:
        limit = f"have {needed} rows per base class (--shot + --query)"
        fail(PROG, "--dataset", limit, f"class {base.names[worst]!r} with {size}", "Ask for fewer rows.")


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
