"""The page in a browser: how soon its first view is there, and how it scrolls: `python -m benchmarks.page`.

Headless Chromium opens the page of a server of its own, on this machine.
  first view    milliseconds from the last byte of the HTML to the view's first frame, with an empty cache each time;
                and of the next one, with what the browser kept; also from a server that has the same answers in memory
                and does nothing else, which shows what the browser alone takes
  scrolling     the lens grid of a long text, from its first token on at a constant speed, while its columns come and,
                once more, when they are there: the frames that a trace of the browser says were drawn, and those that
                were dropped. The model is not asked: what the grid shows is made up here, so that the page alone is
                measured

Ends with 1 where the median of either view is over 300 ms, or where a grid that was read scrolls at under 58 frames
per second.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from statistics import median
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, Request, Route, sync_playwright

import vitrine
from benchmarks.common import report
from benchmarks.common.findings import Findings, parser_of
from deployments.interrupts import terminate_as_interrupt

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
MOST_MS, LEAST_FRAMES = 300.0, 58.0
# Of a trace. Without the first, which turns off all that are on by default, it is too large to read.
CATEGORIES = ["-*", "disabled-by-default-devtools.timeline.frame"]
PROMPT, WORDS = 10, (" the", " of", "ing", " Paris", ",", " water", "\n", " 12")
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
# There and back for so many seconds, up to `most` pixels; gives how far it came.
SCROLL = """async ([speed, seconds, most]) => {
  const body = document.querySelector("lens-grid .body");
  const end = Math.min(most ?? Infinity, body.scrollWidth - body.clientWidth);
  let [at, way, reached] = [0, 1, 0];
  const begun = performance.now();
  while (performance.now() - begun < 1000 * seconds) {
    body.scrollLeft = at;
    reached = Math.max(reached, at);
    if (at + way * speed > end || at + way * speed < 0) way = -way;
    at += way * speed;
    await new Promise(requestAnimationFrame);
  }
  return reached;
}"""
ALL_READ = """() => !document.querySelector("lens-grid [aria-label$='not read yet']")"""


def first_views(browser: Browser, url: str) -> list[float]:
    """Milliseconds from the HTML to the first frame with the view: with an empty cache, and once more."""
    context = browser.new_context()
    found = []
    for _ in range(2):
        page = context.new_page()
        page.goto(f"{url}/health")  # the browser's process for this origin begins; it has none of the page's files
        page.add_init_script(WATCH)
        page.goto(url)
        found.append(float(page.wait_for_function(SHOWN).json_value()))
        page.close()
    context.close()
    return found


@contextmanager
def remembered(url: str) -> Iterator[str]:
    """The address of a server in this process that gives a server's own answers from memory, while the block runs."""
    answers = cache(lambda path: httpx.get(url + path))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = answers(self.path)
            self.send_response(answer.status_code)
            for name in answer.headers.keys() - {"connection", "content-encoding", "date", "server"}:
                self.send_header(name, answer.headers[name] if name != "content-length" else str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: Any) -> None:
            """Nothing: the library would write each request to the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def opened(browser: Browser, url: str, tokens: int, layers: int) -> Page:
    """Open the lens grid of a text of so many tokens, for a model of so many layers."""

    def cell(position: int, layer: int) -> dict[str, Any]:
        top = [
            {"token": WORDS[(position * layer + i) % len(WORDS)], "token_id": i, "logprob": -0.3 * (i + position % 7)}
            for i in range(5)
        ]
        return {"layer": layer, "top": top, "targets": [top[layer % 5] | {"rank": 1 + layer % 5}]}

    def read(route: Route) -> None:
        body = route.request.post_data_json
        assert body
        window = body["logit_lens"]["tokens"]
        found = [
            {"position": at, "token": texts[at], "layers": [cell(at, layer) for layer in range(layers)]}
            for at in range(window["from"], window["to"])
        ]
        route.fulfill(json={"choices": [{"logit_lens": {"prompt": found}}]})

    texts = [WORDS[i % len(WORDS)] for i in range(tokens)]
    state = {"ids": list(range(tokens)), "count": PROMPT}
    coded = base64.urlsafe_b64encode(json.dumps(state).encode()).decode().rstrip("=")
    page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
    page.route("**/detokenize", lambda route: route.fulfill(json={"prompt": "", "token_texts": texts}))
    page.route("**/v1/model/structure*", lambda route: route.fulfill(json={"layers": layers, "points": []}))
    page.route("**/v1/completions", read)
    page.goto(f"{url}/#lens={coded}")
    page.wait_for_selector(READY)
    page.get_by_role("button", name="Read the layers").click()
    page.wait_for_selector("lens-grid [role=gridcell]")
    page.wait_for_function(ALL_READ)  # the first window
    return page


def scrolled(browser: Browser, page: Page, speed: int, seconds: float, most: float | None) -> dict[str, float]:
    """Scroll, `speed` pixels a frame and up to `most` pixels; gives a trace's frames, their rate and their gaps."""
    asked: list[str] = []

    def note(request: Request) -> None:
        asked.append(request.url)

    page.on("request", note)
    browser.start_tracing(page=page, categories=CATEGORIES)
    reached = page.evaluate(SCROLL, [speed, seconds, most])
    events = json.loads(browser.stop_tracing())["traceEvents"]
    drawn = sorted(event["ts"] / 1000 for event in events if event["name"] == "DrawFrame")  # milliseconds
    dropped = sum(event["name"] == "DroppedFrame" for event in events)
    page.wait_for_function(ALL_READ)
    page.remove_listener("request", note)
    return {
        "pixels": reached,
        "windows read": len(asked),
        "frames": len(drawn),
        "frames per second": 1000 * (len(drawn) - 1) / (drawn[-1] - drawn[0]),
        "dropped frames, percent": 100 * dropped / (len(drawn) + dropped),
        "longest gap, ms": max(after - before for before, after in pairwise(drawn)),
    }


