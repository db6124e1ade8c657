"""Simulated contest: pack the submission, unpack it into an empty folder, and evaluate it in a clean process.

The process can import torch, numpy and the standard library only. Without --json, the results are in
build/contest*.json. For new samples of the data, run python -m analysis contest-draws.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.shared.runner import BUILD_FOLDER, StudyOptions, StudyReport, write_rows
from protonet.datasets import Split
from protonet.errors import raise_input_error
from protonet.ui.command_line import check_known_name, check_output_path
from protonet.ui.options import option
from solution.pack import pack_single_file, pack_zip

#: The official data. Only studies may use its seeds, not the library.
NUM_CLASSES, DIM, PROTOTYPE_RADIUS, NOISE_STD = 128, 384, 2.5, 0.4
PROTOTYPE_SEED, TRAIN_SEED, VAL_SEED, TEST_SEED = 2025, 1337, 2026, 4242
SAMPLES_PER_CLASS = {"official": (16, 4, 8), "agentics": (1, 1, 1)}  #: Train, val and test, by configuration.
WORKER_FILE = Path(__file__).with_name("worker.py")
PARAM_LIMIT, BASELINE_ACCURACY = 500_000.0, 0.72
TIMEOUT_SECONDS = 3600.0
SPLIT_NAMES = ("train", "val", "test")
#: Versions of the contest's image, which asks for ``torch>=2.2,<2.4``.
CONTEST_PYTHON, CONTEST_TORCH = (3, 12), {(2, 2), (2, 3)}


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """The options of the study."""

    config: str = option(
        "or agentics: 1 sample per class (default: official)",
        "official",
        parse=partial(check_known_name, known_names=SAMPLES_PER_CLASS),
    )
    single_file: bool = option("evaluate the single file", False)
    python: str = option("interpreter (default: this one)", sys.executable, metavar="PATH")


def run(options: Options) -> StudyReport:
    """Evaluate the packed submission on the official data."""
    name = "contest" + "_agentics" * (options.config == "agentics") + "_single_file" * options.single_file
    default_json = None if options.json else check_output_path("--json", BUILD_FOLDER / f"{name}.json")
    submission = pack_single_file() if options.single_file else pack_zip()
    described = {"submission": "single file" if options.single_file else "ZIP"}
    described |= {"sha256": hashlib.sha256(submission).hexdigest(), "config": options.config}
    split = sample_official_data(*SAMPLES_PER_CLASS[options.config])
    result = evaluate_submission(submission, split, python=options.python)
    line = "accuracy {accuracy:.4f}  score {score:.2f}  parameters {parameters:,}  seconds {seconds:.1f}  "
    line += "peak memory {peak_memory_mib:.0f} MiB\nPython {python}, torch {torch}, numpy {numpy}: "
    if default_json is not None:
        write_rows(default_json, described | result)
    return StudyReport(described | result, line.format(**result) + describe_versions(result["python"], result["torch"]))


def describe_versions(python: str, torch_version: str) -> str:
    """Describe in a line whether versions are those of the contest: Python 3.12, torch 2.2 or 2.3."""
    python_minor, torch_minor = (tuple(map(int, version.split(".")[:2])) for version in (python, torch_version))
    if python_minor == CONTEST_PYTHON and torch_minor in CONTEST_TORCH:
        return "the contest's versions\n"
    return "not the contest's versions (Python 3.12, torch 2.2 or 2.3); `make contest-versions` runs these\n"


def evaluate_submission(
    submission: bytes, split: Split, *, param_limit: float = PARAM_LIMIT, python: str = sys.executable
) -> dict[str, Any]:
    """Unpack a submission (ZIP or ``solution.py``), train it in a process without access to the repository; score it.

    The process runs the interpreter ``python``, whose environment needs torch and numpy alone.

    The result has accuracy in [0, 1], score in [0, 100] (0 above ``param_limit`` parameters), parameters, seconds of
    ``solve``, peak_memory_mib of the process, added_memory_mib beyond that of torch and the data, threads, and the
    versions of python, torch and numpy. An InputError is raised if the submission failed, its traceback being on
    stderr, or took more than an hour.
    """
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        workspace = top / "workspace"
        workspace.mkdir()
        if zipfile.is_zipfile(io.BytesIO(submission)):
            zipfile.ZipFile(io.BytesIO(submission)).extractall(workspace)
        else:
            (workspace / "solution.py").write_bytes(submission)
        for path in (*workspace.rglob("*"), workspace):  # read-only, as a contest may have it
            path.chmod(0o555 if path.is_dir() else 0o444)
        arrays = {f"{part}_{side}": getattr(split, f"{part}_{side}") for part in SPLIT_NAMES for side in "xy"}
        np.savez(top / "data.npz", **{name: tensor.numpy() for name, tensor in arrays.items()})
        limits = {"param_limit": param_limit, "baseline_accuracy": BASELINE_ACCURACY}
        described = {"num_classes": split.num_classes, "input_dim": split.train_x.shape[1], **limits, "device": "cpu"}
        described |= {f"{part}_samples": len(getattr(split, f"{part}_y")) for part in SPLIT_NAMES}
        request = {**limits, "metadata": described, "solution": str(workspace / "solution.py")}
        request |= {"data": str(top / "data.npz"), "result": str(top / "result.json")}
        (top / "request.json").write_text(json.dumps(request), encoding="utf-8")
        command = [python, "-I", str(WORKER_FILE), str(top / "request.json")]
        try:  # in a session of its own, so that Ctrl-C ends it from here and it shows no traceback
            ended = subprocess.run(command, cwd=top, timeout=TIMEOUT_SECONDS, check=False, start_new_session=True)
        except subprocess.TimeoutExpired:
            raise_input_error("submission", f"end within {TIMEOUT_SECONDS:.0f} s", "no result", "Lower the time limit.")
        if ended.returncode:
            got, remedy = f"exit code {ended.returncode}", "Its traceback is above."
            raise_input_error("submission", "run in the contest's process", got, remedy)
        result: dict[str, Any] = json.loads((top / "result.json").read_text(encoding="utf-8"))
        return result


def sample_official_data(n_train: int = 16, n_val: int = 4, n_test: int = 8) -> Split:
    """Sample the official data, with the same bits and order as the contest's; counts are samples per class, >= 1.

    Source: Frontier-CS, ``research/problems/imagenet_pareto``; seeds and order as its evaluator has them.
    """
    directions = torch.randn(NUM_CLASSES, DIM, generator=torch.Generator().manual_seed(PROTOTYPE_SEED))
    prototypes = torch.nn.functional.normalize(directions, dim=1) * PROTOTYPE_RADIUS
    return Split(
        *_sample_rows(prototypes, n_train, TRAIN_SEED),
        *_sample_rows(prototypes, n_val, VAL_SEED),
        *_sample_rows(prototypes, n_test, TEST_SEED),
        num_classes=NUM_CLASSES,
        noise_covariance=NOISE_STD**2 * torch.eye(DIM, dtype=torch.float64),
        radius=PROTOTYPE_RADIUS,
    )


def _sample_rows(prototypes: Tensor, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sample n rows per class around prototypes, in random order: rows (num_classes * n, dim) and their classes."""
    generator = torch.Generator().manual_seed(seed)
    rows = [prototype + NOISE_STD * torch.randn(n, DIM, generator=generator) for prototype in prototypes]
    order = torch.randperm(NUM_CLASSES * n, generator=generator)
    labels = torch.arange(NUM_CLASSES).repeat_interleave(n)  # (num_classes * n,)
    return torch.cat(rows)[order], labels[order]
