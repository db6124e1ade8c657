"""Updates of one model file by several processes at a time, and of models that store their rows."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from protonet.commands.update import format_accuracy_change
from protonet.pipeline import TablePipeline
from tests.commands.cases import FAST, Run, fit_model
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


def write_arrays(path: Path, x: np.ndarray, y: np.ndarray) -> Path:
    np.savez(path, x=x, y=y)
    return path


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    """Rows of three classes in a plane; those of the third lie beyond the others."""
    draw, y = np.random.default_rng(0), np.repeat(["ant", "bee", "cat"], 20)
    return (np.repeat([[0.0, 0], [1.5, 0], [3, 0]], 20, axis=0) + draw.normal(size=(60, 2)) / 3).astype(np.float32), y


@pytest.mark.parametrize("more", [(), ("--balanced",)])
def test_update_of_stored_rows_equals_fit_to_all_rows(
    more: tuple[str, ...], rows: tuple[np.ndarray, np.ndarray], tmp_path: Path, run: Run
) -> None:
    x, y = rows
    old, new = write_arrays(tmp_path / "old.npz", x[:40], y[:40]), write_arrays(tmp_path / "new.npz", x[40:], y[40:])
    both, model = write_arrays(tmp_path / "both.npz", x, y), tmp_path / "m.protonet"
    output = run("fit", old, "-o", model, "--store-rows", *more)
    assert "40 rows stored for update, 640 bytes before compression\n" in output
    output = run("update", model, new, "--in-place")
    assert output.startswith(f"{model}: 20 samples added, 1 new class: cat; fitted again to 60 rows\ncross-validated")
    run("fit", both, "-o", tmp_path / "all.protonet", *more)
    given = torch.from_numpy(x)
    updated, fitted = (TablePipeline.load(path).network(given) for path in (model, tmp_path / "all.protonet"))
    torch.testing.assert_close(updated, fitted)
    output = run("update", model, new, "-o", tmp_path / "twice.protonet")  # the rows are still stored
    assert "fitted again to 80 rows" in output


def test_groups_are_stored_with_the_rows(tmp_path: Path, run: Run) -> None:
    lines = [f"{(row % 2) * 4 + row / 9},{row % 3},{'ant' if row % 2 else 'bee'},p{row // 4}" for row in range(24)]
    header, model = "x,z,kind,who", tmp_path / "m.protonet"
    for name, part in (("old", lines[:16]), ("new", lines[12:])):
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *part, ""]))
    run("fit", tmp_path / "old.csv", *FAST, "--group", "who", "-o", model, "--store-rows")
    run("update", model, tmp_path / "new.csv", "--in-place")
    pipeline = TablePipeline.load(model, for_update=True)
    assert [*pipeline.metadata.group_indices] == [f"p{index}" for index in range(6)]
    stored = pipeline.update_state["stored_groups"].tolist()
    assert stored == [row // 4 for row in range(16)] + [row // 4 for row in range(12, 24)]


def test_a_new_class_beyond_the_others_is_advised_on() -> None:
    before = torch.eye(2, dtype=torch.float64)[torch.arange(30) % 2]
    after = torch.nn.functional.pad(before, (0, 1))
    after[:9, 2] = 2.0
    advice = "\nupdate moves prototypes, not the views: run protonet fit on both tables together, or with --store-rows"
    assert advice in format_accuracy_change(before, after, torch.arange(30) % 2, ("a", "b", "c"))
    after[3:9, 2] = 0.0  # three rows may fall by chance
    assert advice not in format_accuracy_change(before, after, torch.arange(30) % 2, ("a", "b", "c"))


def test_stored_rows_that_do_not_fit_are_refused(rows: tuple[np.ndarray, np.ndarray], tmp_path: Path, run: Run) -> None:
    x, y = rows
    table, model = write_arrays(tmp_path / "x.npz", x, y), tmp_path / "m.protonet"
    run("fit", table, "-o", model, "--store-rows")
    pipeline = TablePipeline.load(model, for_update=True)
    for name, tensor in (
        ("stored_labels", torch.full((60,), 3)),
        ("stored_labels", torch.zeros(59, dtype=torch.int64)),
        ("stored_features", torch.zeros(60, 3)),
        ("stored_groups", torch.zeros(60, dtype=torch.int64)),
    ):
        replace(pipeline, update_state=pipeline.update_state | {name: tensor}).save(model)
        assert "`model` must have stored rows that fit it" in run("update", model, table, "--in-place", code=2)
