"""Episodes of a fixed split, of generalized few-shot learning, and of Meta-Dataset."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from protonet.datasets.benchmarks import read_class_lists
from protonet.datasets.dataset import Dataset
from protonet.episodes.evaluation.evaluate import evaluate
from protonet.episodes.methods import METHODS
from protonet.episodes.samplers import meta_dataset
from protonet.episodes.samplers.batch import make_row_reader, summarize_base_classes
from protonet.episodes.samplers.config import EpisodeConfig, GeneralizedSampler
from protonet.episodes.samplers.fixed_split import FixedSplit, describe_duplicates, group_equal_rows
from protonet.episodes.samplers.meta_dataset import MetaDataset, read_class_groups
from protonet.episodes.samplers.sampler import EMPTY_SLOT, RandomStream, RowPool, sample_uniform_by_episode
from protonet.errors import InputError
from protonet.sampling import ClassIndex, index_classes, list_class_rows
from tests.strategies import seeds

GENERATOR = torch.Generator().manual_seed(0)
TRAIN = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 0])
TEST = torch.tensor([1, 0, 2, 1, 1])
COUNTS = (4, 3, 2)
X = torch.randn(14, 5, generator=GENERATOR)
INDEX = index_classes(torch.cat([TRAIN, TEST]))


def dataset(x: torch.Tensor, y: torch.Tensor, names: tuple[str, ...] = ("a", "b", "c")) -> Dataset:
    return Dataset(x, y, names)


@given(seed=seeds)
def test_the_support_is_of_training_rows_and_the_queries_are_the_test_split(seed: int) -> None:
    draw = FixedSplit((2, 2), COUNTS).sample(INDEX, seed=seed, first=5, n_episodes=6)
    assert draw.support_ids.shape == (6, 3, 2)
    for support, query in zip(draw.support_ids, draw.query_ids, strict=True):
        assert bool((TRAIN[support] == torch.arange(3)[:, None]).all())
        assert all(len(part.unique()) == 2 for part in support)
        assert [[row for row in part.tolist() if row != EMPTY_SLOT] for part in query] == [[10], [9, 12, 13], [11]]


def test_every_training_row_is_as_likely() -> None:
    draw = FixedSplit((2, 2), COUNTS).sample(INDEX, seed=1, first=0, n_episodes=3000)
    for part, rows in enumerate(([0, 3, 6, 8], [1, 4, 7], [2, 5])):
        counts = torch.bincount(draw.support_ids[:, part].flatten(), minlength=9)
        assert counts.nonzero().flatten().tolist() == rows
        assert chisquare(counts[rows].numpy()).pvalue > 1e-3


def test_settings_that_do_not_fit_the_split_are_refused() -> None:
    for setting, message in [
        (FixedSplit((0, 0), COUNTS), r"`shot` must be a whole number in \[1, 1000000\]; got 0"),
        (FixedSplit((3, 3), COUNTS), "`classes` must have 3 training rows; got class 'c' with 2. Ask for fewer shots"),
        (FixedSplit((1, 1), (4, 3)), "`n_training_rows` must be one count for each"),
        (FixedSplit((1, 1), (4, 6, 2)), "`classes` must have a test row; got class 'b' without any"),
    ]:
        with pytest.raises(InputError, match=message):
            setting.validate(INDEX, ("a", "b", "c"))


@pytest.mark.parametrize("name", ["protonet", "knn"])
def test_many_queries_come_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    methods, config = {name: METHODS[name]}, FixedSplit((2, 2), COUNTS)
    full = evaluate(X, INDEX, methods, config, episodes=3)[name]
    monkeypatch.setattr("protonet.episodes.evaluation.evaluate.MAX_DOT_PRODUCTS_PER_CALL", 1)
    monkeypatch.setattr("protonet.episodes.evaluation.evaluate.MIN_QUERIES_PER_CALL", 2)
    blocks = evaluate(X, INDEX, methods, config, episodes=3)[name]
    assert torch.equal(full.accuracy, blocks.accuracy)
    assert torch.allclose(full.confidence_bins, blocks.confidence_bins, atol=1e-5)


def test_splits_are_joined_by_name() -> None:
    train, test = dataset(X[:9], TRAIN), dataset(X[9:], (TEST + 1) % 3, ("c", "a", "b"))
    sampler, data = FixedSplit((2, 2)).join_test_set(train, test, ("x", "y"))
    assert torch.equal(data.x, X)
    assert data.y.tolist() == [*TRAIN.tolist(), *TEST.tolist()]
    assert sampler == FixedSplit((2, 2), COUNTS)
    _, half = FixedSplit((2, 2)).join_test_set(train, dataset(X[9:].half(), TEST), ("x", "y"))
    assert half.x.dtype == torch.float32
    pixels = dataset((2 * torch.arange(45)).view(9, 5).to(torch.uint8), TRAIN)
    _, grey = FixedSplit((2, 2)).join_test_set(pixels, pixels._replace(x=pixels.x + 1), ("x", "y"))
    assert torch.equal(grey.x[:9], pixels.x)
    _, mixed = FixedSplit((2, 2)).join_test_set(pixels, test, ("x", "y"))
    assert torch.equal(mixed.x, torch.cat([pixels.x / 255, X[9:]]))


def test_splits_that_do_not_fit_together_are_refused() -> None:
    for test, message in [
        (dataset(X[9:, :4], TEST), "have 5 features per row, as x.npz; got 4 of y.npz. Embed both alike"),
        (dataset(X[9:], TEST, ("a", "b", "d")), "have the classes of x.npz, by name; got 'd' in y.npz alone"),
        (dataset(X[9:11], TEST[:2], ("a", "b")), "got 'c' in x.npz alone. Rename them, or leave them out"),
        *(
            (dataset(X[8:13].to(dtype), TEST), "share no row with x.npz; got 1, such as row 0 of y.npz and row 8 of x")
            for dtype in (torch.float16, torch.float32, torch.float64)
        ),
    ]:
        with pytest.raises(InputError, match=message):
            FixedSplit((2, 2)).join_test_set(dataset(X[:9], TRAIN), test, ("x.npz", "y.npz"))


@given(
    rows=st.lists(st.lists(st.sampled_from([-1.0, -0.0, 0.0, 1.0]), min_size=3, max_size=3), max_size=12),
    dtype=st.sampled_from([torch.uint8, torch.float16, torch.float32, torch.float64]),
)
def test_equal_rows_have_the_same_group(rows: list[list[float]], dtype: torch.dtype) -> None:
    x = torch.tensor(rows).view(-1, 3)
    x = (x.abs() if dtype == torch.uint8 else x).to(dtype)
    indices = group_equal_rows(x)
    assert torch.equal(indices[:, None] == indices, (x[:, None] == x).all(dim=2))


def test_lines_about_duplicates_equal_a_slow_count() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 12, (60, 1), generator=generator).float()
    y = torch.arange(60) % 6
    data = Dataset(x, y, tuple("abcdef"), ("novel", "novel", "novel", "base", "base", "validation"))
    equal = (x == x.T).fill_diagonal_(fill_value=False)
    evaluated = y < 3
    expected = [
        evaluated & (equal & (y[:, None] == y)).any(dim=1),
        evaluated & (equal & (y[:, None] != y) & evaluated).any(dim=1),
        evaluated & (equal & ~evaluated).any(dim=1),
    ]
    lines = list(describe_duplicates(data, torch.arange(3)))
    assert [int(line.partition(": ")[2].split()[0]) for line in lines] == [int(rows.sum()) for rows in expected]
    assert all("(a, b, c)" in line for line in lines)
    assert "not evaluated, of 3 classes (d, e, f): " in lines[2]
    assert list(describe_duplicates(data._replace(x=torch.arange(60.0)[:, None]), torch.arange(3))) == []


def test_small_classes_give_all_that_they_have() -> None:
    setting = FixedSplit((3, 3), COUNTS, allow_small=True)
    draw = setting.sample(setting.validate(INDEX, ("a", "b", "c")), seed=0, first=0, n_episodes=9)
    assert ((draw.support_ids >= 0).sum(dim=2) == torch.tensor([3, 3, 2])).all()
    assert (draw.support_ids[:, 2, :2].sort().values == torch.tensor([2, 5])).all()


SORTED_GENERATOR = torch.Generator().manual_seed(0)
SORTED_LABELS = torch.arange(9).repeat_interleave(torch.tensor([11, 7, 12, *[9] * 6]))
SORTED_X = torch.randn(9, 4, generator=SORTED_GENERATOR)[SORTED_LABELS] + 0.8 * torch.randn(
    len(SORTED_LABELS), 4, generator=SORTED_GENERATOR
)


def join(
    labels: torch.Tensor, x: torch.Tensor, n_base_classes: int, setting: EpisodeConfig
) -> tuple[GeneralizedSampler, RowPool, ClassIndex]:
    """Make generalized episodes of which the first classes are base; return them, their rows, and the base rows."""
    full, names = index_classes(labels), tuple("abcdefghi")
    base, novel = map(full.select_classes, torch.arange(len(full.class_counts)).tensor_split([n_base_classes]))
    learned, queries = GeneralizedSampler(setting).hold_out_queries(base, names)
    means = summarize_base_classes(make_row_reader(x), learned).class_means
    of_novel, of_base = (RowPool(x, make_row_reader(x), index, index) for index in (novel, queries))
    sampler, pool = GeneralizedSampler(setting).join_base_classes(of_novel, of_base, means)
    return sampler, pool, learned


KIND, POOL, LEARNED = join(SORTED_LABELS, SORTED_X, 3, EpisodeConfig(way=(2, 4), shot=(1, 3), query=3))
ROWS, SORTED_INDEX, SOURCES = POOL.x, POOL.rows_by_class, POOL.dataset_rows


def test_every_fifth_base_row_is_a_query_and_not_in_its_mean_and_no_row_is_lost() -> None:
    for part in range(3):
        mine = SORTED_X[part == SORTED_LABELS]
        is_query = torch.arange(len(mine)) % 5 == 4
        rows = ROWS[SORTED_INDEX.class_starts[part] : SORTED_INDEX.class_starts[part] + SORTED_INDEX.class_counts[part]]
        assert torch.allclose(rows[0], mine[~is_query].mean(dim=0), atol=1e-6)
        assert torch.equal(rows[1:], mine[is_query])
    assert torch.equal(ROWS[SORTED_INDEX.class_starts[3] :], SORTED_X[SORTED_LABELS >= 3])
    assert torch.equal(SORTED_LABELS[SOURCES.row_indices[SOURCES.class_starts]], torch.arange(9))
    assert torch.equal(SORTED_X[SOURCES.row_indices[SOURCES.class_starts[3] :]], ROWS[SORTED_INDEX.class_starts[3] :])
    for part, learned in enumerate(list_class_rows(LEARNED)):
        queries = list_class_rows(SOURCES)[part][1:]
        assert sorted(torch.cat([learned, queries]).tolist()) == SORTED_LABELS.eq(part).nonzero().flatten().tolist()


@given(seed=seeds, first=st.integers(0, 10**9), n=st.integers(1, 4))
def test_base_classes_come_first_and_novel_ones_are_those_of_plain_episodes(seed: int, first: int, n: int) -> None:
    draw = KIND.sample(SORTED_INDEX, seed=seed, first=first, n_episodes=n)
    novel = SORTED_INDEX.select_classes(torch.arange(3, 9))
    plain = KIND.novel_config.sample(novel, seed=seed, first=first, n_episodes=n)
    assert torch.equal(draw.support_ids[:, 3:], plain.support_ids)
    assert torch.equal(draw.query_ids[:, 3:, : plain.query_ids.shape[2]], plain.query_ids)
    assert (draw.support_ids[:, :3, 0] == SORTED_INDEX.class_starts[:3]).all()
    assert (draw.support_ids[:, :3, 1:] < 0).all()
    for part in range(3):
        is_query = draw.query_ids[:, part]
        n_queries = min(3, int(SORTED_INDEX.class_counts[part]) - 1)
        assert (is_query > SORTED_INDEX.class_starts[part]).sum() == n * n_queries
        assert (is_query < SORTED_INDEX.class_starts[part] + SORTED_INDEX.class_counts[part]).all()


def test_scores_equal_a_slow_loop() -> None:
    """The slow loop finds the nearest mean among base and novel classes, one query at a time."""
    scores = evaluate(ROWS, SORTED_INDEX, {"protonet": METHODS["protonet"]}, KIND, seed=2, episodes=20)["protonet"]
    for position in range(20):
        draw = KIND.sample(SORTED_INDEX, seed=2, first=position, n_episodes=1)
        supports = [part[part >= 0] for part in draw.support_ids[0]]
        means = [ROWS[part].mean(dim=0) for part in supports if len(part)]
        right: dict[bool, list[bool]] = {True: [], False: []}
        for label, part in enumerate(draw.query_ids[0]):
            for row in part[part >= 0]:
                nearest = min(range(len(means)), key=lambda c: float(torch.dist(ROWS[row], means[c])))
                right[label < 3].append(nearest == label)
        base, novel = (sum(right[side]) / len(right[side]) for side in (True, False))
        assert float(scores.base_accuracy[position]) == pytest.approx(base)
        assert float(scores.novel_accuracy[position]) == pytest.approx(novel)
        mean = 2 * base * novel / (base + novel) if base + novel else 0
        assert float(scores.harmonic_mean[position]) == pytest.approx(mean)
        both = right[True] + right[False]
        assert float(scores.accuracy[position]) == pytest.approx(sum(both) / len(both))


def test_data_that_the_protocol_cannot_sample_are_refused() -> None:
    for kind, message in [
        (replace(KIND, n_base_classes=0), "`n_base_classes` must be classes of a mean and a query or more; got 0"),
        (replace(KIND, n_base_classes=9), "`n_base_classes` must be classes of a mean and a query or more; got 9"),
        (replace(KIND, novel_config=EpisodeConfig(way=(2, 7))), r"`way` must be at most the number of .* \(6\); got 7"),
    ]:
        with pytest.raises(InputError, match=message):
            kind.validate(SORTED_INDEX, tuple("abcdefghi"))


def test_a_base_class_of_two_rows_has_a_mean_and_a_query() -> None:
    labels, x = torch.tensor([0, 0, 1, 1, 1]), torch.arange(10.0).reshape(5, 2)
    _, pool, _ = join(labels, x, 1, EpisodeConfig())
    assert torch.equal(pool.x[:2], x[:2])
    assert pool.rows_by_class.class_counts.tolist() == [2, 3]
    message = "`base classes` must have 2 rows, to learn from and to ask for; got class 'a'"
    with pytest.raises(InputError, match=message):
        join(labels[1:], x[1:], 1, EpisodeConfig())


META_GENERATOR = torch.Generator().manual_seed(0)
SIZE = torch.randint(2, 300, (70,), generator=META_GENERATOR)
META_LABELS = torch.arange(70).repeat_interleave(SIZE)[torch.randperm(int(SIZE.sum()), generator=META_GENERATOR)]
META_INDEX = index_classes(META_LABELS)
GROUPED = MetaDataset((tuple(range(6)), tuple(range(4, 70))))
SETTINGS = [MetaDataset(), GROUPED, replace(GROUPED, use_whole_group=True)]


def describe_slowly(setting: MetaDataset, seed: int, index: int) -> tuple[list[int], int, list[int]]:
    """Draw an episode's classes, queries per class and shots, as the paper's appendix and its code say."""

    def uniform(stream: RandomStream, *shape: int) -> list[float]:
        indices = sample_uniform_by_episode(seed, stream, index, (1, *shape))
        return [float(item) for item in indices.flatten()]

    groups = setting.class_groups or (tuple(range(70)),)
    group = groups[int(uniform(RandomStream.GROUP)[0] * len(groups))]
    maximum = min(50, len(group))
    way = maximum if setting.use_whole_group else 5 + int(uniform(RandomStream.WAY)[0] * (maximum - 5 + 1))
    left, classes = list(group), []
    for position in uniform(RandomStream.CLASS, 50)[:way]:
        classes.append(left.pop(int(position * len(left))))
    images = [int(SIZE[c]) for c in classes]
    n_query = min(10, *(count // 2 for count in images))
    remaining = [count - n_query for count in images]
    beta = uniform(RandomStream.SHOT)[0]
    total = min(500, sum(math.floor(beta * min(100, count) + 1) for count in remaining))
    alphas = [math.log(0.5) + item * (math.log(2) - math.log(0.5)) for item in uniform(RandomStream.SIZE, 50)[:way]]
    weights = [math.exp(alpha) * count for alpha, count in zip(alphas, images, strict=True)]
    fractions = zip([weight / sum(weights) for weight in weights], remaining, strict=True)
    return classes, n_query, [min(math.floor(fraction * (total - way)) + 1, count) for fraction, count in fractions]


def test_counts_equal_the_papers_equations() -> None:
    for setting in SETTINGS:
        draw = setting.sample(META_INDEX, seed=4, first=7, n_episodes=40)
        _, queries = setting.count_classes_and_queries(META_INDEX, seed=4, n_episodes=47)
        for at, index in enumerate(range(7, 47)):
            classes, n_query, shots = describe_slowly(setting, 4, index)
            way = len(classes)
            assert [int(META_LABELS[part[0]]) for part in draw.support_ids[at][:way]] == classes
            assert (draw.support_ids[at] >= 0).sum(dim=1).tolist() == [*shots, *[0] * (50 - way)]
            assert (draw.query_ids[at] >= 0).sum(dim=1).tolist() == [*[n_query] * way, *[0] * (50 - way)]
            assert int(queries[index]) == n_query * way


def use_hierarchy(monkeypatch: pytest.MonkeyPatch, **children: str) -> None:
    """Make "tree" the name of a class list with a hierarchy: the children of each node, with blanks between."""
    known = replace(read_class_lists()["meta-ilsvrc-2012"], children=children)
    monkeypatch.setattr(meta_dataset, "read_class_lists", lambda: {"tree": known})


def test_groups_are_nodes_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node is a group if it has several children, and neither too few nor too many classes."""
    nodes = {"root": "animal thing far", "animal": "mammal bird", "only": "animal", "thing": "cup"}
    nodes |= {"mammal": "m0 m1 m2 m3 m4", "bird": "b0 b1 b2 b3 m0", "far": " ".join(f"f{c}" for c in range(400))}
    use_hierarchy(monkeypatch, **nodes)
    names = [f"m{c}" for c in range(5)] + [f"b{c}" for c in range(4)] + ["cup"]
    # animal: 9 classes; bird: 5 with m0; mammal: 5; root: 10; thing has one child.
    nine, bird, mammal = tuple(range(9)), (0, 5, 6, 7, 8), (0, 1, 2, 3, 4)
    assert read_class_groups("tree", names) == ((nine, bird, mammal, tuple(range(10))), True)
    more = [*names, *(f"f{c}" for c in range(400))]
    groups, _ = read_class_groups("tree", more)
    assert groups == (nine, bird, mammal)


