"""Meta-training: an encoder that learns to tell apart the classes of episodes, and all base classes at once.

First what a step is, then the run that takes them, its checkpoints, and the loop with its log.
"""

from __future__ import annotations

import copy
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from protonet.episodes.backbones import make_backbone
from protonet.episodes.checkpoints import BEST, take_prefix, write_checkpoint
from protonet.episodes.distributed import Group
from protonet.episodes.tasks import Plan, Score, Side, draw_batch, score_encoder
from protonet.losses import cosine_cross_entropy, episodic_loss


@dataclass(frozen=True)
class Recipe:
    """How the encoder is trained. All values are our own choice."""

    learning_rate: float = 3e-3  #: AdamW's.
    weight_decay: float = 1e-2  #: AdamW's, of the encoder's weights; the proxies have none.
    temperature: float = 0.1  #: Divides the cosines in both losses.
    smoothing: float = 0.1  #: Label smoothing in both losses, in [0, 1).
    average_decay: float = 0.99  #: Decay per step of the average of the weights, which is what is validated and kept.
    average_delay: int = 9  #: In step t the decay is at most t / (t + this), to forget the initial weights soon.


RECIPE = Recipe()
#: What the names of a checkpoint's tensors begin with, beside those of the best weights.
LEARNER, AVERAGED, OPTIMIZER = "learner.", "average.", "optimizer."
LOSSES = ("episodic_loss", "cross_entropy")  #: The names of a step's two losses in the log.


