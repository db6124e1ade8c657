"""Small data sets of pictures in their authors' layouts. Each picture has one colour, which identifies it."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

#: Maps a side, as most authors name it in files, to its classes.
CLASSES = {"train": ("ant", "bee", "cat"), "val": ("dog", "eel"), "test": ("fox", "gnu")}
PER_CLASS = 2


def colour(label: str, index: int) -> np.ndarray:
    """Return the colour of a class's picture: (3,) uint8."""
    return np.array([ord(label[0]), ord(label[1]), (50 + 100 * index) % 256], np.uint8)


def paint(label: str, index: int, size: int = 20) -> np.ndarray:
    """Return a picture of a class: (size, size, 3) uint8."""
    return np.tile(colour(label, index), (size, size, 1))


def draw(path: Path, label: str, index: int) -> None:
    """Write a picture of a class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(paint(label, index)).save(path, quality=100)


def draw_classes(folder: Path, labels: Sequence[str], suffix: str = ".png") -> None:
    """Write ``folder/CLASS/CLASS0.png`` and so on."""
    for label in labels:
        for index in range(PER_CLASS):
            draw(folder / label / f"{label}{index}{suffix}", label, index)


def dump(path: Path, content: Any, protocol: int = 2) -> None:
    """Write a pickle, by default as Python 2 can read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(content, file, protocol)


def stack(labels: Sequence[str], size: int) -> tuple[np.ndarray, list[str]]:
    """Return the pictures (n, size, size, 3) of classes, and the class of each picture."""
    pairs = [(label, index) for label in labels for index in range(PER_CLASS)]
    return np.stack([paint(label, index, size) for label, index in pairs]), [label for label, _ in pairs]


def encode(pixels: np.ndarray) -> bytes:
    """Return the content of a PNG file of pixels."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def make_folders(root: Path, names: Sequence[str] = ("train", "val", "test")) -> Path:
    """Make ``root/train/CLASS/*.png``, ``val`` and ``test``."""
    for name, labels in zip(names, CLASSES.values(), strict=True):
        draw_classes(root / name, labels)
    return root


def make_csv(root: Path) -> Path:
    """Make mini-ImageNet's images and Ravi's lists."""
    for name, labels in CLASSES.items():
        lines = ["filename,label"]
        for label in labels:
            for index in range(PER_CLASS):
                draw(root / "images" / f"{label}{index}.jpg", label, index)
                lines.append(f"{label}{index}.jpg,{label}")
        (root / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return root


def make_cache(root: Path) -> Path:
    """Make mini-ImageNet's pickles of Ren et al."""
    for name, labels in CLASSES.items():
        images, of = stack(labels, 84)
        rows = {label: [k for k, element in enumerate(of) if element == label] for label in labels}
        dump(root / f"mini-imagenet-cache-{name}.pkl", {"image_data": images, "class_dict": rows})
    return root


def make_numbered(root: Path, pattern: str, size: int = 32, train: str = "train") -> Path:
    """Make pickles with numbered labels, of Gidaris and Komodakis (mini-ImageNet) or Lee et al. (CIFAR-FS, FC100)."""
    for first, (name, labels) in zip((0, 3, 5), CLASSES.items(), strict=True):
        images, of = stack(labels, size)
        content = {"data": images, "labels": [first + labels.index(label) for label in of], "catname2label": {}}
        dump(root / pattern.format(train if name == "train" else name), content)
    return root


def make_tiered(root: Path, *, png: bool) -> Path:
    """Make tiered-ImageNet's files, as PNG files in a pickle or as an NPZ file; in each side, classes count from 0."""
    for name, labels in CLASSES.items():
        images, of = stack(labels, 84)
        indices = np.array([labels.index(label) for label in of], np.int32)
        if png:
            encoded = [np.frombuffer(encode(image), np.uint8)[:, None] for image in images]
            dump(root / f"{name}_images_png.pkl", encoded)
            dump(root / f"{name}_labels.pkl", {"label_specific": indices, "label_specific_str": list(labels)})
        else:
            np.savez(root / f"{name}_images.npz", images=images)
            dump(root / f"{name}_labels.pkl", {"labels": indices})
    return root


def make_imagenet(root: Path) -> Path:
    """Make ImageNet's training pictures, and the lists of tiered-ImageNet of Ren et al."""
    for name, labels in CLASSES.items():
        draw_classes(root / "train", labels, ".JPEG")
        (root / f"{name}.csv").write_text("".join(f"{label},n0{k}\n" for k, label in enumerate(labels)) + "\n")
    (root / "val").mkdir()
    return root


def make_cub(root: Path, split: str = "") -> Path:
    """Make CUB-200-2011 with its lists, and those of Chen et al. ("json") or of Boudiaf et al. ("csv")."""
    home = root / "CUB_200_2011"
    labels = [f"{index:03}.{label}" for index, label in enumerate(sum(CLASSES.values(), ()), 1)]
    lines: list[tuple[str, int]] = []
    for index, label in enumerate(labels, 1):
        for picture in range(PER_CLASS):
            name = f"{label}/{label[4:]}_{picture}.jpg"
            draw(home / "images" / name, label[4:], picture)
            lines.append((name, index))
    for name, text in (
        ("images.txt", [f"{k} {file}" for k, (file, _) in enumerate(lines, 1)]),
        ("image_class_labels.txt", [f"{k} {index}" for k, (_, index) in enumerate(lines, 1)]),
        ("classes.txt", [f"{index} {label}" for index, label in enumerate(labels, 1)]),
    ):
        (home / name).write_text("\n".join(text) + "\n")
    for part, base, element in zip(CLASSES, ("base", "val", "novel"), CLASSES.values(), strict=True):
        chosen = [(file, index) for file, index in lines if file[4:7] in element]
        if split == "csv":
            (home / f"{part}.csv").write_text("\n".join(["filename,label", *(f"{a},{b}" for a, b in chosen)]))
        if split == "json":
            names = [f"/home/author/CUB_200_2011/images/{file}" for file, _ in chosen]
            content = {"label_names": labels, "image_names": names, "image_labels": [index for _, index in chosen]}
            (home / f"{base}.json").write_text(json.dumps(content))
    return root


def make_cifar_fs(root: Path) -> Path:
    """Make CIFAR-FS of Bertinetto et al."""
    (root / "cifar100" / "splits" / "bertinetto").mkdir(parents=True)
    for name, labels in CLASSES.items():
        draw_classes(root / "cifar100" / "data", labels)
        (root / "cifar100" / "splits" / "bertinetto" / f"{name}.txt").write_text("\n".join(labels) + "\n")
    return root
