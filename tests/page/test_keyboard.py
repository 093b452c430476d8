"""The page without a mouse: each control has a name and shows the focus, which no button takes with it when it goes."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, Route, expect

PROMPT = "Tom has 3 boxes"

# What has the focus: its name, whether it is seen, whether that shows, and whether it stands after the one before. A
# field for a time has several stops, of which the browser marks its own.
FOCUSED = """() => {
  const one = document.activeElement;
  if (one === document.body) return null;
  const { outlineStyle, outlineWidth } = getComputedStyle(one);
  const before = window.focusedBefore;
  window.focusedBefore = one;
  const labels = [...(one.labels ?? [])].map((label) => label.textContent).join(" ");
  return {
    tag: one.tagName,
    name: (one.getAttribute("aria-label") ?? (labels || one.textContent)).trim(),
    seen: one.checkVisibility({ visibilityProperty: true }) && one.getBoundingClientRect().width > 0,
    marked: one === before || (outlineStyle !== "none" && parseFloat(outlineWidth) >= 2),
    follows: !(before?.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_PRECEDING),
  };
}"""


def fails(route: Route) -> None:
    route.fulfill(status=500, json={})


def never(_: Route) -> None:
    """No answer comes."""


def button(page: Page, name: str):
    return page.get_by_role("button", name=name, exact=True)


@pytest.mark.parametrize("view", ["chat", "lens", "steer", "attention", "runs", "readouts"])
def test_tab_goes_through_a_view_in_order_and_shows_where_it_is(opened, view):
    page = opened(f"#{view}")
    for summary in page.locator("summary").all():
        summary.click()
    page.evaluate("() => { document.activeElement.blur(); getSelection().removeAllRanges(); scrollTo(0, 0); }")
    page.locator("a.skip").focus()
    page.evaluate(FOCUSED)
    stops = 0
    while (page.keyboard.press("Tab") or (found := page.evaluate(FOCUSED))) is not None:
        assert found["name"], found
        assert found["seen"], found
        assert found["marked"], found
        assert found["follows"], found
        stops += 1
        assert stops < 200
    assert stops > 12


def test_the_focus_stays_with_what_was_begun_stopped_or_tried_again(opened):
    page = opened("#lens")
    read, again, stop = (button(page, name) for name in ("Read the layers", "Try again", "Stop"))
    page.get_by_label("Text").fill(PROMPT)
    page.route("**/tokenize", never)
    read.press("Enter")
    expect(stop).to_be_visible()
    expect(read).to_be_disabled()
    expect(read).to_be_focused()
    page.keyboard.press("Enter")  # does nothing meanwhile
    page.keyboard.press("Tab")
    expect(stop).to_be_focused()
    page.keyboard.press("Enter")
    expect(read).to_be_focused()
    page.unroute("**/tokenize")
    page.route("**/tokenize", fails)
    page.keyboard.press("Enter")
    expect(page.locator("main .error")).to_contain_text("responded with 500")
    expect(read).to_be_focused()
    for _ in range(2):
        again.press("Enter")
        expect(again).to_be_focused()  # it failed once more
    page.unroute("**/tokenize")
    page.route("**/v1/completions", fails)
    page.get_by_text("Length and sampling").click()
    page.get_by_label("Max new tokens").fill("0")
    again.press("Enter")
    expect(page.get_by_role("grid")).to_be_visible()
    expect(read).to_be_focused()
    expect(page.locator("main .error")).to_contain_text("responded with 500")  # of the columns
    page.unroute("**/v1/completions")
    again.press("Enter")
    expect(read).to_be_focused()
    expect(page.get_by_role("gridcell").last).to_have_attribute("aria-label", re.compile("%$"))


def test_the_box_of_a_chat_has_the_focus_again(opened):
    page = opened()
    box = page.get_by_label("Message", exact=True)
    page.route("**/v1/chat/completions", fails)
    box.fill(PROMPT)
    page.keyboard.press("Enter")
    button(page, "Try again").press("Enter")
    expect(button(page, "Try again")).to_be_focused()
    page.unroute("**/v1/chat/completions")
    page.keyboard.press("Enter")
    expect(box).to_be_focused()
    expect(page.locator(".under")).to_be_visible()
    expect(box).to_be_focused()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    expect(box).to_be_focused()  # Tab comes here still


def test_a_patch_needs_no_mouse_and_the_sheet_of_a_narrow_window_closes(opened):
    page = opened("#lens", viewport={"width": 700, "height": 900})
    page.get_by_label("Text").fill(PROMPT)
    page.get_by_role("button", name="Read the layers").click()
    page.get_by_role("grid").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    sheet = page.get_by_role("complementary")
    for close in (lambda: page.keyboard.press("Escape"), page.get_by_role("button", name="Close").click):
        expect(sheet.locator("h2")).to_have_text("Layer 1")
        close()
        expect(sheet).to_be_hidden()
        expect(page.get_by_role("grid")).to_be_focused()
        page.keyboard.press("Enter")
    page.get_by_label("Token", exact=True).select_option("0")
    page.get_by_role("button", name="Patch it there").press("Enter")
    expect(page.locator(".patched [role=status]")).to_contain_text("completion")


def test_the_form_for_a_key_takes_the_focus_and_gives_it_back(opened):
    page = opened()
    button(page, "API key").press("Enter")
    expect(page.get_by_label("API key of this server")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_label("API key of this server")).to_have_count(0)
    expect(button(page, "API key")).to_be_focused()
