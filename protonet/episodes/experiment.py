"""One evaluation from the command line: from data, encoder and methods to a report."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from protonet._checks import fail, optional_packages
from protonet.datasets import Dataset
from protonet.datasets.dataset import SIDES
from protonet.episodes.backbones import embed_rows
from protonet.episodes.batch import Base, Take, gather_episodes, split_draw, summarize_base, take_from
from protonet.episodes.checkpoints import load_encoder, read_plan
from protonet.episodes.distributed import join_group
from protonet.episodes.draws import Setting, check_setting, draw_episodes, find_members
from protonet.episodes.evaluation import Scores, evaluate, join_batches
from protonet.episodes.methods import ALIASES, CENTRED, METHODS, NEEDS_BASE, USES_BASE
from protonet.episodes.report import Summary, format_report, summarize, write_csv, write_json, write_plot
from protonet.episodes.sources import load_source
from protonet.episodes.state import describe_run, read_state, write_state
from protonet.episodes.statistics import half_width, mean_of
from protonet.sampling import ClassIndex, index_classes

PROG = "protonet.episodes"  #: The command, for messages.
SHOWN_EVERY, SAVED_EVERY = 0.5, 10.0  #: Seconds between two accuracies in the bar, and two writings of the state.


class Experiment(NamedTuple):
    """The settings of an evaluation."""

    dataset: str  #: A data set by name or path, see `protonet.episodes.sources.load_source`.
    side: str | None  #: Of the split by class, or "all"; None for "novel" if there is a split, otherwise "all".
    split_seed: int | None  #: Split the classes at random with this seed; None keeps the data set's own split.
    encoder: str | None  #: The path of a checkpoint; None evaluates the features as they are.
    setting: Setting  #: The kind of episodes.
    methods: list[str]  #: Names of methods, or "all".
    n_episodes: int  #: Most episodes.
    until: float  #: Stop once the half-widths of all 95 % intervals are below this many percentage points; 0 for never.
    seed: int  #: Of the episodes.
    interval: str = "episodes"  #: What intervals are over: "episodes" or "classes".


class Material(NamedTuple):
    """The data and methods of an evaluation, ready to use."""

    x: Tensor  #: (n, dim) floating.
    take: Take  #: Returns rows of ``x`` by number.
    by_class: ClassIndex  #: Rows by class, of the classes to draw from.
    class_names: tuple[str, ...]  #: One name per class of the side.
    base: Base | None  #: The base classes, if a method uses them.
    side: str  #: Of the split, or "all".
    methods: list[str]  #: Their names.
    notes: list[str]  #: Lines to print with the report.


def run_experiment(
    experiment: Experiment, outputs: Mapping[str, Path], *, state: Path | None = None, resume: bool = False
) -> None:
    """Evaluate, print the report and write the outputs.

    Args:
        experiment: The settings.
        outputs: The paths of the files to write, under ``json``, ``csv`` and ``plot``; each may be missing.
        state: Where the scores of finished episodes are kept, every few seconds and at the end; None for nowhere.
        resume: Continue from the state, if there is one. The result is that of an uninterrupted run, to the byte.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once the report and the files of the finished episodes are written.
        MissingPackageError: A package that the data or an output needs is missing.
        InputError: Data, side, encoder, setting and state do not fit together.
    """
    if "plot" in outputs:
        with optional_packages(PROG):
            import matplotlib as _  # noqa: F401, PLC0415 - before the work, if it is missing
    with join_group() as group:
        data = load_source(experiment.dataset, split_seed=experiment.split_seed)
        material = _prepare(data, experiment)
        is_main = group.rank == 0  # the process that prints and writes
        settings = _describe(experiment, material.side)
        run: dict[str, Any] = {}
        earlier: dict[str, Scores] | None = None
        if state is not None:
            scored = {name: value for name, value in settings.items() if name != "interval"}
            run = describe_run(scored, material.methods, material.take, material.by_class, material.base)
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
                text = f"{name} {100 * mean_of(accuracy):.2f} ±{100 * half_width(accuracy):.2f} %"
                bar.set_postfix_str(text, refresh=False)
                shown = now
            bar.update(len(batches[-1][name].accuracy) if group.world_size == 1 else _count(batches) - bar.n)
            if now - saved > SAVED_EVERY:
                save()
                saved = time.monotonic()

        def report(scores: Mapping[str, Scores]) -> int:
            bar.close()
            n_episodes = _count([scores])
            members = None
            if experiment.interval == "classes":
                members = find_members(
                    material.by_class, experiment.setting, seed=experiment.seed, n_episodes=n_episodes
                )
            if is_main:
                summary = summarize(scores, experiment.setting.shot, settings, members)
                print(_format_title(summary, material, experiment) + format_report(summary), end="", flush=True)
                _write_outputs(summary, outputs, material, experiment)
            return n_episodes

        try:
            scores = evaluate(
                material.x,
                material.by_class,
                {name: METHODS[name] for name in material.methods},
                experiment.setting,
                seed=experiment.seed,
                n_episodes=experiment.n_episodes,
                until=experiment.until,
                base=material.base,
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
            done = report(join_batches(latest))
            text = f"stopped after {done:,} of {experiment.n_episodes:,} episodes"
            raise KeyboardInterrupt(text + ("" if state is None else "; run again with --resume")) from None
        latest[:] = [scores]
        save()
        report(scores)


def _count(batches: Sequence[Mapping[str, Scores]]) -> int:
    """Return how many episodes there are in batches of scores."""
    return sum(len(next(iter(batch.values())).accuracy) for batch in batches)


def _prepare(data: Dataset, experiment: Experiment) -> Material:
    """Select the rows and classes of an experiment's side, and embed them if there is an encoder."""
    sides = data.sides or ("all",) * data.num_classes
    side = experiment.side or ("all" if data.sides is None else "novel")
    if side not in {"all", *sides}:
        got = f"{side} of {', '.join(sorted(set(data.sides or ()))) or 'no split'}"
        fail(PROG, "--side", "be a side that has classes", got, "Pass --side all, or --split-seed 0 for a split.")
    with_base = side in SIDES[1:] and "base" in sides
    methods, notes = _find_methods(experiment.methods, with_base=with_base)
    chosen = [c for c, own in enumerate(sides) if side in ("all", own)]
    names = tuple(data.class_names[c] for c in chosen)
    whole = index_classes(data.y)
    by_class = check_setting(PROG, whole.take(torch.tensor(chosen)), experiment.setting, names)
    most = experiment.setting.way[1] + experiment.setting.n_open
    if experiment.interval == "classes" and most >= len(by_class.size):
        got = f"classes, with all {len(by_class.size)} classes in an episode"
        fail(PROG, "--interval", "leave a class out of each episode", got, "Pass a smaller --way, or episodes.")
    if experiment.setting.allow_small:
        few = experiment.setting.shot[1] + experiment.setting.n_query
        small = int((by_class.size < few).sum())
        note = f"{small} of {len(chosen)} classes have fewer rows than shot + query, "
        notes.append(f"{note}{len(chosen) - len(by_class.size)} too few to be drawn.")
    base_ids = [c for c, own in enumerate(sides) if own == "base"] if with_base and USES_BASE & set(methods) else []
    base_index = whole.take(torch.tensor(base_ids)) if base_ids else None
    x, take = data.x, (take_from(data.x) if data.mapping is None else data.take_rows)
    if experiment.encoder is not None:
        notes += _compare_split(read_plan(experiment.encoder), experiment, side)
        encoder = load_encoder(experiment.encoder, dim=x.shape[1])
        used = torch.isin(data.y, torch.tensor(chosen + base_ids)).nonzero().flatten()
        places = torch.full((len(x),), -1).index_copy_(0, used, torch.arange(len(used)))
        x = embed_rows(encoder, take, used)
        take, by_class = take_from(x), by_class._replace(rows=places[by_class.rows])
        base_index = None if base_index is None else base_index._replace(rows=places[base_index.rows])
    # Base rows are copied into memory of their own: a method may take them while it uses an episode's.
    base_take = take if x is data.x and data.mapping is not None else take_from(x)
    base = None if base_index is None else summarize_base(base_take, base_index)
    return Material(x, take, by_class, names, base, side, methods, notes)


