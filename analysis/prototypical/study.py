"""Prototypical networks on glyphs: the command ``train --objective protonet`` beside a plain loop in torch.

Both train on 20-way 1-shot episodes of 5 queries, with the same layers and base classes. The loop has torch's layers
with torch's initial weights, Adam, and episodes of its own; it validates nothing. Its variants differ in one point, in
which other objectives of ``train`` differ from a plain loop.
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from analysis.shared.runner import (
    JournalOptions,
    StudyReport,
    int_option,
    list_option,
    names_option,
    parse_integers,
    run_all,
)
from analysis.shared.tables import format_mean
from protonet.datasets.dataset import Dataset
from protonet.episodes import EvaluationSettings, evaluate_dataset, load_source
from protonet.episodes.__main__ import main
from protonet.episodes.networks.augmentation import draw_affine_maps, warp_images
from protonet.sampling import index_classes, list_class_rows
from protonet.ui.text import format_table

#: By name of a variant, its description in the table.
VARIANTS = {
    "loop": "loop",
    "train": "`train`",
    "train-affine": "`train --augment affine`",
    "loop-affine": "loop, pictures warped as by `--augment affine`",
    "loop-he": "loop from He's initial weights",
    "loop-average": "loop, moving averages of the weights",
}
N_WAY, N_SHOT, N_QUERY = 20, 1, 5  #: Of training episodes.


@dataclass(frozen=True, kw_only=True)
class Options(JournalOptions):
    """The options of the study."""

    variants: Sequence[str] | None = names_option(VARIANTS)
    steps: Sequence[int] = list_option("numbers of steps", "300,2000", partial(parse_integers, low=1))
    seeds: int = int_option("seeds of each variant", 3, low=2)
    episodes: int = int_option("5-way 1-shot episodes of novel classes that evaluate each encoder", 1000)
    jobs: int = int_option("processes", 1)


def run(options: Options) -> StudyReport:
    """Train by each variant, and compare the accuracies with those of the loop."""
    variants = options.variants or [*VARIANTS]
    runs = [
        (name, steps, seed, options.episodes)
        for steps in options.steps
        for name in variants
        for seed in range(options.seeds)
    ]
    results = run_all(runs, measure, options.state, jobs=options.jobs)
    header, rows = ["training", *(f"{steps:,} steps, %" for steps in options.steps)], []
    for name in variants:
        cells = []
        for steps in options.steps:
            accuracies = [results[name, steps, seed, options.episodes] for seed in range(options.seeds)]
            cells.append(format_mean([100 * accuracy for accuracy in accuracies]))
        rows.append([VARIANTS[name], *cells])
    note = f"\nAccuracy on {options.episodes:,} 5-way 1-shot episodes of novel alphabets, by class means; mean and "
    note += f"standard error of {options.seeds} seeds.\n"
    return StudyReport([[*run, value] for run, value in results.items()], format_table(header, rows) + note)


def measure(run: tuple[str, int, int, int]) -> float:
    """Train an encoder, and measure its accuracy in [0, 1] on novel classes."""
    name, steps, seed, n_episodes = run
    settings = EvaluationSettings(method=["protonet"], way=(5, 5), shot=(1, 1), query=15, episodes=n_episodes)
    if name.startswith("train"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "encoder.safetensors")
            train_by_command(path, steps, seed, "affine" if name == "train-affine" else "none")
            result = evaluate_dataset(settings, dataset="glyphs", encoder=path)
    else:
        encoder, novel = train_by_loop(steps, seed, name.partition("-")[2]), load_glyphs("novel")
        with torch.no_grad():
            embedded = torch.cat([encoder(rows) for rows in novel.x.split(1024)])
        result = evaluate_dataset(settings, dataset=novel._replace(x=embedded))
    return result.methods["protonet"].accuracy.mean


def train_by_command(path: Path, steps: int, seed: int, augment: str) -> None:
    """Train by the command, with its defaults but for the episodes and a patience that no run exhausts."""
    words = (
        f"train --objective protonet --augment {augment} --steps {steps} --patience {steps} --seed {seed} --way {N_WAY}"
    )
    words += f" --shot {N_SHOT} --query {N_QUERY} --device cpu --output"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*words.split(), str(path)]) == 0


@cache
def load_glyphs(side: str) -> Dataset:
    """Load the characters on one side of the split, with pixels as floats."""
    data = load_source("glyphs")
    class_ids = torch.tensor([c for c, of_class in enumerate(data.sides or ()) if of_class == side])
    rows = torch.isin(data.y, class_ids).nonzero().flatten()
    names = tuple(data.class_names[c] for c in class_ids.tolist())
    return Dataset(data.get_rows(rows).float(), torch.searchsorted(class_ids, data.y[rows]), names)


def train_by_loop(steps: int, seed: int, change: str) -> nn.Module:
    """Train by a plain loop; ``change`` is the point in which it differs: "", "affine", "he" or "average"."""
    data = load_glyphs("base")
    base = list_class_rows(index_classes(data.y))
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    encoder = nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 32, 5, stride=2, padding=2, bias=False), nn.GroupNorm(8, 32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.GroupNorm(8, 64), nn.Flatten()),
    )
    if change == "he":
        for layer in encoder:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, 0, math.sqrt(2 / layer.weight[0].numel()))
    average = torch.optim.swa_utils.AveragedModel(
        encoder, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    for _ in range(steps):
        classes = torch.randperm(len(base), generator=generator)[:N_WAY].tolist()
        draws = [base[c][torch.randperm(len(base[c]), generator=generator)[: N_SHOT + N_QUERY]] for c in classes]
        x = data.x[torch.cat(draws)]
        if change == "affine":
            x = warp_images(x, draw_affine_maps(len(x), generator))
        support, query = encoder(x).view(N_WAY, N_SHOT + N_QUERY, -1).split([N_SHOT, N_QUERY], dim=1)
        distances = (query.flatten(0, 1)[:, None] - support.mean(dim=1)).square().sum(dim=2)
        loss = F.cross_entropy(-distances, torch.arange(N_WAY).repeat_interleave(N_QUERY))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(encoder)
    return average.module if change == "average" else encoder
