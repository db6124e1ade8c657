"""What an evaluation needs: its settings, and the rows, classes, base classes and methods that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from protonet._checks import fail
from protonet.datasets import Dataset
from protonet.datasets.dataset import SIDES
from protonet.episodes.draws.batch import Base, Take, Trained, summarize_base, take_from
from protonet.episodes.draws.fixed_split import FixedSplit, join_split
from protonet.episodes.draws.generalized import Generalized, hold_out, join_base
from protonet.episodes.draws.meta_dataset import MetaDataset, read_groups
from protonet.episodes.draws.numbered import Sampler, Setting
from protonet.episodes.features.normalization import CHUNK, normalize_rows
from protonet.episodes.features.sources import load_base, load_source, load_texts, same_source
from protonet.episodes.methods import ALIASES, METHODS, MethodSpec
from protonet.episodes.methods.choice import ChosenMethod
from protonet.episodes.networks.backbones import embed_rows
from protonet.episodes.networks.checkpoints import find_head_way, load_trained, read_plan
from protonet.sampling import ClassIndex, index_classes, index_pieces, list_pieces

PROG = "protonet.episodes"  #: The command, for messages.


class Experiment(NamedTuple):
    """The settings of an evaluation."""

    dataset: str  #: A data set by name or path, see `protonet.episodes.features.sources.load_source`.
    side: str | None  #: Of the split by class, or "all"; None for "novel" if there is a split, otherwise "all".
    split_seed: int | None  #: Split the classes at random with this seed; None keeps the data set's own split.
    encoder: str | None  #: The path of a checkpoint; None evaluates the features as they are.
    setting: Sampler  #: The kind of episodes, as far as it is known without the data.
    methods: Sequence[ChosenMethod]  #: In the order of the report.
    n_episodes: int  #: Most episodes.
    until: float  #: Stop once the half-widths of all 95 % intervals are below this many percentage points; 0 for never.
    seed: int  #: Of the episodes.
    every: bool = False  #: Evaluate all methods that can run, before ``methods``.
    normalize: str = "none"  #: One of `protonet.episodes.features.normalization.NORMALIZATIONS`.
    base: str | None = None  #: Of whose rows the base statistics are, see `load_base`; None for the data set's own.
    #: For each method to tune, its settings; the best one on validation classes is evaluated with the others.
    tune: Sequence[Sequence[ChosenMethod]] = ()
    against: ChosenMethod | None = None  #: Compare this method with each other one; None compares all pairs.
    texts: str | None = None  #: The embeddings of texts that name the classes, see `load_texts`.
    image_size: int | None = None  #: Pixels per side of pictures, see `protonet.episodes.features.sources.load_source`.
    test: str | None = None  #: The test rows of a `FixedSplit`, a data set by name or path.
    hierarchy: str | None = None  #: Which classes belong together for `MetaDataset`, see `read_groups`.


class Material(NamedTuple):
    """The data and methods of an evaluation, ready to use."""

    x: Tensor  #: (n, dim) floating, of which methods see what ``take`` returns.
    take: Take  #: Returns rows of ``x``, normalised, by number.
    by_class: ClassIndex  #: Rows by class, of the classes to draw from.
    source_rows: Tensor  #: (rows,) int64, the numbers in the data set of ``by_class.rows``.
    class_names: tuple[str, ...]  #: One name per class of the side.
    base: Base | None  #: The base classes, if a method uses them.
    texts: Tensor | None  #: (classes of ``by_class``, dim) float32, embeddings of texts that name them.
    side: str  #: Of the split, or "all".
    methods: dict[str, ChosenMethod]  #: By name.
    notes: list[str]  #: Lines to print with the report.
    setting: Sampler  #: The kind of episodes, of these data.
    trained: Trained | None  #: The encoder that ``x`` is embedded by, with the rows before it by the numbers of ``x``.


class SourceRows(NamedTuple):
    """Rows of a data set, embedded or not."""

    x: Tensor  #: (n, dim) floating.
    places: Tensor  #: (rows of the data set,) int64, where each is in ``x``; -1 for those that are not.
    read: Take | None = None  #: Returns rows of ``x`` by number, where they are not in memory.
    trained: Trained | None = None  #: As in `Material`.

    def open(self) -> Take:
        """Return a function that copies rows into memory of its own: a method may use two of them together."""
        return take_from(self.x) if self.read is None else self.read

    def normalize(self, kind: str, mean: Tensor | None) -> SourceRows:
        """Normalise the rows, those of a mapped file as they are read; arguments are as in `normalize_rows`."""
        if self.read is None:
            return self._replace(x=torch.cat([normalize_rows(x, kind, mean) for x in self.x.split(CHUNK)]))
        read = self.read
        return self._replace(read=lambda rows: normalize_rows(read(rows), kind, mean))


def load_data(experiment: Experiment) -> tuple[Dataset, Experiment]:
    """Load the data set that an experiment names, with its test split where it names one, which its setting then knows.

    Raises:
        MissingPackageError: A package that the data need is missing.
        InputError: The data cannot be loaded, or both splits do not fit together.
    """
    data = load_source(experiment.dataset, split_seed=experiment.split_seed, image_size=experiment.image_size)
    if experiment.test is None or not isinstance(experiment.setting, FixedSplit):
        return data, experiment
    names = (experiment.dataset, experiment.test)
    data, n_train = join_split(PROG, data, load_source(experiment.test, image_size=experiment.image_size), names)
    return data, experiment._replace(setting=experiment.setting._replace(n_train=n_train))


def prepare(data: Dataset, experiment: Experiment) -> Material:
    """Select the rows and classes of an experiment's side, and embed and normalise them as it says.

    Args:
        data: The data set that the experiment names.
        experiment: The settings. Those of ``tune`` are not looked at.

    Raises:
        InputError: Data, side, encoder, base, setting and methods do not fit together.
    """
    sides = data.sides or ("all",) * data.num_classes
    side = experiment.side or ("all" if data.sides is None else "novel")
    if side not in {"all", *sides}:
        got = f"{side} of {', '.join(sorted(set(data.sides or ()))) or 'no split'}"
        fail(PROG, "--side", "be a side that has classes", got, "Pass --side all, or --split-seed 0 for a split.")
    base_data, base_ids = _find_base(data, side, experiment)
    plan = None if experiment.encoder is None else read_plan(experiment.encoder)
    n_unlabelled = experiment.setting.n_unlabelled if isinstance(experiment.setting, Setting) else 0
    supply = Supply(
        n_base=len(base_ids),
        objective=None if plan is None else plan["objective"],
        head_way=None if plan is None else find_head_way(plan),
        way=experiment.setting.way if isinstance(experiment.setting, Setting) else None,
        texts=experiment.texts is not None,
        unlabelled=n_unlabelled > 0,
        means=isinstance(experiment.setting, Generalized),
    )
    methods, notes = _find_methods(experiment, supply)
    chosen = [c for c, own in enumerate(sides) if side in ("all", own)]
    names = tuple(data.class_names[c] for c in chosen)
    whole = index_classes(data.y)
    setting = experiment.setting
    if isinstance(setting, MetaDataset) and experiment.hierarchy is not None:
        groups, all_of_group = read_groups(experiment.hierarchy, names)
        setting = setting._replace(groups=groups, whole=all_of_group)
    novel = setting.novel if isinstance(setting, Generalized) else setting
    by_class = novel.check(PROG, whole.take(torch.tensor(chosen)), names)
    if isinstance(setting, Setting) and setting.allow_small:
        few = setting.shot[1] + setting.n_query
        small = int((by_class.size < few).sum())
        note = f"{small} of {len(chosen)} classes have fewer rows than shot + query, "
        notes.append(f"{note}{len(chosen) - len(by_class.size)} too few to be drawn.")
    kind = experiment.normalize
    uses_base = any(choice.spec.uses_base for choice in methods.values())
    if kind != "cl2" and not uses_base and not isinstance(setting, Generalized):
        base_ids = []
    if plan is not None:
        notes += _compare_split(plan, experiment, side)
        adapting = [name for name, choice in methods.items() if choice.spec.adapts]
        if kind != "none" and adapting:
            notes.append(f"{' and '.join(adapting)} embed rows anew, which are not normalized then.")
        if data.shape is None and plan["backbone"] != "mlp":
            notes.append(f"The encoder takes rows of {data.x.shape[1]} features for images, which these may not be.")
    rows = _open_rows(data, chosen + (base_ids if base_data is data else []), experiment.encoder)
    base = None
    if base_ids:
        base_rows = rows if base_data is data else _open_rows(base_data, base_ids, experiment.encoder)
        base_index = index_classes(base_data.y).take(torch.tensor(base_ids))
        if isinstance(setting, Generalized):  # what methods may see has no query
            base_index, _ = hold_out(PROG, base_index, tuple(data.class_names[c] for c in base_ids))
        base = _summarize(base_rows, base_index)
    if kind != "none":
        mean = base.mean if kind == "cl2" and base is not None else None
        rows = rows.normalize(kind, mean)
        if base is not None:
            base = _summarize(rows if base_data is data else base_rows.normalize(kind, mean), base_index)
    source_rows, by_class = by_class.rows, by_class._replace(rows=rows.places[by_class.rows])
    x, take = rows.x, rows.open()
    if isinstance(setting, Generalized):
        novel_index, base_index = (whole.take(torch.tensor(ids)) for ids in (chosen, base_ids))
        names = tuple(data.class_names[c] for c in (*base_ids, *chosen))
        place = rows.places
        x, by_class, sources = join_base(PROG, lambda numbers: take(place[numbers]), base_index, novel_index, names)
        source_rows = sources.rows
        take = take_from(x)
        setting = setting._replace(n_base=len(base_ids))
        by_class = setting.check(PROG, by_class, names)
        if experiment.encoder is not None:
            notes.append("The encoder may have learned from the queries of base classes: their accuracy flatters it.")
    texts = None
    if experiment.texts is not None:
        own = data.y[source_rows[by_class.start]].tolist()
        texts = load_texts(experiment.texts, dim=x.shape[1], names=[data.class_names[c] for c in own])
    trained = None if isinstance(setting, Generalized) else rows.trained  # its rows have other numbers
    return Material(x, take, by_class, source_rows, names, base, texts, side, methods, notes, setting, trained)


def _find_base(data: Dataset, side: str, experiment: Experiment) -> tuple[Dataset, list[int]]:
    """Return the base classes: the data set that holds them, and their numbers, none where there are none."""
    own = data.sides or ()
    if experiment.base is not None:
        data = load_base(experiment.base, dim=data.x.shape[1], image_size=experiment.image_size)
        sides = data.sides or ("base",) * data.num_classes
        return data, [c for c, each in enumerate(sides) if each == "base"] or list(range(data.num_classes))
    found = [c for c, each in enumerate(own) if each == "base"] if side in SIDES[1:] else []
    if experiment.normalize == "cl2" and not found:
        remedy = "Pass --base FILE, --side novel of data with a split (--split-seed 0 makes one), or --normalize l2."
        fail(PROG, "--normalize", "find base classes to centre on", "cl2 without any", remedy)
    return data, found


def _summarize(rows: SourceRows, index: ClassIndex) -> Base:
    """Return the classes of an index, of a data set of which there are ``rows``, as base classes."""
    return summarize_base(rows.open(), index_pieces([rows.places[own] for own in list_pieces(index)]))


def _open_rows(data: Dataset, class_ids: Sequence[int], encoder: str | None) -> SourceRows:
    """Return a data set's rows; with an encoder, embed those of some classes, the only ones that are then there."""
    if encoder is None:
        return SourceRows(data.x, torch.arange(len(data.x)), None if data.is_plain else data.take_rows)
    take = take_from(data.x) if data.is_plain else data.take_rows
    used = torch.isin(data.y, torch.tensor(class_ids)).nonzero().flatten()
    places = torch.full((len(data.x),), -1).index_copy_(0, used, torch.arange(len(used)))
    trained = load_trained(encoder, lambda rows: take(used[rows]), dim=data.x.shape[1])
    return SourceRows(embed_rows(trained.encoder, take, used), places, trained=trained)


