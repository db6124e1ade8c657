"""Published data sets in every layout of their authors, and the class lists of the usual benchmarks."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from protonet.datasets import load_benchmark
from protonet.datasets.benchmarks import (
    describe_class_list_difference,
    format_class_lists,
    read_class_lists,
    simplify_class_name,
)
from protonet.datasets.dataset import SPLIT_SIDES
from protonet.episodes.features.sources import load_source
from protonet.episodes.samplers.meta_dataset import MAX_NODE_CLASSES, read_class_groups
from tests.datasets import trees
from tests.datasets.test_features import HOSTILE
from tests.episodes.cases import Command

NAMES = [label for labels in trees.CLASSES.values() for label in labels]
NUMBERS, BIRDS = "0123456", [f"{index:03}.{name}" for index, name in enumerate(NAMES, 1)]
COUNTED = ["base 0", "base 1", "2", "validation 0", "validation 1", "novel 0", "novel 1"]
META = ("meta-train", "meta-val", "meta-test")
SIDES = ["base"] * 3 + ["validation"] * 2 + ["novel"] * 2
PHASES: dict[str, Any] = {"pattern": "miniImageNet_category_split_{}.pickle", "size": 84, "train": "train_phase_train"}
#: For each layout: the data set, the function that writes the layout, the pixels per side, and the classes' names.
LAYOUTS: dict[str, tuple[str, Callable[[Path], Path], int, Sequence[str]]] = {
    "mini, lists": ("mini-imagenet", trees.make_csv, 84, NAMES),
    "mini, pickles of rows by class": ("mini-imagenet", trees.make_cache, 84, NAMES),
    "mini, pickles of labels": ("mini-imagenet", partial(trees.make_numbered, **PHASES), 84, NUMBERS),
    "mini, folders": ("mini-imagenet", trees.make_folders, 84, NAMES),
    "tiered, PNG": ("tiered-imagenet", partial(trees.make_tiered, png=True), 84, NAMES),
    "tiered, NPZ": ("tiered-imagenet", partial(trees.make_tiered, png=False), 84, COUNTED),
    "tiered, lists": ("tiered-imagenet", trees.make_imagenet, 84, NAMES),
    "tiered, folders": ("tiered-imagenet", trees.make_folders, 84, NAMES),
    "CUB, JSON": ("cub", partial(trees.make_cub, split="json"), 84, BIRDS),
    "CUB, CSV": ("cub", partial(trees.make_cub, split="csv"), 84, BIRDS),
    "CUB, folders": ("cub", trees.make_folders, 84, NAMES),
    "CIFAR-FS, lists": ("cifar-fs", trees.make_cifar_fs, 32, NAMES),
    "CIFAR-FS, pickles": ("cifar-fs", partial(trees.make_numbered, pattern="CIFAR_FS_{}.pickle"), 32, NUMBERS),
    "CIFAR-FS, folders": ("cifar-fs", partial(trees.make_folders, names=META), 32, NAMES),
    "FC100, pickles": ("fc100", partial(trees.make_numbered, pattern="FC100_{}.pickle"), 32, NUMBERS),
    "FC100, folders": ("fc100", trees.make_folders, 32, NAMES),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_classes_and_sides(name: str, root: Path) -> None:
    key, make, side, names = LAYOUTS[name]
    data = load_benchmark(key, make(root))
    assert (data.shape, data.x.dtype) == ((3, side, side), torch.uint8)
    assert data.x.shape == (14, 3 * side * side)
    assert dict(zip(data.class_names, data.sides or (), strict=True)) == dict(zip(names, SIDES, strict=True))
    order = data.y.argsort(stable=True)
    expected = {part: [trees.colour(label, k) for k in range(2)] for part, label in zip(names, NAMES, strict=True)}
    colours = torch.from_numpy(np.stack([colour for part in data.class_names for colour in expected[part]]))
    pictures = 255 * data.get_rows(order).unflatten(1, (3, side * side))
    # JPEG is off by a little; all else is what it was.
    torch.testing.assert_close(pictures, colours[:, :, None].expand_as(pictures).float(), rtol=0, atol=3)


@pytest.mark.parametrize("key", ["mini-imagenet", "tiered-imagenet", "cub", "fc100"])
def test_a_folder_without_the_layout_is_refused(key: str, root: Path) -> None:
    with pytest.raises(ValueError, match=r"^`root` must hold .*; got .*data with nothing\. Pass the folder"):
        load_benchmark(key, root)
    with pytest.raises(ValueError, match=r"got no folder .*absent"):
        load_benchmark(key, root / "absent")


def test_without_lists_cub_is_split_by_the_rule_of_chen_et_al(root: Path) -> None:
    data = load_benchmark("cub", trees.make_cub(root))
    assert data.sides == ("base", "validation", "base", "novel", "base", "validation", "base")
    assert data.class_names[:2] == ("001.ant", "002.bee")


def test_bad_lists_of_cub_and_cifar_fs_are_refused(tmp_path: Path) -> None:
    classes = "\n".join(f"{k} {k}" for k in range(1, 15))
    for index, (file, text, message) in enumerate(
        (
            ("images.txt", "1\n", r"images\.txt \(a line without a number and a value\)"),
            ("images.txt", "", r"images\.txt \(empty\)"),
            ("image_class_labels.txt", "1 1\n", r"image_class_labels\.txt \(1 labels of 14 pictures\)"),
            ("image_class_labels.txt", classes, r"\(folder 001\.ant of classes 1 and 2"),
            ("base.json", "{}", r"base\.json \(KeyError\)"),
            ("base.json", '{"image_names": ["a"]}', r"base\.json \(ValueError\)"),
            ("splits/bertinetto/val.txt", "owl\n", r"val\.txt \(no folder .*owl\)"),
            ("splits/bertinetto/val.txt", "\n", r"val\.txt \(empty\)"),
        )
    ):
        root, is_cub = tmp_path / str(index), not file.startswith("splits")
        home = trees.make_cub(root) / "CUB_200_2011" if is_cub else trees.make_cifar_fs(root) / "cifar100"
        (home / file).write_text(text)
        with pytest.raises(ValueError, match=f"^`root` must hold lists and pictures that can be read; .*{message}"):
            load_benchmark("cub" if is_cub else "cifar-fs", root)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": HOSTILE}, r"got .*_val\.pickle with builtins\.exec, which is not loaded"),
        ({"data": np.zeros((2, 32, 32, 3)), "labels": [1, 2]}, r"\(n, height, width, 3\) uint8; got float64 \(2, 32"),
        ({"data": np.zeros((2, 32, 32, 3), np.uint8), "labels": [1]}, r"a label of each of 2 pictures; got 1 in"),
        ({"image_data": np.zeros((2, 9, 9, 3), np.uint8), "class_dict": {"a": [0]}}, r"\(picture 1 in no class\)"),
        ({"image_data": np.zeros((2, 9, 9, 3), np.uint8), "class_dict": {"a": [2]}}, r"\(picture 2 of 2\)"),
        ({"data": np.zeros((1, 32, 32, 3), np.uint8), "labels": ["0"]}, None),
    ],
)
def test_bad_pickles_are_refused(root: Path, content: object, message: str | None) -> None:
    trees.dump(trees.make_numbered(root, "FC100_{}.pickle") / "FC100_val.pickle", content)
    if message is None:  # class 0 of the base classes is another one
        assert load_benchmark("fc100", root).class_names[-2:] == ("base 0", "validation 0")
        return
    with pytest.raises(ValueError, match=f"^`root` must .*{message}"):
        load_benchmark("fc100", root)
    (root / "FC100_val.pickle").unlink()
    with pytest.raises(ValueError, match=r"got no .*FC100_val\.pickle\. Get all of them"):
        load_benchmark("fc100", root)


def test_synsets_of_the_same_words_are_two_classes(root: Path) -> None:
    trees.make_tiered(root, png=True)
    labels = pickle.loads((root / "train_labels.pkl").read_bytes()) | {"label_specific_str": ["crane", "crane", "cat"]}
    trees.dump(root / "train_labels.pkl", labels)
    assert load_benchmark("tiered-imagenet", root).class_names[:3] == ("cat", "crane 0", "crane 1")


@pytest.mark.parametrize("kind", ["compressed", "other", "damaged", "list"])
def test_bad_files_of_tiered_imagenet(root: Path, kind: str) -> None:
    trees.make_tiered(root, png=kind == "list")
    path = root / "val_images.npz"
    images = np.zeros((4, 84, 84, 3), np.uint8)
    if kind == "compressed":  # it is read whole
        np.savez_compressed(path, images=images)
        assert int(load_benchmark("tiered-imagenet", root).x[6:10].max()) == 0
        return
    if kind == "other":
        np.savez(path, x=images)
        message = r"hold pictures, .* got none in .*val_images\.npz"
    elif kind == "damaged":
        path.write_bytes(b"PK")
        message = r"val_images\.npz \((BadZipFile|ValueError)\)"
    else:
        trees.dump(root / "val_images_png.pkl", {})
        message = "a dict, not a list of PNG files"
    with pytest.raises(ValueError, match=f"^`root` must .*{message}"):
        load_benchmark("tiered-imagenet", root)
    (root / "val_labels.pkl").unlink()
    with pytest.raises(ValueError, match=r"got no .*val_labels\.pkl"):
        load_benchmark("tiered-imagenet", root)


def test_rows_are_in_the_order_of_the_lists_of_mini_imagenet(root: Path) -> None:
    lines = (trees.make_csv(root) / "train.csv").read_text().splitlines()
    (root / "train.csv").write_text("\n".join(lines[::-1][:-1]))  # nor is the header needed
    data = load_benchmark("mini-imagenet", root, size=4)
    assert [data.class_names[label] for label in data.y.tolist()][:6] == ["cat", "cat", "bee", "bee", "ant", "ant"]
    assert data.sides == tuple(SIDES)


def test_bad_lists_of_mini_imagenet_are_refused(root: Path) -> None:
    trees.make_csv(root)
    for text, message in (
        ("filename,label\nant0.jpg,ant\n", "keep every class on one side; got class ant on base and validation"),
        ("file,label\ndog0.jpg,dog\n", "have columns filename and label in every list; got .*with file, label"),
        ("filename,label\ndog0.jpg\n", "have columns filename and label"),
        ("", "have columns filename and label .* with nothing"),
    ):
        (root / "val.csv").write_text(text)
        with pytest.raises(ValueError, match=f"^`root` must {message}"):
            load_benchmark("mini-imagenet", root)
    trees.make_csv(root)
    (root / "images" / "dog1.jpg").unlink()
    with pytest.raises(ValueError, match=r"`root` must hold its pictures; got no .*dog1\.jpg"):
        load_benchmark("mini-imagenet", root)
    (root / "val.csv").unlink()
    with pytest.raises(ValueError, match=r"hold lists and pictures that can be read; got .*val\.csv"):
        load_benchmark("mini-imagenet", root)


BACKGROUND = {"Alpha": 4, "Beta": 3, "Gamma": 2, "Delta": 1}
EVALUATION = {"Omega": 2}


def make_omniglot(root: Path) -> Path:
    """Write two drawings of 105 x 105 pixels of 1 bit for each character; the height of the ink tells them apart."""
    index = 0
    for part, alphabets in (("images_background", BACKGROUND), ("images_evaluation", EVALUATION)):
        for alphabet, n_characters in alphabets.items():
            for character in range(1, n_characters + 1):
                folder = root / part / alphabet / f"character{character:02}"
                folder.mkdir(parents=True)
                for drawing in (1, 2):
                    index += 1
                    ink = np.zeros((105, 105), bool)
                    ink[: 4 * index, :15] = True
                    Image.fromarray(~ink).save(folder / f"{index:04}_{drawing:02}.png")
    return root


@pytest.mark.parametrize("home", ["", "omniglot-py"])
def test_rows_names_and_sides_of_omniglot(tmp_path: Path, home: str) -> None:
    make_omniglot(tmp_path / home)
    data = load_benchmark("omniglot", str(tmp_path), size=7)
    assert (tuple(data.x.shape), data.x.dtype, data.shape) == ((24, 49), torch.uint8, (1, 7, 7))
    x = data.get_rows(torch.arange(24))
    assert data.class_names[:3] == ("Alpha/character01", "Alpha/character02", "Alpha/character03")
    assert data.sides is not None
    side_of = {name.split("/")[0]: side for name, side in zip(data.class_names, data.sides, strict=True)}
    # Ten characters: the last alphabets up to two of them, whole.
    expected = {"Alpha": "base", "Beta": "base", "Delta": "base", "Gamma": "validation", "Omega": "novel"}
    assert side_of == expected
    for name, index in (("Alpha/character01", 1), ("Gamma/character02", 17), ("Omega/character02", 23)):
        first = x[data.y == data.class_names.index(name)][0].reshape(7, 7)
        inked = torch.tensor([min(1.0, max(0.0, (4 * index - 15 * row) / 15)) for row in range(7)])
        torch.testing.assert_close(first[:, 0], inked, rtol=0, atol=1.01 / 255)
        assert float(first[:, 1:].abs().max()) == 0  # paper


def test_rotations_are_classes(tmp_path: Path) -> None:
    make_omniglot(tmp_path)
    plain, data = load_benchmark("omniglot", tmp_path, size=7), load_benchmark("omniglot-rotations", tmp_path, size=7)
    assert data.num_classes == 4 * plain.num_classes
    assert plain.sides is not None
    assert data.sides is not None
    side_of = dict(zip(data.class_names, data.sides, strict=True))
    for c, name in enumerate(plain.class_names):
        drawings = plain.get_rows((plain.y == c).nonzero().flatten()).reshape(-1, 7, 7)
        for quarters in range(4):
            turned = f"{name} rot{90 * quarters:03}" if quarters else name
            assert side_of[turned] == plain.sides[c]
            rows = data.get_rows((data.y == data.class_names.index(turned)).nonzero().flatten()).reshape(-1, 7, 7)
            torch.testing.assert_close(rows, drawings.rot90(quarters, dims=(1, 2)), rtol=0, atol=1.01 / 255)
    assert torch.equal(load_benchmark("omniglot", tmp_path, size=7).x, plain.x)  # each has a cached file of its own
    assert load_source(f"omniglot-rotations:{tmp_path}").num_classes == data.num_classes


def test_one_alphabet_is_base(tmp_path: Path) -> None:
    make_omniglot(tmp_path)
    for alphabet in ("Beta", "Gamma", "Delta"):
        (tmp_path / "images_background" / alphabet).rename(tmp_path / alphabet)
    assert load_benchmark("omniglot", tmp_path).sides == ("base",) * 4 + ("novel",) * 2


def test_bad_copies_of_omniglot_are_refused(tmp_path: Path) -> None:
    expected = r"^`root` must hold images_background/ALPHABET/CHARACTER/\*\.png and images_evaluation/"
    with pytest.raises(ValueError, match=rf"{expected}.*; got no folder .*images_background\."):
        load_benchmark("omniglot", tmp_path)
    make_omniglot(tmp_path)
    (tmp_path / "images_evaluation" / "Omega").rename(tmp_path / "images_evaluation" / "Beta")
    message = r"`root` must keep every class on one side; got class Beta/character01 on base and novel"
    with pytest.raises(ValueError, match=message):
        load_benchmark("omniglot", tmp_path)
    (tmp_path / "images_evaluation" / "Beta").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"{expected}.*; got .*images_evaluation without characters\."):
        load_benchmark("omniglot", tmp_path)
    (tmp_path / "images_evaluation" / "Omega" / "character01").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"have an image in every class; got none in .*Omega/character01\."):
        load_benchmark("omniglot", tmp_path)


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
        assert f"{name}: {known.benchmark}" in format_class_lists(), name
        assert known.sha256 in format_class_lists(), name


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
    ("key", "folders"), [("fc100", ["train", "test"]), ("cub", ["images"]), ("meta-vgg-flower", [""])]
)
def test_plain_folders_are_split_by_the_list(key: str, folders: list[str], tmp_path: Path) -> None:
    for folder in folders:
        paint(tmp_path / folder, key, lambda label: label.replace(" ", "_").upper())
    (tmp_path / folders[0] / "another class").mkdir()
    data = load_benchmark(key, tmp_path, size=1)
    assert dict(zip(data.class_names, data.sides or (), strict=True)) == LISTS[key].side_of
    assert torch.bincount(data.y).tolist() == [len(folders)] * data.num_classes
    part = tmp_path / folders[0] / LISTS[key].novel[0].replace(" ", "_").upper()
    (part / "0.png").unlink()
    part.rmdir()
    with pytest.raises(ValueError, match=rf"without 1, such as '{LISTS[key].novel[0]}'\. Get all of them"):
        load_benchmark(key, tmp_path, size=1)


def test_a_copy_that_differs_from_the_benchmark_is_described_in_a_line() -> None:
    right = dict.fromkeys(LISTS["fc100"].side_of.items(), 600)
    assert describe_class_list_difference("fc100:a", right) == []
    assert describe_class_list_difference("fc100:a", {(f"{n}", side): 600 for n, (_, side) in enumerate(right)}) == []
    assert describe_class_list_difference("unknown:a", {}) == describe_class_list_difference("fc100", {}) == []
    begin = "This is not FC100, Oreshkin et al. (2018), as papers have it: "
    last = max((name, side) for name, side in right if side == "novel")
    lines = describe_class_list_difference("fc100:a", right | {last: 599})
    assert lines == [f"{begin}11,999 of 12,000 novel pictures."]
    (line,) = describe_class_list_difference("cifar-fs:a", right)
    assert "60 of 64 base classes (" in line
    (line,) = describe_class_list_difference("fc100:a", {item: n for item, n in right.items() if item != last})
    assert line == f"{begin}19 of 20 novel classes (1 of them missing, such as {last[0]})."


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^`key` must be one of mini-imagenet, .*; got 'aircraft'"):
        load_benchmark("aircraft", tmp_path)
    with pytest.raises(ValueError, match=r"^`root` must hold a folder for each class of .*Textures"):
        load_benchmark("meta-dtd", tmp_path)


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
