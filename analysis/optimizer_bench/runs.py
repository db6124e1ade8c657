"""Training runs of the benchmark, whose workloads and optimizers are built in or come from files."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # exported, but not by its stubs

from analysis.optimizer_bench.workload import (
    STEPS_PER_VALIDATION,
    LossCurve,
    WorkloadBuilder,
    compute_validation_loss,
    seed_initial_weights,
    train_workload,
)
from analysis.optimizer_bench.workloads import FILE_WORKLOAD_ROLE, WORKLOADS, WORKLOADS_BY_ROLE, get_groups
from analysis.shared.runner import BUILD_FOLDER, JournalOptions, hash_sources, parse_integers, parse_names, run_all
from protonet.errors import raise_input_error
from protonet.ui.options import option, same_option

WARMUP_FRACTION = 0.03  #: Fraction of the steps in which the learning rate rises.
BENCHMARK_FOLDER = "analysis/optimizer_bench"
#: Source files that affect every run.
SHARED_SOURCE_FILES = [f"{BENCHMARK_FOLDER}/{name}.py" for name in ("workload", "runs")]
BASELINES_FILE = Path("analysis/results/optimizer_baselines.json")
#: Result of tuned AdamW on a workload. ``target`` is the best smoothed loss of the worst seed with ``setting``.
#: ``steps`` is the median over seeds of the first step at the target, for the ``fastest`` of the best settings, whose
#: first steps are ``hits`` (None for a miss). ``initial`` is the mean validation loss before training, ``max_steps``
#: the length of every run, and ``fingerprint`` that of the workload. Newer baselines have ``easier`` ones by name, each
#: with a target, steps and settings; ``coarse`` ones are of the ladder alone.
Baseline = dict[str, Any]
Baselines = dict[str, dict[str, Baseline]]  #: Baselines by workload and by horizon, which is a text.


class CandidateOptimizer(NamedTuple):
    """The optimizer to be evaluated: its file and its configuration."""

    name: str  #: The name in tables.
    config: str  #: Settings as a JSON object.
    file: Path  #: File of its class ``CustomOptimizer``.

    def with_settings(self, **changes: Any) -> CandidateOptimizer:
        """Return a candidate with changed settings."""
        return self._replace(config=json.dumps(json.loads(self.config) | changes, sort_keys=True))


class AdamWSetting(NamedTuple):
    """Hyperparameters of AdamW; the learning rate rises for ``WARMUP_FRACTION`` of the steps, then follows a cosine."""

    lr: float = 3e-3  #: Initial learning rate; the default is the start of the search.
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    horizon: float = 1.0  #: Fraction of the steps after which the cosine reaches 0; 0 for a constant learning rate.


class TrainingRun(NamedTuple):
    """A training run of an optimizer on a workload."""

    workload: str
    workload_file: Path | None  #: File whose ``WORKLOADS`` has the workload; None for a built-in workload.
    seed: int  #: Seed of initial weights and batches.
    max_steps: int  #: Maximum number of steps.
    optimizer: CandidateOptimizer | AdamWSetting
    target: float = -math.inf  #: The smoothed loss at which a candidate's run ends.


LossCurves = dict[tuple[CandidateOptimizer | AdamWSetting, str, int], LossCurve]  #: By optimizer, workload, seed.


def parse_horizons(option: str, text: str) -> list[int]:
    """Parse comma-separated horizons (numbers of steps), which must be multiples of ``STEPS_PER_VALIDATION``."""
    steps = parse_integers(option, text, low=STEPS_PER_VALIDATION)
    for horizon in steps:
        if horizon % STEPS_PER_VALIDATION:
            must = f"be multiples of {STEPS_PER_VALIDATION}"
            raise_input_error(option, must, horizon, "Validations are so far apart.")
    return steps


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(JournalOptions):
    """The options that studies of optimizers share: the workloads, and one journal of finished runs."""

    state: Path = same_option(
        JournalOptions,
        "state",
        default=BUILD_FOLDER / "optimizer_bench.jsonl",
        help="journal of finished runs (default: build/optimizer_bench.jsonl)",
    )
    workloads: str | None = option(f"of {', '.join(WORKLOADS)} and the file's (default: all)", metavar="NAMES")
    workload_file: str | None = option("Python file with a dictionary WORKLOADS", metavar="FILE")


def select_workloads(
    options: WorkloadOptions, roles: Collection[str] = tuple(WORKLOADS_BY_ROLE)
) -> dict[str, Path | None]:
    """Map the names of selected workloads to their files, None if built in; by default, those of ``roles`` and file."""
    known: dict[str, Path | None] = dict.fromkeys(WORKLOADS)
    if options.workload_file is not None:
        path = Path(options.workload_file).resolve()
        known |= dict.fromkeys(load_workloads(path), path)
    if options.workloads is not None:
        return {name: known[name] for name in parse_names("--workloads", options.workloads, known)}
    return {name: file for name, file in known.items() if get_groups(name).role in {*roles, FILE_WORKLOAD_ROLE}}


@functools.cache
def import_file(path: Path) -> ModuleType:
    """Import a Python file by its path, once per process."""
    name = f"bench_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("its name does not end in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def load_workloads(path: Path) -> dict[str, WorkloadBuilder]:
    """Load the dictionary ``WORKLOADS`` of a Python file; raise an InputError if a name is already built in."""
    try:
        builds = dict(import_file(path).WORKLOADS)
    except Exception as error:
        got = f"{path} ({error!r})"
        raise_input_error("--workload-file", "hold a dictionary WORKLOADS", got, "Map names to build.")
    if clashes := sorted(builds.keys() & WORKLOADS.keys()):
        raise_input_error("--workload-file", "have names of its own", ", ".join(clashes), "Rename these workloads.")
    return builds


def load_optimizer_class(candidate: CandidateOptimizer) -> type[torch.optim.Optimizer]:
    """Load the class ``CustomOptimizer`` of a candidate's file; raise an InputError if it rejects the configuration."""
    try:
        made: type[torch.optim.Optimizer] = import_file(candidate.file).CustomOptimizer
        made([nn.Parameter(torch.zeros(2, 2))], **json.loads(candidate.config))
    except Exception as error:
        remedy = "Change the file or --config; python -m solution.pack writes dist/custom_optimizer.py."
        got = f"{candidate.file} ({error!r})"
        raise_input_error("--optimizer", "hold a class CustomOptimizer that takes --config", got, remedy)
    return made


