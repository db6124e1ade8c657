"""Samplers from the options of the command, and presets: the options of evaluations that papers report, by name."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from protonet._validation import check_number
from protonet.episodes.samplers.config import EpisodeConfig
from protonet.episodes.samplers.fixed_split import FixedSplit
from protonet.episodes.samplers.generalized import Generalized
from protonet.episodes.samplers.meta_dataset import MetaDataset
from protonet.episodes.samplers.sampler import Sampler
from protonet.errors import raise_input_error
from protonet.ui.command_line import parse_whole

#: Options of episodes, and those of each protocol.
COMMON_OPTIONS = ("way", "shot", "query", "unequal", "imbalance", "allow_small")
PROTOCOL_OPTIONS = {
    "episodes": (*COMMON_OPTIONS, "n_open_classes", "unlabelled", "distractors", "side", "split_seed", "base"),
    "meta-dataset": ("hierarchy", "side", "split_seed", "base"),
    "generalized": (*COMMON_OPTIONS, "side", "split_seed"),
    "fixed-split": ("shot", "allow_small", "base"),
}


def read_samplers(options: argparse.Namespace, given: Collection[str], preset: Mapping[str, str]) -> dict[str, Sampler]:
    """Create the samplers that options ask for: one for each number of shots, by that number as text.

    Args:
        options: Of the command.
        given: The names of those that were given, be it with their defaults' values.
        preset: The values by name that the preset ``options.preset`` has; none without one.

    Raises:
        InputError: A value is none of its option's, or an option, given or the preset's, is not one of the protocol's.
    """
    protocol = "fixed-split" if options.test_dataset else options.protocol
    kind = "--test-dataset" if options.test_dataset else f"--protocol {protocol}"
    if options.test_dataset and options.protocol != "episodes":
        remedy = "Leave one of the two out."
        raise_input_error("--test-dataset", f"be left out with --protocol {options.protocol}", "both", remedy)
    if options.way == "all" and not options.test_dataset:
        remedy = "Pass --test-dataset FILE, a test split by rows, or a number."
        raise_input_error("--way", "be a number or a span where there is no --test-dataset", "all", remedy)
    if options.test_dataset and "way" in given and options.way != "all":
        raise_input_error("--way", "be all with --test-dataset", options.way, "Leave it out.")
    for name in (*PROTOCOL_OPTIONS["episodes"], "hierarchy"):
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        is_all = name in {"way", "side"} and value == "all"  # which a fixed split has anyway
        if name in PROTOCOL_OPTIONS[protocol] or is_all:
            continue
        if name in given:
            remedy = "Leave it out." if name != "hierarchy" else "Pass --protocol meta-dataset."
            raise_input_error(option, f"be left out with {kind}", value, remedy)
        if name in preset:
            got = f"{options.preset}, which has {option} {value}"
            raise_input_error("--preset", f"have options that go with {kind}", got, "Leave one of the two out.")
    if protocol == "meta-dataset":
        return {"": MetaDataset(hierarchy=options.hierarchy)}
    shots = options.shot.split(",")
    if len(set(shots)) < len(shots):
        raise_input_error("--shot", "have each value once", repr(options.shot), "Leave one out.")
    if protocol == "fixed-split":  # the classes follow from the data
        return {shot: FixedSplit(parse_whole("--shot", shot, low=1), (), options.allow_small) for shot in shots}
    settings = {shot: read_setting(options, shot) for shot in shots}
    if protocol == "generalized":
        return {shot: Generalized(setting) for shot, setting in settings.items()}
    return {**settings}


def read_setting(options: argparse.Namespace, shot: str) -> EpisodeConfig:
    """Return the episodes that options ask for, with some shots."""
    return EpisodeConfig(
        way=parse_span("--way", options.way, low=2),
        shot=parse_span("--shot", shot, low=1),
        n_query=parse_whole("--query", options.query, low=1),
        unequal=options.unequal,
        imbalance=None
        if options.imbalance is None
        else parse_non_negative("--imbalance", options.imbalance, strict=True),
        n_open_classes=parse_whole("--n-open-classes", options.n_open_classes, low=0),
        allow_small=options.allow_small,
        n_unlabelled=parse_whole("--unlabelled", options.unlabelled, low=0),
        n_distractors=parse_whole("--distractors", options.distractors, low=0),
    )


def parse_span(argument: str, text: str, *, low: int) -> tuple[int, int]:
    """Parse ``5`` as (5, 5) and ``5-20`` as (5, 20); raise an InputError for anything else."""
    first, dash, last = text.partition("-")
    if not first or (dash and not last):
        raise_input_error(argument, "be a number or a span such as 5-20", repr(text), f"Pass a number >= {low}.")
    minimum = parse_whole(argument, first, low=low)
    maximum = parse_whole(argument, last, low=low) if dash else minimum
    if maximum < minimum:
        raise_input_error(argument, "be a number or a span such as 5-20", repr(text), "Write the smaller number first.")
    return minimum, maximum


def parse_non_negative(argument: str, text: str, *, strict: bool) -> float:
    """Parse a finite float >= 0 (> 0 if ``strict``); raise an InputError for anything else."""
    try:
        value: object = float(text)
    except ValueError:
        value = text
    return check_number(argument, value, low=0, strict=strict)


@dataclass(frozen=True)
class Preset:
    """Options of an evaluation."""

    summary: str  #: A description, in one line.
    source: str  #: The paper.
    options: Mapping[str, str]  #: Values by option, as texts; with ``_`` in place of ``-``.


FIVE_WAY = {"way": "5", "shot": "1,5", "query": "15"}
PRESETS = {
    "mini-imagenet": Preset(
        "5-way, 1 and 5 shots, 15 queries, 600 episodes: mini-ImageNet, CUB and their likes",
        "Ravi and Larochelle, Optimization as a model for few-shot learning (2017), sec. 5.1",
        {**FIVE_WAY, "episodes": "600"},
    ),
    "metaopt": Preset(
        "5-way, 1 and 5 shots, 15 queries, 1,000 episodes: tieredImageNet, CIFAR-FS, FC100",
        "Lee et al., Meta-learning with differentiable convex optimization (2019), its code's test.py",
        {**FIVE_WAY, "episodes": "1000"},
    ),
    "simpleshot": Preset(
        "5-way, 1 and 5 shots, 15 queries, 10,000 episodes",
        "Wang et al., SimpleShot (2019), sec. 4.1; Boudiaf et al., TIM (2020)",
        {**FIVE_WAY, "episodes": "10000"},
    ),
    "omniglot": Preset(
        "5-way, 1 and 5 shots, 15 queries, 1,000 episodes; --way 20 is the other half",
        "Snell et al., Prototypical networks for few-shot learning (2017), sec. 3.1 and its code",
        {**FIVE_WAY, "episodes": "1000"},
    ),
    "dirichlet": Preset(
        "5-way, 1, 5, 10 and 20 shots, 75 queries by Dirichlet shares of 2, 10,000 episodes",
        "Veilleux et al., Realistic evaluation of transductive few-shot learning (2021), sec. 5",
        {**FIVE_WAY, "shot": "1,5,10,20", "imbalance": "2", "episodes": "10000"},
    ),
    "open-set": Preset(
        "5-way, 1 and 5 shots, 15 queries of each class and of 5 open ones, 500 episodes",
        "Boudiaf et al., Open-set likelihood maximization for few-shot learning (2023), its code's inference.py",
        {**FIVE_WAY, "n_open_classes": "5", "episodes": "500"},
    ),
    "bscd-fsl": Preset(
        "5-way, 5, 20 and 50 shots, 15 queries, 600 episodes: CropDiseases, EuroSAT, ISIC, ChestX",
        "Guo et al., A broader study of cross-domain few-shot learning (2020), sec. 4.1",
        {**FIVE_WAY, "shot": "5,20,50", "episodes": "600", "side": "all"},
    ),
    "meta-dataset": Preset(
        "Meta-Dataset's sampler, 600 episodes of each data set",
        "Triantafillou et al., Meta-Dataset (2020), sec. 3.2 and 4",
        {"protocol": "meta-dataset", "episodes": "600"},
    ),
    "semi-supervised": Preset(
        "5-way 1-shot, 20 queries, 20 unlabelled rows of each class and of 5 distractor classes, 600 episodes",
        "Ren et al., Meta-learning for semi-supervised few-shot classification (2018), its code's README",
        {"way": "5", "shot": "1", "query": "20", "unlabelled": "20", "distractors": "5", "episodes": "600"},
    ),
    "coop": Preset(
        "all classes, 1, 2, 4, 8 and 16 shots, three draws; the test split by --test-dataset",
        "Zhou et al., Learning to prompt for vision-language models (2022), sec. 4.1; Zhang et al., Tip-Adapter (2022)",
        {"way": "all", "shot": "1,2,4,8,16", "episodes": "3"},
    ),
}


def list_presets() -> str:
    """Return all presets with their options and sources, as text for people."""
    lines = ["A preset sets options; options on the command line take precedence: --preset bscd-fsl --shot 5."]
    for name, preset in PRESETS.items():
        options = " ".join(f"--{option.replace('_', '-')} {value}" for option, value in preset.options.items())
        lines += ["", f"{name}: {preset.summary}", f"  {options}"]
        lines += textwrap.wrap(f"Source: {preset.source}", 100, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines) + "\n"
