"""Our few-shot methods beside the code of their authors, on the same episodes.

``--authors DIR`` is a folder of their public repositories, each under its own name: those of ``PAIRS``, and for
MetaOptNet and DeepEMD qpth, a solver that both import. None of their code is ours to keep: what is not there is left
out. Methods that look at the places of maps need a file of ``extract --maps``, and DeepEMD's code OpenCV.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.episodes.authors_worker import FEW, NOTHING
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
WORKER = "analysis.episodes.authors_worker"
AT_ONCE = 150  #: Episodes that ours and theirs see together,
FEATURES_AT_ONCE = 2**24  #: as far as they have no more features than these.
CALIBRATION = "distribution calibration"
MOST_BASE = 40  #: Base classes that distribution calibration sees: its code copies all covariances for each row.


class Pair(NamedTuple):
    """Their code, and the method of ours that it is compared with."""

    name: str  #: In `analysis.episodes.authors_worker.RUNS`.
    folder: str  #: The repository's.
    ours: str  #: As on the command line.
    share: float = 1.0  #: Of the episodes that are run, for what takes long.
    n_unlabelled: int = 0  #: Rows of each class, and of as many distractors.
    maps: bool = False  #: Looks at the places of maps, where all others look at features.


PAIRS = (
    Pair("TIM-GD", "TIM", "tim", 0.1),
    Pair("TIM-ADM", "TIM", "tim-adm"),
    Pair("alpha-TIM", "Realistic_Transductive_Few_Shot", "alpha-tim", 0.1),
    Pair("BD-CSPN", "Realistic_Transductive_Few_Shot", "bd-cspn"),
    Pair("LaplacianShot", "LaplacianShot", "laplacian-shot"),
    Pair("PT-MAP", "Realistic_Transductive_Few_Shot", "pt-map"),
    Pair("PADDLE", "PADDLE", "paddle"),
    Pair("protoLP", "protoLP", "proto-lp"),
    Pair("alpha-AM", "AM", "alpha-am", 0.4),
    Pair("iLPC", "iLPC", "ilpc", 0.05),
    Pair("OSLO", "few-shot-open-set", "oslo"),
    Pair("MetaOptNet", "MetaOptNet", "metaopt-svm"),
    Pair(CALIBRATION, "Few_Shot_Distribution_Calibration", "distribution-calibration", 0.2),
    Pair("semi-supervised k-means", "few-shot-ssl-public", "semi-kmeans", n_unlabelled=5),
    Pair("k-means with distractors", "few-shot-ssl-public", "semi-kmeans-cluster:centred=false", n_unlabelled=5),
    Pair("k-means with masks", "few-shot-ssl-public", "semi-kmeans-masked", n_unlabelled=5),
    Pair("FRN", "FRN", "frn", 0.2, maps=True),
    Pair("CrossTransformers", "meta-dataset", "ctx", 0.2, maps=True),
    Pair("DeepBDC", "DeepBDC", "deepbdc", 0.1, maps=True),
    Pair("DeepEMD", "DeepEMD", "deepemd", 0.1, maps=True),
)
TITLE = f"""# Our methods beside their authors' code

{WAY}-way, {QUERIES} queries per class, {{n}} episodes (where others, in brackets), seed 0, float32. Accuracy of the
authors' code in percent, then ours less theirs on the same episodes, in points, with the half-width of its 95 %
interval, and in brackets the share of queries that both take for the same class. Where more follows, theirs was run in
another way as well: protoLP nearer to convergence, alpha-AM in double precision and distribution calibration with
another seed (the first {FEW} episodes), masks that count once, as in the paper. It is the share of theirs with that,
and of ours with that. An empty place: their code takes powers of negative features, which are no numbers.

{{kinds}}

Distribution calibration sees {MOST_BASE} base classes; iLPC's code starts from random weights; semi-supervised k-means
has 10 queries per class, and 5 unlabelled rows of these and of 5 other classes, and the numbers that it would learn are
those of ours.

