"""``page``: answers while it is killed, two at once, requests of noise, and how long the next question takes."""

from __future__ import annotations

import argparse
import csv
import http.client
import json
import os
import random
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from analysis.commands.noise import make_requests
from analysis.commands.servers import TOKEN, start
from analysis.commands.speed import measure
from analysis.shared.runner import Report, StudyParser

#: Classes, columns and rows of the table that is labelled while the server is killed.
CLASSES, COLUMNS, ROWS = 3, 4, 5000
#: Kills after which a new file of answers begins: a start learns from all that there are.
FRESH = 5
#: What is asked for in noise, beside paths of noise.
PATHS = ("/", "/api/answer", "/api/next", "/api/rows", "/api/try", "/picture?row=x", "/take?file=x", "/api/undo")
SERVED = ("/", "/healthz", "/metrics", "/models/model/predict", "/models/../../etc/passwd")
NOTE = """
| promise | found |
|---|---|
| kill -9 at {kills} random moments while answers come: answers; lost, twice, of another class | {answers:,}; {wrong} |
| rows that two were asked for at once | {shared} |
| {requests:,} requests of noise to `page`: answered by 5xx; answers' file; it lives | {noise} |
| {requests:,} requests of noise to `serve`: answered by 5xx; it lives | {served} |
| next question, {pictures:,} pictures, {asked} answers: 50 %, 95 %, most, ms | {waits} |
| the same, those who answer wait {pause} s before each | {paused} |

Two answer over connections of their own; a kill counts ({kills} of {starts} did) that came after two answers
at least, and while one was on its way. Whoever was not told that an answer is kept gives it again after the restart.
The next question is timed from the answer that is sent to the question that is there, while the server learns from all
answers so far and chooses anew, on one thread of torch; it holds {memory:,.0f} MiB. {cores} cores, shared with others,
load {load}.
"""


class Person:
    """Somebody who labels."""

    def __init__(self, port: int, tab: str) -> None:
        self.connection, self.tab = http.client.HTTPConnection("127.0.0.1", port, timeout=60), tab

    def ask(self, what: str, **more: object) -> dict[str, Any]:
        """Return what the desk says."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        self.connection.request("POST", f"/api/{what}", json.dumps({"tab": self.tab, **more}), headers)
        answer = self.connection.getresponse()
        told: dict[str, Any] = json.loads(answer.read())
        if answer.status != 200:
            raise RuntimeError(told["error"])
        return told


def write_table(path: Path) -> None:
    """Write a table without classes; the class of a row is its number modulo `CLASSES`."""
    x = np.random.default_rng(0).normal(size=(ROWS, COLUMNS))
    x[:, 0] += 4 * (np.arange(ROWS) % CLASSES)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[f"c{at}" for at in range(COLUMNS)], *([f"{v:.5f}" for v in row] for row in x)])


def read_answers(path: Path, rows: dict[tuple[str, ...], int]) -> list[tuple[int, str]]:
    """Return the row and the class of each answer on the disk."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))[1:]
    return [(rows[tuple(line[:-1])], line[-1]) for line in lines]


def kill(folder: Path, kills: int) -> dict[str, Any]:
    """Label while the server is killed; return what became of the answers, in files of `FRESH` kills each.

    A kill counts that falls while answers come: two or more were taken since the start, and the next was on its way.
    """
    table, draw = folder / "rest.csv", random.Random(0)
    write_table(table)
    with table.open(newline="", encoding="utf-8") as file:
        rows = {tuple(line): number for number, line in enumerate(list(csv.reader(file))[1:])}
    told: dict[int, str] = {}
    shared = answers = lost = twice = wrong = counted = starts = 0
    while counted < kills:
        path = folder / f"answers-{starts // FRESH}.csv"
        before = len(told)
        with start("page", table, "-o", path) as server:
            asked: dict[str, int | None] = {}
            begun = threading.Event()

            def label(
                tab: str, port: int = server.port, asked: dict[str, int | None] = asked, begun: threading.Event = begun
            ) -> None:
                nonlocal shared
                person = Person(port, tab)
                with suppress(OSError, http.client.HTTPException, ValueError):
                    question = person.ask("next")
                    while question["row"] is not None:
                        row = asked[tab] = int(question["row"])
                        shared += sum(other == row for own, other in asked.items() if own != tab)
                        name = f"class {row % CLASSES}"
                        question = person.ask("answer", row=row, name=name)
                        asked[tab] = None
                        told[row] = name
                        begun.set()

            people = [threading.Thread(target=label, args=(tab,)) for tab in ("one", "two")]
            for person in people:
                person.start()
            begun.wait(60)
            time.sleep(draw.uniform(0.0, 0.4))
            server.process.send_signal(signal.SIGKILL)
            for person in people:
                person.join()
        starts += 1
        counted += len(told) > before + 1 and any(row is not None for row in asked.values())
        if starts % FRESH == 0 or counted == kills:
            kept = read_answers(path, rows)
            answers += len(kept)
            lost += len(told.keys() - dict(kept).keys())
            twice += len(kept) - len(dict(kept))
            wrong += sum(name != f"class {row % CLASSES}" for row, name in kept)
            told.clear()
    own = {"answers": answers, "wrong": f"{lost}, {twice}, {wrong}", "shared": shared, "kills": kills}
    return own | {"starts": starts}


