"""What meta-training learns from, episodes of base classes, and is judged on, episodes of validation classes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from protonet._checks import fail
from protonet.datasets.dataset import Dataset
from protonet.episodes.augmentation import draw_maps, warp_images
from protonet.episodes.backbones import embed_rows
from protonet.episodes.batch import Take
from protonet.episodes.distributed import Group
from protonet.episodes.draws import Setting, check_setting, draw_episodes
from protonet.episodes.evaluation import evaluate
from protonet.episodes.meta import Plan, Score
from protonet.episodes.methods.prototypes import protonet_cosine
from protonet.episodes.statistics import half_width, mean_of
from protonet.sampling import ClassIndex, index_classes

#: Standard deviation of the noise added to rows that are no images, in units of each feature's own.
NOISE = 0.3
#: Rows that the features' standard deviations are taken of.
SAMPLE = 4096
#: Judged on: episodes of at most this many classes, with 1 shot and this many queries a class where it has them.
VALIDATION_EPISODES, VALIDATION_WAY, VALIDATION_QUERY = 600, 5, 15


class Side(NamedTuple):
    """One side of a data set's split by class.

    Attributes:
        take: Takes rows of the whole data set by number.
        classes: (n,) the class of each row among those of the side, -1 for rows of the other sides.
        by_class: Rows by class, of the side alone.
        names: Of the classes.
        spread: (dim,) standard deviation of each feature.
    """

    take: Take
    classes: Tensor
    by_class: ClassIndex
    names: tuple[str, ...]
    spread: Tensor


def take_side(function: str, argument: str, data: Dataset, side: str) -> Side:
    """Return one side of the split, without a copy of its rows.

    Args:
        function: The public function's or command's name, for messages.
        argument: The argument that the data came from, for messages.
        data: Rows with ``sides``.
        side: One of `protonet.datasets.dataset.SIDES`.

    Raises:
        ValueError: There is no split, or fewer than two classes on that side of which an episode can be drawn.
    """
    if data.sides is None:
        fail(function, argument, "have a split by class", "none", "Pass --split-seed 0.")
    class_ids = torch.tensor([c for c, own in enumerate(data.sides) if own == side], dtype=torch.int64)
    index = index_classes(data.y).take(class_ids)
    usable = int((index.size > 1).sum())
    if usable < 2:
        remedy = "Add classes or rows to that side, or pass another --split-seed and 10 classes or more."
        fail(function, argument, f"have at least 2 {side} classes with 2 rows", usable, remedy)
    numbers = torch.full((data.num_classes,), -1).index_copy_(0, class_ids, torch.arange(len(class_ids)))
    classes = numbers[data.y]  # (n,)
    rows = (classes >= 0).nonzero().flatten()
    spread = data.take_rows(rows[:: -(-len(rows) // SAMPLE)]).float().std(dim=0, correction=0)
    return Side(data.take_rows, classes, index, tuple(data.class_names[c] for c in class_ids.tolist()), spread)


def draw_batch(base: Side, plan: Plan, step: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return this process's share of a step's episodes, augmented: they hang on the seed and the step alone.

    Args:
        base: The base classes.
        plan: What was asked for.
        step: The step's number, >= 0.
        group: The processes that share the episodes; their number divides that of the episodes.

    Returns:
        Rows (episodes, way, shot + query, dim) float32 and their classes (episodes, way, shot + query).
    """
    share = plan.episodes_per_step // group.world_size
    first = step * plan.episodes_per_step + group.rank * share
    draw = draw_episodes(base.by_class, plan.setting, seed=plan.seed, first=first, n_episodes=share)
    rows = torch.cat([draw.support, draw.query], dim=2)  # (episodes, way, shot + query)
    x = base.take(rows.flatten()).float()
    seed = np.random.SeedSequence([plan.seed, step]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(seed[0]))
    all_rows, own = len(x) * group.world_size, slice(group.rank * len(x), (group.rank + 1) * len(x))
    if plan.backbone == "conv":
        x = warp_images(x, draw_maps(all_rows, generator)[own])
    else:
        x = x + NOISE * base.spread * torch.randn(all_rows, plan.dim, generator=generator)[own]
    return x.unflatten(0, rows.shape), base.classes[rows]


def score_encoder(encoder: nn.Module, validation: Side, step: int, group: Group) -> Score:
    """Return the accuracy of the nearest prototype by cosine, on episodes that are always the same ones.

    Args:
        encoder: Maps rows (n, dim) to (n, embedding_dim).
        validation: The validation classes.
        step: Goes into the score.
        group: The processes that share the episodes.
    """
    rows = (validation.classes >= 0).nonzero().flatten()
    index = index_classes(validation.classes[rows])
    way = min(VALIDATION_WAY, int((index.size > 1).sum()))
    setting = Setting((way, way), (1, 1), VALIDATION_QUERY, allow_small=True)
    index = check_setting("validation", index, setting, ())
    embeddings = embed_rows(encoder, validation.take, rows)
    methods = {"cosine": protonet_cosine}
    scores = evaluate(embeddings, index, methods, setting, n_episodes=VALIDATION_EPISODES, group=group)
    accuracy = scores["cosine"].accuracy
    return Score(step, mean_of(accuracy), half_width(accuracy))
