"""Each view of the page, used as a person uses it, against the served model."""

from __future__ import annotations

import re
import subprocess
import sys

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

import vitrine
from tests.browsers import follow, link, painted

QUESTION = "Ann has 3 boxes of 12 pens. How many pens is that?"
PROMPT = "Tom has 3 boxes"
MODEL = "vitrine-demo"


def ask(page: Page, text: str = QUESTION) -> None:
    """A chat's question, up to the end of its answer."""
    answers = page.locator("article.assistant .under")
    before = answers.count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(answers).to_have_count(before + 1)
    painted(page)


def options(page: Page, name: str = "Tokens of the answer"):
    return page.get_by_role("listbox", name=name).last.get_by_role("option")


def code(page: Page, name: str, form: str = "as Python") -> str:
    """A request of the view as code."""
    page.get_by_text("The requests as Python and curl").click()
    section = page.locator("request-code section", has=page.get_by_text(name, exact=True))
    section.get_by_role("button", name=form).click()
    return section.locator("pre").text_content() or ""


def test_a_chat_shows_what_each_token_was_chosen_from(opened, served):
    page = opened()
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    ask(page)
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "seed": 0}
    body |= {"logprobs": True, "top_logprobs": 20}
    said = httpx.post(f"{served.base_url}/chat/completions", json=body, timeout=60).json()
    tokens = said["choices"][0]["logprobs"]["content"]
    assert options(page).all_text_contents() == [one["token"].replace("\n", "⏎") for one in tokens]

    options(page).nth(2).hover()
    about = page.get_by_role("complementary", name="Token")
    likeliest = about.get_by_role("listitem")
    expect(likeliest).to_have_count(20)
    assert (tokens[2]["top_logprobs"][1]["token"].strip() or "␣") in likeliest.nth(1).text_content()
    options(page).nth(2).click()
    options(page).nth(0).hover()
    expect(about.locator("dd").first).to_have_text(str(said["usage"]["prompt_tokens"] + 2))  # pinned, it stays
    page.get_by_text("Show as text").click()
    expect(page.locator(".plain[dir=auto]")).to_have_text(said["choices"][0]["message"]["content"])

    page.get_by_role("listbox").focus()
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")  # from the token that was clicked
    expect(about.locator("dd").first).to_have_text(str(said["usage"]["prompt_tokens"] + 3))
    page.keyboard.press("End")
    expect(about.locator("dd").first).to_have_text(str(said["usage"]["prompt_tokens"] + len(tokens) - 1))
    page.get_by_label("Colour by").select_option("norm")
    expect(page.locator(".legend")).to_contain_text("norm")
    assert options(page).first.evaluate("one => one.style.backgroundColor")
    done = subprocess.run([sys.executable, "-c", code(page, "Chat")], capture_output=True, text=True, timeout=60)
    assert tokens[0]["token"] in done.stdout, done.stderr


def test_a_lens_reads_every_layer_and_a_cell_is_dragged_onto_another_token(opened, served):
    page = opened("#lens")
    page.get_by_label("Text").fill(PROMPT)
    page.get_by_role("button", name="Read the layers").click()
    cells = page.get_by_role("gridcell")
    expect(cells.last).to_have_attribute("aria-label", re.compile("%$"))
    lens = {"layers": "all", "top_k": 1, "tokens": "all", "targets": "last_layer"}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 0, "logit_lens": lens}
    answer = httpx.post(f"{served.base_url}/completions", json=body, timeout=60).json()
    found = answer["choices"][0]["logit_lens"]["prompt"]
    want = [one["layers"][-1]["top"][0]["token"] for one in found]
    row = page.locator(f"[aria-rowindex='{len(found)}']").get_by_role("gridcell")
    assert row.last.get_attribute("aria-label").startswith(f"layer 5 after {found[-1]['token']}: {want[-1]}")
    assert page.locator("[role=rowheader].answer").count()  # the generated tokens' columns follow

    row.nth(4).click()
    expect(page.get_by_role("complementary").get_by_role("listitem")).to_have_count(20)
    row.nth(4).drag_to(page.locator("[aria-rowindex='2']").get_by_role("gridcell").nth(1))
    expect(page.locator(".patched [role=status]")).to_contain_text("answer")
    expect(page.locator(".patched h2")).to_contain_text("Layer 4 at")
    body = code(page, "The patched answer", "as curl")
    assert '"op":"replace","point":"layers.1.output","tokens":{"positions":[1]}' in body
    page.get_by_label("Colour by").select_option("rank")
    expect(page.locator(".legend").first).to_contain_text("above 1000")
    expect(row.last).to_have_attribute("aria-label", re.compile(r"rank \d+$"))
    ranks = [one["targets"][0]["rank"] for one in found[-1]["layers"]]
    labels = [cell.get_attribute("aria-label") or "" for cell in row.all()]
    assert [int(label.rpartition("rank ")[2]) for label in labels] == ranks


