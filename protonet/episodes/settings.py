"""The settings of evaluations and of meta-training, which also declare the options of their commands.

Nothing here imports torch. A field without a declaration of an option is set in Python alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from protonet.episodes import names
from protonet.errors import raise_input_error
from protonet.ui.command_line import check_known_name, parse_integer, parse_number
from protonet.ui.options import option, parse_integer_up_to, same_option

if TYPE_CHECKING:
    from torch import Tensor

    from protonet.datasets import Dataset

_SPLIT_SEED_HELP = "split the classes at random: 60 %% base, 15 %% validation, 25 %% novel"
_IMAGE_SIZE_HELP = "pixels per side of pictures (default: as their authors take them; a folder by class: 28, grey)"
_parse_positive, _parse_count = partial(parse_integer, low=1), partial(parse_integer, low=0)
_parse_positive_number = partial(parse_number, low=0, strict=True)
_parse_seed, _parse_rows = (
    partial(parse_integer_up_to, 2**63 - 1),
    partial(parse_integer_up_to, names.MAX_CLASSES_OR_ROWS, low=1),
)
_EPISODES = "episodes and validation"


def parse_integer_range(argument: str, text: str, *, low: int) -> tuple[int, int]:
    """Parse ``5`` as (5, 5) and ``5-20`` as (5, 20); raise an InputError for other texts or numbers below ``low``."""
    first, dash, last = text.partition("-")
    if not first or (dash and not last):
        raise_input_error(argument, "be a number or a span such as 5-20", repr(text), f"Pass a number >= {low}.")
    minimum = parse_integer(argument, first, low=low)
    maximum = parse_integer(argument, last, low=low) if dash else minimum
    if maximum < minimum:
        raise_input_error(argument, "be a number or a span such as 5-20", repr(text), "Write the smaller number first.")
    return minimum, maximum


def parse_shots(argument: str, text: str) -> list[tuple[int, int]]:
    """Parse numbers or spans with commas between them, such as ``1,5-20``, each of which one evaluation has."""
    shots = [parse_integer_range(argument, part, low=1) for part in text.split(",")]
    if len(set(shots)) < len(shots):
        raise_input_error(argument, "have each value once", repr(text), "Leave one out.")
    return shots


def _parse_way(argument: str, text: str) -> tuple[int, int] | str:
    """Parse the number of classes: a number, a span, or all."""
    return text if text == "all" else parse_integer_range(argument, text, low=2)


def format_setting(value: object) -> str:
    """Format the value of a setting as on the command line, such as ``5-20`` for (5, 20)."""
    if isinstance(value, list):
        return ",".join(map(format_setting, value))
    return "-".join(map(str, dict.fromkeys(value))) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """The settings of an evaluation that determine its rows; those of `EvaluationSettings`, which describes them."""

    dataset: str | Path | Dataset = option(
        "glyphs (default), digits, synthetic:FAMILY, FEATURES.npz, TABLE.csv, a folder of images by class, KIND:ROOT;"
        " several for a table of all",
        "glyphs",
        nargs="+",
        metavar="DATA",
    )
    side: str | None = option(
        "side of the split by class: novel (default if there is a split), validation, base or all",
        metavar="SIDE",
        parse=partial(check_known_name, known_names=names.SPLIT_SIDE_CHOICES),
    )
    encoder: str | Path | None = option("file from 'train'; without it, features are used as they are", metavar="FILE")
    test_dataset: str | Path | None = option(
        "test rows of each --dataset, of the same classes: all are queries, of all-way draws of the support; with"
        " --way N, or --n-effective-classes, queries of N-way episodes are drawn from them",
        nargs="+",
        metavar="DATASET",
        group="data",
    )
    validation_dataset: str | Path | None = option(
        "with --test-dataset and --tune: validation rows of each --dataset, of the same classes",
        nargs="+",
        metavar="DATASET",
        group="data",
    )
    split_seed: int | None = option(_SPLIT_SEED_HELP, group="data", parse=_parse_count)
    image_size: int | None = option(_IMAGE_SIZE_HELP, group="data", parse=_parse_positive)
    normalize: str = option(
        "of all rows, before any method: l2, to unit norm; cl2, less the base mean, then l2; z, each row's features"
        " to mean 0, variance 1",
        "none",
        metavar="{none,l2,cl2,z}",
        group="data",
        parse=partial(check_known_name, known_names=names.ROW_NORMALIZATIONS),
    )
    base: str | Path | None = option(
        "take the base classes of this data set, in place of the evaluated one's", metavar="FILE", group="data"
    )
    texts: str | Path | None = option(
        "embeddings of texts by class, such as CLIP's: .npz of x and y, the names of the data set's classes",
        metavar="FILE",
        group="data",
    )


#: Options of episodes that several protocols depend on.
_COMMON = ("way", "shot", "query", "unequal", "imbalance", "allow_small", "n_effective_classes", "multinomial")
#: For each protocol, the settings that its episodes depend on, of those that some protocol does not.
PROTOCOL_SETTINGS = {
    "episodes": (*_COMMON, "n_open_classes", "unlabelled", "distractors", "side", "split_seed", "base"),
    "meta-dataset": ("hierarchy", "side", "split_seed", "base"),
    "generalized": (*_COMMON, "side", "split_seed"),
    "test-split": (*_COMMON, "n_open_classes", "base"),
    "fixed-split": ("shot", "allow_small", "base"),
    "own": ("side", "split_seed", "base"),
}


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(RowSettings):
    """The settings of an evaluation: its options on the command line, its arguments in Python, and its JSON.

    Args:
        dataset: The name or the path of a data set, see `load_source`; or one in memory.
        side: The side of the split to draw episodes from: "novel", "validation", "base" or "all". None selects "novel"
            if the data have a split, otherwise "all".
        encoder: A file from ``python -m protonet.episodes train``; None to use the features themselves.
        test_dataset: A data set of test rows of the same classes. All are queries of all-way episodes or, with ``way``
            or ``n_effective_classes``, those that queries are drawn from. Support rows are drawn from ``dataset``.
        validation_dataset: A data set of validation rows of the same classes, for ``tune`` with ``test_dataset``.
        split_seed: Seed of a random split by class, for data without a split; None for no such split.
        image_size: Pixels per side to resize pictures to; None for the size that their authors use.
        normalize: The normalisation of all rows: "none", "l2", "cl2" or "z", see `normalize_rows`.
        base: A data set whose rows are the base classes; None for the base classes of the split.
        texts: A data set of embedded texts that name the classes, for `clip_zero_shot` and `tip_adapter`.
        way, shot, query, unequal, imbalance, n_open_classes: As of `EpisodeConfig`; None for its defaults. If ``way``
            is "all", episodes have all classes.
        unlabelled, distractors, n_effective_classes, multinomial, allow_small: As of `EpisodeConfig`, too.
        protocol: "episodes", "generalized" or "meta-dataset"; or a sampler, such as an `EpisodeConfig`.
        hierarchy: For Meta-Dataset: names (superclass/class) or "meta-ilsvrc-2012".
        episodes: Largest number of episodes, >= 1; None for 2,000, or 10 draws of the support of a fixed test split.
        method: Names of methods, with settings such as ``tim:steps=100``, ``file.py:function``, or "all"; or a mapping
            from names to functions from a batch of `Episodes` to logits.
        tune: Methods with several values of settings, such as ``ridge:penalty=0.1,1``. The settings that are best on
            validation classes are evaluated as a further method.
        seed: Seed of the episodes, in [0, 2**63).
        device: The device on which rows are embedded, classified and scored.
        against: The method that all other methods are compared with; None to compare all pairs of methods.
        records: Whether to record the rows and the prediction of each query. All episodes must then have the same size.
    """

    way: tuple[int, int] | Literal["all"] | None = option(
        "classes per episode (default 5), or all", metavar="N[-M]", parse=_parse_way
    )
    shot: tuple[int, int] | None = option(
        "support rows per class (default 1); 1,5 evaluates both", metavar="N[-M]", parse=parse_shots
    )
    query: int | None = option("query rows per class (default 15)", parse=_parse_positive)
    episodes: int | None = option(
        "most episodes (default 2000; 10 of a fixed test split, which are draws of the support)", parse=_parse_positive
    )
    method: Sequence[str] | Mapping[str, Callable[..., Tensor]] = option(
        "names, with settings as in tim:steps=100, FILE.py:FUNCTION, or all (default:"
        f" {' '.join(names.DEFAULT_METHODS)})",
        names.DEFAULT_METHODS,
    )
    tune: Sequence[str] = option(
        "add methods with the settings best on validation classes: METHOD:name=v1,v2 (v1/v2 where each is several)",
        (),
        metavar="GRID",
    )
    protocol: object = option(
        "episodes (default); generalized: base classes beside novel ones; meta-dataset: its ways and shots",
        "episodes",
        metavar="{episodes,generalized,meta-dataset}",
        group="episodes",
        parse=partial(check_known_name, known_names=names.EPISODE_PROTOCOLS),
    )
    unequal: bool = option("draw the number of shots for each class alone", False, group="episodes")
    imbalance: float | None = option(
        "share queries by a Dirichlet distribution of this concentration, such as 2.0 (default: equally)",
        metavar="A",
        group="episodes",
        parse=_parse_positive_number,
    )
    n_effective_classes: int | None = option(
        "queries of this many of an episode's classes, drawn at random (default: of all)",
        group="episodes",
        parse=_parse_positive,
    )
    multinomial: bool = option(
        "draw each query from the rows of all (effective) classes, so that numbers of queries are multinomial",
        False,
        group="episodes",
    )
    n_open_classes: int | None = option(
        "classes outside the episode, with queries", group="episodes", parse=_parse_count
    )
    unlabelled: int | None = option(
        "unlabelled rows of each class, for methods that learn from them", group="episodes", parse=_parse_count
    )
    distractors: int | None = option(
        "classes outside the episode, with as many unlabelled rows", group="episodes", parse=_parse_count
    )
    hierarchy: str | None = option("of meta-dataset: names (superclass/class) or meta-ilsvrc-2012", group="episodes")
    allow_small: bool = option(
        "accept classes with few rows, with fewer queries; with --imbalance, that balances queries somewhat",
        False,
        group="episodes",
    )
    seed: int = option("seed of the episodes (default 0)", 0, group="episodes", parse=_parse_seed)
    device: str = option(
        "such as cuda: where rows are embedded, classified and scored (default cpu); episodes are the same",
        "cpu",
        group="episodes",
    )
    against: str | None = option(
        "compare this method alone with each other one, not all pairs; the tuned one where --tune has it",
        group="results",
    )
    records: bool = False

    @property
    def sampling(self) -> str:
        """The kind of the episodes: a key of ``PROTOCOL_SETTINGS``."""
        if not isinstance(self.protocol, str):
            return "own"
        if self.test_dataset is None:
            return self.protocol
        has_way = self.way not in {None, "all"} or self.n_effective_classes is not None
        return "test-split" if has_way else "fixed-split"

    def find_unused(self) -> str | None:
        """Return the first setting that differs from its default and that the kind of episodes does not depend on."""
        for declared in fields(self):
            name, value = declared.name, getattr(self, declared.name)
            of_some = any(name in of_kind for of_kind in PROTOCOL_SETTINGS.values())
            is_all = value == "all" and (name == "side" or self.sampling == "fixed-split")
            if of_some and name not in PROTOCOL_SETTINGS[self.sampling] and value != declared.default and not is_all:
                return name
        return None

    def check_protocol(self) -> None:
        """Raise an InputError about settings that do not go together with the protocol."""
        kind = "`test_dataset`" if self.test_dataset is not None else f"`protocol` {self.protocol}"
        if self.test_dataset is not None and self.protocol != "episodes" and self.sampling != "own":
            raise_input_error("test_dataset", f"be left out with `protocol` {self.protocol}", "both", "Leave one out.")
        if self.way == "all" and self.protocol == "generalized":
            raise_input_error("way", f"be a number or a span with {kind}", "all", "Pass a number.")
        if (name := self.find_unused()) is not None:
            remedy = "Leave it out." if name != "hierarchy" else "Pass `protocol` meta-dataset."
            raise_input_error(name, f"be left out with {kind}", format_setting(getattr(self, name)), remedy)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """All settings that determine the result of meta-training; checkpoints store them under these names.

    Settings that are None get the default of the objective. Numbers of classes and rows are those of an episode.
    """

    dataset: str = option(
        "glyphs (default), digits, synthetic:FAMILY, FEATURES.npz, TABLE.csv, a folder of images by class, or"
        " KIND:ROOT, of mini-imagenet, tiered-imagenet, cub, cifar-fs, fc100, omniglot and omniglot-rotations",
        "glyphs",
        metavar="DATA",
    )
    split_seed: int | None = same_option(RowSettings, "split_seed", group="")
    """Seed of a random split of the classes; None for the split that the data have."""
    backbone: str = option(
        "conv (default for square grey images), conv4 (default for RGB), resnet12, or mlp, for rows of any kind", ""
    )
    """One of ``BACKBONES``; "" to choose one by the kind of data, see `choose_backbone`."""
    objective: str = option(
        "prototypes (default): cosine prototypes, with one proxy per base class; protonet: that of Snell et al.,"
        " squared Euclidean distances to class means alone; feat: prototypes adapted to each other by a transformer;"
        " maml, anil: gradient steps on the support, of the whole network or its last layer",
        "prototypes",
    )
    way: int = option(
        "classes per training episode; all base classes if they are fewer (default 64; 30 for protonet; 5 for feat,"
        " maml, anil)",
        parse=partial(_parse_rows, low=2),
    )
    shot: int = option("support rows per class (default 1)", 1, parse=_parse_rows)
    steps: int = option("most steps (default 2000)", 2000, parse=_parse_rows)
    seed: int = option(
        "of the initial weights, the episodes and the augmentation; up to 2^63 - 1 (default 0)", 0, parse=_parse_seed
    )
    """Seed of initial weights, episodes and augmentation, in [0, 2**63)."""
    query: int = option(
        "query rows per class (default 1; 15 for protonet; 15 for feat, maml, anil)", group=_EPISODES, parse=_parse_rows
    )
    episodes_per_step: int = option(
        "episodes per step, shared by the processes (default 2; 1 for protonet; 4 for feat, maml, anil)",
        group=_EPISODES,
        parse=_parse_rows,
    )
    eval_every: int = option(
        "steps from one validation to the next (default 100)", 100, group=_EPISODES, parse=_parse_rows
    )
    patience: int = option(
        "stop after this many validations without a new best score (default 8)", 8, group=_EPISODES, parse=_parse_rows
    )
    learning_rate: float = option(
        "AdamW's (default 0.003; 0.001 for protonet, feat, maml, anil)",
        metavar="R",
        group="learning",
        parse=_parse_positive_number,
    )
    """The default of the objective prototypes is our own choice."""
    inner_steps: int = option(
        "of maml and anil: gradient steps on the support (default 5)", group="learning", parse=_parse_positive
    )
    inner_rate: float = option(
        "of maml and anil: the rate of these steps (default 0.01)",
        metavar="R",
        group="learning",
        parse=_parse_positive_number,
    )
    first_order: bool = option(
        "of maml and anil: take these steps' gradients for constants, which is faster", False, group="learning"
    )
    """Whether the gradients of the inner loop are treated as constants (first-order MAML)."""
    head: str = option(
        "of maml and anil: initial weights of the last layer: classes (default), learned weights of each class, for"
        " episodes of --way classes alone, or zero, for any number of classes",
        group="learning",
    )
    dropblock: float = option(
        "of resnet12: drop this share of its maps by DropBlock, such as 0.1 (default 0)",
        0.0,
        metavar="R",
        group="learning",
        parse=partial(parse_number, low=0),
    )
    start: str | None = option(
        "begin at the encoder of another run, of the same backbone, such as one of prototypes (default: new weights)",
        metavar="FILE",
        group="learning",
    )
    augment: str = option(
        "of training rows: affine (default) rotates, stretches, shears and shifts pictures, mirrors those in colour,"
        " and adds noise to rows of other kinds; none (default of protonet, as Snell et al.) leaves them as they are",
        group="learning",
    )
    dim: int = 0  #: Features per row; 0 until the data are loaded.
    classes: int = 0  #: The number of base classes; 0 until the data are loaded.

    def __post_init__(self) -> None:
        """Set the defaults of the objective; raise an InputError for unknown names and a share of 1 or more."""
        check_known_name("objective", self.objective, names.OBJECTIVES)
        for name, value in _get_objective_defaults(self.objective).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.backbone:
            check_known_name("backbone", self.backbone, names.BACKBONES)
        check_known_name("augment", self.augment, names.AUGMENTATIONS)
        check_known_name("head", self.head, names.HEAD_INITS)
        if self.dropblock >= 1:
            raise_input_error("dropblock", "be a share below 1", self.dropblock, "Pass a number such as 0.1.")

    @property
    def head_n_way(self) -> int | None:
        """The number of classes per episode that the head is limited to; None if any number is possible."""
        return self.way if self.head == "classes" else None


def _get_objective_defaults(objective: str) -> dict[str, object]:
    """Return the defaults of settings that depend on the objective."""
    defaults: dict[str, object] = {"way": 64, "query": 1, "episodes_per_step": 2, "learning_rate": 0.003}
    defaults |= {"augment": "affine", "inner_steps": 0, "inner_rate": 0.0, "head": "zero"}
    if objective == "protonet":  # Snell et al. train on 30 classes for 1-shot mini-ImageNet, without augmentation
        defaults |= {"way": 30, "query": 15, "episodes_per_step": 1, "learning_rate": 0.001, "augment": "none"}
    elif objective != "prototypes":  # whose papers train on episodes like those of the evaluation
        defaults |= {"way": 5, "query": 15, "episodes_per_step": 4, "learning_rate": 0.001}
    if objective in names.INNER_LOOP_OBJECTIVES:
        defaults |= {"inner_steps": 5, "inner_rate": 0.01, "head": "classes"}
    return defaults