class Supply(NamedTuple):
    """What there is for methods beside support and queries."""

    n_base: int  #: Base classes; base rows without classes, as of an NPY file, are one, and what needs them needs two.
    objective: str | None  #: That the encoder was trained for; None without one.
    head_way: int | None  #: The classes that what was trained beside the encoder is for; None for any number.
    way: tuple[int, int] | None  #: Least and most classes of an episode, where the setting says.
    texts: bool  #: Whether texts name the classes.
    unlabelled: bool  #: Whether episodes have unlabelled rows.
    means: bool  #: Whether base classes stand beside the novel ones, by their means.

    def list_missing(self, spec: MethodSpec) -> list[str]:
        """Return what a method needs and does not find, keys of ``LACKS``."""
        trained = self.objective is not None and spec.objective in (None, self.objective)
        there = {"base": self.n_base > 1, "encoder": trained, "texts": self.texts, "unlabelled": self.unlabelled}
        missing: list[str] = [need for need in LACKS if need in spec.needs and not there[need]]
        headed = self.head_way is not None and spec.objective == self.objective is not None
        narrow = headed and self.way is not None and self.way != (self.head_way, self.head_way)
        return missing + ["way"] * narrow + ["means"] * (self.means and not spec.takes_means)


#: What a method lacks: what it must find, and how that is had.
LACKS = {
    "texts": ("find texts that name the classes", "Pass --texts FILE.npz, whose y are the names of the classes."),
    "encoder": ("find an encoder", "Pass --encoder FILE, of such a run."),
    "unlabelled": ("find unlabelled rows", "Pass --unlabelled 5, with --distractors 5 for rows of other classes."),
    "base": (
        "find base classes beside the evaluated ones",
        "Pass --side novel, of data with a split by class (--split-seed 0 makes one), or --base FILE.npz.",
    ),
}
#: Why "all" leaves out methods that lack something; those that take long are named, too.
LEFT_OUT = {
    "encoder": "Without an encoder of their objectives, {} are left out.",
    "texts": "Without texts, {} are left out.",
    "unlabelled": "Without unlabelled rows, {} are left out.",
    "slow": "{} take long, and are left out of 'all': name them, too.",
    "way": "What was trained beside the encoder is for another --way, and {} are left out.",
    "means": "Methods that need rows of all classes are left out: base classes have means.",
}