def test_what_is_shown_stays_its_models_when_another_is_chosen(opened):
    page = opened()
    both = {"data": [{"id": MODEL}, {"id": "another"}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=both))
    page.reload()
    chooser = page.locator("#model")
    expect(chooser.locator("option")).to_have_count(2)
    asked: list[str] = []
    page.on("request", lambda one: one.url.endswith("/completions") and asked.append(one.post_data_json["model"]))
    page.get_by_label("Store activations").check()
    ask(page)
    chooser.select_option("another")
    page.get_by_label("Colour by").select_option("probability")
    page.get_by_label("Point", exact=True).evaluate("one => { one.value = 'embed.output'; }")
    page.get_by_label("Colour by").select_option("norm")
    page.get_by_role("button", name="Lens grid").press("Enter")
    expect(page.get_by_role("main", name="Lens")).to_be_focused()
    expect(chooser).to_have_value(MODEL)
    expect(page.get_by_role("gridcell").last).to_have_attribute("aria-label", re.compile("%$"))
    chooser.select_option("another")
    page.get_by_role("gridcell").last.click()
    expect(page.get_by_role("complementary").get_by_role("listitem")).to_have_count(20)
    other = opened(link(page))
    expect(other.locator("#model")).to_have_value(MODEL)
    page.get_by_role("button", name="Read the layers").click()
    expect(page.locator("main .error")).to_contain_text(f"those of the model {MODEL}")
    assert set(asked) == {MODEL}


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
    expect(page.locator(".patched [role=status]")).to_contain_text("answer")


def test_a_link_holds_a_cell_and_a_patch_with_a_pinned_token(opened):
    page = opened("#lens")
    page.get_by_label("Text").fill(PROMPT)
    page.get_by_role("button", name="Read the layers").click()
    expect(page.get_by_role("gridcell").last).to_have_attribute("aria-label", re.compile("%$"))
    page.locator("[aria-rowindex='3']").get_by_role("gridcell").nth(2).click()
    page.get_by_role("gridcell").last.drag_to(page.get_by_role("gridcell").nth(1))
    said = page.locator(".patched [role=status]")
    expect(said).to_contain_text("answer")
    options(page, "Patched: tokens").first.click()
    other = opened(link(page))
    expect(other.get_by_text("Press “Read the layers”")).to_be_visible()
    other.get_by_role("button", name="Read the layers").click()
    expect(other.locator(".patched [role=status]")).to_have_text(said.text_content())
    assert other.locator(".patched h2").text_content() == page.locator(".patched h2").text_content()
    expect(options(other, "Patched: tokens").first).to_have_attribute("aria-selected", "true")
    assert other.locator("lens-grid .chosen").get_attribute("id").endswith("-2-2")

    page.get_by_role("grid").press("Enter")  # on the cell that was chosen
    page.get_by_role("button", name="Patch it there").click()
    expect(page.locator(".patched h2")).to_contain_text("Layer 2 at")
    expect(said).to_contain_text("answer")
    expect(options(page, "Patched: tokens").first).to_have_attribute("aria-selected", "false")
    expect(page.get_by_role("button", name="Patch it there")).to_be_visible()


