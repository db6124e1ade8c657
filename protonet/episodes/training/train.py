"""The command ``python -m protonet.episodes train``: meta-train an encoder and write it to a file."""

from __future__ import annotations

import copy
import json
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from protonet._io import progress_bar
from protonet._validation import check_device
from protonet.episodes.evaluation.evaluate import ProcessGroup, get_process_group, join_process_group
from protonet.episodes.features.sources import is_same_source, load_source
from protonet.episodes.networks import checkpoints
from protonet.episodes.networks.augmentation import infer_image_shape
from protonet.episodes.networks.backbones import measure_batch_norm_statistics
from protonet.episodes.options import TrainOptions
from protonet.episodes.settings import TrainingPlan
from protonet.episodes.training.objectives import MetaLearner, make_learner
from protonet.episodes.training.tasks import (
    SplitSide,
    ValidationScore,
    draw_training_episodes,
    score_best_raw_method,
    score_encoder,
    select_split_side,
)
from protonet.errors import raise_input_error
from protonet.ui.options import make_options

#: Prefixes of the names of a checkpoint's tensors: the learner's, the averaged weights and the optimizer's state. The
#: prefix of the best weights is ``BEST_WEIGHTS_PREFIX``.
LEARNER_PREFIX, AVERAGED_PREFIX, OPTIMIZER_PREFIX = "learner.", "average.", "optimizer."


@dataclass
class TrainingRun:
    """The state of a meta-training run between two steps, which determines all following steps."""

    plan: TrainingPlan  #: The settings.
    learner: MetaLearner  #: The encoder and the other trained modules.
    optimizer: torch.optim.AdamW  #: The optimizer of the learner's parameters.
    averaged_encoder: nn.Module
    """A copy of the encoder with moving averages of its weights, in evaluation mode. It is validated and kept."""
    averaged_head: nn.Module  #: A copy of the learner's head with moving averages of its weights.
    best_weights: dict[str, Tensor]  #: The averaged weights that had the best validation score, by name.
    best_score: ValidationScore  #: The best validation score.
    step: int  #: The number of steps taken.
    losses: list[list[float]]  #: For each step since the last validation, its losses in the order of the learner's.
    raw: tuple[str, ValidationScore] = ("", ValidationScore(0, 0.0, 0.0))
    """The baseline, set before the first step: the better method of raw features by name, and its validation score."""

    @property
    def beats_raw_features(self) -> bool:
        """Whether the best weights are more accurate than the raw features on the validation episodes."""
        return self.best_score.accuracy > self.raw[1].accuracy

    @property
    def is_finished(self) -> bool:
        """Whether all steps are taken, or too many validations in a row had no new best score (see ``patience``)."""
        since = self.step - self.best_score.step
        return self.step >= self.plan.steps or since >= self.plan.patience * self.plan.eval_every


def make_training_run(plan: TrainingPlan, device: str, start: nn.Module | None = None) -> TrainingRun:
    """Create a training run before its first step, with initial weights on a device.

    If an encoder ``start`` is given, its weights are the initial weights of the run's encoder.
    """
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
    optimizer = torch.optim.AdamW(groups, lr=plan.learning_rate, weight_decay=learner.weight_decay)
    average, head = (copy.deepcopy(module).requires_grad_(False).eval() for module in (encoder, learner.head))
    run = TrainingRun(plan, learner, optimizer, average, head, {}, ValidationScore(0, 0.0, 0.0), 0, [])
    run.best_weights = copy.deepcopy(_list_averaged_weights(run))
    return run


def _list_averaged_weights(run: TrainingRun) -> dict[str, Tensor]:
    """Return the averaged weights of the encoder and of the head by name; names of the head have a prefix."""
    return run.averaged_encoder.state_dict() | {
        checkpoints.HEAD_WEIGHTS_PREFIX + name: tensor for name, tensor in run.averaged_head.state_dict().items()
    }


