"""CPU time of a step relative to AdamW's, on networks of several shapes, alternately in one process on one thread.

AdamW is torch's as it is set by default, which goes from parameter to parameter, and its fused kernel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from analysis.optimizer_bench.bench import load_candidate
from analysis.optimizer_bench.loading import load_optimizer
from analysis.shared.runner import Report, StudyParser
from protonet.ui.command_line import check_name
from protonet.ui.text import format_table

Shapes = list[tuple[int, ...]]
BLOCK: Shapes = [(64,), (64,), (192, 64), (192,), (64, 64), (64,), (64,), (64,), (256, 64), (256,), (64, 256), (64,)]
#: By name, the shapes of a network's parameters.
CASES: dict[str, Shapes] = {
    "64 vectors of 64": [(64,)] * 64,
    "50 of 16 x 16": [(16, 16)] * 50,
    "40 of 32 x 32, biases": [(32, 32), (32,)] * 40,
    "16 of 64 x 64": [(64, 64)] * 16,
    "transformer, 4 blocks of 64": [(96, 64), (32, 64), *BLOCK * 4, (64,), (64,), (96, 64)],
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
SEEN = 200  #: Rows of embeddings that have gradients.
NOTE = """
Milliseconds of CPU time of one step(), medians over turns of {steps} steps after the first {first}; ratios are medians
over pairs of turns. One thread.
"""
FIRST = 100  #: Steps before the time is taken: bases turn more often in the first ones.


def add_options(parser: StudyParser) -> None:
    """Add the optimizer, the networks and the number of steps."""
    parser.add_argument("--optimizer", required=True, metavar="FILE", help="as that of optimizer-bench")
    parser.add_argument("--config", metavar="FILE", help="its config, a JSON object (default: none)")
    parser.add_argument("--case", metavar="NAME", help=f"one of {', '.join(CASES)} (default: all)")
    parser.add_int("--steps", 48, "steps of a turn")
    parser.add_int("--turns", 7, "turns of each optimizer")


def run(options: argparse.Namespace) -> Report:
    """Time the optimizer and AdamW on each network."""
    candidate = load_candidate(Path(options.optimizer), options.config)
    if options.case is not None:
        check_name("--case", options.case, CASES)
    assert candidate.file is not None, "candidates have files"
    config = json.loads(candidate.config)
    make = partial(load_optimizer(candidate.file, config), **config)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        names = CASES if options.case is None else [options.case]
        rows = [measure(name, make, options.steps, options.turns) for name in names]
    finally:
        torch.set_num_threads(threads)
    return Report(rows, tabulate(rows) + NOTE.format(steps=options.steps, first=FIRST))


def measure(name: str, make: Callable[..., torch.optim.Optimizer], steps: int, turns: int) -> dict[str, Any]:
    """Measure a network's milliseconds per step of AdamW, of its fused kernel and of an optimizer; compute ratios."""
    makers: list[Callable[..., torch.optim.Optimizer]] = [
        torch.optim.AdamW,
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        make,
    ]
    generator = torch.Generator().manual_seed(0)
    gradients = [[0.05 + 0.1 * torch.randn(shape, generator=generator) for shape in CASES[name]] for _ in range(4)]
    if name.startswith("embeddings"):
        for (table,) in gradients:
            table[SEEN:] = 0
    parameters = [[nn.Parameter(torch.ones(shape)) for shape in CASES[name]] for _ in makers]
    optimizers = [make_one(group) for make_one, group in zip(makers, parameters, strict=True)]
    for optimizer, group in zip(optimizers, parameters, strict=True):
        _take_steps(optimizer, group, gradients, FIRST)
    times = [
        [
            _take_steps(optimizer, group, gradients, steps)
            for optimizer, group in zip(optimizers, parameters, strict=True)
        ]
        for _ in range(turns)
    ]  # (turns, optimizers)
    plain, fused, ours = (statistics.median(column) for column in zip(*times, strict=True))
    ratios = {"ratio": statistics.median(t[2] / t[0] for t in times)}
    ratios["fused_ratio"] = statistics.median(t[2] / t[1] for t in times)
    return {"name": name, "adamw_ms": plain, "fused_ms": fused, "ms": ours, **ratios}


def _take_steps(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[nn.Parameter],
    gradients: Sequence[Sequence[torch.Tensor]],
    steps: int,
) -> float:
    """Take steps; return the CPU milliseconds of one."""
    seconds = 0.0
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients[step % len(gradients)], strict=True):
            parameter.grad = gradient
        start = time.process_time()
        optimizer.step()
        seconds += time.process_time() - start
    return 1000 * seconds / steps


def tabulate(rows: Sequence[dict[str, Any]]) -> str:
    """Format the table."""
    lines = [
        [row["name"], *(f"{row[key]:.2f}" for key in ("adamw_ms", "fused_ms", "ms"))]
        + [f"{row[key]:.1f}" for key in ("ratio", "fused_ratio")]
        for row in rows
    ]
    return format_table(["parameters", "AdamW ms", "fused ms", "ms", "of AdamW's", "of fused"], lines)
