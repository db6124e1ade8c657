"""``serve`` under load: rows per second, waiting, memory, models that are replaced, its end; and what HTTP costs."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from analysis.commands.servers import Server, finish, start, start_load
from analysis.commands.speed import STREAMED, measure, sample_table, write_rows
from analysis.shared.runner import Report, StudyParser
from protonet.ui.text import format_table

#: The rows that are compared with what predict says, and those that are fitted.
COMPARED, FITTED = 500, 400
#: Connections and rows of a request, and whether it is a server that answers nothing.
LOADS = ((50, 1, True), (50, 1, False), (8, 100, False))
#: What is asked.
PATH = "/models/wide/predict"
#: What is optional and makes it faster.
FASTER = ("uvloop", "httptools", "msgspec")
#: The columns of the table.
HEADER = [
    "connections x rows",
    "requests",
    "rows / s",
    "of predict, %",
    "CPU / row, us",
    "of predict's CPU, %",
    "50 %, ms",
    "95 %",
    "99 %",
    "most",
]
NOTE = """
A model of {fitted} rows of {dim} features and {classes} classes; each request holds its rows as JSON. `predict` makes
{batch:,.0f} rows a second of NPY, and takes {batch_cpu:.0f} us of the CPU for each, its start taken off; all before the
first line. "Nothing" answers 200 as soon as it has the request, by the same uvicorn: what HTTP alone costs. "Of
predict's CPU": what a row takes there of what it takes here. The server, the load generator ({generator:.0f} us of the
CPU for a request of one row, {share:.0f} % of a core) and others share {cores} cores of the machine, load {load};
installed: {fast}.

