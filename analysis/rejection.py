"""Rows unlike every class: ``python -m analysis.rejection``.

Glyphs of 20 known characters at 5 shots, and of 20 unknown ones, from alphabets that nothing was developed on: how well
scores tell known from unknown rows, and whether the false-rejection rate that is asked for is the one that comes.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from solution.start import start

    sys.exit(start("analysis.rejection"))

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from analysis.options import write_results
from analysis.tables import format_mean
from protonet.commands.common import Parser, check_name, check_outputs, count, format_table, parse_whole, run_command
from protonet.datasets import Dataset, load_glyphs
from protonet.fit.baselines import score_lda
from protonet.fit.crossfit import crossfit, predict_held
from protonet.fit.search import EFFORTS
from protonet.fit.solver import solve_problem
from protonet.metrics import calibrate, find_threshold, score_known

PROG = "analysis.rejection"
#: Classes of each sort, labelled rows of a known one, and at most as many fresh rows of any.
CLASSES, SHOTS, FRESH = 20, 5, 10
RATES = (0.02, 0.05, 0.1, 0.2)
OURS = "ours: log-sum-exp of the logits"


class Rows(NamedTuple):
    """One split."""

    x: Tensor
    y: Tensor
    known: Tensor  # fresh rows of the same classes
    unknown: Tensor  # rows of other classes


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


def measure_auroc(known: Tensor, unknown: Tensor) -> float:
    """Return in percent how often a known row scores higher than an unknown one, ties counting half."""
    return 50 + 50 * float((known[:, None] - unknown).sign().mean(dtype=torch.float64))


@torch.no_grad()
def measure_split(rows: Rows, effort: str) -> tuple[dict[str, float], dict[float, float]]:
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
    scores = calibrate(predict_held(crossed), float(crossed.gain))
    rejected = {rate: float((known[OURS] <= find_threshold(scores, rate)).double().mean()) for rate in RATES}
    aurocs = {name: measure_auroc(known[name], unknown[name]) for name in known}
    return aurocs, {rate: 100 * share for rate, share in rejected.items()}


def command(arguments: Sequence[str] | None) -> None:
    """Measure every split and print, or write, the tables."""
    parser = Parser(PROG, "Measure how well rows of unknown classes are told from those of known ones.")
    parser.add_argument("--splits", default="12", metavar="N", help="number of splits (default: 12)")
    parser.add_argument("--effort", default="default", help=f"of {', '.join(EFFORTS)} (default: default)")
    parser.add_argument("--markdown", metavar="PATH", help="write the tables there, too")
    options = parser.parse_args(arguments)
    splits = parse_whole(PROG, "--splits", options.splits, low=2)
    effort = check_name(PROG, "--effort", options.effort, EFFORTS)
    outputs = check_outputs(PROG, options, ("markdown",))
    torch.set_num_threads(1)
    data = load_glyphs(copies=2)
    bar = tqdm(range(splits), desc=PROG, unit="split", file=sys.stderr)
    aurocs, rejected = zip(*(measure_split(draw_rows(data, seed), effort) for seed in bar), strict=True)
    rows = [[name, format_mean([split[name] for split in aurocs]), _format_lead(aurocs, name)] for name in aurocs[0]]
    rates = [[f"{100 * rate:g}", format_mean([split[rate] for split in rejected])] for rate in RATES]
    note = f"Glyphs, {CLASSES} known and {CLASSES} unknown characters of novel alphabets, {SHOTS} shots, "
    note += f"{count(splits, 'split')}, effort {effort}. Mean ± one standard error, percent."
    text = f"{format_table(['score', 'AUROC', 'ours less this'], rows)}\n"
    text += f"{format_table(['false rejections asked for', 'of fresh rows of known classes'], rates)}\n{note}\n"
    made = f"\nMade by `python -m {PROG} --splits {splits} --effort {effort}`.\n"
    write_results(outputs, rows, text + made)


def _format_lead(aurocs: Sequence[dict[str, float]], name: str) -> str:
    """Return by how much ours is ahead, in pairs."""
    return "" if name == OURS else format_mean([split[OURS] - split[name] for split in aurocs], sign=True)


def main() -> int:
    """Run the command line's command and return its exit code."""
    return run_command(PROG, command)
