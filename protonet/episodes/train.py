"""The command ``python -m protonet.episodes train``: meta-train an encoder and keep it in a file."""

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
from protonet.episodes.loop import Outputs, train
from protonet.episodes.meta import Plan, begin_run, unpack_run
from protonet.episodes.tasks import Side, take_side

PROG = "protonet.episodes train"
#: The options that are whole numbers up to a million: the least one, the default, and what they are.
NUMBERS = {
    "way": (2, 64, "classes a training episode, or all base classes if they are fewer"),
    "shot": (1, 1, "support rows a class"),
    "query": (1, 1, "query rows a class"),
    "episodes-per-step": (1, 2, "episodes a step, shared by the processes"),
    "steps": (1, 2000, "steps, at the most"),
    "eval-every": (1, 100, "steps from one validation to the next"),
    "patience": (1, 8, "stop after so many validations without a new best"),
    "seed": (0, 0, "of the first weights, the episodes and the augmentation; up to 2^63 - 1"),
}


def make_parser() -> Parser:
    """Return the parser of the training's arguments."""
    parser = Parser(PROG, "Meta-train an encoder on base classes; the best on validation classes is kept.")
    data = "glyphs (default), digits, synthetic:FAMILY, FEATURES.npz, TABLE.csv, a folder of images by class, "
    data += "omniglot:ROOT or mini-imagenet:ROOT"
    parser.add_argument("--dataset", default="glyphs", help=data)
    split = "split the classes at random: 60 %% base, 15 %% validation, 25 %% novel"
    parser.add_argument("--split-seed", metavar="N", help=split)
    backbone = "conv for square grey images (default of glyphs, omniglot:ROOT and a folder of images), "
    backbone += "mlp for rows of any kind (default of all others)"
    parser.add_argument("--backbone", metavar="NAME", help=backbone)
    for name, (_, default, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", default=str(default), metavar="N", help=f"{text} (default {default})")
    parser.add_argument("--device", help="such as cpu or cuda (default: cuda where there is one)")
    output = "a new .safetensors file: checkpoints while it trains, and the encoder in the end"
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help=output)
    parser.add_argument("--resume", action="store_true", help="continue the run of that file, with the same arguments")
    log = "one JSON line a validation (under torchrun --log-file, for it takes --log for its own)"
    parser.add_argument("--log", "--log-file", metavar="FILE", help=log)
    parser.add_argument("--tensorboard", metavar="FOLDER", help="the same for TensorBoard")
    return parser


def run_train(arguments: Sequence[str] | None) -> None:
    """Train as the arguments say, print one line, and leave the encoder in the output.

    Raises:
        ImportError: A package that an option needs is missing.
        KeyboardInterrupt: After Ctrl-C, the checkpoint being written.
        ValueError: Arguments, data or a checkpoint that do not fit together.
    """
    options = make_parser().parse_args(arguments)
    backbone = check_name(PROG, "--backbone", options.backbone or choose_backbone(options.dataset), BACKBONES)
    numbers = {}
    for name, (low, _, _) in NUMBERS.items():
        key, high = name.replace("-", "_"), 2**63 - 1 if name == "seed" else MOST
        number = parse_whole(PROG, f"--{name}", getattr(options, key), low=low)
        numbers[key] = check_int(PROG, f"--{name}", number, low=low, high=high)
    split_seed = None if options.split_seed is None else parse_whole(PROG, "--split-seed", options.split_seed, low=0)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    with join_group(device) as group:
        if numbers["episodes_per_step"] % group.world_size:
            bound = f"be a multiple of the number of processes ({group.world_size})"
            fail(PROG, "--episodes-per-step", bound, numbers["episodes_per_step"], "Pass another number.")
        outputs = check_outputs(options) if group.rank == 0 else Outputs()
        stored = read_checkpoint(PROG, "--output", options.output) if options.resume else None
        from protonet.episodes.sources import load_source  # noqa: PLC0415 - of use once the arguments are right

        data = load_source(options.dataset, split_seed=split_seed)
        base, validation = (take_side(PROG, "--dataset", data, side) for side in ("base", "validation"))
        numbers["way"] = min(numbers["way"], len(base.names))
        sizes = {"dim": data.x.shape[1], "classes": len(base.names)}
        plan = Plan(dataset=options.dataset, split_seed=split_seed, backbone=backbone, **sizes, **numbers)
        check_rows(base, plan)
        if stored is not None:
            check_same_plan(plan, stored[1]["plan"])
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
    """Return the backbone for a data set: features may have the width of a square image without being one."""
    is_image = dataset == "glyphs" or dataset.startswith("omniglot:") or Path(dataset).is_dir()
    return "conv" if is_image else "mlp"


def check_outputs(options: argparse.Namespace) -> Outputs:
    """Return where results go, once it is known that they can.

    Raises:
        ImportError: What writes them is missing.
        ValueError: They cannot.
    """
    if Path(options.output).suffix != ".safetensors":
        fail(PROG, "--output", "end in .safetensors", options.output, "Rename it.")
    with optional_packages(PROG, INSTALL):
        importlib.import_module("safetensors")  # before the work, if it is to be missing
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


def check_device(device: str) -> None:
    """Raise a ValueError if torch has no such device, or none that holds numbers, as meta does not."""
    try:
        torch.zeros(1, device=device).cpu()
    except (AssertionError, RuntimeError) as error:
        got = f"{device} ({str(error).splitlines()[0]})"
        fail(PROG, "--device", "be one that torch has here", got, "Leave it out.")


def check_rows(base: Side, plan: Plan) -> None:
    """Raise a ValueError that names the smallest base class if it is too small for an episode."""
    needed, worst = plan.shot + plan.query, int(base.by_class.size.argmin())
    size = int(base.by_class.size[worst])
    if size < needed:
        limit, got = f"have {needed} rows a base class (--shot + --query)", f"class {base.names[worst]!r} with {size}"
        fail(PROG, "--dataset", limit, got, "Ask for fewer.")


def check_same_plan(plan: Plan, stored: dict[str, Any]) -> None:
    """Raise a ValueError that names what differs between the plans of a checkpoint and of the arguments."""
    words = {"dim": "features a row:", "classes": "base classes:"}
    differences = [
        f"{words.get(name, '--' + name.replace('_', '-'))} {stored.get(name)} there and {asked} here"
        for name, asked in plan._asdict().items()
        if stored.get(name) != asked
    ]
    if differences:
        remedy = "Pass the same, or another --output without --resume."
        fail(PROG, "--resume", "continue a run of the same settings", "; ".join(differences), remedy)
