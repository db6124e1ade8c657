"""Log of evaluations on held-out workload families; an optimizer may be evaluated on test families at most twice.

A look is at an optimizer's file and its configuration. To see the same again is no further look.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from analysis.optimizer_bench.runs import Candidate
from protonet._io import write_atomically
from protonet.errors import raise_input_error
from solution.pack import ROOT

LOOKS = ROOT / "analysis/results/optimizer_looks.md"
HELD_OUT_ROLES, TEST, MAX_TEST_OPTIMIZERS = {"validation", "test"}, "test", 2
HEADER = """# Looks of the optimizer bench

Each run of `python -m analysis optimizer-bench` on the validation or the test families adds a line: the first digits of
the SHA-256 of the optimizer's file, its configuration, and geometric means by role and horizon. The test families are
looked at by two optimizers at the most.

| date | roles | steps | seeds | optimizer | configuration | ratios |
|---|---|---|---|---|---|---|
"""


class Look(NamedTuple):
    """An evaluation on held-out families: the optimizer and its results."""

    optimizer: str  #: The first digits of its file's hash, or the names of peers.
    config: str  #: Its configuration as JSON; empty for peers.
    roles: Collection[str]  #: Roles of the workloads that are run.

    @classmethod
    def at(cls, candidate: Candidate | None, peers: Sequence[str], roles: Collection[str]) -> Look:
        """Describe an evaluation of a candidate, or of peers alone."""
        if candidate is None or candidate.file is None:
            return cls(", ".join(peers), "", roles)
        return cls(hashlib.sha256(candidate.file.read_bytes()).hexdigest()[:8], candidate.config, roles)


def check_look(look: Look, argument: str) -> None:
    """Raise an InputError before a third optimizer is evaluated on the test families; peers are exempt."""
    if TEST not in look.roles or not look.config:
        return
    lines = LOOKS.read_text(encoding="utf-8").splitlines() if LOOKS.exists() else []
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| 2")]
    seen = dict.fromkeys((row[4], row[5].strip("`")) for row in cells if TEST in row[1].split(", ") and row[5])
    if len(seen) >= MAX_TEST_OPTIMIZERS and (look.optimizer, look.config) not in seen:
        got = f"{len(seen)} looks, at {' and '.join(f'{name} {config}' for name, config in seen)}"
        remedy = f"Judge on validation; {LOOKS.name} has the looks."
        raise_input_error(argument, "let test families be looked at twice at the most", got, remedy)


def log_look(look: Look, steps: Sequence[int], seeds: Sequence[int], ratios: Mapping[tuple[str, int], float]) -> None:
    """Append an evaluation on held-out families to the log: geometric means by role and horizon."""
    if not HELD_OUT_ROLES & set(look.roles):
        return
    means = "; ".join(f"{role} {horizon:,}: {mean:.2f}" for (role, horizon), mean in ratios.items())
    date, config = datetime.date.today().isoformat(), f"`{look.config}`" if look.config else ""
    lists = (", ".join(map(str, values)) for values in (look.roles, steps, seeds))
    cells = [date, *lists, look.optimizer, config, means]
    text = LOOKS.read_text(encoding="utf-8") if LOOKS.exists() else HEADER
    text += f"| {' | '.join(cells)} |\n"
    write_atomically(LOOKS, lambda file: file.write(text.encode()))