def load_candidate(path: str, config_file: str | None) -> CandidateOptimizer:
    """Read an optimizer's file and its configuration; raise an InputError if the optimizer rejects the latter."""
    config = "{}" if config_file is None else Path(config_file).read_text(encoding="utf-8")
    try:
        candidate = CandidateOptimizer(Path(path).stem, config, Path(path).resolve()).with_settings()
    except (ValueError, TypeError) as error:
        raise_input_error("--config", "hold a JSON object", f"{config_file} ({error})", "Write {} for no setting.")
    load_optimizer_class(candidate)
    return candidate


def get_workload_builder(name: str, file: Path | None) -> WorkloadBuilder:
    """Return the function that builds a workload, which is built in if ``file`` is None."""
    return (WORKLOADS if file is None else load_workloads(file))[name]


@functools.cache
def compute_fingerprint(name: str, file: Path | None) -> float:
    """Compute the validation loss before training with seed 0, which identifies the data and weights of a workload."""
    workload = get_workload_builder(name, file)(0)
    return float(f"{compute_validation_loss(workload.model, workload.val_loss):.4g}")


def train_adamw(run: TrainingRun) -> LossCurve:
    """Execute a run of AdamW, to the end of its learning-rate schedule."""
    setting, max_steps = run.optimizer, run.max_steps
    assert isinstance(setting, AdamWSetting), "candidates have no schedule"
    steps = math.ceil(max_steps * (setting.horizon or 1.0) / STEPS_PER_VALIDATION) * STEPS_PER_VALIDATION

    def schedule(step: int) -> float:  # linear warmup, then cosine decay, or none if the horizon is 0
        rise = min(1.0, (step + 1) / max(1.0, WARMUP_FRACTION * max_steps))
        if not setting.horizon:
            return rise
        return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / (setting.horizon * max_steps))))

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, setting.lr, setting.betas, weight_decay=setting.weight_decay, fused=True)

    build = get_workload_builder(run.workload, run.workload_file)
    return train_workload(build, run.seed, make_optimizer, max_steps=min(steps, max_steps), schedule=schedule)


def identify_run(run: TrainingRun) -> list[Any]:
    """List the hashes that identify the inputs of a run in the journal: the workload's fingerprint and the code."""
    sources = [str(run.workload_file or inspect.getfile(inspect.unwrap(WORKLOADS[run.workload])))]
    sources += [str(run.optimizer.file)] if isinstance(run.optimizer, CandidateOptimizer) else []
    return [compute_fingerprint(run.workload, run.workload_file), hash_sources(*SHARED_SOURCE_FILES, *sources)]


def train_candidates(runs: Sequence[TrainingRun], state: Path, jobs: int) -> LossCurves:
    """Execute the training runs that the journal ``state`` lacks; return the loss curves of all runs."""
    results = run_all(runs, train_candidate, state, lambda run: [*identify_run(run), "candidate"], jobs=jobs)
    return {(run.optimizer, run.workload, run.seed): LossCurve(*result) for run, result in results.items()}


def train_candidate(run: TrainingRun) -> LossCurve:
    """Execute a run of a candidate, with random numbers from the run's seed.

    If a matrix decomposition fails, for instance on weights that are not finite, the run counts as diverged. Other
    errors are raised.
    """
    candidate = run.optimizer
    assert isinstance(candidate, CandidateOptimizer), "AdamW's settings have a schedule"

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return load_optimizer_class(candidate)(list(parameters), **json.loads(candidate.config))

    build = get_workload_builder(run.workload, run.workload_file)
    with seed_initial_weights(run.seed):
        return train_workload(
            build, run.seed, make_optimizer, max_steps=run.max_steps, target=run.target, caught_errors=LinAlgError
        )
