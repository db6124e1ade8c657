"""A new method is one file and one line: a function, and its `MethodSpec` in ``METHODS``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from protonet.episodes.__main__ import main
from protonet.episodes.methods import METHODS, MethodSpec
from protonet.episodes.methods.common import support_means
from protonet.episodes.methods.keywords import Positive
from protonet.episodes.samplers.batch import Episodes


def nearest_corner(episodes: Episodes, *, power: Positive = 1.0) -> Tensor:
    """Classify by the largest difference of a feature to the class mean.

    Args:
        episodes: Support (episodes, n_support, dim) and query (episodes, n_queries, dim), floating.
        power: > 0, of the distance.

    Returns:
        Logits (episodes, n_queries, n_way).

    Source: this test.
    """
    return -(torch.cdist(episodes.query, support_means(episodes), p=torch.inf) ** power)


def test_a_new_method_is_one_file_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(METHODS, "nearest-corner", MethodSpec(nearest_corner, takes_means=True))
    assert main(["--list-methods"]) == 0
    listed = capsys.readouterr().out
    assert "nearest-corner (inductive): Classify by the largest difference" in listed
    assert "  power: a number > 0, 1 by default" in listed
    few = ["--dataset", "digits", "--way", "2", "--episodes", "20", "--json", str(tmp_path / "out.json")]
    for part in (["--split-seed", "0", "--protocol", "generalized"], ["--shot", "5"]):
        assert main([*few, *part, "--method", "nearest-corner", "nearest-corner:power=2", "protonet"]) == 0
        methods = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["methods"]
        assert methods["nearest-corner"]["accuracy"] == methods["nearest-corner:power=2"]["accuracy"] > 0.4
    assert main([*few, "--method", "nearest-corner:power=0"]) == 2
    assert "have settings within their bounds, > 0 here" in capsys.readouterr().err
