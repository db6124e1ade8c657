"""The commands for people with a file: what they print and write, and the one line for everything that goes wrong."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protonet import PrototypeNetwork, solve
from protonet.__main__ import COMMANDS, main
from protonet.commands import fit as fit_command
from protonet.commands.summary import format_losses, format_pairs
from protonet.commands.update import compare
from protonet.files import load_model
from protonet.fit.crossfit import crossfit, measure_held
from protonet.fit.solver import solve_problem
from protonet.metrics import find_threshold, score_known
from protonet.tables import formats
from protonet.ui.text import count, format_csv
from tests.strategies import blobs

NAMES = ("ant", "bee, wild", "cat")
COLUMNS = ("w", "x", "y", "z")
FAST = ("--effort", "fast")


def write_table(path: Path, x: Tensor, labels: Sequence[str] | None, columns: Sequence[str] = COLUMNS) -> str:
    order = [COLUMNS.index(name) for name in columns]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *(["kind"] if labels else [])])
        for number, row in enumerate(x[:, order].tolist()):
            writer.writerow([*row, *([labels[number]] if labels else [])])
    return str(path)


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    return blobs(0, classes=3, rows=10, dim=4, noise=1.5)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, data: tuple[Tensor, Tensor]) -> Path:
    """A folder with a table and the model that fit makes of it."""
    folder = tmp_path_factory.mktemp("fitted")
    x, y = data
    table = write_table(folder / "train.csv", x, [NAMES[number] for number in y.tolist()])
    assert main(["fit", table, "--label", "kind", "-o", str(folder / "model.safetensors"), *FAST]) == 0
    return folder


def network_of(data: tuple[Tensor, Tensor]) -> PrototypeNetwork:
    return solve([data], effort="fast")


def read_csv(text: str) -> list[list[str]]:
    return list(csv.reader(text.splitlines()))


class TestFit:
    def test_summary_and_model(
        self, tmp_path: Path, data: tuple[Tensor, Tensor], fitted: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        output = tmp_path / "new" / "model.safetensors"
        arguments = ["fit", str(fitted / "train.csv"), "--label", "kind", *FAST, "-o", str(output)]
        assert main([*arguments, "--details"]) == 0
        said = capsys.readouterr().out
        crossed = crossfit(solve_problem([data], effort="fast"))
        metrics = measure_held(crossed)
        assert said.startswith("train.csv: 3 classes, 30 samples, 4 features, 10 per class\n")
        assert f"| this model          | {100 * metrics.accuracy:.2f}    | [" in said
        assert "| raw cosine " in said
        assert "| LDA " in said
        assert format_losses(metrics._asdict()) in said
        weights = [float(line.split("|")[2]) for line in said.split("\n\n")[1].splitlines()[2:]]
        assert sum(weights) == pytest.approx(100, abs=0.05 * len(weights))
        assert weights == sorted(weights, reverse=True)
        model = load_model(output)
        assert (model.classes, model.columns, model.metadata["samples"]) == (NAMES, COLUMNS, [10, 10, 10])
        assert torch.equal(model.network(data[0]), network_of(data)(data[0]))
        assert model.metadata["held_out"]["accuracy"] == metrics.accuracy
        assert output.read_bytes() == (fitted / "model.safetensors").read_bytes()

    def test_arrays_and_a_figure(
        self, tmp_path: Path, data: tuple[Tensor, Tensor], capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("matplotlib")
        np.savez(tmp_path / "train.npz", x=data[0], y=3 * data[1] + 1)
        plot, output = tmp_path / "figure.png", tmp_path / "model.safetensors"
        arguments = ["fit", str(tmp_path / "train.npz"), *FAST, "-o", str(output), "--plot", str(plot)]
        assert main(arguments) == 0
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert (load_model(output).classes, load_model(output).columns) == ((1, 4, 7), None)
        np.save(tmp_path / "x.npy", data[0])
        np.save(tmp_path / "y.npy", 3 * data[1] + 1)
        capsys.readouterr()
        assert main(["evaluate", str(output), str(tmp_path / "x.npy"), "--labels", str(tmp_path / "y.npy")]) == 0
        accuracy = (network_of(data)(data[0]).argmax(dim=1) == data[1]).double().mean()
        assert capsys.readouterr().out.startswith(f"x.npy: {100 * accuracy:.2f} % of 30 rows right, 95 % interval [")

    def test_one_sample_a_class(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        table = write_table(tmp_path / "a.csv", torch.eye(4)[:3], NAMES)
        output = str(tmp_path / "m.safetensors")
        plot = ["--plot", str(tmp_path / "a.svg")]
        assert main(["fit", table, "--label", "kind", *FAST, "-o", output, *plot]) == 0
        assert "no class has two samples, copies aside: none could be held out to judge by" in capsys.readouterr().out
        assert main(["predict", output, table]) == 0
        assert [row[0] for row in read_csv(capsys.readouterr().out)] == ["class", *NAMES]
        assert main(["predict", output, table, "--unknown", "0.1"]) == 2
        assert capsys.readouterr().err.startswith("protonet predict: `--unknown` must come with a model that was cross")
        assert main(["update", output, table, "--in-place"]) == 0
        assert "no row was held out in fit: what the old classes lose is not known" in capsys.readouterr().out

    def test_time_limit(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        x, y = blobs(0, classes=6, rows=60, dim=20, noise=2.0)
        np.savez(tmp_path / "t.npz", x=x, y=y)
        path = tmp_path / "m.safetensors"
        options = ["--effort", "best", "--time-limit", "1e-9", "-q", "-o", str(path)]
        assert main(["fit", str(tmp_path / "t.npz"), *options]) == 0
        said, metadata = capsys.readouterr().out, load_model(path).metadata
        assert (metadata["time_limit"], metadata["held_out"]["rows"], len(metadata["views"])) == (1e-9, 360, 1)
        assert "the time was over before the last fold: the model may do better than its folds\n" in said

    def test_ctrl_c_before_anything_is_chosen_changes_nothing(
        self, tmp_path: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(fit_command, "solve_problem", interrupt)
        output = tmp_path / "model.safetensors"
        output.write_text("old")
        arguments = ["fit", str(fitted / "train.csv"), "--label", "kind", *FAST, "--quiet"]
        for more in ([], ["-o", str(output)]):
            assert main([*arguments, *more]) == 130
            assert capsys.readouterr().err == "protonet fit: interrupted\n"
        assert list(tmp_path.iterdir()) == [output]
        assert output.read_text() == "old"


class TestPredict:
    @pytest.mark.parametrize("cells", [8, 2**20])
    def test_classes_and_probabilities(
        self,
        cells: int,
        tmp_path: Path,
        data: tuple[Tensor, Tensor],
        fitted: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(formats, "CELLS", cells)
        table = write_table(tmp_path / "new.csv", data[0], None, ("z", "x", "w", "y"))
        model = str(fitted / "model.safetensors")
        assert main(["predict", model, table, "--proba"]) == 0
        said = capsys.readouterr().out
        assert main(["predict", model, table, "--probabilities", "-q"]) == 0  # as it was called at first
        assert capsys.readouterr().out == said
        header, *rows = read_csv(said)
        assert header == ["class", "probability", *(f"P({name})" for name in NAMES)]
        expected = network_of(data)(data[0]).softmax(dim=1)
        assert [row[0] for row in rows] == [NAMES[place] for place in expected.argmax(dim=1).tolist()]
        given = torch.tensor([[float(cell) for cell in row[1:]] for row in rows])
        torch.testing.assert_close(given[:, 1:], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(given[:, 0], given[:, 1:].amax(dim=1))
        output = tmp_path / "out.csv"
        assert main(["predict", model, table, "-o", str(output)]) == 0
        assert read_csv(output.read_text()) == [row[:2] for row in [header, *rows]]
        assert main(["predict", model, table, "--row-numbers"]) == 0
        numbers = ["row", *map(str, range(len(rows)))]
        expected_rows = [[number, *row[:2]] for number, row in zip(numbers, [header, *rows], strict=True)]
        assert read_csv(capsys.readouterr().out) == expected_rows

    def test_unknown(self, data: tuple[Tensor, Tensor], fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model = load_model(fitted / "model.safetensors")
        scores = torch.tensor(model.metadata["scores"], dtype=torch.float64)
        expected = score_known(model.network(data[0])) <= find_threshold(scores, 0.5)
        assert main(["predict", str(fitted / "model.safetensors"), str(fitted / "train.csv"), "--unknown", "0.5"]) == 0
        rows = read_csv(capsys.readouterr().out)[1:]
        assert [row[0] == "unknown" for row in rows] == expected.tolist()
        assert [row[1] == "" for row in rows] == expected.tolist()
        assert bool(expected.any())

    @pytest.mark.parametrize("rate", ["0", "1", "-0.1", "nan", "x", "0.001"])
    def test_no_such_rate(self, rate: str, fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["predict", str(fitted / "model.safetensors"), str(fitted / "train.csv"), f"--unknown={rate}"]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert "`--unknown` must be a number" in error or "protonet predict: `--unknown` must be" in error

    def test_all_rows_or_none(
        self, tmp_path: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(formats, "CELLS", 8)
        table, output = tmp_path / "new.csv", tmp_path / "out.csv"
        table.write_text("w,x,y,z\n" + 100 * "1,2,3,4\n" + "1,2,3,inf\n")
        output.write_text("old")
        for more in ([], ["-o", str(output)]):
            assert main(["predict", str(fitted / "model.safetensors"), str(table), *more]) == 2
            said = capsys.readouterr()
            assert said.out == ""
            assert said.err.endswith("have finite numbers; got 'inf' in z, line 102. Fill it in, or leave it out.\n")
        assert output.read_text() == "old"
        assert sorted(tmp_path.iterdir()) == [table, output]


class TestUpdate:
    def test_new_samples_and_classes(
        self, tmp_path: Path, data: tuple[Tensor, Tensor], fitted: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        more = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)) - 6
        table = write_table(tmp_path / "more.csv", more, ["dog"] * 5)
        path = tmp_path / "model.safetensors"
        shutil.copy(fitted / "model.safetensors", path)
        assert main(["update", str(path), table, "--in-place"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"{path}: 5 samples more, 1 new class: dog\nof 30 rows held out: right ")
        model = load_model(path)
        assert (model.classes, model.metadata["samples"]) == ((*NAMES, "dog"), [10, 10, 10, 5])
        network = network_of(data)
        network.add_class(more)
        torch.testing.assert_close(model.network(data[0]), network(data[0]), rtol=1e-4, atol=1e-4)
        again = tmp_path / "again.safetensors"
        assert main(["update", str(path), str(fitted / "train.csv"), "-o", str(again)]) == 0
        assert load_model(again).metadata["samples"] == [20, 20, 20, 5]
        assert load_model(path).metadata["samples"] == [10, 10, 10, 5]

    def test_another_spelling_is_a_class_of_its_own_where_it_is_meant(self, tmp_path: Path, fitted: Path) -> None:
        table = write_table(tmp_path / "more.csv", torch.eye(4), ["ANT", "ant", "CAT", "dog"])
        model, output = str(fitted / "model.safetensors"), tmp_path / "new.safetensors"
        assert main(["update", model, table, "-o", str(output)]) == 2
        assert not output.exists()
        assert main(["update", model, table, "-o", str(output), "--new-classes"]) == 0
        assert load_model(output).classes == (*NAMES, "ANT", "CAT", "dog")

    def test_which_class_lost(self) -> None:
        labels = torch.tensor([0, 0, 0, 1, 1])
        before = torch.nn.functional.one_hot(labels, 2).float()
        after = torch.tensor([[1, 0, 2], [1, 0, 0], [1, 0, 2], [0, 1, 0], [0, 1, 0]]).float()
        assert compare(before, after, labels, ("a", "b", "c")) == (
            "of 5 rows held out: right 100.00 % before, 60.00 % now\n  a lost: 3 of 3 right before, 1 now\n"
        )
        assert compare(before, before, labels, ("a", "b")).endswith("100.00 % now: no class lost\n")


def test_export(tmp_path: Path, fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "model.onnx"
    assert main(["export", str(fitted / "model.safetensors"), "--onnx", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: features (n, 4) to logits and probabilities (n, 3), ")
    properties = {each.key: json.loads(each.value) for each in onnx.load(path).metadata_props}
    assert properties["classes"] == list(NAMES)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$") if arguments else contextlib.nullcontext():
        assert main(arguments) == 0
    said = capsys.readouterr().out
    assert all(f"python -m protonet {name} " in said for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("fiit", "protonet: `command` must be one of fit, .*; got 'fiit'. Did you mean fit"),
        ("fit", "protonet fit: `arguments` must be as --help lists them; got .*required: table"),
        ("fit T --effort slow", "protonet fit: `--effort` must be one of .*; got 'slow'"),
        ("fit T --seed -1", "protonet fit: `--seed` must be a whole number >= 0"),
        ("fit T --time-limit 0", "protonet fit: `--time-limit` must be a finite number > 0; got '0'"),
        (
            "fit T",
            "protonet fit: `table` must have a column label; got .*train.csv with w, x, y, z, kind. Pass --label",
        ),
        (
            "fit T --label x",
            "protonet fit: `--label` must name a column of classes; got 30 classes in x, 1 row per class. .*--one-shot",
        ),
        ("fit one.csv --label kind", "protonet fit: `table` must have at least 2 classes; got ant alone in kind"),
        ("fit none.csv -o m.pt", r"protonet fit: `--output` must end in \.safetensors; got m\.pt"),
        ("fit none.csv -o T/m.safetensors", "protonet fit: `--output` must be a file that can be written"),
        ("fit none.csv --plot a.txt", r"protonet fit: `--plot` must end in \.png, \.pdf, \.svg"),
        ("fit M.npz -o M", "protonet fit: `table` must be a file that exists"),
        (
            "predict T T",
            "protonet predict: `model` must be a model, which comes before a table; got the table .*train.csv",
        ),
        ("predict M other.csv", "protonet predict: `table` must have the model's columns; got .*other.csv without z"),
        ("predict M two.npy", "protonet predict: `table` must have 4 features per row; got 2 in two.npy"),
        (
            "predict M far.csv",
            "protonet predict: `table` must hold numbers of the size that .*; got 3e.38 as the largest",
        ),
        ("predict M T -o T", "protonet predict: `--output` must be another file than what is read; got .*train.csv"),
        (
            "evaluate M strange.csv",
            "protonet evaluate: `table` must hold a class that the model knows; got 'elk' alone. Name",
        ),
        ("evaluate M T --label z", "protonet evaluate: `table` must have the model's columns; got .* without z"),
        (
            "update M far.csv --in-place",
            "protonet update: `table` must hold numbers of the size that .* got 3e.38 as the largest",
        ),
        (
            "update M none.csv",
            "protonet update: `arguments` must say where the new model goes; got neither .*--in-place",
        ),
        ("update M T -o a.safetensors --in-place", "protonet update: `arguments` must be .* not allowed with"),
        (
            "update M spelled.csv --in-place",
            "protonet update: `table` must spell known .*; got 'ANT' for 'ant'.* --new-c",
        ),
        ("update M none.csv -o none.csv", r"protonet update: `--output` must end in \.safetensors"),
        ("export M --onnx M", r"protonet export: `--onnx` must end in \.onnx"),
    ],
)
def test_errors_are_one_line_and_change_nothing(
    arguments: str,
    line: str,
    tmp_path: Path,
    fitted: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.csv").write_text("a,kind\n1,ant\n2,ant\n")
    Path("other.csv").write_text("w,x,y\n1,2,3\n")
    Path("strange.csv").write_text("w,x,y,z,kind\n1,2,3,4,elk\n")
    Path("spelled.csv").write_text("w,x,y,z,kind\n1,2,3,4,dog\n1,2,3,4,ANT\n")
    Path("far.csv").write_text("w,x,y,z,kind\n1,2,3,4,ant\n-3e38,1,2,1e38,ant\n")
    np.save("two.npy", np.ones((3, 2)))
    before = {path: path.read_bytes() for folder in (tmp_path, fitted) for path in folder.iterdir()}
    short = {"T": "train.csv", "M": "model.safetensors"}
    full = [
        str(fitted / short[each]) if each in short else each.replace("T/", f"{fitted}/train.csv/")
        for each in arguments.split()
    ]
    assert main(full) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert re.match(line, said.err), said.err
    assert before == {path: path.read_bytes() for folder in (tmp_path, fitted) for path in folder.iterdir()}


def test_words() -> None:
    assert [count(n, "class") for n in (1, 2000)] == ["1 class", "2,000 classes"]
    confusion = torch.tensor([[8, 2, 0], [0, 5, 0], [1, 0, 3]])
    assert (
        format_pairs(confusion, NAMES)
        == "most confused:\n  ant taken for bee, wild: 2 of 10\n  cat taken for ant: 1 of 4\n"
    )
    assert format_pairs(torch.eye(3), NAMES) == "no class is taken for another\n"
    assert format_csv([["a", 'b"', "c,d", "-3.5", "-a"]]) == 'a,"b""","c,d",-3.5,\'-a\n'


def test_a_bug_in_a_command_exits_with_1(
    tmp_path: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("deep down")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fit_command, "solve_problem", fail)
    output = tmp_path / "model.safetensors"
    assert main(["fit", str(fitted / "train.csv"), "--label", "kind", *FAST, "-o", str(output)]) == 1
    (path,) = tmp_path.iterdir()
    error = capsys.readouterr().err
    assert error.startswith("protonet fit: this is a bug of protonet, not your mistake (ValueError). ")
    assert str(path) in error
    assert len(error.splitlines()) == 1
    assert "deep down" in path.read_text()
