"""The loop of meta-training: steps, validations, checkpoints, and what is told meanwhile."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from protonet.episodes.checkpoints import write_checkpoint
from protonet.episodes.distributed import Group
from protonet.episodes.meta import Run, keep_best, pack_run, take_step
from protonet.episodes.tasks import Side, draw_batch, score_encoder

#: The names of a step's two losses in the log.
LOSSES = ("episodic_loss", "cross_entropy")


class Outputs(NamedTuple):
    """Where results go: the checkpoint, the log and the TensorBoard folder; None for none."""

    checkpoint: Path | None = None
    log: Path | None = None
    tensorboard: Path | None = None


def train(run: Run, base: Side, validation: Side, group: Group, outputs: Outputs) -> None:
    """Train until the run is finished; each validation, and Ctrl-C between two steps, writes the checkpoint.

    Args:
        run: Changed in place; where it continues, nothing is done twice.
        base: The classes to learn from.
        validation: The classes to judge on.
        group: The processes that share the work, this one among them.
        outputs: Of the one process that writes; none of the others.

    Raises:
        KeyboardInterrupt: After Ctrl-C, the checkpoint being written.
    """
    from tqdm import tqdm  # noqa: PLC0415 - of use here alone

    plan, started = run.plan, time.monotonic()
    shared = DistributedDataParallel(run.learner) if group.world_size > 1 else run.learner
    bar = tqdm(
        total=plan.steps,
        initial=run.step,
        unit="step",
        delay=2,
        dynamic_ncols=True,
        file=sys.stderr,
        disable=outputs.checkpoint is None,
    )
    with bar, open_record(outputs, run.step) as record, delay_interrupt() as interrupted:

        def validate() -> None:
            score = score_encoder(run.average, validation, run.step, group)
            keep_best(run, score)
            means = dict(zip(LOSSES, average(run.losses), strict=True)) if run.losses else {}
            run.losses.clear()
            seconds = round(time.monotonic() - started, 1)
            record({**score._asdict(), **means, "best_accuracy": run.best.accuracy, "seconds": seconds})

        if run.step == 0:
            validate()
        while not run.finished:
            own = take_step(run, shared, *draw_batch(base, plan, run.step, group)).tolist()
            losses, asked = zip(*group.gather((own, interrupted())), strict=True)
            stop = any(asked)
            run.losses.append(average(losses))
            text = f"loss {sum(run.losses[-1]):.3f}, best {100 * run.best.accuracy:.2f} %"
            bar.set_postfix_str(text, refresh=False)
            bar.update()
            if run.step % plan.eval_every == 0 or run.step == plan.steps:
                validate()
                save(run, outputs)
            elif stop:
                save(run, outputs)
            if stop and not run.finished:
                raise KeyboardInterrupt(f"stopped at step {run.step:,}; run again with --resume")


def average(pairs: Sequence[Sequence[float]]) -> list[float]:
    """Return the means of pairs of losses, (n, 2), as a pair."""
    means: list[float] = torch.tensor(pairs, dtype=torch.float64).mean(dim=0).tolist()
    return means


def save(run: Run, outputs: Outputs) -> None:
    """Write the checkpoint, if this process is the one that does."""
    if outputs.checkpoint is not None:
        write_checkpoint(outputs.checkpoint, *pack_run(run))


@contextmanager
def open_record(outputs: Outputs, step: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that adds a validation to the log and to TensorBoard's; new ones, if no step is taken yet."""
    with ExitStack() as stack:
        file = writer = None
        if outputs.log is not None:
            outputs.log.write_text("".join(read_log(outputs.log, step) if step else []), encoding="utf-8")
            file = stack.enter_context(outputs.log.open("a", encoding="utf-8"))
        if outputs.tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional

            writer = SummaryWriter(str(outputs.tensorboard), purge_step=step + 1)
            stack.callback(writer.close)

        def record(entry: dict[str, Any]) -> None:
            if file is not None:
                print(json.dumps(entry), file=file, flush=True)
            if writer is not None:
                for name in entry.keys() & {"accuracy", *LOSSES}:
                    writer.add_scalar(name, entry[name], entry["step"])
                writer.flush()

        yield record


def read_log(path: Path, step: int) -> list[str]:
    """Return a log's lines up to a step: those after the last checkpoint, written before a crash, will come again."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    steps = [re.match(r'{"step": (\d+),.*}\n', line) for line in lines]
    return [line for line, found in zip(lines, steps, strict=True) if found and int(found[1]) <= step]


@contextmanager
def delay_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C came, which does not interrupt, unless it comes a second time.

    A step that is cut off in the middle could not be continued to the same result.
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
