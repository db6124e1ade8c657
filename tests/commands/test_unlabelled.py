"""``fit`` with unlabelled rows: empty label cells, or another table."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.commands.cases import FAST, Run
from tests.strategies import write_columns


def write(path: Path, rows: np.ndarray, kinds: list[str] | None) -> str:
    columns = {name: [f"{value:.4f}" for value in cells] for name, cells in zip("abc", rows.T, strict=True)}
    return write_columns(path, columns if kinds is None else {**columns, "kind": kinds})


def blobs(kinds: str, rows: int, seed: int, noise: float = 0.7) -> tuple[np.ndarray, list[str]]:
    random = np.random.default_rng(seed)
    centres = {"u": (4, 0, 0), "v": (0, 4, 0), "w": (0, 0, 4)}
    names = [kind for kind in kinds for _ in range(rows)]
    return np.array([centres[name] for name in names]) + random.normal(0, noise, (len(names), 3)), names


def test_another_file_and_empty_cells_give_the_same_model(tmp_path: Path, run: Run) -> None:
    (few, names), (remaining, _) = blobs("uv", 6, 2, noise=2.0), blobs("uvw", 30, 1)
    train, more = write(tmp_path / "t.csv", few, names), write(tmp_path / "more.csv", remaining, None)
    both = write(tmp_path / "both.csv", np.concatenate([few, remaining]), [*names, *[""] * len(remaining)])
    output, metrics, texts = [], [], []
    for arguments in ([train, "--unlabelled", more], [both], [both, "--drop-unlabelled"], [train]):
        result, text = run.read_json("fit", *arguments, *FAST, "-o", tmp_path / "m.safetensors")
        output.append(text)
        metrics.append(result)
        texts.append(run("predict", tmp_path / "m.safetensors", more, "--proba"))
    assert "90 unlabelled rows: used in training (log-loss in cross-validation" in output[0]
    assert re.search("1 group of (2[89]|30) unlabelled rows:\n  line 6", output[0])
    assert re.search("unlabelled rows:\n  line 7", output[1])  # the same rows stand further down in that file
    assert "unlabelled rows" not in output[2] + output[3]
    actual = metrics[0]["unlabelled"]
    assert {**actual, "outlier_groups": []} == {**metrics[1]["unlabelled"], "outlier_groups": []}
    assert (actual["rows"], actual["sampled"], actual["used"]) == (90, 90, True)
    named = {f"line {line} of more.csv" for line in range(62, 92)}
    assert len(set(actual["outlier_groups"][0]) & named) >= 28
    assert "unlabelled" not in metrics[2]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert texts[0] != texts[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "`table` must have the model's columns; got .*more.csv without c. .*"),
        ("a,b,c\n1,2,inf\n", "`--unlabelled` must have finite numbers; got 'inf' in c, line 2. .*"),
        ("a,b,c\n", "`table` must have at least one row; got none in .*more.csv. Add rows."),
        ("a,b,c\n,n/a,\n", "`--unlabelled` must have rows with a readable cell; got 1 row without one. .*"),
    ],
    ids=["columns", "infinity", "no row", "no cell"],
)
def test_invalid_unlabelled_rows_are_errors(text: str, message: str, tmp_path: Path, run: Run) -> None:
    train, more = write(tmp_path / "t.csv", *blobs("uv", 6, 0)), tmp_path / "more.csv"
    more.write_text(text)
    error = run("fit", train, "--unlabelled", more, *FAST, "-o", tmp_path / "m.safetensors", code=2)
    assert re.fullmatch(f"protonet fit: {message}\n", error), error
    assert not (tmp_path / "m.safetensors").exists()


def test_rows_without_a_readable_cell_are_no_unlabelled_rows(tmp_path: Path, run: Run) -> None:
    rows, names = blobs("uv", 12, 0)
    footers = [["Total", "", ""], ["exported by", "Foo", ""], ["", "n/a", "?"]]
    columns = dict(zip("abc", map(list, zip(*rows.round(3).tolist(), *footers, strict=True)), strict=True))
    both = write_columns(tmp_path / "both.csv", columns | {"kind": [*names[:22], *[""] * 5]})
    alone = write_columns(tmp_path / "alone.csv", columns | {"kind": [*names, *[""] * 3]})
    more = write_columns(tmp_path / "more.csv", columns)
    for arguments, n_rows, place in (
        ([both], 2, "line 26"),
        ([alone], None, "line 26"),
        ([alone, "--drop-unlabelled", "--unlabelled", more], 24, "line 26 of more.csv"),
    ):
        result, text = run.read_json("fit", *arguments, *FAST, "-o", tmp_path / "m.safetensors")
        assert result.get("unlabelled", {}).get("rows") == n_rows
        (note,) = (line for line in text.splitlines() if "without a readable cell" in line)
        assert "3 unlabelled rows" in note
        assert place in note
