"""What takes long, by the commands themselves: figures, models, predictions, each a process beside the server."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protonet.commands.data import Taken
from protonet.commands.server.guard import RequestError

#: What may be taken: by name, the file of it, and its media type.
FILES = {
    "model": ("model.safetensors", "application/octet-stream"),
    "report": ("report.html", "text/html"),
    "predictions": ("predictions.csv", "text/csv"),
}


@dataclass
class Jobs:
    """Runs commands on the answers, one job at a time; what they write lies in a folder of its own.

    Args:
        answers: The file of the answers.
        table: What is labelled.
        label: The column of the answers.
        model: A file of a model that was there before, to be updated; None to fit.
        taken: What a person says of columns.
        more: Options that all of them take: ``--representation`` and so on.
    """

    answers: Path
    table: str
    label: str
    model: str | None
    taken: Taken
    more: Sequence[str]
    figures: dict[str, Any] | None = None  #: Of the last fit, as ``--json`` has them.
    version: int = -1  #: Of the answers that they are of.
    error: str = ""  #: What the last job said as it failed.
    running: str = ""  #: What is in work: "look", "take", or "" for nothing.
    ready: set[str] = field(default_factory=set)  #: What may be taken.
    folder: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="protonet-page-")
    )
    _task: asyncio.Task[None] | None = None

    def start(self, what: str, version: int, places: list[int]) -> None:
        """Begin a job, unless one is in work.

        Args:
            what: "look" for figures, "take" for a model, its report and predictions, too.
            version: Of the answers.
            places: The row of each answer, which the figures count.
        """
        if not self.running:
            self.running, self.error = what, ""
            shutil.copyfile(self.answers, Path(self.folder.name, self.answers.name))  # others go on answering
            self._task = asyncio.create_task(self._work(what, version, places))

    def find(self, name: str) -> tuple[Path, str]:
        """Return the file of what may be taken, and its media type.

        Raises:
            RequestError: There is none yet.
        """
        if name not in self.ready:
            made = ", ".join(["labelled", *sorted(self.ready)])
            raise RequestError(404, f"`file` must be one of {made}; got another one. The button makes the others.")
        file, media = FILES[name]
        return Path(self.folder.name, file), media

    def list_commands(self) -> list[str]:
        """Return the command lines that make the same."""
        answers, out = [str(self.answers), "--label", self.label], ["-o", "model.safetensors"]
        commands = [["fit", *answers, *self.taken.list_options(), "--report", "report.html", *out]]
        if self.model is not None:
            report = ["evaluate", self.model, *answers, "--report", "report.html"]
            commands = [["update", self.model, *answers, *out], report]
        commands.append(["predict", "model.safetensors", self.table, "-o", "predictions.csv", "--proba"])
        return [shlex.join(["python", "-m", "protonet", *command, *self.more]) for command in commands]

    def list_python(self) -> list[str]:
        """Return lines of Python that use the model that is taken."""
        lines = ["from protonet import load_model", 'model = load_model("model.safetensors")']
        return [*lines, "model.network(features).softmax(dim=1)  # of rows as model.encoding.encode gives them"]

    async def _work(self, what: str, version: int, places: list[int]) -> None:
        """Do a job."""
        folder = Path(self.folder.name)
        model, report, figures = (str(folder / name) for name in ("model.safetensors", "report.html", "figures.json"))
        answers = [str(folder / self.answers.name), "--label", self.label]
        fit = ["fit", *answers, *self.taken.list_options(), *self.more, "--json", figures, "--report", report]
        try:
            if what == "look":
                await self._run([*fit, "--effort", "fast"])
            else:
                self.ready.clear()
                if self.model is None:
                    await self._run([*fit, "-o", model])
                else:
                    await self._run(["update", self.model, *answers, "-o", model, *self.more])
                predicted = str(folder / FILES["predictions"][0])
                await self._run(["predict", model, self.table, "-o", predicted, "--proba", *self.more])
                self.ready = {"model", "predictions"}
                if self.model is not None:
                    await self._run(["evaluate", self.model, *answers, "--report", report, *self.more])
                self.ready.add("report")
            if what == "look" or self.model is None:
                self.figures = json.loads((folder / "figures.json").read_text(encoding="utf-8")) | {"places": places}
                self.version = version
        except (RuntimeError, OSError) as error:
            self.error = " ".join(str(error).split())
            self.version = version
        finally:
            self.running = ""

    async def _run(self, arguments: Sequence[str]) -> None:
        """Run a command; raise a RuntimeError with what it says where it fails."""
        command = [sys.executable, "-m", "protonet", *arguments, "-q"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=pipe)
        try:
            _, said = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            raise
        if process.returncode:
            raise RuntimeError(said.decode(errors="replace").strip()[-500:])
