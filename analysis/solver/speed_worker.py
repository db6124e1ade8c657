"""Execute a measurement of `analysis.solver.speed` in its own process; PYTHONPATH selects the library's version."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from protonet import solve

SEED = 0
PREDICTED_ROWS, REPEATS = 512, 5  #: Rows of a prediction, and its repetitions, of which the fastest counts.
PROTOTYPE_RADIUS, NOISE_DEVIATION = 2.5, 0.4  #: Geometry of the contest's classes (`analysis.contest.trial`).
Data = dict[str, Any]


def measure_prediction(data: Data, effort: str) -> dict[str, float]:
    """Measure the CPU microseconds to predict a row, and the accuracy and log-loss on test rows."""
    network, new, result = _solve(data, effort)
    rows = new[torch.arange(PREDICTED_ROWS) % len(new)]
    times = []
    with torch.no_grad():
        for _ in range(REPEATS):
            start = time.process_time()
            network(rows)
            times.append(time.process_time() - start)
    return result | {"value": 1e6 * min(times) / PREDICTED_ROWS}


def _solve(data: Data, effort: str) -> tuple[torch.nn.Module, torch.Tensor, dict[str, float]]:
    """Fit a network to labelled rows; return it, test rows, CPU seconds, and accuracy and log-loss on the test rows."""
    torch.set_num_threads(1)
    x, y, new, truth = (torch.from_numpy(data[name]) for name in ("x", "y", "new", "truth"))
    start = time.process_time()
    network = solve((x, y), effort=effort, seed=SEED)
    seconds = time.process_time() - start
    with torch.no_grad():
        logits = network(new)
    right = float((logits.argmax(dim=1) == truth).double().mean())
    return network, new, {"value": seconds, "right": right, "loss": float(F.cross_entropy(logits, truth))}


def measure_command(data: Data, folder: str) -> dict[str, float]:
    """Measure the CPU seconds of a command, its peak memory in MiB, and the size of its model file in MB."""
    arguments = [sys.executable, "-m", "protonet", *(str(argument) for argument in data["arguments"])]
    model = Path(folder, "model.safetensors")
    subprocess.run(arguments, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    size = model.stat().st_size / 1e6 if model.exists() else 0.0
    model.unlink(missing_ok=True)
    return {"value": usage.ru_utime + usage.ru_stime, "memory": usage.ru_maxrss / 1024, "size": size}


def measure_large_fit(data: Data, effort: str) -> dict[str, float]:
    """Measure CPU seconds and peak memory in MiB of ``solve`` on isotropic rows of the sizes in ``data``."""
    torch.set_num_threads(1)
    rows, classes, dim = (int(size) for size in data["sizes"])
    generator = torch.Generator().manual_seed(SEED)
    centres = F.normalize(torch.randn(classes, dim, generator=generator), dim=1) * PROTOTYPE_RADIUS
    x, y = torch.randn(rows, dim, generator=generator).mul_(NOISE_DEVIATION), torch.arange(rows) % classes
    for block in x.split(classes):  # in place: nothing larger than the features is held
        block.add_(centres[: len(block)])
    start = time.process_time()
    solve((x, y), effort=effort, seed=SEED)
    seconds = time.process_time() - start
    return {"value": seconds, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


MEASUREMENTS: dict[str, Callable[[Data, str], dict[str, float]]] = {
    "predict": measure_prediction,
    "fit": lambda data, effort: _solve(data, effort)[2],
    "grow": measure_large_fit,
    "command": measure_command,
}


if __name__ == "__main__":
    kind, path, option = sys.argv[1:]
    with np.load(path) as file:
        stored = dict(file)
    print(json.dumps(MEASUREMENTS[kind](stored, option)))
