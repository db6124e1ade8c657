"""One evaluation from the command line: from a plan to a report."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from protonet._writing import write_json
from protonet.episodes.draws.batch import gather_episodes, hash_rows, split_draw
from protonet.episodes.draws.equal_rows import list_equal
from protonet.episodes.draws.records import record
from protonet.episodes.draws.sampler import Sampler
from protonet.episodes.evaluation.distributed import Group, join_group
from protonet.episodes.evaluation.evaluate import Scores, count_episodes, join_batches
from protonet.episodes.evaluation.page import list_classes, write_page
from protonet.episodes.evaluation.plan import EvaluationPlan
from protonet.episodes.evaluation.prepare import Prepared, plan_tuning, prepare
from protonet.episodes.evaluation.report import format_report, percent, summarize, write_csv, write_plot, write_tables
from protonet.episodes.evaluation.state import describe_run, find_versions, read_state, write_state
from protonet.episodes.evaluation.statistics import Evaluation, Rate, Tuning
from protonet.episodes.features.sources import Sources, load_data
from protonet.errors import optional_packages, raise_input_error

SHOWN_EVERY, SAVED_EVERY = 0.5, 10.0  #: Seconds between two accuracies in the bar, and two writings of the state.


def run_evaluation(
    plan: EvaluationPlan, outputs: Mapping[str, Path], *, state: Path | None = None, resume: bool = False
) -> Evaluation | None:
    """Evaluate, print the report and write the outputs.

    Args:
        plan: The settings.
        outputs: The paths of the files to write, under some of ``json``, ``csv``, ``plot``, ``latex``, ``markdown`` and
            ``report``.
        state: Where the scores of finished episodes are kept, every few seconds and at the end, and beside it those of
            settings to choose from; None for nowhere.
        resume: Continue from the state, if there is one. The result is that of an uninterrupted run, to the byte.

    Returns:
        The results; None in other processes than the first.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once the report and the files of the finished episodes are written.
        MissingPackageError: A package that the data or an output needs is missing.
        InputError: Data, side, encoder, sampler and state do not fit together.
    """
    if "plot" in outputs:
        with optional_packages():
            import matplotlib as _  # noqa: F401, PLC0415 - before the work, if it is missing
    with join_group() as group:
        sampler, sources = load_data(plan.rows, plan.sampler)
        tunings = _tune(plan, sampler, sources, group, state, resume=resume)
        best = {tuning.chosen for tuning in tunings}
        candidates = [choice for grid in plan.methods.tune for choice in grid if choice.name in best]
        plan = replace(plan, methods=plan.methods.add_tuned(candidates))
        prepared = prepare(plan, sampler, sources)
        prepared.notes.extend(map(str, tunings))
        settings = plan.describe(prepared.side, prepared.sampler)
        watch = _Watch(settings, prepared, group, state, resume=resume)
        try:
            scores = prepared.evaluate(plan, group, watch.show, watch.earlier)
        except KeyboardInterrupt:
            watch.close()
            if not watch.latest:
                raise
            if group.rank == 0:
                _report(settings, prepared, tunings, join_batches(watch.latest), outputs)
            text = f"stopped after {count_episodes(watch.latest):,} of {plan.n_episodes:,} episodes"
            again = "; run again to go on" if resume else "; run again with --resume"
            raise KeyboardInterrupt(text + ("" if state is None else again)) from None
        watch.latest = [scores]
        watch.close()
        return _report(settings, prepared, tunings, scores, outputs) if group.rank == 0 else None


def _tune(
    plan: EvaluationPlan, sampler: Sampler, sources: Sources, group: Group, state: Path | None, *, resume: bool
) -> list[Tuning]:
    """Evaluate the settings of each method to tune on validation classes; return one result for each."""
    if not plan.methods.tune:
        return []
    path = None if state is None else state.with_name(f"{state.stem}-tune{state.suffix}")
    if path is not None and path.exists() and not resume and group.rank == 0:
        remedy = "Continue its run with --resume, or pass another path."
        raise_input_error("state", "leave room beside it for that of --tune", f"{path}, which exists", remedy)
    tuning = plan_tuning(plan, sampler, sources)
    prepared = prepare(tuning, sampler, sources)
    watch = _Watch(tuning.describe(prepared.side, prepared.sampler), prepared, group, path, resume=resume, what="tune")
    with closing(watch):
        scores = prepared.evaluate(tuning, group, watch.show, watch.earlier)
        watch.latest = [scores]
    n_classes = len(prepared.pool.by_class.size)
    return [Tuning.of({own.name: scores[own.name].accuracy for own in grid}, n_classes) for grid in plan.methods.tune]


class _Watch:
    """What watches an evaluation: it shows how far it is, and keeps the scores of finished episodes."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        prepared: Prepared,
        group: Group,
        state: Path | None,
        *,
        resume: bool,
        what: str | None = None,
    ) -> None:
        self.run = describe_run(settings, prepared)
        self.path, self.group = state, group
        self.earlier = read_state(state, self.run) if state is not None and resume and state.exists() else None
        self.latest: Sequence[Mapping[str, Scores]] = [] if self.earlier is None else [self.earlier]
        self.shown = self.saved = time.monotonic()
        self.bar = tqdm(
            total=settings["most_episodes"],
            desc=what,
            initial=count_episodes(self.latest),
            unit="episode",
            delay=1.0,
            dynamic_ncols=True,
            disable=group.rank != 0,
        )

    def show(self, batches: Sequence[Mapping[str, Scores]]) -> None:
        """Show and keep what is done."""
        self.latest = [*batches]
        now, name = time.monotonic(), next(iter(batches[0]))
        if now - self.shown > SHOWN_EVERY:
            accuracy = torch.cat([batch[name].accuracy for batch in batches])
            self.bar.set_postfix_str(f"{name} {percent(Rate.measure(accuracy, None))} %", refresh=False)
            self.shown = now
        n_last = len(batches[-1][name].accuracy)
        self.bar.update(n_last if self.group.world_size == 1 else count_episodes(batches) - self.bar.n)
        if now - self.saved > SAVED_EVERY:
            self.save()
            self.saved = time.monotonic()

    def save(self) -> None:
        """Write the scores of the finished episodes."""
        if self.path is not None and self.group.rank == 0 and self.latest:
            write_state(self.path, self.run, join_batches(self.latest))

    def close(self) -> None:
        """Write them a last time, and end the bar."""
        self.bar.close()
        self.save()


