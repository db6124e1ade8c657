"""The labelling page in a real Chromium, which labels by keys, draws on the map and takes pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.browser import CHROMIUM, Browser, every
from tests.commands.cases import Run
from tests.commands.servers import TOKEN, Server, start, wait_for_job
from tests.commands.test_page import KINDS, TEXTS, read_answers, write_table

Image = pytest.importorskip("PIL.Image", reason="it draws pictures")
#: A camera of the browser, which shows a moving dot, and its question whether the page may use it.
FLAGS = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser with a camera that may ask servers of this machine."""
    if CHROMIUM is None:
        pytest.skip("no Chromium")
    with Browser(tmp_path_factory.mktemp("chromium"), "http://127.0.0.1:", FLAGS) as browser:
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


def open_page(browser: Browser, server: Server, loaded: str, query: str = "") -> None:
    """Open the labelling page, and wait until a JavaScript expression is true."""
    browser.open(f"http://127.0.0.1:{server.port}/?token={TOKEN}{query}")
    browser.wait(loaded)


def test_a_table_is_labelled_inspected_tried_and_downloaded(
    chromium: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, classes, before = tmp_path / "answers.csv", [KINDS[row % 3] for row in range(24)], 4
    write_table(tmp_path / "rest.csv", 24)
    header, *lines = (tmp_path / "rest.csv").read_text(encoding="utf-8").splitlines()
    labelled = [f"{header},label", *(f"{lines[row]},{classes[row]}" for row in range(before))]
    answers.write_text("\n".join([*labelled, ""]), encoding="utf-8")
    with start("page", tmp_path / "rest.csv", "-o", answers) as server:
        open_page(chromium, server, "document.querySelectorAll('#question dd').length > 0")
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
        model = tmp_path / "taken.safetensors"
        model.write_bytes(server.ask("GET", "/download?file=model")[1])
        assert server.ask("GET", "/download?file=labelled")[1] == answers.read_bytes()
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


def test_pictures_are_labelled_taken_and_shown(chromium: Browser, tmp_path: Path) -> None:
    draw, classes = np.random.default_rng(0), [("red", "blue")[index % 2] for index in range(16)]
    (tmp_path / "pictures").mkdir()
    for index, name in enumerate(classes):
        noise = draw.integers(0, 90, (16, 16, 3)) + np.array([150, 0, 0] if name == "red" else [0, 0, 150])
        Image.fromarray(noise.astype(np.uint8)).save(tmp_path / "pictures" / f"{index:02d}.png")
    loaded = "document.querySelector('#question img')?.naturalWidth == 16"
    with start("page", tmp_path / "pictures", "--representation", "none", "-o", tmp_path / "own.csv") as server:
        open_page(chromium, server, loaded)
        label_by_keys(chromium, classes, range(4))
        open_page(chromium, server, loaded, "&dir=rtl")  # the page is mirrored
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
        open_page(chromium, server, f"!document.getElementById('missing').hidden && {loaded}")
        chromium.ask("document.getElementById('adding').open = true")
        chromium.ask("document.getElementById('camera').click()")
        chromium.wait("!document.getElementById('take').hidden && document.getElementById('video').currentTime > 0")
        chromium.ask("document.getElementById('take').click()")
        chromium.wait("document.getElementById('added').textContent.startsWith('1 picture was added.')")
        chromium.ask("document.getElementById('camera').click()")  # turned off
        chromium.wait("document.getElementById('take').hidden && !document.getElementById('video').srcObject")
        (taken,) = (tmp_path / "own.added").iterdir()
        with Image.open(taken) as image:
            assert (taken.name[:7], image.format, min(image.size) >= 120) == ("camera-", "JPEG", True)
        assert server.ask("GET", "/picture?row=16")[1].startswith(b"\x89PNG")
        server.act("jobs", job="export")
        state = wait_for_job(server)
        assert (state["error"], state["ready"]) == ("", ["model", "report", "predictions"])
        predictions = server.ask("GET", "/download?file=predictions")[1].decode().splitlines()
        assert len(predictions) == 1 + 16 - 2 + 1  # without the deleted ones, and with the new one
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
        chromium.open("about:blank")
        assert chromium.errors == []
        answers = read_answers(tmp_path / "own.csv")
    assert all(classes[int(Path(path).stem)] == name for path, name in answers[:4])


def test_the_page_adds_rows_explains_words_and_undoes_after_a_reload(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("\n".join(["note", *TEXTS, ""]), encoding="utf-8")
    loaded = "document.getElementById('reason').textContent"
    with start("page", tmp_path / "texts.csv", "--representation", "none", "-o", tmp_path / "out.csv") as server:
        open_page(chromium, server, loaded)
        chromium.ask("document.getElementById('by').value = 'Ann'")
        chromium.ask("document.getElementById('by').dispatchEvent(new Event('change'))")
        for number, name in enumerate(("plus", "minus"), 1):
            for key in ("n", *name, "Enter"):
                chromium.press(key)
            chromium.wait(f"document.getElementById('progress').textContent.startsWith('{number} labelled')")
        assert read_answers(tmp_path / "out.by.csv")[0][0] == "Ann"
        # A duplicated tab takes an identifier of its own, and cannot undo the steps of the first one.
        first = chromium.ask("sessionStorage.getItem('tab')")
        chromium.call("Runtime.evaluate", expression="window.other = open(location.href)", userGesture=True)
        storage = "other.sessionStorage.getItem"
        chromium.wait(f"{storage}('steps') === '[]' && {storage}('tab') !== '{first}'")
        assert chromium.ask("sessionStorage.getItem('tab')") == first
        chromium.ask("other.close()")
        open_page(chromium, server, f"{loaded} && !document.getElementById('undo').disabled")
        assert chromium.ask("document.getElementById('by').value") == "Ann"
        chromium.press("u")
        chromium.wait("document.getElementById('progress').textContent.startsWith('1 labelled')")
        # A label that was changed elsewhere is not undone.
        (row,) = (line["row"] for line in server.act("labels")["rows"])
        server.act("relabel", row=row, name="minus")
        chromium.press("u")
        chromium.wait("document.getElementById('error').textContent.includes(\"has the label 'minus' now\")")
        assert [line[-1] for line in read_answers(tmp_path / "out.csv")] == ["minus"]
        chromium.ask("document.querySelector('#label .help').click()")
        note = "document.getElementById(document.querySelector('#label .help').getAttribute('aria-controls'))"
        assert chromium.ask(f"{note}.hidden") is False
        chromium.ask("document.getElementById('adding').open = true")
        chromium.ask("document.getElementById('texts').value = 'a new text\\n\\ngood day\\n'")
        chromium.ask("document.getElementById('add-texts').requestSubmit()")
        chromium.wait("document.getElementById('added').textContent.includes('1 row was added. 1 of the lines')")
        chromium.check_layout()
        chromium.open("about:blank")
        assert [error for error in chromium.errors if "409 (Conflict)" not in error] == []
        chromium.errors.clear()


def test_fourteen_classes_are_told_apart_merged_and_split_again(chromium: Browser, tmp_path: Path) -> None:
    names = [f"class {chr(65 + index)}" for index in range(14)]
    draw = np.random.default_rng(0)
    rows = [f"{draw.normal(row % 14):.3f},{draw.normal(row % 5):.3f}" for row in range(120)]
    (tmp_path / "rest.csv").write_text("\n".join(["x,z", *rows, ""]), encoding="utf-8")
    progress = "document.getElementById('progress').textContent"
    with start("page", tmp_path / "rest.csv", "--classes", ",".join(names), "-o", tmp_path / "out.csv") as server:
        for index, name in enumerate(names):
            server.act("label_many", rows=[index, index + 14, index + 28], name=name)
        wait_for_job(server)
        open_page(chromium, server, "document.querySelectorAll('#keys button').length == 9")
        chromium.ask("document.getElementById('fixed').click()")
        # The keys stay where they are: 1 to 9, 0, and letters without a meaning of their own.
        assert chromium.ask(every("#keys bdi", "each.textContent")) == names
        assert chromium.ask(every("#keys kbd", "each.textContent")) == list("1234567890abcd")
        chromium.press("b")
        chromium.wait(f"{progress}.startsWith('43 labelled')")
        assert read_answers(tmp_path / "out.csv")[-1][-1] == names[11]
        for width in (1280, 375):
            chromium.look(width=width, height=800)
            top = "getElementById('{}').getBoundingClientRect().top"
            assert chromium.ask("document." + top.format("keys") + " < innerHeight")
            below = chromium.ask("document." + top.format("similar-rows") + " - document." + top.format("keys"))
            assert width == 1280 or below > 0
            assert chromium.ask("document.documentElement.scrollWidth <= innerWidth")
            hides = "document.getElementById('counts').scrollHeight > document.getElementById('counts').clientHeight"
            assert "scroll" in chromium.ask("document.getElementById('n-classes').textContent") or not chromium.ask(
                hides
            )
            chromium.shoot(tmp_path / f"label-{width}.png")
        chromium.look(width=1280, height=800)
        check_layout(chromium, "review")
        # A merge is confirmed; Escape closes the question.
        for key, labels in (("Escape", 43), ("Enter", 43)):
            chromium.ask(f"document.getElementById('rename-old').value = '{names[1]}'")
            chromium.ask(f"document.getElementById('rename-new').value = '{names[0]}'")
            chromium.ask("document.getElementById('rename').requestSubmit()")
            chromium.wait("!document.getElementById('similar').hidden")
            assert chromium.ask("document.getElementById('similar-text').textContent").startswith(
                f"Merge {names[1]} (3 labels) into {names[0]} (3 labels)?"
            )
            chromium.shoot(tmp_path / "merge.png")
            chromium.press(key)
            chromium.wait("document.getElementById('similar').hidden")
            assert chromium.ask(progress).startswith(f"{labels} labelled")
            shown = f"document.getElementById('renamed').textContent == '{names[1]} was merged with {names[0]}.'"
            if key == "Escape":
                assert not chromium.ask(shown)
            else:
                chromium.wait(shown)
        assert sum(line[-1] == names[0] for line in read_answers(tmp_path / "out.csv")) == 6
        chromium.ask("document.getElementById('undo-rename').click()")
        chromium.wait("document.getElementById('renamed').textContent.endsWith('is a class again.')")
        given = [line[-1] for line in read_answers(tmp_path / "out.csv")]
        assert (given.count(names[0]), given.count(names[1])) == (3, 3)
        # Results are those of all labels, and the classes have different colours or shapes.
        chromium.ask("document.getElementById('to-results').click()")
        tiles = "[...document.querySelectorAll('#tiles dd')].map((each) => each.textContent)"
        chromium.wait(f"{tiles}.includes('43') && {tiles}.includes('all of them')")
        server.act("label_many", rows=[100], name=names[0])
        chromium.ask("document.getElementById('to-results').click()")
        chromium.wait(f"{tiles}.includes('44') && {tiles}.includes('all of them')")
        chromium.ask("document.getElementById('draw').click()")
        chromium.wait("document.querySelectorAll('#legend button').length == 14")
        colours = chromium.ask(every("#legend i", "getComputedStyle(each).backgroundColor"))
        assert len({*colours}) == 14
        chromium.shoot(tmp_path / "results.png")
        check_layout(chromium, "results")
        chromium.open("about:blank")
        assert [error for error in chromium.errors if "409 (Conflict)" not in error] == []
        chromium.errors.clear()


def test_a_second_person_answers_and_the_agreement_is_shown(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("\n".join(["note", *TEXTS, ""]), encoding="utf-8")
    guidelines = tmp_path / "guidelines.txt"
    guidelines.write_text("plus: <b>good</b> news\nminus: all else\n", encoding="utf-8")
    output, progress = tmp_path / "out.csv", "document.getElementById('progress').textContent"
    page = ("page", tmp_path / "texts.csv", "--representation", "none", "-o", output, "--guidelines", guidelines)
    with start(*page) as server:
        for row in range(4):
            server.act("label", row=row, name="plus" if row % 2 else "minus", by="Ann")
        open_page(chromium, server, f"{progress}.startsWith('4 labelled')")
        assert chromium.ask("document.querySelector('#guidelines .text').innerText.trim()") == (
            "plus: <b>good</b> news\nminus: all else"
        )
        set_value = "document.getElementById('by').value = 'Bo'; document.getElementById('by').dispatchEvent"
        chromium.ask(f"{set_value}(new Event('change'))")
        chromium.ask("document.getElementById('second').click()")
        for row in range(4):
            chromium.wait(f"document.getElementById('reason').textContent.startsWith('Row {row}: another person')")
            assert chromium.ask(every("#keys .unit", "each.textContent")) == []  # no hint at the first answer
            assert chromium.ask("document.getElementById('flag').disabled")
            if row == 0:
                for width in (1280, 375):
                    chromium.look(width=width, height=800)
                    chromium.shoot(tmp_path / f"second-{width}.png")
            keys = chromium.ask(every("#keys bdi", "each.textContent"))
            chromium.press(str(keys.index("plus" if row in {1, 2, 3} else "minus") + 1))
        chromium.wait("!document.getElementById('reason').textContent.includes('another person')")
        assert chromium.ask(progress).startswith("4 labelled")
        chromium.ask("document.getElementById('to-review').click()")
        chromium.wait("!document.getElementById('agreement').hidden")
        shown = every("#pairs tbody th, #pairs tbody td", "each.textContent")
        assert chromium.ask(shown) == ["Ann, Bo", "4", "75 %", "0.50"]
        chromium.ask("document.getElementById('disputed').click()")
        chromium.wait("document.querySelectorAll('#labels li').length == 1")
        assert "answers: Ann minus, Bo plus" in chromium.ask("document.getElementById('labels').textContent")
        for width in (1280, 375):
            chromium.look(width=width, height=800)
            chromium.shoot(tmp_path / f"agreement-{width}.png")
        check_layout(chromium, "review")
        check_layout(chromium, "label")
        chromium.open("about:blank")
        assert chromium.errors == []
    assert [line[-1] for line in read_answers(output)] == ["minus", "plus", "minus", "plus"]


def test_classes_come_first_and_the_camera_records_their_examples(chromium: Browser, tmp_path: Path) -> None:
    output, count = tmp_path / "own.csv", every("#example-classes .soft", "each.textContent")
    with start("page", "--representation", "none", "-o", output) as server:
        open_page(chromium, server, "!document.getElementById('examples').hidden")
        for name in ("hand", "face"):
            chromium.ask(f"document.getElementById('class-name').value = '{name}'")
            chromium.ask("document.getElementById('add-class').requestSubmit()")
            chromium.wait(f"document.getElementById('example-classes').textContent.includes('{name}')")
        assert chromium.ask(every(".hold", "each.disabled")) == [True, True]
        chromium.ask("document.getElementById('record-camera').click()")
        chromium.wait(
            "document.getElementById('record-video').currentTime > 0 && !document.querySelector('.hold').disabled"
        )
        # Pictures are taken while the mouse button, or a key, is down.
        chromium.look(width=1280, height=900)
        x, y = chromium.ask(
            "(({ x, y, width, height }) => [x + width / 2, y + height / 2])"
            "(document.querySelector('.hold').getBoundingClientRect())"
        )
        event = {"x": x, "y": y, "button": "left", "clickCount": 1}
        chromium.call("Input.dispatchMouseEvent", type="mousePressed", **event)
        chromium.wait("parseInt(document.querySelectorAll('#example-classes .soft')[0].textContent) >= 4")
        assert chromium.ask("document.querySelector('.hold').classList.contains('recording')")
        chromium.call("Input.dispatchMouseEvent", type="mouseReleased", **event)
        chromium.ask("document.querySelectorAll('.hold')[1].focus()")
        key = {"key": " ", "code": "Space", "windowsVirtualKeyCode": 32}
        chromium.call("Input.dispatchKeyEvent", type="keyDown", text=" ", **key)
        chromium.wait("parseInt(document.querySelectorAll('#example-classes .soft')[1].textContent) >= 4")
        chromium.call("Input.dispatchKeyEvent", type="keyUp", **key)
        chromium.wait("!document.querySelector('.recording')")
        recorded = chromium.ask(f"new Promise((resolve) => setTimeout(() => resolve({count}), 400))")
        labels = [line[-1] for line in read_answers(output)]
        assert recorded == [f"{labels.count(name)} examples" for name in ("hand", "face")]
        for width in (1280, 375):
            chromium.look(width=width, height=800)
            chromium.shoot(tmp_path / f"examples-{width}.png")
        chromium.check_layout()
        # The live camera is classified until another tab is opened.
        chromium.look()
        chromium.ask("document.getElementById('to-try').click()")
        assert chromium.ask("document.getElementById('record-video').srcObject") is None
        chromium.ask("document.getElementById('try-camera').click()")
        chromium.wait("document.querySelectorAll('#prediction tr').length == 2")
        assert chromium.ask("document.getElementById('prediction').getAttribute('aria-live')") == "off"
        chromium.ask("document.querySelector('#prediction table').remove()")
        chromium.wait("document.querySelectorAll('#prediction tr').length == 2")  # the next picture
        for width in (1280, 375):
            chromium.look(width=width, height=800)
            chromium.shoot(tmp_path / f"try-{width}.png")
        chromium.check_layout()
        chromium.ask("document.getElementById('to-label').click()")
        chromium.wait("document.getElementById('try-video').hidden")
        chromium.open("about:blank")
        assert chromium.errors == []
