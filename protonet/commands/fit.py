"""``protonet fit``: learn the classes of a table, tell how well, and keep the model in a file."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from protonet._text import to_printable
from protonet.commands.content import JudgedRows, list_importance, list_learning, list_sections, list_table
from protonet.commands.data import Data, Rest, read_data
from protonet.commands.figures import format_losses, format_views, tell_columns
from protonet.commands.models import find_sizes, keep_crossfit, list_cancelled, name_columns, show_progress, write_model
from protonet.commands.report import list_figures
from protonet.commands.summary import compare_baselines, describe_views, format_baselines, format_pairs
from protonet.embeddings.pictures.files import split_backbone
from protonet.embeddings.pictures.images import path_to_text
from protonet.errors import raise_input_error
from protonet.files import Model
from protonet.fit.active import group_strangers
from protonet.fit.balance import balance_classes, count_rows, count_samples
from protonet.fit.copies import hash_rows
from protonet.fit.crossfit import (
    FREQUENT,
    Crossfit,
    crossfit,
    measure_held,
    number_held,
    predict_baselines,
    predict_held,
    repeat_held,
    score_frequent,
)
from protonet.fit.names import ALONE, NAMES
from protonet.fit.search import Progress
from protonet.fit.solver import TIME_LIMIT, Solution, solve_problem
from protonet.fit.twins import TWINS, find_twins
from protonet.tables.table import format_names
from protonet.ui.page.document import write_outputs
from protonet.ui.plots import draw_plot
from protonet.ui.text import count

#: Of a time limit, what is over as the report begins.
HELD = 0.8
#: Groups of strangers that are told of, and rows of each that are named, at the most.
MOST_GROUPS, SHOWN = 5, 5
#: Of the time, and of its limit, what the choice of views takes; the rest is fitting it again without each fold.
SOLVING = 0.6


def run(options: argparse.Namespace) -> None:
    """Fit as the arguments say, print a summary, and write the model if there is a path for it.

    Raises:
        MissingPackageError: A package that an option needs is missing.
        KeyboardInterrupt: After Ctrl-C. What stood at the path of the model stands there still; but where the model
            was ready and only its cross-validation was not, it is written without, and the summary that there is is
            printed.
        InputError: Arguments or a table that do not fit.
    """
    rows = vars(options).pop("rows")  # which take memory
    seed, limit, outputs, started = options.seed, options.time_limit, options.outputs, time.monotonic() - rows.seconds
    data = read_data(options, rows, keep_cells="report" in outputs)
    del rows
    name = path_to_text(Path(options.table).name)
    if "plot" in outputs and not len(data.x):
        raise_input_error("--plot", "come with rows that have a class", "none", "Leave it out.")
    rest = Rest(data, options.unlabelled and Path(options.unlabelled), options.label or "label")
    shots = torch.bincount(data.y, minlength=len(data.classes)).tolist()
    metadata: dict[str, Any] = {"label": options.label or "label", "effort": options.effort, "seed": seed}
    metadata |= {"samples": shots, "group": options.group, "id": options.id, "left_out": data.left_out}
    metadata |= {"time_limit": limit, "balanced": options.balanced or None, "seen": data.seen}
    metadata |= {"uninformative": data.uninformative} if any(data.uninformative) else {}
    if options.missing_values is not None:
        metadata["missing_values"] = options.missing_values.split(",")
    if data.names is not None:
        metadata["named"] = data.names.describe(data.classes)
    weights = balance_classes(data.y) if options.balanced else None
    beside = None if data.names is None else data.names.count_samples(len(data.classes))

    def make_model(solution: Solution) -> Model:
        views = {"views": describe_views(solution.choice)}
        return Model(solution.network, data.classes, data.columns, metadata | views, {}, data.encoding)

    deadline = math.inf if limit is None else started + limit
    solution, crossed = None, None
    try:
        with show_progress(quiet=options.quiet) as show_stage:

            def tell(part: float, stage: str, share: float) -> None:
                show_stage(stage, SOLVING * share if part == 0 else SOLVING + (1 - SOLVING) * share)

            alone = data.names is not None and not len(data.x)
            solution = solve_problem(
                None if alone else [(data.x, data.y)],
                metadata={"num_classes": len(data.classes)},
                time_limit=TIME_LIMIT if limit is None else max(0.0, SOLVING * (started + limit - time.monotonic())),
                effort=ALONE if alone else options.effort,
                seed=seed,
                weights=weights,
                groups=data.groups,
                blocks=None if data.encoding is None else data.encoding.blocks,
                spans=() if data.encoding is None else data.encoding.spans,
                progress=partial(tell, 0),
                unlabelled=rest or None,
                names=data.names,
            )
            if alone:
                solution.network.temperature.div_(1 + NAMES.sharper / len(data.classes))
            data = data._replace(notes=[*data.notes, *suspect_twins(data, solution)])
            data.notes.extend([*list_cancelled(solution.network, data.classes), *list_unevaluated(data, solution)])
            until = deadline if limit is None or "report" not in outputs else started + HELD * limit
            crossed = crossfit(solution, deadline=until, progress=partial(tell, 1))
            in_time = time.monotonic() < until
        if weights is not None:
            crossed = count_rows(crossed, data.y, weights, beside)
        model = keep_crossfit(make_model(solution), crossed, data.number_groups(solution), hash_rows(data.x))
        if "output" in outputs:
            write_model(outputs["output"], model)
    except KeyboardInterrupt:
        if solution is None or "output" not in outputs:
            raise
        if weights is not None:
            rows = torch.bincount(data.y, minlength=len(data.classes))
            count_samples(solution.network, rows if beside is None else rows + beside)
        model = make_model(solution)
        write_model(outputs["output"], model)
        print(summarise(name, data, model, solution, rest, []) + format_notes(data.notes), end="")
        raise KeyboardInterrupt(f"stopped; {outputs['output']} is kept, without cross-validation") from None
    try:
        strangers = group_strangers(solution)
        print(summarise(name, data, model, solution, rest, strangers))
        if options.verbose:
            print(format_views(model.metadata["views"]))
        compared = compare(crossed, solution, model)
        shown = compared if options.verbose else choose_baselines(compared)
        print(report(crossed, shown, list(map(to_printable, data.classes))) + format_notes(data.notes), end="")
        if not in_time and len(crossed.labels):
            print("the time was over before the last fold: the model may do better than its folds")
        if "plot" in outputs:
            draw(outputs["plot"], crossed, data, quiet=options.quiet)
        if "json" in outputs or "report" in outputs:
            figures = list_fit(name, data, model, crossed, compared)
            figures |= list_rest(solution, rest, strangers)
            if "report" in outputs and len(crossed.labels):
                with show_progress(quiet=options.quiet) as progress:
                    figures |= list_more(data, model, solution, crossed, seed, deadline, progress)
            write_outputs(outputs, figures)
        print(tell_next(outputs.get("output"), options.representation))
    except KeyboardInterrupt:
        if "output" not in outputs:
            raise
        raise KeyboardInterrupt(f"stopped; {outputs['output']} is kept") from None


def summarise(
    name: str, data: Data, model: Model, solution: Solution, rest: Rest, strangers: Sequence[Sequence[int]]
) -> str:
    """Return what the table was taken for, and what was made of equal rows and of rows without a class."""
    shots = torch.bincount(data.y, minlength=len(data.classes)).tolist()
    sizes = [count(len(data.classes), "class"), count(len(data.x), "sample"), count(data.x.shape[1], "feature")]
    if data.encoding is not None and not data.encoding.plain:
        sizes[-1] += f" of {count(len(data.encoding.columns), 'column')}"
    sizes += [count(len(data.group_names), "group")] * (data.groups is not None)
    several = "" if min(shots) == max(shots) else f" to {max(shots)}"
    lines = [f"{name}: {', '.join(sizes)}, {min(shots)}{several} per class"]
    lines += [
        f"  {line}" for line in tell_columns(data.columns, None if data.encoding is None else data.encoding.summary)
    ]
    if solution.problem.repeated:
        rows = count(solution.problem.repeated, "row")
        lines.append(f"{rows} equal to others, or nearly: copies are held out together, and count as one where equal")
    if data.names is not None:
        total = f"each as {count(round(data.names.weight), 'sample')}"
        lines.append(f"the names of {count(len(data.names.labels), 'class')} are learned from, {total}")
    if model.metadata["balanced"]:
        lines.append("every class counts alike in learning, also in the probabilities (--balanced)")
    lines += tell_rest(solution, rest, strangers)
    return "\n".join(lines) + "\n"


def format_notes(notes: Sequence[str]) -> str:
    """Return what a person should know of the table, and look at, in lines."""
    return "".join(f"{note}\n" for note in notes)


def tell_next(path: Path | None, representation: Sequence[str] | None) -> str:
    """Return where the model is, and what to do next, given its path, if it was written, and what reads its rows."""
    if path is None:
        return "no model was written: -o FILE.safetensors keeps it"
    size = path.stat().st_size / 1e6
    again = [quote(name) for name in representation or () if Path(split_backbone(name)[0]).exists()]
    more = f" --representation {' '.join(again)}" if again else ""
    return f"{path}: {size:.1f} MB; next: protonet predict {quote(str(path))} NEW.csv -o predicted.csv{more}"


def suspect_twins(data: Data, solution: Solution) -> list[str]:
    """Return a line, or none, about rows with near-duplicates; none if a note already names a column to group by."""
    share = 0.0 if data.sources else find_twins(solution.problem.rows)
    if share < TWINS.share:
        return []
    what = f"{100 * share:.0f} % of the rows have twins of their class, far nearer than all others"
    return [f"warning: {what}; if such have one source, name the column that tells it with --group NAME"]


def list_unevaluated(data: Data, solution: Solution) -> list[str]:
    """Return a line, or none, about classes none of whose rows can be held out, where those of others can."""
    held = number_held(solution.problem) >= 0
    rows, judged = (torch.bincount(y, minlength=len(data.classes)).tolist() for y in (data.y, data.y[held]))
    left = [str(name) for name, total, some in zip(data.classes, rows, judged, strict=True) if total and not some]
    if not left or not any(judged):
        return []
    return [f"not evaluated: {format_names(left)}: a class of one row, copies aside, stays in every fit"]


def tell_rest(solution: Solution, rest: Rest, groups: Sequence[Sequence[int]]) -> list[str]:
    """Return lines about the rows without a class: whether they are learned from, and the groups of strangers."""
    pool, pooled = solution.problem.pool, solution.pooled
    if pool is None or pooled is None:
        return []
    rows, what = f"{count(pool.total, 'row')} without a class", "learned from" if pooled.learned else "not learned from"
    drawn = "" if len(pool.features) == pool.total else f", {len(pool.features):,} of which were drawn"
    losses = "no row could be held out to judge by"
    if pooled.losses is not None:
        before, after = pooled.losses
        losses = f"log-loss on held-out rows {before:.3f} without them, {after:.3f} with them"
        losses += "" if pooled.decided else "; within one standard error: undecided"
    lines = [f"{rows}{drawn}: {what} ({losses})"]
    if groups:
        sizes = [str(len(group)) for group in groups[:MOST_GROUPS]]
        listed = ", ".join(sizes[:-1]) + " and " * (len(sizes) > 1) + sizes[-1]
        verb = "looks" if len(groups) == 1 else "look"
        lines.append(f"{count(len(groups), 'group')} of {listed} rows {verb} like classes of their own:")
        lines += [f"  {', '.join(map(rest.name, group[:SHOWN]))}, ..." for group in groups[:MOST_GROUPS]]
    return lines


def draw(path: Path, crossed: Crossfit, data: Data, *, quiet: bool) -> None:
    """Draw the rows that were held out, or, where there are none, those that the model was fitted to."""
    if len(crossed.labels):
        draw_plot(path, predict_held(crossed), crossed.labels, data.classes, "rows held out", quiet=quiet)
    else:
        with torch.no_grad():
            logits, rows = crossed.whole(data.x), "the rows that it was fitted to"
        draw_plot(path, logits, data.y, data.classes, rows, judged=False, quiet=quiet)


def compare(crossed: Crossfit, solution: Solution, model: Model) -> list[dict[str, Any]]:
    """Return how often the model, and its baselines, are right on the held-out rows, if there are any."""
    if not len(crossed.labels):
        return []
    balanced = bool(model.metadata["balanced"])
    frequent = score_frequent(torch.tensor(model.metadata["samples"]), len(crossed.labels))
    baselines = {FREQUENT: frequent, **predict_baselines(solution.problem)}
    return compare_baselines(predict_held(crossed), crossed.labels, baselines, crossed.sample, balanced=balanced)


def choose_baselines(compared: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return of `compare` the model, the most frequent class, and of the other baselines the best one."""
    others = sorted(compared[2:], key=lambda baseline: -float(baseline[baseline["compared_by"]]))
    return [*compared[:2], *others[:1]]


