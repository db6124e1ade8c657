"""``serve`` under load: rows per second, waiting, memory, models that are replaced, its end."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from analysis.commands.speed import STREAMED, measure, sample_table, write_rows
from analysis.shared.runner import Report, StudyParser
from protonet.ui.text import format_table

#: Of the token, and the rows that are compared with what predict says.
TOKEN, COMPARED = "study", 500
#: The columns of the table.
HEADER = [
    "connections x rows",
    "requests",
    "rows / s",
    "of predict, %",
    "of the CPU, %",
    "50 %, ms",
    "95 %",
    "99 %",
    "most",
]
NOTE = """
A model of {fitted} rows of {dim} features and {classes} classes; each request holds its rows as JSON. `predict` makes
{batch:,.0f} rows a second of NPY, {batch_cpu:,.0f} a second of the CPU, and {csv_cpu:,.0f} a second of the CPU of CSV,
its start taken off. The server, the load generator ({generator:.0f} % of a core) and others share {cores} cores of the
machine, load {load}; httptools: {fast}. "Of the CPU": rows per second of the server's CPU, of those of
`predict` for CSV.

| promise | found |
|---|---|
| largest difference from a probability of `predict`, {compared} rows; other classes | {difference:.1e}; {wrong} |
| memory over {requests:,} requests, MiB, after the first tenth and at the end | {before:.0f}, {after:.0f} |
| a model replaced every second for {seconds} s under load: reloads; requests | {reloads}; {replaced} |
| SIGTERM under load, {ends} times: requests; exit codes | {ended}; {codes} |
"""


@contextmanager
def start(command: Sequence[str | Path]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a command that listens; yield its process and port, and end it."""
    environment = {**os.environ, "PROTONET_TOKEN": TOKEN}
    arguments = [sys.executable, "-m", "protonet", *map(str, command), "--port", "0"]
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)/\?token", process.stdout.readline())
        assert found
        yield process, int(found[1])
    finally:
        process.terminate()
        process.wait()


def start_load(port: int, body: str, **limits: float) -> subprocess.Popen[str]:
    """Start the load generator."""
    headers = f"Authorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    settings = {"port": port, "path": "/models/wide/predict", "headers": headers, "body": body}
    settings |= {"connections": 50, "limit": 10**6, "requests": 10**9, **limits}
    command = [sys.executable, str(Path(__file__).with_name("load.py"))]
    load = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert load.stdin
    load.stdin.write(json.dumps(settings))
    load.stdin.close()
    load.stdin = None
    return load


