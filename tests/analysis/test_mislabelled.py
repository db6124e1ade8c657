"""The study of mislabelled rows: what is flipped, how a list is scored, and that it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from sklearn.metrics import average_precision_score

from analysis.__main__ import main
from analysis.real_data.mislabelled import ONCE, OURS, average_precision, flip_labels
from tests.strategies import seeds


@given(seeds)
def test_average_precision_is_that_of_scikit_learn(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, wrong = torch.randn(30, generator=generator), torch.rand(30, generator=generator) < 0.2
    wrong[0] = True
    assert average_precision(scores, wrong) == pytest.approx(average_precision_score(wrong, scores))


def test_ties_count_as_in_the_worst_order() -> None:
    wrong = torch.tensor([True, False, False, True])
    assert average_precision(torch.zeros(4), wrong) == pytest.approx((1 / 3 + 2 / 4) / 2)


def test_flipped_labels_are_those_of_other_classes() -> None:
    labels = torch.arange(200) % 4
    noisy, wrong = flip_labels(labels, 4, seed=0)
    assert int(wrong.sum()) == 10
    assert ((noisy != labels) == wrong).all()
    assert 0 <= int(noisy.min()) <= int(noisy.max()) < 4
    assert not torch.equal(flip_labels(labels, 4, seed=1)[1], wrong)


def test_the_study_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ["--state", str(tmp_path / "state.jsonl")]
    assert main(["mislabelled", "--datasets", "iris", "--splits", "1", *state]) == 0
    said = capsys.readouterr().out
    assert OURS in said
    assert ONCE in said
    assert "cleanlab" not in said
    assert main(["mislabelled", "--datasets", "iris", "--splits", "1", "--peers", str(tmp_path / "none"), *state]) == 2
    assert "`--peers` must be a Python that has cleanlab" in capsys.readouterr().err
