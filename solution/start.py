"""Start of a command: Ctrl-C during the import of torch, most of the first second, shows no traceback either."""

from __future__ import annotations

import sys
from importlib import import_module


def start(module: str) -> int:
    """Import a command's module and run its ``main``; return the exit code, 130 after Ctrl-C.

    A command calls this above its own imports, which therefore happen here.
    """
    try:
        code: int = import_module(module).main()
    except KeyboardInterrupt:
        print(f"{module.removesuffix('.__main__')}: interrupted", file=sys.stderr)
        return 130
    return code
