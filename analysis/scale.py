"""What `protonet.solve` costs as rows and classes grow: ``python -m analysis.scale``.

Each size is one process, so that its peak memory is its own.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from solution.start import start

    sys.exit(start("analysis.scale"))

import json
import subprocess
from collections.abc import Sequence

from tqdm import tqdm

from analysis.options import parse_wholes, write_results
from protonet._checks import fail
from protonet.commands.common import Parser, check_outputs, count, format_table, parse_whole, run_command
from solution.pack import ROOT

PROG = "analysis.scale"
ROWS, CLASSES, DIM = "1000,10000,100000", "10,128,1000", "384"
NOTE = """
One `solve` of {dim:,} features, isotropic, through DataLoader(batch_size=128, shuffle=True), on {threads}. Peak memory
is the whole process's; before is its peak when solve() begins, data included. Prediction is of 4,096 rows at once; bare
are float32 matrix products of the sizes that the network has.
"""


def measure(n_rows: int, num_classes: int, dim: int) -> dict[str, float]:
    """Return `analysis.scale_worker.measure_solve` of a process of its own.

    Raises:
        ValueError: It failed; the last line of its stderr is in the message.
    """
    command = [sys.executable, "-m", "analysis.scale_worker", *map(str, (n_rows, num_classes, dim))]
    # In a session of its own, so that Ctrl-C ends it from here and it shows no traceback.
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, start_new_session=True)
    if ended.returncode:
        last = (ended.stderr.splitlines() or ["nothing on stderr"])[-1]
        got = f"{n_rows}: exit code {ended.returncode}, {last}"
        fail(PROG, "--rows", "be what this machine can hold", got, "Pass fewer rows.")
    result: dict[str, float] = json.loads(ended.stdout)
    return result


def tabulate(rows: Sequence[dict[str, float]], dim: int) -> str:
    """Return the Markdown table of `measure`'s results, and a note that explains it."""
    header = ["classes", "rows", "wall s", "CPU s", "ms a row", "before MiB", "peak MiB", "KiB a row"]
    header += ["predict µs a row", "bare", "ratio"]
    lines = [
        [
            f"{row['classes']:,}",
            f"{row['rows']:,}",
            f"{row['wall_seconds']:.1f}",
            f"{row['cpu_seconds']:.1f}",
            f"{1e3 * row['wall_seconds'] / row['rows']:.3f}",
            f"{row['mib_before']:,.0f}",
            f"{row['peak_memory_mib']:,.0f}",
            f"{1024 * (row['peak_memory_mib'] - row['mib_before']) / row['rows']:.1f}",
            f"{row['predict_microseconds']:.2f}",
            f"{row['bare_microseconds']:.2f}",
            f"{row['predict_microseconds'] / row['bare_microseconds']:.1f}",
        ]
        for row in rows
    ]
    threads = count(int(rows[0]["threads"]), "thread")
    return format_table(header, lines) + NOTE.format(dim=dim, threads=threads)


def _run(arguments: Sequence[str] | None) -> None:
    """Measure every size, the smallest first, and print the table."""
    parser = Parser(PROG, "Measure time and memory of solve() as rows and classes grow.")
    add = parser.add_argument
    add("--rows", default=ROWS, help=f"numbers of rows, with commas (default: {ROWS})")
    add("--classes", default=CLASSES, help=f"numbers of classes, no more than rows (default: {CLASSES})")
    add("--dim", default=DIM, metavar="N", help=f"features (default: {DIM})")
    add("--json", metavar="PATH", help="write the results there")
    add("--markdown", metavar="PATH", help="write the table there, too")
    options = parser.parse_args(arguments)
    dim = parse_whole(PROG, "--dim", options.dim, low=2)
    classes = sorted(parse_wholes(PROG, "--classes", options.classes, low=2))
    rows = sorted(parse_wholes(PROG, "--rows", options.rows, low=classes[0]))
    sizes = [(c, n) for c in classes for n in rows if n >= c]
    outputs = check_outputs(PROG, options, ("json", "markdown"))
    results = []
    with tqdm(total=sum(n for _, n in sizes), unit="row", unit_scale=True, dynamic_ncols=True) as bar:
        for num_classes, n_rows in sizes:
            bar.set_postfix_str(f"{n_rows:,} rows of {num_classes:,} classes")
            results.append(measure(n_rows, num_classes, dim))
            bar.update(n_rows)
    write_results(outputs, results, tabulate(results, dim))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    return run_command(PROG, _run, arguments)
