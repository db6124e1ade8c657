"""Run one evaluation, from its settings to its results or report, and store finished episodes to resume from.

`evaluate_dataset` does so from Python; other functions are those of ``python -m protonet.episodes``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protonet._io import progress_bar, write_atomically, write_json, write_text
from protonet._text import to_printable
from protonet._validation import check_device, check_int, check_type
from protonet.datasets import Dataset
from protonet.episodes.evaluation.evaluate import (
    EpisodeScores,
    choose_batch_size,
    concatenate_batches,
    count_episodes,
    evaluate,
    get_process_group,
    is_batch_end,
    join_process_group,
)
from protonet.episodes.evaluation.prepare import (
    EvaluationPlan,
    PreparedEvaluation,
    load_data_sources,
    make_plan,
    prepare_evaluation,
    prepare_tuning,
)
from protonet.episodes.evaluation.report import (
    compute_class_accuracies,
    format_evaluation,
    format_evaluation_page,
    format_mean,
    format_summary_tables,
    summarize,
    write_accuracy_figure,
    write_tables,
)
from protonet.episodes.evaluation.statistics import Evaluation, MeasureMean, TuningResult
from protonet.episodes.methods.choice import ChosenMethod
from protonet.episodes.names import EPISODE_PROTOCOLS, ROW_NORMALIZATIONS, SPLIT_SIDE_CHOICES
from protonet.episodes.samplers.batch import hash_class_rows, record_episodes
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.samplers.fixed_split import FixedSplit, describe_duplicates
from protonet.episodes.samplers.sampler import Sampler
from protonet.episodes.settings import EvaluationSettings
from protonet.errors import DISTRIBUTION_NAME, InputTypeError, installed_version, optional_packages, raise_input_error
from protonet.ui.command_line import check_known_name

STATE_FORMAT, STATE_VERSION = "protonet.episodes", 7
#: Settings that may change when a run is resumed, because the scores of an episode do not depend on them.
SETTINGS_CHANGEABLE_ON_RESUME = ("against", "episodes")


def evaluate_dataset(
    settings: EvaluationSettings | None = None, *, progress: bool = False, **fields: Any
) -> Evaluation:
    """Evaluate few-shot methods on the episodes of a data set, as ``python -m protonet.episodes`` does.

    Episodes are drawn from the novel classes, if the data have a split by class. Methods that need base classes get the
    base classes of the split. Intervals and p-values are over classes and over episodes.

    Args:
        settings: The settings of the evaluation; None if all are given by keyword.
        progress: Whether to show a progress bar on terminals.
        **fields: Fields of `EvaluationSettings`, such as ``dataset="glyphs", method=["protonet"], shot=(5, 5)``; they
            replace those of ``settings``.

    Returns:
        The results: ``methods`` has accuracies with intervals by name, ``summary.comparisons`` the paired tests, and
        `format_evaluation` formats all results as text.

    Raises:
        MissingPackageError: A package that the data need is missing.
        InputTypeError: An argument has the wrong type.
        InputError: A value is out of range, or data, methods and settings do not fit together.
    """
    known = [declared.name for declared in dataclasses.fields(EvaluationSettings)]
    for name in fields:
        check_known_name("fields", name, known)
    settings = replace(EvaluationSettings() if settings is None else settings, **fields)
    check_type("dataset", settings.dataset, (str, Path, Dataset), "the name or the path of a data set, or a Dataset")
    if not isinstance(settings.protocol, Sampler):
        check_known_name("protocol", str(settings.protocol), EPISODE_PROTOCOLS)
    if isinstance(settings.protocol, FixedSplit) and settings.test_dataset is None:
        remedy = "Pass test_dataset, too, or an EpisodeConfig."
        raise_input_error("protocol", "come with test data", "FixedSplit without test_dataset", remedy)
    if settings.test_dataset is not None and not isinstance(settings.protocol, FixedSplit | EpisodeConfig | str):
        remedy = "Pass one of these, or leave test_dataset out."
        got = f"{type(settings.protocol).__name__} with test_dataset"
        raise_input_error("protocol", "be a FixedSplit or an EpisodeConfig where there are test data", got, remedy)
    if isinstance(settings.dataset, Dataset) and settings.split_seed is not None:
        remedy = "Pass split_classes(data, seed) instead."
        raise_input_error("split_seed", "be left out for a data set in memory", settings.split_seed, remedy)
    check_type("progress", progress, bool, "True or False")
    tune = settings.tune
    if isinstance(tune, str):
        raise_input_error("tune", "be a list of texts", repr(tune), f"Pass [{tune!r}].", kind=InputTypeError)
    if settings.episodes is not None:
        check_int("episodes", settings.episodes, low=1)
    check_int("seed", settings.seed, low=0, high=2**63 - 1)
    check_device("device", settings.device)
    check_known_name("normalize", settings.normalize, ROW_NORMALIZATIONS)
    if settings.side is not None:
        check_known_name("side", settings.side, SPLIT_SIDE_CHOICES)
    plan = make_plan(settings)  # raises errors of methods before any data are loaded
    with join_process_group():
        evaluation, interrupted = evaluate_plan(plan, progress=progress)
        if interrupted:
            raise KeyboardInterrupt
        return evaluation


def describe_run_inputs(settings: Mapping[str, object], prepared: PreparedEvaluation) -> dict[str, object]:
    """Describe everything that scores depend on, to check whether a state file belongs to the same run.

    Returns values for JSON: settings, methods, plug-ins, versions of packages, and a hash of the data. The hash is of
    the row indices and 3 rows of each class, which is fast for large data.
    """
    digest = hashlib.sha256()
    index = prepared.row_pool.rows_by_class
    offsets = (0, index.class_counts // 2, index.class_counts - 1)
    positions = torch.cat([index.class_starts + offset for offset in offsets])
    for tensor in (*index, prepared.row_pool.read_rows(index.row_indices[positions]), *prepared.hashed_tensors):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    run = {name: value for name, value in settings.items() if name not in SETTINGS_CHANGEABLE_ON_RESUME}
    run |= {"plugins": prepared.plugin_versions, "methods": list(prepared.methods), "data": digest.hexdigest()}
    described: dict[str, object] = json.loads(json.dumps(run | get_package_versions()))
    return described


def get_package_versions() -> dict[str, str | None]:
    """Return the versions of the installed packages that scores may depend on, by name."""
    packages = {"protonet": DISTRIBUTION_NAME, "torch": "torch", "numpy": "numpy"}
    return {name: installed_version(package) for name, package in packages.items()}


def write_run_state(path: Path, run: Mapping[str, object], batches: Sequence[Mapping[str, EpisodeScores]]) -> None:
    """Write the scores of a run's finished episodes to a state file, atomically.

    ``run`` is from `describe_run_inputs`, and ``batches`` are the scores by method of each finished batch of episodes.
    """
    # The last batch is stored separately: a longer run scores it again if it is incomplete.
    parts = [concatenate_batches(batches[:-1]), batches[-1]] if len(batches) > 1 else batches
    header = json.dumps({"format": STATE_FORMAT, "version": STATE_VERSION, "run": run, "parts": len(parts)})
    arrays = {
        f"{part}.{method_index}.{field}": tensor.numpy()
        for part, scores in enumerate(parts)
        for method_index, score in enumerate(scores.values())
        for field, tensor in vars(score).items()
    }
    write_atomically(path, lambda file: np.savez(file, header=np.array(header), **arrays))


def read_run_state(path: Path, run: Mapping[str, object]) -> list[dict[str, EpisodeScores]]:
    """Read the scores of finished episodes from a state file; raise an InputError if it belongs to another run.

    Returns batches of scores by method: the last batch, preceded by all earlier batches joined into one, if any.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            header = json.loads(str(arrays["header"]))
            if header["format"] != STATE_FORMAT or header["version"] != STATE_VERSION:
                raise ValueError("of another format")
            stored = header["run"]

            def read_scores(part: int, method_index: int) -> EpisodeScores:
                prefix, names = f"{part}.{method_index}.", [field.name for field in dataclasses.fields(EpisodeScores)]
                return EpisodeScores(**{name: torch.from_numpy(arrays[prefix + name]) for name in names})

            batches = [
                {name: read_scores(part, index) for index, name in enumerate(stored["methods"])}
                for part in range(header["parts"])
            ]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise_input_error("state", "be the state of an evaluation", f"{path} ({error})", "Pass another path.")
    hashes = ("plugins", "data")  # last, because a differing setting is the more helpful message
    for name in (*sorted((stored.keys() | run.keys()) - {*hashes}), *hashes):
        if stored.get(name) != run.get(name):
            got = f"{name} {to_printable(run.get(name))}, where {path} has {to_printable(stored.get(name))}"
            got = f"other {name} than {path} has" if name in hashes else got
            remedy = "Pass the same arguments, or another `state`."
            raise_input_error("resume", "continue the same run", got, remedy)
    return batches


