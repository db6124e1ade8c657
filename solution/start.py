"""Start of a command such that Ctrl-C shows no traceback, even while torch is being imported, which takes a second."""

from __future__ import annotations

import sys
from importlib import import_module


def start_command(module: str) -> int:
    """Import the module of a command and run its ``main``; return the exit code, 130 after Ctrl-C.

    A command calls this function before its own imports, so that they happen here.
    """
    try:
        code: int = import_module(module).main()
    except KeyboardInterrupt:
        print(f"{module.removesuffix('.__main__')}: interrupted", file=sys.stderr)
        return 130
    return code