| promise | found |
|---|---|
| largest difference from a probability of `predict`, {compared} rows; other classes | {difference:.1e}; {wrong} |
| memory over {requests:,} requests, MiB, after the first tenth and at the end | {before:.0f}, {after:.0f} |
| a model replaced every second for {seconds} s under load: reloads; requests | {reloads}; {replaced} |
| SIGTERM under load, {ends} times: requests; exit codes | {ended}; {codes} |
"""


def write_body(rows: np.ndarray) -> str:
    """Return rows as JSON."""
    return json.dumps({"rows": [[round(cell, 4) for cell in row] for row in rows.tolist()]})


def compare(server: Server, folder: Path, rows: np.ndarray) -> tuple[float, int]:
    """Return the largest difference of a probability from that of ``predict``, and how many classes differ."""
    body = json.loads(write_body(rows[:COMPARED]))
    np.save(folder / "some.npy", np.array(body["rows"], np.float32))
    out = folder / "some.csv"
    measure(["-m", "protonet", "predict", str(folder / "wide.safetensors"), str(folder / "some.npy"), "-o", str(out)])
    found = server.ask_json("POST", PATH, body)["predictions"]
    told = [line.split(",") for line in out.read_text(encoding="utf-8").splitlines()[1:]]
    pairs = list(zip(found, told, strict=True))
    return (
        max(abs(each["probability"] - float(share)) for each, (_, share) in pairs),
        sum(each["class"] != name for each, (name, _) in pairs),
    )


def add_options(parser: StudyParser) -> None:
    """Add how long, and how much."""
    parser.add_whole("--seconds", 60, "of load, and of models that are replaced")
    parser.add_whole("--requests", 100_000, "over which memory is looked at")
    parser.add_whole("--rows", 100_000, "that predict makes in a batch")
    parser.add_whole("--ends", 10, "how often a server under load is ended")


def run(options: argparse.Namespace) -> Report:
    """Measure a server, and what predict makes beside it."""
    first = os.getloadavg()[0]
    _, dim, classes = STREAMED
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        x, labels = sample_table(FITTED, dim, classes)
        np.savez(folder / "fit.npz", x=x, y=labels)
        model = folder / "wide.safetensors"
        measure(["-m", "protonet", "fit", str(folder / "fit.npz"), "-o", str(model), "-q"])
        write_rows(folder / "rows.npy", options.rows, dim)
        rows = np.load(folder / "rows.npy", mmap_mode="r")
        np.save(folder / "one.npy", rows[:1])
        spent = [
            measure(["-m", "protonet", "predict", str(model), str(folder / which), "-o", str(folder / "out.csv")])
            for which in ("one.npy", "rows.npy")
        ]
        seconds, cpu = (after - before for before, after in zip(*(each[:2] for each in spent), strict=True))
        figures: dict[str, Any] = {"batch": options.rows / seconds, "batch_cpu": 1e6 * cpu / options.rows}
        lines, results = list[list[str]](), list[dict[str, Any]]()
        for connections, size, bare in LOADS:
            told: dict[str, Any] = {"connections": connections, "size": size, "bare": bare}
            with start(script=Path(__file__).with_name("floor.py")) if bare else start("serve", model) as server:
                if not bare and not figures.get("compared"):
                    difference, wrong = compare(server, folder, np.asarray(rows))
                    figures |= {"difference": difference, "wrong": wrong, "compared": COMPARED}
                body = write_body(rows[:size])
                finish(start_load(server.port, PATH, body, limit=1, connections=connections))
                before, _ = server.measure()
                told |= finish(start_load(server.port, PATH, body, limit=options.seconds, connections=connections))
                told["server"] = 1e6 * (server.measure()[0] - before) / told["answered"] / size
            results.append(told)
            lines.append(describe_load(told, figures))
        figures["generator"] = 1e6 * results[1]["cpu"] / results[1]["answered"]
        figures["share"] = 100 * results[1]["cpu"] / results[1]["elapsed"]
        body, most = write_body(rows[:1]), options.requests // 10
        with start("serve", model) as server:
            finish(start_load(server.port, PATH, body, requests=most))
            figures["before"] = server.measure()[1]
            finish(start_load(server.port, PATH, body, requests=options.requests - most))
            figures["after"] = server.measure()[1]
            load, content = start_load(server.port, PATH, body, limit=options.seconds), model.read_bytes()
            for _ in range(options.seconds):
                time.sleep(1)
                (folder / "new").write_bytes(content)
                (folder / "new").replace(model)
            told = finish(load)
            time.sleep(1)
            reloads = re.search(r"reloads_total\{[^}]*\} (\d+)", server.ask("GET", "/metrics")[1].decode())
            figures |= {"replaced": describe([told]), "reloads": int(reloads[1]) if reloads else 0}
        found, codes = [], []
        for _ in range(options.ends):
            with start("serve", model) as server:
                load = start_load(server.port, PATH, body, limit=3)
                time.sleep(1.5)
                server.process.send_signal(signal.SIGTERM)
                codes.append(server.process.wait())
                found.append(finish(load))
        figures |= {"ended": describe(found), "codes": ", ".join(map(str, sorted(set(codes))))}
    figures |= {"seconds": options.seconds, "requests": options.requests, "ends": options.ends, "fitted": FITTED}
    figures |= {"dim": dim, "classes": classes, "cores": os.cpu_count()}
    figures |= {"load": f"{first:.1f} before, {os.getloadavg()[0]:.1f} after"}
    figures["fast"] = ", ".join(each for each in FASTER if find_spec(each)) or "nothing that is optional"
    return Report({"results": results, **figures}, format_table(HEADER, lines) + NOTE.format(**figures))


def describe_load(told: dict[str, Any], figures: dict[str, Any]) -> list[str]:
    """Return a line of the table."""
    assert not told["lost"] + told["failed"] + told["refused"], told
    speed, name = told["answered"] * told["size"] / told["elapsed"], f"{told['connections']} x {told['size']}"
    waited = [f"{1000 * told['quantiles'][share]:.0f}" for share in ("0.5", "0.95", "0.99", "1.0")]
    shares = [f"{100 * speed / figures['batch']:.0f}", f"{told['server']:.0f}"]
    shares.append(f"{100 * figures['batch_cpu'] / told['server']:.0f}")
    return [f"{name}, nothing" if told["bare"] else name, f"{told['answered']:,}", f"{speed:,.0f}", *shares, *waited]


def describe(found: Sequence[dict[str, Any]]) -> str:
    """Return how many requests were answered, and how many were not."""
    answered, lost, failed = (sum(each[name] for each in found) for name in ("answered", "lost", "failed"))
    return f"{answered:,} answered, {lost} lost, {failed} failed"
