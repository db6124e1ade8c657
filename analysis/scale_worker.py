"""One size of `analysis.scale`, in a process of its own: ``python -m analysis.scale_worker ROWS CLASSES DIM``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from analysis.contest_worker import BATCH, measure_peak_memory
from analysis.official import NOISE, RADIUS
from protonet import PrototypeNetwork, solve
from protonet.encoder import Encoder
from protonet.views.linear import LinearView
from protonet.views.radial import RadialView

#: Rows that prediction is timed on, and how often; the best counts.
PREDICTED, REPEATS = 4096, 7


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


def list_products(network: PrototypeNetwork) -> list[tuple[int, int]]:
    """Return the shapes (in, out) of all matrices that a row is multiplied with on its way to the logits."""
    encoder = network.encoder
    assert isinstance(encoder, Encoder)
    shapes = [(network.prototypes.shape[1], len(network.prototypes))]
    read: set[nn.Module] = set()  # a linear view is worked out once for all that read it
    for view in encoder.views:
        linear = view.view if isinstance(view, RadialView) else view
        if isinstance(linear, LinearView) and linear.basis.shape[1] and linear not in read:
            read.add(linear)
            shapes += [(linear.basis.shape[0], linear.basis.shape[1]), (linear.basis.shape[1], linear.basis.shape[0])]
        if isinstance(view, RadialView):
            shapes += [(view.landmarks.shape[1], len(view.landmarks)), (len(view.readout), view.readout.shape[1])]
    if encoder.learned is not None:
        for first, last in zip(encoder.learned.first, encoder.learned.last, strict=True):
            shapes += [(first.shape[0], first.shape[1]), (last.shape[0], last.shape[1])]
    return shapes


def measure_prediction(network: PrototypeNetwork, x: Tensor) -> tuple[float, float]:
    """Return the seconds to classify rows (n, dim), and those of bare float32 matrix products of the same sizes."""
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(len(x), into, generator=generator), torch.randn(into, out, generator=generator))
        for into, out in list_products(network)
    ]

    def multiply() -> None:
        for rows, matrix in pairs:
            torch.mm(rows, matrix)

    def time_best(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    with torch.no_grad():
        return time_best(lambda: network(x)), time_best(multiply)


def measure_solve(n_rows: int, num_classes: int, dim: int) -> dict[str, float]:
    """Return what `protonet.solve` costs: wall and CPU seconds, the process's peak MiB before it and after.

    With it comes what its network costs: microseconds a row, and those of the bare matrix products.
    """
    features, labels = sample_rows(n_rows, num_classes, dim)
    loader = DataLoader(TensorDataset(features, labels), batch_size=BATCH, shuffle=True)
    before = measure_peak_memory()
    wall, cpu = time.perf_counter(), time.process_time()
    network = solve(loader, metadata={"num_classes": num_classes, "input_dim": dim})
    wall, cpu, peak = time.perf_counter() - wall, time.process_time() - cpu, measure_peak_memory()
    batch = features[torch.arange(PREDICTED) % n_rows]
    seconds, bare = measure_prediction(network, batch)
    return {
        "rows": n_rows,
        "classes": num_classes,
        "wall_seconds": round(wall, 3),
        "cpu_seconds": round(cpu, 3),
        "mib_before": round(before, 1),
        "peak_memory_mib": round(peak, 1),
        "predict_microseconds": round(1e6 * seconds / PREDICTED, 3),
        "bare_microseconds": round(1e6 * bare / PREDICTED, 3),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    print(json.dumps(measure_solve(*map(int, sys.argv[1:]))))
