"""Pictures from files: which there are below a folder, and their pixels, decoded in threads."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from protonet._progress import progress_bar
from protonet.embeddings.pictures.images import (
    SUFFIXES,
    UNREADABLE_IMAGE,
    describe_error,
    is_hidden,
    list_folders,
    open_plain,
    path_to_text,
)
from protonet.errors import optional_packages, raise_input_error

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

#: Pictures that a thread reads at a time.
AT_ONCE = 32
#: Files, folders or kinds of files that a message names.
MOST_NAMED = 5
#: Pixels per side that a JPEG keeps as pictures are compared: a camera's takes 30 ms then instead of 150.
COMPARED_SIDE = 512
#: Parts of a data set, and what their folders are called.
SPLITS = {"train": ("train", "training"), "valid": ("valid", "val", "validation", "dev"), "test": ("test", "testing")}


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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


class _Files(NamedTuple):
    """The visible files below a folder, in the order of their names."""

    pictures: list[Path]  #: By their names.
    others: list[Path]


def list_pictures(path: Path, *, labelled: bool) -> Listing:
    """List the pictures of a folder with a folder for each class, of a folder without, or a single one.

    Folders in a class's folder are part of it. Hidden files and folders, and those that operating systems add, are
    skipped; other files that are no pictures by their names are counted in a note, as are empty class folders.

    Args:
        path: The folder or file.
        labelled: Whether the classes are needed: pictures beside their folders are left out then.

    Raises:
        InputError: There is no such path or no picture. If classes are needed: there is no class folder, one has files
            but no picture, or the folders look like the parts of a split.
    """
    if path.is_file():
        if labelled:
            raise_input_error(
                "path", "be a folder with a folder for each class", path_to_text(path), "Pass the folder."
            )
        return Listing([path], None, [])
    if not path.is_dir():
        raise_input_error("path", "be a file or folder that exists", path_to_text(path), "")
    loose, loose_others = _find_files(path.iterdir(), path)
    files = {folder: _find_files(folder.rglob("*"), folder) for folder in list_folders(path)}
    others = [*loose_others, *(other for found in files.values() for other in found.others)]
    if not files and (labelled or not loose):
        got = f"{path_to_text(path)} with {len(loose)} pictures and no folder"
        must = "hold one folder for each class" if labelled else "hold pictures"
        remedy = "Put the pictures of each class in a folder of its own."
        raise_input_error("path", must, f"{got}{_describe_others(others, path)}", remedy)
    if labelled:
        _check_class_folders(path, files)
    pictures = [("", each) for each in loose] * (not labelled)
    pictures += [(path_to_text(folder.name), each) for folder in files for each in files[folder].pictures]
    if not pictures:
        got = f"{path_to_text(path)} without one{_describe_others(others, path)}"
        raise_input_error("path", "hold pictures", got, f"Their names end in {', '.join(sorted(SUFFIXES))}.")
    paths = [each for _, each in pictures]
    notes = [f"left out: {len(loose)} pictures beside the class folders"] * (labelled and bool(loose))
    empty = [path_to_text(folder.name) for folder, found in files.items() if not found.pictures]
    if labelled and empty:
        notes.append(f"left out: {count(len(empty), 'class folder')} without a file: {_list_some(empty)}")
    if others:
        total = len(others) + len(loose) + sum(len(found.pictures) for found in files.values())
        notes.append(f"not read: {len(others)} of {count(total, 'file')}{_describe_others(others, path)}")
    escaped = [path_to_text(each.relative_to(path)) for each in paths]
    escaped = [text for each, text in zip(paths, escaped, strict=True) if text != str(each.relative_to(path))]
    if escaped:
        notes.append(f"{count(len(escaped), 'path')} not in UTF-8, written with escapes: {_list_some(escaped)}")
    return Listing(paths, [name for name, _ in pictures] if files else None, notes)


def _find_files(paths: Iterable[Path], folder: Path) -> _Files:
    """Return the visible files among paths below a folder."""
    visible = [path for path in paths if not any(map(is_hidden, path.relative_to(folder).parts))]
    files = sorted(path for path in visible if path.is_file())
    return _Files(
        [path for path in files if path.suffix.lower() in SUFFIXES],
        [path for path in files if path.suffix.lower() not in SUFFIXES],
    )


def _check_class_folders(path: Path, files: Mapping[Path, _Files]) -> None:
    """Raise an InputError if folders look like the parts of a split, or hold files but no picture."""
    filled = [folder for folder, found in files.items() if found.pictures]
    parts = [_find_part(folder.name) for folder in filled]
    if len(parts) > 1 and "train" in parts and all(parts):
        train = filled[parts.index("train")]
        if len(list_folders(train)) > 1:
            names = ", ".join(folder.name for folder in filled)
            got = f"{names} in {path_to_text(path)}, which look like a split of a data set"
            raise_input_error("path", "hold one folder for each class", got, f"Pass --split {train.name}.")
    unread = [folder for folder, found in files.items() if found.others and not found.pictures]
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        what = _describe_others(files[unread[0]].others, path)
        got = f"none in {path_to_text(unread[0])}{more}{what}"
        raise_input_error("path", "have a picture in every class folder", got, "Add one, or remove the folder.")


def _find_part(name: str) -> str | None:
    """Return the part of a data set that a folder's name stands for, if any."""
    return next((part for part, names in SPLITS.items() if name.lower() in names), None)


