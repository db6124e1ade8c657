"""``explain``: column importance and row explanations equal slow computations."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from sklearn.metrics import accuracy_score, log_loss
from torch import Tensor
from torch.nn.functional import cosine_similarity

from protonet import solve
from protonet.commands.explain import MAX_LISTED_COLUMNS
from protonet.files import Model, load_model, save_model
from protonet.fit import diagnostics
from protonet.fit.cross_validation import CrossValidation, predict_held_out, restore_cross_validation
from protonet.fit.diagnostics import measure_permutation_importance
from tests.commands.cases import Run, fit_model
from tests.strategies import blobs
from tests.strategies import write_columns as write

WORDS = {"ant": "small black worker", "bee": "yellow wild flyer", "cat": "soft furry sleeper"}


def make_informative(seed: int, n: int = 48) -> dict[str, Any]:
    """Make a table of two classes that only the second column determines."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(n) % 2
    x = rng.normal(size=(n, 4))
    x[:, 1] += 2.5 * y
    return {**{f"x{at}": column.tolist() for at, column in enumerate(x.T)}, "kind": [("ant", "bee")[at] for at in y]}


def mixed(seed: int, n: int = 42) -> dict[str, Any]:
    """Make a table of three classes that words, and partly colours, determine; its numeric column is noise."""
    rng = np.random.default_rng(seed)
    kinds = [("ant", "bee", "cat")[at] for at in rng.permutation(n) % 3]
    colours = [("red", "blue", "grey")[("ant", "bee", "cat").index(kind)] for kind in kinds]
    spoken = ["red" if rng.random() < 0.4 else colour for colour in colours]
    notes = [" ".join(rng.permutation(WORDS[kind].split())[:2]) + f" {rng.integers(10)}" for kind in kinds]
    sizes = [f"{value:.3f}" if rng.random() < 0.8 else "" for value in rng.normal(size=n)]
    return {"colour": spoken, "note": notes, "size": sizes, "kind": kinds}


