"""Rank variants of an optimizer on the visible and tuning workloads, at 1,000 steps on one seed.

FILE is a Python file as --optimizer of optimizer-bench takes it. FILE:PRECONDITIONER.max_length=256,SEARCH.gain=0.02 is
the same file with other fields of the frozen dataclasses that are its constants. By default only the cheap workloads
run.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import spearmanr

from analysis.optimizer_bench import loading
from analysis.optimizer_bench.bench import Grid, add_grid, check_baselines, load_candidate
from analysis.optimizer_bench.runs import Candidate, train_all
from analysis.optimizer_bench.score import Row, average_by
from analysis.optimizer_bench.tune import check_steps
from analysis.optimizer_bench.workloads import FAMILY, ROLE
from analysis.shared.runner import Report, StudyParser
from protonet._io import write_atomically
from protonet.errors import raise_input_error
from protonet.ui.command_line import check_name
from protonet.ui.text import format_table

#: One or two workloads of each visible or tuning family: those with the shortest runs, 50 s in total on two cores with
#: the shared optimizer, which ends early where it is fast.
CHEAP = (
    *("gpt", "recommender", "vae", "gnn", "prototype", "syntax", "spiky", "chain", "denoiser", "ranking", "words"),
    *("loud", "contrast", "tastes", "teacher", "petals", "surface", "spring", "kinds"),
)
NOTE = """
Geometric means of AdamW's steps over the variant's, as of optimizer-bench, over workloads and horizons. Left out: for
each family, the variant that is best on all others, and what it gets on that family; the mean over all workloads is an
honest estimate of what the choice is worth.
"""


class Choice(NamedTuple):
    """The variant that would be chosen without a family."""

    family: str
    variant: str  #: The best one on all other families.
    ratio: float  #: Its geometric mean on the family.
    best: float  #: The largest geometric mean of any variant there.


def add_options(parser: StudyParser) -> None:
    """Add the variants and workloads."""
    parser.add_argument("variants", nargs="+", metavar="FILE[:NAME.field=value,...]", help="optimizers to rank")
    parser.add_argument("--config", metavar="FILE", help="config of all of them, a JSON object (default: none)")
    parser.add_argument("--all", action="store_true", help="run every workload, and rate the cheap ones' ranking")
    parser.add("--steps", "1000", "horizons, with commas", check_steps)
    add_grid(parser, "0")
    parser.add_state("optimizer_bench")


def run(options: argparse.Namespace) -> Report:
    """Run every variant, rank them, and estimate the value of the choice."""
    folder = options.state.parent / "optimizer_variants"
    variants = {
        name: make_variant(text, options.config, folder) for name, text in name_variants(options.variants).items()
    }
    names = [name for name, role in ROLE.items() if role in {"visible", "tuning"} and (options.all or name in CHEAP)]
    baselines = loading.read_baselines(Path(options.baselines))
    grid = Grid(dict.fromkeys(names), baselines, options.seeds, sorted(options.steps))
    check_baselines(grid)
    optimizers_of = {name: grid.set_horizons(candidate) for name, candidate in variants.items()}
    runs = [run for optimizers in optimizers_of.values() for run in grid.list_runs(optimizers)]
    curves = train_all(runs, options.state, options.jobs)
    rows = {name: grid.score(optimizers, curves) for name, optimizers in optimizers_of.items()}
    ratios = {name: average_by(result, "workload") for name, result in rows.items()}
    choices = leave_out(ratios, FAMILY)
    text = f"{tabulate(rows)}\n{tabulate_choices(choices, ratios)}"
    result: dict[str, Any] = {"rows": rows, "choices": [choice._asdict() for choice in choices]}
    if options.all:
        result["rank_correlation"] = correlate(ratios, CHEAP)
        correlation = (
            "too few variants differ" if result["rank_correlation"] is None else f"{result['rank_correlation']:.2f}"
        )
        cheap = sum(name in CHEAP for name in names)
        text += f"\nSpearman's rank correlation of the {cheap} cheap workloads with all {len(names)}: {correlation}.\n"
    return Report(result, f"{text}{NOTE}")


def make_variant(text: str, config_file: str | None, folder: Path) -> Candidate:
    """Make a variant of an optimizer; changed constants are written to a file, named after the change."""
    name, _, fields = text.partition(":")
    path = Path(name)
    candidate = load_candidate(path, config_file)  # raises an error that names the file
    if not fields:
        return candidate
    source = change_constants(path, fields)
    made = folder / f"{path.stem}_{hashlib.sha256(source.encode()).hexdigest()[:12]}.py"
    folder.mkdir(parents=True, exist_ok=True)
    if not made.exists():
        write_atomically(made, lambda file: file.write(source.encode()))
    return load_candidate(made, config_file)


def name_variants(texts: Sequence[str]) -> dict[str, str]:
    """Name variants by their files' names, without folders if these are unique."""
    texts = list(dict.fromkeys(texts))
    parts = [text.partition(":") for text in texts]
    short = [" ".join(filter(None, (Path(file).stem, fields))) for file, _, fields in parts]
    return dict(zip(short if len(set(short)) == len(short) else texts, texts, strict=True))


