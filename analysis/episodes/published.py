"""A published error made again: one-shot classification on the 20 runs that come with Omniglot.

FOLDER holds ``all_runs.zip`` of https://github.com/brendenlake/omniglot, ``python/one-shot-classification``: in each
run 20 characters of one alphabet, drawn once by a person, and once by another one to be classified. The repository says
what the modified Hausdorff distance gets wrong; methods of ours see the same pictures.
"""

from __future__ import annotations

import argparse
import io
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from analysis.shared.runner import FOLDER, Report, StudyParser
from protonet._checks import optional_packages, refuse
from protonet.episodes.draws.batch import Episodes
from protonet.episodes.evaluation.statistics import half_width
from protonet.episodes.methods import METHODS
from protonet.episodes.methods.choice import choose_methods
from protonet.representations.representation import hash_file
from protonet.ui.text import format_table

PUBLISHED = 38.8  #: Percent, "this demo should lead to a result of" (demo_classification.py, commit 057f034baf2e).
SHA256 = "437c1eeab0af8484112e1b4cc0f3d541ec727f7c47b9b202da738af9dfd6c325"  #: Of the file at that commit.
OURS = ("protonet", "protonet-cosine", "simpleshot-l2n", "adaptive", "bd-cspn", "laplacian-shot", "pt-map", "ilpc")
TITLE = """# A published error, made again

One-shot classification among 20 characters of one alphabet, the 20 runs of Omniglot's repository
(https://github.com/brendenlake/omniglot, `python/one-shot-classification/all_runs.zip`,
{known}). Errors in percent, with 95 % intervals over other runs. The
repository tells what the modified Hausdorff distance between the places of ink gets wrong. Methods of ours see raw
pixels of two people's drawings, without learning from any others; from `{first}` on, all queries of a run at once.

"""


class Run(NamedTuple):
    """One of the runs."""

    support: Tensor  #: (classes, height, width) bool, ink, in the order of the names of their files.
    query: Tensor  #: (queries, height, width) bool.
    labels: Tensor  #: (queries,) int64, which of ``support`` each is.


def add_options(parser: StudyParser) -> None:
    """Add the folder."""
    parser.add_argument(FOLDER, metavar="FOLDER", help="holds all_runs.zip of Omniglot's repository")


def run(options: argparse.Namespace) -> Report:
    """Classify by the modified Hausdorff distance, and by methods of ours."""
    path = Path(options.folder, "all_runs.zip")
    runs = read_runs(path)
    errors = {"modified Hausdorff distance": torch.tensor([100 - score(rate_hausdorff(each), each) for each in runs])}
    episodes, _ = join(runs)
    for name, method in choose_methods(OURS).items():
        logits = method(episodes)
        errors[name] = torch.tensor([100 - score(own, each) for own, each in zip(logits, runs, strict=True)])
    rows = {name: [float(own.mean()), half_width(own)] for name, own in errors.items()}
    shown = [
        [name, f"{mean:.2f} ±{half:.2f}", f"{PUBLISHED}" if number == 0 else ""]
        for number, (name, (mean, half)) in enumerate(rows.items())
    ]
    first = next(name for name in OURS if METHODS[name].transductive)
    digest = hash_file(path)
    known = f"sha256 {digest}{'' if digest == SHA256 else ', another one than at that commit'}"
    return Report(
        rows, TITLE.format(known=known, first=first) + format_table(["method", "error, %", "published"], shown)
    )


def read_runs(path: Path) -> list[Run]:
    """Read the runs of a ZIP file, in the order of their names."""
    with optional_packages("analysis episode-published"):
        from PIL import Image  # noqa: PLC0415 - optional

    def ink(archive: zipfile.ZipFile, name: str) -> np.ndarray:
        return ~np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("1"))

    runs = []
    try:
        with zipfile.ZipFile(path) as archive:
            for list_ in sorted(name for name in archive.namelist() if name.endswith("class_labels.txt")):
                pairs = [line.split() for line in archive.read(list_).decode().splitlines() if line.strip()]
                place = f"{list_.rpartition('/')[0]}/training/"
                classes = sorted(name for name in archive.namelist() if name.startswith(place) and name != place)
                support, query = (
                    torch.from_numpy(np.stack([ink(archive, name) for name in names]))
                    for names in (classes, [item for item, _ in pairs])
                )
                runs.append(Run(support, query, torch.tensor([classes.index(label) for _, label in pairs])))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        refuse(
            FOLDER, "hold Omniglot's all_runs.zip", f"{path} ({type(error).__name__})", "Get it from its repository."
        )
    if not runs:
        refuse(FOLDER, "hold Omniglot's all_runs.zip", f"{path} without runs", "Get it from its repository.")
    return runs


def join(runs: list[Run]) -> tuple[Episodes, Tensor]:
    """Return runs as a batch of episodes of pixels, and the labels (runs, queries) of their queries."""
    support, query = (torch.stack([each[at].flatten(1).float() for each in runs]) for at in (0, 1))
    n_way = support.shape[1]
    labels = torch.arange(n_way).expand(len(runs), -1)
    return Episodes(support, labels, query, n_way), torch.stack([each.labels for each in runs])


def score(logits: Tensor, run: Run) -> float:
    """Return the percent of a run's queries that logits (queries, classes) are highest right for."""
    return 100 * float((logits.argmax(dim=1) == run.labels).double().mean())


def rate_hausdorff(run: Run) -> Tensor:
    """Return minus the modified Hausdorff distances (queries, classes) of a run.

    A picture is the places of its ink less their mean. Of two, the mean distance of a point of either to the nearest
    one of the other is taken, and the larger of both.

    Source: Dubuisson and Jain, "A modified Hausdorff distance for object matching" (1994).
    """

    def place(picture: Tensor) -> Tensor:
        points = picture.nonzero().double()
        return points - points.mean(dim=0)

    classes = [place(picture) for picture in run.support]
    rows = []
    for picture in run.query:
        points = place(picture)
        distances = [torch.cdist(points, own) for own in classes]
        rows.append([max(float(each.amin(dim=1).mean()), float(each.amin(dim=0).mean())) for each in distances])
    return -torch.tensor(rows, dtype=torch.float64)
