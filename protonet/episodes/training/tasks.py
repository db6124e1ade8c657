"""The episodes of meta-training: augmented training episodes of base classes, and validation episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from protonet.datasets.dataset import Dataset
from protonet.episodes.evaluation.evaluate import ProcessGroup, evaluate, get_process_group
from protonet.episodes.evaluation.statistics import interval_half_width, nan_mean
from protonet.episodes.methods import METHODS, Method
from protonet.episodes.methods.prototypes import protonet_cosine
from protonet.episodes.networks.augmentation import augment_rows
from protonet.episodes.networks.backbones import MIN_IMAGE_SIDES, embed_rows_in_batches
from protonet.episodes.samplers.batch import TrainedEncoder
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.samplers.sampler import RowReader
from protonet.episodes.settings import TrainingPlan
from protonet.errors import raise_input_error
from protonet.sampling import ClassIndex, index_classes

RAW_FEATURE_METHODS = ("protonet", "protonet-cosine")  #: An encoder must beat these methods on raw features.


class ValidationScore(NamedTuple):
    """The accuracy of an encoder on the validation episodes."""

    step: int  #: The number of training steps before the validation.
    accuracy: float  #: The mean accuracy over the validation episodes, in [0, 1].
    half_width: float  #: Half the width of the accuracy's 95 % interval.


class SplitSide(NamedTuple):
    """The rows and classes on one side of a data set's split by class, such as the base classes.

    The n rows of the side are numbered from 0.
    """

    data: Dataset  #: The data set, which has rows of other sides as well.
    read_rows: RowReader  #: Copies rows of the side by number; pixels are converted to [0, 1].
    row_classes: Tensor  #: (n,) int64, the index of each row's class in ``class_names``.
    rows_by_class: ClassIndex  #: For each class the numbers of its rows.
    class_names: tuple[str, ...]  #: The names of the classes of this side.
    feature_stds: Tensor  #: (dim,) float32, the standard deviation of each feature over rows of this side.


def select_split_side(data: Dataset, side: str) -> SplitSide:
    """Select the classes on one side of a data set's split (a name in ``SPLIT_SIDES``), without copying rows.

    An InputError about ``dataset`` is raised if there is no split, or if fewer than two of the classes have two rows.
    """
    # The features' standard deviations are estimated from about this many rows at most.
    max_rows_for_std = 4096
    if data.sides is None:
        raise_input_error("dataset", "have a split by class", "none", "Pass `split_seed` 0.")
    chosen = [c for c, side_of_class in enumerate(data.sides) if side_of_class == side]
    class_ids = torch.tensor(chosen, dtype=torch.int64)
    rows = torch.isin(data.y, class_ids).nonzero().flatten()  # (n,)
    classes = torch.searchsorted(class_ids, data.y[rows])
    index = index_classes(classes)
    usable = int((index.class_counts > 1).sum())
    if usable < 2:
        remedy = "Add classes or rows to that side; a random split needs 10 classes or more, and data without a split."
        raise_input_error("dataset", f"have at least 2 {side} classes with 2 rows", usable, remedy)
    sampled = rows[:: -(-len(rows) // max_rows_for_std)]
    spread = data.get_rows(sampled).float().std(dim=0, correction=0)
    names = tuple(data.class_names[c] for c in chosen)
    return SplitSide(data, lambda numbers: data.get_rows(rows[numbers]), classes, index, names, spread)


def draw_training_episodes(
    base: SplitSide, plan: TrainingPlan, step: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Draw the training episodes of a step, augmented if the plan says so: this process's share of the episodes.

    The episodes depend only on the seed of the plan and the step, not on the number of processes.

    Returns:
        The rows (episodes, n_way, n_shot + n_query, dim) float32, support first; and the base class of each
        row, (episodes, n_way, n_shot + n_query) int64.
    """
    n_episodes = plan.episodes_per_step // group.world_size
    first = step * plan.episodes_per_step + group.rank * n_episodes
    setting = EpisodeConfig((plan.way, plan.way), (plan.shot, plan.shot), plan.query)
    draw = setting.sample(base.rows_by_class, seed=plan.seed, first=first, n_episodes=n_episodes)
    rows = torch.cat([draw.support_ids, draw.query_ids], dim=2)  # (episodes, n_way, n_shot + n_query)
    x = base.read_rows(rows.flatten()).float()
    if plan.augment == "none":
        return x.unflatten(0, rows.shape), base.row_classes[rows]
    seed = np.random.SeedSequence([plan.seed, step]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(seed[0]))
    # Every process draws the random numbers of all processes, and uses its own.
    spread = None if plan.backbone in MIN_IMAGE_SIDES else base.feature_stds
    x = augment_rows(x, spread, generator, n=len(x) * group.world_size, first=group.rank * len(x))
    return x.unflatten(0, rows.shape), base.row_classes[rows]


