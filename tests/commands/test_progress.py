"""Bars on stderr say how long it will take yet, and blocks are worked on side by side."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from protonet._io import show_progress
from protonet.commands.data import map_blocks
from protonet.tables import formats
from protonet.tables.table import ReadSpec, RowBlock, open_table


@pytest.mark.parametrize("quiet", [False, True])
def test_the_bar_shows_the_remaining_time(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with show_progress(quiet=quiet) as report:
        for stage, fraction in (("start", 0.0), ("first", 0.2), ("second", 0.25), ("third", 0.5)):
            report(stage, fraction)
            now[0] += 30
    output = capsys.readouterr().err
    shown = re.findall(r"(\w+): (\d+) %\|.*?\| ([\d:]+), ([\d:]+) left", output)
    expected = [
        ("first", "20", "00:30", "02:00"),
        ("second", "25", "01:00", "03:00"),
        ("third", "50", "01:30", "01:30"),
    ]
    assert shown == ([] if quiet else expected)
    assert bool(output) != quiet


def test_blocks_are_processed_in_order_and_a_few_at_a_time() -> None:
    used: list[int] = []

    def blocks() -> Iterator[RowBlock]:
        for index in range(40):
            used.append(index)
            yield RowBlock([np.array([index])], np.empty(0, np.str_), (), [index], [index])

    def work(block: RowBlock) -> int:
        if len(used) == 40 and block.positions == [39]:
            raise ValueError("the last")
        return int(block.columns[0][0])

    threads = torch.get_num_threads()
    results = map_blocks(work, blocks())
    assert next(results) == 0
    assert len(used) <= 2 * threads + 1
    assert [next(results) for _ in range(38)] == list(range(1, 39))
    with pytest.raises(ValueError, match="the last"):
        next(results)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".parquet", ".xlsx", ".csv"])
def test_the_bar_of_rows_shows_the_remaining_time_if_known(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, x = tmp_path / f"t{suffix}", np.arange(8.0).reshape(4, 2)
    frame = pandas.DataFrame(x, columns=["a", "b"])
    writers: dict[str, Callable[[], object]] = {
        ".npz": lambda: np.savez(path, x=x),
        ".npy": lambda: np.save(path, x),
        ".parquet": lambda: frame.to_parquet(path),
        ".xlsx": lambda: frame.to_excel(path, index=False),
        ".csv": lambda: frame.to_csv(path, index=False),
    }
    writers[suffix]()
    monkeypatch.setattr(formats, "CELLS_PER_CHUNK", 4)
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    table = open_table(path, ReadSpec(label="kind", labelled=False))
    assert table.n_rows == (None if suffix == ".csv" else 4)

    def blocks() -> Iterator[RowBlock]:
        for block in table.blocks:
            now[0] += 30
            yield block

    assert sum(map_blocks(lambda block: len(block.positions), blocks(), rows=table.n_rows)) == 4
    output = capsys.readouterr().err
    assert bool(re.search(r" 50%\|.*\| 2\.00/4\.00 \[00:30<00:30, ", output)) == (suffix != ".csv")
    assert "2.00" in output
