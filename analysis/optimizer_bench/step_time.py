"""Measure an optimizer's CPU time per step, state size and CPU time to the same loss relative to AdamW.

The optimizers take turns on one thread. Parameters and gradients are those of the networks of the bench's workloads,
and of further networks that are given by their shapes. All steps of a run count, also the first ones, in which
optimizers may do more work. The CPU time to a loss also has that of the gradients.

AdamW is torch's default implementation, which loops over parameters, and torch's fused kernel.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from analysis.optimizer_bench.runs import load_candidate, load_optimizer_class
from analysis.optimizer_bench.workloads import WORKLOADS, get_groups
from analysis.shared.runner import StudyOptions, StudyReport, int_option, use_one_thread
from protonet.ui.command_line import check_known_name
from protonet.ui.options import option
from protonet.ui.text import format_table

ParameterShapes = list[tuple[int, ...]]
ATTENTION_SHAPES: ParameterShapes = [(64,), (64,), (192, 64), (192,), (64, 64), (64,)]
FEED_FORWARD_SHAPES: ParameterShapes = [(64,), (64,), (256, 64), (256,), (64, 256), (64,)]
#: Names of workloads whose networks are measured, and the parameter shapes of other networks by name.
STREAM_WORKLOADS = ("grammar", "petals", "hops", "regress", "tastes", "teacher", "chords", "jumps")
TIMED_WORKLOADS = [*(name for name in WORKLOADS if get_groups(name).role == "visible"), *STREAM_WORKLOADS]
SHAPE_CASES: dict[str, ParameterShapes] = {
    "64 vectors of 64": [(64,)] * 64,
    "50 of 16 x 16": [(16, 16)] * 50,
    "40 of 32 x 32, biases": [(32, 32), (32,)] * 40,
    "16 of 64 x 64": [(64, 64)] * 16,
    "transformer, 4 blocks of 64": [
        (96, 64),
        (32, 64),
        *(ATTENTION_SHAPES + FEED_FORWARD_SHAPES) * 4,
        (64,),
        (64,),
        (96, 64),
    ],
    "8 of 64 x 64 x 3 x 3": [(64, 64, 3, 3)] * 8,
    "MLP of 784, 128, 10": [(128, 784), (128,), (10, 128), (10,)],
    "MLP of 784, 256, 10": [(256, 784), (256,), (10, 256), (10,)],
    "4 of 256 x 256": [(256, 256)] * 4,
    "16 of 256 x 256": [(256, 256)] * 16,
    "2 of 512 x 512": [(512, 512)] * 2,
    "1,000 x 1,000": [(1000, 1000)],
    "embeddings of 50,000 x 20": [(50_000, 20)],
    "a vector of 1,000,000": [(1_000_000,)],
}
TABLE_NOTE = """
Milliseconds of CPU time of one step(), and of the gradients of a batch; means over the first {steps:,} steps, in turns.
State: the bytes of its tensors over those of AdamW's. Medians over the {count} workloads: {ratio:.1f} times AdamW's CPU
time of a step, {state:.1f} times its state. One thread.
"""
CPU_TIME_NOTE = """
CPU time: that of AdamW's gradients and steps to the same loss, divided by the optimizer's, by the ratios of steps in
{file}; geometric mean {plain:.2f}, with torch's fused AdamW {fused:.2f}.
"""
N_GRADIENTS_TIMED = 50


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """The options of the study."""

    optimizer: str = option("as that of optimizer-bench", metavar="FILE", required=True)
    config: str | None = option("its config, a JSON object (default: none)", metavar="FILE")
    case: str | None = option(
        f"one of {', '.join([*TIMED_WORKLOADS, *SHAPE_CASES])} (default: all)",
        parse=partial(check_known_name, known_names=[*TIMED_WORKLOADS, *SHAPE_CASES]),
    )
    bench: Path | None = option("results of optimizer-bench, for the CPU time to the same loss", metavar="JSON")
    steps: int = int_option("steps of a turn", 50)
    turns: int = int_option("turns of each optimizer", 20)


def run(options: Options) -> StudyReport:
    """Time the optimizer and AdamW on each network."""
    candidate = load_candidate(options.optimizer, options.config)
    make_optimizer = partial(load_optimizer_class(candidate), **json.loads(candidate.config))
    with use_one_thread():
        names = [*TIMED_WORKLOADS, *SHAPE_CASES] if options.case is None else [options.case]
        rows = [measure_step_time(name, make_optimizer, options.steps, options.turns) for name in names]
    of_workloads = [row for row in rows if row["name"] in WORKLOADS] or rows
    medians = {key: statistics.median(row[key] for row in of_workloads) for key in ("ratio", "state")}
    note = TABLE_NOTE.format(steps=options.steps * options.turns, count=len(of_workloads), **medians)
    if options.bench is not None:
        scores = json.loads(options.bench.read_text(encoding="utf-8"))[0]["rows"]
        step_ratios = {score["workload"]: score["ratio"] for score in scores}
        means = {}
        for name, key in (("plain", "adamw_ms"), ("fused", "fused_ms")):
            for row in (row for row in of_workloads if row["name"] in step_ratios):
                times = [row["gradient_ms"] + row[milliseconds] for milliseconds in (key, "ms")]
                row[f"{name}_cpu_time"] = step_ratios[row["name"]] * times[0] / times[1]
            known = [row[f"{name}_cpu_time"] for row in rows if f"{name}_cpu_time" in row]
            means[name] = statistics.geometric_mean(known)
        note += CPU_TIME_NOTE.format(file=options.bench, **means)
    cells = "{adamw_ms:.2f} {fused_ms:.2f} {ms:.2f} {ratio:.1f} {fused_ratio:.1f} {state:.1f}"
    lines = [
        [row["name"], *cells.format(**row).split()]
        + [f"{row[key]:.2f}" if row.get(key) else "" for key in ("gradient_ms", "plain_cpu_time")]
        for row in rows
    ]
    header = ["parameters", "AdamW ms", "fused ms", "ms", "of AdamW's", "of fused", "state", "gradient ms", "CPU time"]
    return StudyReport(rows, format_table(header, lines) + note)


MakeOptimizer = Callable[..., torch.optim.Optimizer]  #: Makes an optimizer of a list of parameters.


def measure_step_time(name: str, make_optimizer: MakeOptimizer, steps: int, turns: int) -> dict[str, Any]:
    """Time the steps of AdamW, fused AdamW and an optimizer on a network, by turns; return milliseconds and ratios."""
    makers: list[MakeOptimizer] = [AdamW, partial(AdamW, fused=True), make_optimizer]
    weights, gradients = make_weights_and_gradients(name)
    parameters = [[nn.Parameter(weight.clone()) for weight in weights] for _ in makers]
    optimizers = [make_one(group) for make_one, group in zip(makers, parameters, strict=True)]
    pairs = list(zip(optimizers, parameters, strict=True))
    times = [[_time_steps(*pair, gradients, steps) for pair in pairs] for _ in range(turns)]  # (turns, optimizers)
    plain, fused, ours = (statistics.fmean(column) for column in zip(*times, strict=True))
    sizes = []
    for optimizer in optimizers:
        tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        sizes.append(sum(storage.nbytes() for storage in storages.values()))  # shared memory counts once
    milliseconds = {"adamw_ms": plain, "fused_ms": fused, "ms": ours, "gradient_ms": time_gradients(name)}
    ratios = {"ratio": ours / plain, "fused_ratio": ours / fused, "state": sizes[2] / sizes[0]}
    return {"name": name, **milliseconds, **ratios}


def time_gradients(name: str) -> float:
    """Return the mean CPU milliseconds of a batch's gradients on a workload; 0 for a network that is none."""
    if name not in WORKLOADS:
        return 0.0
    model, train_loss, _ = WORKLOADS[name](0)
    start = time.process_time()
    for _ in range(N_GRADIENTS_TIMED):
        torch.autograd.grad(train_loss(), [*model.parameters()])
    return 1000 * (time.process_time() - start) / N_GRADIENTS_TIMED


def make_weights_and_gradients(name: str) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Make the weights of a network, and gradients of four batches; ``name`` is a workload or a key of SHAPE_CASES."""
    if name in WORKLOADS:
        model, train_loss, _ = WORKLOADS[name](0)
        weights = [parameter.detach() for parameter in model.parameters()]
        return weights, [[*torch.autograd.grad(train_loss(), [*model.parameters()])] for _ in range(4)]
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPE_CASES[name]
    gradients = [[0.05 + 0.1 * torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4)]
    n_rows_with_gradient = 200  # rows of an embedding table whose gradients are not 0
    if name.startswith("embeddings"):
        for (table,) in gradients:
            table[n_rows_with_gradient:] = 0
    return [torch.ones(shape) for shape in shapes], gradients


def _time_steps(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
    gradients: Sequence[Sequence[Tensor]],
    steps: int,
) -> float:
    """Take steps of an optimizer; return the mean CPU milliseconds of a step."""
    seconds = 0.0
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients[step % len(gradients)], strict=True):
            parameter.grad = gradient
        start = time.process_time()
        optimizer.step()
        seconds += time.process_time() - start
    return 1000 * seconds / steps
