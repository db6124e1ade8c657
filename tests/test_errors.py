"""Checks of arguments; atomic writes leave the old or the new content; progress bars appear on terminals only."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protonet import _io, errors
from protonet._io import progress_bar, write_atomically
from protonet._validation import check_features, check_int, check_labels, check_number
from protonet.errors import InputError, InputTypeError, MissingPackageError


@given(value=st.integers(0, 10**9))
def test_numbers_are_accepted_as_int_float_and_tensor(value: int) -> None:
    for form in (value, float(value), torch.tensor(value)):
        assert check_int("a", form, low=0) == check_number("a", form, low=0) == value


def test_features_of_any_real_type_are_flattened() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.float64):
        rows = check_features("a", torch.ones(2, 3, 4, dtype=dtype), dim=12)
        assert rows.shape == (2, 12), dtype
        assert rows.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), dtype


def test_invalid_arguments_are_errors() -> None:
    integer, number = partial(check_int, low=0), partial(check_number, low=0)
    features, labels = partial(check_features, dim=4), partial(check_labels, n=2, num_classes=3)
    no_integer = r"be a whole number >= 0; got .*\. Pass an int such as 0\.$"
    no_number = r"be a finite number >= 0; got .*\. Pass a finite float\.$"
    cases: list[tuple[Callable[..., object], object, type[Exception], str]] = [
        *((integer, value, InputTypeError, no_integer) for value in (True, "3", None, [1])),
        *((number, value, InputTypeError, no_number) for value in (True, "3", None, [1])),
        *((integer, value, InputError, "be a whole number") for value in (float("nan"), float("inf"), -1, 1.5)),
        (partial(check_int, low=1, high=3), 4, InputError, r"be a whole number in \[1, 3\]; got 4"),
        (partial(check_number, low=0, strict=True), 0, InputError, "be a finite number > 0; got 0"),
        (features, [[1.0]], InputTypeError, r"be a tensor of shape \(n, dim\); got list"),
        (features, torch.ones(2, 2, dtype=torch.complex64), InputTypeError, "be real"),
        (features, torch.ones(3), InputError, r"have shape \(n, dim\); got shape \(3,\)"),
        (features, torch.ones(2, 5), InputError, "have 4 features per row; got 5"),
        (features, torch.tensor([[0.0, 1, 2, torch.nan], [0] * 4]), InputError, "be finite; got NaN .* in 1 of 2 rows"),
        (labels, [0, 1], InputTypeError, "be a tensor of integer labels; got list"),
        (labels, torch.tensor([0.0, 1.0]), InputTypeError, "be a tensor of integer labels; got torch.float32"),
        (labels, torch.tensor([0, 1, 2]), InputError, r"have one label per row \(2\); got 3"),
        (labels, torch.tensor([0, 4]), InputError, r"be in \[0, 3\); got 4 \(1 such labels\)"),
        (labels, torch.tensor([-1, -1]), InputError, r"be in \[0, 3\); got -1 \(2 such labels\)"),
    ]
    for check, value, error, message in cases:
        with pytest.raises(error, match=f"^`a` must {message}"):
            check("a", value)


def test_errors_are_of_the_standard_classes_and_name_the_argument() -> None:
    for kind, standard in ((InputError, ValueError), (InputTypeError, TypeError), (MissingPackageError, ImportError)):
        with pytest.raises(kind, match=r"^`a` must be\ b; got c\. D\.$") as raised:
            errors.raise_input_error("a", "be\nb", "c", "D.", kind=kind)
        assert issubclass(kind, standard)
        assert vars(raised.value) == {"argument": "a"}
        again = pickle.loads(pickle.dumps(raised.value))
        assert (str(again), vars(again)) == (str(raised.value), {"argument": "a"})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"^no such file: \\x1bx\.csv$"):
        errors.raise_missing_file("\x1bx.csv")


def test_a_missing_package_error_says_how_to_install_it() -> None:
    with (
        pytest.raises(MissingPackageError, match=r"^`none_such` must be installed\. Run pip install x\.$"),
        errors.optional_packages(install="pip install x"),
    ):
        import none_such.inside  # type: ignore[import-not-found]  # noqa: F401


def test_versions_are_those_of_the_installed_packages() -> None:
    assert errors.installed_version("torch") == torch.__version__
    assert errors.installed_version("none-such") is None


@pytest.mark.parametrize("kind", [errors.InputError, errors.InputTypeError, errors.MissingPackageError])
def test_arguments_are_renamed_for_the_caller(kind: type[errors.UserError]) -> None:
    with (
        pytest.raises(kind, match=r"^`--rate` must be > 0; got -1\. Mend `--rate`\.$") as raised,
        errors.renamed_arguments(rate="--rate", other="--other"),
    ):
        errors.raise_input_error("rate", "be > 0", -1, "Mend `rate`.", kind=kind)
    assert type(raised.value) is kind
    assert raised.value.argument == "--rate"
    with pytest.raises(kind, match=r"^plain$"), errors.renamed_arguments(rate="--rate"):
        raise kind("plain")


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


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="only Linux has files without a name")
def test_a_killed_writer_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for delay in (0, 0.002, 0.005):
        process = start(path)
        time.sleep(delay)
        kill(process)
        assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: '.*/x'$"):
        write_atomically(tmp_path / "x", write)


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
