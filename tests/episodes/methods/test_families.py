"""On features that are not normal about zero, no default method may fall far below prototypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from protonet.episodes.__main__ import DEFAULT_METHODS
from protonet.episodes.evaluation.evaluate import evaluate
from protonet.episodes.methods import METHODS
from protonet.episodes.methods.choice import choose_methods
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.sampling import index_classes

CLASSES, ROWS, DIM = 64, 60, 64
#: Configurations of episodes, with the number of episodes.
SETTINGS = (EpisodeConfig((5, 5), (1, 1)), 30), (EpisodeConfig((10, 10), (10, 10)), 8)
#: Methods that need no base classes.
TESTED = tuple(dict.fromkeys((*DEFAULT_METHODS, *(name for name, spec in METHODS.items() if spec.centred))))
#: For each family, a function that makes features from class centres and noise, both standard normal.
FAMILIES: dict[str, Callable[[Tensor, Tensor, torch.Generator], Tensor]] = {
    # Log-normal: most are small, some many times as large.
    "skewed": lambda centres, noise, _: (0.5 * centres + 0.8 * noise).exp(),
    # Student's t with 2 degrees of freedom, whose variance is infinite.
    "heavy-tailed": lambda centres, noise, generator: (
        0.9 * centres + noise / torch.randn(2, *noise.shape, generator=generator).square().mean(dim=0).sqrt()
    ),
    # Mean 30: all cosines between rows are nearly 1.
    "shifted": lambda centres, noise, _: 30 + 0.6 * centres + noise,
    # 88 % zeros, as after a ReLU.
    "sparse": lambda centres, noise, _: (0.8 * centres + noise - 1.5).clamp_min(0),
}


def score_methods(family: str, setting: EpisodeConfig, names: Sequence[str], n_episodes: int) -> dict[str, Tensor]:
    """Compute the accuracy (n_episodes,) of each method, all on the same episodes of a family."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, 1, DIM, generator=generator)
    x = FAMILIES[family](centres, torch.randn(CLASSES, ROWS, DIM, generator=generator), generator).flatten(0, 1)
    index = index_classes(torch.arange(CLASSES).repeat_interleave(ROWS))
    scores = evaluate(x, index, choose_methods(names), setting, n_episodes=n_episodes)
    return {name: score.accuracy for name, score in scores.items()}


@pytest.mark.parametrize(("setting", "n_episodes"), SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_default_is_far_below_prototypes(family: str, setting: EpisodeConfig, n_episodes: int) -> None:
    scores = score_methods(family, setting, TESTED, n_episodes)
    accuracy = {name: float(values.mean()) for name, values in scores.items()}
    assert min(accuracy.values()) > 0.9 * accuracy["protonet"], accuracy


def test_a_common_mean_costs_the_adaptive_method_nothing_at_one_shot() -> None:
    accuracy = score_methods("shifted", SETTINGS[0][0], ("protonet", "adaptive"), 200)
    lead = accuracy["adaptive"] - accuracy["protonet"]
    assert float(lead.mean()) > -3 * float(lead.std()) / len(lead) ** 0.5
