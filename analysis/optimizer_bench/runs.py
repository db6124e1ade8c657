"""Training runs of the benchmark; workloads and optimizers are built-in or come from files."""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # exported, but not by its stubs

from analysis.optimizer_bench.peers import LIBRARIES, PEERS
from analysis.optimizer_bench.workload import (
    STEPS_PER_VALIDATION,
    LossCurve,
    WorkloadBuilder,
    compute_validation_loss,
    seed_initial_weights,
    train_workload,
)
from analysis.optimizer_bench.workloads import ROLE_OF_WORKLOAD, WORKLOADS, WORKLOADS_BY_ROLE
from analysis.shared.journal import hash_sources, run_all
from analysis.shared.runner import StudyParser, parse_names
from protonet.errors import installed_version, raise_input_error

FILE_ROLE = "file"  #: Role, family and kind of the workloads of a file.
WARMUP_FRACTION = 0.03  #: Fraction of the steps in which the learning rate rises.
BENCHMARK_FOLDER = "analysis/optimizer_bench"
#: Source files that affect every run.
SHARED_SOURCE_FILES = [
    f"{BENCHMARK_FOLDER}/workload.py",
    *(f"{BENCHMARK_FOLDER}/workloads/{name}.py" for name in ("data", "models")),
]
BASELINES_FILE = Path("analysis/results/optimizer_baselines.json")
#: Result of tuned AdamW on a workload. ``setting`` has the lowest ``target``: the worst seed's best smoothed loss.
#: ``steps`` is the median over seeds of the first step at the target, for the ``fastest`` of the best settings, whose
#: first steps are ``hits`` (None for a miss). ``initial`` is the mean validation loss before training, ``max_steps``
#: the length of every run, and ``fingerprint`` that of the workload. Newer baselines have ``easier`` ones by name, each
#: with a target, steps and settings; ``coarse`` ones are of the ladder alone.
Baseline = dict[str, Any]
Baselines = dict[str, dict[str, Baseline]]  #: By workload and horizon, as text.


class CandidateOptimizer(NamedTuple):
    """An optimizer with its settings."""

    name: str  #: A key of ``PEERS``, or the name in tables.
    config: str  #: Settings as a JSON object.
    file: Path | None = None  #: File of its class ``CustomOptimizer``; None for a peer.

    def with_settings(self, **changes: Any) -> CandidateOptimizer:
        """Return a candidate with changed settings."""
        return self._replace(config=json.dumps(json.loads(self.config) | changes, sort_keys=True))


class AdamWSetting(NamedTuple):
    """An AdamW setting: linear warmup for the fraction ``WARMUP_FRACTION`` of ``horizon`` steps, then cosine decay."""

    lr: float = 3e-3  #: Also the start of the search.
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    horizon: float = 1.0


class TrainingRun(NamedTuple):
    """A training run of an optimizer on a workload."""

    workload: str
    file: Path | None  #: File whose ``WORKLOADS`` has it; None for a built-in one.
    seed: int  #: Seed of initial weights and batches.
    max_steps: int  #: Maximum number of steps.
    optimizer: CandidateOptimizer | AdamWSetting
    target: float = -math.inf  #: The smoothed loss at which a candidate's run ends.


Curves = dict[tuple[CandidateOptimizer | AdamWSetting, str, int], LossCurve]  #: By optimizer, workload and seed.


def add_workload_options(parser: StudyParser, default: str = "all") -> None:
    """Add the options that studies of optimizers share: the workloads and the journal."""
    names = f"of {', '.join(WORKLOADS)} and the file's (default: {default})"
    parser.add_argument("--workloads", metavar="NAMES", help=names)
    parser.add_argument("--workload-file", metavar="FILE", help="Python file with a dictionary WORKLOADS")
    parser.add_state_options("optimizer_bench")


def select_workloads(
    options: argparse.Namespace, roles: Collection[str] = tuple(WORKLOADS_BY_ROLE)
) -> dict[str, Path | None]:
    """Return the file of each selected workload, None if built in; without names, select by role and file."""
    known: dict[str, Path | None] = dict.fromkeys(WORKLOADS)
    if options.workload_file is not None:
        path = Path(options.workload_file).resolve()
        known |= dict.fromkeys(load_workloads(path), path)
    if options.workloads is not None:
        return {name: known[name] for name in parse_names("--workloads", options.workloads, known)}
    return {name: file for name, file in known.items() if ROLE_OF_WORKLOAD.get(name, FILE_ROLE) in {*roles, FILE_ROLE}}


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
    """Load the dictionary ``WORKLOADS`` of a file, whose names must differ from built-in ones."""
    try:
        builds = dict(import_file(path).WORKLOADS)
    except Exception as error:
        raise_input_error(
            "--workload-file", "hold a dictionary WORKLOADS", f"{path} ({error!r})", "Map names to build."
        )
    if clashes := sorted(builds.keys() & WORKLOADS.keys()):
        raise_input_error("--workload-file", "have names of its own", ", ".join(clashes), "Rename these workloads.")
    return builds


