"""Few-shot methods on episodes of glyphs and of synthetic classes: ``python -m analysis.episodes``.

Each experiment is one `protonet.episodes` command. Encoders are meta-trained first, by ``protonet.episodes train``,
where their file is not there yet.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from solution.start import start

    sys.exit(start("analysis.episodes"))

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from analysis.journal import append_journal, hash_sources, read_journal
from analysis.options import write_results
from protonet._checks import fail
from protonet.commands.common import (
    Parser,
    check_outputs,
    check_writable_folder,
    format_table,
    parse_whole,
    run_command,
)
from protonet.episodes.methods import METHODS, TRANSDUCTIVE
from protonet.episodes.statistics import Comparison
from solution.pack import ROOT

PROG = "analysis.episodes"
BUILD = Path("build")
STATE = BUILD / "episodes.jsonl"
ENCODERS = {"mlp": BUILD / "mlp.safetensors", "conv": BUILD / "conv.safetensors"}
PLAIN = ("protonet", "protonet-cosine")
DIRICHLET = ["--imbalance", "2.0"]


class Experiment(NamedTuple):
    """One command: a column of a table."""

    title: str
    arguments: tuple[str, ...]
    methods: tuple[str, ...]

    def command(self, n_episodes: int) -> list[str]:
        """Return the arguments of ``python -m protonet.episodes``."""
        return [*self.arguments, "--episodes", str(n_episodes), "--method", *self.methods]


def glyphs(title: str, backbone: str | None, *arguments: str, methods: Sequence[str] = tuple(METHODS)) -> Experiment:
    """Return an experiment on novel alphabets, of pixels or of an encoder's embedding."""
    encoder = () if backbone is None else ("--encoder", str(ENCODERS[backbone]))
    return Experiment(title, ("--dataset", "glyphs", *encoder, *arguments), tuple(methods))


ACCURACY = (
    glyphs("pixels, 1-shot", None),
    glyphs("MLP, 1-shot", "mlp"),
    glyphs("conv, 1-shot", "conv"),
    glyphs("pixels, 5-shot", None, "--shot", "5"),
    glyphs("conv, 5-shot", "conv", "--shot", "5"),
)
RIVALS = (*PLAIN, *TRANSDUCTIVE)
WARPED = ("--dataset", "synthetic:warped", "--shot", "5")
#: Pairs of experiments, balanced and by Dirichlet shares, on the same numbers of queries.
UNBALANCED = (
    glyphs("conv", "conv", "--query", "4", methods=RIVALS),
    glyphs("conv, Dirichlet", "conv", "--query", "4", *DIRICHLET, methods=RIVALS),
    glyphs("pixels", None, "--query", "4", methods=RIVALS),
    glyphs("pixels, Dirichlet", None, "--query", "4", *DIRICHLET, methods=RIVALS),
    Experiment("warped, 5-shot", WARPED, RIVALS),
    Experiment("warped, Dirichlet", (*WARPED, *DIRICHLET), RIVALS),
)
TITLE = """# Few-shot experiments

Made by `python -m analysis.episodes --episodes {n}`. 5-way, seed 0, accuracy in percent with 95 % intervals over {n:,}
episodes; all methods of a column see the same episodes. Glyphs are characters of alphabets that the encoders never saw.

## Novel alphabets, 15 queries a class

Encoders are meta-trained on the base alphabets by `python -m protonet.episodes train --backbone mlp` (or `conv`).
`simpleshot` and `distribution-calibration` also use the base classes; methods from `{first}` on are transductive.

"""
SECOND = """
## Queries that are not balanced

Queries by Dirichlet shares (concentration 2) against as many of each class: 1 shot and 4 queries a class on
average of glyphs (5 shots and 15 queries of the synthetic family). In the Dirichlet columns: the paired difference from
the better of the two plain prototypes, `{plain}`, and in bold what loses to it with p < 0.05 (Holm).

"""


def train_encoder(backbone: str, path: Path) -> None:
    """Meta-train an encoder, or continue to, unless its file is finished."""
    command = [sys.executable, "-m", "protonet.episodes", "train", "--backbone", backbone, "-o", str(path)]
    command += ["--resume"] if path.exists() else []
    if subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL).returncode:
        fail(PROG, "encoders", "be made by protonet.episodes train", path, "Its message is above.")