def measure(browser: Browser, url: str, options: argparse.Namespace, findings: Findings) -> None:
    """Measure the milliseconds of views and the frames of scrolling."""
    with remembered(url) as bare:
        first_views(browser, bare)
        rounds = [first_views(browser, url) + first_views(browser, bare) for _ in range(options.rounds)]
    names = ("first view", "next view", "first view, answers from memory", "next view, answers from memory")
    for name, views in zip(names, zip(*rounds, strict=True), strict=True):
        found = {"median": median(views), "lowest": min(views), "highest": max(views)}
        _show(findings, f"{name}, in ms, {options.rounds} times", found)
        if name in names[:2] and found["median"] > MOST_MS:
            findings.failed.append(f"the {name} takes {found['median']:.0f} ms")
    page = opened(browser, url, options.tokens, options.layers)
    title = f"a lens of {options.tokens} tokens and {options.layers} layers, {options.speed} pixels a frame"
    reached = None
    for state in ("as its columns come", "with its columns there"):
        found = scrolled(browser, page, options.speed, options.seconds, reached)
        reached = found["pixels"]
        _show(findings, f"{title}, {state}", found)
    if found["frames per second"] < LEAST_FRAMES:
        findings.failed.append(f"the grid scrolls at {found['frames per second']:.0f} frames per second")


def _show(findings: Findings, title: str, found: dict[str, float]) -> None:
    print(report.table(title, ["", ""], [[name, f"{value:.1f}"] for name, value in found.items()]), flush=True)
    findings.add("page", title, found)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parser = parser_of(__doc__, "benchmark-page", rounds=11)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--speed", type=int, default=40, help="pixels a frame; a token is 78 wide")
    parser.add_argument("--seconds", type=float, default=20, help="of each scroll, there and back in a short text")
    options = parser.parse_args(arguments)
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    if binary is None:
        print(f"no {' or '.join(BROWSERS)} to open the page with", file=sys.stderr)
        return 2
    findings = Findings(options)
    with vitrine.serve() as server, sync_playwright() as playwright:
        # Without a sandbox: containers often allow none, and the page is the project's own.
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        measure(browser, server.url, options, findings)
        browser.close()
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
