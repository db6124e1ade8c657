"""Rows that are added on the labelling page, who gave a label, and clients that change the same row."""

from __future__ import annotations

import csv
import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protonet import InputError
from protonet.server.labels import LabelFile, UploadedRows
from tests.browser import CHROMIUM, Browser
from tests.commands.servers import TOKEN, start, wait_for_job

pytest.importorskip("uvicorn", reason="it listens")
Image = pytest.importorskip("PIL.Image", reason="it draws pictures")
JSON = {"Content-Type": "application/json"}
TEXTS = ["good day", "bad day", "good night", "bad night", "so so", "well done", "not done", "fine"]


def read(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def draw(colour: tuple[int, int, int], kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), colour).save(file, kind)
    return file.getvalue()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts.csv").write_text("\n".join(["note", *TEXTS]) + "\n", encoding="utf-8")
    return tmp_path / "texts.csv"


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


def test_a_duplicated_tab_does_not_overwrite_labels(texts: Path) -> None:
    """A duplicated tab has the identifier and the steps of the first one: both clients here are "one"."""
    with start("page", texts, "--representation", "none", "-o", texts.with_name("out.csv")) as server:
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
        assert (
            server.refuse_action("undo", row=other, seen=None)[0] == 409
        )  # the duplicate skipped it, and another labelled it
        assert [line[-1] for line in read(texts.with_name("out.csv"))[1:]] == ["minus", "plus"]
        undone = server.act("undo", row=other, seen="plus")
        assert (undone["row"], undone["label"]) == (other, None)
        assert "no label any more" in server.refuse_action("undo", row=other, seen="plus")[1]


def test_who_gave_a_label_is_kept(texts: Path) -> None:
    output = texts.with_name("out.csv")
    for restarted in (False, True):
        with start("page", texts, "--representation", "none", "-o", output) as server:
            if not restarted:
                for row, person in enumerate(["", "Ann", "Bo", "Ann"]):
                    server.act("label", row=row, name="plus", by=person)
                server.act("relabel", row=3, name="minus", by="Bo")
                server.act("relabel", row=2, name="minus")
                server.act("label_many", rows=[4, 5], name="minus", by=" Ann ")
                assert "printable" in server.refuse_action("label", row=6, name="plus", by="a\x07")[1]
            listed = server.act("labels")
            given = {line["row"]: line["by"] for line in listed["rows"]}
            assert given == {0: "", 1: "Ann", 2: "", 3: "Bo", 4: "Ann", 5: "Ann"}
            assert listed["people"] == ["Ann", "Bo"]
            assert {line["row"] for line in server.act("labels", person="Ann")["rows"]} == {1, 4, 5}
            assert {line["row"] for line in server.act("labels", person="")["rows"]} == {0, 2}
    assert read(output)[0] == ["note", "label"]  # the names are no feature of a fit
    assert read(texts.with_name("out.by.csv"))[:2] == [["by", "note", "label"], ["Ann", "bad day", "plus"]]


def test_pasted_texts_become_rows(texts: Path) -> None:
    output = texts.with_name("out.csv")
    with start("page", texts, "--representation", "none", "-o", output) as server:
        assert server.ask_json("GET", "/api/state")["adds"] == "texts"
        for row in range(4):
            server.act("label", row=row, name=["plus", "minus"][row % 2])
        added = server.act("add", text=" quite good \r\n\ngood day\n=1+1\nquite good\n")
        assert (added["added"], added["left"]) == (2, 6)  # neither the empty line nor what there is already
        assert server.act("add", text="quite good")["added"] == 0
        assert "20,000 characters" in server.refuse_action("add", text="x" * 20_001)[1]
        assert server.refuse("POST", "/api/add_picture?name=a.png", draw((1, 2, 3)))[0] == 409
        assert server.act("label", row=8, name="plus")["answered"] == 5
        assert server.act("rows", rows=[8, 9])
        server.act("jobs", job="export")
        assert wait_for_job(server)["error"] == ""
        predictions = server.ask("GET", "/download?file=predictions")[1].decode().splitlines()
        assert len(predictions) == 1 + len(TEXTS) + 2
    assert read(texts.with_name("out.added.csv"))[1:] == [["quite good", "added"], ["'=1+1", "added"]]
    with start("page", texts, "--representation", "none", "-o", output) as server:
        state = server.act("next")
        assert (state["answered"], state["left"]) == (5, 5)
        assert server.ask_json("POST", "/api/rows", {"tab": "one", "rows": [9]})[0]["cells"] == ["=1+1"]


def test_an_interrupted_upload_is_repeated(tmp_path: Path) -> None:
    """Rows that are on the disk, but not on the page, because the request failed later, are not saved twice."""
    with LabelFile(tmp_path / "out.added.csv", ["id", "note", "added"], ["added"], lazy=True) as file:
        uploads = UploadedRows(file, tmp_path / "texts.csv", 1, are_pictures=False)
        for text in ("one\ntwo", "one\ntwo\nthree"):
            assert uploads.add_texts(text, known_texts={"zero"}) == [["", line] for line in text.splitlines()]
        assert uploads.add_texts("zero", known_texts={"zero"}) == []
        with pytest.raises(InputError, match=r"10,000 lines"):
            uploads.add_texts("\n".join(map(str, range(10_000))), known_texts=set())
    assert [cells[1] for cells in read(tmp_path / "out.added.csv")[1:]] == ["one", "two", "three"]


