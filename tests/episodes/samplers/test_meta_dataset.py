from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protonet.episodes.samplers.meta_dataset import MetaDataset, read_class_groups
from protonet.episodes.samplers.sampler import RandomStream, sample_uniform_by_episode
from protonet.errors import InputError
from protonet.sampling import index_classes

GENERATOR = torch.Generator().manual_seed(0)
SIZE = torch.randint(2, 300, (70,), generator=GENERATOR)
LABELS = torch.arange(70).repeat_interleave(SIZE)[torch.randperm(int(SIZE.sum()), generator=GENERATOR)]
INDEX = index_classes(LABELS)
GROUPED = MetaDataset((tuple(range(6)), tuple(range(4, 70))))
SETTINGS = [MetaDataset(), GROUPED, replace(GROUPED, all_of_group=True)]


def describe_slowly(setting: MetaDataset, seed: int, index: int) -> tuple[list[int], int, list[int]]:
    """Draw an episode's classes, queries per class and shots, as the paper's appendix and its code say."""

    def uniform(stream: RandomStream, *shape: int) -> list[float]:
        indices = sample_uniform_by_episode(seed, stream, index, (1, *shape))
        return [float(item) for item in indices.flatten()]

    groups = setting.groups or (tuple(range(70)),)
    group = groups[int(uniform(RandomStream.GROUP)[0] * len(groups))]
    maximum = min(50, len(group))
    way = maximum if setting.all_of_group else 5 + int(uniform(RandomStream.WAY)[0] * (maximum - 5 + 1))
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
        draw = setting.sample(INDEX, seed=4, first=7, n_episodes=40)
        _, queries = setting.count(INDEX, seed=4, n_episodes=47)
        for at, index in enumerate(range(7, 47)):
            classes, n_query, shots = describe_slowly(setting, 4, index)
            way = len(classes)
            assert [int(LABELS[part[0]]) for part in draw.support[at][:way]] == classes
            assert (draw.support[at] >= 0).sum(dim=1).tolist() == [*shots, *[0] * (50 - way)]
            assert (draw.query[at] >= 0).sum(dim=1).tolist() == [*[n_query] * way, *[0] * (50 - way)]
            assert int(queries[index]) == n_query * way


def test_groups_are_nodes_of_a_tree(tmp_path: Path) -> None:
    """A node is a group if it has several children, and neither too few nor too many classes."""
    lines = ["root animal", "root thing", "animal mammal", "animal bird", "only animal", "thing cup"]
    lines += [f"mammal m{c}" for c in range(5)] + [f"bird b{c}" for c in range(4)] + ["bird m0"]
    lines += [f"far f{c}" for c in range(400)] + ["root far"]
    path = tmp_path / "is_a.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    names = [f"m{c}" for c in range(5)] + [f"b{c}" for c in range(4)] + ["cup"]
    # animal: 9 classes; bird: 5 with m0; mammal: 5; root: 10; thing has one child.
    nine, bird, mammal = tuple(range(9)), (0, 5, 6, 7, 8), (0, 1, 2, 3, 4)
    assert read_class_groups(str(path), names) == ((nine, bird, mammal, tuple(range(10))), True)
    more = [*names, *(f"f{c}" for c in range(400))]
    groups, _ = read_class_groups(str(path), more)
    assert groups == (nine, bird, mammal)


def test_files_that_are_no_hierarchy_are_refused(tmp_path: Path) -> None:
    for text, message in [
        ("a b c\n", "have lines 'parent child'; got 'a b c', number 1"),
        ("a c0\na c1\na c2\na b\nb a\n", "have no circles; got one through 'a'"),
        ("a c0\n", "have all classes, by name; got none for 'c1'"),
        ("a c0\na c1\na c2\n", "have a group of 5 classes; got 3 at most"),
        (None, "be names, or a file that can be read; got "),
    ]:
        path = tmp_path / ("tree.txt" if text else "absent.txt")
        path.write_text(text, encoding="utf-8") if text else None
        with pytest.raises(InputError, match=rf"^`hierarchy` must {message}"):
            read_class_groups(str(path), ["c0", "c1", "c2"])


def test_data_that_the_protocol_cannot_sample_are_refused() -> None:
    for setting, labels, message in [
        (MetaDataset(), torch.arange(4).repeat(3), "`classes` must be 5 or more, as Meta-Dataset's .* have; got 4"),
        (MetaDataset(), torch.arange(9) % 5, r"`classes` must have 2 rows \(shot \+ query\); got class '4' with 1"),
        (MetaDataset(((0, 1, 2, 3),)), torch.arange(5).repeat(3), "`groups` must be of 5 known classes or more"),
        (MetaDataset(((0, 1, 2, 3, 9),)), torch.arange(5).repeat(3), "`groups` must be of 5 known classes or more"),
    ]:
        with pytest.raises(InputError, match=message):
            setting.validate(index_classes(labels), ("0", "1", "2", "3", "4"))


def test_names_without_superclasses() -> None:
    with pytest.raises(InputError, match="be in the names of all classes; got 'b' without a superclass"):
        read_class_groups("names", ["a/b", "b"])
