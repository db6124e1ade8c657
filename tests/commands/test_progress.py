"""Progress bars show the remaining time, and blocks are processed in parallel."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from protonet._io import show_progress
from protonet.commands.data import map_blocks
from protonet.tables.table import RowBlock


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
