"""Time and memory of our own features of pictures that are really on the disk, beside other work of the machine."""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter

from analysis.shared.runner import BUILD, Report, StudyParser, call_alone
from protonet.tables.columns.picture import Picture
from protonet.ui.text import format_table

#: Pixels per side of the pictures that are written.
SIDE = 128
NOTE = """
{pictures:,} pictures of {side} x {side} pixels in colour, half of them PNG and half JPEG, read from the disk and turned
into features in a process of its own. Memory is the process's peak, torch's import (some 250 MiB) and all features
included; seconds of the processor are those of all threads, and show what other work on the machine hid.
"""


def add_options(parser: StudyParser) -> None:
    """Add how many pictures, and threads."""
    parser.add_whole("--pictures", 10_000, "how many")
    parser.add_whole("--threads", 2, "threads")


def run(options: argparse.Namespace) -> Report:
    """Write the pictures, and measure."""
    write_pictures(options.pictures)
    row = call_alone(measure, options.pictures, options.threads)
    row |= {"pictures": options.pictures, "threads": options.threads}
    cells = [str(options.threads), f"{row['seconds']:.1f}", f"{row['processor']:.1f}", f"{row['memory']:.0f}"]
    table = format_table(["threads", "seconds", "seconds of the processor", "memory, MiB"], [cells])
    return Report([row], table + NOTE.format(pictures=options.pictures, side=SIDE))


def list_files(n: int) -> list[Path]:
    """Return the paths of n pictures."""
    folder = BUILD / "picture-speed"
    return [folder / f"{number}.{'png' if number % 2 else 'jpg'}" for number in range(n)]


def write_pictures(n: int) -> None:
    """Write n smooth and noisy pictures, those that are not there yet."""
    random = np.random.default_rng(0)
    (BUILD / "picture-speed").mkdir(parents=True, exist_ok=True)
    for path in list_files(n):
        if not path.exists():
            coarse = random.integers(0, 256, (8, 8, 3), np.uint8)
            smooth = Image.fromarray(coarse).resize((SIDE, SIDE)).filter(ImageFilter.GaussianBlur(1))
            noise = random.normal(0, 4, (SIDE, SIDE, 1))
            Image.fromarray((np.asarray(smooth) + noise).clip(0, 255).astype(np.uint8)).save(path)


def measure(n: int, threads: int) -> dict[str, float]:
    """Return seconds, seconds of the processor, and the peak of memory in MiB, of the features of n pictures."""
    torch.set_num_threads(threads)
    cells = np.array(list(map(str, list_files(n))), object)
    started, used = time.perf_counter(), time.process_time()
    features = Picture().encode(cells)
    assert len(features) == n, "one row for each picture"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": time.perf_counter() - started, "processor": time.process_time() - used, "memory": peak}
