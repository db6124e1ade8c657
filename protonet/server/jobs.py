"""Fits, reports and predictions, each made by a command in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from starlette.exceptions import HTTPException

from protonet._io import JsonDict
from protonet.commands.data import ColumnOverrides
from protonet.commands.options import (
    EvaluateOptions,
    FitOptions,
    PredictOptions,
    ReadOptions,
    UpdateOptions,
    format_command,
    to_arguments,
)
from protonet.ui.text import format_csv

#: Files that jobs write, and their media types, by name.
FILES = {
    "model": ("model.protonet", "application/octet-stream"),
    "report": ("report.html", "text/html"),
    "predictions": ("predictions.csv", "text/csv"),
}


@dataclass(frozen=True)
class PageJob:
    """Work on the labels of one version: their metrics, or a model."""

    kind: str  #: "results" for metrics, "export" for a model, its report and predictions too.
    version: int  #: The version of the labels.
    rows: list[int]  #: The index of each labelled row.
    lines: Sequence[Sequence[str]]  #: The header and the labelled rows.
    table: Sequence[Sequence[str]] | None  #: The header and the rows to predict; None for the whole table.


@dataclass
class JobRunner:
    """Runs commands on the labelled rows, one job at a time; their output lies in a temporary folder."""

    answers: Path  #: The file of the labelled rows.
    table: Path  #: The table to label.
    label: str  #: The column of the labels.
    model: Path | None  #: The file of a model to update; None to fit a new one.
    columns: ColumnOverrides  #: The user's settings of columns.
    reading: ReadOptions  #: How all commands read tables.
    metrics: JsonDict | None = None  #: The output of the last fit with ``--json``.
    version: int = -1  #: The version of the labels of the metrics.
    checked: int = 0  #: The number of labels of the metrics, or of the fit in progress.
    error: str = ""  #: The message of the last job, if it failed.
    running: str = ""  #: The kind of the job in progress, or "".
    folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)
    _next: PageJob | None = None
    _task: asyncio.Task[None] | None = None

    def start(self, job: PageJob) -> None:
        """Start a job, after the one in progress."""
        if self.running:
            self._next = job
            return
        self.running, self.error, self.checked = job.kind, "", len(job.rows)
        folder, path = Path(self.folder.name), self.table
        (folder / self.answers.name).write_text(format_csv(job.lines), encoding="utf-8")
        if job.table is not None:
            path = folder / "table.csv"
            path.write_text(format_csv(job.table), encoding="utf-8")
        self._task = asyncio.create_task(self._work(job, path))

    def get_file(self, name: str) -> tuple[Path, str]:
        """Return the path and the media type of a file; raise an HTTPException if it is not made yet."""
        if name not in self.ready():
            made = ", ".join(["labelled", *self.ready()])
            raise HTTPException(404, f"`file` must be one of {made}; got another one. Export makes the others.")
        file, media = FILES[name]
        return Path(self.folder.name, file), media

    def list_commands(self, answers: Path, table: Path, folder: Path) -> list[ReadOptions]:
        """List the commands that make the files in a folder, given the labelled rows and the table to predict."""
        model, report, predictions = (folder / file for file, _ in FILES.values())
        reading = vars(replace(self.reading, sheet=None))  # answers are CSV files
        sheet = {"sheet": self.reading.sheet} if table == self.table else {}
        predict = PredictOptions(**reading | sheet, model=model, table=table, output=predictions, proba=True)
        if self.model is None:
            return [self.fit(answers, report=report, output=model), predict]
        update = UpdateOptions(**reading, model=self.model, table=answers, label=self.label, output=model)
        evaluate = EvaluateOptions(**reading, model=self.model, table=answers, label=self.label, report=report)
        return [update, predict, evaluate]

    def fit(self, answers: Path, **options: Any) -> FitOptions:
        """Build the options of a fit to the labelled rows, given further ones."""
        return FitOptions(
            **vars(replace(self.reading, sheet=None)),
            table=answers,
            label=self.label,
            column_type=[f"{name}={column_type}" for name, column_type in self.columns.types.items()],
            drop=self.columns.dropped,
            group=self.columns.group,
            **options,
        )

    def format_commands(self) -> list[str]:
        """Format the command lines that make the files in the current folder."""
        return list(map(format_command, self.list_commands(self.answers, self.table, Path())))

    async def _work(self, job: PageJob, to_predict: Path) -> None:
        """Run the commands of a job, and then the next job."""
        folder = Path(self.folder.name)
        answers, metrics = folder / self.answers.name, folder / "metrics.json"
        if job.kind == "results":
            commands: list[ReadOptions] = [self.fit(answers, report=folder / "results.html", effort="fast")]
        else:
            commands = self.list_commands(answers, to_predict, folder)
            for file, _ in FILES.values():
                (folder / file).unlink(missing_ok=True)
        try:
            for command in commands:
                if not isinstance(command, FitOptions):
                    await self._run(command)
                    continue
                await self._run(replace(command, json=metrics))
                self.metrics = json.loads(metrics.read_text(encoding="utf-8")) | {"rows_of_table": job.rows}
                self.version = job.version
        except (RuntimeError, OSError) as error:
            self.error = " ".join(str(error).split())
        finally:
            self.running = ""
        if self._next is not None:
            following, self._next = self._next, None
            self.start(following)

    def ready(self) -> list[str]:
        """Return the names of the files that were made."""
        made = [name for name, (file, _) in FILES.items() if Path(self.folder.name, file).exists()]
        return [] if self.running == "export" else made

    async def _run(self, options: ReadOptions) -> None:
        """Run a command; raise a RuntimeError with its message if it fails."""
        command = [sys.executable, "-m", "protonet", *to_arguments(replace(options, quiet=True))]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=pipe)
        try:
            _, message = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            raise
        if process.returncode:
            raise RuntimeError(message.decode(errors="replace").strip()[-500:])
