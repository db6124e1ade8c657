"""Predictions of folders of Parquet files, by processes and on Dask, also if some are killed."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protonet.commands import folder
from protonet.commands.folder import FileTask
from protonet.errors import InputError
from protonet.files import load_model, save_model
from protonet.files.metadata import TrainingMetadata
from protonet.fit import solver
from tests.commands.cases import Run, do
from tests.commands.conftest import FAST_SEARCH
from tests.commands.servers import start_command

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

FILES, ROWS = 5, 1_200
COLUMNS = [f"x{column}" for column in range(6)]


def write_rows(path: Path, rows: int, seed: int, names: list[str] = COLUMNS) -> None:
    x = np.random.default_rng(seed).standard_normal((rows, len(names))).astype(np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(dict(zip(names, x.T, strict=True))), path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    generator = np.random.default_rng(0)
    labels = np.arange(60) % 3
    x = generator.standard_normal((60, 6)) + 2 * np.eye(3, 6)[labels]
    columns = dict(zip(COLUMNS, x.T, strict=True)) | {"label": np.array(["ant", "bee", "cat"])[labels]}
    parquet.write_table(pa.table(columns), folder / "train.parquet")
    with pytest.MonkeyPatch.context() as patch:  # slow views, so that the blows come before the end
        patch.setattr(solver, "DEFAULT_SEARCH", FAST_SEARCH)
        do("fit", folder / "train.parquet", "-o", folder / "m.safetensors")
    return folder / "m.safetensors"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files in two folders, an empty one, and hidden files that are not read."""
    folder = tmp_path_factory.mktemp("rows")
    for index in range(FILES):
        write_rows(folder / f"day={index % 2}" / f"task-{index}.parquet", ROWS, index)
    write_rows(folder / "none.parquet", 0, 0, COLUMNS[::-1])
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / "half.parquet").write_bytes(b"PAR1")
    (folder / "_SUCCESS").touch()
    return folder


@pytest.fixture(scope="module")
def alone(model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The predictions of each file by itself, by the name of its output."""
    output, result = tmp_path_factory.mktemp("alone") / "out.csv", {}
    for path in rows.glob("day=*/*.parquet"):
        do("predict", model, path, "-o", output, "--unknown", "0.1")
        result[str(path.relative_to(rows).with_suffix(".csv"))] = output.read_bytes()
    return result | {"none.csv": b"class,probability\n"}


def read_outputs(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*.csv")}


def wait_for(holds: Callable[[], Any], what: str) -> Any:
    for _ in range(2400):
        if result := holds():
            return result
        time.sleep(0.05)
    raise AssertionError(what)


def list_children(process: int) -> list[int]:
    path = Path(f"/proc/{process}/task/{process}/children")
    return list(map(int, path.read_text().split())) if path.exists() else []


def is_working(process: int) -> bool:
    """Test whether a process is a spawned worker, rather than a helper of multiprocessing."""
    path = Path(f"/proc/{process}/cmdline")
    return path.exists() and b"spawn_main" in path.read_bytes()


def lives(process: int) -> bool:
    path = Path(f"/proc/{process}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for_file(output: Path) -> None:
    wait_for(lambda: read_outputs(output).keys() - {"none.csv"}, "no file was finished")


def wait_for_end(processes: Sequence[int]) -> None:
    wait_for(lambda: not any(map(lives, processes)), "a process goes on without its command")


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")


@needs_proc
def test_a_killed_run_continues_and_each_file_gives_its_predictions(
    model: Path, rows: Path, alone: dict[str, bytes], tmp_path: Path, run: Run
) -> None:
    predict = ["predict", model, rows, "--unknown", "0.1", "--workers"]
    for blow in ("worker", signal.SIGINT, signal.SIGKILL):
        output = tmp_path / str(blow)
        with start_command(*predict, "1", "-o", output) as (process, _, errors):
            assert process.pid is not None
            wait_for_file(output)
            children = list_children(process.pid)
            if blow == "worker":
                os.kill(next(child for child in children if is_working(child)), signal.SIGKILL)
            else:
                os.killpg(process.pid, blow) if blow == signal.SIGINT else process.kill()
            process.join()
            printed = errors.read()
        wait_for_end(children)
        assert all(alone[name] == content for name, content in read_outputs(output).items())
        assert blow == signal.SIGKILL or not list(output.rglob("*.tmp"))
        if blow == "worker":
            assert process.exitcode == 2
            assert printed.splitlines()[-1].endswith(
                "`--workers` must fit into memory; got 1, and one was killed. "
                "Run it again with fewer; finished files are kept."
            )
        elif read_outputs(output) != alone:  # else the machine was quicker than the blow
            assert process.exitcode == (130 if blow == signal.SIGINT else -signal.SIGKILL), printed
    (output / "none.csv").write_bytes(alone["none.csv"])  # if the blow came before that
    saved = {name: (output / name).stat().st_mtime_ns for name in read_outputs(output)}
    old = output / next(name for name in saved if name != "none.csv")
    os.utime(old, ns=(0, 0))  # the file was written anew since then
    del saved[str(old.relative_to(output))]
    run(*predict, "2", "-o", output, quiet=False)
    assert re.search(rf"^note: {len(saved)} files? of {FILES + 1} were finished earlier$", run.notes, re.MULTILINE)
    assert read_outputs(output) == alone
    assert not list(output.rglob("*.tmp"))
    assert all((output / name).stat().st_mtime_ns == written for name, written in saved.items())
    assert old.stat().st_mtime_ns > 0
    error = run(*predict, "1", "-o", output, "--proba", code=2)
    assert "must be a new folder, or one of this model and these options" in error


def test_argument_errors(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("none", "broken", "other", "odd"):
        Path(name).mkdir()
    for name, columns in (("less", COLUMNS[:-2]), ("more", [*COLUMNS[:-1], "y"])):
        write_rows(Path(name, "a.parquet"), 3, 0)
        write_rows(Path(name, "b.parquet"), 3, 0, columns)
    write_rows(Path("in/a.parquet"), 3, 0)
    for name, columns in (("a", COLUMNS[:-1]), ("b", COLUMNS), ("c", COLUMNS)):
        write_rows(Path("odd", f"{name}.parquet"), 3, 0, columns)
    Path("broken/a.parquet").write_bytes(b"PAR1")
    Path("file").touch()
    Path("other/x.csv").touch()
    for arguments, text in (
        ("in", "`--output` must name a folder; got none."),
        ("in/a.parquet --workers 2", "`--workers` must come with a folder"),
        ("in/a.parquet --workers tcp://localhost:1", "`--workers` must come with a folder"),
        ("in -o out --workers 0", "`--workers` must be a whole number >= 1"),
        ("in -o file", "`--output` must be a folder that can be written"),
        ("in -o other", "`--output` must be a new folder"),
        ("none -o out", "must be a folder of Parquet files; got none in "),
        ("less -o out", "files with the same columns; got b.parquet without x4, x5, unlike a.parquet. Move it"),
        ("more -o out", "files with the same columns; got b.parquet without x5 and with y, unlike a.parquet. Move it"),
        ("odd -o out", "files with the same columns; got a.parquet without x5, unlike b.parquet. Move it"),
        ("broken -o out", "must be a folder of Parquet files that can be read; got a.parquet (ArrowInvalid)"),
    ):
        assert text in run("predict", model, *arguments.split(), code=2)
    assert not any(Path("out").iterdir())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Dask cluster of a single-threaded worker process, which is restarted if it is killed."""
    distributed = pytest.importorskip("distributed")
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[2]), path])
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster
    os.environ["PYTHONPATH"] = path


