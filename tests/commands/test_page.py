"""The command ``page``: a real server that is killed, restarted and used by several clients."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from tests.commands.cases import Run
from tests.commands.servers import TOKEN, Server, make_requests, start, wait_for_job

pytest.importorskip("uvicorn", reason="it listens")
Image = pytest.importorskip("PIL.Image", reason="it draws pictures")
KINDS = ["ant", "bee", "cow"]
TEXTS = ["good day", "bad day", "good night", "bad night", "so so", "well done", "not done", "fine"]
JSON = {"Content-Type": "application/json"}


def write_table(path: Path, rows: int) -> None:
    """Write a table whose row i has class ``KINDS[i % 3]``."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, 3)) + 4 * np.eye(3)[np.arange(rows) % 3]
    lines: list[list[object]] = [["number", "a", "b", "مرحبا"]]
    lines += [[row, *map("{:.4f}".format, cells)] for row, cells in enumerate(x.tolist())]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)


def read_answers(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("desk") / "rest.csv"
    write_table(path, 90)
    return path


@pytest.fixture(scope="module")
def server(table: Path) -> Iterator[Server]:
    with start("page", table, "-o", table.with_name("answers.csv")) as server:
        yield server
        code, output = server.end()
        assert (code, output) == (0, "server stopped; pending requests were answered\n")


def test_a_row_is_labelled_undone_skipped_flagged_and_corrected(server: Server, table: Path) -> None:
    path = table.with_name("answers.csv")
    first = server.act("next")
    assert first == server.act("next")
    assert first["likely"] == []
    row = first["row"]
    second = server.act("label", row=row, name=" ant ")
    assert second["row"] != row
    assert second["near"] == [{"row": row, "name": "ant", "cells": first["cells"], "picture": True}]
    assert read_answers(path) == [[*first["cells"], "ant"]]
    assert server.act("label", row=row, name="ant")["answered"] == 1  # a repeated label counts once
    assert server.refuse_action("label", "two", row=row, name="bee")[0] == 409
    assert server.act("relabel", row=row, name="ant")["answered"] == 1
    wrong = {"": "name of up to 100 characters", "NA": "no missing value", "a\x07": "name of up to", 7: "name"}
    for name, line in wrong.items():
        assert line in server.refuse_action("label", row=second["row"], name=name)[1]
    third = server.act("label", row=second["row"], name="bee")
    assert server.refuse_action("relabel", row=third["row"], name="bee")[0] == 409
    server.act("relabel", row=row, name="bee")
    assert [line[-1] for line in read_answers(path)] == ["bee", "bee"]
    assert server.act("undo", row=row)["row"] == row
    assert [line[-1] for line in read_answers(path)] == ["bee"]
    assert server.act("skip", row=row)["row"] != row
    fourth = server.act("next")
    server.act("flag", row=fourth["row"])
    flags = table.with_name("answers.flagged.csv")
    assert read_answers(flags) == [[*fourth["cells"], "flagged"]]
    back = server.act("undo", row=fourth["row"])
    assert (back["row"], back["flagged"]) == (fourth["row"], 0)
    assert read_answers(flags) == []
    for bad in (-1, 90, "1", 1.5, True, None):
        status, line = server.refuse_action("label", row=bad, name="ant")
        assert (status, "row" in line) == (400 if type(bad) is not int else 404, True)


def test_two_users_never_get_the_same_row_and_all_labels_are_saved(server: Server, table: Path) -> None:
    before = len(read_answers(table.with_name("answers.csv")))
    seen: list[int] = []

    def label(tab: str) -> None:
        result = server.act("next", tab)
        for _ in range(20):
            seen.append(result["row"])
            result = server.act("label", tab, row=result["row"], name=KINDS[result["row"] % 3])
        server.act("leave", tab)

    threads = [threading.Thread(target=label, args=(tab,)) for tab in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == len(set(seen)) == 40
    answers = read_answers(table.with_name("answers.csv"))
    assert len(answers) == before + 40
    assert sorted(int(line[0]) for line in answers[before:]) == sorted(seen)
    for what in ("skip", "flag"):  # another user has labelled it: the next undo is not theirs
        assert server.refuse_action(what, "late", row=seen[0])[0] == 409


def test_rows_are_labelled_together_and_column_types_are_set(server: Server, table: Path) -> None:
    path, flags = table.with_name("answers.csv"), table.with_name("answers.flagged.csv")
    before, result = len(read_answers(path)), server.act("next", "many")
    done = {int(line[0]) for line in read_answers(path)}
    free = [row for row in range(90) if row not in done][:4]
    assert server.act("label_many", "many", rows=[*free[:3], *done], name="dog")["answered"] == before + 3
    assert [line[0::4] for line in read_answers(path)[before:]] == [[str(row), "dog"] for row in free[:3]]
    assert server.act("label_many", "many", rows=free, name=None)["flagged"] == 1
    assert [line[0] for line in read_answers(flags)] == [str(free[3])]
    server.act("undo", "many", row=free[3])
    for row in free[:3]:
        server.act("undo", "many", row=row)
    assert len(read_answers(path)) == before
    for rows in ([90], [-1], "all", [True], list(range(90)) * 3):
        line = server.refuse_action("label_many", "many", rows=rows, name="dog")[1]
        assert "rows" in line
    state = server.ask_json("GET", "/api/state")
    assert [(item["name"], item["type"]) for item in state["columns"]] == [
        *((name, "number") for name in ("a", "b", "مرحبا")),
        ("number", "not used"),
    ]
    for column, choice, option in (("a", "drop", "--drop a"), ("b", "category", "--column-type b=category")):
        state = server.act("columns", column=column, choice=choice)
        assert option in state["commands"][0]
    state = server.act("columns", column="number", choice="group")
    assert "--group number --drop a --column-type b=category" in state["commands"][0]
    for column, choice, line in (
        ("z", "drop", "`column` must be one of the table"),
        ("a", "tree", "`choice` must be one of number"),
        ("b", "picture", "`choice` must be one of number, category, date, text, drop, group, or empty"),
        ("b", "drop", ""),
        ("مرحبا", "drop", "`columns` must have columns beside the classes"),
    ):
        body = json.dumps({"tab": "one", "column": column, "choice": choice})
        status, content, _ = server.ask("POST", "/api/columns", body)
        assert (status, line in content.decode()) == (400 if line else 200, True), content
    for column in ("a", "b", "number"):
        state = server.act("columns", column=column, choice="")
    assert "--drop" not in state["commands"][0]
    assert result["row"] is not None


def test_labels_are_reviewed_and_classes_are_renamed_and_merged(server: Server, table: Path) -> None:
    path = table.with_name("answers.csv")
    for index, name in enumerate(KINDS):  # whatever the other tests have labelled
        server.act("label_many", rows=list(range(index, 60, 3)), name=name)
    lines = read_answers(path)
    listed = server.act("labels")
    assert (listed["total"], listed["differing"]) == (len(lines), 0)  # no results yet
    bees = server.act("labels", name="bee")
    assert {item["name"] for item in bees["rows"]} == {"bee"}
    cells = bees["rows"][-1]["cells"]
    assert server.act("labels", text=cells[1])["rows"][0]["cells"] == cells
    # A new class that is similar to another one is not created unless it is meant.
    row = server.act("next")["row"]
    for name in ("Cow", "COW "):
        assert server.act("label", row=row, name=name) == {"similar": "cow"}
    assert len(read_answers(path)) == len(lines)
    label, rename = {"row": row, "name": "Cow", "create": True}, {"old": "Cow", "name": "ox"}
    for action, more in (("label", label), ("rename", rename)):
        counts = {item["name"]: item["rows"] for item in server.act(action, **more)["classes"]}
        assert counts[more["name"]] == 1
    assert (counts["ox"], "Cow" in counts) == (1, False)
    merged = {item["name"]: item["rows"] for item in server.act("rename", old="ox", name="cow")["classes"]}
    assert merged == {name: n + (name == "cow") for name, n in counts.items() if name != "ox"}
    assert {line[-1] for line in read_answers(path)} == set(KINDS)
    assert server.refuse_action("rename", old="fox", name="cow")[0] == 404
    again = server.act("undo", row=row)
    assert (again["row"], [item["name"] for item in again["classes"]]) == (row, list(merged))


def test_renamings_and_merges_are_undone(tmp_path: Path) -> None:
    write_table(tmp_path / "rest.csv", 30)
    path = tmp_path / "out.csv"
    with start("page", tmp_path / "rest.csv", "-o", path) as server:
        for index, name in enumerate(("red", "green", "blue")):
            server.act("label_many", rows=list(range(index, 12, 3)), name=name)
        before = read_answers(path)
        server.act("rename", old="green", name="red")
        server.act("relabel", row=1, name="blue")
        value = server.act("undo_rename", old="green", name="red")
        assert [(item["name"], item["rows"]) for item in value["classes"]] == [("red", 4), ("green", 3), ("blue", 5)]
        server.act("relabel", row=1, name="green")
        assert read_answers(path) == before
        server.act("rename", old="blue", name="violet")
        server.act("label", row=20, name="violet")
        assert [item["name"] for item in server.act("next")["classes"]] == ["red", "green", "violet"]
        value = server.act("undo_rename", old="blue", name="violet")
        assert [(item["name"], item["rows"]) for item in value["classes"]] == [("red", 4), ("green", 4), ("blue", 5)]
        assert {line[-1] for line in read_answers(path)} == {"red", "green", "blue"}
        for old, new in (("blue", "violet"), ("green", "red"), ("x", "y")):
            status, line = server.refuse_action("undo_rename", old=old, name=new)
            assert (status, line) == (409, f"`old` must be a class that was renamed; got {old!r}.")
        # The model is fitted to the changed classes; until then the page waits, and does not claim that labels miss.
        server.act("rename", old="green", name="red")
        status, content, headers = server.ask("GET", "/api/map")
        assert status == 200 or (headers["retry-after"], b"is being fitted" in content) == ("1", True)


def test_results_follow_labels_that_were_given_during_a_job(tmp_path: Path) -> None:
    write_table(tmp_path / "rest.csv", 80)
    with start("page", tmp_path / "rest.csv", "-o", tmp_path / "out.csv") as server:
        for first in (0, 20, 47):
            for index, name in enumerate(KINDS):
                server.act(
                    "label_many",
                    rows=list(range(first + index, (first or 0) + (27 if first == 20 else 20), 3)),
                    name=name,
                )
        while (state := server.ask_json("GET", "/api/jobs"))["checked"] < 67 or state["running"]:
            time.sleep(0.1)
        assert (state["answered"], state["metrics"]["data"]["rows"]) == (67, 67)


def test_a_labelled_table_is_reviewed(tmp_path: Path) -> None:
    write_table(tmp_path / "plain.csv", 30)
    with (tmp_path / "plain.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    labels = [KINDS[row % 3] for row in range(30)]
    labels[4] = "cow"  # which is a bee
    with (tmp_path / "all.csv").open("w", newline="", encoding="utf-8") as file:
        lines = ([*cells, name] for cells, name in zip(rows, labels, strict=True))
        csv.writer(file).writerows([[*header, "label"], *lines])
    output = tmp_path / "reviewed.csv"
    with start("page", tmp_path / "all.csv", "-o", output) as server:
        assert server.act("next")["row"] is None
        server.act("jobs", job="results")
        state = wait_for_job(server)
        assert (state["check"]["accuracy"], state["checked"]) == (state["metrics"]["accuracy"], 30)
        assert 1 <= state["next_check"] <= 20
        listed = server.act("labels")
        assert (listed["total"], listed["differing"]) == (30, 1)
        assert (listed["rows"][0]["row"], listed["rows"][0]["predicted"]) == (4, "bee")
        assert [line[-1] for line in read_answers(output)] == labels
        server.act("relabel", row=4, name="bee")
    with start("page", tmp_path / "all.csv", "-o", output) as server:
        assert server.act("labels")["total"] == 30
    assert [line[-1] for line in read_answers(output)] == [*labels[:4], "bee", *labels[5:]]


def test_unauthorized_and_random_requests_are_refused(server: Server, table: Path) -> None:
    before = table.with_name("answers.csv").read_bytes()
    assert server.refuse("GET", "/api/state", token="")[0] == 401
    assert server.refuse("GET", "/", headers={"Host": "evil.example"})[0] == 400
    assert server.refuse("POST", "/api/next", '{"tab": "x"}', headers={"Origin": "http://evil.example"})[0] == 403
    assert server.refuse("GET", "/download?file=..%2f..%2fetc%2fpasswd")[0] == 404
    assert server.refuse("GET", "/download?file=model")[0] == 404
    assert server.refuse("GET", "/picture?row=0")[0] == 404
    paths = ["/", "/api/label", "/api/next", "/api/rows", "/api/try", "/picture?row=x", "/download?file=x", "/api/jobs"]
    for method, path, body, headers in make_requests(1, 80, paths, TOKEN):
        if path == "/api/jobs" and method == "POST":
            continue
        status, content, _ = server.ask(method, path, body, headers, token="")
        assert 200 <= status < 500, (status, content, method, path, body)
        assert b"Traceback" not in content
    assert table.with_name("answers.csv").read_bytes() == before


def test_confirmed_labels_survive_a_kill(tmp_path: Path) -> None:
    answers, confirmed, draw = tmp_path / "answers.csv", dict[int, str](), random.Random(0)
    write_table(tmp_path / "rest.csv", 24)
    with suppress(OSError, HTTPException), start("page", tmp_path / "rest.csv", "-o", answers) as server:
        question = server.act("next")
        while question["row"] is not None:
            row = question["row"]
            question = server.act("label", row=row, name=KINDS[row % 3])
            confirmed[row] = KINDS[row % 3]
            if len(confirmed) == 3:
                threading.Timer(draw.uniform(0.0, 0.01), server.process.kill).start()
    saved = {int(line[0]): line[-1] for line in read_answers(answers)}
    assert len(saved) == len(read_answers(answers))
    assert confirmed.items() <= saved.items()
    assert 3 <= len(saved) <= len(confirmed) + 1  # one may be on the disk, and its answer on the way
    assert all(name == KINDS[row % 3] for row, name in saved.items())


def draw(colour: tuple[int, int, int], kind: str = "PNG", side: int = 16) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(file, kind)
    return file.getvalue()


def test_a_row_that_is_unlike_the_table_is_farther_from_every_class_than_its_rows(tmp_path: Path) -> None:
    centres = np.array([[0, 0], [4, 0], [0, 4]])
    points = centres[np.arange(60) % 3] + 0.5 * np.random.default_rng(0).normal(size=(60, 2))
    lines = ["x,y", *(f"{x:.3f},{y:.3f}" for x, y in points)]
    (tmp_path / "points.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with start("page", tmp_path / "points.csv", "-o", tmp_path / "out.csv") as server:
        for row in range(12):
            server.act("label", row=row, name="abc"[row % 3])

        def try_point(x: float, y: float) -> dict[str, Any]:
            status, answer, _ = server.ask("POST", "/api/try", json.dumps({"rows": [[str(x), str(y)]]}), JSON)
            return json.loads(answer) if status == 200 else {"likely": [{"probability": 0.0}]}

        until = time.monotonic() + 60
        while try_point(4, 0)["likely"][0]["probability"] < 0.9:  # until a network is fitted to all labels
            assert time.monotonic() < until
            time.sleep(0.05)
        assert try_point(4, 0)["farther"] > 0.3
        assert try_point(-40, -40)["farther"] < 0.05


def test_classes_are_merged_during_fits(tmp_path: Path) -> None:
    """The network is fitted in a thread: a merge during a fit changes the indices of the classes."""
    (tmp_path / "texts.csv").write_text("\n".join(["note", *TEXTS, ""]), encoding="utf-8")
    with start("page", tmp_path / "texts.csv", "--representation", "none", "-o", tmp_path / "out.csv") as server:
        for number in range(8):
            for row in range(len(TEXTS)):
                path = "relabel" if number else "label"
                server.act(path, row=row, name=["first", "plus", "minus"][row % 3], create=True)
            server.act("rename", old="first", name="plus")
        until = time.monotonic() + 60
        while server.ask("GET", "/api/map")[0] == 409:  # until a network is fitted
            assert time.monotonic() < until
            time.sleep(0.05)
        assert set(server.ask_json("GET", "/api/map")["names"]) == {"plus", "minus"}
        assert server.end() == (0, "server stopped; pending requests were answered\n")


def test_dropped_pictures_become_rows(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    random = np.random.default_rng(0)
    for index in range(6):
        pixels = random.integers(0, 255, (16, 16, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{index}.png")
    output = tmp_path / "out.csv"
    with start("page", tmp_path / "pictures", "--representation", "none", "-o", output) as server:
        before = sorted(tmp_path.rglob("*"))
        assert server.ask_json("GET", "/api/state")["adds"] == "pictures"
        names = ["../../evil.sh", "%00%0A<img>.png", "a.jpg", "C:\\x\\con.png", ""]
        for number, name in enumerate(names):
            content = draw((40 * number, 0, 200), "JPEG" if number == 2 else "PNG")
            for times in (1, 0):  # the same picture again is no second row
                path = f"/api/add_picture?name={name.replace('<', '%3C').replace('>', '%3E')}"
                status, answer, _ = server.ask("POST", path, content)
                assert (status, json.loads(answer)["added"]) == (200, times)
        new = [path for path in sorted(tmp_path.rglob("*")) if path not in before]
        assert {path.parent for path in new if path.suffix in {".png", ".jpeg"}} == {tmp_path / "out.added"}
        assert {path.relative_to(tmp_path).parts[0] for path in new} == {"out.added", "out.added.csv"}
        assert sorted(path.suffix for path in (tmp_path / "out.added").iterdir()) == [".jpeg", *[".png"] * 4]
        large = server.refuse("POST", "/api/add_picture?name=a.png", draw((1, 1, 1), side=5001))
        assert (large[0], "got 25,010,001, and" in large[1]) == (400, True)
        for bad in (b"", b"<svg onload='alert(1)'/>", b"%!PS-Adobe-3.0 EPSF-3.0", draw((1, 1, 1))[:60]):
            status, line = server.refuse("POST", "/api/add_picture?name=a.png", bad)
            assert (status, "must be a picture that can be read" in line) == (400, True)
        assert server.refuse_action("add", text="a text")[0] == 409
        assert server.act("next")["left"] == 11
        assert server.ask("GET", "/picture?row=10")[1].startswith(b"\x89PNG")
        server.act("label", row=10, name="blue")
    with start("page", tmp_path / "pictures", "--representation", "none", "-o", output) as server:
        assert (server.act("next")["answered"], server.act("next")["left"]) == (1, 10)
    inside = tmp_path / "pictures" / "inside.csv"
    with start("page", tmp_path / "pictures", "--representation", "none", "-o", inside) as server:
        assert "pass another -o" in server.refuse("POST", "/api/add_picture?name=a.png", draw((9, 9, 9)))[1]


def test_texts_are_labelled_by_several_people_and_added(tmp_path: Path) -> None:
    table, output = tmp_path / "texts.csv", tmp_path / "out.csv"
    table.write_text("\n".join(["note", *TEXTS, ""]), encoding="utf-8")
    page = ("page", table, "--representation", "none", "-o", output)
    with start(*page) as server:
        for row, person in enumerate(["", "Ann", "Bo", "Ann"]):
            server.act("label", row=row, name="plus", by=person)
        server.act("relabel", row=3, name="minus", by="Bo")
        server.act("relabel", row=2, name="minus")
        server.act("label_many", rows=[4, 5], name="minus", by=" Ann ")
        assert "printable" in server.refuse_action("label", row=6, name="plus", by="a\x07")[1]
        # A duplicated tab has the identifier and the steps of the first one: both clients here are "one".
        row = server.act("next")["row"]
        assert server.act("next")["row"] == row  # the duplicate has the same question
        assert server.act("label", row=row, name="plus")["label"] == "plus"
        assert server.refuse_action("label", row=row, name="minus")[0] == 409
        assert server.act("relabel", row=row, name="minus", seen="plus")["label"] == "minus"
        for path, more in (("undo", {}), ("relabel", {"name": "plus"})):
            status, line = server.refuse_action(path, row=row, seen="plus", **more)
            assert (status, "has the label 'minus' now" in line) == (409, True)
        other = server.act("next")["row"]
        server.act("skip", row=other)
        server.act("label", "two", row=other, name="plus")
        # The duplicate skipped it, and another client labelled it.
        assert server.refuse_action("undo", row=other, seen=None)[0] == 409
        undone = server.act("undo", row=other, seen="plus")
        assert (undone["row"], undone["label"]) == (other, None)
        assert "no label any more" in server.refuse_action("undo", row=other, seen="plus")[1]
        assert server.ask_json("GET", "/api/state")["adds"] == "texts"
        added = server.act("add", text=" quite good \r\n\ngood day\n=1+1\nquite good\n")
        assert (added["added"], added["left"]) == (2, 3)  # neither the empty line nor what there is already
        assert server.act("add", text="quite good")["added"] == 0
        assert "20,000 characters" in server.refuse_action("add", text="x" * 20_001)[1]
        assert server.refuse("POST", "/api/add_picture?name=a.png", draw((1, 2, 3)))[0] == 409
        assert server.act("label", row=8, name="plus")["answered"] == 8
    with start(*page) as server:
        state = server.act("next")
        assert (state["answered"], state["left"]) == (8, 2)
        assert server.ask_json("POST", "/api/rows", {"tab": "one", "rows": [9]})[0]["cells"] == ["=1+1"]
        listed = server.act("labels")
        people = {line["row"]: line["by"] for line in listed["rows"]}
        assert people == {0: "", 1: "Ann", 2: "", 3: "Bo", 4: "Ann", 5: "Ann", row: "", 8: ""}
        assert listed["people"] == ["Ann", "Bo"]
        assert {line["row"] for line in server.act("labels", person="Ann")["rows"]} == {1, 4, 5}
        assert {line["row"] for line in server.act("labels", person="")["rows"]} == {0, 2, row, 8}
    assert output.read_text(encoding="utf-8").splitlines()[0] == "note,label"  # the names are no feature of a fit
    lines = (tmp_path / "out.by.csv").read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["by,note,label", "Ann,bad day,plus"]
    assert read_answers(tmp_path / "out.added.csv") == [["quite good", "added"], ["'=1+1", "added"]]


def test_answers_of_two_people_are_kept_and_compared(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("\n".join(["note", *TEXTS, ""]), encoding="utf-8")
    page = ("page", tmp_path / "texts.csv", "--representation", "none", "-o", tmp_path / "out.csv")
    answers = tmp_path / "out.answers.csv"
    with start(*page) as server:
        for row, name in enumerate(["plus", "minus", "plus", "minus", "plus"]):
            server.act("label", row=row, name=name, by="Ann")
        assert not answers.exists()  # nobody has given a second answer
        assert server.act("labels")["agreement"] == []
        # Bo is asked the rows of Ann, without a hint at her answers; Ann and people without a name are not.
        assert server.act("next", "ann", by="Ann", second=True)["row"] not in range(5)
        assert server.act("next", "nobody", second=True)["row"] not in range(5)
        asked = server.act("next", "bo", by="Bo", second=True)
        for name, row in (("plus", 0), ("plus", 1), ("plus", 2), ("minus", 3)):
            assert (asked["row"], asked["second"]) == (row, True)
            assert asked["likely"] == [{"name": other, "probability": None} for other in ("plus", "minus")]
            if row == 1:
                asked = server.act("label", "bo", row=row, name="minus", by="Bo", second=True)
                asked = server.act("undo", "bo", row=row, by="Bo", seen="minus", second=True)
                assert (asked["row"], asked["answered"]) == (1, 5)  # the label of Ann remains
            asked = server.act("label", "bo", row=row, name=name, by="Bo", second=True)
        assert asked["row"] == 4
        assert server.act("skip", "bo", row=4, by="Bo", second=True)["row"] != 4
        assert server.act("undo", "bo", row=4, by="Bo", second=True)["row"] == 4
        server.act("label", "bo", row=3, name="minus", by="Bo")  # a repeated request
        line = "`row` must be without your answer; got one that you have answered."
        assert server.refuse_action("label", "bo", row=3, name="plus", by="Bo") == (409, line)
        assert server.refuse_action("label", "nobody", row=3, name="plus")[0] == 409
        assert [line[-1] for line in read_answers(tmp_path / "out.csv")] == ["plus", "minus", "plus", "minus", "plus"]
        result = server.act("labels", disputed=True)
        (row,) = result["rows"]
        assert (row["row"], row["name"], row["by"]) == (1, "minus", "Ann")
        assert row["answers"] == [{"by": "Ann", "name": "minus"}, {"by": "Bo", "name": "plus"}]
        kappa = cohen_kappa_score(["plus", "minus", "plus", "minus"], ["plus", "plus", "plus", "minus"])
        before = [{"people": ["Ann", "Bo"], "rows": 4, "agreement": 0.75, "kappa": pytest.approx(kappa)}]
        assert result["agreement"] == before
        # Neither a review, which knows both answers, nor a renaming or merge that is undone changes the agreement.
        server.act("relabel", row=1, name="plus", by="Bo")
        for new in ("good", "minus"):
            server.act("rename", old="plus", name=new)
            (renamed,) = server.act("labels")["agreement"]
            assert renamed["agreement"] == (0.75 if new == "good" else 1.0)
            assert (renamed["kappa"] is None) == (new == "minus")  # one class: it is not defined
            server.act("undo_rename", old="plus", name=new)
            assert server.act("labels")["agreement"] == before
    lines = answers.read_text(encoding="utf-8").splitlines()
    assert lines[:5] == ["by,note,label", *(f"{who},{TEXTS[0]},plus" for who in ("Ann", "Bo")), *lines[3:5]]
    assert sorted(lines[3:5]) == [f"Ann,{TEXTS[1]},minus", f"Bo,{TEXTS[1]},plus"]
    with start(*page) as server:
        assert server.act("labels")["agreement"] == before
        assert server.act("next", "bo", by="Bo", second=True)["row"] == 4
        # A label that is undone and given again is compared with the answer that is still there.
        server.act("undo", row=2, by="Ann", seen="plus")
        server.act("label", row=2, name="minus", by="Ann")
        assert server.act("labels")["agreement"][0]["agreement"] == 0.5


def test_guidelines_are_shown_and_checked_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, guidelines = tmp_path / "texts.csv", tmp_path / "guidelines.txt"
    table.write_text("\n".join(["note", *TEXTS, ""]), encoding="utf-8")
    guidelines.write_text("\ufeffGood news is <b>plus</b>.\n\nAll else is minus.\n", encoding="utf-8")
    page = ("page", table, "--representation", "none", "-o", tmp_path / "out.csv", "--guidelines", guidelines)
    with start(*page) as server:
        text = "Good news is <b>plus</b>.\n\nAll else is minus."
        assert server.ask_json("GET", "/api/state")["guidelines"] == text
    for content, message in (
        (b"\xff\xfe\x00", "`--guidelines` must be a text in UTF-8"),
        (b"x" * 100_001, "`--guidelines` must be a text of at most 100 kB"),
        (None, "no such file"),
    ):
        if content is None:
            guidelines.unlink()
        else:
            guidelines.write_bytes(content)
        assert message in Run(capsys, tmp_path)(*page, code=2)


def test_a_page_without_a_table_starts_with_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.csv"
    page = ("page", "--classes", "red", "--representation", "none", "-o", output)
    draws = np.random.default_rng(0)

    def colour(name: str) -> tuple[int, int, int]:
        shade = int(draws.integers(190, 250))
        return (shade, 20, 30) if name == "red" else (30, 20, shade)

    with start(*page) as server:
        assert (server.act("next")["row"], server.act("next")["left"]) == (None, 0)
        state = server.ask_json("GET", "/api/state")
        assert (state["adds"], state["header"], state["used"]) == ("pictures", ["picture"], ["picture"])
        assert server.act("add_class", name="Red") == {"similar": "red"}
        assert [item["name"] for item in server.act("add_class", name=" blue ")["classes"]] == ["red", "blue"]
        assert "printable" in server.refuse_action("add_class", name="")[1]
        for name in ["red", "blue"] * 4:
            status, answer, _ = server.ask("POST", "/api/add_picture?name=a.png", draw(colour(name)))
            assert status == 200, answer
            server.act("label", row=json.loads(answer)["row"], name=name, by="Ann")
        until = time.monotonic() + 60
        for name in ("red", "blue"):
            while True:  # until a network is fitted to all labels
                status, answer, _ = server.ask("POST", "/api/try", draw(colour(name)), {"Content-Type": "image/png"})
                if status == 200 and json.loads(answer)["likely"][0]["name"] == name:
                    break
                assert time.monotonic() < until, answer
                time.sleep(0.05)
        server.act("jobs", job="export")
        state = wait_for_job(server)
        assert (state["error"], state["ready"]) == ("", ["model", "report", "predictions"])
    assert len(read_answers(output)) == 8
    for command in (page, (*page, "--classes", "red"), ("page", tmp_path / "out.added", *page[3:])):
        with start(*command) as server:  # the same command continues, as does its folder
            assert (server.act("next")["answered"], server.act("next")["left"]) == (8, 0)
            for command_line in server.ask_json("GET", "/api/state")["commands"]:
                assert command_line.startswith(("protonet fit", "protonet predict"))
    for option, value in (("--model", "a.protonet"), ("--drop", "a"), ("--column-type", "a=text")):
        assert "must come with a table if" in Run(capsys, tmp_path)("page", option, value, code=2)


def test_temporary_folders_of_killed_servers_are_removed(tmp_path: Path) -> None:
    write_table(tmp_path / "rest.csv", 9)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "protonet-project").mkdir()  # of the user
    settings = {"TMPDIR": str(tmp_path / "tmp")}

    def list_folders() -> set[Path]:
        """List the folders, which become an hour older."""
        folders = {*(tmp_path / "tmp").iterdir()}
        for path in folders:
            os.utime(path, (time.time() - 3600,) * 2)
        return folders

    def start_page(name: str) -> AbstractContextManager[Server]:
        return start("page", tmp_path / "rest.csv", "-o", tmp_path / name, environment=settings)

    with start_page("first.csv") as server:
        first = list_folders()
        assert len(first) == 2
        server.process.kill()
        server.process.join()
    assert list_folders() == first
    with start_page("second.csv") as server:
        second = list_folders()
        assert (len(second), len(second & first)) == (2, 1)
        with start_page("third.csv") as other:
            assert len(list_folders() - second) == 1  # that of the running server remains
            assert other.end()[0] == 0
        assert list_folders() == second
        assert server.end()[0] == 0
    assert [path.name for path in list_folders()] == ["protonet-project"]