#: Decay per step of the exponential moving average of the weights. The averaged weights are validated and kept.
WEIGHT_AVERAGE_DECAY = 0.99
#: In step t the decay is at most t / (t + this), so that the initial weights are forgotten soon.
WEIGHT_AVERAGE_DELAY = 9


def take_training_step(run: TrainingRun, model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Take one optimizer step on a batch of episodes, then update the averaged weights and the step count of the run.

    The learning rate depends on the number of earlier steps alone, not on the number of all steps, so that a run can be
    made longer.

    ``model`` is the run's learner, or a wrapper that averages gradients over processes. Returns the losses before the
    step in nats, in the order of the learner's ``loss_names``.

    Source: averaging, Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992).
    """
    device = next(run.learner.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout is equal in resumed runs
        seed = np.random.SeedSequence([run.plan.seed, run.step, 1]).generate_state(1, np.uint64)
        torch.manual_seed(int(seed[0]))
        losses: Tensor = model(x.to(device), targets.to(device), run.plan.shot)
    run.optimizer.zero_grad(set_to_none=True)
    losses.sum().backward()
    if run.learner.episodes_per_halving is not None:
        halvings = run.step * run.plan.episodes_per_step // run.learner.episodes_per_halving
        for group in run.optimizer.param_groups:
            group["lr"] = run.plan.learning_rate / 2**halvings
    run.optimizer.step()
    run.step += 1
    decay = 0.0
    if run.learner.is_averaged:
        decay = min(WEIGHT_AVERAGE_DECAY, run.step / (run.step + WEIGHT_AVERAGE_DELAY))
    for average, learned in ((run.averaged_encoder, run.learner.encoder), (run.averaged_head, run.learner.head)):
        for averaged, weight in zip(average.parameters(), learned.parameters(), strict=True):
            averaged.lerp_(weight.detach(), 1 - decay)
    return losses.detach()


def update_best_weights(run: TrainingRun, score: ValidationScore) -> None:
    """Keep a copy of the run's averaged weights as the best weights, if their validation score is the best so far."""
    if score.accuracy > run.best_score.accuracy:
        run.best_score, run.best_weights = score, copy.deepcopy(_list_averaged_weights(run))


def serialize_run(run: TrainingRun) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Convert the state of a run to the arguments of `write_checkpoint`: tensors by name, and metadata for JSON."""
    states = {
        LEARNER_PREFIX: run.learner.state_dict(),
        AVERAGED_PREFIX: _list_averaged_weights(run),
        checkpoints.BEST_WEIGHTS_PREFIX: run.best_weights,
    }
    states |= {f"{OPTIMIZER_PREFIX}{index}.": state for index, state in run.optimizer.state_dict()["state"].items()}
    tensors = {prefix + name: tensor for prefix, state in states.items() for name, tensor in state.items()}
    method, score = run.raw
    raw = {"method": method, **score._asdict(), "beaten": run.beats_raw_features}
    del raw["step"]
    state = {"step": run.step, "best": run.best_score, "losses": run.losses, "raw_features": raw}
    return tensors, state | {"plan": asdict(run.plan)}


def restore_run(run: TrainingRun, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Restore a run in place, from the tensors and metadata that `serialize_run` returned for a run of this plan.

    The plan may have another number of steps, and another patience.
    """
    run.learner.load_state_dict(checkpoints.select_by_prefix(tensors, LEARNER_PREFIX))
    encoder, head = checkpoints.split_encoder_and_head(checkpoints.select_by_prefix(tensors, AVERAGED_PREFIX))
    run.averaged_encoder.load_state_dict(encoder)
    run.averaged_head.load_state_dict(head)
    run.best_weights = checkpoints.select_by_prefix(tensors, checkpoints.BEST_WEIGHTS_PREFIX)
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in checkpoints.select_by_prefix(tensors, OPTIMIZER_PREFIX).items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": state})
    run.step, run.best_score = metadata["step"], ValidationScore(*metadata["best"])
    run.losses = metadata["losses"]


