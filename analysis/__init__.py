"""Studies of the library: ``python -m analysis`` lists them, ``python -m analysis NAME`` runs one.

Each study prints a table, and writes it where it is asked to; those of the README are in ``results/``.
"""

from __future__ import annotations

import sys

#: Studies that were one command before and are several now.
SPLIT = {
    "contest": "contest, or contest-draws for new draws of its data",
    "optimizer_bench": "optimizer-bench (--figure is --plot), or optimizer-tune (--json is --baselines)",
}
#: What was a command of its own.
BEFORE = {"ceiling", "command_kills", "command_speed", "contest", "episode_speed", "episodes", "optimizer_bench"}
BEFORE |= {"rejection", "robustness", "scale", "training"}

if sys.argv[0] == "-m":  # ``python -m`` looks for a module of this package, as studies were run before
    module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    if module.startswith("analysis."):
        name = module.removeprefix("analysis.")
        new = f"analysis {SPLIT.get(name, name.replace('_', '-'))}" if name in BEFORE else "analysis for a list"
        print(f"{module}: studies are run by one command now. Run python -m {new}.", file=sys.stderr)
        sys.exit(2)
