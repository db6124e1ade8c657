"""Uninformative rows: their probabilities are the class frequencies, and commands count them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protonet.estimator import ProtoNetClassifier
from protonet.pipeline import TablePipeline
from protonet.server.parsing import parse_body
from tests.commands.cases import FAST, Run, read_table
from tests.commands.servers import start

pd = pytest.importorskip("pandas", reason="it makes frames")
N, SHARE = 80, 0.25
#: Cells (number, category) of rows, and whether they have no information.
ROWS = [("", "", True), ("9.5", "Rome", False), ("n.a.", "", True), ("", "Paris", True), ("", "Oslo", False)]
NOTE = "3 rows have no information"


def make_frame(gaps: float = 0.0) -> Any:
    """Make a table with a quarter of the rows in the class "bee" and a fraction of missing cells."""
    draw = np.random.default_rng(0)
    bee = np.arange(N) < SHARE * N
    size = draw.normal(9 * bee, 1.0).round(3).astype(object)
    city = np.array(["Rome", "Oslo", "Bern"], dtype=object)[(bee + draw.integers(0, 2, N)) % 3]
    for cells in (size, city):
        cells[draw.random(N) < gaps] = None
    return pd.DataFrame({"size": size, "city": city, "kind": np.where(bee, "bee", "ant")})


@pytest.fixture
def model(tmp_path: Path, run: Run) -> Path:
    make_frame(0.1).to_csv(tmp_path / "train.csv", index=False)
    run("fit", tmp_path / "train.csv", *FAST, "-o", tmp_path / "model.safetensors")
    lines = ["size,city,kind", *(f"{size},{city},ant" for size, city, _ in ROWS)]
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "model.safetensors"


def test_commands_and_the_server_count_uninformative_rows(model: Path, tmp_path: Path, run: Run) -> None:
    predicted = read_table(run("predict", model, tmp_path / "new.csv", "--proba", quiet=False))
    assert NOTE in run.notes
    for row, (*_, uninformative) in zip(predicted, ROWS, strict=True):
        assert abs(float(row["P(bee)"]) - SHARE) < 0.1 or not uninformative
    assert float(predicted[1]["P(bee)"]) > 0.9
    run("evaluate", model, tmp_path / "new.csv", "--label", "kind", quiet=False)
    assert NOTE in run.notes
    path = tmp_path / "explained.json"
    run("explain", model, tmp_path / "new.csv", "--rows", "2,3", "--json", path)
    explained = [row["classes"][0]["probability"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    assert explained == pytest.approx([float(row["probability"]) for row in predicted[:2]], abs=1e-4)

    table = (tmp_path / "new.csv").read_bytes()
    cells = [[float(size) if size[:1].isdigit() else None, city or None] for size, city, _ in ROWS]
    for media, body in (("text/csv", table), ("application/json", json.dumps(cells).encode())):
        rows = parse_body(TablePipeline.load(model), media, body)
        assert rows.uninformative is not None
        assert rows.uninformative.tolist() == [uninformative for *_, uninformative in ROWS]
        assert any(NOTE in note for note in rows.notes)

    before = TablePipeline.load(model).metadata.get("uninformative", [0, 0])
    (tmp_path / "more.csv").write_text("size,city,kind\n,,cat\n,,cat\n1,Rome,ant\n", encoding="utf-8")
    run("update", model, tmp_path / "more.csv", "--in-place", "--new-classes", quiet=False)
    assert "2 rows without information" in run.notes
    assert TablePipeline.load(model).metadata["uninformative"] == [*before, 2]


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
    frame = make_frame()
    x, y = frame[["size", "city"]].astype({"size": float}), frame["kind"]
    estimator = ProtoNetClassifier(effort="fast").fit(x, y)
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


def test_the_page_gives_class_frequencies(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="it listens")
    frame = make_frame()
    frame.loc[len(frame)] = [None, None, "ant"]
    frame.drop(columns="kind").to_csv(tmp_path / "rows.csv", index=False)
    with start("page", tmp_path / "rows.csv", "-m", model, "-o", tmp_path / "answers.csv") as server:
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
