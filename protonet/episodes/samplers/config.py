"""Samplers of N-way K-shot episodes: ranges of ways and shots, unbalanced queries, open classes, unlabelled rows.

`GeneralizedSampler` adds base classes to them. The other protocols are in `fixed_split` and `meta_dataset`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from protonet._validation import check_int, check_number
from protonet.datasets.dataset import Dataset
from protonet.episodes.names import MAX_CLASSES_OR_ROWS
from protonet.episodes.samplers.batch import make_row_reader
from protonet.episodes.samplers.fixed_split import join_test_rows
from protonet.episodes.samplers.sampler import (
    EMPTY_SLOT,
    RandomStream,
    RowPool,
    SampledEpisodes,
    Sampler,
    format_span,
    sample_uniform_by_episode,
)
from protonet.errors import InputTypeError, raise_input_error
from protonet.sampling import ClassIndex, draw_without_replacement, index_class_rows, list_class_rows


@dataclass(frozen=True)
class EpisodeConfig(Sampler):
    """The sampler of N-way K-shot episodes: numbers of classes, support rows, queries and unlabelled rows.

    Source: imbalance as in Veilleux et al., "Realistic evaluation of transductive few-shot learning" (2021), sec. 3,
        https://arxiv.org/abs/2204.11181; effective classes as in Martin et al., "Towards practical few-shot query sets:
        transductive minimum description length inference" (2022), sec. 4.1, whose code draws queries at random from the
        rows of these classes (``multinomial``). https://arxiv.org/abs/2210.14545
    """

    way: tuple[int, int] | None = (5, 5)
    """Minimum and maximum number of classes per episode (n_way), >= 2. Each episode draws its number uniformly. None
    for all classes of the data."""
    shot: tuple[int, int] = (1, 1)
    """Minimum and maximum number of support rows per class (n_shot), >= 1. Each episode draws its number uniformly."""
    query: int = 15  #: Query rows per class, >= 1; the average over classes if their numbers differ.
    unequal: bool = False  #: Whether each class draws its number of support rows, instead of each episode.
    imbalance: float | None = None
    """Concentration, > 0, of the Dirichlet distribution that splits the ``way * query`` queries of an episode among its
    classes: papers use 2, and smaller values are less balanced. None gives each class ``query`` queries."""
    n_open_classes: int = 0
    """Number of open classes, >= 0: classes without support rows in the episode that add ``query`` queries each."""
    allow_small: bool = False
    """Whether a class with fewer rows than shots and queries may be drawn, with fewer queries. A class without any row
    for a query is left out."""
    unlabelled: int = 0
    """Number of unlabelled rows, >= 0, of each class of the episode and of each distractor class. Methods may learn
    from these rows."""
    distractors: int = 0  #: Number of distractor classes, >= 0: other classes that add only unlabelled rows.
    n_effective_classes: int | None = None
    """Number of effective classes, >= 1: a random choice of the classes of the episode, of which all queries are. None
    for queries of all classes."""
    multinomial: bool = False
    """Whether each query is of a random class, in proportion to the rows of the classes, so that the numbers of queries
    are multinomial."""
    n_training_rows: tuple[int, ...] = ()
    """The number of training rows of each class, set by `join_test_set`: these rows, the first of the class, are for
    the support, and its other rows for queries. () if all rows are for both."""

    @property
    def n_required_classes(self) -> int:
        """The maximum number of classes of an episode, with open classes and distractors; the least for all classes."""
        return (2 if self.way is None else self.way[1]) + self.n_open_classes + self.distractors

    def join_test_set(self, data: Dataset, test: Dataset, names: tuple[str, str]) -> tuple[EpisodeConfig, Dataset]:
        """Join training rows and test rows by `join_test_rows`; return this sampler for them, and all rows."""
        counts, joined = join_test_rows(data, test, names)
        return replace(self, n_training_rows=counts), joined

    def fix_way(self, index: ClassIndex) -> EpisodeConfig:
        """Return this sampler with a number of classes: that of the index, if each episode has all classes."""
        n_classes = len(index.class_counts) - self.n_open_classes - self.distractors
        return self if self.way is not None else replace(self, way=(n_classes, n_classes))

    def _count_query_rows(self, index: ClassIndex) -> Tensor:
        """Count the rows (classes,) int64 of each class that are left for queries in every episode."""
        n_others = torch.tensor(self.n_training_rows or self.shot[1] + self.unlabelled)
        return index.class_counts - n_others

    def has_equal_queries(self, index: ClassIndex) -> bool:
        """Whether each class of every episode has the same number of queries, for classes from `validate`."""
        varied = self.imbalance is not None or self.multinomial or self.n_effective_classes is not None
        return not varied and bool((self._count_query_rows(index) >= self.query).all())

    def choose_classes(self, index: ClassIndex, class_names: tuple[str, ...]) -> tuple[Sampler, ClassIndex, list[str]]:
        """Select the classes with enough rows, and return a note about small and excluded classes for the report."""
        chosen = self.validate(index, class_names)
        config = self.fix_way(chosen)
        if not self.allow_small:
            return config, chosen, []
        few = int((chosen.class_counts < self.shot[1] + self.query).sum())
        left_out = len(index.class_counts) - len(chosen.class_counts)
        of_classes = f"{few} of {len(index.class_counts)} classes"
        return config, chosen, [f"{of_classes} have fewer rows than shot + query, {left_out} too few to be drawn."]

    def validate(self, index: ClassIndex, class_names: tuple[str, ...]) -> ClassIndex:
        """Check the settings and class sizes as `Sampler.validate` does; ``allow_small`` excludes too small classes."""
        if self.way is not None:
            check_integer_range("way", self.way, low=2)
        check_integer_range("shot", self.shot, low=1)
        for name, low in (("query", 1), ("n_open_classes", 0), ("unlabelled", 0), ("distractors", 0)):
            check_int(name, getattr(self, name), low=low, high=MAX_CLASSES_OR_ROWS)
        if self.distractors and not self.unlabelled:
            remedy = "Ask for unlabelled rows (`unlabelled`), or for no distractors."
            raise_input_error("distractors", "be 0 where there are no unlabelled rows", self.distractors, remedy)
        if self.n_training_rows and self.unlabelled:
            remedy = "Ask for none, or pass one file."
            raise_input_error("unlabelled", "be 0 where queries are of another file", self.unlabelled, remedy)
        if self.imbalance is not None:
            check_number("imbalance", self.imbalance, low=0, strict=True)
        if self.multinomial and self.imbalance is not None:
            remedy = "Leave one of the two out."
            raise_input_error("multinomial", "be left out with `imbalance`", f"`imbalance` {self.imbalance:g}", remedy)
        if self.n_training_rows and len(self.n_training_rows) != len(index.class_counts):
            got = f"{len(self.n_training_rows)} for {len(index.class_counts)}"
            raise_input_error("n_training_rows", "be one count for each class", got, "Pass the counts of all classes.")
        if self.allow_small and not self.n_training_rows:
            needed = self.shot[1] + 1 + self.unlabelled
            index = index.select_classes((index.class_counts >= needed).nonzero().flatten())
        if self.n_required_classes > len(index.class_counts):
            others = {"open ones": self.n_open_classes, "distractors": self.distractors}
            beside = "".join(f" beside {n} {kind}" for kind, n in others.items() if n)
            remedy = "Ask for fewer classes, or another side of the split."
            constraint = f"be at most the number of classes ({len(index.class_counts)}{beside})"
            raise_input_error("way", constraint, "all" if self.way is None else self.way[1], remedy)
        least_way, most_way = self.fix_way(index).way or (0, 0)
        if self.n_effective_classes is not None:
            check_int("n_effective_classes", self.n_effective_classes, low=1, high=least_way)
        varied = self.imbalance is not None or self.multinomial
        max_query = self.query * ((self.n_effective_classes or most_way) if varied else 1)
        self._check_class_sizes(index, class_names, 1 if self.allow_small else max_query)
        return index

    def _check_class_sizes(self, index: ClassIndex, class_names: tuple[str, ...], max_query: int) -> None:
        """Raise an InputError if a class has too few rows for an episode with ``max_query`` queries of it."""
        # The paper command records each query of episodes of equal sizes, and has no option for that.
        remedy = "Ask for fewer rows; an evaluation can also allow small classes (`allow_small`)."
        shot, unlabelled = self.shot[1], " + unlabelled" if self.unlabelled else ""
        sizes = [(index.class_counts, shot + max_query + self.unlabelled, f"rows (shot + query{unlabelled}")]
        if self.n_training_rows:
            train = torch.tensor(self.n_training_rows)
            sizes = [(train, shot, "training rows (shot"), (index.class_counts - train, max_query, "test rows (query")]
        same_class = ", were all of one class" if max_query > self.query else ""
        for counts, needed, kind in sizes:
            if bool((counts < needed).any()):
                worst = int(counts.argmin())
                got = f"class {class_names[worst]!r} with {int(counts[worst])}"
                raise_input_error("classes", f"have {needed} {kind}{same_class})", got, remedy)

    def draw(self, index: ClassIndex, *, seed: int, first: int, n_episodes: int) -> SampledEpisodes:
        """Draw the episodes, see `Sampler.sample`."""
        if self.way is None:
            return self.fix_way(index).draw(index, seed=seed, first=first, n_episodes=n_episodes)
        max_way, max_shot, n_open = self.way[1], self.shot[1], self.n_open_classes

        def uniform(stream: RandomStream, *shape: int) -> Tensor:
            return sample_uniform_by_episode(seed, stream, first, (n_episodes, *shape))

        way = _scale_to_integers(uniform(RandomStream.WAY), *self.way)
        uniform_classes = uniform(RandomStream.CLASS, max_way + n_open)
        uniform_distractors = uniform(RandomStream.DISTRACTOR, self.distractors)
        # (episodes, max_way + open classes + distractors); an episode has the first ``way`` of the ``max_way``
        classes = _draw_classes(torch.cat([uniform_classes, uniform_distractors], dim=1), len(index.class_counts))
        size, start = index.class_counts[classes], index.class_starts[classes]
        train = torch.tensor(self.n_training_rows)[classes] if self.n_training_rows else None
        drawn = torch.arange(max_way) < way[:, None]  # (episodes, max_way), the classes that the episode has
        shots = _scale_to_integers(uniform(RandomStream.SHOT, max_way), *self.shot)
        shots = (shots if self.unequal else shots[:, :1].expand(-1, max_way)).where(drawn, 0)
        left = (size[:, :max_way] - shots if train is None else (size - train)[:, :max_way]) - self.unlabelled
        queries = self._draw_query_counts(uniform, drawn, left)
        varied = self.imbalance is not None or self.multinomial
        max_query = self.query * ((self.n_effective_classes or max_way) if varied else 1)
        max_query = min(max_query, int(index.class_counts.max()))
        open_queries = (size if train is None else size - train)[:, max_way : max_way + n_open].clamp_max(self.query)
        counts = torch.cat([queries.flatten(), open_queries.flatten(), torch.zeros(1, dtype=torch.int64)])
        slots = max_shot + int(counts.max())  # per class
        uniform_rows = uniform(RandomStream.ROW, max_way + n_open, max_shot + max_query)[..., :slots]
        unlabelled = torch.empty(n_episodes, max_way + self.distractors, 0, dtype=torch.int64)
        if self.unlabelled:
            uniform_unlabelled = uniform(RandomStream.UNLABELLED, max_way + self.distractors, self.unlabelled)
            uniform_known, taken = uniform_rows[:, :max_way], shots + queries
            unlabelled = _draw_unlabelled(index, uniform_known, uniform_unlabelled, taken, size, start)
            unlabelled[:, :max_way].masked_fill_(~drawn[..., None], EMPTY_SLOT)
        size, start = size[:, : max_way + n_open], start[:, : max_way + n_open]
        if train is None:
            offsets, begin = draw_without_replacement(uniform_rows, size), shots  # queries come right after the support
        else:
            train, begin = train[:, : max_way + n_open], torch.full_like(shots, max_shot)
            of_support, of_query = uniform_rows.tensor_split([max_shot], dim=2)
            of_query = train[..., None] + draw_without_replacement(of_query, size - train)
            offsets = torch.cat([draw_without_replacement(of_support, train), of_query], dim=2)
        rows = index.row_indices[start[..., None] + offsets]  # (episodes, max_way + n_open, slots)
        inside, outside, position = rows[:, :max_way], rows[:, max_way:], torch.arange(slots)
        is_support = position < shots[..., None]
        is_query = (position >= begin[..., None]) & (position < (begin + queries)[..., None])
        outside = outside[..., 0 if train is None else max_shot :]
        is_open = torch.arange(outside.shape[2]) < open_queries[..., None]
        return SampledEpisodes(
            inside.where(is_support, EMPTY_SLOT)[..., :max_shot],
            inside.where(is_query, EMPTY_SLOT)[..., self.shot[0] :],
            outside.where(is_open, EMPTY_SLOT)[..., : self.query],
            unlabelled,
        )

    def _draw_query_counts(self, uniform: Callable[..., Tensor], drawn: Tensor, left: Tensor) -> Tensor:
        """Draw the number of queries (episodes, classes) of each ``drawn`` class, which has ``left`` rows for them."""
        max_way, asked = drawn.shape[1], drawn
        if self.n_effective_classes is not None:
            order = uniform(RandomStream.EFFECTIVE, max_way).where(drawn, 1.0).argsort(dim=1)
            asked = order.argsort(dim=1) < self.n_effective_classes
        total = asked.sum(dim=1) * self.query
        if self.imbalance is not None:
            queries = _split_queries(uniform(RandomStream.QUERY, max_way), self.imbalance, asked, total)
        elif self.multinomial:
            n_draws = self.query * (self.n_effective_classes or max_way)
            queries = _count_random_queries(uniform(RandomStream.QUERY_CLASS, n_draws), left.where(asked, 0), total)
        else:
            queries = torch.full_like(left, self.query).where(asked, 0)
        return torch.minimum(queries, left).where(drawn, 0)

    def to_dict(self) -> dict[str, object]:
        """Convert the settings to a JSON object."""
        settings = asdict(replace(self, n_training_rows=()))
        for name in ("n_training_rows", "n_effective_classes", "multinomial"):
            if not settings[name]:  # as before these settings existed
                del settings[name]
        return {"protocol": "episodes"} | settings

    @property
    def hashed_tensors(self) -> list[Tensor]:
        """The numbers of training rows, which episodes depend on."""
        return [torch.tensor(self.n_training_rows)] if self.n_training_rows else []

    def format_title(self) -> str:
        """Format the settings as a short title of the protocol, such as ``5-way 1-shot 15-query``."""
        kind = "" if self.imbalance is None else f", queries by Dirichlet shares of {self.imbalance:g}"
        kind += ", multinomial queries" if self.multinomial else ""
        kind += f", {self.n_effective_classes} effective classes" if self.n_effective_classes else ""
        kind += ", queries of a test split" if self.n_training_rows else ""
        kind += f", {self.n_open_classes} open classes" if self.n_open_classes else ""
        if self.unlabelled:
            others = f" and of {self.distractors} distractor classes" if self.distractors else ""
            kind += f", {self.unlabelled} unlabelled rows of each class{others}"
        way = "all" if self.way is None else format_span(self.way)
        return f"{way}-way {format_span(self.shot)}-shot {self.query}-query{kind}"


@dataclass(frozen=True)
class GeneralizedSampler(Sampler):
    """The sampler of generalised few-shot classification: episodes have novel classes and all base classes.

    The support of a base class is a single row: the mean of its rows that are not held out as queries.

    Source: Gidaris and Komodakis, "Dynamic few-shot visual learning without forgetting" (2018), sec. 4.1, joint
        accuracies; Ye, Hu and Zhan, "Learning adaptive classifiers synthesis for generalized few-shot learning" (2021),
        sec. 3.3, harmonic means. https://arxiv.org/abs/1804.09458, https://arxiv.org/abs/1906.02944
    """

    novel_config: EpisodeConfig  #: The sampler of the novel classes, without open classes and unlabelled rows.
    n_base_classes: int = 0
    """Number of base classes, set by `join_base_classes`. They are the first classes of the index, and the first row of
    each is the class mean."""

    @property
    def shot(self) -> tuple[int, int]:
        """Minimum and maximum number of support rows per novel class."""
        return self.novel_config.shot

    @property
    def n_required_classes(self) -> int:
        """The maximum number of classes of an episode, base and novel."""
        return self.n_base_classes + self.novel_config.n_required_classes

    def choose_classes(
        self, index: ClassIndex, class_names: tuple[str, ...]
    ) -> tuple[GeneralizedSampler, ClassIndex, list[str]]:
        """Select the novel classes with enough rows; return this sampler, the rows of these classes, and no notes."""
        return self, self.novel_config.validate(index, class_names), []

    def hold_out_queries(self, base: ClassIndex, class_names: tuple[str, ...]) -> tuple[ClassIndex, ClassIndex]:
        """Hold out every fifth row of each base class as a query; the mean of the remaining rows represents the class.

        Returns the rows for the means, and the queries of each class after a placeholder row, which `join_base_classes`
        overwrites with the mean.
        """
        if int(base.class_counts.min()) < 2:
            got = f"class {class_names[int(base.class_counts.argmin())]!r} with one"
            constraint = "have 2 rows, to learn from and to ask for"
            raise_input_error("base classes", constraint, got, "Leave it out.")
        seen, queries = [], []
        # Every fifth row of a base class is a query, and not part of its mean. Our choice.
        held_out_stride = 5
        for rows in list_class_rows(base):
            held_out = torch.arange(len(rows)) % held_out_stride == min(held_out_stride, len(rows)) - 1
            seen.append(rows[~held_out])
            queries.append(torch.cat([rows[~held_out][:1], rows[held_out]]))
        return index_class_rows(seen), index_class_rows(queries)

    def join_base_classes(self, pool: RowPool, base: RowPool, means: Tensor) -> tuple[GeneralizedSampler, RowPool]:
        """Join base classes and novel classes to one pool of rows in memory, base classes first.

        Args:
            pool: The rows of the novel classes.
            base: The queries of the base classes, from `hold_out_queries`.
            means: (base classes, dim), the mean of the other rows of each base class.

        Returns:
            The sampler, adapted to the base classes; and the pool of all rows.
        """
        known, dataset_rows = (
            index_class_rows(list_class_rows(first) + list_class_rows(second))
            for first, second in ((base.rows_by_class, pool.rows_by_class), (base.dataset_rows, pool.dataset_rows))
        )
        x = pool.read_rows(known.row_indices)
        x[known.class_starts[: len(means)].to(x.device)] = means.to(x.dtype)
        by_class = known._replace(row_indices=torch.arange(len(x)))
        return replace(self, n_base_classes=len(means)), RowPool(x, make_row_reader(x), by_class, dataset_rows)

    def validate(self, index: ClassIndex, class_names: tuple[str, ...]) -> ClassIndex:
        """Check that each base class has a mean and a query, and that the novel classes have enough rows."""
        too_small = bool((index.class_counts[: self.n_base_classes] < 2).any())
        if not 0 < self.n_base_classes < len(index.class_counts) or too_small:
            remedy = "Add rows to the base classes."
            raise_input_error("n_base_classes", "be classes of a mean and a query or more", self.n_base_classes, remedy)
        self.novel_config.validate(
            index.select_classes(torch.arange(self.n_base_classes, len(index.class_counts))),
            class_names[self.n_base_classes :],
        )
        return index

    def draw(self, index: ClassIndex, *, seed: int, first: int, n_episodes: int) -> SampledEpisodes:
        """Draw the episodes, see `Sampler.sample`; base classes come before novel classes."""
        novel_index = index.select_classes(torch.arange(self.n_base_classes, len(index.class_counts)))
        novel = self.novel_config.draw(novel_index, seed=seed, first=first, n_episodes=n_episodes)
        shape = (n_episodes, self.n_base_classes, self.novel_config.query)
        start, size = index.class_starts[: self.n_base_classes], index.class_counts[: self.n_base_classes] - 1
        uniform = sample_uniform_by_episode(seed, RandomStream.QUERY, first, shape)
        offsets = draw_without_replacement(uniform, size.expand(shape[:2]))
        drawn = torch.arange(shape[2]) < size[:, None]
        query = index.row_indices[start[:, None] + 1 + offsets].where(drawn, EMPTY_SLOT)
        support = torch.full((n_episodes, self.n_base_classes, novel.support_ids.shape[2]), EMPTY_SLOT)
        support[:, :, 0] = index.row_indices[start]
        max_query = max(query.shape[2], novel.query_ids.shape[2])
        queries = [F.pad(rows, (0, max_query - rows.shape[2]), value=EMPTY_SLOT) for rows in (query, novel.query_ids)]
        support = torch.cat([support, novel.support_ids], dim=1)
        unlabelled = torch.empty(n_episodes, support.shape[1], 0, dtype=torch.int64)
        return SampledEpisodes(support, torch.cat(queries, dim=1), novel.open_query_ids, unlabelled)

    def to_dict(self) -> dict[str, object]:
        """Convert the settings to a JSON object, whose keys are the names of the command-line options."""
        settings = {"protocol": "generalized", "base_classes": self.n_base_classes, "kind": self.format_title()}
        return self.novel_config.to_dict() | settings

    def format_title(self) -> str:
        """Format the settings as a short title of the protocol, as `EpisodeConfig.format_title` does."""
        return f"{self.novel_config.format_title()} beside {self.n_base_classes} base classes"


def check_integer_range(argument: str, value: object, *, low: int) -> tuple[int, int]:
    """Return a pair of integers >= ``low`` in ascending order; raise an InputError for any other value."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        remedy = f"Pass ({value}, {value})." if isinstance(value, int) else f"Pass ({low}, {low})."
        constraint = "be a pair of whole numbers, (least, most)"
        raise_input_error(argument, constraint, repr(value), remedy, kind=InputTypeError)
    minimum, maximum = (check_int(argument, end, low=low, high=MAX_CLASSES_OR_ROWS) for end in value)
    if maximum < minimum:
        remedy = f"Pass ({maximum}, {minimum})."
        raise_input_error(argument, "have the smaller number first, (least, most)", repr(value), remedy)
    return minimum, maximum


