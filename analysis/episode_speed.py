"""Episodes a second, ours against easyfsl's in the same run: ``python -m analysis.episode_speed``.

Both sample the episodes, classify the queries and rate the accuracy, in turn, on one thread.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from solution.start import start

    sys.exit(start("analysis.episode_speed"))

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from analysis.options import parse_wholes, write_results
from analysis.peers import load_easyfsl, make_loader
from protonet.commands.common import Parser, check_outputs, format_table, parse_whole, run_command
from protonet.episodes.batch import Base, summarize_base, take_from
from protonet.episodes.draws import Setting, check_setting
from protonet.episodes.evaluation import evaluate, one_thread
from protonet.episodes.methods import METHODS, Method
from protonet.episodes.methods.tim import tim
from protonet.sampling import ClassIndex, index_classes

PROG = "analysis.episode_speed"
CLASSES, ROWS, DIM = 64, 600, 640
SETTING = Setting(way=(5, 5), shot=(5, 5), n_query=15)
GROWTH = "1000,10000,100000"


class Pair(NamedTuple):
    """One of our methods, easyfsl's classifier of that name, and how many episodes each runs at a time."""

    name: str
    ours: Method
    module: str
    classifier: str
    bar: float
    settings: dict[str, Any] = {}  # noqa: RUF012 - read alone
    n_ours: int = 2048
    n_theirs: int = 100


UNIT: dict[str, Any] = {"feature_normalization": 2.0}
MEAN = torch.full((DIM,), 0.4)  # of standard normal numbers behind a ReLU: what both centre on
CENTRE: dict[str, Any] = {"feature_centering": MEAN}
PAIRS = (
    Pair("ProtoNet", METHODS["protonet"], "methods.prototypical_networks", "PrototypicalNetworks", 10),
    Pair("SimpleShot, L2N", METHODS["simpleshot-l2n"], "methods.simple_shot", "SimpleShot", 10, UNIT),
    Pair("SimpleShot, CL2N", METHODS["simpleshot"], "methods.simple_shot", "SimpleShot", 10, UNIT | CENTRE),
    Pair("BD-CSPN", METHODS["bd-cspn"], "methods.bd_cspn", "BDCSPN", 8),
    Pair("LaplacianShot", METHODS["laplacian-shot"], "methods.laplacian_shot", "LaplacianShot", 8, UNIT),
    Pair("TIM, 50 steps", partial(tim, steps=50), "methods.tim", "TIM", 10, UNIT, 512, 10),
    Pair("PT-MAP", METHODS["pt-map"], "methods.pt_map", "PTMAP", 150, {}, 512, 3),
)
NOTE = """
{setting}, {classes} classes of {rows} rows of {dim} features, float32, one thread; CPU time, medians of {repeats}
alternating runs. Ours rates calibration beside the accuracy. easyfsl {version} draws, loads and classifies one episode
after another, its random numbers Python's own. It is set to scale and centre rows where ours does; its TIM takes
cosines where ours takes distances; its PT-MAP neither scales nor centres rows and always takes 1,000 Sinkhorn steps.
"""
GROWTH_NOTE = """
`protonet.episodes.evaluation.evaluate` with ProtoNet on the same data, a process for each number of episodes.
Before is the peak when the data are there; the rest is what evaluating adds.
"""


def make_data() -> tuple[Tensor, Tensor]:
    """Return rows (CLASSES * ROWS, DIM) float32, as behind a ReLU, in overlapping classes, and their labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES).repeat_interleave(ROWS)
    centres = torch.randn(CLASSES, DIM, generator=generator)
    return (0.15 * centres[labels] + torch.randn(len(labels), DIM, generator=generator)).relu_(), labels


def time_ours(x: Tensor, index: ClassIndex, base: Base, pair: Pair, seed: int) -> float:
    """Return the CPU seconds an episode of our evaluation."""
    started = time.process_time()
    evaluate(x, index, {pair.name: pair.ours}, SETTING, seed=seed, n_episodes=pair.n_ours, base=base)
    return (time.process_time() - started) / pair.n_ours


def time_theirs(classifier: Any, loader: Any) -> float:
    """Return the CPU seconds an episode of easyfsl's loader and classifier."""
    started, right, total, n = time.process_time(), 0, 0, 0
    with torch.no_grad():
        for support, support_labels, query, query_labels, _ in loader:
            classifier.process_support_set(support, support_labels)
            right += int((classifier(query).argmax(dim=1) == query_labels).sum())
            total, n = total + len(query_labels), n + 1
    assert right <= total
    return (time.process_time() - started) / n