@pytest.mark.parametrize("view", ["chat", "steer", "attention"])
def test_a_link_holds_which_token_is_pinned(opened, view):
    label, press, name = {
        "chat": ("Message", "Send", "Tokens of the answer"),
        "steer": ("Prompt", "Answer with and without", "Steered: tokens"),
        "attention": ("Text", "Show the heads", "Tokens; the one you look at"),
    }[view]
    page = opened(f"#{view}")
    page.get_by_label(label, exact=True).fill(QUESTION)
    page.get_by_role("button", name=press).click()
    options(page, name).nth(2).click()
    shown = page.locator("aside, .from[role=status]").last
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    other = opened(link(page))
    other.get_by_role("button", name="Answer again" if view == "chat" else press).click()
    expect(options(other, name).nth(2)).to_have_attribute("aria-selected", "true")
    expect(other.locator("aside, .from[role=status]").last).to_have_text(shown.text_content())
    other.get_by_label(label, exact=True).fill(PROMPT)
    other.get_by_role("button", name=press).click()
    expect(options(other, name).nth(2)).to_have_attribute("aria-selected", "false")
    expect(other.get_by_role("button", name="Stop")).to_be_hidden()
    expect(options(other, name).nth(2)).to_have_attribute("aria-selected", "false")


def test_going_back_finds_an_answer_that_came_meanwhile(opened):
    page = opened()
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.keyboard.press("Enter")
    expect(options(page).first).to_be_visible()
    page.get_by_role("link", name="Attention").click()
    page.go_back()
    expect(page.get_by_role("button", name="Answer again")).to_be_visible()
    expect(options(page).nth(1)).to_be_visible()


def test_ids_of_a_text_that_was_typed_over_are_in_no_link(opened):
    page = opened("#lens")
    page.get_by_label("Text").fill(PROMPT)
    page.get_by_role("button", name="Read the layers").click()
    expect(page.get_by_role("gridcell").last).to_have_attribute("aria-label", re.compile("%$"))
    page.get_by_label("Text").fill("Ann reads.")
    page.get_by_role("gridcell").first.click()
    expect(page.get_by_role("button", name="Patch it there")).to_be_visible()
    other = opened(link(page))
    other.get_by_role("button", name="Read the layers").click()
    expect(other.get_by_role("rowheader").first).to_be_visible()
    assert not any("Tom" in text for text in other.get_by_role("rowheader").all_text_contents())
    assert other.locator(".chosen").count() == 0


def test_a_model_without_attention_patterns_says_what_to_start_it_with(opened):
    page = opened("#attention")
    refused = {"message": "it gives none", "code": "no_attention_patterns", "param": "capture.points"}
    page.route("**/v1/completions", lambda route: route.fulfill(status=400, json={"error": refused}))
    page.get_by_role("button", name="Show the heads").click()
    expect(page.locator("main .error")).to_contain_text("Start the server with attention=eager")


def test_a_long_answer_is_laid_out_in_blocks_and_painted_once(opened):
    page = opened()
    blocks, painted, first = page.evaluate(
        r"""async () => {
          const strip = document.createElement("token-strip");
          document.querySelector("main").replaceChildren(strip);
          strip.colour(() => ({ ground: "red", ink: "white" }));
          const frame = () => new Promise(requestAnimationFrame);
          const word = (i) => ({ text: i % 90 ? " word" : ".\n" });
          strip.add(Array.from({ length: 1000 }, (_, i) => word(i + 1)));
          strip.add(Array.from({ length: 1000 }, () => ({ text: "x" })));
          await frame(), await frame();
          let painted = 0;
          const look = new MutationObserver((seen) => (painted += seen.length));
          look.observe(strip, { subtree: true, childList: true, attributes: true });
          strip.add([{ text: "y" }]);
          await frame(), await frame();
          const blocks = [...strip.children].map((one) => one.childElementCount);
          return [blocks, painted, strip.children[0].lastChild.textContent];
        }"""
    )
    assert (sum(blocks), blocks[:2], first) == (2001, [90, 90], ".⏎")
    assert max(blocks) <= 400
    assert painted == 1  # a new element: the others stay as they are


def test_both_answers_of_steering_begin_from_one_seed(opened):
    page = opened("#steer")
    page.get_by_label("Prompt").fill(PROMPT)
    page.get_by_text("Answer and sampling").click()
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Most new tokens").fill("12")
    page.get_by_label("Strength").fill("0")
    page.get_by_role("button", name="Answer with and without").click()
    default, steered = (options(page, f"{name}: tokens of the answer") for name in ("Default", "Steered"))
    expect(page.get_by_text("tick “as a chat message”")).to_be_visible()
    painted(page)
    assert default.all_text_contents() == steered.all_text_contents()
    page.get_by_label("Strength").fill("2")
    page.get_by_role("button", name="Answer with and without").click()
    expect(page.get_by_text(re.compile("length [1-9].* at layers.3.output.*The answers differ"))).to_be_visible()
    painted(page)
    assert default.all_text_contents() != steered.all_text_contents()
    shown = link(page)
    page.get_by_label("Strength").fill("1")
    link(page)
    page.evaluate("shown => (location.hash = shown)", shown)
    expect(page.get_by_label("Strength")).to_have_value("2")
    assert steered.count() == 0  # a link holds no answer


