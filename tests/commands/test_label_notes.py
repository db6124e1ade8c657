"""What fit and update say of labels: rows that contradict each other, classes that are not evaluated or cancel."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from protonet.commands.labels import warn_contradictions
from tests.commands.cases import FAST, Run


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_lines(n: int, classes: str = "ab") -> list[str]:
    draw = np.random.default_rng(0)
    return [f"{x:.4f},{y:.4f},{classes[row % len(classes)]}" for row, (x, y) in enumerate(draw.normal(size=(n, 2)))]


def test_equal_rows_of_different_classes_are_named(tmp_path: Path, run: Run) -> None:
    lines = ["x,y,kind", *make_lines(40)]
    model = tmp_path / "m.safetensors"
    assert "contradicting" not in run("fit", write(tmp_path / "t.csv", lines), *FAST)
    lines += [lines[5].replace(",a", ",b"), lines[6], ",,a", ",,b"]
    output = run("fit", write(tmp_path / "t.csv", lines), *FAST, "-o", model)
    (line,) = (line for line in output.splitlines() if "contradicting labels" in line)
    assert "2 rows equal rows of another class: line 6 (a), line 42 (b)" in line
    output = run(
        "update", model, write(tmp_path / "more.csv", ["x,y,kind", "1,2,a", "1,2,b", *make_lines(8)]), "--in-place"
    )
    assert "line 2 (a), line 3 (b)" in output


def test_equal_texts_of_different_classes_are_named(tmp_path: Path, run: Run) -> None:
    texts = [("my card got lost", "card"), ("shut my account", "close"), ("open an account", "open")]
    lines = ["text,kind", *(f"{text} number {row},{kind}" for row in range(8) for text, kind in texts)]
    lines.append(lines[1].replace(",card", ",close"))
    output = run("fit", write(tmp_path / "t.csv", lines), *FAST, "--representation", "none")
    assert "contradicting labels" in output
    assert "line 2 (card), line 26 (close)" in output


def test_sets_of_equal_rows_are_those_of_a_slow_search() -> None:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 12, (60, 2)).astype(np.float32) * np.array([1.0, -0.0], np.float32)
    x = np.concatenate([x, draw.normal(size=(400, 2)).astype(np.float32)])
    labels = draw.integers(0, 2, len(x)).tolist()
    expected = sum(any((x[i] == x[j]).all() and labels[i] != labels[j] for j in range(len(x))) for i in range(60))
    (line,) = warn_contradictions(x, labels, list(map(str, range(len(x)))))
    assert f" {expected} rows equal" in line


def test_classes_without_held_out_rows_are_named(tmp_path: Path, run: Run) -> None:
    output = run("fit", write(tmp_path / "t.csv", ["x,y,kind", *make_lines(40), "9,9,c", "9,8,d"]), *FAST)
    assert "not evaluated: c, d:" in output
    output = run("fit", write(tmp_path / "t.csv", ["x,y,kind", *make_lines(40)]), *FAST)
    assert "not evaluated" not in output
