"""Rows unlike every class: how well scores tell known from unknown rows.

Glyphs of 20 known characters at 5 shots, and of 20 unknown ones, from alphabets that nothing was developed on; and
whether the false-rejection rate that is asked for is the one that comes.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.shared.journal import run_all
from analysis.shared.runner import Report, StudyParser
from analysis.shared.tables import format_mean, subtract
from protonet.datasets import Dataset, load_glyphs
from protonet.fit.crossfit import crossfit, score_held, score_lda
from protonet.fit.search import EFFORTS
from protonet.fit.solver import solve_problem
from protonet.metrics import calibrate, find_auroc, find_threshold, score_known
from protonet.ui.command_line import check_name
from protonet.ui.text import count, format_table

#: Classes of each sort, labelled rows of a known one, and at most as many fresh rows of any.
CLASSES, SHOTS, FRESH = 20, 5, 10
RATES = (0.02, 0.05, 0.1, 0.2)
OURS = "ours: log-sum-exp of the logits"


class Rows(NamedTuple):
    """One split."""

    x: Tensor
    y: Tensor
    known: Tensor  #: Fresh rows of the same classes.
    unknown: Tensor  #: Rows of other classes.


def draw_rows(data: Dataset, seed: int) -> Rows:
    """Draw a split of the novel alphabets."""
    assert data.sides is not None
    generator = torch.Generator().manual_seed(seed)
    novel = torch.tensor([number for number, side in enumerate(data.sides) if side == "novel"])
    chosen = data.take_classes(novel[torch.randperm(len(novel), generator=generator)[: 2 * CLASSES]].tolist())
    order = torch.randperm(len(chosen.y), generator=generator)
    places = [order[chosen.y[order] == number] for number in range(2 * CLASSES)]
    shots = torch.cat([place[:SHOTS] for place in places[:CLASSES]])
    known = torch.cat([place[SHOTS : SHOTS + FRESH] for place in places[:CLASSES]])
    unknown = torch.cat([place[:FRESH] for place in places[CLASSES:]])
    return Rows(chosen.x[shots], chosen.y[shots], chosen.x[known], chosen.x[unknown])


@torch.no_grad()
def measure_split(rows: Rows, effort: str) -> tuple[dict[str, float], list[float]]:
    """Return each score's AUROC, and the rate of false rejections for each of ``RATES``, in percent."""
    solution = solve_problem([(rows.x, rows.y)], effort=effort)
    network = solution.network
    crossed = crossfit(solution)
    embedded = network.embed(rows.x)
    shift, spread = rows.x.mean(dim=0), rows.x.std(dim=0).clamp_min(1e-3)

    def nearest(x: Tensor, labelled: Tensor, k: int) -> Tensor:
        return -torch.cdist(x, labelled).topk(k, dim=1, largest=False).values[:, -1]

    def score(x: Tensor) -> dict[str, Tensor]:
        logits = network(x)
        unit, labelled = F.normalize(x, dim=1), F.normalize(rows.x, dim=1)
        return {
            OURS: score_known(logits),
            "largest softmax probability of the same network": logits.double().softmax(dim=1).amax(dim=1),
            "nearest row, our embedding": nearest(network.embed(x), embedded, 1),
            "nearest row, pixels": nearest(x, rows.x, 1),
            "nearest row, pixels of unit norm": nearest(unit, labelled, 1),
            "5th nearest row, pixels": nearest(x, rows.x, 5),
            "nearest row, standardised pixels": nearest((x - shift) / spread, (rows.x - shift) / spread, 1),
            "Mahalanobis distance to LDA": score_lda(rows.x, rows.y, x, CLASSES).amax(dim=1),
        }

    known, unknown = score(rows.known), score(rows.unknown)
    scores = calibrate(score_held(crossed), float(crossed.offset))
    rejected = [100 * float((known[OURS] <= find_threshold(scores, rate)).double().mean()) for rate in RATES]
    return {name: 100 * find_auroc(known[name], unknown[name]) for name in known}, rejected


def add_options(parser: StudyParser) -> None:
    """Add how many splits there are, and the solver's effort."""
    parser.add_whole("--splits", 12, "number of splits", low=2)
    parser.add("--effort", "default", f"of {', '.join(EFFORTS)}", partial(check_name, known=EFFORTS))
    parser.add_state()


def run(options: argparse.Namespace) -> Report:
    """Measure every split."""
    data = load_glyphs(copies=2)
    runs = [(options.effort, seed) for seed in range(options.splits)]
    results = run_all(runs, lambda run: measure_split(draw_rows(data, run[1]), run[0]), options.state, unit="split")
    aurocs, rejected = zip(*results.values(), strict=True)
    values = {name: [split[name] for split in aurocs] for name in aurocs[0]}
    leads = {name: [] if name == OURS else subtract(values[OURS], own) for name, own in values.items()}
    rows = [[name, format_mean(own), format_mean(leads[name], sign=True)] for name, own in values.items()]
    rates = [[f"{100 * rate:g}", format_mean(shares)] for rate, *shares in zip(RATES, *rejected, strict=True)]
    note = f"Glyphs, {CLASSES} known and {CLASSES} unknown characters of novel alphabets, {SHOTS} shots, "
    note += f"{count(options.splits, 'split')}, effort {options.effort}. Mean ± one standard error, percent."
    first = format_table(["score", "AUROC", "ours less this"], rows)
    second = format_table(["false rejections asked for", "of fresh rows of known classes"], rates)
    return Report(rows, f"{first}\n{second}\n{note}\n")
