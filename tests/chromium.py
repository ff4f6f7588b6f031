"""A headless Chromium to try pages in, spoken to over a pipe: standard library only."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), "")
PATIENCE = 90.0  # seconds for any answer; the machine may be busy


def high_pipe() -> tuple[int, int]:
    low = os.pipe()
    reader, writer = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 40) for fd in low)
    for fd in low:
        os.close(fd)
    return reader, writer


class Chromium:
    """One page. Collects what it complains about in ``complaints``."""

    def __init__(self) -> None:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # the protocol wants descriptors 3 and 4; high numbers here cannot get in their way
        ours_in, theirs_out = high_pipe()
        theirs_in, ours_out = high_pipe()
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe",
            f"--user-data-dir={self.profile.name}", "about:blank",
        ]  # fmt: skip
        redirect = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", redirect, PROGRAM, *options],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.reader, self.writer = ours_in, ours_out
        self.buffer = b""
        self.count = 0
        self.loaded = False
        self.complaints: list[str] = []
        self.session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message: dict[str, Any] = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.send(message)
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.writer, data) :]

    def receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reader], [], [], max(0, deadline - time.monotonic()))
            piece = os.read(self.reader, 1 << 20) if ready else b""
            if not piece:
                raise RuntimeError("Chromium does not answer")
            self.buffer += piece
        first, self.buffer = self.buffer.split(b"\0", 1)
        event = json.loads(first)
        self.loaded |= event.get("method") == "Page.loadEventFired"
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(event["params"]["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded":
            self.complaints.append(event["params"]["entry"]["text"])
        if event.get("method") == "Runtime.consoleAPICalled":
            self.complaints.append(str(event["params"]["args"]))
        return event

    def open(self, page: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait for all of it."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.loaded = False
        self.call("Page.navigate", url=page.as_uri())
        while not self.loaded:
            self.receive()
        self.value("Promise.all([...document.images].map((i) => i.decode())).then(() => true)")

    def value(self, expression: str) -> Any:
        """What an expression is worth in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path: Path, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **self.area(whole))
        path.write_bytes(base64.b64decode(data["data"]))

    def area(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "scale": 1, **{k: size[k] for k in ("width", "height")}}}

    def close(self) -> None:
        self.session = ""
        try:
            self.call("Browser.close")
            self.process.wait(timeout=20)
        except (RuntimeError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.reader)
        os.close(self.writer)
        self.profile.cleanup()
