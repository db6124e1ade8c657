"""Your own data: a folder of images by class, an NPZ file, a CSV file. Nothing is ever unpickled."""

from __future__ import annotations

import csv
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from protonet._checks import check_int, fail
from protonet.datasets._images import list_folders, list_images, read_image
from protonet.datasets.dataset import Dataset, assign_sides, make_dataset

#: Characters of a line of a table, at the most: a file without line ends must not fill the memory.
LONGEST = 2**26
#: What numpy and zipfile raise, beside a ValueError, over a damaged file.
UNREADABLE = (
    *(OSError, EOFError, LookupError, MemoryError, OverflowError, RuntimeError, SyntaxError, TypeError),
    *(struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)


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
    classes = list_folders(folder)
    if not classes:
        remedy = "Put the images of each class in a folder of its own: FOLDER/CLASS/*.png."
        got = f"{folder} without any" if folder.is_dir() else f"{folder}, which is no folder"
        fail("load_images", "folder", "hold one folder a class", got, remedy)
    rows, labels, shape = [], [], None
    for entry in classes:
        for path in list_images("load_images", "folder", entry):
            pixels = read_image("load_images", "folder", path, size=size, colour=colour)
            width_height = pixels.shape[1::-1]
            shape = shape or width_height
            if width_height != shape:
                got = f"{width_height} in {path} after {shape}"
                fail("load_images", "folder", "hold images of one size", got, "Pass size=28 to resize them.")
            rows.append(pixels.reshape(-1))  # (dim,)
            labels.append(entry.name)
    return make_dataset("load_images", "folder", torch.from_numpy(np.stack(rows)).float().div_(255), labels)


def load_npz(path: str | Path) -> Dataset:
    """Load an NPZ file with arrays ``x``, ``y`` and, if there is a split by class, ``split``.

    Args:
        path: A file of ``numpy.savez``: x (n, ...) real, y (n,) integers or strings, split (n,) strings "base",
            "validation" or "novel" (or "train", "val" or "valid", "test"), the same for all rows of a class.
            Strings may be bytes in UTF-8.

    Returns:
        The rows, flattened and not scaled. Integer classes are numbered in their order.

    Raises:
        ValueError: No such file or no NPZ file, x or y missing, object arrays, NaN, shapes that do not fit, a class
            on two sides.
    """
    arrays = read_arrays("load_npz", Path(path), {"x", "y", "split"})
    x = arrays["x"]
    if x.dtype.kind not in "biuf" or x.ndim < 2:
        fail("load_npz", "x", "be real, of shape (n, dim)", f"{x.dtype} {x.shape}", "Save features as floats.")
    x = x.astype(np.float32, copy=False)
    data = make_dataset("load_npz", "x", torch.from_numpy(x), arrays["y"])
    return assign_sides("load_npz", "split", data, arrays.get("split"))


def read_arrays(function: str, path: Path, names: set[str]) -> dict[str, np.ndarray]:
    """Return some of the arrays x, y and split of an NPZ file; y and split have shape (n,), split alone may be missing.

    Args:
        function: The public function's name, for messages.
        path: The file; nothing in it is unpickled.
        names: Those to read.

    Raises:
        ValueError: No such file or no NPZ file, x or y missing, object arrays, labels that are neither integers nor
            strings, bytes that are not UTF-8.
    """
    try:
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            missing = sorted((names - {"split"}) - set(file.files))
            found = ", ".join(file.files) or "nothing"
            arrays = {name: file[name] for name in file.files if name in names and not missing}
    except ValueError as error:
        if "Object arrays" not in str(error):
            fail(function, "path", "be an NPZ file", str(path), "Use numpy.savez(path, x=x, y=y).")
        remedy = "Save them as numbers, or labels as strings: y.astype(str)."
        fail(function, "path", "hold no object arrays, which would be unpickled", str(path), remedy)
    except (FileNotFoundError, IsADirectoryError):
        fail(function, "path", "be a file that exists", str(path), "")
    except UNREADABLE as error:
        got = f"{path} ({type(error).__name__})"
        fail(function, "path", "be an NPZ file that can be read", got, "Save it again with numpy.savez.")
    if missing:
        remedy = "Save it with numpy.savez(path, x=x, y=y)."
        fail(function, "path", f"hold an array {missing[0]}", f"{path} with {found}", remedy)
    for name in arrays.keys() - {"x"}:
        arrays[name] = check_names(function, name, arrays[name])
    return arrays


def check_names(function: str, argument: str, values: np.ndarray) -> np.ndarray:
    """Return numbers or names (n,), bytes as strings, or raise a ValueError if they are neither."""
    try:
        names = np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
    except UnicodeDecodeError as error:
        fail(function, argument, "be UTF-8 where it is bytes", repr(error.object), "Save strings, not bytes.")
    if names.dtype.kind not in "biuU":
        fail(function, argument, "be integers or strings", str(names.dtype), "Save class numbers or names.")
    return names.reshape(-1)


def load_csv(path: str | Path, *, label: str = "label") -> Dataset:
    """Load a CSV file with a header, a column of labels and columns of numbers.

    Args:
        path: The file, UTF-8.
        label: The name of the column that holds the class of each row.

    Returns:
        The rows, not scaled; columns in the file's order.

    Raises:
        ValueError: The file does not exist or cannot be read, has no such column or no other one, a row of another
            length, a cell that is no number, NaN (an empty cell is one).
    """
    path = Path(path)
    rows, labels = [], []
    lines = read_rows("load_csv", path)
    _, header = next(lines, (0, []))
    if header.count(label) != 1 or len(header) < 2:
        more = f" and {len(header) - 5} more" if len(header) > 5 else ""
        got = f"{path} with {', '.join(header[:5]) or 'nothing'}{more}"
        remedy = f"Name the classes' column {label}, or pass label=."
        fail("load_csv", "path", f"have one column {label} and columns of numbers", got, remedy)
    column = header.index(label)
    for number, cells in lines:
        labels.append(cells.pop(column))
        rows.append([_parse_number(cell, number) for cell in cells])
    features = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), len(header) - 1)  # (n, dim)
    return make_dataset("load_csv", "path", features, labels)