def test_attention_is_that_of_the_model(opened, served):
    page = opened("#attention")
    page.get_by_label("Text").fill(PROMPT)
    page.get_by_label("Layer").select_option("2")
    page.get_by_role("button", name="Show the heads").click()
    page.get_by_role("button", name="head 1").click()
    capture = {"points": ["layers.2.attention.weights"], "mode": "trace", "return": "inline"}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 0, "capture": capture}
    answer = httpx.post(f"{served.base_url}/completions", json=body, timeout=60).json()
    run = answer["activations_meta"]["runs"][0]
    names = [one if one.strip() else "␣" for one in options(page, "Tokens; the one you look at").all_text_contents()]
    assert page.locator(".down span").all_text_contents() == names
    assert page.locator(".across span").all_text_contents() == names
    shares = run["points"]["layers.2.attention.weights"]["data"][-1][1]
    expect(page.locator(".from[role=status]")).to_contain_text(
        f"({shares.index(max(shares))}) {max(shares) * 100:.0f}%"
    )


def test_a_stored_run_opens_from_what_is_stored_and_downloads(opened, tmp_path):
    page = opened()
    page.get_by_label("Store activations").check()
    page.get_by_label("Points").fill("layers.1.output, layers.1.attention.weights")
    page.get_by_label("Session").fill("page-tests")
    ask(page)
    ask(page, "And of 5 boxes?")
    page.get_by_label("Points").fill("layers.2.output")  # of the next answers
    page.get_by_label("Point", exact=True).evaluate("one => { one.value = 'layers.1.output'; }")
    with page.expect_request("**/files/*"):  # what is stored is not asked of the model again
        page.get_by_label("Colour by").select_option("norm")
    page.get_by_label("Point", exact=True).fill("layers.*.mlp.output")
    page.get_by_label("Point", exact=True).press("Enter")
    expect(page.locator("main .error")).to_contain_text("names 6 points")
    page.get_by_role("button", name="Stored run", exact=True).last.click()
    strip = options(page, "Tokens of the run")
    expect(strip.last).to_be_visible()
    strip_length = strip.count()
    page.get_by_label("Colour by").last.select_option("norm")
    expect(page.locator("main .legend")).to_contain_text("norm")
    run = page.get_by_role("heading", level=2, name="run-").text_content()
    with page.expect_download() as begun:
        page.get_by_role("button", name="Download").last.click()
    assert begun.value.suggested_filename.endswith(".arrow")
    begun.value.save_as(tmp_path / "fetched.arrow")
    assert len(vitrine.load(tmp_path / "fetched.arrow", run_id=run)["layers.1.output"]) == strip_length
    page.route("**/files/*", lambda route: None)
    page.get_by_role("button", name="Download").last.click()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Download", exact=True).last).to_be_enabled()
    page.unroute("**/files/*")
    page.get_by_label("Point", exact=True).select_option("layers.2.output")
    expect(page.get_by_text("Computed now, with interventions left out")).to_be_visible()
    assert '["layers.*.input", "layers.*.resid_mid", "layers.*.output"]' in code(page, "To record the residual stream")
    page.get_by_label("Point", exact=True).select_option("layers.1.output")
    expect(page.get_by_text("Computed now, with interventions left out")).to_be_hidden()
    colour = page.get_by_label("Colour by").last
    colour.select_option("probability")
    expect(page.locator("main .error")).to_contain_text("Probabilities are not stored")
    expect(page.locator("main .legend")).to_contain_text("norm")  # of the colours that are still there
    page.get_by_role("button", name="Score the tokens now").click()
    expect(page.get_by_text("Scored now")).to_be_visible()
    expect(strip.last).to_have_attribute("style", re.compile("background"))
    colour.select_option("norm")
    strip.nth(2).click()
    other = opened(link(page))
    expect(options(other, "Tokens of the run").last).to_have_attribute("style", re.compile("background"))
    expect(options(other, "Tokens of the run").nth(2)).to_have_attribute("aria-selected", "true")
    expect(other.get_by_role("complementary").locator("dt", has_text="norm")).to_be_visible()
    page.get_by_role("button", name="Attention, as stored").click()
    expect(page.get_by_role("heading", name="Layer 1, head 0")).to_be_visible()
    asked = [sys.executable, "-c", code(page, "The stored pattern")]
    assert run in subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout


def test_two_runs_are_compared_token_by_token_in_light_and_dark(opened, served, accessible, eventually):
    session = "page-compared"
    capture = {"points": ["layers.1.output"], "mode": "trace"}
    for prompt in (PROMPT, f"{PROMPT} of 4 pens"):
        body = {"model": MODEL, "prompt": prompt, "capture": capture, "session_id": session}
        assert httpx.post(f"{served.base_url}/completions", json=body, timeout=60).status_code == 200
    listed = f"{served.base_url}/activations/runs?session={session}"
    eventually(lambda: httpx.get(listed, timeout=60).json()["data"], lambda runs: len(runs) == 2)
    page = opened("#runs", color_scheme="light", bypass_csp=True)
    page.get_by_role("button", name=session, exact=True).click()
    boxes = page.get_by_role("checkbox", name="Compare")
    expect(boxes).to_have_count(2)
    for box in boxes.all():
        box.check()
    page.get_by_role("button", name="Compare the two").click()
    tokens = page.get_by_role("list", name="Tokens of both runs").get_by_role("listitem")
    expect(tokens.first).to_contain_text("token 0: the same")
    expect(tokens.last).to_contain_text("differs")
    page.get_by_label("How far apart at").select_option("layers.1.output")
    expect(page.locator("main .legend")).to_contain_text("cosine")
    expect(tokens.first).to_contain_text("1 – cosine 0.000")
    light = tokens.first.evaluate("one => getComputedStyle(one).backgroundColor")
    page.emulate_media(color_scheme="dark")
    expect(tokens.first).not_to_have_css("background-color", light)
    accessible(page, "compare")


def test_an_answer_keeps_its_colours_while_others_come(opened):
    page = opened()
    ask(page)
    expect(options(page).first).to_have_attribute("style", re.compile("background"))
    page.evaluate(
        """() => {
          window.painted = 0;
          const look = new MutationObserver((seen) => (window.painted += seen.length));
          look.observe(document.querySelector("token-strip"), { subtree: true, attributeFilter: ["style"] });
        }"""
    )
    code(page, "Chat", "as curl")
    ask(page, "And of 5 boxes?")
    expect(options(page).first).to_have_attribute("style", re.compile("background"))
    assert page.evaluate("window.painted") == 0
    expect(page.locator("request-code pre")).to_have_text(re.compile("^curl .*And of 5 boxes", re.DOTALL))


def test_runs_are_found_by_their_tags(opened, served):
    tags = {"condition": "<b>control</b>"}
    capture = {"points": ["norm.output"], "mode": "trace", "tags": tags}
    body = {"model": MODEL, "prompt": PROMPT, "capture": capture, "session_id": "page-tags"}
    assert httpx.post(f"{served.base_url}/completions", json=body, timeout=60).status_code == 200
    page = opened("#runs")
    expect(page.get_by_role("row").nth(1)).to_contain_text("page-tags")  # the last used one
    page.get_by_text("Filters").click()
    page.get_by_role("textbox", name="Tag").fill("condition=<b>control</b>")
    page.get_by_role("button", name="Find").click()
    expect(page.get_by_role("row")).to_have_count(2)
    page.get_by_role("textbox", name="Model").fill(MODEL)
    page.get_by_role("button", name="page-tags", exact=True).press("Enter")
    expect(page.get_by_role("heading", name="page-tags")).to_be_focused()
    expect(page.get_by_role("cell", name="condition=<b>control</b>").first).to_be_visible()
    expect(page.get_by_role("row").nth(1)).to_contain_text(PROMPT)
    other = opened(link(page))
    expect(other.locator("form.filters input").first).to_have_value(MODEL)
    page.get_by_role("textbox", name="Tag").fill("condition=other")
    page.get_by_role("button", name="Find").click()
    expect(page.get_by_text("No run fits")).to_be_visible()
    page = opened("#runs")
    session = page.get_by_role("button", name="page-tags", exact=True)
    for sure in (False, True):
        expect(session).to_be_visible()
        page.once("dialog", lambda dialog, sure=sure: dialog.accept() if sure else dialog.dismiss())
        page.get_by_role("button", name="Delete page-tags").click()
    expect(session).to_have_count(0)
    assert httpx.get(f"{served.base_url}/activations/session/page-tags", timeout=60).status_code == 404


