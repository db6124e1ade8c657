"""The examples of README and of the guide run, and print what they promise.

Python blocks run, page by page. Shell blocks of the library's commands run in a folder with small tables; those of
studies and of meta-training, which take minutes, are checked against the options that their ``--help`` names.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import shutil
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from sklearn.datasets import load_wine

from protonet import __main__ as library
from protonet.commands import arguments as commands
from protonet.episodes import __main__ as episodes
from protonet.episodes.options import EPISODE_COMMANDS, make_parser
from protonet.episodes.training import tasks
from tests.datasets import trees
from tests.docs.outputs import NAMES, PAGES, ROOT, is_same, read_blocks, read_commands, read_extras
from tests.embeddings.pictures.test_files import write_onnx
from tests.episodes.cases import save_data

COMMANDS = [(name, command) for name in NAMES for command in read_commands(name)]
METHOD = "docs/how-to/few-shot-method.md"


@pytest.fixture
def work(tmp_path: Path, embedding_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which a page's examples run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_blocks(name: str) -> dict[str, Any]:
    """Run a page's Python blocks one after the other, and return what they left."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in read_blocks(name):
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, str(ROOT / name), "exec"), names)
    return names


def write_plugin(folder: Path) -> None:
    """Write the method of one's own that the guide shows."""
    (text,) = (block.text for block in read_blocks(METHOD) if block.text.startswith("# mine.py\n"))
    (folder / "mine.py").write_text(text, encoding="utf-8")


def test_the_python_blocks_for_an_own_method_run(tables: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(tables / "features.npz", work)
    write_plugin(work)
    for command in (line for line in read_commands(METHOD) if " paper " in line and "features.npz" in line):
        assert episodes.main([*shlex.split(command)[3:], "--episodes", "20"]) == 0
    names = run_blocks(METHOD)
    rates = {name: method["accuracy"] for name, method in names["run"]["methods"].items()}
    assert rates == pytest.approx({name: each.mean() for name, each in names["accuracy_of"].items()})
    assert list(names["scores"]) == ["city-block", "protonet"]
    assert 0.5 < float(names["accuracy"].mean()) < 1
    assert float(names["scores"]["city-block"].accuracy.mean()) > 0.5
    assert float(names["tuned"]["own"].accuracy.mean()) > 0.5
    assert "Holm for 4 comparisons of mine.py:power_means with another" in capsys.readouterr().out


def test_every_page_with_python_is_run() -> None:
    pages = {name for name in NAMES if any(block.language == "python" for block in read_blocks(name))}
    assert pages <= {"README.md", METHOD, *PAGES}


@pytest.mark.usefixtures("work")
def test_the_examples_of_the_readme_print_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: pytest.Cache
) -> None:
    monkeypatch.setenv("PROTONET_CACHE", str(cache.mkdir("protonet")))  # glyphs are rendered in the first run alone
    blocks = read_blocks("README.md")
    (estimator,) = (block for block in blocks if block.language == "python")
    fitted, score, episodic = (block.text for block in blocks if block.language == "text")
    exec(estimator.text, {})
    assert is_same(score, capsys.readouterr().out)
    fit, episode = (command for command in read_commands("README.md") if "-m protonet" in command)
    first_model = "docs/start/first-model.md"  # a page whose commands run in another test
    assert fit in read_commands(first_model)
    assert any(block.text.startswith(fitted.removesuffix("...\n")) for block in read_blocks(first_model))
    assert episodes.main(shlex.split(episode)[3:]) == 0
    assert episodic in capsys.readouterr().out