def run_evaluation(
    plan: EvaluationPlan, outputs: Mapping[str, Path], *, state: Path | None = None, resume: bool = False
) -> Evaluation | None:
    """Run an evaluation, print its report and write its output files; return the results in the first process.

    ``outputs`` are the files to write, by ``json``, ``plot``, ``latex``, ``markdown`` and ``report`` (HTML). ``state``
    stores the scores of finished episodes; those by which settings are chosen are in a second file in the same folder.
    With ``resume``, a run continues from the state file; its outputs equal those of an uninterrupted run. After Ctrl-C,
    a KeyboardInterrupt is raised, and the report and the files cover the finished episodes, if there are any.
    """
    if "plot" in outputs:
        with optional_packages():
            import matplotlib as _  # noqa: F401, PLC0415 - raises before the work if the package is missing
    with join_process_group():
        is_main = get_process_group().rank == 0
        evaluation, interrupted = evaluate_plan(plan, state=state, resume=resume)
        if is_main:
            _write_outputs(evaluation, outputs)
        if interrupted:
            text = f"stopped after {evaluation.summary.n_episodes:,} of {plan.n_episodes:,} episodes"
            again = "; run again to go on" if resume else "; run again with --resume"
            raise KeyboardInterrupt(text + ("" if state is None else again))
        return evaluation if is_main else None


