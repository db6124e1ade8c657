"""Studies of few-shot methods on files that are not ours, on small ones of the same form."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from analysis.__main__ import main
from analysis.episodes import photographs
from analysis.episodes.photographs import find_pictures, hash_pictures, rank
from analysis.episodes.published import Run, rate_hausdorff, read_runs
from tests.analysis.conftest import read_cells
from tests.representations.pictures.test_files import write_onnx

WAY = 4


def write_runs(folder: Path) -> None:
    """Write two runs of four characters, one stroke each, moved to be classified; one label is wrong."""
    with zipfile.ZipFile(folder / "all_runs.zip", "w") as archive:
        for run in ("run01", "run02"):
            lines = []
            for number in range(WAY):
                picture = np.zeros((20, 20), bool)
                picture[2 + 3 * number : 5 + 3 * number, 2 : 8 + 3 * number] = True
                moved = np.roll(picture, (1, 2), axis=(0, 1))
                for name, ink in ((f"{run}/training/class{number}.png", picture), (f"{run}/test/i{number}.png", moved)):
                    file = io.BytesIO()
                    Image.fromarray(~ink).save(file, "PNG")
                    archive.writestr(name, file.getvalue())
                wrong = run == "run02" and number == 0
                lines.append(f"{run}/test/i{number}.png {run}/training/class{1 if wrong else number}.png")
            archive.writestr(f"{run}/class_labels.txt", "\n".join(lines))


def test_the_distance_is_that_of_a_slow_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    support, query = (torch.rand(3, 9, 9, generator=generator) < 0.2 for _ in range(2))
    rates = rate_hausdorff(Run(support, query, torch.arange(3)))
    for q in range(3):
        for s in range(3):
            a, b = (
                np.argwhere(each.numpy()) - np.argwhere(each.numpy()).mean(axis=0) for each in (query[q], support[s])
            )
            there = np.mean([min(np.hypot(*(point - other)) for other in b) for point in a])
            back = np.mean([min(np.hypot(*(point - other)) for other in a) for point in b])
            assert float(rates[q, s]) == pytest.approx(-max(there, back), rel=1e-6)


def test_published_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_runs(tmp_path)
    (first, second) = read_runs(tmp_path / "all_runs.zip")
    assert first.labels.tolist() == [0, 1, 2, 3]
    assert second.labels.tolist() == [1, 1, 2, 3]
    assert main(["episode-published", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "another one than at that commit" in table
    assert read_cells(table)[2][:2] == ["modified Hausdorff distance", "12.50 ±158.83"]  # 0 and 25 %
    (tmp_path / "all_runs.zip").write_bytes(b"")
    assert main(["episode-published", str(tmp_path)]) == 2
    assert "`folder` must hold Omniglot's all_runs.zip" in capsys.readouterr().err


def test_photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for label in range(16):
        for number in range(35):
            path = Path("photos", ("train", "test")[number % 2], f"class {label}", f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 90, (8, 8, 3)) + rng.permutation([150, 90, 10]) * (label % 2) + 5 * label
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    write_onnx(tmp_path / "net.onnx", ["n", 3, 8, 8])
    methods = "protonet,bd-cspn,soft-kmeans"
    arguments = ["episode-photographs", "photos", "--backbone", str(tmp_path / "net.onnx"), "--way", "3", "--episodes"]
    arguments += ["5", "--methods", methods, "--json", "rows.json"]
    assert main(arguments) == 0
    first = capfd.readouterr().out
    digest = hash_pictures(find_pictures(Path("photos")))
    assert f"560 photographs of 16 classes: of no set that we know;\nsha256 of all {digest}" in first
    rows = json.loads(Path("rows.json").read_text(encoding="utf-8"))
    assert list(rows) == list(photographs.COLUMNS)
    (header, _, own, *_) = read_cells(first)
    assert header == ["accuracy, % ±classes ±episodes", *photographs.COLUMNS]
    assert own[1].startswith(f"{100 * rows['1-shot']['methods']['protonet']['accuracy']:.2f} ±")
    assert [cells[0] for cells in read_cells(first)[-2:]] == ["protonet", "bd-cspn"]
    before = {path: path.stat().st_mtime_ns for path in Path("build").rglob("*.npz")}
    assert main(arguments) == 0
    assert capfd.readouterr().out == first
    features = next(path for path in before if "net" in path.name)
    assert features.stat().st_mtime_ns == before[features]
    assert main(["episode-photographs", "build/absent"]) == 2
    assert "`folder` must hold pictures in folders of two classes or more" in capfd.readouterr().err


def test_ranks_share_a_place() -> None:
    assert rank({"a": 3, "b": 5, "c": 3, "d": 1}) == {"a": 2.5, "b": 1, "c": 2.5, "d": 4}