def read_rows(function: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the line and the cells of each row of a CSV file, the header's first.

    Args:
        function: The public function's name, for messages.
        path: The file, UTF-8, with commas; empty lines are left out.

    Raises:
        ValueError: The file does not exist or cannot be read, or a row has not as many cells as the header.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines, width = csv.reader(_split_lines(file), strict=True), 0
            for cells in filter(None, lines):
                width = width or len(cells)
                if len(cells) != width:
                    got = f"{len(cells)} in line {lines.line_num}"
                    fail(function, "path", f"have {width} cells a row", got, "Mend that line.")
                yield lines.line_num, cells
    except (FileNotFoundError, IsADirectoryError):
        fail(function, "path", "be a file that exists", str(path), "")
    except csv.Error as error:
        fail(function, "path", "be a CSV file", f"{path} ({error} in line {lines.line_num})", "Mend it.")
    except (OSError, UnicodeDecodeError) as error:
        got = f"{path} ({type(error).__name__})"
        fail(function, "path", "be a CSV file that can be read", got, "Save it as UTF-8.")


def _split_lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a file; raise a csv.Error at what cannot be one of a table."""
    while line := file.readline(LONGEST + 1):
        if "\0" in line or len(line) > LONGEST:
            raise csv.Error("binary data" if "\0" in line else "no end of the line")
        yield line


def _parse_number(cell: str, line: int) -> float:
    """Return a cell's number; an empty one is NaN."""
    try:
        return float(cell) if cell.strip() else math.nan
    except ValueError:
        fail("load_csv", "path", "hold numbers beside the label", f"{cell!r} in line {line}", "Encode it as numbers.")