def evaluate_plan(
    plan: EvaluationPlan, *, state: Path | None = None, resume: bool = False, progress: bool = True
) -> tuple[Evaluation, bool]:
    """Choose settings of methods on validation classes, then evaluate all methods; arguments as in `run_evaluation`.

    ``progress`` shows a bar. Returns the results; and whether Ctrl-C was pressed, so that they cover the finished
    episodes only. Without a finished episode, KeyboardInterrupt is raised.
    """
    sources = load_data_sources(plan)
    tunings: list[TuningResult] = []
    if plan.tuning_grids:  # first, and with a state of its own: other episodes are scored
        path = None if state is None else state.with_name(f"{state.stem}-tune{state.suffix}")
        if path is not None and path.exists() and not resume and get_process_group().rank == 0:
            remedy = "Continue its run with `resume`, or pass another path."
            raise_input_error("state", "have no file of `tune` beside it", f"{path}, which exists", remedy)
        run = _EpisodeRun(*prepare_tuning(plan, sources), path, resume=resume, progress=progress)
        tunings = run.compare_settings(plan.tuning_grids)
    plan = plan.add_tuned_methods({tuning.best_method for tuning in tunings})
    prepared = prepare_evaluation(plan, sources)
    prepared.notes.extend(map(str, tunings))
    run, interrupted = _EpisodeRun(plan, prepared, state, resume=resume, progress=progress), False
    try:
        scores = run.score_methods()
    except KeyboardInterrupt:
        if not run.finished:
            raise
        scores, interrupted = concatenate_batches(run.finished), True
    return run.summarize(scores, tunings), interrupted


