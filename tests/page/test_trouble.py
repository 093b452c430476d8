"""The page where something is wrong: text that would harm it, keys, a server that is slow or away."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from playwright.sync_api import Page, expect

from deployments.options import NO_MODEL
from tests.browsers import follow, painted

HOSTILE = "<script>document.title = 'ran'</script><img src=x onerror=\"document.title='ran'\">\u202egnp.\u2066 \u200b"
KEY = "sk-page-4fJc0Vb1xT9q"
MODEL = "vitrine-demo"
CHAT = "**/v1/chat/completions"


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def is_as_wide_as_its_window(page: Page) -> bool:
    return page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.fixture
def obedient(opened):
    """A page whose model answers with a text that a test gives: the server itself holds it to that."""

    def made(text: str, **context) -> Page:
        page = opened(**context)
        schema = {"type": "json_schema", "json_schema": {"name": "text", "schema": {"const": text}}}

        def forced(route):
            route.continue_(post_data=json.dumps(route.request.post_data_json | {"response_format": schema}))

        page.route(CHAT, forced)
        return page

    return made


def test_hostile_text_stays_text(obedient):
    page = obedient(HOSTILE, viewport={"width": 390, "height": 800})
    page.get_by_text("Settings").click()
    page.get_by_label("Max new tokens").fill("600")
    say(page, HOSTILE)
    expect(page.locator(".under")).to_contain_text("tokens, up to")
    painted(page)
    said = "".join(page.get_by_role("listbox").get_by_role("option").all_text_contents())
    assert "<script>" in said
    assert "onerror" in said
    assert "\u202e" not in said  # it would turn around what stands behind it
    assert page.locator(".said").text_content() == HOSTILE
    assert page.title() == "Chat – Vitrine"
    assert page.locator("main img, main script").count() == 0
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.title() == "Chat – Vitrine"
    assert is_as_wide_as_its_window(page)


def test_hostile_text_stays_text_in_every_view(opened, served):
    session, tags = "page-hostile", {"condition": HOSTILE}
    capture = {"points": ["layers.1.output"], "mode": "trace", "tags": tags}
    for _ in range(2):
        body = {"model": MODEL, "prompt": HOSTILE, "capture": capture, "session_id": session}
        assert httpx.post(f"{served.base_url}/completions", json=body, timeout=60).status_code == 200
    page = opened("#lens", viewport={"width": 390, "height": 800})

    def is_harmless(as_text: bool = True) -> None:
        text = page.locator("main").text_content()
        assert ("<script>" in text) or not as_text
        assert "\u202e" not in text
        assert page.locator("main img, main script").count() == 0
        assert "ran" not in page.title()
        assert is_as_wide_as_its_window(page)

    for view, label, press, shown in (
        ("Lens", "Text", "Read the layers", "lens-grid [role=gridcell]"),
        ("Steer", "Prompt", "Generate with and without", "token-strip [role=option]"),
        ("Attention", "Text", "Show the heads", "canvas"),
    ):
        page.get_by_role("link", name=view).click()
        page.get_by_label(label, exact=True).fill(HOSTILE)
        page.get_by_role("button", name=press).click()
        expect(page.locator(f"main {shown}").first).to_be_visible()
        is_harmless(as_text=view == "Attention")  # elsewhere tokens of their own have its parts
    page.get_by_role("link", name="Stored runs").click()
    page.get_by_role("button", name=session, exact=True).click()
    boxes = page.get_by_role("checkbox", name="Compare")
    expect(boxes).to_have_count(2)
    is_harmless()
    page.get_by_role("button", name=re.compile("^run-")).first.click()
    expect(page.get_by_role("listbox", name="Tokens of the run")).to_be_visible()
    is_harmless()
    page.get_by_role("button", name="Close").click()
    for box in boxes.all():
        box.check()
    page.get_by_role("button", name="Compare the two").click()
    expect(page.get_by_role("list", name="Tokens of both runs")).to_be_visible()
    is_harmless()


def test_ten_thousand_characters_without_a_space_break_no_layout(opened):
    page = opened(viewport={"width": 390, "height": 800})
    long = "x" * 10_000
    say(page, long)
    expect(page.locator(".error, .under").first).to_be_visible()
    assert is_as_wide_as_its_window(page)
    if page.locator(".error").count():  # more than the model's context: what was typed is there to be cut
        expect(page.get_by_label("Message", exact=True)).to_have_value(long)
    page.get_by_role("link", name="Attention").click()
    page.get_by_label("Text").fill(long)
    page.get_by_role("button", name="Show the heads").click()
    expect(page.locator(".error, canvas").first).to_be_visible()
    assert is_as_wide_as_its_window(page)


def test_a_link_that_is_damaged_or_hostile_opens_a_view_all_the_same(opened):
    assert opened("#lens=%%%").get_by_text("The link is damaged").is_visible()
    page = opened("#chat=eyJtZXNzYWdlcyI6W3sicm9sZSI6MX0sbnVsbCwiPHNjcmlwdD4iXSwiZHJhZnQiOnsiYSI6MX19")
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    follow(page, "chat", {"colour": None, "messages": [{"role": "user", "content": "Hello"}]})
    expect(page.get_by_text("This chat comes from a link")).to_be_visible()


def test_a_setting_is_sent_as_it_is_typed_or_said_to_be_wrong(opened):
    page = opened()
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0.33")
    page.get_by_label("Top p").fill("0.975")
    with page.expect_request(CHAT) as asked:
        say(page, "Tom has 3 boxes")
    body = asked.value.post_data_json
    assert (body["temperature"], body["top_p"]) == (0.33, 0.975)
    expect(page.locator(".under")).to_be_visible()
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").evaluate("one => { one.value = 3; }")
    say(page, "Ann has 3 boxes")
    expect(page.locator("main .error")).to_contain_text("Temperature: ")
    expect(page.get_by_label("Temperature")).to_be_focused()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Ann has 3 boxes")
    page.get_by_role("button", name="Regenerate").click()
    assert page.get_by_role("listbox").count() == 1  # the answer that is there stays


def test_no_other_model_is_asked_in_the_place_of_one_that_is_not_served(opened):
    page = opened()
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": []}))
    page.reload()
    expect(page.get_by_text("No model is loaded")).to_be_visible()
    page.unroute("**/v1/models")
    expect(page.get_by_text("No model is loaded")).to_be_hidden()
    expect(page.locator("#model")).to_have_value(MODEL)
    follow(page, "chat", {"model": "another", "draft": "Tom"})
    expect(page.get_by_text("The model another is not served now")).to_be_visible()
    with page.expect_request(CHAT) as asked:
        page.get_by_role("button", name="Send").click()
    assert asked.value.post_data_json["model"] == "another"
    expect(page.locator("main .error")).to_contain_text("another")
    page.locator("#model").select_option(MODEL)
    expect(page.get_by_text("The model another is not served now")).to_be_hidden()


def test_a_key_is_asked_for_and_stays_in_the_tab(another_app, opened, tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"use:{KEY}\n")
    with another_app("page-keys", f"api_keys_file={path}", f"model={NO_MODEL}") as root:
        page = opened(root=root)
        expect(page.get_by_label("The server asks for an API key")).to_be_visible()
        say(page, "What I typed")
        expect(page.get_by_label("Message", exact=True)).to_have_value("What I typed")
        page.get_by_label(re.compile("API key")).last.fill("schlüssel-北京")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#key-input:invalid")).to_be_focused()  # no header can hold it
        assert page.get_by_text("does not respond").count() == 0
        for key, told in (("sk-wrong-0000000000", "does not know this API key"), (KEY, "No model is loaded")):
            page.get_by_label(re.compile("API key")).last.fill(key)
            page.get_by_role("button", name="Use it").click()
            expect(page.get_by_text(told)).to_be_visible()
        page.get_by_role("link", name="Stored runs").click()
        expect(page.get_by_text("No stored session fits")).to_be_visible()
        assert page.evaluate("() => JSON.stringify([sessionStorage, localStorage, document.cookie])").count(KEY) == 1
        assert KEY not in page.url
        page.get_by_text("The requests as Python and curl").click()
        expect(page.locator("request-code")).to_contain_text("VITRINE_API_KEY")
        assert KEY not in page.content()
        page.reload()
        expect(page.get_by_text("No model is loaded")).to_be_visible()
