"""``python -m protonet fit``: learn the classes of a table, tell how well, and keep the model in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from protonet._checks import fail
from protonet.commands.common import check_name, count, parse_whole
from protonet.commands.models import (
    MODELS,
    PLOTS,
    check_packages,
    check_paths,
    keep_crossfit,
    make_parser,
    show_progress,
)
from protonet.commands.plots import draw_plot
from protonet.commands.summary import describe_views, format_baselines, format_losses, format_pairs, format_views
from protonet.files import Model, save_model
from protonet.fit.crossfit import Crossfit, crossfit, predict_baselines, predict_held
from protonet.fit.search import EFFORTS
from protonet.fit.solver import Solution, solve_problem
from protonet.metrics import measure
from protonet.tables.table import Wanted, read_table

PROG = "protonet fit"
#: Of the time, what the choice of views takes; the rest is fitting it again without each fold.
SOLVING = 0.6


def run(arguments: Sequence[str] | None) -> None:
    """Fit as the arguments say, print a summary, and write the model if there is a path for it.

    Raises:
        MissingPackageError: A package that an option needs is missing.
        KeyboardInterrupt: After Ctrl-C. What stood at the path of the model stands there still; but where the model
            was ready and only its cross-validation was not, it is written without.
        InputError: Arguments or a table that do not fit.
    """
    parser = make_parser(PROG, "Learn the classes of a table, and tell how well.", label="label")
    parser.add_argument("-o", "--output", metavar="FILE", help="the model, .safetensors; without it, only the summary")
    parser.add_argument("--effort", default="default", help="fast, default or best")
    parser.add_argument("--seed", default="0", metavar="N", help="of folds, first weights and episodes (default 0)")
    parser.add_argument("--plot", metavar="FILE", help="a plot, .png, .pdf or .svg: the embedding and the confusion")
    options = parser.parse_args(arguments)
    check_name(PROG, "--effort", options.effort, EFFORTS)
    seed = parse_whole(PROG, "--seed", options.seed, low=0)
    outputs = check_paths(PROG, options, {"output": MODELS, "plot": PLOTS}, [options.table, options.labels])
    check_packages(PROG, ["safetensors"] * ("output" in outputs))
    check_packages(PROG, ["matplotlib"] * ("plot" in outputs), 'pip install "protonet[analysis]"')

    label = options.label or "label"
    table, (rows, labels) = read_table(
        PROG, Path(options.table), Wanted(label), options.labels and Path(options.labels)
    )
    names, numbers = np.unique(labels, return_inverse=True)
    classes = tuple(names.tolist() if names.dtype.kind in "iu" else map(str, names.tolist()))
    if len(classes) < 2:
        fail(PROG, "path", "have at least 2 classes", f"{classes[0]!r} alone in {options.table}", "Add another one.")
    x, y = torch.from_numpy(rows), torch.from_numpy(numbers)
    shots = torch.bincount(y).tolist()
    metadata: dict[str, Any] = {"label": label, "effort": options.effort, "seed": seed, "samples": shots}

    def make_model(solution: Solution) -> Model:
        views = {"views": describe_views(solution.choice)}
        return Model(solution.network, classes, table.columns, metadata | views, {})

    def keep(solution: Solution) -> str:
        save_model(outputs["output"], make_model(solution))
        return f"{outputs['output']} is kept, without cross-validation"

    solution, crossed = learn(x, y, options.effort, seed, keep if "output" in outputs else None)
    model = keep_crossfit(make_model(solution), crossed)
    if "output" in outputs:
        save_model(outputs["output"], model)
    if "plot" in outputs:
        draw(outputs["plot"], crossed, x, y, classes)
    sizes = count(len(classes), "class"), count(len(x), "sample"), count(x.shape[1], "feature")
    several = "" if min(shots) == max(shots) else f" to {max(shots)}"
    print(f"{Path(options.table).name}: {', '.join(sizes)}, {min(shots)}{several} per class\n")
    print(format_views(model.metadata["views"]))
    print(report(crossed, predict_baselines(solution.problem), classes), end="")
    if "output" in outputs:
        print(f"{outputs['output']}: {outputs['output'].stat().st_size / 1e6:.1f} MB")


def learn(
    x: Tensor, y: Tensor, effort: str, seed: int, keep: Callable[[Solution], str] | None
) -> tuple[Solution, Crossfit]:
    """Solve, and fit what was chosen again without each fold, behind a progress bar.

    Args:
        x: (n, dim) float32.
        y: (n,) int64.
        effort: As in `protonet.solve`.
        seed: The same.
        keep: After Ctrl-C in the second half, it is given the solution, and tells what it did with it.

    Raises:
        KeyboardInterrupt: After Ctrl-C.
        InputError: As in `protonet.solve`.
    """
    with show_progress() as show:
        solution = solve_problem(
            [(x, y)], effort=effort, seed=seed, progress=lambda stage, share: show(stage, SOLVING * share)
        )
        try:
            crossed = crossfit(solution, progress=lambda stage, share: show(stage, SOLVING + (1 - SOLVING) * share))
        except KeyboardInterrupt:
            if keep is None:
                raise
            raise KeyboardInterrupt(f"stopped; {keep(solution)}") from None
    return solution, crossed


def draw(path: Path, crossed: Crossfit, x: Tensor, y: Tensor, classes: Sequence[str | int]) -> None:
    """Draw the rows that were held out, or, where there are none, those (n, dim) that the model was fitted to."""
    if len(crossed.labels):
        draw_plot(path, predict_held(crossed), crossed.labels, classes, "rows held out")
    else:
        with torch.no_grad():
            draw_plot(path, crossed.whole(x), y, classes, "the rows that it was fitted to")


def report(crossed: Crossfit, baselines: Mapping[str, Tensor], classes: Sequence[str | int]) -> str:
    """Return what the held-out rows say of a model beside its baselines' scores of them."""
    if not len(crossed.labels):
        return "no class has two samples: none could be held out to judge by\n"
    logits = predict_held(crossed)
    metrics = measure(logits, crossed.labels)
    held = f"{count(len(logits), 'row')} in {count(len(crossed.folds), 'fold')}, each judged by a fit without its fold"
    return "".join(
        [
            format_baselines(logits, crossed.labels, baselines),
            f"{held}: {format_losses(metrics)}",
            format_pairs(metrics.confusion, classes),
        ]
    )
