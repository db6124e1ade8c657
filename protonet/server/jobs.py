"""Fits, reports and predictions, each made by a command in a process of its own."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from starlette.exceptions import HTTPException

from protonet.commands.data import ColumnOverrides

#: Files that are made, and their media types, by name.
FILES = {
    "model": ("model.safetensors", "application/octet-stream"),
    "report": ("report.html", "text/html"),
    "predictions": ("predictions.csv", "text/csv"),
}


@dataclass
class JobRunner:
    """Runs commands on the answers, one job at a time; their output lies in a temporary folder.

    Args:
        answers: The file of the answers.
        table: What is labelled.
        label: The column of the answers.
        model: A file of a model that was there before, to be updated; None to fit.
        columns: What a person says of columns.
        options: Options of all commands: ``--representation`` and so on.
    """

    answers: Path
    table: str
    label: str
    model: str | None
    columns: ColumnOverrides
    options: Sequence[str]
    metrics: dict[str, Any] | None = None  #: Of the last fit, as ``--json`` has them.
    version: int = -1  #: Of the answers that the metrics are of.
    error: str = ""  #: What the last job said as it failed.
    running: str = ""  #: "look", "take", or "" for nothing.
    folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)
    _task: asyncio.Task[None] | None = None

    def start(self, kind: str, version: int, rows: list[int]) -> None:
        """Begin a job, unless one is in work.

        Args:
            kind: "look" for metrics, "take" for a model, its report and predictions, too.
            version: Of the answers.
            rows: The row of each answer.
        """
        if not self.running:
            self.running, self.error = kind, ""
            shutil.copyfile(self.answers, Path(self.folder.name, self.answers.name))  # others go on answering
            self._task = asyncio.create_task(self._work(kind, version, rows))

    def locate(self, name: str) -> tuple[Path, str]:
        """Return a file that was made, and its media type.

        Raises:
            HTTPException: There is none yet.
        """
        if name not in self.ready():
            made = ", ".join(["labelled", *self.ready()])
            raise HTTPException(404, f"`file` must be one of {made}; got another one. The button makes the others.")
        file, media = FILES[name]
        return Path(self.folder.name, file), media

    def build_commands(self, answers: Path, folder: str = "") -> list[list[str]]:
        """Build the commands that make the files, in a folder."""
        model, report, predictions = (f"{folder}{file}" for file, _ in FILES.values())
        table = [str(answers), "--label", self.label]
        if self.model is None:
            commands = [["fit", *table, *self.columns.to_options(), "--report", report, "-o", model]]
        else:
            commands = [["update", self.model, *table, "-o", model]]
        commands.append(["predict", model, self.table, "-o", predictions, "--proba"])
        if self.model is not None:
            commands.append(["evaluate", self.model, *table, "--report", report])
        return [[*command, *self.options] for command in commands]

    def command_lines(self) -> list[str]:
        """Return the command lines that make the same files."""
        return [shlex.join(["python", "-m", "protonet", *each]) for each in self.build_commands(self.answers)]

    def python_lines(self) -> list[str]:
        """Return lines of Python that use the model."""
        lines = ["from protonet import load_model", 'model = load_model("model.safetensors")']
        return [*lines, "model.network(features).softmax(dim=1)  # of rows as model.encoding.encode gives them"]

    async def _work(self, kind: str, version: int, rows: list[int]) -> None:
        """Run the commands of a job."""
        folder, answers = Path(self.folder.name), Path(self.folder.name, self.answers.name)
        metrics, (first, *others) = str(folder / "metrics.json"), self.build_commands(answers, f"{folder}/")
        fits = kind == "look" or self.model is None
        if kind == "look":
            page = ["--report", str(folder / "look.html"), *self.options]
            first, others = ["fit", str(answers), "--label", self.label, *self.columns.to_options(), *page], []
            first += ["--effort", "fast"]
        for file, _ in FILES.values() if kind == "take" else ():
            (folder / file).unlink(missing_ok=True)
        try:
            await self._run([*first, *["--json", metrics] * fits])
            if fits:
                self.metrics = json.loads(Path(metrics).read_text(encoding="utf-8")) | {"places": rows}
            for command in others:
                await self._run(command)
        except (RuntimeError, OSError) as error:
            self.error = " ".join(str(error).split())
        finally:
            self.running, self.version = "", version if fits else self.version

    def ready(self) -> list[str]:
        """Return the names of the files that were made."""
        made = [name for name, (file, _) in FILES.items() if Path(self.folder.name, file).exists()]
        return [] if self.running == "take" else made

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