@pytest.fixture(scope="module")
def numeric(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fit_model(write(tmp_path_factory.mktemp("numbers") / "train.csv", make_informative(0))))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> str:
    options = ["--column-type", "colour=category", "note=text", "size=number"]
    return str(fit_model(write(tmp_path_factory.mktemp("kinds") / "train.csv", mixed(0)), *options))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 40 columns without names and without held-out rows."""
    path = tmp_path_factory.mktemp("bare") / "m.safetensors"
    network = solve([blobs(0, classes=3, rows=3, dim=40)])
    save_model(path, Model(network=network, classes=(5, 6, 7)))
    return str(path)


def unpacked(path: str) -> CrossValidation:
    model = load_model(path, for_update=True)
    return restore_cross_validation(model.network, model.folds, model.update_state)


def test_permutation_importance_is_that_of_a_slow_loop(numeric: str) -> None:
    cv = unpacked(numeric)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randint(1, 5, (len(cv.labels),), generator=generator).double()
    cv = replace(cv, weights=weights)
    n = len(cv.labels)
    orders = torch.stack([torch.randperm(n, generator=generator) for _ in range(3)])
    result = measure_permutation_importance(cv, [1, 2, 1], orders)
    y, w = cv.labels.numpy(), cv.weights.numpy()

    def judge(x: Tensor) -> tuple[list[float], np.ndarray]:
        """Compute the log-loss and the error rate, and both for each row (n, 2)."""
        p = predict_held_out(replace(cv, features=x)).double().softmax(dim=1).numpy()
        wrong = p.argmax(axis=1) != y
        rates = [log_loss(y, p, sample_weight=w), 1 - accuracy_score(y, p.argmax(axis=1), sample_weight=w)]
        return rates, np.stack([-np.log(p[np.arange(n), y]), wrong], axis=1)

    rates, rows = judge(cv.features)
    for features, item in zip(([0], [1, 2], [3]), result, strict=True):
        means, influence = np.zeros(2), np.zeros((n, 2))
        for order in orders:
            x = cv.features.clone()
            for at in features:
                x[:, at] = cv.features[order, at]
            shuffled, cost = judge(x)
            means += (np.array(shuffled) - rates) / len(orders)
            cost = w[:, None] * (cost - rows) / (w.mean() * len(orders))
            influence += cost
            influence[order.numpy()] += cost  # whose cell it is
        influence -= means * (1 + w / w.mean())[:, None]
        quantile = student.ppf(0.975, w.sum() ** 2 / (w**2).sum() - 1)
        half = quantile * np.sqrt(cv.evaluation_sample.variance_factor * (influence**2).sum(axis=0) / n / (n - 1))
        assert [item.log_loss_rise, item.accuracy_fall] == pytest.approx(means.tolist(), abs=1e-6)
        assert item.log_loss_interval == pytest.approx((means[0] - half[0], means[0] + half[0]), abs=1e-4)
        assert item.accuracy_interval == pytest.approx((means[1] - half[1], means[1] + half[1]), abs=1e-4)


def test_held_out_rows_rank_the_important_column_first(numeric: str, tmp_path: Path, run: Run) -> None:
    result, output = run.read_json("explain", numeric)
    first, *remaining = result["columns"]
    assert (first["name"], first["index"]) == ("x1", 1)
    assert first["log_loss_interval"][0] > 0 < first["accuracy_interval"][0]
    for column in remaining:
        for name in ("log_loss_interval", "accuracy_interval"):
            assert column[name][0] - 0.01 <= 0 <= column[name][1] + 0.01  # an interval misses 0 once in twenty times
            assert column[name][1] < first[name][0]
    assert [result[name] for name in ("table", "rows", "total_rows", "seed", "shuffles")] == [None, 48, 48, 0, 10]
    right = f"accuracy {100 * result['accuracy']:.2f} %, log-loss {result['log_loss']:.3f}"
    assert output.startswith(f"48 rows held out in fit: {right}\n")
    low, high = first["log_loss_interval"]
    line = f"| x1     | {first['log_loss_rise']:+.3f}            | [{low:+.3f}, {high:+.3f}] |"
    assert output.splitlines()[5].startswith(line)
    table = write(tmp_path / "fresh.csv", make_informative(1, 12))
    fresh = [run("explain", numeric, table, "--seed", seed) for seed in ("0", "0", "1")]
    assert fresh[0] == fresh[1] != fresh[2]


def test_rows_that_do_not_exist(numeric: str, bare: str, tmp_path: Path, run: Run) -> None:
    table = Path(write(tmp_path / "t.csv", make_informative(1, 12)))
    lines = table.read_text(encoding="utf-8").splitlines()
    table.write_text("\n".join([*lines[:4], "", *lines[4:], ""]), encoding="utf-8")
    for row, got in ((5, "line 5, where no row begins"), (1, "1, and the rows are from line 2 to line 14")):
        error = run("explain", numeric, table, "--rows", str(row), code=2)
        assert f"`--rows` must be rows of the table; got {got}. Count " in error
        assert "of a text file" in error
    np.savez(tmp_path / "t.npz", x=blobs(0, classes=3, rows=5, dim=40)[0].numpy())
    error = run("explain", bare, tmp_path / "t.npz", "--rows", "15", code=2)
    assert error.endswith("from row 0 (counted from 0) to row 14 (counted from 0). Count the rows from 0.\n")


def test_many_columns_without_names_drawn(bare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(diagnostics, "MAX_SHUFFLED_PREDICTIONS", 40 * 12)
    monkeypatch.setattr(diagnostics, "MIN_IMPORTANCE_ROWS", 10)
    x, y = blobs(0, classes=3, rows=5, dim=40)
    np.savez(tmp_path / "t.npz", x=x.numpy(), y=y.numpy() + 5)
    result, output = run.read_json("explain", bare, str(tmp_path / "t.npz"))
    assert [result[name] for name in ("rows", "total_rows", "shuffles")] == [12, 15, 1]
    assert output.startswith("12 rows of t.npz, a random sample of 15: ")
    assert output.endswith("30 of 40 columns shown, the largest first; --json writes all\n")
    rises = [column["log_loss_rise"] for column in result["columns"]]
    assert rises == sorted(rises, reverse=True)
    assert {column["name"] for column in result["columns"]} == {f"column {index}" for index in range(40)}
    shown = [line for line in output.splitlines() if line.startswith("| column ")][1:]
    assert len(shown) == MAX_LISTED_COLUMNS
    assert shown[0].startswith(f"| {result['columns'][0]['name']} ")


def test_row_explanations_equal_a_slow_computation(kinds: str, tmp_path: Path, run: Run) -> None:
    fresh = mixed(1)
    moved, _ = run.read_json("explain", kinds, write(tmp_path / "fresh.csv", fresh))
    assert moved["columns"][0]["name"] == "note"  # whose features move together
    table = write(tmp_path / "t.csv", {name: cells for name, cells in fresh.items() if name != "kind"})
    actual, output = run.read_json("explain", kinds, table, "--rows", "9,2,9", "--seed", "3")
    model, held_out = load_model(kinds), unpacked(kinds)
    encoding = model.encoding
    assert encoding is not None
    assert [item["location"] for item in actual["rows"]] == ["line 9", "line 2"]
    drawn = torch.randperm(len(held_out.labels), generator=torch.Generator().manual_seed(3))[:50]
    assert actual["sample"] == len(drawn)
    ends = np.cumsum([0, *encoding.n_features_per_column])
    for result in actual["rows"]:
        cells = [np.array([fresh[name][result["row"] - 2]], dtype=object) for name in ("colour", "note", "size")]
        x = torch.from_numpy(encoding.encode(cells))
        log_p = model.network(x).double().log_softmax(dim=1)[0]
        label = int(log_p.argmax())
        first, second = result["classes"]
        assert first == {"name": model.classes[label], "probability": pytest.approx(float(log_p.max().exp()), rel=1e-4)}
        assert second["probability"] == pytest.approx(float(log_p.sort().values[-2].exp()), rel=1e-4)
        cosines = cosine_similarity(model.network.embed(x), model.network.embed(held_out.features))
        nearest = cosines.sort(descending=True).values[:3].tolist()
        assert [item["cosine"] for item in result["neighbors"]] == pytest.approx(nearest, abs=1e-5)
        for item in result["neighbors"]:
            assert item["cosine"] == pytest.approx(float(cosines[item["index"]]), abs=1e-5)
            assert item["class"] == model.classes[int(held_out.labels[item["index"]])]
            trained = int(item["location"].removeprefix("line ")) - 2
            cells = [np.array([mixed(0)[name][trained]], dtype=object) for name in ("colour", "note", "size")]
            assert encoding.encode(cells)[0] == pytest.approx(held_out.features[item["index"]].numpy())
        for column in result["columns"]:
            at = column["index"]
            other = x.repeat(len(drawn), 1)
            other[:, ends[at] : ends[at + 1]] = held_out.features[drawn, ends[at] : ends[at + 1]]
            mean = torch.stack([model.network(row[None]).double().log_softmax(dim=1)[0, label] for row in other])
            weights = held_out.weights[drawn]
            expected = float(log_p[label] - (weights * mean).sum() / weights.sum())
            assert column["contribution"] == pytest.approx(expected, abs=1e-5)
            assert column["cell"] == fresh[column["name"]][result["row"] - 2]
        supports = [abs(column["contribution"]) for column in result["columns"]]
        assert supports == sorted(supports, reverse=True)
        fraction = f"{100 * first['probability']:.2f} %"
        assert f"line {result['row']}: {first['name']} {fraction}, then {second['name']} " in output
        nearest = result["neighbors"][0]
        assert f"nearest rows of fit (class, cosine): {nearest['location']} ({first['name']}, " in output
    assert re.search(r"^  [+-][\d.e-]+ +note = ", output, re.MULTILINE)


def test_a_model_without_held_out_rows_is_an_error(bare: str, tmp_path: Path, run: Run) -> None:
    np.save(tmp_path / "t.npy", blobs(0, classes=3, rows=2, dim=40)[0].numpy())
    result, output = run.read_json("explain", bare, str(tmp_path / "t.npy"), "--rows", "1")
    assert [result["rows"][0][name] for name in ("row", "neighbors", "columns")] == [1, None, None]
    first, last = output.splitlines()
    assert first.startswith("row 1 (counted from 0): ")
    assert last.startswith("the model has no held-out rows of fit")


def test_errors(numeric: str, bare: str, tmp_path: Path, run: Run) -> None:
    table, output = write(tmp_path / "t.csv", make_informative(1)), tmp_path / "t.json"
    unknown = write(tmp_path / "s.csv", {**make_informative(1), "kind": ["elk"] * 48})
    without = write(tmp_path / "n.csv", {"x0": [1.0], "x1": [2.0]})
    far = write(tmp_path / "f.csv", {**make_informative(1), "x0": [3e38] * 48, "x1": [-3e38] * 48})
    for arguments, message in (
        ([numeric, table, "--rows", "3,50"], "`--rows` must be rows of the table; got 50, and the rows are from "),
        ([numeric, table, "--rows", "1,x"], "`--rows` must be a whole number >= 0; got 'x'. "),
        ([numeric, "--rows", "1"], "`arguments` must name a table for --rows, --label and --labels-file; got none. "),
        ([numeric, without], "`table` must have the column of the labels, kind; got "),
        ([numeric, without, "--label", "x"], "`--label` must name a column of the table; got x, and "),
        ([numeric, unknown], "`table` must have classes that the model knows; got 'elk'. "),
        ([numeric, far], "`table` must have numbers of the scale of the training data; got 3e+38 as the largest "),
        ([bare], "`model` must have held-out rows, if no table is given; got none. Pass a labelled table"),
        ([numeric, "--seed", "9" * 30], "`--seed` must be a whole number in [0, 9223372036854775807]; got "),
    ):
        error = run("explain", *arguments, "--json", output, code=2)
        assert error.startswith(f"protonet explain: {message}"), error
        assert ("--rows" in error) == ("--rows" in arguments or arguments == [numeric, without]), error
    assert not output.exists()
