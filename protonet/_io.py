"""Atomic file writes, the cache folder, and progress bars on terminals."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

if sys.platform != "win32":
    import fcntl

JsonDict = dict[str, Any]  #: A dict that can be written as a JSON object.


def cache_folder() -> Path:
    """Get the folder in which embeddings are cached.

    It is ``$PROTONET_CACHE`` if this variable is set, else ``protonet`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
    """
    if folder := os.environ.get("PROTONET_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "protonet")


def write_atomically(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically: to a temporary file in its folder, which is then renamed.

    Args:
        path: The file, in a folder that exists. Symbolic links are followed. Pipes and devices are written directly.
        write: Writes the content to an open file. If it raises an error, the old file is unchanged.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            write(file)
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with _lock_folder(path):
        try:
            with _open_temporary(temporary) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
                if not temporary.exists():  # the file has no name yet
                    folder = os.open(path.parent, os.O_RDONLY)
                    try:  # with a folder, `os.link` follows the link to the open file
                        source = f"/proc/self/fd/{file.fileno()}"
                        os.link(source, temporary.name, src_dir_fd=folder, dst_dir_fd=folder)
                    finally:
                        os.close(folder)
            temporary.replace(path)
        except OSError as error:  # a full disk, for example, is an error without a name of a file
            if error.filename is None:
                error.errno, error.strerror = error.errno or errno.EIO, error.strerror or str(error)
                error.filename = str(path)
            raise
        finally:
            temporary.unlink(missing_ok=True)


def _open_temporary(path: Path) -> BinaryIO:
    """Open a new file: if the system can, one without a name, of which nothing is left if the process is killed."""
    if hasattr(os, "O_TMPFILE") and Path("/proc/self/fd").is_dir():
        with suppress(OSError):  # not supported by every file system
            return os.fdopen(os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b")
    return path.open("x+b")


def read_stamp(path: Path) -> tuple[int, ...]:
    """Return inode, modification time and size of a file, which change if it is replaced; () if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def open_locked(path: Path, flags: int = os.O_RDONLY, *, wait: bool) -> int:
    """Open a file that is read, changed and replaced, and lock it against other processes that do the same.

    The lock ends when the file descriptor is closed, or the process is killed. File systems without locks give none.

    Args:
        path: The file. It is itself locked, so that no other file is left behind.
        flags: Flags of `os.open`.
        wait: Whether to wait for a process that has locked the file.

    Returns:
        The file descriptor.

    Raises:
        BlockingIOError: Another process has locked the file, and ``wait`` is False.
        OSError: The file cannot be opened.
    """
    while True:
        file = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o666)
        try:
            lock_open_file(file, wait=wait)
            # Another process may have replaced the file before it unlocked the old one.
            if sys.platform == "win32" or os.path.samestat(os.fstat(file), path.stat()):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def lock_open_file(file: int, *, wait: bool) -> None:
    """Lock a file descriptor, if the file system has locks; see `open_locked`."""
    if sys.platform == "win32":  # an open file cannot be replaced there
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8; see `write_atomically`."""
    write_atomically(path, lambda file: file.write(text.encode()))


def write_json(path: str | Path, value: JsonDict) -> None:
    """Write a JSON file, indented, but with each list of integers on a single line; see `write_atomically`."""
    text = json.dumps(value, indent=1, allow_nan=False)
    write_text(path, re.sub(r"\[\n[\d\s,]+\]", lambda match: "".join(match[0].split()), text) + "\n")


#: Start of the names of the temporary folders of servers. No other software uses it, as such folders are removed.
SERVER_FOLDER_PREFIX = "protonet-server-"


@contextmanager
def temporary_server_folder() -> Iterator[Path]:
    """Create a temporary folder, and remove it at the end of the context.

    It is locked until then. If the process is killed, `remove_stale_server_folders` finds it unlocked.
    """
    with tempfile.TemporaryDirectory(prefix=SERVER_FOLDER_PREFIX) as name:
        if sys.platform == "win32":  # a folder cannot be opened there
            yield Path(name)
            return
        file = os.open(name, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_SH)  # shared with `write_atomically`
            yield Path(name)
        finally:
            os.close(file)


def remove_stale_server_folders() -> None:
    """Remove the temporary folders that servers of this user left behind when they were killed."""
    if sys.platform == "win32":
        return
    min_age_seconds = 60.0  # a new folder may not be locked yet
    for folder in Path(tempfile.gettempdir()).glob(f"{SERVER_FOLDER_PREFIX}*"):
        with suppress(OSError):  # in use, of another user, or on a file system without locks
            stat = folder.lstat()
            if stat.st_uid != os.getuid() or time.time() - stat.st_mtime < min_age_seconds:
                continue
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(file)


def remove_temporary_files(folder: Path) -> None:
    """Remove temporary files that killed processes left behind in a folder and its subfolders.

    A folder in which another process is writing is left unchanged.
    """
    for temporary in folder.rglob(f".*.{'[0-9a-f]' * 8}.tmp"):
        with _lock_folder(temporary.with_name(temporary.name[1:-13])):
            pass


@contextmanager
def _lock_folder(path: Path) -> Iterator[None]:
    """Lock the folder of ``path`` during a write, then sync it; the last writer removes leftover temporary files."""
    if sys.platform == "win32":  # open files cannot be removed there, so removable files are leftovers
        _remove_temporary_files_of(path)
        yield
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # another process is writing, or the file system has no locks
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_temporary_files_of(path)
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH)
        yield
        with suppress(OSError):  # not supported by every file system
            os.fsync(folder)
    finally:
        os.close(folder)


def _remove_temporary_files_of(path: Path) -> None:
    """Remove temporary files that interrupted writes of ``path`` left behind; ignore files that cannot be removed."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
        with suppress(OSError):
            temporary.unlink()


def progress_bar(*, shown: bool = True, delay: float = 1.0, **settings: Any) -> Any:
    """Create a tqdm progress bar, which appears only on a terminal, if ``shown``, after ``delay`` seconds."""
    from tqdm import tqdm  # noqa: PLC0415 - slow to import

    # With None, tqdm disables the bar unless its file is a terminal.
    return tqdm(disable=None if shown else True, delay=delay, dynamic_ncols=True, **settings)


@contextmanager
def show_progress(*, quiet: bool = False) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar, unless ``quiet``, for work within the context that takes longer than a second.

    The value of the context is a function of the name of the current stage and of the finished fraction of all work.
    """
    form = "{desc}: {percentage:.0f} %|{bar}| {elapsed}, {remaining} left"
    # smoothing=0: the remaining time follows from the mean speed; miniters=0: every step is shown.
    with progress_bar(total=1.0, bar_format=form, smoothing=0, miniters=0, leave=False, shown=not quiet) as bar:

        def show(stage: str, fraction: float) -> None:
            bar.set_description_str(stage, refresh=False)
            bar.update(fraction - bar.n)

        yield show