#: The statistics of batch normalisation are measured on at least this many training rows.
MIN_BATCH_NORM_ROWS = 2048


def train(run: TrainingRun, base: SplitSide, validation: SplitSide, outputs: Mapping[str, Path]) -> None:
    """Train until the run is finished; write the checkpoint at each validation, and after Ctrl-C.

    The step is finished before a KeyboardInterrupt is raised. A loss that is not finite raises an InputError.
    ``outputs`` maps ``output`` (the checkpoint) and ``log`` to paths, in the first process only.
    """
    group = get_process_group()
    plan, device = run.plan, next(run.averaged_encoder.parameters()).device
    shared = DistributedDataParallel(run.learner) if group.world_size > 1 else run.learner
    checkpoint = outputs.get("output")
    bar = progress_bar(total=plan.steps, initial=run.step, unit="step", delay=2.0, shown=checkpoint is not None)
    with bar, _open_log(outputs.get("log"), run.step) as (log, before), delay_interrupt() as interrupted:
        started = time.monotonic() - before

        def validate() -> None:
            n_rows = plan.episodes_per_step * plan.way * (plan.shot + plan.query)  # of a batch
            n_batches = -(-MIN_BATCH_NORM_ROWS // n_rows)
            batches = (draw_training_episodes(base, plan, step, ProcessGroup())[0] for step in range(n_batches))
            measure_batch_norm_statistics(run.averaged_encoder, (rows.flatten(0, 2).to(device) for rows in batches))
            score = score_encoder(run.averaged_encoder, run.averaged_head, validation, plan, run.step)
            update_best_weights(run, score)
            means = dict(zip(run.learner.loss_names, _average_losses(run.losses), strict=True)) if run.losses else {}
            run.losses.clear()
            seconds = round(time.monotonic() - started, 1)
            log({**score._asdict(), **means, "best_accuracy": run.best_score.accuracy, "seconds": seconds})

        def save() -> None:
            if checkpoint is not None:
                checkpoints.write_checkpoint(checkpoint, *serialize_run(run))

        if run.step == 0:
            validate()
        while not run.is_finished:
            step_losses = take_training_step(run, shared, *draw_training_episodes(base, plan, run.step, group)).tolist()
            losses, interrupts = zip(*group.all_gather((step_losses, interrupted())), strict=True)
            stop = any(interrupts)
            run.losses.append(_average_losses(losses))
            if not math.isfinite(sum(run.losses[-1])):
                remedy = "Lower `learning_rate`, or `inner_rate`; `resume` goes on from the last validation."
                raise_input_error("loss", "stay finite", f"{sum(run.losses[-1])} in step {run.step}", remedy)
            text = f"loss {sum(run.losses[-1]):.3f}, best {100 * run.best_score.accuracy:.2f} %"
            bar.set_postfix_str(text, refresh=False)
            bar.update()
            if run.step % plan.eval_every == 0 or run.step == plan.steps:
                validate()
                save()
            elif stop:
                save()
            if stop and not run.is_finished:
                raise KeyboardInterrupt(f"stopped at step {run.step:,}; run again with --resume")


def _average_losses(losses: Sequence[Sequence[float]]) -> list[float]:
    """Average each loss over steps or processes; ``losses`` is (n, number of losses), averaged over the first axis."""
    means: list[float] = torch.tensor(losses, dtype=torch.float64).mean(dim=0).tolist()
    return means


@contextmanager
def _open_log(path: Path | None, step: int) -> Iterator[tuple[Callable[[dict[str, object]], None], float]]:
    """A context manager that opens a log file, if any, and removes its entries after ``step``.

    Yields a function that adds an entry, and the seconds of training that the log already records.
    """
    if path is None:
        yield lambda entry: None, 0.0
        return
    # Lines after the checkpoint were written before a crash; the resumed run writes them again.
    text = path.read_text(encoding="utf-8") if step and path.exists() else ""
    entries = re.finditer(r'^{"step": (\d+),.*}\n', text, re.MULTILINE)
    lines = [entry[0] for entry in entries if int(entry[1]) <= step]
    path.write_text("".join(lines), encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:

        def log(entry: dict[str, object]) -> None:
            print(json.dumps(entry), file=file, flush=True)

        yield log, float(json.loads(lines[-1]).get("seconds", 0.0)) if lines else 0.0


@contextmanager
def delay_interrupt() -> Iterator[Callable[[], bool]]:
    """Record Ctrl-C instead of raising KeyboardInterrupt, so that the caller can finish a step before it stops.

    An interrupted step could not be resumed with the same result. A context manager, which yields a function that
    returns whether Ctrl-C was pressed. A second Ctrl-C raises KeyboardInterrupt at once.
    """
    interrupted = threading.Event()

    def record_interrupt(*_: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = signal.signal(signal.SIGINT, record_interrupt)
    try:
        yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def run_train(options: TrainOptions) -> None:
    """Run the command ``train``: meta-train an encoder, write it to a file and print its validation accuracy.

    If the encoder is not more accurate than the raw features, its file says so, and an InputError is raised.
    """
    plan = make_options(TrainingPlan, options)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device("device", device)
    with join_process_group(device):
        group = get_process_group()
        if plan.episodes_per_step % group.world_size:
            bound = f"be a multiple of the number of processes ({group.world_size})"
            raise_input_error("episodes_per_step", bound, plan.episodes_per_step, "Pass another number.")
        begun = options.resume and options.output.exists()  # a run may be killed before its first checkpoint
        stored = checkpoints.read_checkpoint("output", options.output) if begun else None
        if plan.start is not None and stored is None:
            checkpoints.read_checkpoint("start", plan.start)  # raises before the work if the file is missing
        data = load_source(plan.dataset, split_seed=plan.split_seed, image_size=options.image_size)
        base, validation = (select_split_side(data, side) for side in ("base", "validation"))
        dim, n_classes = data.x.shape[1], len(base.class_names)
        backbone = plan.backbone or choose_backbone(plan.dataset, dim)
        if plan.dropblock and backbone != "resnet12":
            raise_input_error("dropblock", "be of the backbone resnet12", f"that of {backbone}", "Leave it out.")
        plan = replace(plan, dim=dim, classes=n_classes, backbone=backbone, way=min(plan.way, n_classes))
        _check_rows(base, validation, plan)
        if stored is not None:
            _check_resumed_plan(plan, stored[1])
        run = make_training_run(plan, device, None if stored is not None else _load_initial_encoder(plan))
        run.raw = score_best_raw_method(validation, plan)
        if stored is not None:
            restore_run(run, *stored)
        outputs = {"output": options.output} | ({} if options.log is None else {"log": options.log})
        train(run, base, validation, outputs if group.rank == 0 else {})
    if group.rank == 0:
        checkpoint = options.output
        step, accuracy, half_width = run.best_score
        score = f"{100 * accuracy:.2f} ±{100 * half_width:.2f} % on validation classes"
        if not run.beats_raw_features:
            raw_method, raw = run.raw
            baseline = f"{100 * raw.accuracy:.2f} ±{100 * raw.half_width:.2f} % ({raw_method} on raw features)"
            remedy = f"{checkpoint} is kept, and says so. Use the features without an encoder, train for longer "
            remedy += "(`resume` with more `steps` and `patience`), at another `learning_rate` or on more classes."
            raise_input_error("accuracy", f"be above {baseline}", score, remedy)
        before = "untrained network" if plan.start is None else "encoder that it began at"
        score = f"{score} after step {step:,}" if step else f"no validation beat the {before}: {score}"
        name = plan.backbone if plan.objective == "prototypes" else f"{plan.backbone} by {plan.objective}"
        print(f"{checkpoint}: {name}, {run.step:,} steps, {score}")


def choose_backbone(dataset: str, dim: int) -> str:
    """Choose the default backbone for a data set: "conv" for square grey images, "conv4" for RGB, otherwise "mlp".

    Whether rows are images is decided by ``dataset``, the data set as the command line names it: the number of features
    ``dim`` could also be a square by chance.
    """
    kind, colon, _ = dataset.partition(":")
    is_image = dataset == "glyphs" or Path(dataset).is_dir() or (bool(colon) and kind != "synthetic")
    shape = infer_image_shape(dim)
    if not is_image or shape is None:
        return "mlp"
    return "conv" if shape[0] == 1 else "conv4"


def _load_initial_encoder(plan: TrainingPlan) -> nn.Module | None:
    """Load the encoder whose weights a plan starts from, and check backbone and split; None for random weights."""
    if plan.start is None:
        return None
    before = TrainingPlan(**checkpoints.read_checkpoint("start", plan.start)[1]["plan"])
    if is_same_source(before.dataset, plan.dataset) and before.split_seed != plan.split_seed:
        constraint = f"be that of `start`, {before.split_seed}, which learned its base classes"
        raise_input_error("split_seed", constraint, plan.split_seed, "Pass the same, or begin without `start`.")
    if (before.backbone, before.dim) != (plan.backbone, plan.dim):
        constraint = f"hold an encoder of {plan.backbone} and {plan.dim} features per row"
        got, remedy = f"{before.backbone} and {before.dim}", "Pass another file or `backbone`."
        raise_input_error("start", constraint, got, remedy)
    return checkpoints.load_trained_encoder(plan.start).encoder


def _check_rows(base: SplitSide, validation: SplitSide, plan: TrainingPlan) -> None:
    """Raise an InputError if a base class or too many validation classes have fewer rows than an episode needs."""
    needed, worst = plan.shot + plan.query, int(base.rows_by_class.class_counts.argmin())
    if (size := int(base.rows_by_class.class_counts[worst])) < needed:
        limit = f"have {needed} rows per base class (`shot` + `query`)"
        raise_input_error("dataset", limit, f"class {base.class_names[worst]!r} with {size}", "Ask for fewer rows.")
    usable = int((validation.rows_by_class.class_counts > plan.shot).sum())
    min_classes = plan.head_n_way or 2
    # Prototypes are validated with one row of each class.
    if plan.objective != "prototypes" and usable < min_classes:
        limit = f"have at least {min_classes} validation classes with {plan.shot + 1} rows (`shot` + 1)"
        other = ", for fewer classes (`way`), or for `head` zero" if min_classes > 2 else ""
        raise_input_error("dataset", limit, usable, f"Ask for fewer rows{other}.")


def _check_resumed_plan(plan: TrainingPlan, metadata: Mapping[str, Any]) -> None:
    """Raise an InputError unless a plan continues the run of a checkpoint, which ``metadata`` describe.

    ``steps`` and ``patience`` may differ: they determine when a run ends, and nothing before its end.
    """
    stored = TrainingPlan(**metadata["plan"])
    words = {"dim": "features per row:", "classes": "base classes:"}
    there, here = asdict(replace(stored, steps=plan.steps, patience=plan.patience)), asdict(plan)
    differences = [
        f"{words.get(name, f'`{name}`')} {there[name]} there and {value} here"
        for name, value in here.items()
        if there[name] != value
    ]
    if differences:
        remedy = "Pass the same, or another `output` without `resume`."
        raise_input_error("resume", "continue a run of the same settings", "; ".join(differences), remedy)
    done, since = metadata["step"], metadata["step"] - ValidationScore(*metadata["best"]).step
    if plan.steps < done:
        raise_input_error("steps", f"be at least the {done:,} steps that are taken", plan.steps, "Pass more.")
    if plan.steps > stored.steps and since >= plan.patience * plan.eval_every:
        got = f"{plan.patience}, with which the run ended at step {done:,}"
        remedy = f"Pass {since // plan.eval_every + 1} or more."
        raise_input_error("patience", "allow more steps", got, remedy)
