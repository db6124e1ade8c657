"""The command ``label``: its file of answers, its session, and the whole of it in a terminal that is killed."""

from __future__ import annotations

import csv
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from protonet import InputError, PrototypeNetwork
from protonet.commands.answers import Answers
from protonet.commands.data import UnlabelledTable
from protonet.commands.label import BATCH, KEYS, Session, ask, fit_answers, parse_classes
from protonet.files import Model
from protonet.tables.table import Table
from tests.commands.cases import FAST, Run
from tests.strategies import blobs, write_columns

CLASSES = ["ant", "bee"]
HEADER = ["a", "b", "label"]


def opened(path: Path) -> Answers:
    return Answers(path, HEADER, CLASSES)


class TestAnswers:
    def test_each_is_in_the_file_at_once_and_can_be_taken_back(self, tmp_path: Path) -> None:
        path = tmp_path / "answers.csv"
        with opened(path) as answers:
            answers.add(["1", 'two, "2"\nlines'], "ant")
            first = path.read_bytes()
            assert list(csv.reader(first.decode().splitlines(keepends=True)))[1:] == answers.rows
            answers.add(["3", ""], "bee")
            assert answers.undo() == ["3", "", "bee"]
            assert path.read_bytes() == first
        with opened(path) as answers:
            assert answers.rows == [["1", 'two, "2"\nlines', "ant"]]
            answers.undo()
        assert path.read_text(encoding="utf-8") == "a,b,label\n"

    def test_whatever_was_cut_off_is_removed_and_nothing_else(self, tmp_path: Path) -> None:
        path = tmp_path / "answers.csv"
        with opened(path) as answers:
            answers.add(["é", "x\ny"], "ant")
            answers.add(["2", "p, q"], "bee")
            rows, ends = list(answers.rows), [len("a,b,label\n"), len('a,b,label\né,"x\ny",ant\n'.encode())]
        whole = path.read_bytes()
        for size in range(len(whole) + 1):
            path.write_bytes(whole[:size])
            with opened(path) as answers:
                kept = 2 if size == len(whole) else int(size >= ends[1])
                assert answers.rows == rows[:kept], size
            assert path.read_bytes() == whole[: [*ends, len(whole)][kept]]

    @pytest.mark.parametrize(
        ("content", "got"),
        [
            ("a,c,label\n1,2,ant\n", "columns a, c, label"),
            ("no line end", "columns no line end"),
            ("a,b,label\n1,2,cat\n", "'cat' as the class in line 2"),
            ("a,b,label\n1,ant\n1,2,ant\n", "'ant' as the class in line 2"),
            ("a,b,label\n\n1,2,ant\n", "'' as the class in line 2"),
            (b"\xff\xfe", r"columns \udcff\udcfe"),
        ],
    )
    def test_another_file_is_refused_and_left_alone(self, tmp_path: Path, content: str | bytes, got: str) -> None:
        path = tmp_path / "other.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        before = path.read_bytes()
        must = "be a new file, or labelled rows of this table and these classes"
        with pytest.raises(InputError, match=rf"^`--output` must {must}; got .*other\.csv with {re.escape(got)}\."):
            opened(path)
        assert path.read_bytes() == before

    def test_one_command_at_a_time(self, tmp_path: Path) -> None:
        message = "^`--output` must be written by one command at a time; got .*answers.csv, in use by another"
        with opened(tmp_path / "answers.csv") as answers:
            with pytest.raises(InputError, match=message):
                opened(tmp_path / "answers.csv")
            answers.add(["1", "2"], "ant")
        with opened(tmp_path / "answers.csv") as answers:
            assert len(answers.rows) == 1


def make_model(classes: tuple[str, ...]) -> Model:
    network = PrototypeNetwork(torch.nn.Identity(), embedding_dim=4, num_classes=len(classes))
    x, y = blobs(0, classes=len(classes), rows=3, dim=4)
    network.set_prototypes(x, y)
    return Model(network, classes, None, {}, {})


