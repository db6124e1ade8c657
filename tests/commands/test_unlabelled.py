"""``fit`` with unlabelled rows and imbalanced classes; rows without information count as the class frequencies."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from protonet.estimator import ProtoNetClassifier
from protonet.files import load_model
from protonet.fit.cross_validation import predict_held_out, restore_cross_validation
from protonet.metrics import compute_class_metrics, compute_metrics
from protonet.pipeline import TablePipeline
from protonet.server.parsing import parse_body
from tests.commands.cases import FAST, Run, read_table
from tests.commands.servers import start
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
        ("a,b\n1,2\n", "`--unlabelled` must have the model's columns; got .*more.csv without c. .*"),
        ("a,b,c\n1,2,inf\n", "`--unlabelled` must have finite numbers; got 'inf' in c, line 2. .*"),
        ("a,b,c\n", "`--unlabelled` must have at least one row; got none in .*more.csv. Add rows."),
        ("a,b,c\n,n/a,\n", "`--unlabelled` must have rows with a readable cell; got 1 row without one. .*"),
    ],
    ids=["columns", "infinity", "no row", "no cell"],
)
def test_invalid_unlabelled_rows_are_errors(text: str, message: str, tmp_path: Path, run: Run) -> None:
    train, more = write(tmp_path / "t.csv", *blobs("uv", 6, 0)), tmp_path / "more.csv"
    more.write_text(text)
    for output in ([], ["-o", tmp_path / "m.safetensors"]):  # without it, a note says that no model will be written
        error = run("fit", train, "--unlabelled", more, *FAST, *output, code=2, quiet=False)
        assert re.fullmatch(f"protonet fit: {message}\n", error), error
    assert not (tmp_path / "m.safetensors").exists()
    run("fit", train, *FAST, quiet=False)
    assert run.notes == "note: no model will be written: --output names its file\n"


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


def make_table(path: Path, shift: float, *, rows: int = 100, rare: int = 5, seed: int = 0) -> str:
    """Write a table of a rare and a usual class, which differ by a shift in two of four columns of noise."""
    rng = np.random.default_rng(seed)
    kinds = np.arange(rows) < rare
    x = rng.normal(size=(rows, 4)) + shift * kinds[:, None] * np.array([1, 1, 0, 0])
    columns = {f"x{index}": column.tolist() for index, column in enumerate(x.T)}
    return write_columns(path, {**columns, "kind": np.where(kinds, "a rare one", "usual").tolist()})


def test_a_model_of_one_predicted_class_is_reported(tmp_path: Path, run: Run) -> None:
    table, model = make_table(tmp_path / "t.csv", 0.0), tmp_path / "m.safetensors"
    results, output = run.read_json("fit", table, *FAST, "-o", model)
    ours, frequent = results["baselines"][:2]
    assert [ours["name"], frequent["name"]] == ["this model", "most frequent class"]
    assert (frequent["accuracy"], frequent["balanced_accuracy"]) == (0.95, 0.5)
    assert ours["balanced_accuracy"] == results["balanced_accuracy"] < 0.6
    assert ours["accuracy"] - frequent["difference"] == pytest.approx(0.95)
    assert "warning: the model is not more accurate than the most frequent class\n" in output
    assert re.search(r"\| most frequent class \| 95.00 +\| \[\d\d.\d\d, 9\d.\d\d\] \| 50.00 +\| [+-]\d.\d\d ±", output)
    results, output = run.read_json("evaluate", model, table)
    balanced = f"balanced accuracy {100 * results['balanced_accuracy']:.2f} %"
    assert output.splitlines()[1] == f"{balanced}; baseline, always usual (the most frequent class of fit): 95.00 %"
    assert results["baselines"][1]["accuracy"] == 0.95
    assert ", baseline (most frequent class) 95.00 %, log-loss" in run("info", model)


def test_balanced_fit_compares_balanced_accuracy(tmp_path: Path, run: Run) -> None:
    table = make_table(tmp_path / "t.csv", 1.5)
    fresh, right = make_table(tmp_path / "u.csv", 1.5, rows=1000, rare=500, seed=1), []
    for options, measured in ([], "accuracy"), (["--balanced"], "balanced_accuracy"):
        path = tmp_path / f"{measured}.safetensors"
        fitted, output = run.read_json("fit", table, *FAST, "-o", path, *options)
        assert ("all classes have equal weight" in output) == bool(options)
        assert ("the model is not more accurate" in output) == (fitted["baselines"][1]["difference"] <= 0)
        assert "| most frequent class | 95.00 " in output  # of the rows as they are, whatever they weigh
        assert "5-fold cross-validation on 100 rows" in output
        assert f"{'balanced ' * bool(options)}difference to baseline, points" in output
        model = load_model(path, for_update=True)
        cv = restore_cross_validation(model.network, model.folds, model.update_state)
        assert model.network.counts.tolist() == list(model.metadata.sample_counts) == [5, 95]
        assert [network.counts.sum() for network in cv.fold_models] == [80] * 5
        assert torch.equal(cv.weights, torch.ones(100, dtype=torch.float64))
        metrics = compute_metrics(predict_held_out(cv), cv.labels)
        stored, balanced = (
            model.metadata.cross_validation or {},
            compute_class_metrics(metrics.confusion).balanced_accuracy,
        )
        assert (stored["accuracy"], stored["balanced_accuracy"]) == (metrics.accuracy, balanced)
        for results in (fitted, run.read_json("evaluate", path, table)[0]):
            ours, *others = results["baselines"]
            for other in others:
                assert other["difference"] == pytest.approx(ours[measured] - other[measured])
                assert other["compared_by"] == measured
        right.append(run.read_json("evaluate", path, fresh)[0]["balanced_accuracy"])
    assert right[1] > right[0] + 0.05  # 4 standard errors of 1,000 rows


N, SHARE = 80, 0.25
#: Cells (number, category) of rows, and whether they have no information.
ROWS = [("", "", True), ("9.5", "Rome", False), ("n.a.", "", True), ("", "Paris", True), ("", "Oslo", False)]
NOTE = "3 rows have no information"


def make_uninformative(gaps: float = 0.0) -> Any:
    """Make a table with a quarter of the rows in the class "bee" and a fraction of missing cells."""
    draw = np.random.default_rng(0)
    bee = np.arange(N) < SHARE * N
    size = draw.normal(9 * bee, 1.0).round(3).astype(object)
    city = np.array(["Rome", "Oslo", "Bern"], dtype=object)[(bee + draw.integers(0, 2, N)) % 3]
    for cells in (size, city):
        cells[draw.random(N) < gaps] = None
    return pd.DataFrame({"size": size, "city": city, "kind": np.where(bee, "bee", "ant")})


@pytest.fixture
def gaps_model(tmp_path: Path, run: Run) -> Path:
    make_uninformative(0.1).to_csv(tmp_path / "train.csv", index=False)
    run("fit", tmp_path / "train.csv", *FAST, "-o", tmp_path / "model.safetensors")
    lines = ["size,city,kind", *(f"{size},{city},ant" for size, city, _ in ROWS)]
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "model.safetensors"


def test_commands_and_the_server_count_uninformative_rows(gaps_model: Path, tmp_path: Path, run: Run) -> None:
    predicted = read_table(run("predict", gaps_model, tmp_path / "new.csv", "--proba", quiet=False))
    assert NOTE in run.notes
    for row, (*_, is_empty) in zip(predicted, ROWS, strict=True):
        assert abs(float(row["P(bee)"]) - SHARE) < 0.1 or not is_empty
    assert float(predicted[1]["P(bee)"]) > 0.9
    run("evaluate", gaps_model, tmp_path / "new.csv", "--label", "kind", quiet=False)
    assert NOTE in run.notes
    path = tmp_path / "explained.json"
    run("explain", gaps_model, tmp_path / "new.csv", "--rows", "2,3", "--json", path)
    explained = [row["classes"][0]["probability"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    assert explained == pytest.approx([float(row["probability"]) for row in predicted[:2]], abs=1e-4)

    table = (tmp_path / "new.csv").read_bytes()
    cells = [[float(size) if size[:1].isdigit() else None, city or None] for size, city, _ in ROWS]
    for media, body in (("text/csv", table), ("application/json", json.dumps(cells).encode())):
        rows = parse_body(TablePipeline.load(gaps_model), media, body)
        assert rows.uninformative_mask is not None
        assert rows.uninformative_mask.tolist() == [is_empty for *_, is_empty in ROWS]
        assert any(NOTE in note for note in rows.notes)

    before = TablePipeline.load(gaps_model).metadata.uninformative_counts or (0, 0)
    (tmp_path / "more.csv").write_text("size,city,kind\n,,cat\n,,cat\n1,Rome,ant\n", encoding="utf-8")
    run("update", gaps_model, tmp_path / "more.csv", "--in-place", "--new-classes", quiet=False)
    assert "2 rows without information" in run.notes
    assert TablePipeline.load(gaps_model).metadata.uninformative_counts == (*before, 2)


def test_an_informative_missing_cell_is_used(tmp_path: Path, run: Run) -> None:
    answers = ["yes", "no", ""] * 40
    kinds = {"yes": "ant", "no": "bee", "": "cat"}
    lines = ["answer,kind", *(f"{answer},{kinds[answer]}" for answer in answers)]
    (tmp_path / "train.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run("fit", tmp_path / "train.csv", *FAST, "-o", tmp_path / "model.safetensors")
    (tmp_path / "new.csv").write_text('answer\n""\n', encoding="utf-8")
    (row,) = read_table(run("predict", tmp_path / "model.safetensors", tmp_path / "new.csv"))
    assert row["class"] == "cat"
    assert float(row["probability"]) > 0.8


def test_the_estimator_warns_and_predicts_frequencies(tmp_path: Path) -> None:
    frame = make_uninformative()
    x, y = frame[["size", "city"]].astype({"size": float}), frame["kind"]
    estimator = ProtoNetClassifier().fit(x, y)
    rows = pd.DataFrame({"size": [np.nan, 9.5, np.nan], "city": [None, "Rome", "Paris"]})
    estimator.save(tmp_path / "model.safetensors")
    for item in (estimator, ProtoNetClassifier.load(tmp_path / "model.safetensors")):
        with pytest.warns(UserWarning, match="2 rows have no information"):
            bee = item.predict_proba(rows)[:, 1]
        assert np.abs(bee[[0, 2]] - SHARE).max() < 0.1
        assert bee[1] > 0.9
        with pytest.warns(UserWarning, match="2 rows have no information"):
            assert item.predict(rows).tolist() == ["ant", "bee", "ant"]
        assert np.isfinite(item.transform(rows)).all()
        assert [suggestion.row for suggestion in item.suggest(rows, 1)] == [1]
        with pytest.raises(ValueError, match="Ask for at most 1 of 1 rows"):
            item.suggest(rows, 2)


def test_the_page_gives_class_frequencies(gaps_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="it listens")
    frame = make_uninformative()
    frame.loc[len(frame)] = [None, None, "ant"]
    frame.drop(columns="kind").to_csv(tmp_path / "rows.csv", index=False)
    with start("page", tmp_path / "rows.csv", "-m", gaps_model, "-o", tmp_path / "answers.csv") as server:
        labelled = range(0, N, 2)
        for name in ("ant", "bee"):
            rows = [row for row in labelled if frame["kind"][row] == name]
            server.ask_json("POST", "/api/label_many", {"tab": "one", "rows": rows, "name": name})
        body, media = '{"rows": [[null, null]]}', {"Content-Type": "application/json"}
        values, tried = dict[str, float](), dict[str, Any]()
        until = time.monotonic() + 60
        while abs(values.get("bee", 1.0) - SHARE) > 0.1:  # until a network is fitted to all labels
            assert time.monotonic() < until, values
            status, answer, _ = server.ask("POST", "/api/try", body, media)
            tried = json.loads(answer)
            values = {guess["name"]: guess["probability"] for guess in tried["likely"]} if status == 200 else {}
            time.sleep(0.05)
        assert any("1 row has no information" in note for note in tried["notes"])
        for row in [row for row in range(N) if row not in labelled]:
            server.ask_json("POST", "/api/skip", {"tab": "one", "row": row})
        question = server.ask_json("POST", "/api/next", {"tab": "one"})
        assert question["row"] == N
        assert abs(next(guess["probability"] for guess in question["likely"] if guess["name"] == "bee") - SHARE) < 0.1
        notes = server.ask_json("GET", "/api/state")["notes"]
        assert any("1 row" in note and "information" in note for note in notes), notes