def run_experiment(experiment: Experiment, n_episodes: int) -> dict[str, Any]:
    """Return the summary of one command."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "summary.json")
        command = [sys.executable, "-m", "protonet.episodes", *experiment.command(n_episodes), "--json", str(path)]
        ended = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, start_new_session=True)
        if ended.returncode:
            got = (ended.stderr.splitlines() or ["nothing on stderr"])[-1]
            fail(PROG, experiment.title, "run", got, "See that message.")
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def tabulate(summaries: Mapping[str, Mapping[str, Any]], n_episodes: int) -> str:
    """Return both tables in Markdown; summaries by the experiments' titles."""
    rows = [[name, *(_show(summaries[each.title], name) for each in ACCURACY)] for name in METHODS]
    text = TITLE.format(n=n_episodes, first=next(iter(TRANSDUCTIVE)))
    text += format_table(["method", *(each.title for each in ACCURACY)], rows)
    rows = []
    for name in RIVALS:
        row = [name]
        for each in UNBALANCED:
            summary = summaries[each.title]
            row.append(_show(summary, name))
            if "--imbalance" in each.arguments:
                row[-1] += _show_loss(summary, name)
        rows.append(row)
    text += SECOND.format(plain="`, `".join(PLAIN))
    return text + format_table(["method", *(each.title for each in UNBALANCED)], rows)


def _show(summary: Mapping[str, Any], name: str) -> str:
    """Return a method's accuracy with its interval, in percent."""
    own = summary["methods"][name]
    return f"{100 * own['accuracy']:.2f} ±{100 * own['half_width']:.2f}"


def _show_loss(summary: Mapping[str, Any], name: str) -> str:
    """Return a method's paired difference from the better plain prototypes, in bold if it loses to them for certain."""
    best = max(PLAIN, key=lambda plain: float(summary["methods"][plain]["accuracy"]))
    if name == best:
        return ""
    pair = next(Comparison(**p) for p in summary["comparisons"] if {p["first"], p["second"]} == {best, name})
    difference = round(100 * (pair.difference if pair.first == name else -pair.difference), 2) + 0.0  # no -0.00
    text = f"{difference:+.2f} ±{100 * pair.half_width:.2f}"
    return f" (**{text}**)" if difference < 0 and pair.p_holm < 0.05 else f" ({text})"


def _run(arguments: Sequence[str] | None) -> None:
    """Run what the journal does not have, and print the tables."""
    parser = Parser(PROG, "Compare few-shot methods on episodes; an interrupted study continues.")
    parser.add_argument("--episodes", default="2000", metavar="N", help="episodes of each experiment (default 2000)")
    parser.add_argument("--state", default=str(STATE), metavar="PATH", help=f"journal (default: {STATE})")
    parser.add_argument("--json", metavar="PATH", help="write the summaries there")
    parser.add_argument("--markdown", metavar="PATH", help="write the tables there, too")
    options = parser.parse_args(arguments)
    n_episodes = parse_whole(PROG, "--episodes", options.episodes, low=2)
    outputs = check_outputs(PROG, options, ("state", "json", "markdown"))
    check_writable_folder(PROG, "build", ROOT / BUILD)
    sources = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protonet").rglob("*.py"))
    code = hash_sources(*sources)
    for backbone, path in ENCODERS.items():
        train_encoder(backbone, ROOT / path)
    done = {
        json.dumps(entry["command"]): entry["summary"]
        for entry in read_journal(outputs["state"])
        if entry.get("code") == code
    }
    summaries: dict[str, Any] = {}
    with tqdm([*ACCURACY, *UNBALANCED], unit="experiment", dynamic_ncols=True) as bar:
        for experiment in bar:
            bar.set_postfix_str(experiment.title)
            command = experiment.command(n_episodes)
            if json.dumps(command) not in done:
                done[json.dumps(command)] = run_experiment(experiment, n_episodes)
                entry = {"command": command, "code": code, "summary": done[json.dumps(command)]}
                append_journal(outputs["state"], entry)
            summaries[experiment.title] = done[json.dumps(command)]
    write_results(outputs, summaries, tabulate(summaries, n_episodes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(PROG, _run, arguments)