def _count_random_queries(uniform: Tensor, weights: Tensor, total: Tensor) -> Tensor:
    """Draw the class of each of ``total`` (episodes,) queries by ``weights`` (episodes, classes), and count them."""
    ends = weights.cumsum(dim=1).double()
    ends /= ends[:, -1:]
    chosen = torch.searchsorted(ends, uniform, right=True)  # (episodes, most queries); a class of weight 0 has no room
    is_counted = (torch.arange(uniform.shape[1]) < total[:, None]).long()
    return torch.zeros_like(weights).scatter_add_(1, chosen, is_counted)


def _draw_classes(uniform: Tensor, n_classes: int) -> Tensor:
    """Draw different classes (episodes, draws) int64, as `draw_without_replacement` does from ``uniform`` numbers."""
    n_episodes, n_draws = uniform.shape
    # Classes are drawn by lists, in a time in proportion to the number of classes, if these are few beside the square
    # of the number of draws, to which the time of tensors is in proportion.
    min_squared_draws_per_class = 100
    if n_draws**2 < min_squared_draws_per_class * n_classes:
        return draw_without_replacement(uniform, torch.tensor(n_classes).expand(n_episodes))
    # A draw is the class with as many undrawn classes before it, which a list finds without the earlier draws.
    left = n_classes - torch.arange(n_draws)
    undrawn_before = (uniform * left).long().minimum(left - 1).tolist()
    remaining = [list(range(n_classes)) for _ in range(n_episodes)]
    drawn = [[classes.pop(k) for k in draws] for classes, draws in zip(remaining, undrawn_before, strict=True)]
    return torch.tensor(drawn, dtype=torch.int64).view(n_episodes, n_draws)


