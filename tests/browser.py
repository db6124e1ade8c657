"""A headless Chromium that tests control through its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

#: The path of the browser, and the time limit of an answer, s.
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 120.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
#: JavaScript that lists the texts of a page whose contrast is below that of WCAG 2.2: 4.5, or 3 for large text.
CONTRAST = """
(() => {
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const parse = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const behind = (element) => {
    const layers = [];
    for (let layer = element; layer; layer = layer.parentElement) {
      layers.push(parse(getComputedStyle(layer).backgroundColor));
    }
    const paint = (back, [r, g, b, a = 1]) => [r, g, b].map((v, at) => a * v + (1 - a) * back[at]);
    return layers.reverse().reduce(paint, [255, 255, 255]);
  };
  const faults = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const element = node.parentElement, style = getComputedStyle(element);
    if (!node.textContent.trim() || !element.getClientRects().length || element.closest("script, .skip")) continue;
    const ink = parse(element instanceof SVGElement ? style.fill : style.color).slice(0, 3), back = behind(element);
    const [low, high] = [light(ink), light(back)].sort((a, b) => a - b);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if ((high + 0.05) / (low + 0.05) < (large ? 3 : 4.5)) faults.push([node.textContent, ink, back]);
  }
  return faults;
})()
"""


class Browser:
    """A browser with one page, and without network except for one server; ``errors`` lists errors of the page.

    Args:
        folder: The folder of the browser's profile.
        server: The start of all addresses that may be requested, such as "http://127.0.0.1:8000/"; None for none.
        flags: Further command-line flags of the browser.
    """

    def __init__(self, folder: Path, server: str | None = None, flags: Sequence[str] = ()) -> None:
        self._allowed = ("file:", "about:", *([server, f"blob:{server}"] if server else []))
        assert CHROMIUM is not None
        self.profile = Path(tempfile.mkdtemp(dir=folder))
        reading, theirs = os.pipe()
        ours, self._writing = os.pipe()
        command = f'exec "$0" "$@" 3<&{ours} 4>&{theirs}'
        arguments = ["bash", "-c", command, CHROMIUM, *FLAGS, *flags]
        arguments += [f"--user-data-dir={self.profile}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(arguments, pass_fds=(ours, theirs), stdout=quiet, stderr=quiet)
        os.close(ours)
        os.close(theirs)
        self._reading, self._left, self._numbers = reading, b"", itertools.count(1)
        self.errors: list[str] = []
        self._session: str | None = None
        target = next(item for item in self.call("Target.getTargets")["targetInfos"] if item["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        speeds = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        if server is None:
            self.call("Network.emulateNetworkConditions", offline=True, **speeds)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._writing)
        os.close(self._reading)
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method: str, **parameters: object) -> Any:
        """Call a method of the DevTools protocol; return its result."""
        index = next(self._numbers)
        message: dict[str, object] = {"id": index, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == index:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        """Read the next message of the browser; add errors of the page to ``errors``."""
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._left:
            ready, *_ = select.select([self._reading], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            got = os.read(self._reading, 1 << 20)
            assert got, "the browser has ended"
            self._left += got
        text, self._left = self._left.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        method, result = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(result["exceptionDetails"]))
        elif method == "Log.entryAdded" or (
            method == "Runtime.consoleAPICalled" and result["type"] in {"error", "warning"}
        ):
            self.errors.append(json.dumps(result))
        elif method == "Network.requestWillBeSent" and not result["request"]["url"].startswith(self._allowed):
            self.errors.append(f"a request to {result['request']['url'][:200]}")
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"a dialog: {result['message']}")
        return message

    def open(self, path: Path | str) -> float:
        """Load a file or an address; return the milliseconds from the start to the end of its loading."""
        self.call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass
        timing = "performance.getEntriesByType('navigation')[0].loadEventEnd"
        while not (took := self.ask(timing)):
            time.sleep(0.01)
        return float(took)

    def ask(self, expression: str) -> Any:
        """Evaluate a JavaScript expression, await its promise, and return its JSON value."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key, such as Tab, Enter or ArrowDown."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        code = codes.get(key, ord(key[0].upper()))
        event: dict[str, object] = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def wait(self, expression: str) -> Any:
        """Evaluate a JavaScript expression until its value is true; return the value."""
        until = time.monotonic() + PATIENCE
        while not (result := self.ask(expression)):
            assert time.monotonic() < until, (expression, self.errors, self.ask("document.body.innerText"))
            time.sleep(0.02)
        return result

    def look(self, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window, and whether it is dark."""
        scale = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **scale)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def check_layout(self, page: Path | None = None) -> None:
        """Check contrast and width in light, dark and phone mode, of the present page or of a file that is opened."""
        for mode in ({}, {"dark": True}, {"width": 375, "height": 700}):
            self.look(**mode)
            if page is not None:
                self.open(page)
            assert self.ask(CONTRAST) == []
            assert self.ask("document.documentElement.scrollWidth <= innerWidth"), mode

    def shoot(self, path: Path) -> None:
        """Write a picture of the whole page, .png."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        used = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(used["data"]))


def every(selector: str, expression: str) -> str:
    """Write JavaScript that evaluates an expression of ``each`` for every element of a selector."""
    return f"[...document.querySelectorAll('{selector}')].map((each) => {expression})"


def check_looks(browser: Browser, page: Path) -> None:
    """Open a file in light, dark and phone mode; check contrast, width and errors of the page."""
    browser.check_layout(page)
    assert browser.errors == []
