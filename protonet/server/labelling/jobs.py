"""Jobs of the labelling page: fits, reports and predictions, which commands compute in separate processes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from protonet._io import JsonDict
from protonet.commands.options import (
    EvaluateOptions,
    FitOptions,
    PageOptions,
    PredictOptions,
    ReadOptions,
    UpdateOptions,
    format_command,
    to_command_line,
)
from protonet.ui.options import make_options
from protonet.ui.text import format_csv

#: File name and media type of each exported file, by its name on the page.
EXPORTED_FILES = {
    "model": ("model.protonet", "application/octet-stream"),
    "report": ("report.html", "text/html"),
    "predictions": ("predictions.csv", "text/csv"),
}


@dataclass(frozen=True)
class PageJob:
    """A job on a snapshot of the labels, which computes metrics or exports a model."""

    kind: str  #: "results" computes metrics; "export" also writes a model, its report and predictions.
    labels_version: int  #: The number of changes of labels before the job (`LabelQueue.n_changes`).
    row_indices: list[int]  #: The index of each labelled row.
    labelled_table: Sequence[Sequence[str]]  #: The header, and the cells and label of each labelled row.
    table_to_predict: Sequence[Sequence[str]] | None
    """The header and the rows to predict; None to predict the table's file."""


@dataclass
class JobRunner:
    """Runs the jobs of the labelling page one at a time; the files of the latest job are in a temporary folder."""

    options: PageOptions  #: The options of ``page``, with the column types, dropped columns and groups set since then.
    label_column: str  #: The name of the column of labels.
    folder: Path  #: The folder of exported files.
    metrics: JsonDict | None = None  #: The metrics of the last fit.
    metrics_version: int = -1  #: The `PageJob.labels_version` of the metrics; -1 before the first fit.
    n_fitted_labels: int = 0  #: The number of labels in the last fit, or in the fit in progress.
    error_message: str = ""  #: The error message of the last job; "" if it succeeded.
    running_job: str = ""  #: The kind of the job in progress; "" if no job is in progress.
    on_end: Callable[[], None] = lambda: None  #: Called after each job.
    _waiting_job: PageJob | None = None  #: The job that waits for the end of the job in progress.
    _task: asyncio.Task[None] | None = None

    def start_job(self, job: PageJob) -> None:
        """Start a job or, if another is in progress, let it wait; it replaces a job that already waits."""
        if self.running_job:
            self._waiting_job = job
            return
        self.running_job, self.error_message, self.n_fitted_labels = job.kind, "", len(job.row_indices)
        folder, path = self.folder, self.options.table
        (folder / self.options.output.name).write_text(format_csv(job.labelled_table), encoding="utf-8")
        if job.table_to_predict is not None:
            path = folder / "table.csv"
            path.write_text(format_csv(job.table_to_predict), encoding="utf-8")
        self._task = asyncio.create_task(self._run_job(job, path))

    def get_exported_file(self, name: str) -> tuple[Path, str]:
        """Return the path and media type of an exported file; raise an HTTPException if it does not exist yet."""
        if name not in self.list_exported_files():
            made = ", ".join(["labelled", *self.list_exported_files()])
            raise HTTPException(404, f"`file` must be one of {made}; got another one. Export makes the others.")
        file, media = EXPORTED_FILES[name]
        return self.folder / file, media

    def list_export_commands(self, labels: Path, table: Path, folder: Path) -> list[ReadOptions]:
        """List the options of the commands that export a model, its report and predictions, in the order to run them.

        ``labels`` is the file of labelled rows, and ``table`` the rows to predict; outputs are written to ``folder``.
        """
        model, report, predictions = (folder / file for file, _ in EXPORTED_FILES.values())
        reading, options = self.make_label_read_options(), self.options
        sheet = {"sheet": options.sheet} if table == options.table else {}
        predict = PredictOptions(**reading | sheet, model=model, table=table, output=predictions, proba=True)
        if options.model is None:
            return [self.make_fit_options(labels, report=report, output=model), predict]
        update = UpdateOptions(**reading, model=options.model, table=labels, label=self.label_column, output=model)
        evaluate = EvaluateOptions(**reading, model=options.model, table=labels, label=self.label_column, report=report)
        return [update, predict, evaluate]

    def make_label_read_options(self) -> dict[str, Any]:
        """Return the options for reading the file of labelled rows: the options of the table, but without a sheet."""
        return vars(replace(make_options(ReadOptions, self.options), sheet=None))

    def make_fit_options(self, labels: Path, **options: Any) -> FitOptions:
        """Make the options of the command ``fit`` on a file of labelled rows; ``options`` sets further ones."""
        return FitOptions(
            **self.make_label_read_options(),
            table=labels,
            label=self.label_column,
            column_type=self.options.column_type,
            drop=self.options.drop,
            group=self.options.group,
            **options,
        )

    def format_commands(self) -> list[str]:
        """Return the shell commands that write the files of all jobs to the current folder, for users to copy."""
        return list(map(format_command, self.list_export_commands(self.options.output, self.options.table, Path())))

    async def _run_job(self, job: PageJob, table_path: Path) -> None:
        """Run the commands of a job on the table at ``table_path``, then start the waiting job, if there is one."""
        folder = self.folder
        labels, metrics = folder / self.options.output.name, folder / "metrics.json"
        if job.kind == "results":
            commands: list[ReadOptions] = [self.make_fit_options(labels, report=folder / "results.html")]
        else:
            commands = self.list_export_commands(labels, table_path, folder)
            for file, _ in EXPORTED_FILES.values():
                (folder / file).unlink(missing_ok=True)
        try:
            for command in commands:
                if not isinstance(command, FitOptions):
                    await self._run_command(command)
                    continue
                await self._run_command(replace(command, json=metrics))
                self.metrics = json.loads(metrics.read_text(encoding="utf-8")) | {"rows_of_table": job.row_indices}
                self.metrics_version = job.labels_version
        except (RuntimeError, OSError) as error:
            self.error_message = " ".join(str(error).split())
        finally:
            self.running_job = ""
        if self._waiting_job is not None:
            following, self._waiting_job = self._waiting_job, None
            self.start_job(following)
        self.on_end()

    def list_exported_files(self) -> list[str]:
        """List the names of the exported files; the list is empty during an export."""
        made = [name for name, (file, _) in EXPORTED_FILES.items() if (self.folder / file).exists()]
        return [] if self.running_job == "export" else made

    async def _run_command(self, options: ReadOptions) -> None:
        """Run a command in another process; if the command fails, raise a RuntimeError with its error message."""
        command = [sys.executable, "-m", "protonet", *to_command_line(replace(options, quiet=True))]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=pipe)
        try:
            _, message = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            raise
        if process.returncode:
            raise RuntimeError(message.decode(errors="replace").strip()[-500:])