@pytest.mark.filterwarnings("default")
def test_a_killed_dask_worker_loses_and_repeats_no_file(
    cluster: Any,
    model: Path,
    rows: Path,
    alone: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
) -> None:
    output, predict = tmp_path / "out", ["predict", model, rows, "--unknown", "0.1", "-o"]

    def kill() -> None:
        wait_for_file(output)
        os.kill(next(iter(cluster.workers.values())).pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    run(*predict, output, "--workers", cluster.scheduler_address)
    killer.join()
    assert read_outputs(output) == alone
    assert not list(output.rglob("*.tmp"))
    monkeypatch.setattr(folder, "CLUSTER_TIMEOUT_SECONDS", 1)
    error = run(*predict, tmp_path / "other", "--workers", "tcp://127.0.0.1:9", code=2)
    assert "`--workers` must be the address of a Dask scheduler that answers; got tcp://127.0.0.1:9" in error


@pytest.mark.filterwarnings("default")
def test_an_error_in_a_file_names_the_file(cluster: Any, model: Path, tmp_path: Path, run: Run) -> None:
    write_rows(tmp_path / "in" / "a.parquet", 3, 0)
    too_large = dict.fromkeys(COLUMNS, np.full(6, 1e38))
    parquet.write_table(pa.table(too_large), tmp_path / "in" / "b.parquet")
    predict = ["predict", model, tmp_path / "in", "-o", tmp_path / "out", "--workers", cluster.scheduler_address]
    assert run(*predict, code=2).endswith("In b.parquet.\n")


def test_a_model_that_changes_is_refused(model: Path, tmp_path: Path) -> None:
    from protonet.commands.predict import PredictionOutputSpec, predict_file
    from protonet.embeddings.encoder import hash_file

    other, digest = tmp_path / "m.safetensors", hash_file(model)
    save_model(other, replace(load_model(model), metadata=TrainingMetadata()))
    write_rows(tmp_path / "none.parquet", 0, 0)
    task = FileTask(tmp_path / "none.parquet", tmp_path / "none.csv", 0)
    spec = PredictionOutputSpec(None, has_all_probabilities=False, has_row_numbers=False)
    with pytest.raises(InputError, match="`model` must remain unchanged"):
        predict_file(str(other), digest, None, spec, task, lambda rows: None)
