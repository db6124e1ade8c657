"""The tasks of meta-training: augmented episodes of base classes to learn from, validation episodes to be judged on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protonet._checks import fail
from protonet.datasets.dataset import Dataset
from protonet.episodes.backbones import embed_rows
from protonet.episodes.batch import Take
from protonet.episodes.distributed import Group
from protonet.episodes.draws import Setting, check_setting, draw_episodes
from protonet.episodes.evaluation import evaluate
from protonet.episodes.methods.prototypes import protonet_cosine
from protonet.episodes.statistics import half_width, mean_of
from protonet.sampling import ClassIndex, index_classes


@dataclass(frozen=True)
class Augmentation:
    """How far training rows are changed at random. All values are our own choice."""

    rotation: float = math.pi / 12  #: Largest rotation of an image to either side, in radians.
    stretch: float = 0.2  #: Largest logarithm of an image's scale along either axis, and its largest shear.
    shift: float = 0.15  #: Largest shift of an image along either axis, in halves of its side.
    noise: float = 0.3  #: Standard deviation of the noise on rows that are not images, in that of each feature.
    n_sampled: int = 4096  #: Rows that the features' standard deviations are estimated from, at most about.


@dataclass(frozen=True)
class Validation:
    """The validation episodes. All values are our own choice."""

    n_episodes: int = 600  #: Episodes, always the same ones.
    n_way: int = 5  #: Classes per episode; all validation classes if they are fewer.
    n_shot: int = 1  #: Support rows per class.
    n_query: int = 15  #: Query rows per class; all that are left if they are fewer.


AUGMENTATION, VALIDATION = Augmentation(), Validation()


class Plan(NamedTuple):
    """The settings that decide the result of a run; checkpoints store them under these names."""

    dataset: str  #: The data set, as the command line names it.
    split_seed: int | None  #: Of the split by class, or None for the data set's own.
    dim: int  #: Features per row.
    classes: int  #: The number of base classes.
    backbone: str  #: One of `protonet.episodes.backbones.BACKBONES`.
    way: int  #: Classes per training episode.
    shot: int  #: Support rows per class.
    query: int  #: Query rows per class.
    episodes_per_step: int  #: Episodes whose losses are averaged in a step.
    steps: int  #: Most steps.
    eval_every: int  #: Steps from one validation to the next.
    patience: int  #: Validations without a new best score after which the run ends.
    seed: int  #: Of the initial weights, the episodes and the augmentation, in [0, 2**63).


class Score(NamedTuple):
    """The result of a validation."""

    step: int  #: Steps taken before it.
    accuracy: float  #: The mean accuracy over the validation episodes, in [0, 1].
    half_width: float  #: Half the width of the accuracy's 95 % interval.


class Side(NamedTuple):
    """One side of a data set's split by class."""

    take: Take  #: Returns rows of the whole data set by number.
    classes: Tensor  #: (n,) int64, the class of each row among those of the side, -1 for rows of the other sides.
    by_class: ClassIndex  #: Rows by class, of the side alone.
    names: tuple[str, ...]  #: One name per class of the side.
    spread: Tensor  #: (dim,) float32, the standard deviation of each feature.


