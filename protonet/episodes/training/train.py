"""The command ``python -m protonet.episodes train``: meta-train an encoder and write it to a file.

In this order: a training run and its steps, its checkpoints, the training loop with its log, and the command.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from protonet._io import progress_bar
from protonet._validation import check_device
from protonet.episodes.evaluation.distributed import ProcessGroup, join_group
from protonet.episodes.features.sources import is_same_source, load_source
from protonet.episodes.names import TrainingPlan
from protonet.episodes.networks.augmentation import infer_image_shape
from protonet.episodes.networks.backbones import measure_statistics
from protonet.episodes.networks.checkpoints import (
    BEST,
    HEAD,
    load_encoder,
    read_checkpoint,
    select_prefix,
    split_head,
    write_checkpoint,
)
from protonet.episodes.training.objectives import LOSSES, TRAINING_RECIPE, Learner, make_learner
from protonet.episodes.training.tasks import Score, Side, draw_batch, score_encoder, score_raw_features, select_side
from protonet.errors import raise_input_error

#: Prefixes of the names of a checkpoint's tensors, but for the prefix of the best weights.
LEARNER, AVERAGED, OPTIMIZER = "learner.", "average.", "optimizer."


@dataclass
class TrainingRun:
    """The state of a training run between two steps, which determines all following steps."""

    plan: TrainingPlan  #: The settings.
    learner: Learner  #: The encoder and the other trained modules.
    optimizer: torch.optim.AdamW  #: The optimizer of the learner's parameters.
    average: nn.Module  #: The encoder with averaged weights, in evaluation mode.
    head: nn.Module  #: The learner's head with averaged weights.
    best_weights: dict[str, Tensor]  #: The averaged weights with the best validation score.
    best: Score  #: The best validation score.
    step: int  #: The number of steps taken.
    losses: list[list[float]]  #: The losses of each step since the last validation.

    @property
    def finished(self) -> bool:
        """Whether all steps are taken, or the patience is exhausted."""
        since = self.step - self.best.step
        return self.step >= self.plan.steps or since >= self.plan.patience * self.plan.eval_every


def begin_run(plan: TrainingPlan, device: str, start: nn.Module | None = None) -> TrainingRun:
    """Create a run before its first step on a device, perhaps with the weights of the encoder ``start``."""
    learner = make_learner(plan, torch.Generator().manual_seed(plan.seed))
    encoder = learner.encoder
    if start is not None:
        encoder.load_state_dict(start.state_dict())
    learner.to(device)
    head_parameters = [parameter for name, parameter in learner.named_parameters() if not name.startswith("encoder.")]
    groups: list[dict[str, object]] = [
        {"params": list(encoder.parameters())},
        {"params": head_parameters, "weight_decay": 0.0},
    ]
    weight_decay = 0.0 if plan.objective == "protonet" else TRAINING_RECIPE.weight_decay
    optimizer = torch.optim.AdamW(groups, lr=plan.learning_rate, weight_decay=weight_decay)
    average, head = (copy.deepcopy(module).requires_grad_(False).eval() for module in (encoder, learner.head))
    run = TrainingRun(plan, learner, optimizer, average, head, {}, Score(0, 0.0, 0.0), 0, [])
    run.best_weights = copy.deepcopy(_list_averaged_weights(run))
    return run


def _list_averaged_weights(run: TrainingRun) -> dict[str, Tensor]:
    """List the averaged weights of the encoder and the head by name."""
    return run.average.state_dict() | {HEAD + name: tensor for name, tensor in run.head.state_dict().items()}


def take_step(run: TrainingRun, model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Take one optimizer step on a batch from `draw_batch`, update the averaged weights, and return the losses in nats.

    The ``model`` is the run's learner, or a wrapper of it that shares gradients among processes.

    Source: averaging, Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992).
    """
    device = next(run.learner.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout is equal in resumed runs
        seed = np.random.SeedSequence([run.plan.seed, run.step, 1]).generate_state(1, np.uint64)
        torch.manual_seed(int(seed[0]))
        losses: Tensor = model(x.to(device), targets.to(device), run.plan.shot)
    run.optimizer.zero_grad(set_to_none=True)
    losses.sum().backward()
    run.optimizer.step()
    run.step += 1
    decay = min(TRAINING_RECIPE.average_decay, run.step / (run.step + TRAINING_RECIPE.average_delay))
    for average, learned in ((run.average, run.learner.encoder), (run.head, run.learner.head)):
        for averaged, weight in zip(average.parameters(), learned.parameters(), strict=True):
            averaged.lerp_(weight.detach(), 1 - decay)
    return losses.detach()


def update_best(run: TrainingRun, score: Score) -> None:
    """Store the averaged weights as the best weights if their score is the best so far."""
    if score.accuracy > run.best.accuracy:
        run.best, run.best_weights = score, copy.deepcopy(_list_averaged_weights(run))


def pack_run(run: TrainingRun) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Convert a run to tensors by name and metadata, for `write_checkpoint`."""
    states = {LEARNER: run.learner.state_dict(), AVERAGED: _list_averaged_weights(run), BEST: run.best_weights}
    states |= {f"{OPTIMIZER}{index}.": state for index, state in run.optimizer.state_dict()["state"].items()}
    tensors = {prefix + name: tensor for prefix, state in states.items() for name, tensor in state.items()}
    return tensors, {"step": run.step, "best": run.best, "losses": run.losses, "plan": asdict(run.plan)}


def unpack_run(run: TrainingRun, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Restore the state of a run of the same plan in place, from the tensors and metadata of `pack_run`."""
    run.learner.load_state_dict(select_prefix(tensors, LEARNER))
    encoder, head = split_head(select_prefix(tensors, AVERAGED))
    run.average.load_state_dict(encoder)
    run.head.load_state_dict(head)
    run.best_weights = select_prefix(tensors, BEST)
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in select_prefix(tensors, OPTIMIZER).items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": state})
    run.step, run.best = metadata["step"], Score(*metadata["best"])
    run.losses = metadata["losses"]


def train(run: TrainingRun, base: Side, validation: Side, group: ProcessGroup, outputs: Mapping[str, Path]) -> None:
    """Train until the run is finished, and write the checkpoint at each validation and after Ctrl-C.

    Args:
        run: The run, which is changed in place.
        base: The base classes.
        validation: The validation classes.
        group: The processes that share the work.
        outputs: In the first process, the paths of ``output`` and perhaps of ``log`` and ``tensorboard``.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; the step is finished first.
        InputError: A loss is not finite.
    """
    plan = run.plan
    shared = DistributedDataParallel(run.learner) if group.world_size > 1 else run.learner
    checkpoint = outputs.get("output")
    bar = progress_bar(total=plan.steps, initial=run.step, unit="step", delay=2.0, shown=checkpoint is not None)
    with bar, _open_log(outputs, run.step) as (log, before), delay_interrupt() as interrupted:
        started = time.monotonic() - before

        def validate() -> None:
            measure_statistics(run.average, _draw_measured(run, base))
            score = score_encoder(run.average, run.head, validation, plan, run.step, group)
            update_best(run, score)
            means = dict(zip(run.learner.losses, _average_losses(run.losses), strict=True)) if run.losses else {}
            run.losses.clear()
            seconds = round(time.monotonic() - started, 1)
            log({**score._asdict(), **means, "best_accuracy": run.best.accuracy, "seconds": seconds})

        def save() -> None:
            if checkpoint is not None:
                write_checkpoint(checkpoint, *pack_run(run))

        if run.step == 0:
            validate()
        while not run.finished:
            step_losses = take_step(run, shared, *draw_batch(base, plan, run.step, group)).tolist()
            losses, interrupts = zip(*group.gather((step_losses, interrupted())), strict=True)
            stop = any(interrupts)
            run.losses.append(_average_losses(losses))
            if not math.isfinite(sum(run.losses[-1])):
                remedy = "Lower `learning_rate`, or `inner_rate`; `resume` goes on from the last validation."
                raise_input_error("loss", "stay finite", f"{sum(run.losses[-1])} in step {run.step}", remedy)
            text = f"loss {sum(run.losses[-1]):.3f}, best {100 * run.best.accuracy:.2f} %"
            bar.set_postfix_str(text, refresh=False)
            bar.update()
            if run.step % plan.eval_every == 0 or run.step == plan.steps:
                validate()
                save()
            elif stop:
                save()
            if stop and not run.finished:
                raise KeyboardInterrupt(f"stopped at step {run.step:,}; run again with --resume")


def _draw_measured(run: TrainingRun, base: Side) -> Iterator[Tensor]:
    """Yield the rows (n, dim) of a run's first batches, for the statistics of batch normalisation."""
    plan, device = run.plan, next(run.average.parameters()).device
    rows = plan.episodes_per_step * plan.way * (plan.shot + plan.query)
    for step in range(-(-TRAINING_RECIPE.measured_rows // rows)):
        yield draw_batch(base, plan, step, ProcessGroup())[0].flatten(0, 2).to(device)


def _average_losses(losses: Sequence[Sequence[float]]) -> list[float]:
    """Average losses (n, losses) over the first axis."""
    means: list[float] = torch.tensor(losses, dtype=torch.float64).mean(dim=0).tolist()
    return means


@contextmanager
def _open_log(outputs: Mapping[str, Path], step: int) -> Iterator[tuple[Callable[[dict[str, object]], None], float]]:
    """Open the log and TensorBoard's folder of a run, and remove entries after ``step``.

    Yields a function that adds an entry to both, and the seconds of the last entry, from which a resumed run counts.
    """
    with ExitStack() as stack:
        file = writer = None
        seconds = 0.0
        if "log" in outputs:
            lines = _read_log(outputs["log"], step) if step else []
            seconds = float(json.loads(lines[-1]).get("seconds", 0.0)) if lines else 0.0
            outputs["log"].write_text("".join(lines), encoding="utf-8")
            file = stack.enter_context(outputs["log"].open("a", encoding="utf-8"))
        if "tensorboard" in outputs:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional

            writer = SummaryWriter(str(outputs["tensorboard"]), purge_step=step + 1)
            stack.callback(writer.close)

        def log(entry: dict[str, object]) -> None:
            if file is not None:
                print(json.dumps(entry), file=file, flush=True)
            if writer is not None:
                for name in entry.keys() & {"accuracy", *LOSSES}:
                    writer.add_scalar(name, entry[name], entry["step"])
                writer.flush()

        yield log, seconds


def _read_log(path: Path, step: int) -> list[str]:
    """Read a log's lines up to a step; later lines, written between the last checkpoint and a crash, are repeated."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    steps = [re.match(r'{"step": (\d+),.*}\n', line) for line in lines]
    return [line for line, match in zip(lines, steps, strict=True) if match and int(match[1]) <= step]


@contextmanager
def delay_interrupt() -> Iterator[Callable[[], bool]]:
    """Delay Ctrl-C until the end of a step, as an interrupted step could not be resumed with the same result.

    Yields a function that returns whether Ctrl-C was pressed. A second Ctrl-C raises KeyboardInterrupt at once.
    """
    interrupted = threading.Event()

    def note(*_: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def run_train(options: argparse.Namespace) -> None:
    """Train as the options of ``train`` say, write the encoder and print its accuracy.

    Raises an InputError if options, data and checkpoints do not fit together, or if the encoder is not more accurate
    than the raw features on the validation classes, in which case its file is removed.
    """
    plan: TrainingPlan = options.plan
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device("device", device)
    with join_group(device) as group:
        if plan.episodes_per_step % group.world_size:
            bound = f"be a multiple of the number of processes ({group.world_size})"
            raise_input_error("episodes_per_step", bound, plan.episodes_per_step, "Pass another number.")
        begun = options.resume and Path(options.output).exists()  # a run may be killed before its first checkpoint
        stored = read_checkpoint("output", options.output) if begun else None
        if plan.start is not None and stored is None:
            read_checkpoint("start", plan.start)  # raises before the work if the file is missing
        data = load_source(plan.dataset, split_seed=plan.split_seed, image_size=options.image_size)
        base, validation = (select_side("dataset", data, side) for side in ("base", "validation"))
        dim, n_classes = data.x.shape[1], len(base.names)
        backbone = plan.backbone or choose_backbone(plan.dataset, dim)
        if plan.dropblock and backbone != "resnet12":
            raise_input_error("dropblock", "be of the backbone resnet12", f"that of {backbone}", "Leave it out.")
        plan = replace(plan, dim=dim, classes=n_classes, backbone=backbone, way=min(plan.way, n_classes))
        _check_rows(base, validation, plan)
        if stored is not None:
            _check_same_plan(plan, stored[1]["plan"])
        run = begin_run(plan, device, None if stored is not None else _load_start(plan))
        if stored is not None:
            unpack_run(run, *stored)
        train(run, base, validation, group, options.paths)
        raw_method, raw = score_raw_features(validation, plan, group)
    if checkpoint := options.paths.get("output"):
        step, accuracy, half_width = run.best
        score = f"{100 * accuracy:.2f} ±{100 * half_width:.2f} % on validation classes"
        if accuracy <= raw.accuracy:
            checkpoint.unlink()
            baseline = f"{100 * raw.accuracy:.2f} ±{100 * raw.half_width:.2f} % ({raw_method} on raw features)"
            remedy = f"{checkpoint} is not written. Use the features without an encoder, or train for longer "
            remedy += "(`steps`, `patience`), at another `learning_rate` or on more classes."
            raise_input_error("accuracy", f"be above {baseline}", score, remedy)
        before = "untrained network" if plan.start is None else "encoder that it began at"
        score = f"{score} after step {step:,}" if step else f"no validation beat the {before}: {score}"
        name = plan.backbone if plan.objective == "prototypes" else f"{plan.backbone} by {plan.objective}"
        print(f"{checkpoint}: {name}, {run.step:,} steps, {score}")


def choose_backbone(dataset: str, dim: int) -> str:
    """Choose the backbone for a data set of ``dim`` features: "conv" for grey images, "conv4" for RGB, or "mlp".

    The name decides whether rows are images: the number of features may be a square by chance.
    """
    kind, colon, _ = dataset.partition(":")
    is_image = dataset == "glyphs" or Path(dataset).is_dir() or (bool(colon) and kind != "synthetic")
    shape = infer_image_shape(dim)
    if not is_image or shape is None:
        return "mlp"
    return "conv" if shape[0] == 1 else "conv4"


def _load_start(plan: TrainingPlan) -> nn.Module | None:
    """Load the encoder with a plan's initial weights, if any; raise an InputError if its backbone differs."""
    if plan.start is None:
        return None
    before = TrainingPlan(**read_checkpoint("start", plan.start)[1]["plan"])
    if is_same_source(before.dataset, plan.dataset) and before.split_seed != plan.split_seed:
        constraint = f"be that of `start`, {before.split_seed}, which learned its base classes"
        raise_input_error("split_seed", constraint, plan.split_seed, "Pass the same, or begin without `start`.")
    if (before.backbone, before.dim) != (plan.backbone, plan.dim):
        constraint = f"hold an encoder of {plan.backbone} and {plan.dim} features per row"
        got, remedy = f"{before.backbone} and {before.dim}", "Pass another file or `backbone`."
        raise_input_error("start", constraint, got, remedy)
    return load_encoder(plan.start)


def _check_rows(base: Side, validation: Side, plan: TrainingPlan) -> None:
    """Raise an InputError if a base class, or too many validation classes, have too few rows for an episode."""
    needed, worst = plan.shot + plan.query, int(base.by_class.size.argmin())
    if (size := int(base.by_class.size[worst])) < needed:
        limit = f"have {needed} rows per base class (`shot` + `query`)"
        raise_input_error("dataset", limit, f"class {base.names[worst]!r} with {size}", "Ask for fewer rows.")
    usable = int((validation.by_class.size > plan.shot).sum())
    min_classes = plan.head_way or 2
    # Prototypes are validated with one row of each class.
    if plan.objective != "prototypes" and usable < min_classes:
        limit = f"have at least {min_classes} validation classes with {plan.shot + 1} rows (`shot` + 1)"
        other = ", for fewer classes (`way`), or for `head` zero" if min_classes > 2 else ""
        raise_input_error("dataset", limit, usable, f"Ask for fewer rows{other}.")


def _check_same_plan(plan: TrainingPlan, stored: Mapping[str, object]) -> None:
    """Raise an InputError that names the differences, if any, between a plan and the plan of a checkpoint."""
    words = {"dim": "features per row:", "classes": "base classes:"}
    differences = [
        f"{words.get(name, f'`{name}`')} {stored.get(name)} there and {value} here"
        for name, value in asdict(plan).items()
        if stored.get(name) != value
    ]
    if differences:
        remedy = "Pass the same, or another `output` without `resume`."
        raise_input_error("resume", "continue a run of the same settings", "; ".join(differences), remedy)