def score_best_raw_method(validation: SplitSide, plan: TrainingPlan) -> tuple[str, ValidationScore]:
    """Measure the accuracy of the raw features on the validation episodes, as the baseline for an encoder.

    Returns the name of the more accurate one of ``RAW_FEATURE_METHODS``, and its score.
    """
    methods = {name: METHODS[name] for name in RAW_FEATURE_METHODS}
    accuracies = _score_methods(validation.data.x, validation.rows_by_class, methods, plan, take=validation.read_rows)
    name = max(accuracies, key=lambda name: nan_mean(accuracies[name]))
    return name, ValidationScore(0, nan_mean(accuracies[name]), interval_half_width(accuracies[name]))


def score_encoder(
    encoder: nn.Module, head: nn.Module, validation: SplitSide, plan: TrainingPlan, step: int
) -> ValidationScore:
    """Measure the accuracy of an encoder and its head on the validation episodes, after ``step`` training steps.

    Episodes are classified by the few-shot method of the training objective. The encoder must be in evaluation mode.
    """
    trained = TrainedEncoder(encoder, head, plan, validation.read_rows)
    method: Mapping[str, Method] = {"own": METHODS.get(plan.objective, protonet_cosine)}
    embeddings = embed_rows_in_batches(encoder, validation.read_rows, torch.arange(len(validation.row_classes)))
    accuracy = _score_methods(embeddings, validation.rows_by_class, method, plan, trained=trained)["own"]
    return ValidationScore(step, nan_mean(accuracy), interval_half_width(accuracy))


N_VALIDATION_EPISODES = 600  #: The number of validation episodes, our own choice.
N_MAML_VALIDATION_EPISODES = 200  #: The number of episodes for MAML, which adapts the whole network in each.


def _score_methods(
    x: Tensor,
    index: ClassIndex,
    methods: Mapping[str, Method],
    plan: TrainingPlan,
    *,
    take: RowReader | None = None,
    trained: TrainedEncoder | None = None,
) -> dict[str, Tensor]:
    """Compute the accuracies (episodes,) of each method on the validation episodes, by the method's name."""
    # Our own choice, the same at every validation: 5 classes, or all if they are fewer, with 15 queries, or all
    # remaining rows; one shot for the objective prototypes, and the shots of training for the others.
    n_shot = 1 if plan.objective == "prototypes" else plan.shot
    n_way = plan.head_n_way or min(5, int((index.class_counts > n_shot).sum()))
    config = EpisodeConfig((n_way, n_way), (n_shot, n_shot), 15, allow_small=True)
    index = config.validate(index, ())
    n_episodes = N_MAML_VALIDATION_EPISODES if plan.objective == "maml" else N_VALIDATION_EPISODES
    group = get_process_group()
    scores = evaluate(x, index, methods, config, episodes=n_episodes, group=group, take=take, trained=trained)
    return {name: score.accuracy for name, score in scores.items()}
