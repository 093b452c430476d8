"""The pictures of docs/web-ui.md, of SmolLM2's own answers: `python -m tests.page.pictures`."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, expect

import vitrine
from tests import browsers

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH = 1280
TIMEOUT_MS = 120_000


def chat(page: Page) -> int:
    """An answer, one of whose tokens is pinned; gives the picture's height."""
    page.get_by_label("Message", exact=True).fill("Why is the sky blue? Answer in two sentences.")
    page.keyboard.press("Enter")
    expect(page.locator(".under")).to_be_visible(timeout=TIMEOUT_MS)
    page.get_by_role("listbox").get_by_role("option").nth(6).click()
    return 640


def lens(page: Page) -> int:
    """A short text and its answer, with the tokens of a cell near the last layer."""
    page.get_by_label("Text").fill("The capital of France is")
    page.get_by_role("button", name="Read the layers").click()
    page.locator("[aria-rowindex='5'] [data-row='28']").click(timeout=TIMEOUT_MS)
    expect(page.get_by_role("complementary").get_by_role("listitem")).to_have_count(20, timeout=TIMEOUT_MS)
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    expect(page.locator("lens-grid [aria-label$='not read yet']")).to_have_count(0)
    return 920


def steer(page: Page) -> int:
    """The two answers to a prompt, with the details of a token of the steered one."""
    page.get_by_label("Prompt").fill("I went to the park and")
    page.get_by_role("button", name="Generate with and without").click()
    expect(page.get_by_text("where activation vectors are")).to_be_visible(timeout=TIMEOUT_MS)
    page.get_by_role("listbox", name="Steered").get_by_role("option").nth(3).click()
    return 1060


def main() -> None:
    """Draw them anew."""
    with vitrine.serve("smollm2") as server, browsers.chromium() as browser:
        for view in (chat, lens, steer):
            page = browser.new_page(color_scheme="light", device_scale_factor=2)
            page.set_viewport_size({"width": WIDTH, "height": 900})
            browsers.show(page, f"{server.url}/#{view.__name__}")
            page.set_viewport_size({"width": WIDTH, "height": view(page)})
            page.mouse.move(0, 0)
            page.evaluate("scrollTo(0, 0)")  # a click may have scrolled
            page.screenshot(path=IMAGES / f"page-{view.__name__}.png")
            page.close()


if __name__ == "__main__":
    main()