def _find_methods(names: Sequence[str], *, with_base: bool) -> tuple[list[str], list[str]]:
    """Return the methods' names, "all" being every method that can run, and lines to print with the report."""
    notes = []
    if "all" in names:
        missing = [] if with_base else sorted(NEEDS_BASE)
        notes += [f"Without base classes, {name} is left out." for name in missing]
        names = [name for name in METHODS if name not in missing]
    for name in names:
        if name in NEEDS_BASE and not with_base:
            remedy = "Pass --side novel, of data with a split by class; --split-seed 0 makes one."
            fail(PROG, "--method", "find base classes beside the evaluated ones", f"none for {name}", remedy)
    notes += [f"{name} is {ALIASES[name]}." for name in names if name in ALIASES]
    names = list(dict.fromkeys(ALIASES.get(name, name) for name in names))
    if "simpleshot" in names and not with_base:
        notes.append("Without base classes, simpleshot centres on each episode's own support rows.")
    others = [name for name in names if name in CENTRED and name != "simpleshot"]
    if others and not with_base:
        notes.append(f"Without base classes, rows are scaled to unit norm without centring in {', '.join(others)}.")
    return names, notes


def _compare_split(plan: Mapping[str, Any], experiment: Experiment, side: str) -> list[str]:
    """Check that an encoder was trained on the same split; note where it is evaluated on classes that it learned."""
    if plan["dataset"] != experiment.dataset:
        return []
    if plan["split_seed"] != experiment.split_seed:
        trained = "without one" if plan["split_seed"] is None else f"with {plan['split_seed']}"
        got = f"{experiment.split_seed}; the encoder was trained {trained}"
        constraint = "be the encoder's, or it would be judged on classes that it learned"
        fail(PROG, "--split-seed", constraint, got, "Pass the encoder's.")
    if side == "novel":
        return []
    return [f"The encoder was trained or chosen on classes of side {side}: this is no test of it."]