def find_split(path: Path, part: str) -> Path:
    """Return the folder of a part of a data set, such as ``train``, by its own name or a usual one.

    Raises:
        InputError: There is none.
    """
    folders = list_folders(path)
    named = [folder for folder in folders if folder.name.lower() == part.lower()]
    alike = [folder for folder in folders if _find_part(folder.name) == _find_part(part) is not None]
    if not named and not alike:
        got = f"{part}; {path_to_text(path)} has {_list_some([path_to_text(folder.name) for folder in folders])}"
        raise_input_error(
            "--split", "name a folder in that of the pictures", got, "Leave it out, or name one of these."
        )
    return (named or alike)[0]


def _describe_others(files: Sequence[Path], folder: Path) -> str:
    """Return how many files of which kinds there are, with an example of each: "" for none."""
    kinds: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        kinds[path_to_text(file.suffix.lower()) or "without extension"].append(file)
    ordered = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    texts = [f"{len(own)} {kind} ({path_to_text(own[0].relative_to(folder))})" for kind, own in ordered]
    return f": {_list_some(texts)}" if files else ""


def _list_some(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


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


def refuse_picture(path: Path, error: Exception, *, more: int = 0) -> NoReturn:
    """Raise an InputError that names a picture that cannot be read, and counts others."""
    got = f"{path_to_text(path)} ({describe_error(error)})" + (f" and {more} more" if more else "")
    remedy = "Replace or remove that file, or pass --skip-broken."
    raise_input_error("path", "hold pictures that can be read", got, remedy)


def find_broken(paths: Sequence[Path]) -> list[bool]:
    """Return of each picture whether it cannot be decoded."""
    return [isinstance(result, Exception) for result in _hash_pictures(paths)]


def check_pictures(paths: Sequence[Path], labels: Sequence[str], *, shown: bool = False) -> list[str]:
    """Decode pictures before the work that they are read for; return a note if some are in two classes.

    Args:
        paths: Of n pictures.
        labels: The class of each, "" for none.
        shown: Show progress on stderr, if it takes long.

    Raises:
        InputError: Some cannot be read.
    """
    digests: dict[bytes, dict[str, Path]] = defaultdict(dict)  # of the pixels, the first picture of each class
    broken: list[tuple[Path, Exception]] = []
    for path, label, result in zip(paths, labels, _hash_pictures(paths, shown=shown), strict=True):
        if isinstance(result, Exception):
            broken.append((path, result))
        elif label:
            digests[result].setdefault(label, path)
    if broken:
        refuse_picture(*broken[0], more=len(broken) - 1)
    same = [own for own in digests.values() if len(own) > 1]
    texts = [" = ".join(map(path_to_text, own.values())) for own in same]
    return [f"warning: {count(len(same), 'picture')} in more than one class: {_list_some(texts)}"] if same else []


def _hash_pictures(paths: Sequence[Path], *, shown: bool = False) -> list[bytes | Exception]:
    """Return the SHA-256 of the size and pixels of each picture, or why it cannot be decoded.

    A JPEG of more than twice ``COMPARED_SIDE`` is decoded smaller, and so never equals a picture of another format.
    """
    need_pillow()

    def work(path: Path) -> bytes | Exception:
        try:
            image = open_plain(path, COMPARED_SIDE).convert("RGB")
        except UNREADABLE_IMAGE as error:
            return error
        return hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()

    results = []
    with show_items(len(paths), "picture", shown=shown) as bar, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for result in pool.map(work, paths):
            results.append(result)
            bar.update()
    return results


def need_pillow() -> None:
    """Raise an ImportError of one line where Pillow is missing."""
    with optional_packages("pictures"):
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