def _draw_unlabelled(
    index: ClassIndex, uniform_rows: Tensor, uniform_unlabelled: Tensor, n_used: Tensor, size: Tensor, start: Tensor
) -> Tensor:
    """Draw unlabelled rows (episodes, classes + distractors, n_unlabelled) that are not support or query rows."""
    n_classes, n_unlabelled = uniform_rows.shape[1], uniform_unlabelled.shape[2]
    n_distractors = uniform_unlabelled.shape[1] - n_classes
    wide = F.pad(uniform_rows, (0, n_unlabelled))
    position = torch.arange(wide.shape[2])
    begin = n_used[..., None]  # right after the support and query rows
    is_unlabelled = (position >= begin) & (position < begin + n_unlabelled)
    wide[is_unlabelled] = uniform_unlabelled[:, :n_classes].flatten()
    inside = draw_without_replacement(wide, size[:, :n_classes])[is_unlabelled].view(len(wide), n_classes, n_unlabelled)
    last = slice(size.shape[1] - n_distractors, None)
    offsets = torch.cat([inside, draw_without_replacement(uniform_unlabelled[:, n_classes:], size[:, last])], dim=1)
    return index.row_indices[torch.cat([start[:, :n_classes], start[:, last]], dim=1)[..., None] + offsets]


def _scale_to_integers(uniform: Tensor, low: int, high: int) -> Tensor:
    """Convert uniform numbers in [0, 1) to uniform integers from ``low`` to ``high``, both included."""
    return low + (uniform * (high - low + 1)).long()


def _split_queries(uniform: Tensor, concentration: float, drawn: Tensor, total: Tensor) -> Tensor:
    """Divide ``total`` (episodes,) queries among the ``drawn`` classes of each episode by a Dirichlet distribution."""
    from scipy.special import gammaincinv  # noqa: PLC0415 - slow to import

    # A share is a gamma variate over their sum: Devroye, "Non-uniform random variate generation" (1986), ch. XI.4.
    gamma = torch.from_numpy(gammaincinv(concentration, uniform.numpy())).where(drawn, 0.0)
    gamma = gamma.where(gamma.sum(dim=1, keepdim=True) > 0, drawn.double())  # equal shares if all underflowed
    exact = gamma / gamma.sum(dim=1, keepdim=True) * total[:, None]
    floor = exact.floor()
    # The queries that remain go to the classes that lost most by rounding down.
    rank = (exact - floor).where(drawn, -1.0).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (floor + (rank < (total - floor.sum(dim=1))[:, None])).long()
