"""``fit`` with rows that have no class: empty cells, another file, and what is said of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from protonet.__main__ import main

FAST = ["--label", "kind", "--effort", "fast", "--quiet"]


def write(path: Path, rows: np.ndarray, kinds: list[str] | None) -> str:
    lines = ["a,b,c" + ",kind" * (kinds is not None)]
    for number, row in enumerate(rows):
        lines.append(",".join(f"{value:.4f}" for value in row) + ("" if kinds is None else f",{kinds[number]}"))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def blobs(kinds: str, each: int, seed: int) -> tuple[np.ndarray, list[str]]:
    random = np.random.default_rng(seed)
    centres = {"u": (4, 0, 0), "v": (0, 4, 0), "w": (0, 0, 4)}
    names = [kind for kind in kinds for _ in range(each)]
    return np.array([centres[name] for name in names]) + random.normal(0, 0.7, (len(names), 3)), names


def test_another_file_and_empty_cells_give_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (few, names), (rest, _) = blobs("uv", 12, 0), blobs("uvw", 30, 1)
    train, more = write(tmp_path / "t.csv", few, names), write(tmp_path / "more.csv", rest, None)
    both = write(tmp_path / "both.csv", np.concatenate([few, rest]), [*names, *[""] * len(rest)])
    said, models = [], []
    for number, asked in enumerate(([train, "--unlabelled", more], [both], [both, "--drop-unlabelled"], [train])):
        output, figures = tmp_path / f"{number}.safetensors", tmp_path / f"{number}.json"
        assert main(["fit", *asked, *FAST, "-o", str(output), "--json", str(figures)]) == 0
        said.append(capsys.readouterr().out)
        models.append(json.loads(figures.read_text()))
        predicted = tmp_path / f"{number}.csv"
        assert main(["predict", str(output), more, "-o", str(predicted), "--quiet", "--proba"]) == 0
    assert "90 rows without a class: learned from (log-loss on held-out rows" in said[0]
    assert re.search("1 group of (2[89]|30) rows looks like classes of their own:\n  line 6", said[0])
    assert re.search("classes of their own:\n  line 8", said[1])  # the same rows stand further down in that file
    assert "without a class" not in said[2] + said[3]
    found = models[0]["unlabelled"]
    assert {**found, "strangers": []} == {**models[1]["unlabelled"], "strangers": []}
    assert (found["rows"], found["drawn"], found["learned"]) == (90, 90, True)
    named = {f"line {line} of more.csv" for line in range(62, 92)}
    assert len(set(found["strangers"][0]) & named) >= 28
    assert "unlabelled" not in models[2]
    texts = [(tmp_path / f"{number}.csv").read_text() for number in range(4)]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert texts[0] != texts[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "`--unlabelled` must have the model's columns; got more.csv without c. .*"),
        ("a,b,c\n1,2,inf\n", "`--unlabelled` must have finite numbers; got 'inf' in c, line 2. .*"),
        ("a,b,c\n", "`--unlabelled` must have at least one row; got none in .*more.csv. Add rows."),
        (None, "`--unlabelled` must be a file that exists; got .*more.csv."),
    ],
    ids=["columns", "infinity", "no row", "no file"],
)
def test_rows_that_do_not_fit_are_one_line(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write(tmp_path / "t.csv", *blobs("uv", 6, 0))
    more = tmp_path / "more.csv"
    if text is not None:
        more.write_text(text)
    output = tmp_path / "m.safetensors"
    assert main(["fit", train, "--unlabelled", str(more), *FAST, "-o", str(output)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(f"protonet fit: {message}\n", said.err.replace(f"{tmp_path}/", "")), said.err
    assert not output.exists()


def test_the_output_may_not_be_the_file_that_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write(tmp_path / "t.csv", *blobs("uv", 6, 0))
    more = tmp_path / "more.json"
    more.write_text("{}")
    assert main(["fit", train, "--unlabelled", str(more), *FAST, "--json", str(more)]) == 2
    assert "must be another file than what is read" in capsys.readouterr().err
