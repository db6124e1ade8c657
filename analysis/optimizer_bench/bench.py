"""The bench's runs: a workload, a seed and an optimizer each, on several processes, with a journal to continue from."""

from __future__ import annotations

import functools
import inspect
import json
import multiprocessing
import signal
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # exported, but not by its stubs

from analysis.journal import append_journal, hash_sources, read_journal
from analysis.optimizer_bench.loading import find_build, load_optimizer, take_fingerprint
from analysis.optimizer_bench.peers import LIBRARIES, PEERS
from analysis.optimizer_bench.running import Curve, train
from analysis.optimizer_bench.tuning import Setting, run_adamw
from analysis.optimizer_bench.workload import initial_weights
from analysis.optimizer_bench.workloads import WORKLOADS
from protonet._checks import find_version

FOLDER = "analysis/optimizer_bench"
#: The sources that decide every run.
SHARED = [f"{FOLDER}/{name}.py" for name in ("workload", "running", "workloads/_text", "workloads/_glyphs")]


class Candidate(NamedTuple):
    """An optimizer with its settings.

    Attributes:
        name: A key of ``PEERS``, or what tables call it.
        config: Its settings, a JSON object.
        file: The file of its class ``CustomOptimizer``, or None for one of ``PEERS``.
    """

    name: str
    config: str
    file: Path | None = None


class Run(NamedTuple):
    """One training run.

    Attributes:
        workload: Its name.
        file: The file whose ``WORKLOADS`` has it, or None for a visible one.
        seed: Of its initial weights and batches.
        max_steps: Where it ends at the latest.
        optimizer: A candidate, or one of AdamW's settings.
        target: The smoothed loss at which a candidate's run ends.
    """

    workload: str
    file: Path | None
    seed: int
    max_steps: int
    optimizer: Candidate | Setting
    target: float | None = None


class Outcome(NamedTuple):
    """A run's curve, and the CPU milliseconds of one ``step()`` of a candidate."""

    curve: Curve
    step_ms: float | None = None


def measure(runs: Sequence[Run], journal: Path, jobs: int) -> Iterator[tuple[Run, Outcome]]:
    """Yield every run with its outcome: first those of the journal, then those done now, as they end.

    Args:
        runs: What to do.
        journal: The JSON-lines file; made if need be, appended to.
        jobs: How many processes, of one thread each.
    """
    wanted = {json.dumps(_identify(run)): run for run in runs}
    for entry in read_journal(journal):
        run = wanted.pop(json.dumps(entry.get("run")), None)
        if run is not None:
            yield run, Outcome(Curve(*entry["curve"]), entry["step_ms"])
    for run, outcome in _do_all(list(wanted.values()), jobs):
        append_journal(journal, {"run": _identify(run), "curve": outcome.curve, "step_ms": outcome.step_ms})
        yield run, outcome


@contextmanager
def keeping(journal: Path) -> Iterator[None]:
    """Let Ctrl-C say where the finished runs are."""
    try:
        yield
    except KeyboardInterrupt:
        kept = f"interrupted; the finished runs are kept in {journal}. The same command continues."
        raise KeyboardInterrupt(kept) from None


def do(run: Run) -> Outcome:
    """Do one run; what its optimizer draws is the seed's, and the global random state is put back."""
    build = find_build(run.workload, run.file)
    if isinstance(run.optimizer, Setting):
        return Outcome(run_adamw(build, run.optimizer, run.seed, run.max_steps))
    candidate, target = run.optimizer, run.target
    assert target is not None, "candidates are judged at a target"
    times: list[float] = []

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = _make(candidate, parameters)
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda *_: times.append(time.process_time()))
        return optimizer

    with initial_weights(run.seed), warnings.catch_warnings():
        if candidate.file is None:
            warnings.simplefilter("ignore")  # libraries' own
        try:
            curve = train(build, run.seed, make, max_steps=run.max_steps, target=target)
        except LinAlgError:  # what decompositions make of weights that are not finite
            curve = Curve([], diverged=True)
    seconds = sum(times[1::2]) - sum(times[: len(times) // 2 * 2 : 2])
    return Outcome(curve, round(1000 * seconds / max(1, len(times) // 2), 3))


def _make(candidate: Candidate, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make a candidate's optimizer."""
    config: dict[str, Any] = json.loads(candidate.config)
    if candidate.file is None:
        return PEERS[candidate.name].make(list(parameters), **config)
    return load_optimizer(candidate.file, config)(parameters, **config)


def _do_all(runs: Sequence[Run], jobs: int) -> Iterator[tuple[Run, Outcome]]:
    """Yield runs with their outcomes, as they end."""
    if min(jobs, len(runs)) < 2:
        yield from ((run, do(run)) for run in runs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(runs)), context, _start_worker) as pool:
        futures = {pool.submit(do, run): run for run in runs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:  # nobody waits for the others
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _start_worker() -> None:
    """Work on one thread, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _identify(run: Run) -> list[Any]:
    """Return what decides a run's outcome."""
    optimizer = run.optimizer
    if isinstance(optimizer, Setting):
        config: list[Any] = list(optimizer)
        code = _hash_code(run.workload, run.file, f"{FOLDER}/tuning.py")
    else:
        config = [optimizer.name, optimizer.config]
        config += [] if optimizer.file else map(find_version, LIBRARIES)
        code = _hash_code(run.workload, run.file, str(optimizer.file or f"{FOLDER}/peers.py"))
    return [run.workload, take_fingerprint(run.workload, run.file), run.seed, run.max_steps, run.target, config, code]


@functools.cache
def _hash_code(workload: str, file: Path | None, optimizer: str) -> str:
    """Return a hash of a workload's and an optimizer's sources, and of the packages below them."""
    source = inspect.getfile(WORKLOADS[workload]) if file is None else str(file)
    return hash_sources(*SHARED, source, optimizer)
