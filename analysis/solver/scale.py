"""What `protonet.solve` costs as rows and classes grow, and what its network costs beside bare matrix products.

Each size is one process, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from timeit import repeat

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from analysis.contest.official import NOISE, RADIUS
from analysis.contest.worker import BATCH, measure_peak_memory
from analysis.shared.journal import run_all
from analysis.shared.runner import Report, StudyParser, call_alone, parse_wholes
from analysis.shared.tables import format_columns
from protonet import PrototypeNetwork, solve
from protonet._checks import refuse
from protonet.encoder import Encoder
from protonet.ui.command_line import parse_whole
from protonet.ui.text import count

PREDICTED, REPEATS = 4096, 7  #: Rows that prediction is timed on, and how often; the best counts.
#: The table's columns, from what `measure_solve` returns.
COLUMNS = {
    "classes": "{classes:,}",
    "rows": "{rows:,}",
    "wall s": "{wall_seconds:.1f}",
    "CPU s": "{cpu_seconds:.1f}",
    "ms per row": "{milliseconds:.3f}",
    "before MiB": "{mib_before:,.0f}",
    "peak MiB": "{peak_memory_mib:,.0f}",
    "KiB per row": "{kib:.1f}",
    "predict µs per row": "{predict_microseconds:.2f}",
    "bare": "{bare_microseconds:.2f}",
    "ratio": "{ratio:.1f}",
}
NOTE = """
One `solve` of {dim:,} features, isotropic, through DataLoader(batch_size=128, shuffle=True), on {threads}. Peak memory
is the whole process's; before is its peak when solve() begins, data included. Prediction is of 4,096 rows at once; bare
are float32 matrix products of the sizes that the network has.
"""


def add_options(parser: StudyParser) -> None:
    """Add the sizes."""
    wholes = partial(parse_wholes, low=2)
    parser.add("--classes", "10,128,1000", "numbers of classes, no more than rows", wholes)
    parser.add("--rows", "1000,10000,100000", "numbers of rows", wholes)
    parser.add_whole("--dim", 384, "features", low=2)
    parser.add_state()


def run(options: argparse.Namespace) -> Report:
    """Measure every size, the smallest first."""
    parse_whole("--rows", str(min(options.rows)), low=min(options.classes))
    sizes = [(n, c, options.dim) for c in sorted(options.classes) for n in sorted(options.rows) if n >= c]
    rows = list(run_all(sizes, measure_alone, options.state, unit="size").values())
    return Report(rows, tabulate(rows, options.dim))


def measure_alone(size: tuple[int, int, int]) -> dict[str, float]:
    """Return `measure_solve` of a process of its own, or raise an InputError with the last line of its stderr."""
    try:
        result: dict[str, float] = call_alone(measure_solve, *size)
    except ChildProcessError as error:
        refuse("--rows", "be what this machine can hold", f"{size[0]}: {error}", "Pass fewer rows.")
    return result


def tabulate(rows: Sequence[Mapping[str, float]], dim: int) -> str:
    """Return the Markdown table of `measure_solve`'s results, and a note that explains it."""
    derived = []
    for row in rows:
        memory = 1024 * (row["peak_memory_mib"] - row["mib_before"])
        costs = {"milliseconds": 1e3 * row["wall_seconds"] / row["rows"], "kib": memory / row["rows"]}
        derived.append({**row, **costs, "ratio": row["predict_microseconds"] / row["bare_microseconds"]})
    return format_columns(COLUMNS, derived) + NOTE.format(dim=dim, threads=count(int(rows[0]["threads"]), "thread"))


def sample_rows(n_rows: int, num_classes: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return features (n_rows, dim), float32, and labels (n_rows,), int64, isotropic as the contest's are."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.nn.functional.normalize(torch.randn(num_classes, dim, generator=generator), dim=1) * RADIUS
    features = torch.randn(n_rows, dim, generator=generator).mul_(NOISE)
    for block in features.split(num_classes):  # nothing larger than the features is held on the way
        block.add_(prototypes[: len(block)])
    return features, torch.arange(n_rows) % num_classes


def list_products(network: PrototypeNetwork) -> list[tuple[int, int]]:
    """Return the shapes (in, out) of all matrices that a row is multiplied with on its way to the logits."""
    assert isinstance(network.encoder, Encoder)
    return [(network.prototypes.shape[1], len(network.prototypes)), *network.encoder.products()]


def make_products(shapes: Sequence[tuple[int, int]], n_rows: int) -> Callable[[], None]:
    """Return work: float32 products of random rows with random matrices of these shapes."""
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n_rows, i, generator=generator), torch.randn(i, o, generator=generator)) for i, o in shapes]

    def multiply() -> None:
        for rows, matrix in pairs:
            torch.mm(rows, matrix)

    return multiply


def time_products(shapes: Sequence[tuple[int, int]], n_rows: int, times: int) -> dict[tuple[int, int], float]:
    """Return the CPU seconds of a row's bare product of each shape: the best of some times, of so many rows."""
    return {
        shape: min(repeat(make_products([shape], n_rows), timer=time.process_time, number=1, repeat=times)) / n_rows
        for shape in dict.fromkeys(shapes)
    }


def measure_prediction(network: PrototypeNetwork, x: Tensor) -> tuple[float, float]:
    """Return the seconds to classify rows (n, dim), and those of bare float32 matrix products of the same sizes."""
    multiply = make_products(list_products(network), len(x))
    with torch.no_grad():
        ours, bare = (min(repeat(work, number=1, repeat=REPEATS)) for work in (lambda: network(x), multiply))
    return ours, bare


def measure_solve(n_rows: int, num_classes: int, dim: int) -> dict[str, float]:
    """Return seconds and peak MiB of `protonet.solve`, and its network's microseconds per row beside bare products'."""
    features, labels = sample_rows(n_rows, num_classes, dim)
    loader = DataLoader(TensorDataset(features, labels), batch_size=BATCH, shuffle=True)
    before = measure_peak_memory()
    wall, cpu = time.perf_counter(), time.process_time()
    network = solve(loader, metadata={"num_classes": num_classes, "input_dim": dim})
    wall, cpu, peak = time.perf_counter() - wall, time.process_time() - cpu, measure_peak_memory()
    seconds, bare = measure_prediction(network, features[torch.arange(PREDICTED) % n_rows])
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
