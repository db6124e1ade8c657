"""One size of `analysis.scale`, in a process of its own: ``python -m analysis.scale_worker ROWS CLASSES DIM``."""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from analysis.contest_worker import BATCH, measure_peak_memory
from analysis.official import NOISE, RADIUS
from protonet import solve


def sample_rows(n_rows: int, num_classes: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return features (n_rows, dim), float32, and labels (n_rows,), int64, isotropic as the contest's are.

    Nothing larger than the features is held on the way.
    """
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.nn.functional.normalize(torch.randn(num_classes, dim, generator=generator), dim=1) * RADIUS
    features = torch.randn(n_rows, dim, generator=generator).mul_(NOISE)
    for block in features.split(num_classes):
        block.add_(prototypes[: len(block)])
    return features, torch.arange(n_rows) % num_classes


def measure_solve(n_rows: int, num_classes: int, dim: int) -> dict[str, float]:
    """Return what `protonet.solve` costs: wall and CPU seconds, the process's peak MiB before it and after."""
    loader = DataLoader(TensorDataset(*sample_rows(n_rows, num_classes, dim)), batch_size=BATCH, shuffle=True)
    before = measure_peak_memory()
    wall, cpu = time.perf_counter(), time.process_time()
    solve(loader, metadata={"num_classes": num_classes, "input_dim": dim})
    return {
        "rows": n_rows,
        "wall_seconds": round(time.perf_counter() - wall, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "mib_before": round(before, 1),
        "peak_memory_mib": round(measure_peak_memory(), 1),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    print(json.dumps(measure_solve(*map(int, sys.argv[1:]))))