def write_pictures(path: Path) -> None:
    """Write the table of pictures that a shop sells, of the guide."""
    rng = np.random.default_rng(0)
    notes = {"print": "from the press of the town", "painting": "signed by the painter", "drawing": "a sketch on paper"}
    lines = ["number,sold,price,framed,style,note,width,kind"]
    for index in range(36):
        kind = list(notes)[index * 7 % 3]
        day = np.datetime64("2023-01-05") + int(rng.integers(0, 700))
        price = f'"${rng.normal(2500 if kind == "painting" else 900, 300):,.2f}"' if index % 9 else ""
        style = rng.choice(["ink", "chalk", "oil"] if kind != "painting" else ["oil", "water"])
        cells = [index + 1, day, price, ["no", "yes"][int(rng.integers(2))], style]
        cells += [f"{notes[kind]} no. {rng.integers(900)}", f"{rng.normal(40, 9):.1f}", kind]
        lines.append(",".join(map(str, cells)))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_what_the_guide_says_of_columns_is_what_fit_says(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(work / "pictures.csv")
    page = (ROOT / "docs" / "reference" / "columns.md").read_text(encoding="utf-8")
    table, expected = re.findall(r"```text\n(.*?)```", page, re.DOTALL)[:2]
    assert (work / "pictures.csv").read_text(encoding="utf-8").startswith(table.removesuffix("...\n"))
    assert library.main(["fit", "pictures.csv", "--label", "kind"]) == 0
    sizes = r"\d+ (?=features|directions|words)"  # these change with every rule of text and categories
    assert re.sub(sizes, "", capsys.readouterr().out).startswith(re.sub(sizes, "", expected))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the examples read: wines, and features with classes."""
    folder = tmp_path_factory.mktemp("tables")
    x, y = load_wine(return_X_y=True)
    kinds = np.array(["barolo", "grignolino", "barbera"])[y]
    order = np.random.default_rng(0).permutation(len(x))
    columns = [f"c{index}" for index in range(x.shape[1])]
    for name, rows, labelled in (
        ("train", order[:30], True),
        ("test", order[30:90], True),
        ("more", order[90:110], True),
        ("new", order[110:130], False),
    ):
        lines = [",".join([*columns, *["cultivar"] * labelled])]
        lines += [",".join([*map(str, x[row].tolist()), *[str(kinds[row])] * labelled]) for row in rows]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "rows").mkdir()
    new = dict(zip(columns, x[order[110:130]].T, strict=True))
    parquet.write_table(pyarrow.table(new), folder / "rows" / "part-0.parquet")
    (features,) = (b.text for b in read_blocks("docs/how-to/few-shot.md") if "np.savez" in b.text)
    exec(features.replace("features.npz", (folder / "features.npz").as_posix()), {})
    return folder


def test_the_commands_for_an_own_method_run(tables: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(tables / "features.npz", work)
    write_plugin(work)
    section = [c for c in read_commands(METHOD) if re.search("first.json|second.json|normalize", c)]
    assert len(section) == 4
    for command in section:
        words = shlex.split(command)[3:]
        few = [] if words[0] == "compare" else ["--episodes", "20"]
        assert episodes.main([*words, *few]) == 0
    out = capsys.readouterr().out
    assert re.search(r"mine.py:power_means:power=\S+ is the best of 3 settings on 6 validation classes", out)
    assert "comparisons of ridge with another" in out
    assert (work / "table.tex").is_file()


def test_the_commands_for_pictures_and_features_of_others_run(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trees.make_csv(work / "mini")
    trees.make_cub(work, "json")
    rng = np.random.default_rng(0)
    trees.dump(work / "output.plk", {label: list(rng.standard_normal((20, 4))) for label in range(6)})
    write_onnx(work / "net.onnx", ["n", 3, 8, 8])
    (block,) = (b.text for b in read_blocks("docs/how-to/few-shot-data.md") if "extract cub:" in b.text)
    for line in block.splitlines():
        words = shlex.split(line, comments=True)[3:]
        few = [] if words[0] == "extract" else ["--episodes", "20", "--method", "protonet"]
        assert episodes.main([*words, *few]) == 0
    assert "cub.npz: 14 rows of 3 features, 7 classes" in capsys.readouterr().out


def test_the_protocols_of_the_guide_run(tables: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with np.load(shutil.copy(tables / "features.npz", work)) as archive:
        x, y = archive["x"], archive["y"]
    np.savez("other.npz", x=x + np.float32(1), y=y)
    np.savez("train.npz", x=x[:1000], y=y[:1000])
    np.savez("test.npz", x=x[1000:], y=y[1000:])
    commands = read_commands("docs/how-to/few-shot-protocols.md")
    first = next(at for at, command in enumerate(commands) if command.endswith(" --list-presets"))
    for command in commands[first : first + 8]:
        words = shlex.split(command)[3:]
        few = [] if "--episodes" in words else ["--episodes", "6"]
        assert episodes.main([*words, *few]) == 0
    out = capsys.readouterr().out
    assert "simpleshot" in out.rpartition("95 % intervals over episodes\n")[2]  # the last of them
    for heading in ("average rank", "harmonic mean, %", "AUROC of open classes, %", "queries of a fixed test split"):
        assert heading in out


def test_the_commands_of_meta_training_run(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_data(work / "tiny.npz")
    monkeypatch.setattr(tasks, "N_VALIDATION_EPISODES", 10)
    monkeypatch.setattr(tasks, "N_MAML_VALIDATION_EPISODES", 2)
    baseline = ("protonet", tasks.ValidationScore(0, 0.0, 0.0))  # encoders of one step are worse than raw features
    monkeypatch.setattr("protonet.episodes.training.train.score_best_raw_method", lambda *_: baseline)
    (block,) = (b for b in read_blocks("docs/how-to/meta-training.md") if "--objective maml" in b.text)
    few = {True: "--way 2 --query 2 --steps 1 --backbone mlp", False: "--way 2 --query 3 --episodes 2"}
    for line in block.text.splitlines():
        words = shlex.split(line)[3:]
        more = ["--dataset", "tiny.npz", *few[words[0] == "train"].split()]
        assert episodes.main([*words, *more]) == 0
    assert "| maml:steps=10 " in capsys.readouterr().out


@cache
def ask_for_help(module: str, arguments: tuple[str, ...], option: str = "--help") -> str:
    """Return what ``python -m module ... --help-all`` prints, or ``--help`` where that is all."""
    printed = io.StringIO()
    old_arguments = sys.argv
    sys.argv = [module, *arguments, option]
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            warnings.simplefilter("ignore", RuntimeWarning)  # the module may have been imported by another test
            runpy.run_module(module, run_name="__main__", alter_sys=False)
    finally:
        sys.argv = old_arguments
    text = printed.getvalue()
    return ask_for_help(module, arguments, "--help-all") if option == "--help" and "--help-all" in text else text


def check_options(module: str, words: Sequence[str]) -> None:
    """Check that a command's ``--help`` names the options that an example gives."""
    first = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    text = ask_for_help(module, tuple(words[:first]))
    assert "usage" in text, f"python -m {module} {' '.join(words)} has no --help"
    for word in words[first:]:
        if word.startswith("-"):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text), f"python -m {module} knows no {word}"


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[f"{name}: {command}" for name, command in COMMANDS])
def test_every_command_is_one_that_exists(name: str, command: str) -> None:
    match shlex.split(command):
        case ["head" | "(head" | "cat" | "cut" | "curl" | "grep", *_]:
            pass
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        case ["pip", "install", "torch", "--index-url", "https://download.pytorch.org/whl/cpu"]:
            pass
        case ["pip", "install", package]:
            assert set(re.findall(r"[\w-]+", package)) <= set(read_extras()), f"{name}: {command}"
        case ["python", "-m", "protonet", *words]:
            assert not words or words[0] in commands.COMMANDS
            check_options("protonet", words[:1] if len(words) == 1 else words)
        case ["python", "-m", "protonet.episodes", *words] | ["torchrun", _, _, "-m", "protonet.episodes", *words]:
            subcommand = words.pop(0) if words and words[0] in EPISODE_COMMANDS else ""
            make_parser(subcommand).parse_args(words)
        case ["python", "-m", "solution.pack" | "analysis" as module, *words]:
            check_options(module, words)
        case _:
            pytest.fail(f"{name}: the test does not know {command}")


def test_every_block_says_its_language() -> None:
    known = {"python", "sh", "text", "{toctree}", "{eval-rst}", "{include}", "{image}"}
    for name in NAMES:
        for block in read_blocks(name):
            assert block.language.split(" ")[0] in known or (name == "README.md" and "protonet/" in block.text), block
