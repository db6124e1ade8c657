"""One evaluation from the command line: from data, encoder and methods to a report."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from protonet._checks import optional_packages
from protonet._writing import write_json
from protonet.datasets import Dataset
from protonet.episodes.draws.batch import gather_episodes, hash_rows, split_draw
from protonet.episodes.draws.equal_rows import list_equal
from protonet.episodes.draws.meta_dataset import MetaDataset
from protonet.episodes.evaluation.distributed import join_group
from protonet.episodes.evaluation.evaluate import Scores, evaluate, join_batches
from protonet.episodes.evaluation.material import PROG, Experiment, Material, load_data, prepare
from protonet.episodes.evaluation.page import list_classes, write_page
from protonet.episodes.evaluation.report import (
    Summary,
    format_report,
    list_halves,
    list_members,
    list_right,
    percent,
    rate,
    summarize,
    write_csv,
    write_plot,
    write_tables,
)
from protonet.episodes.evaluation.state import describe_run, find_versions, read_state, write_state
from protonet.episodes.evaluation.statistics import mean_of
from protonet.episodes.evaluation.tuning import Tuning, tune

SHOWN_EVERY, SAVED_EVERY = 0.5, 10.0  #: Seconds between two accuracies in the bar, and two writings of the state.


def run_experiment(
    experiment: Experiment, outputs: Mapping[str, Path], *, state: Path | None = None, resume: bool = False
) -> dict[str, Any]:
    """Evaluate, print the report and write the outputs.

    Args:
        experiment: The settings.
        outputs: The paths of the files to write, under ``json``, ``csv``, ``plot``, ``latex``, ``markdown`` and
            ``report``; each
            may be missing.
        state: Where the scores of finished episodes are kept, every few seconds and at the end; None for nowhere.
        resume: Continue from the state, if there is one. The result is that of an uninterrupted run, to the byte.

    Returns:
        What ``json`` holds; nothing in other processes than the first.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once the report and the files of the finished episodes are written.
        MissingPackageError: A package that the data or an output needs is missing.
        InputError: Data, side, encoder, setting and state do not fit together.
    """
    if "plot" in outputs:
        with optional_packages(PROG):
            import matplotlib as _  # noqa: F401, PLC0415 - before the work, if it is missing
    with join_group() as group:
        data, experiment = load_data(experiment)
        tunings = tune(data, experiment, group)
        experiment = _choose(experiment, tunings)
        material = prepare(data, experiment)
        material.notes.extend(map(str, tunings))
        is_main = group.rank == 0  # the process that prints and writes
        if is_main:
            material.notes.extend(list_equal(data, data.y[material.source_rows[material.by_class.start]]))
        settings = _describe(experiment, material)
        run: dict[str, Any] = {}
        earlier: dict[str, Scores] | None = None
        if state is not None:
            scored = {name: value for name, value in settings.items() if name != "against"}
            scored["plugins"] = _list_plugins(material)
            means = () if material.base is None else (material.base.mean, material.base.class_means)
            texts = () if material.texts is None else (material.texts,)
            head = () if material.trained is None else material.trained.head.state_dict().values()
            seen = [*means, *texts, *_list_groups(material), *head]
            run = describe_run(scored, list(material.methods), material.take, material.by_class, seen)
            earlier = read_state(state, run) if resume and state.exists() else None
        done = 0 if earlier is None else len(next(iter(earlier.values())).accuracy)
        bar = tqdm(
            total=experiment.n_episodes,
            initial=done,
            unit="episode",
            delay=1.0,
            dynamic_ncols=True,
            disable=not is_main,
        )
        latest: list[Mapping[str, Scores]] = [] if earlier is None else [earlier]
        shown = saved = time.monotonic()

        def save() -> None:
            if state is not None and is_main:
                write_state(state, run, join_batches(latest))

        def show(batches: Sequence[Mapping[str, Scores]]) -> None:
            nonlocal shown, saved
            latest[:] = batches
            now, name = time.monotonic(), next(iter(batches[0]))
            if now - shown > SHOWN_EVERY:
                accuracy = torch.cat([batch[name].accuracy for batch in batches])
                bar.set_postfix_str(
                    f"{name} {percent(mean_of(accuracy), *list_halves(rate(accuracy, None)))} %", refresh=False
                )
                shown = now
            bar.update(len(batches[-1][name].accuracy) if group.world_size == 1 else _count(batches) - bar.n)
            if now - saved > SAVED_EVERY:
                save()
                saved = time.monotonic()

        def report(scores: Mapping[str, Scores]) -> dict[str, Any]:
            bar.close()
            figures: dict[str, Any] = {}
            n_episodes = _count([scores])
            if is_main:
                members = material.setting.find_members(material.by_class, seed=experiment.seed, n_episodes=n_episodes)
                varied = members[:, material.setting.n_base :]
                summary = summarize(scores, material.setting.shot, settings, varied)
                title = _format_title(summary, material, experiment)
                print("\n".join([title, *material.notes]) + "\n\n" + format_report(summary), end="", flush=True)
                figures = {**summary, **_detail(scores, data, material, experiment, tunings), **list_members(varied)}
                if "report" in outputs:
                    figures["by_class"] = list_classes(scores, members, _name_classes(data, material))
                    write_page(outputs["report"], title, material.notes, figures)
                if "json" in outputs:
                    write_json(outputs["json"], figures)
                _write_outputs(summary, outputs, material, experiment)
            return figures

        try:
            scores = evaluate(
                material.x,
                material.by_class,
                material.methods,
                material.setting,
                seed=experiment.seed,
                n_episodes=experiment.n_episodes,
                until=experiment.until,
                base=material.base,
                texts=material.texts,
                trained=material.trained,
                group=group,
                progress=show,
                take=material.take,
                earlier=earlier,
            )
        except KeyboardInterrupt:
            bar.close()
            if not latest:
                raise
            save()
            report(join_batches(latest))
            text = f"stopped after {_count(latest):,} of {experiment.n_episodes:,} episodes"
            raise KeyboardInterrupt(text + ("" if state is None else "; run again with --resume")) from None
        latest[:] = [scores]
        save()
        return report(scores)


def _count(batches: Sequence[Mapping[str, Scores]]) -> int:
    """Return how many episodes there are in batches of scores."""
    return sum(len(next(iter(batch.values())).accuracy) for batch in batches)


def _choose(experiment: Experiment, tunings: Sequence[Tuning]) -> Experiment:
    """Add to an experiment's methods those that were tuned, and the one that others are compared with.

    If that is a method without settings that was tuned, it is the tuned one.
    """
    methods = [*experiment.methods, *(tuning.chosen for tuning in tunings)]
    against = experiment.against
    if against is not None:
        tuned = [tuning.chosen for tuning in tunings if tuning.chosen.key == against.key and not against.keywords]
        against = (tuned or [against])[0]
        methods.append(against)
    return experiment._replace(methods=methods, against=against)


def _describe(experiment: Experiment, material: Material) -> dict[str, Any]:
    """Return the settings for the summary, under the names of the command line."""
    return {
        "dataset": experiment.dataset,
        "test": experiment.test,
        "side": material.side,
        "image_size": experiment.image_size,
        "split_seed": experiment.split_seed,
        "encoder": experiment.encoder,
        "normalize": experiment.normalize,
        "base": experiment.base,
        "texts": experiment.texts,
        "hierarchy": experiment.hierarchy,
        **material.setting.describe(),
        "most_episodes": experiment.n_episodes,
        "until": experiment.until,
        "seed": experiment.seed,
        "tune": [[choice.name for choice in grid] for grid in experiment.tune],
        "against": None if experiment.against is None else experiment.against.name,
    }


def _list_groups(material: Material) -> list[torch.Tensor]:
    """Return the classes of the groups of a hierarchy, which the settings know by its name alone."""
    groups = material.setting.groups if isinstance(material.setting, MetaDataset) else ()
    return [torch.tensor(own) for own in groups]


def _list_plugins(material: Material) -> dict[str, str]:
    """Return what tells the versions of plug-ins apart, by their names."""
    return {choice.key: choice.origin for choice in material.methods.values() if choice.origin is not None}


def _name_classes(data: Dataset, material: Material) -> list[str]:
    """Return the names of the classes that episodes are drawn from: small ones may have been left out."""
    labels = data.y[material.source_rows[material.by_class.start]]
    return [data.class_names[label] for label in labels.tolist()]


def _detail(
    scores: Mapping[str, Scores], data: Dataset, material: Material, experiment: Experiment, tunings: Sequence[Tuning]
) -> dict[str, Any]:
    """Return what the JSON file tells beside the summary: all that another run needs to be compared by episode."""
    n_episodes = _count([scores])
    queries = material.setting.count_queries(material.by_class, seed=experiment.seed, n_episodes=n_episodes)
    return {
        "tuning": [tuning.describe() for tuning in tunings],
        "versions": find_versions(),
        "plugins": _list_plugins(material),
        "data": hash_rows(data.take_rows, material.by_class._replace(rows=material.source_rows)),
        "classes": len(material.by_class.size),
        "queries": queries.tolist() if len(queries.unique()) > 1 else int(queries[0]),
        "right": list_right(scores, queries),
    }


def _format_title(summary: Summary, material: Material, experiment: Experiment) -> str:
    """Format the line above the table: what was evaluated."""
    features = f"{experiment.encoder}" if experiment.encoder else f"{material.x.shape[1]} features"
    features += "" if experiment.normalize == "none" else f" ({experiment.normalize})"
    title = f"{experiment.dataset}, {len(material.class_names)} classes, {features}: "
    return f"{title}{material.setting.title()}, {summary['episodes']:,} episodes, seed {experiment.seed}"


def _write_outputs(summary: Summary, outputs: Mapping[str, Path], material: Material, experiment: Experiment) -> None:
    """Write the files among ``csv``, ``latex``, ``markdown`` and ``plot`` that are in ``outputs``; name them all."""
    if "csv" in outputs:
        write_csv(outputs["csv"], summary)
    write_tables(outputs, summary)
    if "plot" in outputs:
        part = next(split_draw(material.setting.draw(material.by_class, seed=experiment.seed, first=0, n_episodes=1)))
        write_plot(outputs["plot"], summary, gather_episodes(material.take, part), part.query_labels)
    for path in outputs.values():
        print(f"wrote {path}", file=sys.stderr)
