"""A real browser without a window, spoken to through a pipe: pages are opened from disk, nothing else is allowed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
]
# The browser reads from descriptor 3 and writes to descriptor 4.
_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Chromium:
    """A browser; `open` gives a fresh tab."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        theirs, self._out = os.pipe()
        self._in, mine = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs, mine)]
        words = [sys.executable, "-S", "-c", _START, *map(str, high), PROGRAM, *_FLAGS, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [*words, "about:blank"],
            pass_fds=high,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in (theirs, mine, *high):
            os.close(fd)
        self._rest, self._count = b"", 0
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        """End the browser and all processes it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser does not answer")
            self._rest += data
        text, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; events that come first are kept."""
        self._count += 1
        number, message = self._count, {"id": self._count, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.events.append(answer)

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> Tab:
        """Open a file in a fresh tab and wait until it has loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[theme])
        tab.call("Page.navigate", url=path.resolve().as_uri())
        tab.wait("document.readyState === 'complete'")
        return tab


class Tab:
    """One open page."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self.browser, self.session, self.target = browser, session, target

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def resize(self, width: int, height: int) -> None:
        """Give the page another screen; narrow ones are those of phones."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def run(self, script: str) -> Any:
        """Return what an expression gives in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Wait until a condition holds in the page."""
        deadline = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.05)

    def draw_all(self) -> None:
        """Scroll through the page, until every figure is drawn."""
        self.run("for (const p of document.querySelectorAll('.plot')) p.scrollIntoView()")
        count = self.run("document.querySelectorAll('.plot').length")
        for index in range(count):
            self.run(f"document.querySelectorAll('.plot')[{index}].scrollIntoView({{behavior: 'instant'}})")
            self.wait(f"'drawn' in document.querySelectorAll('.plot')[{index}].dataset")
        self.run("scrollTo({top: 0, behavior: 'instant'})")

    @property
    def _events(self) -> list[dict[str, Any]]:
        return [event for event in self.browser.events if event.get("sessionId") == self.session]

    @property
    def requests(self) -> list[str]:
        """Everything that was asked for, but the page itself and what lies inside it."""
        events = [event for event in self._events if event["method"] == "Network.requestWillBeSent"]
        urls = [event["params"]["request"]["url"] for event in events]
        return [url for url in urls if not url.startswith(("file:", "data:", "blob:"))] + [
            url for url in urls if url.startswith("file:")
        ][1:]

    @property
    def complaints(self) -> list[Any]:
        """Everything on the console, and every error."""
        kinds = (
            "Runtime.consoleAPICalled",
            "Runtime.exceptionThrown",
            "Log.entryAdded",
            "Page.javascriptDialogOpening",
        )
        return [event["params"] for event in self._events if event["method"] in kinds]

    def picture(self, path: Path, *, full: bool = True) -> None:
        """Write a PNG of the page, or of what is in view."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))
