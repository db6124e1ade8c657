"""The contest's evaluator, in a separate process: ``python -I worker.py REQUEST``.

This file imports nothing of the repository, and lets the submission import nothing but the standard library,
torch, numpy and what lies in its own workspace, whatever else is installed. The request is a JSON file:

- ``solution``: path of ``solution.py``;
- ``data``: path of an npz file: ``train_x`` (n, dim) float32, ``train_y`` (n,) int64, val and test alike;
- ``metadata``: the third argument of ``solve``, or null;
- ``param_limit`` and ``baseline_accuracy``: numbers, for the score;
- ``result``: path of the JSON file to write.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
import time
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

#: torch, numpy, and what torch itself requires.
ALLOWED_MODULES = sys.stdlib_module_names | {
    *("torch", "torchgen", "functorch", "numpy", "typing_extensions", "setuptools", "filelock", "fsspec"),
    *("sympy", "mpmath", "networkx", "jinja2", "markupsafe"),
}
SEED, BATCH_SIZE = 2025, 128


class _RestrictedFinder:
    """An import finder that hides all modules except allowed modules and modules of the workspace."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace.resolve()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        top = name.partition(".")[0]
        if spec is None or top in ALLOWED_MODULES or top.startswith("_sysconfigdata"):  # the latter is sysconfig's
            return spec
        origin = Path(spec.origin or "/").resolve()
        return spec if origin.is_relative_to(self.workspace) else None


def import_solution(path: Path) -> ModuleType:
    """Import ``solution.py`` by its path as the contest does, without its folder on ``sys.path``."""
    spec = importlib.util.spec_from_file_location("submitted_solution", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_peak_memory() -> float:
    """Measure this process's peak resident memory in MiB."""
    status = Path("/proc/self/status")  # Linux's getrusage would include what the parent held when it forked
    lines = status.read_text().splitlines() if status.exists() else []
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    if peaks:
        return peaks[0] / 1024
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def evaluate_request(request: dict[str, Any]) -> dict[str, Any]:
    """Train and test the submission of a request; return accuracy, score, parameters, time, memory and versions."""
    solution = Path(request["solution"])
    finders: Any = [BuiltinImporter, FrozenImporter, _RestrictedFinder(solution.parent)]
    sys.meta_path[:] = finders
    import numpy as np  # noqa: PLC0415 - the import system is narrowed first
    import torch  # noqa: PLC0415
    from torch.utils.data import DataLoader, TensorDataset  # noqa: PLC0415

    with np.load(request["data"]) as arrays:
        parts = [[torch.from_numpy(arrays[f"{part}_{side}"]) for side in "xy"] for part in ("train", "val", "test")]
    loaders = [DataLoader(TensorDataset(*part), batch_size=BATCH_SIZE, shuffle=part is parts[0]) for part in parts]
    before = measure_peak_memory()
    submission = import_solution(solution).Solution()
    torch.manual_seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - the contest does
    started = time.perf_counter()
    model = submission.solve(*loaders[:2], request["metadata"])
    seconds = time.perf_counter() - started
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"solve: `model` must be an nn.Module; got {type(model).__name__}. Return the model.")
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    model.eval()
    with torch.no_grad():
        correct = torch.cat([model(inputs).argmax(dim=1) == targets for inputs, targets in loaders[2]])
    accuracy = int(correct.sum()) / len(correct)
    baseline = request["baseline_accuracy"]
    score = min(100.0, max(0.0, (accuracy - baseline) / (1 - baseline) * 100))
    return {
        "accuracy": accuracy,
        "score": score if parameters <= request["param_limit"] else 0.0,
        "parameters": parameters,
        "seconds": round(seconds, 2),
        "peak_memory_mib": round(measure_peak_memory(), 1),
        "added_memory_mib": round(measure_peak_memory() - before, 1),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(request["result"]).write_text(json.dumps(evaluate_request(request)), encoding="utf-8")
