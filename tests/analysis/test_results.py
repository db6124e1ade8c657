"""A result is committed as long as its command runs: every printed command of a study has the options that it needs."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from analysis.__main__ import STUDIES
from protonet.ui.command_line import CommandParser
from protonet.ui.options import add_options, parse_options
from solution.pack import ROOT

RESULTS = ROOT / "analysis" / "results"
TABLES = sorted(path.name for path in RESULTS.glob("*.md"))
#: Files that belong to no table of their name, and the study that writes them.
OTHERS = {"contest.json": "contest", "optimizer_baselines.json": "optimizer-tune"}


def read_printed_commands(path: Path) -> list[list[str]]:
    """Return the words behind ``python -m analysis`` of each command that a text quotes."""
    text = path.read_text(encoding="utf-8")
    return [shlex.split(command) for command in re.findall(r"`python\s-m\sanalysis\s([^`]+)`", text)]


def check_command(words: list[str]) -> None:
    """Raise an error if a study or one of its options does not exist."""
    options = importlib.import_module(f"analysis.{STUDIES[words[0]][0]}").Options
    parser = CommandParser("analysis", "")
    add_options(parser, options)
    parse_options(parser, options, words[1:])


@pytest.mark.parametrize("name", TABLES)
def test_a_result_names_commands_that_run(name: str) -> None:
    commands = read_printed_commands(RESULTS / name)
    assert commands
    for words in commands:
        check_command(words)


def test_a_command_that_is_gone_is_found() -> None:
    with pytest.raises(KeyError):
        check_command(["boosters"])
    with pytest.raises(Exception, match="unknown option: --effort"):
        check_command(["mixed", "--effort", "fast"])


def test_every_result_belongs_to_a_table_or_a_study() -> None:
    for path in RESULTS.iterdir():
        assert f"{path.stem}.md" in TABLES or OTHERS[path.name] in STUDIES, path.name


def test_studies_that_pages_and_code_quote_exist() -> None:
    folders = [ROOT / name for name in ("docs", "protonet", "analysis", "solution")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".md", ".py"}]
    for path in [*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"python -m analysis ([a-z][a-z-]*)", text)
        assert set(names) <= set(STUDIES), path


def test_files_of_results_that_pages_and_code_quote_exist() -> None:
    folders = [ROOT / name for name in ("docs", "protonet", "analysis", "solution")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".md", ".py"}]
    for path in files:
        for name in re.findall(r"analysis/results/([a-z]\w*\.\w+)", path.read_text(encoding="utf-8")):
            assert (RESULTS / name).is_file(), path
