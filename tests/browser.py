"""A real headless Chromium, driven through the pipe of its DevTools protocol."""

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
from pathlib import Path
from types import TracebackType
from typing import Any

#: Where there may be one, and how long an answer may take, in seconds.
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 120.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
)


class Browser:
    """One page of a browser without network; what went wrong on it is in ``errors``."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self.profile = Path(tempfile.mkdtemp(dir=folder))
        reading, theirs = os.pipe()
        ours, self._writing = os.pipe()
        command = f'exec "$0" "$@" 3<&{ours} 4>&{theirs}'
        arguments = ["bash", "-c", command, CHROMIUM, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(arguments, pass_fds=(ours, theirs), stdout=quiet, stderr=quiet)
        os.close(ours)
        os.close(theirs)
        self._reading, self._left, self._numbers = reading, b"", itertools.count(1)
        self.errors: list[str] = []
        self._session: str | None = None
        target = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

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
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        """Return the next message; keep what tells of an error on the page."""
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._left:
            ready, *_ = select.select([self._reading], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            got = os.read(self._reading, 1 << 20)
            assert got, "the browser has ended"
            self._left += got
        text, self._left = self._left.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        method, told = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"]))
        elif method == "Log.entryAdded" or (
            method == "Runtime.consoleAPICalled" and told["type"] in {"error", "warning"}
        ):
            self.errors.append(json.dumps(told))
        elif method == "Network.requestWillBeSent" and not told["request"]["url"].startswith(("file:", "about:")):
            self.errors.append(f"a request to {told['request']['url'][:200]}")
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"a dialog: {told['message']}")
        return message

    def open(self, path: Path) -> float:
        """Load a file; return the milliseconds from the start of its navigation to the end of its loading."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass
        timing = "performance.getEntriesByType('navigation')[0].loadEventEnd"
        while not (took := self.ask(timing)):
            time.sleep(0.01)
        return float(took)

    def ask(self, expression: str) -> Any:
        """Return what an expression of JavaScript is, as JSON can hold it; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key, such as Tab, Enter or ArrowDown."""
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        own: dict[str, object] = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 * shift}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **own, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **own)

    def look(self, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window, and whether it is dark."""
        scale = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **scale)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def shoot(self, path: Path) -> None:
        """Write a picture of the whole page, .png."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(taken["data"]))