"""
#: Of features, for the title.
MADE = {
    "relu": "relu: Gaussian classes of 640 features behind a ReLU.",
    "pixels": "pixels: of alphabets that no encoder saw.",
    "conv": "conv: these, embedded.",
}


class Source(NamedTuple):
    """Rows to draw episodes of."""

    take: Take  #: Returns rows by number.
    by_class: ClassIndex  #: Of the classes to draw from.
    base: Base  #: The base classes.
    shape: tuple[int, int, int] | None = None  #: Channels, height and width of maps.


def load_relu() -> Source:
    """Make overlapping classes behind a ReLU."""
    x, labels = make_data(SPREAD)
    index = index_classes(labels)
    classes = torch.arange(len(index.size))
    base = summarize_base(take_from(x), index.take(classes[:BASE_CLASSES]))
    return Source(take_from(x), index.take(classes[BASE_CLASSES:]), base)


def load_rows(rows: RowsPlan) -> Source:
    """Load a data set with a split."""
    methods = [choose_method("bd-cspn")]  # which uses the base classes
    plan = EvaluationPlan(rows, MethodsPlan(methods), make_setting(1), n_episodes=1)
    prepared = prepare(plan, *load_data(plan.rows, plan.sampler))
    assert prepared.base is not None  # there is a split
    shape = prepared.data.shape if prepared.data.has_maps else None
    return Source(prepared.pool.take, prepared.pool.by_class, prepared.base, shape)


def load_conv() -> Source:
    """Load novel alphabets, embedded by a small network of convolutions."""
    train_encoder("conv", ROOT / ENCODERS["conv"])
    return load_rows(RowsPlan("glyphs", encoder=str(ROOT / ENCODERS["conv"])))


KINDS: dict[str, Callable[[], Source]] = {
    "relu": cache(load_relu),
    "pixels": cache(lambda: load_rows(RowsPlan("glyphs"))),
    "conv": cache(load_conv),
}


def make_setting(shot: int, n_unlabelled: int = 0) -> Setting:
    """Return the kind of episodes."""
    return Setting(
        way=(WAY, WAY),
        shot=(shot, shot),
        n_query=QUERIES - n_unlabelled,
        n_unlabelled=n_unlabelled,
        n_distractors=WAY if n_unlabelled else 0,
    )


def add_options(parser: StudyParser) -> None:
    """Add where their code is, and how many episodes there are."""
    parser.add_argument("--authors", metavar="DIR", help="folder of the authors' repositories")
    parser.add_whole("--episodes", 300, "episodes of each comparison", low=20)
    parser.add_names("--only", [pair.name for pair in PAIRS])
    parser.add_names("--kinds", list(KINDS))
    text = "compare on these features, too, which a split by seed 0 divides; of maps, the methods that look at places"
    parser.add_argument("--features", metavar="FILE.npz", nargs="+", default=[], help=text)
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
    sources = {kind: KINDS[kind] for kind in (KINDS if options.kinds is None else options.kinds)}
    for path in options.features:
        sources[Path(path).stem] = cache(partial(load_rows, RowsPlan(path, split_seed=0)))
    with_maps = {kind for kind, load in sources.items() if kind not in KINDS and load().shape is not None}
    pairs = {pair.name: pair for pair in there}
    runs = [
        (pair.name, kind, options.episodes)
        for kind, pair in itertools.product(sources, there)
        if pair.maps == (kind in with_maps)
    ]
    code = hash_sources("protonet", "analysis/episodes")

    def do(run: tuple[str, str, int]) -> dict[str, list[list[float]]]:
        name, kind, n_episodes = run
        return compare(folder, pairs[name], kind, sources[kind](), n_episodes)

    results = run_all(runs, do, options.state, lambda _: code, unit="pair")
    found = {name: value for each in results.values() for name, value in each.items()}
    return Report(found, tabulate(there, list(dict.fromkeys(kind for _, kind, _ in runs)), found, options.episodes))


def compare(folder: Path, pair: Pair, kind: str, source: Source, n_episodes: int) -> dict[str, list[list[float]]]:
    """Return of each episode the accuracy of our method and of theirs, and what share of queries is the same.

    Two more are the shares that are the same in theirs and in ours as in theirs run another way, see
    `analysis.episodes.authors_worker.AGAIN`. All are NaN where theirs has no prediction.
    """
    take, index, base, shape = source
    method, total = choose_method(pair.ours), round(n_episodes * pair.share)
    base_rows, base_labels = torch.empty(0), torch.empty(0, dtype=torch.int64)
    if pair.name == CALIBRATION:
        base = _limit(base)
        base_rows, base_labels = _take_all(base)
    with tempfile.TemporaryDirectory() as scratch:
        jobs: list[tuple[str, Path, Path]] = []
        ours: list[Tensor] = []
        for shot in SHOTS:
            draw = make_setting(shot, pair.n_unlabelled).draw(index, seed=0, first=0, n_episodes=total)
            part = next(iter(split_draw(draw)))  # all are of one kind
            n_rows = part.support.shape[1] + part.query.shape[1]
            at_once = min(AT_ONCE, max(1, FEATURES_AT_ONCE // (n_rows * len(base.mean))))
            for first in range(0, total, at_once):
                fields = {each: getattr(part, each)[first : first + at_once] for each in part._fields[:-1]}
                episodes = gather_episodes(take, part._replace(**fields), base, shape=shape)
                support = interleave(episodes.support, fields["support_labels"])
                query = interleave(episodes.query, fields["query_labels"])
                labels = torch.arange(WAY).repeat(shot).expand(len(support), -1)
                episodes = episodes._replace(support=support, support_labels=labels, query=query)
                with torch.no_grad():
                    ours.append(method(episodes).argmax(dim=2))
                path = Path(scratch, f"{len(jobs)}.npz")
                np.savez(
                    path,
                    support=support.numpy(),
                    query=query.numpy(),
                    mean=base.mean.numpy(),
                    base=base_rows.numpy(),
                    base_labels=base_labels.numpy(),
                    unlabelled=torch.empty(0) if episodes.unlabelled is None else episodes.unlabelled.numpy(),
                    shape=np.array(shape or (0, 0, 0)),
                )
                jobs.append((f"{pair.name}, {kind}, {shot}-shot", path, path.with_suffix(".npy")))
        command = [sys.executable, "-m", WORKER, str(folder / pair.folder), pair.name]
        command += [str(each) for job in jobs for each in job[1:]]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, start_new_session=True, cwd=ROOT)
        if ended.returncode:
            last = (ended.stderr.splitlines() or ["nothing on stderr"])[-1]
            refuse("--authors", f"hold {pair.folder} as it was published", last, "See that message.")
        numbers: dict[str, list[list[float]]] = {}
        for (name, _, out), predicted in zip(jobs, ours, strict=True):
            theirs, again = torch.from_numpy(np.load(out))
            right = torch.arange(WAY).repeat(predicted.shape[1] // WAY)
            compared = ((predicted, right), (theirs, right), (predicted, theirs), (theirs, again), (predicted, again))
            shares = [compare_predictions(*pair) for pair in compared]
            for kept, more in zip(numbers.setdefault(name, [[] for _ in compared]), shares, strict=True):
                kept.extend(more.tolist())
    return numbers


def compare_predictions(a: Tensor, b: Tensor) -> Tensor:
    """Return the share of each episode's queries that two predictions are the same for; NaN where one has none."""
    there = ((a != NOTHING) & (b != NOTHING)).all(dim=1)
    return (a == b).double().mean(dim=1).where(there, torch.nan)


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
    pairs: Sequence[Pair], kinds: Sequence[str], found: Mapping[str, Sequence[Sequence[float]]], n_episodes: int
) -> str:
    """Return the table in Markdown."""
    columns = [f"{kind}, {shot}-shot" for kind in kinds for shot in SHOTS]
    rows = []
    for pair in pairs:
        numbers = [found.get(f"{pair.name}, {column}") for column in columns]
        count = next((len(each[0]) for each in numbers if each is not None), 0)
        rows.append([pair.name if count == n_episodes else f"{pair.name} ({count})"])
        rows[-1] += ["" if each is None else _show(*each) for each in numbers]
    told = " ".join(MADE.get(kind, f"{kind}: novel classes of {kind}.npz.") for kind in kinds)
    return TITLE.format(n=n_episodes, kinds=told) + format_table(["method", *columns], rows)


def _show(ours: Sequence[float], theirs: Sequence[float], *shares: Sequence[float]) -> str:
    """Return their accuracy, the paired difference and shares as text; nothing where theirs is no number."""
    a, b, *same = (100 * torch.tensor(each, dtype=torch.float64) for each in (ours, theirs, *shares))
    if bool(b.isnan().any()):
        return ""
    told = [f"{each.nanmean():.1f} %" for each in same]
    told = told[:1] if float(same[1].nanmean()) == 100 else told
    difference = (a - b).mean().round(decimals=2) + 0.0
    return f"{b.mean():.2f}, {difference:+.2f} ±{half_width(a - b):.2f} ({'; '.join(told)})"
