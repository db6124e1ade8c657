"""Episodes per second against easyfsl, in the same run.

Both sample the episodes, classify the queries and compute the accuracy, alternately, on one thread. The lean loop runs
easyfsl's classifiers alone, on pre-sampled rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analysis.contest.worker import measure_peak_memory
from analysis.episodes.peers import load_easyfsl, make_loader
from analysis.shared.journal import run_all
from analysis.shared.runner import Report, StudyParser, call_alone, parse_wholes
from analysis.shared.tables import format_columns
from protonet.episodes.evaluation.evaluate import evaluate
from protonet.episodes.methods import METHODS, Method
from protonet.episodes.methods.tim import tim
from protonet.episodes.samplers.batch import Base, EpisodeBatch, make_row_reader, split_by_size, summarize_base
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.errors import installed_version
from protonet.sampling import ClassIndex, index_classes

CLASSES, ROWS, DIM = 64, 600, 640
SETTING = EpisodeConfig(way=(5, 5), shot=(5, 5), n_query=15)


class Pair(NamedTuple):
    """One of our methods, easyfsl's classifier, and the number of episodes per run of each."""

    name: str
    ours: Method
    module: str
    classifier: str
    bar: float
    settings: dict[str, Any] = {}  # noqa: RUF012 - read alone
    n_ours: int = 2048
    n_theirs: int = 100
    spread: float = 0.15  #: Standard deviation of the classes' centres, where that of their rows is 1.


UNIT: dict[str, Any] = {"feature_normalization": 2.0}
MEAN = torch.full((DIM,), 0.4)  # of standard normal numbers behind a ReLU: what both centre on
CENTRE: dict[str, Any] = {"feature_centering": MEAN}
PAIRS = (
    Pair("ProtoNet", METHODS["protonet"], "methods.prototypical_networks", "PrototypicalNetworks", 20),
    Pair("SimpleShot, L2N", METHODS["simpleshot-l2n"], "methods.simple_shot", "SimpleShot", 20, UNIT),
    Pair("SimpleShot, CL2N", METHODS["simpleshot"], "methods.simple_shot", "SimpleShot", 20, UNIT | CENTRE),
    Pair("BD-CSPN", METHODS["bd-cspn"], "methods.bd_cspn", "BDCSPN", 15, UNIT | CENTRE),
    Pair("LaplacianShot", METHODS["laplacian-shot"], "methods.laplacian_shot", "LaplacianShot", 12, UNIT | CENTRE),
    Pair("TIM, 50 steps", partial(tim, steps=50), "methods.tim", "TIM", 20, UNIT, 512, 10),
    Pair("PT-MAP, overlapping", METHODS["pt-map"], "methods.pt_map", "PTMAP", 150, {}, 512, 3),
    Pair("PT-MAP, separable", METHODS["pt-map"], "methods.pt_map", "PTMAP", 150, {}, 512, 3, 1.0),
    Pair("PT-MAP, unit rows", METHODS["pt-map"], "methods.pt_map", "PTMAP", 50, UNIT, 512, 3),
)
COLUMNS = {
    "method": "{method}",
    "ours, µs per episode": "{ours_us:,.0f}",
    "easyfsl, µs": "{easyfsl_us:,.0f}",
    "ours, episodes per second": "{per_second:,.0f}",
    "times faster": "{ratio:.1f}",
    "bar": "{bar:g}",
    "lean loop, µs": "{lean_us:,.0f}",
    "times": "{lean_ratio:.1f}",
}
GROWTH_COLUMNS = {
    "episodes": "{episodes:,.0f}",
    "CPU seconds": "{seconds:.2f}",
    "µs per episode": "{each_us:.0f}",
    "before MiB": "{before_mib:,.0f}",
    "peak MiB": "{peak_mib:,.0f}",
}
NOTE = f"""
{SETTING.way[0]}-way {SETTING.shot[0]}-shot {SETTING.n_query}-query, {CLASSES} classes of {ROWS} rows of {DIM} features,
float32, one thread; CPU time, medians of {{repeats}} alternating runs. Ours rates calibration beside the accuracy.
easyfsl {{version}} draws, loads and classifies one episode after another, its random numbers Python's own. It is set to
scale and centre rows where ours does; its TIM takes cosines where ours takes distances; its PT-MAP neither scales nor
centres rows, and takes 1,000 Sinkhorn steps but where rows are scaled before ("unit rows"). How many ours takes depends
on how separable the classes are. The lean loop gathers rows drawn beforehand and calls easyfsl's classifier, no more.
"""
GROWTH_NOTE = """
`protonet.episodes.evaluation.evaluate` with ProtoNet on the same data, a process for each number of episodes.
Before is the peak when the data are there; the rest is what evaluating adds.
"""


def make_data(spread: float = 0.15) -> tuple[Tensor, Tensor]:
    """Generate rows (CLASSES * ROWS, DIM) float32, as after a ReLU, and their labels.

    ``spread`` is the standard deviation of the classes' centres, where that of their rows is 1: 0.15 makes overlapping
    classes.
    """
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES).repeat_interleave(ROWS)
    centres = torch.randn(CLASSES, DIM, generator=generator)
    return (spread * centres[labels] + torch.randn(len(labels), DIM, generator=generator)).relu_(), labels


