"""The output, the files and the error messages of commands on tables of numbers."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protonet import PrototypeNetwork, pipeline, solve
from protonet.commands.update import format_accuracy_change
from protonet.errors import InputError
from protonet.files import load_model
from protonet.fit.cross_validation import cross_validate, measure_cross_validation
from protonet.fit.solver import fit_solution
from protonet.metrics import rejection_threshold, score_known_class
from protonet.report import format_confusions
from protonet.tables.formats import source as table_source
from protonet.ui.text import format_probability_metrics
from tests.commands.cases import FAST, Run, fit_model, read_lines
from tests.strategies import blobs, write_columns

NAMES = ("ant", "bee, wild", "cat")
COLUMNS = ("w", "x", "y", "z")
X, Y = blobs(0, classes=3, rows=10, dim=4, noise=1.5)


def write_table(path: Path, x: Tensor, labels: Sequence[str] | None, columns: Sequence[str] = COLUMNS) -> str:
    cells = {name: x[:, COLUMNS.index(name)].tolist() for name in columns}
    return write_columns(path, cells | ({"kind": labels} if labels else {}))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table and the model that fit makes of it."""
    folder = tmp_path_factory.mktemp("fitted")
    fit_model(write_table(folder / "train.csv", X, [NAMES[index] for index in Y.tolist()]))
    return folder


@pytest.fixture(scope="module")
def network() -> PrototypeNetwork:
    return solve([(X, Y)])


class TestFit:
    def test_summary_and_model(self, tmp_path: Path, fitted: Path, network: PrototypeNetwork, run: Run) -> None:
        output = tmp_path / "new" / "model.safetensors"
        printed = run("fit", fitted / "train.csv", *FAST, "-o", output, "--verbose")
        metrics = measure_cross_validation(cross_validate(fit_solution([(X, Y)])))
        assert printed.startswith("train.csv: 3 classes, 30 samples, 4 features, 10 per class\n")
        assert f"| this model          | {100 * metrics.accuracy:.2f} " in printed
        assert "| raw cosine " in printed
        assert "| LDA " in printed
        assert format_probability_metrics(vars(metrics)) in printed
        cells = [line.split("|")[2].strip() for line in printed.split("\n\n")[1].splitlines()[2:]]
        weights = [float(cell) for cell in cells if cell != "none"]
        assert cells[len(weights) :] == ["none"] * (len(cells) - len(weights))  # candidates without weight come last
        assert sum(weights) == pytest.approx(100, abs=0.05 * len(weights))
        assert weights == sorted(weights, reverse=True)
        model = load_model(output)
        assert (model.classes, model.columns, model.metadata.sample_counts) == (NAMES, COLUMNS, (10, 10, 10))
        assert torch.equal(model.network(X), network(X))
        assert (model.metadata.cross_validation or {})["accuracy"] == metrics.accuracy
        assert output.read_bytes() == (fitted / "model.safetensors").read_bytes()

    def test_arrays(self, tmp_path: Path, network: PrototypeNetwork, run: Run) -> None:
        np.savez(tmp_path / "train.npz", x=X, y=3 * Y + 1)
        output = tmp_path / "model.safetensors"
        run("fit", tmp_path / "train.npz", *FAST[2:], "-o", output)
        assert (load_model(output).classes, load_model(output).columns) == ((1, 4, 7), None)
        np.save(tmp_path / "x.npy", X)
        np.save(tmp_path / "y.npy", 3 * Y + 1)
        accuracy = (network(X).argmax(dim=1) == Y).double().mean()
        printed = run("evaluate", output, tmp_path / "x.npy", "--labels-file", tmp_path / "y.npy")
        assert printed.startswith(f"x.npy: accuracy {100 * accuracy:.2f} % on 30 rows, 95 % interval [")

    def test_time_limit(self, tmp_path: Path, run: Run) -> None:
        x, y = blobs(0, classes=4, rows=20, dim=8, noise=2.0)
        np.savez(tmp_path / "t.npz", x=x, y=y)
        path = tmp_path / "m.safetensors"
        output = run("fit", tmp_path / "t.npz", "--time-limit", "1e-9", "-o", path)
        metadata = load_model(path).metadata
        assert (metadata.time_limit, (metadata.cross_validation or {})["rows"], len(metadata.view_influences)) == (
            1e-9,
            80,
            1,
        )
        assert "time limit reached during cross-validation: " in output

    def test_ctrl_c_before_model_selection_writes_nothing(
        self, tmp_path: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch, run: Run
    ) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(pipeline, "fit_solution", interrupt)
        output = tmp_path / "model.safetensors"
        output.write_text("old")
        for more in ([], ["-o", output]):
            run("fit", fitted / "train.csv", *FAST, *more, code=130)
            assert run.notes == "protonet fit: interrupted\n"
        assert list(tmp_path.iterdir()) == [output]
        assert output.read_text() == "old"


