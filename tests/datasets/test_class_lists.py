"""Class lists of the usual benchmarks: their content, and folders that are split by the lists."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from protonet.datasets import Dataset, load_cub, load_fc100, load_meta_dataset
from protonet.datasets.benchmarks import (
    describe_class_list_difference,
    format_class_lists,
    read_class_lists,
    simplify_class_name,
)
from protonet.datasets.dataset import SPLIT_SIDES
from protonet.episodes.samplers.meta_dataset import MAX_NODE_CLASSES, read_class_groups
from tests.datasets import trees
from tests.episodes.command_cases import Command

LISTS = read_class_lists()
#: The number of classes of each side, as the papers say.
COUNTS = {
    "mini-imagenet": (64, 16, 20),
    "tiered-imagenet": (351, 97, 160),
    "cub": (100, 50, 50),
    "cifar-fs": (64, 16, 20),
    "fc100": (60, 20, 20),
    "meta-aircraft": (70, 15, 15),
    "meta-cu-birds": (140, 30, 30),
    "meta-dtd": (33, 7, 7),
    "meta-fungi": (994, 200, 200),
    "meta-mscoco": (0, 40, 40),
    "meta-quickdraw": (241, 52, 52),
    "meta-traffic-sign": (0, 0, 43),
    "meta-vgg-flower": (71, 15, 16),
    "meta-ilsvrc-2012": (712, 158, 130),
}


def test_a_list_has_its_hash() -> None:
    for name in LISTS:
        known = LISTS[name]
        sides = {side: getattr(known, side) for side in SPLIT_SIDES}
        assert tuple(map(len, sides.values())) == COUNTS[name], name
        lines = "".join(f"{side}\t{label}\n" for side, labels in sides.items() for label in sorted(labels))
        assert hashlib.sha256(lines.encode()).hexdigest() == known.sha256, name
        assert len(set(map(simplify_class_name, known.side_of))) == sum(COUNTS[name]), name  # no two are one folder
        assert all((known.pictures[side] > 0) == bool(labels) for side, labels in sides.items()), name
        assert f"{name}: {known.of}" in format_class_lists(), name
        assert known.sha256 in format_class_lists(), name


def test_lists_of_related_benchmarks_agree() -> None:
    assert set(LISTS["cifar-fs"].side_of) == set(LISTS["fc100"].side_of)
    synsets = set(LISTS["meta-ilsvrc-2012"].side_of)
    assert len(synsets) == 1000
    assert set(LISTS["mini-imagenet"].side_of) < synsets
    assert set(LISTS["tiered-imagenet"].side_of) < synsets
    assert set(LISTS["cub"].side_of) == set(LISTS["meta-cu-birds"].side_of)
    rule = {
        name: "base" if index % 2 == 0 else "validation" if index % 4 == 1 else "novel"
        for index, name in enumerate(sorted(LISTS["cub"].side_of))
    }
    assert rule == LISTS["cub"].side_of


def test_groups_of_imagenet_equal_a_search() -> None:
    names = LISTS["meta-ilsvrc-2012"].validation
    children = {node: below.split() for node, below in LISTS["meta-ilsvrc-2012"].children.items()}

    def search(node: str) -> frozenset[str]:
        return frozenset({node} & set(names)).union(*(search(child) for child in children.get(node, ())))

    below = {node: search(node) for node in children}
    forks = {
        leaves
        for node, leaves in below.items()
        if 5 <= len(leaves) <= MAX_NODE_CLASSES
        and sum(bool(below.get(c, {c} & set(names))) for c in children[node]) > 1
    }
    groups, full = read_class_groups("meta-ilsvrc-2012", names)
    assert full
    assert {frozenset(names[index] for index in group) for group in groups} == forks


def paint(root: Path, key: str, spell: Callable[[str], str] = str) -> Path:
    """Write a folder with one picture of one pixel for each class on a list."""
    trees.draw(root / "pixel.png", "ab", 0)
    pixel = (root / "pixel.png").read_bytes()
    (root / "pixel.png").unlink()
    for label in LISTS[key].side_of:
        (root / spell(label)).mkdir(parents=True)
        (root / spell(label) / "0.png").write_bytes(pixel)
    return root


@pytest.mark.parametrize(
    ("key", "load", "folders"),
    [
        ("fc100", load_fc100, ["train", "test"]),
        ("cub", load_cub, ["images"]),
        ("meta-vgg-flower", partial(load_meta_dataset, "meta-vgg-flower"), [""]),
    ],
)
def test_plain_folders_are_split_by_the_list(
    key: str, load: Callable[..., Dataset], folders: list[str], tmp_path: Path
) -> None:
    for folder in folders:
        paint(tmp_path / folder, key, lambda label: label.replace(" ", "_").upper())
    (tmp_path / folders[0] / "another class").mkdir()
    data = load(tmp_path, size=1)
    assert dict(zip(data.class_names, data.sides or (), strict=True)) == LISTS[key].side_of
    assert torch.bincount(data.y).tolist() == [len(folders)] * data.num_classes
    part = tmp_path / folders[0] / LISTS[key].novel[0].replace(" ", "_").upper()
    (part / "0.png").unlink()
    part.rmdir()
    with pytest.raises(ValueError, match=rf"without 1, such as '{LISTS[key].novel[0]}'\. Get all of them"):
        load(tmp_path, size=1)


def test_a_copy_that_differs_from_the_benchmark_is_described_in_a_line() -> None:
    right = dict.fromkeys(LISTS["fc100"].side_of.items(), 600)
    assert describe_class_list_difference("fc100:a", right) == []
    assert describe_class_list_difference("fc100:a", {(f"{n}", side): 600 for n, (_, side) in enumerate(right)}) == []
    assert describe_class_list_difference("unknown:a", {}) == describe_class_list_difference("fc100", {}) == []
    begin = "This is not FC100, Oreshkin et al. (2018), as papers have it: "
    last = max((name, side) for name, side in right if side == "novel")
    assert describe_class_list_difference("fc100:a", right | {last: 599}) == [
        f"{begin}11,999 of 12,000 novel pictures."
    ]
    (line,) = describe_class_list_difference("cifar-fs:a", right)
    assert "60 of 64 base classes (" in line
    (line,) = describe_class_list_difference("fc100:a", {item: n for item, n in right.items() if item != last})
    assert line == f"{begin}19 of 20 novel classes (1 of them missing, such as {last[0]})."


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^`key` must be one of meta-aircraft, .*; got 'aircraft'"):
        load_meta_dataset("aircraft", tmp_path)
    with pytest.raises(ValueError, match=r"^`root` must hold a folder for each class of .*Textures"):
        load_meta_dataset("meta-dtd", tmp_path)


def test_the_command_reports_a_wrong_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROTONET_CACHE", str(tmp_path / "cache"))
    command = Command(capsys, tmp_path)
    root = paint(tmp_path / "data", "meta-dtd")
    for label in LISTS["meta-dtd"].novel:
        (root / label / "1.png").write_bytes((root / label / "0.png").read_bytes())
    out = command(f"--dataset meta-dtd:{root} --image-size 2 --query 1 --episodes 2 --method protonet")
    assert "This is not Describable Textures, as of Meta-Dataset, as papers have it: 33 of 3,960 base pictures, " in out
    assert command("--class-lists") == format_class_lists()
