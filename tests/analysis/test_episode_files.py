"""Studies of few-shot methods on files that are not ours, on small ones of the same form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from analysis.__main__ import main
from analysis.episodes import photographs
from analysis.episodes.photographs import hash_pictures, locate_pictures, tabulate_ranks
from tests.analysis.conftest import read_cells
from tests.embeddings.pictures.test_files import write_onnx


def test_photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for label in range(16):
        for index in range(35):
            path = Path("photos", ("train", "test")[index % 2], f"class {label}", f"{index}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 90, (8, 8, 3)) + rng.permutation([150, 90, 10]) * (label % 2) + 5 * label
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    write_onnx(tmp_path / "net.onnx", ["n", 3, 8, 8])
    methods = "protonet,bd-cspn,soft-kmeans"
    arguments = ["episode-photographs", "photos", "--backbone", str(tmp_path / "net.onnx"), "--way", "3", "--episodes"]
    arguments += ["5", "--methods", methods, "--json", "rows.json"]
    assert main(arguments) == 0
    first = capfd.readouterr().out
    digest = hash_pictures(locate_pictures(Path("photos")))
    assert f"560 photographs of 16 classes: of no set that we know;\nsha256 of all {digest}" in first
    rows = json.loads(Path("rows.json").read_text(encoding="utf-8"))
    assert list(rows) == list(photographs.COLUMN_OPTIONS)
    (header, _, measured, *_) = read_cells(first)
    assert header == [
        "accuracy, % ±episodes",
        *photographs.COLUMN_OPTIONS,
    ]  # too few episodes for intervals over classes
    assert measured[1].startswith(f"{100 * rows['1-shot']['methods']['protonet']['accuracy']:.2f} ±")
    assert [cells[0] for cells in read_cells(first)[-2:]] == ["protonet", "bd-cspn"]
    before = {path: path.stat().st_mtime_ns for path in Path("build").rglob("*.npz")}
    assert main(arguments) == 0
    assert capfd.readouterr().out == first
    features = next(path for path in before if "net" in path.name)
    assert features.stat().st_mtime_ns == before[features]
    assert main(["episode-photographs", "build/absent"]) == 2
    assert "`folder` must hold pictures in folders of two classes or more" in capfd.readouterr().err


def test_methods_of_equal_accuracy_share_their_mean_rank() -> None:
    methods = {"protonet": 0.3, "simpleshot": 0.5, "bd-cspn": 0.3, "tim": 0.1}
    result = {"methods": {name: {"accuracy": accuracy} for name, accuracy in methods.items()}}
    cells = {name: measured for name, measured, *_ in read_cells(tabulate_ranks({"1-shot": result, "5-shot": result}))}
    assert [cells[name] for name in methods] == ["2.5 (30.0)", "1 (50.0)", "2.5 (30.0)", "4 (10.0)"]
