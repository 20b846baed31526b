"""A real headless Chromium, driven by the DevTools protocol over two pipes, so that no driver is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60  # seconds for any answer
FREE = 10  # first file descriptor that a shell does not use itself
PHONE, DESK = 390, 1280  # pixels
LEAST = 12  # pixels that text is high, as the browser draws it
OPENED = "document.querySelectorAll('details').forEach(each => each.open = true)"
PLOTS = """[...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  return [svg.querySelector('title').textContent, box.width, box.height,
          svg.getBBox().width, svg.querySelectorAll('text').length];
})"""
SMALL_TEXT = """(least => {
  const small = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || element.closest('script, style, title, desc')) continue;
    const scale = element.ownerSVGElement ? element.getScreenCTM() : {c: 0, d: 1};
    const size = parseFloat(getComputedStyle(element).fontSize) * Math.hypot(scale.c, scale.d);
    if (size < least - 0.05) small.push([text.slice(0, 40), size]);
  }
  return small;
})(""" + f"{LEAST})"
OVERLAPPING = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')];
  const boxes = texts.map(text => [text.textContent, text.getBoundingClientRect()]);
  return boxes.flatMap(([one, a], place) => boxes.slice(place + 1).filter(([other, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
    Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.4 * Math.min(a.height, b.height)
  ).map(([other]) => [svg.querySelector('title').textContent, one, other]));
})"""


def find() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page at a time; `errors` gathers what it complains of: exceptions, console errors, and anything
    that it was kept from loading."""

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing, self.buffer, self.number = reading, writing, b"", 0
        self.events: list[dict[str, Any]] = []
        self.session = None
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int, dark: bool = False) -> None:
        """Loads a file in a window of `width` pixels, as on a phone or a desk, and waits for it."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
                  mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._until(lambda: any(event["method"] == "Page.loadEventFired" for event in self.events))

    def do(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def errors(self) -> list[str]:
        self.do("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
        return [json.dumps(event["params"])[:2000] for event in self.events if _complains(event)]

    def requests(self) -> list[str]:
        return [event["params"]["request"]["url"] for event in self.events
                if event["method"] == "Network.requestWillBeSent"]

    def picture(self, file: Path) -> None:
        """The whole page, as high as it is."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        session = {"sessionId": self.session} if self.session else {}
        message = {"id": self.number, "method": method, "params": parameters, **session}
        os.write(self.writing, json.dumps(message).encode() + b"\0")
        answers: list[dict[str, Any]] = []
        self._until(lambda: bool(answers), answers)
        assert "error" not in answers[0], f"{method}: {answers[0]['error']}"
        return answers[0]["result"]

    def _until(self, holds: Any, answers: list[dict[str, Any]] | None = None) -> None:
        end = time.monotonic() + PATIENCE
        while not holds():
            assert select.select([self.reading], [], [], max(0.0, end - time.monotonic()))[0], "no answer"
            content = os.read(self.reading, 1 << 16)
            assert content, "the browser has ended"
            *whole, self.buffer = (self.buffer + content).split(b"\0")
            for message in map(json.loads, whole):
                if "method" in message:
                    self.events.append(message)
                elif answers is not None and message["id"] == self.number:
                    answers.append(message)


def _complains(event: dict[str, Any]) -> bool:
    method, found = event["method"], event["params"]
    return (method in ("Runtime.exceptionThrown", "Network.loadingFailed")
            or (method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"))
            or (method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning")))


@contextmanager
def started(program: str, folder: Path) -> Iterator[Browser]:
    """A browser with its profile in `folder`, ended with the block."""
    pipes = [os.pipe(), os.pipe()]
    (its_reading, writing), (reading, its_writing) = pipes
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, FREE) for each in (its_reading, its_writing)]
    options = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
               "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
               f"--user-data-dir={folder}"]
    shell = f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}'
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(["bash", "-c", shell, program, *options], pass_fds=high, stdout=log,
                                   stderr=log, start_new_session=True)
    for each in (its_reading, its_writing, *high):
        os.close(each)
    try:
        browser = Browser(reading, writing)
        yield browser
        with suppress(AssertionError, OSError):
            browser.session = None
            browser.call("Browser.close")
    finally:
        with suppress(ProcessLookupError):
            if process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
            os.killpg(process.pid, 9)  # what it has started, too
        process.wait()
        for each in (reading, writing):
            os.close(each)


def require_readable(page: Browser, file: Path, width: int, dark: bool) -> None:
    """The page in `file` is whole on a window of `width` pixels: no error, nothing loaded from elsewhere, no
    part beyond the window, no small text, no text over another."""
    page.open(file, width, dark)
    page.do(OPENED)
    assert page.errors() == []
    assert page.requests() == [file.resolve().as_uri()], "nothing else is loaded"
    assert page.do("innerWidth") == width
    assert page.do("document.documentElement.scrollWidth") <= width
    assert page.do(SMALL_TEXT) == []
    assert page.do(OVERLAPPING) == []