def send_noise(port: int, n: int, paths: tuple[str, ...]) -> int:
    """Send requests of noise; return how many were answered by 5xx, or not at all."""
    failed = 0
    for method, path, body, headers in make_requests(0, n, paths, TOKEN):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            failed += answer.status >= 500 or b"Traceback" in content or b"root:" in content
        finally:
            connection.close()
    return failed


def write_pictures(folder: Path, n: int) -> None:
    """Write pictures of ten sorts: bars of so many widths, at random places, in noise."""
    from PIL import Image  # noqa: PLC0415 - optional

    draw = np.random.default_rng(0)
    folder.mkdir()
    for number in range(n):
        pixels = draw.integers(0, 90, (32, 32), np.uint8)
        first = int(draw.integers(0, 10))
        pixels[first : first + 2 * (number % 10) + 2] += 150
        Image.fromarray(pixels).save(folder / f"{number:05d}.png")


def wait_for_questions(person: Person, n: int, pause: float) -> list[float]:
    """Answer; return the milliseconds until each next question, in ascending order."""
    question, waits = person.ask("next"), []
    for _ in range(n):
        time.sleep(pause)
        name = f"class {int(Path(question['cells'][0]).stem) % 10}"
        started = time.perf_counter()
        question = person.ask("answer", row=question["row"], name=name)
        waits.append(1000 * (time.perf_counter() - started))
    return sorted(waits)


def describe(waits: list[float]) -> str:
    """Return the median, the 95th percentile and the largest of waits."""
    return ", ".join(f"{waits[min(len(waits) - 1, int(share * len(waits)))]:.0f}" for share in (0.5, 0.95, 1))


def add_options(parser: StudyParser) -> None:
    """Add how much of each."""
    parser.add_whole("--kills", 200, "random moments at which it is killed")
    parser.add_whole("--requests", 10_000, "of noise")
    parser.add_whole("--pictures", 10_000, "in the pool")
    parser.add_whole("--answers", 200, "that are timed")


def run(options: argparse.Namespace) -> Report:
    """Label, kill, and measure."""
    first, pause = os.getloadavg()[0], 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = kill(folder, options.kills)
        answers = folder / "answers-0.csv"
        with start("page", folder / "rest.csv", "-o", answers) as server:
            before = answers.read_bytes()
            failed = send_noise(server.port, options.requests, PATHS)
            lives = "yes" if server.process.poll() is None else "no"
            figures["noise"] = f"{failed}; {'same' if before == answers.read_bytes() else 'other'}; {lives}"
        model = folder / "model.safetensors"
        measure(["-m", "protonet", "fit", str(answers), "--effort", "fast", "-o", str(model)])
        with start("serve", model) as server:
            failed = send_noise(server.port, options.requests, SERVED)
            figures["served"] = f"{failed}; {'yes' if server.process.poll() is None else 'no'}"
        write_pictures(folder / "pictures", options.pictures)
        command: list[str | Path] = ["page", folder / "pictures", "--representation", "none", "-o", folder / "own.csv"]
        with start(*command) as server:
            person = Person(server.port, "one")
            figures["waits"] = describe(wait_for_questions(person, options.answers, 0.0))
            figures["paused"] = describe(wait_for_questions(person, options.answers // 4, pause))
            figures["memory"] = server.measure()[1]
    figures |= {"requests": options.requests, "pictures": options.pictures, "asked": options.answers, "pause": pause}
    figures |= {"cores": os.cpu_count(), "load": f"{first:.1f} before, {os.getloadavg()[0]:.1f} after"}
    return Report(figures, NOTE.format(**figures).strip() + "\n")