def _describe(experiment: Experiment, side: str) -> dict[str, Any]:
    """Return the settings for the summary, under the names of the command line."""
    dataset, _, split_seed, encoder, setting, _, n_episodes, until, seed, interval = experiment
    names = {"n_query": "query", "n_open": "open"}
    kind = {names.get(name, name): value for name, value in setting._asdict().items()}
    data = {"dataset": dataset, "side": side, "split_seed": split_seed, "encoder": encoder}
    return {**data, **kind, "most_episodes": n_episodes, "until": until, "seed": seed, "interval": interval}


def _format_title(summary: Summary, material: Material, experiment: Experiment) -> str:
    """Format the lines above the table: what was evaluated, and the notes."""
    setting = experiment.setting
    spans = ["-".join(map(str, dict.fromkeys(span))) for span in (setting.way, setting.shot)]
    kind = "" if setting.imbalance is None else f", queries by Dirichlet shares of {setting.imbalance:g}"
    kind += f", {setting.n_open} open classes" if setting.n_open else ""
    features = f"{experiment.encoder}" if experiment.encoder else f"{material.x.shape[1]} features"
    title = f"{experiment.dataset}, {len(material.class_names)} classes, {features}: {spans[0]}-way {spans[1]}-shot"
    title += f" {setting.n_query}-query{kind}, {summary['episodes']:,} episodes, seed {experiment.seed}"
    return "\n".join([f"{title}; 95 % intervals over {experiment.interval}", *material.notes]) + "\n\n"


def _write_outputs(summary: Summary, outputs: Mapping[str, Path], material: Material, experiment: Experiment) -> None:
    """Write the files among ``json``, ``csv`` and ``plot`` that are in ``outputs``."""
    if "json" in outputs:
        write_json(outputs["json"], summary)
    if "csv" in outputs:
        write_csv(outputs["csv"], summary)
    if "plot" in outputs:
        index, setting = material.by_class, experiment.setting
        part = next(split_draw(draw_episodes(index, setting, seed=experiment.seed, first=0, n_episodes=1)))
        write_plot(outputs["plot"], summary, gather_episodes(material.take, part), part.query_labels)
    for path in outputs.values():
        print(f"wrote {path}", file=sys.stderr)
