"""One experiment of the command line: data, encoder and methods to a report."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from protonet._checks import fail
from protonet.datasets import Dataset
from protonet.datasets.dataset import SIDES, optional_packages
from protonet.episodes.backbones import embed_rows
from protonet.episodes.batch import Base, Take, gather_episodes, split_draw, summarize_base, take_from
from protonet.episodes.checkpoints import load_encoder
from protonet.episodes.distributed import join_group
from protonet.episodes.evaluation import Scores, evaluate, join_scores
from protonet.episodes.methods import METHODS, NEEDS_BASE, USES_BASE
from protonet.episodes.report import format_report, summarize, write_csv, write_json
from protonet.episodes.sampling import ClassIndex, Setting, check_setting, draw_episodes, index_classes
from protonet.episodes.sources import load_source
from protonet.episodes.statistics import half_width, mean_of

NAME = "protonet.episodes"


class Experiment(NamedTuple):
    """What was asked for: `protonet.episodes.__main__` describes each."""

    dataset: str
    side: str | None
    split_seed: int | None
    encoder: str | None
    setting: Setting
    methods: list[str]
    n_episodes: int
    until: float
    seed: int


class Material(NamedTuple):
    """Rows and how to take them, the classes to draw from, their names, and the base classes if a method uses them."""

    x: Tensor
    take: Take
    by_class: ClassIndex
    class_names: tuple[str, ...]
    base: Base | None


def run_experiment(experiment: Experiment, outputs: Mapping[str, Path]) -> None:
    """Evaluate, print the report, and write ``json``, ``csv`` and ``plot`` where they are among the outputs.

    Raises:
        KeyboardInterrupt: After the report of the episodes so far; nothing is written.
        ValueError: Data, side, encoder and setting that do not fit together.
    """
    if "plot" in outputs:
        with optional_packages(NAME):
            pass
    with join_group() as group:
        data = load_source(experiment.dataset, split_seed=experiment.split_seed)
        material = prepare(data, experiment)
        index = check_setting(NAME, material.by_class, experiment.setting, material.class_names)
        leads = group.rank == 0
        bar = tqdm(total=experiment.n_episodes, unit="episode", delay=1.0, dynamic_ncols=True, disable=not leads)
        latest: dict[str, Sequence[Scores]] = {}

        def show(done: int, scores: Mapping[str, Sequence[Scores]]) -> None:
            latest.update(scores)
            accuracy = torch.cat([part.accuracy for part in scores[experiment.methods[0]]])
            running = f"{experiment.methods[0]} {100 * mean_of(accuracy):.2f} ±{100 * half_width(accuracy):.2f} %"
            bar.set_postfix_str(running, refresh=False)
            bar.update(done - bar.n)

        def report(scores: Mapping[str, Scores]) -> dict[str, Any]:
            bar.close()
            summary = summarize(scores, experiment.setting.shot, describe(experiment))
            if leads:
                print(format_title(summary, material, experiment) + format_report(summary), end="", flush=True)
            return summary

        try:
            scores = evaluate(
                material.x,
                index,
                {name: METHODS[name] for name in experiment.methods},
                experiment.setting,
                seed=experiment.seed,
                n_episodes=experiment.n_episodes,
                until=experiment.until,
                base=material.base,
                group=group,
                progress=show,
                take=material.take,
            )
        except KeyboardInterrupt:
            if not latest:
                raise
            done = report({name: join_scores(parts) for name, parts in latest.items()})["episodes"]
            raise KeyboardInterrupt(f"stopped after {done:,} of {experiment.n_episodes:,} episodes") from None
        summary = report(scores)
        if leads:
            write_outputs(summary, outputs, material, index, experiment)


def prepare(data: Dataset, experiment: Experiment) -> Material:
    """Return the rows and classes of an experiment's side, embedded if there is an encoder."""
    side = experiment.side or ("all" if data.sides is None else "novel")
    if side != "all" and (data.sides is None or side not in data.sides):
        got = f"{side} of {', '.join(sorted(set(data.sides or ()))) or 'no split'}"
        fail(NAME, "--side", "be a side that has classes", got, "Pass --side all, or --split-seed 0 for a split.")
    needy = [name for name in experiment.methods if name in NEEDS_BASE]
    with_base = data.sides is not None and "base" in data.sides and side in SIDES[1:]
    if needy and not with_base:
        remedy = "Use data with a split by class, or --split-seed 0."
        fail(NAME, "--method", "find base classes beside the evaluated ones", f"none for {needy[0]}", remedy)
    whole = index_classes(data.y)
    chosen = [c for c in range(data.num_classes) if side in ("all", (data.sides or ("all",) * data.num_classes)[c])]
    index, base_index, x = whole.take(torch.tensor(chosen)), None, data.x
    if with_base and any(name in USES_BASE for name in experiment.methods):
        base_index = whole.take(torch.tensor([c for c, own in enumerate(data.sides or ()) if own == "base"]))
    take: Take = take_from(x) if data.mapping is None else data.take_rows
    if experiment.encoder is not None:
        encoder = load_encoder(experiment.encoder, dim=x.shape[1])
        needed = set(chosen) | ({c for c, own in enumerate(data.sides or ()) if own == "base"} if base_index else set())
        used = torch.isin(data.y, torch.tensor(sorted(needed))).nonzero().flatten()
        places = torch.full((len(x),), -1).index_copy_(0, used, torch.arange(len(used)))
        x = embed_rows(encoder, data.take_rows, used)
        take, index = take_from(x), index._replace(rows=places[index.rows])
        base_index = None if base_index is None else base_index._replace(rows=places[base_index.rows])
    # With memory of its own: a method may take base rows while it holds an episode.
    base_take = take_from(x) if data.mapping is None or experiment.encoder is not None else take
    base = None if base_index is None else summarize_base(base_take, base_index)
    return Material(x, take, index, tuple(data.class_names[c] for c in chosen), base)


