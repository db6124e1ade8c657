"""The study of rejection: what it draws and counts."""

from __future__ import annotations

import torch

from analysis.real_data.rejection import draw_rows
from protonet.datasets import Dataset


def test_the_study_draws_fresh_rows_of_the_known_classes_and_rows_of_others() -> None:
    y = torch.arange(50).repeat_interleave(20)
    x = torch.stack([y.float(), torch.arange(1000.0)], dim=1)
    names = tuple(map(str, range(50)))
    rows = draw_rows(Dataset(x, y, names, ("base",) * 5 + ("novel",) * 45), 0)
    assert [len(part) for part in rows] == [100, 100, 200, 200]
    labelled, known, unknown = (set(part[:, 0].tolist()) for part in (rows.x, rows.known, rows.unknown))
    assert labelled == known
    assert not known & unknown
    assert min(known | unknown) >= 5
    assert not set(rows.x[:, 1].tolist()) & set(rows.known[:, 1].tolist())
