"""The page in a browser: how soon its first view is there, and how it scrolls: `python -m benchmarks.page`.

Headless Chromium opens the page of a server of its own, on this machine.
  first view    milliseconds from the last byte of the HTML to the view's first frame, in a new window each time
  scrolling     the lens grid of a long answer, from its first token to its last at a constant speed: frames per second
                by `requestAnimationFrame`, before and after the grid's columns were read from the model

Ends with 1 where the median of the first view is over 300 ms, or where a grid that was read scrolls at under 58 frames
per second.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import sys
from pathlib import Path
from statistics import median

from playwright.sync_api import Browser, Page, sync_playwright

import vitrine
from benchmarks.common import report
from benchmarks.common.children import terminate_as_interrupt
from benchmarks.common.findings import Findings
from deployments.options import DEMO, SMOLLM2, home

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MOST_MS, LEAST_FRAMES = 300.0, 58.0
LATE_MS = 25.0  # between two frames: at 60 a second, one was left out
STEP = 40  # columns that are read at a time
PROMPT = "Write a long story about the sea."
READY = "html[data-ready]"
# When the view's element is there, and the frame after that begins.
WATCH = """
const look = new MutationObserver(() => {
  if (!document.querySelector("#view > *")) return;
  look.disconnect();
  requestAnimationFrame(() => requestAnimationFrame((now) => (window.shownAt = now)));
});
look.observe(document, { subtree: true, childList: true });
"""
SHOWN = """() => window.shownAt && window.shownAt - performance.getEntriesByType("navigation")[0].responseEnd"""
SCROLL = """async (speed) => {
  const body = document.querySelector("lens-grid .body");
  const frames = [];
  body.scrollLeft = 0;
  await new Promise((done) => {
    const step = (now) => {
      frames.push(now);
      const before = body.scrollLeft;
      body.scrollLeft += speed;
      if (body.scrollLeft > before) requestAnimationFrame(step);
      else done();
    };
    requestAnimationFrame(step);
  });
  return frames;
}"""
IS_READ = """(column) => {
  const body = document.querySelector("lens-grid .body");
  body.scrollLeft = column * 78;
  return document.querySelector(`lens-grid [aria-rowindex="${column + 1}"]`) &&
    ![...document.querySelectorAll("lens-grid [role=gridcell]")].some((cell) => cell.textContent === "·");
}"""


def first_view(browser: Browser, url: str) -> float:
    """Milliseconds from the HTML to the first frame with the view."""
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script(WATCH)
    page.goto(url)
    found = float(page.wait_for_function(SHOWN).json_value())
    context.close()
    return found


def opened(browser: Browser, server: vitrine.Server, tokens: int) -> Page:
    """The lens grid of a text and an answer of so many tokens."""
    asked = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "seed": 0, "return_token_ids": True}
    choice = server.complete(PROMPT, **asked)["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    state = {"ids": ids, "count": len(ids) - tokens, "model": server.model}
    coded = base64.urlsafe_b64encode(json.dumps(state).encode()).decode().rstrip("=")
    page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
    page.goto(f"{server.url}/#lens={coded}")
    page.wait_for_selector(READY)
    page.get_by_role("button", name="Read the layers").click()
    page.wait_for_selector("lens-grid [role=gridcell]")
    return page


def scrolled(page: Page, speed: int) -> dict[str, float]:
    """How many frames a second the grid scrolls at."""
    frames = page.evaluate(SCROLL, speed)
    gaps = [after - before for before, after in zip(frames, frames[1:], strict=False)]
    return {
        "frames": len(gaps),
        "frames per second": 1000 * len(gaps) / sum(gaps),
        "late frames, percent": 100 * sum(gap > LATE_MS for gap in gaps) / len(gaps),
        "longest gap, ms": max(gaps),
    }


def read_all(page: Page, tokens: int) -> None:
    """Bring every column into view until it is read."""
    for column in [*range(0, tokens, STEP), tokens - 1]:
        page.wait_for_function(IS_READ, arg=column, timeout=120_000, polling=50)


def measure(browser: Browser, server: vitrine.Server, options: argparse.Namespace, findings: Findings) -> None:
    """Measure, show and keep what is asked for."""
    views = sorted(first_view(browser, server.url) for _ in range(options.rounds))
    found = {"median": median(views), "lowest": views[0], "highest": views[-1]}
    _show(findings, f"first view, in ms, {options.rounds} times", found)
    if found["median"] > MOST_MS:
        findings.failed.append(f"the first view takes {found['median']:.0f} ms")
    page = opened(browser, server, options.tokens)
    layers = page.locator("lens-grid [role=row]").first.get_by_role("gridcell").count()
    title = f"a lens of {options.tokens} tokens and {layers} layers, {options.speed} pixels a frame"
    _show(findings, f"{title}, while it is read", scrolled(page, options.speed))
    read_all(page, options.tokens)
    found = scrolled(page, options.speed)
    _show(findings, f"{title}, read", found)
    if found["frames per second"] < LEAST_FRAMES:
        findings.failed.append(f"the grid scrolls at {found['frames per second']:.0f} frames per second")


def _show(findings: Findings, title: str, found: dict[str, float]) -> None:
    print(report.table(title, ["", ""], [[name, f"{value:.1f}"] for name, value in found.items()]), flush=True)
    findings.add("page", title, found)


def main(arguments: list[str] | None = None) -> int:
    """Measure, show, keep."""
    terminate_as_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2 if (home() / "models" / SMOLLM2).is_dir() else DEMO)
    parser.add_argument("--tokens", type=int, default=2000, help="of the answer")
    parser.add_argument("--speed", type=int, default=40, help="pixels a frame; a token is 78 wide")
    parser.add_argument("--rounds", type=int, default=11, help="of the first view")
    parser.add_argument("--results", type=Path, default=Path("results") / "benchmark-page", help="without a suffix")
    parser.set_defaults(threads=os.cpu_count())
    options = parser.parse_args(arguments)
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        print(f"no {' or '.join(BROWSERS)} to open the page with", file=sys.stderr)
        return 2
    findings = Findings(options)
    with vitrine.serve(options.model) as server, sync_playwright() as playwright:
        # Without a sandbox: containers often allow none, and the page is the project's own.
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        measure(browser, server, options, findings)
        browser.close()
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