def finish(load: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a load generator; return what it says."""
    return dict(json.loads(load.communicate()[0]))


def write_body(rows: np.ndarray) -> str:
    """Return rows as JSON."""
    return json.dumps({"rows": [[round(cell, 4) for cell in row] for row in rows.tolist()]})


def read_process(process: subprocess.Popen[str]) -> tuple[float, float]:
    """Return the seconds of the CPU of a process, and the MiB that it holds."""
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    pages = int(Path(f"/proc/{process.pid}/statm").read_text(encoding="utf-8").split()[1])
    ticks = os.sysconf("SC_CLK_TCK")
    return (int(fields[11]) + int(fields[12])) / ticks, pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def compare(port: int, folder: Path, rows: np.ndarray) -> tuple[float, int]:
    """Return the largest difference of a probability from that of ``predict``, and how many classes differ."""
    import http.client  # noqa: PLC0415 - of this alone

    body = write_body(rows[:COMPARED])
    np.save(folder / "some.npy", np.array(json.loads(body)["rows"], np.float32))
    out = folder / "some.csv"
    measure(["-m", "protonet", "predict", str(folder / "wide.safetensors"), str(folder / "some.npy"), "-o", str(out)])
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    connection.request("POST", "/models/wide/predict", body, headers)
    found = json.loads(connection.getresponse().read())["predictions"]
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
    fitted = 400
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        x, labels = sample_table(fitted, dim, classes)
        np.savez(folder / "fit.npz", x=x, y=labels)
        model = folder / "wide.safetensors"
        measure(["-m", "protonet", "fit", str(folder / "fit.npz"), "-o", str(model), "-q"])
        write_rows(folder / "rows.npy", options.rows, dim)
        rows = np.load(folder / "rows.npy", mmap_mode="r")
        few = min(5000, options.rows)
        header = ",".join(f"x{at}" for at in range(dim))
        np.savetxt(folder / "rows.csv", rows[:few], "%.4f", ",", header=header, comments="")
        np.savez(folder / "named.npz", x=x, y=labels)
        named = folder / "named.csv"
        named.write_text(
            header
            + ",label\n"
            + "\n".join(
                ",".join([*map("{:.5f}".format, row), f"class {label}"])
                for row, label in zip(x.tolist(), labels.tolist(), strict=True)
            ),
            encoding="utf-8",
        )
        measure(["-m", "protonet", "fit", str(named), "-o", str(folder / "named.safetensors"), "-q"])
        predict = ["-m", "protonet", "predict"]
        np.save(folder / "one.npy", rows[:1])
        idle = measure([*predict, str(model), str(folder / "one.npy"), "-o", str(folder / "out.csv")])
        batch = measure([*predict, str(model), str(folder / "rows.npy"), "-o", str(folder / "out.csv")])
        csv = measure(
            [*predict, str(folder / "named.safetensors"), str(folder / "rows.csv"), "-o", str(folder / "out.csv")]
        )
        rate = options.rows / (batch[0] - idle[0])
        figures: dict[str, Any] = {"batch": rate, "batch_cpu": options.rows / (batch[1] - idle[1])}
        figures["csv_cpu"] = few / (csv[1] - idle[1])
        lines, results = list[list[str]](), list[dict[str, Any]]()
        for connections, size in ((50, 1), (1, 50), (8, 50)):
            with start(["serve", model]) as (process, port):
                if not results:
                    difference, wrong = compare(port, folder, np.asarray(rows))
                    figures |= {"difference": difference, "wrong": wrong}
                before, _ = read_process(process)
                told = finish(start_load(port, write_body(rows[:size]), limit=options.seconds, connections=connections))
                cpu = read_process(process)[0] - before
            made = told["answered"] * size
            told |= {"connections": connections, "size": size, "server_cpu": cpu}
            results.append(told)
            waited = [f"{1000 * told['quantiles'][share]:.0f}" for share in ("0.5", "0.95", "0.99", "1.0")]
            assert not told["lost"] + told["failed"] + told["refused"], told
            speed = made / told["elapsed"]
            shares = [f"{100 * speed / rate:.0f}", f"{100 * made / cpu / figures['csv_cpu']:.0f}"]
            lines.append([f"{connections} x {size}", f"{told['answered']:,}", f"{speed:,.0f}", *shares, *waited])
        figures["generator"] = 100 * results[0]["cpu"] / results[0]["elapsed"]
        body = write_body(rows[:1])
        with start(["serve", model]) as (process, port):
            finish(start_load(port, body, requests=options.requests // 10))
            figures["before"] = read_process(process)[1]
            finish(start_load(port, body, requests=options.requests - options.requests // 10))
            figures["after"] = read_process(process)[1]
            load, content = start_load(port, body, limit=options.seconds), model.read_bytes()
            for _ in range(options.seconds):
                time.sleep(1)
                (folder / "new").write_bytes(content)
                (folder / "new").replace(model)
            told = finish(load)
            time.sleep(1)
            figures["replaced"] = describe([told])
            figures["reloads"] = read_reloads(port)
        found, codes = [], []
        for _ in range(options.ends):
            with start(["serve", model]) as (process, port):
                load = start_load(port, body, limit=3)
                time.sleep(1.5)
                process.send_signal(signal.SIGTERM)
                codes.append(process.wait())
                found.append(finish(load))
        figures |= {"ended": describe(found), "codes": ", ".join(map(str, sorted(set(codes))))}
    figures |= {"seconds": options.seconds, "requests": options.requests, "ends": options.ends, "compared": COMPARED}
    figures |= {"fitted": fitted, "dim": dim, "classes": classes, "cores": os.cpu_count()}
    figures |= {"load": f"{first:.1f} before, {os.getloadavg()[0]:.1f} after"}
    figures["fast"] = "yes" if find_spec("httptools") else "no"
    return Report({"results": results, **figures}, format_table(HEADER, lines) + NOTE.format(**figures))


def describe(found: Sequence[dict[str, Any]]) -> str:
    """Return how many requests were answered, and how many were not."""
    answered, lost, failed = (sum(each[name] for each in found) for name in ("answered", "lost", "failed"))
    return f"{answered:,} answered, {lost} lost, {failed} failed"


def read_reloads(port: int) -> int:
    """Return how often a server has read its model again, as its figures say."""
    import http.client  # noqa: PLC0415 - as above

    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    found = re.search(r"reloads_total\{[^}]*\} (\d+)", connection.getresponse().read().decode())
    assert found
    return int(found[1])