def _find_methods(experiment: Experiment, supply: Supply) -> tuple[dict[str, ChosenMethod], list[str]]:
    """Return an experiment's methods by name, and lines for the report."""
    if supply.means and not supply.n_base:
        remedy = "Pass --side novel, of data with a split by class (--split-seed 0 makes one)."
        fail(PROG, "--protocol", "find base classes, to be generalized", "none", remedy)
    notes: list[str] = []
    choices = list(experiment.methods)
    if experiment.every:
        notes, known = _choose_all(supply)
        choices = known + choices
    for choice in choices:
        for need in supply.list_missing(choice.spec)[:1] if choice.origin is None else ():
            _refuse(choice, need, supply)
    notes += [f"{choice.key} is {choice.name}." for choice in choices if choice.key in ALIASES]
    methods = {choice.name: choice for choice in choices}
    ours = {name: choice.spec for name, choice in methods.items() if choice.origin is None}
    blind = [name for name, spec in ours.items() if "unlabelled" not in spec.needs]
    if supply.unlabelled and blind:
        notes.append(f"Unlabelled rows are not looked at by {', '.join(blind)}.")
    if not supply.n_base:
        without = [name for name, spec in ours.items() if spec.without_base is not None]
        for text in dict.fromkeys(ours[name].without_base for name in without):
            own = ", ".join(name for name in without if ours[name].without_base == text)
            notes.append(f"Without base classes, {text} in {own}.")
    return methods, notes


