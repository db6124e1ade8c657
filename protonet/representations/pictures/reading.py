"""Pictures from files: which there are below a folder, and their pixels, decoded in threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from protonet._checks import fail, optional_packages, refuse
from protonet._progress import progress_bar
from protonet.representations.pictures.images import SUFFIXES, UNREADABLE_IMAGE, list_folders, open_plain

if TYPE_CHECKING:
    from PIL.Image import Image

if TYPE_CHECKING:
    from torch import Tensor

INSTALL = 'pip install "protonet[pictures]"'
#: Pictures that a thread reads at a time.
AT_ONCE = 32
#: Broken pictures that are named.
MOST_NAMED = 5


class Listing(NamedTuple):
    """The pictures below a folder, in the order of their names."""

    paths: list[Path]
    classes: list[str] | None  #: The name of each one's class, "" for none; None where there is no class folder.
    notes: list[str]  #: What a person should be told.


def are_pictures(path: Path) -> bool:
    """Return whether a path is a folder or, by its name, a picture."""
    return path.is_dir() or path.suffix.lower() in SUFFIXES


def hold_pictures(folder: Path) -> bool | None:
    """Return whether there is a picture, by its name, anywhere in a folder, and no Parquet file; None for neither."""
    suffixes = {path.suffix.lower() for path in folder.rglob("*")}
    if ".parquet" in suffixes:
        return False
    return True if suffixes & SUFFIXES else None


def list_pictures(path: Path, *, labelled: bool) -> Listing:
    """List the pictures of a folder with a folder for each class, of a folder without, or a single one.

    Folders in a class's folder are part of it. Hidden files and folders, and files that are no pictures by their names,
    are left out.

    Args:
        path: The folder or file.
        labelled: Whether the classes are needed: pictures beside their folders are left out then.

    Raises:
        InputError: There is no such path, no picture, or, if classes are needed, no class folder, or an empty one.
    """
    if path.is_file():
        if labelled:
            refuse("path", "be a folder with a folder for each class", path, "Pass the folder.")
        return Listing([path], None, [])
    if not path.is_dir():
        refuse("path", "be a file or folder that exists", path, "")
    folders, loose = list_folders(path), _find(path.iterdir())
    if not folders:
        if labelled or not loose:
            got = f"{path} with {len(loose)} pictures and no folder"
            must = "hold one folder for each class" if labelled else "hold pictures"
            refuse("path", must, got, "Put the pictures of each class in a folder of its own.")
        return Listing(loose, None, [])
    found = {folder.name: _find(folder.rglob("*"), folder) for folder in folders}
    if labelled:
        empty = [name for name, own in found.items() if not own]
        if empty:
            got = f"none in {path / empty[0]}" + (f" and {len(empty) - 1} more" if len(empty) > 1 else "")
            refuse("path", "have a picture in every class folder", got, "Add one, or remove the folder.")
    notes = [f"left out: {len(loose)} pictures beside the class folders"] * (labelled and bool(loose))
    kept = [("", each) for each in loose] * (not labelled) + [(name, each) for name in found for each in found[name]]
    if not kept:
        refuse("path", "hold pictures", f"{path} without one", f"Their names end in {', '.join(sorted(SUFFIXES))}.")
    return Listing([each for _, each in kept], [name for name, _ in kept], notes)


def _find(paths: Iterator[Path], folder: Path | None = None) -> list[Path]:
    """Return the pictures among paths, in the order of their names, without those that are hidden below a folder."""

    def hidden(path: Path) -> bool:
        parts = (path.name,) if folder is None else path.relative_to(folder).parts
        return any(part.startswith(".") for part in parts)

    return sorted(each for each in paths if each.suffix.lower() in SUFFIXES and each.is_file() and not hidden(each))


def read_pixels(path: Path, height: int, width: int, *, grey: bool = False) -> np.ndarray:
    """Return a picture's pixels (3, height, width) uint8, or (1, ...) grey, resized without regard to its shape.

    Raises:
        InputError: It cannot be read.
    """
    from PIL import Image  # noqa: PLC0415 - optional

    try:
        image = open_plain(path, max(height, width)).convert("L" if grey else "RGB")
    except UNREADABLE_IMAGE as error:
        refuse_picture(path, error)
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC), np.uint8)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def open_whole(path: Path, least: int | None = None) -> Image:
    """Open and decode a picture, as `open_plain` does, in colours.

    Raises:
        InputError: It cannot be read.
    """
    try:
        return open_plain(path, least).convert("RGB")
    except UNREADABLE_IMAGE as error:
        refuse_picture(path, error)


def draw_blank() -> Image:
    """Return a picture of nothing, to try a network on."""
    from PIL import Image  # noqa: PLC0415 - optional

    return Image.new("RGB", (32, 32))


def refuse_picture(path: Path, error: Exception) -> NoReturn:
    """Raise an InputError that names a picture that cannot be read."""
    reason = "no such file" if isinstance(error, FileNotFoundError) else type(error).__name__
    remedy = "Replace or remove that file, or pass --skip-broken."
    fail("pictures", "path", "hold pictures that can be read", f"{path} ({reason})", remedy)


def find_broken(paths: Sequence[Path]) -> list[bool]:
    """Return of each picture whether it cannot be decoded."""
    need_pillow()

    def check(path: Path) -> bool:
        try:
            open_plain(path)
        except UNREADABLE_IMAGE:
            return True
        return False

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(check, paths))


def need_pillow() -> None:
    """Raise an ImportError of one line where Pillow is missing."""
    with optional_packages("", INSTALL):
        import PIL.Image  # noqa: F401, PLC0415 - optional


def map_pictures(
    paths: Sequence[Path],
    height: int,
    width: int,
    work: Callable[[Tensor], Tensor],
    *,
    grey: bool = False,
    shown: bool = False,
) -> Tensor:
    """Return what ``work`` gives for pictures, a few at a time in each thread.

    Args:
        paths: At least one.
        height: Pixels that they are brought to.
        width: The same.
        work: From pixels (b, 3, height, width) uint8, or (b, 1, ...) grey ones, to (b, features).
        grey: Whether they are grey.
        shown: Show on stderr how many are done, and how long it will take yet, if it takes long.

    Raises:
        InputError: One cannot be read.
    """
    import torch  # noqa: PLC0415 - commands look for pictures before it is there

    def do(part: Sequence[Path]) -> Tensor:
        pixels = np.stack([read_pixels(path, height, width, grey=grey) for path in part])
        with torch.no_grad():
            return work(torch.from_numpy(pixels))

    parts = [paths[first : first + AT_ONCE] for first in range(0, len(paths), AT_ONCE)]
    found = []
    with show_items(len(paths), "picture", shown=shown) as bar, _use_threads() as pool:
        results = pool.map(do, parts) if pool else map(do, parts)
        try:
            for part, result in zip(parts, results, strict=True):
                found.append(result)
                bar.update(len(part))
        except BaseException:
            if pool:
                pool.shutdown(wait=False, cancel_futures=True)
            raise
    return torch.cat(found)


def show_items(count: int, name: str, *, shown: bool) -> Any:
    """Return a bar of so many items on stderr, which says how long it will take yet; there is none if not shown."""
    return progress_bar(total=count, unit=name, leave=False, shown=shown)


@contextmanager
def _use_threads() -> Iterator[ThreadPoolExecutor | None]:
    """Yield a pool of as many threads as torch may use, each of which computes alone; None for one."""
    import torch  # noqa: PLC0415 - as above

    threads = torch.get_num_threads()
    if threads == 1:
        yield None
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)