def change_constants(path: Path, fields: str) -> str:
    """Append assignments to a module's source that change fields of its dataclass constants.

    Args:
        path: Of the module, which can be imported.
        fields: As in ``PRECONDITIONER.max_length=256,SEARCH.gain=0.02``.
    """
    module, source = loading.load_python("--optimizer", path.resolve()), path.read_text(encoding="utf-8")
    constants = {
        name: value for name, value in vars(module).items() if dataclasses.is_dataclass(value) and name.isupper()
    }
    changed: dict[str, dict[str, Any]] = {}
    for part in re.split(r",(?=\s*\w+\.\w+=)", fields):
        match = re.fullmatch(r"\s*(\w+)\.(\w+)=(.+)", part)
        if match is None:
            raise_input_error(
                "variants", "be FILE:NAME.field=value,...", repr(part), "Write such as PRECONDITIONER.max_length=256."
            )
        name, field, value = match.groups()
        check_name("variants", name, constants)
        check_name("variants", field, [known.name for known in dataclasses.fields(constants[name])])
        try:
            changed.setdefault(name, {})[field] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise_input_error(
                "variants", f"have a literal as {name}.{field}", repr(value), "Write a number or a tuple."
            )
    for name, values in changed.items():
        given = ", ".join(f"{field}={value!r}" for field, value in values.items())
        source += f'\n{name} = __import__("dataclasses").replace({name}, {given})\n'
    return source


def average(ratios: Mapping[str, float], names: Collection[str]) -> float:
    """Compute the geometric mean of the ratios of workloads."""
    return statistics.geometric_mean(ratios[name] for name in ratios if name in names)


def leave_out(ratios: Mapping[str, Mapping[str, float]], families: Mapping[str, str]) -> list[Choice]:
    """Choose the best variant without each family.

    Args:
        ratios: Of variants, by the workload.
        families: Of the workloads.
    """
    names = list(next(iter(ratios.values())))
    choices = []
    for family in dict.fromkeys(families[name] for name in names):
        members = {name for name in names if families[name] == family}
        others = {name for name in names if name not in members} or members
        chosen = max(ratios, key=lambda variant: average(ratios[variant], others))
        best = max(average(ratio, members) for ratio in ratios.values())
        choices.append(Choice(family, chosen, average(ratios[chosen], members), best))
    return choices


def estimate(choices: Sequence[Choice], families: Mapping[str, str], names: Collection[str]) -> float:
    """Compute the geometric mean over workloads of the variants that were chosen without their families."""
    ratios = {choice.family: choice.ratio for choice in choices}
    return statistics.geometric_mean(ratios[families[name]] for name in names)


def correlate(ratios: Mapping[str, Mapping[str, float]], names: Collection[str]) -> float | None:
    """Compute the rank correlation of variants between some and all workloads; None if too few differ."""
    some = [average(ratio, names) for ratio in ratios.values()]
    every = [average(ratio, ratio) for ratio in ratios.values()]
    if len(set(some)) < 3 or len(set(every)) < 3:
        return None
    return float(spearmanr(some, every).statistic)


def tabulate(rows: Mapping[str, Sequence[Row]]) -> str:
    """Format a line for each variant, the best first."""
    means = {name: average(ratio := average_by(result, "workload"), ratio) for name, result in rows.items()}
    lines = []
    for name in sorted(rows, key=lambda variant: -means[variant]):
        horizons, families = (average_by(rows[name], key) for key in ("steps", "family"))
        worst = min(rows[name], key=lambda row: float(row["ratio"]))
        diverged = dict.fromkeys(row["workload"] for row in rows[name] if any(row["diverged"]))
        line = [name, f"{means[name]:.3f}", *(f"{mean:.3f}" for mean in horizons.values())]
        line += [f"{worst['workload']} {worst['ratio']:.2f}", ", ".join(diverged) or "none"]
        lines.append([*line, *(f"{mean:.2f}" for mean in families.values())])
    first = next(iter(rows.values()))
    headings = [f"{steps:,} steps" for steps in average_by(first, "steps")]
    return format_table(["variant", "mean", *headings, "worst", "not finite", *average_by(first, "family")], lines)


def tabulate_choices(choices: Sequence[Choice], ratios: Mapping[str, Mapping[str, float]]) -> str:
    """Format the choices without each family, and the estimated value of the choice."""
    lines = [[choice.family, choice.variant, f"{choice.ratio:.2f}", f"{choice.best:.2f}"] for choice in choices]
    best = max(ratios, key=lambda variant: average(ratios[variant], ratios[variant]))
    text = f"Best on all: {best}, {average(ratios[best], ratios[best]):.3f}. "
    text += f"Chosen without the family that it is judged on: {estimate(choices, FAMILY, ratios[best]):.3f}."
    return f"{format_table(['left out', 'best on the others', 'ratio', 'best there'], lines)}\n{text}\n"
