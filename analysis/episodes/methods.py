"""Few-shot methods on episodes of glyphs and of synthetic classes, also with imbalanced queries.

Each experiment is one `protonet.episodes` command. Missing encoders are meta-trained first, by protonet.episodes train.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from analysis.shared.journal import hash_sources, run_all
from analysis.shared.runner import BUILD, Report, StudyParser, run_python
from protonet.episodes.evaluation.statistics import Comparison
from protonet.episodes.methods import METHODS
from protonet.errors import raise_input_error
from protonet.ui.command_line import check_writable
from protonet.ui.text import format_table
from solution.pack import ROOT

ENCODERS = {"mlp": BUILD / "mlp.safetensors", "conv": BUILD / "conv.safetensors"}
#: Those that need nothing more and take less than a tenth of a second an episode.
EVALUATED = tuple(name for name, spec in METHODS.items() if not spec.slow and not spec.needs)
PLAIN = ("protonet", "protonet-cosine")
DIRICHLET = ["--imbalance", "2.0"]


class Experiment(NamedTuple):
    """One command ``python -m protonet.episodes``: a column of a table."""

    title: str
    arguments: tuple[str, ...]
    methods: tuple[str, ...]


def glyphs(title: str, backbone: str | None, *arguments: str, methods: Sequence[str] = EVALUATED) -> Experiment:
    """Specify an experiment on novel alphabets, with pixels or with an encoder's embedding."""
    encoder = () if backbone is None else ("--encoder", str(ENCODERS[backbone]))
    return Experiment(title, ("--dataset", "glyphs", *encoder, *arguments), tuple(methods))


ACCURACY = (
    glyphs("pixels, 1-shot", None),
    glyphs("MLP, 1-shot", "mlp"),
    glyphs("conv, 1-shot", "conv"),
    glyphs("pixels, 5-shot", None, "--shot", "5"),
    glyphs("conv, 5-shot", "conv", "--shot", "5"),
)
COMPARED = (*PLAIN, *(name for name in EVALUATED if METHODS[name].transductive))
WARPED = ("--dataset", "synthetic:warped", "--shot", "5")
#: Pairs of experiments, balanced and by Dirichlet shares, on the same numbers of queries.
UNBALANCED = (
    glyphs("conv", "conv", "--query", "4", methods=COMPARED),
    glyphs("conv, Dirichlet", "conv", "--query", "4", *DIRICHLET, methods=COMPARED),
    glyphs("pixels", None, "--query", "4", methods=COMPARED),
    glyphs("pixels, Dirichlet", None, "--query", "4", *DIRICHLET, methods=COMPARED),
    Experiment("warped, 5-shot", WARPED, COMPARED),
    Experiment("warped, Dirichlet", (*WARPED, *DIRICHLET), COMPARED),
)
TITLE = """# Few-shot experiments

5-way, seed 0, accuracy in percent with 95 % intervals over {n:,}
episodes; all methods of a column see the same episodes. Glyphs are characters of alphabets that the encoders never saw.

## Novel alphabets, 15 queries per class

Encoders are meta-trained on the base alphabets by `python -m protonet.episodes train --backbone mlp` (or `conv`).
`{uses}` also use the base classes; methods from `{first}` on are transductive.

"""
SECOND = """
## Queries that are not balanced

Queries by Dirichlet shares (concentration 2) against as many of each class: 1 shot and 4 queries per class on
average of glyphs (5 shots and 15 queries of the synthetic family). In the Dirichlet columns: the paired difference from
the better of the two plain prototypes, `{plain}`, and in bold what loses to it with p < 0.05 (Holm).

"""


def add_options(parser: StudyParser) -> None:
    """Add the number of episodes."""
    parser.add_int("--episodes", 2000, "episodes of each experiment", low=2)
    parser.add_names("--methods", EVALUATED)
    parser.add_state()


def run(options: argparse.Namespace) -> Report:
    """Meta-train the encoders, and execute all experiments."""
    check_writable("build", ROOT / BUILD, folder=True)
    for backbone, path in ENCODERS.items():
        train_encoder(backbone, ROOT / path)
    fixed = "--episodes", str(options.episodes), "--method"
    rows = EVALUATED if options.methods is None else tuple(options.methods)
    runs = [
        (
            experiment.title,
            (*experiment.arguments, *fixed, *(name for name in experiment.methods if name in {*rows, *PLAIN})),
        )
        for experiment in (*ACCURACY, *UNBALANCED)
    ]
    results = run_all(runs, run_experiment, options.state, lambda _: hash_sources("protonet"), unit="experiment")
    summaries = {title: summary for (title, _), summary in results.items()}
    return Report(summaries, tabulate(summaries, options.episodes, rows))


def train_encoder(backbone: str, path: Path) -> None:
    """Meta-train an encoder, or resume its training, unless its file is finished."""
    command = [sys.executable, "-m", "protonet.episodes", "train", "--backbone", backbone, "-o", str(path)]
    command += ["--resume"] if path.exists() else []
    if subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL).returncode:
        raise_input_error("encoders", "be made by protonet.episodes train", path, "Its message is above.")


def run_experiment(run: tuple[str, tuple[str, ...]]) -> dict[str, Any]:
    """Run a command, given its title and arguments; return its summary."""
    title, arguments = run
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "summary.json")
        exit_code, _, last = run_python("-m", "protonet.episodes", *arguments, "--json", str(path))
        if exit_code:
            raise_input_error(title, "run", last, "See that message.")
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def tabulate(summaries: Mapping[str, Mapping[str, Any]], n_episodes: int, rows: Sequence[str] = EVALUATED) -> str:
    """Format both tables of the selected methods as Markdown, given summaries by the experiments' titles."""

    def show(experiments: Sequence[Experiment], methods: Iterable[str]) -> str:
        header = ["method", *(experiment.title for experiment in experiments)]
        return format_table(
            header, [[name, *(_show(experiment, summaries, name) for experiment in experiments)] for name in methods]
        )

    first = TITLE.format(
        n=n_episodes,
        first=next(name for name, spec in METHODS.items() if spec.transductive),
        uses="`, `".join(name for name in EVALUATED if METHODS[name].uses_base),
    ) + show(ACCURACY, rows)
    return (
        first + SECOND.format(plain="`, `".join(PLAIN)) + show(UNBALANCED, [name for name in COMPARED if name in rows])
    )


def _show(experiment: Experiment, summaries: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Format a method's accuracy with its interval, in percent, and its loss from imbalance."""
    summary = summaries[experiment.title]
    loss = _show_loss(summary, name) if "--imbalance" in experiment.arguments else ""
    metrics = summary["methods"][name]
    return f"{100 * metrics['accuracy']:.2f} ±{100 * metrics['half_width_episodes']:.2f}{loss}"


def _show_loss(summary: Mapping[str, Any], name: str) -> str:
    """Format a method's paired difference from the better plain prototypes, in bold if it is significantly negative."""
    best = max(PLAIN, key=lambda plain: float(summary["methods"][plain]["accuracy"]))
    if name == best:
        return ""
    pair = next(Comparison(**p) for p in summary["comparisons"] if {p["first"], p["second"]} == {best, name})
    difference = round(100 * (pair.difference if pair.first == name else -pair.difference), 2) + 0.0  # no -0.00
    text = f"{difference:+.2f} ±{100 * pair.half_width_episodes:.2f}"
    return f" (**{text}**)" if difference < 0 and pair.p_holm_episodes < 0.05 else f" ({text})"
