"""The protocol of CLIP's few-shot methods: all classes, support from the training split, the test split as queries.

Episodes differ only in their support; all have the same queries. The module also detects exactly equal rows, because a
query may be a copy of a row that a method has learned from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256

import torch
from torch import Tensor

from protonet._text import plural, shorten_list
from protonet._validation import check_int
from protonet.datasets.dataset import Dataset
from protonet.episodes.names import MAX_CLASSES_OR_ROWS
from protonet.episodes.samplers import sampler
from protonet.errors import raise_input_error
from protonet.sampling import ClassIndex, draw_without_replacement


def group_equal_rows(x: Tensor, release: Callable[[], None] = lambda: None) -> Tensor:
    """Group exactly equal rows of ``x`` (n, dim): equal rows get the same group number, (n,) int64; -0.0 equals 0.0.

    Groups are numbered from 0 in the order of their first rows. ``release`` is called after each block of rows is read,
    to free the memory of a memory-mapped file.
    """
    group_of: dict[bytes, int] = {}  # by the SHA-256 of a row
    groups: list[int] = []
    # Rows are read in blocks of at most this many bytes, but of at least one row.
    bytes_per_comparison_block = 2**24
    for rows in torch.arange(len(x)).split(max(1, bytes_per_comparison_block // max(1, x.shape[1] * x.element_size()))):
        block = x[rows]
        release()
        block = block + 0.0 if block.is_floating_point() else block
        groups += (group_of.setdefault(sha256(row).digest(), len(group_of)) for row in block.numpy())
    return torch.tensor(groups, dtype=torch.int64)


def describe_duplicates(data: Dataset, class_ids: Tensor) -> Iterator[str]:
    """Yield notes for the report on rows of the evaluated classes ``class_ids`` that exactly equal other rows."""
    groups = group_equal_rows(data.x, data.release_memory)
    pairs, counts = (groups * data.num_classes + data.y).unique(return_counts=True)
    classes, (_, group) = pairs % data.num_classes, (pairs // data.num_classes).unique(return_inverse=True)
    inside = torch.isin(classes, class_ids)  # (pairs of a group of equal rows and a class that has such rows,)
    n_inside = torch.bincount(group[inside], minlength=len(pairs))[group]  # classes with such rows
    n_outside = torch.bincount(group[~inside], minlength=len(pairs))[group]

    def count_rows(chosen: Tensor) -> str:
        return f"{plural(int(counts[chosen].sum()), 'row')} of {list_classes(chosen)}"

    max_listed_class_names = 5  # maximum number of classes that a note lists by name

    def list_classes(chosen: Tensor) -> str:
        names = [data.class_names[c] for c in classes[chosen].unique().tolist()]
        return f"{plural(len(names), 'class')} ({shorten_list(names, max_listed_class_names)})"

    if bool((copied := inside & (counts > 1)).any()):
        yield f"Equal to another row of its class, so queries may be copies of support rows: {count_rows(copied)}."
    if bool((other := inside & (n_inside > 1)).any()):
        yield f"Exactly equal to a row of another evaluated class: {count_rows(other)}."
    if bool((seen := inside & (n_outside > 0)).any()):
        where = list_classes(~inside & (n_inside > 0))
        yield f"Exactly equal to a row that is not evaluated, of {where}: {count_rows(seen)}."


def join_test_rows(data: Dataset, test: Dataset, names: tuple[str, str]) -> tuple[tuple[int, ...], Dataset]:
    """Join training rows and test rows, whose classes are matched by name, to one data set in memory.

    Returns the number of training rows of each class, and the rows, training rows first. An InputError is raised if
    the data sets differ in their features or classes, or have a row in common.
    """
    if test.x.shape[1] != data.x.shape[1]:
        got = f"{test.x.shape[1]} of {names[1]}"
        must = f"have {data.x.shape[1]} features per row, as {names[0]}"
        raise_input_error("test", must, got, "Embed both alike.")
    class_id_of = {name: c for c, name in enumerate(data.class_names)}
    for split, other, at in ((test, data, 1), (data, test, 0)):
        missing = [name for name in split.class_names if name not in other.class_names]
        if missing:
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            got = f"{missing[0]!r} in {names[at]} alone{more}"
            constraint = f"have the classes of {names[0]}, by name"
            raise_input_error("test", constraint, got, "Rename them, or leave them out.")
    sides = [data.x, test.x]
    if data.x.dtype != test.x.dtype:  # such as pixels of 8 bits beside features: both as floats
        sides = [split.get_rows(torch.arange(len(split.x))) for split in (data, test)]
    x = torch.cat(sides)
    coarse = min((rows.dtype for rows in sides), key=lambda dtype: dtype.itemsize)
    known, sought = group_equal_rows(torch.cat([rows.to(coarse) for rows in sides])).split(list(map(len, sides)))
    shared = torch.isin(sought, known).nonzero().flatten().tolist()
    if shared:
        last = int((known == sought[shared[0]]).nonzero()[-1])
        got = f"{len(shared)}, such as row {shared[0]} of {names[1]} and row {last} of {names[0]}"
        raise_input_error("test", f"share no row with {names[0]}", got, "Leave these rows out of one of the two.")
    y = torch.cat([data.y, torch.tensor([class_id_of[name] for name in test.class_names])[test.y]])
    counts = tuple(torch.bincount(data.y, minlength=data.num_classes).tolist())
    return counts, Dataset(x, y, data.class_names, shape=data.shape)


@dataclass(frozen=True)
class FixedSplit(sampler.Sampler):
    """The sampler for a fixed test split: K training rows of each class are the support, all test rows the queries.

    Source: Zhou et al., "Learning to prompt for vision-language models" (2022), sec. 4.1: 1, 2, 4, 8 and 16 shots, the
        full test set, three draws. https://arxiv.org/abs/2109.01134
    """

    shot: tuple[int, int] = (1, 1)  #: Minimum and maximum number of support rows per class, >= 1; here they are equal.
    n_training_rows: tuple[int, ...] = ()
    """The number of training rows of each class, set by `join_test_set`. They come before the test rows of the class.
    """
    allow_small: bool = False
    """Whether a class may have fewer than ``shot`` training rows; all of them are then its support, as in the paper's
    code."""

    @property
    def n_required_classes(self) -> int:
        """The number of classes of the data set, as each episode has all of them."""
        return len(self.n_training_rows)

    @property
    def way(self) -> tuple[int, int]:
        """Minimum and maximum number of classes per episode: both are the number of classes of the data set."""
        return self.n_required_classes, self.n_required_classes

    def join_test_set(self, data: Dataset, test: Dataset, names: tuple[str, str]) -> tuple[FixedSplit, Dataset]:
        """Join training rows and test rows by `join_test_rows`; return this sampler for them, and all rows."""
        counts, joined = join_test_rows(data, test, names)
        return replace(self, n_training_rows=counts), joined

    def has_equal_queries(self, index: ClassIndex) -> bool:
        """Whether each class has the same number of test rows."""
        return len((index.class_counts - torch.tensor(self.n_training_rows)).unique()) == 1

    def validate(self, index: ClassIndex, class_names: tuple[str, ...]) -> ClassIndex:
        """Check that each class has enough training rows and a test row, and return the index unchanged."""
        shot = check_int("shot", self.shot[0], low=1, high=MAX_CLASSES_OR_ROWS)
        if self.shot[1] != shot:
            raise_input_error(
                "shot", "be one number with a fixed test split", sampler.format_span(self.shot), "Pass a number."
            )
        if len(self.n_training_rows) != len(index.class_counts) or len(self.n_training_rows) < 2:
            got = f"{len(self.n_training_rows)} for {len(index.class_counts)}"
            remedy = "Pass the counts of all classes."
            raise_input_error("n_training_rows", "be one count for each of at least 2 classes", got, remedy)
        needed = 1 if self.allow_small else shot
        for c, (n_train, size) in enumerate(zip(self.n_training_rows, index.class_counts.tolist(), strict=True)):
            if n_train < needed:
                remedy = "Ask for fewer shots, or take all rows of small classes (`allow_small`)."
                got = f"class {class_names[c]!r} with {n_train}"
                raise_input_error("classes", f"have {needed} training rows", got, remedy)
            if size <= n_train:
                got = f"class {class_names[c]!r} without any"
                raise_input_error("classes", "have a test row", got, "Add one, or leave the class out.")
        return index

    def draw(self, index: ClassIndex, *, seed: int, first: int, n_episodes: int) -> sampler.SampledEpisodes:
        """Draw the episodes, see `Sampler.sample`; all have the same queries."""
        train = torch.tensor(self.n_training_rows)
        shape = (n_episodes, len(train), self.shot[0])
        offsets = draw_without_replacement(
            sampler.sample_uniform_by_episode(seed, sampler.RandomStream.ROW, first, shape), train.expand(shape[:2])
        )
        drawn = torch.arange(self.shot[0]) < train[:, None]  # (classes, shot)
        test = index.class_counts - train
        slots = torch.arange(int(test.max()))
        is_test = slots < test[:, None]  # (classes, slots)
        positions = ((index.class_starts + train)[:, None] + slots).where(is_test, 0)
        rows = index.row_indices[positions].where(is_test, sampler.EMPTY_SLOT)
        return sampler.SampledEpisodes(
            index.row_indices[index.class_starts[:, None] + offsets].where(drawn, sampler.EMPTY_SLOT),
            rows.expand(n_episodes, -1, -1),
            torch.empty(n_episodes, 0, 0, dtype=torch.int64),
            torch.empty(n_episodes, len(train), 0, dtype=torch.int64),
        )

    def to_dict(self) -> dict[str, object]:
        """Convert the settings to a JSON object, whose keys are the names of the command-line options."""
        return {
            "protocol": "fixed-split",
            "way": list(self.way),
            "shot": list(self.shot),
            "n_open_classes": 0,
            "allow_small": self.allow_small,
            "kind": self.format_title(),
        }

    def format_title(self) -> str:
        """Format the settings as a short title of the protocol, for reports and logs."""
        return f"all {self.n_required_classes} ways, {self.shot[0]}-shot, queries of a fixed test split"
