"""Kill python -m protonet fit and update at random moments, and look at the model file.

Whatever the moment, the model file has to be the old one or the new one, whole.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tqdm import trange

from analysis.commands.speed import SMALL, sample_table, write_csv
from analysis.shared.runner import Report, StudyParser
from protonet.ui.text import format_table


def run_for(arguments: Sequence[str | Path], seconds: float | None) -> float:
    """Run a command, kill it after some seconds if it takes as long, and return the seconds that it took."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "protonet", *map(str, arguments)]
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(command, check=False, timeout=seconds, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def count_wholes(arguments: Sequence[str | Path], model: Path, old: bytes, kills: int) -> dict[str, int]:
    """Kill a command that replaces a model's file; count the runs that left the old file, the new and another one."""
    model.write_bytes(old)
    whole = run_for(arguments, None)
    new, found = model.read_bytes(), {"old": 0, "new": 0, "broken": 0}
    generator = random.Random(0)
    for _ in trange(kills, unit="kill", dynamic_ncols=True):
        model.write_bytes(old)
        # Half of the moments around the end, where the file is written.
        run_for(arguments, whole * (generator.random() if generator.random() < 0.5 else generator.uniform(0.8, 1.0)))
        content = model.read_bytes()
        found["old" if content == old else "new" if content == new else "broken"] += 1
    run_for(arguments, None)
    left = [path.name for path in model.parent.iterdir() if path.name.endswith(".tmp")]
    return {**found, "left over": len(left)}


def add_options(parser: StudyParser) -> None:
    """Add how often each command is killed."""
    parser.add_whole("--kills", 20, "of each command")


def run(options: argparse.Namespace) -> Report:
    """Kill both commands, and count what was left."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_csv(folder / "a.csv", *sample_table(*SMALL))
        model = folder / "model.safetensors"
        fit: list[str | Path] = ["fit", folder / "a.csv", "-o", model, "--effort", "fast"]
        run_for([*fit, "--seed", "1"], None)
        old = model.read_bytes()
        update: list[str | Path] = ["update", model, folder / "a.csv", "--in-place"]
        found = {command[0]: count_wholes(command, model, old, options.kills) for command in (fit, update)}
    rows = [[str(name), *map(str, counts.values())] for name, counts in found.items()]
    return Report(found, format_table(["killed", *found["fit"]], rows))
