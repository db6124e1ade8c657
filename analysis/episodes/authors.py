"""Our few-shot methods beside the code of their authors, on the same episodes.

``--authors DIR`` is a folder of their public repositories, each under its own name: those of ``PAIRS``, and for
MetaOptNet qpth, its solver. None of their code is ours to keep: what is not there is left out.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.episodes.methods import ENCODERS, train_encoder
from analysis.episodes.speed import make_data
from analysis.shared.journal import hash_sources, run_all
from analysis.shared.runner import BUILD, Report, StudyParser
from protonet._checks import refuse
from protonet.episodes.draws.batch import Base, gather_episodes, split_draw, summarize_base, take_from
from protonet.episodes.draws.numbered import Setting
from protonet.episodes.draws.sampler import Take
from protonet.episodes.evaluation.plan import EvaluationPlan, MethodsPlan
from protonet.episodes.evaluation.prepare import prepare
from protonet.episodes.evaluation.statistics import half_width
from protonet.episodes.features.sources import RowsPlan, load_data
from protonet.episodes.methods.choice import choose_method
from protonet.sampling import ClassIndex, index_classes
from protonet.ui.command_line import check_writable_folder
from protonet.ui.text import format_table
from solution.pack import ROOT

WAY, QUERIES = 5, 15  #: Some of their code has them written into it.
SHOTS = (1, 5)
SPREAD = 0.2  #: Of the classes' centres of the ReLU features, in standard deviations of their rows.
BASE_CLASSES = 40  #: Of the 64 classes of ReLU features; the others are novel.
WORKER = "analysis/episodes/authors_worker.py"
AT_ONCE = 150  #: Episodes that ours and theirs see together.
CALIBRATION = "distribution calibration"
MOST_BASE = 40  #: Base classes that distribution calibration sees: its code copies all covariances for each row.


class Pair(NamedTuple):
    """Their code, and the method of ours that it is compared with."""

    name: str  #: In `analysis.episodes.authors_worker.RUNS`.
    folder: str  #: The repository's.
    ours: str  #: As on the command line.
    share: float = 1.0  #: Of the episodes that are run, for what takes long.


PAIRS = (
    Pair("TIM-GD", "TIM", "tim", 0.1),
    Pair("TIM-ADM", "TIM", "tim-adm"),
    Pair("alpha-TIM", "Realistic_Transductive_Few_Shot", "alpha-tim", 0.1),
    Pair("BD-CSPN", "Realistic_Transductive_Few_Shot", "bd-cspn"),
    Pair("LaplacianShot", "LaplacianShot", "laplacian-shot"),
    Pair("PT-MAP", "Realistic_Transductive_Few_Shot", "pt-map"),
    Pair("PADDLE", "PADDLE", "paddle"),
    Pair("protoLP", "protoLP", "proto-lp"),
    Pair("alpha-AM", "AM", "alpha-am", 0.05),
    Pair("iLPC", "iLPC", "ilpc", 0.05),
    Pair("MetaOptNet", "MetaOptNet", "metaopt-svm", 0.5),
    Pair(CALIBRATION, "Few_Shot_Distribution_Calibration", "distribution-calibration", 0.05),
)
TITLE = f"""# Our methods beside their authors' code

{WAY}-way, {QUERIES} queries per class, {{n}} episodes (where others, in brackets), seed 0, float32. Accuracy of the
authors' code in percent, then ours less theirs on the same episodes, in points, with the half-width of its 95 %
interval, and in brackets the share of episodes in which both have as many right. relu: Gaussian classes of 640
features behind a ReLU; pixels and the conv embedding are of alphabets that no encoder saw. An empty place: their code
takes powers of negative features, which are no numbers. Distribution calibration samples at random, other numbers in
theirs than in ours, and sees {MOST_BASE} base classes; iLPC's code starts from random weights.

