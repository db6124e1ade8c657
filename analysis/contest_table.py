"""The table of the simulated contest: accuracies in percent, compared draw by draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.contest_draws import OURS, Cell, Grid, Results
from analysis.tables import format_mean, mean_and_error
from protonet.commands.common import count, format_table

#: The contenders' names in the table, in its order.
NAMES = {
    "nearest_mean": "nearest mean",
    "cosine": "cosine",
    "mlp": "statement's MLP",
    "lda": "shrunken LDA",
    "logistic": "logistic regression",
}
#: The methods that regret is measured against: the best of them, row by row.
RIVALS = ("cosine", "lda", "logistic")
NOTE = """
Test accuracy in percent, mean over {draws} ± one standard error. In brackets: ours minus it, paired by
draw. The gap is the Bayes rule minus ours, the regret the best of cosine, LDA and logistic regression minus
ours.
"""


def summarise(grid: Grid, results: Results) -> list[dict[str, Any]]:
    """Gather the results by row.

    Args:
        grid: What was measured.
        results: Its results, all of them.

    Returns:
        One row for each family, shots and limit: ``percent`` holds the accuracies by draw of every method
        that applies, ``parameters`` and ``seconds`` the solver's.
    """
    rows = []
    for family in grid.families:
        for n_train, n_val in grid.shots:
            draws = [(family, n_train, n_val, seed) for seed in grid.seeds]
            others = {
                method: [results[Cell(*draw, method, None)]["accuracy"] for draw in draws]
                for method in grid.methods_of(family)
            }
            for limit in grid.limits:
                ours = [results[Cell(*draw, OURS, limit)] for draw in draws]
                percent = {
                    method: [100 * accuracy for accuracy in accuracies]
                    for method, accuracies in {OURS: [r["accuracy"] for r in ours], **others}.items()
                    if None not in accuracies
                }
                row = {"family": family, "shots": f"{n_train}+{n_val}", "limit": limit, "percent": percent}
                rows.append(row | {key: [r[key] for r in ours] for key in ("parameters", "seconds")})
    return rows


def tabulate(rows: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table of the rows that `summarise` gathered, and a note that explains it."""
    shown = [method for method in NAMES if any(method in row["percent"] for row in rows)]
    header = ["family", "train+val", "limit", "ours", "Bayes", "gap to Bayes"]
    header += [*(NAMES[method] for method in shown), "regret", "parameters", "seconds"]
    table = format_table(header, [_format_row(row, shown) for row in rows])
    return table + NOTE.format(draws=count(len(rows[0]["seconds"]), "draw"))


def _format_row(row: dict[str, Any], shown: Sequence[str]) -> list[str]:
    """Return the texts of one row, the contenders being ``shown``."""
    percent = row["percent"]
    ours = percent[OURS]
    bayes = percent.get("bayes", [])
    cells = [row["family"], row["shots"], f"{row['limit']:,}", format_mean(ours), format_mean(bayes)]
    cells.append(format_mean(_subtract(bayes, ours), sign=True))
    for method in shown:
        other = percent.get(method, [])
        difference = format_mean(_subtract(ours, other), sign=True)
        cells.append(f"{mean_and_error(other)[0]:.2f} ({difference})" if other else "")
    rivals = [percent[method] for method in RIVALS if method in percent]
    best: list[float] = max(rivals, key=lambda values: mean_and_error(values)[0], default=[])
    cells.append(format_mean(_subtract(best, ours), sign=True))
    return [
        *cells,
        f"{mean_and_error(row['parameters'])[0]:,.0f}",
        f"{mean_and_error(row['seconds'])[0]:.1f}",
    ]


def _subtract(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Return the differences by draw; none if one side is not known."""
    return [a - b for a, b in zip(left, right, strict=True)] if left and right else []
