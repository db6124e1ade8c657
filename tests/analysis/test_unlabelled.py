"""The study of rows without a label: how rows are split, and that it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from analysis.__main__ import main
from analysis.real_data.sets import load_real
from analysis.real_data.unlabelled import MOST_ROWS, split_rows


def test_regimes_hide_what_they_say() -> None:
    data = load_real("digits")
    alike, shares, strangers = (split_rows(data, 5, 0, regime) for regime in ("alike", "shares", "strangers"))
    assert alike is not None
    assert shares is not None
    assert strangers is not None
    assert torch.bincount(alike.hidden[1]).tolist() == [MOST_ROWS] * 10
    counts = torch.bincount(shares.hidden[1], minlength=10)
    assert int(counts.max()) == MOST_ROWS
    assert int(counts.min()) < MOST_ROWS / 3
    assert (strangers.num_classes, int(strangers.hidden[1].max())) == (7, 9)
    assert int(strangers.train[1].max()) == int(strangers.fresh[1].max()) == 6
    assert torch.bincount(alike.train[1]).tolist() == [5] * 10
    rows = [set(map(tuple, part[0].tolist())) for part in (alike.train, alike.hidden, alike.fresh)]
    assert not rows[0] & rows[1]
    assert len(rows[1] & rows[2]) < 3  # digits hold a few equal images
    assert split_rows(load_real("breast_cancer"), 5, 0, "strangers") is None


def test_the_study_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = ["--datasets", "iris", "--shots", "5", "--splits", "1", "--state", str(tmp_path / "state.jsonl")]
    assert main(["unlabelled", *some, "--regimes", "alike,strangers", "--peers"]) == 0
    said = capsys.readouterr().out
    assert "**5 per class, alike**" in said
    assert "**5 per class, strangers**" in said
    assert "LabelSpreading" in said
    assert main(["unlabelled", *some[:-2], "--shots", "49"]) == 2
    assert "`--datasets` must have rows enough for a split" in capsys.readouterr().err