"""


class Source(NamedTuple):
    """Rows to draw episodes of."""

    take: Take  #: Returns rows by number.
    by_class: ClassIndex  #: Of the classes to draw from.
    base: Base  #: The base classes.


def load_relu() -> Source:
    """Make overlapping classes behind a ReLU."""
    x, labels = make_data(SPREAD)
    index = index_classes(labels)
    classes = torch.arange(len(index.size))
    base = summarize_base(take_from(x), index.take(classes[:BASE_CLASSES]))
    return Source(take_from(x), index.take(classes[BASE_CLASSES:]), base)


def load_glyphs(backbone: str | None) -> Source:
    """Load novel alphabets, as pixels or embedded."""
    encoder = None
    if backbone is not None:
        encoder = str(ROOT / ENCODERS[backbone])
        train_encoder(backbone, ROOT / ENCODERS[backbone])
    methods = [choose_method("bd-cspn")]  # which uses the base classes
    plan = EvaluationPlan(RowsPlan("glyphs", encoder=encoder), MethodsPlan(methods), make_setting(1), n_episodes=1)
    prepared = prepare(plan, *load_data(plan.rows, plan.sampler))
    assert prepared.base is not None  # glyphs have a split
    return Source(prepared.pool.take, prepared.pool.by_class, prepared.base)


KINDS: dict[str, Callable[[], Source]] = {
    "relu": cache(load_relu),
    "pixels": cache(lambda: load_glyphs(None)),
    "conv": cache(lambda: load_glyphs("conv")),
}


def make_setting(shot: int) -> Setting:
    """Return the kind of episodes."""
    return Setting(way=(WAY, WAY), shot=(shot, shot), n_query=QUERIES)


def add_options(parser: StudyParser) -> None:
    """Add where their code is, and how many episodes there are."""
    parser.add_argument("--authors", metavar="DIR", help="folder of the authors' repositories")
    parser.add_whole("--episodes", 300, "episodes of each comparison", low=20)
    parser.add_names("--only", [pair.name for pair in PAIRS])
    parser.add_names("--kinds", list(KINDS))
    parser.add_state()


def run(options: argparse.Namespace) -> Report:
    """Compare every pair whose repository is there, on each kind of features."""
    if options.authors is None or not Path(options.authors).is_dir():
        remedy = "Put their repositories there, each under its own name."
        refuse("--authors", "be a folder", options.authors, remedy)
    check_writable_folder("build", ROOT / BUILD)
    folder = Path(options.authors).absolute()
    chosen = [pair for pair in PAIRS if options.only is None or pair.name in options.only]
    there = [pair for pair in chosen if (folder / pair.folder).is_dir()]
    if not there:
        refuse("--authors", f"hold {', '.join(sorted({pair.folder for pair in chosen}))}", folder, "Name them so.")
    folders = dict.fromkeys(pair.folder for pair in there)
    kinds = list(KINDS) if options.kinds is None else options.kinds
    runs = [(each, kind, options.episodes) for kind in kinds for each in folders]
    code = hash_sources("protonet", "analysis/episodes")

    def do(run: tuple[str, str, int]) -> dict[str, list[list[float]]]:
        return compare(folder / run[0], [pair for pair in there if pair.folder == run[0]], *run[1:])

    results = run_all(runs, do, options.state, lambda _: code, unit="repository")
    found = {name: value for each in results.values() for name, value in each.items()}
    return Report(found, tabulate([pair.name for pair in there], kinds, found, options.episodes))


def compare(folder: Path, pairs: Sequence[Pair], kind: str, n_episodes: int) -> dict[str, list[list[float]]]:
    """Return the accuracies of our methods and of a repository's, episode by episode; NaN where theirs has none."""
    take, index, base = KINDS[kind]()
    base_rows, base_labels = torch.empty(0), torch.empty(0, dtype=torch.int64)
    if any(pair.name == CALIBRATION for pair in pairs):
        base = _limit(base)
        base_rows, base_labels = _take_all(base)
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        jobs: list[tuple[str, str, Path, Path]] = []
        for pair, shot in itertools.product(pairs, SHOTS):
            name = f"{pair.name}, {kind}, {shot}-shot"
            ours[name], theirs[name] = [], []
            method, total = choose_method(pair.ours), round(n_episodes * pair.share)
            draw = make_setting(shot).draw(index, seed=0, first=0, n_episodes=total)
            part = next(iter(split_draw(draw)))  # all are of one kind
            for first in range(0, total, AT_ONCE):
                some = part._replace(
                    **{each: getattr(part, each)[first : first + AT_ONCE] for each in part._fields[:-1]}
                )
                episodes = gather_episodes(take, some, base)
                with torch.no_grad():
                    right = method(episodes).argmax(dim=2) == some.query_labels
                ours[name] += right.double().mean(dim=1).tolist()
                path = Path(scratch, f"{len(jobs)}.npz")
                rows = interleave(episodes.support, some.support_labels), interleave(episodes.query, some.query_labels)
                np.savez(
                    path,
                    support=rows[0].numpy(),
                    query=rows[1].numpy(),
                    mean=base.mean.numpy(),
                    base=base_rows.numpy(),
                    base_labels=base_labels.numpy(),
                )
                jobs.append((name, pair.name, path, path.with_suffix(".npy")))
        command = [sys.executable, str(ROOT / WORKER), str(folder)]
        command += [str(each) for job in jobs for each in job[1:]]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, start_new_session=True)
        if ended.returncode:
            last = (ended.stderr.splitlines() or ["nothing on stderr"])[-1]
            refuse("--authors", f"hold {folder.name} as it was published", last, "See that message.")
        for name, _, _, out in jobs:
            theirs[name] += np.load(out).tolist()
    return {name: [ours[name], theirs[name]] for name in ours}