def _report(
    settings: Mapping[str, Any],
    prepared: Prepared,
    tunings: Sequence[Tuning],
    scores: Mapping[str, Scores],
    outputs: Mapping[str, Path],
) -> Evaluation:
    """Print the report and write the outputs."""
    sampler, index, seed = prepared.sampler, prepared.pool.by_class, settings["seed"]
    n_episodes = count_episodes([scores])
    members = sampler.find_members(index, seed=seed, n_episodes=n_episodes)
    queries = sampler.count_queries(index, seed=seed, n_episodes=n_episodes)
    varied = members[:, sampler.n_base :]
    summary = summarize(scores, sampler.shot, settings, varied)
    notes = [*prepared.notes, *list_equal(prepared.data, prepared.class_ids)]
    title = _format_title(settings, prepared, n_episodes)
    print("\n".join([title, *notes]) + "\n\n" + format_report(summary), end="", flush=True)
    names = [prepared.data.class_names[c] for c in prepared.class_ids.tolist()]
    evaluation = Evaluation(
        summary,
        tunings,
        find_versions(),
        prepared.plugins,
        data=hash_rows(prepared.data.take_rows, prepared.pool.sources),
        queries=queries,
        right={name: (score.accuracy * queries).round().long() for name, score in scores.items()},
        members=varied,
        n_classes=len(index.size),
        records=record(
            sampler,
            prepared.pool,
            (prepared.data.y, prepared.data.class_names),
            {name: score.predicted for name, score in scores.items()},
            seed=seed,
        )
        if settings.get("records")
        else None,
        notes=notes,
        by_class=list_classes(scores, members, names) if "report" in outputs else None,
    )
    if "report" in outputs:
        write_page(outputs["report"], title, notes, evaluation)
    if "json" in outputs:
        write_json(outputs["json"], evaluation.describe())
    if "csv" in outputs:
        write_csv(outputs["csv"], summary)
    write_tables(outputs, summary)
    if "plot" in outputs:
        part = next(split_draw(sampler.draw(index, seed=seed, first=0, n_episodes=1)))
        write_plot(outputs["plot"], summary, gather_episodes(prepared.pool.take, part), part.query_labels)
    for path in outputs.values():
        print(f"wrote {path}", file=sys.stderr)
    return evaluation


def _format_title(settings: Mapping[str, Any], prepared: Prepared, n_episodes: int) -> str:
    """Format the line above the table: what was evaluated."""
    features = settings["encoder"] or f"{prepared.pool.x.shape[1]} features"
    features += "" if settings["normalize"] == "none" else f" ({settings['normalize']})"
    title = f"{settings['dataset']}, {prepared.n_classes} classes, {features}: "
    return f"{title}{prepared.sampler.title()}, {n_episodes:,} episodes, seed {settings['seed']}"
