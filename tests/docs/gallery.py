"""Run the notebooks of docs/gallery and compare their outputs.

``python -m tests.docs.gallery [NAME ...]`` runs notebooks, all by default, and replaces outputs that differ.
"""

from __future__ import annotations

import copy
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.outputs import ROOT, Page, is_same, prepare

GALLERY = ROOT / "docs" / "gallery"
NAMES = sorted(path.stem for path in GALLERY.glob("*.ipynb"))


def read_notebook(name: str) -> Any:
    """Return a notebook with the outputs that it stores."""
    return nbformat.read(GALLERY / f"{name}.ipynb", as_version=4)


def run_notebook(name: str, folder: Path) -> Any:
    """Run a notebook in a copy of its folder below `folder`, and return it with the outputs of the run."""
    for part in ("docs/gallery", "examples"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns(".*"))
    notebook = copy.deepcopy(read_notebook(name))
    where = {"metadata": {"path": str(folder / "docs" / "gallery")}}
    with prepare(Page(encoders=True), folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # as in the process of the tests
        client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where, record_timing=False)
        client.coalesce_streams = True  # otherwise the number of outputs depends on the time between prints
        client.execute()
    return notebook


def list_texts(notebook: Any) -> list[str]:
    """Return the text of each output, in order; "picture" for a picture."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [_get_text(output) for output in outputs]


def _get_text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    return "picture" if "image/png" in output.data else str(output.data.get("text/markdown", output.data["text/plain"]))


def have_same_outputs(stored: Any, made: Any) -> bool:
    """Compare the texts of two runs' outputs, numbers with the tolerance of the pages."""
    texts = list_texts(stored), list_texts(made)
    return len(texts[0]) == len(texts[1]) and all(map(is_same, *texts))


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            made = run_notebook(name, Path(folder))
        if not have_same_outputs(read_notebook(name), made):
            (GALLERY / f"{name}.ipynb").write_text(nbformat.writes(made, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {time.monotonic() - start:.1f} s")
