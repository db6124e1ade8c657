"""Warnings of ``fit`` and ``update`` about duplicates, groups, leakage and labels; the files after Ctrl-C."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protonet.commands import fit as fit_command
from protonet.commands.rows import read_class_descriptions
from protonet.commands.update import extend_classes
from protonet.errors import InputError
from protonet.files import load_model, save_model
from protonet.fit.training_set import MAX_SAMPLED_ROWS, prepare_training_set
from protonet.pipeline import TablePipeline
from protonet.tables.table import RowBlock
from protonet.tables.training import TrainingTable, determine_classes, parse_integer_labels
from tests.commands.cases import FAST, Run, fit_model, parse_accuracy, read_lines
from tests.strategies import blobs
from tests.strategies import write_columns as write

RNG = np.random.default_rng(0)
NOISE = RNG.normal(size=(40, 5))
SORTED = ["ant"] * 20 + ["bee"] * 20


def get_column_names(x: np.ndarray) -> dict[str, Any]:
    return {f"x{index}": column.tolist() for index, column in enumerate(x.T)}


def noise(rows: Any = slice(None)) -> dict[str, Any]:
    return get_column_names(NOISE[rows])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path / "m.safetensors"


def parse_updated_accuracy(output: str) -> float:
    """Parse the accuracy on held-out rows after an update, in percent."""
    return float(re.findall(r"([\d.]+) % after", output)[0])


def test_duplicates_are_counted_and_held_out_together(model: Path, tmp_path: Path, run: Run) -> None:
    coins = np.where(RNG.integers(2, size=40), "ant", "bee").tolist()
    table = write(tmp_path / "t.csv", {**noise(np.arange(80) % 40), "kind": coins + coins})
    output = run("fit", table, *FAST, "-o", model)
    assert "40 rows equal to others, or nearly: duplicates share a fold" in output
    assert "5-fold cross-validation on 80 rows" in output
    assert parse_accuracy(output) < 75
    assert parse_updated_accuracy(run("update", model, table, "--in-place")) < 75


def test_a_row_index_is_dropped_by_name(model: Path, tmp_path: Path, run: Run) -> None:
    """Fit to a table that also has a date that leaks the class, and a class with a single row."""
    days = [str(np.datetime64("2024-01-01T08:00") + np.timedelta64(7 * row, "h")) for row in range(40)]
    indices = np.cumsum(RNG.integers(1, 50, 40)).tolist()
    kinds = [*SORTED[:-1], "\x1b[31mred\x07"]
    table = write(tmp_path / "t.csv", {"id": indices, "when": days, **noise(), "kind": kinds})
    output = run("fit", table, *FAST, "-o", model)
    assert "dropped: id: distinct integers in the order of the rows (--columns keeps it)\n" in output
    assert "warning: when determines the class, as the order of the rows does" in output
    assert re.search("not evaluated: .*red.*: only one distinct row", output)
    assert output.replace("\n", "").isprintable()
    for new in (table, write(tmp_path / "u.csv", {"when": days, **noise()})):  # the column may be there, or not
        run("predict", model, new)
    output = run("fit", table, *FAST, "--columns", "id", "x0")
    assert "2 features" in output
    assert "warning: id " in output


def test_drop_columns_and_id(model: Path, tmp_path: Path, run: Run) -> None:
    names = [f"row {index}" for index in range(40)]
    table = write(tmp_path / "t.csv", {"name": names, "note": ["text"] * 40, **noise(), "kind": SORTED})
    run("fit", table, *FAST, "--drop", "note", "--id", "name", "-o", model)
    assert load_model(model).columns == tuple(noise())
    rows = read_lines(run("predict", model, table))
    assert rows[0] == ["name", "class", "probability"]
    assert [row[0] for row in rows[1:]] == names
    numbered = read_lines(run("predict", model, table, "--row-numbers"))
    assert numbered == [[str(index), *row] for index, row in zip(["row", *range(2, 42)], rows, strict=True)]
    for arguments, message in (
        *(
            (f"{option} kind{value}", f"`{option}` must name another column than that of the labels; got 'kind'")
            for option, value in (("--drop", ""), ("--columns", ""), ("--group", ""), ("--column-type", "=number"))
        ),
        ("--columns x0 X9", "`--columns` must name columns of the table; got X9, and "),
        ("--columns Nam", "t.csv has name, note, x0, x1, x2 and 2 more. Did you mean name?\n"),
        ("--columns x0 name --id name", "`--columns` must name columns of the table; got name, and "),
        ("--drop Note Nope", "`--drop` must name columns of the table; got Note, Nope, and "),
        ("--drop Note", " and 3 more. Did you mean note?\n"),
        ("--drop qqq", " and 3 more. Name those that it has.\n"),
        ("--id missing_id", "`--id` must name columns of the table; got missing_id, and "),
        ("--group nam", "`--group` must name columns of the table; got nam, and "),
        ("--drop a --columns b", "not allowed with argument"),
    ):
        assert message in run("fit", table, *FAST, *arguments.split(), code=2)
    np.savez(tmp_path / "t.npz", x=NOISE, y=np.array(SORTED))
    for option in ("--columns", "--drop"):
        error = run("fit", tmp_path / "t.npz", option, "x0", code=2)
        assert "`table` must name its columns to choose among them; got " in error


@pytest.mark.usefixtures("kernel_views")
def test_groups(model: Path, tmp_path: Path, run: Run) -> None:
    patients = np.arange(80) // 4
    x = 5 * NOISE[patients] + 0.3 * RNG.normal(size=(80, 5))
    columns = get_column_names(x)
    columns["kind"] = np.where(np.arange(20) % 2, "ant", "bee")[patients].tolist()
    table = write(tmp_path / "t.csv", {**columns, "patient": [f"P{index}" for index in patients]})
    output = run("fit", table, *FAST, "--group", "patient", "-o", model)
    assert "20 groups" in output
    assert parse_accuracy(output) < 85
    assert parse_accuracy(run("fit", table, *FAST, "--drop", "patient")) > 90
    assert parse_updated_accuracy(run("update", model, table, "--in-place")) < 85
    bare = write(tmp_path / "u.csv", columns)
    run("predict", model, bare)
    error = run("update", model, bare, "--in-place", code=2)
    assert "must have the column patient, which names the groups of the model" in error
    full = write(tmp_path / "w.csv", {**noise(), "patient": ["P1"] * 20 + ["P2", "P3"] * 10, "kind": SORTED})
    error = run("fit", full, *FAST, "--group", "patient", code=2)
    assert "`--group` must hold no class whole; got all 20 rows of class ant in group P1." in error


@pytest.mark.parametrize(
    ("stage", "words"), [("cross_validate_model", " without cross-validation"), ("save", ""), ("format_evaluation", "")]
)
def test_ctrl_c_before_the_first_fold_and_after_the_last(
    stage: str, words: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    interrupted, save = list[Path](), TablePipeline.save

    def interrupt_once(pipeline: TablePipeline, path: Path) -> None:
        interrupted.append(path)
        if len(interrupted) == 1:
            raise KeyboardInterrupt
        save(pipeline, path)

    table = write(tmp_path / "t.csv", {**noise(), "kind": SORTED})
    with monkeypatch.context() as patch:
        if stage == "save":
            patch.setattr(TablePipeline, "save", interrupt_once)
        else:
            patch.setattr(fit_command, stage, interrupt)
        output = run("fit", table, *FAST, "-o", model, code=130)
    assert run.notes == f"protonet fit: stopped; {model} was written{words}\n"
    assert output.startswith("t.csv: 2 classes, 40 samples, 5 features, 20 per class\n")
    assert load_model(model).classes == ("ant", "bee")
    output = run("update", model, table, "--in-place")
    assert bool(words) == ("no held-out rows: the effect on the old classes is unknown\n" in output)


def test_new_classes_that_look_alike_get_a_warning(model: Path, tmp_path: Path, run: Run) -> None:
    kinds = ["cat", "CAT", "dog", "2", "2.0"]
    table = write(tmp_path / "t.csv", {**noise(), "kind": [kinds[row % 5] for row in range(40)]})
    output = run("fit", table, *FAST, "-o", model)
    assert "warning: classes '2.0' for '2', 'cat' for 'CAT'; two spellings of one class?\n" in output
    more = write(tmp_path / "more.csv", {**noise(np.arange(2)), "kind": ["elk", "Elk"]})
    output = run("update", model, more, "--in-place")
    assert "warning: classes 'elk' for 'Elk'; two spellings of one class?\n" in output


AGES = np.concatenate([np.arange(18, 90, 2), np.arange(30, 78, 2)])  # 36 of them in 60 rows


def test_measured_integers_are_not_classes_unless_allowed() -> None:
    cases: list[np.ndarray] = [
        AGES,
        AGES.astype(str),
        np.concatenate([np.arange(36), np.arange(24)]),  # one after the other, but more than half of the rows
        np.repeat(np.arange(0, 90, 3), 3),  # 30 that span 87
        np.concatenate([np.repeat(np.arange(0, 90, 3), 2), np.zeros(50, int)]),  # one of them has many rows
    ]
    for labels in cases:
        got = r"got \d\d whole numbers, such as \d\d, in age, most with 3 rows or fewer.*`allow_many_classes`"
        with pytest.raises(InputError, match=f"^`label` must name a column of classes; {got}"):
            determine_classes(labels, "age", allow_many=False)
        names, indices = determine_classes(labels, "age", allow_many=True)
        assert [str(names[index]) for index in indices.tolist()] == labels.astype(str).tolist(), labels

    cases = [
        np.repeat(np.arange(60), 5),
        np.repeat(np.arange(0, 6000, 100), 5),  # codes far apart, of many rows
        np.repeat(np.arange(60), 2),  # few rows, but one number after the other
        np.repeat([f"c{code}" for code in range(0, 300, 10)], 2),
        np.concatenate([np.arange(0, 90, 5), np.arange(2)]),  # 20 classes at most
    ]
    for labels in cases:
        names, indices = determine_classes(labels, "kind", allow_many=False)
        assert len(names) == len(set(labels.tolist())), labels
        assert [str(names[index]) for index in indices.tolist()] == labels.astype(str).tolist(), labels


def test_new_integer_classes_stay_integers() -> None:
    assert extend_classes((1, 2), np.array(["10", "2", "9"])) == (1, 2, 9, 10)
    assert extend_classes((1, 2), np.array(["ten"])) == ("1", "2", "ten")
    assert extend_classes(("a",), np.array(["10", "9"])) == ("a", "9", "10")
    assert parse_integer_labels(np.array(["01", "1"])).tolist() == ["01", "1"]  # two names of one number stay two


def collect_notes(output: str) -> list[str]:
    return [line for line in output.splitlines() if "warning: " in line]


def test_a_group_column_gets_a_warning(tmp_path: Path, run: Run) -> None:
    rng = np.random.default_rng(0)
    subject = np.repeat(np.arange(30), 4)
    x = rng.normal(size=(30, 4))[subject] + 0.05 * rng.normal(size=(120, 4))
    kind = np.array(["a", "b"])[rng.integers(2, size=30)][subject]
    columns = get_column_names(x) | {"subject": [f"S{index}" for index in subject], "kind": kind.tolist()}
    table = write(tmp_path / "t.csv", columns)
    result, output = run.read_json("fit", table, *FAST)
    line = "warning: 30 values of subject repeat, nearly always with the same class; if rows with the same "
    line += "value have the same source, --group subject holds them out together"
    assert collect_notes(output) == [line]  # one cause, one line
    assert line in result["data"]["notes"]
    held_out = run("fit", table, *FAST, "--group", "subject")
    assert not [note for note in collect_notes(held_out) if "subject" in note]
    assert parse_accuracy(held_out) < 75


@pytest.mark.usefixtures("kernel_views")
def test_near_duplicates_get_a_warning(tmp_path: Path, run: Run) -> None:
    rng = np.random.default_rng(0)
    of = np.repeat(np.arange(30), 4)
    x, kind = rng.normal(size=(30, 10))[of] + 0.2 * rng.normal(size=(120, 10)), np.arange(30)[of] % 3
    columns = get_column_names(x) | {"source": [f"file {index} here" for index in of]}
    table = write(tmp_path / "t.csv", columns | {"kind": [f"k{index}" for index in kind]})
    output = run("fit", table, *FAST, "--drop", "source")
    assert parse_accuracy(output) > 90
    (line,) = collect_notes(output)
    assert line.endswith("; if these have a common source, pass its column with --group NAME")
    output = run("fit", table, *FAST, "--group", "source")
    assert parse_accuracy(output) < 60
    assert not collect_notes(output)


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_lines(n: int, classes: str = "ab") -> list[str]:
    draw = np.random.default_rng(0)
    return [f"{x:.4f},{y:.4f},{classes[row % len(classes)]}" for row, (x, y) in enumerate(draw.normal(size=(n, 2)))]


def collect_contradictions(output: str) -> list[str]:
    return [line for line in output.splitlines() if "contradicting labels" in line]


def test_equal_rows_of_different_classes_are_named(tmp_path: Path, run: Run) -> None:
    lines = ["x,y,kind", *make_lines(40)]
    model = tmp_path / "m.safetensors"
    lines += [lines[5].replace(",a", ",b"), lines[6], ",,a", ",,b"]
    table = write_lines(tmp_path / "t.csv", lines)
    (line,) = collect_contradictions(run("fit", table, *FAST, "-o", model))
    assert "2 rows equal rows of another class: line 6 (a), line 42 (b)" in line
    more = write_lines(tmp_path / "more.csv", ["x,y,kind", "1,2,a", "1,2,b", *make_lines(4)])
    assert "line 2 (a), line 3 (b)" in run("update", model, more, "-o", tmp_path / "other.safetensors")
    new = [lines[3], lines[7].replace(",a", ",b"), "1,2,a", lines[8].replace(",b", ",c")]
    more = write_lines(tmp_path / "more.csv", [lines[0], *new])
    for _ in range(2):  # the second update adds the same rows again
        (line,) = collect_contradictions(run("update", model, more, "--in-place"))
        assert "2 rows of another class than equal rows of fit: line 3 (b, was a), line 5 (c, was b)" in line


def test_columns_and_files_that_fit_cannot_use_are_explained(tmp_path: Path, run: Run) -> None:
    lines = ["w,photo,kind", *(f"{row}.5,{tmp_path / f'{row}.png'},{'ab'[row % 2]}" for row in range(12))]
    for row in range(12):
        (tmp_path / f"{row}.png").write_bytes(b"")
    table = write_lines(tmp_path / "t.csv", lines)
    output = run("fit", table, *FAST, quiet=False)
    assert "warning: photo names pictures, which are not read; --column-type photo=picture" in output
    assert "no model will be written" in run.notes
    (tmp_path / "a b").mkdir()
    lines = [line.replace(str(tmp_path), f"{tmp_path}/a b/..") for line in lines]  # paths with spaces are texts
    leaking = write_lines(tmp_path / "leaking.csv", lines)
    assert "--column-type photo=picture" in run("fit", leaking, *FAST)
    assert "Did you mean w?" in run("fit", table, *FAST, "--column-type", "W=number", code=2)
    (tmp_path / "empty.csv").write_bytes(b"")
    assert "empty.csv, which is empty" in run("fit", tmp_path / "empty.csv", *FAST, code=2)
    for name in "ab":
        (tmp_path / "texts" / name).mkdir(parents=True)
        (tmp_path / "texts" / name / "1.txt").write_text("a text", encoding="utf-8")
    assert "Texts go into a table" in run("fit", tmp_path / "texts", code=2)
    error = run("fit", table, "--classes", "names", code=2)
    assert "--classes" in error
    assert "names" in error


def test_sets_of_equal_rows_are_those_of_a_slow_search() -> None:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 12, (60, 2)).astype(np.float32) * np.array([1.0, -0.0], np.float32)
    x = np.concatenate([x, draw.normal(size=(400, 2)).astype(np.float32)])
    labels = draw.integers(0, 2, len(x)).tolist()
    expected = sum(any((x[i] == x[j]).all() and labels[i] != labels[j] for j in range(len(x))) for i in range(60))
    table = TrainingTable(
        rows=RowBlock.from_columns(list(x.T))._replace(labels=np.array(labels)),
        x=torch.from_numpy(x),
        y=torch.tensor(labels),
        classes=(0, 1),
        encoding=None,
        uninformative_mask=torch.zeros(len(x), dtype=torch.bool),
    )
    (line,) = table.warn_contradictory_labels()
    assert f" {expected} rows equal" in line


def make_blobs(seed: int) -> dict[str, list[object]]:
    x, y = blobs(seed, classes=3, rows=6, dim=3)
    return {f"x{index}": column.tolist() for index, column in enumerate(x.T)} | {"kind": [f"k{k}" for k in y]}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit_model(write(tmp_path_factory.mktemp("fitted") / "t.csv", make_blobs(0)))


def test_update_warns_about_repeated_rows(fitted: Path, tmp_path: Path, run: Run) -> None:
    first, more = write(tmp_path / "t.csv", make_blobs(0)), write(tmp_path / "u.csv", make_blobs(1))
    twice = {name: cells + cells[:1] for name, cells in make_blobs(2).items()}
    again, new, old = write(tmp_path / "v.csv", twice), tmp_path / "new.safetensors", tmp_path / "old"

    def check(source: Path, table: str, repeated: str) -> None:
        output = run("update", source, table, *(["--in-place"] if source == new else ["-o", new]))
        line = " equal to earlier or other new ones: they count"
        assert (f"\n{repeated}{line}" in output) == (line in output) == bool(repeated)

    check(fitted, first, "18 samples")
    assert not collect_contradictions(run("update", fitted, first, "-o", new))
    check(fitted, more, "")
    check(new, more, "18 samples")
    check(new, again, "1 sample")
    before = load_model(new, for_update=True)
    del before.update_state["given"]
    save_model(old, before)  # as files were that do not say: of these, the rows that fit held out are known
    check(old, first, "18 samples")
    check(old, more, "")


def test_classes_may_be_names_with_commas() -> None:
    names = ["sport", "food", *(f"class {index}" for index in range(90))]
    assert read_class_descriptions(Path(", ".join(names))) == dict.fromkeys(names, "")
    for text, reason in (("a,,b", "empty name"), ("a,b,a", "'a' repeatedly")):
        with pytest.raises(InputError, match=f"`classes` must .*{reason}"):
            read_class_descriptions(Path(text))


def test_a_sample_of_many_rows_is_mentioned() -> None:
    n = MAX_SAMPLED_ROWS + 1000
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    problem, _ = prepare_training_set(x, (x[:, 0] > 0).long(), 2)
    *_, line = fit_command.summarize_duplicates_and_sample(problem)
    rows = len(problem.rows.labels)
    assert line == f"a sample of {rows:,} of {n:,} distinct rows is used, with the class frequencies of all rows"
    few, _ = prepare_training_set(x[:100], (x[:100, 0] > 0).long(), 2)
    assert fit_command.summarize_duplicates_and_sample(few) == []


def make_shifted(seed: int, unit: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    y = np.arange(60) % 3
    x = (rng.normal(size=(60, 3)) + 4 * np.eye(3)[y]) * [1, unit, 1]
    return get_column_names(x) | {"kind": [f"k{k}" for k in y]}


def test_commands_warn_of_another_unit(tmp_path: Path, run: Run) -> None:
    fitted = fit_model(write(tmp_path / "t.csv", make_shifted(0)))
    line = "warning: x1 is far from the training rows: most rows are outside "
    for unit, lines in ((1000.0, 1), (1.0, 0)):
        table = write(tmp_path / "new.csv", make_shifted(1, unit))
        for command in ("predict", "evaluate", "update", "explain"):
            more = ["-o", tmp_path / "copy.safetensors"] if command == "update" else []
            run(command, fitted, table, *more, quiet=False)
            assert run.notes.count(line) == run.notes.count("warning: ") == lines, command
            run(command, fitted, table, *more)  # quiet: no notes
