"""Updates of one model file by several processes at a time."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from protonet.pipeline import TablePipeline
from tests.commands.cases import Run, fit_model
from tests.commands.servers import start_command

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it forks")
N_PROCESSES = 4


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two classes with ten rows each."""
    table = tmp_path / "table.csv"
    lines = [f"{(row % 2) * 4 + row / 9},{row % 3},{'ant' if row % 2 else 'bee'}" for row in range(20)]
    table.write_text("\n".join(["x,z,kind", *lines, ""]), encoding="utf-8")
    return fit_model(table)


def write_rows(path: Path, n: int, name: str = "ant") -> Path:
    path.write_text("x,z,kind\n" + f"4.5,1,{name}\n" * n, encoding="utf-8")
    return path


def test_concurrent_updates_lose_no_row(model: Path, tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "more"
    folder.mkdir()
    before = sum(run.count_samples(model))
    with ExitStack() as stack:
        started = []
        for index in range(N_PROCESSES):
            table = write_rows(folder / f"{index}.csv", index + 1)
            started.append(stack.enter_context(start_command("update", model, table, "--in-place", "-q")))
        for process, _, errors in started:
            process.join(60)
            assert (process.exitcode, errors.read()) == (0, "")
    assert sum(run.count_samples(model)) == before + sum(range(N_PROCESSES + 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "more", "table.csv"]


def test_a_killed_update_leaves_no_lock(model: Path, tmp_path: Path, run: Run) -> None:
    fifo = tmp_path / "wait.csv"  # an update that reads it waits for a writer, and holds the model
    os.mkfifo(fifo)
    with start_command("update", model, fifo, "--in-place", "-q") as (process, _, _):
        file = os.open(fifo, os.O_WRONLY)  # until the update reads
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        os.close(file)
    fifo.unlink()
    before = sum(run.count_samples(model))
    run("update", model, write_rows(tmp_path / "more.csv", 3), "--in-place")
    assert sum(run.count_samples(model)) == before + 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "more.csv", "table.csv"]


@pytest.mark.parametrize("output", ["--in-place", "-o"])
def test_a_model_that_another_command_replaced_is_not_overwritten(
    output: str, model: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that writes the model during an update is not undone, even where the file system has no locks."""
    table, other, update = write_rows(tmp_path / "more.csv", 3), tmp_path / "other.protonet", TablePipeline.update
    run("update", model, table, "-o", other)

    def replace_and_update(self: TablePipeline, *arguments: object, **more: object) -> TablePipeline:
        other.replace(model)
        return update(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(TablePipeline, "update", replace_and_update)
    error = run("update", model, table, *([output] if output == "--in-place" else ["-o", model]), code=2)
    assert "`model` must stay the same during the update; got another file " in error
    assert sum(run.count_samples(model)) == 23