@pytest.mark.parametrize(
    ("text", "known", "message"),
    [
        (None, (), "`--classes` must name the classes; got none"),
        ("ant", (), "`--classes` must be 2 to 32 names, one key each; got 1"),
        (",".join(f"c{number}" for number in range(33)), (), "must be 2 to 32 names, one key each; got 33"),
        ("ant,ant", (), "`--classes` must be different names.*; got 'ant'"),
        ("ant,NA", (), "not a missing value; got 'NA'"),
        ("bee,,ant", (), "not a missing value; got ''"),
        ("ant,", (), "not a missing value; got ''"),
        ("ant,cow", ("ant", "bee"), "must be classes that the model knows; got 'cow', and it knows ant, bee"),
    ],
)
def test_classes_that_do_not_fit(text: str | None, known: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_classes(text, make_model(known) if known else None)


def test_classes_have_keys_of_their_own() -> None:
    assert parse_classes(" ant, bee", None) == CLASSES
    assert parse_classes(None, make_model(("ant", "bee"))) == CLASSES
    assert parse_classes("bee", make_model(("ant", "bee"))) == ["bee"]
    assert not {"s", "u", "q"} & set(KEYS)
    assert len(set(KEYS)) == len(KEYS) == 32


X, Y = blobs(1, classes=2, rows=12, dim=4, noise=0.8)
CELLS = [[f"{value:.6g}" for value in row] for row in X.tolist()]
COLUMNS = ("p", "q", "r", "s")


def make_rows(x: Tensor, columns: tuple[str, ...] = COLUMNS) -> UnlabelledTable:
    table = Table(columns, iter(()), "row {}", [])
    return UnlabelledTable(x, None, table, torch.zeros(len(x), dtype=torch.bool), positions=range(len(x)))


@contextmanager
def open_session(path: Path, model: Model | None = None) -> Iterator[Session]:
    with Answers(path, [*COLUMNS, "label"], CLASSES) as answers:
        yield Session(make_rows(X), CELLS, CLASSES, model, answers)


def play(path: Path, keys: Sequence[str]) -> tuple[Session, list[str], list[int]]:
    """Press keys; return the session, what was shown before each of them, and how many answers there were then."""
    shown, kept = list[str](), list[int]()

    def press(text: str) -> str:
        shown.append(text)
        kept.append(len(path.read_text(encoding="utf-8").splitlines()) - 1)
        return keys[len(shown) - 1]

    with open_session(path) as session:
        ask(session, COLUMNS, press)
    return session, shown, kept


class TestSession:
    def test_answers_move_the_prototypes_as_samples_do(self, tmp_path: Path) -> None:
        model = make_model(("ant", "bee"))
        before = model.network.prototypes.clone()
        with open_session(tmp_path / "answers.csv", model) as session:
            for row in (3, 8):
                session.answer(row, CLASSES[int(Y[row])])
            assert session.network is not None
            expected = make_model(("ant", "bee")).network
            expected.add_samples(X[[3, 8]], Y[[3, 8]])
            torch.testing.assert_close(session.network.prototypes, expected.prototypes)
            sure = expected(X[session.list_left()]).softmax(dim=1).amax(dim=1).mean()
            assert session.summary().startswith(f"mean predicted probability {100 * sure:.0f} % on 22 unlabelled rows")
            assert session.undo() == (8, f"undone: it was labelled {CLASSES[int(Y[8])]}")
            assert session.undo() == (3, f"undone: it was labelled {CLASSES[int(Y[3])]}")
            assert session.undo() is None
            torch.testing.assert_close(session.network.prototypes, before)
        assert torch.equal(model.network.prototypes, before)

    def test_without_a_model_it_is_fitted_to_the_answers(self, tmp_path: Path) -> None:
        with open_session(tmp_path / "answers.csv") as session:
            assert session.summary() == "no model yet: two classes need labels"
            first = session.choose()
            assert len(first) == BATCH
            assert {int(Y[row]) for row, _ in first} == {0, 1}
            rows = [row for row, _ in first]
            for row in rows:
                session.answer(row, CLASSES[int(Y[row])])
            session.learn(anew=True)
            assert session.network is not None
            torch.testing.assert_close(session.network(X), fit_answers(X[rows], Y[rows], 2, None)(X))
            more = session.choose()
            assert not {row for row, _ in more} & set(rows)
            session.answer(more[0].row, "ant")
            assert re.search(r"% on 18 unlabelled rows; \d of your last \d labels", session.summary())
            for _ in range(3):
                session.undo()  # beyond what it was fitted to
            torch.testing.assert_close(session.network(X), fit_answers(X[rows[:3]], Y[rows[:3]], 2, None)(X))
        with open_session(tmp_path / "answers.csv") as again:
            assert again.done == rows[:3]

    def test_answers_of_another_table_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "answers.csv").write_text("p,q,r,s,label\n1,2,3,4,ant\n", encoding="utf-8")
        message = "`table` must be the table of the labels; got a label 'ant'"
        with pytest.raises(InputError, match=message), open_session(tmp_path / "answers.csv"):
            pass

    def test_equal_rows_are_asked_for_once_each(self, tmp_path: Path) -> None:
        x = torch.tensor([[0.0], [1.0]]).repeat(3, 1)
        cells = [[f"{value:g}"] for value in x[:, 0].tolist()]
        rows = make_rows(x, ("p",))
        with Answers(tmp_path / "answers.csv", ["p", "label"], CLASSES) as answers:
            session = Session(rows, cells, CLASSES, None, answers)
            for row in (4, 2):
                session.answer(row, "ant")
            assert Session(rows, cells, CLASSES, None, answers).done == [0, 2]
            known = torch.tensor([True, False, False, True, False, False])
            session = Session(rows._replace(known=known), cells, CLASSES, None, answers)
            assert session.done == [2, 4]
            assert session.list_left().tolist() == [1, 5]
            assert {row for row, _ in session.choose()} == {1, 5}

    def test_the_last_key_is_taken_back(self, tmp_path: Path) -> None:
        session, shown, kept = play(tmp_path / "answers.csv", ["2", "s", "u", "s", "u", "u", "u", "q"])
        lines = [text.split("\n")[1] for text in shown]
        first, second = (re.findall(r"row \d+ ", text)[0] for text in lines[:2])
        assert kept == [0, 1, 1, 1, 1, 1, 0, 0]
        assert lines[3] == lines[5] == f"{second}(1 labelled): undone: it was skipped"
        assert lines[6] == f"{first}(0 labelled): undone: it was labelled bee"
        assert lines[7] == lines[6]  # there is nothing more
        assert not session.skipped

    def test_keys(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        session, shown, _ = play(tmp_path / "answers.csv", ["1", "x", "", "2", "u", "s", *"1212" * 9])
        assert len(session.answers.rows) == 23
        assert capsys.readouterr().out.endswith("all rows are labelled; 1 row skipped\n")
        rows = [int(number) for number in re.findall(r"^\nrow (\d+) ", "\n".join(shown), re.MULTILINE)]
        assert rows[1] == rows[3]  # taken back
        assert "undone" in shown[5]
        assert shown[0].endswith("\n1 ant  2 bee  s skip  u undo  q quit")
        assert shown[2:4] == ["", ""]
        assert shown[0].split("\n")[2] == f"  p = {CELLS[rows[0]][0]}"


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.screen, theirs = pty.openpty()
        command = [sys.executable, "-m", "protonet", *words]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder)
        os.close(theirs)
        self.text = ""

    def wait_for(self, text: str) -> str:
        """Return what was shown up to a text, which must come within a minute."""
        end = time.monotonic() + 60
        while text not in self.text:
            ready, _, _ = select.select([self.screen], [], [], max(0.0, end - time.monotonic()))
            assert ready, self.text
            try:
                self.text += os.read(self.screen, 65536).decode()
            except OSError:  # it has ended
                pytest.fail(self.text)
        shown, self.text = self.text.split(text, 1)
        return shown

    def press(self, keys: bytes) -> None:
        os.write(self.screen, keys)

    def end(self) -> int:
        code = self.process.wait(60)
        os.close(self.screen)
        return code