def take_side(function: str, argument: str, data: Dataset, side: str) -> Side:
    """Select one of the `protonet.datasets.dataset.SIDES` of a data set, without copying its rows.

    Raises:
        InputError: There is no split, or the side has fewer than two classes with a row for support and one for query.
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
    sampled = rows[:: -(-len(rows) // AUGMENTATION.n_sampled)]
    spread = data.take_rows(sampled).float().std(dim=0, correction=0)
    return Side(data.take_rows, classes, index, tuple(data.class_names[c] for c in class_ids.tolist()), spread)


def draw_batch(base: Side, plan: Plan, step: int, group: Group) -> tuple[Tensor, Tensor]:
    """Draw and augment this process's share of a step's episodes, which depend only on the seed and the step.

    Args:
        base: The base classes.
        plan: The settings of the run.
        step: The step's number, >= 0.
        group: The processes that share the episodes; their number divides that of the episodes.

    Returns:
        x: (episodes, n_way, n_shot + n_query, dim) float32, support first.
        targets: (episodes, n_way, n_shot + n_query) int64, the rows' base classes.
    """
    share = plan.episodes_per_step // group.world_size
    first = step * plan.episodes_per_step + group.rank * share
    setting = Setting((plan.way, plan.way), (plan.shot, plan.shot), plan.query)
    draw = draw_episodes(base.by_class, setting, seed=plan.seed, first=first, n_episodes=share)
    rows = torch.cat([draw.support, draw.query], dim=2)  # (episodes, n_way, n_shot + n_query)
    x = base.take(rows.flatten()).float()
    seed = np.random.SeedSequence([plan.seed, step]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(seed[0]))
    # Every process draws the random numbers of all of them and uses its own.
    all_rows, own = len(x) * group.world_size, slice(group.rank * len(x), (group.rank + 1) * len(x))
    if plan.backbone == "conv":
        x = warp_images(x, draw_maps(all_rows, generator)[own])
    else:
        x = x + AUGMENTATION.noise * base.spread * torch.randn(all_rows, plan.dim, generator=generator)[own]
    return x.unflatten(0, rows.shape), base.classes[rows]


def score_encoder(encoder: nn.Module, validation: Side, step: int, group: Group) -> Score:
    """Measure the accuracy of the nearest prototype by cosine on the validation episodes, the same in every process.

    Args:
        encoder: Maps rows (n, dim) to (n, embedding_dim).
        validation: The validation classes.
        step: The steps taken so far, for the score.
        group: The processes that share the episodes.
    """
    rows = (validation.classes >= 0).nonzero().flatten()
    index = index_classes(validation.classes[rows])
    n_way, n_shot = min(VALIDATION.n_way, int((index.size > 1).sum())), VALIDATION.n_shot
    setting = Setting((n_way, n_way), (n_shot, n_shot), VALIDATION.n_query, allow_small=True)
    index = check_setting("validation", index, setting, ())
    embeddings, methods = embed_rows(encoder, validation.take, rows), {"cosine": protonet_cosine}
    scores = evaluate(embeddings, index, methods, setting, n_episodes=VALIDATION.n_episodes, group=group)
    accuracy = scores["cosine"].accuracy
    return Score(step, mean_of(accuracy), half_width(accuracy))


def draw_maps(n: int, generator: torch.Generator) -> Tensor:
    """Draw affine maps of images: a rotation, a scale along either axis, a shear and a shift, each uniform around none.

    They are (n, 2, 3) float32, from the output's coordinates to the input's, which are -1 and 1 at an image's edges.
    """
    limits = AUGMENTATION
    angle, shear, *scales, right, down = (2 * torch.rand(6, n, generator=generator) - 1).unbind()
    cos, sin = (limits.rotation * angle).cos(), (limits.rotation * angle).sin()
    rotation = torch.stack([cos, -sin, sin, cos], dim=1).reshape(n, 2, 2)  # (n, 2, 2)
    ones = torch.ones(n)
    slant = torch.stack([ones, limits.stretch * shear, 0 * ones, ones], dim=1).reshape(n, 2, 2)  # (n, 2, 2)
    linear = rotation @ slant * (limits.stretch * torch.stack(scales, dim=1)).exp()[:, None]
    return torch.cat([linear, limits.shift * torch.stack([right, down], dim=1)[..., None]], dim=2)


def warp_images(x: Tensor, maps: Tensor) -> Tensor:
    """Move the pixels of square images by bilinear interpolation; outside the image all is 0.

    Args:
        x: (n, side * side) float32, row by row of the pixels.
        maps: (n, 2, 3) float32, from `draw_maps`.

    Returns:
        (n, side * side) float32.

    Source: Jaderberg et al., "Spatial transformer networks" (2015), eqs. 1 and 5. https://arxiv.org/abs/1506.02025
    """
    side = math.isqrt(x.shape[1])
    images = x.reshape(-1, 1, side, side)  # (n, 1, side, side)
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False).flatten(1)
