"""The examples of the first guide run as pasted, and print the quoted output."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.outputs import PAGES, is_same, run_page


@pytest.mark.parametrize("name", PAGES)
def test_quoted_outputs_are_those_of_a_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / PAGES[name], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for example in run_page((ROOT / name).read_text(encoding="utf-8")):
        if example.quoted is not None:
            assert is_same(example.quoted, example.printed), f"{example.code}\n{example.quoted}\n{example.printed}"


def test_outputs_differ_if_a_word_or_a_number_differs() -> None:
    assert is_same("accuracy 93.33 %", "accuracy 93.34 %")
    assert not is_same("accuracy 93.33 %", "accuracy 90.10 %")
    assert not is_same("accuracy 93.33 %", "accuracies 93.33 %")
    assert not is_same("difference +3.33", "difference -3.33")
