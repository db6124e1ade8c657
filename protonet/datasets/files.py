"""Your own data: a folder of images by class, an NPZ file, a CSV file. Nothing is unpickled."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from protonet._validation import check_int
from protonet.datasets.dataset import Dataset, assign_sides, make_dataset
from protonet.embeddings.pictures.images import list_folders, list_images, read_image
from protonet.errors import raise_input_error
from protonet.tables.arrays import read_arrays
from protonet.tables.delimited import read_rows


def load_images(folder: str | Path, *, size: int | None = None, colour: bool = False) -> Dataset:
    """Load a folder of images by class: ``folder/class/*.png`` (or any other common format).

    Args:
        folder: A folder with one folder per class; hidden ones are ignored.
        size: Pixels per side to resize every image to; None if all images have the same size, which is kept.
        colour: Keep red, green and blue; otherwise images are turned grey.

    Returns:
        Rows of ``height * width`` (times 3, channels first) values in [0, 1], classes and files in sorted order.

    Raises:
        MissingPackageError: Pillow is missing.
        InputTypeError: The size is not a number.
        InputError: There is no such folder, it has fewer than two classes, a class has no images, a file is not an
            image, or images differ in size.
    """
    folder = Path(folder)
    if size is not None:
        size = check_int("size", size, low=1)
    classes = list_folders(folder)
    if not classes:
        remedy = "Put the images of each class in a folder of its own: FOLDER/CLASS/*.png."
        got = f"{folder} without any" if folder.is_dir() else f"{folder}, which is no folder"
        raise_input_error("folder", "hold one folder per class", got, remedy)
    rows, labels, shape = [], [], None
    for entry in classes:
        for path in list_images("folder", entry):
            pixels = read_image("folder", path, size=size, colour=colour)
            width_height = pixels.shape[1::-1]
            shape = shape or width_height
            if width_height != shape:
                got = f"{width_height} in {path} after {shape}"
                raise_input_error("folder", "hold images of one size", got, "Pass size=28 to resize them.")
            rows.append(pixels.reshape(*width_height[::-1], -1).transpose(2, 0, 1))  # (channels, height, width)
            labels.append(entry.name)
    x = torch.from_numpy(np.stack(rows)).float().div_(255)  # (n, channels, height, width)
    return make_dataset("folder", x, labels)._replace(shape=rows[0].shape)


def load_npz(path: str | Path) -> Dataset:
    """Load an NPZ file with arrays ``x``, ``y`` and, if there is a split by class, ``split``.

    Args:
        path: A file of ``numpy.savez``: x (n, ...) real, y (n,) integers or strings, split (n,) strings "base",
            "validation" or "novel" (or "train", "val" or "valid", "test"), the same for all rows of a class; and
            perhaps maps (3,), channels, height and width of rows that are maps of a network. Strings may be bytes in
            UTF-8.

    Returns:
        The rows, flattened and not scaled. Integer classes are numbered in ascending order.

    Raises:
        InputError: There is no such file, it is not an NPZ file, x or y is missing, there are object arrays or NaN,
            shapes do not fit, or a class is on two sides.
    """
    arrays = read_arrays(Path(path), {"x", "y", "split", "maps"})
    x = arrays["x"]
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        raise_input_error("x", "be real, of shape (n, dim)", f"{x.dtype} {x.shape}", "Save features as floats.")
    data = make_dataset("x", torch.from_numpy(x.astype(np.float32, copy=False)), arrays["y"])
    shape = read_shape(arrays.get("maps"), data.x.shape[1])
    return assign_sides("split", data, arrays.get("split"))._replace(shape=shape)


def read_shape(shape: np.ndarray | None, dim: int) -> tuple[int, int, int] | None:
    """Return the array ``maps`` of an NPZ file, channels, height and width of rows of ``dim`` features; None for None.

    Raises:
        InputError: It is none of such rows.
    """
    if shape is None:
        return None
    if shape.shape != (3,) or shape.dtype.kind not in "iu" or math.prod(shape.tolist()) != dim or shape.min() < 1:
        got = f"{shape.tolist()} of {dim} features"
        raise_input_error("maps", "be channels, height and width of a row", got, "Leave it out, or mend it.")
    channels, height, width = shape.tolist()
    return channels, height, width


def load_csv(path: str | Path, *, label: str = "label") -> Dataset:
    """Load a CSV file with a header, a column of labels and columns of numbers.

    Args:
        path: The file: cells between commas, semicolons, tabs or bars, as text or compressed by gzip, in UTF-8, UTF-16
            or Latin-1; "-" for the standard input. Spaces around names are left out.
        label: The name of the column that holds the class of each row.

    Returns:
        The rows, not scaled; columns in the file's order.

    Raises:
        InputError: The file does not exist or cannot be read, has no such column or no other one, a row has too few or
            too many cells, a cell is not a number, or is empty or NaN.
    """
    path = Path(path)
    rows, labels = [], []
    lines = read_rows(path, names={label})
    header = [cell.strip() for cell in next(lines, (0, []))[1]]
    if header.count(label) != 1 or len(header) < 2:
        more = f" and {len(header) - 5} more" if len(header) > 5 else ""
        got = f"{path} with {', '.join(header[:5]) or 'nothing'}{more}"
        remedy = f"Name the classes' column {label}, or pass label=."
        raise_input_error("path", f"have one column {label} and columns of numbers", got, remedy)
    column = header.index(label)
    for line_index, cells in lines:
        if not any(map(str.strip, cells)):
            continue  # a blank row
        labels.append(cells.pop(column).strip())
        rows.append([_parse_float(cell, line_index) for cell in cells])
    features = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), len(header) - 1)  # (n, dim)
    return make_dataset("path", features, labels)


def _parse_float(cell: str, line: int) -> float:
    """Return a cell's number; an empty cell is NaN."""
    try:
        return float(cell) if cell.strip() else math.nan
    except ValueError:
        raise_input_error("path", "hold numbers beside the label", f"{cell!r} in line {line}", "Encode it as numbers.")