class Learner(nn.Module):
    """An encoder and one proxy per base class, with their two losses.

    Args:
        encoder: Maps rows (n, dim) to (n, embedding_dim).
        proxies: (classes, embedding_dim) float32.
    """

    def __init__(self, encoder: nn.Module, proxies: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.proxies = nn.Parameter(proxies)

    def forward(self, x: Tensor, targets: Tensor, n_shot: int) -> Tensor:
        """Compute the episodic loss and the cross-entropy.

        Args:
            x: (episodes, n_way, n_shot + n_query, dim) float32, support first.
            targets: (episodes, n_way, n_shot + n_query) int64, the rows' base classes.
            n_shot: Support rows per class.

        Returns:
            (2,) float32, in nats.
        """
        embeddings = F.normalize(self.encoder(x.flatten(0, 2)), dim=1)  # (rows of all episodes, embedding_dim)
        episodes = embeddings.unflatten(0, x.shape[:3])  # (episodes, n_way, n_shot + n_query, embedding_dim)
        temperature, smoothing = RECIPE.temperature, RECIPE.smoothing
        episodic = episodic_loss(episodes, n_shot=n_shot, temperature=temperature, smoothing=smoothing)
        labels = targets.flatten()
        entropy = cosine_cross_entropy(embeddings, labels, self.proxies, temperature=temperature, smoothing=smoothing)
        return torch.stack([episodic, entropy])


@dataclass
class Run:
    """A run between two steps: everything that the next steps depend on."""

    plan: Plan  #: The settings.
    learner: Learner  #: The encoder and the proxies being trained.
    optimizer: torch.optim.AdamW  #: Of the learner's parameters.
    average: nn.Module  #: The encoder with averaged weights.
    kept: dict[str, Tensor]  #: The averaged weights of the best validation.
    best: Score  #: The best validation.
    step: int  #: Steps taken.
    losses: list[list[float]]  #: The two losses of each step since the last validation.

    @property
    def finished(self) -> bool:
        """Whether all steps are taken, or the best validation is too long ago."""
        since = self.step - self.best.step
        return self.step >= self.plan.steps or since >= self.plan.patience * self.plan.eval_every


def begin_run(plan: Plan, device: str) -> Run:
    """Make a run before its first step, with all tensors on ``device``."""
    generator = torch.Generator().manual_seed(plan.seed)
    encoder = make_backbone(plan.backbone, plan.dim, generator)
    embedding_dim = encoder(torch.zeros(1, plan.dim)).shape[1]
    proxies = torch.randn(plan.classes, embedding_dim, generator=generator) / embedding_dim**0.5
    learner = Learner(encoder, proxies).to(device)
    proxy_group: dict[str, Any] = {"params": [learner.proxies], "weight_decay": 0.0}
    groups = [{"params": list(encoder.parameters())}, proxy_group]
    optimizer = torch.optim.AdamW(groups, lr=RECIPE.learning_rate, weight_decay=RECIPE.weight_decay)
    average = copy.deepcopy(learner.encoder).requires_grad_(False)
    return Run(plan, learner, optimizer, average, copy.deepcopy(average.state_dict()), Score(0, 0.0, 0.0), 0, [])


def take_step(run: Run, model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Take one optimizer step on a batch and update the average of the weights.

    Args:
        run: Changed in place.
        model: The run's learner, or a wrapper of it that shares gradients among processes.
        x: (episodes, n_way, n_shot + n_query, dim) float32.
        targets: (episodes, n_way, n_shot + n_query) int64, the rows' base classes.

    Returns:
        (2,) float32, the episodic loss and the cross-entropy before the step, in nats.

    Source: averaging, Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992).
    """
    device = run.learner.proxies.device
    losses: Tensor = model(x.to(device), targets.to(device), run.plan.shot)
    run.optimizer.zero_grad(set_to_none=True)
    losses.sum().backward()
    run.optimizer.step()
    run.step += 1
    decay = min(RECIPE.average_decay, run.step / (run.step + RECIPE.average_delay))
    for kept, weight in zip(run.average.parameters(), run.learner.encoder.parameters(), strict=True):
        kept.lerp_(weight.detach(), 1 - decay)
    return losses.detach()


def keep_best(run: Run, score: Score) -> None:
    """Keep the averaged weights if their score is the best so far."""
    if score.accuracy > run.best.accuracy:
        run.best, run.kept = score, copy.deepcopy(run.average.state_dict())


def pack_run(run: Run) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a run as tensors by name and metadata, for `protonet.episodes.checkpoints.write_checkpoint`."""
    states = {LEARNER: run.learner.state_dict(), AVERAGED: run.average.state_dict(), BEST: run.kept}
    states |= {f"{OPTIMIZER}{number}.": state for number, state in run.optimizer.state_dict()["state"].items()}
    tensors = {prefix + name: tensor for prefix, state in states.items() for name, tensor in state.items()}
    backbone, plan = {"name": run.plan.backbone, "dim": run.plan.dim}, run.plan._asdict()
    return tensors, {"step": run.step, "best": run.best, "losses": run.losses, "plan": plan, "backbone": backbone}


def unpack_run(run: Run, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Bring a run, in place, to the state of one of the same plan, from what `pack_run` returned, on any device."""
    run.learner.load_state_dict(take_prefix(tensors, LEARNER))
    run.average.load_state_dict(take_prefix(tensors, AVERAGED))
    run.kept = take_prefix(tensors, BEST)
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in take_prefix(tensors, OPTIMIZER).items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = tensor
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": state})
    run.step, run.best = metadata["step"], Score(*metadata["best"])
    run.losses = metadata.get("losses", [])  # files of version 1 have none


class Outputs(NamedTuple):
    """Where results are written: the checkpoint, the log and the folder for TensorBoard; None for none."""

    checkpoint: Path | None = None
    log: Path | None = None
    tensorboard: Path | None = None


def train(run: Run, base: Side, validation: Side, group: Group, outputs: Outputs) -> None:
    """Train until the run is finished; every validation, and Ctrl-C between two steps, writes the checkpoint.

    Args:
        run: Changed in place; it may have taken steps before.
        base: The classes to learn from.
        validation: The classes to be judged on.
        group: The processes that share the work, including this one.
        outputs: Where the one process that writes does so; none for the others.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once the checkpoint is written.
    """
    from tqdm import tqdm  # noqa: PLC0415 - used here alone

    plan = run.plan
    shared = DistributedDataParallel(run.learner) if group.world_size > 1 else run.learner
    silent = outputs.checkpoint is None
    bar = tqdm(total=plan.steps, initial=run.step, unit="step", delay=2, dynamic_ncols=True, disable=silent)
    with bar, _open_log(outputs, run.step) as (log, before), delay_interrupt() as interrupted:
        started = time.monotonic() - before

        def validate() -> None:
            score = score_encoder(run.average, validation, run.step, group)
            keep_best(run, score)
            means = dict(zip(LOSSES, _average_losses(run.losses), strict=True)) if run.losses else {}
            run.losses.clear()
            seconds = round(time.monotonic() - started, 1)
            log({**score._asdict(), **means, "best_accuracy": run.best.accuracy, "seconds": seconds})

        def save() -> None:
            if outputs.checkpoint is not None:
                write_checkpoint(outputs.checkpoint, *pack_run(run))

        if run.step == 0:
            validate()
        while not run.finished:
            own_losses = take_step(run, shared, *draw_batch(base, plan, run.step, group)).tolist()
            losses, asked = zip(*group.gather((own_losses, interrupted())), strict=True)
            stop = any(asked)
            run.losses.append(_average_losses(losses))
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


def _average_losses(pairs: Sequence[Sequence[float]]) -> list[float]:
    """Average pairs of losses, (n, 2) with n >= 1, into one pair."""
    means: list[float] = torch.tensor(pairs, dtype=torch.float64).mean(dim=0).tolist()
    return means


@contextmanager
def _open_log(outputs: Outputs, step: int) -> Iterator[tuple[Callable[[dict[str, Any]], None], float]]:
    """Open the log and TensorBoard's folder, without entries after ``step``.

    Yields a function that adds an entry to both, and the seconds of the last entry, from which those of a resumed run
    go on; 0 without one.
    """
    with ExitStack() as stack:
        file = writer = None
        seconds = 0.0
        if outputs.log is not None:
            lines = _read_log(outputs.log, step) if step else []
            seconds = float(json.loads(lines[-1]).get("seconds", 0.0)) if lines else 0.0
            outputs.log.write_text("".join(lines), encoding="utf-8")
            file = stack.enter_context(outputs.log.open("a", encoding="utf-8"))
        if outputs.tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional

            writer = SummaryWriter(str(outputs.tensorboard), purge_step=step + 1)
            stack.callback(writer.close)

        def log(entry: dict[str, Any]) -> None:
            if file is not None:
                print(json.dumps(entry), file=file, flush=True)
            if writer is not None:
                for name in entry.keys() & {"accuracy", *LOSSES}:
                    writer.add_scalar(name, entry[name], entry["step"])
                writer.flush()

        yield log, seconds


def _read_log(path: Path, step: int) -> list[str]:
    """Return a log's lines up to a step; those written between the last checkpoint and a crash will be repeated."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    steps = [re.match(r'{"step": (\d+),.*}\n', line) for line in lines]
    return [line for line, found in zip(lines, steps, strict=True) if found and int(found[1]) <= step]


@contextmanager
def delay_interrupt() -> Iterator[Callable[[], bool]]:
    """Delay Ctrl-C, because a step that is cut off in the middle could not be continued to the same result.

    Yields a function that returns whether Ctrl-C came. A second Ctrl-C raises KeyboardInterrupt at once.
    """
    asked = threading.Event()

    def note(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