def test_in_a_terminal_killed_and_taken_up_again(tmp_path: Path, run: Run) -> None:
    x, y = blobs(1, classes=2, rows=8, dim=2, noise=0.5)
    columns = {"picture": [f"pictures/{number} ü.png" for number in range(16)]}
    write_columns(tmp_path / "rest.csv", columns | {"p": x[:, 0].tolist(), "q": x[:, 1].tolist()})
    words = ["label", "rest.csv", "--classes", "ant,bee", "--label", "kind"]
    output, answered = tmp_path / "rest-labelled.csv", list[str]()

    def answer(terminal: Terminal) -> None:
        shown = terminal.wait_for("q quit\r\n")
        path = re.findall(r"picture = (.*?)\r\n", shown)[-1]
        terminal.press(b"12"[int(y[int(path.split("/")[1].split()[0])]) :][:1])
        answered.append(path)
        terminal.wait_for("line ")  # the next one

    terminal = Terminal(tmp_path, *words)
    for _ in range(3):
        answer(terminal)
    terminal.process.kill()
    assert terminal.end() == -9
    terminal = Terminal(tmp_path, *words)
    assert "(3 labelled)" in terminal.wait_for(")") + ")"
    for _ in range(4):
        answer(terminal)
    terminal.wait_for("q quit\r\n")
    terminal.press(b"\x1b[1~")  # Home is no 1
    time.sleep(0.2)
    terminal.press(b"q")
    terminal.wait_for("7 labels in rest-labelled.csv: the same command continues")
    assert terminal.end() == 0
    header, *rows = csv.reader(output.read_text(encoding="utf-8").splitlines())
    assert header == ["picture", "p", "q", "kind"]
    assert [row[0] for row in rows] == answered
    assert len(set(answered)) == 7
    names = [CLASSES[int(y[int(path.split("/")[1].split()[0])])] for path in answered]
    assert [row[-1] for row in rows] == names
    assert "2 classes, 7 samples" in run("fit", output, *FAST)
