"""The study of pretrained representations."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from analysis.__main__ import main
from analysis.pretrained import measure
from analysis.pretrained.study import tabulate
from analysis.shared.tables import write_csv
from protonet.embeddings.loading import ENCODER_PACKAGES

#: Words of two classes with similar names.
WORDS = {
    "fruit": ["apple", "banana", "cherry", "grape", "lemon", "mango", "orange", "peach"],
    "railway train": ["locomotive", "station", "track", "carriage", "railroad", "tram", "platform", "engine"],
}
ROWS_PER_CLASS = 12
needs_words = pytest.mark.skipif(
    not all(find_spec(module) for module in ENCODER_PACKAGES["words"].required_modules),
    reason='needs the extra "words"',
)


def write_texts(folder: Path) -> None:
    generator = np.random.default_rng(0)
    rows = []
    for name, words in WORDS.items():
        for _ in range(ROWS_PER_CLASS):
            first, second, third = generator.choice(words, 3, replace=False)
            rows.append([f"the {first} and a {second} by the {third}", name])
    write_csv(folder / "things.csv", ["text", "class"], rows)


def test_sets_are_tables_and_folders_of_pictures(tmp_path: Path) -> None:
    write_texts(tmp_path)
    for name in ("b", "a"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "pictures" / name / "1.png")
    paths = measure.list_datasets(tmp_path)
    assert list(paths) == ["things", "pictures"]
    texts, pictures = map(measure.read_dataset, paths.values())
    assert (texts.modality, texts.classes, texts.class_names[0]) == ("text", tuple(WORDS), "fruit")
    assert (pictures.modality, pictures.class_names) == ("picture", ["a", "b"])
    assert [Path(cell).parent.name for cell in pictures.contents] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "wrong"), [("text,label\na,b\n", "columns text and class"), ("text,class\na,b\n", "two classes")]
)
def test_folders_that_are_no_data_set_are_one_line(
    text: str, wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    assert main(["pretrained", str(tmp_path), "--state", str(tmp_path / "state")]) == 2
    errors = capsys.readouterr().err
    assert wrong in errors
    assert errors.count("\n") == 1


def test_a_split_judges_no_row_that_it_learns_from() -> None:
    labels = np.repeat([0, 1, 2], [5, 40, 60])
    items = measure.ItemDataset("text", list(map(str, range(105))), ("a", "b", "c"), labels, "")
    parts = {shots: measure.split_dataset(items, shots, 3, 30) for shots in (0, 1, 20)}
    assert [np.bincount(labels[part.labelled_rows], minlength=3).tolist() for part in parts.values()] == [
        [0, 0, 0],
        [1, 1, 1],
        [3, 20, 20],
    ]
    assert set(parts[1].labelled_rows) <= set(parts[20].labelled_rows) <= set(parts[20].unlabelled_rows)
    assert not set(parts[0].test_rows) & set(parts[0].unlabelled_rows)
    assert len(set(parts[0].test_rows)) == 30
    for part in parts.values():
        np.testing.assert_array_equal(part.test_rows, parts[0].test_rows)
    assert set(measure.split_dataset(items, 1, 4, 30).test_rows) != set(parts[0].test_rows)


@needs_words
def test_the_commands_are_run_and_nothing_is_done_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = tmp_path / "sets"
    sets.mkdir()
    write_texts(sets)
    monkeypatch.setenv("PROTONET_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    command = "--shots 0,5 --splits 1 --tests 8 --effort fast --representations words,none"
    outputs = ["--markdown", "table.md", "--json", "rows.json", "--state", "state.jsonl"]
    assert main(["pretrained", str(sets), *command.split(), *outputs]) == 0
    table = capsys.readouterr().out
    written = Path("table.md").read_text(encoding="utf-8")
    assert written == f"{table}\nMade by `python -m analysis pretrained FOLDER {command}`.\n"
    rows = json.loads(Path("rows.json").read_text(encoding="utf-8"))
    row_of = {(row["shots"], row["method"]): row for row in rows}
    methods = ["words", "none", measure.CLASS_CODES, measure.LOGISTIC, measure.TFIDF]
    assert [method for shots, method in row_of if shots == 5] == methods
    assert row_of[0, "words"]["percent"] >= 75  # fruit and railways, from their names alone
    assert row_of[5, "words"]["percent"] >= 75
    assert all(row["seconds"] >= 0 for row in rows)
    journal = Path("state.jsonl").read_bytes()
    assert main(["pretrained", str(sets), *command.split(), *outputs]) == 0
    assert (capsys.readouterr().out, Path("state.jsonl").read_bytes()) == (table, journal)


def test_pictures_are_classified_by_folders_whose_names_predict_does_not_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(0)
    for name, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        folder = tmp_path / "sets" / "colours" / name
        folder.mkdir(parents=True)
        for index in range(8):
            pixels = generator.normal(colour, 20, (16, 16, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{index}.png")
    command = "pretrained sets --shots 0,4 --splits 1 --effort fast --representations none --state state.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert main(command.split()) == 0
    output = capsys.readouterr().out
    assert "**1 set of pictures, 4 labelled per class**" in output
    match = re.search(r"\| colours \| 2 +\| ([\d.]+) +\|", output)
    assert match is not None
    assert float(match[1]) > 80


def test_means_are_over_sets_and_leads_in_pairs() -> None:
    def row(dataset: str, method: str, percent: float, seed: int = 0) -> dict[str, object]:
        row = {"dataset": dataset, "method": method, "percent": percent, "seed": seed}
        return row | {"takes": "text", "shots": 5, "representation": "words", "seconds": 2.0}

    rows = [row("a", "words", 80), row("a", "words", 90, 1), row("b", "words", 60)]
    rows += [row("a", measure.LOGISTIC, 75), row("b", measure.LOGISTIC, 40), row("b", measure.SETFIT, 61)]
    table = tabulate(rows, {"a": 2, "b": 3})
    assert "**2 sets of texts, 5 labelled per class**" in table
    assert "| fit, words                 | 72.5        | +15.00 ±5.00 " in table  # 10 and 20
    assert "| SetFit's recipe            |             | +21.00 " in table  # one of the sets alone
    assert "| a   | 2       | 85.0 " in table