def time_ours(x: Tensor, index: ClassIndex, base: Base, pair: Pair, seed: int) -> float:
    """Measure the CPU seconds per episode of our evaluation."""
    started = time.process_time()
    evaluate(x, index, {pair.name: pair.ours}, SETTING, seed=seed, n_episodes=pair.n_ours, base=base)
    return (time.process_time() - started) / pair.n_ours


def time_theirs(classifier: Any, loader: Any) -> float:
    """Measure the CPU seconds per episode of easyfsl's loader and classifier."""
    started, right, total, n = time.process_time(), 0, 0, 0
    with torch.no_grad():
        for support, support_labels, query, query_labels, _ in loader:
            classifier.process_support_set(support, support_labels)
            right += int((classifier(query).argmax(dim=1) == query_labels).sum())
            total, n = total + len(query_labels), n + 1
    assert right <= total
    return (time.process_time() - started) / n


def time_lean(classifier: Any, x: Tensor, part: EpisodeBatch) -> float:
    """Measure the CPU seconds per episode of a loop that gathers pre-sampled rows, and classifies them."""
    rows = zip(part.support, part.support_labels, part.query, part.query_labels, strict=True)
    started, right = time.process_time(), 0
    with torch.no_grad():
        for support, support_labels, query, query_labels in rows:
            classifier.process_support_set(x[support], support_labels)
            right += int((classifier(x[query]).argmax(dim=1) == query_labels).sum())
    assert right <= part.query.numel()
    return (time.process_time() - started) / len(part.support)


def compare(pair: Pair, repeats: int) -> dict[str, Any]:
    """Measure the median microseconds per episode of all sides of a pair, in alternating runs, and their ratios."""
    x, labels = make_data(pair.spread)
    index = index_classes(labels)
    base = summarize_base(make_row_reader(x), index)._replace(mean=MEAN)
    classifier = getattr(load_easyfsl(pair.module), pair.classifier)(**pair.settings)
    sizes = {"n_way": SETTING.way[0], "n_shot": SETTING.shot[0], "n_query": SETTING.n_query}
    loader = make_loader(x, labels, **sizes, n_tasks=pair.n_theirs)
    part = next(split_by_size(SETTING.sample(index, seed=0, first=0, n_episodes=pair.n_theirs)))
    seconds = [
        (time_ours(x, index, base, pair, seed), time_theirs(classifier, loader), time_lean(classifier, x, part))
        for seed in range(repeats)
    ]
    ours, theirs, lean = (1e6 * statistics.median(side) for side in zip(*seconds, strict=True))
    result = {"method": pair.name, "ours_us": ours, "easyfsl_us": theirs, "ratio": theirs / ours, "bar": pair.bar}
    return {**result, "lean_us": lean, "lean_ratio": lean / ours}


def measure_growth(n_episodes: int) -> dict[str, float]:
    """Measure CPU seconds and memory of ``n_episodes`` episodes of ProtoNet, in this process."""
    x, labels = make_data()
    index = SETTING.validate(index_classes(labels), tuple(map(str, range(CLASSES))))
    before, started = measure_peak_memory(), time.process_time()
    evaluate(x, index, {"protonet": METHODS["protonet"]}, SETTING, n_episodes=n_episodes)
    seconds = time.process_time() - started
    return {"episodes": n_episodes, "seconds": seconds, "before_mib": before, "peak_mib": measure_peak_memory()}


def tabulate(pairs: Sequence[Mapping[str, Any]], growth: Sequence[Mapping[str, float]], repeats: int) -> str:
    """Format the tables as Markdown, with a note."""
    text = format_columns(COLUMNS, [{**pair, "per_second": 1e6 / pair["ours_us"]} for pair in pairs])
    text += NOTE.format(repeats=repeats, version=installed_version("easyfsl"))
    rows = [{**size, "each_us": 1e6 * size["seconds"] / size["episodes"]} for size in growth]
    return text + (f"\n{format_columns(GROWTH_COLUMNS, rows)}{GROWTH_NOTE}" if growth else "")


def add_options(parser: StudyParser) -> None:
    """Add the number and the length of measurements."""
    parser.add_int("--repeats", 5, "alternating runs of each method")
    parser.add("--growth", "1000,10000,100000", "numbers of episodes", partial(parse_wholes, low=1))
    parser.add_state()


def run(options: argparse.Namespace) -> Report:
    """Compare the methods, and measure the growth of time and memory."""
    by_name = {pair.name: pair for pair in PAIRS}

    def do(run: tuple[str, int]) -> dict[str, Any]:
        name, n = run
        return compare(by_name[name], n) if name in by_name else call_alone(measure_growth, n)

    runs = [*((name, options.repeats) for name in by_name), *(("growth", n) for n in options.growth)]
    results = list(run_all(runs, do, options.state).values())
    pairs, growth = results[: len(PAIRS)], results[len(PAIRS) :]
    return Report({"pairs": pairs, "growth": growth}, tabulate(pairs, growth, options.repeats))