def test_wrong_hierarchies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, children, message in [
        ("tree", "c0", "have all classes, by name; got none for 'c1'"),
        ("tree", "c0 c1 c2", "have a group of 5 classes; got 3 at most"),
        ("tree.txt", "c0", r"be names or one of tree; got 'tree\.txt'"),
    ]:
        use_hierarchy(monkeypatch, a=children)
        with pytest.raises(InputError, match=rf"^`hierarchy` must {message}"):
            read_class_groups(name, ["c0", "c1", "c2"])


def test_data_that_meta_dataset_cannot_sample_are_refused() -> None:
    for setting, labels, message in [
        (MetaDataset(), torch.arange(4).repeat(3), "`classes` must be 5 or more, as Meta-Dataset's .* have; got 4"),
        (MetaDataset(), torch.arange(9) % 5, r"`classes` must have 2 rows \(shot \+ query\); got class '4' with 1"),
        (MetaDataset(((0, 1, 2, 3),)), torch.arange(5).repeat(3), "`class_groups` must be of 5 known"),
        (MetaDataset(((0, 1, 2, 3, 9),)), torch.arange(5).repeat(3), "`class_groups` must be of 5 known"),
    ]:
        with pytest.raises(InputError, match=message):
            setting.validate(index_classes(labels), ("0", "1", "2", "3", "4"))


def test_names_without_superclasses() -> None:
    with pytest.raises(InputError, match="be in the names of all classes; got 'b' without a superclass"):
        read_class_groups("names", ["a/b", "b"])
