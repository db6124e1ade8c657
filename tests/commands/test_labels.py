"""Labels of the page: their file, and the session that fits a network to them."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from protonet import InputError, PrototypeNetwork
from protonet.commands.options import PageOptions
from protonet.pipeline import TablePipeline
from protonet.server.labelling.class_names import parse_classes
from protonet.server.labelling.jobs import JobRunner
from protonet.server.labelling.label_file import LabelFile
from protonet.server.labelling.session import LabelSession, fit_network_to_labels
from protonet.server.labelling.uploads import Uploads
from protonet.tables.table import RowBlock
from protonet.tables.training import TrainingTable
from tests.commands.cases import read_lines
from tests.commands.servers import PROCESSES
from tests.strategies import blobs

CLASSES = ["ant", "bee"]
HEADER = ["a", "b", "label"]


def opened(path: Path) -> LabelFile:
    return LabelFile(path, HEADER, CLASSES)


class TestAnswers:
    def test_only_incomplete_lines_are_removed(self, tmp_path: Path) -> None:
        path = tmp_path / "answers.csv"
        with opened(path) as answers:
            answers.add(["é", "x\ny"], "ant")
            answers.add(["2", "p, q"], "bee")
            rows, ends = list(answers.rows), [len("a,b,label\n"), len('a,b,label\né,"x\ny",ant\n'.encode())]
        full = path.read_bytes()
        for size in range(len(full) + 1):
            path.write_bytes(full[:size])
            with opened(path) as answers:
                saved = 2 if size == len(full) else int(size >= ends[1])
                assert answers.rows == rows[:saved], size
            assert path.read_bytes() == full[: [*ends, len(full)][saved]]

    def test_another_format_is_refused_and_unchanged(self, tmp_path: Path) -> None:
        cases: list[tuple[str | bytes, str]] = [
            ("a,c,label\n1,2,ant\n", "columns a, c, label"),
            ("no line end", "columns no line end"),
            ("a,b,label\n1,2,cat\n", "'cat' as the class in line 2"),
            ("a,b,label\n1,ant\n1,2,ant\n", "'ant' as the class in line 2"),
            ("a,b,label\n\n1,2,ant\n", "'' as the class in line 2"),
            (b"\xff\xfe", r"columns \udcff\udcfe"),
        ]
        for content, got in cases:
            path = tmp_path / "other.csv"
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
            before = path.read_bytes()
            must = "be a new file, or labelled rows of this table and these classes"
            with pytest.raises(InputError, match=rf"^`output` must {must}; got .*other\.csv with {re.escape(got)}\."):
                opened(path)
            assert path.read_bytes() == before, content

    def test_one_command_at_a_time(self, tmp_path: Path) -> None:
        message = "^`output` must be written by one command at a time; got .*answers.csv, in use by another"
        with opened(tmp_path / "answers.csv") as answers:
            with pytest.raises(InputError, match=message):
                opened(tmp_path / "answers.csv")
            answers.add(["1", "2"], "ant")
        with opened(tmp_path / "answers.csv") as answers:
            assert len(answers.rows) == 1


def make_model(classes: tuple[str, ...]) -> TablePipeline:
    network = PrototypeNetwork(torch.nn.Identity(), embedding_dim=4, num_classes=len(classes))
    x, y = blobs(0, classes=len(classes), rows=3, dim=4)
    network.set_prototypes(x, y)
    return TablePipeline(network=network, classes=classes)


def test_classes_are_the_models_or_those_that_are_named() -> None:
    model = make_model(("ant", "bee"))
    assert parse_classes(" ant, bee", None) == parse_classes(None, model) == CLASSES
    assert (parse_classes(None, None), parse_classes("bee", model)) == ([], ["bee"])
    assert (parse_classes("+,-", None), parse_classes("ant,none", None)) == (["+", "-"], ["ant", "none"])
    cases: list[tuple[str | None, tuple[str, ...], str]] = [
        ("ant,ant", (), "`classes` must be different names.*; got 'ant'"),
        ("ant,NA", (), "not a missing value; got 'NA'"),
        ("1,none", (), "not a missing value; got 'none'"),
        ("ant,", (), "not a missing value; got ''"),
        ("ant,cow", ("ant", "bee"), "must be classes that the model knows; got 'cow', and it knows ant, bee"),
    ]
    for text, known, message in cases:
        with pytest.raises(InputError, match=message):
            parse_classes(text, make_model(known) if known else None)


BATCH = 5
X, Y = blobs(1, classes=2, rows=12, dim=4, noise=0.8)
CELLS = [[f"{value:.6g}" for value in row] for row in X.tolist()]
COLUMNS = ("p", "q", "r", "s")


def make_rows(x: Tensor, columns: tuple[str, ...] = COLUMNS) -> TrainingTable:
    rows, none = RowBlock.from_columns(list(x.numpy().T), columns), torch.zeros(len(x), dtype=torch.bool)
    return TrainingTable(rows=rows, x=x, y=none.long() - 1, classes=(), encoding=None, uninformative_mask=none)


@contextmanager
def open_session(path: Path, model: TablePipeline | None = None) -> Iterator[LabelSession]:
    with LabelFile(path, [*COLUMNS, "label"], CLASSES) as answers:
        yield LabelSession(make_rows(X), CELLS, CLASSES, model, answers)


class TestSession:
    def test_answers_move_the_prototypes_as_samples_do(self, tmp_path: Path) -> None:
        model = make_model(("ant", "bee"))
        before = model.network.prototypes.clone()
        with open_session(tmp_path / "answers.csv", model) as session:
            for row in (3, 8):
                session.add_label(row, CLASSES[int(Y[row])])
            session.update_network()
            assert session.network is not None
            expected = make_model(("ant", "bee")).network
            expected.add_samples(X[[3, 8]], Y[[3, 8]])
            torch.testing.assert_close(session.network.prototypes, expected.prototypes)
            session.change_label(8, None)
            session.change_label(3, None)
            session.update_network()
            torch.testing.assert_close(session.network.prototypes, before)
        assert torch.equal(model.network.prototypes, before)

    def test_without_a_model_it_is_fitted_to_the_answers(self, tmp_path: Path) -> None:
        with open_session(tmp_path / "answers.csv") as session:
            assert session.network is None
            first = session.suggest(BATCH)
            assert len(first) == BATCH
            assert {int(Y[row]) for row, _ in first} == {0, 1}
            rows = [row for row, _ in first]
            for row in rows:
                session.add_label(row, CLASSES[int(Y[row])])
            session.update_network(refit=True)
            assert session.network is not None
            torch.testing.assert_close(session.network(X), fit_network_to_labels(X[rows], Y[rows], 2, None)(X))
            more = session.suggest(BATCH)
            assert not {row for row, _ in more} & set(rows)
            session.add_label(more[0].row, "ant")
            for row in (more[0].row, *rows[3:]):
                session.change_label(row, None)  # beyond what it was fitted to
            session.update_network()
            torch.testing.assert_close(session.network(X), fit_network_to_labels(X[rows[:3]], Y[rows[:3]], 2, None)(X))
        with open_session(tmp_path / "answers.csv") as again:
            assert again.labelled == rows[:3]

    def test_equal_rows_are_suggested_once(self, tmp_path: Path) -> None:
        x = torch.tensor([[0.0], [1.0]]).repeat(3, 1)
        cells = [[f"{value:g}"] for value in x[:, 0].tolist()]
        rows = make_rows(x, ("p",))
        with LabelFile(tmp_path / "answers.csv", ["p", "label"], CLASSES) as answers:
            session = LabelSession(rows, cells, CLASSES, None, answers)
            for row in (4, 2):
                session.add_label(row, "ant")
            assert LabelSession(rows, cells, CLASSES, None, answers).labelled == [0, 2]
            known = rows.rows._replace(labels=np.array(["a", "", "", "b", "", ""]))
            session = LabelSession(replace(rows, rows=known), cells, CLASSES, None, answers)
            assert session.labelled == [2, 4]
            assert session.list_unlabelled_rows().tolist() == [1, 5]
            assert {row for row, _ in session.suggest(BATCH)} == {1, 5}
            rows = replace(rows, rows=known, uninformative_mask=torch.arange(len(x)) == 1)
            session = LabelSession(rows, cells, CLASSES, None, answers)
            assert {row for row, _ in session.suggest(BATCH)} == {5}


def test_an_interrupted_upload_is_repeated(tmp_path: Path) -> None:
    """Rows that are on the disk, but not on the page, because the request failed later, are not saved twice."""
    with LabelFile(tmp_path / "out.added.csv", ["id", "note", "added"], ["added"], lazy=True) as file:
        uploads = Uploads(file, tmp_path / "texts.csv", 1, are_pictures=False)
        for text in ("one\ntwo", "one\ntwo\nthree"):
            assert uploads.add_texts(text, known_texts={"zero"}) == [["", line] for line in text.splitlines()]
        assert uploads.add_texts("zero", known_texts={"zero"}) == []
        with pytest.raises(InputError, match=r"10,000 lines"):
            uploads.add_texts("\n".join(map(str, range(10_000))), known_texts=set())
    assert [cells[1] for cells in read_lines((tmp_path / "out.added.csv").read_text())[1:]] == ["one", "two", "three"]


def test_uploads_of_several_threads_are_saved_once(tmp_path: Path) -> None:
    """As when a request has timed out, whose thread goes on beside that of the repeated request."""
    lines = [f"text {index}" for index in range(8)]
    with LabelFile(tmp_path / "out.added.csv", ["note", "added"], ["added"], lazy=True) as file:
        uploads = Uploads(file, tmp_path / "texts.csv", 0, are_pictures=False)
        with ThreadPoolExecutor(4) as pool:
            added = list(pool.map(lambda _: uploads.add_texts("\n".join(lines), known_texts=set()), range(4)))
    assert added == [[[line] for line in lines]] * 4
    assert read_lines((tmp_path / "out.added.csv").read_text())[1:] == [[line, "added"] for line in lines]


def test_a_file_whose_rows_are_replaced_stays_locked(tmp_path: Path) -> None:
    """A second command never gets the file while it is replaced; its labels would be written to the old file."""
    path, taken = tmp_path / "answers.csv", []

    def take() -> None:
        try:
            with LabelFile(path, ["text", "label"], None):
                taken.append(path)
        except InputError:
            return

    with LabelFile(path, ["text", "label"], None) as file, ThreadPoolExecutor(1) as pool:
        for _ in range(60):
            taking = pool.submit(take)
            file.replace_rows([["a", "ant"]])
            taking.result()
    assert not taken
    assert path.read_text(encoding="utf-8") == "text,label\na,ant\n"


def fill_disk(path: Path) -> None:
    """Add rows of which one exceeds the size limit of files."""
    with LabelFile(path, ["text", "label"], None) as answers:
        answers.add(["short"], "ant")
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
        with pytest.raises(OSError, match=r"File too large: .*answers\.csv"):
            answers.add(["long " * 100], "bee")
        answers.add(["x"], "bee")


def test_a_full_disk_is_an_error_and_loses_no_label(tmp_path: Path) -> None:
    path = tmp_path / "answers.csv"
    process = PROCESSES.Process(target=fill_disk, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert path.read_text(encoding="utf-8") == "text,label\nshort,ant\nx,bee\n"


def test_commands_of_downloads() -> None:
    columns = {"column_type": ["a=category"], "drop": ["b", "c"], "group": "d"}
    for more, commands in (
        (
            {"sheet": "x", **columns},
            [
                "fit own.csv --label label --report report.html --output model.protonet"
                " --group d --drop b c --column-type a=category",
                "predict model.protonet rest.csv --sheet x --output predictions.csv --proba",
            ],
        ),
        (
            {"model": Path("old.safetensors")},
            [
                "update old.safetensors own.csv --label label --output model.protonet",
                "predict model.protonet rest.csv --output predictions.csv --proba",
                "evaluate old.safetensors own.csv --label label --report report.html",
            ],
        ),
    ):
        options: dict[str, Any] = {"table": Path("rest.csv"), "output": Path("own.csv"), **more}
        jobs = JobRunner(PageOptions(**options), "label", Path())
        assert jobs.format_commands() == [f"protonet {item}" for item in commands]
    jobs = JobRunner(PageOptions(table=Path("rest.csv"), output=Path("own.csv"), skip_broken=True), "-class", Path())
    assert all("--skip-broken" in command for command in jobs.format_commands())
    assert "--label=-class" in jobs.format_commands()[0]
