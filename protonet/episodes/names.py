"""Known names of settings, limits, and presets, in a module that does not import torch."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

EVALUATE_PROG = "protonet.episodes"
MAX_CLASSES_OR_ROWS = 10**6  #: The largest allowed number of classes and of rows per class.
AUGMENTATIONS = ("none", "affine")
BACKBONES = ("mlp", "conv", "conv4", "resnet12")
OBJECTIVES = ("prototypes", "protonet", "feat", "maml", "anil")
#: Initial weights of the last layer of MAML and ANIL: "classes" for learned weights of each class, or "zero".
HEAD_INITS = ("classes", "zero")
INNER_LOOP_OBJECTIVES = ("maml", "anil")  #: Objectives that classify queries after gradient steps on the support.
#: Normalisations of rows. none: no normalisation. l2: scale to unit norm. cl2: subtract the mean of the base classes'
#: rows, then scale to unit norm. z: subtract the mean of the row's features, and divide by their standard deviation.
ROW_NORMALIZATIONS = ("none", "l2", "cl2", "z")
DEFAULT_METHODS = ("protonet", "protonet-cosine", "simpleshot", "adaptive", "bd-cspn")
SPLIT_SIDE_CHOICES = ("novel", "validation", "base", "all")
EPISODE_PROTOCOLS = ("episodes", "generalized", "meta-dataset")


@dataclass(frozen=True)
class Preset:
    """A preset: the command-line options of an evaluation protocol that papers report, with their source."""

    summary: str  #: A description of the episodes, in one line.
    source: str  #: The papers that report such evaluations.
    options: str  #: The options, as on the command line.


#: Options of 5-way episodes with 1 and 5 shots and 15 queries per class.
FIVE_WAY_OPTIONS = "--way 5 --shot 1,5 --query 15"
#: The presets by their names on the command line.
PRESETS = {
    "mini-imagenet": Preset(
        "5-way, 1 and 5 shots, 15 queries, 600 episodes: mini-ImageNet, CUB and similar sets",
        "Ravi and Larochelle, Optimization as a model for few-shot learning (2017), sec. 5.1",
        f"{FIVE_WAY_OPTIONS} --episodes 600",
    ),
    "metaopt": Preset(
        "5-way, 1 and 5 shots, 15 queries, 1,000 episodes: tieredImageNet, CIFAR-FS, FC100, Omniglot (also --way 20)",
        "Lee et al., Meta-learning with differentiable convex optimization (2019), its code's test.py; Snell et al., "
        "Prototypical networks for few-shot learning (2017), sec. 3.1 and its code",
        f"{FIVE_WAY_OPTIONS} --episodes 1000",
    ),
    "simpleshot": Preset(
        "5-way, 1 and 5 shots, 15 queries, 10,000 episodes",
        "Wang et al., SimpleShot (2019), sec. 4.1; Boudiaf et al., TIM (2020)",
        f"{FIVE_WAY_OPTIONS} --episodes 10000",
    ),
    "dirichlet": Preset(
        "5-way, 1, 5, 10 and 20 shots, 75 queries by Dirichlet shares of 2, 10,000 episodes",
        "Veilleux et al., Realistic evaluation of transductive few-shot learning (2021), sec. 5",
        "--way 5 --shot 1,5,10,20 --query 15 --imbalance 2 --episodes 10000",
    ),
    "paddle": Preset(
        "all ways, 5, 10 and 20 shots, 75 queries drawn from 5 effective classes, 1,000 episodes",
        "Martin et al., Towards practical few-shot query sets: transductive minimum description length inference "
        "(2022), sec. 4.1, and its code's config/main_config.yaml",
        "--way all --shot 5,10,20 --query 15 --n-effective-classes 5 --multinomial --episodes 1000",
    ),
    "open-set": Preset(
        "5-way, 1 and 5 shots, 15 queries of each class and of 5 open ones, 500 episodes",
        "Boudiaf et al., Open-set likelihood maximization for few-shot learning (2023), its code's inference.py",
        f"{FIVE_WAY_OPTIONS} --n-open-classes 5 --episodes 500",
    ),
    "bscd-fsl": Preset(
        "5-way, 5, 20 and 50 shots, 15 queries, 600 episodes: CropDiseases, EuroSAT, ISIC, ChestX",
        "Guo et al., A broader study of cross-domain few-shot learning (2020), sec. 4.1",
        "--way 5 --shot 5,20,50 --query 15 --episodes 600 --side all",
    ),
    "meta-dataset": Preset(
        "Meta-Dataset's sampler, 600 episodes of each data set",
        "Triantafillou et al., Meta-Dataset (2020), sec. 3.2 and 4",
        "--protocol meta-dataset --episodes 600",
    ),
    "semi-supervised": Preset(
        "5-way 1-shot, 20 queries, 20 unlabelled rows of each class and of 5 distractor classes, 600 episodes",
        "Ren et al., Meta-learning for semi-supervised few-shot classification (2018), its code's README",
        "--way 5 --shot 1 --query 20 --unlabelled 20 --distractors 5 --episodes 600",
    ),
    "coop": Preset(
        "all classes, 1, 2, 4, 8 and 16 shots, three draws; the test split by --test-dataset",
        "Zhou et al., Learning to prompt for vision-language models (2022), sec. 4.1; Zhang et al., Tip-Adapter (2022)",
        "--way all --shot 1,2,4,8,16 --episodes 3",
    ),
}


def format_presets() -> str:
    """Format all presets with their options and sources as text, for ``--list-presets``."""
    lines = ["A preset sets options; options on the command line take precedence: --preset bscd-fsl --shot 5."]
    for name, preset in PRESETS.items():
        lines += ["", f"{name}: {preset.summary}", f"  {preset.options}"]
        lines += textwrap.wrap(f"Source: {preset.source}", 100, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines) + "\n"
