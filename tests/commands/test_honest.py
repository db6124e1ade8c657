"""What the commands do so that no figure is fooled: copies, groups, row numbers, and a model that Ctrl-C leaves."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protonet.__main__ import main
from protonet._checks import InputError
from protonet.commands import fit as fit_command
from protonet.commands.labels import read_whole, suspect_spellings
from protonet.commands.rows import check_classes
from protonet.commands.update import extend_classes
from protonet.files import load_model
from tests.strategies import write_columns as write

RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=(40, 5))
SORTED = ["ant"] * 20 + ["bee"] * 20
FAST = ("--label", "kind", "--effort", "fast")


def noise(rows: Any = slice(None)) -> dict[str, Any]:
    return {f"x{number}": column[rows].tolist() for number, column in enumerate(NOISE.T)}


def right(said: str) -> float:
    found = re.search(r"this model +\| ([\d.]+)", said)
    assert found
    return float(found[1])


def test_copies_are_counted_and_held_out_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coins = np.where(RNG.integers(2, size=40), "ant", "bee").tolist()
    table = write(tmp_path / "t.csv", {**noise(np.arange(80) % 40), "kind": coins + coins})
    model = str(tmp_path / "m.safetensors")
    assert main(["fit", table, *FAST, "-o", model]) == 0
    said = capsys.readouterr().out
    assert "40 rows equal to others, or nearly: copies are held out together" in said
    assert "80 rows in 5 folds" in said
    assert right(said) < 75
    assert main(["update", model, table, "--in-place"]) == 0
    assert float(re.findall(r"([\d.]+) % now", capsys.readouterr().out)[0]) < 75


@pytest.mark.parametrize("name", ["row", "id"])
def test_a_row_number_is_left_out_by_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = np.arange(40) if name == "row" else np.cumsum(RNG.integers(1, 50, 40))
    table = write(tmp_path / "t.csv", {name: numbers.tolist(), **noise(), "kind": SORTED})
    model = str(tmp_path / "m.safetensors")
    assert main(["fit", table, *FAST, "-o", model]) == 0
    said = capsys.readouterr().out
    assert f"left out: {name}: whole numbers that all differ, in the order of the rows (--columns keeps it)\n" in said
    assert "5 features" in said
    assert right(said) < 75
    assert main(["predict", model, table]) == 0  # the column may be there, or not
    assert main(["predict", model, write(tmp_path / "u.csv", noise())]) == 0
    capsys.readouterr()
    assert main(["fit", table, *FAST, "--columns", name, "x0"]) == 0
    said = capsys.readouterr().out
    assert "2 features" in said
    assert f"look at: {name} " in said


def test_a_date_that_tells_the_class_by_the_order_of_the_rows_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    days = [str(np.datetime64("2024-01-01T08:00") + np.timedelta64(7 * row, "h")) for row in range(40)]
    table = write(tmp_path / "t.csv", {"when": days, **noise(), "kind": SORTED})
    assert main(["fit", table, *FAST]) == 0
    assert "look at: when tells the class, as the order of the rows does" in capsys.readouterr().out


def test_classes_that_are_whole_numbers_are_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(tmp_path / "t.csv", {**noise(), "kind": [(2, 10, 1, 9)[row % 4] for row in range(40)]})
    model = str(tmp_path / "m.safetensors")
    assert main(["fit", table, *FAST, "-o", model]) == 0
    assert load_model(model).classes == (1, 2, 9, 10)
    capsys.readouterr()


def test_drop_columns_and_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"row {number}" for number in range(40)]
    columns = {"name": names, "note": ["text"] * 40, **noise(), "kind": SORTED}
    table, model = write(tmp_path / "t.csv", columns), str(tmp_path / "m.safetensors")
    assert main(["fit", table, *FAST, "--drop", "note", "--id", "name", "-o", model]) == 0
    assert load_model(model).columns == tuple(noise())
    capsys.readouterr()
    assert main(["predict", model, table]) == 0
    rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert rows[0] == ["name", "class", "probability"]
    assert [row[0] for row in rows[1:]] == names
    assert main(["predict", model, table, "--row-numbers"]) == 0
    numbered = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert numbered == [[str(number), *row] for number, row in zip(["row", *range(40)], rows, strict=True)]
    for arguments, message in (
        (["--drop", "kind"], "`arguments` must use the classes' column for nothing else; got 'kind'"),
        (["--columns", "x0", "X9"], "`--columns` must name columns of the table; got X9, and "),
        (["--columns", "Nam"], "t.csv has name, note, x0, x1, x2 and 2 more. Did you mean name?\n"),
        (["--columns", "x0", "name", "--id", "name"], "`--columns` must name columns of the table; got name, and "),
        (["--drop", "Note", "Nope"], "`--drop` must name columns of the table; got Note, Nope, and "),
        (["--drop", "Note"], " and 3 more. Did you mean note?\n"),
        (["--drop", "qqq"], " and 3 more. Name those that it has.\n"),
        (["--id", "nobody"], "`table` must have a column nobody"),
        (["--drop", "a", "--columns", "b"], "`arguments` must be as --help lists them"),
    ):
        assert main(["fit", table, *FAST, *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize("option", ["--columns", "--drop"])
def test_a_table_without_names_has_no_columns_to_name(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "t.npz", x=NOISE, y=np.array(SORTED))
    assert main(["fit", str(tmp_path / "t.npz"), "--effort", "fast", option, "x0"]) == 2
    said = capsys.readouterr()
    assert "`table` must name its columns to choose among them; got " in said.err
    assert len(said.err.splitlines()) == 1


def test_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patients = np.arange(80) // 4
    coins = np.where(np.arange(20) % 2, "ant", "bee")[patients].tolist()
    x = 5 * NOISE[patients] + 0.3 * RNG.normal(size=(80, 5))
    columns = {f"x{number}": column.tolist() for number, column in enumerate(x.T)}
    columns |= {"patient": [f"P{number}" for number in patients], "kind": coins}
    table, model = write(tmp_path / "t.csv", columns), str(tmp_path / "m.safetensors")
    assert main(["fit", table, *FAST, "--group", "patient", "-o", model]) == 0
    said = capsys.readouterr().out
    assert "20 groups" in said
    assert right(said) < 85
    assert main(["fit", table, *FAST, "--drop", "patient"]) == 0
    assert right(capsys.readouterr().out) > 90
    assert main(["update", model, table, "--in-place"]) == 0
    assert float(re.findall(r"([\d.]+) % now", capsys.readouterr().out)[0]) < 85
    del columns["patient"]
    bare = write(tmp_path / "u.csv", columns)
    assert main(["predict", model, bare]) == 0
    assert main(["update", model, bare, "--in-place"]) == 2
    assert "must have a column patient" in capsys.readouterr().err
    whole = write(tmp_path / "w.csv", {**noise(), "patient": ["P1"] * 20 + ["P2", "P3"] * 10, "kind": SORTED})
    assert main(["fit", whole, *FAST, "--group", "patient"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "protonet fit: `--group` must hold no class whole; got all 20 rows of class ant in group P1."
    )


def test_what_lies_far_from_zero_keeps_its_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, order = 1.7e12 + 1e4 * np.repeat([0, 1], 20), RNG.permutation(40)
    columns = {
        "time": numbers[order].tolist(),
        "x0": (1e-3 * NOISE[:, 0]).tolist(),
        "kind": np.array(SORTED)[order].tolist(),
    }
    table, model = write(tmp_path / "t.csv", columns), str(tmp_path / "m.safetensors")
    assert main(["fit", table, *FAST, "-o", model]) == 0
    assert right(capsys.readouterr().out) == 100
    assert main(["evaluate", model, table]) == 0
    assert ": 100.00 % of 40 rows right" in capsys.readouterr().out
    assert main(["update", model, table, "--in-place"]) == 0


def test_ctrl_c_before_the_first_fold_and_after_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    table = write(tmp_path / "t.csv", {**noise(), "kind": SORTED})
    for stage, words in (("crossfit", ", without cross-validation"), ("predict_baselines", "")):
        model = tmp_path / f"{stage}.safetensors"
        with monkeypatch.context() as patch:
            patch.setattr(fit_command, stage, interrupt)
            assert main(["fit", table, *FAST, "-q", "-o", str(model)]) == 130
        said = capsys.readouterr()
        assert said.err == f"protonet fit: stopped; {model} is kept{words}\n"
        assert said.out.startswith("t.csv: 2 classes, 40 samples, 5 features, 20 per class\n")
        assert load_model(model).classes == ("ant", "bee")
        judged = stage != "crossfit"
        assert main(["update", str(model), table, "--in-place"]) == (0 if judged else 2)
        missing = "protonet update: `model` must hold what fit keeps for an update; got "
        assert capsys.readouterr().err.startswith("" if judged else missing)


def test_a_class_called_unknown_and_one_with_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["unknown"] * 20 + ["\x1b[31mred\x07"] * 20
    table, model = write(tmp_path / "t.csv", {**noise(), "kind": kinds}), str(tmp_path / "m.safetensors")
    assert main(["fit", table, *FAST, "-o", model]) == 0
    assert main(["evaluate", model, table]) == 0
    assert main(["update", model, table, "--in-place"]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\x07" not in said
    assert main(["predict", model, table, "--unknown", "0.1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("protonet predict: `--unknown` must come with a model that has no class of that name")
    odd = write(tmp_path / "o.csv", {**noise(), "kind": ["\x1b[31mno"] * 40})
    assert main(["evaluate", model, odd]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_new_classes_that_look_alike_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["cat", "CAT", "dog", "2", "2.0"]
    table = write(tmp_path / "t.csv", {**noise(), "kind": [kinds[row % 5] for row in range(40)]})
    model = str(tmp_path / "m.safetensors")
    assert main(["fit", table, *FAST, "-o", model]) == 0
    line = "look at: classes '2.0' for '2', 'cat' for 'CAT'; one class, spelled in two ways?\n"
    assert line in capsys.readouterr().out
    for names, expected in ((["elk", "Elk"], "'elk' for 'Elk'"), (["fox", "ox"], None)):
        more = write(tmp_path / "more.csv", {**noise(np.arange(2)), "kind": names})
        assert main(["update", model, more, "--in-place"]) == 0
        said = capsys.readouterr().out
        assert ("look at: classes" in said) == (expected is not None)
        assert expected is None or f"look at: classes {expected}; one class, spelled in two ways?\n" in said


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["a", "b"], []),
        ([1, 2], []),
        (["A", "a", "a "], ["'a' for 'A', 'a ' for 'A'"]),
        (["1", "1.0", "1e0", "01", "1.00"], ["'01' for '1', '1.0' for '1', '1.00' for '1' and 1 more"]),
    ],
)
def test_spellings_among_classes(names: list[str | int], expected: list[str]) -> None:
    assert suspect_spellings(names) == [
        f"look at: classes {each}; one class, spelled in two ways?" for each in expected
    ]


@pytest.mark.parametrize("command", ["fit", "predict", "evaluate", "update", "explain"])
def test_help_says_which_tables_are_read(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    kinds = "CSV, TSV or text with a header (also .gz, or - for standard input), Excel, Parquet, NPZ with x and y, NPY"
    assert kinds in said


AGES = np.concatenate([np.arange(18, 90, 2), np.arange(30, 78, 2)])  # 36 of them in 60 rows


@pytest.mark.parametrize(
    "labels",
    [
        AGES,
        AGES.astype(str),
        np.concatenate([np.arange(36), np.arange(24)]),  # one after the other, but more than half of the rows
        np.repeat(np.arange(0, 90, 3), 3),  # 30 that span 87
        np.concatenate([np.repeat(np.arange(0, 90, 3), 2), np.zeros(50, int)]),  # one of them has many rows
    ],
)
def test_whole_numbers_that_are_measured_are_no_classes(labels: np.ndarray) -> None:
    said = r"^`--label` must name a column of classes; got \d\d whole numbers, such as \d\d, in age, most with 3 rows"
    with pytest.raises(InputError, match=f"{said} or fewer.*--one-shot"):
        check_classes(labels, "age", one_shot=False)
    names, numbers = check_classes(labels, "age", one_shot=True)
    assert [str(names[number]) for number in numbers.tolist()] == labels.astype(str).tolist()


@pytest.mark.parametrize(
    "labels",
    [
        np.repeat(np.arange(60), 5),
        np.repeat(np.arange(0, 6000, 100), 5),  # codes far apart, of many rows
        np.repeat(np.arange(60), 2),  # few rows, but one number after the other
        np.repeat([f"c{number}" for number in range(0, 300, 10)], 2),
        np.concatenate([np.arange(0, 90, 5), np.arange(2)]),  # 20 classes at most
    ],
)
def test_classes_may_be_whole_numbers(labels: np.ndarray) -> None:
    names, numbers = check_classes(labels, "kind", one_shot=False)
    assert len(names) == len(set(labels.tolist()))
    assert [str(names[number]) for number in numbers.tolist()] == labels.astype(str).tolist()


def test_fit_takes_no_age_for_classes_unless_it_is_meant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(tmp_path / "t.csv", {**noise(np.arange(60) % 40), "age": AGES.tolist()})
    assert main(["fit", table, "--label", "age", "--effort", "fast"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("protonet fit: `--label` must name a column of classes; got 36 whole numbers, such as ")
    assert len(said.err.splitlines()) == 1


def test_new_classes_of_whole_numbers_stay_numbers() -> None:
    assert extend_classes((1, 2), np.array(["10", "2", "9"])) == (1, 2, 9, 10)
    assert extend_classes((1, 2), np.array(["ten"])) == ("1", "2", "ten")
    assert extend_classes(("a",), np.array(["10", "9"])) == ("a", "9", "10")
    assert read_whole(np.array(["01", "1"])).tolist() == ["01", "1"]  # two names of one number stay two
