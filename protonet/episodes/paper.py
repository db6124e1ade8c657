"""The command ``python -m protonet.episodes paper``: compare a new method with common methods, for a paper.

For each number of shots, it writes a JSON file with all predictions, and a state file to resume from. For all numbers
of shots together, it writes tables in Markdown and LaTeX, a figure, and an appendix that describes the runs.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from protonet._io import write_text
from protonet.datasets.dataset import SPLIT_SIDES
from protonet.episodes.evaluation import report, statistics
from protonet.episodes.evaluation.prepare import EvaluationPlan, make_plan
from protonet.episodes.evaluation.several import run_suite
from protonet.episodes.features.sources import load_source
from protonet.episodes.methods.choice import ChosenMethod, choose_method_grid
from protonet.episodes.methods.keywords import parse_source_section
from protonet.episodes.names import EVALUATE_PROG
from protonet.episodes.options import PaperOptions
from protonet.episodes.settings import EvaluationSettings
from protonet.errors import renamed_arguments
from protonet.ui.options import name_options_in_errors
from protonet.ui.text import format_table


def run_paper(options: PaperOptions) -> None:
    """Run the command ``paper``: evaluate methods, and write tables, figure and appendix for a paper."""
    others = [text for text in dict.fromkeys(options.method) if text != options.own]
    grids = [choose_method_grid(options.own, "own"), *(choose_method_grid(text, "method") for text in others)]
    new_method = grids[0][0] if len(grids[0]) == 1 else replace(grids[0][0], name=grids[0][0].method_key, keywords={})
    plans = [
        replace(
            make_plan(settings),
            methods=[grid[0] for grid in grids if len(grid) == 1],
            tuning_grids=[grid for grid in grids if len(grid) > 1],
            reference_method=new_method,
        )
        for settings in options.list_evaluations()
    ]
    folder, command_line = options.output, shlex.join(["python", "-m", EVALUATE_PROG, "paper", *options.words])
    paper = PaperWriter(folder, command_line, grids)
    # `paper` has no such options, and its evaluations have options that it lacks.
    with name_options_in_errors(EvaluationSettings), renamed_arguments(tune="own", state="output", resume="output"):
        run_suite(plans, paper.write, state=folder / "state.npz", resume=True, output_folder=folder)


@dataclass(frozen=True)
class PaperWriter:
    """Writes the tables, the figure and the appendix of a paper from its evaluations, one for each number of shots."""

    folder: Path  #: The folder to write to.
    command_line: str  #: The command line as text, for the appendix.
    method_grids: Sequence[Sequence[ChosenMethod]]
    """For each method its candidate settings; the new method is the first."""

    def write(self, plans: Sequence[EvaluationPlan], evaluations: Sequence[statistics.Evaluation]) -> None:
        """Print a table of results for each number of shots, and write tables, figure and appendix to files."""
        keys = {choice.name: choice.method_key for grid in self.method_grids for choice in grid if len(grid) > 1}
        summaries = adjust_summary_p_values([rename_methods(evaluation.summary, keys) for evaluation in evaluations])
        tables = []
        for plan, summary in zip(plans, summaries, strict=True):
            ((header, rows),) = report.format_summary_tables(summary)
            tables.append(([f"{plan.sampler.shot_title}-shot", *header[1:]], rows))
        n_pairs = sum(len(summary.comparisons) for summary in summaries)
        text = "\n".join(format_table(*table) for table in tables)
        text += f"\np-values are of paired t tests, adjusted by Holm for these {n_pairs} comparisons together.\n"
        text += f"{report.explain_intervals(summaries[0])}\n{report.explain_settings(summaries[0].methods.values())}"
        print(text, end="", flush=True)
        write_text(self.folder / "table.md", text)
        write_text(self.folder / "table.tex", "\n".join(report.format_latex_table(*table) for table in tables))
        titles = (f"{plan.sampler.shot_title}-shot" for plan in plans)
        report.write_accuracy_figure(self.folder / "figure.pdf", dict(zip(titles, summaries, strict=True)))
        paragraphs = self.describe_experiments(plans, evaluations, n_pairs)
        quoted = ((title, re.sub('"(.*?)"', r"``\1''", report.format_latex_cell(text))) for title, text in paragraphs)
        text = "\n".join(rf"\paragraph{{{title}.}} {text}" + "\n" for title, text in quoted)
        write_text(self.folder / "appendix.tex", text)
        for name in ("table.md", "table.tex", "figure.pdf", "appendix.tex"):
            print(f"wrote {self.folder / name}", file=sys.stderr)

    def describe_experiments(
        self, plans: Sequence[EvaluationPlan], evaluations: Sequence[statistics.Evaluation], n_pairs: int
    ) -> Iterator[tuple[str, str]]:
        """Yield the paragraphs of the appendix as pairs (title, text); ``n_pairs`` is the number of paired tests."""
        first, settings = evaluations[0], evaluations[0].summary.settings
        yield "Data", _describe_data(plans[0], first)
        queries = f"{settings['query']} of each class"
        if settings["imbalance"] is not None:
            total = settings["query"] * settings["way"][0]
            queries = f"{total} in all, shared by a Dirichlet distribution of concentration {settings['imbalance']:g}"
        shots = " and ".join(plan.sampler.shot_title for plan in plans)
        counts = " and ".join(f"{result.summary.n_episodes:,}" for result in evaluations)
        tuned = {str(tuning) for tuning in first.tuning}
        notes = "".join(f" {note}" for note in first.notes if note not in tuned)
        text = f"{settings['way'][0]} classes of the {settings['side']} side, {shots} support rows of each, queries: "
        text += f"{queries}. {counts} episodes, drawn by seed {settings['seed']}: all methods have the same episodes."
        yield "Episodes", text + notes
        methods = ". ".join(_describe_method(grid) for grid in self.method_grids)
        yield "Methods", f"{methods}. Settings that are not listed are the defaults of this software."
        if first.tuning:
            text = f"By the highest mean accuracy on the same {first.tuning[0].n_episodes:,} episodes of the kind "
            text += f"above, of {first.tuning[0].n_classes} validation classes, in %:"
            for plan, evaluation in zip(plans, evaluations, strict=True):
                worth = [rate for tuning in evaluation.tuning for rate in tuning.accuracies.items()]
                rates = ", ".join(f"{name} {100 * rate.mean:.2f}" for name, rate in worth)
                chosen = ", ".join(tuning.best_method for tuning in evaluation.tuning)
                text += f" {plan.sampler.shot_title}-shot: {rates}; evaluated were {chosen}."
            yield "Choice of settings", text
        text = "Accuracy is the mean over episodes of the share of right queries. "
        text += f"{report.explain_intervals(first.summary)} The jackknife leaves out one class at a time with all "
        text += "of its episodes. Differences are paired by episode; "
        text += f"p-values are of paired t tests, adjusted by Holm for all {n_pairs} comparisons together."
        yield "Statistics", text
        versions = ", ".join(f"{package} {version}" for package, version in first.versions.items())
        yield "Software", f"{versions}, on {settings.get('device', 'cpu')}. {self.command_line}"


def _describe_method(grid: Sequence[ChosenMethod]) -> str:
    """Describe a method, given its candidate settings: name, file hash of a plug-in, summary of docstring, source."""
    choice = grid[0]
    name = choice.name if len(grid) == 1 else choice.method_key
    origin = "" if choice.plugin_version is None else f"; {choice.plugin_version}"
    summary = (choice.spec.function.__doc__ or "").partition("\n")[0]
    return f"{name}{origin}: {summary} {parse_source_section(choice.spec.function)}".rstrip(" .")


def _describe_data(plan: EvaluationPlan, evaluation: statistics.Evaluation) -> str:
    """Describe the data set for the appendix: rows, classes, split, hash, encoder and normalisation."""
    settings = plan.settings
    data = load_source(plan.dataset_name, split_seed=settings.split_seed, image_size=settings.image_size)
    sides = Counter(data.sides or ())
    split = ", ".join(f"{sides[side]} {side}" for side in SPLIT_SIDES if sides[side]) or "without a split"
    drawn = "" if settings.split_seed is None else f", drawn by seed {settings.split_seed}"
    text = f"{plan.dataset_name}: {len(data.x):,} rows of {data.x.shape[1]} features in {data.num_classes} classes: "
    text += f"{split}{drawn}. SHA-256 of the evaluated rows, class by class: {evaluation.data_hash}."
    text += "" if settings.encoder is None else f" Embedded by {settings.encoder}."
    text += "" if settings.base is None else f" Base classes are those of {settings.base}."
    return text + ("" if settings.normalize == "none" else f" All rows were normalized by {settings.normalize}.")


def rename_methods(summary: statistics.EvaluationSummary, keys: Mapping[str, str]) -> statistics.EvaluationSummary:
    """Return a summary in which methods are renamed by ``keys``, which maps old to new names; other names stay.

    The result has only accuracies, settings and comparisons, no further measures.
    """
    methods = {
        keys.get(name, name): statistics.MethodSummary(method.accuracy, setting=method.setting)
        for name, method in summary.methods.items()
    }
    pairs = [
        replace(pair, first=keys.get(pair.first, pair.first), second=keys.get(pair.second, pair.second))
        for pair in summary.comparisons
    ]
    settings = {**summary.settings, "against": keys.get(summary.reference_method or "", summary.reference_method)}
    return statistics.EvaluationSummary(settings, summary.n_episodes, methods, pairs)


def adjust_summary_p_values(summaries: Sequence[statistics.EvaluationSummary]) -> list[statistics.EvaluationSummary]:
    """Adjust p-values by Holm's procedure for the comparisons of all summaries together; return new summaries."""
    pairs = [pair for summary in summaries for pair in summary.comparisons]
    over_classes = iter(statistics.adjust_p_values([pair.p_value_classes for pair in pairs]))
    over_episodes = iter(statistics.adjust_p_values([pair.p_value_episodes for pair in pairs]))

    def adjust_pair(pair: statistics.MethodComparison) -> statistics.MethodComparison:
        return replace(pair, p_holm_classes=next(over_classes), p_holm_episodes=next(over_episodes))

    return [replace(summary, comparisons=[adjust_pair(pair) for pair in summary.comparisons]) for summary in summaries]
