"""Atomic writes leave the old or the new content and no other file; progress bars appear on terminals only."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from protonet import _io
from protonet._io import progress_bar, write_atomically

SIZE = 2**20
#: Rewrites the file in a loop; importing the module alone saves the second of importing the library.
ENDLESS = f"""
import itertools, runpy, sys
write_atomically = runpy.run_path(sys.argv[1])["write_atomically"]
for letter in itertools.cycle((b"a", b"b")):
    write_atomically(sys.argv[2], lambda file: [file.write(letter * 1024) for _ in range({SIZE // 1024})])
    print(flush=True)
"""


def start(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", ENDLESS, str(_io.__file__), str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def test_a_write_leaves_the_content_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "x [1].bin"
    for content in (b"old", b"newer"):
        write_atomically(str(path), lambda file, content=content: file.write(content))  # type: ignore[misc]
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none" / "x", lambda file: file.write(b""))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("no")])
def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, write)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_a_complete_file(tmp_path: Path) -> None:
    path, delays = tmp_path / "x", random.Random(0)
    for _ in range(4):
        process = start(path)
        time.sleep(delays.uniform(0, 0.02))
        kill(process)
        assert path.read_bytes() in {b"a" * SIZE, b"b" * SIZE}
    write_atomically(path, lambda file: file.write(b"next"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_leftover_temporary_files_are_removed_unless_a_writer_is_active(tmp_path: Path) -> None:
    path, mine = tmp_path / "x", tmp_path / "x.tmp"
    left = tmp_path / ".x.0123abcd.tmp"
    others = [mine, tmp_path / ".x.notes.tmp", tmp_path / ".y.0123abcd.tmp"]
    for file_path in (left, *others):
        file_path.touch()

    def write(file: BinaryIO) -> None:
        left.touch()  # simulates the temporary file of an active writer
        write_atomically(path, lambda inner: inner.write(b"inner"))
        assert left.exists() or sys.platform == "win32"

    write_atomically(path, write)
    assert left.exists() or sys.platform == "win32"
    write_atomically(path, lambda file: file.write(b"last"))
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes are POSIX's")
def test_links_and_pipes_are_preserved(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, lambda file: file.write(b"new"))
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_atomically(pipe, lambda file: file.write(b"through"))
    reader.join()
    assert read == [b"through"]
    assert pipe.is_fifo()


@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (True, False), (False, True)])
def test_bars_are_shown_on_terminals_only(
    terminal: bool, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress_bar(total=2, unit="row", delay=0, shown=shown) as bar:
        bar.update(1)
    assert ("1/2" in capsys.readouterr().err) == (terminal and shown)
