"""Kill -9 at random moments of fit and update: ``python -m analysis.command_kills``.

Whatever the moment, the model file has to be the old one or the new one, whole.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from solution.start import start

    sys.exit(start("analysis.command_kills"))

import random
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from analysis.command_speed import SMALL, sample_table, write_csv
from protonet.commands.common import Parser, parse_whole, run_command

PROG = "analysis.command_kills"


def run_for(arguments: Sequence[str | Path], seconds: float | None) -> float:
    """Run a command, kill it after some seconds if it takes as long, and return the seconds that it took."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "protonet", *map(str, arguments)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    return time.perf_counter() - started


def count_wholes(arguments: Sequence[str | Path], model: Path, old: bytes, kills: int) -> dict[str, int]:
    """Kill a command that replaces a model at random moments.

    Args:
        arguments: Of the command.
        model: The file that it writes.
        old: What is in that file before each run.
        kills: How many runs.

    Returns:
        How many runs left the old file, the new one, and another one.
    """
    model.write_bytes(old)
    whole = run_for(arguments, None)
    new, found = model.read_bytes(), {"old": 0, "new": 0, "broken": 0}
    generator = random.Random(0)
    for _ in range(kills):
        model.write_bytes(old)
        # Half of the moments around the end, where the file is written.
        run_for(arguments, whole * (generator.random() if generator.random() < 0.5 else generator.uniform(0.8, 1.0)))
        content = model.read_bytes()
        found["old" if content == old else "new" if content == new else "broken"] += 1
    run_for(arguments, None)
    left = [path.name for path in model.parent.iterdir() if path.name.endswith(".tmp")]
    return {**found, "left over": len(left)}


def _run(arguments: Sequence[str] | None) -> None:
    """Kill, and print what was left."""
    parser = Parser(PROG, "Kill python -m protonet fit and update at random moments, and look at the model file.")
    parser.add_argument("--kills", default="20", metavar="N", help="of each command (default 20)")
    kills = parse_whole(PROG, "--kills", parser.parse_args(arguments).kills, low=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_csv(folder / "a.csv", *sample_table(*SMALL))
        model = folder / "model.safetensors"
        fit: list[str | Path] = ["fit", folder / "a.csv", "-o", model, "--effort", "fast"]
        run_for([*fit, "--seed", "1"], None)
        old = model.read_bytes()
        update: list[str | Path] = ["update", model, folder / "a.csv"]
        for command in (fit, update):
            found = count_wholes(command, model, old, kills)
            print(f"{command[0]}: {', '.join(f'{what} {n}' for what, n in found.items())} of {kills} kills")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(PROG, _run, arguments)