def describe(experiment: Experiment) -> dict[str, Any]:
    """Return the settings as JSON writes them, under the names of the command line."""
    setting = experiment.setting
    return {
        "dataset": experiment.dataset,
        "side": experiment.side,
        "split_seed": experiment.split_seed,
        "encoder": experiment.encoder,
        "way": setting.way,
        "shot": setting.shot,
        "query": setting.n_query,
        "unequal": setting.unequal,
        "imbalance": setting.imbalance,
        "open": setting.n_open,
        "allow_small": setting.allow_small,
        "most_episodes": experiment.n_episodes,
        "until": experiment.until,
        "seed": experiment.seed,
    }


def format_title(summary: Mapping[str, Any], material: Material, experiment: Experiment) -> str:
    """Return the line above the table: what was evaluated."""
    setting = experiment.setting
    spans = ["-".join(map(str, dict.fromkeys(span))) for span in (setting.way, setting.shot)]
    kind = "" if setting.imbalance is None else f", queries by Dirichlet shares of {setting.imbalance:g}"
    kind += f", {setting.n_open} open classes" if setting.n_open else ""
    features = f"{experiment.encoder}" if experiment.encoder else f"{material.x.shape[1]} features"
    title = f"{experiment.dataset}, {len(material.class_names)} classes, {features}: {spans[0]}-way {spans[1]}-shot"
    title += f" {setting.n_query}-query{kind}, {summary['episodes']:,} episodes, seed {experiment.seed}"
    notes = ""
    if material.base is None and any(name in USES_BASE for name in experiment.methods):
        notes = "Without base classes, simpleshot centres on each episode's own support rows.\n"
    return f"{title}; 95 % intervals\n{notes}\n"


def write_outputs(
    summary: Mapping[str, Any],
    outputs: Mapping[str, Path],
    material: Material,
    index: ClassIndex,
    experiment: Experiment,
) -> None:
    """Write the files that were asked for."""
    if "json" in outputs:
        write_json(outputs["json"], summary)
    if "csv" in outputs:
        write_csv(outputs["csv"], summary)
    if "plot" in outputs:
        from protonet.episodes.figures import draw_figure  # noqa: PLC0415 - with matplotlib

        part = next(split_draw(draw_episodes(index, experiment.setting, seed=experiment.seed, first=0, n_episodes=1)))
        draw_figure(outputs["plot"], summary, gather_episodes(material.take, part), part.query_labels)
    for path in outputs.values():
        print(f"wrote {path}", file=sys.stderr)
