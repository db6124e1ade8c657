"""The command ``python -m protonet.episodes train``: meta-train an encoder and keep it in a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from protonet._checks import check_int, fail
from protonet._command import Parser, check_name, check_writable_file, check_writable_folder, parse_whole
from protonet.datasets.dataset import optional_packages
from protonet.episodes.backbones import BACKBONES
from protonet.episodes.checkpoints import read_checkpoint
from protonet.episodes.distributed import join_group
from protonet.episodes.loop import Outputs, train
from protonet.episodes.meta import Plan, begin_run, unpack_run
from protonet.episodes.sampling import check_setting
from protonet.episodes.tasks import take_side

PROG = "protonet.episodes train"
#: The options that are whole numbers: the least one, the default, and what they are.
NUMBERS = {
    "way": (2, 64, "classes a training episode, or all base classes if they are fewer"),
    "shot": (1, 1, "support rows a class"),
    "query": (1, 1, "query rows a class"),
    "episodes-per-step": (1, 2, "episodes a step, shared by the processes"),
    "steps": (1, 2000, "steps, at the most"),
    "eval-every": (1, 100, "steps from one validation to the next"),
    "patience": (1, 8, "stop after so many validations without a new best"),
    "seed": (0, 0, "of the first weights, the episodes and the augmentation"),
}


def make_parser() -> Parser:
    """Return the parser of the training's arguments."""
    parser = Parser(PROG, "Meta-train an encoder on base classes; the best on validation classes is kept.")
    data = "glyphs (default), digits, synthetic:FAMILY, FEATURES.npz, TABLE.csv, a folder of images by class, "
    data += "omniglot:ROOT or mini-imagenet:ROOT"
    parser.add_argument("--dataset", default="glyphs", help=data)
    split = "split the classes at random: 60 %% base, 15 %% validation, 25 %% novel"
    parser.add_argument("--split-seed", metavar="N", help=split)
    backbone = "conv for square grey images (default), mlp for rows of any kind"
    parser.add_argument("--backbone", default="conv", metavar="NAME", help=backbone)
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
    check_name(PROG, "--backbone", options.backbone, BACKBONES)
    numbers = {
        name.replace("-", "_"): parse_whole(PROG, f"--{name}", getattr(options, name.replace("-", "_")), low=low)
        for name, (low, _, _) in NUMBERS.items()
    }
    check_int(PROG, "--seed", numbers["seed"], low=0, high=2**63 - 1)
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
        base, validation = take_side(data, "base"), take_side(data, "validation")
        numbers["way"] = min(numbers["way"], len(base.names))
        sizes = {"dim": data.x.shape[1], "classes": len(base.names)}
        plan = Plan(dataset=options.dataset, split_seed=split_seed, backbone=options.backbone, **sizes, **numbers)
        check_setting(PROG, base.by_class, plan.setting, base.names)
        if stored is not None:
            check_same_plan(plan, stored[1]["plan"])
        run = begin_run(plan, device)
        if stored is not None:
            unpack_run(run, *stored)
        train(run, base, validation, group, outputs)
    if outputs.checkpoint is not None:
        step, accuracy, half_width = run.best
        score = f"{100 * accuracy:.2f} ±{100 * half_width:.2f} % on validation classes after step {step:,}"
        print(f"{outputs.checkpoint}: {plan.backbone}, {run.step:,} steps, {score}")


def check_outputs(options: argparse.Namespace) -> Outputs:
    """Return where results go, once it is known that they can, or raise a ValueError."""
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
        import torch.utils.tensorboard as _  # noqa: F401, PLC0415 - before the work, if it is to be missing
    return Outputs(checkpoint, log, check_writable_folder(PROG, "--tensorboard", options.tensorboard))


def check_device(device: str) -> None:
    """Raise a ValueError if torch has no such device."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        got = f"{device} ({str(error).splitlines()[0]})"
        fail(PROG, "--device", "be one that torch has here", got, "Leave it out.")


def check_same_plan(plan: Plan, stored: dict[str, Any]) -> None:
    """Raise a ValueError that names what differs between the plans of a checkpoint and of the arguments."""
    differences = [
        f"--{name.replace('_', '-')} {stored.get(name)} there and {asked} here"
        for name, asked in plan._asdict().items()
        if stored.get(name) != asked
    ]
    if differences:
        remedy = "Pass the same, or another --output without --resume."
        fail(PROG, "--resume", "continue a run of the same settings", "; ".join(differences), remedy)
