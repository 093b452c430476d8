"""What a person chooses while the page waits for the server: an answer that is late changes nothing else."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.browsers import READY, idle, painted

PROMPT = "Tom has 3 boxes"
MODEL = "vitrine-demo"
STRUCTURE = "**/v1/model/structure*"


def of_two_models(page: Page) -> list[Route]:
    """The page with a second model, whose structure comes at once; requests for the first one's are held."""
    held: list[Route] = []

    def structure(route: Route) -> None:
        if f"model={MODEL}" in route.request.url:
            held.append(route)
        else:
            route.fulfill(json={"layers": 3, "points": []})

    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": MODEL}, {"id": "another"}]}))
    page.route(STRUCTURE, structure)
    page.reload()
    page.wait_for_selector(READY)
    return held


def requested(page: Page, *kinds: str) -> list[dict[str, Any]]:
    """The bodies of requests whose addresses end so, as they come."""
    found: list[dict[str, Any]] = []
    page.on("request", lambda one: one.url.endswith(kinds) and found.append(one.post_data_json))
    return found


def test_layers_are_those_of_the_model_that_was_chosen_last(opened):
    page = opened()
    held = of_two_models(page)
    with page.expect_request(STRUCTURE):
        page.get_by_role("link", name="Steer").click()
    page.locator("#model").select_option("another")
    layers = page.get_by_label("Where").locator("option")
    expect(layers).to_have_count(1 + 3)
    with page.expect_request_finished(lambda request: f"model={MODEL}" in request.url):
        held[0].continue_()
    painted(page)
    expect(layers).to_have_count(1 + 3)


def test_attention_is_read_from_the_model_it_was_asked_of(opened):
    page = opened()
    held = of_two_models(page)
    asked = requested(page, "/tokenize", "/completions")
    with page.expect_request(STRUCTURE):
        page.get_by_role("link", name="Attention").click()
    page.get_by_label("Text").fill(PROMPT)
    page.get_by_role("button", name="Show the heads").click()
    page.locator("#model").select_option("another")
    held[0].continue_()
    expect(page.get_by_role("button", name="head 0")).to_be_visible()
    assert {body["model"] for body in asked} == {MODEL}


def test_a_view_that_was_left_before_it_was_ready_has_the_model_do_nothing(opened):
    page = opened()
    page.get_by_label("Message", exact=True).fill(PROMPT)
    page.keyboard.press("Enter")
    expect(page.locator(".under")).to_be_visible()
    held: list[Route] = []
    page.route(STRUCTURE, lambda route: held.append(route))
    with page.expect_request(STRUCTURE):
        page.get_by_role("button", name="Attention").click()
    page.get_by_role("link", name="Chat").click()
    asked = requested(page, "/detokenize", "/completions")
    with page.expect_request_finished():
        held[0].continue_()
    idle(page)
    assert not asked
