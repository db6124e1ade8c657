"""Fits, reports and predictions, each made by a command in a process of its own."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from starlette.exceptions import HTTPException

from protonet.commands.data import ColumnOverrides
from protonet.ui.text import format_csv

#: Files that jobs write, and their media types, by name.
FILES = {
    "model": ("model.protonet", "application/octet-stream"),
    "report": ("report.html", "text/html"),
    "predictions": ("predictions.csv", "text/csv"),
}


@dataclass
class JobRunner:
    """Runs commands on the labelled rows, one job at a time; their output lies in a temporary folder.

    Args:
        answers: The file of the labelled rows.
        table: The table to label.
        label: The column of the labels.
        model: The file of a model to update; None to fit a new one.
        columns: The user's settings of columns.
        options: Options of all commands: ``--representation`` and so on.
    """

    answers: Path
    table: str
    label: str
    model: str | None
    columns: ColumnOverrides
    options: Sequence[str]
    metrics: dict[str, Any] | None = None  #: The output of the last fit with ``--json``.
    version: int = -1  #: The version of the labels of the metrics.
    checked: int = 0  #: The number of labels of the metrics, or of the fit in progress.
    error: str = ""  #: The message of the last job, if it failed.
    running: str = ""  #: "results" or "export"; "" if there is no job.
    folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)
    _next: tuple[str, int, list[int], Sequence[Sequence[str]], Sequence[Sequence[str]] | None] | None = None
    _task: asyncio.Task[None] | None = None

    def start(
        self,
        job: str,
        version: int,
        rows: list[int],
        lines: Sequence[Sequence[str]],
        table: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Start a job, after the one in progress.

        Args:
            job: "results" for metrics, "export" for a model, its report and predictions too.
            version: The version of the labels.
            rows: The index of each labelled row.
            lines: The header and the labelled rows.
            table: The header and the rows to predict; None for the whole table.
        """
        if self.running:
            self._next = (job, version, rows, lines, table)
            return
        self.running, self.error, self.checked = job, "", len(rows)
        Path(self.folder.name, self.answers.name).write_text(format_csv(lines), encoding="utf-8")
        path = self.table
        if table is not None:
            path = str(Path(self.folder.name, "table.csv"))
            Path(path).write_text(format_csv(table), encoding="utf-8")
        self._task = asyncio.create_task(self._work(job, version, rows, path))

    def get_file(self, name: str) -> tuple[Path, str]:
        """Return the path and the media type of a file; raise an HTTPException if it is not made yet."""
        if name not in self.ready():
            made = ", ".join(["labelled", *self.ready()])
            raise HTTPException(404, f"`file` must be one of {made}; got another one. Export makes the others.")
        file, media = FILES[name]
        return Path(self.folder.name, file), media

    def build_commands(self, answers: Path, to_predict: str, folder: str = "") -> list[list[str]]:
        """Build the commands that make the files, in a folder."""
        model, report, predictions = (f"{folder}{file}" for file, _ in FILES.values())
        table = [str(answers), "--label", self.label]
        if self.model is None:
            commands = [["fit", *table, *self.columns.to_options(), "--report", report, "-o", model]]
        else:
            commands = [["update", self.model, *table, "-o", model]]
        commands.append(["predict", model, to_predict, "-o", predictions, "--proba"])
        if self.model is not None:
            commands.append(["evaluate", self.model, *table, "--report", report])
        return [[*command, *self.options] for command in commands]

    def command_lines(self) -> list[str]:
        """Return the command lines that make the files."""
        return [shlex.join(["protonet", *command]) for command in self.build_commands(self.answers, self.table)]

    async def _work(self, job: str, version: int, rows: list[int], to_predict: str) -> None:
        """Run the commands of a job, and then the next job."""
        folder, answers = Path(self.folder.name), Path(self.folder.name, self.answers.name)
        metrics = str(folder / "metrics.json")
        first, *others = self.build_commands(answers, to_predict, f"{folder}/")
        fits = job == "results" or self.model is None
        if job == "results":
            options = ["--report", str(folder / "results.html"), "--effort", "fast", *self.options]
            first, others = ["fit", str(answers), "--label", self.label, *self.columns.to_options(), *options], []
        for file, _ in FILES.values() if job == "export" else ():
            (folder / file).unlink(missing_ok=True)
        try:
            await self._run([*first, *["--json", metrics] * fits])
            if fits:
                self.metrics = json.loads(Path(metrics).read_text(encoding="utf-8")) | {"rows_of_table": rows}
                self.version = version
            for command in others:
                await self._run(command)
        except (RuntimeError, OSError) as error:
            self.error = " ".join(str(error).split())
        finally:
            self.running = ""
        if self._next is not None:
            following, self._next = self._next, None
            self.start(*following)

    def ready(self) -> list[str]:
        """Return the names of the files that were made."""
        made = [name for name, (file, _) in FILES.items() if Path(self.folder.name, file).exists()]
        return [] if self.running == "export" else made

    async def _run(self, arguments: Sequence[str]) -> None:
        """Run a command; raise a RuntimeError with its message if it fails."""
        command = [sys.executable, "-m", "protonet", *arguments, "-q"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=pipe)
        try:
            _, message = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            raise
        if process.returncode:
            raise RuntimeError(message.decode(errors="replace").strip()[-500:])
