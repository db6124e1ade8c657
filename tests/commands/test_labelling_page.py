"""The command ``page``: a real server, killed and used by two clients, and a real Chromium that labels by keys."""

from __future__ import annotations

import csv
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import numpy as np
import pytest

from protonet.commands.data import NO_OVERRIDES, ColumnOverrides
from protonet.commands.options import ReadOptions
from protonet.server.jobs import JobRunner
from tests.browser import CHROMIUM, Browser, every
from tests.commands.cases import Run
from tests.commands.noise import make_requests
from tests.commands.servers import TOKEN, Server, start, wait_for_job

pytest.importorskip("uvicorn", reason="it listens")
Image = pytest.importorskip("PIL.Image", reason="it draws pictures")
KINDS = ["ant", "bee", "cow"]


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
    for name, line in (
        ("", "name of up to 100 characters"),
        ("NA", "no missing value"),
        ("a\x07", "name of up to"),
        (7, "name"),
    ):
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
        status, content, _ = server.ask(
            "POST", "/api/columns", json.dumps({"tab": "one", "column": column, "choice": choice})
        )
        assert (status, line in content.decode()) == (400 if line else 200, True), content
    for column in ("a", "b", "number"):
        state = server.act("columns", column=column, choice="")
    assert "--drop" not in state["commands"][0]
    assert result["row"] is not None


def test_labels_are_reviewed_and_classes_are_renamed_and_merged(server: Server, table: Path) -> None:
    path = table.with_name("answers.csv")
    for number, name in enumerate(KINDS):  # whatever the other tests have labelled
        server.act("label_many", rows=list(range(number, 60, 3)), name=name)
    lines = read_answers(path)
    wrong = next(int(line[0]) for line in lines if line[-1] == KINDS[int(line[0]) % 3])
    server.act("relabel", row=wrong, name=KINDS[(wrong + 1) % 3])
    server.act("jobs", job="results")
    state = wait_for_job(server)
    assert (state["check"]["accuracy"], state["checked"]) == (state["metrics"]["accuracy"], len(lines))
    assert 1 <= state["next_check"] <= 20
    listed = server.act("labels")
    differing = {item["row"]: item["predicted"] for item in listed["rows"][: listed["differing"]]}
    assert (listed["total"], differing[wrong]) == (len(lines), KINDS[wrong % 3])
    assert len(differing) <= 3  # the labelled rows depend on which of the two was faster
    server.act("relabel", row=wrong, name=KINDS[wrong % 3])
    bees = server.act("labels", name="bee")
    assert {item["name"] for item in bees["rows"]} == {"bee"}
    cells = bees["rows"][-1]["cells"]
    assert server.act("labels", text=cells[1])["rows"][0]["cells"] == cells
    # A new class that is similar to another one is not created unless it is meant.
    row = server.act("next")["row"]
    for name in ("Cow", "COW "):
        assert server.act("label", row=row, name=name) == {"similar": "cow"}
    assert len(read_answers(path)) == len(lines)
    assert {item["name"]: item["rows"] for item in server.act("label", row=row, name="Cow", create=True)["classes"]}[
        "Cow"
    ] == 1
    counts = {item["name"]: item["rows"] for item in server.act("rename", old="Cow", name="ox")["classes"]}
    assert (counts["ox"], "Cow" in counts) == (1, False)
    merged = {item["name"]: item["rows"] for item in server.act("rename", old="ox", name="cow")["classes"]}
    assert merged == {name: n + (name == "cow") for name, n in counts.items() if name != "ox"}
    assert {line[-1] for line in read_answers(path)} == set(KINDS)
    assert server.refuse_action("rename", old="fox", name="cow")[0] == 404
    again = server.act("undo", row=row)
    assert (again["row"], [item["name"] for item in again["classes"]]) == (row, list(merged))