def report(crossed: Crossfit, compared: Sequence[Mapping[str, Any]], classes: Sequence[str | int]) -> str:
    """Return what the held-out rows say of a model, compared with its baselines."""
    if not len(crossed.labels):
        return "no class has two samples, copies aside: none could be held out to judge by\n"
    metrics = measure_held(crossed)
    rows, folds = count(round(float(crossed.weights.sum())), "row"), count(len(crossed.folds), "fold")
    held = f"{rows} in {folds}, each judged by a fit without its fold"
    return "".join(
        [
            format_baselines(compared),
            f"{held}: {format_losses(metrics._asdict())}",
            format_pairs(metrics.confusion, classes),
        ]
    )


def list_fit(
    name: str, data: Data, model: Model, crossed: Crossfit, compared: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return all figures of the summary as JSON can hold them: of the table, and of the held-out rows, if any."""
    table = list_table(model, data.y, len(data.x), data.gaps, data.notes)
    figures: dict[str, Any] = {"command": "fit", "table": name, "views": model.metadata["views"], "data": table}
    if not len(crossed.labels):
        return figures
    metrics = measure_held(crossed)
    return figures | list_figures(name, data.classes, metrics) | {"baselines": compared}


def list_rest(solution: Solution, rest: Rest, strangers: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return what was made of the rows without a class, if there are any, as JSON can hold it."""
    pool, pooled = solution.problem.pool, solution.pooled
    if pool is None or pooled is None:
        return {}
    without, learned = (None, None) if pooled.losses is None else pooled.losses
    found = {"rows": pool.total, "drawn": len(pool.features), "learned": pooled.learned}
    losses = {"log_loss_without": without, "log_loss_with": learned, "decided": pooled.decided}
    return {"unlabelled": found | losses | {"strangers": [[rest.name(row) for row in group] for group in strangers]}}


def list_more(
    data: Data, model: Model, solution: Solution, crossed: Crossfit, seed: int, deadline: float, progress: Progress
) -> dict[str, Any]:
    """Return what only the report tells: of each held-out row, of the columns, and of more labels."""
    names, held = name_columns(model), number_held(solution.problem)
    judged = (held >= 0).nonzero().flatten()
    parts = iter(range(3))

    def stage() -> Progress:
        """Return the progress of the next of the parts, of which each takes about as long."""
        part = next(parts)
        return lambda name, share: progress(name, (part + share) / 3)

    importance = list_importance(crossed, names, find_sizes(model), seed, deadline, stage())
    doubts = repeat_held(solution, crossed, deadline=deadline, progress=stage())
    learning = list_learning(solution, crossed, deadline, stage())
    places = [data.place.format(row) for row in data.rows]
    logits = predict_held(crossed)[held.clamp_min(0)]
    every = JudgedRows(logits, data.y, data.numbers, places, data.ids, names, data.cells)
    return list_sections(every.take(judged.tolist()), doubts[held[judged]], importance) | {"learning": learning}
