"""What takes long, by the commands themselves: figures, models, predictions, each a process beside the server."""

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
    folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)
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
        if name not in self.list_ready():
            made = ", ".join(["labelled", *self.list_ready()])
            raise RequestError(404, f"`file` must be one of {made}; got another one. The button makes the others.")
        file, media = FILES[name]
        return Path(self.folder.name, file), media

    def make_commands(self, answers: Path, folder: str = "") -> list[list[str]]:
        """Return the commands that make what may be taken, in a folder."""
        model, report, predictions = (f"{folder}{file}" for file, _ in FILES.values())
        told = [str(answers), "--label", self.label]
        if self.model is None:
            commands = [["fit", *told, *self.taken.list_options(), "--report", report, "-o", model]]
        else:
            commands = [["update", self.model, *told, "-o", model]]
        commands.append(["predict", model, self.table, "-o", predictions, "--proba"])
        if self.model is not None:
            commands.append(["evaluate", self.model, *told, "--report", report])
        return [[*command, *self.more] for command in commands]

    def list_commands(self) -> list[str]:
        """Return the command lines that make the same."""
        return [shlex.join(["python", "-m", "protonet", *each]) for each in self.make_commands(self.answers)]

    def list_python(self) -> list[str]:
        """Return lines of Python that use the model that is taken."""
        lines = ["from protonet import load_model", 'model = load_model("model.safetensors")']
        return [*lines, "model.network(features).softmax(dim=1)  # of rows as model.encoding.encode gives them"]

    async def _work(self, what: str, version: int, places: list[int]) -> None:
        """Do a job."""
        folder, answers = Path(self.folder.name), Path(self.folder.name, self.answers.name)
        figures, (first, *others) = str(folder / "figures.json"), self.make_commands(answers, f"{folder}/")
        fits = what == "look" or self.model is None
        if what == "look":
            page = ["--report", str(folder / "look.html"), *self.more]
            first, others = ["fit", str(answers), "--label", self.label, *self.taken.list_options(), *page], []
            first += ["--effort", "fast"]
        for file, _ in FILES.values() if what == "take" else ():
            (folder / file).unlink(missing_ok=True)
        try:
            await self._run([*first, *["--json", figures] * fits])
            if fits:
                self.figures = json.loads(Path(figures).read_text(encoding="utf-8")) | {"places": places}
            for command in others:
                await self._run(command)
        except (RuntimeError, OSError) as error:
            self.error = " ".join(str(error).split())
        finally:
            self.running, self.version = "", version if fits else self.version

    def list_ready(self) -> list[str]:
        """Return what may be taken: what is there and not in work."""
        there = [name for name, (file, _) in FILES.items() if Path(self.folder.name, file).exists()]
        return [] if self.running == "take" else there

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
