"""What the command is given: workloads, candidates and baselines, from files that may be anybody's."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from analysis.optimizer_bench.running import validate
from analysis.optimizer_bench.workload import Build
from analysis.optimizer_bench.workloads import WORKLOADS
from protonet._checks import fail

PROG = "analysis.optimizer_bench"


@functools.cache
def load_python(argument: str, path: Path) -> ModuleType:
    """Import a file by its path, once a process.

    Raises:
        ValueError: It cannot be read, or raises an error.
    """
    name = f"bench_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    try:
        if spec is None or spec.loader is None:
            raise ImportError("its name does not end in .py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        got = f"{path} ({type(error).__name__}: {error})"
        fail(PROG, argument, "be a Python file that can be imported", got, "Mend it, or pass another path.")
    return module


def load_workloads(path: Path) -> dict[str, Build]:
    """Return the dictionary ``WORKLOADS`` of a file.

    Raises:
        ValueError: The file has none, or a name of it is a visible workload's.
    """
    builds = getattr(load_python("--workload-file", path), "WORKLOADS", None)
    if not isinstance(builds, dict) or not builds:
        fail(PROG, "--workload-file", "hold a dictionary WORKLOADS", str(path), "Map names to functions build(seed).")
    taken = sorted(builds.keys() & WORKLOADS.keys())
    if taken:
        fail(PROG, "--workload-file", "have names of its own", ", ".join(taken), "Rename these workloads.")
    return builds


def find_build(name: str, file: Path | None) -> Build:
    """Return what builds a workload of a file, or a visible one."""
    return (WORKLOADS if file is None else load_workloads(file))[name]


def load_optimizer(path: Path, config: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """Return the class ``CustomOptimizer`` of a file.

    Raises:
        ValueError: The file has none, or it does not take the configuration.
    """
    if path.name == "custom_optimizer.py" and not path.exists():
        remedy = "Pass protonet/optimizer.py: python -m solution.pack makes custom_optimizer.py of it."
        fail(PROG, "--optimizer", "be a file that exists", path, remedy)
    made = getattr(load_python("--optimizer", path), "CustomOptimizer", None)
    if not isinstance(made, type) or not issubclass(made, torch.optim.Optimizer):
        remedy = "Derive one from torch.optim.Optimizer."
        fail(PROG, "--optimizer", "hold a class CustomOptimizer", f"none in {path}", remedy)
    try:
        made([nn.Parameter(torch.zeros(2, 2))], **config)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        fail(PROG, "--config", "be what CustomOptimizer takes", got, "Change the configuration.")
    return made


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or raise a ValueError."""
    config = read_json("--config", path)
    if not isinstance(config, dict):
        fail(PROG, "--config", "hold a JSON object", f"a {type(config).__name__} in {path}", "Write {} for no setting.")
    return config


def read_json(argument: str, path: Path) -> Any:
    """Return what a JSON file holds, or raise a ValueError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(PROG, argument, "be a readable JSON file", f"{path} ({error})", "Pass another path.")


@functools.cache
def take_fingerprint(name: str, file: Path | None) -> float:
    """Return the validation loss of seed 0 before training, to 4 digits: other data or weights have another."""
    workload = find_build(name, file)(0)
    return float(f"{validate(workload.model, workload.val_loss):.4g}")
