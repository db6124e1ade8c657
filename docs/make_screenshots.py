"""Take the screenshots of the guides, with Chromium, into docs/_static.

Run ``python -m docs.make_screenshots``. The page and the report are those of the sample data in ``examples``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

from protonet.__main__ import main as run_command
from tests.browser import CHROMIUM, Browser
from tests.commands.servers import TOKEN, start

ROOT = Path(__file__).resolve().parents[1]
STATIC, WINE = ROOT / "docs/_static", ROOT / "examples/wine"
LABELS = 24  #: Number of rows that have labels on the page.


def main() -> int:
    """Take all screenshots."""
    if CHROMIUM is None:
        print("docs.make_screenshots: Chromium must be installed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        shoot_page(Path(folder))
        shoot_report(Path(folder))
    return 0


def shoot_page(folder: Path) -> None:
    """Take a screenshot of the labelling page, on a table that has some labels."""
    header, *lines = (WINE / "test.csv").read_text(encoding="utf-8").splitlines()
    rows = [line if index < LABELS else line.rpartition(",")[0] + "," for index, line in enumerate(lines)]
    (folder / "wines.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    with (
        start("page", folder / "wines.csv", "--label", "cultivar", environment={"PYTHONPATH": str(ROOT)}) as server,
        Browser(folder, "http://127.0.0.1:") as browser,
    ):
        browser.look(width=1100, height=760)
        browser.open(f"http://127.0.0.1:{server.port}/?token={TOKEN}")
        browser.wait("document.querySelectorAll('#keys bdi').length")
        _save(browser, folder, "page.png")


def shoot_report(folder: Path) -> None:
    """Take a screenshot of the report of a fit."""
    report = folder / "report.html"
    arguments = ["fit", WINE / "train.csv", "--label", "cultivar", "-o", folder / "wine.protonet", "--report", report]
    assert run_command(list(map(str, arguments))) == 0
    with Browser(folder) as browser:
        browser.look(width=1000, height=760)
        browser.open(report)
        _save(browser, folder, "report.png")


def _save(browser: Browser, folder: Path, name: str) -> None:
    """Write a picture of the window with 64 colours."""
    browser.shoot(folder / name)
    width, height = (browser.ask(f"inner{side}") for side in ("Width", "Height"))
    with Image.open(folder / name) as image:
        window = image.convert("RGB").crop((0, 0, min(width, image.width), min(height, image.height)))
        window.quantize(64).save(STATIC / name, optimize=True)
    print(f"docs/_static/{name}: {(STATIC / name).stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