def _choose_all(supply: Supply) -> tuple[list[str], list[ChosenMethod]]:
    """Return all methods that can run, and lines that say which others there are."""
    reasons: dict[str, list[str]] = {reason: [] for reason in LEFT_OUT}
    chosen = []
    for name, spec in METHODS.items():
        missing = ["slow"] * spec.slow + supply.list_missing(spec)
        if missing:
            reasons.get(missing[0], []).append(name)
        else:
            chosen.append(ChosenMethod(name, name, spec))
    notes = [LEFT_OUT[reason].format(", ".join(names)) for reason, names in reasons.items() if names]
    return notes, chosen


def _refuse(choice: ChosenMethod, need: str, supply: Supply) -> NoReturn:
    """Raise an InputError for a method that lacks something."""
    if need == "means":
        known = sorted(name for name, spec in METHODS.items() if spec.takes_means)
        constraint = "know a class by its mean, which is all that there is of base classes"
        fail(PROG, "--method", constraint, choice.name, f"Pass some of {', '.join(known)}.")
    if need == "way" and supply.way is not None:
        constraint = f"be {supply.head_way} for {choice.key}, whose last layer has weights of as many classes"
        remedy = f"Pass --way {supply.head_way}, or train with --head zero, for any number."
        fail(PROG, "--way", constraint, "-".join(map(str, dict.fromkeys(supply.way))), remedy)
    constraint, remedy = LACKS[need]
    got = f"none for {choice.name}"
    if need == "encoder" and choice.spec.objective is not None:
        constraint += f" of train --objective {choice.spec.objective}"
        got = got if supply.objective is None else f"one of {supply.objective} for {choice.name}"
    fail(PROG, "--method", constraint, got, remedy)


def _compare_split(plan: Mapping[str, Any], experiment: Experiment, side: str) -> list[str]:
    """Check that an encoder was trained on the same split; note where it is evaluated on classes that it learned."""
    if not same_source(plan["dataset"], experiment.dataset):
        return []
    if plan["split_seed"] != experiment.split_seed:
        trained = "without one" if plan["split_seed"] is None else f"with {plan['split_seed']}"
        got = f"{experiment.split_seed}; the encoder was trained {trained}"
        constraint = "be the encoder's, or it would be judged on classes that it learned"
        fail(PROG, "--split-seed", constraint, got, "Pass the encoder's.")
    if side == "novel":
        return []
    return [f"The encoder was trained or chosen on classes of side {side}: this is no test of it."]