def load_optimizer(candidate: CandidateOptimizer) -> type[torch.optim.Optimizer]:
    """Load the class ``CustomOptimizer`` of a candidate's file, and check that it accepts the configuration."""
    assert candidate.file is not None, "peers have no file"
    try:
        made: type[torch.optim.Optimizer] = import_file(candidate.file).CustomOptimizer
        made([nn.Parameter(torch.zeros(2, 2))], **json.loads(candidate.config))
    except Exception as error:
        remedy = "Change the file or --config; python -m solution.pack writes dist/custom_optimizer.py."
        got = f"{candidate.file} ({error!r})"
        raise_input_error("--optimizer", "hold a class CustomOptimizer that takes --config", got, remedy)
    return made


def get_workload_builder(name: str, file: Path | None) -> WorkloadBuilder:
    """Return the function that builds a workload."""
    return (WORKLOADS if file is None else load_workloads(file))[name]


@functools.cache
def compute_fingerprint(name: str, file: Path | None) -> float:
    """Compute the validation loss before training with seed 0, which identifies the data and weights of a workload."""
    workload = get_workload_builder(name, file)(0)
    return float(f"{compute_validation_loss(workload.model, workload.val_loss):.4g}")


def run_adamw(run: TrainingRun) -> LossCurve:
    """Train a workload with AdamW to the end of its schedule."""
    setting, max_steps = run.optimizer, run.max_steps
    assert isinstance(setting, AdamWSetting), "candidates have no schedule"
    schedule = functools.partial(compute_rate_factor, max_steps=max_steps, horizon=setting.horizon)
    steps = math.ceil(max_steps * (setting.horizon or 1.0) / STEPS_PER_VALIDATION) * STEPS_PER_VALIDATION

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, setting.lr, setting.betas, weight_decay=setting.weight_decay, fused=True)

    build = get_workload_builder(run.workload, run.file)
    return train_workload(build, run.seed, make, max_steps=min(steps, max_steps), schedule=schedule)


def compute_rate_factor(step: int, *, max_steps: int, horizon: float) -> float:
    """Compute the learning rate factor at a step: linear warmup, then cosine decay, or none if ``horizon`` is 0."""
    rise = min(1.0, (step + 1) / max(1.0, WARMUP_FRACTION * max_steps))
    return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / (horizon * max_steps)))) if horizon else rise


def identify_run(run: TrainingRun) -> list[Any]:
    """List the fingerprint, versions and source hash that determine the result of a run, for the journal."""
    file = run.optimizer.file if isinstance(run.optimizer, CandidateOptimizer) else None
    workload = run.file or inspect.getfile(inspect.unwrap(WORKLOADS[run.workload]))
    sources = [str(workload), f"{BENCHMARK_FOLDER}/runs.py", str(file or f"{BENCHMARK_FOLDER}/peers.py")]
    versions = [] if file or isinstance(run.optimizer, AdamWSetting) else [*map(installed_version, LIBRARIES)]
    return [compute_fingerprint(run.workload, run.file), versions, hash_sources(*SHARED_SOURCE_FILES, *sources)]


def train_all(runs: Sequence[TrainingRun], state: Path, jobs: int) -> Curves:
    """Train candidates and peers, or read their curves from the journal; return all curves."""
    results = run_all(runs, train_candidate, state, lambda run: [*identify_run(run), "candidate"], jobs=jobs)
    return {(run.optimizer, run.workload, run.seed): LossCurve(*result) for run, result in results.items()}


def train_candidate(run: TrainingRun) -> LossCurve:
    """Execute a run of a candidate or a peer, with random numbers from the run's seed.

    If a matrix decomposition fails, for instance on weights that are not finite, the run counts as diverged. So does a
    run in which a peer raises any error, for instance on a shape that it does not support. Other errors are raised.
    """
    candidate = run.optimizer
    assert isinstance(candidate, CandidateOptimizer), "AdamW's settings have a schedule"
    caught = LinAlgError if candidate.file is not None else Exception
    times: list[float] = []
    raised: list[str] = []

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        maker = PEERS[candidate.name].make_optimizer if candidate.file is None else load_optimizer(candidate)
        optimizer = maker(parameters, **json.loads(candidate.config))
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda *_: times.append(time.process_time()))
        step: Callable[[], object] = optimizer.step

        def step_or_set_nan() -> None:
            """Take a step; if it raises an exception, set the weights to NaN, so that the run ends."""
            try:
                step()
            except caught as error:
                raised.append(_format_error(error))
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.fill_(torch.nan)

        optimizer.step = step_or_set_nan  # type: ignore[assignment, method-assign]
        return optimizer

    with seed_initial_weights(run.seed), warnings.catch_warnings():
        if candidate.file is None:
            warnings.simplefilter("ignore")  # warnings of libraries
        try:
            curve = train_workload(
                get_workload_builder(run.workload, run.file), run.seed, make, max_steps=run.max_steps, target=run.target
            )
        except caught as error:  # when it is made, or in a loss
            raised.append(_format_error(error))
            curve = LossCurve([], diverged=True)
    seconds = sum(times[1::2]) - sum(times[: len(times) // 2 * 2 : 2])
    step_ms = round(1000 * seconds / max(1, len(times) // 2), 3)
    diverged, first = curve.diverged or bool(raised), raised[0] if raised else None
    return curve._replace(step_ms=step_ms, diverged=diverged, error_message=first)


def _format_error(error: Exception) -> str:
    """Format an exception as one short line."""
    return f"{type(error).__name__.lstrip('_')}: {' '.join(str(error).split())}"[:160]
