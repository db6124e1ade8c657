"""Loading of workloads, candidates and baselines from untrusted files."""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from analysis.optimizer_bench.workload import Build, validate
from analysis.optimizer_bench.workloads import ROLE, ROLES, WORKLOADS
from analysis.shared.runner import StudyParser, parse_names
from protonet.errors import raise_input_error, raise_missing_file

#: Role and family of the workloads of a file.
FILE = "file"
BASELINES = Path("analysis/results/optimizer_baselines.json")
#: Result of tuned AdamW on a workload. ``setting`` has the lowest ``target``: the worst seed's best smoothed loss.
#: ``steps`` is the median over seeds of the first step at the target, for the ``fastest`` of the best settings, whose
#: first steps are ``hits`` (None for a miss). ``initial`` is the mean validation loss before training, ``curve`` the
#: mean over seeds of the smoothed losses of ``setting``, ``max_steps`` the length of every run, and ``fingerprint``
#: that of the workload. Newer baselines have ``easier`` ones by name, each with a target, steps and settings;
#: ``coarse`` ones are of the ladder alone.
Baseline = dict[str, Any]
#: By workload name and horizon, as text.
Baselines = dict[str, dict[str, Baseline]]
NEEDED = {"target", "steps", "initial", "max_steps", "fingerprint", "curve"}


def get_role(name: str) -> str:
    """Get the role of a workload."""
    return ROLE.get(name, FILE)


def add_workloads(parser: StudyParser, default: str = "all") -> None:
    """Add the workloads and the journal, which the commands share."""
    add = parser.add_argument
    add("--workloads", metavar="NAMES", help=f"of {', '.join(WORKLOADS)} and the file's (default: {default})")
    add("--workload-file", metavar="FILE", help="Python file with a dictionary WORKLOADS")
    parser.add_state("optimizer_bench")


def pick_workloads(options: argparse.Namespace, roles: Collection[str] = tuple(ROLES)) -> dict[str, Path | None]:
    """Select workloads: the file of each, None for a built-in one.

    These are the workloads that were asked for by name, else those of the roles and of the file.
    """
    known: dict[str, Path | None] = dict.fromkeys(WORKLOADS)
    if options.workload_file is not None:
        path = Path(options.workload_file).resolve()
        known |= dict.fromkeys(load_workloads(path), path)
    if options.workloads is not None:
        return {name: known[name] for name in parse_names("--workloads", options.workloads, known)}
    return {name: file for name, file in known.items() if get_role(name) in {*roles, FILE}}


@functools.cache
def load_python(argument: str, path: Path) -> ModuleType:
    """Import a file by its path, once per process; errors become an InputError."""
    name = f"bench_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    try:
        if spec is None or spec.loader is None:
            raise ImportError("its name does not end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # a dataclass looks its module up
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        got = f"{path} ({type(error).__name__}: {error})"
        raise_input_error(argument, "be a Python file that can be imported", got, "Mend it, or pass another path.")
    return module


def load_workloads(path: Path) -> dict[str, Build]:
    """Load the dictionary ``WORKLOADS`` of a file, whose names must differ from built-in ones."""
    builds = getattr(load_python("--workload-file", path), "WORKLOADS", None)
    if not isinstance(builds, dict) or not builds:
        raise_input_error(
            "--workload-file", "hold a dictionary WORKLOADS", str(path), "Map names to functions build(seed)."
        )
    clashes = sorted(builds.keys() & WORKLOADS.keys())
    if clashes:
        raise_input_error("--workload-file", "have names of its own", ", ".join(clashes), "Rename these workloads.")
    return builds


def get_build(name: str, file: Path | None) -> Build:
    """Get the function that builds a workload."""
    return (WORKLOADS if file is None else load_workloads(file))[name]


def load_optimizer(path: Path, config: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """Load the class ``CustomOptimizer`` of a file, and check that it accepts the configuration."""
    if path.name == "custom_optimizer.py" and not path.exists():
        remedy = "Run python -m solution.pack, which writes dist/custom_optimizer.py."
        raise_missing_file(path, argument="--optimizer")
    made = getattr(load_python("--optimizer", path), "CustomOptimizer", None)
    if not isinstance(made, type) or not issubclass(made, torch.optim.Optimizer):
        remedy = "Derive one from torch.optim.Optimizer."
        raise_input_error("--optimizer", "hold a class CustomOptimizer", f"none in {path}", remedy)
    try:
        made([nn.Parameter(torch.zeros(2, 2))], **config)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise_input_error("--config", "be what CustomOptimizer takes", got, "Change the configuration.")
    return made


def read_baselines(path: Path) -> Baselines:
    """Read the baselines that optimizer-tune wrote; raise an InputError if they are invalid."""
    baselines: Baselines = read_json("--baselines", path)
    groups = baselines.values() if isinstance(baselines, dict) else [None]
    entries = [entry for group in groups for entry in (group.values() if isinstance(group, dict) else [None])]
    if not all(isinstance(entry, dict) and entry.keys() >= NEEDED for entry in entries):
        raise_input_error(
            "--baselines", "hold what tune writes", str(path), "Make it with python -m analysis optimizer-tune."
        )
    return baselines


def read_json(argument: str, path: Path) -> Any:
    """Parse a JSON file; raise an InputError if it is invalid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise_input_error(argument, "be a readable JSON file", f"{path} ({error})", "Pass another path.")


@functools.cache
def compute_fingerprint(name: str, file: Path | None) -> float:
    """Compute the validation loss of seed 0 before training, to 4 digits, which identifies data and weights."""
    workload = get_build(name, file)(0)
    return float(f"{validate(workload.model, workload.val_loss):.4g}")
