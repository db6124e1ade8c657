"""Take the screenshots of the guides, with Chromium, into docs/_static.

Run ``python -m docs.make_screenshots``. The page and the report are those of the sample data in ``examples``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from tests.browser import CHROMIUM, Browser

ROOT = Path(__file__).resolve().parents[1]
STATIC, EXAMPLES = ROOT / "docs/_static", ROOT / "examples"
LABELS = 24  #: Labels that the page has been given.


def main() -> int:
    """Take all screenshots."""
    if CHROMIUM is None:
        print("docs.make_screenshots: Chromium must be installed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(EXAMPLES, folder / "examples")
        shoot_page(folder)
        shoot_report(folder)
    return 0


def shoot_page(folder: Path) -> None:
    """Take a screenshot of the labelling page, on a table that has some labels."""
    lines = (folder / "examples/wine/test.csv").read_text(encoding="utf-8").splitlines()
    labelled = [line if index < LABELS else line.rpartition(",")[0] + "," for index, line in enumerate(lines[1:])]
    (folder / "wines.csv").write_text("\n".join([lines[0], *labelled]) + "\n", encoding="utf-8")
    arguments = ["page", "wines.csv", "--label", "cultivar", "-o", "labelled.csv"]
    with subprocess.Popen(
        _command(arguments), cwd=folder, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        address = next(filter(None, (re.search(r"http://\S+", line) for line in server.stdout)))[0]
        with Browser(folder, "http://127.0.0.1:") as browser:
            browser.look(width=1100, height=760)
            browser.open(address)
            browser.wait("document.getElementById('reason').textContent")
            browser.wait("document.querySelectorAll('#keys bdi').length")
            _save(browser, folder, "page.png")
        server.terminate()


def shoot_report(folder: Path) -> None:
    """Take a screenshot of the report of a fit."""
    arguments = ["fit", "examples/wine/train.csv", "--label", "cultivar", "-o", "wine.safetensors"]
    subprocess.run(_command([*arguments, "--report", "report.html", "-q"]), cwd=folder, env=_environment(), check=True)
    with Browser(folder) as browser:
        browser.look(width=1000, height=760)
        browser.open(folder / "report.html")
        _save(browser, folder, "report.png")


def _save(browser: Browser, folder: Path, name: str) -> None:
    """Write a picture of the window with 64 colours."""
    browser.shoot(folder / name)
    width, height = (browser.ask(f"inner{side}") for side in ("Width", "Height"))
    with Image.open(folder / name) as image:
        window = image.convert("RGB").crop((0, 0, min(width, image.width), min(height, image.height)))
        window.quantize(64).save(STATIC / name, optimize=True)
    print(f"docs/_static/{name}: {(STATIC / name).stat().st_size / 1000:.0f} kB")


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "protonet", *arguments]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    sys.exit(main())