def compare(pairs: Sequence[Pair], repeats: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return for each pair the median microseconds an episode of both, and their ratio."""
    x, labels = make_data()
    index = index_classes(labels)
    base = summarize_base(take_from(x), index)._replace(mean=MEAN)
    sizes = {"n_way": SETTING.way[0], "n_shot": SETTING.shot[0], "n_query": SETTING.n_query}
    results = []
    for pair in pairs:
        classifier = getattr(load_easyfsl(pair.module), pair.classifier)(**pair.settings)
        loader = make_loader(x, labels, **sizes, n_tasks=pair.n_theirs)
        ours, theirs = [], []
        for repeat in range(repeats):
            tell(f"{pair.name}, run {repeat + 1}")
            ours.append(1e6 * time_ours(x, index, base, pair, repeat))
            theirs.append(1e6 * time_theirs(classifier, loader))
        middle = statistics.median(ours), statistics.median(theirs)
        results.append(
            {
                "method": pair.name,
                "ours_us": middle[0],
                "easyfsl_us": middle[1],
                "ratio": middle[1] / middle[0],
                "bar": pair.bar,
            }
        )
    return results


def measure_growth(n_episodes: int) -> dict[str, float]:
    """Return seconds and memory of ``n_episodes`` episodes of ProtoNet, of this process."""
    import resource  # noqa: PLC0415 - there is none on Windows

    x, labels = make_data()
    index = check_setting(PROG, index_classes(labels), SETTING, tuple(map(str, range(CLASSES))))
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    evaluate(x, index, {"protonet": METHODS["protonet"]}, SETTING, n_episodes=n_episodes)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"episodes": n_episodes, "seconds": seconds, "before_mib": before / 1024, "peak_mib": peak / 1024}


def tabulate(pairs: Sequence[dict[str, Any]], growth: Sequence[dict[str, float]], repeats: int) -> str:
    """Return both tables in Markdown, with what explains them."""
    from importlib import metadata  # noqa: PLC0415 - for a word of the note

    lines = [
        [
            each["method"],
            f"{each['ours_us']:,.0f}",
            f"{each['easyfsl_us']:,.0f}",
            f"{1e6 / each['ours_us']:,.0f}",
            f"{each['ratio']:.1f}",
            f"{each['bar']:g}",
        ]
        for each in pairs
    ]
    header = ["method", "ours, µs an episode", "easyfsl, µs", "ours, episodes a second", "times faster", "bar"]
    way, shot, query = SETTING.way[0], SETTING.shot[0], SETTING.n_query
    text = format_table(header, lines) + NOTE.format(
        setting=f"{way}-way {shot}-shot {query}-query",
        classes=CLASSES,
        rows=ROWS,
        dim=DIM,
        repeats=repeats,
        version=metadata.version("easyfsl"),
    )
    if growth:
        rows = [
            [
                f"{each['episodes']:,.0f}",
                f"{each['seconds']:.2f}",
                f"{1e6 * each['seconds'] / each['episodes']:.0f}",
                f"{each['before_mib']:,.0f}",
                f"{each['peak_mib']:,.0f}",
            ]
            for each in growth
        ]
        header = ["episodes", "seconds", "µs an episode", "before MiB", "peak MiB"]
        text += "\n" + format_table(header, rows) + GROWTH_NOTE
    return text


def _run(arguments: Sequence[str] | None) -> None:
    """Compare, measure growth, and print the tables."""
    parser = Parser(PROG, "Compare the speed of few-shot evaluation with easyfsl's, in the same run.")
    parser.add_argument("--repeats", default="5", metavar="N", help="alternating runs of each method (default 5)")
    parser.add_argument("--growth", default=GROWTH, help=f"numbers of episodes, with commas (default: {GROWTH})")
    parser.add_argument("--json", metavar="PATH", help="write the results there")
    parser.add_argument("--markdown", metavar="PATH", help="write the tables there, too")
    parser.add_argument("--worker", metavar="N", help="measure N episodes in this process, and print JSON alone")
    options = parser.parse_args(arguments)
    if options.worker is not None:
        print(json.dumps(measure_growth(parse_whole(PROG, "--worker", options.worker, low=1))))
        return
    repeats = parse_whole(PROG, "--repeats", options.repeats, low=1)
    sizes = parse_wholes(PROG, "--growth", options.growth, low=1)
    outputs = check_outputs(PROG, options, ("json", "markdown"))
    growth: list[dict[str, float]] = []
    with one_thread(), tqdm(total=repeats * len(PAIRS) + len(sizes), unit="run", dynamic_ncols=True) as bar:

        def tell(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        pairs = compare(PAIRS, repeats, tell)
        for size in sizes:
            command = [sys.executable, "-m", PROG, "--worker", str(size)]
            ended = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True)
            growth.append(json.loads(ended.stdout))
            tell(f"{size:,} episodes")
    write_results(outputs, {"pairs": pairs, "growth": growth}, tabulate(pairs, growth, repeats))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(PROG, _run, arguments)
