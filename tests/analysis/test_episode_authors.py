"""The study of authors' code, on a repository made up here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from analysis.__main__ import main
from analysis.episodes import authors
from analysis.episodes.authors import PAIRS, Pair, Source, interleave, tabulate
from protonet.episodes.draws.batch import summarize_base, take_from
from protonet.sampling import index_classes

#: A method of the interface of PADDLE's repository: the nearest mean, plus a log file as theirs.
THEIRS = """
import torch
import requests
from src.utils import half


class PADDLE:
    def __init__(self, model, device, log_file, args):
        open(log_file, "w").close()
        self.way, self.steps = args.n_ways, args.iter

    def run_task(self, task_dic, shot):
        support, query = (half(task_dic[name].cuda()) for name in ("x_s", "x_q"))
        assert task_dic["y_s"][0, :, 0].tolist() == list(range(self.way)) * shot
        means = support.unflatten(1, (shot, self.way)).mean(dim=1)
        right = torch.cdist(query, means).argmin(dim=2) == task_dic["y_q"][..., 0]
        return {"acc": right.float().mean(dim=1, keepdim=True).numpy()}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write their repository, and let the study have small features and one pair."""
    source = tmp_path / "PADDLE" / "src"
    (source / "methods").mkdir(parents=True)
    (source / "methods" / "__init__.py").write_text(THEIRS, encoding="utf-8")
    (source / "utils.py").write_text("def half(x):\n    return x / 2\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(12).repeat_interleave(30)
    x = torch.randn(12, 8, generator=generator)[labels] + torch.randn(360, 8, generator=generator)
    index = index_classes(labels)
    made = Source(take_from(x), index, summarize_base(take_from(x), index))
    monkeypatch.setattr(authors, "KINDS", {"small": lambda: made})
    monkeypatch.setattr(authors, "PAIRS", (Pair("PADDLE", "PADDLE", "protonet"), Pair("PT-MAP", "Absent", "pt-map")))
    return tmp_path


def test_ours_and_theirs_see_the_same_episodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["episode-authors", "--authors", str(folder), "--episodes", "20", "--state", str(folder / "s.jsonl")])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    line = next(line for line in captured.out.splitlines() if line.startswith("| PADDLE "))
    assert line.count(", +0.00 ±0.00 (100 %)") == 2
    assert "PT-MAP" not in captured.out  # whose repository is not there
    assert (folder / "PADDLE" / "src" / "utils.py").exists()


def test_rows_come_one_of_each_class_at_a_time() -> None:
    labels = torch.tensor([[4, 0, 1, 3, 2, 2, 3, 1, 0, 4]])
    rows = 10 * labels[..., None] + torch.arange(10)[:, None]
    assert interleave(rows, labels)[0, :, 0].tolist() == [1, 12, 24, 33, 40, 8, 17, 25, 36, 49]


def test_the_table_leaves_out_what_is_no_number() -> None:
    places = [f"{kind}, {shot}-shot" for kind in authors.KINDS for shot in (1, 5)]
    found = {f"{pair.name}, {place}": [[0.5, 0.7], [0.6, 0.7]] for pair in PAIRS for place in places}
    found["PT-MAP, conv, 1-shot"] = [[0.5, 0.7], [float("nan"), 0.7]]
    lines = tabulate([pair.name for pair in PAIRS], list(authors.KINDS), found, 2).splitlines()
    row = next(line for line in lines if line.startswith("| PT-MAP "))
    assert row.count("65.00, -5.00 ±63.53 (50 %)") == 5
    lines = tabulate(["TIM-GD"], ["pixels"], found, 20).splitlines()
    assert lines[-1].startswith("| TIM-GD (2) ")
    assert lines[-1].count("%") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "analysis episode-authors: `--authors` must be a folder; got None"),
        (["--authors", "absent"], "`--authors` must be a folder; got absent"),
        (["--authors", "."], "`--authors` must hold Absent, PADDLE; got "),
        (["--authors", ".", "--only", "X"], "`--only` must be of "),
    ],
)
def test_errors(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder / "empty")
    assert main(["episode-authors", *arguments, "--state", str(folder / "s.jsonl")]) == 2
    assert message in capsys.readouterr().err


def test_code_that_fails_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "PADDLE" / "src" / "utils.py").write_text("1 / 0\n", encoding="utf-8")
    arguments = ["--authors", str(folder), "--episodes", "20", "--state", str(folder / "s.jsonl")]
    assert main(["episode-authors", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "`--authors` must hold PADDLE as it was published; got ZeroDivisionError: division by zero" in error