def _limit(base: Base) -> Base:
    """Return the first of the base classes, at most ``MOST_BASE``."""
    few = torch.arange(min(MOST_BASE, len(base.by_class.size)))
    return summarize_base(base.take, base.by_class.take(few))


def _take_all(base: Base) -> tuple[Tensor, Tensor]:
    """Return all rows (n, dim) float32 of base classes, and their classes (n,)."""
    starts, sizes = base.by_class.start.tolist(), base.by_class.size.tolist()
    rows = torch.cat([base.by_class.rows[start : start + size] for start, size in zip(starts, sizes, strict=True)])
    return base.take(rows).float().clone(), torch.arange(len(sizes)).repeat_interleave(base.by_class.size)


def interleave(rows: Tensor, labels: Tensor) -> Tensor:
    """Return rows (episodes, n, dim) in the order in which their code wants them: one of each class at a time."""
    by_class = labels.argsort(dim=1, stable=True)
    order = by_class.unflatten(1, (WAY, -1)).transpose(1, 2).flatten(1)
    return rows.gather(1, order[..., None].expand(-1, -1, rows.shape[2]))


def tabulate(
    names: Sequence[str], kinds: Sequence[str], found: Mapping[str, Sequence[Sequence[float]]], n_episodes: int
) -> str:
    """Return the table in Markdown."""
    columns = [f"{kind}, {shot}-shot" for kind in kinds for shot in SHOTS]
    rows = []
    for name in names:
        count = len(found[f"{name}, {columns[0]}"][0])
        rows.append([name if count == n_episodes else f"{name} ({count})"])
        rows[-1] += [_show(*found[f"{name}, {column}"]) for column in columns]
    return TITLE.format(n=n_episodes) + format_table(["method", *columns], rows)


def _show(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return their accuracy and the paired difference as text; nothing where theirs is no number."""
    a, b = (torch.tensor(each, dtype=torch.float64) for each in (ours, theirs))
    if bool(b.isnan().any()):
        return ""
    difference = 100 * (a - b)
    same = float(((a - b).abs() < 1e-6).double().mean())
    text = f"{difference.mean().round(decimals=2) + 0.0:+.2f} ±{half_width(difference):.2f}"
    return f"{100 * b.mean():.2f}, {text} ({100 * same:.0f} %)"
