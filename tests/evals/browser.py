"""A page in headless Chromium, driven by its own protocol."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


@contextmanager
def browser(profile: Path) -> Iterator["Page"]:
    """A window of the browser; skips the test where there is none."""
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    if binary is None:
        pytest.skip(f"no {' or '.join(NAMES)} to open pages with")
    # Without a sandbox: containers often allow none, and the page is the project's own.
    command = [binary, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    # Nothing of the browser's own asks the network.
    command += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += ["--disable-quic", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr
        line = next(line for line in process.stderr if line.startswith("DevTools listening on "))
        root = line.split()[-1].replace("ws://", "http://").partition("/devtools")[0]
        with urlopen(f"{root}/json") as answer:
            target = next(one for one in json.load(answer) if one["type"] == "page")
        with connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.communicate()


class Page:
    """What the window shows."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0

    def open(self, url: str) -> None:
        """Returns once the page says that it is ready."""
        self.tell("Page.navigate", url="about:blank")  # else another fragment alone would load nothing
        self.tell("Page.navigate", url=url)
        self.until("document.documentElement?.dataset.ready")

    def look(self, expression: str) -> Any:
        """The value of an expression, awaited."""
        found = self.tell("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Returns once an expression holds."""
        while not self.look(expression):
            self.look("new Promise((done) => setTimeout(done, 20))")

    def fill(self, name: str, value: str) -> None:
        """Types into a field, or chooses."""
        change = "for (const kind of ['input', 'change']) one.dispatchEvent(new Event(kind));"
        self.look(f"(one => {{ one.value = {json.dumps(value)}; {change} }})(document.getElementById('{name}'))")

    def press_enter(self) -> None:
        """Where the focus is."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        for kind in ("keyDown", "keyUp"):
            self.tell("Input.dispatchKeyEvent", type=kind, **key)

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while (answer := json.loads(self._socket.recv())).get("id") != self._number:
            pass  # an event
        assert "error" not in answer, answer
        return dict(answer["result"])
