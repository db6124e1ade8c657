"""Names of options, limits, and the plan of meta-training; without imports, so that commands start fast."""

from __future__ import annotations

from dataclasses import dataclass

EVALUATE_PROG = "protonet.episodes"
TRAIN_PROG = f"{EVALUATE_PROG} train"
COMPARE_PROG = f"{EVALUATE_PROG} compare"
EXTRACT_PROG = f"{EVALUATE_PROG} extract"
PAPER_PROG = f"{EVALUATE_PROG} paper"
MAX_OPTION_COUNT = 10**6  #: The largest allowed number of classes and of rows per class.
BACKBONES = ("mlp", "conv", "conv4", "resnet12")
OBJECTIVES = ("prototypes", "protonet", "feat", "maml", "anil")
#: Initial weights of the last layer of MAML and ANIL: "classes" for learned weights of each class, or "zero".
HEAD_KINDS = ("classes", "zero")
ADAPTED_OBJECTIVES = ("maml", "anil")  #: Objectives that classify queries after gradient steps on the support.
#: Normalisations of rows. none: no normalisation. l2: scale to unit norm. cl2: subtract the mean of the base classes'
#: rows, then scale to unit norm. z: subtract the mean of the row's features, and divide by their standard deviation.
ROW_NORMALIZATIONS = ("none", "l2", "cl2", "z")
_SAME_NAMES = (
    *("against", "allow_small", "backbone", "base", "dataset", "device", "distractors", "dropblock"),
    *("encoder", "episodes", "episodes_per_step", "first_order", "head", "hierarchy", "image_size"),
    *("imbalance", "inner_rate", "inner_steps", "learning_rate", "maps", "method", "n_open_classes", "names"),
    *("normalize", "objective", "output", "patience", "preset", "protocol", "query", "resume", "seed", "shot"),
    *("side", "split_seed", "start", "state", "steps", "target_half_width", "template", "test_dataset"),
    *("texts", "traceback", "tune", "unequal", "unlabelled", "validation_dataset", "way", "weights"),
)
#: The command-line option for each argument of a function, so that error messages can name the option.
OPTION_NAMES = {
    **{name: f"--{name.replace('_', '-')}" for name in _SAME_NAMES},
    "n_episodes": "--episodes",
    "n_query": "--query",
    "n_unlabelled": "--unlabelled",
    "n_distractors": "--distractors",
}
PAPER_OPTION_NAMES = OPTION_NAMES | {"own": "METHOD", "tune": "METHOD", "state": "--output", "resume": "--output"}


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """All settings that determine the result of meta-training; checkpoints store them under these names."""

    dataset: str  #: The data set, as the command line names it.
    split_seed: int | None  #: Seed of a random split of the classes; None for the split that the data have.
    way: int  #: Classes per training episode.
    shot: int  #: Support rows per class.
    query: int  #: Query rows per class.
    episodes_per_step: int  #: Episodes whose losses are averaged in an optimizer step.
    steps: int  #: The largest number of optimizer steps.
    eval_every: int  #: Steps between two validations.
    patience: int  #: Training stops after this many validations without a new best score.
    seed: int  #: Seed of initial weights, episodes and augmentation, in [0, 2**63).
    dim: int = 0  #: Features per row; 0 until the data are loaded.
    classes: int = 0  #: The number of base classes; 0 until the data are loaded.
    backbone: str = ""  #: One of ``BACKBONES``; "" to choose one by the kind of data, see `choose_backbone`.
    objective: str = "prototypes"  #: One of ``OBJECTIVES``.
    learning_rate: float = 3e-3  #: The learning rate of AdamW, > 0. The default is our own choice.
    inner_steps: int = 0  #: Gradient steps of MAML and ANIL on an episode's support (the inner loop).
    inner_rate: float = 0.0  #: The learning rate of the inner loop.
    first_order: bool = False  #: Whether the gradients of the inner loop are treated as constants (first-order MAML).
    dropblock: float = 0.0  #: The rate of DropBlock in ResNet-12, in [0, 1).
    start: str | None = None  #: The path of a checkpoint with the encoder's initial weights; None for random weights.
    head: str = "zero"  #: The initial weights of the last layer of MAML and ANIL, one of ``HEAD_KINDS``.

    @property
    def head_way(self) -> int | None:
        """The number of classes per episode that the head is limited to; None if any number is possible."""
        return self.way if self.head == "classes" else None