class TestPredict:
    def test_classes_and_probabilities(
        self, tmp_path: Path, fitted: Path, network: PrototypeNetwork, monkeypatch: pytest.MonkeyPatch, run: Run
    ) -> None:
        monkeypatch.setattr(table_source, "CELLS_PER_CHUNK", 8)  # several blocks
        predict = ["predict", fitted / "model.safetensors", write_table(tmp_path / "new.csv", X, None, "zxwy")]
        header, *rows = read_lines(run(*predict, "--proba"))
        assert header == ["class", "probability", *(f"P({name})" for name in NAMES)]
        expected = network(X).softmax(dim=1)
        assert [row[0] for row in rows] == [NAMES[position] for position in expected.argmax(dim=1).tolist()]
        given = torch.tensor([[float(cell) for cell in row[1:]] for row in rows])
        torch.testing.assert_close(given[:, 1:], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(given[:, 0], given[:, 1:].amax(dim=1))
        output = tmp_path / "out.csv"
        run(*predict, "-o", output)
        short = [row[:2] for row in [header, *rows]]
        assert read_lines(output.read_text()) == short
        numbered = [[str(index), *row] for index, row in zip(["row", *range(2, len(rows) + 2)], short, strict=True)]
        assert read_lines(run(*predict, "--row-numbers")) == numbered

    def test_unknown(self, fitted: Path, run: Run) -> None:
        path, table = fitted / "model.safetensors", fitted / "train.csv"
        model = load_model(path)
        scores = torch.tensor(model.metadata.known_scores, dtype=torch.float64)
        expected = score_known_class(model.network(X)) <= rejection_threshold(scores, 0.5)
        rows = run.read_rows("predict", path, table, "--unknown", "0.5")
        assert [row["class"] == "unknown" for row in rows] == expected.tolist()
        assert [row["probability"] == "" for row in rows] == expected.tolist()
        assert bool(expected.any())
        for rate in ("0", "1", "-0.1", "nan", "x", "0.001"):
            assert "`--unknown` must be " in run("predict", path, table, f"--unknown={rate}", code=2)

    def test_bad_rows_give_nothing(
        self, tmp_path: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch, run: Run
    ) -> None:
        monkeypatch.setattr(table_source, "CELLS_PER_CHUNK", 8)
        table, output = tmp_path / "new.csv", tmp_path / "out.csv"
        table.write_text("w,x,y,z\n" + 100 * "1,2,3,4\n" + "1,2,3,inf\n")
        output.write_text("old")
        for more in ([], ["-o", output]):
            error = run("predict", fitted / "model.safetensors", table, *more, code=2)
            assert error.endswith("have finite numbers; got 'inf' in z, line 102. Fill it in, or leave it out.\n")
        assert output.read_text() == "old"
        assert sorted(tmp_path.iterdir()) == [table, output]


class TestUpdate:
    def test_new_samples_and_classes(self, tmp_path: Path, fitted: Path, network: PrototypeNetwork, run: Run) -> None:
        more = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)) - 6
        table = write_table(tmp_path / "more.csv", more, ["dog"] * 5)
        path, again = tmp_path / "model.safetensors", tmp_path / "again.safetensors"
        shutil.copy(fitted / "model.safetensors", path)
        output = run("update", path, table, "--in-place")
        assert output.startswith(f"{path}: 5 samples added, 1 new class: dog\naccuracy on 30 held-out rows: ")
        model, expected = load_model(path), copy.deepcopy(network)
        assert (model.classes, model.metadata.sample_counts) == ((*NAMES, "dog"), (10, 10, 10, 5))
        expected.add_class(more)
        torch.testing.assert_close(model.network(X), expected(X), rtol=1e-4, atol=1e-4)
        run("update", path, fitted / "train.csv", "-o", again)
        assert run.count_samples(again) == [20, 20, 20, 5]
        assert run.count_samples(path) == [10, 10, 10, 5]

    def test_another_spelling_is_another_class_on_request(self, tmp_path: Path, fitted: Path, run: Run) -> None:
        table = write_table(tmp_path / "more.csv", torch.eye(4), ["ANT", "ant", "CAT", "dog"])
        update = ["update", fitted / "model.safetensors", table, "-o", tmp_path / "new.safetensors"]
        run(*update, code=2)
        assert not (tmp_path / "new.safetensors").exists()
        run(*update, "--new-classes")
        assert load_model(tmp_path / "new.safetensors").classes == (*NAMES, "ANT", "CAT", "dog")

    def test_update_names_the_class_with_the_lowest_recall(self) -> None:
        labels = torch.tensor([0, 0, 0, 1, 1])
        before = torch.nn.functional.one_hot(labels, 2).float()
        after = torch.tensor([[1, 0, 2], [1, 0, 0], [1, 0, 2], [0, 1, 0], [0, 1, 0]]).float()
        lines = ["accuracy on 5 held-out rows: 100.00 % before, 60.00 % after", "  a: 3 of 3 correct before, 1 after"]
        assert format_accuracy_change(before, after, labels, ("a", "b", "c")).splitlines() == lines
        assert format_accuracy_change(before, before, labels, ("a", "b")).endswith("100.00 % after\n")