class _EpisodeRun:
    """Scores methods on episodes: shows progress on a bar, stores scores in a state file, and resumes from it."""

    def __init__(
        self, plan: EvaluationPlan, prepared: PreparedEvaluation, path: Path | None, *, resume: bool, progress: bool
    ) -> None:
        self.plan, self.prepared, self.path, self.progress = plan, prepared, path, progress
        self.group = get_process_group()
        self.settings: Mapping[str, Any] = plan.to_dict(prepared.side, prepared.sampler)
        self.description, n_episodes = describe_run_inputs(self.settings, prepared), plan.n_episodes
        self.finished: Sequence[Mapping[str, EpisodeScores]] = []
        if path is not None and resume and path.exists():
            self.finished = read_run_state(path, self.description)
            n_scored = count_episodes(self.finished)
            if n_episodes < n_scored:
                remedy = f"Pass {n_scored} or more."
                raise_input_error("episodes", f"be at least the {n_scored} of {path}", n_episodes, remedy)
            # A batch that ended where the run did would be longer in a longer run, and round differently.
            batch_size = choose_batch_size(prepared.methods, prepared.row_pool.x)
            if n_scored < n_episodes and not is_batch_end(n_scored, batch_size):
                self.finished = self.finished[:-1]
        self.shown = self.saved = time.monotonic()

    def score_methods(self, name: str | None = None) -> dict[str, EpisodeScores]:
        """Score the methods on all episodes that are not finished, with a bar called ``name``; return all scores."""
        plan, prepared, pool = self.plan, self.prepared, self.prepared.row_pool
        shown, initial = self.group.rank == 0 and self.progress, count_episodes(self.finished)
        with progress_bar(total=plan.n_episodes, desc=name, initial=initial, unit="episode", shown=shown) as self.bar:
            try:
                return evaluate(
                    pool.x,
                    pool.rows_by_class,
                    prepared.methods,
                    prepared.sampler,
                    seed=plan.settings.seed,
                    episodes=plan.n_episodes,
                    base=prepared.base,
                    texts=prepared.text_embeddings,
                    trained=prepared.trained,
                    shape=prepared.data.shape if prepared.trained is None else None,
                    group=self.group,
                    progress=self._show_progress,
                    take=pool.read_rows,
                    earlier=concatenate_batches(self.finished) if self.finished else None,
                    keep_predictions=plan.settings.records,
                )
            finally:  # also after Ctrl-C and errors, so that no finished episode is lost
                self._save_state()

    def compare_settings(self, grids: Sequence[Sequence[ChosenMethod]]) -> list[TuningResult]:
        """Score the candidate settings of each method (``grids``); return one result for each method."""
        scores, n_classes = self.score_methods("tune"), len(self.prepared.row_pool.rows_by_class.class_counts)
        means = {name: MeasureMean.from_values(score.accuracy, None) for name, score in scores.items()}
        return [TuningResult({choice.name: means[choice.name] for choice in grid}, n_classes) for grid in grids]

    def summarize(self, scores: Mapping[str, EpisodeScores], tunings: Sequence[TuningResult]) -> Evaluation:
        """Convert the scores of finished episodes to results: means with intervals, paired tests, notes and hashes."""
        prepared, settings, data = self.prepared, self.settings, self.prepared.data
        sampler, index, seed = prepared.sampler, prepared.row_pool.rows_by_class, self.plan.settings.seed
        n_episodes = count_episodes([scores])
        class_mask, queries = sampler.count_classes_and_queries(index, seed=seed, n_episodes=n_episodes)
        varied = class_mask[:, sampler.n_base_classes :]
        class_names = [data.class_names[c] for c in prepared.class_ids.tolist()]
        records = None
        if self.plan.settings.records:
            predicted = {name: score.predicted_classes for name, score in scores.items()}
            records = record_episodes(sampler, prepared.row_pool, data.y, data.class_names, predicted, seed)
        return Evaluation(
            summary=summarize(scores, sampler.shot, settings, varied, prepared.methods),
            tuning=tunings,
            versions=get_package_versions(),
            plugin_versions=prepared.plugin_versions,
            data_hash=hash_class_rows(data.get_rows, prepared.row_pool.dataset_rows),
            query_counts=queries,
            correct_counts={name: (score.accuracy * queries).round().long() for name, score in scores.items()},
            class_mask=varied,
            n_classes=len(index.class_counts),
            title=_format_title(settings, prepared, n_episodes),
            notes=[*prepared.notes, *describe_duplicates(data, prepared.class_ids)],
            class_accuracies=compute_class_accuracies(scores, class_mask, class_names),
            episode_records=records,
        )

    def _show_progress(self, batches: Sequence[Mapping[str, EpisodeScores]]) -> None:
        """Update the progress bar with the scores of all finished episodes, and save the scores at intervals."""
        self.finished = [*batches]
        now, name = time.monotonic(), next(iter(batches[0]))
        # Seconds between two updates of the accuracy in the progress bar.
        progress_interval_seconds = 0.5
        if now - self.shown > progress_interval_seconds:
            accuracy = torch.cat([batch[name].accuracy for batch in batches])
            self.bar.set_postfix_str(f"{name} {format_mean(MeasureMean.from_values(accuracy, None))} %", refresh=False)
            self.shown = now
        self.bar.update(count_episodes(batches) - self.bar.n)
        state_save_interval_seconds = 10.0  # seconds between two writes of the state file
        if now - self.saved > state_save_interval_seconds:
            self._save_state()
            self.saved = time.monotonic()

    def _save_state(self) -> None:
        """Write the scores of the finished episodes to the state file."""
        if self.path is not None and self.group.rank == 0 and self.finished:
            write_run_state(self.path, self.description, self.finished)


def _write_outputs(evaluation: Evaluation, outputs: Mapping[str, Path]) -> None:
    """Print the report of an evaluation, and write the files of ``outputs`` (paths by kind, as in `run_evaluation`)."""
    print(format_evaluation(evaluation), end="", flush=True)
    if "report" in outputs:
        write_text(outputs["report"], format_evaluation_page(evaluation))
    if "json" in outputs:
        write_json(outputs["json"], evaluation.to_dict(by_class="report" in outputs))
    write_tables(outputs, format_summary_tables(evaluation.summary))
    if "plot" in outputs:
        write_accuracy_figure(outputs["plot"], {"": evaluation.summary})
    for path in outputs.values():
        print(f"wrote {path}", file=sys.stderr)


def _format_title(settings: Mapping[str, object], prepared: PreparedEvaluation, n_episodes: int) -> str:
    """Format the title of the report: data set, features, protocol, number of episodes and seed."""
    features = str(settings["encoder"] or f"{prepared.row_pool.x.shape[1]} features")
    features += "" if settings["normalize"] == "none" else f" ({settings['normalize']})"
    title = f"{settings['dataset']}, {prepared.n_classes} classes, {features}: "
    return f"{title}{prepared.sampler.format_title()}, {n_episodes:,} episodes, seed {settings['seed']}"
