"""A headless Chromium that Playwright drives."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

# Those without windows first: a page takes half as much processor time there.
NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
READY = "html[data-ready]"  # what each page of the project sets once it shows all
TIMEOUT_MS = 60_000  # of every wait: the model may be busy, and the machine slow

expect.set_options(timeout=TIMEOUT_MS)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser while the block runs, in which no other code can run an event loop; skips where there is none."""
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    if binary is None:
        pytest.skip(f"no {' or '.join(NAMES)} to open pages with")
    with sync_playwright() as playwright:
        # Without a sandbox: containers often allow none, and the pages are the project's own.
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()


def show(page: Page, url: str) -> None:
    """Open an address in a page, anew even where only its fragment differs."""
    page.goto("about:blank")
    page.goto(url)
    page.wait_for_selector(READY)


def follow(page: Page, view: str, state: dict[str, Any]) -> None:
    """Go to a view's link in a page that is open already."""
    coded = base64.urlsafe_b64encode(json.dumps(state).encode()).decode().rstrip("=")
    page.evaluate("fragment => { location.hash = fragment; }", f"{view}={coded}")


def painted(page: Page) -> None:
    """Wait for the page's next frame: what it puts off to that, such as the last tokens of an answer, is there then."""
    page.evaluate("() => new Promise(requestAnimationFrame)")


def idle(page: Page) -> None:
    """Wait until the page has dealt with what it received. A page that draws no frames may never report to be idle."""
    page.evaluate("() => new Promise((done) => requestIdleCallback(done, {timeout: 5000}))")


def link(page: Page) -> str:
    """The fragment of the link to what the page shows."""
    page.get_by_role("button", name="Copy link").click()
    return str(page.evaluate("() => location.hash"))