def test_exported_files_have_the_classes_and_compute_the_logits(tmp_path: Path, fitted: Path, run: Run) -> None:
    onnx = pytest.importorskip("onnx")
    model, graph, program = fitted / "model.safetensors", tmp_path / "m.onnx", tmp_path / "m.pt2"
    output = run("export", model, "--onnx", graph, "--pt2", program)
    assert output.startswith(f"{graph}: features (n, 4) to logits and probabilities (n, 3), ")
    assert f"{program}: features (n, 4) to logits (n, 3), " in output
    properties = {item.key: json.loads(item.value) for item in onnx.load(graph).metadata_props}
    assert properties["classes"] == list(NAMES)
    torch.testing.assert_close(torch.export.load(program).module()(X), load_model(model).network(X), rtol=0, atol=1e-5)
    assert "neither" in run("export", model, code=2)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("fit T --time-limit 0", "`--time-limit` must be a finite number > 0; got '0'"),
        ("predict M other.csv", "`table` must have the model's columns; got .*other.csv without z"),
        ("predict M two.npy", "`table` must have 4 features per row; got 2 in two.npy"),
        ("predict M far.csv", "`table` must have numbers of the scale .*; got 3e.38 as the largest"),
        ("predict M T -o T", "`--output` must be another file than the inputs; got .*train.csv"),
        ("update M none.csv", "`-o or --in-place` must name the file to write; got neither .*--in-place"),
        ("update M T -o a.safetensors --in-place", "argument .* not allowed with"),
        ("update M spelled.csv --in-place", "`table` must spell known .*; got 'ANT' for 'ant'.* --new-c"),
        ("update M other.csv --in-place", "`table` must have the column of the labels, kind; got .*other.csv with w"),
        ("evaluate M other.csv", "`table` must have the column of the labels, kind; got .*other.csv with w, x, y"),
        ("update M none.csv -o none.csv", r"`--output` must end in \.protonet, \.safetensors"),
    ],
)
def test_errors_change_nothing(
    arguments: str, line: str, tmp_path: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.csv").write_text("w,x,y\n1,2,3\n")
    Path("spelled.csv").write_text("w,x,y,z,kind\n1,2,3,4,dog\n1,2,3,4,ANT\n")
    Path("far.csv").write_text("w,x,y,z,kind\n1,2,3,4,ant\n-3e38,1,2,1e38,ant\n")
    np.save("two.npy", np.ones((3, 2)))
    before = {path: path.read_bytes() for folder in (tmp_path, fitted) for path in folder.iterdir()}
    short = {"T": fitted / "train.csv", "M": fitted / "model.safetensors"}
    error = run(*(short.get(item, item) for item in arguments.split()), code=2)
    assert re.match(rf"protonet( {arguments.split(maxsplit=1)[0]})?: {line}", error), error
    assert before == {path: path.read_bytes() for folder in (tmp_path, fitted) for path in folder.iterdir()}


def test_the_most_frequent_confusions_are_listed() -> None:
    confusion = torch.tensor([[8, 2, 0], [0, 5, 0], [1, 0, 3]])
    lines = ["most frequent confusions:", "  ant predicted as bee, wild: 2 of 10", "  cat predicted as ant: 1 of 4", ""]
    assert format_confusions(confusion, NAMES).split("\n") == lines
    assert format_confusions(torch.eye(3), NAMES) == "no confusions\n"


def test_a_useless_table_suggests_an_option_of_fit_alone(tmp_path: Path, run: Run) -> None:
    columns: dict[str, list[object]] = {"a": [*range(18)]}
    suggesting = run("suggest", write_columns(tmp_path / "u.csv", columns), code=2)
    columns["kind"] = [NAMES[row % 3] for row in range(18)]
    fitting = run("fit", write_columns(tmp_path / "t.csv", columns), *FAST, code=2)
    assert (fitting.count("--columns"), suggesting.count("--columns")) == (1, 0)
    assert fitting.endswith(" Add features.\n")
    assert suggesting.endswith(" Add features.\n")


def test_invalid_models_give_errors_of_the_command(fitted: Path, tmp_path: Path, run: Run) -> None:
    table, model, other = fitted / "train.csv", fitted / "model.safetensors", tmp_path / "other"
    other.write_text("no model")
    remaining: dict[str, list[object]] = {"explain": [], "info": [], "export": ["--onnx", tmp_path / "m.onnx"]}
    remaining |= {"predict": [table], "evaluate": [table], "suggest": [table], "update": [table, "--in-place"]}
    for command, more in remaining.items():
        error = run(command, other, *more, code=2)
        assert error.startswith(f"protonet {command}: `model` must be a ")
        assert error.endswith("Pass a file that fit wrote.\n")
        error = run(command, table, *([model] if command in {"predict", "evaluate"} else more), code=2)
        must = f"be a model file, which comes before the table; got the table {table}. Pass a file that fit wrote."
        assert error == f"protonet {command}: `model` must {must}\n"
    with pytest.raises(InputError, match=r"^.* Pass a file that save_model wrote\.$"):
        load_model(other)
    error = run("suggest", table, model, code=2)
    assert error.startswith(f"protonet suggest: `arguments` must end with a table; got the model {model}. ")
