"""The sealed collection: its list, reading sets at a commit, resuming, and wins by t intervals."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from analysis.__main__ import main
from analysis.real_data import sealed
from analysis.shared.tables import write_csv
from protonet.fit import solver
from solution.pack import ROOT
from tests.strategies import PLAIN


def test_the_sealed_list_is_complete_and_its_repositories_are_unread() -> None:
    items = sealed.read_list()
    kinds = Counter(item.kind for item in items)
    assert kinds["table"] >= 60
    assert kinds["text"] >= 10
    assert kinds["picture"] + kinds["series"] >= 6
    assert len({item[1:5] for item in items}) == len(items)
    assert all(re.fullmatch("[0-9a-f]{40}", item.commit) for item in items)
    assert all((item.target == "") == (item.kind in {"picture", "series"}) for item in items)
    rows = json.loads((ROOT / "analysis" / "results" / "raw_tables.json").read_text(encoding="utf-8"))
    assert not {item.repository for item in items} & {row["path"].partition("/")[0] for row in rows}
    assert max(Counter(item.repository for item in items if item.kind == "table").values()) <= 10


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a repository that has a set of each kind, which the list of the study names."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    repository, rng = tmp_path / "clones" / "owner+name", np.random.default_rng(0)
    repository.mkdir(parents=True)
    kinds = ["left", "right"] * 40
    rows = [f"{9 * (kind == 'left') + rng.normal():.2f},{index % 7},{kind}" for index, kind in enumerate(kinds)]
    (repository / "table.csv").write_text("\n".join(["x,code,type", *rows, "1.0,1,rare"]) + "\n")
    words = {"left": "apple pear plum", "right": "train tram station"}
    (repository / "texts.txt").write_text("".join(f"{words[kind]} {index}\n" for index, kind in enumerate(kinds)))
    (repository / "labels.txt").write_text("\n".join(kinds) + "\n")
    for index, kind in enumerate(kinds):
        path = repository / "pictures" / kind / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 200 if kind == "left" else index).save(path)
    waves = [np.sin(np.linspace(0, 20 if kind == "left" else 50, 30)) + rng.normal(size=30) / 9 for kind in kinds]
    lines = [" ".join([str(1 + (kind == "left")), *map(str, wave)]) for kind, wave in zip(kinds, waves, strict=True)]
    for part, some in (("TRAIN", lines[:20]), ("TEST", lines[20:])):
        (repository / f"wave_{part}").write_text("\n".join(some) + "\n")
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "data"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    cells = [
        ["table", "owner+name", commit, "table.csv", "type", ""],
        ["text", "owner+name", commit, "texts.txt", "labels.txt", ""],
        ["picture", "owner+name", commit, r"pictures/(\w+)/.+\.png", "", ""],
        ["series", "owner+name", commit, "wave_", "", ""],
    ]
    write_csv(tmp_path / "sealed.csv", sealed.SealedSet._fields, cells)
    monkeypatch.setattr(sealed, "LIST", tmp_path / "sealed.csv")
    return tmp_path / "clones"


def test_sealed_sets_are_read_from_a_commit(clone: Path, tmp_path: Path) -> None:
    (clone / "owner+name" / "table.csv").write_text("changed,later\n")
    for item in sealed.read_list():
        content = sealed.load_set(clone, item, tmp_path)
        assert np.bincount(content.items.labels).tolist() == [40, 40], item.kind
        assert content.items.classes == (("1", "2") if item.kind == "series" else ("left", "right"))
    assert len(list(tmp_path.glob("owner+name-*.png"))) == 80


def test_the_sealed_study_resumes_and_reports_by_repository(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(solver, "DEFAULT_SEARCH", PLAIN)
    monkeypatch.chdir(tmp_path)
    common = [str(clone), "--kinds", "series,table", "--shots", "5", "--splits", "2", "--state", "state.jsonl"]
    assert main(["sealed", *common, "--methods", "trees,convolutions"]) == 0
    assert "lead of protonet" in capsys.readouterr().out
    baselines = Path("state.jsonl").read_bytes()
    sealed_methods = ["ours", "trees", "convolutions"]
    assert main(["sealed", *common, "--methods", ",".join(sealed_methods), "--json", "rows.json"]) == 0
    assert Path("state.jsonl").read_bytes().startswith(baselines)
    table, series = json.loads(Path("rows.json").read_text(encoding="utf-8"))
    assert {name: len(values) for name, values in series["accuracy"].items()} == dict.fromkeys(sealed_methods, 2)
    assert (table["path"], [*table["accuracy"]]) == ("table.csv", ["ours"])
    assert min(series["accuracy"]["ours"] + table["accuracy"]["ours"]) > 90
    output = capsys.readouterr().out
    assert "**Series: 1 set, repositories: 1, 5 rows per class**" in output
    assert main(["sealed", str(tmp_path), *common[1:]]) == 2
    assert "`folder` must hold 1 clone more; got owner+name" in capsys.readouterr().err


def test_wins_are_beyond_the_t_interval_of_the_splits() -> None:
    assert sealed.compare([80, 81, 82], [70, 71, 72]) == 1
    assert sealed.compare([70, 71, 72], [80, 81, 82]) == -1
    assert sealed.compare([80, 70, 75], [70, 72, 71]) == 0
    assert sealed.compare([80, 80], [80, 80]) == 0
