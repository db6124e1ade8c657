"""Start commands in processes that are forked from one that has imported the library, which takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TextIO

import torch

from protonet.__main__ import main

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["protonet.server.label_api", "protonet.server.prediction_api"])


def run_command(arguments: Sequence[str], environment: Mapping[str, str], outputs: Sequence[Connection]) -> None:
    """Run a command in a new process with a new session, the given environment and outputs, and one thread."""
    os.setsid()
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    for stream, connection in enumerate(outputs, 1):
        os.dup2(connection.fileno(), stream)
        connection.close()
    sys.exit(main(arguments))


@contextmanager
def start_command(
    *arguments: object, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[BaseProcess, TextIO, TextIO]]:
    """Start a command, which is killed at the end of the context, and return its process, stdout and stderr."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    readers, writers = zip(*(PROCESSES.Pipe(duplex=False) for _ in range(2)), strict=True)
    process = PROCESSES.Process(target=run_command, args=([*map(str, arguments)], settings, writers))
    process.start()
    for writer in writers:
        writer.close()
    with ExitStack() as stack:
        output, errors = (
            stack.enter_context(os.fdopen(os.dup(reader.fileno()), encoding="utf-8")) for reader in readers
        )
        for reader in readers:
            reader.close()
        stack.callback(process.join)
        stack.callback(process.kill)
        yield process, output, errors