def test_uploads_of_several_threads_are_saved_once(tmp_path: Path) -> None:
    """As when a request has timed out, whose thread goes on beside that of the repeated request."""
    lines = [f"text {index}" for index in range(8)]
    with LabelFile(tmp_path / "out.added.csv", ["note", "added"], ["added"], lazy=True) as file:
        uploads = UploadedRows(file, tmp_path / "texts.csv", 0, are_pictures=False)
        with ThreadPoolExecutor(4) as pool:
            added = list(pool.map(lambda _: uploads.add_texts("\n".join(lines), known_texts=set()), range(4)))
    assert added == [[[line] for line in lines]] * 4
    assert read(tmp_path / "out.added.csv")[1:] == [[line, "added"] for line in lines]


def test_dropped_pictures_become_rows(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    random = np.random.default_rng(0)
    for index in range(6):
        pixels = random.integers(0, 255, (16, 16, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{index}.png")
    output, before = tmp_path / "out.csv", sorted(tmp_path.rglob("*"))
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


def test_pictures_of_the_camera_become_rows(tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    (tmp_path / "pictures").mkdir()
    for index in range(4):
        (tmp_path / "pictures" / f"{index}.png").write_bytes(draw((60 * index, 0, 100)))
    output = tmp_path / "out.csv"
    # A camera of the browser, which shows a moving dot, and its question whether the page may use it.
    flags = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with (
        start("page", tmp_path / "pictures", "--representation", "none", "-o", output) as server,
        Browser(tmp_path, "http://127.0.0.1:", flags) as browser,
    ):
        browser.open(f"http://127.0.0.1:{server.port}/?token={TOKEN}")
        browser.wait("document.getElementById('reason').textContent")
        browser.ask("document.getElementById('adding').open = true")
        browser.ask("document.getElementById('camera').click()")
        browser.wait("!document.getElementById('take').hidden && document.getElementById('video').currentTime > 0")
        browser.ask("document.getElementById('take').click()")
        browser.wait("document.getElementById('added').textContent.startsWith('1 picture was added.')")
        browser.ask("document.getElementById('camera').click()")  # turned off
        browser.wait("document.getElementById('take').hidden && !document.getElementById('video').srcObject")
        assert server.act("next")["left"] == 5
        assert server.ask("GET", "/picture?row=4")[1].startswith(b"\x89PNG")
        assert browser.errors == []
    (taken,) = (tmp_path / "out.added").iterdir()
    assert taken.name.startswith("camera-")
    with Image.open(taken) as image:
        assert (image.format, min(image.size) >= 120) == ("JPEG", True)


def test_classes_are_merged_during_fits(texts: Path) -> None:
    """The network is fitted in a thread: a merge during a fit changes the indices of the classes."""
    with start("page", texts, "--representation", "none", "-o", texts.with_name("out.csv")) as server:
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


def test_the_page_adds_rows_explains_words_and_undoes_after_a_reload(texts: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    output = texts.with_name("out.csv")
    with (
        start("page", texts, "--representation", "none", "-o", output) as server,
        Browser(texts.parent, "http://127.0.0.1:") as browser,
    ):
        address = f"http://127.0.0.1:{server.port}/?token={TOKEN}"
        browser.open(address)
        browser.wait("document.getElementById('reason').textContent")
        browser.ask("document.getElementById('by').value = 'Ann'")
        browser.ask("document.getElementById('by').dispatchEvent(new Event('change'))")
        for number, name in enumerate(("plus", "minus"), 1):
            for key in ("n", *name, "Enter"):
                browser.press(key)
            browser.wait(f"document.getElementById('progress').textContent.startsWith('{number} labelled')")
        assert read(texts.with_name("out.by.csv"))[1][0] == "Ann"
        # A duplicated tab takes an identifier of its own, and cannot undo the steps of the first one.
        first = browser.ask("sessionStorage.getItem('tab')")
        browser.call("Runtime.evaluate", expression="window.other = open(location.href)", userGesture=True)
        browser.wait(
            f"other.sessionStorage.getItem('steps') === '[]' && other.sessionStorage.getItem('tab') !== '{first}'"
        )
        assert browser.ask("sessionStorage.getItem('tab')") == first
        browser.ask("other.close()")
        browser.open(address)
        browser.wait("document.getElementById('reason').textContent && !document.getElementById('undo').disabled")
        assert browser.ask("document.getElementById('by').value") == "Ann"
        browser.press("u")
        browser.wait("document.getElementById('progress').textContent.startsWith('1 labelled')")
        # A label that was changed elsewhere is not undone.
        (row,) = (line["row"] for line in server.act("labels")["rows"])
        server.act("relabel", row=row, name="minus")
        browser.press("u")
        browser.wait("document.getElementById('error').textContent.includes(\"has the label 'minus' now\")")
        assert [line[-1] for line in read(output)[1:]] == ["minus"]
        browser.ask("document.querySelector('#label .help').click()")
        note = "document.getElementById(document.querySelector('#label .help').getAttribute('aria-controls'))"
        assert browser.ask(f"{note}.hidden") is False
        browser.ask("document.getElementById('adding').open = true")
        browser.ask("document.getElementById('texts').value = 'a new text\\n\\ngood day\\n'")
        browser.ask("document.getElementById('add-texts').requestSubmit()")
        browser.wait("document.getElementById('added').textContent.includes('1 row was added. 1 of the lines')")
        browser.check_layout()
        assert [error for error in browser.errors if "409 (Conflict)" not in error] == []