def test_a_labelled_table_is_reviewed(tmp_path: Path) -> None:
    write_table(tmp_path / "plain.csv", 30)
    with (tmp_path / "plain.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    labels = [KINDS[row % 3] for row in range(30)]
    labels[4] = "cow"  # which is a bee
    with (tmp_path / "all.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [[*header, "label"], *([*cells, name] for cells, name in zip(rows, labels, strict=True))]
        )
    output = tmp_path / "reviewed.csv"
    with start("page", tmp_path / "all.csv", "-o", output) as server:
        assert server.act("next")["row"] is None
        server.act("jobs", job="results")
        wait_for_job(server)
        listed = server.act("labels")
        assert (listed["total"], listed["differing"]) == (30, 1)
        assert (listed["rows"][0]["row"], listed["rows"][0]["predicted"]) == (4, "bee")
        assert [line[-1] for line in read_answers(output)] == labels
        server.act("relabel", row=4, name="bee")
    with start("page", tmp_path / "all.csv", "-o", output) as server:
        assert server.act("labels")["total"] == 30
    assert [line[-1] for line in read_answers(output)] == [*labels[:4], "bee", *labels[5:]]


def test_commands_of_downloads() -> None:
    overrides = ColumnOverrides({"a": "category"}, ("b", "c"), "d")
    for model, chosen, sheet, commands in (
        (
            None,
            overrides,
            "x",
            [
                "fit own.csv --label label --report report.html --output model.protonet"
                " --group d --drop b c --column-type a=category",
                "predict model.protonet rest.csv --sheet x --output predictions.csv --proba",
            ],
        ),
        (
            Path("old.safetensors"),
            NO_OVERRIDES,
            None,
            [
                "update old.safetensors own.csv --label label --output model.protonet",
                "predict model.protonet rest.csv --output predictions.csv --proba",
                "evaluate old.safetensors own.csv --label label --report report.html",
            ],
        ),
    ):
        jobs = JobRunner(Path("own.csv"), Path("rest.csv"), "label", model, chosen, ReadOptions(sheet=sheet))
        with jobs.folder:
            assert jobs.format_commands() == [f"protonet {item}" for item in commands]
    reading = ReadOptions(skip_broken=True)
    jobs = JobRunner(Path("own.csv"), Path("rest.csv"), "-class", None, NO_OVERRIDES, reading)
    with jobs.folder:
        assert all("--skip-broken" in command for command in jobs.format_commands())
        assert "--label=-class" in jobs.format_commands()[0]


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


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A folder with a table and the labels of a killed server, and the labels that it confirmed."""
    folder, confirmed, draw = tmp_path_factory.mktemp("killed"), dict[int, str](), random.Random(0)
    write_table(folder / "rest.csv", 24)
    with suppress(OSError, HTTPException), start("page", folder / "rest.csv", "-o", folder / "answers.csv") as server:
        question = server.act("next")
        while question["row"] is not None:
            row = question["row"]
            question = server.act("label", row=row, name=KINDS[row % 3])
            confirmed[row] = KINDS[row % 3]
            if len(confirmed) == 3:
                threading.Timer(draw.uniform(0.0, 0.01), server.process.kill).start()
    return folder, confirmed


def test_confirmed_labels_survive_a_kill(killed: tuple[Path, dict[int, str]]) -> None:
    folder, confirmed = killed
    saved = {int(line[0]): line[-1] for line in read_answers(folder / "answers.csv")}
    assert len(saved) == len(read_answers(folder / "answers.csv"))
    assert confirmed.items() <= saved.items()
    assert 3 <= len(saved) <= len(confirmed) + 1  # one may be on the disk, and its answer on the way
    assert all(name == KINDS[row % 3] for row, name in saved.items())


def test_a_full_disk_is_an_error_and_loses_no_label(tmp_path: Path) -> None:
    path = tmp_path / "answers.csv"
    script = """
import resource, sys
from pathlib import Path
from protonet.server.labels import LabelFile
with LabelFile(Path(sys.argv[1]), ["text", "label"], None) as answers:
    answers.add(["short"], "ant")
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    for text in ("long " * 100, "x"):
        try:
            answers.add([text], "bee")
        except OSError as error:
            print(error.strerror)
"""
    result = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert result.stdout == "File too large\n"
    assert read_answers(path) == [["short", "ant"], ["x", "bee"]]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that may ask servers of this machine."""
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    with Browser(tmp_path_factory.mktemp("chromium"), "http://127.0.0.1:") as browser:
        yield browser


def label_by_keys(browser: Browser, classes: list[str], rows: range) -> None:
    """Label rows by keys; type the class if it has no key."""
    for i in rows:
        (row,) = re.findall(r"^Row (\d+)", browser.ask("document.getElementById('reason').textContent"))
        keys = browser.ask("[...document.querySelectorAll('#keys bdi')].map((each) => each.textContent)")
        name = classes[int(row)]
        for key in [str(keys.index(name) + 1)] if name in keys else ["n", *name, "Enter"]:
            browser.press(key)
        browser.wait(f"document.getElementById('progress').textContent.startsWith('{i + 1} labelled')")


def check_layout(browser: Browser, name: str) -> None:
    """Open a tab of the page, and check its layout."""
    browser.ask(f"document.getElementById('to-{name}').click()")
    browser.check_layout()


def outline_all(browser: Browser) -> None:
    """Draw an outline around the complete map."""
    browser.look()
    browser.ask("document.getElementById('map').scrollIntoView()")
    box = browser.ask("JSON.parse(JSON.stringify(document.getElementById('map').getBoundingClientRect()))")
    corners = [(0.01, 0.01), (0.99, 0.01), (0.99, 0.99), (0.01, 0.99), (0.01, 0.02)]
    kinds = ["mousePressed", "mouseMoved", "mouseMoved", "mouseMoved", "mouseReleased"]
    for kind, (x, y) in zip(kinds, corners, strict=True):
        point = {"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}
        browser.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **point)


def test_a_table_is_labelled_inspected_tried_and_downloaded(
    killed: tuple[Path, dict[int, str]], chromium: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, classes = killed[0] / "answers.csv", [KINDS[row % 3] for row in range(24)]
    before = len(read_answers(answers))
    with start("page", killed[0] / "rest.csv", "-o", answers) as server:
        base = f"http://127.0.0.1:{server.port}/"
        chromium.open(f"{base}?token={TOKEN}")
        chromium.wait("document.querySelectorAll('#question dd').length > 0")
        label_by_keys(chromium, classes, range(before, before + 4))
        chromium.press("u")
        chromium.wait(f"document.getElementById('progress').textContent.startsWith('{before + 3} labelled')")
        check_layout(chromium, "label")
        chromium.ask("document.getElementById('to-try').click()")
        chromium.ask("document.querySelectorAll('#fields input').forEach((each) => { each.value = '4.0'; })")
        chromium.ask("document.getElementById('attempt').requestSubmit()")
        chromium.wait("document.querySelectorAll('#prediction table').length == 2")  # and what speaks for it
        check_layout(chromium, "try")
        check_layout(chromium, "export")
        chromium.ask("document.getElementById('make').click()")
        chromium.wait("document.querySelectorAll('#files a').length == 4")
        model, labelled = tmp_path / "taken.safetensors", tmp_path / "labelled.csv"
        model.write_bytes(server.ask("GET", "/download?file=model")[1])
        labelled.write_bytes(server.ask("GET", "/download?file=labelled")[1])
        assert labelled.read_bytes() == answers.read_bytes()
        assert len(server.ask("GET", "/download?file=predictions")[1].splitlines()) == 25
        chromium.ask("document.getElementById('to-results').click()")
        chromium.wait("document.querySelectorAll('#tiles dd').length > 0")
        shown = chromium.ask("document.querySelector('#tiles dd').textContent")
        chromium.ask("document.getElementById('draw').click()")
        chromium.wait("document.querySelectorAll('#legend button').length == 3")
        chromium.ask("document.getElementById('map').focus()")
        for key in ("ArrowRight", "ArrowRight", " "):
            chromium.press(key)
        chromium.wait("document.getElementById('selected').textContent.startsWith('1 row is selected')")
        outline_all(chromium)
        chromium.wait("document.querySelectorAll('#inside li').length == 24")
        check_layout(chromium, "results")
        chromium.ask("document.querySelector('#actions > button:last-child').click()")  # to flag them
        chromium.wait("document.getElementById('progress').textContent.includes(', 0 left, ')")
        chromium.ask("document.querySelector('#columns select').value = 'drop'")
        chromium.ask("document.querySelector('#columns select').dispatchEvent(new Event('change'))")
        chromium.wait("document.querySelector('#commands code').textContent.includes('--drop a')")
        assert "print(model.predict(" in chromium.ask("document.querySelector('#python code').textContent")
        chromium.open("about:blank")
        assert chromium.errors == []
        assert server.end()[0] == 0
    run = Run(capsys, tmp_path)
    info = json.loads(run("info", model, "--json"))
    assert shown == f"{100 * info['cross_validation']['accuracy']:.1f} %"
    assert sum(item["samples"] for item in info["classes"]) == before + 3


def test_pictures_are_labelled_and_shown(chromium: Browser, tmp_path: Path) -> None:
    draw, classes = np.random.default_rng(0), [("red", "blue")[index % 2] for index in range(16)]
    (tmp_path / "pictures").mkdir()
    for index, name in enumerate(classes):
        noise = draw.integers(0, 90, (16, 16, 3)) + np.array([150, 0, 0] if name == "red" else [0, 0, 150])
        Image.fromarray(noise.astype(np.uint8)).save(tmp_path / "pictures" / f"{index:02d}.png")
    with start("page", tmp_path / "pictures", "--representation", "none", "-o", tmp_path / "own.csv") as server:
        base = f"http://127.0.0.1:{server.port}/"
        chromium.open(f"{base}?token={TOKEN}")
        chromium.wait("document.querySelector('#question img')?.naturalWidth == 16")
        label_by_keys(chromium, classes, range(4))
        chromium.open(f"{base}?token={TOKEN}&dir=rtl")  # the page is mirrored
        chromium.wait("document.querySelector('#question img')?.naturalWidth == 16")
        chromium.look()
        edges = chromium.ask(every("[role=tab], #question img", "each.getBoundingClientRect().right"))
        assert edges[:4] == sorted(edges[:4], reverse=True)
        assert edges[4] > 1200 / 2
        assert server.ask("GET", "/picture?row=3")[1].startswith(b"\x89PNG")
        assert server.refuse_action("columns", column="picture", choice="drop")[0] == 409
        # Deleted pictures, one labelled and the one that is shown, are skipped and named; all else goes on.
        labelled = server.act("labels")["rows"][0]["cells"][0]
        shown = server.act("next")["cells"][0]
        for path in (labelled, shown):
            Path(path).unlink()
        value = server.act("next")
        assert (value["missing"], value["cells"][0] != shown) == ([shown], True)
        assert server.refuse("GET", f"/picture?row={server.act('labels')['rows'][0]['row']}")[0] == 404
        chromium.open(f"{base}?token={TOKEN}")
        chromium.wait("!document.getElementById('missing').hidden")
        server.act("jobs", job="export")
        state = wait_for_job(server)
        assert (state["error"], state["ready"]) == ("", ["model", "report", "predictions"])
        chromium.wait("document.querySelector('#question img')?.naturalWidth == 16")
        for key in ("n", "r", "e", "d", "d", "Enter"):  # a class that is similar to another one
            chromium.press(key)
        chromium.wait("!document.getElementById('similar').hidden")
        chromium.press("Enter")  # use the class that there is
        chromium.wait("document.getElementById('progress').textContent.startsWith('5 labelled')")
        for index in range(8):  # more classes than keys
            row = server.act("next", "other")["row"]
            server.act("label", "other", row=row, name=f"kind {index}", create=True)
        chromium.ask("document.getElementById('to-label').click()")
        chromium.wait("document.querySelectorAll('#all button').length == 10")
        chromium.ask("document.getElementById('new').focus()")
        chromium.press("7")
        chromium.wait("document.querySelectorAll('#all button').length == 1")
        check_layout(chromium, "review")
        assert "protonet predict" in chromium.ask("document.querySelector('#python code').textContent")
        assert chromium.errors == []
        return
    assert all(classes[int(Path(path).stem)] == name for path, name in read_answers(tmp_path / "own.csv"))
