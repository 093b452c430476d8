"""Stop, in each view that has the model work: the server's slots are free, and what came stays."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Thread
from urllib.parse import urlsplit

import pytest
import torch
from playwright.sync_api import Page, Route, expect

from tests.browsers import follow, idle

PROMPT = "Tom has 3 boxes"
WITHIN_S = 20.0  # seconds, of answers without an end: a busy machine takes some
SLOTS = {"chat": 1, "lens": 1, "patch": 2, "steer": 2, "attention": 1}


def without_end(route: Route) -> None:
    """A request whose answer is as long as the model's context lets it be."""
    body = route.request.post_data_json
    if body.get("stream"):
        most = "max_completion_tokens" if "messages" in body else "max_tokens"
        body |= {"ignore_eos": True, most: 3500}
    route.continue_(post_data=json.dumps(body))


@contextmanager
def way_to(root: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Another address of a server, and what cuts all connections to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def carry(here: socket.socket, there: socket.socket) -> None:
        with suppress(OSError):
            while piece := here.recv(1 << 16):
                there.sendall(piece)
            there.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", urlsplit(root).port))
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    Thread(target=carry, args=pair, daemon=True).start()

    def cut() -> None:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", cut
    listener.close()
    cut()


def begin(page: Page, view: str) -> None:
    """Have the model answer in a view."""
    if view == "chat":
        page.get_by_label("Message", exact=True).fill(PROMPT)
        page.keyboard.press("Enter")
        return
    page.get_by_label("Prompt" if view == "steer" else "Text").fill(PROMPT)
    page.get_by_text("Length and sampling").click()
    page.get_by_label("Max new tokens").fill("0" if view == "patch" else "8")
    name = {"steer": "Generate with and without", "attention": "Show the heads"}.get(view, "Read the layers")
    page.get_by_role("button", name=name).click()
    if view == "patch":
        page.get_by_role("gridcell").last.click()
        page.get_by_role("button", name="Patch it there").click()


def above_answers(page: Page) -> list[float]:
    """The pixels between a patch's heading and its answers; an empty list in other views."""
    top = "one => one.querySelector('.pair').offsetTop - one.querySelector('h2').offsetTop"
    return [one.evaluate(top) for one in page.locator(".patched:has(.pair)").all()]


@pytest.mark.parametrize("view", SLOTS)
def test_stop_frees_the_slots_of_a_view(opened, install, statistics, eventually, view):
    page = opened(f"#{'lens' if view == 'patch' else view}")
    legend = page.locator(".patched .legend" if view == "patch" else ".colouring .legend")
    if view in ("chat", "steer"):
        install({"weight": torch.ones(1, 192)}, name=f"stop-{view}", kind="linear", point="layers.3.output")
        page.get_by_label("Color by").select_option("readout")
        page.get_by_role("group", name="Colors").get_by_label("Probe or autoencoder").select_option(f"stop-{view}/0")
    expect(legend).to_have_count(0)
    aside = ThreadPoolExecutor(1)  # Playwright's event loop runs in this thread

    def count() -> int:
        page.wait_for_timeout(20)  # requests go through `without_end` while Playwright waits
        return aside.submit(statistics).result()["running"]

    def running(wanted: int, limit_s: float) -> None:
        eventually(count, lambda now: now == wanted, limit_s)

    running(0, 60)
    page.route(re.compile("/v1/(chat/)?completions"), without_end)
    begin(page, view)
    running(SLOTS[view], 60)
    strips = page.locator("token-strip").all()
    assert bool(strips) == (view in ("chat", "patch", "steer"))
    tokens = [strip.get_by_role("option").first for strip in strips]
    for token in tokens:  # a readout's value comes after its token
        expect(token).to_have_attribute("style", re.compile("background"))
    stop = page.locator(".patched" if view == "patch" else "main").get_by_role("button", name="Stop")
    height = above_answers(page)
    stop.click()
    running(0, WITHIN_S)
    expect(stop).to_be_hidden()
    assert page.locator(".error").count() == 0
    assert above_answers(page) == height  # they do not jump
    for token in tokens:  # what came stays coloured, with the legend of its colours
        expect(token).to_have_attribute("style", re.compile("background"))
    if tokens:
        expect(legend).to_contain_text("probability" if view == "patch" else f"stop-{view}")


def test_stopping_what_is_read_for_a_colour_leaves_the_answer_as_it_is(opened):
    page = opened()
    page.get_by_label("Message", exact=True).fill(PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator(".under")).to_be_visible()
    page.route("**/v1/completions", lambda _: None)  # the values never come
    with page.expect_request("**/v1/completions"):  # only what is on its way can be cut off
        page.get_by_label("Color by").select_option("norm")
    expect(page.get_by_text("Reading the values")).to_be_visible()
    with page.expect_event("requestfailed") as ended:
        page.get_by_role("button", name="Stop").click()
    assert ended.value.failure == "net::ERR_ABORTED"
    expect(page.get_by_text("Reading the values")).to_be_hidden()
    expect(page.locator("main .legend")).to_contain_text("probability")  # of the colours that are still there
    page.get_by_label("Color by").select_option("entropy")
    expect(page.locator("main .legend")).to_contain_text("bits")


def test_a_lens_that_was_stopped_or_failed_stays_whole_and_goes_on(opened):
    page = opened("#lens")
    stop, cells = page.get_by_role("button", name="Stop"), page.get_by_role("gridcell")
    page.route("**/v1/completions", lambda route: route.fulfill(status=500, json={}))
    page.get_by_label("Text").fill(PROMPT)
    page.get_by_text("Length and sampling").click()
    page.get_by_label("Max new tokens").fill("0")
    page.get_by_role("button", name="Read the layers").click()
    expect(page.locator("main .error")).to_contain_text("responded with 500")
    page.unroute("**/v1/completions")
    page.route("**/v1/completions", lambda _: None)  # no answer comes
    with page.expect_request("**/v1/completions"):
        page.get_by_role("button", name="Try again").click()
    expect(page.get_by_text("Reading tokens 0 to")).to_be_visible()
    with page.expect_event("requestfailed"):
        stop.click()
    expect(page.get_by_text("Reading tokens 0 to")).to_be_hidden()
    page.unroute("**/v1/completions")
    page.get_by_label("Color by").select_option("rank")
    expect(cells.last).to_have_attribute("aria-label", re.compile(r"rank \d+$"))

    page.route("**/v1/completions", lambda _: None)
    page.get_by_label("Text").fill("Ann reads a book")
    page.get_by_label("Max new tokens").fill("8")
    page.get_by_role("button", name="Read the layers").click()
    stop.click()
    cells.last.click()
    expect(page.get_by_role("complementary")).to_contain_text("“ boxes”")  # of the text that is shown
    expect(page.get_by_role("complementary").get_by_role("button", name="Stop")).to_be_visible()
    page.get_by_role("button", name="Read the layers").click()
    follow(page, "lens", {"text": "Another text"})
    expect(page.get_by_text("Press “Read the layers”")).to_be_visible()
    expect(stop).to_have_count(0)
    assert page.locator("main .error").count() == 0


def test_a_page_that_nobody_uses_asks_the_server_nothing(opened):
    page = opened()
    page.clock.install()
    page.get_by_label("Message", exact=True).fill(PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator(".under")).to_be_visible()
    for name in ("Lens", "Steer", "Attention", "Stored runs", "Probes"):
        page.get_by_role("link", name=name).click()
        expect(page.get_by_role("region", name=name, exact=True)).to_be_visible()
    expect(page.locator("main")).to_contain_text(re.compile("No probe is installed|Description"))
    asked: list[str] = []
    page.on("request", lambda request: "/page/" in request.url or asked.append(request.url))
    page.clock.fast_forward("01:00:00")
    idle(page)
    assert not asked


def test_a_server_that_goes_away_within_an_answer_leaves_what_came(opened, served):
    with way_to(served.root) as (root, cut):
        page = opened(root=root)
        page.route("**/v1/chat/completions", without_end)
        box = page.get_by_label("Message", exact=True)
        box.fill(PROMPT)
        page.keyboard.press("Enter")
        tokens = page.get_by_role("listbox").get_by_role("option")
        expect(tokens.nth(3)).to_be_visible()
        page.get_by_label("Color by").select_option("entropy")
        expect(tokens.nth(tokens.count() + 3)).to_have_attribute("style", re.compile("background"))
        box.fill("What I typed meanwhile")
        page.context.set_offline(True)
        cut()
        expect(page.locator("main .error")).to_contain_text("disconnected before the response's end")
        assert tokens.count() > 3
        expect(page.get_by_text("the web UI tries again")).to_be_visible()
        page.context.set_offline(False)
        expect(page.get_by_text("the web UI tries again")).to_be_hidden()
        expect(box).to_have_value("What I typed meanwhile")
        page.unroute("**/v1/chat/completions")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".under")).to_contain_text("the end of its response")
        expect(page.locator("article.user")).to_have_count(1)


def test_a_link_that_is_opened_within_an_answer_shows_nothing_of_that_answer(opened):
    page = opened("#chat")
    page.route("**/v1/chat/completions", without_end)
    begin(page, "chat")
    expect(page.get_by_role("listbox", name="Tokens of the response").get_by_role("option").nth(3)).to_be_visible()
    follow(page, "chat", {"messages": [{"role": "user", "content": "Another chat"}], "pinned": [2]})
    expect(page.get_by_text("This chat comes from a link")).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.locator("aside")).to_contain_text("Point at a token")
    expect(page.locator("p.hidden[role=status]")).to_have_text("")
