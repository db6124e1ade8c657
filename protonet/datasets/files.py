"""Your own data: a folder of images by class, an NPZ file, a CSV file. Nothing is ever unpickled."""

from __future__ import annotations

import csv
import math
import zipfile
from pathlib import Path

import numpy as np
import torch

from protonet._checks import check_int, fail
from protonet.datasets.dataset import Dataset, make_dataset, optional_packages

IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}


def load_images(folder: str | Path, *, size: int | None = None, colour: bool = False) -> Dataset:
    """Load a folder of images by class: ``folder/class/*.png`` (or any other common format).

    Args:
        folder: A folder with one folder a class; hidden ones are left out.
        size: Pixels a side to resize every image to, or None to keep one size that all images have.
        colour: Keep red, green and blue; otherwise images are turned grey.

    Returns:
        Rows of ``height * width`` (times 3, channels last) values in [0, 1], classes and files in sorted order.

    Raises:
        ImportError: Pillow is missing.
        ValueError: No folder, no classes, a class without images, a file that is no image, images of several
            sizes.
    """
    folder = Path(folder)
    if size is not None:
        size = check_int("load_images", "size", size, low=1)
    with optional_packages("load_images", "pip install pillow"):
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - optional
    classes = sorted(entry for entry in folder.glob("[!.]*") if entry.is_dir())
    if not classes:
        remedy = "Put the images of each class in a folder of its own: FOLDER/CLASS/*.png."
        got = f"{folder} without any" if folder.is_dir() else f"{folder}, which is no folder"
        fail("load_images", "folder", "hold one folder a class", got, remedy)
    rows, labels, shape = [], [], None
    for entry in classes:
        paths = sorted(path for path in entry.iterdir() if path.suffix.lower() in IMAGES)
        if not paths:
            fail("load_images", "folder", "have an image in every class", f"none in {entry}", "Add one or remove it.")
        for path in paths:
            try:
                with Image.open(path) as image:
                    pixels = image.convert("RGB" if colour else "L")
            except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
                got = f"{path} ({type(error).__name__})"
                fail("load_images", "folder", "hold images that can be read", got, "Replace that file.")
            if size is not None:
                pixels = pixels.resize((size, size), Image.Resampling.BOX)
            shape = shape or pixels.size
            if pixels.size != shape:
                got = f"{pixels.size} in {path} after {shape}"
                fail("load_images", "folder", "hold images of one size", got, "Pass size=28 to resize them.")
            rows.append(np.asarray(pixels, np.uint8).reshape(-1))  # (dim,)
            labels.append(entry.name)
    return make_dataset("load_images", "folder", torch.from_numpy(np.stack(rows)) / 255, labels)


def load_npz(path: str | Path) -> Dataset:
    """Load an NPZ file with arrays ``x``, ``y`` and, if there is a split by class, ``split``.

    Args:
        path: A file of ``numpy.savez``: x (n, ...) real, y (n,) integers or strings, split (n,) strings "base",
            "validation" or "novel", the same for all rows of a class.

    Returns:
        The rows, flattened and not scaled. Integer classes are numbered in their order.

    Raises:
        ValueError: Not an NPZ file, x or y missing, object arrays, NaN, shapes that do not fit.
    """
    path = Path(path)
    arrays = _read_arrays(path)
    for name in ("x", "y"):
        if name not in arrays:
            got = f"{path} with {', '.join(sorted(arrays)) or 'nothing'}"
            fail("load_npz", "path", f"hold an array {name}", got, "Save it with numpy.savez(path, x=x, y=y).")
    x, y, split = arrays["x"], arrays["y"].reshape(-1), arrays.get("split")
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        fail("load_npz", "x", "be real, of shape (n, dim)", f"{x.dtype} {x.shape}", "Save features as floats.")
    if y.dtype.kind not in "biuU":
        fail("load_npz", "y", "be integers or strings", str(y.dtype), "Save class numbers or names.")
    sides = None if split is None else split.reshape(-1)
    return make_dataset("load_npz", "x", torch.from_numpy(x.astype(np.float32)), y, sides)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays x, y and split of an NPZ file, those that it has."""
    try:
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            return {name: file[name] for name in file.files if name in {"x", "y", "split"}}
    except ValueError as error:
        if "Object arrays" not in str(error):
            fail("load_npz", "path", "be an NPZ file", str(path), "Use numpy.savez(path, x=x, y=y).")
        remedy = "Save them as numbers, or labels as strings: y.astype(str)."
        fail("load_npz", "path", "hold no object arrays, which would be unpickled", str(path), remedy)
    except (OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        got = f"{path} ({type(error).__name__})"
        fail("load_npz", "path", "be an NPZ file that can be read", got, "Save it again with numpy.savez.")


def load_csv(path: str | Path, *, label: str = "label") -> Dataset:
    """Load a CSV file with a header, a column of labels and columns of numbers.

    Args:
        path: The file, UTF-8.
        label: The name of the column that holds the class of each row.

    Returns:
        The rows, not scaled; columns in the file's order.

    Raises:
        ValueError: The file cannot be read, has no such column or no other one, a row of another length, a cell
            that is no number, NaN (an empty cell is one).
    """
    path = Path(path)
    rows, labels = [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            header = next(lines, [])
            if header.count(label) != 1 or len(header) < 2:
                got = f"{path} with {', '.join(header) or 'nothing'}"
                remedy = "Name the column with label=."
                fail("load_csv", "path", f"have one column {label} and columns of numbers", got, remedy)
            column = header.index(label)
            for cells in filter(None, lines):
                if len(cells) != len(header):
                    got = f"{len(cells)} in line {lines.line_num}"
                    fail("load_csv", "path", f"have {len(header)} cells a row", got, "Mend that line.")
                labels.append(cells.pop(column))
                rows.append([_parse_number(cell, lines.line_num) for cell in cells])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        got = f"{path} ({type(error).__name__})"
        fail("load_csv", "path", "be a CSV file that can be read", got, "Check the path; save it as UTF-8.")
    features = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), len(header) - 1)  # (n, dim)
    return make_dataset("load_csv", "path", features, labels)


def _parse_number(cell: str, line: int) -> float:
    """Return a cell's number; an empty one is NaN."""
    try:
        return float(cell) if cell.strip() else math.nan
    except ValueError:
        fail("load_csv", "path", "hold numbers beside the label", f"{cell!r} in line {line}", "Encode it as numbers.")