def test_a_view_whose_module_is_late_opens_in_the_state_of_its_link(opened):
    page = opened()
    page.clock.install()
    held: list[Route] = []
    page.route("**/lens.js", lambda route: held.append(route))
    page.get_by_label("Message", exact=True).fill("Ann")  # a moment later this is in the chat's address
    with page.expect_request("**/lens.js"):
        follow(page, "lens", {"text": PROMPT})
    page.clock.run_for(1000)
    held[0].continue_()
    expect(page.get_by_label("Text")).to_have_value(PROMPT)


@pytest.mark.parametrize("view", ["chat", "lens", "steer", "attention", "runs"])
def test_a_link_opens_a_view_as_it_was_and_asks_the_model_nothing(opened, served, view):
    page = opened(f"#{view}")
    label = {"chat": "Message", "lens": "Text", "steer": "Prompt", "attention": "Text", "runs": "Tag"}[view]
    if view == "runs":
        page.get_by_text("Filters").click()
    expect(page.locator("#model option")).to_have_count(1)
    page.get_by_label(label, exact=True).fill("é 北京 “pens”")
    fragment = link(page)
    other = opened()
    asked: list[str] = []
    other.on("request", lambda request: asked.append(f"{request.method} {request.url}"))
    other.goto(f"{served.root}/{fragment}")
    expect(other.get_by_label(label, exact=True)).to_have_value("é 北京 “pens”")
    assert not [one for one in asked if one.startswith("POST")]


def test_no_view_breaks_a_rule_of_accessibility(opened, accessible, served):
    body = {"model": MODEL, "prompt": PROMPT, "capture": {"points": ["layers.1.output"]}, "session_id": "page-axe"}
    assert httpx.post(f"{served.base_url}/completions", json=body, timeout=60).status_code == 200
    page = opened(color_scheme="light", viewport={"width": 1280, "height": 900}, bypass_csp=True)
    ask(page)
    options(page).nth(1).click()
    accessible(page, "chat")
    strongest = page.locator("main .legend").first.locator(".swatch").last  # of 100% in both views
    in_chat = strongest.evaluate("one => one.style.backgroundColor")
    page.get_by_role("button", name="Lens grid").click()
    cell = page.get_by_role("gridcell").last
    expect(cell).to_have_attribute("aria-label", re.compile("%$"))
    cell.click()
    page.get_by_role("button", name="Patch it there").click()
    expect(page.locator(".patched [role=status]")).to_contain_text("answer")
    accessible(page, "lens")
    assert strongest.evaluate("one => one.style.backgroundColor") == in_chat
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("button", name="Attention").click()
    expect(page.get_by_role("button", name="head 0")).to_be_visible()
    accessible(page, "attention")
    page.get_by_role("link", name="Steer").click()
    page.get_by_role("button", name="Answer with and without").click()
    expect(page.get_by_text("where rows are")).to_be_visible()
    accessible(page, "steer")
    page.get_by_role("link", name="Stored runs").click()
    expect(page.get_by_role("table", name="Sessions")).to_be_visible()
    accessible(page, "sessions")
    page.get_by_role("button", name="page-axe", exact=True).click()
    page.get_by_role("button", name=re.compile("^run-")).click()
    expect(options(page, "Tokens of the run").last).to_be_visible()
    page.get_by_label("Colour by").last.select_option("probability")
    expect(page.locator("main .error")).to_be_visible()
    accessible(page, "a run")
    page.get_by_role("link", name="Readouts").click()
    page.get_by_role("region", name="Readouts", exact=True).get_by_text("The requests as Python and curl").click()
    accessible(page, "readouts")
    page.get_by_role("button", name="API key").click()
    page.set_viewport_size({"width": 390, "height": 800})
    accessible(page, "narrow")
    for name in ("Chat", "Lens", "Steer", "Attention", "Stored runs", "Readouts"):
        page.get_by_role("link", name=name).click()
        expect(page.get_by_role("region", name=name, exact=True)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
