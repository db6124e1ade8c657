"""New draws of the contest's data, and the solver and its contenders on each.

Every result is one line of a state file as soon as it is there, with a hash of the code that made it, so that
an interrupted table continues and results of other versions of the code are left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from analysis.contenders import METHODS
from analysis.journal import append_journal, hash_sources, read_journal
from protonet.datasets import Split, sample_family
from protonet.fit.solver import solve
from solution.pack import library_files

OURS = "ours"


class Cell(NamedTuple):
    """One measurement: a method on a draw. Only the solver has a limit."""

    family: str
    n_train: int
    n_val: int
    seed: int
    method: str
    limit: int | None


class Grid(NamedTuple):
    """What to measure; ``methods`` None stands for all, logistic regression left out on isotropic data."""

    families: Sequence[str]
    shots: Sequence[tuple[int, int]]
    limits: Sequence[int]
    seeds: Sequence[int]
    methods: Sequence[str] | None = None
    num_classes: int = 128
    dim: int = 384

    def methods_of(self, family: str) -> list[str]:
        """Return the contenders on a family."""
        if self.methods is not None:
            return list(self.methods)
        return [name for name in METHODS if name != "logistic" or family != "isotropic"]

    def cells(self) -> Iterator[Cell]:
        """Yield every cell, those of one draw one after another."""
        for family in self.families:
            for n_train, n_val in self.shots:
                for seed in self.seeds:
                    draw = (family, n_train, n_val, seed)
                    yield from (Cell(*draw, method, None) for method in self.methods_of(family))
                    yield from (Cell(*draw, OURS, limit) for limit in self.limits)


#: accuracy (None where the method does not apply), parameters and seconds of each cell.
Results = dict[Cell, dict[str, Any]]


def hash_code(method: str) -> str:
    """Return a hash of the code that decides a method's results."""
    others = ("analysis/contenders.py", "analysis/bayes.py", "protonet/losses.py")
    return hash_sources("protonet/datasets/synthetic.py", *(library_files() if method == OURS else others))


def measure(grid: Grid, state: Path) -> Results:
    """Measure every cell of a grid that the state file does not have, with a progress bar on stderr.

    Args:
        grid: What to measure.
        state: The JSON-lines file; made if need be, appended to.

    Returns:
        All of the grid's results.

    Raises:
        KeyboardInterrupt: Ctrl-C; what is finished is in the state file.
    """
    codes = {method: hash_code(method) for method in (*METHODS, OURS)}
    size = [grid.num_classes, grid.dim]
    cells = list(grid.cells())
    wanted = {json.dumps([cell, size, codes[cell.method]]): cell for cell in cells}
    results = Results()
    for entry in read_journal(state):
        key = json.dumps([entry.get("cell"), entry.get("size"), entry.get("code")])
        if key in wanted and "result" in entry:
            results[wanted[key]] = entry["result"]
    split, drawn = None, None
    missing = [cell for cell in cells if cell not in results]
    bar = tqdm(missing, initial=len(results), total=len(cells), unit="result", dynamic_ncols=True)
    try:
        with bar:
            for cell in bar:
                if split is None or drawn != cell[:4]:
                    split, drawn = sample_draw(grid, cell), cell[:4]
                bar.set_postfix_str(f"{cell.family} {cell.n_train}+{cell.n_val} {cell.method}")
                results[cell] = run_method(split, cell.method, cell.limit)
                entry = {"cell": cell, "size": size, "code": codes[cell.method], "result": results[cell]}
                append_journal(state, entry)
    except KeyboardInterrupt:
        kept = f"interrupted; {len(results)} of {len(cells)} results are kept in {state}"
        raise KeyboardInterrupt(f"{kept}. The same command continues.") from None
    return results


def sample_draw(grid: Grid, cell: Cell) -> Split:
    """Sample the draw of a cell: seeds are the synthetic families' own, never the contest's."""
    return sample_family(
        cell.family,
        seed=cell.seed,
        n_train=cell.n_train,
        n_val=cell.n_val,
        num_classes=grid.num_classes,
        dim=grid.dim,
    )


def run_method(split: Split, method: str, limit: int | None) -> dict[str, Any]:
    """Return accuracy in [0, 1], or None where the method does not apply, parameters and seconds."""
    started = time.perf_counter()
    parameters = None
    if method == OURS:
        loaders = [
            DataLoader(TensorDataset(x, y), batch_size=128)
            for x, y in ((split.train_x, split.train_y), (split.val_x, split.val_y))
        ]
        known = {"num_classes": split.num_classes, "input_dim": split.train_x.shape[1], "param_limit": limit}
        network = solve(loaders[0], loaders[1], known)
        parameters = network.count_parameters()
        with torch.no_grad():
            predicted = network(split.test_x).argmax(dim=1)
    else:
        predicted = METHODS[method](split)
    accuracy = None if predicted is None else float((predicted == split.test_y).double().mean())
    seconds = round(time.perf_counter() - started, 3)
    return {"accuracy": accuracy, "parameters": parameters, "seconds": seconds}
