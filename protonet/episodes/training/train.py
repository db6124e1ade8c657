"""The command ``python -m protonet.episodes train``: meta-train an encoder and write it to a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protonet._validation import check_device
from protonet.episodes.evaluation.distributed import join_group
from protonet.episodes.networks.augmentation import infer_image_shape
from protonet.episodes.networks.checkpoints import (
    TrainingPlan,
    complete_plan,
    get_head_way,
    load_encoder,
    read_checkpoint,
)
from protonet.episodes.training.meta import Outputs, begin_run, train, unpack_run
from protonet.episodes.training.tasks import Side, score_raw_features, select_side
from protonet.errors import raise_input_error


def run_train(options: argparse.Namespace) -> None:
    """Train as `protonet.episodes.arguments.read_train` says, write the encoder and print one line.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once the checkpoint is written.
        InputError: Arguments, data or a checkpoint do not fit together; or the best encoder is not more accurate than
            the raw features on the validation classes, and its file is removed.
    """
    integers, more, objective = dict(options.integers), options.more, options.objective
    split_seed, size = options.split_seed, options.image_size
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device("device", device)
    with join_group(device) as group:
        if integers["episodes_per_step"] % group.world_size:
            bound = f"be a multiple of the number of processes ({group.world_size})"
            raise_input_error("episodes_per_step", bound, integers["episodes_per_step"], "Pass another number.")
        outputs = Outputs(*map(options.paths.get, ("output", "log", "tensorboard")))
        begun = options.resume and Path(options.output).exists()  # a run may be killed before its first checkpoint
        stored = read_checkpoint("output", options.output) if begun else None
        if options.start is not None and stored is None:
            read_checkpoint("start", options.start)  # before the work, if it is missing
        from protonet.episodes.features.sources import load_source  # noqa: PLC0415 - needed once the arguments are right

        data = load_source(options.dataset, split_seed=split_seed, image_size=size)
        base, validation = (select_side("dataset", data, side) for side in ("base", "validation"))
        integers["way"] = min(integers["way"], len(base.names))
        dim = data.x.shape[1]
        backbone = options.backbone or choose_backbone(options.dataset, dim)
        if more["dropblock"] and backbone != "resnet12":
            raise_input_error("dropblock", "be of the backbone resnet12", f"that of {backbone}", "Leave it out.")
        plan = TrainingPlan(options.dataset, split_seed, dim, len(base.names), backbone, **integers, **more)
        _check_rows(base, validation, plan)
        if stored is not None:
            _check_same_plan(plan, complete_plan(stored[1]["plan"]))
        run = begin_run(plan, device, None if stored is not None else _load_start(plan))
        if stored is not None:
            unpack_run(run, *stored)
        train(run, base, validation, group, outputs)
        raw_method, raw = score_raw_features(validation, plan, group)
    if outputs.checkpoint is not None:
        step, accuracy, half_width = run.best
        score = f"{100 * accuracy:.2f} ±{100 * half_width:.2f} % on validation classes"
        if accuracy <= raw.accuracy:
            outputs.checkpoint.unlink()
            baseline = f"{100 * raw.accuracy:.2f} ±{100 * raw.half_width:.2f} % ({raw_method} on raw features)"
            remedy = f"{outputs.checkpoint} is not written. Use the features without an encoder, or train for longer "
            remedy += "(`steps`, `patience`), at another `learning_rate` or on more classes."
            raise_input_error("accuracy", f"be above {baseline}", score, remedy)
        before = "untrained network" if plan.start is None else "encoder that it began at"
        score = f"{score} after step {step:,}" if step else f"no validation beat the {before}: {score}"
        name = plan.backbone if objective == "prototypes" else f"{plan.backbone} by {objective}"
        print(f"{outputs.checkpoint}: {name}, {run.step:,} steps, {score}")


def choose_backbone(dataset: str, dim: int) -> str:
    """Return the default backbone for a data set of ``dim`` features: "conv" or "conv4" for images, grey or RGB.

    The number of features is not enough: it may be a square although the rows are not images.
    """
    kind, colon, _ = dataset.partition(":")
    is_image = dataset == "glyphs" or Path(dataset).is_dir() or (bool(colon) and kind != "synthetic")
    shape = infer_image_shape(dim)
    if not is_image or shape is None:
        return "mlp"
    return "conv" if shape[0] == 1 else "conv4"


def _load_start(plan: TrainingPlan) -> nn.Module | None:
    """Return the encoder that a plan begins at, once it is of the same backbone."""
    if plan.start is None:
        return None
    metadata = read_checkpoint("start", plan.start)[1]
    backbone, before = metadata["backbone"], complete_plan(metadata["plan"])
    from protonet.episodes.features.sources import same_source  # noqa: PLC0415 - as in run_train

    if same_source(before["dataset"], plan.dataset) and before["split_seed"] != plan.split_seed:
        constraint = f"be that of `start`, {before['split_seed']}, which learned its base classes"
        raise_input_error("split_seed", constraint, plan.split_seed, "Pass the same, or begin without `start`.")
    if backbone != {"name": plan.backbone, "dim": plan.dim}:
        constraint = f"hold an encoder of {plan.backbone} and {plan.dim} features per row"
        raise_input_error(
            "start", constraint, f"{backbone['name']} and {backbone['dim']}", "Pass another file or `backbone`."
        )
    return load_encoder(plan.start)


def _check_rows(base: Side, validation: Side, plan: TrainingPlan) -> None:
    """Raise an InputError if a base class or too many validation classes have too few rows for an episode."""
    needed, worst = plan.shot + plan.query, int(base.by_class.size.argmin())
    if (size := int(base.by_class.size[worst])) < needed:
        limit = f"have {needed} rows per base class (`shot` + `query`)"
        raise_input_error("dataset", limit, f"class {base.names[worst]!r} with {size}", "Ask for fewer rows.")
    usable = int((validation.by_class.size > plan.shot).sum())
    min_classes = get_head_way(plan._asdict()) or 2
    if (
        plan.objective != "prototypes" and usable < min_classes
    ):  # which is validated with as many rows as it trains with
        limit = f"have at least {min_classes} validation classes with {plan.shot + 1} rows (`shot` + 1)"
        other = ", for fewer classes (`way`), or for `head` zero" if min_classes > 2 else ""
        raise_input_error("dataset", limit, usable, f"Ask for fewer rows{other}.")


def _check_same_plan(plan: TrainingPlan, stored: dict[str, Any]) -> None:
    """Raise an InputError that names what differs between the plan of the arguments and that of a checkpoint."""
    words = {"dim": "features per row:", "classes": "base classes:"}
    differences = [
        f"{words.get(name, f'`{name}`')} {stored.get(name)} there and {value} here"
        for name, value in plan._asdict().items()
        if stored.get(name) != value
    ]
    if differences:
        remedy = "Pass the same, or another `output` without `resume`."
        raise_input_error("resume", "continue a run of the same settings", "; ".join(differences), remedy)
